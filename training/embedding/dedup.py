"""Unique signs of a batch in hash order, which server holds each, and the sum of gradients per unique sign.

Hash order makes each server's share contiguous and lets it walk through its tables from one end to the other.
N occurrences, U unique signs, D width of a row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.hashing import GOLDEN, mix_reference, sign_hash
from training.embedding.jit import inlined, kernel
from training.embedding.simd import load8, load_part, multiply_high, prefetch, store8, store_part

_AHEAD = 16
_CELLS_PER_SIGN = 3
_U0, _U1, _U32 = np.uint64(0), np.uint64(1), np.uint64(32)
_MAX_OCCURRENCES = 2**30

Signs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]


def dedup(
    signs: Signs, *, unique: Signs | None = None, inverse: npt.NDArray[np.uint32] | None = None
) -> tuple[Signs, npt.NDArray[np.uint32]]:
    """``unique`` uint64 [U] in hash order and ``inverse`` uint32 [N] with ``unique[inverse] == signs``.

    They are written to ``unique`` uint64 [N + 1] and ``inverse`` uint32 [N] where given.
    ``unique`` depends on the set of signs only, not on their order. Raises ``ValueError`` for more than 2^30 signs or another dtype.
    """
    if signs.dtype != np.uint64 or signs.ndim != 1:
        raise ValueError(f"signs must be uint64 [N], got {signs.dtype} {list(signs.shape)}")
    n = len(signs)
    if n > _MAX_OCCURRENCES:
        raise ValueError(f"a batch holds at most {_MAX_OCCURRENCES} ids per table, got {n}; lower training.batch_size")
    scratch = _scratch_for(n)
    inverse = np.empty(n, np.uint32) if inverse is None else inverse
    unique = np.empty(n + 1, np.uint64) if unique is None else unique
    num_unique = _dedup(read_only(signs), scratch.table, np.uint64(_CELLS_PER_SIGN * n), scratch.order, scratch.ranks, unique, inverse)
    return unique[:num_unique], inverse


def server_of(signs: Signs, num_servers: int) -> npt.NDArray[np.int64]:
    """Which of ``num_servers`` (at most 2^31) servers holds each sign: int64, same shape."""
    high = mix_reference(signs + GOLDEN) >> np.uint64(32)
    servers: npt.NDArray[np.int64] = ((high * np.uint64(num_servers)) >> np.uint64(32)).astype(np.int64)
    return servers


def route(unique: Signs, num_servers: int) -> npt.NDArray[np.int64]:
    """int64 [num_servers + 1]: server s holds unique[starts[s] : starts[s + 1]]. ``unique`` in the order of ``dedup``."""
    starts = np.empty(num_servers + 1, np.int64)
    _route(read_only(unique), starts)
    return starts


def sum_gradients(gradients: Rows, inverse: npt.NDArray[np.uint32], num_unique: int) -> Rows:
    """Gradients [N, D] summed per unique sign: float32 [num_unique, D], added in order of occurrence."""
    if gradients.dtype != np.float32 or gradients.ndim != 2 or len(gradients) != len(inverse):
        raise ValueError(f"gradients must be float32 [{len(inverse)}, D], got {gradients.dtype} {list(gradients.shape)}")
    out = np.zeros((num_unique, gradients.shape[1]), np.float32)
    flat = np.ascontiguousarray(gradients).reshape(-1)
    _sum_gradients(read_only(flat), read_only(inverse), gradients.shape[1], out.reshape(-1))
    return out


def read_only(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A read-only, contiguous, aligned view (a copy if need be): one type for the compiler whatever the caller holds."""
    view = np.require(array, requirements=["C", "A"]).view()
    view.flags.writeable = False
    return view


@dataclass(frozen=True)
class _Scratch:
    """Buffers of one thread, used again by its next call."""

    table: Signs
    """All zero between calls. Signs pushed on from the last cells go into a tail long enough for all; the last entry stands for sign 0."""
    order: npt.NDArray[np.uint32]
    ranks: npt.NDArray[np.uint32]


_per_thread = threading.local()


def _scratch_for(count: int) -> _Scratch:
    scratch: _Scratch | None = getattr(_per_thread, "scratch", None)
    cells = (_CELLS_PER_SIGN + 1) * count + 2
    if scratch is None or len(scratch.table) < cells:
        scratch = _Scratch(np.zeros(cells, np.uint64), np.empty(count + 1, np.uint32), np.empty(cells, np.uint32))
        _per_thread.scratch = scratch
    return scratch


