"""Random streams of calls on the table and on a slow model of it: places, admission, eviction, optimizers, rounding, snapshots.

`make test-bounds` runs this file with bounds checks in the compiled code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding import geometry
from training.embedding import table as table_module
from training.embedding.dedup import dedup
from training.embedding.geometry import Geometry
from training.embedding.hashing import GOLDEN, mix_reference
from training.embedding.places import Places
from training.embedding.simd import load8
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable

SEED = 5
OPTIMIZERS = [
    SparseOptimizerConfig(name="sgd", learning_rate=0.5, weight_decay=0.1),
    SparseOptimizerConfig(name="sgd", learning_rate=0.1, momentum=0.9, clip_norm=0.7),
    SparseOptimizerConfig(name="adagrad", learning_rate=0.1, initial_accumulator=0.1),
    SparseOptimizerConfig(name="rowwise_adagrad", learning_rate=0.1, clip_norm=2.0),
    SparseOptimizerConfig(name="adam", learning_rate=0.05, weight_decay=0.01),
]
STEP_OF = {"float32": 2.0**-22, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def mixed(value: int) -> int:
    return int(mix_reference(np.array([value % 2**64], np.uint64))[0])


class Row:
    def __init__(self, values: np.ndarray, start: float) -> None:
        self.values = values
        self.buffers = [np.full(len(values), start, np.float32) for _ in range(2)]
        self.scalar = np.float32(start)

    def stepped(self, config: SparseOptimizerConfig, gradient: np.ndarray) -> np.ndarray:
        """The values after an update, in float32; state is advanced."""
        if config.clip_norm is not None:
            gradient = gradient * np.float32(min(1.0, config.clip_norm / (np.linalg.norm(gradient.astype(np.float64)) + 1e-6)))
        g = gradient + np.float32(config.weight_decay) * self.values
        rate, first = np.float32(config.learning_rate), self.buffers[0]
        if config.name == "sgd":
            first[:] = np.float32(config.momentum) * first + g
            return self.values - rate * first
        if config.name == "adagrad":
            first += g * g
            return self.values - rate * g / (np.sqrt(first) + np.float32(config.eps))
        if config.name == "rowwise_adagrad":
            self.scalar = np.float32(self.scalar + np.mean(g * g))
            return self.values - rate * g / (np.sqrt(self.scalar) + np.float32(config.eps))
        self.scalar = np.float32(self.scalar + 1)
        second, t = self.buffers[1], int(self.scalar)
        first += np.float32(1 - config.beta1) * (g - first)
        second[:] = np.float32(config.beta2) * second + np.float32(1 - config.beta2) * g * g
        root = np.sqrt(second) / np.float32(math.sqrt(1 - config.beta2**t))
        return self.values - np.float32(config.learning_rate / (1 - config.beta1**t)) * first / (root + np.float32(config.eps))


class Model:
    """Buckets are lists of signs from oldest to newest."""

    def __init__(self, spec: TableSpec, geometry: Geometry) -> None:
        self.spec = spec
        self.geometry = geometry
        self.buckets: list[list[int]] = [[] for _ in range(geometry.num_buckets)]
        self.rows: dict[int, Row] = {}
        self.counters = np.zeros(geometry.filter_bytes, np.int64)
        self.counted = 0
        self.seed = mixed(SEED + int(GOLDEN))

    def places(self, sign: int) -> tuple[int, int, int, int]:
        """Both buckets, the block, the hash."""
        hashed, size = mixed(sign + int(GOLDEN)), self.geometry.block_buckets
        spread = hashed * (self.geometry.num_servers or int(GOLDEN)) % 2**64 >> 32
        block, inside = divmod(spread * self.geometry.num_blocks, 2**32)
        first, second = inside * size >> 32, hashed % 2**24 * (size - 1) >> 24
        return block * size + first, block * size + second + (second >= first), block, hashed

    def first_values(self, sign: int) -> np.ndarray:
        if self.spec.initializer.kind == "zeros":
            return np.zeros(self.spec.dim, np.float32)
        origin, values = mixed(sign ^ self.seed), []
        for pair in range((self.spec.dim + 1) // 2):
            bits = mixed(origin + (pair + 1) * int(GOLDEN))
            values += [((part / 2**23) - 1.0) * self.spec.initializer.scale for part in (bits >> 40, bits >> 8 & 0xFFFFFF)]
        return np.array(values[: self.spec.dim], np.float32)

    def admits(self, block: int, hashed: int) -> bool:
        if self.spec.min_count == 1:
            return True
        lines = self.geometry.filter_bytes // 64 // self.geometry.num_blocks
        line = (block * lines + (hashed % 2**32 * lines >> 32)) * 64
        one = hashed >> 32 & 63
        two = (one + 1 + (hashed >> 38 & 63) % 63) % 64
        count = min(self.counters[line + one], self.counters[line + two]) + 1
        for cell in (line + one, line + two):
            self.counters[cell] = max(self.counters[cell], min(count, 255))
        return bool(count >= self.spec.min_count)

    def train(self, signs: list[int]) -> tuple[list[Row | None], tuple[int, int, int, int]]:
        found: list[Row | None] = []
        hits = inserted = refused = evicted = 0
        for sign in signs:
            one, two, block, hashed = self.places(sign)
            if sign in self.rows:
                bucket = self.buckets[one if sign in self.buckets[one] else two]
                bucket.remove(sign)
                hits += 1
            elif not self.admits(block, hashed):
                refused += 1
                found.append(None)
                continue
            else:
                bucket = self.buckets[one if len(self.buckets[one]) <= len(self.buckets[two]) else two]
                if len(bucket) == 7:
                    bucket = self.buckets[two if hashed >> 24 & 1 else one]
                    del self.rows[bucket.pop(0)]
                    evicted += 1
                inserted += 1
                start = 0.0 if self.spec.optimizer.name == "adam" else self.spec.optimizer.initial_accumulator
                self.rows[sign] = Row(self.first_values(sign), start)
            bucket.append(sign)
            found.append(self.rows[sign])
        self.fade(refused + inserted)
        return found, (hits, inserted, refused, evicted)

    def fade(self, count: int) -> None:
        if self.spec.min_count > 1:
            self.counted += count
            if self.counted >= self.geometry.num_slots * self.spec.min_count // 2:
                self.counted = 0
                self.counters >>= 1


def allowed(expected: np.ndarray, row_dtype: str) -> np.ndarray:
    """How far a stored value may be from what float32 arithmetic gives."""
    smallest = 2.0**-24 if row_dtype == "float16" else 0.0
    return np.abs(expected) * STEP_OF[row_dtype] + smallest + 2e-6


class Pair:
    """A table and its model, compared after every call."""

    def __init__(self, spec: TableSpec, capacity: int, directory: Path, make: Callable[[], EmbeddingTable]) -> None:
        self.spec = spec
        self.make = make
        self.directory = directory
        self.table = make()
        self.model = Model(spec, self.table.geometry)
        self.draw = 0
        self.looked_up: list[tuple[np.ndarray, Places]] = []
        """Look-ups of training whose update has not come."""

    def close(self) -> None:
        self.table.close()

    def apply(self, verb: str, numbers: list[int]) -> None:
        signs = dedup(np.array(numbers, np.uint64))[0]
        getattr(self, verb)(signs, [int(s) for s in signs])
        assert self.table.rows == len(self.model.rows)

    def values(self, signs: np.ndarray) -> np.ndarray:
        out = np.full((len(signs), self.spec.dim), 7.0, np.float32)
        self.table.lookup(signs, out, insert=False)
        return out

    def train(self, signs: np.ndarray, numbers: list[int]) -> None:
        out = np.full((len(signs), self.spec.dim), 7.0, np.float32)
        self.looked_up.append((signs, Places(np.full(len(signs), -(2**40), np.int64))))
        counts = self.table.lookup(signs, out, insert=True, places=self.looked_up[-1][1])
        rows, expected = self.model.train(numbers)
        assert (counts.hits, counts.inserted, counts.refused, counts.evicted) == expected
        for row, got in zip(rows, out, strict=True):
            wanted = np.zeros(self.spec.dim, np.float32) if row is None else row.values
            assert (np.abs(got - wanted) <= allowed(wanted, self.spec.row_dtype)).all()
            if row is not None:
                row.values = got.copy()

    def read(self, signs: np.ndarray, numbers: list[int]) -> None:
        for number, got in zip(numbers, self.values(signs), strict=True):
            row = self.model.rows.get(number)
            np.testing.assert_array_equal(got, np.zeros(self.spec.dim, np.float32) if row is None else row.values)

    def update_looked_up(self, _: np.ndarray, numbers: list[int]) -> None:
        """One of the batches in flight, as chance has it."""
        if self.looked_up:
            signs, places = self.looked_up.pop(len(numbers) % len(self.looked_up))
            self.update(signs, [int(s) for s in signs], places)

    def update(self, signs: np.ndarray, numbers: list[int], places: Places | None = None) -> None:
        self.draw += 1
        gradients = np.random.default_rng(self.draw).standard_normal((len(signs), self.spec.dim)).astype(np.float32)
        counts = self.table.update(signs, gradients, draw=self.draw, places=places)
        present = [n in self.model.rows for n in numbers]
        assert (counts.applied, counts.absent) == (sum(present), len(present) - sum(present))
        for number, gradient, got in zip(numbers, gradients, self.values(signs), strict=True):
            if row := self.model.rows.get(number):
                expected = row.stepped(self.spec.optimizer, gradient)
                assert (np.abs(got - expected) <= allowed(expected, self.spec.row_dtype)).all(), (got, expected)
                row.values = got.copy()
            else:
                assert not got.any()

    def snapshot(self, signs: np.ndarray, numbers: list[int]) -> None:
        self.directory = self.directory / "next"
        self.directory.mkdir()
        meta = json.loads(json.dumps(self.table.snapshot(self.directory)))
        self.table.close()
        self.table, self.looked_up = self.make(), []
        self.table.restore(self.directory, meta)
        everyone = np.array(sorted(self.model.rows), np.uint64)
        self.read(everyone, [int(s) for s in everyone])


verbs = st.sampled_from(["train", "train", "update", "update_looked_up", "update_looked_up", "read", "snapshot"])
ids = st.lists(st.integers(0, 90) | st.sampled_from([2**63, 2**64 - 1]), max_size=70)
streams = st.lists(st.tuples(verbs, ids), max_size=9)
specs = st.builds(
    TableSpec,
    name=st.just("t"),
    dim=st.sampled_from([1, 5, 8, 19]),
    optimizer=st.sampled_from(OPTIMIZERS),
    initializer=st.sampled_from([InitializerConfig(kind="uniform", scale=0.2), InitializerConfig(kind="zeros")]),
    min_count=st.sampled_from([1, 2, 3]),
    capacity_rows=st.just(1000),
    row_dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
)
calmly = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def run(spec: TableSpec, capacity: int, directory: Path, stream: list[tuple[str, list[int]]], **options: Any) -> None:
    pair = Pair(spec, capacity, directory, lambda: EmbeddingTable.create(spec, capacity_rows=capacity, seed=SEED, **options))
    try:
        for verb, numbers in stream:
            pair.apply(verb, numbers)
    finally:
        pair.close()


@given(spec=specs, stream=streams, capacity=st.sampled_from([1, 30, 60, 90]), servers=st.sampled_from([None, 1, 5]))
@calmly
def test_any_stream_of_calls_does_what_the_model_does(
    tmp_path_factory: pytest.TempPathFactory, spec: TableSpec, stream: list[tuple[str, list[int]]], capacity: int, servers: int | None
) -> None:
    run(spec, capacity, tmp_path_factory.mktemp("one"), stream, num_servers=servers)


@pytest.mark.parametrize("capacity", [1, 40, 100])
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_updates_of_rows_that_have_gone_meanwhile_do_what_the_model_does(
    tmp_path: Path, optimizer: SparseOptimizerConfig, capacity: int
) -> None:
    """Three batches in flight in a table that is too small for them."""
    rng, stream = np.random.default_rng(capacity), []
    for step in range(30):
        stream.append(("train", rng.integers(0, 90, 30).tolist()))
        if step >= 2:
            stream.append(("update_looked_up", [1, 2, 3]))
    run(TableSpec("t", 5, optimizer, InitializerConfig(scale=0.2), 1, 1000), capacity, tmp_path, stream)


@given(spec=specs, stream=streams, capacity=st.sampled_from([30, 60, 90]))
@calmly
def test_threads_that_share_a_table_do_what_the_model_does(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    spec: TableSpec,
    stream: list[tuple[str, list[int]]],
    capacity: int,
) -> None:
    """Blocks of four buckets and parts of four signs: every call of a dozen signs is shared."""
    monkeypatch.setattr(table_module, "SIGNS_PER_THREAD", 4)
    monkeypatch.setattr(geometry, "MAX_BLOCK_BUCKETS", 4)
    with ThreadPoolExecutor(2) as crew:
        run(spec, capacity, tmp_path_factory.mktemp("shared"), stream, num_servers=1, crew=crew, threads=3)


@given(spec=specs, many=st.lists(streams, min_size=3, max_size=3))
@settings(calmly, max_examples=15)
def test_threads_with_a_table_each_do_not_disturb_one_another(
    tmp_path_factory: pytest.TempPathFactory, spec: TableSpec, many: list[list[tuple[str, list[int]]]]
) -> None:
    directories = [tmp_path_factory.mktemp("each") for _ in many]
    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(run, spec, 40, directory, stream) for directory, stream in zip(directories, many, strict=True)]:
            done.result()


@pytest.mark.skipif(not numba.config.BOUNDSCHECK, reason="only with NUMBA_BOUNDSCHECK=1")
def test_bounds_checks_reach_into_vector_accesses() -> None:
    @numba.njit
    def touch(array: Any, index: Any) -> None:
        load8(array, index)

    touch(np.zeros(16, np.float32), 8)
    for index in (9, -1):
        with pytest.raises(IndexError, match="vector access"):
            touch(np.zeros(16, np.float32), index)
