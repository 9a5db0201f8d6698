# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
"""The compiled inside of an embedding table: find, insert, evict, gather.

Index: uint64 [num_buckets * 8], one 64-byte line per bucket: 7 keys and a meta word. A sign may stand in either of two buckets, both
within one block of at most 512 buckets (signs in hash order thus walk through index and rows monotonically). Meta word:
bits 0..27 hold the ways from newest to oldest, 4 bits each, xor ``_FIRST_ORDER`` (so zeroed memory is an empty table); bits 28..34 say
which ways hold a sign. Ways fill from 0 and are never emptied. Slot = bucket * 7 + way.

Every call runs in two phases over its batch: probe (signs to slots), then rows (gather or update); each prefetches ``AHEAD`` signs ahead
(16-32 measured best, 2.7-4x over none). Slots on the way: >= 0 known row; ``ABSENT``; below: row -(slot + 2), new in this call.
Both phases go through the batch in order, so a row evicted within its own batch is still read before its successor is written.
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
AHEAD = 16
ABSENT = -1
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
_U0, _U1, _U2, _U4, _U8, _U32, _U40 = (np.uint64(n) for n in (0, 1, 2, 4, 8, 32, 40))
_VICTIM_BIT = np.uint64(24)
_FILTER_SHIFT = np.uint64(25)
_SIX_BITS = np.uint64(63)
_TWO_PI = 2.0 * np.pi


@inlined
def _buckets(hashed: Any, multiplier: Any, num_blocks: Any, block: Any) -> Any:
    """Both buckets of a hash (int64). ``multiplier`` spreads one server's share of the hashes over all 64 bits, in order."""
    spread = hashed * multiplier
    first = multiply_high(spread, num_blocks) * block
    offset = multiply_high(spread * num_blocks, block)
    other = offset + _U1 + multiply_high(hashed << _U40, block - _U1)
    if other >= block:
        other -= block
    return np.int64(first + offset), np.int64(first + other)


@inlined
def _prefetch_buckets(index: Any, sign: Any, multiplier: Any, num_blocks: Any, block: Any) -> None:
    one, two = _buckets(sign_hash(sign), multiplier, num_blocks, block)
    prefetch(index, one * LINE)
    prefetch(index, two * LINE)


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
    valid_one = (index[one * LINE + WAYS] >> _VALID_SHIFT) & _VALID_MASK
    valid_two = (index[two * LINE + WAYS] >> _VALID_SHIFT) & _VALID_MASK
    return (match8(index, one * LINE, sign) & valid_one) | ((match8(index, two * LINE, sign) & valid_two) << _U8)


@kernel
def probe(index, multiplier, num_blocks, block, signs, slots):
    """Slots of signs, ``ABSENT`` where there is none. Changes nothing. Returns how many were found."""
    n = len(signs)
    for i in range(min(AHEAD, n)):
        _prefetch_buckets(index, signs[i], multiplier, num_blocks, block)
    found = 0
    for i in range(n):
        if i + AHEAD < n:
            _prefetch_buckets(index, signs[i + AHEAD], multiplier, num_blocks, block)
        one, two = _buckets(sign_hash(signs[i]), multiplier, num_blocks, block)
        match = _match(index, signs[i], one, two)
        if match == _U0:
            slots[i] = ABSENT
        else:
            position = trailing_zeros(match)
            bucket = one if position < LINE else two
            slots[i] = bucket * WAYS + (position & 7)
            found += 1
    return found


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
    valid_one = (index[one * LINE + WAYS] >> _VALID_SHIFT) & _VALID_MASK
    valid_two = (index[two * LINE + WAYS] >> _VALID_SHIFT) & _VALID_MASK
    if (valid_one & valid_two) == _VALID_MASK:
        bucket = one if (hashed >> _VICTIM_BIT) & _U1 == _U0 else two
        meta = index[bucket * LINE + WAYS]
        way = (((meta & _ORDER_MASK) ^ _FIRST_ORDER) >> _OLDEST_SHIFT) & _NIBBLE
        evicted = 1
    else:
        bucket = one if valid_one <= valid_two else two
        meta = index[bucket * LINE + WAYS]
        way = np.uint64(trailing_zeros(~(meta >> _VALID_SHIFT)))
        meta |= _U1 << (_VALID_SHIFT + way)
        evicted = 0
    index[bucket * LINE + np.int64(way)] = sign
    index[bucket * LINE + WAYS] = _touched(meta, way)
    return bucket * WAYS + np.int64(way), evicted


