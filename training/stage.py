"""The frame around one stage of a run: when it started, how it came out, what it made. Pipeline steps and CLI verbs use it alike."""

from __future__ import annotations

import errno
import os
import select
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from training.errors import SatrapError, os_error_text
from training.events import EventLog

RUNNER = "SATRAP_RUNNER"
"""Environment variable with the pid of the process that runs the pipeline: a stage does not go on without it."""
LOOK_SECONDS = 1.0
"""How often a stage looks for its runner."""
GRACE_SECONDS = 15.0
"""How long a stage without a runner may take to close what it opened; then it is killed."""
_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EFBIG)
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
    ones are ignored until it is. So does the end of the process named by ``RUNNER``, if that is set.
    """
    with EventLog(Path(run_dir) / "events.jsonl") as events, _interruptible(), _watched():
        begun = time.monotonic()
        events.emit("stage", name=name, status="started")
        current = Stage(name, events)
        try:
            yield current
        except BaseException as error:
            seconds = round(time.monotonic() - begun, 3)
            with suppress(OSError):  # On a full disk: what the stage died of says more.
                events.emit("stage", name=name, status="failed", seconds=seconds, message=_text(error), error=type(error).__name__)
            raise
        seconds = round(time.monotonic() - begun, 3)
        events.emit("stage", name=name, status="reused" if current.reused else "succeeded", seconds=seconds, message=current.message)


def is_about_room(text: str) -> bool:
    """Whether an error's text, whoever passed it on, is that of a file system that is full or not to be written to."""
    return any(os.strerror(number) in text for number in _NO_ROOM)


def room_text(text: str) -> str:
    """The text of an error, with what to do if it is about room: libraries hand such an ``OSError`` on as errors of their own."""
    told = any(words in text for words in ("output.root", "output directory", "free space"))
    return text if told or not is_about_room(text) else f"{text}; free space there, or choose another place (output.root, -o)"


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _text(error: BaseException) -> str:
    if isinstance(error, SatrapError):
        return room_text(str(error))
    if isinstance(error, OSError):
        return os_error_text(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return room_text(f"unexpected {type(error).__name__}: {error}")


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


@contextmanager
def _watched() -> Iterator[None]:
    """While open, the end of the runner stops this process as SIGTERM does, and by force if it does not end then."""
    runner = int(os.environ.get(RUNNER, "0"))
    if not runner:
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(runner, ended), name="watch the runner", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _watch(runner: int, ended: threading.Event) -> None:
    with suppress(ProcessLookupError):  # It is gone already.
        descriptor = os.pidfd_open(runner) if hasattr(os, "pidfd_open") else None
        try:
            while _alive(runner, descriptor):
                if ended.wait(LOOK_SECONDS):
                    return
        finally:
            if descriptor is not None:
                os.close(descriptor)
    os.kill(os.getpid(), signal.SIGTERM)
    if not ended.wait(GRACE_SECONDS):
        os.kill(os.getpid(), signal.SIGKILL)


def _alive(pid: int, descriptor: int | None) -> bool:
    """Whether a process runs. Its pidfd, where there are such (Linux), knows a zombie and a reused pid; raises ``ProcessLookupError``."""
    if descriptor is not None:
        return not select.select([descriptor], [], [], 0.0)[0]
    os.kill(pid, 0)
    return True
