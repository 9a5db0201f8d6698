"""Event times: text to whole seconds since 1970-01-01 UTC (fractions are cut off towards the past)."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.numerals import OK, parse_numbers
from training.data.spans import Bools, TextColumn

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]

_FIRST, _LAST = -62_135_596_800, 253_402_300_799
"""0001-01-01T00:00:00 and 9999-12-31T23:59:59: seconds beyond are refused (milliseconds read as seconds are found out by this)."""


def parse_times(column: TextColumn, form: str) -> tuple[I64, Bools]:
    """Seconds int64 [N], and whether each text was understood, bool [N]. Missing values count as not understood.

    ``form`` is that of ``TimeConfig.format``. iso8601 is ``YYYY-MM-DD``, optionally ``T`` or a blank and ``HH:MM[:SS[.fraction]]``,
    optionally ``Z`` or an offset such as ``+05:30``.
    """
    if form in ("epoch_seconds", "epoch_milliseconds"):
        numbers, verdicts = parse_numbers(column)
        with np.errstate(invalid="ignore"):
            seconds = np.floor(numbers / (1000.0 if form == "epoch_milliseconds" else 1.0))
            good = (verdicts == OK) & ~column.missing & (seconds >= _FIRST) & (seconds <= _LAST)
        return np.where(good, seconds, 0.0).astype(np.int64), good
    if form == "iso8601":
        seconds_iso, good = _parse_iso(column.data, column.starts, column.ends)
        return seconds_iso, good & ~column.missing
    return _parse_pattern(column, form)


def _parse_pattern(column: TextColumn, pattern: str) -> tuple[I64, Bools]:
    """Any strptime pattern: each distinct text is parsed once."""
    encoded = column.to_arrow().dictionary_encode()
    # strptime takes one digit where two are meant: of directives that touch, "141021" for %y%m%d%H would be 1 o'clock of 2014-01-02.
    exact = re.search(r"%[A-Za-z]%[A-Za-z]", pattern) is not None
    parsed = [_strptime(text, pattern, exact=exact) for text in encoded.dictionary.to_pylist()]
    codes = encoded.indices.to_numpy(zero_copy_only=False)
    seconds = np.array([value or 0 for value in parsed], np.int64)
    good = np.array([value is not None for value in parsed], np.bool_)
    return seconds[codes], good[codes] & ~column.missing


def _strptime(text: str, pattern: str, *, exact: bool) -> int | None:
    try:
        moment = datetime.strptime(text, pattern)
    except ValueError:
        return None
    if exact and len(moment.strftime(pattern)) != len(text):
        return None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() // 1)


@njit(cache=True, nogil=True)
def _digits_at(data: U8, at: int, end: int, width: int) -> int:
    """The number in exactly ``width`` digits, or -1."""
    if at + width > end:
        return -1
    value = 0
    for i in range(at, at + width):
        if not 48 <= data[i] <= 57:
            return -1
        value = value * 10 + np.int64(data[i]) - 48  # type: ignore[assignment]
    return value


@njit(cache=True, nogil=True)
def _days(year: int, month: int, day: int) -> int:
    """Days since 1970-01-01 in the proleptic Gregorian calendar (Hinnant, "chrono-compatible low-level date algorithms")."""
    year -= month <= 2
    era = year // 400
    year_of_era = year - era * 400
    day_of_year = (153 * (month + (-3 if month > 2 else 9)) + 2) // 5 + day - 1
    return era * 146_097 + year_of_era * 365 + year_of_era // 4 - year_of_era // 100 + day_of_year - 719_468


@njit(cache=True, nogil=True)
def _date(data: U8, at: int, end: int) -> tuple[int, bool]:
    year, month, day = _digits_at(data, at, end, 4), _digits_at(data, at + 5, end, 2), _digits_at(data, at + 8, end, 2)
    if year < 1 or not 1 <= month <= 12 or day < 1 or data[at + 4] != 45 or data[at + 7] != 45:
        return 0, False
    following = _days(year + month // 12, month % 12 + 1, 1)
    days = _days(year, month, day)
    return days * 86_400, days < following


@njit(cache=True, nogil=True)
def _clock(data: U8, at: int, end: int) -> tuple[int, int, bool]:
    """(position, seconds of the day, understood) of ``HH:MM[:SS[.fraction]]``."""
    hour, minute, second = _digits_at(data, at, end, 2), _digits_at(data, at + 3, end, 2), 0
    if not 0 <= hour <= 23 or not 0 <= minute <= 59 or data[at + 2] != 58:
        return at, 0, False
    at += 5
    if at < end and data[at] == 58:
        second = _digits_at(data, at + 1, end, 2)
        at += 3
        if not 0 <= second <= 59:
            return at, 0, False
        if at < end and (data[at] == 46 or data[at] == 44):
            at += 1
            while at < end and 48 <= data[at] <= 57:
                at += 1
    return at, hour * 3600 + minute * 60 + second, True


@njit(cache=True, nogil=True)
def _offset(data: U8, at: int, end: int) -> tuple[int, bool]:
    """Seconds east of UTC of what ends a time: nothing, ``Z``, ``+HH``, ``+HHMM`` or ``+HH:MM``."""
    if at == end or (at + 1 == end and (data[at] == 90 or data[at] == 122)):
        return 0, True
    if data[at] != 43 and data[at] != 45:
        return 0, False
    hour, minute = _digits_at(data, at + 1, end, 2), 0
    rest = at + 3
    if rest < end:
        if data[rest] == 58:
            rest += 1
        minute = _digits_at(data, rest, end, 2)
        rest += 2
    if not 0 <= hour <= 23 or not 0 <= minute <= 59 or rest != end:
        return 0, False
    seconds = hour * 3600 + minute * 60
    return -seconds if data[at] == 45 else seconds, True


@njit(cache=True, nogil=True)
def _parse_iso(data: U8, starts: I64, ends: I64) -> tuple[I64, Bools]:
    seconds, good = np.zeros(len(starts), np.int64), np.zeros(len(starts), np.bool_)
    for i in range(len(starts)):
        at, end = starts[i], ends[i]
        base, understood = _date(data, at, end)
        at += 10
        if understood and at < end:
            understood = data[at] == 84 or data[at] == 116 or data[at] == 32
            if understood:
                at, clock, understood = _clock(data, at + 1, end)
                base += clock
            if understood:
                east, understood = _offset(data, at, end)
                base -= east
        if understood:
            seconds[i], good[i] = base, True
    return seconds, good
