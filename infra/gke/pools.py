"""The cluster of a run as data: what is asked of GKE, and how what is there differs from it. Pure: no cloud, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from google.cloud import container_v1 as gke
from google.protobuf import duration_pb2, timestamp_pb2
from google.protobuf.message import Message

from infra.gang import RUN, Gang, RoleSpec
from infra.gke.machines import KINDS, family_of, gpus_of, pool_problems
from training.config import ClusterConfig
from training.errors import ConfigError

SYSTEM_POOL = "system"
SYSTEM_MACHINE = "e2-standard-4"
SYSTEM_NODES = 2
"""For the controllers of JobSet and Kueue, DNS and the like, two of each: a run does not wait for one that is being replaced."""
DISK_GB = 100
_SCOPES = ["https://www.googleapis.com/auth/cloud-platform"]
_RESERVATION = "compute.googleapis.com/reservation-name"


@dataclass(frozen=True)
class Pool:
    """One node pool: what is asked for."""

    role: RoleSpec
    node_pool: gke.NodePool
    scaled: bool
    """It starts without nodes and grows when pods ask (profile queued)."""

    @property
    def name(self) -> str:
        """Name within the cluster: the role's short name."""
        return self.role.short

    @property
    def wave(self) -> int:
        """Its place in the order in which machines are asked for."""
        return KINDS.index(family_of(self.role.pool.machine_type).kind)

    @property
    def nodes(self) -> int:
        """Nodes that must run once it is made."""
        return 0 if self.scaled else self.role.pods

    def __str__(self) -> str:
        settings = self.role.pool
        parts = [f"{'up to ' if self.scaled else ''}{self.role.pods} x {settings.machine_type}"]
        gpus = gpus_of(settings.machine_type)
        parts += [f"{self.role.pods * gpus.count} {gpus.type}"] if gpus else []
        parts += [name for name in ("compact", "tier_1", "spot") if getattr(settings, name)]
        parts += [f"{settings.huge_pages_gib} GiB huge pages"] if settings.huge_pages_gib else []
        parts += [f"{settings.local_ssds} local SSDs"] if settings.local_ssds else []
        parts += [f"reservation {settings.reservation}"] if settings.reservation else []
        parts += ["queued by DWS"] if self.node_pool.queued_provisioning.enabled else []
        return ", ".join(parts)


def pools_of(gang: Gang, cluster: ClusterConfig) -> list[Pool]:
    """One pool per role, in the order in which they are made. Raises ``ConfigError`` with everything a machine cannot do."""
    problems = [line for role in gang.roles for line in pool_problems(role, cluster)]
    if problems:
        raise ConfigError(problems)
    pools = [Pool(role, _node_pool(role, gang, cluster), scaled=cluster.profile == "queued") for role in gang.roles]
    return sorted(pools, key=lambda pool: (pool.wave, pool.name))


def cluster_of(gang: Gang, cluster: ClusterConfig) -> gke.Cluster:
    """The cluster with its system pool, as it is asked for: zonal, without upgrades until the run's time is over."""
    assert cluster.project
    start, end = (timestamp_pb2.Timestamp() for _ in range(2))
    start.FromDatetime(gang.expires - timedelta(hours=cluster.max_run_hours + 1))
    end.FromDatetime(gang.expires + timedelta(days=1))
    quiet = gke.TimeWindow(start_time=start, end_time=end, maintenance_exclusion_options={"scope": "NO_UPGRADES"})
    system = gke.NodePool(
        name=SYSTEM_POOL,
        initial_node_count=SYSTEM_NODES,
        config=_node_config(gang, SYSTEM_MACHINE, {RUN: gang.run}),
        management={"auto_repair": True, "auto_upgrade": True},
    )
    system.config.max_run_duration = _run_time(cluster)
    return gke.Cluster(
        name=gang.run,
        description=f"training run of satrap; owner {gang.owner}; satrap sweep may delete it after {gang.expires:%Y-%m-%d %H:%M} UTC",
        resource_labels=gang.labels,
        node_pools=[system],
        release_channel={"channel": "REGULAR"},
        maintenance_policy={"window": {"maintenance_exclusions": {"satrap-run": quiet}}},
        ip_allocation_policy={"use_ip_aliases": True},
        workload_identity_config={"workload_pool": f"{cluster.project}.svc.id.goog"},
        addons_config={"gcs_fuse_csi_driver_config": {"enabled": True}},
    )


