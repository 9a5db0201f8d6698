"""The parameter server: its part of every embedding table, read and updated by embedding workers at any time.

Mode sync: the updates of one step wait until those of every rank are there, are merged per sign, and are applied as one; then every
rank gets its acknowledgement. So W ranks of B records do to a row exactly what one rank of W*B records does.
Modes hybrid and async: every update is applied on arrival.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.codec import WIRE_DTYPES, decode, encode
from training.embedding.dedup import dedup, server_of, sum_gradients
from training.embedding.messages import Kind
from training.embedding.schedule import rate_at
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable
from training.embedding.transport import Message
from training.errors import RoleError, TrainingError, TransportError

Signs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

# Hashing spreads signs binomially over servers; 2 % + 64 rows of room keeps the fullest of 1,024 servers within its part.
SPREAD = 1.02
SPREAD_ROWS = 64

_RANK_SHIFT = 48
"""Above the step in the number of an update, so that every rank's rounding is its own."""


@dataclass
class _Step:
    """The updates of one step in mode sync, until every rank's are there."""

    parts: dict[int, list[tuple[Signs, Rows]]] = field(default_factory=dict)
    applied: bool = False
    failure: str | None = None


@dataclass
class _Timer:
    calls: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds


class ParameterServer:
    """Handles the messages of one server. A context manager that frees the tables. Safe for concurrent calls."""

    def __init__(
        self, specs: Sequence[TableSpec], tables: Sequence[EmbeddingTable], *, wire_dtype: str, sync_ranks: int, timeout_seconds: float
    ) -> None:
        self.tables = tables
        self._specs = specs
        self._wire_dtype = WIRE_DTYPES[wire_dtype]
        self._sync_ranks = sync_ranks
        self._timeout_seconds = timeout_seconds
        self._locks = [threading.Lock() for _ in tables]
        self._steps: dict[int, _Step] = {}
        self._arrived = threading.Condition()
        self._timers = {"look_up": _Timer(), "update": _Timer()}
        self._absent = 0
        self._inserted = 0
        self._stack = ExitStack()

    @classmethod
    def create(
        cls,
        specs: Sequence[TableSpec],
        *,
        num_servers: int,
        seed: int,
        wire_dtype: str,
        sync_ranks: int = 0,
        threads: int = 1,
        timeout_seconds: float = 120.0,
    ) -> ParameterServer:
        """Allocate this server's part of every table. ``sync_ranks`` is the number of ranks to merge in mode sync, 0 otherwise.

        ``threads`` share large look-ups and updates; results do not depend on it.

        Raises ``CapacityError`` if memory cannot hold the tables.
        """
        with ExitStack() as stack:
            tables = []
            crew = stack.enter_context(ThreadPoolExecutor(threads - 1, "table")) if threads > 1 else None
            for spec in specs:
                capacity = int(-(-spec.capacity_rows // num_servers) * (SPREAD if num_servers > 1 else 1.0)) + SPREAD_ROWS
                table = EmbeddingTable.create(spec, capacity_rows=capacity, seed=seed, num_servers=num_servers, crew=crew, threads=threads)
                tables.append(stack.enter_context(table))
            server = cls(specs, tables, wire_dtype=wire_dtype, sync_ranks=sync_ranks, timeout_seconds=timeout_seconds)
            server._stack = stack.pop_all()
        return server

    def __enter__(self) -> ParameterServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for lock in self._locks:
            lock.acquire()  # A request still running must not touch freed memory; later ones fail on the closed table.
        self._stack.close()
        for lock in self._locks:
            lock.release()

    def handle(self, message: Message) -> Message:
        """Answer one request; see ``training.embedding.messages``."""
        match message.kind:
            case Kind.ROWS_OF:
                return self._rows_of(message)
            case Kind.APPLY:
                return self._apply(message)
            case Kind.SNAPSHOT:
                return self._snapshot(Path(message.meta["directory"]))
            case Kind.RESTORE:
                return self._restore(message.meta)
            case Kind.STATISTICS:
                return Message(Kind.OK, self._statistics())
            case Kind.SAMPLE:
                return self._sample(message.meta)
        raise TransportError(f"a parameter_server does not answer {message.kind.name}")

    def _rows_of(self, message: Message) -> Message:
        started = time.perf_counter()
        insert = bool(message.meta["insert"])
        blocks, scales = [], []
        for table, lock, signs in zip(self.tables, self._locks, message.arrays, strict=True):
            rows = np.empty((len(signs), table.dim), np.float32)
            with lock:
                counts = table.lookup(signs, rows, insert=insert)
            self._inserted += counts.inserted
            block, scale = encode(rows, self._wire_dtype)
            blocks.append(block)
            scales.append(scale)
        self._timers["look_up"].add(time.perf_counter() - started)
        return Message(Kind.ROWS, {"scales": scales}, blocks)

    def _apply(self, message: Message) -> Message:
        arrays, scales = message.arrays, message.meta["scales"]
        parts = [(arrays[2 * t], decode(arrays[2 * t + 1], scales[t])) for t in range(len(arrays) // 2)]
        step, rank = int(message.meta["step"]), int(message.meta["rank"])
        if self._sync_ranks > 1:
            self._apply_with_all_ranks(step, rank, parts)
        else:
            self._update(parts, step=step, rank=rank)
        return Message(Kind.OK)

    def _update(self, parts: list[tuple[Signs, Rows]], *, step: int, rank: int) -> None:
        started = time.perf_counter()
        for spec, table, lock, (signs, gradients) in zip(self._specs, self.tables, self._locks, parts, strict=False):
            with lock:
                table.set_learning_rate(rate_at(spec.optimizer, step))
                counts = table.update(signs, gradients, draw=step + (rank << _RANK_SHIFT))
            self._absent += counts.absent
        self._timers["update"].add(time.perf_counter() - started)

    def _apply_with_all_ranks(self, number: int, rank: int, parts: list[tuple[Signs, Rows]]) -> None:
        with self._arrived:
            step = self._steps.setdefault(number, _Step())
            # The arrays are views of this connection's buffer; its thread waits below until they are used.
            step.parts[rank] = parts
            if len(step.parts) == self._sync_ranks:
                try:
                    self._update(_merged([step.parts[r] for r in sorted(step.parts)]), step=number, rank=0)
                except TrainingError as error:
                    step.failure = str(error)
                step.applied = True
                del self._steps[number]
                self._arrived.notify_all()
            elif not self._arrived.wait_for(lambda: step.applied, timeout=self._timeout_seconds):
                missing = sorted(set(range(self._sync_ranks)) - set(step.parts))
                raise RoleError(f"step {number}: no update of nn_worker rank(s) {missing} within {self._timeout_seconds:g} s")
            if step.failure:
                raise TrainingError(step.failure)

    def _snapshot(self, directory: Path) -> Message:
        metas = []
        for index, (table, lock) in enumerate(zip(self.tables, self._locks, strict=True)):
            part = directory / f"table-{index}"
            part.mkdir(parents=True, exist_ok=True)
            with lock:
                metas.append(table.snapshot(part))
        return Message(Kind.OK, {"tables": metas})

    def _restore(self, meta: dict[str, Any]) -> Message:
        """Take this server's rows out of the parts of a checkpoint; with as many servers as then, only its own part holds any."""
        index, num_servers = int(meta["index"]), int(meta["num_servers"])
        rows = 0
        for part in meta["parts"]:
            same = part["num_servers"] == num_servers
            if same and part["server"] != index:
                continue
            for t, (table, lock) in enumerate(zip(self.tables, self._locks, strict=True)):
                keep = None if same else lambda signs: server_of(signs, num_servers) == index
                with lock:
                    rows += table.restore(Path(part["directory"]) / f"table-{t}", part["tables"][t], keep=keep)
        return Message(Kind.OK, {"rows": rows})

    def _statistics(self) -> dict[str, Any]:
        return {
            "tables": {
                spec.name: {
                    "rows": table.rows,
                    "capacity": table.capacity_rows,
                    "evicted": table.evicted_total,
                    "memory_bytes": table.memory_bytes,
                }
                for spec, table in zip(self._specs, self.tables, strict=True)
            },
            "seconds": {name: timer.seconds for name, timer in self._timers.items()},
            "calls": {name: timer.calls for name, timer in self._timers.items()},
            "absent_updates": self._absent,
            "inserted": self._inserted,
        }

    def _sample(self, meta: dict[str, Any]) -> Message:
        table = int(meta["table"])
        with self._locks[table]:
            signs, values = self.tables[table].sample(int(meta["count"]))
        return Message(Kind.OK, {}, [signs, values])


def _merged(ranks: list[list[tuple[Signs, Rows]]]) -> list[tuple[Signs, Rows]]:
    """One update per sign and table: the sum over ranks, added in rank order. Ranks that skipped the step send nothing."""
    ranks = [parts for parts in ranks if parts]
    if not ranks:
        return []
    merged = []
    for t in range(len(ranks[0])):
        signs = np.concatenate([parts[t][0] for parts in ranks])
        gradients = np.concatenate([parts[t][1] for parts in ranks])
        unique, inverse = dedup(signs)
        merged.append((unique, sum_gradients(gradients, inverse, len(unique))))
    return merged
