"""What the embedding tables take, per row and per machine. The sizes are those of ``training.embedding.footprint``."""

from __future__ import annotations

from dataclasses import dataclass

from infra.local import USABLE_SHARE
from infra.plan.costs import assumed
from infra.plan.shape import Pool
from infra.plan.workload import SIGN_BYTES, Workload
from training.embedding.footprint import VALUE_BYTES, blocks_of, server_rows, state_of, table_bytes
from training.embedding.slots import TableSpec

_FLOAT_BYTES = 4
_PLACE_BYTES, _RECENCY_BYTES = 8, 1
"""Of a row in a checkpoint, beside its sign."""


@dataclass(frozen=True)
class TableMemory:
    """One table over all its servers, at capacity. Bytes are per row unless they say otherwise."""

    name: str
    rows: int
    dim: int
    row_dtype: str
    optimizer: str
    value_bytes: float
    state_bytes: float
    index_bytes: float
    """Signs, recency and admission counters, places that are unused included."""
    unused_bytes: float
    """Values and state of places that are unused, because a table runs full before it evicts."""
    total_bytes: float
    """Of the whole table."""
    distinct: float | None
    """Different signs of the train split, where a manifest says."""

    @property
    def bytes_per_row(self) -> float:
        """All together."""
        return self.total_bytes / self.rows

    @property
    def fill(self) -> float:
        """Rows over places."""
        payload = self.value_bytes + self.state_bytes
        return payload / (payload + self.unused_bytes)

    @property
    def parameters(self) -> int:
        """Values of all rows."""
        return self.rows * self.dim

    @property
    def checkpoint_bytes(self) -> float:
        """Of the table at capacity: sign, place, recency, values and state of every row."""
        return self.rows * (SIGN_BYTES + _PLACE_BYTES + _RECENCY_BYTES + self.value_bytes + self.state_bytes)


def table_memory(spec: TableSpec, *, num_servers: int, distinct: float | None = None) -> TableMemory:
    """Of one table at the capacity its configuration gives it."""
    rows = spec.capacity_rows
    buffers, scalar = state_of(spec.optimizer)
    value_bytes = float(-(-spec.dim * VALUE_BYTES[spec.row_dtype] // _FLOAT_BYTES) * _FLOAT_BYTES)
    state_bytes = float(_FLOAT_BYTES * (spec.dim * buffers + scalar))
    blocks, block_slots = blocks_of(server_rows(rows, num_servers))
    places = num_servers * blocks * block_slots
    total = table_bytes(spec, capacity_rows=rows, num_servers=num_servers)
    payload = value_bytes + state_bytes
    return TableMemory(
        name=spec.name,
        rows=rows,
        dim=spec.dim,
        row_dtype=spec.row_dtype,
        optimizer=spec.optimizer.name,
        value_bytes=value_bytes,
        state_bytes=state_bytes,
        index_bytes=(total - places * payload) / rows,
        unused_bytes=(places - rows) * payload / rows,
        total_bytes=float(total),
        distinct=distinct,
    )


def memory_of(workload: Workload, *, num_servers: int, known: bool) -> tuple[TableMemory, ...]:
    """Of all tables. ``known``: whether the number of different signs was counted."""
    return tuple(
        table_memory(spec, num_servers=num_servers, distinct=workload.distinct(i) if known else None)
        for i, spec in enumerate(workload.tables)
    )


def usable_bytes(pool: Pool) -> float:
    """What the tables of one machine may take."""
    share = assumed("usable_share") if pool.machine.node else USABLE_SHARE
    return share * pool.machine.allocatable_bytes


def needed_bytes(total_bytes: float, pool: Pool) -> float:
    """What the fullest machine of a pool has to hold of tables of ``total_bytes``."""
    return total_bytes / pool.processes * min(pool.each, pool.processes)


def servers_needed(workload: Workload, pool: Pool) -> int | None:
    """The smallest number of server processes on such machines that hold the tables; None if no number does."""

    def fits(count: int) -> bool:
        total = sum(table_bytes(spec, capacity_rows=spec.capacity_rows, num_servers=count) for spec in workload.tables)
        return needed_bytes(total, pool.sized(count)) <= usable_bytes(pool)

    total = sum(table_bytes(spec, capacity_rows=spec.capacity_rows, num_servers=1) for spec in workload.tables)
    count = max(1, int(total * pool.each / usable_bytes(pool)) - pool.each)
    for candidate in range(count, 2 * count + 64 * pool.each):
        if fits(candidate):
            return candidate
    return None


def size_text(num_bytes: float) -> str:
    """A size for reading, in decimal units: 252.3 TB."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:,.0f} B"
