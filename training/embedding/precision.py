"""Rows stored in 16 bits: reading them as eight float32 lanes, and stochastic rounding on the way back.

The type of the array says the format: float32 rows are float32, float16 rows int16, bfloat16 rows uint16 (both the bits alone). Kernels are
compiled for the format at hand. Rounded to nearest, an update smaller than half a step of the format is lost for ever, and most are
(Zamirai et al. 2021); rounded up with the probability of what is cut off, it is kept on average. The noise is a hash of (key, position),
the key one of sign and step: a resumed run rounds as an uninterrupted one. float16 is rounded right down to its subnormals; beyond
65504 it becomes infinite, as it must: nothing is clamped silently.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from training.embedding.jit import inlined
from training.embedding.simd import LANES, VECTOR, address, declare, float32x8, lane_mask

ROW_DTYPES: dict[str, tuple[np.dtype[Any], int]] = {
    "float32": (np.dtype(np.float32), 4),
    "float16": (np.dtype(np.int16), 2),
    "bfloat16": (np.dtype(np.uint16), 2),
}
"""dtype of the array of values, and bytes per value, by the name in the configuration."""

NEAREST = np.int64(-1)
"""In place of a key: round to nearest."""

_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_HALVES, _WORDS = ir.VectorType(_I16, LANES), ir.VectorType(_I32, LANES)


def _every(value: int) -> Any:
    return ir.Constant(_WORDS, [value] * LANES)


def _floats(value: float) -> Any:
    return ir.Constant(VECTOR, [value] * LANES)


def _spread(builder: Any, value: Any, vector: Any) -> Any:
    undefined = ir.Constant(vector, ir.Undefined)
    return builder.shuffle_vector(builder.insert_element(undefined, value, ir.Constant(_I32, 0)), undefined, _every(0))


def _widened(builder: Any, dtype: Any, raw: Any) -> Any:
    """The bits of eight halves as float32 lanes."""
    if dtype == types.uint16:
        return builder.bitcast(builder.shl(builder.zext(raw, _WORDS), _every(16)), VECTOR)
    return builder.fpext(builder.bitcast(raw, ir.VectorType(ir.HalfType(), LANES)), VECTOR)


def _noise(builder: Any, key: Any, position: Any) -> Any:
    """Sixteen random bits per lane, uniform over keys and positions; 32768, which rounds to nearest, for ``NEAREST``."""
    lanes = builder.add(_spread(builder, builder.trunc(position, _I32), _WORDS), ir.Constant(_WORDS, list(range(LANES))))
    x = builder.add(_spread(builder, builder.trunc(key, _I32), _WORDS), builder.mul(lanes, _every(0x9E3779B9)))
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # Wellons' and Degski's 32-bit mixer
        x = builder.mul(builder.xor(x, builder.lshr(x, _every(shift))), _every(factor))
    nearest = builder.icmp_signed("==", key, ir.Constant(key.type, int(NEAREST)))
    return builder.select(nearest, _every(0x8000), builder.lshr(x, _every(16)))


def _bfloat16(builder: Any, value: Any, noise: Any) -> Any:
    bits = builder.bitcast(value, _WORDS)
    rounded = builder.lshr(builder.add(bits, noise), _every(16))
    quiet = builder.or_(builder.lshr(bits, _every(16)), _every(0x40))  # A carry could turn a NaN into a number.
    return builder.trunc(builder.select(builder.fcmp_unordered("uno", value, value), quiet, rounded), _HALVES)


def _float16(builder: Any, value: Any, noise: Any) -> Any:
    bits = builder.bitcast(value, _WORDS)
    normal = builder.and_(builder.add(bits, builder.lshr(noise, _every(3))), _every(0xFFFFE000))
    sign = builder.and_(bits, _every(0x80000000))
    size = builder.bitcast(builder.and_(bits, _every(0x7FFFFFFF)), VECTOR)
    share = builder.fmul(builder.uitofp(noise, VECTOR), _floats(2.0**-16))
    steps = builder.fadd(builder.fmul(size, _floats(2.0**24)), share)
    whole = builder.call(declare(builder, "llvm.floor.v8f32", ir.FunctionType(VECTOR, [VECTOR])), [steps])
    small = builder.or_(builder.bitcast(builder.fmul(whole, _floats(2.0**-24)), _WORDS), sign)
    chosen = builder.select(builder.fcmp_ordered("<", size, _floats(2.0**-14)), small, normal)
    chosen = builder.select(builder.fcmp_unordered("uno", value, value), bits, chosen)
    narrow = builder.fptrunc(builder.bitcast(chosen, VECTOR), ir.VectorType(ir.HalfType(), LANES))  # exact
    return builder.bitcast(narrow, _HALVES)


@intrinsic
def load_values8(_typing: Any, values: Any, index: Any) -> Any:
    """values[index : index + 8] as float32 lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        pointer = address(context, builder, sig.args[0], args[0], args[1])
        kind = VECTOR if sig.args[0].dtype == types.float32 else _HALVES
        raw = builder.load(builder.bitcast(pointer, kind.as_pointer()), align=4 if kind is VECTOR else 2)
        return raw if kind is VECTOR else _widened(builder, sig.args[0].dtype, raw)

    return float32x8(values, types.int64), generate


