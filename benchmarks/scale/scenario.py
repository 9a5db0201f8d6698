"""What is simulated: the gang, its machines, the costs. Every number says where it comes from: measured, catalogue, published, assumed,
or calibrated (chosen so that the simulation meets a published figure)."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from benchmarks.scale.measure import CONSTANTS, unique_share
from benchmarks.streams import NUM_DENSE, NUM_SLOTS

NS = 1e-9
Mode = Literal["sync", "hybrid", "async"]
HIDDEN = (4096, 2048, 1024, 512, 256)
"""Published: widths of the dense network."""
PUBLISHED_SIZES = {6.25e12: 1.79, 12.5e12: 1.85, 25e12: 1.89, 50e12: 1.83, 100e12: 1.91}
"""Published: parameters -> million samples/s in mode hybrid on 64 A100, read off a plot to about 2 %."""
PUBLISHED_MODES = {"sync": 0.73, "hybrid": 1.91, "async": 2.15}
"""Published: million samples/s at 1e14 parameters."""


@dataclass(frozen=True)
class Machine:
    """Of the catalogue of machine types: virtual CPUs, and bandwidth out, which is taken for both directions."""

    name: str
    vcpus: int
    gbps: float

    @property
    def cores(self) -> int:
        """Two virtual CPUs are one core."""
        return self.vcpus // 2


SERVER = Machine("m2-ultramem-416", 416, 32.0)
CPU = Machine("c2-standard-30", 30, 32.0)
GPU = Machine("a2-highgpu-8g", 96, 100.0)


@dataclass(frozen=True)
class Costs:
    """Seconds on one core. The first group is ``measured`` (constants.json)."""

    look_up_seconds: float
    """Per row at 1e6 rows, of a look-up of training, at this dim."""
    update_seconds: float
    look_up_growth: tuple[tuple[float, float], ...]
    """(rows, extra seconds per row) against 1e6 rows, at dim 16."""
    update_growth: tuple[tuple[float, float], ...]
    dedup_seconds: float
    expand_seconds: float
    """Per value, as are sum, encode, decode."""
    sum_seconds: float
    encode_seconds: float
    decode_seconds: float
    message_seconds: float
    """The interpreter's part of one message at one end; it holds the interpreter's lock."""
    byte_seconds: float
    """Per byte at one end: half of what both ends take."""
    read_seconds: float
    """Per record read from a shard."""
    # Calibrated, and zero in our design: what the published system spends beyond that.
    worker_id_seconds: float = 0.0
    """Per id, of a worker's thread, on the way forward and again on the way back."""
    rank_record_seconds: float = 0.0
    """Per record, of a rank's main thread."""


@dataclass(frozen=True)
class Assumptions:
    """What was neither measured nor looked up. The page shows how much the result depends on each."""

    wire_seconds: float = 50e-6
    """One way between two machines of a zone."""
    gpu_flops: float = 19.5e12
    """Per second: data sheet of the A100, float32 without tensor cores."""
    gpu_efficiency: float = 0.6
    """Share of that a large matrix multiplication reaches."""
    bus_bytes_per_second: float = 12e9
    """Between host and GPU, per rank."""
    launch_seconds: float = 2e-3
    """Host time of a step that the GPU waits for: launching kernels, the decision whether gradients are finite, the optimizer."""
    thread_efficiency: float = 0.75
    """Of a server's threads in one table; measured for 2: 0.74 (look-up), 0.84 (update)."""
    jitter: float = 0.1
    """Standard deviation of the duration of compute over its mean."""
    growth_beyond: float = 1.0
    """How a row's cost grows beyond the largest measured table: 1 as in its last decade, 0 not at all."""
    ids_alpha: float = 1.05
    """Zipf exponent of the ids of a slot; 0 is uniform."""


