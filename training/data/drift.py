"""How far two histograms of one feature are apart. The formulas, so that a number in a report can be computed again by hand.

Both runs count a feature's values in the same B buckets: c_i this run, d_i the previous one, with sums n and m. Missing values are in no
bucket (their rate is compared on its own). Numeric features use the manifest's fixed edges; a slot's ids fall into 64 buckets by the
top six bits of their signs, so slots of any size compare at the same cost.

- Jensen-Shannon divergence, in bits: p_i = c_i / n, q_i = d_i / m, w_i = (p_i + q_i) / 2,
  ``JS = 1/2 sum p_i log2(p_i / w_i) + 1/2 sum q_i log2(q_i / w_i)``; 0 is equal, 1 is disjoint. It needs no smoothing.
- Population stability index: buckets that are empty in both runs are left out (K remain), every count gets one half added so that no
  logarithm diverges: p_i = (c_i + 1/2) / (n + K/2), q_i alike, ``PSI = sum (p_i - q_i) ln(p_i / q_i)``.
  The customary reading: below 0.1 no change, above 0.2 to 0.25 a large one.
- Sampling noise: two samples of one distribution differ by about ``(K - 1) (1/n + 1/m)`` in PSI and ``(K - 1) (1/n + 1/m) / (8 ln 2)``
  in JS (the leading term of both for independent records). A value near it means "too few records to tell".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Shares = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Drift:
    """Distances between two histograms and what chance alone would give."""

    js_divergence: float
    """Bits, 0 to 1."""
    psi: float
    js_noise: float
    psi_noise: float


def drift(counts: Sequence[int], previous: Sequence[int]) -> Drift | None:
    """Distances between bucket counts [B] of this run and the previous one; None if either has no values.

    Raises ``ValueError`` if they have different numbers of buckets.
    """
    if len(counts) != len(previous):
        raise ValueError(f"histograms must have the same buckets, got {len(counts)} and {len(previous)}")
    c, d = np.asarray(counts, np.float64), np.asarray(previous, np.float64)
    used = (c + d) > 0
    c, d = c[used], d[used]
    if c.sum() == 0 or d.sum() == 0:
        return None
    noise = (len(c) - 1) * (1 / c.sum() + 1 / d.sum())
    return Drift(_js_divergence(c / c.sum(), d / d.sum()), _psi(c, d), noise / (8 * math.log(2)), noise)


def _js_divergence(p: Shares, q: Shares) -> float:
    w = (p + q) / 2
    halves = [float((x[x > 0] * np.log2(x[x > 0] / w[x > 0])).sum()) / 2 for x in (p, q)]
    return min(max(sum(halves), 0.0), 1.0)


def _psi(c: Shares, d: Shares) -> float:
    p, q = ((x + 0.5) / (x.sum() + 0.5 * len(x)) for x in (c, d))
    return float(((p - q) * np.log(p / q)).sum())
