import json

import pytest

from infra import local, processes
from training.config_file import parse_config
from training.embedding.parameter_server import ParameterServer
from training.embedding.slots import tables
from training.errors import CapacityError
from training.events import EventLog

MACHINE = local.Machine(cores=4, memory_bytes=1024**3)


def config_of(**embedding):
    return parse_config(
        json.dumps(
            {
                "name": "m",
                "data": {"paths": ["/a.csv"], "format": "csv"},
                "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}, {"name": "b"}]},
                "split": {"by": "hash"},
                "embedding": embedding,
            }
        )
    )


def stages(run_dir, *ended):
    with EventLog(run_dir / "events.jsonl") as events:
        for name, status in ended:
            events.emit("stage", name=name, status=status)


def test_provision_measures_the_machine_and_has_nothing_to_do(tmp_path):
    found = local.provision(config_of(capacity_rows=1000), tmp_path, machine=MACHINE)
    assert found.message.startswith("local: nothing to provision (4 cores, 1.0 GiB free; 5 role processes")
    stored = json.loads((tmp_path / "provision.json").read_text())
    assert stored["machine"] == {"cores": 4, "memory_bytes": 1024**3}
    assert stored["processes"] == 5
    assert set(stored["table_bytes"]) == {"dim16-adagrad"}


def test_the_tables_of_all_parameter_servers_are_counted(tmp_path):
    config = parse_config(
        json.dumps({**config_of(dim=8, capacity_rows=50_000).to_dict(), "training": {"roles": {"parameter_server": 3}}}),
    )
    with ParameterServer.create(tables(config), num_servers=3, seed=0, wire_dtype="float32") as server:
        taken = sum(table.memory_bytes for table in server.tables)
    found = local.provision(config, tmp_path, machine=MACHINE)
    assert sum(found.table_bytes.values()) == 3 * taken


def test_this_machine_has_cores_and_memory():
    machine = local.measure()
    assert machine.cores >= 1
    assert machine.memory_bytes > 2**24


def test_tables_that_do_not_fit_are_refused_with_a_capacity_that_fits(tmp_path):
    with pytest.raises(CapacityError, match=r"need 15\.3 GiB at 100,000,000 rows each, but .* only 0\.8 GiB .*capacity_rows to") as refused:
        local.provision(config_of(capacity_rows=100_000_000), tmp_path, machine=MACHINE)
    advised = int(str(refused.value).split("capacity_rows to ")[1].split(" or less")[0].replace(",", ""))
    local.provision(config_of(capacity_rows=advised), tmp_path, machine=MACHINE)
    with pytest.raises(CapacityError):
        local.provision(config_of(capacity_rows=advised + 100), tmp_path, machine=MACHINE)


@pytest.mark.parametrize(
    ("ended", "interrupted", "outcome", "failed_stage"),
    [
        ([("train", "succeeded"), ("register", "succeeded")], False, "succeeded", None),
        ([("preprocess", "succeeded"), ("train", "failed")], False, "failed", "train"),
        ([("preprocess", "succeeded"), ("train", "started"), ("release", "started")], False, "failed", "train"),
        ([("train", "failed")], True, "interrupted", "train"),
        ([], False, "failed", None),
    ],
)
def test_release_judges_by_the_events_of_the_run(tmp_path, ended, interrupted, outcome, failed_stage):
    stages(tmp_path, *ended)
    local.release(tmp_path, interrupted=interrupted)
    stored = json.loads((tmp_path / "release.json").read_text())
    assert (stored["run"], stored["outcome"], stored["failed_stage"], stored["terminated"]) == (tmp_path.name, outcome, failed_stage, [])


def test_release_ends_what_is_left_of_the_run_and_twice_does_no_harm(tmp_path, monkeypatch):
    import subprocess
    import sys

    monkeypatch.setenv(processes.MARK, str(tmp_path))
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert local.release(tmp_path).terminated == [process.pid]
    finally:
        process.kill()
        process.wait()
    assert local.release(tmp_path).message == "local: nothing left to end"
