"""Unique signs of a batch in hash order, which server holds each, and the sum of gradients per unique sign.

Hash order makes each server's share contiguous and lets it walk through its tables from one end to the other.
N occurrences, U unique signs, D width of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.hashing import GOLDEN, mix_reference, sign_hash
from training.embedding.jit import inlined, kernel
from training.embedding.simd import load8, load_part, multiply_high, prefetch, store8, store_part

_EMPTY = np.int32(-1)
_AHEAD = 16
_MAX_OCCURRENCES = 2**30

Signs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]


def dedup(signs: Signs) -> tuple[Signs, npt.NDArray[np.uint32]]:
    """``unique`` uint64 [U] in hash order and ``inverse`` uint32 [N] with ``unique[inverse] == signs``.

    ``unique`` depends on the set of signs only, not on their order. Raises ``ValueError`` for more than 2^30 signs or another dtype.
    """
    if signs.dtype != np.uint64 or signs.ndim != 1:
        raise ValueError(f"signs must be uint64 [N], got {signs.dtype} {list(signs.shape)}")
    n = len(signs)
    if n > _MAX_OCCURRENCES:
        raise ValueError(f"a batch holds at most {_MAX_OCCURRENCES} ids per table, got {n}; lower training.batch_size")
    cells = max(16, 2 * n)
    # Signs pushed on from the last cells go into a tail long enough for all of them: the sweep stays in hash order.
    table = np.full(cells + n + 1, _EMPTY, np.int32)
    firsts = np.empty(n, np.int32)
    inverse = np.empty(n, np.uint32)
    unique = np.empty(n, np.uint64)
    num_unique = _dedup(read_only(signs), table, np.uint64(cells), firsts, unique, inverse)
    return unique[:num_unique], inverse


def server_of(signs: Signs, num_servers: int) -> npt.NDArray[np.int64]:
    """Which of ``num_servers`` (at most 2^31) servers holds each sign: int64, same shape."""
    high = mix_reference(signs + GOLDEN) >> np.uint64(32)
    servers: npt.NDArray[np.int64] = ((high * np.uint64(num_servers)) >> np.uint64(32)).astype(np.int64)
    return servers


def route(unique: Signs, num_servers: int) -> npt.NDArray[np.int64]:
    """int64 [num_servers + 1]: server s holds unique[starts[s] : starts[s + 1]]. ``unique`` in the order of ``dedup``."""
    starts = np.empty(num_servers + 1, np.int64)
    starts[0], starts[num_servers] = 0, len(unique)
    for server in range(1, num_servers):
        low, high = int(starts[server - 1]), len(unique)
        while low < high:
            middle = (low + high) // 2
            if server_of(unique[middle : middle + 1], num_servers)[0] < server:
                low = middle + 1
            else:
                high = middle
        starts[server] = low
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


@inlined
def _cell(sign: Any, cells: Any) -> Any:
    return np.int64(multiply_high(sign_hash(sign), cells))


@kernel
def _dedup(signs: Any, table: Any, cells: Any, firsts: Any, unique: Any, inverse: Any) -> Any:
    """Linear probing from the cell of the hash; ``table`` holds numbers of unique signs in order of appearance, until they are sorted."""
    n = len(signs)
    for i in range(min(_AHEAD, n)):
        prefetch(table, _cell(signs[i], cells))
    found = 0
    for i in range(n):
        if i + _AHEAD < n:
            prefetch(table, _cell(signs[i + _AHEAD], cells))
        cell = _cell(signs[i], cells)
        while table[cell] >= 0 and signs[firsts[table[cell]]] != signs[i]:
            cell += 1
        if table[cell] < 0:
            table[cell] = found
            firsts[found] = i
            found += 1
        inverse[i] = table[cell]
    _sort(signs, table, firsts, found, unique)
    rank = table[:found]
    for i in range(found):
        rank[firsts[i]] = i
    for i in range(n):
        inverse[i] = rank[inverse[i]]
    return found


@inlined
def _sort(signs: Any, table: Any, firsts: Any, found: Any, unique: Any) -> None:
    """Unique signs by hash; firsts[k] becomes the number of the k-th. A sweep is sorted but for neighbours that were pushed on."""
    filled = 0
    cell = 0
    hashes = np.empty(found, np.uint64)
    order = np.empty(found, np.int32)
    while filled < found:
        number = table[cell]
        cell += 1
        if number >= 0:
            hashed = sign_hash(signs[firsts[number]])
            k = filled
            while k > 0 and hashes[k - 1] > hashed:
                hashes[k] = hashes[k - 1]
                order[k] = order[k - 1]
                k -= 1
            hashes[k] = hashed
            order[k] = number
            filled += 1
    for k in range(found):
        unique[k] = signs[firsts[order[k]]]
    for k in range(found):
        firsts[k] = order[k]


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
