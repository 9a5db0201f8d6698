"""Numbers in text: exact decimal to float64 conversion over columns.

A number is digits with an optional sign, fraction and exponent. Up to 19 digits with a power of ten within 10**22 are converted
by one exactly rounded operation (Clinger 1990); the rest, rare, goes through Python's ``float``.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from training.data.spans import Bools, TextColumn

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

OK, BAD, NOT_FINITE, _HARD = 0, 1, 2, 3
_EXACT = 2**53
_POWERS = np.array([10.0**i for i in range(23)])
_NON_FINITE = {"inf", "infinity", "nan"}


def parse_numbers(column: TextColumn) -> tuple[F64, npt.NDArray[np.int8]]:
    """Values float64 [N] (NaN where missing or refused) and verdicts int8 [N]: ``OK``, ``BAD``, ``NOT_FINITE``."""
    values, verdicts = _parse(column.data, column.starts, column.ends, column.missing, _POWERS)
    for row in np.nonzero(verdicts == _HARD)[0].tolist():
        value = float(column.text(row))
        verdicts[row] = OK if np.isfinite(value) else NOT_FINITE
        values[row] = value if np.isfinite(value) else np.nan
    for row in np.nonzero(verdicts == BAD)[0].tolist():
        if column.text(row).lower().lstrip("+-") in _NON_FINITE:
            verdicts[row] = NOT_FINITE
    return values, verdicts


@njit(cache=True, nogil=True)
def _digits(data: U8, at: int, end: int, mantissa: int, used: int) -> tuple[int, int, int]:
    """Take digits while they fit 18 places: (position, mantissa, digits taken); digits that do not fit make ``used`` large."""
    while at < end and 48 <= data[at] <= 57:
        if used < 18:
            mantissa = mantissa * 10 + (np.int64(data[at]) - 48)  # type: ignore[assignment]
        if mantissa > 0 or used > 0:
            used += 1
        at += 1
    return at, mantissa, used


@njit(cache=True, nogil=True)
def _exponent(data: U8, at: int, end: int) -> tuple[int, int]:
    """(position, exponent) of the digits after an ``e``; position -1 if there are none. Saturates at 9999."""
    negative = at < end and data[at] == 45
    if at < end and (data[at] == 45 or data[at] == 43):
        at += 1
    if at >= end:
        return -1, 0
    value = 0
    while at < end and 48 <= data[at] <= 57:
        value = min(value * 10 + np.int64(data[at]) - 48, 9999)  # type: ignore[assignment]
        at += 1
    return at, -value if negative else value


@njit(cache=True, nogil=True)
def _number(data: U8, start: int, end: int, powers: F64) -> tuple[float, int]:
    at = start
    negative = at < end and data[at] == 45
    if at < end and (data[at] == 45 or data[at] == 43):
        at += 1
    first = at
    at, mantissa, used = _digits(data, at, end, 0, 0)
    count, scale = at - first, 0
    if at < end and data[at] == 46:
        point = at + 1
        at, mantissa, used = _digits(data, point, end, mantissa, used)
        count += at - point
        scale = point - at
    if count == 0:
        return np.nan, BAD
    if at < end and (data[at] == 101 or data[at] == 69):
        at, exponent = _exponent(data, at + 1, end)
        scale += exponent
    if at != end:
        return np.nan, BAD
    if used > 18 or mantissa > _EXACT or abs(scale) > 22:
        return np.nan, _HARD
    value = mantissa * powers[scale] if scale >= 0 else mantissa / powers[-scale]
    return -value if negative else value, OK


@njit(cache=True, nogil=True)
def _parse(data: U8, starts: I64, ends: I64, missing: Bools, powers: F64) -> tuple[F64, npt.NDArray[np.int8]]:
    values, verdicts = np.empty(len(starts)), np.zeros(len(starts), np.int8)
    for i in range(len(starts)):
        if missing[i]:
            values[i] = np.nan
        else:
            values[i], verdicts[i] = _number(data, starts[i], ends[i], powers)
    return values, verdicts
