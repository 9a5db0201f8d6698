from datetime import UTC, datetime, timedelta

import pytest

from infra.gang import EXPIRES, expired, gang_of, run_name
from training.config import Config
from training.config_file import parse_config
from training.errors import ConfigError

NOW = datetime(2026, 12, 1, 18, 30, 20, tzinfo=UTC)
POOL = {"machine_type": "c2-standard-30"}
CLUSTER = {
    "provider": "gke",
    "project": "some-project",
    "zone": "us-central1-a",
    "bucket": "gs://some-bucket",
    "image": "europe-docker.pkg.dev/some-project/satrap/satrap@sha256:" + "0" * 64,
    "pools": {
        "data_loader": POOL,
        "embedding_worker": POOL,
        "nn_worker": {"machine_type": "a2-highgpu-8g", "processes_per_machine": 8},
        "parameter_server": {"machine_type": "m2-ultramem-416"},
    },
}


def config(**cluster: object) -> Config:
    import json

    tree = {
        "name": "ads",
        "data": {"paths": ["x.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "user"}]},
        "split": {"by": "hash"},
        "training": {"roles": {"data_loader": 2, "embedding_worker": 3, "nn_worker": 12, "parameter_server": 4}},
        "cluster": {**CLUSTER, **cluster},
    }
    return parse_config(json.dumps(tree))


def test_pods_of_every_role_and_the_processes_in_them() -> None:
    gang = gang_of(config(), "20261201-abc", now=NOW)
    assert [(role.short, role.pods) for role in gang.roles] == [("ps", 4), ("ew", 3), ("dl", 2), ("nn", 2)]
    ranks = gang.role("nn_worker")
    assert [list(ranks.indices(pod)) for pod in range(ranks.pods)] == [list(range(8)), [8, 9, 10, 11]]
    assert gang.host("nn_worker", 9) == "satrap-20261201-abc-nn-0-1.satrap-20261201-abc"
    assert [gang.port("nn_worker", index) for index in (0, 7, 8, 9)] == [7700, 7707, 7700, 7701]


def test_every_process_has_an_address_of_its_own_and_every_name_is_a_dns_label() -> None:
    gang = gang_of(config(), "A Very_Long.Run/Id" * 9, now=NOW)
    addresses = {(gang.host(r.role, i), gang.port(r.role, i)) for r in gang.roles for i in range(r.processes)}
    assert len(addresses) == sum(role.processes for role in gang.roles)
    assert all(len(host.split(".")[0]) <= 63 for host, _ in addresses)


def test_labels_tell_run_owner_and_end() -> None:
    gang = gang_of(config(owner="ada", max_run_hours=2.0), "r1", now=NOW)
    assert gang.labels == {"satrap-run": "satrap-r1", "satrap-owner": "ada", "satrap-expires": "20261201t2031z"}
    assert not expired(gang.labels, NOW + timedelta(hours=2))
    assert expired(gang.labels, NOW + timedelta(hours=2, minutes=2))
    assert not expired({EXPIRES: "soon"}, NOW)
    assert not expired({}, NOW)


def test_a_name_that_is_one_already_stays() -> None:
    assert run_name(run_name("X_1")) == run_name("X_1") == "satrap-x-1"
    with pytest.raises(ConfigError, match="needs a letter or digit"):
        run_name("--")


def test_local_needs_no_pools_but_a_gang_does() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.pools"):
        gang_of(config(provider="local", pools=None), "r", now=NOW)


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"zone": None}, "zone: required when provider is gke"),
        ({"image": "repo/satrap:latest"}, "cluster.image"),
        ({"pools": {**CLUSTER["pools"], "parameter_server": {**POOL, "spot": True}}}, "does not survive the loss of a parameter_server"),
        ({"profile": "reserved"}, "reservation: required with profile reserved"),
        ({"pools": {**CLUSTER["pools"], "data_loader": {**POOL, "reservation": "r"}}}, "only used with profile reserved"),
    ],
)
def test_impossible_clusters_are_refused_by_name(cluster: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigError, match=told.replace(".", r"\.")):
        config(**cluster)
