"""``provision`` through the real clients against the fake cloud: made whole, or gone."""

from collections import Counter

import pytest
from google.cloud import compute_v1 as gce

from infra.gke import operations
from infra.gke.operations import Start
from infra.gke.provision import plan, provision
from infra.gke.release import clusters, machines
from training.errors import ClusterError, ConfigError

RUN = "satrap-r1"
PATH = f"projects/some-project/locations/us-central1-a/clusters/{RUN}"
ALL = {"system": 2, "nn": 2, "dl": 2, "ew": 3, "ps": 4}


def nodes(fake):
    return dict(Counter(machine.group.removeprefix(f"gke-{RUN}-").removesuffix("-grp") for machine in fake.machines.values()))


def created(fake):
    return [request.node_pool.name for name, request in fake.calls if name == "CreateNodePool"]


def assert_nothing_left(fake, cloud):
    assert fake.clusters == {}
    assert fake.machines == {}
    assert clusters(cloud) == []
    assert machines(cloud) == []


def test_a_plan_shows_the_difference_and_changes_nothing(fake, cloud, make_config):
    text = str(plan(cloud, make_config(), "r1"))
    assert "+ cluster" in text
    assert "+ pool nn: 2 x a2-highgpu-8g, 16 nvidia-tesla-a100, compact, 2 local SSDs" in text
    assert not any(name.startswith(("Create", "Delete")) for name, _ in fake.calls)


def test_a_cluster_is_made_whole_in_waves(fake, cloud, make_config):
    done = provision(cloud, make_config(), "r1")
    assert nodes(fake) == ALL
    assert created(fake) == ["nn", "dl", "ew", "ps"]
    assert done.endpoint == fake.clusters[PATH].endpoint
    # The next wave is asked for only when the one before stands.
    order = [request.node_pool.name if name == "CreateNodePool" else name for name, request in fake.calls]
    waiting = [name for name in order[order.index("nn") : order.index("dl")] if name == "GetOperation"]
    assert len(waiting) > 10


def test_doing_it_again_changes_nothing(fake, cloud, clock, make_config):
    provision(cloud, make_config(), "r1")
    clock.sleep(3600)
    again = plan(cloud, make_config(), "r1")
    assert again.done
    assert again.gang.expires == plan(cloud, make_config(), "r1").gang.expires
    before = len(created(fake)), fake.count("CreateCluster")
    provision(cloud, make_config(), "r1")
    assert (len(created(fake)), fake.count("CreateCluster")) == before


