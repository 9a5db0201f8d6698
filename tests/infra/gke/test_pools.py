from datetime import UTC, datetime

import pytest
from google.cloud import container_v1 as gke

from infra.gang import gang_of
from infra.gke.pools import cluster_of, differences, pools_of
from training.errors import ConfigError

NOW = datetime(2026, 12, 1, 18, 30, tzinfo=UTC)


def requests_of(config):
    return {pool.name: pool.node_pool for pool in pools_of(gang_of(config, "r1", now=NOW), config.cluster)}


def test_gpus_come_first_and_memory_machines_last(make_config):
    config = make_config()
    assert [pool.name for pool in pools_of(gang_of(config, "r1", now=NOW), config.cluster)] == ["nn", "dl", "ew", "ps"]


def test_a_pool_has_what_its_role_asks_for_and_nothing_else(make_config):
    pools = requests_of(make_config())
    assert {name: pool.initial_node_count for name, pool in pools.items()} == {"nn": 2, "dl": 2, "ew": 3, "ps": 4}
    assert {name for name, pool in pools.items() if pool.config.spot} == {"dl"}
    assert {name for name, pool in pools.items() if pool.placement_policy.type_.name == "COMPACT"} == {"nn", "ew"}
    tiers = {name: pool.network_config.network_performance_config.total_egress_bandwidth_tier.name for name, pool in pools.items()}
    assert {name for name, tier in tiers.items() if tier == "TIER_1"} == {"ew"}
    assert {name: pool.config.linux_node_config.hugepages.hugepage_size1g for name, pool in pools.items()}["ps"] == 64
    assert pools["nn"].config.ephemeral_storage_local_ssd_config.local_ssd_count == 2
    (gpus,) = pools["nn"].config.accelerators
    assert (gpus.accelerator_count, gpus.accelerator_type) == (8, "nvidia-tesla-a100")
    assert gpus.gpu_driver_installation_config.gpu_driver_version.name == "LATEST"
    assert not any(pool.config.accelerators for name, pool in pools.items() if name != "nn")
    assert all(pool.config.gvnic.enabled and not pool.management.auto_repair for pool in pools.values())


def test_everything_carries_run_owner_and_end_and_nodes_their_role(make_config):
    config = make_config(owner="ada", max_run_hours=2.0)
    gang = gang_of(config, "r1", now=NOW)
    labels = {"satrap-run": "satrap-r1", "satrap-owner": "ada", "satrap-expires": "20261201t2031z"}
    cluster = cluster_of(gang, config.cluster)
    assert cluster.resource_labels == labels
    pools = [*cluster.node_pools, *(pool.node_pool for pool in pools_of(gang, config.cluster))]
    assert all(pool.config.resource_labels == labels for pool in pools)
    assert pools[1].config.labels == {"satrap-run": "satrap-r1", "satrap-role": "nn_worker"}
    (taint,) = pools[1].config.taints
    assert (taint.key, taint.value, taint.effect.name) == ("satrap-role", "nn_worker", "NO_SCHEDULE")
    assert not cluster.node_pools[0].config.taints


def test_the_cluster_has_cloud_storage_as_files_and_no_upgrade_while_the_run_lasts(make_config):
    config = make_config()
    gang = gang_of(config, "r1", now=NOW)
    cluster = cluster_of(gang, config.cluster)
    assert cluster.addons_config.gcs_fuse_csi_driver_config.enabled
    assert cluster.workload_identity_config.workload_pool == "some-project.svc.id.goog"
    quiet = cluster.maintenance_policy.window.maintenance_exclusions["satrap-run"]
    assert quiet.start_time <= NOW
    assert quiet.end_time > gang.expires
    assert quiet.maintenance_exclusion_options.scope.name == "NO_UPGRADES"


def test_on_demand_machines_end_by_themselves(make_config):
    config = make_config(max_run_hours=2.0)
    (system,) = cluster_of(gang_of(config, "r1", now=NOW), config.cluster).node_pools
    assert system.config.max_run_duration.total_seconds() == 7200
    for pool in requests_of(config).values():
        assert pool.config.max_run_duration.total_seconds() == 7200
        assert pool.config.reservation_affinity.consume_reservation_type.name == "NO_RESERVATION"


