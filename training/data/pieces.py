"""The transform pass over one piece of input: typed records become shard columns, spilled per split, with statistics.

Spilled pieces are shards of their own, in time order if there is a time. ``training.data.assembly`` makes the final shards of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from training.config import SPLITS, CategoricalFeature, Config
from training.data.dead_letters import DeadLetter, write_dead_letters
from training.data.records import Records
from training.data.shards import Bag, ShardColumns, write_shard
from training.data.spans import TextColumn
from training.data.stats import DensePart, IdCounts, SlotPart, write_counts
from training.data.transforms import Fitted, apply_dense, bucket_indices, bucket_texts, slot_bag, slot_signs

Key = tuple[int, int, int]


@dataclass(frozen=True)
class PieceReport:
    """What the transform pass says about one piece."""

    key: Key
    """Its place: file, chunk, piece."""
    rows: tuple[int, ...]
    """Per split."""
    positives: tuple[int, ...]
    dense: list[dict[str, DensePart]]
    """Per split and feature."""
    slots: list[dict[str, SlotPart]]
    """Per split and slot."""
    dead: Counter[str]
    present: frozenset[str]
    """Wanted columns that occur."""
    times: list[tuple[int, int]]
    """Per split: first and last event time; (0, -1) without records."""


@dataclass(frozen=True)
class WorkFolder:
    """Paths of an unfinished data directory."""

    root: Path

    def prepare(self) -> None:
        """Create the folders."""
        for folder in ("work/pieces", "work/counts", "dead", "ids", *SPLITS):
            (self.root / folder).mkdir(parents=True, exist_ok=True)

    def piece(self, key: Key, split: int) -> Path:
        """Spilled records of one piece and split."""
        return self.root / "work" / "pieces" / f"{_name(key)}-{split}.arrow"

    def counts(self, key: Key) -> Path:
        """Id counts of one piece: a batch per split and slot."""
        return self.root / "work" / "counts" / f"{_name(key)}.arrow"

    def dead(self, key: Key) -> Path:
        """Dead letters of one piece."""
        return self.root / "dead" / f"part-{_name(key)}.jsonl"

    def progress(self) -> Path:
        """File to which every finished chunk appends its bytes."""
        return self.root / "work" / "progress"

    def failure(self) -> Path:
        """The error that ended the pipeline."""
        return self.root / "work" / "failure.json"


def transform_piece(
    records: Records,
    letters: Sequence[DeadLetter],
    key: Key,
    *,
    config: Config,
    fitted: Fitted,
    present: frozenset[str],
    folder: WorkFolder,
) -> PieceReport:
    """Write what one piece contributes and return its report. Doing it twice gives the same files."""
    assert records.split is not None
    features = config.schema_.categorical
    made = [_Slot.of(records, feature, place, fitted) for place, feature in enumerate(features)]
    columns = _shard_columns(records, made, config, fitted)
    counts: list[IdCounts] = []
    rows, positives, dense, slots, times = [], [], [], [], []
    for split in range(len(SPLITS)):
        chosen = np.nonzero(records.split == split)[0]
        if records.time is not None:
            chosen = chosen[np.argsort(records.time[chosen], kind="stable")]
        if len(chosen):
            write_shard(folder.piece(key, split), columns.take(chosen))
        rows.append(len(chosen))
        positives.append(int(records.label[chosen].sum()))
        dense.append({f.name: DensePart.of(records.numbers[f.name][chosen]) for f in config.schema_.dense})
        slots.append({slot.feature.name: slot.part(chosen) for slot in made})
        counts.extend(slot.count(chosen) for slot in made)
        times.append((int(records.time[chosen[0]]), int(records.time[chosen[-1]])) if records.time is not None and len(chosen) else (0, -1))
    write_counts(folder.counts(key), counts)
    dead = write_dead_letters(folder.dead(key), letters)
    return PieceReport(key, tuple(rows), tuple(positives), dense, slots, dead, present, times)


@dataclass(frozen=True)
class _Slot:
    """One slot of N records."""

    feature: CategoricalFeature
    bag: Bag
    """Single-valued slots have one id per record."""
    texts: TextColumn | pa.Array
    """Of every id."""
    missing: np.ndarray[tuple[int], np.dtype[np.bool_]]
    dropped: np.ndarray[tuple[int], np.dtype[np.int64]]

    @classmethod
    def of(cls, records: Records, feature: CategoricalFeature, place: int, fitted: Fitted) -> _Slot:
        transform = fitted.slots[place]
        if feature.multi_valued:
            bag, kept, lost = slot_bag(records, feature, transform)
            return cls(feature, bag, kept.values, np.diff(bag.offsets) == 0, lost)
        signs = slot_signs(records, feature, transform)
        bag = Bag(np.arange(len(records) + 1, dtype=np.int64), signs)
        nothing = np.zeros(len(records), np.int64)
        if transform.boundaries is None:
            column = records.texts[feature.name]
            return cls(feature, bag, column, column.missing, nothing)
        numbers = records.numbers[feature.name]
        texts = pa.array(bucket_texts(transform.boundaries)).take(pa.array(bucket_indices(numbers, transform.boundaries)))
        return cls(feature, bag, texts, np.isnan(numbers), nothing)

    def part(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> SlotPart:
        return SlotPart(len(rows), int(self.missing[rows].sum()), int(self.dropped[rows].sum()))

    def count(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> IdCounts:
        if not self.feature.multi_valued:
            texts = self.texts.take(rows) if isinstance(self.texts, TextColumn) else self.texts.take(pa.array(rows))
            return IdCounts.of(self.bag.values[rows], texts)
        wanted = np.zeros(len(self.missing), np.bool_)
        wanted[rows] = True
        ids = np.repeat(wanted, np.diff(self.bag.offsets))
        assert isinstance(self.texts, TextColumn)
        return IdCounts.of(self.bag.values[ids], self.texts.take(ids))

    def arrow_texts(self) -> pa.Array:
        return self.texts.to_arrow() if isinstance(self.texts, TextColumn) else self.texts


def _shard_columns(records: Records, made: Sequence[_Slot], config: Config, fitted: Fitted) -> ShardColumns:
    single = [slot.bag.values for slot in made if not slot.feature.multi_valued]
    signs = np.stack(single, axis=1) if single else np.empty((len(records), 0), np.uint64)
    bags = {slot.feature.name: slot.bag for slot in made if slot.feature.multi_valued}
    slices = {slot.feature.name: slot.arrow_texts() for slot in made if slot.feature.name in config.evaluation.slices}
    return ShardColumns(records.label, records.time, apply_dense(records, fitted), signs, bags, slices)


def _name(key: Key) -> str:
    file, chunk, piece = key
    return f"{file:05d}-{chunk:05d}-{piece:05d}"
