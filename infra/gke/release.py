"""``release`` and ``sweep``: nothing of a run is left, and that is looked up, not believed.

Both find what there is by the labels that everything carries from its first call on, so they need no record of what was made, work on a
half-made run, and do no harm when done twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime

from google.api_core import exceptions
from google.cloud import compute_v1 as gce

from infra.gang import EXPIRES, OWNER, RUN, expired
from infra.gke.client import Cloud, Deadline
from training.errors import ClusterError

_JUDGED = (exceptions.NotFound, exceptions.FailedPrecondition)
Say = Callable[[str], None]
_STOPPING = "STOPPING"


@dataclass(frozen=True)
class Resource:
    """Something in the project that carries the labels of a run."""

    kind: str
    """``cluster``, ``instance`` or ``disk``."""
    zone: str
    name: str
    run: str
    owner: str
    expires: str
    status: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} in {self.zone} ({self.status}; run {self.run}, owner {self.owner}, expires {self.expires})"

    @property
    def labels(self) -> dict[str, str]:
        """As ``infra.gang`` writes them."""
        return {RUN: self.run, OWNER: self.owner, EXPIRES: self.expires}


def clusters(cloud: Cloud) -> list[Resource]:
    """Clusters of runs, in all zones. Raises ``ClusterError`` if a zone gave no answer: what is not seen is not proved gone."""
    answer = cloud.call(cloud.clusters.list_clusters, f"list clusters of {cloud.project}", parent=cloud.zone("-"))
    if answer.missing_zones:
        raise ClusterError(f"list clusters of {cloud.project}: no answer from {', '.join(answer.missing_zones)}; try again")
    return [
        _resource("cluster", cluster.location, cluster.name, dict(cluster.resource_labels), cluster.status.name)
        for cluster in answer.clusters
        if RUN in cluster.resource_labels
    ]


def machines(cloud: Cloud, run: str | None = None) -> list[Resource]:
    """Instances and disks of a run, or of all runs, in all zones: what clusters are made of, and must not outlive them.

    Raises ``ClusterError`` if a zone gave no answer.
    """
    found = []
    chosen = f"labels.{RUN}={run}" if run else f"labels.{RUN}:*"
    for kind, client in (("instance", gce.InstancesClient), ("disk", gce.DisksClient)):
        what, client = f"list {kind}s of {cloud.project}", cloud.compute(client)
        scopes = cloud.call(lambda client=client, **call: list(client.aggregated_list(**call)), what, project=cloud.project, filter=chosen)
        for scope, page in scopes:
            if page.warning.code == "UNREACHABLE":
                raise ClusterError(f"{what}: no answer from {scope}; try again")
            items = getattr(page, f"{kind}s")
            found += [_resource(kind, scope.removeprefix("zones/"), item.name, dict(item.labels), item.status) for item in items]
    return found


def _resource(kind: str, zone: str, name: str, labels: dict[str, str], status: str) -> Resource:
    return Resource(kind, zone, name, labels.get(RUN, ""), labels.get(OWNER, "nobody"), labels.get(EXPIRES, "never"), status)


def release(cloud: Cloud, run: str, *, looks: int = 1, say: Say = lambda _line: None) -> list[Resource]:
    """Delete everything of a run (its label) and look until nothing is left; returns what there was.

    Waits for operations that are in the way. ``looks``: how often in a row nothing must be found; more than once where a call that
    makes something may still be under way. Raises ``ClusterError`` naming what is left when ``Pace.release`` seconds are over.
    """
    deadline, seen = cloud.pace.deadline(cloud.pace.release), dict[tuple[str, str, str], Resource]()
    gone: Deadline | None = None
    obstacle, empty = "", 0
    while True:
        left = [found for found in clusters(cloud) if found.run == run]
        if left:
            gone = None
            obstacle = next(filter(None, [_delete_cluster(cloud, found, say) for found in left]), obstacle)
        else:
            left = machines(cloud, run)
            gone = gone or cloud.pace.deadline(cloud.pace.fill)
            if left and gone.over:
                _delete_machines(cloud, left, say)
        empty = 0 if left else empty + 1
        if empty >= looks:
            return list(seen.values())
        for found in left:
            seen.setdefault((found.kind, found.zone, found.name), found)
        if not deadline.wait():
            raise ClusterError(
                f"run {run}: not gone after {cloud.pace.release / 60:g} minutes{f' ({obstacle})' if obstacle else ''}: "
                f"{'; '.join(map(str, left)) or 'not looked often enough'}; it goes on costing money: "
                f"run `satrap release {run} --project {cloud.project}` again, or delete it in the console"
            )


def _delete_cluster(cloud: Cloud, found: Resource, say: Say) -> str:
    """Ask for the deletion of a cluster unless it is under way; returns what is in the way."""
    if found.status == _STOPPING:
        return ""
    try:
        cloud.call(
            cloud.clusters.delete_cluster, f"delete {found.name}", name=f"{cloud.zone(found.zone)}/clusters/{found.name}", judged=_JUDGED
        )
        say(f"deleting {found.kind} {found.name} in {found.zone}")
    except exceptions.NotFound:
        return ""
    except exceptions.FailedPrecondition as error:
        return str(error.message)
    return ""


def _delete_machines(cloud: Cloud, left: Iterable[Resource], say: Say) -> None:
    """Delete what outlived its cluster. Instances first: a disk in use cannot go."""
    left = list(left)
    kind = "instance" if any(found.kind == "instance" for found in left) else "disk"
    client = cloud.compute(gce.InstancesClient if kind == "instance" else gce.DisksClient)
    for found in left:
        if found.kind == kind and found.status not in ("STOPPING", "DELETING"):
            say(f"deleting {kind} {found.name} in {found.zone}, which outlived its cluster")
            try:
                request = {"project": cloud.project, "zone": found.zone, kind: found.name}
                cloud.call(client.delete_unary, f"delete {found.name}", judged=_JUDGED, **request)
            except _JUDGED:
                continue


def overdue(cloud: Cloud, now: datetime) -> list[Resource]:
    """Everything of runs whose time is over, clusters first. A run is spared as long as anything of it has time left."""
    there = [*clusters(cloud), *machines(cloud)]
    spared = {found.run for found in there if not expired(found.labels, now)}
    return [found for found in there if found.run not in spared]


def sweep(cloud: Cloud, found: Iterable[Resource], *, say: Say = lambda _line: None) -> None:
    """Release the runs of what ``overdue`` found. One that fails does not keep the others; raises ``ClusterError`` with all failures."""
    failures = []
    for run in dict.fromkeys(resource.run for resource in found):
        try:
            release(cloud, run, say=say)
        except ClusterError as error:
            failures.append(str(error))
    if failures:
        raise ClusterError("\n".join(failures))
