"""Look-up and update by sign against torch.index_select at known rows and against the bare gather, measured side by side.

Only ratios are printed: absolute times differ by 2x between runs of a shared machine. CPU time of one thread, median of repetitions,
unique uniform signs in the order of ``dedup``. ``torch`` reads rows of its own tensor whose (sorted) positions it is told; ``gather`` is
the same with software prefetch, the limit for anything that must first find its rows; ``torch_huge`` is torch in that same memory.

    python benchmarks/table.py            # all sizes
    python benchmarks/table.py --quick    # under 15 s
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import cycle
from typing import Any

import numpy as np
import torch

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding.dedup import dedup, sum_gradients
from training.embedding.jit import inlined, kernel
from training.embedding.memory import Arena
from training.embedding.precision import copy16
from training.embedding.simd import all8, load8, prefetch, store8, sum8
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable

BATCH = 100_000
BATCHES = 5
FULL = [(10**6, 16, "rowwise_adagrad"), (10**6, 16, "adagrad"), (10**6, 16, "adam"), (10**7, 16, "rowwise_adagrad")]
FULL += [(5 * 10**6, 32, "rowwise_adagrad"), (2 * 10**6, 64, "rowwise_adagrad"), (10**6, 128, "rowwise_adagrad")]
QUICK = [(10**6, 16, "rowwise_adagrad"), (10**6, 16, "adam"), (5 * 10**5, 64, "rowwise_adagrad")]


ROWS_AHEAD = 48
"""How far ahead the limits ask for rows; best of 16 to 128."""


@inlined
def prefetch_row(rows: Any, slots: Any, i: Any, stride: Any, floats: Any) -> None:
    """Ask for the first ``floats`` values of row slots[i], of the last row if i is beyond it."""
    base = slots[np.uint64(min(i, len(slots) - 1))] * stride
    for j in range(0, floats, 16):
        prefetch(rows, base + j)


@kernel
def bare_gather(rows: Any, stride: Any, dim: Any, slots: Any, out: Any) -> None:
    """out[i] = the first dim (a multiple of 16) values of row slots[i]."""
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, stride, dim)
        for j in range(0, dim, 16):
            copy16(rows, slots[np.uint64(i)] * stride + j, out, i * dim + j)


@kernel
def bare_update(rows: Any, scalars: Any, dim: Any, slots: Any, gradients: Any) -> None:
    """Row-wise Adagrad on known rows; dim is a multiple of 8."""
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, dim, dim)
        prefetch_row(scalars, slots, i + ROWS_AHEAD, 1, 1)
        slot = slots[np.uint64(i)]
        squares = all8(np.float32(0.0))
        for j in range(0, dim, 8):
            gradient = load8(gradients, i * dim + j)
            squares = squares + gradient * gradient
        total = scalars[slot] + sum8(squares) * np.float32(1.0 / dim)
        scalars[slot] = total
        step = all8(np.float32(-0.02) / (np.sqrt(total) + np.float32(1e-8)))
        for j in range(0, dim, 8):
            store8(rows, slot * dim + j, load8(rows, slot * dim + j) + step * load8(gradients, i * dim + j))


def median_seconds(call: Callable[[], object], repetitions: int) -> float:
    call()
    times = []
    for _ in range(repetitions):
        started = time.thread_time()
        call()
        times.append(time.thread_time() - started)
    return float(np.median(times))


def measure(rows: int, dim: int, optimizer: str, repetitions: int) -> dict[str, float]:
    """Seconds of CPU per batch by name."""
    spec = TableSpec("bench", dim, SparseOptimizerConfig(name=optimizer), InitializerConfig(), 1, rows)  # type: ignore[arg-type]
    rng = np.random.default_rng(0)
    batches = [dedup(np.unique(rng.integers(0, rows, BATCH + BATCH * BATCH // rows, dtype=np.uint64)))[0][:BATCH] for _ in range(BATCHES)]
    out, gradients = np.empty((BATCH, dim), np.float32), rng.standard_normal((BATCH, dim)).astype(np.float32)
    with EmbeddingTable.create(spec, capacity_rows=rows, seed=0, num_servers=1) as table:
        for ids in np.array_split(np.arange(rows, dtype=np.uint64), max(1, rows // 500_000)):
            signs, _ = dedup(ids)
            table.lookup(signs, np.empty((len(signs), dim), np.float32), insert=True)
        batch, size = cycle(batches), len(batches[0])
        known = cycle([rng.permutation(rows)[:size] if rows < 10**7 else rng.integers(0, rows, size) for _ in range(BATCHES)])
        ordered = cycle([np.sort(next(known)) for _ in range(BATCHES)])
        tensor, tensor_out = torch.ones(rows, dim), torch.empty(size, dim)
        flat = out.reshape(-1)
        # As the table's: huge pages, rows on cache lines. A malloc'd array starts 16 bytes off a line, so that each of its rows lies in
        # two: the "limit" is then a quarter of the real one. Untouched memory would all be one page of zeros: it is written first.
        arena = Arena.allocate([(rows * dim, np.float32), (rows, np.float32)])
        arena_rows, arena_scalars = arena.arrays
        arena_rows[:] = 1.0
        same_memory = torch.from_numpy(arena_rows).view(rows, dim)
        seconds = {
            "torch": median_seconds(lambda: torch.index_select(tensor, 0, torch.from_numpy(next(ordered)), out=tensor_out), repetitions),
            "torch_huge": median_seconds(
                lambda: torch.index_select(same_memory, 0, torch.from_numpy(next(ordered)), out=tensor_out), repetitions
            ),
            "gather": median_seconds(lambda: bare_gather(arena_rows, dim, dim, next(ordered), flat), repetitions),
            "read": median_seconds(lambda: table.lookup(next(batch), out, insert=False), repetitions),
            "train": median_seconds(lambda: table.lookup(next(batch), out, insert=True), repetitions),
            "bare_update": median_seconds(
                lambda: bare_update(arena_rows, arena_scalars, dim, next(ordered), gradients.reshape(-1)), repetitions
            ),
            "update": median_seconds(lambda: table.update(next(batch), gradients), repetitions),
        }
        new = cycle([dedup(np.arange(k, k + BATCH, dtype=np.uint64) + np.uint64(2**40))[0] for k in range(0, BATCH * 40, BATCH)])
        median_seconds(lambda: table.lookup(next(new), out, insert=True), 3 if rows > 10**6 else 12)
        arena.close()
        seconds["evict"] = median_seconds(lambda: table.lookup(next(new), out, insert=True), repetitions)
    return seconds


def print_tables(cases: list[tuple[int, int, str]], repetitions: int) -> None:
    heads = ("read/torch", "read/torch_huge", "read/gather", "train/torch", "update/bare_update", "evict/train")
    print(f"{'rows':>9} {'dim':>4} {'optimizer':16}" + "".join(f"{head:>17}" for head in heads) + "   (speed ratios, higher is better)")
    for rows, dim, optimizer in cases:
        s = measure(rows, dim, optimizer, repetitions)
        ratios = [s[b] / s[a] for a, b in (head.split("/") for head in heads)]
        print(f"{rows:9,} {dim:4} {optimizer:16}" + "".join(f"{ratio:16.2f}x" for ratio in ratios), flush=True)


def print_dedup(name: str, ids: np.ndarray, repetitions: int) -> None:
    signs = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    unique, inverse = dedup(signs)
    gradients = np.random.default_rng(0).standard_normal((len(signs), 16)).astype(np.float32)
    torch_arguments = (torch.from_numpy(inverse.astype(np.int64)), torch.from_numpy(gradients))
    into = torch.zeros(len(unique), 16)
    ours = median_seconds(lambda: dedup(signs), repetitions)
    numpy = median_seconds(lambda: np.unique(signs, return_inverse=True), repetitions)
    sums = median_seconds(lambda: sum_gradients(gradients, inverse, len(unique)), repetitions)
    index_add = median_seconds(lambda: into.index_add_(0, *torch_arguments), repetitions)
    print(f"dedup of 4096 x 26 signs, {name}, {len(unique) / len(signs):.0%} unique: {numpy / ours:.1f}x np.unique(return_inverse)")
    print(f"sum of their gradients: {index_add / sums:.1f}x torch.index_add_")


def zipf(rng: np.random.Generator, alpha: float) -> np.ndarray:
    """26 slots of 4096 ids, a million ids each."""
    shares = np.cumsum(1.0 / np.arange(1, 10**6 + 1) ** alpha)
    return np.concatenate([np.searchsorted(shares / shares[-1], rng.random(4096)) + slot * 10**7 for slot in range(26)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small tables, few repetitions: under 15 s")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)
    print_dedup("zipf 1.05", zipf(rng, 1.05), 5 if quick else 15)
    print_dedup("uniform", rng.integers(0, 10**8, 106_496), 5 if quick else 15)
    print_tables(QUICK if quick else FULL, 5 if quick else 15)


if __name__ == "__main__":
    main()
