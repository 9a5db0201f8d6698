"""Where records begin and end in a stream of bytes: line ends (LF, CRLF, CR), quoted line ends, line numbers, chunks.

The planner that cuts a file into chunks and the reader that parses a chunk use the same kernel, so they can never disagree about
a record. A quoted field may hold line ends. A quote that is not closed within ``MAX_QUOTED_BYTES`` or before the end of the file
makes a bad record of its first line only; reading goes on with the next line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.spans import is_blank, starts_with
from training.errors import SourceError

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

MAX_QUOTED_BYTES = 1 << 20
MAX_LINE_BYTES = 64 << 20
_BLOCK_BYTES = 4 << 20
LF, CR, QUOTE = 10, 13, 34
COMPLETE, UNTERMINATED, NEED_MORE = 0, 1, 2


@dataclass(frozen=True)
class Dialect:
    """How records and fields are told apart. ``delimiter``: uint8, in the encoding of the bytes at hand."""

    delimiter: U8
    quoting: bool
    strip: bool

    @classmethod
    def of(cls, delimiter: str, *, quoting: bool, strip: bool, encoding: str = "utf-8") -> Dialect:
        """Encode ``delimiter`` for bytes of ``encoding``."""
        return cls(np.frombuffer(bytearray(delimiter.encode(encoding)), np.uint8), quoting, strip)


LINES = Dialect.of("\n", quoting=False, strip=False)
"""The dialect of files whose records are plain lines."""


@dataclass(frozen=True)
class RecordBounds:
    """Records of a chunk, blank lines left out. All arrays [N]."""

    starts: I64
    ends: I64
    """Without the line end."""
    lines: I64
    """Line number of each record's first line, counted from 1."""
    unterminated: npt.NDArray[np.bool_]


def find_records(data: U8, dialect: Dialect, first_line: int) -> RecordBounds:
    """Bounds of all records of ``data``, which starts and ends at record boundaries."""
    quoting = dialect.quoting and bool((data == QUOTE).any())
    capacity = int(np.count_nonzero(data == LF)) + int(np.count_nonzero(data == CR)) + 1
    starts, ends, lines, unterminated = _find_records(data, quoting, dialect.delimiter, dialect.strip, first_line, capacity)
    return RecordBounds(starts, ends, lines, unterminated)


def undecodable(data: U8, starts: I64, ends: I64) -> I64:
    """Records that are not UTF-8, ascending. Records are looked at one by one only if there is such a one."""
    try:
        str(data.data, "utf-8")
    except UnicodeDecodeError:
        return np.array([i for i in range(len(starts)) if decode_error(data[starts[i] : ends[i]].tobytes())], np.int64)
    return np.empty(0, np.int64)


def decode_error(record: bytes) -> str:
    """Why a record is not UTF-8; empty if it is."""
    try:
        record.decode()
    except UnicodeDecodeError as error:
        return f"not UTF-8: {error.reason} at byte {error.start} of the record (0x{record[error.start]:02x})"
    return ""


@dataclass(frozen=True)
class Piece:
    """Whole records cut from a stream."""

    offset: int
    """Bytes of the stream before it."""
    first_line: int
    data: U8


def cut_pieces(
    read: Callable[[int], bytes], dialect: Dialect, *, piece_bytes: int, name: str, offset: int = 0, first_line: int = 1
) -> Iterator[Piece]:
    """Cut a stream into pieces of whole records; each ends at the first record end at or after ``piece_bytes``.

    ``read(n)`` returns up to n bytes, empty at the end. Where pieces end depends on the bytes alone, not on how they arrive.
    Holds at most a piece and a block in memory. Raises ``SourceError`` naming ``name`` for a line above ``MAX_LINE_BYTES``.
    """
    data, at, lines, final = np.empty(0, np.uint8), 0, 0, False
    while True:
        at, found, starved = _skip_records(data, at, final, dialect.quoting, dialect.delimiter, dialect.strip, piece_bytes)
        lines += found
        if starved and not final:
            if len(data) - at > MAX_LINE_BYTES:
                raise SourceError(
                    f"{name}: line {first_line + lines} is longer than {MAX_LINE_BYTES >> 20} MiB; check data.format, or split the line"
                )
            block = read(_BLOCK_BYTES)
            final = not block
            data = np.concatenate([data, np.frombuffer(block, np.uint8)])
            continue
        if at:
            yield Piece(offset, first_line, data[:at])
        if final and at == len(data):
            return
        offset, first_line, data, at, lines = offset + at, first_line + lines, data[at:].copy(), 0, 0


