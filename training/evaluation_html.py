"""``report.html`` of the evaluate stage, and its figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from training import report as build
from training.config import MetricName
from training.evaluation_record import EvaluationRecord, SliceScore
from training.metrics import (
    HIGHER_IS_BETTER,
    PrecisionRecallCurve,
    ReliabilityCurve,
    RocCurve,
    pr_curve,
    predictions,
    reliability_curve,
    roc_curve,
)
from training.report import Cell, Html, Tone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TITLES: dict[MetricName, str] = {
    "auc": "AUC",
    "log_loss": "Log loss (nats)",
    "normalized_entropy": "Normalised entropy",
    "calibration": "Calibration",
}
_NOTES: dict[MetricName, str] = {
    "auc": "1 is perfect, 0.5 is chance",
    "log_loss": "lower is better",
    "normalized_entropy": "below 1 beats the base rate",
    "calibration": "mean prediction / mean label; 1 is perfect",
}
MAX_SLICES = 25
_HISTOGRAM_BINS = 40


@dataclass(frozen=True)
class ModelCurves:
    """What is drawn of one model."""

    name: str
    reliability: ReliabilityCurve
    pr: PrecisionRecallCurve
    roc: RocCurve


@dataclass(frozen=True)
class Curves:
    """What is drawn of an evaluation."""

    models: list[ModelCurves]
    """The candidate, then the champion if it was scored."""
    base_rate: float
    edges: npt.NDArray[np.float64]
    """Bucket edges [B + 1] of the candidate's predictions."""
    counts: npt.NDArray[np.int64]
    """Records [2, B] per bucket, of label 0 and of label 1."""

    @classmethod
    def of(cls, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.int8], champion: npt.NDArray[np.float32] | None) -> Curves:
        """Compute all curves from logits and labels [N]."""
        pairs = [("candidate", logits), *([("champion", champion)] if champion is not None else [])]
        models = [ModelCurves(name, reliability_curve(x, labels), pr_curve(x, labels), roc_curve(x, labels)) for name, x in pairs]
        finite = np.isfinite(logits)
        predicted = predictions(logits[finite])
        edges = np.linspace(0.0, float(predicted.max(initial=0.0)) or 1.0, _HISTOGRAM_BINS + 1)
        counts = np.array([np.histogram(predicted[labels[finite] == label], edges)[0] for label in (0, 1)], dtype=np.int64)
        return cls(models, float(np.mean(labels)) if len(labels) else 0.0, edges, counts)

    def reliability_figure(self) -> Figure:
        """Positive rate against mean prediction, with 95 % intervals."""

        def plot(axes: Any) -> None:
            highest = max(
                [float(max(m.reliability.mean_prediction.max(), m.reliability.positive_rate.max())) for m in self._drawable()] or [1.0]
            )
            top = min(1.0, 1.08 * highest) or 1.0
            axes.plot([0, top], [0, top], color="#9aa3ae", linestyle="--", linewidth=1.2, label="perfect")
            for model, colour in self._coloured():
                curve = model.reliability
                low, high = curve.interval()
                spread = [curve.positive_rate - low, high - curve.positive_rate]
                axes.errorbar(
                    curve.mean_prediction, curve.positive_rate, spread, color=colour, marker="o", markersize=4, linewidth=1.4, elinewidth=1,
                    label=model.name,
                )  # fmt: skip
            axes.set_xlim(0, top)
            axes.set_ylim(0, top)
            axes.set_aspect("equal")
            axes.set_xlabel("Mean prediction")
            axes.set_ylabel("Share of positives")
            axes.legend(loc="upper left")

        return build.draw(plot, width=5.2, height=4.6)

    def score_figure(self) -> Figure:
        """Distribution of the candidate's predictions, per label."""

        def plot(axes: Any) -> None:
            for counts, label, colour in zip(self.counts, (0, 1), (build.PALETTE[4], build.PALETTE[0]), strict=True):
                share = 100 * counts / max(int(counts.sum()), 1)
                axes.stairs(share, self.edges, fill=True, alpha=0.3, color=colour)
                axes.stairs(share, self.edges, color=colour, linewidth=1.4, label=f"label {label} ({int(counts.sum()):,})")
            axes.set_xlim(0, self.edges[-1])
            axes.set_ylim(bottom=0)
            axes.set_xlabel("Prediction")
            axes.set_ylabel("Records of the label (%)")
            axes.legend()

        return build.draw(plot, width=5.2, height=4.6)

    def pr_figure(self) -> Figure:
        """Precision over recall."""

        def plot(axes: Any) -> None:
            axes.axhline(self.base_rate, color="#9aa3ae", linestyle="--", linewidth=1.2, label=f"base rate {self.base_rate:.3g}")
            for model, colour in self._coloured():
                text = f"{model.name} (AP {model.pr.average_precision:.4f})" if len(model.pr.recall) else model.name
                axes.plot(model.pr.recall, model.pr.precision, color=colour, linewidth=1.6, label=text)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1.02)
            axes.set_xlabel("Recall")
            axes.set_ylabel("Precision")
            axes.legend(loc="best")

        return build.draw(plot, width=5.2, height=4.6)

    def roc_figure(self) -> Figure:
        """True over false positive rate."""

        def plot(axes: Any) -> None:
            axes.plot([0, 1], [0, 1], color="#9aa3ae", linestyle="--", linewidth=1.2, label="chance")
            for model, colour in self._coloured():
                axes.plot(model.roc.false_positive_rate, model.roc.true_positive_rate, color=colour, linewidth=1.6, label=model.name)
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1.01)
            axes.set_aspect("equal")
            axes.set_xlabel("False positive rate")
            axes.set_ylabel("True positive rate")
            axes.legend(loc="lower right")

        return build.draw(plot, width=5.2, height=4.6)

    def _drawable(self) -> list[ModelCurves]:
        return [model for model in self.models if len(model.reliability.rows)]

    def _coloured(self) -> list[tuple[ModelCurves, str]]:
        """The champion first, so that the candidate lies on top."""
        return [(m, build.PALETTE[i]) for i, m in reversed(list(enumerate(self.models))) if len(m.reliability.rows)]


