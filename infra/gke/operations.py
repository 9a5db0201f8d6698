"""Operations of GKE: started a few at a time, waited for with a deadline, and their failures in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from google.api_core import exceptions
from google.cloud import container_v1 as gke

from infra.gke.client import Cloud, Deadline
from training.errors import ClusterError

CONCURRENT = 4
"""Operations on one cluster at a time; GKE turns down more than five."""
_JUDGED = (exceptions.FailedPrecondition, exceptions.AlreadyExists, exceptions.NotFound)
_DONE = gke.Operation.Status.DONE
_REMEDIES = (
    (
        ("STOCKOUT", "RESOURCE_POOL_EXHAUSTED"),
        "the zone has no such machines now: choose another cluster.zone, or profile reserved or queued",
    ),
    (("QUOTA",), "ask for more quota, or choose smaller pools or another region"),
)


@dataclass(frozen=True)
class Start:
    """An operation to start. ``NotFound`` and ``AlreadyExists`` mean that it was started before, whose answer was lost."""

    what: str
    """In errors: ``create pool ps``."""
    method: Callable[..., gke.Operation]
    request: dict[str, Any]


def run(cloud: Cloud, cluster: str, starts: Sequence[Start], deadline: Deadline) -> None:
    """Start operations on a cluster, ``CONCURRENT`` at most, and wait until all are done.

    ``cluster`` is its resource name. One that GKE turns down because others are under way is tried again. Raises ``ClusterError`` at
    the first that fails, while others may still run, or when the time is over.
    """
    waiting = list(starts)
    pending: dict[str, str] = {}
    while True:
        while waiting and len(pending) < CONCURRENT:
            started, operation = _try(cloud, waiting[0])
            if not started:
                break
            start = waiting.pop(0)
            if operation is not None:
                pending[operation] = start.what
        pending = {name: what for name, what in pending.items() if not _ended(cloud, cluster, name, what)}
        if not waiting and not pending:
            return
        if (pending or waiting) and not deadline.wait():
            left = ", ".join([*pending.values(), *(start.what for start in waiting)])
            raise ClusterError(f"not done in time: {left}; raise cluster.provision_timeout_minutes, or choose another cluster.zone")


def running(cloud: Cloud, cluster: str) -> list[str]:
    """Names of the operations under way on a cluster and its node pools."""
    zone, _, name = cluster.partition("/clusters/")
    answer = cloud.call(cloud.clusters.list_operations, f"list operations of {name}", parent=zone)
    return [
        operation.name
        for operation in answer.operations
        if operation.status != _DONE and name in operation.target_link.partition("/clusters/")[2].split("/")[:1]
    ]


def settle(cloud: Cloud, cluster: str, deadline: Deadline) -> None:
    """Wait until no operation is under way on a cluster, whoever started it. Raises ``ClusterError`` when the time is over."""
    while names := running(cloud, cluster):
        if not deadline.wait():
            raise ClusterError(f"{cluster}: still busy with {', '.join(names)} after all the time given; look at them, then try again")


def _try(cloud: Cloud, start: Start) -> tuple[bool, str | None]:
    """Whether it is started, or was, and the name of its operation if that is known."""
    try:
        return True, cloud.call(start.method, start.what, judged=_JUDGED, **start.request).name
    except exceptions.FailedPrecondition:
        return False, None
    except (exceptions.AlreadyExists, exceptions.NotFound):
        return True, None


def _ended(cloud: Cloud, cluster: str, name: str, what: str) -> bool:
    """Whether an operation is done; raises ``ClusterError`` if it failed."""
    zone = cluster.partition("/clusters/")[0]
    operation = cloud.call(cloud.clusters.get_operation, what, name=f"{zone}/operations/{name}")
    if operation.status != _DONE:
        return False
    if operation.error.code or operation.error.message:
        raise ClusterError(f"{what}: {remedied(operation.error.message or operation.detail)}")
    return True


def remedied(text: str) -> str:
    """What GKE says of a failure, and what to do about it."""
    for marks, remedy in _REMEDIES:
        if any(mark in text.upper() for mark in marks):
            return f"{text}: {remedy}"
    return text
