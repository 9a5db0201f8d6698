"""A cloud on this machine: GKE over gRPC and Compute Engine over REST, as far as ``infra.gke`` speaks to them, with faults on demand.

``python -m infra.gke.fake`` serves it until Ctrl-C and prints the two variables that lead ``satrap`` there: for trying ``provision``,
``release`` and ``sweep`` without a project or a bill. The tests use the same class. Not a model of Google's scheduler: machines come up
when their operation ends, quota is counted from the machines there are, and every call is recorded.
"""

from __future__ import annotations

import itertools
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import click
import grpc
from google.cloud import compute_v1 as gce
from google.cloud import container_v1 as gke

from infra.gke.client import COMPUTE_ENDPOINT, GKE_ENDPOINT

MAX_OPERATIONS = 5
"""On one cluster at a time; the sixth is turned down."""
_METHODS: dict[str, tuple[Any, Any]] = {
    "CreateCluster": (gke.CreateClusterRequest, gke.Operation),
    "GetCluster": (gke.GetClusterRequest, gke.Cluster),
    "ListClusters": (gke.ListClustersRequest, gke.ListClustersResponse),
    "DeleteCluster": (gke.DeleteClusterRequest, gke.Operation),
    "CreateNodePool": (gke.CreateNodePoolRequest, gke.Operation),
    "GetNodePool": (gke.GetNodePoolRequest, gke.NodePool),
    "ListNodePools": (gke.ListNodePoolsRequest, gke.ListNodePoolsResponse),
    "DeleteNodePool": (gke.DeleteNodePoolRequest, gke.Operation),
    "GetOperation": (gke.GetOperationRequest, gke.Operation),
    "ListOperations": (gke.ListOperationsRequest, gke.ListOperationsResponse),
}
# Their members are integers to the type checker and of the class itself to the fields.
_CLUSTER: Any = gke.Cluster.Status
_POOL: Any = gke.NodePool.Status
_DONE: Any = gke.Operation.Status.DONE
_STOCKOUT = "[GCE_STOCKOUT]: Instances were not created: ZONE_RESOURCE_POOL_EXHAUSTED"


@dataclass
class Faults:
    """What goes wrong. Pools by name, such as ``ps``."""

    quota: set[str] = field(default_factory=set)
    """Their creation is turned down with RESOURCE_EXHAUSTED."""
    stockout: set[str] = field(default_factory=set)
    """The operation that creates them fails and leaves them in ERROR."""
    missing_nodes: dict[str, int] = field(default_factory=dict)
    """So many of their nodes never come up, though the operation ends well."""
    unavailable: Counter[str] = field(default_factory=Counter)
    """So many next calls of a method answer UNAVAILABLE and do nothing."""
    lost_answers: Counter[str] = field(default_factory=Counter)
    """So many next calls of a method do their work and answer UNAVAILABLE."""
    exclusive: bool = False
    """A cluster takes one operation at a time."""
    failing_deletes: Counter[str] = field(default_factory=Counter)
    """So many next deletions of a cluster end in an error."""
    leaked_instances: int = 0
    """So many instances outlive the next cluster that is deleted."""
    unreachable_zone: str = ""
    """Listing clusters gets no answer from it."""


