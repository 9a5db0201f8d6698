"""From unique rows to one vector per record and slot, and the way back of its gradient.

Kernels write into columns ``[offset, offset + dim)`` of the batch's C-contiguous [N, E] array, so that no slot needs an array of its own.
``inverse`` gives for every occurrence the index of its unique row; the occurrences of a slot are contiguous, in record order.
Rows are moved eight lanes at a time; ``add`` and ``multiply`` round as one float32 operation each, in record order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from training.embedding.jit import inlined, kernel
from training.embedding.simd import all8, load8, load_part, store8, store_part


@inlined
def _load(array: Any, index: Any, count: Any) -> Any:
    if count >= 8:
        return load8(array, index)
    return load_part(array, index, count)


@inlined
def _store(array: Any, index: Any, value: Any, count: Any) -> None:
    if count >= 8:
        store8(array, index, value)
    else:
        store_part(array, index, value, count)


@kernel
def expand(rows_UD: Any, inverse: Any, out_NE: Any, offset: Any) -> None:
    """A single-valued slot: record n gets its id's row. inverse uint32 [N]."""
    dim, width = rows_UD.shape[1], out_NE.shape[1]
    rows, out = rows_UD.reshape(-1), out_NE.reshape(-1)
    for n in range(len(inverse)):
        base = np.int64(inverse[np.uint64(n)]) * dim
        for d in range(0, dim, 8):
            _store(out, n * width + offset + d, _load(rows, base + d, dim - d), dim - d)


@kernel
def pool(rows_UD: Any, inverse: Any, offsets: Any, mean: Any, out_NE: Any, offset: Any) -> None:
    """A multi-valued slot: the sum or mean of the rows of offsets[n]:offsets[n+1]; zeros for none. offsets int64 [N + 1]."""
    dim, width = rows_UD.shape[1], out_NE.shape[1]
    rows, out = rows_UD.reshape(-1), out_NE.reshape(-1)
    for n in range(len(offsets) - 1):
        first, last = offsets[n], offsets[n + 1]
        weight = all8(np.float32(1.0) / np.float32(max(last - first, 1)) if mean else np.float32(1.0))
        for d in range(0, dim, 8):
            total = all8(np.float32(0.0))
            for i in range(first, last):
                total = total + _load(rows, np.int64(inverse[i]) * dim + d, dim - d)
            _store(out, n * width + offset + d, total * weight, dim - d)


@kernel
def expand_backward(gradient_NE: Any, inverse: Any, offset: Any, out_UD: Any) -> None:
    """Adds each record's gradient to its id's row of ``out_UD``, in record order."""
    dim, width = out_UD.shape[1], gradient_NE.shape[1]
    gradient, out = gradient_NE.reshape(-1), out_UD.reshape(-1)
    for n in range(len(inverse)):
        base = np.int64(inverse[np.uint64(n)]) * dim
        for d in range(0, dim, 8):
            _store(out, base + d, _load(out, base + d, dim - d) + _load(gradient, n * width + offset + d, dim - d), dim - d)


@kernel
def pool_backward(gradient_NE: Any, inverse: Any, offsets: Any, mean: Any, offset: Any, out_UD: Any) -> None:
    """Adds each record's gradient (over its number of ids, if mean) to the rows of its ids."""
    dim, width = out_UD.shape[1], gradient_NE.shape[1]
    gradient, out = gradient_NE.reshape(-1), out_UD.reshape(-1)
    for n in range(len(offsets) - 1):
        first, last = offsets[n], offsets[n + 1]
        weight = all8(np.float32(1.0) / np.float32(max(last - first, 1)) if mean else np.float32(1.0))
        for i in range(first, last):
            base = np.int64(inverse[i]) * dim
            for d in range(0, dim, 8):
                share = _load(gradient, n * width + offset + d, dim - d) * weight
                _store(out, base + d, _load(out, base + d, dim - d) + share, dim - d)
