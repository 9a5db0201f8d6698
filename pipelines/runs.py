"""The record of a run: what was run, how it goes, how it came out, and where its results lie.

One JSON file per run, ``<output.root>/runs/<id>/run.json``, replaced atomically whenever something changes. kfp.local keeps no history and
the status an exit handler is given cannot be relied on, so this record, fed by the run's events, is what everything judges by.
"""

from __future__ import annotations

import datetime
import os
import secrets
import subprocess
import time
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from infra import processes
from training.config import Config
from training.errors import ConfigError

RECORD = "run.json"
Status = Literal["running", "succeeded", "failed", "interrupted"]


class StageRecord(BaseModel):
    """How one stage went."""

    status: str
    """started, succeeded, reused, failed or interrupted."""
    started: float
    """Seconds since the epoch."""
    seconds: float | None = None
    message: str = ""
    error: str | None = None
    """Class of the error that ended it."""


class RunRecord(BaseModel):
    """One run. Only the process that executes the run changes it."""

    model_config = ConfigDict(extra="forbid")

    id: str
    name: str
    """``Config.name``."""
    status: Status = "running"
    started: float
    """Seconds since the epoch."""
    ended: float | None = None
    pid: int
    pid_started: str | None
    """Start of the process, see ``infra.processes.started``; with the pid it tells whether the run is still alive."""
    config_digest: str
    ir_digest: str
    """sha256 of the compiled pipeline."""
    git_commit: str | None = None
    """Commit of the code that ran, with ``+changes`` if files differed from it."""
    stages: dict[str, StageRecord] = {}
    metrics: dict[str, dict[str, float]] = {}
    """Stage -> metric -> value."""
    version: int | None = None
    """Version in the registry; None while unregistered or refused."""
    promoted: bool | None = None
    reason: str = ""
    """The registry's reason for promoting or refusing."""
    paths: dict[str, str] = {}
    """Artifact name -> absolute path."""
    error: str | None = None
    """What ended a failed run."""

    @property
    def failed_stage(self) -> str | None:
        """First stage that failed."""
        return next((name for name, stage in self.stages.items() if stage.status == "failed"), None)

    @property
    def seconds(self) -> float | None:
        """Duration of an ended run."""
        return None if self.ended is None else self.ended - self.started

    def apply(self, event: dict[str, Any]) -> bool:
        """Take over one event of the run; whether the record changed."""
        kind = event["kind"]
        if kind == "stage":
            self._apply_stage(event)
        elif kind == "metrics":
            self.metrics[event["stage"]] = {**self.metrics.get(event["stage"], {}), **event["values"]}
        elif kind == "artifact":
            self.paths[event["name"]] = event["path"]
        elif kind == "registration":
            self.version, self.promoted, self.reason = event["version"], event["promoted"], event["reason"]
        else:
            return False
        return True

    def _apply_stage(self, event: dict[str, Any]) -> None:
        before = self.stages.get(event["name"])
        started = event["time"] if before is None or event["status"] == "started" else before.started
        self.stages[event["name"]] = StageRecord(
            status=event["status"],
            started=started,
            seconds=event.get("seconds"),
            message=event.get("message", ""),
            error=event.get("error"),
        )

    def fail_unfinished(self, message: str) -> None:
        """Call the stages that started and never said how they ended failed."""
        for stage in self.stages.values():
            if stage.status == "started":
                stage.status, stage.message, stage.error = "failed", message, "Killed"

    def end(self, status: Status, error: str | None = None) -> None:
        """Close the record. Stages that an interruption stopped are marked so."""
        self.status, self.error, self.ended = status, error, round(time.time(), 3)
        for stage in self.stages.values():
            if stage.status == "started" or (status == "interrupted" and stage.status == "failed"):
                stage.status = "interrupted"

    def save(self, run_dir: Path) -> None:
        """Replace ``run.json`` atomically."""
        temporary = run_dir / f".{RECORD}.{os.getpid()}"
        with temporary.open("w", encoding="utf-8") as file:
            file.write(self.model_dump_json(indent=2) + "\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(run_dir / RECORD)


def begin(config: Config, *, ir_digest: str) -> tuple[RunRecord, Path]:
    """Make a run's directory under ``config.output.root`` and its first record. Returns the record and the directory, absolute."""
    runs = runs_dir(config.output.root)
    runs.mkdir(parents=True, exist_ok=True)
    now = time.time()
    while True:
        stamp = datetime.datetime.fromtimestamp(now).astimezone().strftime("%Y%m%d-%H%M%S")
        run_id = f"{config.name}-{stamp}-{secrets.token_hex(2)}"
        try:
            (runs / run_id).mkdir()
            break
        except FileExistsError:
            continue
    record = RunRecord(
        id=run_id,
        name=config.name,
        started=round(now, 3),
        pid=os.getpid(),
        pid_started=processes.started(os.getpid()),
        config_digest=config.digest,
        ir_digest=ir_digest,
        git_commit=_git_commit(),
    )
    record.save(runs / run_id)
    return record, runs / run_id


def runs_dir(root: str | Path) -> Path:
    """Directory of the run directories, absolute."""
    return Path(root).absolute() / "runs"


def load_run(run_dir: Path) -> RunRecord | None:
    """A run's record; None if the directory holds none that can be read. A run whose process is gone reads as interrupted.

    Whoever wants to know how a run is goes through here: where nobody was left to write it, the file itself says *running* for ever.
    """
    record = load_record(run_dir)
    if record is None:
        return None
    if record.status == "running" and (record.pid_started is None or processes.started(record.pid) != record.pid_started):
        record.end("interrupted")
        record.ended = None
    return record


def load_record(run_dir: Path) -> RunRecord | None:
    """The record as it stands in the file; None if there is none that can be read."""
    try:
        return RunRecord.model_validate_json((run_dir / RECORD).read_bytes())
    except (OSError, ValidationError):
        return None


def list_runs(root: str | Path) -> list[tuple[RunRecord, Path]]:
    """All runs under an output root with their directories, oldest first."""
    runs = runs_dir(root)
    found = [(record, path) for path in (runs.iterdir() if runs.is_dir() else ()) if (record := load_run(path)) is not None]
    return sorted(found, key=lambda pair: (pair[0].started, pair[0].id))


def find_run(root: str | Path, run_id: str | None) -> tuple[RunRecord, Path]:
    """A run by its id, or by an unambiguous part of it, or the latest if None. Raises ``ConfigError`` with the choices."""
    runs = list_runs(root)
    if not runs:
        raise ConfigError([f"{runs_dir(root)}: no runs here; start one with `satrap run CONFIG` or give another --root"])
    if run_id is None:
        return runs[-1]
    matches = [pair for pair in runs if pair[0].id == run_id] or [pair for pair in runs if run_id in pair[0].id]
    if len(matches) == 1:
        return matches[0]
    what = "several runs match" if matches else "no run matches"
    raise ConfigError([f"{run_id}: {what}; runs are {', '.join(record.id for record, _ in (matches or runs)[-10:])}"])


def previous_data(root: str | Path, name: str) -> Path | None:
    """Data directory of the latest successful run of a model name, if it is still there."""
    for record, _ in reversed(list_runs(root)):
        if record.name == name and record.status == "succeeded" and "data" in record.paths:
            data = Path(record.paths["data"])
            if (data / "manifest.json").exists():
                return data
    return None


def _git_commit() -> str | None:
    source = Path(__file__).parent
    try:
        commit = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=source, capture_output=True, text=True, check=True, timeout=5
        ).stdout.strip()
        status = ["git", "status", "--porcelain", "--untracked-files=no"]
        changes = subprocess.run(status, cwd=source, capture_output=True, text=True, check=True, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}+changes" if changes.strip() else commit
