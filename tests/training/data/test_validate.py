"""The validate stage: findings name feature, value, limit and remedy; reports exist whatever the outcome."""

import json
import shutil

import numpy as np
import pyarrow as pa
import pytest

from training.config import SPLITS, Config
from training.data import validation_checks
from training.data.manifest import DenseStatistics, DenseTransform, Manifest, ShardEntry, SlotStatistics, SlotTransform, SplitStatistics
from training.data.shards import Bag, ShardColumns, ShardReader, write_shard
from training.data.signs import sign_seed
from training.data.validate import validate
from training.data.validation_report import ValidationReport
from training.errors import ManifestError, ValidationError

EDGES = [-1.0, 0.0, 1.0, 10.0]
ROWS = {"train": 4000, "valid": 500, "test": 500}


def settings(**changes):
    tree = {
        "name": "clicks",
        "data": {"paths": ["x.csv"], "format": "csv"},
        "schema": {
            "label": {"column": "y"},
            "dense": [{"name": "age", "transforms": ["standardise"]}, {"name": "price", "column": "price_usd"}],
            "categorical": [
                {"name": "user"},
                {"name": "tags", "separator": "|"},
                {"name": "hour", "bucketise": {"boundaries": [6.0, 12.0]}},
            ],
        },
        "split": {"by": "hash"},
        "evaluation": {"slices": ["user"]},
    }
    return Config.model_validate(tree | changes)


def dense_statistics(rows, seed, *, shift=0.0, missing=0):
    values = np.random.default_rng(seed).normal(shift, 2, rows - missing)
    numbers = np.bincount(np.searchsorted(EDGES, values, side="right"), minlength=len(EDGES) + 1)
    return DenseStatistics(
        rows=rows,
        missing=missing,
        mean=float(values.mean()),
        std=float(values.std()),
        min=float(values.min()),
        max=float(values.max()),
        edges=EDGES,
        counts=numbers.tolist(),
    )


def slot_statistics(signs, rows, *, known=None, missing=0):
    values, occurrences = np.unique(signs, return_counts=True)
    order = np.lexsort((values, -occurrences))[:20]
    return SlotStatistics(
        rows=rows,
        missing=missing,
        ids=len(signs),
        distinct=len(values),
        unseen=0 if known is None else int((~np.isin(signs, known)).sum()),
        dropped=0,
        top=[(f"id{values[i]}", int(occurrences[i])) for i in order],
        bucket_counts=np.bincount((signs >> np.uint64(58)).astype(np.int64), minlength=64).tolist(),
    )


def spread(ids):
    """Small numbers to signs all over the range, one to one."""
    return np.asarray(ids, np.uint64) * np.uint64(0x9E3779B97F4A7C15)


