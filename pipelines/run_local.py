"""``run``: the compiled pipeline on this machine, in processes of its own, watched through the run's events.

kfp.local patches ``print`` and keeps global state, so every run gets a fresh interpreter (``pipelines.local_runner``) in a session of its
own; whatever it prints goes to ``logs/pipeline.log``. This process keeps the record, draws the progress and, on SIGINT, SIGTERM or SIGHUP,
ends every process of the run before it returns.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, TracebackType

import yaml

from infra import local, processes
from pipelines.compile import compile_pipeline, ir_digest
from pipelines.local_runner import SCRATCH_PREFIX
from pipelines.progress import Event, Follower, View
from pipelines.runs import RunRecord, begin, previous_data
from training.config import Config
from training.errors import os_error_text
from training.stage import is_about_room

GRACE_SECONDS = 10.0
_SETTINGS = {
    "PYTHONSAFEPATH": "1",  # a folder `training` in the current directory must not shadow ours
    "PYTHONUNBUFFERED": "1",  # the log is complete up to the moment of a failure
    "PYTHONHASHSEED": "0",  # kfp.local keeps tasks in sets: without it their order changes from run to run
}
_FULL_BYTES = 64 * 1024
"""A file system with less room than this is full: the next page of a log may not fit."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_local(config: Config, view: View, *, resume: Path | None = None) -> tuple[RunRecord, Path]:
    """Compile and run the pipeline; returns the ended record and the run's directory.

    A failing stage is no exception here: it stands in the record. Nor is a record that cannot be written: the run has failed then.
    ``resume`` is a checkpoint to go on from. Nothing of the run is alive when this returns. Raises ``OSError`` where a run cannot begin.
    """
    with _Stop() as stop:
        pipeline = compile_pipeline()
        previous = previous_data(config.output.root, config.name)
        record, run_dir = begin(config, ir_digest=ir_digest(pipeline))
        arguments = {
            "config_json": _as_parameter(config),
            "run_dir": str(run_dir),
            "previous": str(previous or ""),
            "resume": str(resume.absolute()) if resume else "",
        }
        (run_dir / "pipeline.yaml").write_text(pipeline, encoding="utf-8")
        (run_dir / "config.yaml").write_text(yaml.safe_dump(config.to_dict(), sort_keys=False, allow_unicode=True), encoding="utf-8")
        (run_dir / "arguments.json").write_text(json.dumps(arguments, indent=2), encoding="utf-8")
        _execute(record, run_dir, view, stop)
        return record, run_dir


def _as_parameter(config: Config) -> str:
    """The configuration as kfp can carry it: short, and without anything that looks like one of kfp's placeholders.

    Only what was set is written: a parameter may have 128 KiB, and the whole tree of some hundred slots has more.
    """
    return config.model_dump_json(by_alias=True, exclude_unset=True).replace("{{$", "{{\\u0024")


def _execute(record: RunRecord, run_dir: Path, view: View, stop: _Stop) -> None:
    def keep(event: Event) -> None:
        if record.apply(event):
            with suppress(OSError):  # A full disk ends the stages by itself, and the last save tells.
                record.save(run_dir)

    code: int | None = None
    try:
        with view, Follower(run_dir / "events.jsonl", [keep, view.handle]), _runner(run_dir, stop) as runner:
            while runner.poll() is None and not stop.requested:
                stop.wait(0.1)
            code = runner.poll()
    finally:
        _close(record, run_dir, code, stop)


def _close(record: RunRecord, run_dir: Path, code: int | None, stop: _Stop) -> None:
    """End the record of a run whose processes are gone. ``code`` is the exit status of the runner, None if it did not end by itself."""
    if code is None:
        record.end(
            "interrupted", "interrupted: everything of the run was ended" if stop.requested else "stopped by an error of satrap itself"
        )
    elif code == 0 and record.failed_stage is None:
        record.end("succeeded")
    else:
        record.end("failed", _failure(record, run_dir, code))
    try:
        if code is None or not (run_dir / "release.json").exists():
            local.release(run_dir, interrupted=code is None)
        record.save(run_dir)
    except OSError as error:
        # A stage that failed for the same reason has told it already.
        told = record.error if record.status == "failed" else f"the record of the run could not be written: {os_error_text(error)}"
        record.end("failed", told)


@contextmanager
def _runner(run_dir: Path, stop: _Stop) -> Iterator[subprocess.Popen[bytes]]:
    """The process that executes the pipeline. Leaving the block ends it and every other process of the run, and removes their files."""
    scratch = tempfile.mkdtemp(prefix=SCRATCH_PREFIX)  # its TMPDIR: kfp never removes its temporary files
    log = run_dir / "logs" / "pipeline.log"
    log.parent.mkdir(exist_ok=True)
    lifeline, ours = os.pipe()
    environment = {**os.environ, processes.MARK: str(run_dir), **_SETTINGS, "TMPDIR": scratch}
    try:
        with log.open("ab") as output:
            runner = subprocess.Popen(
                [sys.executable, "-m", "pipelines.local_runner", str(run_dir), str(lifeline), scratch],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                pass_fds=(lifeline,),
                start_new_session=True,
            )
        os.close(lifeline)
        try:
            yield runner
        finally:
            processes.terminate(lambda: _alive(runner, run_dir), grace_seconds=GRACE_SECONDS, hurry=lambda: stop.hurry)
            runner.wait()
    finally:
        os.close(ours)
        shutil.rmtree(scratch, ignore_errors=True)


def _alive(runner: subprocess.Popen[bytes], run_dir: Path) -> list[int]:
    """Processes of the run. The runner is reaped here, so that it does not count once it has ended."""
    own = [] if runner.poll() is not None else [runner.pid]
    return sorted({*own, *processes.marked(run_dir)})


def _failure(record: RunRecord, run_dir: Path, code: int) -> str:
    log = run_dir / "logs" / "pipeline.log"
    if code < 0:
        record.fail_unfinished("interrupted")
        return f"the process that executes the pipeline was killed by {_signal_name(-code)} (out of memory? see the kernel log); see {log}"
    record.fail_unfinished(_cause_of_death(run_dir))
    stage = record.failed_stage
    if stage is not None:
        return f"{stage}: {_with_place(record.stages[stage].message, run_dir.parent.parent)}"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"the pipeline's process ended with status {code} outside any stage: {lines[-1] if lines else 'it printed nothing'}; see {log}"


def _cause_of_death(run_dir: Path) -> str:
    """Why a stage may have ended without a word."""
    if shutil.disk_usage(run_dir).free < _FULL_BYTES:
        return os_error_text(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir.parent.parent)))
    return f"its process was killed (out of memory? see the kernel log); see {run_dir / 'logs'}"


def _with_place(message: str, root: Path) -> str:
    """A failure of the file system says where the place is that it speaks of; errors of a write do not know."""
    return f"{message}; output.root is {root}" if is_about_room(message) and str(root) not in message else message


def _signal_name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


class _Stop:
    """Turns signals into a request to stop, so that no exception can fall between two lines of clean-up. A context manager.

    The first signal asks to stop; any later one asks to hurry: the grace period for ending processes is cut short.
    """

    def __init__(self) -> None:
        self.requested = False
        self.hurry = False
        self._event = threading.Event()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> _Stop:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def wait(self, seconds: float) -> None:
        """Sleep, but not past a request to stop."""
        self._event.wait(seconds)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        self.hurry = self.requested
        self.requested = True
        self._event.set()
