"""A role in a pod knows which one it is and finds the others by their addresses."""

import socket
import threading

import pytest

from training.checkpoint import CheckpointManifest
from training.config_file import load_config
from training.errors import RoleError
from training.job import Job, Rendezvous
from training.pod import POD_INDEX, POD_IP, PROCESS, PROCESSES, RESTARTS, PodRendezvous, index_of, rendezvous_of, resumed

IP = {POD_IP: "127.0.0.1"}


@pytest.mark.parametrize(
    ("pod", "processes", "process", "index"), [("0", "1", "0", 0), ("3", "1", "0", 3), ("1", "8", "5", 13), ("0", "8", "7", 7)]
)
def test_the_environment_of_a_pod_tells_the_index(pod, processes, process, index):
    assert index_of({POD_INDEX: pod, PROCESSES: processes, PROCESS: process}) == index


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({}, "JOB_COMPLETION_INDEX='': which process is this"),
        ({POD_INDEX: "first", PROCESSES: "1", PROCESS: "0"}, "JOB_COMPLETION_INDEX='first'"),
        ({POD_INDEX: "0", PROCESSES: "8", PROCESS: "8"}, "processes 0 to 7"),
    ],
)
def test_an_environment_that_does_not_tell_is_an_error_that_says_what_to_do(environment, told):
    with pytest.raises(RoleError, match=told):
        index_of(environment)


@pytest.fixture
def job(clicks_yaml, tmp_path):
    """Two servers and two ranks on ports that are free, and half a second to come up."""
    config = load_config(clicks_yaml, ["training.start_timeout_seconds=0.5"])
    (tmp_path / "out").mkdir()
    return Job(
        config_json=config.to_json(),
        data_dir="/nowhere",
        output_dir=str(tmp_path / "out"),
        token="t",
        rendezvous=str(tmp_path),
        events="/dev/null",
        peers={"parameter_server": [free(), free()], "nn_worker": [free(), free()]},
    )


def free():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"localhost:{sock.getsockname()[1]}"


def listening(address):
    return socket.create_server(("127.0.0.1", int(address.split(":")[1])))


def test_addresses_are_those_that_answer_and_names_are_resolved(job):
    first, second = job.peers["parameter_server"]
    with listening(first), listening(second), PodRendezvous(job, IP) as rendezvous:
        found = rendezvous.addresses("parameter_server", 2)
    assert found == [f"tcp:127.0.0.1:{address.split(':')[1]}" for address in (first, second)]


def test_who_does_not_answer_is_named(job):
    first, second = job.peers["parameter_server"]
    with listening(first), PodRendezvous(job, IP) as rendezvous, pytest.raises(RoleError) as late:
        rendezvous.addresses("parameter_server", 2)
    assert f"parameter_server-1 at {second} (Connection refused)" in str(late.value)
    assert "parameter_server-0" not in str(late.value)
    assert "start_timeout_seconds" in str(late.value)


def test_a_name_that_does_not_resolve_yet_is_waited_for_and_named(job):
    job = job.model_copy(update={"peers": {"data_loader": ["no-such-pod.invalid:7700"]}})
    with PodRendezvous(job, IP) as rendezvous, pytest.raises(RoleError, match=r"data_loader-0 at no-such-pod\.invalid:7700"):
        rendezvous.addresses("data_loader", 1)


def test_a_rank_is_found_once_it_has_announced_itself_and_no_longer_when_it_is_gone(job):
    others = []
    with PodRendezvous(job, IP) as waiting:
        thread = threading.Thread(target=lambda: others.extend(waiting.addresses("nn_worker", 1)))
        thread.start()
        with PodRendezvous(job, IP) as rank:
            rank.announce("nn_worker", 0, "rows are ready")
            thread.join()
    assert others == [f"tcp:127.0.0.1:{job.peers['nn_worker'][0].split(':')[1]}"]
    with PodRendezvous(job, IP) as waiting, pytest.raises(RoleError, match="nn_worker-0"):
        waiting.addresses("nn_worker", 1)


def test_servers_listen_at_the_pods_own_address(job):
    training = job.config.training
    port = job.peers["parameter_server"][1].split(":")[1]
    assert PodRendezvous(job, IP).listen_address(training, "parameter_server", 1) == f"tcp:127.0.0.1:{port}"
    with pytest.raises(RoleError, match="SATRAP_POD_IP is not set"):
        PodRendezvous(job, {}).listen_address(training, "parameter_server", 1)


def test_without_addresses_roles_find_one_another_by_files(job):
    assert type(rendezvous_of(job)) is PodRendezvous
    assert type(rendezvous_of(job.model_copy(update={"peers": {}}))) is Rendezvous


def checkpoint(folder, step):
    folder.mkdir(parents=True)
    names = {"name": "clicks", "config_digest": "c", "feature_digest": "f", "fingerprint": "p"}
    manifest = CheckpointManifest(format_version=1, step=step, steps_per_epoch=4, rows={}, parts=[], metrics={}, files={}, **names)
    (folder / "manifest.json").write_text(manifest.model_dump_json())


def test_a_gang_that_was_started_again_goes_on_from_its_newest_checkpoint(job, tmp_path):
    assert resumed(job, {RESTARTS: "1"}).resume is None
    for step in (4, 8):
        checkpoint(tmp_path / "out" / "checkpoints" / f"step-{step:08d}", step)
    first = job.model_copy(update={"warm_start": "/gcs/b/yesterday"})
    assert resumed(first, {}) == first
    assert resumed(first, {RESTARTS: "0"}) == first
    again = resumed(first, {RESTARTS: "2"})
    assert (again.resume, again.warm_start) == (str(tmp_path / "out" / "checkpoints" / "step-00000008"), None)