class Refusal(Exception):  # noqa: N818 - an answer, not a defect
    """A call that is turned down."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass
class Machine:
    """A VM with its boot disk."""

    name: str
    zone: str
    machine_type: str
    group: str
    labels: dict[str, str]
    spot: bool
    reservation: str


@dataclass
class _Running:
    operation: gke.Operation
    end: float
    finish: Callable[[], str]
    """Makes it so; returns what went wrong, or nothing."""


class FakeCloud:
    """The state of one project. All methods may be called from any thread."""

    def __init__(self, *, seconds: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.lock = threading.RLock()
        self.faults = Faults()
        self.seconds = seconds
        """How long an operation takes."""
        self.clock = clock
        self.calls: list[tuple[str, Any]] = []
        self.on_call: Callable[[int], None] = lambda _count: None
        """Called with the number of calls so far before each is answered."""
        self.clusters: dict[str, gke.Cluster] = {}
        """By resource name."""
        self.machines: dict[str, Machine] = {}
        self.missing: Counter[str] = Counter()
        """Nodes that never came up, by instance group."""
        self.limits: dict[str, float] = {}
        """Quota where it is not 1e9; a metric with -1 is not reported."""
        self.reservations: dict[str, gce.Reservation] = {}
        self.absent_machine_types: set[str] = set()
        self.most_operations = 0
        """Under way on one cluster at a time, so far."""
        self._running: dict[str, _Running] = {}
        self._done: dict[str, gke.Operation] = {}
        self._numbers = itertools.count(1)

    @contextmanager
    def served(self) -> Iterator[dict[str, str]]:
        """Serve both APIs on 127.0.0.1; yields the environment variables that lead to them."""
        from infra.gke.fake_compute import served

        server = grpc.server(ThreadPoolExecutor(8), options=[("grpc.so_reuseport", 0)])
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name), request_deserializer=request.deserialize, response_serializer=answer.serialize
            )
            for name, (request, answer) in _METHODS.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("google.container.v1.ClusterManager", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        try:
            with served(self) as address:
                yield {GKE_ENDPOINT: f"127.0.0.1:{port}", COMPUTE_ENDPOINT: address}
        finally:
            server.stop(None).wait()

    def count(self, method: str) -> int:
        """Calls of a method so far."""
        with self.lock:
            return sum(name == method for name, _ in self.calls)

    def record(self, method: str, request: Any) -> None:
        """Note a call."""
        with self.lock:
            self.calls.append((method, request))
            number = len(self.calls)
        self.on_call(number)

    def _handler(self, name: str) -> Callable[[Any, grpc.ServicerContext], Any]:
        answer = getattr(self, f"_{''.join(f'_{letter.lower()}' if letter.isupper() else letter for letter in name)[1:]}")

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            self.record(name, request)
            try:
                with self.lock:
                    self._pass_time()
                    self._fail(self.faults.unavailable, name)
                    result = answer(request)
                    self._fail(self.faults.lost_answers, name)
                    return result
            except Refusal as refusal:
                context.abort(refusal.code, str(refusal))

        return handle

    @staticmethod
    def _fail(fault: Counter[str], name: str) -> None:
        if fault[name] > 0:
            fault[name] -= 1
            raise Refusal(grpc.StatusCode.UNAVAILABLE, "the service is currently unavailable")

    def _pass_time(self) -> None:
        for name, running in list(self._running.items()):
            if running.end <= self.clock():
                del self._running[name]
                trouble = running.finish()
                running.operation.status = _DONE
                if trouble:
                    running.operation.error = {"code": 8, "message": trouble}
                self._done[name] = running.operation

    # Clusters

    def _create_cluster(self, request: gke.CreateClusterRequest) -> gke.Operation:
        wanted, zone = request.cluster, request.parent.rpartition("/")[2]
        path = f"{request.parent}/clusters/{wanted.name}"
        if path in self.clusters:
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"Already exists: {path}")
        cluster = gke.Cluster(wanted)
        cluster.location = cluster.zone = zone
        cluster.status = _CLUSTER.PROVISIONING
        self.clusters[path] = cluster
        for pool in cluster.node_pools:
            pool.status = _POOL.PROVISIONING

        def finish() -> str:
            cluster.status = _CLUSTER.RUNNING
            cluster.endpoint = "203.0.113.10"
            for pool in cluster.node_pools:
                self._fill(path, pool)
            return ""

        return self._start("CREATE_CLUSTER", path, finish)

    def _get_cluster(self, request: gke.GetClusterRequest) -> gke.Cluster:
        return self._cluster(request.name)

    def _cluster(self, path: str) -> gke.Cluster:
        if path not in self.clusters:
            raise Refusal(grpc.StatusCode.NOT_FOUND, f"Not found: {path}")
        return self.clusters[path]

    def _list_clusters(self, request: gke.ListClustersRequest) -> gke.ListClustersResponse:
        found = [cluster for path, cluster in self.clusters.items() if _within(request.parent, path)]
        return gke.ListClustersResponse(
            clusters=found, missing_zones=[self.faults.unreachable_zone] if self.faults.unreachable_zone else []
        )

    def _delete_cluster(self, request: gke.DeleteClusterRequest) -> gke.Operation:
        path, cluster = request.name, self._cluster(request.name)
        self._refuse_if_busy(path, most=0)
        cluster.status = _CLUSTER.STOPPING

        def finish() -> str:
            if self.faults.failing_deletes[cluster.name] > 0:
                self.faults.failing_deletes[cluster.name] -= 1
                cluster.status = _CLUSTER.ERROR
                return "Internal error: the network is still in use"
            for pool in cluster.node_pools:
                self._empty(path, pool, keep=self.faults.leaked_instances)
                self.faults.leaked_instances = 0
            del self.clusters[path]
            return ""

        return self._start("DELETE_CLUSTER", path, finish)

    # Node pools

    def _create_node_pool(self, request: gke.CreateNodePoolRequest) -> gke.Operation:
        path, cluster = request.parent, self._cluster(request.parent)
        pool = gke.NodePool(request.node_pool)
        if any(other.name == pool.name for other in cluster.node_pools):
            raise Refusal(grpc.StatusCode.ALREADY_EXISTS, f"Already exists: {path}/nodePools/{pool.name}")
        self._refuse_if_busy(path, most=MAX_OPERATIONS - 1)
        if pool.name in self.faults.quota:
            raise Refusal(grpc.StatusCode.RESOURCE_EXHAUSTED, f"Insufficient regional quota to satisfy request for {pool.name}")
        pool.status = _POOL.PROVISIONING
        cluster.node_pools.append(pool)

        def finish() -> str:
            kept = self._pool(path, pool.name)
            if pool.name in self.faults.stockout:
                kept.status, kept.status_message = _POOL.ERROR, _STOCKOUT
                return _STOCKOUT
            self._fill(path, kept)
            return ""

        return self._start("CREATE_NODE_POOL", f"{path}/nodePools/{pool.name}", finish)

    def _pool(self, path: str, name: str) -> gke.NodePool:
        for pool in self._cluster(path).node_pools:
            if pool.name == name:
                return pool
        raise Refusal(grpc.StatusCode.NOT_FOUND, f"Not found: {path}/nodePools/{name}")

    def _get_node_pool(self, request: gke.GetNodePoolRequest) -> gke.NodePool:
        path, _, name = request.name.partition("/nodePools/")
        return self._pool(path, name)

    def _list_node_pools(self, request: gke.ListNodePoolsRequest) -> gke.ListNodePoolsResponse:
        return gke.ListNodePoolsResponse(node_pools=self._cluster(request.parent).node_pools)

    def _delete_node_pool(self, request: gke.DeleteNodePoolRequest) -> gke.Operation:
        path, _, name = request.name.partition("/nodePools/")
        pool, cluster = self._pool(path, name), self._cluster(path)
        self._refuse_if_busy(path, most=MAX_OPERATIONS - 1)
        pool.status = _POOL.STOPPING

        def finish() -> str:
            self._empty(path, self._pool(path, name))
            cluster.node_pools = [other for other in cluster.node_pools if other.name != name]
            return ""

        return self._start("DELETE_NODE_POOL", request.name, finish)

    def _fill(self, path: str, pool: gke.NodePool) -> None:
        """Let the nodes of a pool come up."""
        project, zone, cluster = path.split("/")[1], path.split("/")[3], path.split("/")[5]
        group = f"gke-{cluster}-{pool.name}-grp"
        pool.instance_group_urls = [f"https://www.googleapis.com/compute/v1/projects/{project}/zones/{zone}/instanceGroupManagers/{group}"]
        pool.status = _POOL.RUNNING
        self.missing[group] = self.faults.missing_nodes.get(pool.name, 0)
        config = pool.config
        for number in range(pool.initial_node_count - self.missing[group]):
            name = f"gke-{cluster}-{pool.name}-{number:04}"
            held = config.reservation_affinity.values[0] if config.reservation_affinity.values else ""
            self.machines[name] = Machine(name, zone, config.machine_type, group, dict(config.resource_labels), config.spot, held)

    def _empty(self, path: str, pool: gke.NodePool, *, keep: int = 0) -> None:
        group = f"gke-{path.rpartition('/')[2]}-{pool.name}-grp"
        for name in [machine.name for machine in self.machines.values() if machine.group == group][keep:]:
            del self.machines[name]

    # Operations

    def _start(self, kind: str, target: str, finish: Callable[[], str]) -> gke.Operation:
        zone, name = target.split("/")[3], f"operation-{next(self._numbers)}"
        operation = gke.Operation(
            name=name,
            operation_type=kind,
            status=gke.Operation.Status.RUNNING,
            target_link=f"https://container.googleapis.com/v1/{target}",
            location=zone,
            zone=zone,
        )
        self._running[name] = _Running(operation, self.clock() + self.seconds, finish)
        self.most_operations = max(self.most_operations, len(self._busy(target)))
        return operation

    def _busy(self, target: str) -> list[str]:
        cluster = "/".join(target.split("/")[:6])
        return [name for name, other in self._running.items() if f"/{cluster}/" in f"{other.operation.target_link}/"]

    def _refuse_if_busy(self, path: str, *, most: int) -> None:
        busy = self._busy(path)
        exclusive = any("/nodePools/" not in self._running[name].operation.target_link for name in busy)
        if busy and (exclusive or self.faults.exclusive or len(busy) > most):
            raise Refusal(grpc.StatusCode.FAILED_PRECONDITION, f"Cluster is running incompatible operation {busy[0]}.")

    def _get_operation(self, request: gke.GetOperationRequest) -> gke.Operation:
        name = request.name.rpartition("/")[2]
        if name in self._running:
            return self._running[name].operation
        if name in self._done:
            return self._done[name]
        raise Refusal(grpc.StatusCode.NOT_FOUND, f"Not found: {request.name}")

    def _list_operations(self, request: gke.ListOperationsRequest) -> gke.ListOperationsResponse:
        every = [*self._done.values(), *(running.operation for running in self._running.values())]
        return gke.ListOperationsResponse(
            operations=[one for one in every if _within(request.parent, one.target_link.partition("/v1/")[2])]
        )


@click.command()
@click.option("--seconds", default=5.0, show_default=True, type=click.FloatRange(min=0.0), help="How long an operation takes.")
@click.option("--quota", multiple=True, metavar="POOL", help="Turn down this pool (ps, ew, dl, nn) for lack of quota.")
@click.option("--stockout", multiple=True, metavar="POOL", help="Have no machines for this pool; it stays behind in ERROR.")
@click.option("--missing-nodes", multiple=True, metavar="POOL=N", help="Let N nodes of this pool never come up.")
@click.option("--limit", multiple=True, metavar="METRIC=N", help="Quota of the project or region, such as NVIDIA_A100_GPUS=8.")
@click.option("--exclusive", is_flag=True, help="One operation at a time on a cluster.")
def main(seconds: float, limit: tuple[str, ...], **faults: Any) -> None:
    """Serve a cloud on this machine until Ctrl-C."""
    cloud = FakeCloud(seconds=seconds)
    cloud.faults = Faults(
        quota=set(faults["quota"]),
        stockout=set(faults["stockout"]),
        missing_nodes={pool: int(number) for pool, number in map(_assignment, faults["missing_nodes"])},
        exclusive=faults["exclusive"],
    )
    cloud.limits = dict(map(_assignment, limit))
    with cloud.served() as environment:
        for name, value in environment.items():
            click.echo(f"export {name}={value}")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            threading.Event().wait()


def _assignment(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise click.BadParameter(f"{text!r}: expected NAME=NUMBER") from None


def _within(parent: str, path: str) -> bool:
    """Whether a resource lies in ``projects/P/locations/L``, of which L may be ``-``."""
    asked, there = parent.split("/"), path.split("/")
    return asked[1] == there[1] and asked[3] in ("-", there[3])


if __name__ == "__main__":
    main()
