"""``provision``: read what is there, compare it with what the run needs, make the difference; all of it, or nothing.

Machines are asked for in waves, those first that are hardest to get: GPUs, then the others, memory machines last, because they cost most
while they wait. A pool counts as made when it runs with all its nodes. Whatever fails, whoever interrupts: everything of the run is
deleted again, and that is looked up.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Literal

from google.api_core import exceptions
from google.cloud import compute_v1 as gce
from google.cloud import container_v1 as gke

from infra.gang import EXPIRES, RUN, Gang, expired, expiry_of, gang_of
from infra.gke import operations
from infra.gke.client import Cloud, Deadline
from infra.gke.operations import Start, remedied
from infra.gke.pools import SYSTEM_NODES, Pool, cluster_of, differences, pools_of
from infra.gke.quota import Preflight, preflight
from infra.gke.release import Say, release
from training.config import ClusterConfig, Config
from training.errors import ClusterError, SatrapError

Verb = Literal["create", "replace", "keep"]
_SIGNS: dict[Verb, str] = {"create": "+", "replace": "~", "keep": "="}
_NOT_FOUND = (exceptions.NotFound,)
_RUNNING, _COMING = "RUNNING", ("PROVISIONING", "RECONCILING")


@dataclass(frozen=True)
class Change:
    """What is to be done about the cluster or one of its pools."""

    verb: Verb
    what: str
    """``cluster`` or ``pool ps``."""
    why: str
    """What is wanted, or what is wrong with what is there."""
    pool: Pool | None = None

    def __str__(self) -> str:
        return f"{_SIGNS[self.verb]} {self.what}: {self.why}"


@dataclass(frozen=True)
class Plan:
    """The difference between what a run needs and what is there."""

    gang: Gang
    """With the end that the cluster's label says, if it exists."""
    cluster: ClusterConfig
    changes: tuple[Change, ...]
    """The cluster first, then its pools in the order in which they are made."""

    @property
    def pools(self) -> list[Pool]:
        """Those that are to be made."""
        return [change.pool for change in self.changes if change.pool and change.verb != "keep"]

    @property
    def new_cluster(self) -> bool:
        """Whether the cluster is to be made."""
        return self.changes[0].verb == "create"

    @property
    def done(self) -> bool:
        """Whether everything is there."""
        return all(change.verb == "keep" for change in self.changes)

    def __str__(self) -> str:
        head = f"cluster {self.gang.run} in {self.cluster.zone} of {self.cluster.project}, until {self.gang.expires:%Y-%m-%d %H:%M} UTC"
        return "\n".join([head, *(f"  {change}" for change in self.changes)])


@dataclass(frozen=True)
class Provisioned:
    """A cluster that is whole."""

    plan: Plan
    preflight: Preflight
    endpoint: str
    """Address of its Kubernetes API."""

    @property
    def message(self) -> str:
        """For people."""
        made = [change.what for change in self.plan.changes if change.verb != "keep"]
        pools = [change.pool for change in self.plan.changes if change.pool]
        nodes = "; ".join(f"{pool.name} {pool}" for pool in pools)
        return f"gke: cluster {self.plan.gang.run} {'made' if made else 'was there'}: {nodes}"


