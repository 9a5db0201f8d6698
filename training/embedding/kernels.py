# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
"""The compiled inside of an embedding table: find, insert, evict, gather.

Index: uint64 [num_buckets * 8], one 64-byte line per bucket: 7 keys and a meta word. A sign may stand in either of two buckets, both
within one block of at most 512 buckets (signs in hash order thus walk through index and rows monotonically). Meta word:
bits 0..27 hold the ways from newest to oldest, 4 bits each, xor ``_FIRST_ORDER`` (so zeroed memory is an empty table); bits 28..34 say
which ways hold a sign. Ways fill from 0 and are never emptied. Slot = bucket * 7 + way.

Every call goes through its batch twice: probe (signs to slots), then rows (gather or update). Both ask for memory some signs ahead:
32 for the two buckets and 48 for rows measured best (Zen 5, 2026-12); without, large tables are 3-4x slower (prototype). Branches on
which bucket holds a sign would be mispredicted half the time (3x slower), and an ``if`` around a prefetch cost 2x: both are arithmetic.
Slots between the two passes: >= 0 a row; with the bit ``NEW`` a row given in this call; ``ABSENT``.
Index and rows are each written in the order of the batch, so a row evicted within its own batch is read before its successor is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from training.embedding.hashing import GOLDEN, mix, sign_hash
from training.embedding.jit import inlined, kernel
from training.embedding.simd import (
    load8,
    load_part,
    match8,
    multiply_high,
    prefetch,
    store8,
    store_part,
    trailing_zeros,
)

WAYS = 7
LINE = 8
AHEAD = 32
ROWS_AHEAD = 48
ABSENT = -1
NEW = 1 << 62
ROW = NEW - 1
FILTER_LINE = 64
INIT_ZEROS, INIT_UNIFORM, INIT_NORMAL = 0, 1, 2

_FIRST_ORDER = np.uint64(0x6543210)
_ORDER_MASK = np.uint64(0xFFFFFFF)
_ONES = np.uint64(0x1111111)
_EIGHTS = np.uint64(0x8888888)
_VALID_SHIFT = np.uint64(28)
_VALID_MASK = np.uint64(0x7F)
_NIBBLE = np.uint64(0xF)
_OLDEST_SHIFT = np.uint64(24)
_U0, _U1, _U3, _U4, _U7, _U8, _U32, _U40 = (np.uint64(n) for n in (0, 1, 3, 4, 7, 8, 32, 40))
_ULINE, _UWAYS = np.uint64(LINE), np.uint64(WAYS)
_VICTIM_BIT = np.uint64(24)
_FILTER_SHIFT = np.uint64(25)
_SIX_BITS = np.uint64(63)
_LOW_24, _LOW_32 = np.uint64(2**24 - 1), np.uint64(2**32 - 1)
_TWO_PI = 2.0 * np.pi


@inlined
def _announce(where: Any, signs: Any, slots: Any, i: Any) -> None:
    """Ask for both buckets of sign i and leave them in slots[i], as first * 1024 + 512 + (second - first), until it is probed."""
    index, multiplier, num_blocks, block = where
    hashed = sign_hash(signs[i])
    spread = hashed * multiplier
    offset = multiply_high(spread * num_blocks, block)
    first = multiply_high(spread, num_blocks) * block + offset
    other = multiply_high(hashed << _U40, block - _U1)
    other += np.uint64(other >= offset)
    delta = np.int64(other - offset)
    prefetch(index, np.int64(first) * LINE)
    prefetch(index, (np.int64(first) + delta) * LINE)
    slots[i] = (np.int64(first) << 10) + 512 + delta


@inlined
def _announced(slots: Any, i: Any) -> Any:
    """Both buckets of sign i, uint64."""
    packed = slots[i]
    first = packed >> 10
    return np.uint64(first), np.uint64(first + (packed & 1023) - 512)


@inlined
def _located(match: Any, one: Any, two: Any) -> Any:
    """Bucket and way of a match. Which of the two buckets it is cannot be predicted, so there is no branch on it."""
    position = np.uint64(trailing_zeros(match))
    return one + (two - one) * (position >> _U3), position & _U7


@inlined
def _touched(meta: Any, way: Any) -> Any:
    """The meta word with ``way`` as the newest."""
    order = (meta & _ORDER_MASK) ^ _FIRST_ORDER
    differs = order ^ (way * _ONES)
    zero_nibble = (differs - _ONES) & ~differs & _EIGHTS
    shift = np.uint64(trailing_zeros(zero_nibble)) - np.uint64(3)
    below = (_U1 << shift) - _U1
    order = (order & ~((below << _U4) | _NIBBLE)) | ((order & below) << _U4) | way
    return (meta & ~_ORDER_MASK) | (order ^ _FIRST_ORDER)


@inlined
def _match(index: Any, sign: Any, one: Any, two: Any) -> Any:
    """Bits 0..6: ways of bucket one that hold the sign; bits 8..14: of bucket two. At most one bit is set."""
    valid_one = (index[one * _ULINE + _UWAYS] >> _VALID_SHIFT) & _VALID_MASK
    valid_two = (index[two * _ULINE + _UWAYS] >> _VALID_SHIFT) & _VALID_MASK
    return (match8(index, one * _ULINE, sign) & valid_one) | ((match8(index, two * _ULINE, sign) & valid_two) << _U8)


@inlined
def find(where: Any, signs: Any, slots: Any) -> Any:
    """Slots of signs, ``ABSENT`` where there is none. Changes nothing. Returns how many were found."""
    index = where[0]
    n = len(signs)
    for i in range(min(AHEAD, n)):
        _announce(where, signs, slots, i)
    found = 0
    for i in range(n):
        _announce(where, signs, slots, np.uint64(min(i + AHEAD, n - 1)))
        k = np.uint64(i)  # Unsigned indices spare numba's test for negative ones.
        one, two = _announced(slots, k)
        match = _match(index, signs[k], one, two)
        if match == _U0:
            slots[k] = ABSENT
        else:
            bucket, way = _located(match, one, two)
            slots[k] = np.int64(bucket * _UWAYS + way)
            found += 1
    return found


@inlined
def prefetch_row(rows: Any, slots: Any, i: Any, stride: Any, floats: Any) -> None:
    """Ask for the first ``floats`` values of the row of slots[i], all of them if it is new.

    For the last slot if i is beyond it, for any row if that is absent.
    """
    slot = max(slots[np.uint64(min(i, len(slots) - 1))], 0)
    base = (slot & ROW) * stride
    if slot >= NEW:
        floats = stride
    prefetch(rows, base)
    for j in range(16, floats, 16):
        prefetch(rows, base + j)
    if stride % 16 != 0:  # The row may end in a line of its own: 1.6x at dim 12.
        prefetch(rows, base + floats - 1)


@inlined
def _admit(counters: Any, hashed: Any, spread: Any, min_count: Any) -> Any:
    """Count one look-up of a sign without a row; true when it was its ``min_count``-th. Conservative count-min, two cells of one line."""
    line = np.int64(multiply_high(spread, np.uint64(len(counters) // FILTER_LINE))) * FILTER_LINE
    bits = hashed >> _FILTER_SHIFT
    one = np.int64(bits & _SIX_BITS)
    two = (one + 1 + np.int64(((bits >> np.uint64(6)) & _SIX_BITS) % np.uint64(FILTER_LINE - 1))) % FILTER_LINE
    count = min(counters[line + one], counters[line + two])
    if count < 255:
        count += 1
        counters[line + one] = max(counters[line + one], np.uint8(count))
        counters[line + two] = max(counters[line + two], np.uint8(count))
    return count >= min_count


@inlined
def _place(index: Any, sign: Any, hashed: Any, one: Any, two: Any) -> Any:
    """Give a sign the free way of the emptier bucket, else the oldest way of one of its buckets. Returns (slot, evicted)."""
    valid_one = (index[one * _ULINE + _UWAYS] >> _VALID_SHIFT) & _VALID_MASK
    valid_two = (index[two * _ULINE + _UWAYS] >> _VALID_SHIFT) & _VALID_MASK
    if (valid_one & valid_two) == _VALID_MASK:
        bucket = one if (hashed >> _VICTIM_BIT) & _U1 == _U0 else two
        meta = index[bucket * _ULINE + _UWAYS]
        way = (((meta & _ORDER_MASK) ^ _FIRST_ORDER) >> _OLDEST_SHIFT) & _NIBBLE
        evicted = 1
    else:
        bucket = one if valid_one <= valid_two else two
        meta = index[bucket * _ULINE + _UWAYS]
        way = np.uint64(trailing_zeros(~(meta >> _VALID_SHIFT)))
        meta |= _U1 << (_VALID_SHIFT + way)
        evicted = 0
    index[bucket * _ULINE + way] = sign
    index[bucket * _ULINE + _UWAYS] = _touched(meta, way)
    return np.int64(bucket * _UWAYS + way), evicted


@inlined
def _find_or_insert(where: Any, counters: Any, min_count: Any, signs: Any, slots: Any) -> Any:
    """As ``find``, but new signs get a row once they were seen ``min_count`` times, and recency is refreshed.

    Returns (hits, inserted, refused, evicted).
    """
    index, multiplier, _, _ = where
    n = len(signs)
    for i in range(min(AHEAD, n)):
        _announce(where, signs, slots, i)
    hits, inserted, refused, evictions = 0, 0, 0, 0
    for i in range(n):
        _announce(where, signs, slots, np.uint64(min(i + AHEAD, n - 1)))
        k = np.uint64(i)
        sign = signs[k]
        one, two = _announced(slots, k)
        match = _match(index, sign, one, two)
        if match != _U0:
            bucket, way = _located(match, one, two)
            index[bucket * _ULINE + _UWAYS] = _touched(index[bucket * _ULINE + _UWAYS], way)
            slots[k] = np.int64(bucket * _UWAYS + way)
            hits += 1
            continue
        hashed = sign_hash(sign)
        if len(counters) > 0 and not _admit(counters, hashed, hashed * multiplier, min_count):
            slots[k] = ABSENT
            refused += 1
        else:
            slot, evicted = _place(index, sign, hashed, one, two)
            slots[k] = slot | NEW
            inserted += 1
            evictions += evicted
    return hits, inserted, refused, evictions


@inlined
def _initialise(rows: Any, base: Any, stride: Any, dim: Any, sign: Any, seed: Any, kind: Any, scale: Any, state: Any) -> None:
    """First values of a new row, two from each hash of (sign, position, seed): nothing else decides them. Then its state."""
    origin = mix(sign ^ seed)
    for pair in range((dim + 1) // 2):
        bits = mix(origin + (np.uint64(pair) + _U1) * GOLDEN)
        one, two = 0.0, 0.0
        if kind == INIT_UNIFORM:
            one = (np.float64(bits >> _U40) / 8388608.0 - 1.0) * scale
            two = (np.float64((bits >> _U8) & _LOW_24) / 8388608.0 - 1.0) * scale
        elif kind == INIT_NORMAL:  # Box and Muller 1958
            radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _U32) + 0.5) / 4294967296.0)) * scale
            angle = _TWO_PI * np.float64(bits & _LOW_32) / 4294967296.0
            one, two = radius * np.cos(angle), radius * np.sin(angle)
        rows[base + 2 * pair] = np.float32(one)
        if 2 * pair + 1 < dim:
            rows[base + 2 * pair + 1] = np.float32(two)
    for j in range(dim, stride):
        rows[base + j] = state


@inlined
def _copy_out(rows: Any, base: Any, dim: Any, out: Any, to: Any) -> None:
    whole = dim - dim % 8
    for j in range(0, whole, 8):
        store8(out, to + j, load8(rows, base + j))
    if whole < dim:
        store_part(out, to + whole, load_part(rows, base + whole, dim - whole), dim - whole)


@inlined
def _zero(out: Any, to: Any, dim: Any) -> None:
    for j in range(dim):
        out[to + j] = np.float32(0.0)


@kernel
def read(where, rows, stride, dim, signs, slots, out):
    """Values of signs to ``out`` [U * dim], zeros for absent ones. Changes no row. Returns how many were found."""
    found = find(where, signs, slots)
    n = len(signs)
    for i in range(min(ROWS_AHEAD, n)):
        prefetch_row(rows, slots, i, stride, dim)
    for i in range(n):
        prefetch_row(rows, slots, i + ROWS_AHEAD, stride, dim)
        slot = slots[np.uint64(i)]
        if slot >= 0:
            _copy_out(rows, slot * stride, dim, out, i * dim)
        else:
            _zero(out, i * dim, dim)
    return found


@kernel
def read_or_insert(where, counters, min_count, rows, scalars, stride, dim, signs, slots, out, seed, kind, scale, state):
    """As ``read``; gives admitted new signs a row with its first values and state, evicting if need be, and refreshes recency.

    ``counters`` is the admission filter, empty if every sign is admitted at once. ``state`` is the start value of row state and of the
    scalar per row; ``scalars`` is empty where the optimizer has none. Returns (hits, inserted, refused, evicted).
    """
    counts = _find_or_insert(where, counters, min_count, signs, slots)
    n = len(signs)
    for i in range(min(ROWS_AHEAD, n)):
        prefetch_row(rows, slots, i, stride, dim)
    for i in range(n):
        prefetch_row(rows, slots, i + ROWS_AHEAD, stride, dim)
        slot = slots[np.uint64(i)]
        if slot == ABSENT:
            _zero(out, i * dim, dim)
            continue
        if slot >= NEW:
            slot &= ROW
            _initialise(rows, slot * stride, stride, dim, signs[i], seed, kind, scale, state)
            if len(scalars) > 0:
                scalars[slot] = state
        _copy_out(rows, slot * stride, dim, out, i * dim)
    return counts


@kernel
def occupied(index, first_bucket, last_bucket, signs, slots, recency):
    """List the rows of a range of buckets in slot order: their signs, slots and rank in the bucket (0 newest). Returns how many."""
    n = 0
    for bucket in range(first_bucket, last_bucket):
        meta = index[bucket * LINE + WAYS]
        valid = (meta >> _VALID_SHIFT) & _VALID_MASK
        order = (meta & _ORDER_MASK) ^ _FIRST_ORDER
        for way in range(WAYS):
            if (valid >> np.uint64(way)) & _U1 != _U0:
                signs[n] = index[bucket * LINE + way]
                slots[n] = bucket * WAYS + way
                for rank in range(WAYS):
                    if (order >> np.uint64(4 * rank)) & _NIBBLE == np.uint64(way):
                        recency[n] = rank
                n += 1
    return n


@kernel
def place_exactly(index, signs, slots, recency):
    """The inverse of ``occupied`` on an empty index: put signs at their slots with their rank."""
    for i in range(len(signs)):
        bucket, way = slots[i] // WAYS, slots[i] % WAYS
        meta = index[bucket * LINE + WAYS]
        order = (meta & _ORDER_MASK) ^ _FIRST_ORDER
        wanted = np.uint64(4 * np.int64(recency[i]))
        present = wanted
        for rank in range(WAYS):
            if (order >> np.uint64(4 * rank)) & _NIBBLE == np.uint64(way):
                present = np.uint64(4 * rank)
        displaced = (order >> wanted) & _NIBBLE
        order &= ~((_NIBBLE << wanted) | (_NIBBLE << present))
        order |= (displaced << present) | (np.uint64(way) << wanted)
        index[bucket * LINE + way] = signs[i]
        index[bucket * LINE + WAYS] = (meta & ~_ORDER_MASK) | (order ^ _FIRST_ORDER) | (_U1 << (_VALID_SHIFT + np.uint64(way)))


@kernel
def copy_rows(source, rows, stride, slots):
    """Row i of ``source`` [n * stride] to slots[i], in order; codes of new rows are understood."""
    for i in range(len(slots)):
        slot = slots[i] & ROW
        for j in range(stride):
            rows[slot * stride + j] = source[i * stride + j]
