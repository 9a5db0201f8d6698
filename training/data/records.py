"""From raw text to typed values: labels, times, numbers, ids and the split, with a dead letter for every record that does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.config import CategoricalFeature, Config, DenseFeature, LabelConfig
from training.data.dead_letters import DeadLetter, Faults
from training.data.numerals import NOT_FINITE, OK, parse_numbers
from training.data.raw import RawRecords
from training.data.spans import ListColumn, TextColumn, TextTable, clean, keep_present, split_lists
from training.data.splits import split_by_column, split_by_hash, split_by_time
from training.data.times import parse_times

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
FLOAT32_LIMIT = (2.0 - 2.0**-24) * 2.0**127
"""From here on a number rounds to infinity in float32."""


@dataclass(frozen=True)
class Records:
    """N well-formed records, in file order."""

    label: npt.NDArray[np.int8]
    time: I64 | None
    split: npt.NDArray[np.int8] | None
    """0 train, 1 valid, 2 test; None while the cut points of a split by time are not known."""
    numbers: dict[str, F64]
    """Dense features and bucketised slots by name; NaN is missing."""
    texts: dict[str, TextColumn]
    """Single-valued slots by name, bucketised ones left out."""
    lists: dict[str, ListColumn]
    """Multi-valued slots by name."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass
class RecordParser:
    """Turns raw records into typed ones after one configuration."""

    config: Config
    cut_points: list[int] | None = None
    """By time: first second of valid and of test, once known."""
    with_ids: bool = True
    """Whether the slots are wanted, or only what decides about faults, splits and statistics."""
    overflows: Callable[[str, F64], npt.NDArray[np.bool_]] | None = None
    """Once the transforms are known: which values of a dense feature they carry beyond float32, bool [N]."""
    _missing: TextTable = field(init=False)

    def __post_init__(self) -> None:
        self._missing = TextTable.of(self.config.data.missing_values)

    def parse(self, raw: RawRecords, file: str) -> tuple[Records, list[DeadLetter]]:
        """The well-formed records, and a dead letter for each of the others, both in file order."""
        faults = raw.faults
        rows = faults.good_rows()
        columns = _Columns(raw, rows, self._missing, strip=self.config.data.strip_whitespace)
        label = self._label(columns, faults)
        time = self._time(columns, faults)
        numbers = self._numbers(columns, faults)
        split = self._split(columns, time, faults)
        keep = faults.codes[rows] == 0
        texts: dict[str, TextColumn] = {}
        lists: dict[str, ListColumn] = {}
        if self.with_ids:
            texts = {f.name: columns.text(f.source).take(keep) for f in self._plain_slots() if not f.multi_valued}
            lists = {f.name: columns.list_(f).take(np.nonzero(keep)[0]) for f in self._plain_slots() if f.multi_valued}
        records = Records(
            label[keep],
            None if time is None else time[keep],
            None if split is None else split[keep],
            {name: values[keep] for name, values in numbers.items()},
            texts,
            lists,
        )
        letters = [DeadLetter(file, int(raw.lines[row]), reason, detail, raw.record(row)) for row, reason, detail in faults.found()]
        return records, letters

    def _plain_slots(self) -> list[CategoricalFeature]:
        return [feature for feature in self.config.schema_.categorical if feature.bucketise is None]

    def _label(self, columns: _Columns, faults: Faults) -> npt.NDArray[np.int8]:
        rule = self.config.schema_.label
        column = columns.text(rule.column)
        faults.add(columns.rows[column.missing], "label missing", lambda _: f"{rule.column}: no value")
        value, understood = parse_labels(column, rule)
        expected = "a number" if rule.threshold is not None else "0 or 1"
        faults.add(
            columns.rows[~understood], "label not understood", columns.detail(rule.column, lambda text: f"{text!r} is not {expected}")
        )
        return value

    def _time(self, columns: _Columns, faults: Faults) -> I64 | None:
        rule = self.config.schema_.time
        if rule is None:
            return None
        column = columns.text(rule.column)
        seconds, understood = parse_times(column, rule.format)
        faults.add(columns.rows[column.missing], "time missing", lambda _: f"{rule.column}: no value")
        faults.add(
            columns.rows[~understood], "time not understood", columns.detail(rule.column, lambda text: f"{text!r} is not {rule.format}")
        )
        return seconds

    def _numbers(self, columns: _Columns, faults: Faults) -> dict[str, F64]:
        schema = self.config.schema_
        sources = {f.name: f.source for f in schema.dense} | {f.name: f.source for f in schema.categorical if f.bucketise is not None}
        parsed: dict[str, F64] = {}
        for source in dict.fromkeys(sources.values()):
            values, verdicts = parse_numbers(columns.text(source))
            for verdict, reason in ((NOT_FINITE, "number not finite"), (None, "number not understood")):
                bad = verdicts == verdict if verdict is not None else verdicts != OK
                faults.add(columns.rows[bad], reason, columns.detail(source, lambda text: f"{text!r} is not a finite number"))  # type: ignore[arg-type]
            parsed[source] = values
        for feature in schema.dense:
            self._check_float32(feature, parsed[feature.source], columns, faults)
        return {name: parsed[source] for name, source in sources.items()}

    def _check_float32(self, feature: DenseFeature, values: F64, columns: _Columns, faults: Faults) -> None:
        """Shards hold dense features as float32: a value that is infinite there, before or after its transforms, is a fault."""

        def add(bad: npt.NDArray[np.bool_], where: str) -> None:
            detail = columns.detail(feature.source, lambda text: f"{text!r} is beyond the float32 range (3.4e38){where}")
            faults.add(columns.rows[bad], "number not finite", detail)

        with np.errstate(invalid="ignore"):
            beyond = np.abs(values) >= FLOAT32_LIMIT
        add(beyond, "")
        if self.overflows is not None:
            add(~beyond & self.overflows(feature.name, values), f" after {' and '.join(feature.transforms)}")

    def _split(self, columns: _Columns, time: I64 | None, faults: Faults) -> npt.NDArray[np.int8] | None:
        split = self.config.split
        if split.by == "column":
            assert split.column is not None
            return split_by_column(columns.raw, columns.rows, columns.text(split.column), split, faults)
        if split.by == "hash":
            whole = [part.take(columns.rows) for part in columns.raw.identity]
            return split_by_hash([columns.text(name) for name in split.key] or whole, split)
        if self.cut_points is None:
            return None
        assert time is not None
        return split_by_time(time, self.cut_points)


