"""Runs in words: the report at the end of ``satrap run`` and the table of ``satrap runs``."""

from __future__ import annotations

import datetime
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.runs import RunRecord
from training.errors import SatrapError
from training.evaluation_record import EvaluationRecord

_KEY_DIGITS = 12


def run_report(record: RunRecord, run_dir: Path) -> str:
    """What a person needs after a run: metrics, version, where things lie, what to type next."""
    lines = [""]
    if table := _evaluation_table(record, run_dir):
        lines += [table, ""]
    if record.promoted is not None:
        lines.append(f"model        {registration_text(record.name, record.version, promoted=record.promoted, reason=record.reason)}")
    names = {"report": "report", "validation_report": "validation", "checkpoint": "checkpoint", "data": "data"}
    there = {name: Path(path) for name in names if (path := record.paths.get(name)) and Path(path).exists()}
    lines += [f"{names[name]:<13}{_abbreviated(path) if name == 'data' else short(path)}" for name, path in there.items()]
    if boards := sorted(run_dir.glob("*/tensorboard"), reverse=True):
        lines += [f"{'TensorBoard' if board is boards[0] else '':<13}{short(board)}" for board in boards]
        lines.append(f"{'to open it':<13}{_command()} tensorboard {record.id}{_root_option(run_dir)}")
    if record.status != "succeeded" and any(run_dir.glob("train/checkpoints/step-*/manifest.json")):
        config = shlex.quote(short(run_dir / "config.yaml"))
        lines.append(f"{'to go on':<13}{_command()} run {config} --resume {record.id}")
    lines.append(f"{'log':<13}{short(run_dir / 'logs' / 'pipeline.log')}")
    lines.append(f"{'run':<13}{record.id}: {record.status} in {record.seconds or 0.0:.1f} s")
    return "\n".join(lines)


def runs_table(records: Sequence[RunRecord]) -> str:
    """One line per run."""
    rows = [("RUN", "STATUS", "STARTED", "SECONDS", "AUC", "LOG LOSS", "VERSION")]
    for record in records:
        measured = record.metrics.get("evaluate", {})
        status = record.status if record.failed_stage is None or record.status != "failed" else f"failed: {record.failed_stage}"
        rows.append(
            (
                record.id,
                status,
                datetime.datetime.fromtimestamp(record.started).astimezone().strftime("%Y-%m-%d %H:%M:%S"),
                "" if record.seconds is None else f"{record.seconds:.1f}",
                _number(measured.get("auc")),
                _number(measured.get("log_loss")),
                _version(record),
            )
        )
    return columns(rows)


def metrics_table(by_model: Mapping[str, Mapping[str, float | str | None]]) -> str:
    """Metrics as rows, models as columns. A text stands for a metric without a value: why it has none."""
    names = list(dict.fromkeys(name for values in by_model.values() for name in values))
    return columns(
        [("METRIC", *(model.upper() for model in by_model)), *((n, *(_number(v.get(n)) for v in by_model.values())) for n in names)]
    )


def registration_text(name: str, version: int | None, *, promoted: bool, reason: str) -> str:
    """How a registration came out."""
    if promoted:
        return f"{name} v{version} is the champion: {reason}"
    return f"{name} refused: {reason}" if version is None else f"{name} v{version} registered, not promoted: {reason}"


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as aligned columns."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)


def short(path: str | Path) -> str:
    """A path relative to the current directory if it lies below it."""
    path = Path(path)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _evaluation_table(record: RunRecord, run_dir: Path) -> str:
    measured = record.metrics.get("evaluate")
    if measured is None:
        return ""
    try:
        evaluation = EvaluationRecord.load(run_dir / "evaluate" / "evaluation.json")
    except SatrapError:
        return metrics_table({"candidate": measured}) if measured else ""
    undefined = {str(name): f"undefined: {reason}" for name, reason in evaluation.candidate.undefined.items()}
    shown: dict[str, float | str | None] = {**measured, **undefined}
    by_model = {"candidate": shown}
    if evaluation.champion and evaluation.champion.score:
        champion = {str(name): value for name, value in evaluation.champion.score.metrics.items()}
        by_model["champion before"] = {name: champion.get(name) for name in shown}
    return metrics_table(by_model)


def _number(value: float | str | None) -> str:
    if isinstance(value, str):
        return value
    return "-" if value is None else f"{value:.4f}"


def _version(record: RunRecord) -> str:
    if record.promoted is None:
        return ""
    if record.version is None:
        return "refused"
    return f"v{record.version}" + (" promoted" if record.promoted else "")


def _abbreviated(path: Path) -> str:
    """A path whose last name is a long key, cut to a pattern that a shell completes to this path and no other."""
    pattern = f"{path.name[:_KEY_DIGITS]}*"
    return short(path.with_name(pattern) if list(path.parent.glob(pattern)) == [path] else path)


def _command() -> str:
    """What to type to get this program: its name if the shell would find it, its path otherwise."""
    return "satrap" if shutil.which("satrap") else short(Path(sys.argv[0]).absolute())


def _root_option(run_dir: Path) -> str:
    root = run_dir.parent.parent
    return "" if root == Path.cwd() / "satrap-runs" else f" --root {shlex.quote(short(root))}"