def _node_config(gang: Gang, machine_type: str, labels: dict[str, str]) -> gke.NodeConfig:
    return gke.NodeConfig(
        machine_type=machine_type,
        disk_type=family_of(machine_type).disk_type,
        disk_size_gb=DISK_GB,
        image_type="COS_CONTAINERD",
        oauth_scopes=_SCOPES,
        labels=labels,
        resource_labels=gang.labels,
        gvnic={"enabled": True},
        workload_metadata_config={"mode": "GKE_METADATA"},
    )


def _run_time(cluster: ClusterConfig) -> duration_pb2.Duration:
    """Compute Engine itself ends the machine then: a bill that nobody has to look after. One of a reservation is paid for either way."""
    return duration_pb2.Duration(seconds=int(cluster.max_run_hours * 3600))


def _node_pool(role: RoleSpec, gang: Gang, cluster: ClusterConfig) -> gke.NodePool:
    settings = role.pool
    family, gpus = family_of(settings.machine_type), gpus_of(settings.machine_type)
    config = _node_config(gang, settings.machine_type, {RUN: gang.run, **role.node_labels})
    config.taints = [gke.NodeTaint(key=key, value=value, effect="NO_SCHEDULE") for key, value in role.node_labels.items()]
    config.spot = settings.spot
    if gpus:
        driver = {"gpu_driver_version": "LATEST"}
        config.accelerators = [
            gke.AcceleratorConfig(accelerator_count=gpus.count, accelerator_type=gpus.type, gpu_driver_installation_config=driver)
        ]
    if settings.huge_pages_gib:
        config.linux_node_config = gke.LinuxNodeConfig(hugepages={"hugepage_size1g": settings.huge_pages_gib})
    if settings.local_ssds:
        config.ephemeral_storage_local_ssd_config = gke.EphemeralStorageLocalSsdConfig(local_ssd_count=settings.local_ssds)
    pool = gke.NodePool(
        name=role.short,
        config=config,
        initial_node_count=role.pods,
        # A node that is replaced has lost its rows: the run must hear of it, not find a new empty one.
        management={"auto_repair": False, "auto_upgrade": True},
    )
    if settings.tier_1:
        pool.network_config = gke.NodeNetworkConfig(network_performance_config={"total_egress_bandwidth_tier": "TIER_1"})
    if settings.compact:
        pool.placement_policy = gke.NodePool.PlacementPolicy(type_="COMPACT")
    if settings.reservation:
        config.reservation_affinity = gke.ReservationAffinity(
            consume_reservation_type="SPECIFIC_RESERVATION", key=_RESERVATION, values=[settings.reservation]
        )
    else:
        config.reservation_affinity = gke.ReservationAffinity(consume_reservation_type="NO_RESERVATION")
        config.max_run_duration = _run_time(cluster)
    if cluster.profile == "queued":
        pool.initial_node_count = 0
        pool.autoscaling = gke.NodePoolAutoscaling(enabled=True, total_max_node_count=role.pods, location_policy="ANY")
        if family.flex_start and role.role == "nn_worker":
            config.flex_start = True
            pool.queued_provisioning = gke.NodePool.QueuedProvisioning(enabled=True)
    pool.config = config
    return pool


_UNCOMPARED = frozenset(
    {
        *("description", "disk_size_gb", "disk_type", "image_type", "oauth_scopes", "workload_metadata_config"),
        *("maintenance_policy", "release_channel", "ip_allocation_policy", "management", "gpu_driver_installation_config"),
    }
)
"""Fields that no run depends on, or that GKE writes in words of its own: a pool of memory machines is not made anew for them."""


def differences(wanted: Message, found: Message, path: str = "") -> list[str]:
    """Fields set in ``wanted`` that ``found`` has otherwise, as ``path: found instead of wanted``.

    What GKE fills in by itself is no difference: further fields, map entries and list elements of ``found`` do not count.
    """
    lines: list[str] = []
    for field, value in wanted.ListFields():
        if field.name in _UNCOMPARED:
            continue
        place = f"{path}.{field.name}" if path else field.name
        there = getattr(found, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            lines += [f"{place}[{key}]: {there.get(key)!r} instead of {value[key]!r}" for key in value if there.get(key) != value[key]]
        elif field.is_repeated:
            missing = [item for item in value if not any(_same(item, other) for other in there)]
            lines += [f"{place}: lacks {' '.join(str(item).split())}" for item in missing]
        elif field.message_type is not None:
            lines += differences(value, there, place)
        elif there != value:
            lines.append(f"{place}: {there!r} instead of {value!r}")
    return lines


def _same(wanted: Any, found: Any) -> bool:
    return not differences(wanted, found) if isinstance(wanted, Message) else bool(wanted == found)
