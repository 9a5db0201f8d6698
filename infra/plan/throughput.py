"""How fast a gang is expected to be: the work of one step, station by station, against what the machines can do.

The stations and ways are those of the trainer (ARCHITECTURE.md) and of the simulation in ``benchmarks/scale``, whose figures a test holds
these against. A step of all ranks takes as long as the slowest of three: a rank's own course (host, GPU, all-reduce, waiting for the
slowest rank), the way of a batch to the servers and back divided by the permits a rank has, and the busiest station that ranks share.
Queues and bursts are left out, so expect less rather than more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from infra.plan.costs import Costs, assumed, costs
from infra.plan.shape import Pool, Shape
from infra.plan.workload import FLOAT_BYTES, SIGN_BYTES, Batch, Workload

_BUCKET_BYTES = 25 << 20
"""DistributedDataParallel's default."""
_COLLECTIVE_SECONDS = 20e-6


@dataclass(frozen=True)
class Throughput:
    """What is expected of a gang."""

    samples_per_second: float
    step_seconds: float
    """Of one step of all ranks."""
    limits: tuple[tuple[str, float], ...]
    """What would bound the step, largest first: name, seconds of one step."""
    rank_parts: tuple[tuple[str, float], ...]
    """What a rank's own course consists of, longest first: name, seconds of one step."""
    network_bytes: float
    """Between the roles in one step of all ranks, without the all-reduce."""
    reduce_bytes: float
    """All-reduced in one step by all machines of ranks."""

    @property
    def limit(self) -> str:
        """What bounds the step."""
        return self.limits[0][0]


