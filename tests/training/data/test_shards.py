import contextlib
import itertools
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pytest

from training.data import shards
from training.data.manifest import ShardEntry
from training.data.shards import Bag, BatchPlan, ShardColumns, ShardReader, check_shard, open_shard, write_shard
from training.errors import ManifestError


def columns(first, rows):
    """Records whose every value tells their global number."""
    numbers = np.arange(first, first + rows)
    offsets = np.zeros(rows + 1, np.int64)
    np.cumsum(numbers % 3, out=offsets[1:])
    values = np.repeat(numbers, numbers % 3).astype(np.uint64)
    return ShardColumns(
        (numbers % 2).astype(np.int8),
        numbers * 10,
        np.stack([numbers, -numbers], axis=1).astype(np.float32),
        np.stack([numbers.astype(np.uint64) + np.uint64(offset) for offset in (0, 2**63, 7)], axis=1),
        {"tags": Bag(offsets, values)},
        {"city": pa.array([f"city{n % 4}" for n in numbers])},
    )


@pytest.fixture
def reader(tmp_path):
    entries, first = [], 0
    for i, rows in enumerate((5, 1, 8)):
        name = f"part-{i}.arrow"
        digest = write_shard(tmp_path / name, columns(first, rows))
        entries.append(ShardEntry(file=name, split="train", rows=rows, bytes=(tmp_path / name).stat().st_size, digest=digest))
        first += rows
    with ShardReader(tmp_path, entries) as opened:
        yield opened


def assert_rows(batch, numbers):
    numbers = np.asarray(numbers)
    assert batch.label.dtype == np.float32
    assert batch.label.tolist() == (numbers % 2).tolist()
    assert batch.time.tolist() == (numbers * 10).tolist()
    assert batch.dense.tolist() == [[n, -n] for n in numbers]
    assert batch.signs.tolist() == [[n, n + 2**63, n + 7] for n in numbers.tolist()]
    (bag,) = batch.bags
    assert bag.offsets[0] == 0
    assert [bag.values[a:b].tolist() for a, b in zip(bag.offsets, bag.offsets[1:], strict=False)] == [[n] * (n % 3) for n in numbers]


@pytest.mark.parametrize(("start", "stop"), [(0, 14), (0, 5), (2, 4), (4, 7), (5, 6), (3, 3), (13, 14), (14, 14)])
def test_reads_consecutive_records_across_shards(reader, start, stop):
    assert_rows(reader.read(start, stop), list(range(start, stop)))
    assert reader.slice_values("city", start, stop).tolist() == [f"city{n % 4}" for n in range(start, stop)]


@pytest.mark.parametrize("rows", [[], [13], [0, 13, 5, 4, 6], [3, 3, 3], list(range(13, -1, -1))])
def test_takes_any_records_in_any_order(reader, rows):
    assert_rows(reader.take(np.array(rows, np.int64)), rows)


@pytest.mark.parametrize("rows", [[-1], [14]])
def test_records_outside_the_split_are_refused(reader, rows):
    with pytest.raises(IndexError, match="of a split of 14"):
        reader.take(np.array(rows))
    with pytest.raises(IndexError):
        reader.read(0, 15)


def test_batches_may_be_written_to(reader):
    batch = reader.read(0, 3)
    batch.dense[:] = 9
    batch.signs[:] = 9
    assert_rows(reader.read(0, 3), [0, 1, 2])


def test_the_file_has_the_documented_columns(tmp_path):
    write_shard(tmp_path / "a.arrow", columns(0, 4))
    schema = pa.ipc.open_file(tmp_path / "a.arrow").schema
    assert [(f.name, str(f.type)) for f in schema] == [
        ("label", "int8"),
        ("time", "int64"),
        ("dense", "fixed_size_list<item: float>[2]"),
        ("signs", "fixed_size_list<item: uint64>[3]"),
        ("bag:tags", "large_list<item: uint64>"),
        ("slice:city", "dictionary<values=string, indices=int32, ordered=0>"),
    ]


def test_a_split_without_shards_gives_empty_batches(tmp_path):
    with ShardReader(tmp_path, []) as reader:
        assert reader.rows == 0
        assert len(reader.read(0, 0)) == 0


