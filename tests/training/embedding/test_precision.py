"""Rows of 16 bits: what is stored is right on average, repeatable, and good enough to train with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from training.config import Config, InitializerConfig, SparseOptimizerConfig
from training.embedding import geometry
from training.embedding import table as table_module
from training.embedding.dedup import dedup
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable
from training.events import EventLog
from training.in_process import in_process_trainer

HALVES = ["float16", "bfloat16"]
SGD = SparseOptimizerConfig(name="sgd", learning_rate=1.0)
ROWS = 20_000


def spec_of(row_dtype: str, *, dim: int = 8, optimizer: SparseOptimizerConfig = SGD, kind: str = "zeros") -> TableSpec:
    return TableSpec("t", dim, optimizer, InitializerConfig(kind=kind), 1, ROWS, row_dtype)  # type: ignore[arg-type]


def rows_of(table: EmbeddingTable, signs: np.ndarray, *, insert: bool = False) -> np.ndarray:
    out = np.empty((len(signs), table.dim), np.float32)
    table.lookup(signs, out, insert=insert)
    return out


def stored(row_dtype: str, value: float, *, draw: int = 1) -> np.ndarray:
    """What becomes of a value in rows of many signs."""
    signs, _ = dedup(np.arange(ROWS, dtype=np.uint64))
    with EmbeddingTable.create(spec_of(row_dtype), capacity_rows=2 * ROWS, seed=0) as table:
        rows_of(table, signs, insert=True)
        table.update(signs, np.full((ROWS, 8), -np.float32(value)), draw=draw)
        return rows_of(table, signs)


def neighbours(row_dtype: str, value: float) -> tuple[float, float]:
    """The numbers of the format right below and above in magnitude."""
    size = abs(np.float32(value))
    if row_dtype == "bfloat16":
        bits = size.view(np.uint32) & np.uint32(0xFFFF0000)
        low, high = bits.view(np.float32), (bits + np.uint32(0x10000)).view(np.float32)
    else:
        low = np.float16(size)
        low = low if low <= size else np.nextafter(low, np.float16(0))
        high = np.nextafter(low, np.float16(np.inf))
    return float(low), float(high)


@pytest.mark.parametrize("row_dtype", HALVES)
@pytest.mark.parametrize("value", [1.0003, -0.1, 0.0123, 300.1, 7e-5, -3.3e-6, 4e-8, 1.5e-8])
def test_a_value_is_rounded_up_as_often_as_it_lies_above(row_dtype: str, value: float) -> None:
    low, high = neighbours(row_dtype, value)
    got = stored(row_dtype, value) * np.sign(value)
    assert set(np.unique(got)) <= {np.float32(low), np.float32(high)}
    share, exact = (got == np.float32(high)).mean(axis=0), (abs(np.float32(value)) - low) / (high - low)
    np.testing.assert_allclose(share, exact, atol=5 * np.sqrt(0.25 / ROWS))  # in every lane
    lanes = np.corrcoef((got == np.float32(high)).T.astype(float)) if 0.01 < exact < 0.99 else np.eye(8)
    assert np.abs(lanes - np.eye(8)).max() < 0.04


@pytest.mark.parametrize("row_dtype", HALVES)
@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 2.0**-14, np.inf, -np.inf, np.nan])
def test_a_value_of_the_format_is_kept(row_dtype: str, value: float) -> None:
    np.testing.assert_array_equal(stored(row_dtype, value), np.full((ROWS, 8), np.float32(value)))


def test_float16_beyond_its_range_is_infinite_and_not_clamped() -> None:
    assert np.isposinf(stored("float16", 1e5)).all()
    assert (stored("bfloat16", 2.0**100) == 2.0**100).all()


@pytest.mark.parametrize("row_dtype", HALVES)
def test_rounding_depends_on_sign_and_draw_only(row_dtype: str) -> None:
    once = stored(row_dtype, 0.1)
    np.testing.assert_array_equal(stored(row_dtype, 0.1), once)
    assert 0.3 < (stored(row_dtype, 0.1, draw=2) == once).mean() < 0.8


@pytest.mark.parametrize("row_dtype", HALVES)
def test_steps_too_small_to_be_seen_add_up(row_dtype: str) -> None:
    signs, _ = dedup(np.arange(2000, dtype=np.uint64))
    with EmbeddingTable.create(spec_of(row_dtype), capacity_rows=ROWS, seed=0) as table:
        rows_of(table, signs, insert=True)
        table.update(signs, np.full((2000, 8), -1.0, np.float32))
        for step in range(200):
            table.update(signs, np.full((2000, 8), -1e-4, np.float32), draw=step)
        assert rows_of(table, signs).mean() == pytest.approx(1.02, abs=0.001)


@pytest.mark.parametrize("row_dtype", HALVES)
def test_state_stays_float32_and_first_values_are_the_nearest(row_dtype: str) -> None:
    adagrad = SparseOptimizerConfig(name="adagrad", learning_rate=0.1)
    signs, _ = dedup(np.arange(500, dtype=np.uint64))
    gradients = np.random.default_rng(0).standard_normal((500, 7)).astype(np.float32)
    with (
        EmbeddingTable.create(spec_of("float32", dim=7, optimizer=adagrad, kind="normal"), capacity_rows=600, seed=1) as wide,
        EmbeddingTable.create(spec_of(row_dtype, dim=7, optimizer=adagrad, kind="normal"), capacity_rows=600, seed=1) as narrow,
    ):
        step = 2.0**-11 if row_dtype == "float16" else 2.0**-8
        full, half = rows_of(wide, signs, insert=True), rows_of(narrow, signs, insert=True)
        assert (np.abs(half - full) <= np.abs(full) * step + 2.0**-25).all()
        for k in range(30):
            for table in (wide, narrow):
                table.update(signs, gradients, draw=k)
        full, half = rows_of(wide, signs), rows_of(narrow, signs)
        assert np.abs(half - full).max() < 60 * step * np.abs(full).max()
        assert abs((half - full).mean()) < 0.3 * step


@pytest.mark.parametrize("row_dtype", HALVES)
def test_halves_take_half_the_memory(row_dtype: str) -> None:
    with (
        EmbeddingTable.create(spec_of("float32", dim=64), capacity_rows=ROWS, seed=0) as wide,
        EmbeddingTable.create(spec_of(row_dtype, dim=64), capacity_rows=ROWS, seed=0) as narrow,
    ):
        assert wide.memory_bytes - narrow.memory_bytes == 64 * 2 * wide.geometry.num_slots


def auc(config: Config, data: Path, output: Path) -> float:
    output.mkdir()
    with EventLog(output / "events.jsonl") as events, in_process_trainer(config, data, output, events=events) as rank:
        rank.run()
        return rank.progress.metrics["auc"]


@pytest.mark.parametrize("row_dtype", HALVES)
def test_a_small_log_trains_to_the_same_auc(configured: Callable[..., Config], clicks_data: Path, tmp_path: Path, row_dtype: str) -> None:
    reference = auc(configured("training.epochs=4"), clicks_data, tmp_path / "float32")
    narrow = auc(configured("training.epochs=4", f"embedding.row_dtype={row_dtype}"), clicks_data, tmp_path / row_dtype)
    assert reference > 0.7
    assert narrow == pytest.approx(reference, abs=0.005)


@pytest.mark.parametrize("row_dtype", ["float32", "bfloat16"])
def test_server_threads_change_no_result(
    monkeypatch: pytest.MonkeyPatch, configured: Callable[..., Config], clicks_data: Path, tmp_path: Path, row_dtype: str
) -> None:
    monkeypatch.setattr(table_module, "SIGNS_PER_THREAD", 8)
    monkeypatch.setattr(geometry, "MAX_BLOCK_BUCKETS", 8)
    results = []
    for threads in (1, 3):
        output = tmp_path / str(threads)
        config = configured("training.max_steps=8", f"training.server_threads={threads}", f"embedding.row_dtype={row_dtype}")
        auc(config, clicks_data, output)
        results.append({p.name: p.read_bytes() for p in sorted(output.glob("checkpoints/*/embedding/server-0-of-2/table-0/*.npy"))})
    assert len(results[0]) == 6
    assert results[0] == results[1]
