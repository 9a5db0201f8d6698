"""What memory allows: updates of rows whose places are known, with prefetch and nothing else. ``benchmarks.table.bare_gather`` reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.table import ROWS_AHEAD, prefetch_row
from training.embedding.jit import kernel
from training.embedding.simd import all8, load8, sqrt8, store8, sum8

RATE, EPS = np.float32(-0.02), np.float32(1e-8)
BETA_1, BETA_2 = np.float32(0.9), np.float32(0.999)


@kernel
def bare_rowwise_adagrad(rows: Any, scalars: Any, dim: Any, slots: Any, gradients: Any) -> None:
    """dim: a multiple of 8, as below. A row is its values; its accumulator is scalars[slot]."""
    rate = all8(RATE)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, dim, dim)
        prefetch_row(scalars, slots, i + ROWS_AHEAD, 1, 1)
        slot = slots[np.uint64(i)]
        squares = all8(np.float32(0.0))
        for j in range(0, dim, 8):
            gradient = load8(gradients, i * dim + j)
            squares = squares + gradient * gradient
        scalars[slot] += sum8(squares) / np.float32(dim)
        denominator = all8(np.sqrt(scalars[slot]) + EPS)
        for j in range(0, dim, 8):
            value = load8(rows, slot * dim + j)
            store8(rows, slot * dim + j, value + rate * load8(gradients, i * dim + j) / denominator)


@kernel
def bare_adagrad(rows: Any, scalars: Any, dim: Any, slots: Any, gradients: Any) -> None:  # noqa: ARG001
    """A row is [values | accumulators]."""
    rate, eps = all8(RATE), all8(EPS)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, 2 * dim, 2 * dim)
        base = slots[np.uint64(i)] * 2 * dim
        for j in range(0, dim, 8):
            gradient = load8(gradients, i * dim + j)
            total = load8(rows, base + dim + j) + gradient * gradient
            store8(rows, base + dim + j, total)
            store8(rows, base + j, load8(rows, base + j) + rate * gradient / (sqrt8(total) + eps))


@kernel
def bare_adam(rows: Any, scalars: Any, dim: Any, slots: Any, gradients: Any) -> None:
    """A row is [values | first moments | second moments], its number of steps is scalars[slot]; the corrections are taken for 1."""
    rate, eps, beta_2 = all8(RATE), all8(EPS), all8(BETA_2)
    fresh_1, fresh_2 = all8(np.float32(1.0) - BETA_1), all8(np.float32(1.0) - BETA_2)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, 3 * dim, 3 * dim)
        prefetch_row(scalars, slots, i + ROWS_AHEAD, 1, 1)
        slot = slots[np.uint64(i)]
        scalars[slot] += np.float32(1.0)
        base = slot * 3 * dim
        for j in range(0, dim, 8):
            gradient = load8(gradients, i * dim + j)
            mean = load8(rows, base + dim + j)
            mean = mean + fresh_1 * (gradient - mean)
            second = beta_2 * load8(rows, base + 2 * dim + j) + fresh_2 * gradient * gradient
            store8(rows, base + dim + j, mean)
            store8(rows, base + 2 * dim + j, second)
            store8(rows, base + j, load8(rows, base + j) + rate * mean / (sqrt8(second) + eps))


BARE_UPDATES = {"rowwise_adagrad": (bare_rowwise_adagrad, 1), "adagrad": (bare_adagrad, 2), "adam": (bare_adam, 3)}
"""Kernel and floats of a row per dim."""
