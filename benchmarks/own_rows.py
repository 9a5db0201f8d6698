"""Contender: the embedding table by sign, and beside it, in this process, the same work on rows whose places are known (the limit).

With several threads the signs are shared out by hash to as many tables, each with a thread of its own, as parameter servers do.
A request names a method of ``OwnRows``. Timed ones answer the seconds of every call, CPU and wall.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import serve, timed
from benchmarks.limits import BARE_UPDATES
from benchmarks.streams import gradients_of, rows_of, signs_of
from benchmarks.table import bare_gather
from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding.dedup import dedup, route, sum_gradients
from training.embedding.memory import Arena
from training.embedding.pooling import expand
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable

_FILL = 500_000
_ELSEWHERE = 2**40
"""Row numbers from here on are in no batch."""

ONE_SLOT = np.zeros(1, np.int64)
"""Its first column."""


def spec_of(optimizer: str, dim: int, rows: int) -> TableSpec:
    """The table all contenders have: rows start at zero, learning rate 0.02."""
    own = SparseOptimizerConfig(name=optimizer, learning_rate=0.02)  # type: ignore[arg-type]
    return TableSpec("bench", dim, own, InitializerConfig(kind="zeros"), 1, rows)


def insert(table: EmbeddingTable, first: int, last: int, out: np.ndarray) -> None:
    """Give rows to the signs of row numbers first .. last-1 that this table is to hold."""
    signs, _ = dedup(signs_of(np.arange(first, last)))
    table.lookup(signs, out[: len(signs)], insert=True)


class OwnRows:
    """State between requests."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    def close(self) -> dict[str, Any]:
        """Give all memory back."""
        self._tables, self._bare = [], np.empty(0, np.float32)
        self._stack.close()
        return {}

    def open(self, *, rows: int, dim: int, optimizer: str, threads: int, batches: str) -> dict[str, Any]:
        """Fill the tables with signs of rows 0 .. rows-1; ``batches`` is an .npy of row numbers [K, B], different within a batch."""
        self.close()
        self._rows, self._dim, self._optimizer, self._threads = rows, dim, optimizer, threads
        self._pool = self._stack.enter_context(ThreadPoolExecutor(threads))
        room = int(rows / threads * (1.02 if threads > 1 else 1.0)) + 64
        spec = spec_of(optimizer, dim, rows)
        self._tables = [
            self._stack.enter_context(EmbeddingTable.create(spec, capacity_rows=room, seed=0, num_servers=threads)) for _ in range(threads)
        ]
        given = np.load(batches)
        self._out = [np.empty((max(_FILL, given.shape[1]), dim), np.float32) for _ in range(threads)]
        for start in range(0, rows, _FILL):
            self._look_up(self._shared(dedup(signs_of(np.arange(start, min(start + _FILL, rows))))[0]), insert=True)
        self._signs = [self._shared(dedup(signs_of(batch))[0]) for batch in given]
        self._gradients = [[gradients_of(rows_of(part), dim) for part in parts] for parts in self._signs]
        self._known = [np.array_split(np.sort(batch), threads) for batch in given]
        self._known_gradients = [[gradients_of(part, dim).reshape(-1) for part in parts] for parts in self._known]
        return {"rows": sum(table.rows for table in self._tables)}

    def open_limit(self) -> dict[str, Any]:
        """Memory for the limit: rows as the table's, on cache lines in huge pages, but no index and no unused places."""
        floats = BARE_UPDATES[self._optimizer][1] * self._dim
        arena = Arena.allocate([(self._rows * floats, np.float32), (self._rows, np.float32)])
        self._stack.callback(arena.close)
        self._bare, self._scalars = arena.arrays
        self._bare[:] = 0.0
        return {}

    def lookup(self, *, calls: int, insert: bool) -> dict[str, Any]:
        """By sign; insert=True is a look-up of training, which refreshes recency."""
        return timed(lambda k: self._look_up(self._signs[k % len(self._signs)], insert=insert), calls)

    def update(self, *, calls: int) -> dict[str, Any]:
        """By sign."""

        def call(k: int) -> None:
            signs, gradients = self._signs[k % len(self._signs)], self._gradients[k % len(self._signs)]
            self._at_once(lambda t: self._tables[t].update(signs[t], gradients[t]))

        return timed(call, calls)

    def limit_lookup(self, *, calls: int) -> dict[str, Any]:
        """Known rows, ascending."""
        stride = BARE_UPDATES[self._optimizer][1] * self._dim

        def call(k: int) -> None:
            known = self._known[k % len(self._known)]
            self._at_once(lambda t: bare_gather(self._bare, stride, self._dim, known[t], self._out[t].reshape(-1)))

        return timed(call, calls)

    def limit_update(self, *, calls: int) -> dict[str, Any]:
        """Known rows, ascending."""
        kernel = BARE_UPDATES[self._optimizer][0]

        def call(k: int) -> None:
            known, gradients = self._known[k % len(self._known)], self._known_gradients[k % len(self._known)]
            self._at_once(lambda t: kernel(self._bare, self._scalars, self._dim, known[t], gradients[t]))

        return timed(call, calls)

    def occurrences(self, *, calls: int, path: str) -> dict[str, Any]:
        """The whole way of a batch's occurrences, one thread: dedup, look up, expand; then sum gradients per sign and update."""
        batches = [signs_of(batch) for batch in np.load(path)]
        table, count = self._tables[0], len(batches[0])
        rows, out, gradients = (np.zeros((count, self._dim), np.float32) for _ in range(3))
        kept = [dedup(batch) for batch in batches]

        def forward(k: int) -> None:
            signs, inverse = dedup(batches[k % len(batches)])
            table.lookup(signs, rows[: len(signs)], insert=True)
            expand(rows[: len(signs)], inverse, ONE_SLOT, out)

        def backward(k: int) -> None:
            signs, inverse = kept[k % len(batches)]
            table.update(signs, sum_gradients(gradients, inverse, len(signs)))

        return {"forward": timed(forward, calls), "backward": timed(backward, calls), "unique": sum(len(s) for s, _ in kept) / len(kept)}

    def evict(self, *, calls: int, size: int) -> dict[str, Any]:
        """Look-ups of new signs by a table with room, then of others by a full one; one thread."""
        out = np.empty((size, self._dim), np.float32)
        new = [dedup(signs_of(np.arange(k * size, (k + 1) * size) + _ELSEWHERE))[0] for k in range(2 * calls + 2)]
        with EmbeddingTable.create(
            spec_of(self._optimizer, self._dim, self._rows), capacity_rows=self._rows, seed=0, num_servers=1
        ) as table:
            for start in range(0, self._rows // 4, size):
                insert(table, start, start + size, out)
            room = timed(lambda k: table.lookup(new[k], out, insert=True), calls)
            early = table.evicted_total
            # Twice what it holds goes through it: every bucket is full and what must go has aged.
            for start in range(self._rows, 3 * self._rows, size):
                insert(table, start, start + size, out)
            before = table.evicted_total
            full = timed(lambda k: table.lookup(new[calls + 1 + k], out, insert=True), calls)
            return {"room": room, "full": full, "evicted_early": early, "evicted": table.evicted_total - before}

    def values(self, *, count: int) -> dict[str, Any]:
        """Values of the lowest ``count`` row numbers of the first batch."""
        rows = np.sort(np.concatenate(self._known[0]))[:count]
        out = np.zeros((count, self._dim), np.float32)
        for k, sign in enumerate(signs_of(rows)):
            one = np.empty((1, self._dim), np.float32)
            for table in self._tables:
                if table.lookup(np.array([sign]), one, insert=False).hits:
                    out[k] = one[0]
        return {"values": out.tolist()}

    def memory(self, *, rows: int, dim: int, optimizer: str, load: float) -> dict[str, Any]:
        """A table with room for ``rows``, filled with different signs: bytes by its own account and the system's, and rows lost."""
        size = 100_000
        out = np.empty((size, dim), np.float32)
        with EmbeddingTable.create(spec_of(optimizer, dim, 64), capacity_rows=64, seed=0, num_servers=1) as small:
            insert(small, 0, size, out)  # Compiles and touches all buffers, so that they are not counted.
        before = resident_bytes()
        with EmbeddingTable.create(spec_of(optimizer, dim, rows), capacity_rows=rows, seed=0, num_servers=1) as table:
            wanted = int(rows * load)
            for start in range(0, wanted, size):
                insert(table, start, min(start + size, wanted), out)
            return {
                "stated": table.memory_bytes,
                "resident": resident_bytes() - before,
                "rows": table.rows,
                "offered": wanted,
                "slots": table.geometry.num_slots,
            }

    def _shared(self, signs: np.ndarray) -> list[np.ndarray]:
        starts = route(signs, self._threads)
        return [signs[starts[t] : starts[t + 1]].copy() for t in range(self._threads)]

    def _look_up(self, parts: list[np.ndarray], *, insert: bool) -> None:
        self._at_once(lambda t: self._tables[t].lookup(parts[t], self._out[t][: len(parts[t])], insert=insert))

    def _at_once(self, call: Callable[[int], object]) -> None:
        """The call of every thread."""
        if self._threads == 1:
            call(0)
            return
        for future in [self._pool.submit(call, t) for t in range(self._threads)]:
            future.result()


def resident_bytes() -> int:
    """Memory of this process that the system counts."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise OSError("no VmRSS in /proc/self/status")


def main() -> None:
    """Serve requests."""
    own = OwnRows()
    serve(lambda request: getattr(own, request.pop("what"))(**request))


if __name__ == "__main__":
    main()
