"""Csv and tsv: from the bytes of whole records to spans of the wanted fields.

Quotes are those of RFC 4180: a field that begins with a double quote (after blanks, if blanks are stripped) ends at the next
single one; two stand for one. A quote inside an unquoted field is text. One empty field too many at the end of a record is a
trailing delimiter, not a fault.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.dead_letters import Faults
from training.data.lines import QUOTE, Dialect, decode_error, find_records, undecodable
from training.data.raw import RawColumn, RawRecords, Wanted
from training.data.spans import is_blank, starts_with

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


def parse_delimited(data: U8, *, piece: int, first_line: int, names: tuple[str, ...], dialect: Dialect, wanted: Wanted) -> RawRecords:
    """Parse whole records in UTF-8 whose fields are called ``names``. Undecodable records are faults."""
    bounds = find_records(data, dialect, first_line)
    count, columns = len(bounds.starts), wanted.columns
    faults = Faults(count)

    def record(row: int) -> bytes:
        return data[bounds.starts[row] : bounds.ends[row]].tobytes()

    faults.add(undecodable(data, bounds.starts, bounds.ends), "undecodable", lambda row: decode_error(record(row)))
    faults.add(np.nonzero(bounds.unterminated)[0], "unterminated quote", lambda _: "a quoted field that begins here is never closed")
    target = np.full(len(names), -1, np.int64)
    for place, name in enumerate(columns):
        target[names.index(name)] = place
    quoted = dialect.quoting and bool((data == QUOTE).any())
    text = data.copy() if quoted else data
    starts, ends = np.zeros((len(columns), count), np.int64), np.zeros((len(columns), count), np.int64)
    fields, bad_quote = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    _split_fields(
        text,
        bounds.starts,
        bounds.ends,
        bounds.unterminated,
        quoted,
        dialect.delimiter,
        dialect.strip,
        target,
        starts,
        ends,
        fields,
        bad_quote,
    )
    faults.add(np.nonzero(bad_quote)[0], "text after quote", lambda _: "a quoted field is followed by more text before the delimiter")
    faults.add(np.nonzero(fields != len(names))[0], "field count", lambda row: f"expected {len(names)} fields, found {fields[row]}")
    scalars = {name: RawColumn(text, starts[place], ends[place]) for place, name in enumerate(columns)}
    whole = RawColumn(data, bounds.starts, bounds.ends)
    return RawRecords(piece, bounds.lines, scalars, {}, faults, record, (whole,), frozenset(columns))


def split_header(line: bytes, dialect: Dialect, encoding: str) -> tuple[str, ...]:
    """Names in a header line; undecodable bytes are shown escaped. An empty last name (a trailing delimiter) is dropped."""
    data, names, at = np.frombuffer(bytearray(line), np.uint8), [], 0
    while True:
        start, stop, delimiter_at, _ = _next_field(data, at, len(data), dialect.quoting, dialect.delimiter, dialect.strip)
        name = data[start:stop].tobytes().decode(encoding, "backslashreplace")
        names.append(name.strip() if dialect.strip else name)
        if delimiter_at >= len(data):
            return tuple(names[:-1] if len(names) > 1 and not names[-1] else names)
        at = delimiter_at + len(dialect.delimiter)


@njit(cache=True, nogil=True)
def _quoted_field(data: U8, at: int, end: int) -> tuple[int, int]:
    """End of the text (compacted in place) of a quoted field whose text begins at ``at``, and the position after its closing quote."""
    write = at
    while at < end:
        if data[at] == QUOTE:
            if at + 1 < end and data[at + 1] == QUOTE:
                at += 1
            else:
                return write, at + 1
        data[write] = data[at]
        write += 1
        at += 1
    return write, end


@njit(cache=True, nogil=True)
def _to_delimiter(data: U8, at: int, end: int, delimiter: U8) -> int:
    first = delimiter[0]
    while at < end and not (data[at] == first and starts_with(data, at, end, delimiter)):
        at += 1
    return at


@njit(cache=True, nogil=True)
def _next_field(data: U8, at: int, end: int, quoted: bool, delimiter: U8, strip: bool) -> tuple[int, int, int, bool]:
    """(start, end, position of the delimiter or the record's end, whether text follows a closing quote) of the field at ``at``."""
    if not quoted:
        stop = _to_delimiter(data, at, end, delimiter)
        return at, stop, stop, False
    start = at
    while strip and start < end and is_blank(data[start]) and not starts_with(data, start, end, delimiter):
        start += 1
    if start >= end or data[start] != QUOTE:
        stop = _to_delimiter(data, at, end, delimiter)
        return at, stop, stop, False
    text_end, after = _quoted_field(data, start + 1, end)
    stop = _to_delimiter(data, after, end, delimiter)
    odd = False
    for i in range(after, stop):
        odd = odd or not (strip and is_blank(data[i]))
    return start + 1, text_end, stop, odd


@njit(cache=True, nogil=True)
def _split_fields(  # noqa: PLR0913
    data: U8,
    record_starts: I64,
    record_ends: I64,
    skip: npt.NDArray[np.bool_],
    quoted: bool,
    delimiter: U8,
    strip: bool,
    target: I64,
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    fields: I64,
    bad_quote: npt.NDArray[np.bool_],
) -> None:
    """Fill ``starts`` and ``ends`` [C, N] for fields whose ``target`` is a column, count ``fields``, mark ``bad_quote``."""
    for row in range(len(record_starts)):
        if skip[row]:
            continue
        at, end, field = record_starts[row], record_ends[row], 0
        while True:
            start, stop, delimiter_at, odd = _next_field(data, at, end, quoted, delimiter, strip)
            if odd:
                bad_quote[row] = True
            if field < len(target):
                place = target[field]
                if place >= 0:
                    starts[place, row], ends[place, row] = start, stop
            field += 1
            if delimiter_at >= end:
                break
            at = delimiter_at + len(delimiter)
        if field == len(target) + 1 and start == stop:
            field -= 1
        fields[row] = field
