"""Progress as data: every stage appends JSON lines to one file; whoever watches a run follows that file.

Processes append whole lines to a file opened with O_APPEND, so lines of several processes never mix.
Kinds: ``stage`` (name, status started|reused|succeeded|failed, seconds, message, error), ``progress`` (stage, done, total, and any of
samples_per_second, loss, staleness, auc, epoch), ``metrics`` (stage, values), ``note`` (stage, message), ``artifact`` (name, path),
``registration`` (version, promoted, reason).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any


class EventLog:
    """Appends events to a file; a context manager. Safe to share by path between processes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd: int | None = None

    def __enter__(self) -> EventLog:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def emit(self, kind: str, **fields: Any) -> None:
        """Append one event. Values must be JSON types."""
        if self._fd is None:
            raise RuntimeError(f"EventLog {self.path} is not open; use it as a context manager")
        line = json.dumps({"time": round(time.time(), 3), "kind": kind, **fields}) + "\n"
        os.write(self._fd, line.encode())


def read_events(path: Path) -> list[dict[str, Any]]:
    """All complete events of a file; an absent file has none."""
    if not path.exists():
        return []
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def follow_events(path: Path, stopped: Callable[[], bool], poll_seconds: float = 0.1) -> Iterator[dict[str, Any]]:
    """Yield events as they are appended; ends once ``stopped()`` is true and the file is drained."""
    offset, rest = 0, b""
    while True:
        ending = stopped()
        if path.exists():
            with path.open("rb") as file:
                file.seek(offset)
                chunk = file.read()
            offset += len(chunk)
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (json.loads(line) for line in lines)
        if ending:
            return
        time.sleep(poll_seconds)
