"""From unique rows to one vector per record and slot, and the way back of its gradient.

Kernels write into columns ``[offset, offset + dim)`` of the batch's [N, E] array, so that no slot needs an array of its own.
``inverse`` gives for every occurrence the index of its unique row; the occurrences of a slot are contiguous, in record order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def expand(rows_UD: Any, inverse: Any, out_NE: Any, offset: Any) -> None:
    """A single-valued slot: record n gets its id's row. inverse uint32 [N]."""
    dim = rows_UD.shape[1]
    for n in range(len(inverse)):
        u = inverse[n]
        for d in range(dim):
            out_NE[n, offset + d] = rows_UD[u, d]


@njit(nogil=True, cache=True)
def pool(rows_UD: Any, inverse: Any, offsets: Any, mean: Any, out_NE: Any, offset: Any) -> None:
    """A multi-valued slot: the sum or mean of the rows of offsets[n]:offsets[n+1]; zeros for none. offsets int64 [N + 1]."""
    dim = rows_UD.shape[1]
    for n in range(len(offsets) - 1):
        first, last = offsets[n], offsets[n + 1]
        for d in range(dim):
            out_NE[n, offset + d] = np.float32(0.0)
        for i in range(first, last):
            u = inverse[i]
            for d in range(dim):
                out_NE[n, offset + d] += rows_UD[u, d]
        if mean and last - first > 1:
            weight = np.float32(1.0) / np.float32(last - first)
            for d in range(dim):
                out_NE[n, offset + d] *= weight


@njit(nogil=True, cache=True)
def expand_backward(gradient_NE: Any, inverse: Any, offset: Any, out_UD: Any) -> None:
    """Adds each record's gradient to its id's row of ``out_UD``, in record order."""
    dim = out_UD.shape[1]
    for n in range(len(inverse)):
        u = inverse[n]
        for d in range(dim):
            out_UD[u, d] += gradient_NE[n, offset + d]


@njit(nogil=True, cache=True)
def pool_backward(gradient_NE: Any, inverse: Any, offsets: Any, mean: Any, offset: Any, out_UD: Any) -> None:
    """Adds each record's gradient (over its number of ids, if mean) to the rows of its ids."""
    dim = out_UD.shape[1]
    for n in range(len(offsets) - 1):
        first, last = offsets[n], offsets[n + 1]
        weight = np.float32(1.0)
        if mean and last - first > 1:
            weight = np.float32(1.0) / np.float32(last - first)
        for i in range(first, last):
            u = inverse[i]
            for d in range(dim):
                out_UD[u, d] += gradient_NE[n, offset + d] * weight
