"""From spilled pieces to the finished data directory: full shards in order, merged statistics, the manifest.

Without a time the records of a split keep the order of the input. With one they are in time order, ties in input order. Pieces
are sorted already, so a shard, the records of ranks k * 65,536 and following, is a short run of each piece. The runs are found by
bisection on the event time over all pieces at once, and only those records are read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.config import SPLITS, Config, SplitName
from training.data.manifest import (
    FORMAT_VERSION,
    Manifest,
    ShardEntry,
    SlotStatistics,
    SourceEntry,
    SplitStatistics,
)
from training.data.pieces import PieceReport, WorkFolder
from training.data.shards import SHARD_ROWS, ShardColumns, open_shard, write_shard
from training.data.splits import TRAIN
from training.data.stats import IdCounts, merge_dense, merge_slot, read_counts
from training.data.transforms import Fitted
from training.errors import DataError, DeadLetterError, SourceError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ShardTask:
    """One shard to be written: the records of ranks ``first`` to ``last`` of a split."""

    split: int
    index: int
    first: int
    last: int
    runs: tuple[tuple[tuple[int, int, int], int, int], ...]
    """(piece, first, last): the records of each piece, in the order of the input."""


@dataclass(frozen=True)
class SlotTask:
    """One slot whose ids are to be counted."""

    place: int
    pieces: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class SlotResult:
    """Statistics of one slot, per split."""

    place: int
    statistics: list[SlotStatistics]


def check_reports(reports: Sequence[PieceReport], config: Config, wanted: Sequence[str], dead_folder: str) -> None:
    """Refuse input that is no use: raises ``SourceError``, ``DeadLetterError`` or ``DataError``."""
    present = frozenset().union(*(report.present for report in reports))
    if lacking := [name for name in wanted if name not in present]:
        listed = ", ".join(map(repr, sorted(present))) or "none"
        raise SourceError(f"data.paths: no record has a column {', '.join(map(repr, lacking))}; columns found of those asked for: {listed}")
    dead: Counter[str] = sum((report.dead for report in reports), Counter())
    good, bad = sum(sum(report.rows) for report in reports), sum(dead.values())
    if bad and bad > config.data.max_dead_fraction * (good + bad):
        reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(dead.items(), key=lambda item: (-item[1], item[0]))[:5])
        raise DeadLetterError(
            f"{bad} of {good + bad} records ({bad / (good + bad):.2%}) are malformed, more than data.max_dead_fraction "
            f"{config.data.max_dead_fraction:g}: {reasons}; "
            f"they are in {dead_folder}; repair the input, correct data or schema, or raise the limit"
        )
    if not good:
        raise SourceError("data.paths: no records")
    if not sum(report.rows[TRAIN] for report in reports):
        raise DataError(f"split: none of {good} records is in the train split; check split.by {config.split.by} and its settings")


def plan_tasks(reports: Sequence[PieceReport], config: Config, folder: WorkFolder) -> list[ShardTask | SlotTask]:
    """All that remains to be written."""
    tasks: list[ShardTask | SlotTask] = []
    keys = tuple(report.key for report in reports)
    tasks += [SlotTask(place, keys) for place in range(len(config.schema_.categorical))]
    for split in range(len(SPLITS)):
        pieces = [(report.key, report.rows[split]) for report in reports if report.rows[split]]
        if pieces:
            cuts = _time_cuts(pieces, split, folder) if config.schema_.time else _order_cuts([rows for _, rows in pieces])
            tasks += _shard_tasks(split, [key for key, _ in pieces], cuts)
    return tasks


def write_final_shard(task: ShardTask, folder: WorkFolder) -> ShardEntry:
    """Gather the records of a shard and write it."""
    columns = ShardColumns.concatenate([open_shard(folder.piece(key, task.split)).slice(a, b) for key, a, b in task.runs])
    first_time = last_time = None
    if columns.time is not None:
        columns = columns.take(np.argsort(columns.time, kind="stable"))
        assert columns.time is not None
        first_time, last_time = int(columns.time[0]), int(columns.time[-1])
    split: SplitName = SPLITS[task.split]
    name = f"{split}/part-{task.index:05d}.arrow"
    path = folder.root / name
    digest = write_shard(path, columns)
    return ShardEntry(
        file=name, split=split, rows=len(columns), bytes=path.stat().st_size, digest=digest, first_time=first_time, last_time=last_time
    )


def count_slot(task: SlotTask, reports: Sequence[PieceReport], config: Config, folder: WorkFolder) -> SlotResult:
    """Merge a slot's id counts of all pieces and write the train split's distinct signs to ``ids/``."""
    features = config.schema_.categorical
    name = features[task.place].name
    statistics: list[SlotStatistics] = []
    train_signs: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
    for split in range(len(SPLITS)):
        place = split * len(features) + task.place
        ids = IdCounts.merged([read_counts(folder.counts(key), place) for key in task.pieces])
        if split == TRAIN:
            train_signs = ids.signs
            np.save(folder.root / "ids" / f"{name}.npy", train_signs)
        statistics.append(merge_slot([report.slots[split][name] for report in reports], ids, train_signs))
    return SlotResult(task.place, statistics)


def build_manifest(
    config: Config,
    fitted: Fitted,
    reports: Sequence[PieceReport],
    results: Sequence[ShardEntry | SlotResult],
    *,
    sources: list[SourceEntry],
    key: str,
) -> Manifest:
    """The manifest of a finished directory. ``reports`` come in input order."""
    shards = sorted((r for r in results if isinstance(r, ShardEntry)), key=lambda entry: (SPLITS.index(entry.split), entry.file))
    counted = sorted((r for r in results if isinstance(r, SlotResult)), key=lambda result: result.place)
    splits: dict[SplitName, SplitStatistics] = {}
    for index, split in enumerate(SPLITS):
        splits[split] = SplitStatistics(
            rows=sum(report.rows[index] for report in reports),
            positives=sum(report.positives[index] for report in reports),
            dense={f.name: merge_dense([report.dense[index][f.name] for report in reports]) for f in config.schema_.dense},
            slots={config.schema_.categorical[r.place].name: r.statistics[index] for r in counted},
        )
    dead: Counter[str] = sum((report.dead for report in reports), Counter())
    return Manifest(
        format_version=FORMAT_VERSION,
        name=config.name,
        fingerprint=_fingerprint(config, fitted, shards),
        feature_digest=_feature_digest(config, fitted),
        sources=sources,
        dense=fitted.dense,
        slots=fitted.slots,
        slice_columns=list(config.evaluation.slices),
        shards=shards,
        splits=splits,
        dead=dict(sorted(dead.items())),
        data_key=key,
        cut_points=fitted.cut_points,
    )


def _shard_tasks(split: int, keys: Sequence[tuple[int, int, int]], cuts: I64) -> list[ShardTask]:
    """``cuts``: int64 [num_shards + 1, num_pieces], how many records of each piece lie before each shard."""
    tasks = []
    for index in range(len(cuts) - 1):
        runs = [(key, int(a), int(b)) for key, a, b in zip(keys, cuts[index], cuts[index + 1], strict=True) if b > a]
        first = int(cuts[index].sum())
        tasks.append(ShardTask(split, index, first, first + sum(b - a for _, a, b in runs), tuple(runs)))
    return tasks


def _ranks(total: int) -> I64:
    return np.append(np.arange(0, total, SHARD_ROWS, dtype=np.int64), total)


def _order_cuts(rows: Sequence[int]) -> I64:
    """Records of each piece before each shard boundary, in input order: int64 [num_shards + 1, num_pieces]."""
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows, dtype=np.int64)])
    cuts: I64 = np.clip(_ranks(int(before[-1]))[:, None] - before[None, :-1], 0, np.asarray(rows, np.int64)[None, :])
    return cuts


def _time_cuts(pieces: Sequence[tuple[tuple[int, int, int], int]], split: int, folder: WorkFolder) -> I64:
    """The same in time order: a boundary falls into the records of one second, which are taken piece by piece."""
    times = []
    for key, _ in pieces:
        column = open_shard(folder.piece(key, split)).time
        assert column is not None
        times.append(column)
    ranks = _ranks(sum(rows for _, rows in pieces))
    # Smallest second t with more than `rank` records up to it; the last boundary lies behind everything.
    low = np.full(len(ranks) - 1, min(int(column[0]) for column in times), np.int64)
    high = np.full(len(ranks) - 1, max(int(column[-1]) for column in times), np.int64)
    while (low < high).any():
        middle = (low + high) // 2
        enough = sum(np.searchsorted(column, middle, side="right") for column in times) > ranks[:-1]
        low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
    before = np.stack([np.searchsorted(column, low, side="left") for column in times], axis=1)
    during = np.stack([np.searchsorted(column, low, side="right") for column in times], axis=1) - before
    wanted = (ranks[:-1] - before.sum(axis=1))[:, None]
    earlier_pieces = np.cumsum(during, axis=1) - during
    cuts = before + np.clip(wanted - earlier_pieces, 0, during)
    return np.concatenate([cuts, np.array([[len(column) for column in times]])]).astype(np.int64)


def _fingerprint(config: Config, fitted: Fitted, shards: Sequence[ShardEntry]) -> str:
    """Equal content, equal fingerprint, wherever the files lie and whatever wrote their framing."""
    content = {
        "features": _feature_digest(config, fitted),
        "dense": [transform.model_dump() for transform in fitted.dense],
        "slots": [transform.model_dump() for transform in fitted.slots],
        "shards": [(entry.split, entry.rows, entry.digest) for entry in shards],
    }
    return _sha256(content)


def _feature_digest(config: Config, fitted: Fitted) -> str:
    """What a model needs equal to be scored on this data. Fitted numbers are left out: they move a little with every day's data."""
    dense = [(feature.name, list(feature.transforms)) for feature in config.schema_.dense]
    slots = [
        (
            feature.name,
            transform.group,
            transform.hash_seed,
            feature.multi_valued,
            feature.bucketise.model_dump() if feature.bucketise else None,
        )
        for feature, transform in zip(config.schema_.categorical, fitted.slots, strict=True)
    ]
    return _sha256({"dense": dense, "slots": slots})


def _sha256(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
