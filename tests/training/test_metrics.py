"""Metrics against hand-computed tables and brute-force definitions."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training import metrics


def logit(p):
    return math.log(p / (1 - p))


def brute_auc(logits, labels):
    pairs = [(p, n) for p, a in zip(logits, labels, strict=True) if a for n, b in zip(logits, labels, strict=True) if not b]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


@pytest.mark.parametrize(
    ("logits", "labels", "expected"),
    [
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([4, 3, 2, 1], [0, 0, 1, 1], 0.0),
        ([5, 5, 5, 5], [0, 1, 0, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
        ([0.0, -0.0], [0, 1], 0.5),
        ([-1e30, 1e30], [0, 1], 1.0),
    ],
)
def test_auc_of_hand_computed_tables(logits, labels, expected):
    assert metrics.auc(np.float32(logits), labels) == expected


records = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=2, max_size=40)


@settings(max_examples=150, deadline=None)
@given(records)
def test_auc_equals_the_share_of_ordered_pairs_with_ties_as_half(pairs):
    logits, labels = np.array(pairs, dtype=np.float32).T
    if 0 < labels.sum() < len(labels):
        assert metrics.auc(logits, labels) == pytest.approx(brute_auc(logits, labels), abs=1e-12)
    else:
        assert math.isnan(metrics.auc(logits, labels))


def test_auc_counts_pairs_exactly_beyond_float_precision():
    # 1e6 x 1e6 pairs less half a pair: a float32 accumulation could not show it.
    n = 1_000_000
    logits = np.concatenate([np.zeros(n, np.float32), np.ones(n, np.float32)])
    labels = np.repeat([0, 1], n).astype(np.int8)
    logits[0] = 1.0
    assert metrics.auc(logits, labels) == (n * n - n / 2) / (n * n)


@pytest.mark.parametrize(
    ("predictions", "labels", "loss", "entropy", "calibration"),
    [
        # always the base rate: log loss ln 2, NE 1, calibration 1
        ([0.5, 0.5], [0, 1], math.log(2), 1.0, 1.0),
        ([0.25] * 4, [0, 0, 0, 1], -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), 1.0, 1.0),
        # -(ln 0.8 + ln 0.9)/2 over ln 2; mean prediction 0.5 over mean label 0.5
        ([0.2, 0.9], [0, 1], -(math.log(0.8) + math.log(0.9)) / 2, -(math.log(0.8) + math.log(0.9)) / 2 / math.log(2), 1.1),
        ([0.8, 0.8], [0, 1], -(math.log(0.2) + math.log(0.8)) / 2, -(math.log(0.2) + math.log(0.8)) / 2 / math.log(2), 1.6),
    ],
)
def test_log_loss_normalized_entropy_and_calibration_of_hand_computed_tables(predictions, labels, loss, entropy, calibration):
    values = metrics.binary_metrics([logit(p) for p in predictions], labels)
    assert values["log_loss"] == pytest.approx(loss, rel=1e-12)
    assert values["normalized_entropy"] == pytest.approx(entropy, rel=1e-12)
    assert values["calibration"] == pytest.approx(calibration, rel=1e-12)


def test_log_loss_is_exact_where_probabilities_would_saturate():
    values = metrics.binary_metrics(np.float32([800.0, -800.0, 40.0]), [0, 1, 1])
    assert values["log_loss"] == pytest.approx((800 + 800 + math.exp(-40)) / 3, rel=1e-12)
    assert metrics.log_loss([40.0], [1]) == pytest.approx(math.exp(-40), rel=1e-12)


def test_log_loss_over_several_blocks_equals_one_sum(monkeypatch):
    rng = np.random.default_rng(1)
    logits, labels = rng.normal(size=1000).astype(np.float32), rng.integers(0, 2, 1000)
    whole = metrics.binary_metrics(logits, labels)
    monkeypatch.setattr(metrics, "_BLOCK_ROWS", 77)
    assert metrics.binary_metrics(logits, labels) == pytest.approx(whole, rel=1e-12)


@pytest.mark.parametrize(
    ("logits", "labels", "undefined", "reason"),
    [
        ([], [], {"auc", "log_loss", "normalized_entropy", "calibration"}, "no records"),
        ([0.5, 1.0], [0, 0], {"auc", "normalized_entropy", "calibration"}, "all 2 labels are 0"),
        ([0.5, 1.0], [1, 1], {"auc", "normalized_entropy"}, "all 2 labels are 1"),
        ([np.nan, 1.0], [0, 1], {"auc", "log_loss", "normalized_entropy", "calibration"}, "1 of 2 logits are not finite"),
        ([np.inf, 1.0, 2.0], [0, 1, 1], {"auc", "log_loss", "normalized_entropy", "calibration"}, "1 of 3 logits are not finite"),
    ],
)
def test_a_metric_without_a_value_is_nan_with_a_reason(logits, labels, undefined, reason):
    values = metrics.binary_metrics(np.float32(logits), labels)
    reasons = metrics.undefined_reasons(np.float32(logits), labels)
    assert {name for name, value in values.items() if math.isnan(value)} == undefined == set(reasons)
    assert all(reason in text for text in reasons.values())


@pytest.mark.parametrize(("logits", "labels"), [([1.0], [0, 1]), ([[1.0]], [[1]]), ([1.0], [2]), ([1.0], [0.5]), ([1.0], [np.nan])])
def test_wrong_shapes_and_labels_are_refused(logits, labels):
    with pytest.raises(ValueError, match="must"):
        metrics.binary_metrics(logits, labels)


def test_reliability_bins_hold_equal_numbers_and_their_means():
    logits = np.arange(100, dtype=np.float32)[::-1] / 10
    labels = (np.arange(100) % 4 == 0).astype(np.int8)
    curve = metrics.reliability_curve(logits, labels, bins=5)
    assert curve.rows.tolist() == [20] * 5
    assert curve.positive_rate.tolist() == [0.25] * 5
    assert curve.mean_prediction[0] == pytest.approx(np.mean(1 / (1 + np.exp(-np.arange(20) / 10))), abs=1e-6)


def test_reliability_bins_keep_equal_logits_together_whatever_the_order():
    logits, labels = np.float32([0] * 6 + [1] * 4), np.int8([0, 1, 0, 1, 0, 0, 1, 1, 1, 0])
    curve = metrics.reliability_curve(logits, labels, bins=5)
    order = np.random.default_rng(0).permutation(10)
    other = metrics.reliability_curve(logits[order], labels[order], bins=5)
    assert curve.rows.tolist() == other.rows.tolist() == [6, 4]
    assert curve.positive_rate.tolist() == other.positive_rate.tolist() == [2 / 6, 3 / 4]


def test_wilson_interval_matches_the_published_example_and_holds_the_rate():
    # Newcombe 1998, table I: 81 of 263 gives 0.2553 to 0.3662, 0 of 20 gives 0 to 0.1611, 1 of 29 gives 0.0061 to 0.1718.
    curve = metrics.ReliabilityCurve(np.zeros(3), np.array([81 / 263, 0.0, 1 / 29]), np.array([263, 20, 29]))
    low, high = curve.interval()
    assert np.round(low, 4).tolist() == [0.2553, 0.0, 0.0061]
    assert np.round(high, 4).tolist() == [0.3662, 0.1611, 0.1718]
    assert (low <= curve.positive_rate).all()


def test_expected_error_weights_bins_by_records():
    curve = metrics.ReliabilityCurve(np.array([0.1, 0.5]), np.array([0.2, 0.5]), np.array([30, 10]))
    assert curve.expected_error() == pytest.approx(0.075)


def test_pr_and_roc_curves_of_a_hand_computed_table():
    logits, labels = np.float32([4, 3, 3, 2, 1]), np.int8([1, 0, 1, 0, 1])
    pr = metrics.pr_curve(logits, labels)
    assert pr.recall.tolist() == pytest.approx([1 / 3, 2 / 3, 2 / 3, 1])
    assert pr.precision.tolist() == pytest.approx([1, 2 / 3, 1 / 2, 3 / 5])
    assert pr.average_precision == pytest.approx(1 / 3 + 2 / 9 + 1 / 5)
    roc = metrics.roc_curve(logits, labels)
    assert roc.false_positive_rate.tolist() == pytest.approx([0, 0, 1 / 2, 1, 1])
    assert roc.true_positive_rate.tolist() == pytest.approx([0, 1 / 3, 2 / 3, 2 / 3, 1])


def test_the_area_under_the_roc_curve_is_the_auc():
    rng = np.random.default_rng(3)
    logits, labels = rng.integers(0, 50, 2000).astype(np.float32), rng.integers(0, 2, 2000)
    roc = metrics.roc_curve(logits, labels)
    heights = (roc.true_positive_rate[1:] + roc.true_positive_rate[:-1]) / 2
    assert (np.diff(roc.false_positive_rate) * heights).sum() == pytest.approx(metrics.auc(logits, labels), abs=1e-12)


def test_curves_are_thinned_with_both_ends_kept_and_average_precision_unchanged():
    rng = np.random.default_rng(4)
    logits, labels = rng.normal(size=5000).astype(np.float32), rng.integers(0, 2, 5000)
    thin, full = metrics.pr_curve(logits, labels, max_points=50), metrics.pr_curve(logits, labels, max_points=10**6)
    assert len(thin.recall) == 50
    assert len(full.recall) == 5000
    assert (thin.recall[0], thin.recall[-1]) == (full.recall[0], full.recall[-1])
    assert thin.average_precision == full.average_precision


@pytest.mark.parametrize(("logits", "labels"), [([], []), ([1.0], [0]), ([1.0], [1])])
def test_curves_of_one_class_or_nothing_are_empty_or_partial_but_never_fail(logits, labels):
    logits = np.float32(logits)
    assert len(metrics.roc_curve(logits, labels).true_positive_rate) == 0
    assert len(metrics.pr_curve(logits, labels).recall) == (1 if labels == [1] else 0)
    assert metrics.reliability_curve(logits, labels).rows.sum() == len(labels)


@settings(max_examples=30, deadline=None)
@given(records, st.integers(1, 7))
def test_the_accumulator_equals_one_call_whatever_the_batches(pairs, size):
    logits, labels = np.array(pairs, dtype=np.float32).T
    accumulator = metrics.MetricAccumulator()
    for start in range(0, len(pairs), size):
        accumulator.add(logits[start : start + size], labels[start : start + size])
    assert accumulator.rows == len(pairs)
    np.testing.assert_equal(accumulator.metrics(), metrics.binary_metrics(logits, labels))


def test_the_accumulator_copies_batches_and_keeps_five_bytes_per_record():
    accumulator = metrics.MetricAccumulator()
    batch = np.ones(10, np.float64)
    accumulator.add(batch, np.ones(10))
    batch[:] = 7
    assert accumulator.logits.tolist() == [1.0] * 10
    assert accumulator.logits.itemsize + accumulator.labels.itemsize == 5
    empty = metrics.MetricAccumulator()
    assert empty.rows == 0
    assert empty.undefined_reasons()["auc"] == "no records"


def test_metrics_raise_no_numpy_warnings_on_extreme_logits():
    with np.errstate(all="raise", under="ignore"):
        metrics.binary_metrics(np.float32([3e38, -3e38, 0, 100]), [1, 0, 1, 0])
        metrics.predictions(np.float32([3e38, -3e38]))
