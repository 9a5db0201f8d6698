import os
import signal

import pytest

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