def parse_labels(column: TextColumn, rule: LabelConfig) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.bool_]]:
    """0 or 1 per record, int8 [N], and whether the text was understood, bool [N]. ``true`` and ``false`` stand for 1 and 0."""
    if rule.positive:
        return (column.index_in(TextTable.of(rule.positive)) >= 0).astype(np.int8), np.ones(len(column), np.bool_)
    values, verdicts = parse_numbers(column)
    words = column.index_in(TextTable.of(["true", "True", "TRUE", "false", "False", "FALSE"]))
    values = np.where(words >= 0, (words < 3).astype(np.float64), values)
    understood = (verdicts == OK) | (words >= 0)
    if rule.threshold is not None:
        with np.errstate(invalid="ignore"):
            return (values >= rule.threshold).astype(np.int8), understood
    return (values == 1.0).astype(np.int8), understood & ((values == 0.0) | (values == 1.0))


class _Columns:
    """Cleaned columns of the structurally sound rows (``rows``: their numbers among the raw records), each made once."""

    def __init__(self, raw: RawRecords, rows: I64, missing: TextTable, *, strip: bool) -> None:
        self.raw, self.rows, self.missing, self.strip = raw, rows, missing, strip
        self._texts: dict[str, TextColumn] = {}

    def text(self, name: str) -> TextColumn:
        if name not in self._texts:
            column = self.raw.scalars[name]
            self._texts[name] = clean(column.data, column.starts[self.rows], column.ends[self.rows], strip=self.strip, missing=self.missing)
        return self._texts[name]

    def list_(self, feature: CategoricalFeature) -> ListColumn:
        """The values of a multi-valued slot: lists of the file, or text cut at the separator; missing values are no ids."""
        assert feature.separator is not None
        if feature.source in self.raw.lists:
            column = self.raw.lists[feature.source]
            values = clean(column.data, column.starts, column.ends, strip=self.strip, missing=self.missing)
            lists = keep_present(column.offsets, values).take(self.rows)
            if feature.source not in self.raw.scalars:
                return lists
            return merge_lists(lists, self._cut(feature))
        return self._cut(feature)

    def _cut(self, feature: CategoricalFeature) -> ListColumn:
        assert feature.separator is not None
        text = self.text(feature.source)
        offsets, starts, ends = split_lists(text, feature.separator)
        return keep_present(offsets, clean(text.data, starts, ends, strip=self.strip, missing=self.missing))

    def detail(self, name: str, say: Callable[[str], str]) -> Callable[[int], str]:
        """A fault's detail from the text of column ``name`` in a raw row."""
        return lambda row: f"{name}: {say(self.text(name).text(int(np.searchsorted(self.rows, row))))}"


def merge_lists(left: ListColumn, right: ListColumn) -> ListColumn:
    """Per record the values of ``left`` followed by those of ``right``; both must share one buffer."""
    if len(right.values) == 0:
        return left
    if len(left.values) == 0:
        return right
    count = len(left)
    lengths = np.stack([np.diff(left.offsets), np.diff(right.offsets)], axis=1)
    offsets = np.zeros(count + 1, np.int64)
    np.cumsum(lengths.sum(axis=1), out=offsets[1:])
    place_left = np.repeat(offsets[:-1] - left.offsets[:-1], lengths[:, 0]) + np.arange(len(left.values))
    place_right = np.repeat(offsets[:-1] + lengths[:, 0] - right.offsets[:-1], lengths[:, 1]) + np.arange(len(right.values))
    starts, ends = np.empty(offsets[-1], np.int64), np.empty(offsets[-1], np.int64)
    starts[place_left], ends[place_left] = left.values.starts, left.values.ends
    starts[place_right], ends[place_right] = right.values.starts, right.values.ends
    return ListColumn(offsets, TextColumn(left.values.data, starts, ends, np.zeros(len(starts), np.bool_)))
