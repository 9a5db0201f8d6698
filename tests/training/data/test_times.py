import calendar
from datetime import datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data.spans import TextTable, clean
from training.data.times import parse_times


def seconds(text, form):
    table = TextTable.of([text])
    column = clean(table.data, table.offsets[:-1].copy(), table.offsets[1:].copy(), strip=True, missing=TextTable.of([""]))
    value, good = parse_times(column, form)
    return int(value[0]) if good[0] else None


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("epoch_seconds", "1700000000", 1700000000),
        ("epoch_seconds", "1700000000.9", 1700000000),
        ("epoch_seconds", "-1.5", -2),
        ("epoch_seconds", "1700000000000", None),
        ("epoch_seconds", "yesterday", None),
        ("epoch_seconds", "", None),
        ("epoch_seconds", "inf", None),
        ("epoch_milliseconds", "1700000000999", 1700000000),
        ("epoch_milliseconds", "-1", -1),
        ("iso8601", "1970-01-01", 0),
        ("iso8601", "2024-02-29T12:34:56", 1709210096),
        ("iso8601", "2024-02-29 12:34", 1709210040),
        ("iso8601", "2024-02-29T12:34:56.789Z", 1709210096),
        ("iso8601", "2024-02-29T12:34:56+05:30", 1709210096 - 19800),
        ("iso8601", "2024-02-29T12:34:56-0800", 1709210096 + 28800),
        ("iso8601", "2024-02-29T12:34:56+02", 1709210096 - 7200),
        ("iso8601", "2023-02-29", None),
        ("iso8601", "2024-13-01", None),
        ("iso8601", "2024-12-31", 1735603200),
        ("iso8601", "2024-12-32", None),
        ("iso8601", "2024-01-01T24:00", None),
        ("iso8601", "2024-01-01T", None),
        ("iso8601", "2024-01-01x", None),
        ("iso8601", "2024-1-1", None),
        ("iso8601", "20240101", None),
        ("iso8601", "2024-01-01T10:00+5", None),
        ("%y%m%d%H", "14102123", 1413932400),
        ("%y%m%d%H", "141021", None),
        ("%d/%b/%Y %H:%M:%S %z", "21/Oct/2014 23:00:00 +0200", 1413925200),
    ],
)
def test_times_become_seconds_since_1970(form, text, expected):
    assert seconds(text, form) == expected


@given(st.datetimes(min_value=datetime(1, 1, 2), max_value=datetime(9999, 12, 30)))
@settings(deadline=None, max_examples=200)
def test_iso_times_agree_with_python(moment):
    assert seconds(moment.isoformat(), "iso8601") == calendar.timegm(moment.timetuple())
