# mypy: check-untyped-defs=False, disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
"""The compiled inside of an embedding table: find, insert, evict, gather.

Index: uint64 [num_buckets * 8], one 64-byte line per bucket: 7 keys and a meta word. A sign may stand in either of two buckets, both
within one block of at most 512 buckets (signs in hash order thus walk through index and rows monotonically). Meta word:
bits 0..27 hold the ways from newest to oldest, 4 bits each, xor ``_FIRST_ORDER`` (so zeroed memory is an empty bucket); bits 28..34 say
which ways hold a sign. Ways fill from 0 and are never emptied. Slot = bucket * 7 + way.
Rows: float32 [num_slots * stride], a row being its values, in 32 or 16 bits, and its state; ``values`` is the same memory in the type of
the values (see ``training.embedding.precision``).

Every call goes through its batch in chunks, and through each chunk three times: hash (signs to pairs of buckets, which the compiler
vectorises), probe (to slots, asking for the rows), rows (gather or update). Chunks keep slots and rows asked for in the nearest cache:
1.4x against the whole batch at once. Buckets are asked for 64 signs ahead, 1.25x against 32 at 1e7 rows: without, large tables are 3-4x
slower (prototype). Branches on which bucket holds a sign would be mispredicted half the time (3x slower), and an ``if`` around a prefetch
cost 2x: both are arithmetic.
What the probe leaves in ``slots`` [U], per sign: >= 0 a slot; with the bit ``NEW`` one given in this call; ``ABSENT``.
An update gets what its look-up left there and need not probe (``CHECK``, ``TRUST``): rows never move, they only go.
Index and rows are each written in the order of the batch, so a row evicted within its own batch is read before its successor is written.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from training.embedding.first_values import initialise
from training.embedding.hashing import sign_hash
from training.embedding.jit import inlined, kernel
from training.embedding.precision import copy16, load_values8, load_values_part
from training.embedding.simd import match8, prefetch, store8, store_part, trailing_zeros

WAYS = 7
LINE = 8
AHEAD = 64
CHUNK = 256
ABSENT = -1
SHORT = 16
"""Rows of so many words, one line, are asked for as soon as found (1.2x); longer ones shortly before they are needed (1.3x to 2x)."""
NEW = 1 << 62
ROW = NEW - 1
PROBE, CHECK, TRUST = 0, 1, 2
"""What ``slots`` holds before ``find``: nothing; slots of an earlier look-up, whose rows may have gone; such slots, and none has gone."""
FILTER_LINE = 64

_FIRST_ORDER = np.uint64(0x6543210)
_ORDER_MASK = np.uint64(0xFFFFFFF)
_ONES = np.uint64(0x1111111)
_EIGHTS = np.uint64(0x8888888)
_VALID_SHIFT = np.uint64(28)
_VALID_MASK = np.uint64(0x7F)
_BOTH_WAYS = np.uint64(0x7F7F)
_NIBBLE = np.uint64(0xF)
_OLDEST_SHIFT = np.uint64(24)
_U0, _U1, _U3, _U4, _U7, _U8, _U10, _U24, _U32, _U512 = (np.uint64(n) for n in (0, 1, 3, 4, 7, 8, 10, 24, 32, 512))
_ULINE, _UWAYS = np.uint64(LINE), np.uint64(WAYS)
_UROW = np.uint64(ROW)
_SIX_BITS = np.uint64(63)
_LOW_24, _LOW_32 = np.uint64(2**24 - 1), np.uint64(2**32 - 1)


@inlined
def chunk_of(stride: Any) -> Any:
    """How many signs to take at a time, a power of two: about as many as keep their rows in 256 KiB."""
    chunk = CHUNK
    while chunk > AHEAD and chunk * stride > 65_536:
        chunk //= 2
    return chunk


@inlined
def _packed(where: Any, sign: Any) -> Any:
    """Both buckets of a sign, as one * 1024 + 512 + (two - one)."""
    _, multiplier, num_blocks, block = where
    hashed = sign_hash(sign)
    scaled = ((hashed * multiplier) >> _U32) * num_blocks
    one = ((scaled & _LOW_32) * block) >> _U32
    two = ((hashed & _LOW_24) * (block - _U1)) >> _U24
    two += np.uint64(two >= one)
    return np.int64((((scaled >> _U32) * block + one) << _U10) + _U512 + two - one)


@inlined
def _locate(where: Any, signs: Any, slots: Any, first: Any, last: Any) -> None:
    """Leave the packed buckets of signs[first:last] in ``slots``. No branch, no call: it is vectorised."""
    for i in range(first, last):
        slots[np.uint64(i)] = _packed(where, signs[np.uint64(i)])


@inlined
def _buckets(slots: Any, i: Any) -> Any:
    """Both buckets of sign i, uint64."""
    packed = slots[np.uint64(i)]
    one = packed >> 10
    return np.uint64(one), np.uint64(one + (packed & 1023) - 512)


@inlined
def _ask(index: Any, slots: Any, i: Any) -> None:
    one, two = _buckets(slots, i)
    prefetch(index, np.int64(one) * LINE)
    prefetch(index, np.int64(two) * LINE)


@inlined
def begin(where: Any, signs: Any, slots: Any, chunk: Any, known: Any) -> None:
    """Begin a call: its first chunk located and the first buckets asked for. ``slots`` is int64 [U] and holds what ``known`` says."""
    last = min(chunk, len(signs))
    if known == PROBE:
        _locate(where, signs, slots, 0, last)
        for i in range(min(AHEAD, last)):
            _ask(where[0], slots, i)
    elif known == CHECK:
        for i in range(min(AHEAD, last)):
            prefetch(where[0], _key_of(slots, i))


@inlined
def _key_of(slots: Any, i: Any) -> Any:
    """Place in the index of the key of sign i's slot."""
    slot = np.uint64(slots[np.uint64(i)]) & _UROW
    return np.int64(slot + slot // _UWAYS)


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
    """Bits 0..6: ways of bucket one that hold the sign; bits 8..14: of bucket two. At most one bit is set.

    Empty ways are not asked for: what they hold is no sign that could stand there, see ``prepare``.
    """
    return (match8(index, one * _ULINE, sign) | (match8(index, two * _ULINE, sign) << _U8)) & _BOTH_WAYS


@kernel
def prepare(where, slots):
    """Make a zeroed index that of an empty table: the buckets of sign 0 get keys of a sign that belongs elsewhere.

    ``slots`` is int64 [2], scratch.
    """
    index = where[0]
    slots[0] = _packed(where, _U0)
    one, two = _buckets(slots, 0)
    stranger = _U0
    other_one, other_two = one, two
    while other_one in (one, two) or other_two in (one, two):
        stranger += _U1
        slots[1] = _packed(where, stranger)
        other_one, other_two = _buckets(slots, 1)
    for way in range(WAYS):
        index[one * _ULINE + np.uint64(way)] = stranger
        index[two * _ULINE + np.uint64(way)] = stranger


@inlined
def _slot_of(where: Any, sign: Any) -> Any:
    """Slot of one sign, for the few that are not where they were."""
    packed = _packed(where, sign)
    one = np.uint64(packed >> 10)
    two = np.uint64((packed >> 10) + (packed & 1023) - 512)
    match = _match(where[0], sign, one, two)
    if match == _U0:
        return np.int64(ABSENT)
    bucket, way = _located(match, one, two)
    return np.int64(bucket * _UWAYS + way)


@inlined
def _find_again(where: Any, signs: Any, slots: Any, first: Any, last: Any, known: Any) -> Any:
    """``find`` for signs that were looked up before: one line of index per sign, or none."""
    index, n, found = where[0], len(signs), 0
    for i in range(first, last):
        before = slots[np.uint64(i)]
        slot = before
        if known == CHECK:
            prefetch(index, _key_of(slots, min(i + AHEAD, n - 1)))
            if slot >= 0 and index[np.uint64(_key_of(slots, i))] != signs[np.uint64(i)]:
                slot = np.int64(ABSENT)
        if slot < 0:
            slot = _slot_of(where, signs[np.uint64(i)])
        if slot >= 0:
            slot &= ROW
            found += 1
        if slot != before:
            slots[np.uint64(i)] = slot
    return found


@inlined
def _ask_row(rows: Any, slot: Any, stride: Any, floats: Any) -> None:
    """Ask for the first ``floats`` words of a row, whose slot may have the bit ``NEW``."""
    base = (slot & ROW) * stride
    for j in range(0, floats, 16):
        prefetch(rows, base + j)
    if stride % 16 != 0:  # The row may end in a line of its own: 1.6x at dim 12.
        prefetch(rows, base + floats - 1)


@inlined
def find(where: Any, signs: Any, slots: Any, first: Any, chunk: Any, view: Any, known: Any) -> Any:
    """Slots of the chunk of signs from ``first`` on to ``slots``, ``ABSENT`` where there is none. Returns how many were found.

    Chunks must be taken in order; the signs may end before the chunk does, or begins. Changes nothing.
    ``view`` is as in ``ask_ahead``. ``known`` is ``PROBE``, ``CHECK`` or ``TRUST``; the result is the same.
    """
    index, n = where[0], len(signs)
    last = min(first + chunk, n)
    if known != PROBE:
        return _find_again(where, signs, slots, first, last, known)
    _locate(where, signs, slots, last, min(last + chunk, n))
    found = 0
    for i in range(first, last):
        _ask(index, slots, min(i + AHEAD, n - 1))
        sign = signs[np.uint64(i)]
        one, two = _buckets(slots, i)
        match = _match(index, sign, one, two)
        slot = np.int64(ABSENT)
        if match != _U0:
            bucket, way = _located(match, one, two)
            slot = np.int64(bucket * _UWAYS + way)
            if view[3] <= SHORT:
                _ask_row(view[0], slot, view[2], view[3])
            found += 1
        slots[np.uint64(i)] = slot
    return found


@inlined
def ask_ahead(slots: Any, i: Any, view: Any, known: Any) -> None:
    """Ask for the row and the scalar of the sign ``AHEAD`` signs after sign i, as far as ``find`` has not.

    ``view`` is (rows, scalars, stride, floats): the first ``floats`` words of a row are asked for, and a scalar where there are any.
    """
    rows, scalars, stride, floats = view
    slot = max(slots[np.uint64(min(i + AHEAD, len(slots) - 1))], 0) & ROW
    if floats > SHORT or known != PROBE:
        _ask_row(rows, slot, stride, floats)
    if len(scalars) > 0:
        prefetch(scalars, slot)


@inlined
def _admit(counters: Any, hashed: Any, block: Any, num_blocks: Any, min_count: Any) -> Any:
    """Count one look-up of a sign without a row; true when it was its ``min_count``-th. Conservative count-min, two cells of one line.

    Every block of buckets has lines of its own, so that threads at work on different blocks share none.
    """
    lines = np.uint64(len(counters) // FILTER_LINE) // num_blocks
    line = np.int64(block * lines + ((hashed & _LOW_32) * lines >> _U32)) * FILTER_LINE
    bits = hashed >> _U32
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
        bucket = one if (hashed >> _U24) & _U1 == _U0 else two
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
def _find_or_insert(where: Any, admission: Any, signs: Any, slots: Any, first: Any, chunk: Any, view: Any) -> Any:
    """As ``find``, but new signs get a row once they were seen often enough, and recency is refreshed.

    ``admission`` is (counters, min_count). Returns (hits, inserted, refused, evicted).
    """
    (index, _, num_blocks, _), (counters, min_count), n = where, admission, len(signs)
    last = min(first + chunk, n)
    _locate(where, signs, slots, last, min(last + chunk, n))
    hits, inserted, refused, evictions = 0, 0, 0, 0
    for i in range(first, last):
        _ask(index, slots, min(i + AHEAD, n - 1))
        sign = signs[np.uint64(i)]
        one, two = _buckets(slots, i)
        match = _match(index, sign, one, two)
        if match != _U0:
            bucket, way = _located(match, one, two)
            index[bucket * _ULINE + _UWAYS] = _touched(index[bucket * _ULINE + _UWAYS], way)
            slot = np.int64(bucket * _UWAYS + way)
            hits += 1
        else:
            hashed = sign_hash(sign)
            slot = np.int64(ABSENT)
            if len(counters) > 0 and not _admit(counters, hashed, _block(where, sign), num_blocks, min_count):
                refused += 1
            else:
                slot, evicted = _place(index, sign, hashed, one, two)
                slot |= NEW
                inserted += 1
                evictions += evicted
        if view[3] <= SHORT and slot >= 0:
            _ask_row(view[0], slot, view[2], view[3])
        slots[np.uint64(i)] = slot
    return hits, inserted, refused, evictions


@inlined
def _copy_out(values: Any, base: Any, dim: Any, out: Any, to: Any) -> None:
    lines, whole = dim - dim % 16, dim - dim % 8
    for j in range(0, lines, 16):
        copy16(values, base + j, out, to + j)
    if lines < whole:
        store8(out, to + lines, load_values8(values, base + lines))
    if whole < dim:
        store_part(out, to + whole, load_values_part(values, base + whole, dim - whole), dim - whole)


@inlined
def _zero(out: Any, to: Any, dim: Any) -> None:
    for j in range(dim):
        out[to + j] = np.float32(0.0)


@kernel
def read(where, values, rows, layout, signs, slots, out):
    """Values of signs to ``out`` [U * dim], zeros for absent ones. Changes no row. Returns how many were found.

    ``layout`` is (stride, width, head, dim): float32 words per row, values per row were it all values, words before the state, values.
    """
    stride, width, head, dim = layout
    view = (rows, rows[:0], stride, head)
    n, found, chunk = len(signs), 0, chunk_of(stride)
    begin(where, signs, slots, chunk, PROBE)
    for first in range(-chunk, n, chunk):
        found += find(where, signs, slots, first + chunk, chunk, view, PROBE)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, PROBE)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot >= 0:
                _copy_out(values, slot * width, dim, out, i * dim)
            else:
                _zero(out, i * dim, dim)
    return found


@kernel
def read_or_insert(where, admission, values, rows, scalars, layout, signs, slots, out, initial):
    """As ``read``; gives admitted new signs a row with its first values and state, evicting if need be, and refreshes recency.

    ``admission`` is (counters, min_count), counters empty if every sign is admitted at once. ``initial`` is (seed, kind, scale, state);
    ``scalars`` is empty where the optimizer has none. Returns (hits, inserted, refused, evicted).
    """
    stride, width, head, dim = layout
    view = (rows, rows[:0], stride, head)
    n, chunk = len(signs), chunk_of(stride)
    hits, inserted, refused, evicted = 0, 0, 0, 0
    begin(where, signs, slots, chunk, PROBE)
    for first in range(-chunk, n, chunk):
        counts = _find_or_insert(where, admission, signs, slots, first + chunk, chunk, view)
        hits, inserted, refused, evicted = hits + counts[0], inserted + counts[1], refused + counts[2], evicted + counts[3]
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, PROBE)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot == ABSENT:
                _zero(out, i * dim, dim)
                continue
            if slot >= NEW:
                slot &= ROW
                initialise(values, rows, slot, layout, signs[np.uint64(i)], initial)
                if len(scalars) > 0:
                    scalars[slot] = initial[3]
            _copy_out(values, slot * width, dim, out, i * dim)
    return hits, inserted, refused, evicted