def render(record: EvaluationRecord, curves: Curves, *, shown: Sequence[MetricName]) -> str:
    """The page of an evaluation; ``shown``: the metrics to report."""
    blocks = [_tiles(record, shown), _comparison(record, shown), *_undefined(record)]
    blocks += [build.heading("Calibration and separation"), _figures(curves)]
    blocks += _slices(record, shown)
    blocks += [build.heading("Details"), _details(record)]
    step = f"trained for {record.candidate.step:,} steps"
    return build.page(
        f"Evaluation: {record.name}", blocks, subtitle=f"{record.rows:,} test records, data {record.data_fingerprint[:12]}, {step}"
    )


def _champion_metrics(record: EvaluationRecord) -> dict[MetricName, float | None] | None:
    return None if record.champion is None or record.champion.score is None else record.champion.score.metrics


def _tiles(record: EvaluationRecord, shown: Sequence[MetricName]) -> Html:
    theirs = _champion_metrics(record)
    entries = []
    for name in shown:
        note = f"champion {build.number(theirs[name])}" if theirs else _NOTES[name]
        entries.append((TITLES[name], build.number(record.candidate.metrics[name]), note))
    rate = build.percent(record.positives / record.rows if record.rows else None, digits=2)
    return build.tiles([*entries, ("Test records", build.number(record.rows), f"{rate} positive")])


def _comparison(record: EvaluationRecord, shown: Sequence[MetricName]) -> Html:
    if record.champion is None:
        return build.paragraph("There was no champion to compare with.")
    theirs = _champion_metrics(record)
    if theirs is None:
        return build.paragraph(
            build.badge("not comparable", "warn"), f"  The champion could not be scored on this data: {record.champion.incomparable}."
        )
    rows: list[list[Cell]] = []
    for name in shown:
        ours, other = record.candidate.metrics[name], theirs[name]
        difference = None if ours is None or other is None else ours - other
        rows.append([TITLES[name], ours, other, None if difference is None else f"{difference:+.6f}", _judged(name, ours, other)])
    caption = "On the same test records. Whether the difference is enough is decided by the gate of the register stage."
    return build.table(["Metric", "Candidate", "Champion", "Difference", ""], rows, caption=caption, right=["Difference"])


def _judged(name: MetricName, ours: float | None, theirs: float | None) -> Html | None:
    if ours is None or theirs is None:
        return None
    higher = HIGHER_IS_BETTER[name]
    gain = abs(theirs - 1) - abs(ours - 1) if higher is None else (ours - theirs) * (1 if higher else -1)
    # A difference that the four shown digits hide is none to a reader.
    tone: Tone = "plain" if abs(gain) < 5e-5 else "good" if gain > 0 else "warn"
    return build.badge({"plain": "equal", "good": "better", "warn": "worse"}[tone], tone)


def _undefined(record: EvaluationRecord) -> list[Html]:
    rows = [(TITLES[name], reason) for name, reason in record.candidate.undefined.items()]
    return [build.table(["Metric without a value", "Why"], rows)] if rows else []