@kernel
def _dedup(signs: Any, table: Any, cells: Any, order: Any, ranks: Any, unique: Any, inverse: Any) -> Any:
    """Linear probing from the cell of the hash, then a sweep over the cells. Unpredictable branches are avoided: 3x faster with them gone.

    ``inverse`` holds first the cell of the next few signs, then the cell a sign was found in, at last its rank. Returns U.
    """
    n = len(signs)
    zero_cell = np.uint64(len(table) - 1)
    for i in range(min(_AHEAD, n)):
        _announce(signs, table, cells, inverse, i)
    top = _U0
    zeros = 0
    for i in range(n):
        k = np.uint64(i)
        _announce(signs, table, cells, inverse, np.uint64(min(i + _AHEAD, n - 1)))
        sign = signs[k]
        cell = np.uint64(inverse[k])
        if sign == _U0:
            inverse[k] = zero_cell
            zeros += 1
            continue
        there = table[cell]
        while there != sign and there != _U0:
            cell += _U1
            there = table[cell]
        table[cell] = sign
        top = max(top, cell)
        inverse[k] = cell
    found = _sweep(table, top, order, unique) if n > zeros else _U0
    if zeros > 0:
        order[found] = zero_cell
        unique[found] = _U0
        found += _U1
    _sort(unique, order, np.int64(found))
    for i in range(found):
        ranks[order[np.uint64(i)]] = i
    for i in range(n):
        inverse[np.uint64(i)] = ranks[np.uint64(inverse[np.uint64(i)])]
    return np.int64(found)


@inlined
def _announce(signs: Any, table: Any, cells: Any, inverse: Any, i: Any) -> None:
    cell = multiply_high(sign_hash(signs[i]), cells)
    prefetch(table, np.int64(cell))
    inverse[i] = cell


@inlined
def _sweep(table: Any, top: Any, order: Any, unique: Any) -> Any:
    """Collect and clear the cells in use, 0..top. Every cell is written to the end of the list, which grows past the taken ones only."""
    found = _U0
    for c in range(np.int64(top) + 1):
        cell = np.uint64(c)
        sign = table[cell]
        unique[found] = sign
        order[found] = cell
        found += np.uint64(sign != _U0)
        table[cell] = _U0
    return found


@inlined
def _sort(unique: Any, order: Any, found: Any) -> None:
    """By hash; a sweep is in order but for neighbours that were pushed on, so few move and not far."""
    before = _U0
    for i in range(found):
        sign = unique[np.uint64(i)]
        hashed = sign_hash(sign)
        if hashed >= before:
            before = hashed
            continue
        cell = order[i]
        k = i
        while k > 0 and sign_hash(unique[k - 1]) > hashed:
            unique[k] = unique[k - 1]
            order[k] = order[k - 1]
            k -= 1
        unique[k] = sign
        order[k] = cell


@kernel
def _route(unique: Any, starts: Any) -> None:
    """Binary search for the first sign of each server."""
    num_servers = np.uint64(len(starts) - 1)
    starts[0] = 0
    for server in range(1, len(starts)):
        low, high = starts[server - 1], np.int64(len(unique))
        while low < high:
            middle = (low + high) // 2
            if ((sign_hash(unique[middle]) >> _U32) * num_servers) >> _U32 < np.uint64(server):
                low = middle + 1
            else:
                high = middle
        starts[server] = low
    starts[len(starts) - 1] = len(unique)


@kernel
def _sum_gradients(gradients: Any, inverse: Any, dim: Any, out: Any) -> None:
    whole = dim - dim % 8
    for i in range(len(inverse)):
        if i + _AHEAD < len(inverse):
            prefetch(out, np.int64(inverse[i + _AHEAD]) * dim)
        to = np.int64(inverse[i]) * dim
        for j in range(0, whole, 8):
            store8(out, to + j, load8(out, to + j) + load8(gradients, i * dim + j))
        if whole < dim:
            tail = load_part(out, to + whole, dim - whole) + load_part(gradients, i * dim + whole, dim - whole)
            store_part(out, to + whole, tail, dim - whole)
