"""The ``evaluate`` stage: a candidate, and the present champion, on the same test split. Nothing is inserted, nothing is trained.

Written into the output directory: ``evaluation.json`` (schema: ``training.evaluation_record``), ``report.html``, and TensorBoard events
in ``tensorboard/``: scalars ``test/<metric>`` and ``champion/<metric>``, the curve ``test/pr`` and the image ``test/reliability``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from training import evaluation_html
from training.checkpoint import CheckpointManifest
from training.config import Config, MetricName
from training.data.manifest import Manifest
from training.data.shards import Batch, ShardReader
from training.errors import CheckpointError, DataError
from training.evaluation_record import ChampionScore, EvaluationRecord, ModelScore, SliceScore, checkpoint_digest
from training.evaluation_slices import SliceValues, recorded, slice_scores
from training.events import EventLog
from training.metrics import METRIC_NAMES, MetricAccumulator, pr_curve, predictions, reliability_curve
from training.report import pixels, write_text
from training.scorer import Scorer

STAGE = "evaluate"
_PROGRESS_SECONDS = 0.5
Score = Callable[[Batch], npt.NDArray[np.float32]]
"""Logits float32 [N] of a batch."""


@dataclass(frozen=True)
class EvaluationResult:
    """What ``evaluate`` made."""

    record: EvaluationRecord
    evaluation: Path
    report: Path
    tensorboard: Path
    metrics: dict[str, float]
    """Of the candidate: those of ``evaluation.metrics`` that have a value."""
    shown: dict[str, float | str]
    """Of the candidate: all of ``evaluation.metrics``, for one without a value ``undefined: <reason>``."""

    @property
    def summary(self) -> str:
        """One line: the metrics of the candidate."""
        return "  ".join(f"test {name} {value if isinstance(value, str) else f'{value:.4f}'}" for name, value in self.shown.items())


@dataclass
class Scores:
    """One model's logits on a split, with the labels and, if asked for, the slice values."""

    accumulator: MetricAccumulator = field(default_factory=MetricAccumulator)
    slices: list[SliceValues] = field(default_factory=list)

    @property
    def logits(self) -> npt.NDArray[np.float32]:
        """[N] in the split's order."""
        return self.accumulator.logits

    @property
    def labels(self) -> npt.NDArray[np.int8]:
        """[N] in the split's order."""
        return self.accumulator.labels


def evaluate(
    config: Config, data_dir: Path, checkpoint: Path, output_dir: Path, *, champion: Path | None = None, events: EventLog
) -> EvaluationResult:
    """Measure ``checkpoint`` on the test split of ``data_dir``, and ``champion`` (a checkpoint, too) beside it.

    A champion with other features is recorded as incomparable, with the reason. Raises ``DataError`` if there is no test split,
    ``CheckpointError`` if a checkpoint is damaged or the candidate has other features than the data.
    """
    manifest = Manifest.load(data_dir)
    _check(config, manifest, data_dir, checkpoint)
    rival = None if champion is None else _rival(champion, manifest)
    progress = _Progress(events, total=manifest.rows("test") * (1 if rival is None or rival.incomparable else 2))
    ours = _scores(checkpoint, data_dir, config, progress, slots=config.evaluation.slices)
    theirs = None
    if champion is not None and rival is not None and rival.incomparable is None:
        theirs = _scores(champion, data_dir, config, progress, slots=[])
        rival = rival.model_copy(update={"score": model_score(theirs, champion)})
    record = EvaluationRecord(
        name=config.name,
        config_digest=config.digest,
        feature_digest=manifest.feature_digest,
        data_fingerprint=manifest.fingerprint,
        rows=len(ours.labels),
        positives=int(np.count_nonzero(ours.labels)),
        candidate=model_score(ours, checkpoint),
        champion=rival,
        slices=_slices(ours, theirs, min_rows=config.evaluation.min_slice_rows),
    )
    result = _write(record, ours, theirs, config, output_dir)
    events.emit("metrics", stage=STAGE, values=result.metrics)
    return result


def score_split(score: Score, reader: ShardReader, *, batch_size: int, slots: list[str], progress: Callable[[int], None]) -> Scores:
    """Stream a split through ``score``. ``progress`` is told how many more records are done after each batch."""
    scores = Scores(slices=[SliceValues(slot) for slot in slots])
    for start in range(0, reader.rows, batch_size):
        stop = min(start + batch_size, reader.rows)
        batch = reader.read(start, stop)
        scores.accumulator.add(score(batch), batch.label)
        for values in scores.slices:
            values.add(reader.slice_values(values.slot, start, stop))
        progress(stop - start)
    return scores


def model_score(scores: Scores, checkpoint: Path) -> ModelScore:
    """Metrics of a model on a split, with reasons for those that are undefined."""
    logits, labels = scores.logits, scores.labels
    metrics, reasons = recorded(scores.accumulator.metrics()), scores.accumulator.undefined_reasons()
    pr, reliability = pr_curve(logits, labels), reliability_curve(logits, labels)
    extra = {"average_precision": pr.average_precision, "expected_calibration_error": reliability.expected_error()}
    return ModelScore(
        checkpoint=str(checkpoint),
        checkpoint_digest=checkpoint_digest(checkpoint),
        step=CheckpointManifest.load(checkpoint, verify=False).step,
        metrics=metrics,
        undefined={name: reasons.get(name, "not a finite number") for name in METRIC_NAMES if metrics[name] is None},
        **{name: value if np.isfinite(value) else None for name, value in extra.items()},
    )


