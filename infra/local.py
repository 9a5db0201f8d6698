"""``provision`` and ``release`` for a run on one machine: measure it, refuse what cannot fit, and clear up afterwards."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra import processes
from training.config import Config, SparseOptimizerConfig
from training.embedding.slots import TableSpec, tables
from training.errors import CapacityError
from training.events import read_events

_STATE_FLOATS = {"sgd": (0, 0), "adagrad": (1, 0), "rowwise_adagrad": (0, 1), "adam": (2, 0)}
"""Optimizer state as float32 numbers: (per value of the row, per row). sgd with momentum keeps one more per value."""
_VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_INDEX_BYTES = 16
"""Sign, recency, step count and admission counters per place of a table."""
_PLACES_PER_ROW = 1.25
"""A table holds more places than rows, so that it runs full before it evicts. Both bound training.embedding.table, see tests/infra."""
_LAST_STAGE = "register"
"""A run that did not come through it has failed, whatever an orchestrator says."""
_USABLE_SHARE = 0.8
"""Of the available memory; the rest is for the dense network, buffers and the machine itself."""
_GIB = 1024.0**3


@dataclass(frozen=True)
class Machine:
    """What the machine offers now."""

    cores: int
    """Cores this process may use."""
    memory_bytes: int
    """Memory that can be had without swapping, within the container's limit."""


@dataclass(frozen=True)
class Provision:
    """What ``provision`` found; stored as ``provision.json`` in the run's directory."""

    machine: Machine
    table_bytes: dict[str, int]
    """Bytes of every embedding table at full capacity, over all parameter servers."""
    processes: int
    """Role processes the run starts."""
    message: str


@dataclass(frozen=True)
class Release:
    """What ``release`` did; stored as ``release.json`` in the run's directory."""

    run: str
    outcome: str
    """``succeeded``, ``failed`` or ``interrupted``, judged by the run's own events."""
    failed_stage: str | None
    terminated: list[int]
    """Processes of the run that were still alive and have been ended."""
    time: float
    """Seconds since the epoch."""

    @property
    def message(self) -> str:
        """What was done, for people."""
        return f"ended {len(self.terminated)} leftover processes: {self.terminated}" if self.terminated else "local: nothing left to end"


def measure() -> Machine:
    """Cores and memory of this machine, or of the container around this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Machine(cores=cores, memory_bytes=_available_bytes())


def row_bytes(spec: TableSpec) -> int:
    """Bytes one row of a table takes at most: its values, its optimizer state, its share of the index and of spare places."""
    per_value, per_row = _STATE_FLOATS[spec.optimizer.name]
    per_value += _has_momentum(spec.optimizer)
    values = 4 * math.ceil(spec.dim * _VALUE_BYTES[spec.row_dtype] / 4)
    return math.ceil(_PLACES_PER_ROW * (values + 4 * (spec.dim * per_value + per_row) + _INDEX_BYTES))


def provision(config: Config, run_dir: Path, *, machine: Machine | None = None) -> Provision:
    """Check that the tables fit this machine; nothing has to be made ready here. Raises ``CapacityError`` with the numbers."""
    machine = machine or measure()
    specs = tables(config)
    table_bytes = {spec.name: row_bytes(spec) * spec.capacity_rows for spec in specs}
    needed, usable = sum(table_bytes.values()), int(machine.memory_bytes * _USABLE_SHARE)
    if needed > usable:
        rows = usable // sum(row_bytes(spec) for spec in specs)
        raise CapacityError(
            f"the embedding tables need {needed / _GIB:.1f} GiB at {config.embedding.capacity_rows:,} rows each, "
            f"but this machine has only {usable / _GIB:.1f} GiB for them: lower embedding.capacity_rows to {rows:,} or less, "
            f"lower embedding.dim ({config.embedding.dim}), or choose embedding.optimizer.name: rowwise_adagrad "
            "or embedding.row_dtype: float16"
        )
    roles = config.training.roles
    count = roles.data_loader + roles.embedding_worker + roles.nn_worker + roles.parameter_server
    message = (
        f"local: nothing to provision ({machine.cores} cores, {machine.memory_bytes / _GIB:.1f} GiB free; "
        f"{count} role processes, tables at most {_size(needed)})"
    )
    result = Provision(machine=machine, table_bytes=table_bytes, processes=count, message=message)
    _write_json(run_dir / "provision.json", asdict(result))
    return result


def release(run_dir: Path, *, interrupted: bool = False) -> Release:
    """End every process of the run that is still alive and record how the run came out. Doing it twice does no harm.

    The caller and its ancestors are spared. The outcome is judged by the run's own events, not by what an orchestrator claims.
    """
    run_dir = run_dir.absolute()
    terminated = processes.terminate(lambda: processes.marked(run_dir))
    ended = {e["name"]: e["status"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "stage"}
    failed = next((name for name, status in ended.items() if status == "failed"), None)
    outcome = "interrupted" if interrupted else "succeeded" if ended.get(_LAST_STAGE) == "succeeded" else "failed"
    result = Release(run=run_dir.name, outcome=outcome, failed_stage=failed, terminated=terminated, time=round(time.time(), 3))
    _write_json(run_dir / "release.json", asdict(result))
    return result


def _has_momentum(optimizer: SparseOptimizerConfig) -> int:
    return int(optimizer.name == "sgd" and optimizer.momentum > 0.0)


def _available_bytes() -> int:
    limits = [_meminfo_available()]
    try:  # a container's limit, cgroup v2
        limit = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        if limit != "max":
            limits.append(max(int(limit) - used, 0))
    except (OSError, ValueError):
        pass
    return min(limits)


def _meminfo_available() -> int:
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 1024**2:.0f} MiB"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
