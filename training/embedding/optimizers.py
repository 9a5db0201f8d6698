"""Update rules of embedding rows: one kernel and one entry of ``OPTIMIZERS`` each.

A row is [values | state buffers of the same width] in one flat float32 array; an optimizer may also keep one scalar per row in
``scalars``. Formulas and order of operations are those of torch.optim, on the rows a batch touches and no others. Kernels get ``slots``
[U] (negative: skip), ``gradients`` [U * dim] and ``settings``, the float64 array that ``OptimizerEntry.settings`` makes. A gradient that
is not finite makes its row not finite: callers skip such steps before they get here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.config import SparseOptimizerConfig
from training.embedding.jit import inlined, kernel
from training.embedding.kernels import ROWS_AHEAD, find, prefetch_row
from training.embedding.simd import all8, load8, load_part, sqrt8, store8, store_part, sum8


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
def _sgd(where: Any, rows: Any, scalars: Any, dim: Any, signs: Any, slots: Any, gradients: Any, settings: Any) -> Any:  # noqa: ARG001
    """Torch's SGD: p -= lr * (g + wd * p)."""
    rate, decay = all8(np.float32(-settings[0])), all8(np.float32(settings[1]))
    applied = find(where, signs, slots)
    for i in range(min(ROWS_AHEAD, len(slots))):
        prefetch_row(rows, slots, i, dim, dim)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, dim, dim)
        if slots[i] < 0:
            continue
        base = slots[i] * dim
        for j in range(0, dim, 8):
            value = _load(rows, base + j, dim - j)
            gradient = _load(gradients, i * dim + j, dim - j) + decay * value
            _store(rows, base + j, value + rate * gradient, dim - j)
    return applied


@kernel
def _momentum_sgd(where: Any, rows: Any, scalars: Any, dim: Any, signs: Any, slots: Any, gradients: Any, settings: Any) -> Any:  # noqa: ARG001
    """Torch's SGD with momentum: buffer = momentum * buffer + (g + wd * p); p -= lr * buffer."""
    rate, decay, momentum = all8(np.float32(-settings[0])), all8(np.float32(settings[1])), all8(np.float32(settings[2]))
    applied = find(where, signs, slots)
    for i in range(min(ROWS_AHEAD, len(slots))):
        prefetch_row(rows, slots, i, 2 * dim, 2 * dim)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, 2 * dim, 2 * dim)
        if slots[i] < 0:
            continue
        base = slots[i] * 2 * dim
        for j in range(0, dim, 8):
            value = _load(rows, base + j, dim - j)
            gradient = _load(gradients, i * dim + j, dim - j) + decay * value
            buffer = momentum * _load(rows, base + dim + j, dim - j) + gradient
            _store(rows, base + dim + j, buffer, dim - j)
            _store(rows, base + j, value + rate * buffer, dim - j)
    return applied


@kernel
def _adagrad(where: Any, rows: Any, scalars: Any, dim: Any, signs: Any, slots: Any, gradients: Any, settings: Any) -> Any:  # noqa: ARG001
    """Torch's Adagrad: g += wd * p; sum += g^2; p -= lr * g / (sqrt(sum) + eps)."""
    rate, decay, eps = all8(np.float32(-settings[0])), all8(np.float32(settings[1])), all8(np.float32(settings[2]))
    applied = find(where, signs, slots)
    for i in range(min(ROWS_AHEAD, len(slots))):
        prefetch_row(rows, slots, i, 2 * dim, 2 * dim)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, 2 * dim, 2 * dim)
        if slots[i] < 0:
            continue
        base = slots[i] * 2 * dim
        for j in range(0, dim, 8):
            value = _load(rows, base + j, dim - j)
            gradient = _load(gradients, i * dim + j, dim - j) + decay * value
            total = _load(rows, base + dim + j, dim - j) + gradient * gradient
            _store(rows, base + dim + j, total, dim - j)
            _store(rows, base + j, value + rate * gradient / (sqrt8(total) + eps), dim - j)
    return applied


@kernel
def _rowwise_adagrad(where: Any, rows: Any, scalars: Any, dim: Any, signs: Any, slots: Any, gradients: Any, settings: Any) -> Any:
    """Adagrad with one accumulator: g += wd * p; sum += mean(g^2) over the row; p -= lr * g / (sqrt(sum) + eps)."""
    rate, decay, eps = all8(np.float32(-settings[0])), all8(np.float32(settings[1])), np.float32(settings[2])
    applied = find(where, signs, slots)
    for i in range(min(ROWS_AHEAD, len(slots))):
        prefetch_row(rows, slots, i, dim, dim)
        prefetch_row(scalars, slots, i, 1, 1)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, dim, dim)
        prefetch_row(scalars, slots, i + ROWS_AHEAD, 1, 1)
        slot = slots[i]
        if slot < 0:
            continue
        base = slot * dim
        squares = all8(np.float32(0.0))
        for j in range(0, dim, 8):
            gradient = _load(gradients, i * dim + j, dim - j) + decay * _load(rows, base + j, dim - j)
            squares = squares + gradient * gradient
        scalars[slot] += sum8(squares) / np.float32(dim)
        denominator = all8(np.sqrt(scalars[slot]) + eps)
        for j in range(0, dim, 8):
            value = _load(rows, base + j, dim - j)
            gradient = _load(gradients, i * dim + j, dim - j) + decay * value
            _store(rows, base + j, value + rate * gradient / denominator, dim - j)
    return applied


