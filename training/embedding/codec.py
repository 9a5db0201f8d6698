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
from numba import njit, types
from numba.extending import intrinsic

WIRE_DTYPES: dict[str, np.dtype[Any]] = {"float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
HALF_LARGEST_EXPONENT = 15


def encode(block: npt.NDArray[np.float32], dtype: np.dtype[Any]) -> tuple[npt.NDArray[Any], float]:
    """The block as it travels, and its scale. Non-finite values travel as they are, with scale 1 for the rest."""
    if dtype == np.float32:
        return block, 1.0
    scale = scale_for(_largest_magnitude(block.reshape(-1)))
    out = np.empty(block.shape, np.float16)
    _to_half(block.reshape(-1), np.float32(scale), out.reshape(-1).view(np.uint16))
    return out, scale


def decode(block: npt.NDArray[Any], scale: float) -> npt.NDArray[np.float32]:
    """Inverse of ``encode``: a float32 array of its own unless the block already is one."""
    if block.dtype == np.float32:
        return block
    out = np.empty(block.shape, np.float32)
    _from_half(block.reshape(-1).view(np.uint16), np.float32(1.0 / scale), out.reshape(-1))
    return out


def scale_for(largest: float) -> float:
    """The power of two for a block whose largest magnitude is given; 1 for zero or non-finite."""
    if largest == 0.0 or not math.isfinite(largest):
        return 1.0
    exponent = HALF_LARGEST_EXPONENT - math.frexp(largest)[1]
    return 2.0 ** max(-126, min(126, exponent))


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


@njit(nogil=True, cache=True)
def _to_half(values: Any, scale: Any, out: Any) -> None:
    for i in range(len(values)):
        out[i] = _half_bits(values[i] * scale)


@njit(nogil=True, cache=True)
def _from_half(bits: Any, inverse: Any, out: Any) -> None:
    for i in range(len(bits)):
        out[i] = _from_half_bits(bits[i]) * inverse


@njit(nogil=True, cache=True)
def _largest_magnitude(values: Any) -> Any:
    """NaN if any value is; comparisons alone would pass over it."""
    largest = np.float32(0.0)
    poison = np.float32(0.0)
    for i in range(len(values)):
        magnitude = abs(values[i])
        poison += values[i] * np.float32(0.0)
        largest = max(largest, magnitude)
    return largest + poison
