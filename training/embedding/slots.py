"""Which table, sign space and width every slot has: the resolved view of a configuration's embedding part.

A *group* is a set of slots that share rows (most groups hold one slot). A *table* holds the rows of all groups with equal
width, optimizer, initialiser, row format and admission threshold; every parameter server holds a part of every table.
"""

from __future__ import annotations

from dataclasses import dataclass

from training.config import Config, InitializerConfig, SlotConfig, SparseOptimizerConfig


@dataclass(frozen=True)
class TableSpec:
    """One embedding table, over all parameter servers."""

    name: str
    """``dim<width>-<optimizer>`` with a number appended where two would coincide."""
    dim: int
    optimizer: SparseOptimizerConfig
    initializer: InitializerConfig
    min_count: int
    capacity_rows: int
    """Rows over all servers."""
    row_dtype: str = "float32"
    """How values are stored: float32, float16 or bfloat16. Optimizer state is float32 always."""


@dataclass(frozen=True)
class Slot:
    """One categorical feature as the trainer sees it."""

    name: str
    group: str
    """Its rows' sign space: the seed of its hash."""
    table: int
    """Index into ``tables(config)``."""
    dim: int
    multi_valued: bool
    pooling: str
    """``sum`` or ``mean``; single-valued slots have ``sum``."""


def slots(config: Config) -> tuple[Slot, ...]:
    """All slots in schema order."""
    return _resolve(config)[0]


def tables(config: Config) -> tuple[TableSpec, ...]:
    """All tables, in the order their first slot appears."""
    return _resolve(config)[1]


def _resolve(config: Config) -> tuple[tuple[Slot, ...], tuple[TableSpec, ...]]:
    embedding = config.embedding
    group_of = {slot: group for group, members in embedding.groups.items() for slot in members}
    specs: list[TableSpec] = []
    index: dict[str, int] = {}
    resolved = []
    for feature in config.schema_.categorical:
        own = embedding.slots.get(feature.name, SlotConfig())
        dim = own.dim or embedding.dim
        optimizer = own.optimizer or embedding.optimizer
        initializer = own.initializer or embedding.initializer
        min_count = own.min_count or embedding.min_count
        row_dtype = own.row_dtype or embedding.row_dtype
        key = repr((dim, optimizer, initializer, min_count, row_dtype))
        if key not in index:
            index[key] = len(specs)
            base = f"dim{dim}-{optimizer.name}"
            twins = sum(spec.name.split(".")[0] == base for spec in specs)
            name = base if not twins else f"{base}.{twins}"
            specs.append(TableSpec(name, dim, optimizer, initializer, min_count, embedding.capacity_rows, row_dtype))
        resolved.append(
            Slot(feature.name, group_of.get(feature.name, feature.name), index[key], dim, feature.multi_valued, feature.pooling)
        )
    return tuple(resolved), tuple(specs)