@kernel
def _adam(where: Any, rows: Any, scalars: Any, dim: Any, signs: Any, slots: Any, gradients: Any, settings: Any) -> Any:
    """Torch's Adam with the row's own step count t: p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps).

    settings[5:] holds 1 - b1^t and sqrt(1 - b2^t) for t = 1, 2, ... until both are 1 in float32 or the list ends; later ones are computed.
    """
    decay, eps = all8(np.float32(settings[1])), all8(np.float32(settings[2]))
    fresh_1 = all8(np.float32(1.0 - settings[3]))
    beta_2, fresh_2 = all8(np.float32(settings[4])), all8(np.float32(1.0 - settings[4]))
    listed = (len(settings) - 5) // 2
    applied = find(where, signs, slots)
    for i in range(min(ROWS_AHEAD, len(slots))):
        prefetch_row(rows, slots, i, 3 * dim, 3 * dim)
        prefetch_row(scalars, slots, i, 1, 1)
    for i in range(len(slots)):
        prefetch_row(rows, slots, i + ROWS_AHEAD, 3 * dim, 3 * dim)
        prefetch_row(scalars, slots, i + ROWS_AHEAD, 1, 1)
        slot = slots[i]
        if slot < 0:
            continue
        scalars[slot] += np.float32(1.0)
        step = np.int64(scalars[slot])
        if step <= listed:
            correction_1, correction_2 = settings[3 + 2 * step], settings[4 + 2 * step]
        else:
            correction_1, correction_2 = 1.0 - settings[3] ** step, np.sqrt(1.0 - settings[4] ** step)
        rate, root = all8(np.float32(-settings[0] / correction_1)), all8(np.float32(correction_2))
        base = slot * 3 * dim
        for j in range(0, dim, 8):
            value = _load(rows, base + j, dim - j)
            gradient = _load(gradients, i * dim + j, dim - j) + decay * value
            mean = _load(rows, base + dim + j, dim - j)
            mean = mean + fresh_1 * (gradient - mean)
            second = beta_2 * _load(rows, base + 2 * dim + j, dim - j) + fresh_2 * gradient * gradient
            _store(rows, base + dim + j, mean, dim - j)
            _store(rows, base + 2 * dim + j, second, dim - j)
            _store(rows, base + j, value + rate * mean / (sqrt8(second) / root + eps), dim - j)
    return applied


@dataclass(frozen=True)
class OptimizerEntry:
    """What a table must know of its update rule."""

    kernel: Any
    """``kernel(rows, scalars, dim, slots, gradients, settings)``; see the module docstring."""
    buffers: int
    """State buffers per row, each as wide as the row."""
    scalar: bool
    """Whether a float32 per row is kept beside."""
    settings: Callable[[SparseOptimizerConfig], npt.NDArray[np.float64]]
    """Settings as the kernel reads them; [0] is the learning rate, which a schedule may change."""
    start: Callable[[SparseOptimizerConfig], float] = lambda _: 0.0
    """First value of buffers and scalar."""


_LISTED_STEPS = 16_384  # 0.999^16384 vanishes beside 1 in float32; 256 KiB.


def _adam_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    steps = np.arange(1, _LISTED_STEPS + 1, dtype=np.float64)
    corrections = np.stack([1.0 - config.beta1**steps, np.sqrt(1.0 - config.beta2**steps)], axis=1)
    head = [config.learning_rate, config.weight_decay, config.eps, config.beta1, config.beta2]
    return np.concatenate([np.array(head), corrections.ravel()])


def _adagrad_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    return np.array([config.learning_rate, config.weight_decay, config.eps])


def _sgd_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    return np.array([config.learning_rate, config.weight_decay, config.momentum])


OPTIMIZERS: dict[str, OptimizerEntry] = {
    "sgd": OptimizerEntry(_sgd, 0, scalar=False, settings=_sgd_settings),
    "momentum_sgd": OptimizerEntry(_momentum_sgd, 1, scalar=False, settings=_sgd_settings),
    "adagrad": OptimizerEntry(_adagrad, 1, scalar=False, settings=_adagrad_settings, start=lambda c: c.initial_accumulator),
    "rowwise_adagrad": OptimizerEntry(_rowwise_adagrad, 0, scalar=True, settings=_adagrad_settings, start=lambda c: c.initial_accumulator),
    "adam": OptimizerEntry(_adam, 2, scalar=True, settings=_adam_settings),
}


def optimizer_entry(config: SparseOptimizerConfig) -> OptimizerEntry:
    """The entry of a configured optimizer; SGD keeps a buffer only if it has momentum."""
    return OPTIMIZERS["momentum_sgd" if config.name == "sgd" and config.momentum > 0.0 else config.name]
