"""Statistics of the manifest: parts per piece of input, and how they are merged.

Counts of ids are exact. A part is an Arrow file with one record batch per split and slot: distinct signs, their counts, their texts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
from numba import njit

from training.data.manifest import DenseStatistics, SlotStatistics
from training.data.moments import Moments, merge_moments
from training.data.spans import TextColumn

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_POSITIVE_EDGES = [float(f"{digit}e{power}") for power in range(-3, 9) for digit in range(1, 10)]
EDGES: list[float] = [*(-edge for edge in reversed(_POSITIVE_EDGES)), 0.0, *_POSITIVE_EDGES]
"""Bucket edges of every dense feature: 1, 2, ... 9 times every power of ten from 0.001 to 1e8, both signs, and 0."""
_TOP = 20
_COUNTS_SCHEMA = pa.schema([("sign", pa.uint64()), ("count", pa.int64()), ("text", pa.string())])


@dataclass(frozen=True)
class DensePart:
    """One dense feature in one split of one piece."""

    rows: int
    moments: Moments
    counts: I64
    """int64 [len(EDGES) + 1]."""

    @classmethod
    def of(cls, values: F64) -> DensePart:
        """Of raw values; NaN is missing."""
        present = values[~np.isnan(values)]
        buckets = np.searchsorted(np.asarray(EDGES), present, side="right")
        return cls(len(values), Moments.of(values), np.bincount(buckets, minlength=len(EDGES) + 1).astype(np.int64))


def merge_dense(parts: Sequence[DensePart]) -> DenseStatistics:
    """Of all parts, which come in input order."""
    moments = merge_moments(part.moments for part in parts)
    rows = sum(part.rows for part in parts)
    counts = np.sum([part.counts for part in parts], axis=0, dtype=np.int64) if parts else np.zeros(len(EDGES) + 1, np.int64)
    return DenseStatistics(
        rows=rows,
        missing=rows - moments.count,
        mean=moments.mean,
        std=moments.std,
        min=moments.minimum if moments.count else 0.0,
        max=moments.maximum if moments.count else 0.0,
        edges=EDGES,
        counts=counts.tolist(),
    )


@dataclass(frozen=True)
class SlotPart:
    """One slot in one split of one piece, without its ids."""

    rows: int
    missing: int
    dropped: int


@dataclass(frozen=True)
class IdCounts:
    """Distinct signs, ascending, with their counts and one text of each."""

    signs: U64
    counts: I64
    texts: pa.Array

    @classmethod
    def of(cls, signs: U64, texts: TextColumn | pa.Array) -> IdCounts:
        """Count ``signs``; ``texts`` holds the text of each occurrence."""
        first, counts = count_signs(signs)
        order = np.argsort(signs[first])
        first, counts = first[order], counts[order]
        chosen = texts.take(first).to_arrow() if isinstance(texts, TextColumn) else texts.take(pa.array(first))
        return cls(signs[first], counts, chosen)

    @classmethod
    def merged(cls, parts: Sequence[IdCounts]) -> IdCounts:
        """Of all parts."""
        if len(parts) == 1:
            return parts[0]
        signs, first, inverse = np.unique(np.concatenate([part.signs for part in parts]), return_index=True, return_inverse=True)
        counts = np.zeros(len(signs), np.int64)
        np.add.at(counts, inverse, np.concatenate([part.counts for part in parts]))
        return cls(signs, counts, pa.concat_arrays([part.texts for part in parts]).take(pa.array(first)))

    def top(self) -> list[tuple[str, int]]:
        """The most frequent texts by (-count, text)."""
        if not len(self.counts):
            return []
        least = np.partition(self.counts, -_TOP)[-_TOP] if len(self.counts) > _TOP else 0
        rows = np.nonzero(self.counts >= least)[0]
        texts = self.texts.take(pa.array(rows))
        order = np.lexsort((np.asarray(pa.compute.rank(texts)), -self.counts[rows]))[:_TOP]
        return [(texts[int(i)].as_py(), int(self.counts[rows[i]])) for i in order]


def write_counts(path: Path, counts: Sequence[IdCounts]) -> None:
    """Write one record batch per element."""
    partial = path.with_suffix(".partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, _COUNTS_SCHEMA) as writer:
        for each in counts:
            writer.write_batch(pa.record_batch([pa.array(each.signs), pa.array(each.counts), each.texts], schema=_COUNTS_SCHEMA))
    partial.replace(path)


def read_counts(path: Path, place: int) -> IdCounts:
    """One element of what ``write_counts`` wrote."""
    with pa.memory_map(str(path)) as source:
        batch = pa.ipc.open_file(source).get_batch(place)
    return IdCounts(batch.column(0).to_numpy(), batch.column(1).to_numpy(), batch.column(2))


def merge_slot(parts: Sequence[SlotPart], ids: IdCounts, train_signs: U64) -> SlotStatistics:
    """Of one slot in one split. ``train_signs``: distinct signs of the train split, ascending."""
    total = int(ids.counts.sum())
    known = np.isin(ids.signs, train_signs, assume_unique=True)
    return SlotStatistics(
        rows=sum(part.rows for part in parts),
        missing=sum(part.missing for part in parts),
        ids=total,
        distinct=len(ids.signs),
        unseen=total - int(ids.counts[known].sum()),
        dropped=sum(part.dropped for part in parts),
        top=ids.top(),
        bucket_counts=np.bincount((ids.signs >> np.uint64(58)).astype(np.int64), weights=ids.counts, minlength=64)
        .astype(np.int64)
        .tolist(),
    )


def count_signs(signs: U64) -> tuple[I64, I64]:
    """First place and number of occurrences of every distinct sign, in order of first occurrence: int64 [U], int64 [U]."""
    size = 1 << max(4, math.ceil(math.log2(max(1, len(signs)))) + 1)
    return _count_signs(signs, size)  # type: ignore[no-any-return]


@njit(cache=True, nogil=True)
def _count_signs(signs: U64, size: int) -> tuple[I64, I64]:
    table = np.full(size, -1, np.int64)
    first, counts = np.empty(len(signs), np.int64), np.empty(len(signs), np.int64)
    distinct = 0
    for i in range(len(signs)):
        sign = signs[i]
        place = np.int64(sign & np.uint64(size - 1))
        while table[place] >= 0 and signs[first[table[place]]] != sign:
            place = (place + 1) & (size - 1)
        if table[place] < 0:
            table[place] = distinct
            first[distinct], counts[distinct] = i, 1
            distinct += 1
        else:
            counts[table[place]] += 1
    return first[:distinct].copy(), counts[:distinct].copy()
