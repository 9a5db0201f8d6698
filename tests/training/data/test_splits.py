import numpy as np
import pytest

from training.config import Fractions
from training.data.shards import ShardReader
from training.data.splits import find_cut_points, split_by_time


def labels(folder, split):
    with ShardReader.open(folder, split) as reader:
        return reader.read(0, reader.rows)


def by_hash(**settings):
    return {"by": "hash", "fractions": {"train": 0.6, "valid": 0.2, "test": 0.2}} | settings


def users(count, order=1):
    rows = [b"%d,u%d,%d\n" % (i % 2, i // 4, i) for i in range(count)]
    return b"y,c,n\n" + b"".join(rows[::order])


def test_a_hash_split_has_about_the_shares_and_never_divides_a_key(configure, run):
    config = configure({"log.csv": users(4000)}, split=by_hash(key=["c"]))
    manifest, folder = run(config)
    shares = [manifest.rows(split) / 4000 for split in ("train", "valid", "test")]
    assert shares == pytest.approx([0.6, 0.2, 0.2], abs=0.05)
    seen = [set(labels(folder, split).signs[:, 0].tolist()) for split in ("train", "valid", "test")]
    assert [seen[0] & seen[1], seen[0] & seen[2], seen[1] & seen[2]] == [set(), set(), set()]


def test_a_hash_split_depends_on_content_and_salt_but_not_on_place(configure, run):
    schema = {"dense": [{"name": "n", "fill": 0.0}]}

    def valid(content, **settings):
        _, folder = run(configure({"log.csv": content}, schema=schema, split=by_hash(**settings)), reuse=False)
        return sorted(labels(folder, "valid").dense[:, 0].tolist())

    forward = valid(users(400))
    assert valid(users(400, order=-1)) == forward
    assert valid(users(400).replace(b"\n", b"\r\n")) == forward
    assert valid(users(400), salt="other") != forward
    assert valid(users(400).replace(b",u", b",  u"), key=["c"]) == valid(users(400), key=["c"])
    assert valid(users(400), key=["c", "n"]) != forward


def test_everything_may_be_train(configure, run):
    manifest, _ = run(configure({"log.csv": users(400)}))
    assert [manifest.rows(split) for split in ("train", "valid", "test")] == [400, 0, 0]


def test_a_column_names_the_split_and_other_values_are_dead(configure, run, dead_letters):
    content = b"y,c,s\n1,a,train\n0,b,dev\n1,c,TEST\n0,d,holdout\n1,e,\n0,f,train\n"
    split = {"by": "column", "column": "s", "valid": ["dev"], "test": ["test", "TEST"], "fractions": None}
    config = configure({"log.csv": content}, data={"max_dead_fraction": 0.5}, split=split)
    manifest, folder = run(config)
    assert [manifest.rows(name) for name in ("train", "valid", "test")] == [2, 1, 1]
    found = [(letter["line"], letter["reason"], letter["detail"]) for letter in dead_letters(folder)]
    assert found == [
        (5, "unknown split", "s: 'holdout' is none of ['train', 'dev', 'test', 'TEST']"),
        (6, "unknown split", "s: '' is none of ['train', 'dev', 'test', 'TEST']"),
    ]


def test_a_share_of_train_moves_to_valid_by_the_hash_of_the_record(configure, run):
    content = b"y,c,s\n" + b"".join(b"%d,c%d,train\n" % (i % 2, i) for i in range(2000)) + b"1,t,test\n" * 50
    split = {"by": "column", "column": "s", "valid_fraction": 0.1, "fractions": None}
    manifest, _ = run(configure({"log.csv": content}, split=split))
    assert manifest.rows("test") == 50
    assert manifest.rows("train") + manifest.rows("valid") == 2000
    assert manifest.rows("valid") == pytest.approx(200, abs=50)


SHARES = Fractions(train=0.8, valid=0.1, test=0.1)


@pytest.mark.parametrize(
    ("times", "counts", "shares", "cuts"),
    [
        (list(range(10)), [1] * 10, SHARES, [8, 9]),
        ([0, 5, 9], [80, 10, 10], SHARES, [5, 9]),
        ([0, 1], [50, 50], SHARES, [2, 2]),
        ([7], [100], SHARES, [8, 8]),
        ([], [], SHARES, [0, 0]),
        ([0, 1, 2, 3], [1, 1, 1, 1], Fractions(train=1.0, valid=0.0, test=0.0), [4, 4]),
        ([0, 1, 2, 3], [1, 1, 1, 1], Fractions(train=0.5, valid=0.0, test=0.5), [2, 2]),
        ([0, 1, 2], [1000, 10, 10], Fractions(train=0.01, valid=0.0, test=0.99), [0, 0]),
    ],
)
def test_cut_points_never_divide_a_second(times, counts, shares, cuts):
    assert find_cut_points(np.array(times, np.int64), np.array(counts, np.int64), shares) == cuts


def test_a_cut_point_belongs_to_the_later_split():
    assert split_by_time(np.array([0, 7, 8, 9, 100]), [8, 9]).tolist() == [0, 0, 1, 2, 2]


def test_a_time_split_puts_the_past_before_the_future(configure, run):
    order = np.random.default_rng(0).permutation(1000)
    content = b"y,c,t\n" + b"".join(b"%d,c%d,%d\n" % (i % 2, i, i) for i in order)
    config = configure({"log.csv": content}, schema={"time": {"column": "t"}}, split={"by": "time", "fractions": None})
    manifest, folder = run(config)
    assert manifest.cut_points == [800, 900]
    assert [labels(folder, split).time.tolist() for split in ("train", "valid", "test")] == [
        list(range(800)),
        list(range(800, 900)),
        list(range(900, 1000)),
    ]
