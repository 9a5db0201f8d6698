"""What a person sees while a run goes on: one line per stage and, while training, a bar with samples/s, loss and staleness.

Everything comes from the run's events file, so a run in other processes and a stage in this one look the same. On a terminal the current
stage is drawn live by rich; elsewhere plain lines are written, training progress at most every five seconds.
"""

from __future__ import annotations

import sys
import textwrap
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from training.events import follow_events

Event = dict[str, Any]
_PLAIN_SECONDS = 5.0
_MESSAGE_COLUMN = 30
_STYLES = {"succeeded": "green", "reused": "cyan", "failed": "red"}
_WORDS = {"succeeded": "done", "reused": "reused", "failed": "FAILED"}


class View(Protocol):
    """Draws events. A context manager around the run."""

    def __enter__(self) -> View: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def handle(self, event: Event) -> None:
        """Draw one event."""


class PlainView:
    """Lines for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._last_progress = 0.0
        self._unwritten: Event | None = None

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stream.flush()

    def handle(self, event: Event) -> None:
        """Write a line for a stage's start and end, for notes, and now and then for progress; the last progress of training always."""
        if event["kind"] == "stage" and event["status"] == "started":
            self._last_progress = event["time"]
            self._write(f"{event['name']:<11}started")
        elif event["kind"] == "stage":
            if self._unwritten is not None and progress_text(self._unwritten):
                self._write_progress(self._unwritten)
            self._unwritten = None
            self._write(stage_line(event))
        elif event["kind"] == "note":
            self._write(f"{event['stage']:<11}note      {event['message']}")
        elif event["kind"] == "progress" and event["time"] - self._last_progress >= _PLAIN_SECONDS:
            self._last_progress = event["time"]
            self._write_progress(event)
        elif event["kind"] == "progress":
            self._unwritten = event

    def _write_progress(self, event: Event) -> None:
        self._unwritten = None
        self._write(f"{event['stage']:<11}{percent(event):>4.0f} %    {progress_text(event)}")

    def _write(self, line: str) -> None:
        self._stream.write(line.rstrip() + "\n")
        self._stream.flush()


class LiveView:
    """Finished stages as lines, the running one as a bar below them."""

    def __init__(self, console: Console) -> None:
        columns = (
            SpinnerColumn(),
            TextColumn("{task.description:<10}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            TextColumn("{task.fields[text]}"),
        )
        self._progress = Progress(*columns, console=console, transient=True, expand=False)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> LiveView:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._progress.stop()

    def handle(self, event: Event) -> None:
        """Move the bar, or print a finished stage above it."""
        if event["kind"] == "stage" and event["status"] == "started":
            self._tasks[event["name"]] = self._progress.add_task(event["name"], total=None, text="")
        elif event["kind"] == "stage":
            if (task := self._tasks.pop(event["name"], None)) is not None:
                self._progress.remove_task(task)
            style = _STYLES.get(event["status"], "yellow")
            mark = "\u2717" if event["status"] == "failed" else "\u2713"
            line = stage_line(event, width=self._progress.console.width - 2)
            self._print(f"[{style}]{mark}[/{style}] {escape(line)}")
        elif event["kind"] == "note":
            self._print(f"  {escape(event['stage']):<11}{escape(event['message'])}")
        elif event["kind"] == "progress" and (task := self._tasks.get(event["stage"])) is not None:
            self._progress.update(task, completed=event["done"], total=event["total"], text=progress_text(event))

    def _print(self, line: str) -> None:
        self._progress.console.print(line, highlight=False, soft_wrap=True)


def view(stream: TextIO | None = None) -> View:
    """The view that suits a stream (stderr when absent): live on a terminal, plain lines otherwise. NO_COLOR is respected."""
    stream = stream or sys.stderr
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return PlainView(stream)


class Follower:
    """Passes the events of a file to sinks from a thread, as they are written; a context manager that drains the file before it ends.

    An error in a sink ends the thread and is raised at the end of the ``with`` block.
    """

    def __init__(self, path: Path, sinks: Sequence[Callable[[Event], object]]) -> None:
        self._path = path
        self._sinks = sinks
        self._stop = threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="follow events", daemon=True)

    def __enter__(self) -> Follower:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        if self._error is not None and error is None:
            raise self._error

    def _follow(self) -> None:
        try:
            for event in follow_events(self._path, self._stop.is_set):
                for sink in self._sinks:
                    sink(event)
        except Exception as error:  # noqa: BLE001 - handed to the thread that waits
            self._error = error


def stage_line(event: Event, *, width: int | None = None) -> str:
    """``train      done     41.2 s  message``: how a stage ended. A message wider than ``width`` columns goes on below itself."""
    status, seconds = event["status"], event.get("seconds", 0.0)
    word = "stopped" if event.get("error") == "KeyboardInterrupt" else _WORDS.get(status, status)
    # The text of a failure follows as the command's error; here it would only stand twice.
    text = "" if status == "failed" and word == "FAILED" else str(event.get("message", ""))
    lines = text.splitlines()
    if width is not None:
        room = max(width - _MESSAGE_COLUMN, 20)
        lines = [part for line in lines for part in textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)]
    first, *more = lines or [""]
    line = f"{event['name']:<11}{word:<8}{seconds:>7.1f} s  {first}".rstrip()
    return "\n".join([line, *(" " * _MESSAGE_COLUMN + text for text in more)])


def progress_text(event: Event) -> str:
    """The numbers of a progress event in words."""
    if event["stage"] != "train":
        return ""
    parts = [f"step {event['done']:,}/{event['total']:,}"]
    forms = {"samples_per_second": "{:,.0f} samples/s", "loss": "loss {:.4f}", "staleness": "staleness {:.1f}", "auc": "valid auc {:.4f}"}
    parts += [form.format(event[key]) for key, form in forms.items() if event.get(key) is not None]
    return "  ".join(parts)


def percent(event: Event) -> float:
    """Share done, 0 to 100."""
    return 100.0 * event["done"] / event["total"] if event["total"] else 0.0