def test_dense_bags_and_time_may_be_absent(tmp_path):
    bare = ShardColumns(np.ones(2, np.int8), None, np.empty((2, 0), np.float32), np.ones((2, 1), np.uint64), {}, {})
    write_shard(tmp_path / "a.arrow", bare)
    opened = open_shard(tmp_path / "a.arrow")
    assert (opened.time, opened.dense.shape, opened.signs.shape, opened.bags) == (None, (2, 0), (2, 1), {})


@pytest.mark.parametrize("change", ["label", "time", "dense", "signs", "bags", "slices"])
def test_the_digest_sees_every_column(tmp_path, change):
    first = columns(0, 6)
    fields = dict(vars(first))
    other = columns(1, 6)
    fields[change] = vars(other)[change]
    assert write_shard(tmp_path / "a", first) == write_shard(tmp_path / "b", columns(0, 6))
    assert write_shard(tmp_path / "c", ShardColumns(**fields)) != write_shard(tmp_path / "a", first)


@pytest.fixture
def stored(tmp_path):
    """A shard as (bytes, reading): what is in the file, and a function that reads other bytes in its place."""
    digest = write_shard(tmp_path / "a.arrow", columns(0, 40))
    content = (tmp_path / "a.arrow").read_bytes()
    times = itertools.count(1)  # the clock of the file system may be too coarse to tell the versions apart

    def reading(other):
        (tmp_path / "a.arrow").unlink()
        (tmp_path / "a.arrow").write_bytes(other)
        os.utime(tmp_path / "a.arrow", ns=(0, next(times)))
        entry = ShardEntry(file="a.arrow", split="train", rows=40, bytes=len(content), digest=digest)
        with ShardReader(tmp_path, [entry]) as reader:
            return reader.read(0, 40)

    return content, reading


DAMAGED = r"a\.arrow: damaged: its content differs from the manifest; run `satrap preprocess` again"


def test_a_changed_value_is_found_at_the_first_opening(stored):
    content, reading = stored
    place = content.index(np.arange(0, 400, 10).tobytes())
    with pytest.raises(ManifestError, match=DAMAGED):
        reading(content[:place] + b"\7" + content[place + 1 :])
    assert_rows(reading(content), list(range(40)))


def test_a_shard_of_random_bytes_is_called_damaged(stored):
    content, reading = stored
    for seed in range(3):
        with pytest.raises(ManifestError, match=DAMAGED):
            reading(np.random.default_rng(seed).bytes(len(content)))


def test_whatever_byte_is_flipped_records_are_right_or_the_shard_is_damaged(stored):
    content, reading = stored
    flips, refused = np.random.default_rng(0).integers(1, 256, len(content)).tolist(), 0
    for place in range(0, len(content), 3):
        with contextlib.suppress(ManifestError):
            refused += 1
            assert_rows(reading(content[:place] + bytes([content[place] ^ flips[place]]) + content[place + 1 :]), list(range(40)))
            refused -= 1
    assert refused > 500


def test_a_shard_is_verified_once_as_long_as_it_does_not_change(tmp_path, monkeypatch):
    digest = write_shard(tmp_path / "a.arrow", columns(0, 4))
    entry = ShardEntry(file="a.arrow", split="train", rows=4, bytes=1, digest=digest)
    opened = []
    monkeypatch.setattr(shards, "open_shard", lambda path: opened.append(path) or open_shard(path))
    check_shard(tmp_path, entry)
    check_shard(tmp_path, entry)
    assert len(opened) == 1
    write_shard(tmp_path / "a.arrow", columns(1, 4))
    for _ in range(2):
        with pytest.raises(ManifestError, match="damaged"):
            check_shard(tmp_path, entry)
    (tmp_path / "a.arrow").unlink()
    with pytest.raises(ManifestError, match="missing"):
        check_shard(tmp_path, entry)


STARTS = np.array([0, 50, 53, 100, 160])


def all_rows(plan, epoch):
    steps = [plan.rows(epoch, step) for step in range(plan.steps_per_epoch)]
    return [np.arange(s.start, s.stop) if isinstance(s, slice) else s for s in steps]


