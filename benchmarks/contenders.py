"""Programs measured against one another: each a process of its own that works off one request at a time, so that rounds alternate.

A contender is a module with ``serve(answer)`` at its end. It reads one JSON object per line from standard input and writes one per line
to what was its standard output; anything libraries print goes to standard error. Only the standard library is needed here: contenders
also run in the environment of the peers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CALM = {"OMP_WAIT_POLICY": "passive"}
"""Threads that wait sleep, in every contender: where somebody else has a core for a moment, spinning cost 10x (2 cores, load 8)."""
Answer = Callable[[dict[str, Any]], dict[str, Any]]


class ContenderError(Exception):
    """A contender cannot run or failed; the text says why."""


class Contender:
    """A running contender. A context manager that ends the process."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process

    @classmethod
    def start(cls, name: str, module: str, *, python: str | None = None, threads: int = 1) -> Contender:
        """Start ``python -m module``; ``python`` None is this interpreter. ``threads`` limits what OpenMP and numba use."""
        numbers = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS"), str(threads))
        # Rows of the peers lie in huge pages like ours, where the allocator can ask for them.
        environment = {**os.environ, **numbers, **CALM, "THP_MEM_ALLOC_ENABLE": "1", "PYTHONPATH": str(ROOT)}
        command = [python or sys.executable, "-m", module]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        return cls(name, subprocess.Popen(command, text=True, cwd=ROOT, env=environment, **pipes))  # type: ignore[call-overload]

    def __enter__(self) -> Contender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(10.0 if kind is None else 0.1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def ask(self, what: str, **arguments: Any) -> dict[str, Any]:
        """One request, and its answer. Raises ``ContenderError`` with the contender's own words."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise ContenderError(f"{self.name} ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ContenderError(f"{self.name}: {answer['error']}")
        return answer


def serve(answer: Answer) -> None:
    """Work off requests until standard input ends."""
    with os.fdopen(os.dup(1), "w") as replies:
        os.dup2(2, 1)
        for line in sys.stdin:
            try:
                reply = answer(json.loads(line))
            except Exception as error:  # noqa: BLE001 - whatever it was, the driver must hear of it
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()


def peers_python() -> str | None:
    """The interpreter with the peers' packages: PEERS_PYTHON, else .venv-peers; None if there is none."""
    given = os.environ.get("PEERS_PYTHON", "")
    path = Path(given) if given else ROOT / ".venv-peers" / "bin" / "python"
    return str(path) if path.exists() else None


def timed(call: Callable[[int], object], calls: int) -> dict[str, list[float]]:
    """Seconds of each of the calls, of this process and of the clock. One call before them warms up."""
    call(0)
    cpu, wall = [], []
    for number in range(1, calls + 1):
        clock, started = time.perf_counter(), time.process_time()
        call(number)
        cpu.append(time.process_time() - started)
        wall.append(time.perf_counter() - clock)
    return {"cpu": cpu, "wall": wall}
