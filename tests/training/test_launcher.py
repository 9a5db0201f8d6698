"""Real role processes over real sockets: they train, they fail loudly, and they leave nothing behind."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from training import launcher
from training.checkpoint import CheckpointManifest
from training.data.manifest import Manifest
from training.data.shards import ShardReader
from training.embedding.sockets import SocketTransport
from training.errors import CheckpointError, ConfigError, RoleError, TransportError
from training.events import EventLog, read_events
from training.in_process import in_process_trainer
from training.scorer import Scorer


def role_processes():
    """Of this test process: somebody else may be training on the same machine."""
    return [p for p in psutil.Process().children(recursive=True) if "training.roles" in p.cmdline()]


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path, monkeypatch):
    """No role process and no file in the temporary directory outlives a test."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary) if len(str(temporary)) < 60 else None)
    yield
    assert list(Path("/dev/shm").glob("*satrap*")) == []
    assert role_processes() == []
    assert list(temporary.iterdir()) == []


def scores(checkpoint, data):
    with ShardReader.open(data, "test") as reader, Scorer.load(checkpoint) as scorer:
        return scorer.score(reader.read(0, reader.rows))


@pytest.mark.parametrize("transport", ["tcp", "shared_memory"])
def test_processes_over_sockets_equal_the_trainer_in_one_process(configured, clicks_data, tmp_path, events, transport):
    roles = "training.roles={parameter_server: 2, embedding_worker: 2, data_loader: 2}"
    config = configured(roles, f"training.transport={transport}", "training.max_steps=30")
    result = launcher.train(config, clicks_data, tmp_path / "out", events=events)
    with in_process_trainer(config, clicks_data, tmp_path / "one", events=events) as rank:
        one = rank.run()
    assert result.checkpoint == tmp_path / "out" / "checkpoint"
    assert result.steps == rank.progress.step
    assert result.metrics == rank.progress.metrics
    np.testing.assert_array_equal(scores(result.checkpoint, clicks_data), scores(one, clicks_data))
    assert list(result.tensorboard.glob("events.out.tfevents.*"))
    progress = [e for e in read_events(events.path) if e["kind"] == "progress"]
    assert progress[-1]["done"] == progress[-1]["total"] == result.steps


def test_two_ranks_of_b_records_equal_one_rank_of_two_b(configured, clicks_data, tmp_path, events):
    one = launcher.train(configured("training.batch_size=64", "training.epochs=1"), clicks_data, tmp_path / "one", events=events)
    config = configured("training.batch_size=32", "training.epochs=1", "training.roles={nn_worker: 2, parameter_server: 2}")
    two = launcher.train(config, clicks_data, tmp_path / "two", events=events)
    assert one.steps == two.steps
    np.testing.assert_allclose(scores(two.checkpoint, clicks_data), scores(one.checkpoint, clicks_data), rtol=1e-3, atol=1e-4)


IN_THE_FAULT_SUITE = [pytest.param(role, marks=pytest.mark.fault) for role in ("embedding_worker", "data_loader")]


@pytest.mark.parametrize("role", ["parameter_server", "nn_worker", *IN_THE_FAULT_SUITE])
def test_losing_a_role_fails_the_run_naming_it(configured, clicks_data, tmp_path, role):
    config = configured("training.epochs=4000", "training.mode=hybrid")
    folder = tmp_path / "run"
    with EventLog(folder / "events.jsonl") as events:
        killed = threading.Thread(target=signal_when_training, args=(folder, role))
        killed.start()
        with pytest.raises(RoleError, match=f"{role}-0 was killed by SIGKILL"):
            launcher.train(config, clicks_data, folder / "out", events=events)
        killed.join()
    assert not (folder / "out" / "checkpoint").exists()


def signal_when_training(folder, role, number=signal.SIGKILL):
    wait_for_progress(folder / "events.jsonl")
    (victim,) = [p for p in json.loads((folder / "roles.json").read_text())["processes"] if (p["role"], p["index"]) == (role, 0)]
    os.kill(victim["pid"], number)


def wait_for_progress(path):
    """Until training reports its first steps."""
    from training.events import follow_events

    found = threading.Event()
    for event in follow_events(path, found.is_set, poll_seconds=0.02):
        if event["kind"] == "progress":
            found.set()


LAUNCH = """
import sys
from pathlib import Path
from training import launcher
from training.config_file import load_config
from training.errors import SatrapError
from training.events import EventLog
folder = Path(sys.argv[2])
with EventLog(folder / "events.jsonl") as events:
    try:
        launcher.train(load_config(sys.argv[1], ["training.epochs=4000"]), Path(sys.argv[3]), folder / "out", events=events)
    except SatrapError as error:
        sys.exit(f"refused: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
"""


