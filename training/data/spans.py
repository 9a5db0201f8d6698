"""Columns of text as spans of one byte buffer: no object per value, whatever file format the bytes came from.

N: records, V: values of a multi-valued column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from numba import njit

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TextTable:
    """A few texts to compare values with: ``data[offsets[i]:offsets[i+1]]`` is the i-th."""

    data: U8
    offsets: I64

    @classmethod
    def of(cls, texts: Sequence[str]) -> TextTable:
        """Encode ``texts`` as UTF-8, in order."""
        encoded = [text.encode() for text in texts]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        return cls(np.frombuffer(bytearray(b"".join(encoded)), np.uint8), offsets)


@dataclass(frozen=True)
class TextColumn:
    """One text per record: ``data[starts[i]:ends[i]]``, UTF-8. A missing value has an empty span."""

    data: U8
    starts: I64
    ends: I64
    missing: Bools

    def __len__(self) -> int:
        return len(self.starts)

    def take(self, rows: npt.NDArray[np.int64] | Bools) -> TextColumn:
        """The chosen records; the bytes are shared."""
        return TextColumn(self.data, self.starts[rows], self.ends[rows], self.missing[rows])

    def text(self, row: int) -> str:
        """One value, for messages and slow paths."""
        return self.data[self.starts[row] : self.ends[row]].tobytes().decode("utf-8", "backslashreplace")

    def to_arrow(self) -> pa.Array:
        """All values as an Arrow string array (missing: empty text). The bytes must be valid UTF-8."""
        lengths = self.ends - self.starts
        offsets = np.zeros(len(self) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        content = _gather(self.data, self.starts, offsets)
        return pa.LargeStringArray.from_buffers(len(self), pa.py_buffer(offsets), pa.py_buffer(content)).cast(pa.string())

    def index_in(self, table: TextTable) -> npt.NDArray[np.int64]:
        """Per record the index of the equal text of ``table``, or -1; int64 [N]."""
        return _index_in(self.data, self.starts, self.ends, table.data, table.offsets)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ListColumn:
    """Several texts per record: record i has values ``offsets[i]`` to ``offsets[i+1]`` of ``values``, none of them missing."""

    offsets: I64
    values: TextColumn

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def take(self, rows: npt.NDArray[np.int64]) -> ListColumn:
        """The chosen records, in the order of ``rows``."""
        offsets, index = gather_lists(self.offsets, rows)
        return ListColumn(offsets, self.values.take(index))


def clean(data: U8, starts: I64, ends: I64, *, strip: bool, missing: TextTable) -> TextColumn:
    """Strip blanks and find missing values. A span with a negative start is missing already (a JSON or Parquet null)."""
    out_starts, out_ends, flags = _clean(data, starts, ends, strip, missing.data, missing.offsets)
    return TextColumn(data, out_starts, out_ends, flags)


def split_lists(column: TextColumn, separator: str) -> tuple[I64, I64, I64]:
    """Cut every text at ``separator``: offsets int64 [N+1] and the raw spans of the values, starts and ends int64 [V]."""
    table = TextTable.of([separator])
    counts = _count_parts(column.data, column.starts, column.ends, table.data)
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    starts, ends = _cut_parts(column.data, column.starts, column.ends, table.data, offsets)
    return offsets, starts, ends


def keep_present(offsets: I64, values: TextColumn) -> ListColumn:
    """Drop missing values from lists."""
    if not values.missing.any():
        return ListColumn(offsets, values)
    present = ~values.missing
    kept = np.concatenate([np.zeros(1, np.int64), np.cumsum(present, dtype=np.int64)])
    return ListColumn(kept[offsets], values.take(present))


def truncate_lists(lists: ListColumn, limit: int) -> tuple[ListColumn, I64]:
    """Keep the first ``limit`` values of every record. Also returns how many each record lost, int64 [N]."""
    lengths = np.diff(lists.offsets)
    lost: I64 = np.maximum(lengths - limit, 0)
    if not lost.any():
        return lists, lost
    position = np.arange(len(lists.values), dtype=np.int64) - np.repeat(lists.offsets[:-1], lengths)
    offsets = np.zeros(len(lists.offsets), np.int64)
    np.cumsum(np.minimum(lengths, limit), out=offsets[1:])
    return ListColumn(offsets, lists.values.take(position < limit)), lost


def gather_lists(offsets: I64, rows: npt.NDArray[np.int64]) -> tuple[I64, I64]:
    """For the lists of ``rows``: their new offsets int64 [len(rows)+1] and the positions of their values, int64 [V]."""
    starts = offsets[rows]
    lengths = offsets[rows + 1] - starts
    out = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(lengths, out=out[1:])
    index = np.repeat(starts - out[:-1], lengths) + np.arange(out[-1], dtype=np.int64)
    return out, index


@njit(cache=True, nogil=True)
def is_blank(byte: int) -> bool:
    """ASCII white space: space, tab, line feed, vertical tab, form feed, carriage return."""
    return byte == 32 or 9 <= byte <= 13


@njit(cache=True, nogil=True)
def find_text(data: U8, start: int, end: int, table: U8, offsets: I64) -> int:
    """Index of the text of a ``TextTable`` equal to ``data[start:end]``, or -1."""
    length = end - start
    for t in range(len(offsets) - 1):
        first = offsets[t]
        if offsets[t + 1] - first != length:
            continue
        i = 0
        while i < length and data[start + i] == table[first + i]:
            i += 1
        if i == length:
            return t
    return -1


@njit(cache=True, nogil=True)
def starts_with(data: U8, at: int, end: int, text: U8) -> bool:
    """Whether ``text`` stands at ``data[at:end]``."""
    if at + len(text) > end:
        return False
    for i in range(len(text)):  # noqa: SIM110 - compiled code
        if data[at + i] != text[i]:
            return False
    return True


@njit(cache=True, nogil=True)
def _clean(data: U8, starts: I64, ends: I64, strip: bool, table: U8, offsets: I64) -> tuple[I64, I64, Bools]:
    count = len(starts)
    out_starts, out_ends, missing = np.zeros(count, np.int64), np.zeros(count, np.int64), np.zeros(count, np.bool_)
    for i in range(count):
        start, end = starts[i], ends[i]
        if start < 0:
            missing[i] = True
            continue
        if strip:
            while start < end and is_blank(data[start]):
                start += 1
            while start < end and is_blank(data[end - 1]):
                end -= 1
        if find_text(data, start, end, table, offsets) >= 0:
            missing[i] = True
            end = start
        out_starts[i], out_ends[i] = start, end
    return out_starts, out_ends, missing


@njit(cache=True, nogil=True)
def _gather(data: U8, starts: I64, offsets: I64) -> U8:
    out = np.empty(offsets[-1], np.uint8)
    for i in range(len(starts)):
        first = offsets[i]
        for j in range(offsets[i + 1] - first):
            out[first + j] = data[starts[i] + j]
    return out


@njit(cache=True, nogil=True)
def _index_in(data: U8, starts: I64, ends: I64, table: U8, offsets: I64) -> I64:
    out = np.empty(len(starts), np.int64)
    for i in range(len(starts)):
        out[i] = find_text(data, starts[i], ends[i], table, offsets)
    return out


@njit(cache=True, nogil=True)
def _count_parts(data: U8, starts: I64, ends: I64, separator: U8) -> I64:
    out = np.zeros(len(starts), np.int64)
    for i in range(len(starts)):
        if starts[i] == ends[i]:
            continue
        at, parts = starts[i], 1
        while at < ends[i]:
            if starts_with(data, at, ends[i], separator):
                parts += 1
                at += len(separator)
            else:
                at += 1
        out[i] = parts
    return out


@njit(cache=True, nogil=True)
def _cut_parts(data: U8, starts: I64, ends: I64, separator: U8, offsets: I64) -> tuple[I64, I64]:
    out_starts, out_ends = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    for i in range(len(starts)):
        if starts[i] == ends[i]:
            continue
        part, at = offsets[i], starts[i]
        out_starts[part] = at
        while at < ends[i]:
            if starts_with(data, at, ends[i], separator):
                out_ends[part] = at
                at += len(separator)
                part += 1
                out_starts[part] = at
            else:
                at += 1
        out_ends[part] = ends[i]
    return out_starts, out_ends
