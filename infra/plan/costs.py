"""What a piece of work takes: constants that were measured (``measured.json``), are on a data sheet, or are assumed; each with its source.

``measured.json`` is what ``python -m benchmarks.scale measure`` wrote; a test keeps it equal to that file. The sources of the rest stand
in ``ASSUMPTIONS``, which every plan carries along.
"""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

NS = 1e-9


@dataclass(frozen=True)
class Assumption:
    """A constant that a plan rests on, beside the measured costs."""

    value: float
    unit: str
    source: str


ASSUMPTIONS = {
    "wire_seconds": Assumption(50e-6, "s", "assumed: one way between two machines of a zone"),
    "gpu_efficiency": Assumption(0.6, "", "assumed: share of a GPU's data sheet that a large matrix product reaches"),
    "bus_bytes_per_second": Assumption(12e9, "B/s", "assumed: between host and GPU, per rank"),
    "nvlink_bytes_per_second": Assumption(300e9, "B/s", "data sheet of the A100: NVLink, per GPU and direction"),
    "launch_seconds": Assumption(2e-3, "s", "assumed: host time of a step that its GPU waits for"),
    "cpu_flops_per_core": Assumption(
        85.8e9, "1/s", "measured 2026-12: a DLRM's dense network alone on one thread, 30,260 samples/s of 2.84 MFLOP (docs/performance.md)"
    ),
    "thread_efficiency": Assumption(
        0.75, "", "measured for two threads: 0.74 (look-up), 0.84 (update), 0.83 (dense network); taken for more"
    ),
    "jitter": Assumption(0.1, "", "assumed: deviation of a computation's time over its mean"),
    "growth_beyond": Assumption(1.0, "", "assumed: a row's cost grows past the largest measured table as over its last decade"),
    "ids_alpha": Assumption(1.05, "", "assumed: Zipf exponent of a slot's ids"),
    "multi_valued_share": Assumption(0.1, "", "assumed without data: ids of a multi-valued slot, as a share of its max_ids"),
    "server_threads": Assumption(16, "", "assumed where training.server_threads is absent: threads of a server, if it has the cores"),
    "usable_share": Assumption(0.9, "", "chosen: share of a pod's memory that tables may take; the rest is for buffers and the process"),
    "snapshot_bytes_per_second": Assumption(
        1.2e9,
        "B/s",
        "measured 2026-12-04: a server writes its tables to memory; 1.2e9 at width 16, 1.9e9 at 128 (docs/experiments.md)",
    ),
    "disk_bytes_per_second": Assumption(0.5e9, "B/s", "assumed: a local disk, for checkpoints of a run on one machine"),
}


def assumed(name: str) -> float:
    """The value of an assumption."""
    return ASSUMPTIONS[name].value


@dataclass(frozen=True)
class Costs:
    """Seconds on one core, measured."""

    dedup_seconds: float
    """Per id."""
    expand_seconds: float
    """Per value, as are sum, encode and decode."""
    sum_seconds: float
    encode_seconds: float
    decode_seconds: float
    message_seconds: float
    """The interpreter's part of one message at one end; it holds the interpreter's lock."""
    byte_seconds: float
    """Per byte at one end."""
    read_seconds: float
    """Per record read from a shard."""

    def row_seconds(self, dim: int, rows: float) -> tuple[float, float]:
        """Look-up and update of one row of width ``dim`` in a server's table of ``rows`` rows."""
        by_dim, by_rows = _measured()["table_by_dim"], _measured()["table_by_rows"]
        found = []
        for name in ("look_up_ns_per_row", "update_ns_per_row"):
            points = [(float(point["dim"]), NS * point[name]["median"]) for point in by_dim]
            first = by_rows[0][name]["median"]
            growth = [(float(point["rows"]), max(0.0, NS * (point[name]["median"] - first))) for point in by_rows]
            found.append(line_through(points, float(dim)) + _grown(growth, rows))
        return found[0], found[1]


@lru_cache(maxsize=1)
def costs() -> Costs:
    """The measured costs."""
    measured = _measured()
    worker, rpc = measured["worker"], measured["rpc"]
    return Costs(
        dedup_seconds=NS * worker["dedup_ns_per_id"]["median"],
        expand_seconds=NS * worker["expand_ns_per_value"]["median"],
        sum_seconds=NS * worker["sum_ns_per_value"]["median"],
        encode_seconds=NS * worker["encode_ns_per_value"]["median"],
        decode_seconds=NS * worker["decode_ns_per_value"]["median"],
        message_seconds=rpc["cpu_seconds_per_message_end"]["median"],
        byte_seconds=NS * rpc["cpu_ns_per_byte_both_ends"]["median"] / 2,
        read_seconds=NS * measured["loader"]["read_ns_per_record"]["median"],
    )


def measured_on() -> str:
    """When and on what the costs were measured, for people."""
    machine = _measured()["machine"]
    return f"{_measured()['date']} on {machine['cpu']} ({machine['vector']}), one core, by {_measured()['command']}"


def line_through(points: list[tuple[float, float]], at: float) -> float:
    """Between points a straight line; before the first and past the last their line goes on, never below zero."""
    pairs = list(itertools.pairwise(points))
    (a, low), (b, high) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return max(0.0, low + (high - low) * (at - a) / (b - a))


def _grown(points: list[tuple[float, float]], rows: float) -> float:
    """Extra seconds by the logarithm of rows; past the last point with ``growth_beyond`` times its slope."""
    logs = [(math.log(x), y) for x, y in points]
    at = math.log(max(rows, points[0][0]))
    if at <= logs[-1][0]:
        return line_through(logs, at)
    return logs[-1][1] + assumed("growth_beyond") * (line_through(logs, at) - logs[-1][1])


@lru_cache(maxsize=1)
def _measured() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(resources.files(__package__).joinpath("measured.json").read_text(encoding="utf-8"))
    return found
