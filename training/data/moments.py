"""Count, mean and variance of numbers, computed in a fixed order: equal input gives equal bits on any number of workers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Moments:
    """Of some numbers: how many, their mean, the sum of squared deviations from it, the smallest and largest."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0
    minimum: float = math.inf
    maximum: float = -math.inf

    @classmethod
    def of(cls, values: F64) -> Moments:
        """Of the values that are not NaN."""
        count, mean, squares, minimum, maximum = _moments(values)
        return cls(int(count), float(mean), float(squares), float(minimum), float(maximum))

    def merged(self, other: Moments) -> Moments:
        """Of both sets of numbers (Chan, Golub & LeVeque 1979). Not associative to the last bit: merge in a fixed order."""
        count = self.count + other.count
        if not other.count:
            return self
        if not self.count:
            return other
        gap = other.mean - self.mean
        mean = self.mean + gap * (other.count / count)
        squares = self.squares + other.squares + gap * gap * (self.count * (other.count / count))
        return Moments(count, mean, squares, min(self.minimum, other.minimum), max(self.maximum, other.maximum))

    def with_copies(self, value: float, count: int) -> Moments:
        """Of these numbers and ``count`` times ``value``."""
        return self.merged(Moments(count, value, 0.0, value, value)) if count else self

    @property
    def std(self) -> float:
        """Population standard deviation; 0 without numbers."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


def merge_moments(parts: Iterable[Moments]) -> Moments:
    """Of all parts, merged in their order."""
    total = Moments()
    for part in parts:
        total = total.merged(part)
    return total


@njit(cache=True, nogil=True)
def _moments(values: F64) -> tuple[int, float, float, float, float]:
    count, total, minimum, maximum = 0, 0.0, np.inf, -np.inf
    for value in values:
        if not math.isnan(value):
            count += 1
            total += value
            minimum, maximum = min(minimum, value), max(maximum, value)
    mean = total / count if count else 0.0
    squares = 0.0
    for value in values:
        if not math.isnan(value):
            squares += (value - mean) * (value - mean)
    return count, mean, squares, minimum, maximum
