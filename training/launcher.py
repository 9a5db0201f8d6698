"""Runs the roles of a training run as processes of this machine and watches over them.

Every role runs ``python -m training.roles``. The run ends well when all nn_worker ranks have; then the others are told to stop. If any
role ends before that, the rest is stopped and the run fails with that role's own words. Whatever happens, nothing is left behind:
no process (the kernel kills roles whose launcher died), no socket, no temporary directory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType

from training.checkpoint import check_resumable, check_warm_startable, newest_checkpoint
from training.config import Config
from training.data.manifest import Manifest
from training.errors import CheckpointError, ConfigError, RoleError
from training.events import EventLog
from training.job import ROLES, Job, RoleName, total_steps

POLL_SECONDS = 0.05
# When one role dies others fail on it within moments; waiting that long tells the cause from its consequences.
CAUSE_SECONDS = 0.5
GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class TrainResult:
    """What a finished run left."""

    checkpoint: Path
    tensorboard: Path
    metrics: dict[str, float]
    """Last metrics on the valid split; empty without one."""
    steps: int
    skipped_steps: int
    stopped_early: bool
    best_step: int | None
    """The step of the checkpoint, where early stopping chose it."""

    @property
    def summary(self) -> str:
        """One line: steps, why they were no more, metrics."""
        parts = [f"{self.steps:,} steps"]
        if self.best_step is not None and self.best_step != self.steps:
            parts[0] += f"{', stopped early' if self.stopped_early else ''}, kept step {self.best_step:,} (best on valid)"
        if self.skipped_steps:
            parts[0] += f", {self.skipped_steps:,} skipped (not finite)"
        return "  ".join([*parts, *(f"valid {name} {value:.4f}" for name, value in self.metrics.items())])


def train(
    config: Config, data_dir: Path, output_dir: Path, *, events: EventLog, resume: Path | None = None, warm_start: Path | None = None
) -> TrainResult:
    """Train on a preprocessed data directory; leaves ``checkpoint/``, ``tensorboard/`` and ``logs/`` in ``output_dir``.

    ``resume`` goes on from a checkpoint of the same run (a checkpoint, or the output directory of a run that was cut off);
    ``warm_start`` begins new data with another run's weights. Raises ``TrainingError`` and its kin; never hangs: every wait has
    a deadline from the configuration.
    """
    manifest = Manifest.load(data_dir)
    _check(config, manifest)
    if (output_dir / "checkpoint").exists():
        raise CheckpointError(
            f"{output_dir / 'checkpoint'}: a finished model is there already; choose another output directory, or remove it"
        )
    if resume is not None:
        resume = newest_checkpoint(resume).absolute()
        check_resumable(resume, config, fingerprint=manifest.fingerprint)
    elif any((output_dir / "checkpoints").glob("step-*")):
        raise CheckpointError(f"{output_dir}: holds checkpoints of a run that was cut off; go on with --resume {output_dir}, or remove it")
    if warm_start is not None:
        warm_start = newest_checkpoint(warm_start).absolute()
        check_warm_startable(warm_start, config, feature_digest=manifest.feature_digest)
    if resume and warm_start:
        raise CheckpointError("resume and warm start exclude one another: a resumed run has its rows already")
    total_steps(config, manifest)  # Refuses an empty train split before anything starts.
    output_dir.mkdir(parents=True, exist_ok=True)
    with _rendezvous_directory() as rendezvous, _termination_raises():
        job = Job(
            config_json=config.to_json(),
            data_dir=str(data_dir.absolute()),
            output_dir=str(output_dir.absolute()),
            token=secrets.token_hex(16),
            rendezvous=str(rendezvous),
            events=str(events.path.absolute()),
            resume=str(resume) if resume else None,
            warm_start=str(warm_start) if warm_start else None,
        )
        with RoleGroup(job, logs=output_dir / "logs") as group:
            group.run()
        result = json.loads((rendezvous / "result.json").read_text())
    checkpoint = output_dir / "checkpoint"
    Path(result["checkpoint"]).rename(checkpoint)
    shutil.rmtree(output_dir / "checkpoints", ignore_errors=True)
    return TrainResult(
        checkpoint=checkpoint,
        tensorboard=output_dir / "tensorboard",
        metrics=result["metrics"],
        steps=result["steps"],
        skipped_steps=result["skipped_steps"],
        stopped_early=result["stopped_early"],
        best_step=result["best_step"],
    )


class RoleGroup:
    """The processes of one job. A context manager: leaving it leaves no process."""

    def __init__(self, job: Job, *, logs: Path) -> None:
        self._job = job
        self._logs = logs
        self._processes: dict[tuple[RoleName, int], subprocess.Popen[bytes]] = {}

    def __enter__(self) -> RoleGroup:
        try:
            self._start()
        except BaseException:
            self._stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop()

    def run(self) -> None:
        """Wait until every rank is done; raises ``RoleError`` if a role is lost before."""
        ranks = [process for (role, _), process in self._processes.items() if role == "nn_worker"]
        while not all(process.poll() == 0 for process in ranks):
            if self._lost():
                time.sleep(CAUSE_SECONDS)
                raise self._explained(self._lost())
            time.sleep(POLL_SECONDS)

    def _start(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        job = Path(self._job.rendezvous) / "job.json"
        job.touch(mode=0o600)  # It holds the token.
        job.write_text(self._job.model_dump_json())
        for role in ROLES:
            for index in range(self._job.count(role)):
                self._processes[role, index] = self._spawn(role, index, job)
        record = {
            "rendezvous": self._job.rendezvous,
            "processes": [{"role": role, "index": index, "pid": process.pid} for (role, index), process in self._processes.items()],
        }
        Path(self._job.events).with_name("roles.json").write_text(json.dumps(record))

    def _spawn(self, role: RoleName, index: int, job: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "training.roles", role, "--index", str(index), "--job", str(job), "--parent", str(os.getpid())]
        environment = dict(os.environ)
        if role != "nn_worker":
            environment |= {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
        with (self._logs / f"{role}-{index}.log").open("ab") as log:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)

    def _lost(self) -> list[tuple[RoleName, int]]:
        """Roles that ended though the run has not: ranks that failed, and any other role that ended at all."""
        return [key for key, p in self._processes.items() if p.poll() is not None and (key[0] != "nn_worker" or p.returncode != 0)]

    def _explained(self, lost: list[tuple[RoleName, int]]) -> RoleError:
        """The most telling of several ends: killed by a signal before failed by itself, and servers before those that need them."""
        role, index = min(lost, key=lambda key: (self._processes[key].returncode >= 0, ROLES.index(key[0]), key[1]))
        code = self._processes[role, index].returncode
        log = self._logs / f"{role}-{index}.log"
        failure = Path(self._job.rendezvous) / f"failure-{role}-{index}.txt"
        if code < 0:
            name = signal.Signals(-code).name
            hint = " (out of memory? see the kernel log)" if name == "SIGKILL" else ""
            return RoleError(f"{role}-{index} was killed by {name}{hint}; the run was stopped. Its log: {log}")
        if failure.exists():
            return RoleError(f"{role}-{index}: {failure.read_text(encoding='utf-8')}")
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["(nothing in its log)"]
        return RoleError(f"{role}-{index} ended with status {code}: {last[0]}; the run was stopped. Its log: {log}")

    def _stop(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _check(config: Config, manifest: Manifest) -> None:
    """The data must be those the configuration describes."""
    theirs = [t.name for t in manifest.dense], [t.name for t in manifest.slots]
    ours = [f.name for f in config.schema_.dense], [f.name for f in config.schema_.categorical]
    if theirs != ours:
        raise ConfigError(
            [
                f"schema: the data directory holds dense {theirs[0]} and slots {theirs[1]}, "
                f"the configuration declares {ours[0]} and {ours[1]}; preprocess again"
            ]
        )
    if config.training.early_stopping and not manifest.rows("valid"):
        raise ConfigError(["training.early_stopping: the valid split is empty; give split a valid share, or remove it"])


@contextmanager
def _rendezvous_directory() -> Iterator[Path]:
    """A private directory with a short path: Unix socket paths are limited to 107 bytes."""
    base = tempfile.gettempdir()
    with tempfile.TemporaryDirectory(prefix="satrap-", dir=base if len(base) < 60 else "/tmp") as directory:  # noqa: S108 - created with mode 0700
        yield Path(directory)


@contextmanager
def _termination_raises() -> Iterator[None]:
    """While open, SIGTERM unwinds the main thread like Ctrl-C does, unless the caller handles it in a way of their own."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