@njit(cache=True, nogil=True)
def _line_end(data: U8, at: int, size: int) -> int:
    while at < size and data[at] != LF and data[at] != CR:
        at += 1
    return at


@njit(cache=True, nogil=True)
def _after_line_end(data: U8, at: int, size: int) -> int:
    if at >= size:
        return size
    return at + 2 if data[at] == CR and at + 1 < size and data[at + 1] == LF else at + 1


@njit(cache=True, nogil=True)
def _closing_quote(data: U8, at: int, limit: int) -> tuple[int, int]:
    """Position of the quote that closes a field whose text begins at ``at``, or -1; and the line ends passed."""
    lines = 0
    while at < limit:
        byte = data[at]
        if byte == QUOTE:
            if at + 1 < len(data) and data[at + 1] == QUOTE:
                at += 2
                continue
            return at, lines
        if byte == LF or (byte == CR and not (at + 1 < len(data) and data[at + 1] == LF)):
            lines += 1
        at += 1
    return -1, lines


@njit(cache=True, nogil=True)
def _finish(data: U8, end: int, final: bool, lines: int, verdict: int) -> tuple[int, int, int, int]:
    size = len(data)
    if not final and (end >= size or (data[end] == CR and end + 1 >= size)):
        return end, end, lines, NEED_MORE
    return end, _after_line_end(data, end, size), lines + 1, verdict


@njit(cache=True, nogil=True)
def _next_record(data: U8, start: int, final: bool, quoting: bool, delimiter: U8, strip: bool) -> tuple[int, int, int, int]:
    """(end of the record, start of the next one, lines covered, verdict) of the record at ``start``."""
    size = len(data)
    if not quoting:
        return _finish(data, _line_end(data, start, size), final, 0, COMPLETE)  # type: ignore[no-any-return]
    at, lines, fresh = start, 0, True
    while at < size and data[at] != LF and data[at] != CR:
        if fresh and data[at] == QUOTE:
            limit = min(size, start + MAX_QUOTED_BYTES)
            close, passed = _closing_quote(data, at + 1, limit)
            if not final and ((close < 0 and limit == size) or close + 1 == size):
                return at, at, 0, NEED_MORE
            if close < 0:
                return _finish(data, _line_end(data, start, size), final, 0, UNTERMINATED)  # type: ignore[no-any-return]
            at, lines, fresh = close + 1, lines + passed, False
        elif starts_with(data, at, size, delimiter):
            at, fresh = at + len(delimiter), True
        else:
            fresh = fresh and strip and is_blank(data[at])
            at += 1
    return _finish(data, at, final, lines, COMPLETE)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _skip_records(data: U8, at: int, final: bool, quoting: bool, delimiter: U8, strip: bool, target: int) -> tuple[int, int, bool]:
    """Step over records until ``target`` is reached: (position, lines passed, whether the data ran out first)."""
    lines = 0
    while at < target:
        if at >= len(data):
            return at, lines, True
        _, following, covered, verdict = _next_record(data, at, final, quoting, delimiter, strip)
        if verdict == NEED_MORE:
            return at, lines, True
        at = following
        lines += covered
    return at, lines, False


@njit(cache=True, nogil=True)
def _is_blank_line(data: U8, start: int, end: int, delimiter: U8) -> bool:
    for i in range(start, end):  # noqa: SIM110 - compiled code
        if not is_blank(data[i]) or starts_with(data, i, end, delimiter):
            return False
    return True


@njit(cache=True, nogil=True)
def _find_records(
    data: U8, quoting: bool, delimiter: U8, strip: bool, line: int, capacity: int
) -> tuple[I64, I64, I64, npt.NDArray[np.bool_]]:
    starts, ends, lines = np.empty(capacity, np.int64), np.empty(capacity, np.int64), np.empty(capacity, np.int64)
    unterminated = np.zeros(capacity, np.bool_)
    count, at = 0, 0
    while at < len(data):
        end, following, covered, verdict = _next_record(data, at, True, quoting, delimiter, strip)
        if not _is_blank_line(data, at, end, delimiter):
            starts[count], ends[count], lines[count] = at, end, line
            unterminated[count] = verdict == UNTERMINATED
            count += 1
        line += covered
        at = following
    return starts[:count].copy(), ends[:count].copy(), lines[:count].copy(), unterminated[:count].copy()
