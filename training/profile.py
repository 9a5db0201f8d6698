"""Where a step's time goes: seconds per phase of every role, and a trace of the first steps that chrome://tracing and Perfetto read.

Every role keeps a ``Timeline``. Its sums go to TensorBoard (``latency_ms/<phase>`` of the rank, ``latency_ms/worker_<phase>``,
``latency_ms/server_<phase>``); with ``training.profile_steps`` it also keeps the spans of the first steps and leaves them in
``<train output>/profile/<role>-<index>.json`` when the role ends.
``write_trace`` joins those files. All times are of CLOCK_MONOTONIC, one clock for all processes of a machine.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from training.errors import TrainingError

FOLDER = "profile"
TRACE = "trace.json"


class Timeline:
    """One role's phases. A context manager that writes its spans, if it was told to keep any. Safe for all threads."""

    def __init__(self, name: str, *, steps: range = range(0), folder: Path | None = None) -> None:
        self.name = name
        self._steps = steps
        self._folder = folder
        self._lock = threading.Lock()
        self._sums: dict[str, list[int]] = {}
        self._spans: list[tuple[str, int, int, int, int]] = []
        self._threads: dict[int, str] = {}

    def __enter__(self) -> Timeline:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._steps and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            content = {"name": self.name, "threads": self._threads, "spans": self._spans}
            (self._folder / f"{self.name}.json").write_text(json.dumps(content))

    def span(self, phase: str, step: int) -> Span:
        """Context manager around one phase of a step; step -1 (evaluation) counts nowhere."""
        return Span(self, phase, step)

    def add(self, phase: str, step: int, *, started: int, ended: int) -> None:
        """A phase that was timed by ``time.perf_counter_ns``."""
        if step < 0:
            return
        with self._lock:
            sums = self._sums.setdefault(phase, [0, 0])
            sums[0] += 1
            sums[1] += ended - started
            if step in self._steps:
                thread = threading.current_thread()
                self._threads[thread.native_id or 0] = thread.name
                self._spans.append((phase, step, started, ended - started, thread.native_id or 0))

    def take(self) -> dict[str, tuple[int, float]]:
        """Calls and seconds per phase since the last ``take``."""
        with self._lock:
            taken, self._sums = self._sums, {}
        return {phase: (calls, nanoseconds / 1e9) for phase, (calls, nanoseconds) in taken.items()}


class Span:
    """See ``Timeline.span``."""

    __slots__ = ("_phase", "_started", "_step", "_timeline")

    def __init__(self, timeline: Timeline, phase: str, step: int) -> None:
        self._timeline = timeline
        self._phase = phase
        self._step = step

    def __enter__(self) -> None:
        self._started = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._timeline.add(self._phase, self._step, started=self._started, ended=time.perf_counter_ns())


def latencies(prefix: str, parts: Iterable[Mapping[str, tuple[int, float]]]) -> dict[str, float]:
    """Mean milliseconds per call and phase over all processes of a role, by TensorBoard tag."""
    totals: dict[str, list[float]] = {}
    for part in parts:
        for phase, (calls, seconds) in part.items():
            total = totals.setdefault(phase, [0, 0.0])
            total[0] += calls
            total[1] += seconds
    return {f"latency_ms/{prefix}{phase}": 1e3 * seconds / calls for phase, (calls, seconds) in totals.items() if calls}


def find_profile(path: Path) -> Path:
    """The profile folder of a run directory, a train output or a profile folder itself; raises ``TrainingError`` if there is none."""
    for candidate in (path, path / FOLDER, path / "train" / FOLDER):
        if list(candidate.glob("nn_worker-*.json")):
            return candidate
    raise TrainingError(f"{path}: holds no profile; train with --set training.profile_steps=50 (the first 50 steps are kept)")


def write_trace(path: Path, output: Path | None = None) -> tuple[Path, str]:
    """Join the roles' spans into one Chrome trace (``trace.json`` beside them unless told otherwise).

    Returns its path and a table of the milliseconds of a step. Raises ``TrainingError`` if there is no profile.
    """
    folder = find_profile(path)
    roles = _read(folder)
    if not any(role["spans"] for role in roles):
        raise TrainingError(f"{folder}: the roles recorded no step; the run was cut off before its first")
    output = output or folder / TRACE
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps({"traceEvents": _events(roles), "displayTimeUnit": "ms"}))
    return output, _table(roles)


def _read(folder: Path) -> list[dict[str, Any]]:
    roles = []
    for file in sorted(folder.glob("*-*.json")):
        try:
            roles.append(json.loads(file.read_text()))
        except ValueError as error:
            raise TrainingError(f"{file}: is no profile of a role: {error}; train again") from None
    return roles


def _events(roles: list[dict[str, Any]]) -> list[dict[str, Any]]:
    origin = min(span[2] for role in roles for span in role["spans"])
    events: list[dict[str, Any]] = []
    for number, role in enumerate(roles):
        events.append({"ph": "M", "name": "process_name", "pid": number, "args": {"name": role["name"]}})
        for thread, name in role["threads"].items():
            events.append({"ph": "M", "name": "thread_name", "pid": number, "tid": int(thread), "args": {"name": name}})
        for phase, step, started, duration, thread in role["spans"]:
            place = {"pid": number, "tid": thread, "ts": (started - origin) / 1e3, "dur": duration / 1e3}
            events.append({"ph": "X", "name": phase, "args": {"step": step}, **place})
    return events


def _table(roles: list[dict[str, Any]]) -> str:
    """Milliseconds a step spends in each phase, over all processes of a role: median, slowest tenth and mean over steps."""
    totals: dict[tuple[str, str], dict[int, int]] = {}
    for role in roles:
        for phase, step, _, duration, _ in role["spans"]:
            per_step = totals.setdefault((role["name"].rpartition("-")[0], phase), {})
            per_step[step] = per_step.get(step, 0) + duration
    lines = [f"{'ms per step':18}{'phase':16}{'median':>10}{'p90':>10}{'mean':>10}"]
    for (role_name, phase), per_step in totals.items():
        ordered = sorted(per_step.values())
        middle, slow = ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, 9 * len(ordered) // 10)]
        lines.append(f"{role_name:18}{phase:16}{middle / 1e6:10.3f}{slow / 1e6:10.3f}{sum(ordered) / len(ordered) / 1e6:10.3f}")
    return "\n".join(lines)
