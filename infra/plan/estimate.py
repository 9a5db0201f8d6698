"""The plan of one configuration: memory, machines, network, speed, checkpoints, money; and what is wrong with it, if something is."""

from __future__ import annotations

from dataclasses import dataclass, replace

from infra.local import Machine
from infra.plan.catalogue import GIB, MachineType, zones_of
from infra.plan.costs import assumed
from infra.plan.memory import TableMemory, memory_of, needed_bytes, servers_needed, size_text, usable_bytes
from infra.plan.shape import Pool, Shape, allowed
from infra.plan.throughput import Throughput, throughput
from infra.plan.workload import Workload
from training.embedding.footprint import table_bytes

SERVER_SPEED = "a server's own speed"
"""What may limit a checkpoint."""


@dataclass(frozen=True)
class Run:
    """What one run takes."""

    steps: int
    records: int
    """Seen over all epochs."""
    checkpoints: int
    hours: float
    """Training and checkpoints, without preprocessing and without waiting for machines."""
    usd: float | None


@dataclass(frozen=True)
class Estimate:
    """What a workload needs on given machines."""

    workload: Workload
    shape: Shape
    tables: tuple[TableMemory, ...]
    needed_bytes: float
    """Of tables on the fullest machine of parameter servers."""
    usable_bytes: float
    """What a machine has for them."""
    throughput: Throughput
    checkpoint_bytes: float
    """Of all tables at capacity."""
    checkpoint_limits: tuple[tuple[str, float], ...]
    """What bounds the writing of a checkpoint, slowest first: name, seconds. All servers write at once."""

    @property
    def checkpoint_seconds(self) -> float:
        """At least."""
        return self.checkpoint_limits[0][1]

    @property
    def servers(self) -> Pool:
        """The machines of the parameter servers."""
        return self.shape.pool("parameter_server")

    @property
    def fits(self) -> bool:
        """Whether the tables fit."""
        return self.needed_bytes <= self.usable_bytes

    @property
    def total_bytes(self) -> float:
        """Of all tables on all servers."""
        return sum(table.total_bytes for table in self.tables)

    @property
    def parameters(self) -> int:
        """Values of all rows at capacity, and weights of the dense network."""
        return sum(table.parameters for table in self.tables) + sum(self.workload.layers)

    @property
    def usd_per_million_samples(self) -> float | None:
        """List price."""
        price = self.shape.usd_per_hour
        return None if price is None else price / 3600.0 / self.throughput.samples_per_second * 1e6

    @property
    def run(self) -> Run | None:
        """The whole run, if it is known how long it is."""
        steps, training = self.workload.steps, self.workload.config.training
        if steps is None:
            return None
        checkpoints = 1 + (steps // training.checkpoint_every_steps if training.checkpoint_every_steps else 0)
        hours = (steps * self.throughput.step_seconds + checkpoints * self.checkpoint_seconds) / 3600.0
        price = self.shape.usd_per_hour
        records = steps * training.batch_size * training.roles.nn_worker
        return Run(steps, records, checkpoints, hours, None if price is None else price * hours)


def estimate(workload: Workload, shape: Shape, *, known: bool = False) -> Estimate:
    """What a workload needs on these machines. ``known``: the number of different signs was counted, not assumed."""
    pool = shape.pool("parameter_server")
    tables = memory_of(workload, num_servers=pool.processes, known=known)
    total = sum(table.total_bytes for table in tables)
    written = sum(table.checkpoint_bytes for table in tables)
    limits = {SERVER_SPEED: written / pool.processes / assumed("snapshot_bytes_per_second")}
    if shape.shared:
        limits["the disk"] = written / assumed("disk_bytes_per_second")
    else:
        limits["the network of the servers"] = needed_bytes(written, pool) / pool.bytes_per_second
    return Estimate(
        workload=workload,
        shape=shape,
        tables=tables,
        needed_bytes=needed_bytes(total, pool),
        usable_bytes=usable_bytes(pool),
        throughput=throughput(workload, shape),
        checkpoint_bytes=written,
        checkpoint_limits=tuple(sorted(limits.items(), key=lambda item: -item[1])),
    )


def this_machine(machine: Machine) -> MachineType:
    """The machine that ``infra.local.measure`` found, as one of the catalogue."""
    return MachineType(
        name="this machine",
        vcpus=machine.cores,
        memory_gib=machine.memory_bytes / GIB,
        egress_gbps=None,
        tier_1_gbps=None,
        usd_per_hour=None,
        region="",
        price_date="",
        source="measured",
        cores=machine.cores,
        node=False,
    )


def problem_of(found: Estimate) -> str | None:
    """Why the tables do not fit and what would help, in one line; None where they fit."""
    if found.fits:
        return None
    pool = found.servers
    where = pool.machine.name if found.shape.shared else f"one {pool.machine.name}"
    text = f"the embedding tables need {size_text(found.needed_bytes)} on {where}, which has {size_text(found.usable_bytes)} for them"
    rows = _rows_that_fit(found)
    count = None if found.shape.shared else servers_needed(found.workload, pool)
    remedies = []
    if count and allowed(pool.sized(count)):
        remedies.append(f"raise training.roles.parameter_server from {pool.processes} to {count}")
    if rows:
        remedies.append(f"lower embedding.capacity_rows from {found.workload.tables[0].capacity_rows:,} to {rows:,}")
    remedies += [f"store rows as float16 ({_total(found, row_dtype='float16')})"] if _has(found, "float32") else []
    return f"{text}: {', or '.join(remedies)}" if remedies else text


def _has(found: Estimate, row_dtype: str) -> bool:
    return any(spec.row_dtype == row_dtype for spec in found.workload.tables)


def _total(found: Estimate, *, row_dtype: str) -> str:
    tables = tuple(replace(spec, row_dtype=row_dtype) for spec in found.workload.tables)
    other = estimate(replace(found.workload, tables=tables), found.shape)
    return f"{size_text(other.needed_bytes)}, {'which fits' if other.fits else 'not enough alone'}"


def _rows_that_fit(found: Estimate) -> int:
    """The largest common capacity of all tables that fits, 0 if none does."""
    pool = found.servers

    def fits(rows: int) -> bool:
        specs = found.workload.tables
        total = sum(table_bytes(spec, capacity_rows=rows, num_servers=pool.processes) for spec in specs)
        return needed_bytes(total, pool) <= found.usable_bytes

    low, high = 0, max(spec.capacity_rows for spec in found.workload.tables)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def zone_candidates(shape: Shape) -> tuple[str, ...]:
    """Zones that are known to have had all machine types of the run."""
    return () if shape.shared else zones_of({pool.machine.name for pool in shape.pools})
