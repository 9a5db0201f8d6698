"""Processes of a run on this machine: which are alive, which belong to it, and how all of them are ended.

Every process of a run inherits the environment variable ``SATRAP_RUN_DIR`` from the process that started the run. That mark survives
a parent's death and a new session, which process groups and parent links do not, so nothing of a run can hide. Linux reads it from
``/proc``; elsewhere only ``started`` works and a run's processes are those of its process group.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path

MARK = "SATRAP_RUN_DIR"
"""Environment variable that marks a process as part of the run with this directory."""
_PROC = Path("/proc")


def started(pid: int) -> str | None:
    """When a process started, as a text to compare: with the pid it names one process even after pids are reused. None: no such process.

    A zombie counts as gone: it has ended and only waits to be reaped.
    """
    if _PROC.joinpath("self").exists():
        fields = _stat(pid)
        if fields is None or fields[0] == "Z":
            return None
        return f"{fields[19]}@{_boot_id()}"
    result = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return result.stdout.strip() or None


def marked(run_dir: Path) -> list[int]:
    """Living processes of a run, without the calling process and its ancestors, in ascending order."""
    needle = f"{MARK}={run_dir}".encode()
    own = {os.getpid(), *_ancestors(os.getpid())}
    found = []
    for entry in _PROC.iterdir() if _PROC.exists() else ():
        if not entry.name.isdigit() or int(entry.name) in own:
            continue
        try:
            environment = (entry / "environ").read_bytes()
        except OSError:  # ended meanwhile, or another user's
            continue
        if needle in environment.split(b"\0") and started(int(entry.name)) is not None:
            found.append(int(entry.name))
    return sorted(found)


def terminate(
    find: Callable[[], Iterable[int]], *, grace_seconds: float = 10.0, hurry: Callable[[], bool] = lambda: False, poll_seconds: float = 0.05
) -> list[int]:
    """End all processes that ``find`` names: SIGTERM, a grace period, then SIGKILL until none is left.

    ``find`` is asked again and again, so that processes started meanwhile are ended too. ``hurry()`` true cuts the grace period short.
    Returns the pids that were signalled. Children of the caller are reaped by the caller.
    """
    signalled: set[int] = set()
    deadline = time.monotonic() + grace_seconds
    while remaining := set(find()):
        if time.monotonic() >= deadline or hurry():
            _kill(remaining)
        else:
            _send(remaining - signalled, signal.SIGTERM)
        signalled |= remaining
        if time.monotonic() >= deadline + grace_seconds:
            break
        time.sleep(poll_seconds)
    return sorted(signalled)


def _kill(pids: Iterable[int]) -> None:
    _send(pids, signal.SIGKILL)


def _send(pids: Iterable[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):  # ended meanwhile
            continue


def _ancestors(pid: int) -> list[int]:
    line = []
    while (fields := _stat(pid)) is not None and (pid := int(fields[1])) > 0:
        line.append(pid)
    return line


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/<pid>/stat`` from the third (state) on: 0 state, 1 parent, 19 start time in ticks since boot."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text[text.rfind(")") + 2 :].split()


def _boot_id() -> str:
    try:
        return (_PROC / "sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        return ""
