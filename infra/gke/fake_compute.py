"""Compute Engine's REST API over a ``FakeCloud``: the half of the fake that knows quota, reservations and machines."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from google.cloud import compute_v1 as gce

from infra.gke.machines import FAMILIES, family_of, gpus_of
from training.errors import ConfigError

if TYPE_CHECKING:
    from infra.gke.fake import FakeCloud

_PLENTY = 1e9
_GIB_PER_CPU = {"cpu": 4, "gpu": 7, "memory": 28}
"""Only what a shape looks like: real machines differ."""
_ZONAL = r"/compute/v1/projects/[^/]+/zones/(?P<zone>[^/]+)"


class NotHere(Exception):  # noqa: N818 - an answer, not a defect
    """404."""


@contextmanager
def served(cloud: FakeCloud) -> Iterator[str]:
    """Serve the API on 127.0.0.1; yields its address."""

    class Handler(_Handler):
        state = cloud

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), name="fake Compute Engine")
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: FakeCloud
    # One connection for each request: a thread that waits on an idle one would outlive the server.
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._answer(_GET)

    def do_DELETE(self) -> None:
        self._answer(_DELETE)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the base class
        """Say nothing: ``FakeCloud.calls`` has it."""

    def _answer(self, routes: tuple[tuple[str, Callable[..., Any]], ...]) -> None:
        url = urlsplit(self.path)
        self.state.record(f"{self.command} {url.path}", url.query)
        code, answer = 404, None
        for pattern, route in routes:
            found = re.fullmatch(pattern, url.path)
            if found:
                try:
                    with self.state.lock:
                        answer = route(self.state, parse_qs(url.query), **{key: unquote(value) for key, value in found.groupdict().items()})
                    code = 200
                except NotHere:
                    pass
                break
        text = (
            type(answer).to_json(answer)
            if answer is not None
            else json.dumps({"error": {"code": 404, "message": f"{url.path} was not found"}})
        )
        body = text.encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def machine_type(name: str) -> gce.MachineType:
    """A machine as its name tells. Raises ``NotHere`` for names of no known family."""
    try:
        gpus, kind = gpus_of(name), family_of(name).kind
    except ConfigError:
        raise NotHere from None
    size = re.search(r"-(\d+)$", name)
    cpus = int(size[1]) if size else 12 * gpus.count if gpus else 0
    accelerators = [gce.Accelerators(guest_accelerator_count=gpus.count, guest_accelerator_type=gpus.type)] if gpus else []
    return gce.MachineType(name=name, guest_cpus=cpus, memory_mb=cpus * _GIB_PER_CPU[kind] * 1024, accelerators=accelerators)


def _machine_type(cloud: FakeCloud, _query: Any, *, zone: str, name: str) -> gce.MachineType:  # noqa: ARG001
    if name in cloud.absent_machine_types:
        raise NotHere
    return machine_type(name)


def _usage(cloud: FakeCloud) -> Counter[str]:
    """What the machines there are take from the quotas; those of reservations count with their reservation, which is not modelled."""
    used: Counter[str] = Counter()
    for machine in cloud.machines.values():
        shape, gpus = machine_type(machine.machine_type), gpus_of(machine.machine_type)
        cpus = "PREEMPTIBLE_CPUS" if machine.spot else family_of(machine.machine_type).cpu_quota
        used.update({cpus or "": shape.guest_cpus, "CPUS_ALL_REGIONS": shape.guest_cpus, "INSTANCES": 1, "IN_USE_ADDRESSES": 1})
        if gpus:
            used.update({gpus.quota or "": gpus.count, "GPUS_ALL_REGIONS": gpus.count})
    return used


def _quotas(cloud: FakeCloud, metrics: list[str]) -> list[gce.Quota]:
    used = _usage(cloud)
    limits = {metric: cloud.limits.get(metric, _PLENTY) for metric in metrics}
    return [gce.Quota(metric=metric, limit=limit, usage=used[metric]) for metric, limit in limits.items() if limit >= 0]


def _project(cloud: FakeCloud, _query: Any) -> gce.Project:
    return gce.Project(quotas=_quotas(cloud, ["CPUS_ALL_REGIONS", "GPUS_ALL_REGIONS"]))


def _region(cloud: FakeCloud, _query: Any, *, region: str) -> gce.Region:
    own = {row.cpu_quota for row in FAMILIES.values() if row.cpu_quota}
    gpus = ("NVIDIA_A100_GPUS", "NVIDIA_A100_80GB_GPUS", "NVIDIA_L4_GPUS")
    metrics = [*sorted(own), "PREEMPTIBLE_CPUS", *gpus, *(f"PREEMPTIBLE_{name}" for name in gpus)]
    rest = ["LOCAL_SSD_TOTAL_GB", "PREEMPTIBLE_LOCAL_SSD_GB", "SSD_TOTAL_GB", "IN_USE_ADDRESSES", "INSTANCES"]
    return gce.Region(name=region, quotas=_quotas(cloud, [*metrics, *rest]))


def _reservation(cloud: FakeCloud, _query: Any, *, zone: str, name: str) -> gce.Reservation:  # noqa: ARG001
    if name not in cloud.reservations:
        raise NotHere
    held = gce.Reservation(cloud.reservations[name])
    held.specific_reservation.in_use_count += sum(machine.reservation == name for machine in cloud.machines.values())
    return held


def _group(cloud: FakeCloud, _query: Any, *, zone: str, name: str) -> gce.InstanceGroupManager:
    up = sum(machine.group == name and machine.zone == zone for machine in cloud.machines.values())
    coming = cloud.missing[name]
    return gce.InstanceGroupManager(name=name, target_size=up + coming, current_actions={"none": up, "creating": coming})


def _chosen(cloud: FakeCloud, query: dict[str, list[str]]) -> Iterator[Any]:
    """Machines by the only two filters that are asked for: ``labels.K=V`` and ``labels.K:*``."""
    chosen = re.fullmatch(r"labels\.([\w-]+)(?:=([\w-]+)|:\*)", query["filter"][0])
    if chosen is None:
        raise NotHere
    key, value = chosen.groups()
    for machine in cloud.machines.values():
        if key in machine.labels and value in (None, machine.labels[key]):
            yield machine


def _instances(cloud: FakeCloud, query: dict[str, list[str]]) -> gce.InstanceAggregatedList:
    scopes: dict[str, gce.InstancesScopedList] = {}
    for machine in _chosen(cloud, query):
        scope = scopes.setdefault(f"zones/{machine.zone}", gce.InstancesScopedList())
        scope.instances.append(gce.Instance(name=machine.name, labels=machine.labels, status="RUNNING"))
    return gce.InstanceAggregatedList(items=scopes)


def _disks(cloud: FakeCloud, query: dict[str, list[str]]) -> gce.DiskAggregatedList:
    scopes: dict[str, gce.DisksScopedList] = {}
    for machine in _chosen(cloud, query):
        scope = scopes.setdefault(f"zones/{machine.zone}", gce.DisksScopedList())
        scope.disks.append(gce.Disk(name=machine.name, labels=machine.labels, status="READY"))
    return gce.DiskAggregatedList(items=scopes)


def _delete_machine(cloud: FakeCloud, _query: Any, *, zone: str, name: str) -> gce.Operation:  # noqa: ARG001
    if cloud.machines.pop(name, None) is None:
        raise NotHere
    return gce.Operation(name=f"delete-{name}", status="DONE")


_GET: tuple[tuple[str, Callable[..., Any]], ...] = (
    (r"/compute/v1/projects/[^/]+", _project),
    (r"/compute/v1/projects/[^/]+/regions/(?P<region>[^/]+)", _region),
    (rf"{_ZONAL}/machineTypes/(?P<name>[^/]+)", _machine_type),
    (rf"{_ZONAL}/reservations/(?P<name>[^/]+)", _reservation),
    (rf"{_ZONAL}/instanceGroupManagers/(?P<name>[^/]+)", _group),
    (r"/compute/v1/projects/[^/]+/aggregated/instances", _instances),
    (r"/compute/v1/projects/[^/]+/aggregated/disks", _disks),
)
_DELETE: tuple[tuple[str, Callable[..., Any]], ...] = ((rf"{_ZONAL}/(?:instances|disks)/(?P<name>[^/]+)", _delete_machine),)
