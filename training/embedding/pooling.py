"""From unique rows to one vector per record and slot, and the way back of its gradient.

Kernels write into columns ``[offset, offset + dim)`` of the batch's C-contiguous [N, E] array, so that no slot needs an array of its own.
``inverse`` gives for every occurrence the index of its unique row: those of a table's S single-valued slots record by record, those of a
multi-valued slot contiguous, in record order.
Rows are moved eight lanes at a time; ``add`` and ``multiply`` round as one float32 operation each, in record order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from training.embedding.jit import kernel
from training.embedding.simd import LANES, all8, float32x8, load8, load_lanes, prefetch, store8, store_lanes

_AHEAD = 16
_HALVES = ir.VectorType(ir.HalfType(), LANES)
_FLOATS = ir.VectorType(ir.FloatType(), LANES)


@intrinsic
def load8_half(_typing: Any, array: Any, index: Any) -> Any:  # noqa: ARG001 - numba binds arguments by name
    """array[index : index + 8] of a uint16 array that holds float16, as float32 lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), _HALVES.as_pointer())
        return builder.fpext(builder.load(pointer, align=2), _FLOATS)

    return float32x8(array, types.int64), generate


@kernel
def expand(rows_UD: Any, inverse: Any, columns: Any, out_NE: Any) -> None:
    """The S single-valued slots of a table: slot s of record n gets its id's row at columns[s]. inverse uint32 [N * S], columns int64 [S].

    Lanes are moved, not computed with: rows and output may also be pairs of float16.
    """
    dim, width, slots = rows_UD.shape[1], out_NE.shape[1], len(columns)
    rows, out = rows_UD.reshape(-1), out_NE.reshape(-1)
    for n in range(len(inverse) // max(slots, 1)):
        for s in range(slots):
            i = n * slots + s
            if i + _AHEAD < len(inverse):
                prefetch(rows, np.int64(inverse[np.uint64(i + _AHEAD)]) * dim)
            base, to = np.int64(inverse[np.uint64(i)]) * dim, n * width + columns[s]
            for d in range(0, dim, 8):
                store_lanes(out, to + d, load_lanes(rows, base + d, dim - d), dim - d)


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
                total = total + load_lanes(rows, np.int64(inverse[i]) * dim + d, dim - d)
            store_lanes(out, n * width + offset + d, total * weight, dim - d)


@kernel
def expand_backward(gradient_NE: Any, inverse: Any, columns: Any, out_UD: Any) -> None:
    """Adds the gradient of every slot of each record to its id's row of ``out_UD``, in the order of ``inverse`` [N * S]."""
    dim, width, slots = out_UD.shape[1], gradient_NE.shape[1], len(columns)
    gradient, out = gradient_NE.reshape(-1), out_UD.reshape(-1)
    for n in range(len(inverse) // max(slots, 1)):
        for s in range(slots):
            i = n * slots + s
            if i + _AHEAD < len(inverse):
                prefetch(out, np.int64(inverse[np.uint64(i + _AHEAD)]) * dim)
            base, source = np.int64(inverse[np.uint64(i)]) * dim, n * width + columns[s]
            for d in range(0, dim, 8):
                store_lanes(out, base + d, load_lanes(out, base + d, dim - d) + load_lanes(gradient, source + d, dim - d), dim - d)


@kernel
def expand_backward_half(bits_NE: Any, factor: Any, inverse: Any, columns: Any, out_UD: Any) -> None:
    """``expand_backward`` of float16 gradients (as uint16) times ``factor``; for widths that are multiples of 8."""
    dim, width, slots = out_UD.shape[1], bits_NE.shape[1], len(columns)
    bits, out = bits_NE.reshape(-1), out_UD.reshape(-1)
    factors = all8(factor)
    for n in range(len(inverse) // max(slots, 1)):
        for s in range(slots):
            i = n * slots + s
            if i + _AHEAD < len(inverse):
                prefetch(out, np.int64(inverse[np.uint64(i + _AHEAD)]) * dim)
            base, source = np.int64(inverse[np.uint64(i)]) * dim, n * width + columns[s]
            for d in range(0, dim, 8):
                store8(out, base + d, load8(out, base + d) + load8_half(bits, source + d) * factors)


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
                share = load_lanes(gradient, n * width + offset + d, dim - d) * weight
                store_lanes(out, base + d, load_lanes(out, base + d, dim - d) + share, dim - d)
