"""The embedding table against a slow model of itself, and its promises one by one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding import table as table_module
from training.embedding.dedup import dedup, route, server_of
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable
from training.errors import CapacityError, CheckpointError, ConfigError, TrainingError

EDGE_SIGNS = np.array([0, 1, 2, 2**32, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
ADAM = SparseOptimizerConfig(name="adam", learning_rate=0.05)
ROWWISE = SparseOptimizerConfig(name="rowwise_adagrad", learning_rate=0.05)
SGD = SparseOptimizerConfig(name="sgd", learning_rate=0.5)


def spec_of(
    *,
    dim: int = 4,
    optimizer: SparseOptimizerConfig = SGD,
    kind: str = "uniform",
    scale: float = 0.01,
    min_count: int = 1,
    row_dtype: str = "float32",
) -> TableSpec:
    initializer = InitializerConfig(kind=kind) if kind == "zeros" else InitializerConfig(kind=kind, scale=scale)
    return TableSpec(f"dim{dim}-{optimizer.name}", dim, optimizer, initializer, min_count, 1000, row_dtype)


def random_signs(count: int, seed: int = 0) -> np.ndarray:
    return dedup(np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64))[0]


def look_up(table: EmbeddingTable, signs: np.ndarray, *, insert: bool) -> np.ndarray:
    out = np.full((len(signs), table.dim), 7.0, np.float32)
    table.lookup(signs, out, insert=insert)
    return out


def stored(table: EmbeddingTable, directory: Path) -> dict[str, bytes]:
    directory.mkdir()
    table.snapshot(directory)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@contextmanager
def filled(spec: TableSpec, *, capacity_rows: int = 500, steps: int = 6, seed: int = 3, num_servers: int | None = None) -> Iterator:
    with EmbeddingTable.create(spec, capacity_rows=capacity_rows, seed=seed, num_servers=num_servers) as table:
        train(table, range(steps))
        yield table


def train(table: EmbeddingTable, steps: range, signs_per_step: int = 200, ids: int = 1500) -> None:
    for step in steps:
        rng = np.random.default_rng(step)
        signs, _ = dedup(rng.integers(0, ids, signs_per_step, dtype=np.uint64))
        look_up(table, signs, insert=True)
        table.update(signs, rng.standard_normal((len(signs), table.dim)).astype(np.float32), draw=step)


def test_every_64_bit_sign_has_a_row_of_its_own() -> None:
    with EmbeddingTable.create(spec_of(), capacity_rows=64, seed=1) as table:
        assert not look_up(table, EDGE_SIGNS, insert=False).any()
        rows = look_up(table, EDGE_SIGNS, insert=True)
        assert len(np.unique(rows, axis=0)) == len(EDGE_SIGNS)
        table.update(EDGE_SIGNS[-1:], np.ones((1, 4), np.float32))
        after = look_up(table, EDGE_SIGNS, insert=False)
        np.testing.assert_array_equal(after[:-1], rows[:-1])
        np.testing.assert_array_equal(after[-1], rows[-1] - np.float32(0.5))


@pytest.mark.parametrize("num_servers", [None, 1, 3])
def test_a_table_at_load_0_8_has_lost_less_than_0_2_percent(num_servers: int | None) -> None:
    with EmbeddingTable.create(spec_of(dim=1), capacity_rows=100_000, seed=1, num_servers=num_servers) as table:
        ids = np.arange(int(0.8 * table.geometry.num_slots * (num_servers or 1)), dtype=np.uint64)
        given = 0
        for batch in np.array_split(np.random.default_rng(0).permutation(ids), 50):
            signs, _ = dedup(batch)
            mine = signs[: route(signs, num_servers or 1)[1]]
            look_up(table, mine, insert=True)
            given += len(mine)
        assert given > 0.79 * table.geometry.num_slots
        assert table.evicted_total < 0.002 * given
        assert table.rows == given - table.evicted_total


def test_the_least_recently_used_rows_go_first() -> None:
    hot = random_signs(100, seed=1)
    with EmbeddingTable.create(spec_of(dim=1), capacity_rows=1000, seed=1) as table:
        kept = look_up(table, hot, insert=True)
        for step in range(100):
            look_up(table, random_signs(50, seed=100 + step), insert=True)
            look_up(table, hot, insert=True)
        assert table.evicted_total > 3000
        assert table.rows <= table.geometry.num_slots
        np.testing.assert_array_equal(look_up(table, hot, insert=False), kept)
        assert np.count_nonzero(look_up(table, random_signs(50, seed=100), insert=False)) == 0
        assert np.count_nonzero(look_up(table, random_signs(50, seed=199), insert=False)) == 50


def test_a_batch_beyond_capacity_still_gets_every_value_and_drops_the_rest() -> None:
    signs = random_signs(1000)
    with (
        EmbeddingTable.create(spec_of(), capacity_rows=5000, seed=9) as large,
        EmbeddingTable.create(spec_of(), capacity_rows=50, seed=9) as small,
    ):
        small_out = np.empty((1000, 4), np.float32)
        counts = small.lookup(signs, small_out, insert=True)
        np.testing.assert_array_equal(small_out, look_up(large, signs, insert=True))
        assert (counts.hits, counts.inserted, counts.refused) == (0, 1000, 0)
        assert small.rows == 1000 - counts.evicted == small.geometry.num_slots
        updated = small.update(signs, np.zeros((1000, 4), np.float32))
        assert (updated.applied, updated.absent) == (small.rows, 1000 - small.rows)


def test_a_row_evicted_within_its_own_batch_is_still_read_before_it_goes() -> None:
    with EmbeddingTable.create(spec_of(), capacity_rows=1, seed=9) as table:
        first = random_signs(14, seed=1)
        look_up(table, first, insert=True)
        table.update(first, np.ones((14, 4), np.float32))
        trained = look_up(table, first, insert=False)
        present = trained.any(axis=1)
        both = np.concatenate([first[present], random_signs(200, seed=2)])
        np.testing.assert_array_equal(look_up(table, both, insert=True)[: present.sum()], trained[present])


def test_admission_gives_a_row_at_the_third_training_look_up() -> None:
    signs, gradients = random_signs(300), np.ones((300, 4), np.float32)
    with EmbeddingTable.create(spec_of(min_count=3), capacity_rows=2000, seed=1) as table:
        for _ in range(2):
            out = np.full((300, 4), 7.0, np.float32)
            counts = table.lookup(signs, out, insert=True)
            assert (counts.refused, counts.inserted, out.any()) == (300, 0, False)
            assert table.update(signs, gradients).absent == 300
            look_up(table, signs, insert=False)  # Reading does not count.
        assert table.lookup(signs, out, insert=True).inserted == 300
        assert out.any(axis=1).all()
        assert table.update(signs, gradients).applied == 300


def test_admission_keeps_passers_by_out_however_many_come() -> None:
    regulars = random_signs(100, seed=0)
    with EmbeddingTable.create(spec_of(dim=1, min_count=3), capacity_rows=5000, seed=1) as table:
        out = np.empty((1000, 1), np.float32)
        inserted = [table.lookup(random_signs(1000, seed=step), out, insert=True).inserted for step in range(1, 61)]
        assert sum(inserted) < 0.03 * 60_000
        assert sum(inserted[-20:]) < 0.05 * 20_000
        present = [table.lookup(regulars, out[:100], insert=True).hits for _ in range(4)]
        assert present[3] == 100


def test_counters_saturate_at_the_largest_threshold() -> None:
    sign = np.array([5], np.uint64)
    with EmbeddingTable.create(spec_of(min_count=255), capacity_rows=64, seed=1) as table:
        inserted = [table.lookup(sign, np.empty((1, 4), np.float32), insert=True).inserted for _ in range(257)]
        assert inserted.index(1) == 254


def test_reading_changes_not_one_byte(tmp_path: Path) -> None:
    with filled(spec_of(optimizer=ADAM, min_count=2)) as table:
        before = stored(table, tmp_path / "before")
        table.lookup(random_signs(1000), np.empty((1000, 4), np.float32), insert=False)
        look_up(table, np.arange(1500, dtype=np.uint64), insert=False)
        assert stored(table, tmp_path / "after") == before


@pytest.mark.parametrize("optimizer", [SGD, ADAM, ROWWISE, SparseOptimizerConfig(name="adagrad")], ids=lambda o: o.name)
def test_an_update_of_absent_signs_leaves_every_row_exact(tmp_path: Path, optimizer: SparseOptimizerConfig) -> None:
    with filled(spec_of(optimizer=optimizer, dim=5)) as table:
        before = stored(table, tmp_path / "before")
        absent = random_signs(777)
        counts = table.update(absent, np.full((len(absent), 5), 1e3, np.float32))
        assert (counts.applied, counts.absent) == (0, len(absent))
        assert stored(table, tmp_path / "after") == before


def test_first_values_depend_on_sign_and_seed_only() -> None:
    signs = random_signs(3000)
    with EmbeddingTable.create(spec_of(dim=6), capacity_rows=5000, seed=11) as one:
        whole = look_up(one, signs, insert=True)
    shuffled = np.random.default_rng(0).permutation(len(signs))
    for server in range(3):
        mine = shuffled[server_of(signs[shuffled], 3) == server]
        with EmbeddingTable.create(spec_of(dim=6, optimizer=ADAM), capacity_rows=1500, seed=11, num_servers=3) as part:
            for chunk in np.array_split(mine, 7):
                np.testing.assert_array_equal(look_up(part, signs[chunk], insert=True), whole[chunk])
    with EmbeddingTable.create(spec_of(dim=6), capacity_rows=5000, seed=12) as other:
        assert (look_up(other, signs, insert=True) != whole).mean() > 0.999


@pytest.mark.parametrize(("kind", "deviation", "largest"), [("uniform", 0.2 / 3**0.5, 0.2), ("normal", 0.2, 1.3), ("zeros", 0.0, 0.0)])
def test_first_values_have_the_configured_distribution(kind: str, deviation: float, largest: float) -> None:
    with EmbeddingTable.create(
        spec_of(dim=8, kind=kind, **({} if kind == "zeros" else {"scale": 0.2})), capacity_rows=20_000, seed=1
    ) as table:
        values = look_up(table, np.arange(20_000, dtype=np.uint64), insert=True)
    assert abs(values.mean()) < 0.003
    assert values.std() == pytest.approx(deviation, rel=0.01)
    assert np.abs(values).max() <= largest
    assert np.abs(values).max() >= largest * 0.5
    if kind != "zeros":
        assert np.abs(np.corrcoef(values.T) - np.eye(8)).max() < 0.04


@pytest.mark.parametrize(
    "optimizer", [SGD, ADAM, ROWWISE, SparseOptimizerConfig(name="sgd", momentum=0.9)], ids=lambda o: f"{o.name}{o.momentum}"
)
@pytest.mark.parametrize(("min_count", "row_dtype"), [(1, "float32"), (2, "float32"), (1, "float16"), (2, "bfloat16")])
def test_going_on_after_restore_equals_never_having_stopped(
    tmp_path: Path, optimizer: SparseOptimizerConfig, min_count: int, row_dtype: str
) -> None:
    spec = spec_of(optimizer=optimizer, min_count=min_count, dim=3, row_dtype=row_dtype)
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    with filled(spec) as table:
        meta = json.loads(json.dumps(table.snapshot(snapshot)))
        train(table, range(6, 30))
        expected = stored(table, tmp_path / "uninterrupted")
        assert table.evicted_total > meta["evicted_total"]
        total = table.evicted_total
    with EmbeddingTable.create(spec, capacity_rows=500, seed=3) as again:
        assert again.restore(snapshot, meta) == meta["rows"]
        assert stored(again, tmp_path / "restored") == {path.name: path.read_bytes() for path in snapshot.iterdir()}
        train(again, range(6, 30))
        assert stored(again, tmp_path / "resumed") == expected
        assert again.evicted_total == total


def test_two_servers_become_three_with_all_rows_state_and_step_counts(tmp_path: Path) -> None:
    spec, signs = spec_of(optimizer=ADAM), random_signs(900)
    gradients = np.random.default_rng(0).standard_normal((4, 900, 4)).astype(np.float32)
    with EmbeddingTable.create(spec, capacity_rows=2000, seed=5) as whole:
        for step in range(4):
            look_up(whole, signs, insert=True)
            whole.update(signs, gradients[step])
        expected = look_up(whole, signs, insert=False)
    metas = []
    for server in range(2):
        (tmp_path / str(server)).mkdir()
        mine = server_of(signs, 2) == server
        with EmbeddingTable.create(spec, capacity_rows=1000, seed=5, num_servers=2) as part:
            for step in range(3):
                look_up(part, signs[mine], insert=True)
                part.update(signs[mine], gradients[step][mine])
            metas.append(part.snapshot(tmp_path / str(server)))
    for server in range(3):
        mine = server_of(signs, 3) == server
        with EmbeddingTable.create(spec, capacity_rows=700, seed=5, num_servers=3) as part:
            kept = [part.restore(tmp_path / str(s), metas[s], keep=lambda x, server=server: server_of(x, 3) == server) for s in range(2)]
            assert sum(kept) == mine.sum() == part.rows
            assert part.update(signs[mine], gradients[3][mine]).absent == 0
            np.testing.assert_array_equal(look_up(part, signs[mine], insert=False), expected[mine])


def test_a_full_table_fits_into_one_of_a_little_more_room_with_next_to_no_loss(tmp_path: Path) -> None:
    with EmbeddingTable.create(spec_of(dim=1), capacity_rows=50_000, seed=5) as table:
        for part in range(25):
            look_up(table, random_signs(2000, seed=part), insert=True)
        meta = table.snapshot(tmp_path)
        rows = table.rows
    with EmbeddingTable.create(spec_of(dim=1), capacity_rows=52_000, seed=5, num_servers=1) as again:
        again.restore(tmp_path, meta)
        assert rows * 0.998 < again.rows <= rows
        assert again.evicted_total == 0


def test_a_smaller_table_keeps_the_rows_used_last(tmp_path: Path) -> None:
    old, new = random_signs(1000, seed=1), random_signs(150, seed=2)
    with EmbeddingTable.create(spec_of(optimizer=ROWWISE), capacity_rows=1000, seed=5) as table:
        look_up(table, old, insert=True)
        look_up(table, new, insert=True)
        values = look_up(table, new, insert=False)
        meta = table.snapshot(tmp_path)
    with EmbeddingTable.create(spec_of(optimizer=ROWWISE), capacity_rows=500, seed=5) as small:
        assert small.restore(tmp_path, meta) == small.rows < meta["rows"]
        assert small.rows <= small.geometry.num_slots
        kept = (look_up(small, new, insert=False) == values).all(axis=1)
        assert kept.mean() > 0.9
        assert look_up(small, old, insert=False).any(axis=1).mean() < 0.5


@pytest.mark.parametrize("name", ["signs", "slots", "recency", "rows", "scalars", "counters"])
@pytest.mark.parametrize("damage", ["short", "flipped", "missing", "empty", "header"])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, name: str, damage: str) -> None:
    spec, path = spec_of(optimizer=ADAM, min_count=2), tmp_path / f"{name}.npy"
    with filled(spec) as table:
        meta = table.snapshot(tmp_path)
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-5] ^= 0x10
        if damage == "header":
            content[20] ^= 0x40
        path.write_bytes({"short": content[:-5], "flipped": content, "empty": b"", "header": content}[damage])
    with EmbeddingTable.create(spec, capacity_rows=500, seed=3) as again, pytest.raises(CheckpointError, match=rf"{name}\.npy"):
        again.restore(tmp_path, meta)


@pytest.mark.parametrize(
    "other",
    [spec_of(optimizer=ADAM, dim=5), spec_of(optimizer=SGD), spec_of(optimizer=ROWWISE), spec_of(optimizer=ADAM, row_dtype="float16")],
    ids=str,
)
def test_another_tables_snapshot_is_refused(tmp_path: Path, other: TableSpec) -> None:
    with filled(spec_of(optimizer=ADAM)) as table:
        meta = table.snapshot(tmp_path)
    with EmbeddingTable.create(other, capacity_rows=500, seed=3) as again:
        with pytest.raises(CheckpointError, match=other.name):
            again.restore(tmp_path, meta)
        with pytest.raises(CheckpointError, match="format 99"):
            again.restore(tmp_path, {**meta, "format_version": 99})


def test_a_table_beyond_memory_is_refused_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "available_bytes", lambda: 5 * 2**30)
    spec = spec_of(dim=16, optimizer=SparseOptimizerConfig(name="adagrad"))
    with pytest.raises(
        CapacityError, match=r"table dim16-adagrad needs 15\.\d GiB, 5\.0 GiB available: lower embedding.capacity_rows from 1000 "
    ):
        EmbeddingTable.create(spec, capacity_rows=100_000_000, seed=0)
    monkeypatch.setattr(table_module, "available_bytes", lambda: None)
    with pytest.raises(CapacityError, match="more than the system gives"):
        EmbeddingTable.create(spec, capacity_rows=10**15, seed=0)


@pytest.mark.parametrize("capacity", [0, -1])
def test_capacity_must_be_positive(capacity: int) -> None:
    with pytest.raises(CapacityError, match=f"capacity_rows is {capacity}"):
        EmbeddingTable.create(spec_of(), capacity_rows=capacity, seed=0)


def test_admission_thresholds_beyond_the_counters_are_refused() -> None:
    with pytest.raises(ConfigError, match="256"):
        EmbeddingTable.create(spec_of(min_count=256), capacity_rows=10, seed=0)


def test_wrong_arrays_are_refused() -> None:
    signs, good = np.arange(3, dtype=np.uint64), np.zeros((3, 4), np.float32)
    locked = good.copy()
    locked.flags.writeable = False
    with EmbeddingTable.create(spec_of(), capacity_rows=10, seed=0) as table:
        for wrong in (signs.astype(np.int64), signs.reshape(3, 1)):
            with pytest.raises(ValueError, match="signs must be uint64"):
                table.lookup(wrong, good, insert=True)
        for wrong in (good[:, :3], good[:2], good.astype(np.float64), good.astype(np.float16)):
            with pytest.raises(ValueError, match=r"must be float32 \[3, 4\]"):
                table.lookup(signs, wrong, insert=True)
            with pytest.raises(ValueError, match=r"must be float32 \[3, 4\]"):
                table.update(signs, wrong)
        for wrong in (locked, np.zeros((3, 8), np.float32)[:, ::2]):
            with pytest.raises(ValueError, match="writable"):
                table.lookup(signs, wrong, insert=True)
        assert table.rows == 0


def test_read_only_strided_and_unaligned_inputs_do(tmp_path: Path) -> None:
    signs, gradients = random_signs(50), np.random.default_rng(0).standard_normal((50, 4)).astype(np.float32)
    buffer = b"\0" + signs.tobytes() + gradients.tobytes()
    odd_signs = np.frombuffer(buffer, np.uint64, 50, offset=1)
    odd_gradients = np.frombuffer(buffer, np.float32, 200, offset=401).reshape(50, 4)
    with (
        EmbeddingTable.create(spec_of(), capacity_rows=100, seed=0) as one,
        EmbeddingTable.create(spec_of(), capacity_rows=100, seed=0) as two,
    ):
        look_up(one, signs, insert=True)
        one.update(signs, gradients)
        look_up(two, odd_signs, insert=True)
        two.update(np.repeat(signs, 2)[::2], odd_gradients)
        np.testing.assert_array_equal(look_up(one, signs, insert=False), look_up(two, signs, insert=False))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("optimizer", [SGD, ADAM, ROWWISE, SparseOptimizerConfig(name="adagrad")], ids=lambda o: o.name)
def test_a_gradient_that_is_not_finite_spoils_its_own_row_only(optimizer: SparseOptimizerConfig, poison: float) -> None:
    """The trainer skips such steps; were one to come through, it must be seen and stay where it belongs."""
    signs, gradients = random_signs(50), np.ones((50, 4), np.float32)
    with filled(spec_of(optimizer=optimizer)) as one, filled(spec_of(optimizer=optimizer)) as two:
        for table in (one, two):
            look_up(table, signs, insert=True)
        one.update(signs, gradients)
        gradients[7, 2] = poison
        two.update(signs, gradients)
        expected, got = look_up(one, signs, insert=False), look_up(two, signs, insert=False)
        others = np.arange(50) != 7
        np.testing.assert_array_equal(got[others], expected[others])
        assert not np.isfinite(got[7, 2])


def test_a_sign_that_stands_twice_is_looked_up_once_and_updated_twice() -> None:
    twice, one = np.array([3, 9, 3], np.uint64), np.ones((3, 4), np.float32)
    with EmbeddingTable.create(spec_of(kind="zeros"), capacity_rows=100, seed=0) as table:
        counts = table.lookup(twice, one.copy(), insert=True)
        assert (counts.inserted, counts.hits, table.rows) == (2, 1, 2)
        assert table.update(twice, one).applied == 3
        np.testing.assert_array_equal(look_up(table, twice, insert=False)[:, 0], [-1.0, -0.5, -1.0])


def test_signs_in_any_order_give_the_same_rows_even_to_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_module, "SIGNS_PER_THREAD", 10)
    signs = random_signs(5000)
    shuffled = np.random.default_rng(0).permutation(signs)
    with (
        ThreadPoolExecutor(2) as crew,
        EmbeddingTable.create(spec_of(), capacity_rows=20_000, seed=0, num_servers=1, crew=crew, threads=3) as one,
        EmbeddingTable.create(spec_of(), capacity_rows=20_000, seed=0, num_servers=1) as two,
    ):
        for table, order in ((one, signs), (two, shuffled), (one, shuffled)):
            look_up(table, order, insert=True)
            table.update(order, np.ones((5000, 4), np.float32))
        two.update(signs, np.ones((5000, 4), np.float32))
        np.testing.assert_array_equal(look_up(one, signs, insert=False), look_up(two, signs, insert=False))


def test_large_calls_are_shared_by_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    ranges: list[int] = []

    class Crew(ThreadPoolExecutor):
        def submit(self, work, /, first, last):
            ranges.append(last - first)
            return super().submit(work, first, last)

    signs = random_signs(3 * table_module.SIGNS_PER_THREAD + 5)
    with Crew(2) as crew, EmbeddingTable.create(spec_of(), capacity_rows=100_000, seed=0, num_servers=1, crew=crew, threads=3) as table:
        assert table.lookup(signs, np.empty((len(signs), 4), np.float32), insert=True).inserted == len(signs)
        assert len(ranges) == 2
        assert all(0.9 * len(signs) / 3 < part < 1.1 * len(signs) / 3 for part in ranges)
        look_up(table, signs[: 2 * table_module.SIGNS_PER_THREAD - 1], insert=False)
        assert len(ranges) == 2


def test_an_empty_batch_and_an_empty_snapshot_are_fine(tmp_path: Path) -> None:
    none, rows = np.empty(0, np.uint64), np.empty((0, 4), np.float32)
    with EmbeddingTable.create(spec_of(optimizer=ADAM), capacity_rows=10, seed=0) as table:
        assert table.lookup(none, rows, insert=True).inserted == table.lookup(none, rows, insert=False).hits == 0
        assert table.update(none, rows).applied == 0
        assert len(table.sample(5)[0]) == 0
        meta = table.snapshot(tmp_path)
    for capacity in (10, 1000):
        with EmbeddingTable.create(spec_of(optimizer=ADAM), capacity_rows=capacity, seed=0) as again:
            assert again.restore(tmp_path, meta) == again.rows == 0


def test_a_closed_table_says_so_and_an_unclosed_one_warns() -> None:
    table = EmbeddingTable.create(spec_of(), capacity_rows=10, seed=0)
    table.close()
    table.close()
    assert table.memory_bytes == 0
    with pytest.raises(TrainingError, match="closed"):
        look_up(table, EDGE_SIGNS, insert=True)
    leaked = EmbeddingTable.create(spec_of(), capacity_rows=10, seed=0)
    with pytest.warns(ResourceWarning, match="not closed"):
        leaked.__del__()
    assert leaked.memory_bytes == 0


def test_the_learning_rate_can_be_scheduled() -> None:
    sign, one = np.array([1], np.uint64), np.ones((1, 4), np.float32)
    with EmbeddingTable.create(spec_of(kind="zeros"), capacity_rows=10, seed=0) as table:
        look_up(table, sign, insert=True)
        table.set_learning_rate(0.25)
        table.update(sign, one)
        np.testing.assert_array_equal(look_up(table, sign, insert=False), -0.25 * one)
        assert table.learning_rate == 0.25


def test_a_sample_holds_different_rows_with_their_values() -> None:
    with filled(spec_of(optimizer=ADAM), capacity_rows=200) as table:
        for count in (1, 7, table.rows, table.rows + 1):
            signs, values = table.sample(count)
            assert len(np.unique(signs)) == len(signs) == min(count, table.rows)
            np.testing.assert_array_equal(values, look_up(table, signs, insert=False))


@pytest.mark.parametrize("min_count", [1, 2])
def test_memory_is_at_most_16_bytes_per_row_beside_values_and_state_at_load_0_9(min_count: int) -> None:
    with EmbeddingTable.create(spec_of(dim=16, optimizer=ROWWISE, min_count=min_count), capacity_rows=100_000, seed=0) as table:
        payload = (16 + 1) * 4 * table.geometry.num_slots
        assert 0 < table.memory_bytes - payload <= 16 * 0.9 * table.geometry.num_slots
