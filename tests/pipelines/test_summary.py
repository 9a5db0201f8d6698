"""What the report of a run says."""

import json

import pytest

from pipelines.runs import begin
from pipelines.summary import metrics_table, run_report
from training.config_file import parse_config
from training.evaluation_record import EvaluationRecord, ModelScore

KEY = "0123456789abcdef" * 4


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A finished run below the current directory: its record and directory."""
    monkeypatch.chdir(tmp_path)
    tree = {
        "name": "m",
        "data": {"paths": ["/a.csv"], "format": "csv"},
        "schema": {"label": {"column": "y"}, "categorical": [{"name": "a"}]},
        "split": {"by": "hash"},
        "output": {"root": "out"},
    }
    record, run_dir = begin(parse_config(json.dumps(tree)), ir_digest="0")
    data = tmp_path / "out" / "data" / KEY
    data.mkdir(parents=True)
    record.paths["data"] = str(data)
    for stage in ("train", "evaluate"):
        (run_dir / stage / "tensorboard").mkdir(parents=True)
    record.end("succeeded")
    return record, run_dir


def test_the_report_names_the_tensorboard_logs_and_the_command_that_opens_them(run):
    record, run_dir = run
    lines = run_report(record, run_dir).splitlines()
    at = lines.index(f"TensorBoard  out/runs/{record.id}/train/tensorboard")
    assert lines[at + 1].split() == [f"out/runs/{record.id}/evaluate/tensorboard"]
    assert lines[at + 2].startswith("to open it   ")
    assert lines[at + 2].endswith(f"tensorboard {record.id} --root out")


def test_the_data_directory_is_shown_short_as_long_as_that_is_unambiguous(run, tmp_path):
    record, run_dir = run
    assert "data         out/data/0123456789ab*" in run_report(record, run_dir).splitlines()
    (tmp_path / "out" / "data" / f"0123456789ab{'0' * 52}").mkdir()
    assert f"data         out/data/{KEY}" in run_report(record, run_dir).splitlines()


def test_a_metric_without_a_value_is_a_row_with_its_reason(run):
    record, run_dir = run
    record.metrics["evaluate"] = {"log_loss": 0.25}
    score = ModelScore(
        checkpoint="/c",
        checkpoint_digest="0",
        step=1,
        metrics={"auc": None, "log_loss": 0.25, "normalized_entropy": None, "calibration": 1.0},
        undefined={"auc": "all 5 labels are 0", "normalized_entropy": "all 5 labels are 0"},
    )
    evaluation = EvaluationRecord(
        format_version=1,
        name="m",
        config_digest="0",
        feature_digest="0",
        data_fingerprint="0",
        rows=5,
        positives=0,
        candidate=score,
        champion=None,
        slices=[],
    )
    (run_dir / "evaluate" / "evaluation.json").write_text(evaluation.model_dump_json())
    rows = [line.split(maxsplit=1) for line in run_report(record, run_dir).splitlines()]
    assert ["auc", "undefined: all 5 labels are 0"] in rows
    assert ["log_loss", "0.2500"] in rows


def test_a_table_of_metrics_takes_numbers_reasons_and_nothing():
    assert metrics_table({"a": {"auc": 0.5, "log_loss": "undefined: no records"}, "b": {"auc": None}}).splitlines() == [
        "METRIC    A                      B",
        "auc       0.5000                 -",
        "log_loss  undefined: no records  -",
    ]