def test_what_is_missing_or_broken_is_made_anew_and_the_rest_stays(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    pools = fake.clusters[PATH].node_pools
    pools[:] = [pool for pool in pools if pool.name != "dl"]
    for machine in [machine.name for machine in fake.machines.values() if "-dl-" in machine.name]:
        del fake.machines[machine]
    next(pool for pool in pools if pool.name == "ps").status = "ERROR"
    fake.machines.pop(f"gke-{RUN}-ew-0001")
    text = str(plan(cloud, make_config(), "r1"))
    assert "+ pool dl" in text
    assert "~ pool ps" in text
    assert "2 of 3 nodes run" in text
    assert "= pool nn" in text
    provision(cloud, make_config(), "r1")
    assert nodes(fake) == ALL
    assert sorted(created(fake)[4:]) == ["dl", "ew", "ps"]


@pytest.mark.parametrize("broken", ["nn", "dl", "ps"])
@pytest.mark.parametrize("fault", ["quota", "stockout"])
def test_a_pool_that_cannot_be_had_takes_everything_back(fake, cloud, make_config, fault, broken):
    getattr(fake.faults, fault).add(broken)
    said = []
    with pytest.raises(ClusterError) as failed:
        provision(cloud, make_config(), "r1", say=said.append)
    assert f"create pool {broken}" in str(failed.value)
    assert ("quota" if fault == "quota" else "choose another cluster.zone") in str(failed.value)
    assert said[-1] == f"nothing of {RUN} is left"
    assert_nothing_left(fake, cloud)


def test_a_pool_that_stays_short_of_nodes_takes_everything_back(fake, cloud, make_config):
    fake.faults.missing_nodes["ps"] = 1
    with pytest.raises(ClusterError, match="pool ps: only 3 of 4 m2-ultramem-416 came up"):
        provision(cloud, make_config(), "r1")
    assert_nothing_left(fake, cloud)


def test_an_end_of_time_takes_everything_back(fake, cloud, make_config):
    fake.seconds = 900.0
    with pytest.raises(ClusterError, match="not done in time: create pool"):
        provision(cloud, make_config(provision_timeout_minutes=25.0), "r1")
    assert_nothing_left(fake, cloud)


def test_an_interruption_takes_everything_back(fake, cloud, clock, make_config):
    def interrupt(seconds, sleep=clock.sleep):
        sleep(seconds)
        if clock.seconds > 100 and fake.count("DeleteCluster") == 0:
            raise KeyboardInterrupt

    object.__setattr__(cloud.pace, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        provision(cloud, make_config(), "r1")
    assert_nothing_left(fake, cloud)


def test_a_cluster_that_appears_after_its_creation_was_interrupted_is_deleted_too(fake, cloud, clock, make_config):
    """The call was cut off on this side only."""
    late = []

    def interrupted_call(number):
        if fake.calls[-1][0] == "CreateCluster" and not late:
            late.append(fake.calls[-1][1])
            raise KeyboardInterrupt

    def appear(seconds, sleep=clock.sleep):
        sleep(seconds)
        if len(late) == 1:
            late.append(fake._create_cluster(late[0]))

    real = cloud.clusters.create_cluster

    def cut_off(**call):
        fake.on_call = interrupted_call
        fake.record("CreateCluster", call["request"] and _request(call["request"]))
        return real(**call)

    object.__setattr__(cloud.pace, "sleep", appear)
    cloud.clusters.create_cluster = cut_off
    with pytest.raises(KeyboardInterrupt):
        provision(cloud, make_config(), "r1")
    assert len(late) == 2
    assert_nothing_left(fake, cloud)


def _request(fields):
    from google.cloud import container_v1 as gke

    return gke.CreateClusterRequest(fields)


def test_a_rollback_that_fails_says_what_is_left(fake, cloud, make_config):
    fake.faults.stockout.add("nn")
    fake.faults.failing_deletes[RUN] = 10_000
    with pytest.raises(ClusterError) as failed:
        provision(cloud, make_config(), "r1")
    text = str(failed.value)
    assert "create pool nn" in text
    assert "and the rollback failed" in text
    assert f"cluster {RUN} in us-central1-a" in text
    assert f"satrap release {RUN} --project some-project" in text


@pytest.mark.parametrize("method", ["GetCluster", "CreateCluster", "CreateNodePool", "GetOperation", "ListNodePools"])
@pytest.mark.parametrize("fault", ["unavailable", "lost_answers"])
def test_what_passes_by_itself_is_tried_again(fake, cloud, make_config, method, fault):
    getattr(fake.faults, fault)[method] = 2
    provision(cloud, make_config(), "r1")
    assert nodes(fake) == ALL


def test_a_service_that_stays_away_is_given_up_with_a_word_on_what_to_do(fake, cloud, make_config):
    fake.faults.unavailable["GetCluster"] = 10**9
    with pytest.raises(ClusterError, match=r"look at cluster satrap-r1: no answer: .*unavailable.*do it again"):
        provision(cloud, make_config(), "r1")


def test_a_cluster_that_takes_one_operation_at_a_time_is_made_all_the_same(fake, cloud, make_config):
    fake.faults.exclusive = True
    provision(cloud, make_config(), "r1")
    assert nodes(fake) == ALL
    assert fake.most_operations == 1


def test_a_cluster_half_made_by_one_that_was_killed_is_finished(fake, cloud, clock, make_config):
    provision(cloud, make_config(), "r1")
    cluster = fake.clusters[PATH]
    request = next(request for name, request in fake.calls if name == "CreateNodePool" and request.node_pool.name == "ps")
    cluster.node_pools[:] = [pool for pool in cluster.node_pools if pool.name != "ps"]
    fake.machines = {name: machine for name, machine in fake.machines.items() if "-ps-" not in name}
    fake._create_node_pool(request)  # under way when we come
    provision(cloud, make_config(), "r1")
    assert nodes(fake) == ALL
    assert len(created(fake)) == 4


def test_a_cluster_of_another_is_left_alone(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    del fake.clusters[PATH].resource_labels["satrap-run"]
    for verb in (plan, provision):
        with pytest.raises(ClusterError, match="it is not ours to touch"):
            verb(cloud, make_config(), "r1")
    assert PATH in fake.clusters


def test_a_cluster_whose_time_is_over_or_that_is_otherwise_is_not_used(fake, cloud, clock, make_config):
    provision(cloud, make_config(), "r1")
    with pytest.raises(ClusterError, match=r"resource_labels.satrap-owner.: 'satrap' instead of 'ada'.*satrap release satrap-r1"):
        provision(cloud, make_config(owner="ada"), "r1")
    clock.sleep(25 * 3600)
    with pytest.raises(ClusterError, match="its time is over"):
        provision(cloud, make_config(), "r1")
    assert PATH in fake.clusters


def test_a_queued_cluster_is_whole_without_nodes(fake, cloud, make_config):
    provision(cloud, make_config(profile="queued"), "r1")
    assert nodes(fake) == {"system": 2}
    assert plan(cloud, make_config(profile="queued"), "r1").done


@pytest.mark.parametrize(
    ("limits", "told"),
    [
        ({"NVIDIA_A100_GPUS": 8}, "quota NVIDIA_A100_GPUS of us-central1: 16 needed, 8 of 8 left"),
        ({"M2_CPUS": 416}, "quota M2_CPUS of us-central1: 1,664 needed, 416 of 416 left"),
        ({"PREEMPTIBLE_CPUS": 30}, "quota PREEMPTIBLE_CPUS of us-central1: 60 needed"),
        ({"IN_USE_ADDRESSES": 12}, "quota IN_USE_ADDRESSES of us-central1: 13 needed"),
        ({"CPUS_ALL_REGIONS": 2000}, "quota CPUS_ALL_REGIONS of us-central1: 2,014 needed"),
    ],
)
def test_quota_is_looked_at_before_anything_is_made(fake, cloud, make_config, limits, told):
    fake.limits = limits
    with pytest.raises(ClusterError) as refused:
        provision(cloud, make_config(), "r1")
    assert told in str(refused.value)
    assert not any(name.startswith(("Create", "Delete")) for name, _ in fake.calls)


def test_every_problem_is_told_at_once(fake, cloud, make_config):
    fake.limits = {"NVIDIA_A100_GPUS": 8}
    fake.absent_machine_types = {"m2-ultramem-416"}
    pools = {"embedding_worker": {"machine_type": "n2-standard-32", "huge_pages_gib": 120}}
    with pytest.raises(ClusterError) as refused:
        provision(cloud, make_config(pools=pools), "r1")
    lines = str(refused.value).splitlines()
    assert len(lines) == 3
    assert "machine type m2-ultramem-416: us-central1-a has none; choose another cluster.zone, or another machine" in lines


def test_quota_that_cannot_be_read_is_said_and_stops_nobody(fake, cloud, make_config):
    fake.limits = {"M2_CPUS": -1}
    said = []
    provision(cloud, make_config(), "r1", say=said.append)
    assert "not checked: 1,664 of M2_CPUS: the Compute API does not report this quota" in said


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"count": 4}, None),
        ({"count": 3}, "r-mem has 3 of 3 machines free, 4 are needed"),
        ({"machine_type": "m1-ultramem-160"}, "holds m1-ultramem-160, not m2-ultramem-416"),
        ({"status": "CREATING"}, "is CREATING, not READY"),
        ({"name": "other"}, "some-project has no reservation 'r-mem' in us-central1-a"),
    ],
)
def test_reservations_must_hold_the_machines(fake, cloud, make_config, change, told):
    base = make_config().cluster.pools
    names = {"embedding_worker": ("r-cpu", 3), "nn_worker": ("r-gpu", 2), "parameter_server": ("r-mem", 4)}
    pools = {role: {**getattr(base, role).model_dump(), "reservation": name} for role, (name, _) in names.items()}
    for role, (name, count) in names.items():
        given = {"name": name, "count": count, "machine_type": pools[role]["machine_type"], "status": "READY"}
        given |= change if name == "r-mem" else {}
        sku = {"count": given["count"], "instance_properties": {"machine_type": given["machine_type"]}}
        fake.reservations[given["name"]] = gce.Reservation(name=given["name"], status=given["status"], specific_reservation=sku)
    config = make_config(profile="reserved", pools=pools)
    fake.limits = {"M2_CPUS": 0, "C2_CPUS": 0, "A2_CPUS": 0, "NVIDIA_A100_GPUS": 0}  # counted when the reservations were made
    if told is None:
        provision(cloud, config, "r1")
        assert nodes(fake) == ALL
    else:
        with pytest.raises(ClusterError) as refused:
            provision(cloud, config, "r1")
        assert told in str(refused.value)


def test_four_operations_at_a_time(fake, cloud, make_config):
    provision(cloud, make_config(), "r1")
    fake.most_operations = 0
    request = next(request for name, request in fake.calls if name == "CreateNodePool")
    starts = []
    for number in range(11):
        pool = type(request.node_pool)(request.node_pool)
        pool.name = f"more-{number}"
        starts.append(Start(f"create pool {pool.name}", cloud.clusters.create_node_pool, {"parent": PATH, "node_pool": pool}))
    operations.run(cloud, PATH, starts, cloud.pace.deadline(3600))
    assert fake.most_operations == 4
    assert len(fake.clusters[PATH].node_pools) == 5 + 11


def test_a_configuration_that_cannot_be_is_refused_before_the_cloud_is_asked(fake, cloud, make_config):
    with pytest.raises(ConfigError, match=r"cluster.pools.nn_worker.processes_per_machine"):
        provision(cloud, make_config(pools={"nn_worker": {"machine_type": "a2-highgpu-8g"}}), "r1")
    assert not any(name.startswith(("Create", "Delete")) for name, _ in fake.calls)
