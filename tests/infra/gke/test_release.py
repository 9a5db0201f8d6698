"""``release`` and ``sweep`` through the real clients against the fake cloud."""

from datetime import timedelta

import pytest

from infra.gke.provision import provision
from infra.gke.release import overdue, release, sweep
from training.errors import ClusterError

RUN = "satrap-r1"
PATH = f"projects/some-project/locations/us-central1-a/clusters/{RUN}"


def test_release_deletes_everything_and_doing_it_again_finds_nothing(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    assert [found.kind for found in release(cloud, RUN)] == ["cluster"]
    assert (fake.clusters, fake.machines) == ({}, {})
    assert release(cloud, RUN) == []
    assert fake.count("DeleteCluster") == 1


def test_release_of_one_run_leaves_the_others(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    provision(cloud, make_config(zone="europe-west4-a"), "r2")
    release(cloud, RUN)
    assert [path.split("/")[3:] for path in fake.clusters] == [["europe-west4-a", "clusters", "satrap-r2"]]
    assert {machine.labels["satrap-run"] for machine in fake.machines.values()} == {"satrap-r2"}


def test_release_waits_for_what_is_under_way_and_takes_a_half_made_cluster(fake, cloud, clock, make_config):
    provision(cloud, make_config(), "r1")
    request = next(request for name, request in fake.calls if name == "CreateNodePool")
    request.node_pool.name = "more"
    fake._create_node_pool(request)
    begun = clock.seconds
    release(cloud, RUN)
    assert clock.seconds - begun >= 2 * fake.seconds  # the creation, then the deletion
    assert (fake.clusters, fake.machines) == ({}, {})


def test_a_deletion_that_fails_is_done_again(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    fake.faults.failing_deletes[RUN] = 2
    release(cloud, RUN)
    assert fake.clusters == {}
    assert fake.count("DeleteCluster") == 3


def test_machines_that_outlive_their_cluster_are_deleted_one_by_one(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    fake.faults.leaked_instances = 2
    found = release(cloud, RUN)
    assert [one.kind for one in found] == ["cluster", "instance", "instance", "disk", "disk"]
    assert fake.machines == {}


def test_an_unseen_zone_proves_nothing(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    fake.faults.unreachable_zone = "us-east1-b"
    with pytest.raises(ClusterError, match="no answer from us-east1-b"):
        release(cloud, RUN)


def test_a_cluster_that_cannot_be_deleted_is_named(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    fake.faults.failing_deletes[RUN] = 10_000
    with pytest.raises(ClusterError, match=r"run satrap-r1: not gone after 60 minutes: cluster satrap-r1 in us-central1-a"):
        release(cloud, RUN)


def test_sweep_lists_and_deletes_what_outlived_its_label_and_nothing_else(fake, cloud, clock, make_config):
    provision(cloud, make_config(max_run_hours=2.0), "r1")
    provision(cloud, make_config(), "r2")
    fake.clusters[PATH.replace(RUN, "others")] = type(fake.clusters[PATH])(name="others", location="us-central1-a")
    assert overdue(cloud, clock.now()) == []
    clock.sleep(3 * 3600)
    found = overdue(cloud, clock.now())
    assert {one.run for one in found} == {RUN}
    assert (found[0].kind, len(found)) == ("cluster", 1 + 2 * 13)
    assert PATH in fake.clusters
    sweep(cloud, found)
    assert {path.rpartition("/")[2] for path in fake.clusters} == {"satrap-r2", "others"}
    assert overdue(cloud, clock.now()) == []
    assert {one.run for one in overdue(cloud, clock.now() + timedelta(days=2))} == {"satrap-r2"}


def test_sweep_spares_a_run_that_was_given_new_time(fake, cloud, clock, make_config):
    provision(cloud, make_config(max_run_hours=2.0), "r1")
    fake.faults.leaked_instances = 1
    release_at_once = dict(fake.machines)
    release(cloud, RUN)
    orphan = next(iter(release_at_once.values()))
    clock.sleep(3 * 3600)
    provision(cloud, make_config(max_run_hours=2.0), "r1")
    fake.machines["orphan"] = orphan
    assert overdue(cloud, clock.now()) == []


def test_sweep_of_several_runs_goes_on_after_a_failure_and_tells_it(fake, cloud, clock, make_config):
    provision(cloud, make_config(), "r1")
    provision(cloud, make_config(), "r2")
    clock.sleep(25 * 3600)
    found = overdue(cloud, clock.now())
    fake.faults.failing_deletes[RUN] = 700  # the first run's, until it is given up
    with pytest.raises(ClusterError, match="run satrap-r1: not gone"):
        sweep(cloud, found)
    assert [path.rpartition("/")[2] for path in fake.clusters] == [RUN]
