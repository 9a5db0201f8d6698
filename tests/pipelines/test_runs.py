import json
import os
import subprocess
import sys

import pytest

from infra import processes
from pipelines.runs import RunRecord, begin, find_run, list_runs, load_run, previous_data, runs_dir
from training.config_file import parse_config
from training.errors import ConfigError


@pytest.fixture
def config(tmp_path):
    tree = {
        "name": "m",
        "data": {"paths": ["/a.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}]},
        "split": {"by": "hash"},
        "output": {"root": str(tmp_path)},
    }
    return parse_config(json.dumps(tree))


def ended(config, status, *, data=None, name=None):
    record, run_dir = begin(config, ir_digest="0")
    if name:
        record.name = name
    if data:
        record.paths["data"] = str(data)
    record.end(status)
    record.save(run_dir)
    return record


def test_a_run_begins_with_a_directory_and_a_record_of_what_is_run(config, tmp_path):
    record, run_dir = begin(config, ir_digest="abc")
    assert run_dir == tmp_path / "runs" / record.id
    assert record.id.startswith("m-")
    assert load_run(run_dir) == record
    assert (record.status, record.config_digest, record.ir_digest, record.pid) == ("running", config.digest, "abc", os.getpid())


def test_two_runs_in_one_second_get_different_directories(config):
    assert begin(config, ir_digest="0")[1] != begin(config, ir_digest="0")[1]


def test_events_fill_the_record(config):
    record, _ = begin(config, ir_digest="0")
    for event in [
        {"time": 10.0, "kind": "stage", "name": "train", "status": "started"},
        {"time": 11.0, "kind": "progress", "stage": "train", "done": 1, "total": 2},
        {"time": 12.0, "kind": "metrics", "stage": "train", "values": {"auc": 0.7}},
        {"time": 12.0, "kind": "artifact", "name": "checkpoint", "path": "/c"},
        {"time": 12.5, "kind": "stage", "name": "train", "status": "succeeded", "seconds": 2.5, "message": "fine"},
        {"time": 13.0, "kind": "registration", "version": 3, "promoted": True, "reason": "first"},
        {"time": 14.0, "kind": "stage", "name": "release", "status": "failed", "seconds": 0.1, "message": "no", "error": "DataError"},
    ]:
        assert record.apply(event) is (event["kind"] != "progress")
    assert record.stages["train"].model_dump() == {"status": "succeeded", "started": 10.0, "seconds": 2.5, "message": "fine", "error": None}
    assert record.metrics == {"train": {"auc": 0.7}}
    assert record.paths == {"checkpoint": "/c"}
    assert (record.version, record.promoted, record.reason) == (3, True, "first")
    assert record.failed_stage == "release"


def test_an_interrupted_run_marks_the_stages_it_stopped(config):
    record, _ = begin(config, ir_digest="0")
    record.apply({"time": 1.0, "kind": "stage", "name": "preprocess", "status": "succeeded", "seconds": 1.0})
    record.apply({"time": 2.0, "kind": "stage", "name": "train", "status": "failed", "message": "told to stop"})
    record.apply({"time": 2.0, "kind": "stage", "name": "other", "status": "started"})
    record.end("interrupted")
    assert {name: stage.status for name, stage in record.stages.items()} == {
        "preprocess": "succeeded",
        "train": "interrupted",
        "other": "interrupted",
    }


def test_a_run_whose_process_was_killed_reads_as_interrupted(config, tmp_path):
    record, run_dir = begin(config, ir_digest="0")
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        record.pid, record.pid_started = process.pid, processes.started(process.pid)
        record.save(run_dir)
        assert load_run(run_dir).status == "running"
        process.kill()
    assert load_run(run_dir).status == "interrupted"


def test_a_reused_pid_does_not_keep_a_dead_run_alive(config):
    record, run_dir = begin(config, ir_digest="0")
    record.pid_started = "1@another-boot"
    record.save(run_dir)
    assert load_run(run_dir).status == "interrupted"


def test_runs_are_listed_oldest_first_and_strangers_ignored(config, tmp_path):
    first, second = ended(config, "succeeded"), ended(config, "failed")
    (runs_dir(tmp_path) / "not-a-run").mkdir()
    (runs_dir(tmp_path) / "damaged").mkdir()
    (runs_dir(tmp_path) / "damaged" / "run.json").write_text("{")
    assert {record.id for record, _ in list_runs(tmp_path)} == {first.id, second.id}
    started = [record.started for record, _ in list_runs(tmp_path)]
    assert started == sorted(started)
    assert list_runs(tmp_path / "nowhere") == []


def test_a_run_is_found_by_id_by_part_or_as_the_latest(config, tmp_path):
    first, second = ended(config, "succeeded"), ended(config, "succeeded")
    latest = list_runs(tmp_path)[-1][0].id
    assert find_run(tmp_path, None)[0].id == latest
    assert find_run(tmp_path, first.id)[0].id == first.id
    assert find_run(tmp_path, second.id[-7:])[0].id == second.id


@pytest.mark.parametrize(
    ("wanted", "message"), [("zzz", "zzz: no run matches; runs are m-"), ("m-", "m-: several runs match; runs are m-")]
)
def test_an_unknown_or_ambiguous_run_is_refused_with_the_choices(config, tmp_path, wanted, message):
    ended(config, "succeeded"), ended(config, "succeeded")
    with pytest.raises(ConfigError, match=message):
        find_run(tmp_path, wanted)


def test_without_runs_the_command_to_start_one_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no runs here; start one with `satrap run CONFIG`"):
        find_run(tmp_path, None)


def test_previous_data_is_that_of_the_latest_successful_run_of_the_same_name_that_still_exists(config, tmp_path):
    def data(name, *, there=True):
        path = tmp_path / name
        path.mkdir()
        if there:
            (path / "manifest.json").write_text("{}")
        return path

    assert previous_data(tmp_path, "m") is None
    good = data("good")
    for pause, (status, path, name) in enumerate(
        [
            ("succeeded", data("old"), None),
            ("succeeded", good, None),
            ("succeeded", data("removed", there=False), None),
            ("failed", data("bad"), None),
            ("succeeded", data("strange"), "other"),
        ]
    ):
        record = ended(config, status, data=path, name=name)
        record.started += pause
        record.save(runs_dir(tmp_path) / record.id)
    assert previous_data(tmp_path, "m") == good


def test_a_record_with_unknown_fields_is_not_taken_for_ours(config):
    record, run_dir = begin(config, ir_digest="0")
    (run_dir / "run.json").write_text(json.dumps({**record.model_dump(), "colour": "blue"}))
    assert load_run(run_dir) is None
    assert RunRecord.model_validate(record.model_dump()) == record
