"""What would be otherwise: other formats and optimizers of rows, other memory machines, other widths, other numbers of servers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from infra.plan.catalogue import memory_machines
from infra.plan.estimate import Estimate, estimate
from infra.plan.memory import servers_needed
from infra.plan.shape import MAX_NODES_PER_POOL, MAX_SERVERS, Pool, allowed
from infra.plan.throughput import throughput
from infra.plan.workload import Workload
from training.config import SparseOptimizerConfig

Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]
OPTIMIZERS: tuple[Optimizer, ...] = ("sgd", "rowwise_adagrad", "adagrad", "adam")
ROW_DTYPES = ("float16", "float32")
WIDTHS = (8, 16, 32, 64, 128, 256)
_STEPS = 16
"""Of the sweep over numbers of servers."""


@dataclass(frozen=True)
class Alternative:
    """Another way to hold the same rows or parameters."""

    what: str
    """What is different."""
    dim: int | None
    row_dtype: str
    optimizer: str
    machine: str
    price_of: str
    """Region and date of that machine's price."""
    servers: int
    """Smallest number of servers that hold the tables on such machines; 0 on one machine that holds all."""
    machines: int
    fits_as_is: bool
    """Whether the configured machines hold it."""
    possible: bool
    """Whether any number of such machines holds it, within what a node pool may have."""
    bytes_per_row: float
    total_bytes: float
    usd_per_hour: float | None
    """Of all machines of the run, with so many servers."""
    servers_usd_per_hour: float | None
    """Of the machines of parameter servers alone."""
    samples_per_second: float
    checkpoint_seconds: float


@dataclass(frozen=True)
class Alternatives:
    """All that were worked out."""

    formats: tuple[Alternative, ...]
    widths: tuple[Alternative, ...]
    """The same number of parameters in rows of other widths."""
    machines: tuple[Alternative, ...]
    """Cheapest first."""
    modes: dict[str, float]
    """Expected samples per second by mode of training, all else equal."""
    servers: tuple[Alternative, ...]
    """By number of servers, of the configured machine, from the smallest that holds the tables."""


def alternatives_of(found: Estimate) -> Alternatives:
    """All alternatives to an estimate."""
    workload, pool = found.workload, found.servers
    formats = tuple(
        _sized(found, _stored(workload, row_dtype, optimizer), pool, f"{row_dtype} {optimizer}")
        for row_dtype in ROW_DTYPES
        for optimizer in OPTIMIZERS
    )
    cloud = not found.shape.shared
    return Alternatives(formats, _widths(found), _machines(found) if cloud else (), _modes(found), _sweep(found) if cloud else ())


def _modes(found: Estimate) -> dict[str, float]:
    config = found.workload.config
    made = {}
    for mode in ("sync", "hybrid", "async"):
        training = config.training.model_copy(update={"mode": mode})
        workload = replace(found.workload, config=config.model_copy(update={"training": training}))
        made[mode] = throughput(workload, found.shape).samples_per_second
    return made


def _stored(workload: Workload, row_dtype: str, optimizer: Optimizer) -> Workload:
    kind = SparseOptimizerConfig(name=optimizer)
    return replace(workload, tables=tuple(replace(spec, row_dtype=row_dtype, optimizer=kind) for spec in workload.tables))


def _widths(found: Estimate) -> tuple[Alternative, ...]:
    """Only where all rows have one width."""
    workload = found.workload
    dims = {spec.dim for spec in workload.tables}
    if len(dims) > 1:
        return ()
    own = dims.pop()
    made = []
    for row_dtype in ROW_DTYPES:
        for dim in sorted({*WIDTHS, own}):
            specs = tuple(
                replace(spec, dim=dim, capacity_rows=max(1, spec.capacity_rows * own // dim), row_dtype=row_dtype)
                for spec in workload.tables
            )
            slots = tuple(replace(slot, dim=dim, distinct=max(1.0, slot.distinct * own / dim)) for slot in workload.slots)
            made.append(_sized(found, replace(workload, tables=specs, slots=slots), found.servers, f"width {dim}, {row_dtype}"))
    return tuple(made)


def _machines(found: Estimate) -> tuple[Alternative, ...]:
    own = found.servers
    types = {machine.name: machine for machine in [*memory_machines(), own.machine]}
    made = []
    for machine in types.values():
        pool = replace(own, machine=machine, tier_1=own.tier_1 and machine.tier_1_gbps is not None)
        made.append(_sized(found, found.workload, pool, machine.name))
    return tuple(
        sorted((one for one in made if one.possible), key=lambda one: (one.servers_usd_per_hour or float("inf"), one.checkpoint_seconds))
    )


def _sweep(found: Estimate) -> tuple[Alternative, ...]:
    least = servers_needed(found.workload, found.servers)
    if least is None:
        return ()
    least = max(1, min(least, found.servers.processes))
    top = min(max(4 * least, 2 * found.servers.processes, 8), MAX_NODES_PER_POOL * found.servers.each, MAX_SERVERS)
    counts = {round(least * (top / least) ** (i / (_STEPS - 1))) for i in range(_STEPS)} | {found.servers.processes}
    made = (_with(found, found.workload, found.servers.sized(count), f"{count} servers", possible=True) for count in sorted(counts))
    return tuple(made)


def _sized(found: Estimate, workload: Workload, pool: Pool, what: str) -> Alternative:
    """With as many servers as it takes, but not fewer than configured where they hold it."""
    if found.shape.shared:
        return _with(found, workload, pool, what, possible=True)
    count = servers_needed(workload, pool)
    possible = count is not None and allowed(pool.sized(count))
    return _with(found, workload, pool.sized(count) if count else pool, what, possible=possible)


def _with(found: Estimate, workload: Workload, pool: Pool, what: str, *, possible: bool) -> Alternative:
    shape = found.shape.with_servers(pool)
    other = estimate(workload, shape)
    as_is = estimate(workload, found.shape)
    dims = {spec.dim for spec in workload.tables}
    return Alternative(
        what=what,
        dim=dims.pop() if len(dims) == 1 else None,
        row_dtype=_one({spec.row_dtype for spec in workload.tables}),
        optimizer=_one({spec.optimizer.name for spec in workload.tables}),
        machine=pool.machine.name,
        price_of=pool.machine.price_of,
        servers=0 if shape.shared else pool.processes,
        machines=pool.machines,
        fits_as_is=as_is.fits,
        possible=possible and other.fits if not shape.shared else other.fits,
        bytes_per_row=other.total_bytes / sum(table.rows for table in other.tables),
        total_bytes=other.total_bytes,
        usd_per_hour=shape.usd_per_hour,
        servers_usd_per_hour=None if shape.shared else pool.usd_per_hour,
        samples_per_second=other.throughput.samples_per_second,
        checkpoint_seconds=other.checkpoint_seconds,
    )


def _one(names: set[str]) -> str:
    return names.pop() if len(names) == 1 else "mixed"
