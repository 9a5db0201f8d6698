"""Half precision on the wire keeps eleven bits of every value, however small the block."""

import numpy as np
import pytest

from training.embedding.codec import WIRE_DTYPES, decode, encode

HALF = WIRE_DTYPES["float16"]


@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e-4, 1.0, 1e4, 1e30])
def test_relative_error_is_that_of_half_precision_at_any_magnitude(magnitude):
    block = (np.random.default_rng(1).uniform(0.001, 1.0, (50, 8)) * magnitude).astype(np.float32)
    encoded, scale = encode(block, HALF)
    assert encoded.dtype == np.float16
    np.testing.assert_allclose(decode(encoded, scale), block, rtol=2**-11)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_zeros_empty_blocks_and_powers_of_two_are_exact(dtype):
    for block in (np.zeros((3, 2), np.float32), np.zeros((0, 4), np.float32), np.array([[2.0, -0.5, 2.0**-20]], np.float32)):
        encoded, scale = encode(block, WIRE_DTYPES[dtype])
        np.testing.assert_array_equal(decode(encoded, scale), block)


def test_nan_and_infinity_survive_instead_of_becoming_numbers():
    block = np.array([[np.nan, 1.0, np.inf]], np.float32)
    decoded = decode(*encode(block, HALF))
    assert np.isnan(decoded[0, 0])
    assert decoded[0, 1] == 1.0
    assert np.isinf(decoded[0, 2])


def test_conversion_is_that_of_numpy():
    block = np.random.default_rng(2).standard_normal((200, 16)).astype(np.float32)
    encoded, scale = encode(block, HALF)
    np.testing.assert_array_equal(encoded, (block * np.float32(scale)).astype(np.float16))