@dataclass(frozen=True)
class _Step:
    """One step under estimation."""

    workload: Workload
    shape: Shape
    batch: Batch
    costs: Costs

    @property
    def ranks(self) -> Pool:
        return self.shape.pool("nn_worker")

    @property
    def servers(self) -> Pool:
        return self.shape.pool("parameter_server")

    @property
    def workers(self) -> Pool:
        return self.shape.pool("embedding_worker")

    @property
    def loaders(self) -> Pool:
        return self.shape.pool("data_loader")

    @property
    def mode(self) -> str:
        return self.workload.config.training.mode

    # ---- one batch's work on cores, in seconds

    def loader_seconds(self) -> float:
        return self.batch.records * self.costs.read_seconds + self.batch.ids_bytes * self.costs.byte_seconds

    def worker_seconds(self) -> tuple[float, float]:
        """Of an embedding worker: ids in and the way forward; the way back."""
        b, c = self.batch, self.costs
        both = b.row_bytes + b.vector_bytes
        forward = b.ids * c.dedup_seconds + (b.ids_bytes + both) * c.byte_seconds + b.expanded * c.expand_seconds
        return forward, b.expanded * c.sum_seconds + b.unique_values * c.encode_seconds + both * c.byte_seconds

    def table_seconds(self) -> tuple[tuple[float, float], ...]:
        """Look-up and update of one batch's share of each table on one server, on one core."""
        count = self.servers.processes
        found = []
        for spec, unique in zip(self.workload.tables, self.batch.unique, strict=True):
            look_up, update = self.costs.row_seconds(spec.dim, spec.capacity_rows / count)
            found.append((unique / count * look_up, unique / count * update))
        return tuple(found)

    def server_seconds(self) -> tuple[float, float]:
        """Of one server's cores beside its tables: answering a look-up; taking in an update."""
        b, c, count = self.batch, self.costs, self.servers.processes
        out = (b.unique_values * c.encode_seconds + b.row_bytes * c.byte_seconds) / count
        into = (b.unique_values * c.decode_seconds + (b.row_bytes + SIGN_BYTES * b.unique_total) * c.byte_seconds) / count
        return out, into

    def host_seconds(self) -> tuple[float, float]:
        """Of a rank's host: taking vectors in; sending their gradients."""
        b, c = self.batch, self.costs
        moved = b.vector_bytes * c.byte_seconds
        return moved + b.pooled * c.decode_seconds, moved + b.pooled * c.encode_seconds

    @property
    def server_speed(self) -> float:
        """Cores' worth of a server's threads in one table."""
        own = self.workload.config.training.server_threads
        cores = max(1, self.servers.machine.cores // min(self.servers.each, self.servers.processes))
        threads = own or min(int(assumed("server_threads")), cores)
        return 1.0 if threads == 1 else threads * assumed("thread_efficiency")

    # ---- the rank

    def dense_seconds(self) -> tuple[float, float]:
        """Forward and backward of one batch."""
        flops = self.ranks.machine.gpu_flops
        if flops is not None:
            speed = flops * assumed("gpu_efficiency")
        else:
            cores = max(1, self.ranks.machine.cores // min(self.ranks.each, self.ranks.processes))
            threads = self.workload.config.training.dense_threads or cores
            speed = assumed("cpu_flops_per_core") * (1.0 if threads == 1 else threads * assumed("thread_efficiency"))
        forward = self.workload.forward_flops * self.batch.records / speed
        return forward, 2.0 * forward

    def copy_seconds(self) -> float:
        """Vectors to the GPU, and their gradients back as much again; nothing without one."""
        return FLOAT_BYTES * self.batch.pooled / assumed("bus_bytes_per_second") if self.ranks.machine.gpus else 0.0

    def buckets(self) -> list[tuple[float, float]]:
        """(share of backward that must be over, bytes) of the buckets of gradients, last layer first."""
        layers = self.workload.layers
        total, done, held = sum(layers), 0, 0.0
        made: list[tuple[float, float]] = []
        for i, weights in enumerate(reversed(layers)):
            done += weights
            held += FLOAT_BYTES * weights
            if held >= _BUCKET_BYTES or i == len(layers) - 1:
                made.append((done / total, held))
                held = 0.0
        return made

    def reduce_seconds(self, num_bytes: float) -> float:
        """One all-reduce: within machines, then around the ring of machines."""
        each = min(self.ranks.each, self.ranks.processes)
        seconds = _COLLECTIVE_SECONDS
        if each > 1:
            inside = assumed("nvlink_bytes_per_second") if self.ranks.machine.gpus else 1.0 / self.costs.byte_seconds
            seconds += 2.0 * num_bytes * (1.0 - 1.0 / each) / inside
        if self.ranks.machines > 1 and not self.shape.shared:
            seconds += self.ring_bytes(num_bytes) / self.ranks.bytes_per_second
            seconds += 2.0 * (self.ranks.machines - 1) * assumed("wire_seconds")
        return seconds

    def ring_bytes(self, num_bytes: float) -> float:
        """What one machine of ranks sends, and gets, in an all-reduce."""
        return 2.0 * num_bytes * (self.ranks.machines - 1) / self.ranks.machines

    def rank_parts(self) -> dict[str, float]:
        """Seconds of a rank's own course through a step, part by part."""
        forward, backward = self.dense_seconds()
        launch = assumed("launch_seconds") if self.ranks.machine.gpus else 0.0
        parts = {"dense network": forward + backward, "host": launch, "copies": 2.0 * self.copy_seconds()}
        if self.ranks.processes == 1:
            return parts
        if self.mode == "async":
            everything = self.reduce_seconds(FLOAT_BYTES * sum(self.workload.layers))
            return {**parts, "averaging": everything / self.workload.config.training.averaging_period}
        spread = assumed("jitter") * math.sqrt(launch**2 + forward**2 + backward**2)
        end = 0.0
        for share, num_bytes in self.buckets():
            end = max(end, share * backward) + self.reduce_seconds(num_bytes)
        waits = spread * _slowest_of(self.ranks.processes)
        return {**parts, "all-reduce beyond backward": end - backward, "waiting for the slowest": waits}

    # ---- ways

    def way_seconds(self) -> tuple[float, float]:
        """A look-up from the rank's question to its vectors; an update from the gradient to the last acknowledgement. No queues."""
        wire, message, b = assumed("wire_seconds"), self.costs.message_seconds, self.batch
        count = self.servers.processes
        out, into = self.server_seconds()
        look = sum(look for look, _ in self.table_seconds()) / self.server_speed
        update = sum(update for _, update in self.table_seconds()) / self.server_speed
        forward, backward = self.worker_seconds()
        took, gave = self.host_seconds()
        calls = 2.0 * wire + (6.0 + count) * message
        lines = b.vector_bytes / self.workers.bytes_per_second + b.vector_bytes / self.ranks.bytes_per_second
        rows = b.row_bytes / self.workers.bytes_per_second
        forward -= b.ids * self.costs.dedup_seconds
        there = 2.0 * wire + calls + look + out + rows + forward + lines + took
        back = 2.0 * wire + calls + gave + lines + backward + rows + into + update
        return there, back

    # ---- stations that ranks share, in seconds of one step of all ranks

    def stations(self) -> dict[str, float]:
        """Busy seconds of each kind's busiest member."""
        if self.shape.shared:
            return {"cores of the machine": self.all_cores_seconds() / self.shape.cores}
        found = {**self._loader_stations(), **self._worker_stations(), **self._server_stations(), **self._rank_stations()}
        return {name: seconds for name, seconds in found.items() if seconds > 0.0}

    def all_cores_seconds(self) -> float:
        """Of all roles together: what one machine has to do in a step."""
        forward, backward = self.dense_seconds()
        threads = 0.0 if self.ranks.machine.gpus else (forward + backward) * self._rank_cores()
        tables = self.servers.processes * sum(look + update for look, update in self.table_seconds())
        beside = self.servers.processes * sum(self.server_seconds())
        messages = (10.0 + 8.0 * self.servers.processes) * self.costs.message_seconds
        own = self.loader_seconds() + sum(self.worker_seconds()) + sum(self.host_seconds())
        return self.ranks.processes * (threads + tables + beside + own + messages)

    def _rank_cores(self) -> int:
        cores = max(1, self.ranks.machine.cores // min(self.ranks.each, self.ranks.processes))
        return self.workload.config.training.dense_threads or cores

    def _loader_stations(self) -> dict[str, float]:
        own, b, ranks = self.loaders, self.batch, self.ranks.processes
        return {
            "loaders' cores": ranks * self.loader_seconds() / (own.machines * own.machine.cores),
            "loaders' interpreters": ranks * 6.0 * self.costs.message_seconds / own.processes,
            "loaders' network out": ranks * (b.ids_bytes + b.dense_bytes) / own.machines / own.bytes_per_second,
        }

    def _worker_stations(self) -> dict[str, float]:
        own, b, ranks = self.workers, self.batch, self.ranks.processes
        messages = (6.0 + 4.0 * self.servers.processes) * self.costs.message_seconds
        out = 2.0 * SIGN_BYTES * b.unique_total + b.row_bytes + b.vector_bytes
        into = b.ids_bytes + b.row_bytes + b.vector_bytes
        return {
            "embedding workers' cores": ranks * sum(self.worker_seconds()) / (own.machines * own.machine.cores),
            "embedding workers' interpreters": ranks * messages / own.processes,
            "embedding workers' network": ranks * max(out, into) / own.machines / own.bytes_per_second,
        }

    def _server_stations(self) -> dict[str, float]:
        own, b, ranks = self.servers, self.batch, self.ranks.processes
        tables = [look + update for look, update in self.table_seconds()]
        if self.mode == "sync":
            tables = [t + self._merge_seconds(i) for i, t in enumerate(tables)]
        each = min(own.each, own.processes)
        into = 2.0 * SIGN_BYTES * b.unique_total + b.row_bytes
        return {
            "a server's table": ranks * max(tables) / self.server_speed,
            "servers' cores": ranks * each * (sum(tables) + sum(self.server_seconds())) / own.machine.cores,
            "servers' interpreters": ranks * 4.0 * self.costs.message_seconds,
            "servers' network": ranks * max(into, b.row_bytes) / own.machines / own.bytes_per_second,
        }

    def _merge_seconds(self, table: int) -> float:
        """Mode sync: one batch's share of the ranks' gradients is found and summed before the one update."""
        unique, dim = self.batch.unique[table] / self.servers.processes, self.workload.tables[table].dim
        return unique * (self.costs.dedup_seconds + dim * self.costs.sum_seconds)

    def _rank_stations(self) -> dict[str, float]:
        own, b = self.ranks, self.batch
        each = min(own.each, own.processes)
        reduced = 0.0
        if own.machines > 1:
            reduced = self.ring_bytes(FLOAT_BYTES * sum(self.workload.layers))
            reduced /= self.workload.config.training.averaging_period if self.mode == "async" else 1.0
        host = each * sum(self.host_seconds()) / own.machine.cores
        return {
            "nn workers' network": (each * (b.vector_bytes + b.dense_bytes) + reduced) / own.bytes_per_second,
            "nn workers' host cores": host,
        }


def throughput(workload: Workload, shape: Shape) -> Throughput:
    """What a gang is expected to do."""
    step = _Step(workload, shape, workload.batch(), costs())
    parts, (there, back) = step.rank_parts(), step.way_seconds()
    rank = sum(parts.values())
    bound = workload.config.training.staleness_bound
    stations = step.stations()
    if bound == 0:
        # All ranks ask at once and wait: whoever is last has seen the busiest station work for all.
        limits = {"the way to the servers and back": rank + there + back + max(stations.values())}
    else:
        limits = {"nn workers": rank, "staleness bound": (rank + there + back) / (bound + 1)}
        limits |= stations
    ordered = tuple(sorted(limits.items(), key=lambda item: -item[1]))
    seconds = ordered[0][1]
    ranks = step.ranks
    reduced = step.ring_bytes(FLOAT_BYTES * sum(workload.layers)) * ranks.machines if ranks.machines > 1 else 0.0
    return Throughput(
        samples_per_second=ranks.processes * step.batch.records / seconds,
        step_seconds=seconds,
        limits=ordered,
        rank_parts=tuple((name, part) for name, part in sorted(parts.items(), key=lambda item: -item[1]) if part > 0.0),
        network_bytes=ranks.processes * step.batch.network_bytes,
        reduce_bytes=reduced,
    )


def _slowest_of(count: int) -> float:
    """How many deviations the largest of ``count`` normal numbers lies above the mean (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
