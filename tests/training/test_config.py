import json

import pytest
import yaml

from training.config import Config
from training.config_file import load_config, parse_config
from training.errors import ConfigError

GOOD = {
    "name": "m",
    "data": {"paths": ["a.csv"], "format": "csv"},
    "schema": {
        "label": {"column": "y"},
        "dense": [{"name": "d"}],
        "categorical": [{"name": "a"}, {"name": "b", "separator": "|", "pooling": "mean"}],
    },
    "split": {"by": "hash"},
}


@pytest.fixture
def write(tmp_path):
    def write_(tree):
        path = tmp_path / "satrap.yaml"
        path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
        return path

    return write_


def problems(path, *overrides):
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    return refused.value.problems


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("trainin.epochs=2", ["trainin: unknown key; did you mean 'training'?", "legal here: cluster, data, embedding"]),
        ("training.epoch=2", ["training.epoch: unknown key; did you mean 'epochs'?"]),
        ("training.epochs='2'", ["training.epochs: got '2', input should be a valid integer"]),
        ("training.epochs=0", ["training.epochs: got 0, input should be greater than 0"]),
        ("training.mode=asynk", ["training.mode: 'asynk' is not one of 'sync', 'hybrid' or 'async'"]),
        ("training.max_staleness=-1", ["training.max_staleness: got -1"]),
        ("training.roles.parameter_server=0", ["training.roles.parameter_server: got 0"]),
        ("data.format=xml", ["data.format: 'xml' is not one of 'csv', 'tsv', 'jsonl' or 'parquet'"]),
        ("data={paths: [a], format: tsv, delimiter: ;}", ["delimiter: only meaningful with format csv, not tsv"]),
        (
            "schema.time={column: t, format: iso}",
            ["schema.time.format: 'iso' is not one of epoch_seconds, epoch_milliseconds, iso8601, nor a"],
        ),
        ("data.paths=a.csv", ["data.paths: got 'a.csv', expected a list: write [a.csv]"]),
        ("data.header=false", ["columns: required when header is false"]),
        ("data.paths=[]", ["data.paths: got []"]),
        ("data.max_dead_fraction=1.5", ["data.max_dead_fraction: got 1.5, input should be less than or equal to 1"]),
        ("schema.categorical=[]", ["schema.categorical: got []"]),
        ("schema.categorical.0.name=d", ["feature names must differ, got ['d'] twice"]),
        ("schema.categorical.0.pooling=mean", ["pooling: only meaningful for a multi-valued slot"]),
        ("schema.dense.0.transforms=[log]", ["schema.dense.0.transforms.0: 'log' is not one of 'log1p' or 'standardise'"]),
        ("schema.dense.0.transforms=[log1p, log1p]", ["schema.dense.0.transforms: ['log1p', 'log1p'] repeats a transform"]),
        ("schema.dense.0.fill=1e39", ["schema.dense.0.fill: 1e+39 is not finite as float32"]),
        ("schema.dense.0.fill=.nan", ["schema.dense.0.fill: nan is not finite as float32"]),
        ("schema.categorical.0.max_ids=5", ["schema.categorical.0.max_ids: 5 only means something for a multi-valued slot; add separator"]),
        (
            "data={paths: [a], format: jsonl, header: false}",
            ["data.header: False has no effect on jsonl files, only on csv, tsv"],
        ),
        ("data={paths: [a], format: jsonl, quoting: false}", ["data.quoting: False has no effect on jsonl files"]),
        ("data={paths: [a], format: parquet, header: false}", ["data.header: False has no effect on parquet files"]),
        ("data={paths: [a], format: parquet, quoting: false}", ["data.quoting: False has no effect on parquet files"]),
        (
            "data={paths: [a], format: parquet, encoding: latin-1}",
            ["data.encoding: 'latin-1' has no effect on parquet files, only on csv, tsv, jsonl; remove it"],
        ),
        ("data={paths: [a], format: parquet, chunk_bytes: 4096}", ["data.chunk_bytes: 4096 has no effect on parquet files"]),
        ("split={by: time, salt: x}", ["split.salt: 'x' has no effect when by is time; use by: hash"]),
        ("split={by: column, column: c, salt: x}", ["split.salt: 'x' has no effect when by is column; use by: hash, or by: column with"]),
        ("training.averaging_period=8", ["training.averaging_period: 8 has no effect in mode hybrid; remove it or set mode: async"]),
        ("training.shuffle_window_shards=8", ["training.shuffle_window_shards: 8 has no effect without shuffle; remove it or set shuffle"]),
        (
            "embedding.initializer={kind: zeros, scale: 1.0}",
            ["embedding.initializer.scale: 1 has no effect with kind zeros; remove it"],
        ),
        ("embedding.slots={a: {dim: 1025}}", ["embedding.slots.a.dim: got 1025, input should be less than or equal to 1024"]),
        ("evaluation.min_slice_rows=7", ["evaluation.min_slice_rows: 7 has no effect without slices; remove it or name slots"]),
        ("split.by=time", ["split.by: time needs schema.time"]),
        ("split.by=column", ["column: required when by is column"]),
        ("split.fractions={train: 0.5, valid: 0.1, test: 0.1}", ["train + valid + test must be 1, got 0.7"]),
        (
            "embedding.optimizer={name: sgd, eps: 1e-5}",
            ["embedding.optimizer.eps: sgd has no such setting; it takes ['clip_norm'"],
        ),
        ("embedding.slots={zz: {dim: 8}}", ["embedding.slots.zz: no such slot; slots are ['a', 'b']"]),
        ("embedding.groups={g: [a, zz]}", ["embedding.groups.g: no slot 'zz'"]),
        ("embedding.groups={g: [a], h: [a]}", ["slot 'a' is in group 'g' already"]),
        ("embedding.capacity_rows=10", ["embedding.capacity_rows: got 10, input should be greater than or equal to 64"]),
        ("model={name: deepfm, hidden: [8], bottom_hidden: [8]}", ["model.bottom_hidden: only dlrm has a bottom MLP"]),
        ("evaluation.slices=[b]", ["evaluation.slices: 'b' is not a single-valued slot; choose from ['a']"]),
        ("evaluation.metrics=[auc, f1]", ["evaluation.metrics.1: 'f1' is not one of 'auc', 'log_loss'"]),
        ("validation.psi={warn: 0.5, fail: 0.1}", ["must not be below warn, got fail 0.1 < warn 0.5"]),
        ("name=bad name", ["name: got 'bad name'"]),
        ("output.root=''", ["output.root: got ''"]),
        ("nothing", ["--set nothing: expected path=value"]),
        ("name.x=1", ["--set name.x=1: name is the value 'm', not a section"]),
        ("data.paths.5=x", ["--set data.paths.5=x: '5' is not an index of a list of 1; use 0 to 0"]),
        ("training={", ["--set training={: the value is not valid YAML"]),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_the_legal_choices(write, override, told):
    found = problems(write(GOOD), override)
    for text in told:
        assert any(text in problem for problem in found), found


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "holds nothing; expected sections ['cluster', 'data', 'embedding'"),
        ("- a\n- b\n", "holds list; expected sections"),
        ("a: [", "not valid YAML"),
        ("name: a\nname: b\n", "key 'name' is given twice"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(write, text, told):
    (problem,) = problems(write(text))
    assert told in problem


def test_a_missing_file_is_named(tmp_path):
    (problem,) = problems(tmp_path / "nowhere.yaml")
    assert "nowhere.yaml: no such file; give the path of a YAML file" in problem


def test_all_problems_come_at_once(write):
    tree = {**GOOD, "training": {"epochs": 0, "mode": "x"}, "extra": 1}
    assert len(problems(write(tree))) == 3


def test_missing_sections_are_named(write):
    assert problems(write({"name": "m"})) == [f"{section}: required but not given" for section in ("data", "schema", "split")]


def test_overrides_are_applied_in_order_and_reach_into_lists_and_absent_sections(write):
    config = load_config(
        write(GOOD), ["training.epochs=2", "training.epochs=3", "schema.categorical.0.name=z", "embedding.optimizer.eps=1e-5"]
    )
    assert config.training.epochs == 3
    assert [slot.name for slot in config.schema_.categorical] == ["z", "b"]
    assert config.embedding.optimizer.eps == 1e-5


def test_data_paths_are_relative_to_the_file(write, tmp_path):
    assert load_config(write(GOOD)).data.paths == [str(tmp_path / "a.csv")]
    assert load_config(write(GOOD), ["data.paths=[/x/b.csv, gs://bucket/c]"]).data.paths == ["/x/b.csv", "gs://bucket/c"]


def test_json_with_all_defaults_or_only_what_was_set_reads_back_to_the_same_tree(write):
    config = load_config(write(GOOD), ["embedding.optimizer={name: sgd}"])
    for text in (config.to_json(), config.model_dump_json(by_alias=True, exclude_unset=True)):
        again = parse_config(text)
        assert again == config
        assert again.digest == config.digest
    assert json.loads(config.to_json()) == config.to_dict()


def test_the_shown_yaml_is_a_configuration_again(write):
    config = load_config(write(GOOD))
    assert load_config(write(yaml.safe_dump(config.to_dict(), sort_keys=False))) == config


def test_text_that_is_no_json_is_refused():
    with pytest.raises(ConfigError, match="not valid JSON"):
        parse_config("{")


def test_the_tree_cannot_be_changed(write):
    config = load_config(write(GOOD))
    with pytest.raises(ValueError, match="frozen"):
        config.name = "other"


@pytest.mark.parametrize(
    "overrides",
    [
        ["training.mode=async", "training.averaging_period=8"],
        ["training.shuffle=true", "training.shuffle_window_shards=8"],
        ["training.averaging_period=16", "training.shuffle_window_shards=4", "evaluation.min_slice_rows=50"],
        ["evaluation.slices=[a]", "evaluation.min_slice_rows=7"],
        ["schema.categorical.1.max_ids=5"],
        ["split={by: column, column: c, valid_fraction: 0.1, salt: x}"],
        ["split={by: hash, salt: x}"],
        ["data={paths: [a], format: jsonl, encoding: latin-1, chunk_bytes: 4096}"],
        ["embedding.slots={a: {dim: 1024}}"],
        ["embedding.initializer={kind: zeros}"],
    ],
)
def test_settings_that_have_an_effect_or_are_the_default_are_accepted_and_read_back(write, overrides):
    config = load_config(write(GOOD), overrides)
    assert parse_config(config.to_json()) == config


def test_mode_sync_means_staleness_zero(write):
    assert load_config(write(GOOD), ["training.mode=sync", "training.max_staleness=8"]).training.staleness_bound == 0
    assert load_config(write(GOOD), ["training.max_staleness=8"]).training.staleness_bound == 8


def fields(model, path=""):
    from training.config_file import _section_of

    for name, field in model.model_fields.items():
        yield f"{path}{name}", field
        if section := _section_of(field.annotation):
            yield from fields(section, f"{path}{name}.")


def test_every_value_is_documented():
    from pydantic import BaseModel

    for path, field in fields(Config):
        is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        assert field.description or is_section, path


def test_the_resolved_configuration_shows_the_shares_in_force(write):
    assert load_config(write(GOOD)).to_dict()["split"]["fractions"] == {"train": 0.8, "valid": 0.1, "test": 0.1}
