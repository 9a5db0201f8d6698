"""Whether a run's machines may be had, asked before the first of them is made: machine types, reservations, quota."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from google.api_core import exceptions
from google.cloud import compute_v1 as gce

from infra.gke.client import Cloud
from infra.gke.machines import family_of, gpus_of
from infra.gke.pools import DISK_GB, SYSTEM_MACHINE, SYSTEM_NODES, Pool
from training.errors import ClusterError

_HUGE_PAGE_SHARE = 0.8
"""Of a node's memory GKE sets aside as huge pages at most, on machines with 30 GB or more."""
_LOCAL_SSD_GB = 375
_NOT_FOUND = (exceptions.NotFound,)


@dataclass
class Preflight:
    """What was found. ``problems`` forbid the start; ``unchecked`` could not be looked at."""

    problems: list[str] = field(default_factory=list)
    unchecked: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raises ``ClusterError`` with every problem."""
        if self.problems:
            raise ClusterError("\n".join(self.problems))


def preflight(cloud: Cloud, zone: str, pools: Sequence[Pool], *, new_cluster: bool) -> Preflight:
    """Look whether pools that are to be made can be.

    Every machine type must exist in the zone and be what we take it for, reservations must hold enough of it, and quota must be left.
    ``new_cluster``: the system pool is to be made, too.
    """
    found = Preflight()
    demand: Counter[str] = Counter()
    for pool in pools:
        machine = _machine_type(cloud, zone, pool.role.pool.machine_type, found)
        if machine is None:
            continue
        found.problems += _mismatches(pool, machine)
        if pool.role.pool.reservation:
            found.problems += _reservation_problems(cloud, zone, pool)
        else:
            _demand(pool, machine, demand, found)
    if new_cluster:
        machine = _machine_type(cloud, zone, SYSTEM_MACHINE, found)
        if machine is not None:
            demand["CPUS"] += SYSTEM_NODES * machine.guest_cpus
            demand.update({"CPUS_ALL_REGIONS": SYSTEM_NODES * machine.guest_cpus})
        demand.update({"SSD_TOTAL_GB": SYSTEM_NODES * DISK_GB, "IN_USE_ADDRESSES": SYSTEM_NODES, "INSTANCES": SYSTEM_NODES})
    _compare(cloud, zone, demand, found)
    return found


def _machine_type(cloud: Cloud, zone: str, name: str, found: Preflight) -> gce.MachineType | None:
    try:
        machine: gce.MachineType = cloud.call(
            cloud.compute(gce.MachineTypesClient).get,
            f"machine type {name}",
            project=cloud.project,
            zone=zone,
            machine_type=name,
            judged=_NOT_FOUND,
        )
    except exceptions.NotFound:
        line = f"machine type {name}: {zone} has none; choose another cluster.zone, or another machine"
        found.problems += [] if line in found.problems else [line]
        return None
    return machine


def _mismatches(pool: Pool, machine: gce.MachineType) -> Iterator[str]:
    settings, gpus = pool.role.pool, gpus_of(machine.name)
    offered = Counter({item.guest_accelerator_type: item.guest_accelerator_count for item in machine.accelerators})
    expected = Counter({gpus.type: gpus.count} if gpus else {})
    if offered != expected:
        yield f"machine type {machine.name}: has {dict(offered)}, not {dict(expected)}; this version of satrap does not know the machine"
    most = int(_HUGE_PAGE_SHARE * machine.memory_mb / 1024)
    if settings.huge_pages_gib > most:
        yield (
            f"cluster.pools.{pool.role.role}.huge_pages_gib: {settings.huge_pages_gib}, but of {machine.name}'s "
            f"{machine.memory_mb // 1024} GiB at most {most} can be huge pages"
        )


def _reservation_problems(cloud: Cloud, zone: str, pool: Pool) -> Iterator[str]:
    """A reservation of another project is named ``projects/P/reservations/R``."""
    settings, path = pool.role.pool, f"cluster.pools.{pool.role.role}.reservation"
    assert settings.reservation
    *shared, name = settings.reservation.split("/")
    project = shared[1] if len(shared) > 1 else cloud.project
    try:
        held = cloud.call(cloud.compute(gce.ReservationsClient).get, path, project=project, zone=zone, reservation=name, judged=_NOT_FOUND)
    except exceptions.NotFound:
        yield f"{path}: {project} has no reservation {name!r} in {zone}; name another, or choose profile on_demand"
        return
    specific = held.specific_reservation
    machine = specific.instance_properties.machine_type
    free = specific.count - specific.in_use_count
    if held.status != "READY":
        yield f"{path}: {name} is {held.status or 'in no known state'}, not READY; wait for it, or name another"
    elif machine != settings.machine_type:
        yield f"{path}: {name} holds {machine}, not {settings.machine_type}; name another, or change the machine"
    elif free < pool.role.pods:
        yield f"{path}: {name} has {free} of {specific.count} machines free, {pool.role.pods} are needed; enlarge it, or use fewer machines"


def _demand(pool: Pool, machine: gce.MachineType, demand: Counter[str], found: Preflight) -> None:
    """Add what a pool takes from the quotas. Machines of reservations have been counted when those were made."""
    settings, nodes, family = pool.role.pool, pool.role.pods, family_of(machine.name)
    passing = settings.spot or pool.node_pool.config.flex_start
    cpus = nodes * machine.guest_cpus
    if passing:
        demand["PREEMPTIBLE_CPUS"] += cpus
    elif family.cpu_quota:
        demand[family.cpu_quota] += cpus
    else:
        found.unchecked.append(f"{cpus:,} vCPUs of {machine.name}: their quota (CPUS_PER_VM_FAMILY) is not in the Compute API")
    demand["CPUS_ALL_REGIONS"] += cpus
    gpus = gpus_of(machine.name)
    if gpus:
        demand["GPUS_ALL_REGIONS"] += nodes * gpus.count
        if gpus.quota:
            demand[f"PREEMPTIBLE_{gpus.quota}" if passing else gpus.quota] += nodes * gpus.count
        else:
            found.unchecked.append(f"{nodes * gpus.count} {gpus.type}: their quota is not in the Compute API")
    if settings.local_ssds:
        demand["PREEMPTIBLE_LOCAL_SSD_GB" if passing else "LOCAL_SSD_TOTAL_GB"] += nodes * settings.local_ssds * _LOCAL_SSD_GB
    if family.disk_type == "pd-balanced":
        demand["SSD_TOTAL_GB"] += nodes * DISK_GB
    demand.update({"IN_USE_ADDRESSES": nodes, "INSTANCES": nodes})


def _compare(cloud: Cloud, zone: str, demand: Counter[str], found: Preflight) -> None:
    region = zone.rpartition("-")[0]
    project = cloud.call(cloud.compute(gce.ProjectsClient).get, f"quota of {cloud.project}", project=cloud.project)
    regional = cloud.call(cloud.compute(gce.RegionsClient).get, f"quota of {region}", project=cloud.project, region=region)
    quotas = {quota.metric: quota for quota in [*project.quotas, *regional.quotas]}
    for metric, amount in sorted(demand.items()):
        quota = quotas.get(metric)
        # Where no quota for passing machines was granted, these count as others do.
        if metric.startswith("PREEMPTIBLE_") and (quota is None or quota.limit == 0):
            found.unchecked.append(f"{amount:,} of {metric}: no such quota was granted; the ordinary one counts")
        elif quota is None:
            found.unchecked.append(f"{amount:,} of {metric}: the Compute API does not report this quota")
        elif quota.usage + amount > quota.limit:
            found.problems.append(
                f"quota {metric} of {region}: {amount:,} needed, {max(0, int(quota.limit - quota.usage)):,} of {int(quota.limit):,} left; "
                "ask for more at https://console.cloud.google.com/iam-admin/quotas, or choose smaller pools or another region"
            )
