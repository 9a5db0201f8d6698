"""Signs: the 64-bit hashes that name embedding rows.

A sign is ``xxh64(utf-8 text of the value, seed)`` with ``seed = xxh64(group name, 0)``, so equal texts of different groups differ.
A hash of 0 becomes 1: 0 stays free to say "no id" (no code relies on it; tables take any 64-bit number). xxh64 follows the public
specification of the xxHash project (version 0.1.1) and is tested bit by bit against the reference implementation.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash
from numba import njit

U8 = npt.NDArray[np.uint8]
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_ZERO, _ONE = np.uint64(0), np.uint64(1)


def sign_seed(group: str) -> int:
    """Seed of the signs of all slots of ``group``."""
    return xxhash.xxh64_intdigest(group.encode(), 0)


def sign_of(text: str, group: str) -> int:
    """Sign of one value; what ``hash_spans`` computes for many. For serving and tests."""
    return xxhash.xxh64_intdigest(text.encode(), sign_seed(group)) or 1


def hash_spans(data: U8, starts: I64, ends: I64, seed: int) -> U64:
    """Hash ``data[starts[i]:ends[i]]`` for every i; ``starts``, ``ends``: [N]. Returns signs uint64 [N], never 0."""
    return _hash_spans(data, starts, ends, np.uint64(seed))  # type: ignore[no-any-return]


def chain_spans(data: U8, starts: I64, ends: I64, seeds: U64) -> U64:
    """Like ``hash_spans`` with one seed per value [N], for hashing several fields into one number. May return 0."""
    return _chain_spans(data, starts, ends, seeds)  # type: ignore[no-any-return]


def hash_array(values: pa.Array, seed: int) -> U64:
    """Hash an Arrow string or binary array (32- or 64-bit offsets); a null hashes like the empty text. Returns uint64 [N]."""
    offset_type = np.int64 if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type) else np.int32
    validity, offsets, content = values.buffers()
    del validity
    bounds = np.frombuffer(offsets, offset_type)[values.offset : values.offset + len(values) + 1].astype(np.int64)
    data = np.frombuffer(content, np.uint8).copy() if content is not None else np.empty(0, np.uint8)
    starts, ends = bounds[:-1], bounds[1:].copy()
    if values.null_count:
        ends = np.where(np.asarray(values.is_null()), starts, ends)
    return hash_spans(data, np.ascontiguousarray(starts), ends, seed)


@njit(cache=True, nogil=True)
def _rotate(value: np.uint64, bits: int) -> np.uint64:
    return np.uint64((value << np.uint64(bits)) | (value >> np.uint64(64 - bits)))


@njit(cache=True, nogil=True)
def _word(data: U8, at: int, width: int) -> np.uint64:
    value = _ZERO
    for i in range(width):
        value |= np.uint64(data[at + i]) << np.uint64(8 * i)
    return value


@njit(cache=True, nogil=True)
def _round(lane: np.uint64, word: np.uint64) -> np.uint64:
    return np.uint64(_rotate(np.uint64(lane + word * _P2), 31) * _P1)


@njit(cache=True, nogil=True)
def _stripes(data: U8, at: int, end: int, seed: np.uint64) -> np.uint64:
    """The part of xxh64 that eats whole 32-byte stripes."""
    a, b, c, d = np.uint64(seed + _P1 + _P2), np.uint64(seed + _P2), seed, np.uint64(seed - _P1)
    while at + 32 <= end:
        a = _round(a, _word(data, at, 8))
        b = _round(b, _word(data, at + 8, 8))
        c = _round(c, _word(data, at + 16, 8))
        d = _round(d, _word(data, at + 24, 8))
        at += 32
    total = np.uint64(_rotate(a, 1) + _rotate(b, 7) + _rotate(c, 12) + _rotate(d, 18))
    for lane in (a, b, c, d):
        total = np.uint64((total ^ _round(_ZERO, lane)) * _P1 + _P4)
    return total


@njit(cache=True, nogil=True)
def xxh64(data: U8, start: int, end: int, seed: np.uint64) -> np.uint64:
    """xxh64 of ``data[start:end]``; a kernel for use inside other kernels."""
    length = end - start
    at = start
    if length >= 32:
        value = _stripes(data, start, end, seed)
        at = start + (length // 32) * 32
    else:
        value = np.uint64(seed + _P5)
    value = np.uint64(value + np.uint64(length))
    while at + 8 <= end:
        value = np.uint64(_rotate(np.uint64(value ^ _round(_ZERO, _word(data, at, 8))), 27) * _P1 + _P4)
        at += 8
    if at + 4 <= end:
        value = np.uint64(_rotate(np.uint64(value ^ np.uint64(_word(data, at, 4) * _P1)), 23) * _P2 + _P3)
        at += 4
    while at < end:
        value = np.uint64(_rotate(np.uint64(value ^ np.uint64(np.uint64(data[at]) * _P5)), 11) * _P1)
        at += 1
    value = np.uint64((value ^ (value >> np.uint64(33))) * _P2)
    value = np.uint64((value ^ (value >> np.uint64(29))) * _P3)
    return np.uint64(value ^ (value >> np.uint64(32)))


@njit(cache=True, nogil=True)
def _hash_spans(data: U8, starts: I64, ends: I64, seed: np.uint64) -> U64:
    out = np.empty(len(starts), np.uint64)
    for i in range(len(starts)):
        value = xxh64(data, starts[i], ends[i], seed)
        out[i] = _ONE if value == _ZERO else value
    return out


@njit(cache=True, nogil=True)
def _chain_spans(data: U8, starts: I64, ends: I64, seeds: U64) -> U64:
    out = np.empty(len(starts), np.uint64)
    for i in range(len(starts)):
        out[i] = xxh64(data, starts[i], ends[i], seeds[i])
    return out
