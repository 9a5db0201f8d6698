"""Runs the roles of a training run as processes of this machine and watches over them.

Every role runs ``python -m training.roles``. The run ends well when all nn_worker ranks have; then the others are told to stop. If any
role ends before that, or shows no sign of life, the rest is stopped and the run fails with that role's own words. Nothing is left
behind: no process, no socket, no temporary directory. If the launcher itself is killed by SIGKILL, the kernel kills its roles; the
directory of their sockets stays then.
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

from training.checkpoint import CheckpointManifest, check_resumable, check_warm_startable, new_checkpoint, newest_checkpoint
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
        _check_newest(resume, output_dir)
    elif any((output_dir / "checkpoints").glob("step-*")):
        raise CheckpointError(f"{output_dir}: holds checkpoints of a run that was cut off; go on with --resume {output_dir}, or remove it")
    if warm_start is not None:
        warm_start = newest_checkpoint(warm_start).absolute()
        check_warm_startable(warm_start, config, feature_digest=manifest.feature_digest)
    if resume and warm_start:
        raise CheckpointError("resume and warm start exclude one another: a resumed run has its rows already")
    total_steps(config, manifest)  # Refuses an empty train split before anything starts.
    output_dir.mkdir(parents=True, exist_ok=True)
    if resume is not None and (done := CheckpointManifest.load(resume, verify=False)).step == total_steps(config, manifest):
        events.emit("note", stage="train", message=f"nothing left to train: {resume} is of the last step, {done.step:,}")
        return _adopted(resume, output_dir)
    if resume is not None and config.training.early_stopping is not None:
        _bring_best(resume, output_dir)
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
        metrics=CheckpointManifest.load(checkpoint, verify=False).metrics,
        steps=result["steps"],
        skipped_steps=result["skipped_steps"],
        stopped_early=result["stopped_early"],
        best_step=result["best_step"],
    )


def _check_newest(resume: Path, output_dir: Path) -> None:
    """Going on from an older checkpoint would mix its successors with those that lie there."""
    newest = max((p.name for p in (output_dir / "checkpoints").glob("step-*")), default="")
    if resume.parent == (output_dir / "checkpoints").absolute() and newest > resume.name:
        raise CheckpointError(
            f"{output_dir}: holds the newer checkpoint {newest}: go on with --resume {output_dir}, or choose another output directory"
        )


def _adopted(resume: Path, output_dir: Path) -> TrainResult:
    """The result of a run whose training was finished before: its checkpoint, copied."""
    with new_checkpoint(output_dir / "checkpoint") as building:
        shutil.copytree(resume, building, dirs_exist_ok=True)
    manifest = CheckpointManifest.load(output_dir / "checkpoint")
    return TrainResult(output_dir / "checkpoint", output_dir / "tensorboard", manifest.metrics, manifest.step, 0, False, manifest.best_step)


def _bring_best(resume: Path, output_dir: Path) -> None:
    """Early stopping may end with the best checkpoint from before the cut, so it must lie where the run goes on."""
    step = CheckpointManifest.load(resume, verify=False).best_step
    if step is None:
        return
    name = f"step-{step:08d}"
    target = output_dir / "checkpoints" / name
    source = resume if resume.name == name else resume.with_name(name)
    if target.exists():
        return
    if not (source / "manifest.json").exists():
        raise CheckpointError(
            f"{resume}: the best checkpoint so far, {name}, is not beside it, and early stopping may need it; "
            "resume where it is, or set training.early_stopping=null"
        )
    with new_checkpoint(target) as building:
        shutil.copytree(source, building, dirs_exist_ok=True)


class _Beat:
    """A role's sign of life, by this process's own clock: a machine that slept wakes with no role overdue."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: int | None = None
        self._changed = time.monotonic()

    @property
    def seen(self) -> bool:
        """Whether there was any sign yet."""
        return self._stamp is not None

    def silent_seconds(self) -> float:
        """Time since the last change seen, or since the start."""
        try:
            stamp = self._path.stat().st_mtime_ns
        except FileNotFoundError:
            pass
        else:
            if stamp != self._stamp:
                self._stamp, self._changed = stamp, time.monotonic()
        return time.monotonic() - self._changed


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
        beats = {key: _Beat(Path(self._job.rendezvous) / f"alive-{key[0]}-{key[1]}") for key in self._processes}
        training = self._job.config.training
        while not all(process.poll() == 0 for process in ranks):
            if self._lost():
                time.sleep(CAUSE_SECONDS)
                raise self._explained(self._lost())
            for (role, index), beat in beats.items():
                allowed = training.request_timeout_seconds if beat.seen else training.start_timeout_seconds
                if beat.silent_seconds() > allowed:
                    raise RoleError(f"{role}-{index} shows no sign of life for {allowed:g} s (stopped? swapped out?); the run was stopped")
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
        # torch makes a cache directory at import, used or not; here it goes with the run.
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{self._job.rendezvous}/inductor"}
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
        if code in (0, 128 + signal.SIGTERM):
            return RoleError(f"{role}-{index} was told to stop (SIGTERM) by somebody else; the run was stopped")
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
    stopping, valid = config.training.early_stopping, manifest.splits.get("valid")
    if stopping and (valid is None or not valid.rows):
        raise ConfigError(["training.early_stopping: the valid split is empty; give split a valid share, or remove it"])
    if stopping and valid and stopping.metric == "auc" and valid.positives in (0, valid.rows):
        raise ConfigError(
            [f"training.early_stopping.metric: auc is undefined, all {valid.rows:,} valid records are of one class; watch log_loss"]
        )


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
