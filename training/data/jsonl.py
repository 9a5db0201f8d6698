"""JSON lines: one object per line, from bytes to spans of the wanted top-level keys, without a Python object per record.

Numbers keep their text, so an id of 20 digits stays exact. A string without escapes is a span of the line; one with escapes is
decoded and appended to the buffer. Values of other keys are checked and passed over; lists of plain values feed multi-valued slots.
Of a key that occurs twice the last value counts. Keys are matched as written and in the escaped forms writers use. NaN and
Infinity, which RFC 8259 has not but Python writes, are read as plain values.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.dead_letters import Faults
from training.data.lines import LINES, QUOTE, decode_error, find_records, undecodable
from training.data.raw import RawColumn, RawList, RawRecords, Wanted
from training.data.spans import TextTable, find_text

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
I8 = npt.NDArray[np.int8]

_ABSENT, _NULL, _STRING, _ESCAPED, _PLAIN, _LIST, _OBJECT = 0, 1, 2, 3, 4, 5, 6
"""Kinds of values. ``_PLAIN``: a number, true or false, whose text is its span."""
_MAX_DEPTH = 64
_COMMA, _COLON, _BACKSLASH = 44, 58, 92
_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST = 123, 125, 91, 93
_VALUE, _FIRST_VALUE, _KEY, _FIRST_KEY, _AFTER = 0, 1, 2, 3, 4
"""What may come next inside a container."""


def parse_jsonl(data: U8, *, piece: int, first_line: int, wanted: Wanted) -> RawRecords:
    """Parse whole lines in UTF-8. Lines that are no JSON object, and nested values where plain ones are wanted, are faults."""
    bounds = find_records(data, LINES, first_line)
    columns, faults = wanted.columns, Faults(len(bounds.starts))

    def record(row: int) -> bytes:
        return data[bounds.starts[row] : bounds.ends[row]].tobytes()

    faults.add(undecodable(data, bounds.starts, bounds.ends), "undecodable", lambda row: decode_error(record(row)))
    table, owner = _key_table(columns)
    shape = (len(columns), len(bounds.starts))
    kinds, starts, ends = np.zeros(shape, np.int8), np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    bad = _parse_objects(data, bounds.starts, bounds.ends, table.data, table.offsets, owner, kinds, starts, ends)
    faults.add(np.nonzero(bad)[0], "bad json", lambda row: _json_error(record(row)))
    kinds[:, faults.codes != 0] = _ABSENT
    text = _Unescaped(data, faults)
    items = {name: _Items.of(data, kinds[place], starts[place], ends[place]) for place, name in enumerate(columns) if name in wanted.lists}
    for place, name in enumerate(columns):
        _refuse_nested(kinds[place], name, allow_lists=name not in wanted.scalars, faults=faults)
        text.decode(kinds[place], starts[place], ends[place], np.arange(shape[1]))
    for name, item in items.items():
        _refuse_nested_items(item, name, faults)
        text.decode(item.kinds, item.starts, item.ends, item.owners())
    starts[(kinds == _ABSENT) | (kinds == _NULL) | (kinds == _LIST) | (kinds == _OBJECT)] = -1
    buffer = text.buffer()
    scalars = {name: RawColumn(buffer, starts[place], ends[place]) for place, name in enumerate(columns)}
    lists = {name: RawList(buffer, item.offsets, item.starts, item.ends) for name, item in items.items()}
    present = frozenset(name for place, name in enumerate(columns) if (kinds[place] != _ABSENT).any())
    return RawRecords(piece, bounds.lines, scalars, lists, faults, record, (RawColumn(data, bounds.starts, bounds.ends),), present)


class _Items:
    """The values of the lists of one column: record i has ``offsets[i]`` to ``offsets[i+1]``."""

    def __init__(self, offsets: I64, kinds: I8, starts: I64, ends: I64) -> None:
        self.offsets, self.kinds, self.starts, self.ends = offsets, kinds, starts, ends

    @classmethod
    def of(cls, data: U8, kinds: I8, starts: I64, ends: I64) -> _Items:
        offsets = np.zeros(len(kinds) + 1, np.int64)
        np.cumsum(_count_items(data, kinds, starts, ends), out=offsets[1:])
        return cls(offsets, *_cut_items(data, kinds, starts, ends, offsets))

    def owners(self) -> I64:
        """The record of every value."""
        return np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))


class _Unescaped:
    """The lines, and behind them the decoded texts of strings with escapes."""

    def __init__(self, data: U8, faults: Faults) -> None:
        self._data, self._faults = data, faults
        self._texts: list[bytes] = []
        self._size = len(data)

    def decode(self, kinds: I8, starts: I64, ends: I64, owners: I64) -> None:
        """Point the spans of escaped strings to decoded text. A half surrogate pair is no text: a fault of the owning record."""
        for place in np.nonzero(kinds == _ESCAPED)[0].tolist():
            raw = self._data[starts[place] : ends[place]].tobytes()
            try:
                text = str(json.loads(b'"' + raw + b'"')).encode()
            except UnicodeEncodeError:
                self._faults.add(owners[place : place + 1], "bad json", lambda _, raw=raw: f"half a surrogate pair in {raw!r}")  # type: ignore[misc]
                text = b""
            starts[place], ends[place] = self._size, self._size + len(text)
            self._texts.append(text)
            self._size += len(text)

    def buffer(self) -> U8:
        """All bytes that spans point to."""
        if not self._texts:
            return self._data
        return np.concatenate([self._data, np.frombuffer(b"".join(self._texts), np.uint8)])


def _key_table(columns: Sequence[str]) -> tuple[TextTable, I64]:
    """The spellings of all keys, and the column of each spelling."""
    spellings: dict[str, int] = {}
    for place, name in enumerate(columns):
        for spelling in _spellings(name):
            spellings.setdefault(spelling, place)
    return TextTable.of(list(spellings)), np.array(list(spellings.values()), np.int64)


def _spellings(name: str) -> Iterator[str]:
    for ascii_only in (False, True):
        escaped = json.dumps(name, ensure_ascii=ascii_only)[1:-1]
        for form in (escaped, _upper_hex(escaped)):
            yield form
            yield form.replace("/", "\\/")


def _upper_hex(text: str) -> str:
    head, *rest = text.split("\\u")
    return head + "".join("\\u" + part[:4].upper() + part[4:] for part in rest)


def _json_error(record: bytes) -> str:
    try:
        value = json.loads(record)
    except (json.JSONDecodeError, RecursionError) as error:
        return f"not JSON: {error}"
    return "not a JSON object" if not isinstance(value, dict) else f"nested deeper than {_MAX_DEPTH}"


def _refuse_nested(kinds: I8, name: str, *, allow_lists: bool, faults: Faults) -> None:
    nested = (kinds == _OBJECT) if allow_lists else (kinds >= _LIST)
    faults.add(
        np.nonzero(nested)[0],
        "nested value",
        lambda row: f"{name}: is {'a list' if kinds[row] == _LIST else 'an object'}, not a plain value",
    )


def _refuse_nested_items(items: _Items, name: str, faults: Faults) -> None:
    nested = np.unique(items.owners()[items.kinds >= _LIST])
    faults.add(nested, "nested value", lambda _: f"{name}: its list holds lists or objects, not plain values")
    items.starts[(items.kinds == _NULL) | (items.kinds >= _LIST)] = -1


@njit(cache=True, nogil=True)
def _skip_blanks(data: U8, at: int, end: int) -> int:
    while at < end and (data[at] == 32 or data[at] == 9 or data[at] == 10 or data[at] == 13):
        at += 1
    return at


@njit(cache=True, nogil=True)
def _is_hex(byte: int) -> bool:
    return 48 <= byte <= 57 or 65 <= byte <= 70 or 97 <= byte <= 102


@njit(cache=True, nogil=True)
def _escape_end(data: U8, at: int, end: int) -> int:
    """Position after the escape whose backslash is at ``at``, or -1."""
    if at + 1 >= end:
        return -1
    byte = data[at + 1]
    if byte == 117:
        if at + 6 > end:
            return -1
        for i in range(at + 2, at + 6):
            if not _is_hex(data[i]):
                return -1
        return at + 6
    known = byte == 34 or byte == 92 or byte == 47 or byte == 98 or byte == 102 or byte == 110 or byte == 114 or byte == 116
    return at + 2 if known else -1


@njit(cache=True, nogil=True)
def _string_end(data: U8, at: int, end: int) -> tuple[int, bool]:
    """Position of the closing quote of a string whose text begins at ``at``, or -1, and whether it has escapes."""
    escaped = False
    while at < end:
        byte = data[at]
        if byte == QUOTE:
            return at, escaped
        if byte < 32:
            return -1, escaped
        if byte == _BACKSLASH:
            escaped = True
            at = _escape_end(data, at, end)
            if at < 0:
                return -1, escaped
        else:
            at += 1
    return -1, escaped


@njit(cache=True, nogil=True)
def _skip_digits(data: U8, at: int, end: int) -> int:
    while at < end and 48 <= data[at] <= 57:
        at += 1
    return at


@njit(cache=True, nogil=True)
def _number_end(data: U8, at: int, end: int) -> int:
    """Position after a number by the grammar of RFC 8259, or -1."""
    if data[at] == 45:
        at += 1
    first = at
    at = _skip_digits(data, at, end)
    if at == first or (data[first] == 48 and at > first + 1):
        return -1
    if at < end and data[at] == 46:
        point = at + 1
        at = _skip_digits(data, point, end)
        if at == point:
            return -1
    if at < end and (data[at] == 101 or data[at] == 69):
        at += 1
        if at < end and (data[at] == 43 or data[at] == 45):
            at += 1
        digits = at
        at = _skip_digits(data, digits, end)
        if at == digits:
            return -1
    return at


_WORDS = TextTable.of(["null", "true", "false", "NaN", "Infinity", "-Infinity"])
_WORD_TEXT, _WORD_OFFSETS = _WORDS.data, _WORDS.offsets


@njit(cache=True, nogil=True)
def _word_at(data: U8, at: int, end: int) -> tuple[int, int]:
    """(index of the word of ``_WORDS`` that stands at ``at``, its length), or (-1, 0)."""
    for word in range(len(_WORD_OFFSETS) - 1):
        length = _WORD_OFFSETS[word + 1] - _WORD_OFFSETS[word]
        if at + length <= end and find_text(data, at, at + length, _WORD_TEXT, _WORD_OFFSETS) == word:
            return word, length
    return -1, 0


@njit(cache=True, nogil=True)
def _scan_plain(data: U8, at: int, end: int) -> tuple[int, int, int, int]:
    """(kind, start, end, position after) of the value at ``at`` that is no container; position -1 if it is none."""
    byte = data[at]
    if byte == QUOTE:
        close, escaped = _string_end(data, at + 1, end)
        if close < 0:
            return _STRING, at, at, -1
        return _ESCAPED if escaped else _STRING, at + 1, close, close + 1
    word, length = _word_at(data, at, end) if byte >= 65 or (byte == 45 and at + 1 < end and data[at + 1] == 73) else (-1, 0)
    if word >= 0:
        return _NULL if word == 0 else _PLAIN, at, at + length, at + length
    stop = _number_end(data, at, end)
    return _PLAIN, at, stop, stop


@njit(cache=True, nogil=True)
def _after_key(data: U8, at: int, end: int) -> int:
    """Position after the colon of the key whose quote is at ``at``, or -1."""
    close, _ = _string_end(data, at + 1, end)
    if close < 0:
        return -1
    at = _skip_blanks(data, close + 1, end)
    return at + 1 if at < end and data[at] == _COLON else -1


@njit(cache=True, nogil=True)
def _container_end(data: U8, at: int, end: int) -> int:  # noqa: C901 - one state machine
    """Position after the list or object at ``at``, or -1 if it is malformed or too deep."""
    objects, depth, state = np.uint64(0), 0, _VALUE
    while True:
        at = _skip_blanks(data, at, end)
        if at >= end:
            return -1
        byte = data[at]
        closing = False
        if state in (_VALUE, _FIRST_VALUE):
            if byte in (_OPEN_LIST, _OPEN_OBJECT):
                if depth == _MAX_DEPTH:
                    return -1
                is_object = byte == _OPEN_OBJECT
                objects = (objects << np.uint64(1)) | np.uint64(is_object)
                depth += 1
                state = _FIRST_KEY if is_object else _FIRST_VALUE
                at += 1
            elif state == _FIRST_VALUE and byte == _CLOSE_LIST:
                closing = True
            else:
                at = _scan_plain(data, at, end)[3]
                state = _AFTER
        elif state == _AFTER:
            in_object = (objects & np.uint64(1)) == np.uint64(1)
            if byte == _COMMA:
                state = _KEY if in_object else _VALUE
                at += 1
            elif byte == (_CLOSE_OBJECT if in_object else _CLOSE_LIST):
                closing = True
            else:
                return -1
        elif byte == QUOTE:
            at = _after_key(data, at, end)
            state = _VALUE
        elif state == _FIRST_KEY and byte == _CLOSE_OBJECT:
            closing = True
        else:
            return -1
        if at < 0:
            return -1
        if closing:
            at += 1
            depth -= 1
            if depth == 0:
                return at
            objects >>= np.uint64(1)
            state = _AFTER


@njit(cache=True, nogil=True)
def _scan_value(data: U8, at: int, end: int) -> tuple[int, int, int, int]:
    """(kind, start, end, position after) of any value; position -1 if there is none."""
    at = _skip_blanks(data, at, end)
    if at >= end:
        return _NULL, at, at, -1
    byte = data[at]
    if byte in (_OPEN_LIST, _OPEN_OBJECT):
        stop = _container_end(data, at, end)
        return _LIST if byte == _OPEN_LIST else _OBJECT, at, stop, stop
    return _scan_plain(data, at, end)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _parse_object(
    data: U8,
    at: int,
    end: int,
    row: int,
    keys: tuple[U8, I64, I64],
    out: tuple[npt.NDArray[np.int8], npt.NDArray[np.int64], npt.NDArray[np.int64]],
) -> bool:
    """Fill column ``row`` of ``out`` from the object in ``data[at:end]``; whether it is well formed."""
    texts, offsets, owner = keys
    kinds, starts, ends = out
    at = _skip_blanks(data, at, end)
    if at >= end or data[at] != _OPEN_OBJECT:
        return False
    at = _skip_blanks(data, at + 1, end)
    first = True
    while at < end:
        if first and data[at] == _CLOSE_OBJECT:
            return bool(_skip_blanks(data, at + 1, end) == end)
        if data[at] != QUOTE:
            return False
        first = False
        key_start, key_end = at + 1, _string_end(data, at + 1, end)[0]
        at = _after_key(data, at, end)
        if at < 0:
            return False
        kind, start, stop, at = _scan_value(data, at, end)
        if at < 0:
            return False
        spelling = find_text(data, key_start, key_end, texts, offsets)
        if spelling >= 0:
            place = owner[spelling]
            kinds[place, row], starts[place, row], ends[place, row] = kind, start, stop
        at = _skip_blanks(data, at, end)
        if at < end and data[at] == _CLOSE_OBJECT:
            return bool(_skip_blanks(data, at + 1, end) == end)
        if at >= end or data[at] != _COMMA:
            return False
        at = _skip_blanks(data, at + 1, end)
    return False


@njit(cache=True, nogil=True)
def _parse_objects(  # noqa: PLR0913
    data: U8,
    record_starts: I64,
    record_ends: I64,
    texts: U8,
    offsets: I64,
    owner: I64,
    kinds: npt.NDArray[np.int8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
) -> npt.NDArray[np.bool_]:
    """Fill ``kinds``, ``starts``, ``ends`` [C, N]; returns which records are malformed, bool [N]."""
    bad = np.zeros(len(record_starts), np.bool_)
    for row in range(len(record_starts)):
        bad[row] = not _parse_object(data, record_starts[row], record_ends[row], row, (texts, offsets, owner), (kinds, starts, ends))
    return bad


@njit(cache=True, nogil=True)
def _count_items(data: U8, kinds: I8, starts: I64, ends: I64) -> I64:
    out = np.zeros(len(kinds), np.int64)
    for row in range(len(kinds)):
        if kinds[row] != _LIST:
            continue
        at, end = _skip_blanks(data, starts[row] + 1, ends[row]), ends[row]
        while data[at] != _CLOSE_LIST:
            out[row] += 1
            at = _skip_blanks(data, _scan_value(data, at, end)[3], end)
            if data[at] == _COMMA:
                at = _skip_blanks(data, at + 1, end)
    return out


@njit(cache=True, nogil=True)
def _cut_items(data: U8, kinds: I8, starts: I64, ends: I64, offsets: I64) -> tuple[I8, I64, I64]:
    total = offsets[-1]
    out_kinds, out_starts, out_ends = np.zeros(total, np.int8), np.zeros(total, np.int64), np.zeros(total, np.int64)
    for row in range(len(kinds)):
        if kinds[row] != _LIST:
            continue
        at, end = starts[row] + 1, ends[row]
        for item in range(offsets[row], offsets[row + 1]):
            kind, start, stop, at = _scan_value(data, at, end)
            out_kinds[item], out_starts[item], out_ends[item] = kind, start, stop
            at = _skip_blanks(data, at, end) + 1
    return out_kinds, out_starts, out_ends
