"""Values and gradients on the wire: float32, or float16 scaled per block so that small gradients do not underflow.

A block is one array of a message. It is multiplied by a power of two that brings its largest magnitude near 2^15 before the cast and
divided by it after: values down to 2^-29 of the largest keep full half precision (Persia's paper describes such a scaling; its
public code casts without one). A power of two adds no rounding of its own.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from training.embedding.dedup import read_only
from training.embedding.jit import kernel

WIRE_DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
HALF_LARGEST_EXPONENT = 15
MAX_EXPONENT = 100


def encode(block: npt.NDArray[np.float32], dtype: np.dtype[Any], out: npt.NDArray[Any] | None = None) -> tuple[npt.NDArray[Any], float]:
    """The block as it travels, in ``out`` if given, and its scale. Non-finite values travel as they are, with scale 1 for the rest."""
    if dtype == np.float32:
        if out is None:
            return block, 1.0
        np.copyto(out, block)
        return out, 1.0
    values = read_only(block).reshape(-1)
    scale = scale_for(float(np.uint32(_largest_bits(values.view(np.uint32))).view(np.float32)))
    out = np.empty(block.shape, np.float16) if out is None else out
    _to_half(values, np.float32(scale), out.reshape(-1).view(np.uint16))
    return out, scale


def decode(block: npt.NDArray[Any], scale: float, out: npt.NDArray[np.float32] | None = None) -> npt.NDArray[np.float32]:
    """Inverse of ``encode``, in ``out`` if given; else a float32 array of its own unless the block already is one."""
    if block.dtype == np.float32:
        if out is None:
            return block
        np.copyto(out, block)
        return out
    out = np.empty(block.shape, np.float32) if out is None else out
    _from_half(bits_of(block).reshape(-1), np.float32(1.0 / scale), out.reshape(-1))
    return out


def rescale(block: npt.NDArray[np.float16], factor: float, out: npt.NDArray[np.float16]) -> None:
    """Fill ``out`` with block * factor, a power of two not above 1: what encoding with the smaller scale would have given."""
    _rescale(bits_of(block).reshape(-1), np.float32(factor), out.reshape(-1).view(np.uint16))


def bits_of(block: npt.NDArray[np.float16]) -> npt.NDArray[np.uint16]:
    """A read-only view as uint16: kernels know no float16."""
    return read_only(block).view(np.uint16)


def scale_for(largest: float) -> float:
    """The power of two for a block whose largest magnitude is given: 1 if that is not finite, the largest if it is zero."""
    if not math.isfinite(largest):
        return 1.0
    if largest == 0.0:
        return 2.0**MAX_EXPONENT
    exponent = HALF_LARGEST_EXPONENT - math.frexp(largest)[1]
    return 2.0 ** max(-126, min(MAX_EXPONENT, exponent))


@intrinsic
def _half_bits(_typing: Any, value: Any) -> Any:
    """Float32 to the bits of the nearest float16, in one instruction where the CPU has it."""

    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(value), generate


@intrinsic
def _from_half_bits(_typing: Any, bits: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(bits), generate


@kernel
def _to_half(values: Any, scale: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = _half_bits(values[i] * scale)


@kernel
def _from_half(bits: Any, inverse: Any, out: Any) -> None:
    for i in range(len(bits)):
        out[i] = _from_half_bits(bits[i]) * inverse


@kernel
def _rescale(bits: Any, factor: Any, out: Any) -> None:
    for i in range(len(bits)):
        out[i] = _half_bits(_from_half_bits(bits[i]) * factor)


@kernel
def _largest_bits(bits: Any) -> Any:
    """The largest magnitude, as the bits of a float32: magnitudes order as integers do, and NaN comes above infinity.

    As floats LLVM would keep the order of the maxima and use one lane.
    """
    largest = np.uint32(0)
    for i in range(len(bits)):
        largest = max(largest, np.uint32(bits[i] & np.uint32(0x7FFFFFFF)))
    return largest
