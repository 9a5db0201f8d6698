"""What the runner removes, and what it writes when the run's keeper is gone."""

import json
import tempfile

import pytest

from pipelines.local_runner import checked_scratch, record_interruption
from pipelines.runs import begin, load_record
from training.config_file import parse_config
from training.errors import ConfigError
from training.events import EventLog


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """A temporary directory of this test alone."""
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    return tmp_path / "tmp"


def test_a_scratch_directory_below_the_temporary_one_may_be_removed(temporary):
    (temporary / "satrap-x").mkdir()
    assert checked_scratch(temporary / "satrap-x") == temporary / "satrap-x"


def test_the_temporary_directory_itself_may_be_removed_only_if_it_is_a_scratch_directory(temporary, monkeypatch):
    (temporary / "satrap-x").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "satrap-x"))
    assert checked_scratch(temporary / "satrap-x") == temporary / "satrap-x"
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    with pytest.raises(ConfigError, match="not one to remove"):
        checked_scratch(temporary)


@pytest.mark.parametrize("name", [".", "..", "other", "absent/satrap-x", "link/satrap-y", "satrap-link", "satrap-file", "../satrap-z"])
def test_nothing_else_may(temporary, tmp_path, name):
    for folder in (temporary / "other", tmp_path / "elsewhere" / "satrap-y", tmp_path / "satrap-z"):
        folder.mkdir(parents=True)
    (temporary / "link").symlink_to(tmp_path / "elsewhere")
    (temporary / "satrap-link").symlink_to(temporary / "other")
    (temporary / "satrap-file").write_text("")
    with pytest.raises(ConfigError, match="not one to remove"):
        checked_scratch(temporary / name)


@pytest.fixture
def running(tmp_path):
    """Directory of a run whose events are ahead of its record."""
    tree = {
        "name": "m",
        "data": {"paths": ["/a.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}]},
        "split": {"by": "hash"},
        "output": {"root": str(tmp_path)},
    }
    _, run_dir = begin(parse_config(json.dumps(tree)), ir_digest="0")
    with EventLog(run_dir / "events.jsonl") as events:
        events.emit("stage", name="preprocess", status="succeeded", seconds=1.0, message="")
        events.emit("artifact", name="data", path="/d")
        events.emit("stage", name="train", status="started")
    return run_dir


def test_an_orphaned_run_is_recorded_as_interrupted_with_all_its_events_tell(running):
    record_interruption(running)
    record = load_record(running)
    assert record.status == "interrupted"
    assert record.ended is not None
    assert {name: stage.status for name, stage in record.stages.items()} == {"preprocess": "succeeded", "train": "interrupted"}
    assert record.paths == {"data": "/d"}


def test_a_record_that_was_ended_already_stays_as_it_is(running):
    record = load_record(running)
    record.end("succeeded")
    record.save(running)
    before = (running / "run.json").read_bytes()
    record_interruption(running)
    assert (running / "run.json").read_bytes() == before
