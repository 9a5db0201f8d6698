import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.signs import hash_array, hash_spans, sign_of, sign_seed
from training.data.spans import TextTable

TEXTS = ["", "a", "abcd", "x" * 7, "x" * 8, "x" * 31, "x" * 32, "x" * 33, "y" * 1000, "日本語", "ünï😀", "18446744073709551615", "007", "7"]


def spans(texts):
    table = TextTable.of(texts)
    return table.data, table.offsets[:-1].copy(), table.offsets[1:].copy()


@pytest.mark.parametrize("seed", [0, 1, 2**63, 2**64 - 1])
def test_hashes_equal_the_reference_implementation(seed):
    expected = [xxhash.xxh64_intdigest(text.encode(), seed) for text in TEXTS]
    assert hash_spans(*spans(TEXTS), seed).tolist() == expected


@given(st.lists(st.text(max_size=80), max_size=20), st.integers(0, 2**64 - 1))
@settings(deadline=None, max_examples=50)
def test_any_text_hashes_like_the_reference(texts, seed):
    expected = [xxhash.xxh64_intdigest(text.encode(), seed) or 1 for text in texts]
    assert hash_spans(*spans(texts), seed).tolist() == expected


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.large_binary()])
def test_arrow_arrays_hash_like_their_texts_and_nulls_like_the_empty_text(kind):
    array = pa.array([b"skipped", b"abc", None, b"", "é".encode()], kind if "binary" in str(kind) else pa.large_binary()).cast(kind)[1:]
    expected = [xxhash.xxh64_intdigest(text, 5) for text in (b"abc", b"", b"", "é".encode())]
    assert hash_array(array, 5).tolist() == expected


def test_an_all_null_array_hashes_like_empty_texts():
    assert hash_array(pa.nulls(2, pa.string()), 5).tolist() == [xxhash.xxh64_intdigest(b"", 5)] * 2


def test_a_sign_is_the_seeded_hash_of_its_group():
    assert sign_of("Vienna", "city") == xxhash.xxh64_intdigest(b"Vienna", xxhash.xxh64_intdigest(b"city", 0))


def test_one_value_in_300_groups_and_ids_near_2_to_the_64_do_not_alias():
    ids = [str(2**64 - 1 - i) for i in range(1000)]
    signs = np.concatenate([hash_spans(*spans(ids), sign_seed(f"slot{s}")) for s in range(300)])
    assert len(np.unique(signs)) == 300 * 1000
    assert signs.min() > 0
