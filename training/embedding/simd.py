# mypy: disallow-subclassing-any=False
"""Eight float32 lanes and the few machine instructions that numba does not offer: loads, stores, prefetch, one-line key match.

LLVM cannot prove that rows, state and gradients do not overlap, and unrolls short loops before it could vectorise them; written with
these the kernels ran 2.7x faster (prototype, Zen 3, 2026-12). Arithmetic is IEEE, unfused, one rounding per operation: results do not
depend on the vector width of the machine. Indices are elements of flat C-contiguous arrays; they are checked only where numba checks its
own (NUMBA_BOUNDSCHECK=1).
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils, config
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

from training.embedding.jit import inlined

LANES = 8
_I64 = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), LANES)
_KEYS = ir.VectorType(_I64, LANES)


class Float32x8(types.Type):
    """Numba's view of eight float32 values in one register."""

    def __init__(self) -> None:
        super().__init__(name="Float32x8")


float32x8 = Float32x8()


@register_model(Float32x8)
class _Float32x8Model(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


class _Binary(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        if not kws and len(args) == 2 and all(isinstance(a, Float32x8) for a in args):
            return signature(float32x8, float32x8, float32x8)
        return None


def _define(operation: Any, instruction: str) -> None:
    infer_global(operation)(type(f"_{instruction}", (_Binary,), {"key": operation}))

    def lower(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return getattr(builder, instruction)(*args)

    lower_builtin(operation, Float32x8, Float32x8)(lower)


for _operation, _instruction in ((operator.add, "fadd"), (operator.sub, "fsub"), (operator.mul, "fmul"), (operator.truediv, "fdiv")):
    _define(_operation, _instruction)


def address(context: Any, builder: Any, array_type: Any, array: Any, index: Any, *, width: Any = LANES) -> Any:
    """Pointer to array[index], of which ``width`` elements will be touched (an int or an LLVM value)."""
    view = context.make_array(array_type)(context, builder, array)
    if config.BOUNDSCHECK:
        end = builder.add(index, ir.Constant(_I64, width) if isinstance(width, int) else width)
        wrong = builder.or_(builder.icmp_signed("<", index, ir.Constant(_I64, 0)), builder.icmp_signed(">", end, view.nitems))
        with builder.if_then(wrong, likely=False):
            context.call_conv.return_user_exc(builder, IndexError, ("vector access beyond the array",))
    return builder.gep(view.data, [index])


def declare(builder: Any, name: str, function_type: Any) -> Any:
    """LLVM's own functions, by full name: llvmlite cannot spell those of vectors."""
    return cgutils.get_or_insert_function(builder.module, function_type, name)


@intrinsic
def load8(_typing: Any, array: Any, index: Any) -> Any:
    """array[index : index + 8] of a float32 array."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        where = address(context, builder, sig.args[0], args[0], args[1])
        return builder.load(builder.bitcast(where, VECTOR.as_pointer()), align=4)

    return float32x8(array, types.int64), generate


@intrinsic
def store8(_typing: Any, array: Any, index: Any, value: Any) -> Any:
    """array[index : index + 8] = value."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        where = address(context, builder, sig.args[0], args[0], args[1])
        builder.store(args[2], builder.bitcast(where, VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, float32x8), generate


def lane_mask(builder: Any, count: Any) -> Any:
    """Which of the eight lanes are among the first ``count``."""
    lane_type = ir.IntType(32)
    lanes = ir.Constant(ir.VectorType(lane_type, LANES), list(range(LANES)))
    one = builder.insert_element(ir.Constant(lanes.type, ir.Undefined), builder.trunc(count, lane_type), ir.Constant(lane_type, 0))
    all_lanes = builder.shuffle_vector(one, ir.Constant(lanes.type, ir.Undefined), ir.Constant(lanes.type, [0] * LANES))
    return builder.icmp_signed("<", lanes, all_lanes)


@intrinsic
def load_part(_typing: Any, array: Any, index: Any, count: Any) -> Any:
    """The first ``count`` < 8 lanes from array[index:], zeros in the others; touches no memory beyond."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        where = builder.bitcast(address(context, builder, sig.args[0], args[0], args[1], width=args[2]), VECTOR.as_pointer())
        mask = lane_mask(builder, args[2])
        align = ir.Constant(ir.IntType(32), 4)
        function_type = ir.FunctionType(VECTOR, [where.type, align.type, mask.type, VECTOR])
        function = declare(builder, "llvm.masked.load.v8f32.p0", function_type)
        return builder.call(function, [where, align, mask, ir.Constant(VECTOR, [0.0] * LANES)])

    return float32x8(array, types.int64, types.int64), generate


@intrinsic
def store_part(_typing: Any, array: Any, index: Any, value: Any, count: Any) -> Any:
    """The first ``count`` < 8 lanes to array[index:]."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        where = builder.bitcast(address(context, builder, sig.args[0], args[0], args[1], width=args[3]), VECTOR.as_pointer())
        mask = lane_mask(builder, args[3])
        align = ir.Constant(ir.IntType(32), 4)
        function_type = ir.FunctionType(ir.VoidType(), [VECTOR, where.type, align.type, mask.type])
        function = declare(builder, "llvm.masked.store.v8f32.p0", function_type)
        builder.call(function, [args[2], where, align, mask])
        return context.get_dummy_value()

    return types.void(array, types.int64, float32x8, types.int64), generate


@intrinsic
def all8(_typing: Any, value: Any) -> Any:
    """The float32 value in every lane."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        undefined = ir.Constant(VECTOR, ir.Undefined)
        zero = ir.Constant(ir.IntType(32), 0)
        one = builder.insert_element(undefined, args[0], zero)
        return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(zero.type, LANES), [0] * LANES))

    return float32x8(types.float32), generate


@intrinsic
def sqrt8(_typing: Any, value: Any) -> Any:
    """Square root of every lane, rounded to nearest."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        return builder.call(declare(builder, "llvm.sqrt.v8f32", ir.FunctionType(VECTOR, [VECTOR])), args)

    return float32x8(float32x8), generate


@intrinsic
def sum8(_typing: Any, value: Any) -> Any:
    """Sum over the lanes, pairwise: ((0+4)+(2+6)) + ((1+5)+(3+7))."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        parts = [builder.extract_element(args[0], ir.Constant(ir.IntType(32), lane)) for lane in range(LANES)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [builder.fadd(parts[i], parts[i + half]) for i in range(half)]
        return parts[0]

    return types.float32(float32x8), generate


@intrinsic
def prefetch(_typing: Any, array: Any, index: Any) -> Any:
    """Ask for the cache line of array[index], to be read and written soon. Never faults."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        data = context.make_array(sig.args[0])(context, builder, args[0]).data
        pointer = builder.bitcast(builder.gep(data, [args[1]]), ir.IntType(8).as_pointer())
        i32 = ir.IntType(32)
        function_type = ir.FunctionType(ir.VoidType(), [pointer.type, i32, i32, i32])
        function = declare(builder, "llvm.prefetch.p0", function_type)
        builder.call(function, [pointer, ir.Constant(i32, 0), ir.Constant(i32, 3), ir.Constant(i32, 1)])
        return context.get_dummy_value()

    return types.void(array, types.int64), generate


@intrinsic
def match8(_typing: Any, array: Any, index: Any, key: Any) -> Any:
    """Bit i of the result (uint64) tells whether array[index + i] == key, for the eight words of a line of a uint64 array."""

    def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        where = address(context, builder, sig.args[0], args[0], args[1])
        line = builder.load(builder.bitcast(where, _KEYS.as_pointer()), align=8)
        undefined = ir.Constant(_KEYS, ir.Undefined)
        one = builder.insert_element(undefined, args[2], ir.Constant(ir.IntType(32), 0))
        keys = builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES))
        bits = builder.bitcast(builder.icmp_unsigned("==", line, keys), ir.IntType(LANES))
        return builder.zext(bits, _I64)

    return types.uint64(array, types.int64, types.uint64), generate


@intrinsic
def trailing_zeros(_typing: Any, value: Any) -> Any:
    """Index of the lowest set bit of a uint64, 64 for 0 (int64)."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        function_type = ir.FunctionType(_I64, [_I64, ir.IntType(1)])
        function = declare(builder, "llvm.cttz.i64", function_type)
        return builder.call(function, [args[0], ir.Constant(ir.IntType(1), 0)])

    return types.int64(types.uint64), generate


@intrinsic
def multiply_high(_typing: Any, a: Any, b: Any) -> Any:
    """The upper 64 bits of the 128-bit product of two uint64: a scaled from [0, 2^64) to [0, b)."""

    def generate(_context: Any, builder: Any, _sig: Any, args: Any) -> Any:
        wide = ir.IntType(128)
        product = builder.mul(builder.zext(args[0], wide), builder.zext(args[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), _I64)

    return types.uint64(types.uint64, types.uint64), generate


@inlined
def load_lanes(array: Any, index: Any, count: Any) -> Any:
    """Up to eight values from ``index``: whole lanes where ``count`` allows, zeros beyond it."""
    if count >= 8:
        return load8(array, index)
    return load_part(array, index, count)


@inlined
def store_lanes(array: Any, index: Any, value: Any, count: Any) -> None:
    """The first ``count`` lanes, at most eight, to ``index``."""
    if count >= 8:
        store8(array, index, value)
    else:
        store_part(array, index, value, count)
