import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.numerals import BAD, NOT_FINITE, OK, parse_numbers
from training.data.spans import TextTable, clean


def parsed(texts):
    table = TextTable.of(texts)
    column = clean(table.data, table.offsets[:-1].copy(), table.offsets[1:].copy(), strip=False, missing=TextTable.of([""]))
    values, verdicts = parse_numbers(column)
    return values.tolist(), verdicts.tolist()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0.0),
        ("-0", -0.0),
        ("+7", 7.0),
        ("-2", -2.0),
        ("007", 7.0),
        (".5", 0.5),
        ("5.", 5.0),
        ("1e5", 1e5),
        ("1.5E-3", 1.5e-3),
        ("0.1", 0.1),
        ("0.000000000000000000000000123", 1.23e-25),
        ("123456789012345678901234567890", 123456789012345678901234567890.0),
        ("9007199254740993", 9007199254740993.0),
        ("2.2250738585072014e-308", 2.2250738585072014e-308),
        ("1e22", 1e22),
        ("1e23", 1e23),
        ("1e-400", 0.0),
    ],
)
def test_numbers_have_the_exact_value_of_their_text(text, value):
    values, verdicts = parsed([text])
    assert verdicts == [OK]
    assert values == [value]
    assert math.copysign(1, values[0]) == math.copysign(1, value)


@pytest.mark.parametrize("text", ["x", "1x", "x1", "1.2.3", "--1", "+-1", "1e", "1e+", ".", "-", "e5", "1 2", "0x10", "1_000", "1,5", "½"])
def test_other_text_is_refused(text):
    assert parsed([text])[1] == [BAD]


@pytest.mark.parametrize("text", ["inf", "-inf", "+Infinity", "NaN", "-nan", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_told_apart(text):
    assert parsed([text])[1] == [NOT_FINITE]


def test_missing_values_are_nan_and_no_fault():
    values, verdicts = parsed(["1", "", "2"])
    assert np.isnan(values[1])
    assert verdicts == [OK, OK, OK]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=50))
@settings(deadline=None, max_examples=100)
def test_what_python_writes_is_read_back_bit_by_bit(numbers):
    assert parsed([repr(number) for number in numbers])[0] == numbers


@given(st.text("0123456789+-.eE", min_size=1, max_size=30))
@settings(deadline=None, max_examples=300)
def test_accepts_what_python_accepts(text):
    try:
        expected = float(text)
    except ValueError:
        assert parsed([text])[1] == [BAD]
    else:
        values, verdicts = parsed([text])
        assert (values, verdicts) == ([expected], [OK]) if math.isfinite(expected) else verdicts == [NOT_FINITE]
