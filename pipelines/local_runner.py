"""The process that executes a compiled pipeline with kfp.local: ``python -m pipelines.local_runner RUN_DIR LIFELINE``.

``LIFELINE`` is the number of an inherited pipe end whose other end the starting process holds: once that process is gone, however it
died, the pipe ends, and this process takes the whole run down with it.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
from pathlib import Path

from infra import local


def execute(run_dir: Path) -> None:
    """Run ``run_dir/pipeline.yaml`` with the arguments in ``run_dir/arguments.json``; raises if a step failed."""
    from kfp import components
    from kfp import local as kfp_local

    _answer_to_python3()
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
    run_dir, lifeline = Path(arguments[0]), int(arguments[1])
    orphaned = threading.Event()
    watch = threading.Thread(target=_watch, args=(run_dir, lifeline, orphaned), name="lifeline", daemon=True)
    watch.start()
    try:
        execute(run_dir)
    finally:
        if orphaned.is_set():
            watch.join()


def _watch(run_dir: Path, lifeline: int, orphaned: threading.Event) -> None:
    os.read(lifeline, 1)
    orphaned.set()
    local.release(run_dir, interrupted=True)
    shutil.rmtree(tempfile.gettempdir(), ignore_errors=True)
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
