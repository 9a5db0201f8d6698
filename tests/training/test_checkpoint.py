"""A checkpoint is whole or absent; a damaged one is refused by name."""

import json
import shutil

import pytest

from training.checkpoint import CheckpointManifest, check_warm_startable, new_checkpoint, newest_checkpoint
from training.data.manifest import Manifest
from training.errors import CheckpointError
from training.in_process import in_process_trainer
from training.scorer import Scorer


@pytest.fixture(scope="module")
def saved(clicks_yaml, clicks_data, tmp_path_factory):
    """Output directory of a run that saved steps 4, 8 and 12."""
    from training.config_file import load_config
    from training.events import EventLog

    folder = tmp_path_factory.mktemp("saved")
    config = load_config(clicks_yaml, ["training.max_steps=12", "training.checkpoint_every_steps=4", "training.keep_checkpoints=3"])
    with EventLog(folder / "events.jsonl") as events, in_process_trainer(config, clicks_data, folder, events=events) as rank:
        rank.run()
    return folder


@pytest.fixture
def checkpoint(saved, tmp_path):
    """A copy of the last one to damage."""
    return shutil.copytree(saved / "checkpoints" / "step-00000012", tmp_path / "checkpoint")


def test_the_newest_complete_checkpoint_is_found(saved, tmp_path):
    assert [p.name for p in sorted((saved / "checkpoints").iterdir())] == ["step-00000004", "step-00000008", "step-00000012"]
    assert newest_checkpoint(saved).name == "step-00000012"
    copy = shutil.copytree(saved, tmp_path / "copy")
    (copy / "checkpoints" / "step-00000012" / "manifest.json").unlink()
    assert newest_checkpoint(copy).name == "step-00000008"
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        newest_checkpoint(tmp_path)


def test_only_as_many_checkpoints_as_asked_for_stay(configured, clicks_data, tmp_path, events):
    config = configured("training.max_steps=12", "training.checkpoint_every_steps=3", "training.keep_checkpoints=1")
    with in_process_trainer(config, clicks_data, tmp_path, events=events) as rank:
        rank.run()
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000012"]


def test_every_damaged_or_missing_file_is_named(checkpoint):
    names = list(CheckpointManifest.load(checkpoint).files)
    assert "dense.pt" in names
    assert any(name.startswith("embedding/server-1-of-2/table-0/") for name in names)
    for name in names:
        path = checkpoint / name
        whole = path.read_bytes()
        path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
        with pytest.raises(CheckpointError, match=f"{path.name}: damaged"):
            Scorer.load(checkpoint)
        path.unlink()
        with pytest.raises(CheckpointError, match=f"{path.name}: missing"):
            CheckpointManifest.load(checkpoint)
        path.write_bytes(whole)
    Scorer.load(checkpoint).__exit__(None, None, None)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format_version": 1}'])
def test_a_broken_manifest_is_refused(checkpoint, text):
    (checkpoint / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: damaged"):
        Scorer.load(checkpoint)


def test_a_newer_format_is_refused(checkpoint):
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    (checkpoint / "manifest.json").write_text(json.dumps({**manifest, "format_version": 99}))
    with pytest.raises(CheckpointError, match="format version 99, this satrap reads 1"):
        CheckpointManifest.load(checkpoint)


def test_a_failed_write_leaves_nothing(tmp_path):
    def write():
        with new_checkpoint(tmp_path / "step-1") as building:
            (building / "half").write_text("x")
            raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match="cannot be written: No space left"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_a_warm_start_needs_equal_rows_and_network(saved, configured, clicks_data):
    digest = Manifest.load(clicks_data).feature_digest
    checkpoint = newest_checkpoint(saved)
    check_warm_startable(checkpoint, configured("training.batch_size=7", "training.mode=hybrid"), feature_digest=digest)
    with pytest.raises(CheckpointError, match="embedding differs"):
        check_warm_startable(checkpoint, configured("embedding.dim=8"), feature_digest=digest)
    with pytest.raises(CheckpointError, match="other features"):
        check_warm_startable(checkpoint, configured(), feature_digest="0")
