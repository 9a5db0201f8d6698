import math

import numpy as np
import pytest

from training.data.manifest import Manifest
from training.data.moments import Moments, merge_moments
from training.data.shards import ShardReader
from training.data.signs import sign_of
from training.data.transforms import bucket_indices, quantile_boundaries


def preprocessed(run, config):
    manifest, folder = run(config)
    with ShardReader.open(folder, "train") as reader:
        return manifest, reader.read(0, reader.rows)


def test_dense_features_are_filled_then_transformed_in_order(configure, run):
    content = b"y,c,x,w\n1,a,1,-3\n0,a,,0\n1,a,7,\n0,a,4,-1\n"
    dense = [
        {"name": "raw", "column": "x", "fill": -5.0},
        {"name": "mean", "column": "x"},
        {"name": "log", "column": "w", "fill": 0.0, "transforms": ["log1p"]},
        {"name": "scaled", "column": "x", "transforms": ["standardise"]},
        {"name": "both", "column": "w", "fill": 2.0, "transforms": ["log1p", "standardise"]},
        {"name": "late", "column": "x", "transforms": ["standardise", "log1p"]},
    ]
    manifest, batch = preprocessed(run, configure({"log.csv": content}, schema={"dense": dense}))
    x, w = np.array([1, 4, 7, 4.0]), np.array([-3, 0, 2, -1.0])

    def log(values):
        return np.sign(values) * np.log1p(np.abs(values))

    def scale(values):
        return (values - values.mean()) / values.std()

    expected = [np.array([1, -5, 7, 4]), x, log(np.array([-3, 0, 0, -1])), scale(x), scale(log(w)), log(scale(x))]
    np.testing.assert_allclose(batch.dense, np.stack(expected, axis=1), rtol=1e-6, atol=1e-7)
    by_name = {transform.name: transform for transform in manifest.dense}
    assert (by_name["mean"].fill, by_name["both"].fill, by_name["raw"].mean, by_name["raw"].std) == (4.0, 2.0, 0.0, 1.0)
    assert by_name["both"].mean == pytest.approx(log(w).mean())


def test_a_constant_or_absent_feature_is_not_divided_by_zero(configure, run):
    content = b"y,c,x,w\n1,a,5,\n0,a,5,\n"
    dense = [{"name": "x", "transforms": ["standardise"]}, {"name": "w", "transforms": ["log1p", "standardise"]}]
    _, batch = preprocessed(run, configure({"log.csv": content}, schema={"dense": dense}))
    assert batch.dense.tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_only_the_train_split_is_fitted(configure, run):
    content = b"y,c,x,s\n1,a,1,train\n0,a,3,train\n1,a,1000,test\n0,a,,test\n"
    schema = {"dense": [{"name": "x", "transforms": ["standardise"]}]}
    config = configure({"log.csv": content}, schema=schema, split={"by": "column", "column": "s", "fractions": None})
    manifest, folder = run(config)
    with ShardReader.open(folder, "test") as reader:
        assert reader.read(0, 2).dense.tolist() == [[998.0], [0.0]]
    assert (manifest.dense[0].mean, manifest.dense[0].std) == (2.0, 1.0)


def test_buckets_become_ids_and_missing_is_an_id_of_its_own(configure, run):
    content = b"y,c,x\n1,a,-1\n0,a,0\n1,a,9.9\n0,a,10\n1,a,\n0,a,1e9\n"
    slots = [{"name": "x", "bucketise": {"boundaries": [0.0, 10.0]}}]
    manifest, batch = preprocessed(run, configure({"log.csv": content}, schema={"categorical": slots}))
    assert batch.signs[:, 0].tolist() == [sign_of(text, "x") for text in ("0", "1", "1", "2", "", "2")]
    assert manifest.slots[0].boundaries == [0.0, 10.0]
    assert manifest.splits["train"].slots["x"].top == [("1", 2), ("2", 2), ("", 1), ("0", 1)]


