"""The frame around one stage of a run: when it started, how it came out, what it made. Pipeline steps and CLI verbs use it alike."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from training.errors import SatrapError, os_error_text
from training.events import EventLog

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stage:
    """A stage that is running. ``message`` and ``reused`` may be set until it ends; they go into its last event."""

    def __init__(self, name: str, events: EventLog) -> None:
        self.name = name
        self.events = events
        self.message = ""
        self.reused = False

    def artifact(self, name: str, path: str | Path) -> None:
        """Say where something the stage makes lies (or will lie, if it is worth opening even after a failure)."""
        self.events.emit("artifact", name=name, path=str(Path(path).absolute()))

    @contextmanager
    def reuse_of(self, result: Path) -> Iterator[None]:
        """Call the stage reused if the block leaves ``result``, a file replaced whenever the work is done, as it was before."""
        before = _identity(result)
        yield
        self.reused = before is not None and _identity(result) == before


@contextmanager
def stage(name: str, run_dir: str | Path) -> Iterator[Stage]:
    """Frame a stage: its events go to ``run_dir/events.jsonl``; an error is recorded there and passed on.

    SIGINT, SIGTERM and SIGHUP become one ``KeyboardInterrupt``, so that everything the stage opened is closed on the way out; further
    ones are ignored until it is.
    """
    with EventLog(Path(run_dir) / "events.jsonl") as events, _interruptible():
        begun = time.monotonic()
        events.emit("stage", name=name, status="started")
        current = Stage(name, events)
        try:
            yield current
        except BaseException as error:
            seconds = round(time.monotonic() - begun, 3)
            events.emit("stage", name=name, status="failed", seconds=seconds, message=_text(error), error=type(error).__name__)
            raise
        seconds = round(time.monotonic() - begun, 3)
        events.emit("stage", name=name, status="reused" if current.reused else "succeeded", seconds=seconds, message=current.message)


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _text(error: BaseException) -> str:
    if isinstance(error, SatrapError):
        return str(error)
    if isinstance(error, OSError):
        return os_error_text(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return f"unexpected {type(error).__name__}: {error}"


@contextmanager
def _interruptible() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for other in _SIGNALS:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    previous = {number: signal.signal(number, interrupt) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