def plan(cloud: Cloud, config: Config, run_id: str) -> Plan:
    """Compare what the run needs with what is there; changes nothing.

    Raises ``ConfigError`` for machines that cannot do what is asked of them, ``ClusterError`` where the cluster belongs to another or
    its time is over.
    """
    settings, gang = config.cluster, gang_of(config, run_id, now=cloud.pace.now())
    assert settings.zone
    path = f"{cloud.zone(settings.zone)}/clusters/{gang.run}"
    try:
        found: gke.Cluster = cloud.call(cloud.clusters.get_cluster, f"look at cluster {gang.run}", name=path, judged=_NOT_FOUND)
    except exceptions.NotFound:
        changes = [Change("create", f"pool {pool.name}", str(pool), pool) for pool in pools_of(gang, settings)]
        system = f"zonal, {SYSTEM_NODES} nodes for the system, Cloud Storage FUSE, owner {gang.owner}"
        return Plan(gang, settings, (Change("create", "cluster", system), *changes))
    gang = replace(gang, expires=_end(found, gang, cloud))
    wrong = differences(cluster_of(gang, settings)._pb, found._pb)
    if wrong:
        raise ClusterError(
            f"cluster {gang.run} is not as the configuration says ({'; '.join(wrong)}) and cannot be changed: "
            f"`satrap release {gang.run} --project {cloud.project}` first, or give the run another name"
        )
    there = {pool.name: pool for pool in found.node_pools}
    changes = [_change(cloud, pool, there.get(pool.name)) for pool in pools_of(gang, settings)]
    return Plan(gang, settings, (Change("keep", "cluster", found.status.name), *changes))


def _end(found: gke.Cluster, gang: Gang, cloud: Cloud) -> datetime:
    """When a cluster's time is over, by its label."""
    labels = dict(found.resource_labels)
    if labels.get(RUN) != gang.run:
        raise ClusterError(
            f"cluster {gang.run} exists and has no label {RUN}={gang.run}: it is not ours to touch; give the run another name"
        )
    end = expiry_of(labels)
    if end is None or expired(labels, cloud.pace.now()):
        raise ClusterError(
            f"cluster {gang.run} exists and its time is over ({EXPIRES}={labels.get(EXPIRES)}): "
            f"`satrap release {gang.run} --project {cloud.project}` first"
        )
    if found.status.name not in (_RUNNING, *_COMING):
        raise ClusterError(
            f"cluster {gang.run} is {found.status.name} {found.status_message}".rstrip()
            + f": `satrap release {gang.run} --project {cloud.project}` first, then try again"
        )
    return end


def _change(cloud: Cloud, pool: Pool, found: gke.NodePool | None) -> Change:
    what = f"pool {pool.name}"
    if found is None:
        return Change("create", what, str(pool), pool)
    wrong = differences(pool.node_pool._pb, found._pb)
    if found.status.name != _RUNNING:
        wrong.insert(0, f"{found.status.name} {found.status_message}".strip())
    elif not wrong and (nodes := running_nodes(cloud, found)) < pool.nodes:
        wrong.append(f"{nodes} of {pool.nodes} nodes run")
    return (
        Change("replace", what, f"{pool}; there is one with {'; '.join(wrong)}", pool) if wrong else Change("keep", what, str(pool), pool)
    )


def running_nodes(cloud: Cloud, pool: gke.NodePool) -> int:
    """Nodes of a pool that run and are left alone by their group's manager: neither being made nor repaired."""
    count = 0
    client = cloud.compute(gce.InstanceGroupManagersClient)
    for url in pool.instance_group_urls:
        *_, zone, _, name = url.split("/")
        try:
            group = cloud.call(
                client.get, f"count nodes of {pool.name}", project=cloud.project, zone=zone, instance_group_manager=name, judged=_NOT_FOUND
            )
        except exceptions.NotFound:
            continue
        count += group.current_actions.none
    return count


def provision(cloud: Cloud, config: Config, run_id: str, *, say: Say = lambda _line: None) -> Provisioned:
    """Make the cluster of a run, whole. Doing it again changes nothing, or finishes what was begun.

    If anything fails or interrupts, everything of the run is deleted before the error is passed on; except before the first change,
    where nothing is. Raises ``ConfigError`` and ``ClusterError``; one whose rollback failed, too, says what is left.
    """
    deadline = cloud.pace.deadline(config.cluster.provision_timeout_minutes * 60)
    current = plan(cloud, config, run_id)
    path = f"{cloud.zone(str(config.cluster.zone))}/clusters/{current.gang.run}"
    if not current.new_cluster:  # Someone may have been interrupted while making it.
        operations.settle(cloud, path, deadline)
        current = plan(cloud, config, run_id)
    checked = preflight(cloud, str(config.cluster.zone), current.pools, new_cluster=current.new_cluster)
    checked.check()
    for line in checked.unchecked:
        say(f"not checked: {line}")
    try:
        _make(cloud, current, path, deadline, say)
        endpoint = cloud.call(cloud.clusters.get_cluster, f"look at cluster {current.gang.run}", name=path).endpoint
    except BaseException as error:
        _roll_back(cloud, current.gang, error, say)
        raise
    return Provisioned(current, checked, endpoint)