def test_quantile_buckets_are_equally_filled(configure, run):
    rows = b"".join(b"%d,a,%d\n" % (i % 2, i * i) for i in range(100))
    slots = [{"name": "x", "bucketise": {"quantiles": 4}}]
    manifest, batch = preprocessed(run, configure({"log.csv": b"y,c,x\n" + rows}, schema={"categorical": slots}))
    assert manifest.slots[0].boundaries == [625.0, 2500.0, 5625.0]
    assert sorted(np.unique(batch.signs, return_counts=True)[1].tolist()) == [25, 25, 25, 25]


@pytest.mark.parametrize(
    ("values", "counts", "buckets", "expected"),
    [
        ([], [], 4, []),
        ([5.0], [9], 4, []),
        ([1.0, 2.0], [1, 1], 2, [2.0]),
        ([1.0, 2.0, 3.0], [100, 1, 1], 4, []),
        ([1.0, 2.0, 3.0], [1, 1, 100], 4, [3.0]),
        ([1.0, 2.0, 3.0, 4.0], [1, 1, 1, 1], 2, [3.0]),
    ],
)
def test_quantile_boundaries(values, counts, buckets, expected):
    assert quantile_boundaries(np.array(values), np.array(counts, np.int64), buckets) == expected


def test_bucket_indices_put_a_boundary_into_the_upper_bucket():
    assert bucket_indices(np.array([-math.inf, 0.9, 1.0, 1.5, 2.0, math.nan]), [1.0, 2.0]).tolist() == [0, 0, 1, 1, 2, 3]


def test_long_lists_are_cut_and_counted(configure, run):
    content = b"y,c\n1,a|b|c|d\n0,\n1,e\n0,f|g|h\n"
    slots = [{"name": "c", "separator": "|", "max_ids": 2}]
    manifest, batch = preprocessed(run, configure({"log.csv": content}, schema={"categorical": slots}))
    (bag,) = batch.bags
    assert bag.offsets.tolist() == [0, 2, 2, 3, 5]
    assert bag.values.tolist() == [sign_of(text, "c") for text in "abefg"]
    statistics = manifest.splits["train"].slots["c"]
    assert (statistics.rows, statistics.missing, statistics.ids, statistics.distinct, statistics.dropped) == (4, 1, 5, 5, 3)


def test_slots_of_one_group_share_signs_and_others_do_not(configure, run):
    content = b"y,c,d,e\n1,v,v,v\n0,v,v,v\n"
    config = configure(
        {"log.csv": content}, schema={"categorical": [{"name": n} for n in "cde"]}, embedding={"groups": {"shared": ["c", "d"]}}
    )
    _, batch = preprocessed(run, config)
    assert batch.signs[0].tolist() == [sign_of("v", "shared"), sign_of("v", "shared"), sign_of("v", "e")]


def test_merged_moments_equal_those_of_all_numbers():
    numbers = np.random.default_rng(0).normal(1e6, 3, 1000)
    numbers[::7] = np.nan
    present = numbers[~np.isnan(numbers)]
    merged = merge_moments(Moments.of(part) for part in np.split(numbers, [10, 10, 400]))
    assert (merged.count, merged.minimum, merged.maximum) == (len(present), present.min(), present.max())
    assert merged.mean == pytest.approx(present.mean(), rel=1e-12)
    assert merged.std == pytest.approx(present.std(), rel=1e-9)
    assert Moments.of(np.array([1.0, 3.0])).with_copies(5.0, 2).mean == 3.5


def test_the_manifest_repeats_the_features(configure, run):
    config = configure({"log.csv": b"y,c,x\n1,a,1\n"}, schema={"dense": [{"name": "x"}]})
    manifest, folder = run(config)
    assert Manifest.load(folder) == manifest
    assert [(slot.name, slot.group) for slot in manifest.slots] == [("c", "c")]
