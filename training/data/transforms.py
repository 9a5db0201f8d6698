"""Transforms of numbers and ids: what is fitted on the train split, and how it is applied.

Dense features: fill, then the transforms in order. ``log1p`` maps x to sign(x)*log(1+|x|). ``standardise`` subtracts the mean and
divides by the population deviation of the train split as it stands at that point, filled values included (deviation 0: divides by 1).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

from training.config import CategoricalFeature, Config, DenseFeature
from training.data.manifest import DenseTransform, SlotTransform
from training.data.moments import Moments, merge_moments
from training.data.records import FLOAT32_LIMIT, Records
from training.data.shards import Bag
from training.data.signs import hash_spans, sign_of, sign_seed
from training.data.spans import ListColumn, truncate_lists
from training.data.splits import TRAIN
from training.embedding.slots import slots

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class Fitted:
    """Everything the transform pass needs to know about the train split."""

    dense: list[DenseTransform]
    slots: list[SlotTransform]
    cut_points: list[int] | None

    def overflows(self, name: str, values: F64) -> npt.NDArray[np.bool_]:
        """Which values of a dense feature, float32 numbers or NaN for missing, are infinite in float32 after its transforms; bool [N].

        Only division by a tiny deviation does that, and only to values that the train split, where it was measured, does not have.
        """
        transform = next(dense for dense in self.dense if dense.name == name)
        present = ~np.isnan(values)
        largest = np.abs(values).max(initial=0.0, where=present) + abs(transform.mean)
        if largest < FLOAT32_LIMIT * transform.std:  # log1p makes numbers smaller, so this is enough for every order of transforms
            return np.zeros(len(values), np.bool_)
        with np.errstate(over="ignore"):
            return present & ~(np.abs(_transformed(values, transform)) < FLOAT32_LIMIT)


@dataclass(frozen=True)
class Analysis:
    """What one piece of input tells about the train split."""

    key: tuple[int, int, int]
    """Its place: file, chunk, piece."""
    rows: int
    raw: dict[str, Moments]
    """Per dense feature: of the values present."""
    scaled: dict[str, Moments]
    """Per dense feature: of the values present after the transforms before ``standardise``."""
    values: dict[str, tuple[F64, I64]]
    """Per slot with quantile buckets: distinct values, ascending, and their counts."""


def needs_analysis(config: Config) -> bool:
    """Whether any transform depends on the train split."""
    dense, categorical = config.schema_.dense, config.schema_.categorical
    return any(f.fill == "mean" or "standardise" in f.transforms for f in dense) or any(
        f.bucketise and f.bucketise.quantiles for f in categorical
    )


def analyse(records: Records, key: tuple[int, int, int], config: Config) -> Analysis:
    """Statistics of the train records of one piece."""
    assert records.split is not None
    train = records.split == TRAIN
    raw, scaled, values = {}, {}, {}
    for feature in config.schema_.dense:
        numbers = records.numbers[feature.name][train]
        raw[feature.name] = Moments.of(numbers)
        scaled[feature.name] = Moments.of(log1p(numbers)) if _log_first(feature) else raw[feature.name]
    for slot in config.schema_.categorical:
        if slot.bucketise is not None and slot.bucketise.quantiles:
            numbers = records.numbers[slot.name][train]
            values[slot.name] = np.unique(numbers[~np.isnan(numbers)], return_counts=True)
    return Analysis(key, int(train.sum()), raw, scaled, values)


def fit(analyses: Sequence[Analysis], config: Config, cut_points: list[int] | None) -> Fitted:
    """Transforms from the analyses of all pieces, whatever order they come in."""
    ordered = sorted(analyses, key=lambda analysis: analysis.key)
    dense = [_fit_dense(feature, ordered) for feature in config.schema_.dense]
    resolved = {slot.name: slot.group for slot in slots(config)}
    fitted = []
    for feature in config.schema_.categorical:
        group = resolved[feature.name]
        fitted.append(
            SlotTransform(name=feature.name, group=group, hash_seed=sign_seed(group), boundaries=_fit_boundaries(feature, ordered))
        )
    return Fitted(dense, fitted, cut_points)


def log1p(values: F64) -> F64:
    """sign(x) * log(1 + |x|); NaN stays."""
    return _log1p(values)  # type: ignore[no-any-return]


def apply_dense(records: Records, fitted: Fitted) -> npt.NDArray[np.float32]:
    """All dense features after fill and transforms, float32 [N, D]."""
    out = np.empty((len(records), len(fitted.dense)), np.float32)
    for place, transform in enumerate(fitted.dense):
        out[:, place] = _transformed(records.numbers[transform.name], transform)
    return out


def slot_signs(records: Records, feature: CategoricalFeature, fitted: SlotTransform) -> U64:
    """Signs of a single-valued slot, uint64 [N]; a missing value is the empty text's."""
    if fitted.boundaries is None:
        column = records.texts[feature.name]
        return hash_spans(column.data, column.starts, column.ends, fitted.hash_seed)
    texts = bucket_texts(fitted.boundaries)
    signs = np.array([sign_of(text, fitted.group) for text in texts], np.uint64)
    return signs[bucket_indices(records.numbers[feature.name], fitted.boundaries)]