def make_data(folder, *, seed=0, users=(0, 200), shift=0.0, missing_age=0, positives=0.25, change=lambda tree: tree, rows=None):
    """A finished data directory with drawn ids; ``change`` edits the manifest's tree before it is written."""
    rng = np.random.default_rng(seed)
    rows = ROWS | (rows or {})
    splits, shards, train_ids = {}, [], {}
    for split in SPLITS:
        n = rows[split]
        user = spread(rng.integers(*users, n) if split != "test" else rng.integers(users[0], users[1] + 20, n))
        hour, tags = spread(rng.integers(1, 4, n)), spread(rng.integers(1, 9, 2 * n))
        for name, ids in (("user", user), ("tags", tags), ("hour", hour)):
            if split == "train":
                train_ids[name] = np.unique(ids)
        label = (np.arange(n) < positives * n).astype(np.int8)
        columns = ShardColumns(
            label,
            None,
            np.zeros((n, 2), np.float32),
            np.column_stack([user, hour]),
            {"tags": Bag(np.arange(n + 1, dtype=np.int64) * 2, tags)},
            {"user": pa.array([str(u) for u in user])},
        )
        (folder / split).mkdir(parents=True)
        if n:
            path = folder / split / "part-0.arrow"
            digest = write_shard(path, columns)
            shards.append(ShardEntry(file=f"{split}/part-0.arrow", split=split, rows=n, bytes=path.stat().st_size, digest=digest))
            slots = {
                name: slot_statistics(ids, n, known=train_ids[name], missing=0)
                for name, ids in (("user", user), ("tags", tags), ("hour", hour))
            }
            dense = {"age": dense_statistics(n, seed, missing=missing_age if split == "train" else 0)}
            dense["price"] = dense_statistics(n, seed + 1, shift=shift)
            splits[split] = SplitStatistics(rows=n, positives=int(label.sum()), dense=dense, slots=slots)
    (folder / "ids").mkdir()
    for name, ids in train_ids.items():
        np.save(folder / "ids" / f"{name}.npy", ids)
    manifest = Manifest(
        format_version=1,
        name="clicks",
        fingerprint=f"{seed}{shift}",
        feature_digest="f",
        sources=[],
        dense=[
            DenseTransform(name="age", fill=0.5, transforms=["standardise"], mean=0.5, std=2.0),
            DenseTransform(name="price", fill=0.0, transforms=[], mean=0.0, std=1.0),
        ],
        slots=[
            SlotTransform(name="user", group="user", hash_seed=sign_seed("user")),
            SlotTransform(name="tags", group="tags", hash_seed=sign_seed("tags")),
            SlotTransform(name="hour", group="hour", hash_seed=sign_seed("hour"), boundaries=[6.0, 12.0]),
        ],
        slice_columns=["user"],
        shards=shards,
        splits=splits,
        dead={"columns": 3},
    )
    tree = change(manifest.model_dump(mode="json"))
    (folder / "manifest.json").write_text(json.dumps(tree))
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


def found(report, check):
    return [finding for finding in report.findings if finding.check == check]


def limits(**validation):
    return settings(validation=validation)


def test_data_as_declared_passes_and_both_reports_are_written(data, tmp_path):
    report = validate(settings(), data, tmp_path / "report", previous=None)
    assert (report.status, report.findings) == ("passed", [])
    assert ValidationReport.model_validate_json((tmp_path / "report" / "report.json").read_bytes()) == report
    assert [feature.name for feature in report.features] == ["age", "price", "user", "tags", "hour"]
    assert report.splits["train"].rows == 4000
    assert report.splits["train"].positive_rate == 0.25
    html = (tmp_path / "report" / "report.html").read_text()
    assert "All checks passed." in html
    assert "Drift" not in html
    assert "Distributions in train" in html
    assert "previous run" not in html


def test_the_same_data_as_before_shows_no_drift_at_all(data, tmp_path):
    report = validate(settings(), data, tmp_path / "report", previous=data)
    assert report.status == "passed"
    for feature in report.features:
        assert feature.js_divergence == 0.0
        assert feature.psi == 0.0
        assert feature.unseen_by_previous in (0.0, None)
    assert "the same data as in the previous run" in (tmp_path / "report" / "report.html").read_text()


def test_what_preprocess_made_passes(configured, clicks_data, tmp_path):
    report = validate(configured(), clicks_data, tmp_path / "report", previous=clicks_data)
    assert report.findings == []
    assert [feature.name for feature in report.features] == ["price", "age", "user", "tags", "item"]
    assert all(feature.js_divergence == 0.0 for feature in report.features)
    assert [f.unseen_by_previous for f in report.features if f.kind == "categorical"] == [0.0] * 3


SCHEMAS = settings().to_dict()["schema"]


