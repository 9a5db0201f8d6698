"""First values of a row: a function of its sign and the seed alone, eight at a time.

Two values come from each 64-bit hash of (sign, pair, seed). Checkpoints do not hold them, but results depend on them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from training.embedding.hashing import GOLDEN, mix
from training.embedding.jit import inlined
from training.embedding.precision import NEAREST, store_values
from training.embedding.simd import LANES, all8, float32x8, store8, store_part

INIT_ZEROS, INIT_UNIFORM, INIT_NORMAL = 0, 1, 2
INITIALIZERS = {"zeros": INIT_ZEROS, "uniform": INIT_UNIFORM, "normal": INIT_NORMAL}

_U1, _U32 = np.uint64(1), np.uint64(32)
_LOW_32 = np.uint64(2**32 - 1)
_TWO_PI = 2.0 * np.pi
_PAIRS = LANES // 2


@intrinsic
def _uniform8(_typing: Any, origin: Any, pair: Any, scale: Any) -> Any:
    """Lanes 2k and 2k + 1: the upper two 24 bits of mix(origin + (pair + 1 + k) * GOLDEN), scaled to [-scale, scale) in float64."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        i64 = ir.IntType(64)
        words = ir.VectorType(i64, _PAIRS)
        doubles = ir.VectorType(ir.DoubleType(), _PAIRS)

        def every(value: Any) -> Any:
            return ir.Constant(words, [value] * _PAIRS)

        def spread(value: Any, vector: Any) -> Any:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(
                one, ir.Constant(vector, ir.Undefined), ir.Constant(ir.VectorType(ir.IntType(32), _PAIRS), [0] * 4)
            )

        counter = builder.add(spread(args[1], words), ir.Constant(words, [1, 2, 3, 4]))
        bits = builder.add(spread(args[0], words), builder.mul(counter, every(int(GOLDEN))))
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = builder.mul(builder.xor(bits, builder.lshr(bits, every(shift))), every(factor))
        bits = builder.xor(bits, builder.lshr(bits, every(31)))
        parts = []
        for shift in (40, 8):
            part = builder.and_(builder.lshr(bits, every(shift)), every(2**24 - 1))
            value = builder.sitofp(builder.trunc(part, ir.VectorType(ir.IntType(32), _PAIRS)), doubles)
            value = builder.fsub(builder.fmul(value, ir.Constant(doubles, [2.0**-23] * 4)), ir.Constant(doubles, [1.0] * 4))
            value = builder.fmul(value, spread(args[2], doubles))
            parts.append(builder.fptrunc(value, ir.VectorType(ir.FloatType(), _PAIRS)))
        order = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0, 4, 1, 5, 2, 6, 3, 7])
        return builder.shuffle_vector(*parts, order)

    return float32x8(types.uint64, types.uint64, types.float64), generate


@intrinsic
def _with_lane(_typing: Any, vector: Any, lane: Any, value: Any) -> Any:
    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.insert_element(args[0], args[2], builder.trunc(args[1], ir.IntType(32)))

    return float32x8(float32x8, types.int64, types.float32), generate


@inlined
def _normal8(origin: Any, pair: Any, scale: Any) -> Any:
    """Box and Muller 1958: two values from the upper and the lower half of each hash."""
    values = all8(np.float32(0.0))
    for k in range(_PAIRS):
        bits = mix(origin + (pair + np.uint64(k) + _U1) * GOLDEN)
        radius = np.sqrt(-2.0 * np.log((np.float64(bits >> _U32) + 0.5) / 4294967296.0)) * scale
        angle = _TWO_PI * np.float64(bits & _LOW_32) / 4294967296.0
        values = _with_lane(values, 2 * k, np.float32(radius * np.cos(angle)))
        values = _with_lane(values, 2 * k + 1, np.float32(radius * np.sin(angle)))
    return values


@inlined
def initialise(values: Any, rows: Any, slot: Any, layout: Any, sign: Any, initial: Any) -> None:
    """Write the first values of a new row, and its state.

    ``layout`` is that of ``training.embedding.kernels.read``; ``initial`` is (seed, kind, scale, state).
    """
    (stride, width, head, dim), (seed, kind, scale, state) = layout, initial
    origin = mix(sign ^ seed)
    base = slot * width
    for j in range(0, dim, LANES):
        if kind == INIT_UNIFORM:
            drawn = _uniform8(origin, np.uint64(j) // np.uint64(2), scale)
        elif kind == INIT_NORMAL:
            drawn = _normal8(origin, np.uint64(j) // np.uint64(2), scale)
        else:
            drawn = all8(np.float32(0.0))
        store_values(values, base + j, drawn, dim - j, NEAREST, j)
    filling = all8(state)
    for j in range(head, stride, LANES):
        if stride - j >= LANES:
            store8(rows, slot * stride + j, filling)
        else:
            store_part(rows, slot * stride + j, filling, stride - j)
