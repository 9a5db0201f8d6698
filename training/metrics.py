"""Quality of a binary classifier, computed exactly from logits and labels, in plain numpy.

Notation: N records, labels y in {0, 1}, logits x, predictions p = 1 / (1 + exp(-x)), base rate b = mean(y).

- ``auc``: probability that a random positive has a higher logit than a random negative, ties counting one half.
- ``log_loss``: mean of -(y ln p + (1 - y) ln(1 - p)), in nats, from the logits, so it never overflows.
- ``normalized_entropy``: log_loss / -(b ln b + (1 - b) ln(1 - b)); below 1 is better than always predicting the base rate
  (He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014).
- ``calibration``: mean(p) / mean(y); 1 is perfect, 1.1 predicts 10 % too many positives.

A metric that has no value (one class only, no records, logits that are not finite) is nan, and ``undefined_reasons`` says why.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.config import MetricName

METRIC_NAMES: tuple[MetricName, ...] = ("auc", "log_loss", "normalized_entropy", "calibration")
HIGHER_IS_BETTER: dict[MetricName, bool | None] = {"auc": True, "log_loss": False, "normalized_entropy": False, "calibration": None}
"""None: neither; calibration is best at 1."""

_BLOCK_ROWS = 1 << 20  # float64 temporaries are made for this many records at a time

Logits = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int8] | npt.NDArray[np.float32]


def binary_metrics(logits: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, float]:
    """All metrics of ``METRIC_NAMES``, by name.

    ``logits`` [N] real, ``labels`` [N] of 0 and 1 (any numeric dtype). A metric without a value is nan.
    Raises ``ValueError`` if the shapes differ or a label is neither 0 nor 1.
    """
    x, y = _checked(logits, labels)
    rows, positives = len(y), int(np.count_nonzero(y))
    if rows == 0 or not np.isfinite(x).all():
        return dict.fromkeys(METRIC_NAMES, math.nan)
    loss = log_loss(x, y)
    return {
        "auc": auc(x, y),
        "log_loss": loss,
        "normalized_entropy": loss / base_rate_entropy(rows, positives) if 0 < positives < rows else math.nan,
        "calibration": calibration(x, y),
    }


def undefined_reasons(logits: npt.ArrayLike, labels: npt.ArrayLike) -> dict[str, str]:
    """For each metric that ``binary_metrics`` gives as nan, why; empty if all have a value."""
    x, y = _checked(logits, labels)
    rows, positives = len(y), int(np.count_nonzero(y))
    if rows == 0:
        return dict.fromkeys(METRIC_NAMES, "no records")
    if bad := rows - int(np.count_nonzero(np.isfinite(x))):
        return dict.fromkeys(METRIC_NAMES, f"{bad} of {rows} logits are not finite: the model has diverged")
    if positives == 0:
        reason = f"all {rows} labels are 0"
        return {"auc": reason, "normalized_entropy": reason, "calibration": reason}
    if positives == rows:
        reason = f"all {rows} labels are 1"
        return {"auc": reason, "normalized_entropy": reason}
    return {}


def auc(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Area under the ROC curve, exact (integer Mann-Whitney statistic, ties count one half); nan unless both classes occur."""
    x, y = _checked(logits, labels)
    positive, negative = np.sort(x[y == 1]), np.sort(x[y == 0])
    if len(positive) == 0 or len(negative) == 0 or not np.isfinite(x).all():
        return math.nan
    below = np.searchsorted(negative, positive, side="left").sum(dtype=np.int64)
    not_above = np.searchsorted(negative, positive, side="right").sum(dtype=np.int64)
    # Python integers: exact for any number of records.
    return (int(below) + int(not_above)) / (2 * len(positive) * len(negative))


