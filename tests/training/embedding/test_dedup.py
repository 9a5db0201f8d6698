"""Unique signs in hash order, routing, and gradient sums."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.embedding.dedup import dedup, route, server_of, sum_gradients
from training.embedding.hashing import GOLDEN, mix_reference


def hashes(signs: np.ndarray) -> np.ndarray:
    return mix_reference(signs + GOLDEN)


@given(st.lists(st.one_of(st.integers(0, 2**64 - 1), st.integers(0, 20), st.sampled_from([0, 2**63, 2**64 - 1])), max_size=300))
@settings(max_examples=100, deadline=None)
def test_unique_and_inverse_give_the_signs_back(numbers: list[int]) -> None:
    signs = np.array(numbers, np.uint64)
    unique, inverse = dedup(signs)
    assert inverse.dtype == np.uint32
    np.testing.assert_array_equal(unique[inverse], signs)
    np.testing.assert_array_equal(np.sort(unique), np.unique(signs))
    assert (np.diff(hashes(unique).astype(object)) > 0).all()


def test_the_order_of_occurrences_does_not_change_unique() -> None:
    rng = np.random.default_rng(0)
    signs = rng.zipf(1.1, 50_000).astype(np.uint64)
    unique, _ = dedup(signs)
    np.testing.assert_array_equal(dedup(rng.permutation(signs))[0], unique)


def test_signs_that_hash_next_to_each_other_are_kept_apart() -> None:
    """All in one corner of the hash range: the probing runs over the end of its table."""
    top = np.array([2**64 - 1 - k for k in range(2000)], np.uint64)
    signs = _unmix(top) - GOLDEN
    np.testing.assert_array_equal(hashes(signs), top)
    unique, inverse = dedup(np.concatenate([signs, signs[::-1]]))
    np.testing.assert_array_equal(unique, signs[::-1])
    np.testing.assert_array_equal(unique[inverse[:2000]], signs)


def _unmix(values: np.ndarray) -> np.ndarray:
    """Inverse of SplitMix64's finaliser."""
    values = values ^ values >> np.uint64(31) ^ values >> np.uint64(62)
    values = values * np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
    values = values ^ values >> np.uint64(27) ^ values >> np.uint64(54)
    values = values * np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
    return values ^ values >> np.uint64(30) ^ values >> np.uint64(60)


@pytest.mark.parametrize("num_servers", [1, 2, 3, 7, 30, 1000])
def test_each_servers_signs_are_contiguous(num_servers: int) -> None:
    unique, _ = dedup(np.arange(20_000, dtype=np.uint64))
    starts = route(unique, num_servers)
    servers = server_of(unique, num_servers)
    assert (starts[0], starts[-1], len(starts)) == (0, len(unique), num_servers + 1)
    for server in range(num_servers):
        assert (servers[starts[server] : starts[server + 1]] == server).all()
    counts = np.diff(starts)
    mean = len(unique) / num_servers
    assert (np.abs(counts - mean) < 5 * np.sqrt(mean) + 1).all()


def test_an_empty_batch_routes_to_nobody() -> None:
    unique, inverse = dedup(np.empty(0, np.uint64))
    assert len(unique) == len(inverse) == 0
    np.testing.assert_array_equal(route(unique, 3), [0, 0, 0, 0])


def test_signs_of_another_type_are_refused() -> None:
    for wrong in (np.arange(3), np.zeros((2, 2), np.uint64)):
        with pytest.raises(ValueError, match="uint64"):
            dedup(wrong)


def test_the_hash_of_a_sign_never_changes() -> None:
    """Checkpoints and routing depend on it. First outputs of SplitMix64 with seed 0 (Vigna's reference code)."""
    assert [hex(h) for h in hashes(np.array([0], np.uint64))] == ["0xe220a8397b1dcdaf"]
    assert [hex(h) for h in hashes(np.array([int(GOLDEN)], np.uint64))] == ["0x6e789e6aa1b965f4"]


@pytest.mark.parametrize("dim", [1, 5, 8, 16, 21])
def test_gradients_are_summed_in_order_of_occurrence(dim: int) -> None:
    rng = np.random.default_rng(dim)
    inverse = rng.integers(0, 50, 3000).astype(np.uint32)
    gradients = rng.standard_normal((3000, dim)).astype(np.float32)
    expected = np.zeros((60, dim), np.float32)
    np.add.at(expected, inverse, gradients)
    np.testing.assert_array_equal(sum_gradients(gradients, inverse, 60), expected)
    np.testing.assert_array_equal(sum_gradients(np.asfortranarray(gradients), inverse, 60), expected)


def test_gradients_that_do_not_fit_the_batch_are_refused() -> None:
    with pytest.raises(ValueError, match=r"float32 \[4, D\]"):
        sum_gradients(np.zeros((3, 2), np.float32), np.zeros(4, np.uint32), 1)
