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


def run_report(record: RunRecord, run_dir: Path) -> str:
    """What a person needs after a run: metrics, version, where things lie, what to type next."""
    lines = [""]
    if table := _evaluation_table(record, run_dir):
        lines += [table, ""]
    if record.promoted is not None:
        lines.append(f"model        {registration_text(record.name, record.version, promoted=record.promoted, reason=record.reason)}")
    names = {"report": "report", "validation_report": "validation", "checkpoint": "checkpoint", "data": "data"}
    lines += [f"{label:<13}{short(path)}" for name, label in names.items() if (path := record.paths.get(name)) and Path(path).exists()]
    lines += [f"{'TensorBoard':<13}{_command()} tensorboard {record.id}{_root_option(run_dir)}"] if _has_board(run_dir) else []
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


def metrics_table(by_model: Mapping[str, Mapping[str, float | None]]) -> str:
    """Metrics as rows, models as columns."""
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
    if not measured:
        return ""
    by_model: dict[str, Mapping[str, float | None]] = {"candidate": measured}
    if champion := _champion_metrics(run_dir / "evaluate" / "evaluation.json"):
        by_model["champion before"] = {name: champion.get(name) for name in measured}
    return metrics_table(by_model)


def _champion_metrics(evaluation: Path) -> dict[str, float | None]:
    try:
        champion = EvaluationRecord.load(evaluation).champion
    except SatrapError:
        return {}
    return {str(name): value for name, value in champion.score.metrics.items()} if champion and champion.score else {}


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _version(record: RunRecord) -> str:
    if record.promoted is None:
        return ""
    if record.version is None:
        return "refused"
    return f"v{record.version}" + (" promoted" if record.promoted else "")


def _has_board(run_dir: Path) -> bool:
    return any(run_dir.glob("*/tensorboard"))


def _command() -> str:
    """What to type to get this program: its name if the shell would find it, its path otherwise."""
    return "satrap" if shutil.which("satrap") else short(Path(sys.argv[0]).absolute())


def _root_option(run_dir: Path) -> str:
    root = run_dir.parent.parent
    return "" if root == Path.cwd() / "satrap-runs" else f" --root {shlex.quote(short(root))}"