SIGNALS = [signal.SIGTERM, *(pytest.param(number, marks=pytest.mark.fault, id=number.name) for number in (signal.SIGINT, signal.SIGKILL))]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_stopped_launcher_leaves_no_process(clicks_yaml, clicks_data, tmp_path, number):
    folder = tmp_path / "run"
    command = [sys.executable, "-c", LAUNCH, str(clicks_yaml), str(folder), str(clicks_data)]
    temporary = tmp_path / "tmp"
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(temporary)}) as process:
        wait_for_progress(folder / "events.jsonl")
        pids = [p["pid"] for p in json.loads((folder / "roles.json").read_text())["processes"]]
        assert all(psutil.pid_exists(pid) for pid in pids)
        nobody_but_the_owner_can_join(Path(json.loads((folder / "roles.json").read_text())["rendezvous"]))
        process.send_signal(number)
        _, error = process.communicate(timeout=20)
    expected = {signal.SIGTERM: 130, signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}
    assert process.returncode == expected[number], error
    alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=10)[1]
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []
    if number == signal.SIGKILL:  # Nobody was left to remove it; `satrap` does so when it releases the run.
        shutil.rmtree(json.loads((folder / "roles.json").read_text())["rendezvous"])


def nobody_but_the_owner_can_join(rendezvous):
    assert (rendezvous / "job.json").stat().st_mode & 0o777 == 0o600
    token = json.loads((rendezvous / "job.json").read_text())["token"]
    assert len(token) == 32
    address = json.loads((rendezvous / "parameter_server-0.json").read_text())["address"]
    with pytest.raises(TransportError, match="wrong token"):
        SocketTransport(5.0, token[::-1] + "x").connect(address, peer="parameter_server-0")
    SocketTransport(5.0, token).connect(address, peer="parameter_server-0").close()


def test_a_finished_model_is_never_overwritten(configured, clicks_data, tmp_path, events):
    (tmp_path / "out" / "checkpoint").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="a finished model is there already"):
        launcher.train(configured(), clicks_data, tmp_path / "out", events=events)


def test_data_of_another_schema_are_refused_before_anything_starts(configured, clicks_data, tmp_path, events):
    config = configured("schema.categorical=[{name: user}, {name: item}]")
    with pytest.raises(ConfigError, match=r"declares .*'user', 'item'.*preprocess again"):
        launcher.train(config, clicks_data, tmp_path / "out", events=events)
    assert not (tmp_path / "out").exists()


