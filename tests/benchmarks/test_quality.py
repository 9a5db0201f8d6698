"""Hybrid training keeps the quality of a plain, synchronous PyTorch program: same data, same order, same seed, in pairs."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.quality import measure

EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 0.002
"""Test AUC."""


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_on_adult(seeds):
    results = measure(EXAMPLES / "adult" / "satrap.yaml", ["training.epochs=1", "training.batch_size=128"], seeds, ["hybrid"])
    plain, hybrid = ([run["auc"] for run in results[name]] for name in ("plain PyTorch", "hybrid"))
    assert np.mean(plain) > 0.899
    assert np.mean(hybrid) > np.mean(plain) - TOLERANCE


@pytest.mark.slow
@pytest.mark.skipif(
    not (EXAMPLES / "movietweetings" / "ratings.tsv").exists(), reason="fetched by hand, see examples/movietweetings/README.md"
)
def test_on_a_rating_log_where_a_third_of_the_test_users_is_new():
    results = measure(EXAMPLES / "movietweetings" / "satrap.yaml", [], 3, ["hybrid"])
    plain, hybrid = ([run["auc"] for run in results[name]] for name in ("plain PyTorch", "hybrid"))
    assert np.mean(hybrid) > np.mean(plain) - TOLERANCE
    assert np.mean(hybrid) > 0.7465
    assert np.mean([run["log_loss"] for run in results["hybrid"]]) < 0.597