@pytest.mark.parametrize(
    ("schema", "feature", "words"),
    [
        ({"dense": SCHEMAS["dense"][::-1]}, None, "dense features: the data has the order ['age', 'price'], declared is ['price', 'age']"),
        ({"dense": SCHEMAS["dense"][:1]}, "price", "dense features: price is in the data but not declared"),
        ({"dense": [*SCHEMAS["dense"], {"name": "new"}]}, "new", "dense features: new is declared but not in the data"),
        ({"categorical": SCHEMAS["categorical"][:2]}, "hour", "slots: hour is in the data but not declared"),
        ({"dense": [{"name": "age"}, SCHEMAS["dense"][1]]}, "age", "made with transforms ['standardise'], declared []"),
        ({"dense": [SCHEMAS["dense"][0], {"name": "price", "fill": 7.0}]}, "price", "filled with 0, declared 7"),
        ({"categorical": [*SCHEMAS["categorical"][:2], {"name": "hour"}]}, "hour", "the data is bucketised, declared the other way"),
        (
            {"categorical": [*SCHEMAS["categorical"][:2], {"name": "hour", "bucketise": {"boundaries": [6.0]}}]},
            "hour",
            "bucket boundaries are [6.0, 12.0], declared [6.0]",
        ),
    ],
)
def test_data_of_another_schema_fails_naming_the_difference(data, tmp_path, schema, feature, words):
    with pytest.raises(ValidationError, match=r"satrap preprocess"):
        validate(settings(schema=SCHEMAS | schema), data, tmp_path / "report", previous=None)
    report = ValidationReport.model_validate_json((tmp_path / "report" / "report.json").read_bytes())
    assert report.status == "failed"
    assert any(words in finding.message and finding.feature == feature for finding in found(report, "schema")), report.findings


def test_other_groups_or_slices_fail(data, tmp_path):
    config = settings(embedding={"groups": {"shared": ["user", "tags"]}}, evaluation={"slices": ["hour"]})
    with pytest.raises(ValidationError) as caught:
        validate(config, data, tmp_path / "report", previous=None)
    assert "slot user: the data was made for group user, declared shared" in str(caught.value)
    assert "evaluation.slices declares ['hour']" in str(caught.value)
    assert "3 checks failed" in str(caught.value)


def test_signs_of_another_hash_fail(tmp_path):
    def other_seed(tree):
        tree["slots"][0]["hash_seed"] = 5
        return tree

    with pytest.raises(ValidationError, match="slot user: signs were made with hash seed 5"):
        validate(settings(), make_data(tmp_path / "d", change=other_seed), tmp_path / "report", previous=None)


def test_missing_truncated_and_miscounted_shards_fail(data, tmp_path):
    (data / "test" / "part-0.arrow").unlink()
    with (data / "valid" / "part-0.arrow").open("ab") as file:
        file.write(b"x")
    tree = json.loads((data / "manifest.json").read_text())
    tree["splits"]["train"]["rows"] = 3999
    (data / "manifest.json").write_text(json.dumps(tree))
    with pytest.raises(ValidationError) as caught:
        validate(settings(), data, tmp_path / "report", previous=None)
    for words in ("test/part-0.arrow is missing", "valid/part-0.arrow has", "shards of train hold 4000 records, statistics count 3999"):
        assert words in str(caught.value)


def test_an_unfinished_data_directory_is_refused(tmp_path):
    with pytest.raises(ManifestError, match="not a finished data directory"):
        validate(settings(), tmp_path, tmp_path / "report", previous=None)


@pytest.mark.parametrize(
    ("validation", "status"),
    [
        ({"missing_rate": {"warn": 0.2, "fail": 0.5}}, "warned"),
        ({"missing_rate": {"warn": 0.1, "fail": 0.2}}, "failed"),
        ({"missing_rate": {"warn": 0.25, "fail": 0.5}}, "passed"),
        ({"missing_rate": {"warn": None, "fail": None}}, "passed"),
    ],
)
def test_limits_bind_above_not_at_them_and_null_switches_off(tmp_path, validation, status):
    data = make_data(tmp_path / "d", missing_age=1000)
    if status == "failed":
        with pytest.raises(ValidationError) as caught:
            validate(limits(**validation), data, tmp_path / "report", previous=None)
        assert "age: missing rate is 0.25, above validation.missing_rate.fail 0.2; look at column 'age'" in str(caught.value)
    else:
        validate(limits(**validation), data, tmp_path / "report", previous=None)
    report = ValidationReport.model_validate_json((tmp_path / "report" / "report.json").read_bytes())
    assert report.status == status
    if status != "passed":
        [finding] = found(report, "missing_rate")
        assert (finding.feature, finding.value, finding.severity) == ("age", 0.25, "fail" if status == "failed" else "warn")
        assert finding.threshold == 0.2


