import json

import numpy as np
import pytest

from infra.plan.catalogue import machine_type
from infra.plan.costs import assumed
from infra.plan.plan import make_plan
from infra.plan.text import plan_text
from infra.plan.workload import Workload, different_ids
from training.config_file import parse_config
from training.data.manifest import FORMAT_VERSION, Manifest, SlotStatistics, SlotTransform, SplitStatistics
from training.dense.models import build_model
from training.errors import ManifestError

SLOTS = [{"name": "user"}, {"name": "item"}, {"name": "tags", "separator": "|", "max_ids": 30}, {"name": "age", "column": "a"}]


def config_of(*, dense=2, **sections):
    tree = {
        "name": "m",
        "data": {"paths": ["x.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "dense": [{"name": f"d{i}"} for i in range(dense)], "categorical": SLOTS},
        "split": {"by": "hash"},
        **sections,
    }
    return parse_config(json.dumps(tree))


def manifest_of(rows, names=("user", "item", "tags", "age"), **distinct):
    statistics = {
        name: SlotStatistics(rows=rows, missing=0, ids=rows * ids, distinct=count, unseen=0, dropped=0, top=[], bucket_counts=[0] * 64)
        for name, (ids, count) in distinct.items()
    }
    train = SplitStatistics(rows=rows, positives=1, dense={}, slots=statistics)
    slots = [SlotTransform(name=name, group=name, hash_seed=0) for name in names]
    empty = {"sources": [], "dense": [], "slots": slots, "slice_columns": [], "shards": [], "dead": {}}
    return Manifest(format_version=FORMAT_VERSION, name="m", fingerprint="f" * 64, feature_digest="d", splits={"train": train}, **empty)


@pytest.mark.parametrize("alpha", [0.0, 0.8, 1.0, 1.05, 1.5])
@pytest.mark.parametrize(("num_ids", "draws"), [(10, 50), (5000, 2000), (300_000, 4096)])
def test_different_ids_are_as_many_as_are_drawn(num_ids, draws, alpha):
    rng = np.random.default_rng(3)
    uniform = rng.random((max(40, 200_000 // draws), draws))
    if alpha == 0.0:
        ids = uniform * num_ids
    elif alpha == 1.0:
        ids = (num_ids + 1.0) ** uniform
    else:
        power = 1.0 - alpha
        ids = (1.0 + uniform * ((num_ids + 1.0) ** power - 1.0)) ** (1.0 / power)
    found = np.mean([len(np.unique(np.floor(row))) for row in ids])
    assert different_ids(num_ids, draws, alpha) == pytest.approx(found, rel=0.01)


def test_different_ids_at_the_edges():
    assert different_ids(1.0, 100.0, 1.05) == 1.0
    assert different_ids(1e12, 1.0, 1.05) == pytest.approx(1.0)
    assert different_ids(1e12, 1000.0, 0.0) == pytest.approx(1000.0, rel=1e-6)
    assert different_ids(3.0, 1e6, 1.05) == pytest.approx(3.0)


@pytest.mark.parametrize(
    "model",
    [
        {"name": "dnn", "hidden": [32, 8]},
        {"name": "dlrm", "hidden": [32, 8], "bottom_hidden": [6]},
        {"name": "deepfm", "hidden": [32, 8]},
    ],
)
@pytest.mark.parametrize("dense", [0, 2])
def test_the_layers_are_those_of_the_network(model, dense):
    if not dense:
        model = {key: value for key, value in model.items() if key != "bottom_hidden"}
    config = config_of(dense=dense, model=model)
    matrices = [p.numel() for name, p in build_model(config).named_parameters() if p.ndim == 2 and "linear" not in name]
    assert sorted(Workload.of(config).layers) == sorted(matrices)


def test_without_data_tables_are_full_and_shared_evenly():
    workload = Workload.of(config_of(embedding={"capacity_rows": 8000, "groups": {"g": ["user", "item"]}}))
    assert [slot.distinct for slot in workload.slots] == [8000 / 3] * 4
    assert [slot.ids_per_record for slot in workload.slots] == [1.0, 1.0, 30 * assumed("multi_valued_share"), 1.0]
    assert workload.distinct(0) == pytest.approx(8000)
    assert workload.records is workload.steps is None


def test_with_a_manifest_its_records_and_ids_are_taken():
    manifest = manifest_of(1000, user=(1, 700), item=(1, 90), tags=(5, 40), age=(1, 10))
    config = config_of(training={"batch_size": 100, "epochs": 2, "roles": {"nn_worker": 3}}, embedding={"groups": {"g": ["user", "item"]}})
    workload = Workload.of(config, manifest)
    assert [(slot.ids_per_record, slot.distinct) for slot in workload.slots] == [(1, 700), (1, 90), (5, 40), (1, 10)]
    assert workload.distinct(0) == 700 + 40 + 10
    assert workload.steps == 2 * 4
    assert Workload.of(config, manifest, records=100_000).steps == 2 * 334
    assert "ffffffffffff" in workload.source


def test_max_steps_bounds_a_run_and_stands_alone_without_data():
    config = config_of(training={"batch_size": 100, "max_steps": 7})
    assert Workload.of(config).steps == 7
    assert Workload.of(config, records=200).steps == 2
    assert Workload.of(config, records=10_000).steps == 7


def test_a_manifest_without_statistics_of_slots_still_gives_its_records():
    workload = Workload.of(config_of(), manifest_of(2000))
    assert workload.records == 2000
    assert workload.slots[0].distinct == workload.tables[0].capacity_rows / 4


def test_data_with_other_slots_are_refused():
    with pytest.raises(ManifestError, match=r"other slots than the configuration \(without age, tags; beside shop\)"):
        Workload.of(config_of(), manifest_of(2000, names=("user", "item", "shop")))


def test_more_different_signs_than_rows_are_pointed_out(tmp_path):
    (tmp_path / "manifest.json").write_text(manifest_of(1000, user=(1, 700), item=(1, 90), tags=(5, 40), age=(1, 10)).model_dump_json())
    machine = machine_type("c2-standard-8", where="here")
    small, large = (
        make_plan(config_of(embedding={"capacity_rows": rows}), data=tmp_path / "manifest.json", machine=machine) for rows in (600, 900)
    )
    assert "the train split has 840 different signs for 600 rows" in "\n".join(small.notes)
    assert "840 (71% fit)" in plan_text(small)
    assert "840 (all fit)" in plan_text(large)
    assert not [note for note in large.notes if "different signs" in note]


def test_a_batch_is_counted_in_ids_values_and_bytes():
    manifest = manifest_of(1000, user=(1, 1), item=(1, 1), tags=(5, 1), age=(1, 1))
    slots = {"tags": {"dim": 32}}
    config = config_of(training={"batch_size": 10}, embedding={"dim": 8, "slots": slots})
    batch = Workload.of(config, manifest).batch()
    assert (batch.ids, batch.expanded, batch.pooled) == (10 * 8, 10 * (3 * 8 + 5 * 32), 10 * (3 * 8 + 32))
    assert batch.unique == (3.0, 1.0)
    assert batch.unique_values == 3 * 8 + 32
    assert (batch.ids_bytes, batch.vector_bytes, batch.row_bytes, batch.dense_bytes) == (640, 1120, 112, 120)
    assert batch.network_bytes == 640 + 120 + 2 * 8 * 4 + 2 * (112 + 1120)
    wide = config_of(training={"batch_size": 10, "wire_dtype": "float32"}, embedding={"dim": 8, "slots": slots})
    assert Workload.of(wide, manifest).batch().vector_bytes == 2 * 1120