@intrinsic
def load_values_part(_typing: Any, values: Any, index: Any, count: Any) -> Any:
    """The first ``count`` < 8 of them, zeros in the other lanes."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        kind, name, size = (VECTOR, "v8f32", 4) if dtype == types.float32 else (_HALVES, "v8i16", 2)
        pointer = builder.bitcast(address(context, builder, sig.args[0], args[0], args[1], width=args[2]), kind.as_pointer())
        mask, align = lane_mask(builder, args[2]), ir.Constant(_I32, size)
        function_type = ir.FunctionType(kind, [pointer.type, align.type, mask.type, kind])
        zeros = ir.Constant(kind, [0.0 if kind is VECTOR else 0] * LANES)
        raw = builder.call(declare(builder, f"llvm.masked.load.{name}.p0", function_type), [pointer, align, mask, zeros])
        return raw if kind is VECTOR else _widened(builder, dtype, raw)

    return float32x8(values, types.int64, types.int64), generate


@intrinsic
def copy16(_typing: Any, values: Any, index: Any, out: Any, to: Any) -> Any:
    """out[to : to + 16] = values[index : index + 16]; float32 as one whole line, which no cache has to read first: 1.1x from dim 64 on."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        dtype = sig.args[0].dtype
        source = address(context, builder, sig.args[0], args[0], args[1], width=2 * LANES)
        target = address(context, builder, sig.args[2], args[2], args[3], width=2 * LANES)
        if dtype == types.float32:
            line = ir.VectorType(ir.FloatType(), 2 * LANES).as_pointer()
            builder.store(builder.load(builder.bitcast(source, line), align=4), builder.bitcast(target, line), align=4)
            return context.get_dummy_value()
        source, target = builder.bitcast(source, _HALVES.as_pointer()), builder.bitcast(target, VECTOR.as_pointer())
        for half in (ir.Constant(_I64, 0), ir.Constant(_I64, 1)):
            raw = builder.load(builder.gep(source, [half]), align=2)
            builder.store(_widened(builder, dtype, raw), builder.gep(target, [half]), align=4)
        return context.get_dummy_value()

    return types.void(values, types.int64, out, types.int64), generate


@intrinsic
def _store(_typing: Any, values: Any, index: Any, value: Any, count: Any, key: Any, position: Any) -> Any:
    """The first ``count`` lanes, all of them if it is 8 or more, rounded to the format of ``values``."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        array, index, value, count, key, position = args
        dtype = sig.args[0].dtype
        kind, name, size = (VECTOR, "v8f32", 4) if dtype == types.float32 else (_HALVES, "v8i16", 2)
        if kind is _HALVES:
            value = (_bfloat16 if dtype == types.uint16 else _float16)(builder, value, _noise(builder, key, position))
        whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))
        width = builder.select(whole, ir.Constant(count.type, LANES), count)
        pointer = builder.bitcast(address(context, builder, sig.args[0], array, index, width=width), kind.as_pointer())
        with builder.if_else(whole) as (then, otherwise):
            with then:
                builder.store(value, pointer, align=size)
            with otherwise:
                mask, align = lane_mask(builder, count), ir.Constant(_I32, size)
                function_type = ir.FunctionType(ir.VoidType(), [kind, pointer.type, align.type, mask.type])
                builder.call(declare(builder, f"llvm.masked.store.{name}.p0", function_type), [value, pointer, align, mask])
        return context.get_dummy_value()

    return types.void(values, types.int64, value, types.int64, types.int64, types.int64), generate


@inlined
def load_values(values: Any, index: Any, count: Any) -> Any:
    """values[index : index + min(count, 8)] as float32 lanes, zeros in the others."""
    if count >= LANES:
        return load_values8(values, index)
    return load_values_part(values, index, count)


@inlined
def store_values(values: Any, index: Any, value: Any, count: Any, key: Any, position: Any) -> None:
    """values[index : index + min(count, 8)] = value; ``position`` in the row and ``key`` decide the noise of 16-bit formats."""
    _store(values, index, value, count, np.int64(key), position)


def decoded(values: Any) -> Any:
    """An array of values of any format as float32 of the same shape, in NumPy."""
    if values.dtype == np.int16:
        return values.view(np.float16).astype(np.float32)
    if values.dtype == np.uint16:
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values