def test_a_cut_off_run_goes_on_from_its_output_directory(configured, clicks_data, tmp_path, events):
    config = configured("training.checkpoint_every_steps=4", "training.evaluate_every_steps=100")
    with in_process_trainer(
        configured("training.checkpoint_every_steps=4", "training.max_steps=8"), clicks_data, tmp_path / "out", events=events
    ) as rank:
        rank.run()
    with pytest.raises(CheckpointError, match=f"go on with --resume {tmp_path / 'out'}"):
        launcher.train(config, clicks_data, tmp_path / "out", events=events)
    with pytest.raises(CheckpointError, match=r"cannot be resumed: training\.batch_size is 32, was 64"):
        launcher.train(configured("training.batch_size=32"), clicks_data, tmp_path / "out", events=events, resume=tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"is of step 8, beyond the run's end at 5: raise training\.epochs"):
        launcher.train(configured("training.max_steps=5"), clicks_data, tmp_path / "out", events=events, resume=tmp_path / "out")
    older = tmp_path / "out" / "checkpoints" / "step-00000004"
    with pytest.raises(CheckpointError, match="holds the newer checkpoint step-00000008: go on with --resume"):
        launcher.train(config, clicks_data, tmp_path / "out", events=events, resume=older)
    done = launcher.train(configured("training.max_steps=8"), clicks_data, tmp_path / "done", events=events, resume=tmp_path / "out")
    assert CheckpointManifest.load(done.checkpoint).step == done.steps == 8
    result = launcher.train(config, clicks_data, tmp_path / "out", events=events, resume=tmp_path / "out")
    assert (
        CheckpointManifest.load(result.checkpoint).step
        == result.steps
        == config.training.epochs * -(-Manifest.load(clicks_data).rows("train") // 64)
    )
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_early_stopping_keeps_the_best_model_and_says_so(configured, clicks_data, tmp_path, events):
    """Steps this large make the model worse after its first evaluations."""
    config = configured(
        "training.epochs=40",
        "training.dense_optimizer.learning_rate=0.3",
        "embedding.optimizer.learning_rate=1.0",
        "training.early_stopping={metric: log_loss, patience: 2}",
    )
    result = launcher.train(config, clicks_data, tmp_path / "out", events=events)
    assert result.stopped_early
    assert CheckpointManifest.load(result.checkpoint).step == result.best_step < result.steps
    assert f"stopped early, kept step {result.best_step:,} (best on valid)" in result.summary
    assert result.metrics == CheckpointManifest.load(result.checkpoint).metrics
    losses = {e["step"]: e["values"]["valid_log_loss"] for e in read_events(events.path) if e["kind"] == "metrics"}
    assert min(losses, key=losses.get) == result.best_step


@pytest.mark.slow
def test_early_stopping_finds_its_best_model_again_after_a_cut(configured, clicks_data, tmp_path, events):
    settings = ["training.dense_optimizer.learning_rate=0.3", "embedding.optimizer.learning_rate=1.0", "training.keep_checkpoints=9"]
    stopping = "training.early_stopping={metric: log_loss, patience: 2}"
    config = configured(*settings, stopping, "training.epochs=40")
    whole = launcher.train(config, clicks_data, tmp_path / "whole", events=events)
    cut = configured(*settings, stopping, f"training.max_steps={whole.best_step + 1}", "training.evaluate_every_steps=14")
    with in_process_trainer(cut, clicks_data, tmp_path / "cut", events=events) as rank:
        rank.run()
    resumed = launcher.train(config, clicks_data, tmp_path / "new", events=events, resume=tmp_path / "cut")
    assert resumed.best_step == CheckpointManifest.load(resumed.checkpoint).step
    assert resumed.best_step <= whole.best_step + 1
    other = configured(*settings, "training.early_stopping={metric: auc, patience: 2}", "training.epochs=40")
    with pytest.raises(CheckpointError, match=r"training\.early_stopping\.metric is auc, was log_loss"):
        launcher.train(other, clicks_data, tmp_path / "other", events=events, resume=tmp_path / "cut")


@pytest.mark.parametrize(("number", "told"), [(signal.SIGSTOP, "shows no sign of life for 5 s"), (signal.SIGTERM, "was told to stop")])
def test_a_rank_that_hangs_or_is_told_to_stop_fails_the_run(configured, clicks_data, tmp_path, number, told):
    config = configured("training.epochs=4000", "training.request_timeout_seconds=5.0")
    folder = tmp_path / "run"
    with EventLog(folder / "events.jsonl") as events:
        sent = threading.Thread(target=signal_when_training, args=(folder, "nn_worker", number))
        sent.start()
        with pytest.raises(RoleError, match=f"nn_worker-0 {told}"):
            launcher.train(config, clicks_data, folder / "out", events=events)
        sent.join()


@pytest.mark.parametrize("mode", ["async", pytest.param("hybrid", marks=pytest.mark.slow)])
def test_two_ranks_train_in_every_mode(configured, clicks_data, tmp_path, events, mode):
    config = configured(f"training.mode={mode}", "training.batch_size=32", "training.roles={nn_worker: 2, parameter_server: 2}")
    result = launcher.train(config, clicks_data, tmp_path / "out", events=events)
    assert result.metrics["auc"] > 0.7
    assert result.steps == 2 * -(-Manifest.load(clicks_data).rows("train") // 64)


def test_a_warm_start_keeps_the_weights_and_takes_the_new_settings(configured, clicks_data, tmp_path, events):
    first = launcher.train(configured(), clicks_data, tmp_path / "first", events=events)
    config = configured("training.max_steps=1", "training.dense_optimizer.learning_rate=1.0e-9", "embedding.capacity_rows=2000")
    second = launcher.train(config, clicks_data, tmp_path / "second", events=events, warm_start=first.checkpoint)
    assert second.steps == 1
    a, b = (torch.load(r.checkpoint / "dense.pt", weights_only=True) for r in (first, second))
    assert b["optimizer"]["param_groups"][0]["lr"] == 1e-9
    for name in a["model"]:
        torch.testing.assert_close(b["model"][name], a["model"][name], rtol=0, atol=1e-6)
    assert CheckpointManifest.load(second.checkpoint).rows == CheckpointManifest.load(first.checkpoint).rows


@pytest.mark.slow
def test_a_table_too_small_for_a_checkpoint_is_refused(configured, clicks_data, tmp_path, events):
    first = launcher.train(configured("training.max_steps=6"), clicks_data, tmp_path / "first", events=events)
    config = configured("embedding.capacity_rows=64", "training.roles.parameter_server=1")
    with pytest.raises(RoleError, match=r"rows were saved, \d+ fit the tables now: raise embedding\.capacity_rows"):
        launcher.train(config, clicks_data, tmp_path / "second", events=events, warm_start=first.checkpoint)
