"""``provision`` and ``release`` for a run on one machine: measure it, refuse what cannot fit, and clear up afterwards."""

from __future__ import annotations

import bisect
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from infra import processes
from training.config import Config
from training.embedding.footprint import table_bytes
from training.embedding.memory import available_bytes
from training.embedding.slots import tables
from training.errors import CapacityError
from training.events import read_events

_LAST_STAGE = "register"
"""A run that did not come through it has failed, whatever an orchestrator says."""
_OWN_STAGE = "release"
USABLE_SHARE = 0.8
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
    available = available_bytes()
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(cores=cores, memory_bytes=whole if available is None else available)


def provision(config: Config, run_dir: Path, *, machine: Machine | None = None) -> Provision:
    """Check that the tables fit this machine; nothing has to be made ready here. Raises ``CapacityError`` with the numbers."""
    machine = machine or measure()
    roles = config.training.roles
    capacity, usable = config.embedding.capacity_rows, int(machine.memory_bytes * USABLE_SHARE)

    def sizes(rows: int) -> dict[str, int]:
        return {spec.name: table_bytes(spec, capacity_rows=rows, num_servers=roles.parameter_server) for spec in tables(config)}

    needed = sum(sizes(capacity).values())
    if needed > usable:
        rows = bisect.bisect_right(range(1, capacity), usable, key=lambda rows: sum(sizes(rows).values()))
        raise CapacityError(
            f"the embedding tables need {needed / _GIB:.1f} GiB at {capacity:,} rows each, "
            f"but this machine has only {usable / _GIB:.1f} GiB for them: lower embedding.capacity_rows to {rows:,} or less, "
            f"lower embedding.dim ({config.embedding.dim}), or choose embedding.optimizer.name: rowwise_adagrad "
            "or embedding.row_dtype: float16"
        )
    count = roles.data_loader + roles.embedding_worker + roles.nn_worker + roles.parameter_server
    message = (
        f"local: nothing to provision ({machine.cores} cores, {machine.memory_bytes / _GIB:.1f} GiB free; "
        f"{count} role processes, tables {_size(needed)})"
    )
    result = Provision(machine=machine, table_bytes=sizes(capacity), processes=count, message=message)
    _write_json(run_dir / "provision.json", asdict(result))
    return result


def release(run_dir: Path, *, interrupted: bool = False) -> Release:
    """End every process of the run that is still alive and record how the run came out. Doing it twice does no harm.

    The caller and its ancestors are spared. The outcome is judged by the run's own events, not by what an orchestrator claims.
    """
    run_dir = run_dir.absolute()
    terminated = processes.terminate(lambda: processes.marked(run_dir))
    ended = {e["name"]: e["status"] for e in read_events(run_dir / "events.jsonl") if e["kind"] == "stage"}
    # A stage that never ended was killed; only `release` itself, which is calling, is still to end.
    failed = next((name for name, status in ended.items() if status == "failed" or (status == "started" and name != _OWN_STAGE)), None)
    outcome = "interrupted" if interrupted else "succeeded" if ended.get(_LAST_STAGE) == "succeeded" else "failed"
    result = Release(run=run_dir.name, outcome=outcome, failed_stage=failed, terminated=terminated, time=round(time.time(), 3))
    _write_json(run_dir / "release.json", asdict(result))
    return result


def _size(count: int) -> str:
    return f"{count / _GIB:.1f} GiB" if count >= _GIB else f"{count / 1024**2:.0f} MiB"


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
