import json

import numpy as np
import pytest

from training.config_file import load_config
from training.data.preprocess import preprocess
from training.data.synth import bayes_metrics, synth
from training.events import EventLog

SETTINGS = {"rows": 5000, "seed": 3, "malformed": 0.02, "missing": 0.1, "alpha": 1.1, "ids_per_slot": 100}


def test_the_files_run_as_they_are_and_every_malformed_record_is_found(tmp_path):
    truth = synth(tmp_path, **SETTINGS)
    config = load_config(tmp_path / "satrap.yaml")
    with EventLog(tmp_path / "events.jsonl") as events:
        manifest = preprocess(config, tmp_path / "data", events=events)
    assert sum(truth.malformed_kinds.values()) == 100
    assert manifest.dead == truth.malformed_reasons
    assert sum(manifest.rows(split) for split in ("train", "valid", "test")) == 4900
    assert sum(statistics.positives for statistics in manifest.splits.values()) == truth.positives
    train = manifest.splits["train"]
    assert len(train.dense) == 13
    assert len(train.slots) == 26
    assert train.slots["C1"].missing / train.rows == pytest.approx(0.1, abs=0.03)
    assert train.dense["I1"].min == -1.0
    counts = [count for text, count in train.slots["C1"].top if text]
    assert counts[0] / counts[1] == pytest.approx(2**1.1, rel=0.25)


def test_equal_arguments_give_equal_files(tmp_path):
    for name in ("a", "b"):
        synth(tmp_path / name, **SETTINGS)
    other = SETTINGS | {"seed": 4}
    synth(tmp_path / "c", **other)
    text = {name: (tmp_path / name / "clicks.tsv").read_bytes() for name in "abc"}
    assert text["a"] == text["b"] != text["c"]
    assert json.loads((tmp_path / "a" / "truth.json").read_text())["seed"] == 3


@pytest.mark.parametrize("shape", [{"slots": 1, "dense": 0}, {"slots": 40, "dense": 2, "alpha": 0.0}, {"malformed": 0.0, "missing": 0.0}])
def test_any_shape_makes_a_legal_configuration(shape, tmp_path):
    truth = synth(tmp_path, **(SETTINGS | {"rows": 200} | shape))
    config = load_config(tmp_path / "satrap.yaml")
    assert len(config.schema_.categorical) == shape.get("slots", 26)
    assert truth.rows == 200


def test_bayes_metrics_are_what_drawn_labels_give_on_average():
    rng = np.random.default_rng(0)
    logits = rng.normal(-1, 1.3, 400)
    chance = 1 / (1 + np.exp(-logits))
    aucs, losses = [], []
    for _ in range(400):
        label = rng.random(400) < chance
        ranks = np.argsort(np.argsort(logits)) + 1
        positives = label.sum()
        aucs.append((ranks[label].sum() - positives * (positives + 1) / 2) / (positives * (400 - positives)))
        losses.append(-np.where(label, np.log(chance), np.log(1 - chance)).mean())
    auc, log_loss = bayes_metrics(logits)
    assert auc == pytest.approx(np.mean(aucs), abs=0.004)
    assert log_loss == pytest.approx(np.mean(losses), abs=0.004)