def test_reserved_pools_name_their_reservation(make_config):
    names = {"embedding_worker": "r-cpu", "nn_worker": "r-gpu", "parameter_server": "r-mem"}
    pools = {role: {**getattr(make_config().cluster.pools, role).model_dump(), "reservation": name} for role, name in names.items()}
    found = requests_of(make_config(profile="reserved", pools=pools))
    affinity = found["ps"].config.reservation_affinity
    assert (affinity.consume_reservation_type.name, affinity.key, list(affinity.values)) == (
        "SPECIFIC_RESERVATION",
        "compute.googleapis.com/reservation-name",
        ["r-mem"],
    )
    assert not found["ps"].config.max_run_duration
    assert found["dl"].config.reservation_affinity.consume_reservation_type.name == "NO_RESERVATION"  # spot


def test_queued_gpus_wait_for_dws_and_the_others_for_pods(make_config):
    pools = requests_of(make_config(profile="queued"))
    for name, most in {"nn": 2, "dl": 2, "ew": 3, "ps": 4}.items():
        scaling = pools[name].autoscaling
        assert (pools[name].initial_node_count, scaling.total_max_node_count, scaling.location_policy.name) == (0, most, "ANY")
    assert {name for name, pool in pools.items() if pool.queued_provisioning.enabled and pool.config.flex_start} == {"nn"}
    assert pools["nn"].config.reservation_affinity.consume_reservation_type.name == "NO_RESERVATION"


@pytest.mark.parametrize(
    ("pools", "told"),
    [
        ({"parameter_server": {"machine_type": "m2-ultramem-416", "compact": True}}, "parameter_server.compact: m2-ultramem-416 does not"),
        ({"parameter_server": {"machine_type": "m2-ultramem-416", "tier_1": True}}, "parameter_server.tier_1"),
        ({"data_loader": {"machine_type": "h3-standard-88", "spot": True}}, "data_loader.spot"),
        ({"embedding_worker": {"machine_type": "c3-highcpu-176", "local_ssds": 1}}, "embedding_worker.local_ssds"),
        ({"nn_worker": {"machine_type": "a2-highgpu-8g"}}, "has 8 GPUs and every rank takes one: set it to 8"),
        ({"embedding_worker": {"machine_type": "z9-big-4"}}, "embedding_worker.machine type 'z9-big-4': unknown family 'z9'"),
    ],
)
def test_what_a_machine_cannot_do_is_refused_with_its_path(make_config, pools, told):
    with pytest.raises(ConfigError) as refused:
        requests_of(make_config(pools=pools))
    assert told in str(refused.value)


def test_a_queue_has_no_ordinary_machines_for_the_ranks(make_config):
    with pytest.raises(ConfigError, match="profile queued needs machines of DWS"):
        requests_of(make_config(profile="queued", pools={"nn_worker": {"machine_type": "c2-standard-30"}}))


def test_what_the_cloud_adds_is_no_difference_and_what_it_changed_is_one(make_config):
    wanted = requests_of(make_config())["nn"]
    found = gke.NodePool(wanted)
    found.status = "RUNNING"
    found.config.taints.append(gke.NodeTaint(key="nvidia.com/gpu", value="present", effect="NO_SCHEDULE"))
    found.config.labels["cloud.google.com/gke-nodepool"] = "nn"
    found.config.image_type = "cos_containerd"
    assert differences(wanted._pb, found._pb) == []
    found.config.machine_type = "a2-highgpu-4g"
    found.config.labels["satrap-role"] = "other"
    found.config.accelerators[0].accelerator_count = 4
    lines = differences(wanted._pb, found._pb)
    assert "config.machine_type: 'a2-highgpu-4g' instead of 'a2-highgpu-8g'" in lines
    assert "config.labels[satrap-role]: 'other' instead of 'nn_worker'" in lines
    assert len(lines) == 3
