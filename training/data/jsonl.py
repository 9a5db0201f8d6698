"""JSON lines: one object per line, from bytes to spans of the wanted top-level keys, without a Python object per record.

Numbers keep their text, so an id of 20 digits stays exact. A string without escapes is a span of the line; one with escapes is
decoded and appended to the buffer. Objects are passed over unless wanted; lists of plain values feed multi-valued slots.
If a key occurs twice the last value counts.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.dead_letters import Faults
from training.data.delimited import _decode_error, undecodable
from training.data.lines import LINES, QUOTE, find_records
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


def parse_jsonl(data: U8, *, piece: int, first_line: int, wanted: Wanted) -> RawRecords:
    """Parse whole lines in UTF-8. Lines that are no JSON object are faults."""
    bounds = find_records(data, LINES, first_line)
    count, columns = len(bounds.starts), wanted.columns
    faults = Faults(count)

    def record(row: int) -> bytes:
        return data[bounds.starts[row] : bounds.ends[row]].tobytes()

    faults.add(undecodable(data, bounds.starts, bounds.ends), "undecodable", lambda row: _decode_error(record(row)))
    names = TextTable.of(columns)
    shape = (len(columns), count)
    kinds, starts, ends = np.zeros(shape, np.int8), np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    verdicts = _parse_objects(data, bounds.starts, bounds.ends, names.data, names.offsets, kinds, starts, ends)
    _redo_escaped_keys(record, np.nonzero(verdicts == 2)[0], verdicts)
    faults.add(np.nonzero(verdicts == 1)[0], "bad json", lambda row: _json_error(record(row)))
    redone = [row for row in np.nonzero(verdicts == 2)[0].tolist() if faults.codes[row] == 0]
    text = _Appendix(data)
    for row in redone:
        _place_object(json.loads(record(row)), columns, row, text, kinds, starts, ends)
    return _assemble(piece, bounds.lines, text, kinds, starts, ends, faults=faults, record=record, whole=RawColumn(data, bounds.starts, bounds.ends), wanted=wanted)