def _figures(curves: Curves) -> Html:
    return build.grid(
        [
            build.figure(
                curves.reliability_figure(),
                "Reliability: predictions against outcomes in 20 bins of equal numbers of records, with 95 % Wilson intervals.",
            ),
            build.figure(curves.score_figure(), "The candidate's predictions, for each label."),
            build.figure(curves.pr_figure(), "Precision-recall curve. AP: average precision."),
            build.figure(curves.roc_figure(), "ROC curve; the area under it is the AUC."),
        ]
    )


def _slices(record: EvaluationRecord, shown: Sequence[MetricName]) -> list[Html]:
    blocks = []
    for slot in dict.fromkeys(entry.slot for entry in record.slices):
        entries = [entry for entry in record.slices if entry.slot == slot]
        blocks += [build.heading(f"By {slot}"), *_slice_figure(record, entries), _slice_table(entries, shown)]
    return blocks


def _slice_figure(record: EvaluationRecord, entries: list[SliceScore]) -> list[Html]:
    drawn = [entry for entry in entries if entry.metrics["auc"] is not None][:MAX_SLICES]
    overall = record.candidate.metrics["auc"]
    if not drawn or overall is None:
        return []

    def plot(axes: Any) -> None:
        rows = np.arange(len(drawn))[::-1]
        axes.axvline(overall, color="#9aa3ae", linestyle="--", linewidth=1.2, label=f"all records {overall:.4f}")
        rivals = [(row, e.champion_metrics["auc"]) for row, e in zip(rows, drawn, strict=True) if e.champion_metrics]
        if rivals := [(row, value) for row, value in rivals if value is not None]:
            axes.plot([v for _, v in rivals], [r for r, _ in rivals], "D", color=build.PALETTE[1], markersize=6, label="champion")
        axes.plot([entry.metrics["auc"] for entry in drawn], rows, "o", color=build.PALETTE[0], markersize=6, label="candidate")
        axes.set_yticks(rows, [f"{build.figure_text(_value(entry))}  ({entry.rows:,})" for entry in drawn])
        axes.set_ylim(-0.7, len(drawn) - 0.3)
        axes.margins(x=0.08)
        axes.set_xlabel("AUC")
        axes.figure.legend(loc="outside upper left", ncols=3, fontsize=9)

    caption = "AUC per value (number of records), most frequent first." + (
        f" The first {MAX_SLICES} of {len(entries)} values." if len(entries) > len(drawn) == MAX_SLICES else ""
    )
    return [build.figure(build.draw(plot, width=8.6, height=1.3 + 0.3 * len(drawn)), caption)]


def _slice_table(entries: list[SliceScore], shown: Sequence[MetricName]) -> Html:
    """All reported metrics of the candidate; of the champion the first one, or the table would be too wide to read."""
    compared = any(entry.champion_metrics for entry in entries)
    first = TITLES[shown[0]]
    columns = ["Value", "Records", "Positive rate", first, *([f"{first}, champion"] if compared else []), *(TITLES[m] for m in shown[1:])]
    rows: list[list[Cell]] = []
    for entry in entries:
        theirs = [entry.champion_metrics[shown[0]] if entry.champion_metrics else None] if compared else []
        ours = [entry.metrics[name] for name in shown]
        rows.append([_value(entry), entry.rows, entry.positives / entry.rows, ours[0], *theirs, *ours[1:]])
    table = build.table(columns, rows[:MAX_SLICES])
    if len(rows) <= MAX_SLICES:
        return table
    return Html(table + build.details(f"{len(rows) - MAX_SLICES} more values", build.table(columns, rows[MAX_SLICES:])))


def _value(entry: SliceScore) -> str:
    if entry.value is None:
        return f"other ({entry.pooled_values} values)"
    return entry.value or "(missing)"


def _details(record: EvaluationRecord) -> Html:
    rows: list[list[Cell]] = [
        ["Candidate", build.code(record.candidate.checkpoint)],
        ["Champion", build.code(record.champion.checkpoint) if record.champion else "none"],
        ["Data fingerprint", build.code(record.data_fingerprint)],
        ["Features", build.code(record.feature_digest)],
        ["Configuration", build.code(record.config_digest)],
        ["Average precision", record.candidate.average_precision],
        ["Expected calibration error", record.candidate.expected_calibration_error],
    ]
    rows = [[name, build.number(value) if isinstance(value, float) else value] for name, value in rows]
    return build.table(["", ""], rows)
