"""The process that executes a compiled pipeline with kfp.local: ``python -m pipelines.local_runner RUN_DIR LIFELINE SCRATCH``.

``LIFELINE`` is the number of an inherited pipe end whose other end the starting process holds: once that process is gone, however it
died, the pipe ends, and this process takes the whole run down with it, writes that into the run's record and removes ``SCRATCH``, the
run's temporary directory. If this process is killed, too, the stage that runs notices (``training.stage``) and ends; nobody is left then to
change the record, which reads as interrupted through ``pipelines.runs.load_run`` only.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from infra import local
from pipelines.runs import load_record
from training.errors import ConfigError
from training.events import read_events
from training.stage import RUNNER

SCRATCH_PREFIX = "satrap-"
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def execute(run_dir: Path) -> None:
    """Run ``run_dir/pipeline.yaml`` with the arguments in ``run_dir/arguments.json``; raises if a step failed."""
    from kfp import components
    from kfp import local as kfp_local

    _answer_to_python3()
    os.environ[RUNNER] = str(os.getpid())
    runner = kfp_local.SubprocessRunner(use_venv=False)
    kfp_local.init(runner=runner, pipeline_root=str(run_dir / "artifacts"), raise_on_error=True)
    pipeline = components.load_component_from_file(str(run_dir / "pipeline.yaml"))
    pipeline(**json.loads((run_dir / "arguments.json").read_text(encoding="utf-8")))


def _answer_to_python3() -> None:
    """Make ``python3`` mean this interpreter.

    kfp.local replaces the text ``python3`` by ``sys.executable`` unquoted, in the shell script of a step and also in its arguments, where
    it may be part of a data path. With ``sys.executable`` itself ``python3`` nothing changes, and PATH finds the interpreter.
    """
    folder = Path(sys.executable).parent
    if not (folder / "python3").exists() or not (folder / "python3").samefile(sys.executable):
        folder = Path(tempfile.mkdtemp(prefix="python3-"))
        script = folder / "python3"
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n', encoding="utf-8")
        script.chmod(0o700)
    os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"
    sys.executable = "python3"


def main(arguments: list[str]) -> None:
    """Execute the run under a watch on the lifeline."""
    run_dir, lifeline, scratch = Path(arguments[0]), int(arguments[1]), checked_scratch(Path(arguments[2]))
    sys.stdout, sys.stderr = _Colourless.around(sys.stdout), _Colourless.around(sys.stderr)
    orphaned = threading.Event()
    watch = threading.Thread(target=_watch, args=(run_dir, lifeline, scratch, orphaned), name="lifeline", daemon=True)
    watch.start()
    try:
        execute(run_dir)
    finally:
        if orphaned.is_set():
            watch.join()


def checked_scratch(path: Path) -> Path:
    """The path, absolute, if it is a directory that may be removed: a ``satrap-*`` below the temporary directory, or that directory.

    Raises ``ConfigError`` otherwise.
    """
    path, top = path.absolute(), Path(tempfile.gettempdir()).resolve()
    whole = path.resolve()
    if path.is_symlink() or not path.is_dir() or not path.name.startswith(SCRATCH_PREFIX) or not (whole == top or top in whole.parents):
        raise ConfigError(
            [f"{path}: not a directory {SCRATCH_PREFIX}* below {top}, so not one to remove; this is for `satrap run` to give"]
        )
    return path


def _watch(run_dir: Path, lifeline: int, scratch: Path, orphaned: threading.Event) -> None:
    os.read(lifeline, 1)
    orphaned.set()
    try:
        local.release(run_dir, interrupted=True)
        record_interruption(run_dir)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os._exit(1)


def record_interruption(run_dir: Path) -> None:
    """Close the record of a run whose keeper is gone, with all that the run's events tell. An ended record stays as it is."""
    record = load_record(run_dir)
    if record is None or record.status != "running":
        return
    for event in read_events(run_dir / "events.jsonl"):
        record.apply(event)
    record.end("interrupted", "`satrap run` was killed: everything of the run was ended")
    record.save(run_dir)


class _Colourless(io.TextIOWrapper):
    """A standard stream without colour codes: kfp colours its lines whatever they are written to, here a file."""

    @classmethod
    def around(cls, stream: Any) -> _Colourless:
        """Takes over ``stream``, which must not be used any more."""
        return cls(stream.detach(), encoding="utf-8", errors="replace", write_through=True)

    def write(self, text: str) -> int:
        return super().write(_COLOUR.sub("", text))


if __name__ == "__main__":
    main(sys.argv[1:])