@dataclass(frozen=True)
class Scenario:
    """One run of the simulated gang."""

    parameters: float
    costs: Costs
    dim: int = 128
    mode: Mode = "hybrid"
    batch: int = 4096
    """Records per rank and step."""
    max_staleness: int = 4
    """Of modes hybrid and async."""
    averaging_period: int = 16
    servers: int = 30
    workers: int = 70
    loaders: int = 30
    ranks: int = 64
    ranks_per_machine: int = 8
    server_threads: int = 16
    reduce_apart: bool = False
    """Whether the all-reduce has a network of its own, as fast; no machine has. Shows what sharing costs."""
    row_value_bytes: int = 2
    """On the wire between workers and servers."""
    assumptions: Assumptions = field(default_factory=Assumptions)
    measured: int = 20
    """Steps timed, after ``warm`` that are not."""
    seed: int = 0

    @property
    def ids(self) -> int:
        """Per batch."""
        return self.batch * NUM_SLOTS

    @property
    def values(self) -> int:
        """Of a batch's pooled vectors."""
        return self.ids * self.dim

    @property
    def unique(self) -> int:
        """Different ids of a batch."""
        ids_per_slot = max(1, int(self.parameters / self.dim / NUM_SLOTS))
        return round(self.ids * _unique_share(ids_per_slot, self.batch, self.assumptions.ids_alpha))

    @property
    def layers(self) -> list[int]:
        """Weights of the dense network, first layer first."""
        widths = (NUM_SLOTS * self.dim + NUM_DENSE, *HIDDEN, 1)
        return [a * b for a, b in itertools.pairwise(widths)]

    @property
    def dense_seconds(self) -> tuple[float, float]:
        """Forward, and backward (twice that), of one batch."""
        forward = 2.0 * sum(self.layers) * self.batch / (self.assumptions.gpu_flops * self.assumptions.gpu_efficiency)
        return forward, 2.0 * forward

    @property
    def permits(self) -> int:
        """Batches of a rank between look-up and acknowledged update."""
        return 1 if self.mode == "sync" else self.max_staleness + 1

    @property
    def loader_depth(self) -> int:
        """Batches that a loader reads ahead per rank, as the roles are started."""
        return self.permits + 1

    @property
    def warm(self) -> int:
        """Steps until the queues are in their usual state."""
        return self.permits + 6

    def row_seconds(self) -> tuple[float, float]:
        """Look-up and update per row of one server's share, on one core."""
        rows = self.parameters / self.dim / self.servers
        beyond = self.assumptions.growth_beyond
        costs = self.costs
        return (
            costs.look_up_seconds + grown(costs.look_up_growth, rows, beyond),
            costs.update_seconds + grown(costs.update_growth, rows, beyond),
        )

    def assume(self, **changed: float) -> Scenario:
        """With other assumptions."""
        return replace(self, assumptions=replace(self.assumptions, **changed))

    def cost(self, **changed: float) -> Scenario:
        """With other costs."""
        return replace(self, costs=replace(self.costs, **changed))


@lru_cache(maxsize=256)
def _unique_share(ids_per_slot: int, records: int, alpha: float) -> float:
    return unique_share(ids_per_slot, records, alpha)


def grown(points: tuple[tuple[float, float], ...], rows: float, beyond: float) -> float:
    """Extra seconds at ``rows``: between measured points by the logarithm of rows, past the last with ``beyond`` times its slope."""
    if rows <= points[0][0]:
        return points[0][1]
    for (a, low), (b, high) in itertools.pairwise(points):
        if rows <= b:
            return low + (high - low) * math.log(rows / a) / math.log(b / a)
    (a, low), (b, high) = points[-2:]
    return high + beyond * (high - low) * math.log(rows / b) / math.log(b / a)


def measured_costs(dim: int, path: Path = CONSTANTS) -> Costs:
    """Our costs at a width, from the file. Between measured widths a row's cost is a straight line."""
    constants: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    worker, rpc = constants["worker"], constants["rpc"]

    def growth(name: str) -> tuple[tuple[float, float], ...]:
        points = constants["table_by_rows"]
        first = points[0][name]["median"]
        return tuple((float(point["rows"]), max(0.0, NS * (point[name]["median"] - first))) for point in points)

    return Costs(
        look_up_seconds=_at(dim, constants, "look_up_ns_per_row"),
        update_seconds=_at(dim, constants, "update_ns_per_row"),
        look_up_growth=growth("look_up_ns_per_row"),
        update_growth=growth("update_ns_per_row"),
        dedup_seconds=NS * worker["dedup_ns_per_id"]["median"],
        expand_seconds=NS * worker["expand_ns_per_value"]["median"],
        sum_seconds=NS * worker["sum_ns_per_value"]["median"],
        encode_seconds=NS * worker["encode_ns_per_value"]["median"],
        decode_seconds=NS * worker["decode_ns_per_value"]["median"],
        message_seconds=rpc["cpu_seconds_per_message_end"]["median"],
        byte_seconds=NS * rpc["cpu_ns_per_byte_both_ends"]["median"] / 2,
        read_seconds=NS * constants["loader"]["read_ns_per_record"]["median"],
    )


def _at(dim: int, constants: dict[str, Any], name: str) -> float:
    points = [(point["dim"], NS * point[name]["median"]) for point in constants["table_by_dim"]]
    if not points[0][0] <= dim <= points[-1][0]:
        raise ValueError(f"dim {dim}: measured from {points[0][0]} to {points[-1][0]}; add it to DIMS of measure.py and measure again")
    for (a, low), (b, high) in itertools.pairwise(points):
        if dim <= b:
            return low + (high - low) * (dim - a) / (b - a)
    return points[-1][1]


def ours(parameters: float = 100e12, *, dim: int = 128, **changed: Any) -> Scenario:
    """Our design on the reference gang: measured costs, nothing calibrated."""
    return Scenario(parameters=parameters, dim=dim, costs=measured_costs(dim), **changed)