def log_loss(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean cross-entropy in nats, accumulated in float64; nan without records."""
    x, y = _checked(logits, labels)
    if len(x) == 0:
        return math.nan
    # -ln p of the true class = ln(1 + e^-x) for y = 1 and ln(1 + e^x) for y = 0.
    total = sum(float(np.logaddexp(0.0, np.where(y[rows] == 1, -x[rows], x[rows]).astype(np.float64)).sum()) for rows in _blocks(len(x)))
    return total / len(x)


def base_rate_entropy(rows: int, positives: int) -> float:
    """Log loss of always predicting the base rate, in nats; 0 if one class is empty."""
    rate = positives / rows
    return -sum(share * math.log(share) for share in (rate, 1.0 - rate) if share > 0.0)


def normalized_entropy(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Log loss divided by the entropy of the base rate; nan unless both classes occur."""
    return binary_metrics(logits, labels)["normalized_entropy"]


def calibration(logits: npt.ArrayLike, labels: npt.ArrayLike) -> float:
    """Mean prediction / mean label; nan without positives."""
    x, y = _checked(logits, labels)
    positives = int(np.count_nonzero(y))
    if positives == 0:
        return math.nan
    return sum(float(predictions(x[rows]).sum()) for rows in _blocks(len(x))) / positives


def predictions(logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Probabilities [N] of logits [N]; no overflow at either end."""
    x = np.asarray(logits, dtype=np.float64)
    small = np.exp(-np.abs(x))
    return np.where(x >= 0.0, 1.0, small) / (1.0 + small)


@dataclass(frozen=True)
class ReliabilityCurve:
    """Predictions against outcomes in B bins of about equal numbers of records, ascending in prediction."""

    mean_prediction: npt.NDArray[np.float64]
    """[B]"""
    positive_rate: npt.NDArray[np.float64]
    """[B]"""
    rows: npt.NDArray[np.int64]
    """[B], each at least 1."""

    def interval(self) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Wilson 95 % interval of each bin's positive rate, low [B] and high [B]."""
        z2 = 1.959964**2
        centre = (self.positive_rate + z2 / (2 * self.rows)) / (1 + z2 / self.rows)
        half = np.sqrt(z2 * (self.positive_rate * (1 - self.positive_rate) / self.rows + z2 / (4 * self.rows**2))) / (1 + z2 / self.rows)
        # Rounding must not put the rate itself outside its interval.
        return np.minimum(np.maximum(centre - half, 0.0), self.positive_rate), np.maximum(
            np.minimum(centre + half, 1.0), self.positive_rate
        )

    def expected_error(self) -> float:
        """Mean |prediction - rate| over bins, weighted by records (expected calibration error); nan without bins."""
        if len(self.rows) == 0:
            return math.nan
        return float(np.average(np.abs(self.mean_prediction - self.positive_rate), weights=self.rows))


def reliability_curve(logits: npt.ArrayLike, labels: npt.ArrayLike, *, bins: int = 20) -> ReliabilityCurve:
    """At most ``bins`` equal-mass bins; equal logits share a bin, so the order of records cannot matter. No records: no bins.

    Records whose logits are not finite are left out.
    """
    x, y = _checked(logits, labels)
    x, y = _finite(x, y)
    order = np.argsort(x, kind="stable")
    x, y = x[order], y[order]
    wanted = (np.arange(1, bins) * len(x)) // bins
    # A cut inside a run of equal logits moves to the run's start.
    cuts = np.searchsorted(x, x[wanted], side="left") if len(x) else wanted[:0]
    starts = np.unique(np.concatenate([np.zeros(min(len(x), 1), np.int64), cuts.astype(np.int64)]))
    if len(starts) == 0:
        return ReliabilityCurve(np.zeros(0), np.zeros(0), np.zeros(0, np.int64))
    rows = np.diff(np.append(starts, len(x)))
    return ReliabilityCurve(
        np.add.reduceat(predictions(x), starts) / rows,
        np.add.reduceat(y.astype(np.int64), starts) / rows,
        rows,
    )


@dataclass(frozen=True)
class PrecisionRecallCurve:
    """Precision and recall when everything at or above a threshold counts as positive; thresholds descend, recall ascends."""

    recall: npt.NDArray[np.float64]
    """[K]"""
    precision: npt.NDArray[np.float64]
    """[K]"""
    average_precision: float
    """Sum of precision x gain in recall over all thresholds (before thinning); nan without positives."""


def pr_curve(logits: npt.ArrayLike, labels: npt.ArrayLike, *, max_points: int = 500) -> PrecisionRecallCurve:
    """Precision-recall curve over all distinct logits, thinned to ``max_points``; empty without positives."""
    true, false = _cumulative(logits, labels)
    if len(true) == 0 or true[-1] == 0:
        return PrecisionRecallCurve(np.zeros(0), np.zeros(0), math.nan)
    recall, precision = true / true[-1], true / (true + false)
    average = float((np.diff(recall, prepend=0.0) * precision).sum())
    keep = _thinned(len(true), max_points)
    return PrecisionRecallCurve(recall[keep], precision[keep], average)


@dataclass(frozen=True)
class RocCurve:
    """False and true positive rate as the threshold falls; starts at (0, 0), ends at (1, 1)."""

    false_positive_rate: npt.NDArray[np.float64]
    """[K]"""
    true_positive_rate: npt.NDArray[np.float64]
    """[K]"""


def roc_curve(logits: npt.ArrayLike, labels: npt.ArrayLike, *, max_points: int = 500) -> RocCurve:
    """ROC curve over all distinct logits, thinned to ``max_points``; empty unless both classes occur."""
    true, false = _cumulative(logits, labels)
    if len(true) == 0 or true[-1] == 0 or false[-1] == 0:
        return RocCurve(np.zeros(0), np.zeros(0))
    keep = _thinned(len(true), max_points)
    return RocCurve(np.concatenate([[0.0], false[keep] / false[-1]]), np.concatenate([[0.0], true[keep] / true[-1]]))


@dataclass
class MetricAccumulator:
    """Collects logits and labels batch by batch, 5 bytes per record; metrics are exact, whatever the batches were."""

    _logits: list[npt.NDArray[np.float32]] = field(default_factory=list)
    _labels: list[npt.NDArray[np.int8]] = field(default_factory=list)

    def add(self, logits: npt.ArrayLike, labels: npt.ArrayLike) -> None:
        """Append a batch; copies both. Raises ``ValueError`` if the shapes differ or a label is neither 0 nor 1."""
        x, y = _checked(logits, labels)
        self._logits.append(np.array(x, dtype=np.float32))
        self._labels.append(np.array(y, dtype=np.int8))

    @property
    def rows(self) -> int:
        """Records so far."""
        return sum(len(part) for part in self._labels)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """[N] in the order added."""
        self._logits = [np.concatenate(self._logits)] if self._logits else [np.zeros(0, np.float32)]
        return self._logits[0]

    @property
    def labels(self) -> npt.NDArray[np.int8]:
        """[N] in the order added."""
        self._labels = [np.concatenate(self._labels)] if self._labels else [np.zeros(0, np.int8)]
        return self._labels[0]

    def metrics(self) -> dict[str, float]:
        """``binary_metrics`` of everything added."""
        return binary_metrics(self.logits, self.labels)

    def undefined_reasons(self) -> dict[str, str]:
        """Why a metric is nan, by metric."""
        return undefined_reasons(self.logits, self.labels)


def _checked(logits: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[Logits, Labels]:
    x, y = np.asarray(logits), np.asarray(labels)
    if x.shape != y.shape or x.ndim != 1:
        raise ValueError(f"logits and labels must both be [N], got {x.shape} and {y.shape}")
    if not ((y == 0) | (y == 1)).all():
        raise ValueError(f"labels must be 0 or 1, got {y[(y != 0) & (y != 1)][0]}")
    return x, y


def _finite(x: Logits, y: Labels) -> tuple[Logits, Labels]:
    finite = np.isfinite(x)
    return (x, y) if finite.all() else (x[finite], y[finite])


def _cumulative(logits: npt.ArrayLike, labels: npt.ArrayLike) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """True and false positives [K] at each distinct logit, descending."""
    x, y = _finite(*_checked(logits, labels))
    order = np.argsort(-x, kind="stable")
    x, y = x[order], y[order]
    ends = np.flatnonzero(np.append(x[1:] != x[:-1], np.ones(min(len(x), 1), bool)))
    true = np.cumsum(y == 1, dtype=np.int64)[ends]
    return true, ends + 1 - true


def _thinned(count: int, max_points: int) -> npt.NDArray[np.int64]:
    """At most ``max_points`` ascending indices below ``count``, evenly spread, first and last included."""
    return np.unique(np.linspace(0, count - 1, min(count, max_points)).round().astype(np.int64))


def _blocks(rows: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, rows, _BLOCK_ROWS))
