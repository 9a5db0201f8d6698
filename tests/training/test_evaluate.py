"""The evaluate stage: what is measured, recorded, compared and drawn, and that it changes nothing."""

import json
import math
import subprocess
import sys
import threading

import numpy as np
import pyarrow as pa
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training import evaluate as stage
from training.checkpoint import CheckpointManifest, digests, newest_checkpoint
from training.config import Config
from training.data.manifest import Manifest, ShardEntry, SplitStatistics
from training.data.shards import ShardColumns, ShardReader, write_shard
from training.errors import CheckpointError, DataError, SatrapError
from training.evaluate import evaluate, score_split
from training.evaluation_record import EvaluationRecord, checkpoint_digest
from training.evaluation_slices import SliceValues, slice_scores
from training.events import read_events
from training.in_process import in_process_trainer
from training.metrics import binary_metrics
from training.scorer import Scorer

ROWS = 1000


def settings(split=None, **evaluation):
    return Config.model_validate(
        {
            "name": "clicks",
            "data": {"paths": ["x.csv"], "format": "csv"},
            "schema": {"label": {"column": "y"}, "dense": [{"name": "x"}], "categorical": [{"name": "user"}, {"name": "country"}]},
            "split": split or {"by": "hash"},
            "evaluation": {"batch_size": 300, "slices": ["country"], **evaluation},
        }
    )


