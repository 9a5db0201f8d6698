"""Real tables under an id space of 1e14 parameters: signs uniform in 2^64, more of them than any table holds, so that rows must go.

Every batch is half *regulars*, drawn from a set that fits, and half strangers that are hardly ever seen again. At capacity each stranger
costs an eviction. Regulars must survive that with their training: they are updated with a known gradient, and a row that was lost and
made anew shows in its value. Rows per second are of one core's CPU time, over the look-up (which inserts and evicts) and the update.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from benchmarks.own_rows import resident_bytes, spec_of
from benchmarks.results import Spread
from training.embedding.dedup import dedup
from training.embedding.table import EmbeddingTable

DIM, BATCH = 16, 100_000
PARAMETERS = 1e14
REGULAR_SHARE = 0.1
"""Regulars as a share of capacity: with as many strangers per batch as regulars, each is seen once while a tenth of the rows goes."""


def measure(capacity: int, *, turnovers: float = 2.0, batch: int = BATCH, seed: int = 0) -> dict[str, Any]:
    """Fill a table, then let ``turnovers`` times its capacity of strangers through it. Tenths of that time are told apart."""
    rng = np.random.default_rng(seed)
    regular = np.unique(rng.integers(1, 2**64, max(batch, int(capacity * REGULAR_SHARE)), dtype=np.uint64))
    out, half = np.empty((2 * batch, DIM), np.float32), batch // 2
    gradients = np.ones((batch, DIM), np.float32)
    with EmbeddingTable.create(spec_of("sgd", DIM, capacity), capacity_rows=capacity, seed=0, num_servers=1) as table:
        _fill(table, rng, out, batch)
        table.update(dedup(regular[:batch])[0], np.zeros_like(gradients)[: min(batch, len(regular))])  # Compiled before memory is counted.
        before, evicted = resident_bytes(), table.evicted_total
        trained = np.zeros(len(regular), np.int64)
        steps = max(10, int(turnovers * capacity / half))
        look_up, update, counts = [], [], np.zeros(5, np.int64)
        for step in range(steps):
            chosen = (np.arange(half) + step * half) % len(regular)
            signs, _ = dedup(np.concatenate([regular[chosen], rng.integers(1, 2**64, batch - half, dtype=np.uint64)]))
            started = time.thread_time()
            seen = table.lookup(signs, out[: len(signs)], insert=True)
            between = time.thread_time()
            applied = table.update(signs, gradients[: len(signs)])
            update.append((time.thread_time() - between) / len(signs))
            look_up.append((between - started) / len(signs))
            counts += (len(signs), seen.hits, seen.inserted, seen.evicted, applied.absent)
            trained[np.unique(chosen)] += 1
        survival = _survival(table, regular, trained, out)
        return {
            "capacity": capacity,
            "id_space": PARAMETERS / DIM,
            "steps": steps,
            "rows": table.rows,
            "places": table.geometry.num_slots,
            "memory_bytes": table.memory_bytes,
            "resident_growth_bytes": resident_bytes() - before,
            "evicted": table.evicted_total - evicted,
            "signs": int(counts[0]),
            "hits": int(counts[1]),
            "inserted": int(counts[2]),
            "absent_updates": int(counts[4]),
            "look_up": _tenths(look_up),
            "update": _tenths(update),
            **survival,
        }


def _fill(table: EmbeddingTable, rng: np.random.Generator, out: np.ndarray, batch: int) -> None:
    """Twice as many different signs as there is room for: every bucket is full."""
    for _ in range(0, 2 * table.geometry.num_slots, batch):
        signs, _ = dedup(rng.integers(1, 2**64, batch, dtype=np.uint64))
        table.lookup(signs, out[: len(signs)], insert=True)


def _survival(table: EmbeddingTable, regular: np.ndarray, trained: np.ndarray, out: np.ndarray) -> dict[str, float]:
    """Regulars that have a row, and those whose row holds every update: from zero, each took 0.02 off."""
    present = intact = asked = 0
    for start in range(0, len(regular), len(out)):
        part = slice(start, start + len(out))
        signs, inverse = dedup(regular[part])
        rows = out[: len(signs)]
        hits = table.lookup(signs, rows, insert=False).hits
        wanted = np.float32(-0.02) * trained[part].astype(np.float32)
        met = trained[part] > 0
        present += hits
        asked += int(met.sum())
        intact += int((np.abs(rows[inverse][:, 0] - wanted)[met] < 1e-3).sum())
    return {"regulars": len(regular), "present": present / len(regular), "intact": intact / max(1, asked)}


def _tenths(seconds: list[float]) -> dict[str, Any]:
    """Million rows/s of the whole and of its first and last tenth."""
    rates = [1e-6 / value for value in seconds]
    tenth = max(1, len(rates) // 10)
    return {"all": Spread.of(rates).__dict__, "first": Spread.of(rates[:tenth]).__dict__, "last": Spread.of(rates[-tenth:]).__dict__}
