"""The parameter server: its part of every embedding table, read and updated by embedding workers at any time.

Mode sync: the updates of one step wait until those of every rank are there, are merged per sign, and are applied as one; then every
rank gets its acknowledgement. So W ranks of B records do to a row exactly what one rank of W*B records does.
Modes hybrid and async: every update is applied on arrival.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Scratch
from training.embedding.codec import WIRE_DTYPES, decode, encode
from training.embedding.dedup import dedup, server_of, sum_gradients
from training.embedding.messages import Kind
from training.embedding.places import BatchPlaces, KeptPlaces
from training.embedding.schedule import rate_at
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable
from training.embedding.transport import Message
from training.errors import CheckpointError, RoleError, TrainingError, TransportError, os_error_text
from training.profile import Timeline

Signs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]

# Hashing spreads signs binomially over servers, with a deviation of at most the root of the mean. Five of them are exceeded by one server
# in three million.
SPREAD = 5.0

MAX_THREADS = 256

MAX_REFUSED = 0.1
"""Beyond this share of signs without a row, places of a look-up do not help its update: those signs are searched for one by one."""

_RANK_SHIFT = 48
"""Above the step in the number of an update, so that every rank's rounding is its own."""


@dataclass
class _Step:
    """The updates of one step in mode sync, until every rank's are there."""

    parts: dict[int, list[tuple[Signs, Rows]]] = field(default_factory=dict)
    applied: bool = False
    failure: str | None = None


class ParameterServer:
    """Handles the messages of one server. A context manager that frees the tables. Safe for concurrent calls."""

    def __init__(
        self,
        specs: Sequence[TableSpec],
        tables: Sequence[EmbeddingTable],
        *,
        wire_dtype: str,
        sync_ranks: int,
        timeout_seconds: float,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline or Timeline("parameter_server")
        self.tables = tables
        self._specs = specs
        self._wire_dtype = WIRE_DTYPES[wire_dtype]
        self._sync_ranks = sync_ranks
        self._timeout_seconds = timeout_seconds
        self._locks = [threading.Lock() for _ in tables]
        self._steps: dict[int, _Step] = {}
        self._scratch = Scratch()
        self.places = KeptPlaces()
        self._arrived = threading.Condition()
        self._absent = 0
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
        timeline: Timeline | None = None,
    ) -> ParameterServer:
        """Allocate this server's part of every table. ``sync_ranks`` is the number of ranks to merge in mode sync, 0 otherwise.

        ``threads`` (at most ``MAX_THREADS``) share large look-ups and updates; results do not depend on it.

        Raises ``CapacityError`` if memory cannot hold the tables.
        """
        with ExitStack() as stack:
            tables = []
            crew = stack.enter_context(ThreadPoolExecutor(MAX_THREADS, "table"))  # It starts a thread when one is needed.
            for spec in specs:
                mean = -(-spec.capacity_rows // num_servers)
                capacity = mean + int(SPREAD * math.sqrt(mean)) if num_servers > 1 else mean
                table = EmbeddingTable.create(spec, capacity_rows=capacity, seed=seed, num_servers=num_servers, crew=crew, threads=threads)
                tables.append(stack.enter_context(table))
            server = cls(specs, tables, wire_dtype=wire_dtype, sync_ranks=sync_ranks, timeout_seconds=timeout_seconds, timeline=timeline)
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
            case Kind.THREADS:
                return self._share(int(message.meta["threads"]))
        raise TransportError(f"a parameter_server does not answer {message.kind.name}")

    def _rows_of(self, message: Message) -> Message:
        insert, step, span = bool(message.meta["insert"]), int(message.meta["step"]), self._timeline.span
        # Updates of several ranks are merged, and then have other signs.
        places = self.places.new([len(signs) for signs in message.arrays]) if insert and self._sync_ranks <= 1 else None
        blocks, scales = [], []
        for t, (table, lock, signs) in enumerate(zip(self.tables, self._locks, message.arrays, strict=True)):
            shape, full = (len(signs), table.dim), self._wire_dtype == np.float32
            rows = message.array(shape, np.float32) if full else self._scratch.array("rows", shape, np.float32)
            with span("look_up", step), lock:
                counts = table.lookup(signs, rows, insert=insert, places=places.of_table[t] if places else None)
            if places and counts.refused > MAX_REFUSED * len(signs):
                places.of_table[t] = None
            with span("encode", step):
                block, scale = (rows, 1.0) if full else encode(rows, self._wire_dtype, message.array(shape, self._wire_dtype))
            blocks.append(block)
            scales.append(scale)
        return Message(Kind.ROWS, {"scales": scales, "places": self.places.keep(places) if places else None}, blocks)

    def _apply(self, message: Message) -> Message:
        arrays, scales = message.arrays, message.meta["scales"]
        step, rank = int(message.meta["step"]), int(message.meta["rank"])
        with self._timeline.span("decode", step):
            parts = []
            for t, scale in enumerate(scales):
                signs, block = arrays[2 * t], arrays[2 * t + 1]
                if block.dtype != np.float32:
                    block = decode(block, scale, self._scratch.array(f"gradients {t}", block.shape, np.float32))
                parts.append((signs, block))
        if self._sync_ranks > 1:
            self._apply_with_all_ranks(step, rank, parts)
        else:
            places = self.places.take(message.meta["places"])
            self._update(parts, places, step=step, rank=rank)
            if places:
                self.places.done(places)
        return Message(Kind.OK)

    def _update(self, parts: list[tuple[Signs, Rows]], places: BatchPlaces | None, *, step: int, rank: int) -> None:
        """``parts`` has signs and gradients of every table, or is empty."""
        of_table = places.of_table if places else [None] * len(parts)
        with self._timeline.span("update", step):
            for spec, table, lock, (signs, gradients), known in zip(self._specs, self.tables, self._locks, parts, of_table, strict=False):
                with lock:
                    table.set_learning_rate(rate_at(spec.optimizer, step))
                    counts = table.update(signs, gradients, draw=step + (rank << _RANK_SHIFT), places=known)
                    self._absent += counts.absent

    def _apply_with_all_ranks(self, number: int, rank: int, parts: list[tuple[Signs, Rows]]) -> None:
        with self._arrived:
            step = self._steps.setdefault(number, _Step())
            # The arrays are this thread's and its connection's; it waits below until they are used.
            step.parts[rank] = parts
            if len(step.parts) == self._sync_ranks:
                try:
                    self._update(_merged([step.parts[r] for r in sorted(step.parts)]), None, step=number, rank=0)
                except Exception as error:  # noqa: BLE001 - every rank must learn of it, not only the one that came last
                    step.failure = str(error) if isinstance(error, TrainingError) else f"{type(error).__name__}: {error}"
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
            try:
                part.mkdir(parents=True, exist_ok=True)
                with lock:
                    metas.append(table.snapshot(part))
            except OSError as error:
                raise CheckpointError(os_error_text(error)) from None
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
            "phases": self._timeline.take(),
            "absent_updates": self._absent,
        }

    def _share(self, threads: int) -> Message:
        if not 1 <= threads <= MAX_THREADS:
            raise TransportError(f"a parameter_server uses 1 to {MAX_THREADS} threads, not {threads}")
        for table, lock in zip(self.tables, self._locks, strict=True):
            with lock:
                table.threads = threads
        return Message(Kind.OK)

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