def make_data(folder, *, rows=ROWS, positives=None, feature_digest="f"):
    """A data directory whose test split has the true logit as its only dense feature, in shards of 400 records."""
    rng = np.random.default_rng(7)
    logit = rng.normal(-1, 1.5, rows)
    label = (rng.random(rows) < 1 / (1 + np.exp(-logit))).astype(np.int8) if positives is None else np.full(rows, positives, np.int8)
    country = rng.choice(["de", "fr", "", "<b>$x$</b>", "nz", "is"], rows, p=[0.5, 0.3, 0.1, 0.08, 0.01, 0.01])
    (folder / "test").mkdir(parents=True)
    shards = []
    for start in range(0, rows, 400):
        part = slice(start, min(start + 400, rows))
        n = part.stop - part.start
        signs = np.arange(2 * n, dtype=np.uint64).reshape(n, 2)
        dense = logit[part, None].astype(np.float32)
        columns = ShardColumns(label[part], None, dense, signs, {}, {"country": pa.array(country[part].tolist())})
        name = f"test/part-{start}.arrow"
        digest = write_shard(folder / name, columns)
        shards.append(ShardEntry(file=name, split="test", rows=n, bytes=(folder / name).stat().st_size, digest=digest))
    manifest = Manifest(
        format_version=1,
        name="clicks",
        fingerprint="d" * 64,
        feature_digest=feature_digest,
        sources=[],
        dense=[],
        slots=[],
        slice_columns=["country"],
        shards=shards,
        splits={"test": SplitStatistics(rows=rows, positives=int(label.sum()), dense={}, slots={})},
        dead={},
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


def make_checkpoint(folder, *, slope=1.0, offset=0.0, step=120, feature_digest="f"):
    """A checkpoint of the model ``slope * x + offset``, read by ``LinearScorer``."""
    folder.mkdir(parents=True)
    (folder / "model.json").write_text(json.dumps([slope, offset]))
    manifest = CheckpointManifest(
        format_version=1,
        name="clicks",
        step=step,
        best_step=None,
        steps_per_epoch=10,
        config_digest=f"{slope} {offset}",
        feature_digest=feature_digest,
        fingerprint="d",
        rows={},
        parts=[],
        metrics={},
        files={},
    )
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    return folder


class LinearScorer:
    """Scores with the first dense feature; stands in for the trained model, whose own tests are elsewhere."""

    loaded = 0

    def __init__(self, checkpoint):
        self._slope, self._offset = json.loads((checkpoint / "model.json").read_text())

    @classmethod
    def load(cls, checkpoint):
        return cls(checkpoint)

    def __enter__(self):
        assert LinearScorer.loaded == 0, "two models are never in memory together"
        LinearScorer.loaded += 1
        return self

    def __exit__(self, *error):
        LinearScorer.loaded -= 1

    def score(self, batch):
        return (self._slope * batch.dense[:, 0] + self._offset).astype(np.float32)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return make_data(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture
def linear(monkeypatch):
    monkeypatch.setattr(stage, "Scorer", LinearScorer)


@pytest.fixture
def run(linear, data, tmp_path, events):
    def go(config=None, *, champion=None, data=data, **model):
        checkpoint = make_checkpoint(tmp_path / "candidate", **model)
        return evaluate(config or settings(), data, checkpoint, tmp_path / "out", champion=champion, events=events)

    return go


def truth(data):
    with ShardReader.open(data, "test") as reader:
        batch = reader.read(0, reader.rows)
        return batch.dense[:, 0], batch.label, reader.slice_values("country", 0, reader.rows)


def test_metrics_are_those_of_all_test_records_at_once(run, data):
    result = run(slope=0.5, offset=0.2)
    x, y, _ = truth(data)
    expected = binary_metrics((0.5 * x + 0.2).astype(np.float32), y)
    assert result.metrics == expected
    assert result.record.candidate.metrics == expected
    assert (result.record.rows, result.record.positives) == (ROWS, int(y.sum()))
    assert result.record.candidate.step == 120
    assert 0 < result.record.candidate.average_precision < 1


def test_the_record_on_disk_is_the_one_returned_and_names_what_was_compared(run, data, tmp_path):
    result = run()
    record = EvaluationRecord.load(result.evaluation)
    assert record == result.record
    assert record.candidate.checkpoint_digest == checkpoint_digest(tmp_path / "candidate")
    assert (record.feature_digest, record.data_fingerprint, record.config_digest) == ("f", "d" * 64, settings().digest)
    assert record.champion is None


def test_only_configured_metrics_are_reported_but_all_are_recorded(run):
    result = run(settings(metrics=["log_loss"]))
    assert set(result.metrics) == {"log_loss"}
    assert set(result.record.candidate.metrics) == {"auc", "log_loss", "normalized_entropy", "calibration"}
    assert "Normalised entropy" not in result.report.read_text()


@pytest.mark.parametrize("batch_size", [1, 7, 399, 400, 100_000])
def test_batches_cannot_be_seen_in_the_result(data, batch_size):
    whole = score_all(data, ROWS)
    parts = score_all(data, batch_size)
    assert np.array_equal(whole.logits, parts.logits)
    assert np.array_equal(whole.labels, parts.labels)
    pairs = [[(v, p, rows.tolist()) for v, p, rows in scores.slices[0].groups(20)] for scores in (whole, parts)]
    assert pairs[0] == pairs[1]


def score_all(data, batch_size):
    done = []
    with ShardReader.open(data, "test") as reader:
        scores = score_split(lambda batch: batch.dense[:, 0], reader, batch_size=batch_size, slots=["country"], progress=done.append)
    assert sum(done) == ROWS
    return scores


def test_slices_are_measured_by_value_and_small_ones_pooled(run, data):
    x, y, country = truth(data)
    result = run(settings(min_slice_rows=int((country == "<b>$x$</b>").sum())))
    slices = {entry.value: entry for entry in result.record.slices}
    assert [entry.value for entry in result.record.slices] == ["de", "fr", "", "<b>$x$</b>", None]
    for value in ("de", "fr", "", "<b>$x$</b>"):
        mine = country == value
        assert slices[value].rows == mine.sum()
        assert slices[value].positives == y[mine].sum()
        assert slices[value].metrics == binary_metrics(x[mine], y[mine])
        assert slices[value].pooled_values == 0
    rare = np.isin(country, ["nz", "is"])
    assert (slices[None].rows, slices[None].pooled_values) == (rare.sum(), 2)
    assert sum(entry.rows for entry in result.record.slices) == ROWS


def test_a_slice_of_one_class_has_no_auc_and_no_made_up_number():
    values = SliceValues("s")
    values.add(np.array(["a", "b", "a", "b"]))
    labels, logits = np.int8([0, 1, 0, 0]), np.float32([1, 2, 3, 4])
    a, b = slice_scores(values, labels, logits, logits, min_rows=1)
    assert (a.value, a.metrics["auc"], a.metrics["calibration"]) == ("a", None, None)
    assert a.metrics["log_loss"] > 0
    assert b.metrics["auc"] == b.champion_metrics["auc"] == 0.0
    assert list(SliceValues("s").groups(1)) == []


def test_the_champion_is_scored_on_the_same_records(run, data, tmp_path):
    champion = make_checkpoint(tmp_path / "champion", slope=-1.0, step=60)
    result = run(champion=champion)
    x, y, country = truth(data)
    score = result.record.champion.score
    assert score.metrics == binary_metrics(-x, y)
    assert (score.checkpoint, score.step) == (str(champion), 60)
    assert result.record.champion.checkpoint_digest == checkpoint_digest(champion)
    german = next(entry for entry in result.record.slices if entry.value == "de")
    assert german.champion_metrics == binary_metrics(-x[country == "de"], y[country == "de"])
    html = result.report.read_text()
    assert "better" in html
    assert f"{score.metrics['auc']:.4f}" in html


def test_a_champion_with_other_features_is_recorded_with_the_reason_and_not_scored(run, tmp_path):
    champion = make_checkpoint(tmp_path / "champion", feature_digest="other")
    (champion / "model.json").unlink()
    result = run(champion=champion)
    assert result.record.champion.score is None
    assert "trained on other features" in result.record.champion.incomparable
    assert "not comparable" in result.report.read_text()
    assert all(entry.champion_metrics is None for entry in result.record.slices)


def test_a_missing_champion_is_an_error(run, tmp_path):
    with pytest.raises(CheckpointError, match="gone"):
        run(champion=tmp_path / "gone")


def test_a_candidate_with_other_features_is_refused(run):
    with pytest.raises(CheckpointError, match="trained on other features"):
        run(feature_digest="other")


@pytest.mark.parametrize(
    ("split", "remedy"),
    [
        ({"by": "hash"}, "set split.fractions.test above 0"),
        ({"by": "column", "column": "fold", "test": ["holdout"]}, r"let column 'fold' hold one of split.test \['holdout'\]"),
    ],
)
def test_an_empty_test_split_is_an_error_that_tells_how_to_get_one(run, tmp_path, split, remedy):
    data = make_data(tmp_path / "empty", rows=0)
    with pytest.raises(DataError, match=f"test split has no records.*{remedy}"):
        run(settings(split), data=data)


def test_slices_the_data_does_not_carry_are_refused(run):
    with pytest.raises(DataError, match=r"no values of slots \['user'\] for evaluation.slices; run `satrap preprocess` again"):
        run(settings(slices=["user"]))


@pytest.mark.parametrize(("positives", "reason"), [(0, "all 50 labels are 0"), (1, "all 50 labels are 1")])
def test_one_class_gives_reasons_instead_of_numbers(run, tmp_path, positives, reason):
    result = run(data=make_data(tmp_path / "one", rows=50, positives=positives))
    assert result.record.candidate.metrics["auc"] is None
    assert result.record.candidate.undefined["auc"] == reason
    assert "auc" not in result.metrics
    assert result.shown["auc"] == f"undefined: {reason}"
    assert f"test auc undefined: {reason}" in result.summary
    assert f"test log_loss {result.metrics['log_loss']:.4f}" in result.summary
    assert reason in result.report.read_text()
    assert EvaluationRecord.load(result.evaluation) == result.record


def test_a_diverged_model_is_recorded_as_such(run):
    result = run(slope=math.nan)
    assert set(result.record.candidate.metrics.values()) == {None}
    assert "1000 of 1000 logits are not finite" in result.record.candidate.undefined["auc"]
    assert result.metrics == {}
    assert all("logits are not finite" in text for text in result.shown.values())
    assert list(result.shown) == list(settings().evaluation.metrics)


def test_progress_counts_the_records_of_both_models_and_metrics_are_announced(run, tmp_path):
    result = run(champion=make_checkpoint(tmp_path / "champion", slope=2.0))
    seen = read_events(tmp_path / "events.jsonl")
    last = [event for event in seen if event["kind"] == "progress"][-1]
    assert (last["stage"], last["done"], last["total"]) == ("evaluate", 2 * ROWS, 2 * ROWS)
    [metrics] = [event for event in seen if event["kind"] == "metrics"]
    assert metrics["values"] == result.metrics


def test_tensorboard_shows_metrics_curve_and_reliability(run, tmp_path):
    result = run(champion=make_checkpoint(tmp_path / "champion", slope=0.9))
    board = EventAccumulator(str(result.tensorboard)).Reload()
    [point] = board.Scalars("test/auc")
    assert (point.step, point.value) == (120, pytest.approx(result.metrics["auc"], rel=1e-6))
    assert board.Scalars("champion/log_loss")[0].value == pytest.approx(result.record.champion.score.metrics["log_loss"], rel=1e-6)
    [image] = board.Images("test/reliability")
    assert image.width > 300
    assert "test/pr" in board.Tags()["tensors"]


def test_texts_from_the_data_cannot_become_markup(run):
    html = run().report.read_text()
    assert "<b>" not in html
    assert "&lt;b&gt;$x$&lt;/b&gt;" in html


def test_a_trained_model_is_evaluated_twice_alike_without_changing_it(configured, clicks_data, tmp_path, events):
    config = configured("training.max_steps=13")
    with in_process_trainer(config, clicks_data, tmp_path / "train", events=events) as rank:
        rank.run()
    checkpoint = newest_checkpoint(tmp_path / "train")
    before = digests(checkpoint)
    first, second = (evaluate(config, clicks_data, checkpoint, tmp_path / f"out{i}", champion=checkpoint, events=events) for i in (1, 2))
    assert first.record == second.record
    assert first.record.candidate.metrics == first.record.champion.score.metrics
    assert digests(checkpoint) == before
    with Scorer.load(checkpoint) as scorer, ShardReader.open(clicks_data, "test") as reader:
        batch = reader.read(0, reader.rows)
        assert first.metrics == pytest.approx(binary_metrics(scorer.score(batch), batch.label), abs=1e-6)


@pytest.mark.parametrize("text", [None, "", "{}", '{"format_version": 2}'])
def test_a_missing_or_damaged_record_is_named(tmp_path, text):
    path = tmp_path / "evaluation.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SatrapError, match=r"evaluation\.json: .*run `satrap evaluate`"):
        EvaluationRecord.load(path)


def test_the_record_needs_no_torch():
    code = "import sys, training.evaluation_record; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_full_disk_under_tensorboard_is_raised_once_and_not_printed(run, monkeypatch, capsys):
    from tensorboard.summary.writer.record_writer import RecordWriter

    def full(self, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RecordWriter, "write", full)
    before = threading.excepthook
    with pytest.raises(OSError, match="No space left"):
        run()
    assert threading.excepthook is before
    assert "Traceback" not in capsys.readouterr().err
