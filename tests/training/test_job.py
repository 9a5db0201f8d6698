"""What a job description says about the wire between its roles."""

import pytest

from training.embedding.messages import Kind
from training.embedding.transport import Message
from training.job import Job, Rendezvous


def job_of(config, folder):
    paths = dict.fromkeys(("data_dir", "output_dir", "rendezvous", "events"), str(folder))
    return Job(config_json=config.to_json(), token="t", **paths)


@pytest.mark.parametrize(
    ("sets", "address", "shares"),
    [
        ((), "unix:{}/parameter_server-3.sock", True),
        (("training.transport=unix",), "unix:{}/parameter_server-3.sock", False),
        (("training.transport=tcp",), "tcp:127.0.0.1:", False),
        (("training.transport=tcp", "training.tcp_host=127.0.0.2"), "tcp:127.0.0.2:", False),
        (("training.transport=tcp", "training.tcp_host=0.0.0.0"), "tcp:0.0.0.0:", False),
    ],
)
def test_roles_listen_where_the_configuration_says_and_share_memory_by_default(configured, tmp_path, sets, address, shares):
    job = job_of(configured(*sets), tmp_path)
    listen = Rendezvous(tmp_path, 1.0).listen_address(job.config.training, "parameter_server", 3)
    with job.transport().serve(lambda message: Message(Kind.OK, message.meta), listen) as server:
        assert server.address.startswith(address.format(tmp_path))
        connection = job.transport().connect(server.address, peer="parameter_server-3")
        assert connection.request(Message(Kind.STATISTICS, {"a": 1})).meta == {"a": 1}
        assert connection.shares_memory == shares
        connection.close()


def test_a_profile_covers_the_first_steps_of_this_part_of_the_run(configured, tmp_path):
    with job_of(configured("training.profile_steps=3"), tmp_path).timeline("nn_worker", 0) as timeline:
        for step in range(5):
            timeline.add("a", step, started=0, ended=1)
    assert (tmp_path / "profile" / "nn_worker-0.json").exists()
    assert [span[1] for span in timeline._spans] == [0, 1, 2]
