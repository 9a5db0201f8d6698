"""Drift formulas against hand-computed values and their properties."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.data.drift import drift

counts = st.lists(st.integers(0, 1000), min_size=4, max_size=4)


@pytest.mark.parametrize(
    ("ours", "theirs", "js", "psi"),
    [
        ([5, 5], [50, 50], 0.0, 0.0),
        # disjoint: 1 bit; PSI with halves added: p = (10.5, 0.5)/11, q mirrored
        ([10, 0], [0, 10], 1.0, 2 * (10 / 11) * math.log(21)),
        # p = (1/2, 1/2), q = (1, 0): JS = 1/2 [1/2 log2(2/3) + 1/2 log2 2] + 1/2 log2(4/3); PSI of (2.5, 2.5)/5 and (4.5, 0.5)/5
        ([2, 2], [4, 0], 0.25 * math.log2(2 / 3) + 0.25 + 0.5 * math.log2(4 / 3), 0.4 * math.log(1.8) + 0.4 * math.log(5)),
        # a bucket empty in both runs changes nothing
        ([2, 0, 2], [4, 0, 0], 0.25 * math.log2(2 / 3) + 0.25 + 0.5 * math.log2(4 / 3), 0.4 * math.log(1.8) + 0.4 * math.log(5)),
    ],
)
def test_distances_of_hand_computed_histograms(ours, theirs, js, psi):
    result = drift(ours, theirs)
    assert result.js_divergence == pytest.approx(js, abs=1e-12)
    assert result.psi == pytest.approx(psi, abs=1e-12)


@given(counts, counts)
def test_distances_are_symmetric_bounded_and_zero_only_for_equal_shares(ours, theirs):
    one, other = drift(ours, theirs), drift(theirs, ours)
    if sum(ours) == 0 or sum(theirs) == 0:
        assert one is None
        return
    assert 0 <= one.js_divergence <= 1
    assert one.js_divergence == pytest.approx(other.js_divergence, abs=1e-12)
    assert one.psi == pytest.approx(other.psi, abs=1e-12)
    assert one.psi >= 0
    equal = [a * sum(theirs) for a in ours] == [b * sum(ours) for b in theirs]
    assert (one.js_divergence < 1e-12) is equal


def test_noise_is_what_two_samples_of_one_distribution_show():
    rng = np.random.default_rng(0)
    share = rng.dirichlet(np.full(32, 5.0))
    results = [drift(rng.multinomial(4000, share), rng.multinomial(2000, share)) for _ in range(200)]
    assert np.mean([r.psi for r in results]) == pytest.approx(results[0].psi_noise, rel=0.1)
    assert np.mean([r.js_divergence for r in results]) == pytest.approx(results[0].js_noise, rel=0.1)


def test_other_buckets_are_refused():
    with pytest.raises(ValueError, match="same buckets, got 2 and 3"):
        drift([1, 2], [1, 2, 3])