class _Progress:
    """Emits progress events, at most two a second and one at the end."""

    def __init__(self, events: EventLog, *, total: int) -> None:
        self._events = events
        self._total = total
        self._done = 0
        self._begun = self._last = time.monotonic()

    def __call__(self, rows: int) -> None:
        self._done += rows
        now = time.monotonic()
        if now - self._last >= _PROGRESS_SECONDS or self._done == self._total:
            self._last = now
            speed = self._done / max(now - self._begun, 1e-9)
            self._events.emit("progress", stage=STAGE, done=self._done, total=self._total, samples_per_second=round(speed, 1))


def _check(config: Config, manifest: Manifest, data_dir: Path, checkpoint: Path) -> None:
    if manifest.rows("test") == 0:
        how = (
            f"let column {config.split.column!r} hold one of split.test {config.split.test} in some records"
            if config.split.by == "column"
            else "set split.fractions.test above 0"
        )
        raise DataError(
            f"{data_dir}: the test split has no records, so there is nothing to evaluate on; {how} and run `satrap preprocess` again"
        )
    if absent := [slot for slot in config.evaluation.slices if slot not in manifest.slice_columns]:
        raise DataError(
            f"{data_dir}: holds no values of slots {absent} for evaluation.slices; run `satrap preprocess` again with this configuration"
        )
    theirs = CheckpointManifest.load(checkpoint, verify=False).feature_digest
    if theirs != manifest.feature_digest:
        raise CheckpointError(
            f"{checkpoint}: was trained on other features (digest {theirs[:12]}) than {data_dir} holds ({manifest.feature_digest[:12]}); "
            "evaluate it on data preprocessed with its own schema, or train again on this data"
        )


def _rival(champion: Path, manifest: Manifest) -> ChampionScore:
    """The champion before it is scored, with the reason if it cannot be."""
    theirs = CheckpointManifest.load(champion, verify=False).feature_digest
    why = None
    if theirs != manifest.feature_digest:
        why = f"it was trained on other features: their digest is {theirs[:12]}, that of the data {manifest.feature_digest[:12]}"
    return ChampionScore(checkpoint=str(champion), checkpoint_digest=checkpoint_digest(champion), score=None, incomparable=why)


def _scores(checkpoint: Path, data_dir: Path, config: Config, progress: _Progress, *, slots: list[str]) -> Scores:
    # One model at a time: two sets of tables need not fit into memory together.
    with Scorer.load(checkpoint) as scorer, ShardReader.open(data_dir, "test") as reader:
        return score_split(scorer.score, reader, batch_size=config.evaluation.batch_size, slots=slots, progress=progress)


def _slices(ours: Scores, theirs: Scores | None, *, min_rows: int) -> list[SliceScore]:
    rival = None if theirs is None else theirs.logits
    return [score for values in ours.slices for score in slice_scores(values, ours.labels, ours.logits, rival, min_rows=min_rows)]


def _write(record: EvaluationRecord, ours: Scores, theirs: Scores | None, config: Config, output_dir: Path) -> EvaluationResult:
    evaluation, report, board = output_dir / "evaluation.json", output_dir / "report.html", output_dir / "tensorboard"
    curves = evaluation_html.Curves.of(ours.logits, ours.labels, None if theirs is None else theirs.logits)
    _write_board(board, record, ours, curves)
    write_text(report, evaluation_html.render(record, curves, shown=config.evaluation.metrics))
    write_text(evaluation, record.model_dump_json(indent=2) + "\n")
    values = {name: record.candidate.metrics[name] for name in config.evaluation.metrics}
    metrics: dict[str, float] = {name: value for name, value in values.items() if value is not None}
    reasons = {name: f"undefined: {record.candidate.undefined[name]}" for name in values if name not in metrics}
    shown: dict[str, float | str] = {name: metrics.get(name, reasons.get(name, "")) for name in values}
    return EvaluationResult(record, evaluation, report, board, metrics, shown)


@contextmanager
def _thread_errors_raised() -> Iterator[None]:
    """TensorBoard writes from a thread; what that dies of, a full disk, is raised here instead of printed there."""
    errors: list[BaseException] = []
    before, threading.excepthook = threading.excepthook, lambda failed: errors.append(failed.exc_value or failed.exc_type())
    try:
        yield
    finally:
        threading.excepthook = before
    if errors:
        raise errors[0]


def _write_board(directory: Path, record: EvaluationRecord, ours: Scores, curves: evaluation_html.Curves) -> None:
    from torch.utils.tensorboard import SummaryWriter

    step = record.candidate.step
    with _thread_errors_raised(), SummaryWriter(str(directory)) as writer:
        models: list[tuple[str, dict[MetricName, float | None]]] = [("test", record.candidate.metrics)]
        if record.champion is not None and record.champion.score is not None:
            models.append(("champion", record.champion.score.metrics))
        for prefix, metrics in models:
            for name, value in metrics.items():
                if value is not None:
                    writer.add_scalar(f"{prefix}/{name}", value, step)
        if record.positives and np.isfinite(ours.logits).all():
            writer.add_pr_curve("test/pr", ours.labels, predictions(ours.logits), step)
        writer.add_image("test/reliability", pixels(curves.reliability_figure()), step, dataformats="HWC")