def test_too_few_train_records_fail(data, tmp_path):
    with pytest.raises(ValidationError, match=r"train has 4000 records, below validation.min_train_rows 5000; give more data\.paths"):
        validate(limits(min_train_rows=5000), data, tmp_path / "report", previous=None)


def test_one_class_fails_in_train_and_empty_splits_warn(tmp_path):
    data = make_data(tmp_path / "d", positives=0.0, rows={"valid": 0})
    with pytest.raises(ValidationError, match=r"all 4000 labels of train are 0; check schema\.label"):
        validate(settings(), data, tmp_path / "report", previous=None)
    report = ValidationReport.model_validate_json((tmp_path / "report" / "report.json").read_bytes())
    assert [(f.severity, f.message[:17]) for f in found(report, "one_class")] == [
        ("fail", "all 4000 labels o"),
        ("warn", "all 500 labels of"),
    ]
    assert "valid has no records" in found(report, "empty_split")[0].message


def test_unseen_ids_of_test_are_judged_by_occurrences(data, tmp_path):
    report = validate(limits(unseen_id_rate={"warn": 0.01, "fail": None}), data, tmp_path / "report", previous=None)
    [finding] = found(report, "unseen_id_rate")
    expected = Manifest.load(data).splits["test"].slots["user"]
    assert finding.feature == "user"
    assert finding.value == expected.unseen / expected.ids
    assert 0.05 < finding.value < 0.15


def test_a_feature_with_one_value_is_pointed_out(tmp_path):
    def constant(tree):
        tree["splits"]["train"]["dense"]["price"] |= {"min": 3.0, "max": 3.0}
        tree["splits"]["train"]["slots"]["hour"]["distinct"] = 1
        return tree

    report = validate(settings(), make_data(tmp_path / "d", change=constant), tmp_path / "report", previous=None)
    assert [finding.feature for finding in found(report, "constant")] == ["price", "hour"]


def test_drift_of_a_numeric_feature_names_feature_value_and_limit(data, tmp_path):
    now = make_data(tmp_path / "now", seed=5, shift=4.0)
    config = limits(js_divergence={"warn": 0.1, "fail": 0.2})
    with pytest.raises(
        ValidationError, match=r"price: Jensen-Shannon divergence in bits .* above validation.js_divergence.fail 0.2; .*'price_usd'"
    ):
        validate(config, now, tmp_path / "report", previous=data)
    report = ValidationReport.model_validate_json((tmp_path / "report" / "report.json").read_bytes())
    assert {finding.feature for finding in (*found(report, "js_divergence"), *found(report, "psi"))} == {"price"}
    age = report.features[0]
    assert 0 < age.js_divergence < 0.01
    assert age.psi < 5 * age.psi_noise


def test_ids_the_previous_run_never_saw_are_judged(data, tmp_path):
    now = make_data(tmp_path / "now", seed=5, users=(100, 300))
    report = validate(settings(), now, tmp_path / "report", previous=data)
    [finding] = found(report, "unseen_by_previous")
    assert finding.feature == "user"
    assert finding.value == pytest.approx(0.5, abs=0.03)
    assert "above validation.unseen_id_rate.warn 0.3" in finding.message
    by_name = {feature.name: feature.unseen_by_previous for feature in report.features}
    assert by_name["tags"] == by_name["hour"] == 0.0
    assert by_name["age"] is None


def test_unseen_ids_are_counted_exactly_where_all_records_are_looked_at(data, tmp_path, monkeypatch):
    monkeypatch.setattr(validation_checks, "BLOCK_ROWS", 999)
    now = make_data(tmp_path / "now", seed=5, users=(150, 260))
    report = validate(settings(), now, tmp_path / "report", previous=data)
    with ShardReader.open(now, "train") as reader:
        users = reader.read(0, reader.rows).signs[:, 0]
    expected = float(np.mean(~np.isin(users, np.load(data / "ids" / "user.npy"))))
    assert next(f.unseen_by_previous for f in report.features if f.name == "user") == expected