def slot_bag(records: Records, feature: CategoricalFeature, fitted: SlotTransform) -> tuple[Bag, ListColumn, I64]:
    """Signs of a multi-valued slot, the texts they came from, and how many ids beyond ``max_ids`` were dropped per record, int64 [N]."""
    kept, lost = truncate_lists(records.lists[feature.name], feature.max_ids)
    values = kept.values
    return Bag(kept.offsets, hash_spans(values.data, values.starts, values.ends, fitted.hash_seed)), kept, lost


def bucket_indices(values: F64, boundaries: Sequence[float]) -> I64:
    """Bucket of every number: boundary i is the first value of bucket i+1; missing has the index after the last. int64 [N]."""
    index = np.searchsorted(np.asarray(boundaries, np.float64), values, side="right")
    return np.where(np.isnan(values), len(boundaries) + 1, index).astype(np.int64)


def bucket_texts(boundaries: Sequence[float]) -> list[str]:
    """The text that is hashed for every index of ``bucket_indices``."""
    return [*map(str, range(len(boundaries) + 1)), ""]


def quantile_boundaries(values: F64, counts: I64, buckets: int) -> list[float]:
    """Boundaries of ``buckets`` equally filled buckets of distinct ascending ``values``; fewer where values repeat too often."""
    if not len(values):
        return []
    cumulated = np.cumsum(counts)
    ranks = np.arange(1, buckets) * (int(cumulated[-1]) / buckets)
    picked = values[np.minimum(np.searchsorted(cumulated, ranks, side="right"), len(values) - 1)]
    return [float(value) for value in np.unique(picked) if value > values[0]]


def _transformed(values: F64, transform: DenseTransform) -> F64:
    """A dense feature after fill and transforms."""
    values = np.where(np.isnan(values), transform.fill, values)
    for step in transform.transforms:
        values = log1p(values) if step == "log1p" else (values - transform.mean) / transform.std
    return values


def _log_first(feature: DenseFeature) -> bool:
    """Whether log1p comes before standardise."""
    return "standardise" in feature.transforms and feature.transforms[0] == "log1p"


def _fit_dense(feature: DenseFeature, analyses: Sequence[Analysis]) -> DenseTransform:
    raw = merge_moments(analysis.raw[feature.name] for analysis in analyses)
    fill = raw.mean if feature.fill == "mean" else float(feature.fill)
    mean, std = 0.0, 1.0
    if "standardise" in feature.transforms:
        filled = math.copysign(math.log1p(abs(fill)), fill) if _log_first(feature) else fill
        scaled = merge_moments(analysis.scaled[feature.name] for analysis in analyses)
        scaled = scaled.with_copies(filled, sum(analysis.rows for analysis in analyses) - scaled.count)
        mean, std = scaled.mean, scaled.std or 1.0
    return DenseTransform(name=feature.name, fill=fill, transforms=list(feature.transforms), mean=mean, std=std)


def _fit_boundaries(feature: CategoricalFeature, analyses: Sequence[Analysis]) -> list[float] | None:
    if feature.bucketise is None:
        return None
    if feature.bucketise.quantiles is None:
        return list(feature.bucketise.boundaries)
    parts = [analysis.values[feature.name] for analysis in analyses]
    if not parts:
        return []
    values, inverse = np.unique(np.concatenate([part[0] for part in parts]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, inverse, np.concatenate([part[1] for part in parts]))
    return quantile_boundaries(values, counts, feature.bucketise.quantiles)


@njit(cache=True, nogil=True)
def _log1p(values: F64) -> F64:
    out = np.empty_like(values)
    for i in range(len(values)):
        out[i] = math.copysign(math.log1p(abs(values[i])), values[i])
    return out
