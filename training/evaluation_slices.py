"""Metrics per value of a slot: which groups of records a model serves worse than the average shows."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from training.config import MetricName
from training.evaluation_record import SliceScore
from training.metrics import METRIC_NAMES, binary_metrics

Logits = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int8]


class SliceValues:
    """The values of one slot over a split, as 4-byte codes; added batch by batch."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.values: list[str] = []
        """Distinct values; code i means ``values[i]``."""
        self._code_of: dict[str, int] = {}
        self._codes: list[npt.NDArray[np.int32]] = []

    def add(self, texts: npt.NDArray[np.str_]) -> None:
        """Append the values [N] of a batch."""
        distinct, inverse = np.unique(texts, return_inverse=True)
        codes = np.empty(len(distinct), np.int32)
        for i, text in enumerate(distinct.tolist()):
            codes[i] = self._code_of.setdefault(text, len(self.values))
            if codes[i] == len(self.values):
                self.values.append(text)
        self._codes.append(codes[inverse])

    def groups(self, min_rows: int) -> Iterator[tuple[str | None, int, npt.NDArray[np.int64]]]:
        """(value, number of pooled values, record numbers), most records first, then by value; last the pool of the rest, value None."""
        codes = np.concatenate(self._codes) if self._codes else np.zeros(0, np.int32)
        counts = np.bincount(codes, minlength=len(self.values))
        order = np.argsort(codes, kind="stable")
        ends = np.cumsum(counts)
        ranked = sorted(range(len(self.values)), key=lambda code: (-counts[code], self.values[code]))
        pool = [code for code in ranked if counts[code] < min_rows]
        for code in ranked[: len(ranked) - len(pool)]:
            yield self.values[code], 0, order[ends[code] - counts[code] : ends[code]]
        if pool:
            yield None, len(pool), np.sort(np.concatenate([order[ends[code] - counts[code] : ends[code]] for code in pool]))


def slice_scores(values: SliceValues, labels: Labels, logits: Logits, champion_logits: Logits | None, *, min_rows: int) -> list[SliceScore]:
    """One entry per value with at least ``min_rows`` records, and one for the rest. ``labels``, ``logits``: [N], in the split's order."""
    scores = []
    for value, pooled, rows in values.groups(min_rows):
        scores.append(
            SliceScore(
                slot=values.slot,
                value=value,
                pooled_values=pooled,
                rows=len(rows),
                positives=int(np.count_nonzero(labels[rows])),
                metrics=recorded(binary_metrics(logits[rows], labels[rows])),
                champion_metrics=None if champion_logits is None else recorded(binary_metrics(champion_logits[rows], labels[rows])),
            )
        )
    return scores


def recorded(metrics: dict[str, float]) -> dict[MetricName, float | None]:
    """Metrics as JSON can hold them: None for a value that is not finite."""
    return {name: metrics[name] if np.isfinite(metrics[name]) else None for name in METRIC_NAMES}
