"""The compiled pipeline in kfp.local, end to end, every stage real, on a small log."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from infra import processes
from infra.registry import Registry
from pipelines.cli import cli
from pipelines.runs import list_runs
from training.config_file import load_config

QUICK = ["training.epochs=1", "training.mode=hybrid", "evaluation.gate.max_calibration_error=null"]


def satrap(folder, *arguments, overrides=()):
    options = [text for override in overrides for text in ("--set", override)]
    command = [sys.executable, "-P", "-m", "pipelines.cli", *arguments, *options]
    environment = {**os.environ, processes.MARK: f"{folder}-test"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def two_runs(clicks_yaml, tmp_path_factory):
    """The same run twice under one root: the root's folder and what each printed."""
    folder = tmp_path_factory.mktemp("whole")
    overrides = [*QUICK, "output.root=out"]
    results = [satrap(folder, "run", str(clicks_yaml), overrides=overrides) for _ in range(2)]
    for result in results:
        assert result.returncode == 0, result.stdout + result.stderr
    return folder, results


def test_a_run_goes_from_raw_records_to_a_registered_model(two_runs, clicks_yaml):
    folder, _ = two_runs
    record, run_dir = list_runs(folder / "out")[0]
    assert record.status == "succeeded"
    assert {name: stage.status for name, stage in record.stages.items()} == dict.fromkeys(
        ["preprocess", "validate", "provision", "train", "evaluate", "register", "release"], "succeeded"
    )
    config = load_config(clicks_yaml, [*QUICK, "output.root=out"])
    assert record.config_digest == config.digest
    assert load_config(run_dir / "config.yaml") == config
    assert (record.version, record.promoted) == (1, True)
    versions = Registry(folder / "out" / "registry").versions("clicks")
    assert versions[0].record.run_id == record.id
    assert 0.5 < record.metrics["evaluate"]["auc"] < 1.0
    for name in ("data", "validation_report", "checkpoint", "report"):
        assert Path(record.paths[name]).exists(), name
    assert (run_dir / "release.json").exists()


def test_progress_and_results_are_told(two_runs):
    folder, (first, _) = two_runs
    record, _ = list_runs(folder / "out")[0]
    done = [line.split()[0] for line in first.stderr.splitlines() if " done " in line]
    assert done.index("preprocess") < done.index("validate") < done.index("train") < done.index("evaluate") < done.index("register")
    assert "local: nothing to provision" in first.stderr
    assert f"{record.metrics['evaluate']['auc']:.4f}" in first.stdout
    assert "clicks v1 is the champion" in first.stdout
    assert f"tensorboard {record.id} --root out" in first.stdout
    assert os.path.relpath(record.paths["report"], folder) in first.stdout


def test_the_second_run_reuses_the_data_says_so_and_starts_training_from_nothing(two_runs):
    folder, (_, second) = two_runs
    (first_record, _), (record, run_dir) = list_runs(folder / "out")
    fingerprint = json.loads((folder / record.paths["data"] / "manifest.json").read_text())["fingerprint"]
    (line,) = [line for line in second.stderr.splitlines() if line.startswith("preprocess reused")]
    assert "unchanged input" in line
    assert f"(fingerprint {fingerprint[:12]})" in line
    assert record.paths["data"] == first_record.paths["data"]
    arguments = json.loads((run_dir / "arguments.json").read_text())
    assert (arguments["resume"], arguments["previous"]) == ("", record.paths["data"])
    assert json.loads((run_dir / "train" / "checkpoint" / "manifest.json").read_text())["step"] > 0
    assert record.stages["train"].message.split()[0] == first_record.stages["train"].message.split()[0], "as many steps as from nothing"


def test_the_runs_are_listed_with_status_metrics_and_versions(two_runs):
    folder, _ = two_runs
    listed = satrap(folder, "runs", "--root", "out").stdout.splitlines()
    assert listed[0].split() == ["RUN", "STATUS", "STARTED", "SECONDS", "AUC", "LOG", "LOSS", "VERSION"]
    for line, (record, _) in zip(listed[1:], list_runs(folder / "out"), strict=True):
        assert line.startswith(f"{record.id}  succeeded")
        assert f"{record.metrics['evaluate']['auc']:.4f}" in line
    assert listed[1].endswith("v1 promoted")
    as_json = [json.loads(line) for line in satrap(folder, "runs", "--root", "out", "--json").stdout.splitlines()]
    assert [run["id"] for run in as_json] == [record.id for record, _ in list_runs(folder / "out")]


def test_a_failing_train_step_still_runs_release_and_fails_the_run(clicks_yaml, tmp_path):
    diverges = ["training.epochs=20", "training.dense_optimizer={name: sgd, learning_rate: 1.0e30}"]
    overrides = [*QUICK, "output.root=out", *diverges]
    result = satrap(tmp_path, "run", str(clicks_yaml), overrides=overrides)
    assert result.returncode == 1
    ((record, run_dir),) = list_runs(tmp_path / "out")
    assert (record.status, record.failed_stage) == ("failed", "train")
    assert {"evaluate", "register"}.isdisjoint(record.stages)
    assert record.stages["release"].status == "succeeded"
    released = json.loads((run_dir / "release.json").read_text())
    assert (released["outcome"], released["failed_stage"]) == ("failed", "train")
    assert "error: train: nn_worker-0: " in result.stderr
    assert "learning_rate" in result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    assert "failed: train" in satrap(tmp_path, "runs", "--root", "out").stdout
    assert processes.marked(run_dir) == []


def test_every_stage_runs_alone_on_paths(clicks_yaml, clicks_data, tmp_path, monkeypatch):
    for variable in (processes.MARK, "PYTHONSAFEPATH"):  # The verbs set them for the processes they start.
        monkeypatch.setenv(variable, "")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")

    def verb(*arguments):
        options = [text for override in [*QUICK, "output.root=out"] for text in ("--set", override)]
        result = CliRunner().invoke(cli, [*map(str, arguments), *options], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return result

    assert "preprocess done" in verb("preprocess", clicks_yaml, "-o", "data").stderr
    assert "preprocess reused" in verb("preprocess", clicks_yaml, "-o", "data").stderr
    assert (tmp_path / "data" / "manifest.json").read_bytes() == (clicks_data / "manifest.json").read_bytes()
    assert verb("validate", clicks_yaml, "data", "-o", "report", "--previous", clicks_data).stdout == "report/report.html\n"
    assert "METRIC" in verb("train", clicks_yaml, "data", "-o", "model").stdout
    assert "CANDIDATE" in verb("evaluate", clicks_yaml, "data", "model/checkpoint", "-o", "scores").stdout
    assert "clicks v1 is the champion" in verb("register", clicks_yaml, "model/checkpoint", "scores/evaluation.json").stderr
    champion = Registry(tmp_path / "out" / "registry").champion("clicks")
    assert champion.number == 1