@kernel
def probe_or_insert(index, multiplier, num_blocks, block, counters, min_count, signs, slots):
    """Slots of signs, giving new ones a row once they were seen ``min_count`` times; refreshes recency.

    ``counters`` is the admission filter, empty if every sign is admitted at once. Returns (hits, inserted, refused, evicted).
    """
    n = len(signs)
    for i in range(min(AHEAD, n)):
        _prefetch_buckets(index, signs[i], multiplier, num_blocks, block)
    hits, inserted, refused, evictions = 0, 0, 0, 0
    for i in range(n):
        if i + AHEAD < n:
            _prefetch_buckets(index, signs[i + AHEAD], multiplier, num_blocks, block)
        sign = signs[i]
        hashed = sign_hash(sign)
        one, two = _buckets(hashed, multiplier, num_blocks, block)
        match = _match(index, sign, one, two)
        if match != _U0:
            position = trailing_zeros(match)
            bucket = one if position < LINE else two
            way = position & 7
            index[bucket * LINE + WAYS] = _touched(index[bucket * LINE + WAYS], np.uint64(way))
            slots[i] = bucket * WAYS + way
            hits += 1
        elif len(counters) > 0 and not _admit(counters, hashed, hashed * multiplier, min_count):
            slots[i] = ABSENT
            refused += 1
        else:
            slot, evicted = _place(index, sign, hashed, one, two)
            slots[i] = -(slot + 2)
            inserted += 1
            evictions += evicted
    return hits, inserted, refused, evictions


@inlined
def _first_value(sign: Any, j: Any, seed: Any, kind: Any, scale: Any) -> Any:
    """Value j of a new row: a function of (sign, j, seed) alone."""
    bits = mix(mix(sign ^ seed) + (np.uint64(j) + _U1) * GOLDEN)
    if kind == INIT_UNIFORM:
        unit = np.float64(bits >> np.uint64(40)) / 8388608.0 - 1.0
        return np.float32(unit * scale)
    radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _U32) + 0.5) / 4294967296.0))
    angle = _TWO_PI * np.float64(bits & np.uint64(0xFFFFFFFF)) / 4294967296.0
    return np.float32(radius * np.cos(angle) * scale)


@inlined
def _initialise(rows: Any, base: Any, stride: Any, dim: Any, sign: Any, seed: Any, kind: Any, scale: Any, state: Any) -> None:
    if kind == INIT_ZEROS:
        for j in range(dim):
            rows[base + j] = np.float32(0.0)
    else:
        for j in range(dim):
            rows[base + j] = _first_value(sign, j, seed, kind, scale)
    for j in range(dim, stride):
        rows[base + j] = state


@inlined
def prefetch_row(rows: Any, slot: Any, stride: Any, floats: Any) -> None:
    """Ask for the first ``floats`` values of a row; nothing for an absent one."""
    if slot < ABSENT:
        slot = -(slot + 2)
    if slot >= 0:
        for j in range(0, floats, 16):
            prefetch(rows, slot * stride + j)


@kernel
def gather(rows, scalars, stride, dim, signs, slots, out, seed, kind, scale, state):
    """Copy the values of slots to ``out`` [U * dim], zeros for absent ones; write the first values and state of new rows on the way.

    ``state`` is the start value of row state and of the scalar per row; ``scalars`` is empty where the optimizer has none.
    """
    n = len(slots)
    for i in range(min(AHEAD, n)):
        prefetch_row(rows, slots[i], stride, dim)
    whole = dim - dim % 8
    for i in range(n):
        if i + AHEAD < n:
            prefetch_row(rows, slots[i + AHEAD], stride, dim)
        slot = slots[i]
        to = i * dim
        if slot == ABSENT:
            for j in range(dim):
                out[to + j] = np.float32(0.0)
            continue
        if slot < ABSENT:
            slot = -(slot + 2)
            _initialise(rows, slot * stride, stride, dim, signs[i], seed, kind, scale, state)
            if len(scalars) > 0:
                scalars[slot] = state
        base = slot * stride
        for j in range(0, whole, 8):
            store8(out, to + j, load8(rows, base + j))
        if whole < dim:
            store_part(out, to + whole, load_part(rows, base + whole, dim - whole), dim - whole)


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
        slot = slots[i] if slots[i] >= 0 else -(slots[i] + 2)
        for j in range(stride):
            rows[slot * stride + j] = source[i * stride + j]
