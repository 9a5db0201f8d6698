"""Which split a record belongs to: train (0), valid (1) or test (2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from training.config import Fractions, SplitConfig
from training.data.dead_letters import Faults
from training.data.raw import RawColumn, RawRecords
from training.data.signs import chain_spans
from training.data.spans import TextColumn, TextTable

I8 = npt.NDArray[np.int8]
I64 = npt.NDArray[np.int64]
TRAIN, VALID, TEST = 0, 1, 2


def fractions_of(split: SplitConfig) -> Fractions:
    """The shares in force for a split by time or hash."""
    return split.fractions or Fractions()


def split_by_hash(columns: Sequence[RawColumn | TextColumn], split: SplitConfig) -> I8:
    """By a stable hash of ``columns``, the key or the whole record: equal keys, equal split; int8 [N]."""
    shares = fractions_of(split)
    bounds = np.array([shares.train, shares.train + shares.valid])
    if shares.test == 0.0:
        bounds[1] = 1.0
    return np.searchsorted(bounds, unit_hashes(columns, split.salt), side="right").astype(np.int8)


def split_by_column(raw: RawRecords, rows: I64, column: TextColumn, split: SplitConfig, faults: Faults) -> I8:
    """By the text of a column; other texts are faults. A share of train, by a hash of the whole record, becomes valid."""
    texts = [*split.train, *split.valid, *split.test]
    of_text = np.array([TRAIN] * len(split.train) + [VALID] * len(split.valid) + [TEST] * len(split.test) + [TRAIN], np.int8)
    found = column.index_in(TextTable.of(texts))
    found[column.missing] = -1
    place = np.full(len(raw), -1, np.int64)
    place[rows] = np.arange(len(rows))
    faults.add(rows[found < 0], "unknown split", lambda row: f"{split.column}: {column.text(int(place[row]))!r} is none of {texts}")
    result = of_text[found]
    if split.valid_fraction:
        moved = unit_hashes([part.take(rows) for part in raw.identity], split.salt) < split.valid_fraction
        result[(result == TRAIN) & moved] = VALID
    return result


def split_by_time(times: I64, cut_points: Sequence[int]) -> I8:
    """By event time: before the first cut point train, from the second on test; int8 [N]."""
    return np.searchsorted(np.asarray(cut_points, np.int64), times, side="right").astype(np.int8)


def unit_hashes(columns: Sequence[RawColumn | TextColumn], salt: str) -> npt.NDArray[np.float64]:
    """A number in [0, 1) per record, equal for equal values of ``columns`` on every machine; float64 [N].

    The hash of a column is the seed of the next; nulls hash like the empty text.
    """
    hashes = np.full(len(columns[0].starts), xxhash.xxh64_intdigest(salt.encode(), 0), np.uint64)
    for column in columns:
        ends = np.where(column.starts < 0, 0, column.ends)
        hashes = chain_spans(column.data, np.maximum(column.starts, 0), ends, hashes)
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def find_cut_points(times: I64, counts: I64, shares: Fractions) -> list[int]:
    """First second of valid and of test, such that the splits come as close to their shares as whole seconds allow.

    ``times``: distinct event times, ascending; ``counts``: records of each. The records of one second are never divided.
    """
    if not len(times):
        return [0, 0]
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])
    starts = np.append(times, times[-1] + 1)
    total = int(before[-1])
    cuts = []
    for share in (shares.train, shares.train + shares.valid):
        distance = np.abs(before - share * total)
        cuts.append(int(starts[len(distance) - 1 - int(np.argmin(distance[::-1]))]))
    return cuts