def test_large_data_is_sampled_evenly_from_end_to_end(data, monkeypatch):
    monkeypatch.setattr(validation_checks, "BLOCK_ROWS", 10)
    monkeypatch.setattr(validation_checks, "SAMPLE_BLOCKS", 3)
    blocks = list(validation_checks._sampled_signs(settings(), data))
    with ShardReader.open(data, "train") as reader:
        users = reader.read(0, reader.rows).signs[:, 0]
    assert [block["user"].tolist() for block in blocks] == [users[start : start + 10].tolist() for start in (0, 1990, 3990)]
    assert len(blocks[0]["tags"]) == 20


def test_changes_of_missing_and_positive_rate_are_judged(data, tmp_path):
    now = make_data(tmp_path / "now", seed=0, missing_age=400, positives=0.4)
    report = validate(settings(), now, tmp_path / "report", previous=data)
    [missing] = found(report, "missing_rate_change")
    assert (missing.feature, missing.value) == ("age", 0.1)
    assert "from 0 to 0.1" in missing.message
    [label] = found(report, "label_rate_change")
    assert label.value == pytest.approx(0.15)
    assert label.threshold == 0.05


def test_new_gone_and_changed_features_are_findings_not_crashes(data, tmp_path):
    def earlier(tree):
        tree["dense"][0]["name"] = "old_age"
        for split in tree["splits"].values():
            split["dense"]["old_age"] = split["dense"].pop("age")
        tree["slots"][0] |= {"group": "people", "hash_seed": sign_seed("people")}
        tree["splits"]["train"]["dense"]["price"]["edges"] = [0.0, 1.0, 2.0, 3.0]
        return tree

    before = make_data(tmp_path / "before", change=earlier)
    report = validate(settings(), data, tmp_path / "report", previous=before)
    assert report.status == "warned"
    changed = {finding.feature: finding.message for finding in found(report, "features_changed")}
    assert set(changed) == {"age", "old_age", "user", "price"}
    assert "new" in changed["age"]
    assert "gone" in changed["old_age"]
    assert "slot of group people" in changed["user"]
    assert "other buckets" in changed["price"]
    by_name = {feature.name: feature for feature in report.features}
    assert by_name["user"].js_divergence is None
    assert by_name["tags"].js_divergence == 0.0


def test_a_previous_run_that_cannot_be_read_is_a_warning(data, tmp_path):
    shutil.copytree(data, tmp_path / "broken")
    (tmp_path / "broken" / "manifest.json").write_text("{")
    for previous in (tmp_path / "broken", tmp_path / "gone"):
        report = validate(settings(), data, tmp_path / "report", previous=previous)
        assert [finding.check for finding in report.findings] == ["previous_run"]
        assert "manifest.json" in report.findings[0].message


def test_a_previous_run_without_id_files_is_compared_in_the_rest(data, tmp_path):
    before = make_data(tmp_path / "before", seed=9)
    shutil.rmtree(before / "ids")
    report = validate(settings(), data, tmp_path / "report", previous=before)
    assert all(feature.unseen_by_previous is None for feature in report.features)
    assert all(feature.js_divergence is not None for feature in report.features)


def test_a_small_sample_is_told_apart_from_drift(tmp_path):
    data, before = make_data(tmp_path / "d", seed=1, rows={"train": 60}), make_data(tmp_path / "b", seed=2, rows={"train": 60})
    report = validate(limits(unseen_id_rate={"warn": None, "fail": None}), data, tmp_path / "report", previous=before)
    [user] = [finding for finding in found(report, "psi") if finding.feature == "user"]
    assert "sampling noise alone gives about" in user.message


def test_texts_from_the_data_cannot_become_markup(tmp_path):
    def nasty(tree):
        tree["splits"]["train"]["slots"]["user"]["top"] = [["<img src=x onerror=1>$x$", 50], ["", 3]]
        tree["dead"] = {"<b>": 1}
        return tree

    data = make_data(tmp_path / "d", change=nasty)
    validate(settings(), data, tmp_path / "report", previous=make_data(tmp_path / "b", seed=1))
    html = (tmp_path / "report" / "report.html").read_text()
    assert "<img" not in html
    assert "<b>" not in html
