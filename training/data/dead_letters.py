"""Malformed records: why they were refused, and where they are kept. A record never vanishes."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

Reason = Literal[
    "undecodable",
    "unterminated quote",
    "text after quote",
    "field count",
    "bad json",
    "nested value",
    "label missing",
    "label not understood",
    "time missing",
    "time not understood",
    "number not understood",
    "number not finite",
    "unknown split",
]
"""Why a record is malformed. The first reason found, in about this order, is the one given."""
REASONS: tuple[Reason, ...] = get_args(Reason)
_CODES = {reason: code for code, reason in enumerate(REASONS, start=1)}


class Faults:
    """What is wrong with each of N records: at most one reason, and its details."""

    def __init__(self, count: int) -> None:
        self.codes: npt.NDArray[np.int8] = np.zeros(count, np.int8)
        """0: nothing; else 1 + index into ``REASONS``."""
        self._details: dict[int, str] = {}

    def add(self, rows: npt.NDArray[np.int64], reason: Reason, detail: Callable[[int], str]) -> None:
        """Mark records that have no fault yet. ``detail(row)`` says what was found there."""
        for row in rows[self.codes[rows] == 0].tolist():
            self.codes[row] = _CODES[reason]
            self._details[row] = detail(row)

    def good_rows(self) -> npt.NDArray[np.int64]:
        """Records without a fault, ascending."""
        return np.nonzero(self.codes == 0)[0]

    def found(self) -> list[tuple[int, Reason, str]]:
        """(record, reason, detail) of every fault, in record order."""
        return [(row, REASONS[self.codes[row] - 1], self._details[row]) for row in np.nonzero(self.codes)[0].tolist()]


@dataclass(frozen=True)
class DeadLetter:
    """One malformed record."""

    file: str
    line: int
    """Line of the file on which the record begins, from 1; of a Parquet file the number of the row."""
    reason: Reason
    detail: str
    record: bytes
    """As it stands in the file, without the line end; of a Parquet file as JSON."""

    def to_json(self) -> str:
        """One line of JSON. Bytes that are not UTF-8 are shown escaped, and exactly under ``record_base64``."""
        fields = {"file": self.file, "line": self.line, "reason": self.reason, "detail": self.detail}
        try:
            fields["record"] = self.record.decode()
        except UnicodeDecodeError:
            fields["record"] = self.record.decode("utf-8", "backslashreplace")
            fields["record_base64"] = base64.b64encode(self.record).decode()
        return json.dumps(fields, ensure_ascii=False)


def write_dead_letters(path: Path, letters: Iterable[DeadLetter]) -> Counter[str]:
    """Write a JSON-lines file (none without letters) and return the counts by reason."""
    counts: Counter[str] = Counter()
    lines = []
    for letter in letters:
        counts[letter.reason] += 1
        lines.append(letter.to_json() + "\n")
    if lines:
        path.write_text("".join(lines), encoding="utf-8", newline="\n")
    return counts
