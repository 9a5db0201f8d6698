import os
import signal
import subprocess
import sys
import threading

import pytest

from training import stage as module
from training.errors import DataError
from training.events import read_events
from training.stage import stage


def without_times(run_dir):
    return [{k: v for k, v in event.items() if k not in ("time", "seconds")} for event in read_events(run_dir / "events.jsonl")]


def test_a_stage_reports_its_start_its_results_and_its_end(tmp_path):
    with stage("train", tmp_path) as current:
        current.artifact("checkpoint", tmp_path / "c")
        current.message = "well"
    assert without_times(tmp_path) == [
        {"kind": "stage", "name": "train", "status": "started"},
        {"kind": "artifact", "name": "checkpoint", "path": str(tmp_path / "c")},
        {"kind": "stage", "name": "train", "status": "succeeded", "message": "well"},
    ]


def test_a_reused_result_is_called_reused(tmp_path):
    with stage("preprocess", tmp_path) as current:
        current.reused = True
    assert without_times(tmp_path)[-1]["status"] == "reused"


@pytest.mark.parametrize(
    ("error", "message"),
    [(DataError("too few rows: 3"), "too few rows: 3"), (ZeroDivisionError("by 0"), "unexpected ZeroDivisionError: by 0")],
)
def test_an_error_is_recorded_and_passed_on(tmp_path, error, message):
    with pytest.raises(type(error)), stage("validate", tmp_path):
        raise error
    last = without_times(tmp_path)[-1]
    assert last == {"kind": "stage", "name": "validate", "status": "failed", "message": message, "error": type(error).__name__}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_unwinds_the_stage_once_and_handlers_are_restored(tmp_path, number):
    before = signal.getsignal(number)
    cleaned = []

    def work():
        with stage("train", tmp_path):
            try:
                os.kill(os.getpid(), number)
            finally:
                os.kill(os.getpid(), number)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]
    assert signal.getsignal(number) == before
    assert without_times(tmp_path)[-1]["message"] == "interrupted"


@pytest.mark.parametrize(
    ("there_before", "replaced", "reused"), [(True, False, True), (True, True, False), (False, True, False), (False, False, False)]
)
def test_a_stage_is_reused_if_it_leaves_its_result_as_it_was(tmp_path, there_before, replaced, reused):
    result = tmp_path / "manifest.json"
    if there_before:
        result.write_text("same")
    with stage("preprocess", tmp_path) as current, current.reuse_of(result):
        if replaced:
            (tmp_path / "new").write_text("same")
            (tmp_path / "new").replace(result)
    assert without_times(tmp_path)[-1]["status"] == ("reused" if reused else "succeeded")


@pytest.fixture
def runner(monkeypatch):
    """A process that stands for the one that runs the pipeline."""
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        monkeypatch.setenv(module.RUNNER, str(process.pid))
        monkeypatch.setattr(module, "LOOK_SECONDS", 0.01)
        yield process
        process.kill()


def test_a_stage_whose_runner_is_killed_is_interrupted(tmp_path, runner):
    cleaned = []

    def work():
        with stage("train", tmp_path):
            try:
                runner.kill()  # Not reaped: a zombie is no runner either.
                threading.Event().wait(60)
            finally:
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        work()
    assert cleaned == [True]
    assert without_times(tmp_path)[-1]["message"] == "interrupted"


def test_a_stage_ends_undisturbed_while_its_runner_lives_and_leaves_no_thread(tmp_path, runner):
    before = threading.active_count()
    with stage("train", tmp_path):
        assert threading.active_count() == before + 1
    assert threading.active_count() == before
    assert without_times(tmp_path)[-1]["status"] == "succeeded"


def test_a_stage_that_does_not_end_without_its_runner_is_killed(tmp_path, runner):
    code = """
import signal, sys, time
from training import stage
stage.LOOK_SECONDS = stage.GRACE_SECONDS = 0.05
with stage.stage("train", sys.argv[1]):
    print("up", flush=True)
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            pass
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "up\n"
        runner.kill()
        assert process.wait(timeout=60) == -signal.SIGKILL


def test_what_a_stage_died_of_is_passed_on_though_it_cannot_be_recorded(tmp_path, monkeypatch):
    def work():
        with stage("train", tmp_path) as current:
            monkeypatch.setattr(current.events, "emit", full)
            raise DataError("too few rows: 3")

    def full(*args, **fields):
        raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="too few rows"):
        work()
