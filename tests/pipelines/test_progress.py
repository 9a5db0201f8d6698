import io
import threading

import pytest
from rich.console import Console

from pipelines.progress import Follower, LiveView, PlainView, percent, progress_text, stage_line, view
from training.events import EventLog, follow_events, read_events

TRAIN = {
    "kind": "progress",
    "stage": "train",
    "done": 1500,
    "total": 6000,
    "samples_per_second": 41234.5,
    "loss": 0.31239,
    "staleness": 1.5,
}


def plain(*events):
    stream = io.StringIO()
    with PlainView(stream) as screen:
        for event in events:
            screen.handle(event)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        ({"name": "train", "status": "succeeded", "seconds": 41.23, "message": ""}, "train      done       41.2 s"),
        ({"name": "preprocess", "status": "reused", "seconds": 0.2, "message": "unchanged"}, "preprocess reused      0.2 s  unchanged"),
        (
            {"name": "train", "status": "failed", "seconds": 3, "message": "interrupted", "error": "KeyboardInterrupt"},
            "train      stopped     3.0 s  interrupted",
        ),
        (
            {"name": "validate", "status": "succeeded", "seconds": 1, "message": "a\nb"},
            "validate   done        1.0 s  a\n" + " " * 30 + "b",
        ),
        ({"name": "validate", "status": "failed", "seconds": 1, "message": "told by the command's error"}, "validate   FAILED      1.0 s"),
    ],
)
def test_a_finished_stage_is_one_line_with_status_seconds_and_message(event, line):
    assert stage_line(event) == line


def test_on_a_narrow_terminal_a_message_goes_on_below_itself_and_no_word_is_lost():
    message = "363 steps  valid auc 0.9199  valid log_loss 0.2898  valid normalized_entropy 0.5581  valid calibration 1.0123"
    event = {"name": "train", "status": "succeeded", "seconds": 12.3, "message": message}
    lines = stage_line(event, width=78).splitlines()
    assert len(lines) > 1
    assert max(map(len, lines)) <= 78
    assert all(line.startswith(" " * 30) for line in lines[1:])
    assert " ".join(line[30:] for line in lines).split() == message.split()
    assert stage_line(event).count("\n") == 0, "a log has one line per stage"


def test_training_progress_says_speed_loss_and_staleness():
    assert progress_text(TRAIN) == "step 1,500/6,000  41,234 samples/s  loss 0.3124  staleness 1.5"
    assert percent(TRAIN) == 25.0


def test_plain_output_shows_progress_only_now_and_then():
    lines = plain(
        {"time": 0.0, "kind": "stage", "name": "train", "status": "started"},
        {"time": 3.0, **TRAIN},
        {"time": 11.0, **TRAIN},
        {"time": 12.0, **TRAIN},
        {"time": 13.0, "kind": "note", "stage": "train", "message": "hello"},
        {"time": 14.0, "kind": "artifact", "name": "x", "path": "/x"},
        {"time": 15.0, "kind": "stage", "name": "train", "status": "succeeded", "seconds": 15.0, "message": ""},
    )
    assert [line.split()[0:2] for line in lines] == [
        ["train", "started"],
        ["train", "25"],
        ["train", "note"],
        ["train", "25"],
        ["train", "done"],
    ]


def test_the_live_view_draws_the_bar_and_keeps_finished_stages():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=140, no_color=True)
    with LiveView(console) as screen:
        screen.handle({"time": 0.0, "kind": "stage", "name": "train", "status": "started"})
        screen.handle({"time": 1.0, **TRAIN})
        screen._progress.refresh()
        screen.handle({"time": 2.0, "kind": "stage", "name": "train", "status": "succeeded", "seconds": 2.0, "message": "[ok]"})
    text = stream.getvalue()
    assert "41,234 samples/s" in text
    assert "train      done        2.0 s  [ok]" in text


def test_without_a_terminal_lines_are_plain(monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert isinstance(view(io.StringIO()), PlainView)


def test_the_follower_passes_on_everything_written_before_it_is_left(tmp_path):
    seen = []
    with EventLog(tmp_path / "e.jsonl") as log, Follower(tmp_path / "e.jsonl", [seen.append]):
        for number in range(100):
            log.emit("note", stage="train", message=str(number))
    assert [event["message"] for event in seen] == [str(number) for number in range(100)]


def test_an_error_in_a_sink_surfaces(tmp_path):
    def broken(event):
        raise OSError("disk full")

    def follow():
        with EventLog(tmp_path / "e.jsonl") as log, Follower(tmp_path / "e.jsonl", [broken]):
            log.emit("note", stage="train", message="x")

    with pytest.raises(OSError, match="disk full"):
        follow()


def test_a_half_written_line_is_not_yet_an_event(tmp_path):
    path = tmp_path / "e.jsonl"
    path.write_text('{"kind": "note"}\n{"kind": "no')
    assert read_events(path) == [{"kind": "note"}]
    stopped = threading.Event()
    stopped.set()
    assert list(follow_events(path, stopped.is_set)) == [{"kind": "note"}]