@pytest.mark.parametrize("rows_per_step", [1, 7, 64, 1000])
@pytest.mark.parametrize("shuffle", [False, True])
def test_an_epoch_covers_every_record_once(rows_per_step, shuffle):
    plan = BatchPlan(STARTS, rows_per_step=rows_per_step, seed=3, shuffle=shuffle, window_shards=2)
    steps = all_rows(plan, 1)
    assert [len(s) for s in steps[:-1]] == [rows_per_step] * (plan.steps_per_epoch - 1)
    assert sorted(np.concatenate(steps).tolist()) == list(range(160))


def test_unshuffled_steps_are_consecutive():
    plan = BatchPlan(STARTS, rows_per_step=64, seed=3, shuffle=False, window_shards=2)
    assert [plan.rows(5, step) for step in range(3)] == [slice(0, 64), slice(64, 128), slice(128, 160)]


def test_the_plan_is_a_function_of_seed_and_epoch_alone():
    def build(seed=3):
        return BatchPlan(STARTS, rows_per_step=16, seed=seed, shuffle=True, window_shards=2)

    used = build()
    for epoch in (4, 0, 2):
        all_rows(used, epoch)
    fresh = build()
    for step in reversed(range(fresh.steps_per_epoch)):
        assert used.rows(2, step).tolist() == fresh.rows(2, step).tolist()
    assert np.concatenate(all_rows(used, 2)).tolist() != np.concatenate(all_rows(used, 3)).tolist()
    assert np.concatenate(all_rows(used, 2)).tolist() != np.concatenate(all_rows(build(4), 2)).tolist()


def test_threads_that_share_a_plan_get_what_one_alone_gets():
    starts = np.arange(0, 16 * 64 + 1, 64)

    def build():
        return BatchPlan(starts, rows_per_step=48, seed=3, shuffle=True, window_shards=2)

    alone, shared, threads = build(), build(), 8
    wanted = [(epoch, step) for epoch in range(6) for step in range(alone.steps_per_epoch)]
    expected = {at: alone.rows(*at).tolist() for at in wanted}
    together = threading.Barrier(threads, timeout=30)

    def read(thread):
        order = np.random.default_rng(thread).permutation(len(wanted)).tolist()
        together.wait()
        return [at for at in (wanted[i] for i in order) for _ in range(3) if shared.rows(*at).tolist() != expected[at]]

    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(read, range(threads))) == [[]] * threads


def test_records_are_shuffled_within_windows_of_whole_shards():
    plan = BatchPlan(STARTS, rows_per_step=10, seed=1, shuffle=True, window_shards=2)
    windows = set()
    for epoch in range(8):
        order = np.concatenate(all_rows(plan, epoch))
        shard = np.searchsorted(STARTS, order, side="right") - 1
        seen = list(dict.fromkeys(shard.tolist()))
        first_window = frozenset(shard[: sum(STARTS[s + 1] - STARTS[s] for s in seen[:2])].tolist())
        assert first_window == set(seen[:2]), "the first window must end before another shard begins"
        windows.add(first_window)
        members = order[: sum(STARTS[s + 1] - STARTS[s] for s in seen[:2])]
        assert (np.diff(members) < 0).any()
    assert len(windows) > 1


def test_the_order_never_changes_between_versions():
    plan = BatchPlan(np.array([0, 3, 6]), rows_per_step=6, seed=0, shuffle=True, window_shards=1)
    assert [plan.rows(epoch, 0).tolist() for epoch in (0, 1)] == [[3, 4, 5, 2, 1, 0], [3, 4, 5, 1, 2, 0]]


def test_a_step_beyond_the_epoch_is_refused():
    with pytest.raises(IndexError, match="step 3 of an epoch of 3"):
        BatchPlan(STARTS, rows_per_step=64, seed=0, shuffle=False, window_shards=1).rows(0, 3)


def test_an_empty_split_has_no_steps():
    assert BatchPlan(np.array([0]), rows_per_step=64, seed=0, shuffle=True, window_shards=1).steps_per_epoch == 0