@kernel
def insert(where, admission, rows, signs, slots):
    """Give all signs a place, without values: slots [U], with the bit ``NEW`` where it is new. ``admission`` must admit all.

    Returns (hits, inserted, refused, evicted).
    """
    hits, inserted, evicted = 0, 0, 0
    begin(where, signs, slots, CHUNK, PROBE)
    for first in range(0, len(signs), CHUNK):
        counts = _find_or_insert(where, admission, signs, slots, first, CHUNK, (rows, rows[:0], 0, SHORT + 1))
        hits, inserted, evicted = hits + counts[0], inserted + counts[1], evicted + counts[3]
    return hits, inserted, 0, evicted


@kernel
def split(where, signs, bounds):
    """Cut signs into ranges of about equal length that share no block: bounds int64 [parts + 1]. False if the blocks do not ascend."""
    n, parts = len(signs), len(bounds) - 1
    before, ascending = _U0, True
    for i in range(n):
        block = _block(where, signs[np.uint64(i)])
        ascending &= block >= before
        before = block
    bounds[0] = 0
    for part in range(1, parts):
        cut = max(n * part // parts, bounds[part - 1])
        while 0 < cut < n and _block(where, signs[cut]) == _block(where, signs[cut - 1]):
            cut += 1
        bounds[part] = cut
    bounds[parts] = n
    return ascending


@inlined
def _block(where: Any, sign: Any) -> Any:
    return (((sign_hash(sign) * where[1]) >> _U32) * where[2]) >> _U32


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
    """Row i of ``source`` [n * stride] to slots[i], in order; codes of new rows are understood. Both as uint32: bits, not numbers."""
    for i in range(len(slots)):
        slot = slots[i] & ROW
        for j in range(stride):
            rows[slot * stride + j] = source[i * stride + j]