def _make(cloud: Cloud, current: Plan, path: str, deadline: Deadline, say: Say) -> None:
    zone, _, name = path.partition("/clusters/")
    if current.new_cluster:
        say(f"creating cluster {name}")
        wanted = cluster_of(current.gang, current.cluster)
        start = Start(f"create cluster {name}", cloud.clusters.create_cluster, {"parent": zone, "cluster": wanted})
        operations.run(cloud, path, [start], deadline)
        operations.settle(cloud, path, deadline)
    stale = [change.pool for change in current.changes if change.pool and change.verb == "replace"]
    operations.run(cloud, path, [_deletion(cloud, path, pool) for pool in stale], deadline)
    operations.settle(cloud, path, deadline)
    for _, wave in itertools.groupby(current.pools, key=lambda pool: pool.wave):
        pools = list(wave)
        for pool in pools:
            say(f"creating pool {pool.name}: {pool}")
        operations.run(cloud, path, [_creation(cloud, path, pool) for pool in pools], deadline)
        operations.settle(cloud, path, deadline)
        _verify(cloud, path, pools)
    # What stood before may have been lost meanwhile.
    _verify(cloud, path, [change.pool for change in current.changes if change.pool])


def _creation(cloud: Cloud, path: str, pool: Pool) -> Start:
    return Start(f"create pool {pool.name}", cloud.clusters.create_node_pool, {"parent": path, "node_pool": pool.node_pool})


def _deletion(cloud: Cloud, path: str, pool: Pool) -> Start:
    return Start(f"delete pool {pool.name}", cloud.clusters.delete_node_pool, {"name": f"{path}/nodePools/{pool.name}"})


def _verify(cloud: Cloud, path: str, pools: Sequence[Pool]) -> None:
    """Wait until all pools run with all their nodes; raises ``ClusterError`` naming those that do not."""
    deadline = cloud.pace.deadline(cloud.pace.fill)
    while True:
        there = {pool.name: pool for pool in cloud.call(cloud.clusters.list_node_pools, "list node pools", parent=path).node_pools}
        short = [_shortfall(cloud, pool, there.get(pool.name)) for pool in pools]
        lines = [line for line, _ in filter(None, short)]
        if not lines:
            return
        if any(final for _, final in filter(None, short)) or not deadline.wait():
            raise ClusterError("; ".join(lines))


def _shortfall(cloud: Cloud, pool: Pool, found: gke.NodePool | None) -> tuple[str, bool] | None:
    """What a pool lacks, and whether waiting is in vain."""
    if found is None:
        return f"pool {pool.name}: not there; do it again", True
    if found.status.name != _RUNNING:
        return f"pool {pool.name}: {found.status.name}: {remedied(found.status_message)}", found.status.name not in _COMING
    nodes = running_nodes(cloud, found)
    if nodes >= pool.nodes:
        return None
    machine = pool.role.pool.machine_type
    return (
        f"pool {pool.name}: only {nodes} of {pool.nodes} {machine} came up: choose another cluster.zone, or profile reserved or queued",
        False,
    )


def _roll_back(cloud: Cloud, gang: Gang, error: BaseException, say: Say) -> None:
    """Delete everything of a run because of an error. If that fails as well, raises a ``ClusterError`` that tells both."""
    say(f"rolling back: deleting everything of {gang.run}")
    try:
        release(cloud, gang.run, looks=2, say=say)
    except SatrapError as trouble:
        raise ClusterError(f"{error or type(error).__name__}\nand the rollback failed: {trouble}") from error
    say(f"nothing of {gang.run} is left")
