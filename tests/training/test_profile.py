"""The time of a step by phase: every role's spans on one clock, in a trace that viewers read; sums in TensorBoard."""

import json

import pytest
from click.testing import CliRunner
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pipelines.cli import cli
from training import launcher
from training.errors import TrainingError
from training.profile import Timeline, latencies, write_trace

WORKER_PHASES = {"dedup", "send", "wait_rows", "pool", "sum", "push_encode", "push_send", "wait_applied"}
PHASES = {
    "data_loader-0": {"read", "put_ids"},
    "embedding_worker-0": WORKER_PHASES,
    "nn_worker-0": {"wait", "look_up", "decode", "dense", "encode", "update"},
    "parameter_server-0": {"look_up", "encode", "decode", "update"},
    "parameter_server-1": {"look_up", "encode", "decode", "update"},
}


@pytest.fixture(scope="module")
def profiled(clicks_yaml, clicks_data, tmp_path_factory):
    """Output of a run of ten steps over processes, four of them profiled."""
    from training.config_file import load_config
    from training.events import EventLog

    folder = tmp_path_factory.mktemp("run")
    sets = ["training.profile_steps=4", "training.max_steps=10", "training.log_every_steps=5", "training.mode=hybrid"]
    with EventLog(folder / "events.jsonl") as events:
        launcher.train(load_config(clicks_yaml, [*sets, "training.wire_dtype=float16"]), clicks_data, folder / "train", events=events)
    return folder


def test_the_trace_holds_every_phase_of_the_first_steps_of_all_roles(profiled):
    result = CliRunner().invoke(cli, ["profile", str(profiled)])
    assert result.exit_code == 0, result.output
    assert str(profiled / "train" / "profile" / "trace.json") in result.output
    events = json.loads((profiled / "train" / "profile" / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    spans = [e for e in events if e["ph"] == "X"]
    found = {role: {e["name"] for e in spans if names[e["pid"]] == role} for role in names.values()}
    assert found.keys() == PHASES.keys()
    for role, phases in PHASES.items():
        assert phases <= found[role] <= phases | {"encode"}, role
    for role in names.values():
        assert {e["args"]["step"] for e in spans if names[e["pid"]] == role} == {0, 1, 2, 3}
    threads = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert {(e["pid"], e["tid"]) for e in spans} <= threads


def test_all_roles_share_one_clock(profiled):
    """A server's look-up lies within its rank's, so a reader may compare rows of the trace."""
    written, table = write_trace(profiled, profiled / "elsewhere" / "t.json")
    assert written == profiled / "elsewhere" / "t.json"
    assert "parameter_server" in table
    events = json.loads(written.read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    outer = {e["args"]["step"]: e for e in events if e["ph"] == "X" and e["name"] == "look_up" and names[e["pid"]] == "nn_worker-0"}
    inner = [e for e in events if e["ph"] == "X" and e["name"] == "look_up" and names[e["pid"]].startswith("parameter_server")]
    assert len(inner) == 8
    for e in inner:
        whole = outer[e["args"]["step"]]
        assert whole["ts"] <= e["ts"]
        assert e["ts"] + e["dur"] <= whole["ts"] + whole["dur"]


def test_latencies_of_every_role_are_in_tensorboard(profiled):
    accumulator = EventAccumulator(str(profiled / "train" / "tensorboard"))
    accumulator.Reload()
    tags = set(accumulator.Tags()["scalars"])
    expected = PHASES["nn_worker-0"] | {f"worker_{p}" for p in WORKER_PHASES} | {f"server_{p}" for p in PHASES["parameter_server-0"]}
    assert {f"latency_ms/{phase}" for phase in expected} <= tags


def test_no_profile_says_how_to_get_one(tmp_path):
    result = CliRunner().invoke(cli, ["profile", str(tmp_path)])
    assert isinstance(result.exception, TrainingError)
    assert f"{tmp_path}: holds no profile; train with --set training.profile_steps=50" in str(result.exception)


def test_sums_start_anew_when_taken_and_evaluation_counts_nowhere():
    timeline = Timeline("r")
    timeline.add("a", 0, started=0, ended=2_000_000)
    timeline.add("a", 1, started=0, ended=4_000_000)
    timeline.add("a", -1, started=0, ended=9_000_000)
    assert latencies("x_", [timeline.take()]) == {"latency_ms/x_a": 3.0}
    assert timeline.take() == {}


def test_a_damaged_profile_is_named(tmp_path):
    (tmp_path / "nn_worker-0.json").write_text("{")
    with pytest.raises(TrainingError, match=r"nn_worker-0\.json: is no profile of a role"):
        write_trace(tmp_path)
