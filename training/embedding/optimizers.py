"""Update rules of embedding rows: one kernel and one entry of ``OPTIMIZERS`` each.

A row is [values | state buffers, dim float32 each] in one flat array; an optimizer may also keep one scalar per row in ``scalars``.
Formulas and order of operations are those of torch.optim, on the rows a batch touches and no others. Kernels get ``tables`` (values, rows,
scalars) and ``layout`` as in ``training.embedding.kernels``, ``gradients`` [U * dim], ``settings``, the float64 array that
``OptimizerEntry.settings`` makes, and ``options``: (weight decay or None, clipping norm or None, number of the update, from which 16-bit
rows draw their rounding); they are compiled for what is None. They skip absent signs and return how many rows they updated. A gradient
that is not finite makes its row not finite: callers skip such steps before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from training.config import SparseOptimizerConfig
from training.embedding.hashing import mix
from training.embedding.jit import inlined, kernel
from training.embedding.kernels import AHEAD, ask_ahead, begin, chunk_of, find
from training.embedding.precision import load_values, store_values
from training.embedding.simd import all8, load_lanes, sqrt8, store_lanes, sum8

RATE, EPS = 0, 1
"""Places in ``settings``; EPS holds the momentum of SGD."""


@inlined
def _lanes(value: Any) -> Any:
    """The setting in every lane; None, which is known when the kernel is compiled, stays None."""
    if value is None:
        return None
    return all8(np.float32(value))


@inlined
def _clip(gradients: Any, start: Any, dim: Any, limit: Any) -> Any:
    """What a row's gradient is multiplied by so that its norm is at most ``limit``, as torch's clip_grad_norm_; None without a limit."""
    if limit is None:
        return None
    squares = all8(np.float32(0.0))
    for j in range(0, dim, 8):
        gradient = load_lanes(gradients, start + j, dim - j)
        squares = squares + gradient * gradient
    return all8(np.float32(min(1.0, limit / (np.sqrt(np.float64(sum8(squares))) + 1e-6))))


@inlined
def _key(sign: Any, draw: Any) -> Any:
    """What the noise of rounding is drawn from: 31 bits of a sign and the number of its update."""
    return np.int64(mix(sign ^ mix(draw)) >> np.uint64(33))


# What follows is written for lanes j to j + count of a row, so that the compiler knows count = 8 in the loop over whole vectors: 1.5x.
# ``row`` is (start of its values, start of its state, start of its gradient, factor of its gradient, key of its rounding).


@inlined
def _clipped(gradients: Any, start: Any, count: Any, factor: Any) -> Any:
    if factor is None:
        return load_lanes(gradients, start, count)
    return factor * load_lanes(gradients, start, count)


@inlined
def _decayed(gradient: Any, value: Any, decay: Any) -> Any:
    if decay is None:
        return gradient
    return gradient + decay * value


@inlined
def _gradient(tables: Any, gradients: Any, row: Any, j: Any, count: Any, decay: Any) -> Any:
    """The value and its gradient, clipped and decayed."""
    value = load_values(tables[0], row[0] + j, count)
    return value, _decayed(_clipped(gradients, row[2] + j, count, row[3]), value, decay)


@inlined
def _sgd_lanes(tables: Any, gradients: Any, row: Any, j: Any, count: Any, rate: Any, decay: Any) -> None:
    value, gradient = _gradient(tables, gradients, row, j, count, decay)
    store_values(tables[0], row[0] + j, value + rate * gradient, count, row[4], j)


@kernel
def _sgd(where: Any, tables: Any, layout: Any, signs: Any, slots: Any, gradients: Any, settings: Any, options: Any) -> Any:
    """Torch's SGD: p -= lr * (g + wd * p)."""
    (_, rows, scalars), (stride, width, _, dim) = tables, layout
    decay, limit, draw, known = _lanes(options[0]), options[1], options[2], options[3]
    rate = all8(np.float32(-settings[RATE]))
    n, applied, chunk, whole = len(signs), 0, chunk_of(stride), dim - dim % 8
    view = (rows, scalars[:0], stride, stride)
    begin(where, signs, slots, chunk, known)
    for first in range(-chunk, n, chunk):
        applied += find(where, signs, slots, first + chunk, chunk, view, known)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, known)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot < 0:
                continue
            row = (slot * width, 0, i * dim, _clip(gradients, i * dim, dim, limit), _key(signs[np.uint64(i)], draw))
            for j in range(0, whole, 8):
                _sgd_lanes(tables, gradients, row, j, 8, rate, decay)
            if whole < dim:
                _sgd_lanes(tables, gradients, row, whole, dim - whole, rate, decay)
    return applied


@inlined
def _momentum_lanes(tables: Any, gradients: Any, row: Any, j: Any, count: Any, constants: Any) -> None:
    rate, decay, momentum = constants
    value, gradient = _gradient(tables, gradients, row, j, count, decay)
    buffer = momentum * load_lanes(tables[1], row[1] + j, count) + gradient
    store_lanes(tables[1], row[1] + j, buffer, count)
    store_values(tables[0], row[0] + j, value + rate * buffer, count, row[4], j)


@kernel
def _momentum_sgd(where: Any, tables: Any, layout: Any, signs: Any, slots: Any, gradients: Any, settings: Any, options: Any) -> Any:
    """Torch's SGD with momentum: buffer = momentum * buffer + (g + wd * p); p -= lr * buffer."""
    (_, rows, scalars), (stride, width, head, dim) = tables, layout
    decay, limit, draw, known = _lanes(options[0]), options[1], options[2], options[3]
    rate = all8(np.float32(-settings[RATE]))
    constants = (rate, decay, all8(np.float32(settings[EPS])))
    n, applied, chunk, whole = len(signs), 0, chunk_of(stride), dim - dim % 8
    view = (rows, scalars[:0], stride, stride)
    begin(where, signs, slots, chunk, known)
    for first in range(-chunk, n, chunk):
        applied += find(where, signs, slots, first + chunk, chunk, view, known)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, known)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot < 0:
                continue
            row = (slot * width, slot * stride + head, i * dim, _clip(gradients, i * dim, dim, limit), _key(signs[np.uint64(i)], draw))
            for j in range(0, whole, 8):
                _momentum_lanes(tables, gradients, row, j, 8, constants)
            if whole < dim:
                _momentum_lanes(tables, gradients, row, whole, dim - whole, constants)
    return applied


@inlined
def _adagrad_lanes(tables: Any, gradients: Any, row: Any, j: Any, count: Any, constants: Any) -> None:
    rate, decay, eps = constants
    value, gradient = _gradient(tables, gradients, row, j, count, decay)
    total = load_lanes(tables[1], row[1] + j, count) + gradient * gradient
    store_lanes(tables[1], row[1] + j, total, count)
    store_values(tables[0], row[0] + j, value + rate * gradient / (sqrt8(total) + eps), count, row[4], j)


@kernel
def _adagrad(where: Any, tables: Any, layout: Any, signs: Any, slots: Any, gradients: Any, settings: Any, options: Any) -> Any:
    """Torch's Adagrad: g += wd * p; sum += g^2; p -= lr * g / (sqrt(sum) + eps)."""
    (_, rows, scalars), (stride, width, head, dim) = tables, layout
    decay, limit, draw, known = _lanes(options[0]), options[1], options[2], options[3]
    rate = all8(np.float32(-settings[RATE]))
    constants = (rate, decay, all8(np.float32(settings[EPS])))
    n, applied, chunk, whole = len(signs), 0, chunk_of(stride), dim - dim % 8
    view = (rows, scalars[:0], stride, stride)
    begin(where, signs, slots, chunk, known)
    for first in range(-chunk, n, chunk):
        applied += find(where, signs, slots, first + chunk, chunk, view, known)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, known)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot < 0:
                continue
            row = (slot * width, slot * stride + head, i * dim, _clip(gradients, i * dim, dim, limit), _key(signs[np.uint64(i)], draw))
            for j in range(0, whole, 8):
                _adagrad_lanes(tables, gradients, row, j, 8, constants)
            if whole < dim:
                _adagrad_lanes(tables, gradients, row, whole, dim - whole, constants)
    return applied


@inlined
def _squares(tables: Any, gradients: Any, row: Any, j: Any, count: Any, decay: Any) -> Any:
    _, gradient = _gradient(tables, gradients, row, j, count, decay)
    return gradient * gradient


@inlined
def _rowwise_lanes(tables: Any, gradients: Any, row: Any, j: Any, count: Any, constants: Any) -> None:
    step, decay = constants
    value, gradient = _gradient(tables, gradients, row, j, count, decay)
    store_values(tables[0], row[0] + j, value + step * gradient, count, row[4], j)


@kernel
def _rowwise_adagrad(where: Any, tables: Any, layout: Any, signs: Any, slots: Any, gradients: Any, settings: Any, options: Any) -> Any:
    """Adagrad with one accumulator: g += wd * p; sum += mean(g^2) over the row; p -= lr * g / (sqrt(sum) + eps)."""
    (_, rows, scalars), (stride, width, _, dim) = tables, layout
    decay, limit, draw, known = _lanes(options[0]), options[1], options[2], options[3]
    rate = np.float32(-settings[RATE])
    eps, share = np.float32(settings[EPS]), np.float32(1.0 / dim)
    n, applied, chunk, whole = len(signs), 0, chunk_of(stride), dim - dim % 8
    view = (rows, scalars, stride, stride)
    begin(where, signs, slots, chunk, known)
    for first in range(-chunk, n, chunk):
        applied += find(where, signs, slots, first + chunk, chunk, view, known)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, known)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot < 0:
                continue
            row = (slot * width, 0, i * dim, _clip(gradients, i * dim, dim, limit), _key(signs[np.uint64(i)], draw))
            squares = all8(np.float32(0.0))
            for j in range(0, whole, 8):
                squares = squares + _squares(tables, gradients, row, j, 8, decay)
            if whole < dim:
                squares = squares + _squares(tables, gradients, row, whole, dim - whole, decay)
            total = scalars[np.uint64(slot)] + sum8(squares) * share
            scalars[np.uint64(slot)] = total
            constants = (all8(rate / (np.sqrt(total) + eps)), decay)
            for j in range(0, whole, 8):
                _rowwise_lanes(tables, gradients, row, j, 8, constants)
            if whole < dim:
                _rowwise_lanes(tables, gradients, row, whole, dim - whole, constants)
    return applied


@inlined
def _adam_lanes(tables: Any, gradients: Any, row: Any, j: Any, count: Any, dim: Any, constants: Any) -> None:
    rate, root, decay, eps, fresh_1, keep_2, fresh_2 = constants
    value, gradient = _gradient(tables, gradients, row, j, count, decay)
    mean = load_lanes(tables[1], row[1] + j, count)
    mean = mean + fresh_1 * (gradient - mean)
    second = keep_2 * load_lanes(tables[1], row[1] + dim + j, count) + fresh_2 * gradient * gradient
    store_lanes(tables[1], row[1] + j, mean, count)
    store_lanes(tables[1], row[1] + dim + j, second, count)
    store_values(tables[0], row[0] + j, value + rate * mean / (sqrt8(second) / root + eps), count, row[4], j)


@kernel
def _adam(where: Any, tables: Any, layout: Any, signs: Any, slots: Any, gradients: Any, settings: Any, options: Any) -> Any:
    """Torch's Adam with the row's own step count t: p -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps).

    settings[4:] holds 1 - b1^t and sqrt(1 - b2^t) for t = 1, 2, ... until both are 1 in float32 or the list ends; later ones are computed.
    """
    (_, rows, scalars), (stride, width, head, dim) = tables, layout
    decay, limit, draw, known = _lanes(options[0]), options[1], options[2], options[3]
    eps = all8(np.float32(settings[EPS]))
    beta_1, beta_2 = settings[2], settings[3]
    fresh_1, keep_2, fresh_2 = all8(np.float32(1.0 - beta_1)), all8(np.float32(beta_2)), all8(np.float32(1.0 - beta_2))
    listed = (len(settings) - 4) // 2
    n, applied, chunk, whole = len(signs), 0, chunk_of(stride), dim - dim % 8
    view = (rows, scalars, stride, stride)
    begin(where, signs, slots, chunk, known)
    for first in range(-chunk, n, chunk):
        applied += find(where, signs, slots, first + chunk, chunk, view, known)
        for i in range(max(first, -AHEAD), min(first + chunk, n)):
            ask_ahead(slots, i, view, known)
            if i < 0:
                continue
            slot = slots[np.uint64(i)]
            if slot < 0:
                continue
            row = (slot * width, slot * stride + head, i * dim, _clip(gradients, i * dim, dim, limit), _key(signs[np.uint64(i)], draw))
            scalars[np.uint64(slot)] += np.float32(1.0)
            step = np.int64(scalars[np.uint64(slot)])
            if step <= listed:
                correction_1, correction_2 = settings[2 + 2 * step], settings[3 + 2 * step]
            else:
                correction_1, correction_2 = 1.0 - beta_1**step, np.sqrt(1.0 - beta_2**step)
            rate, root = all8(np.float32(-settings[RATE] / correction_1)), all8(np.float32(correction_2))
            constants = (rate, root, decay, eps, fresh_1, keep_2, fresh_2)
            for j in range(0, whole, 8):
                _adam_lanes(tables, gradients, row, j, 8, dim, constants)
            if whole < dim:
                _adam_lanes(tables, gradients, row, whole, dim - whole, dim, constants)
    return applied


@dataclass(frozen=True)
class OptimizerEntry:
    """What a table must know of its update rule."""

    kernel: Any
    """``kernel(where, tables, layout, signs, slots, gradients, settings, options)``; see the module docstring."""
    buffers: int
    """State buffers per row, each as wide as the row."""
    scalar: bool
    """Whether a float32 per row is kept beside."""
    settings: Callable[[SparseOptimizerConfig], npt.NDArray[np.float64]]
    """Settings as the kernel reads them; [0] is the learning rate, which a schedule may change."""
    start: Callable[[SparseOptimizerConfig], float] = lambda _: 0.0
    """First value of buffers and scalar."""


_LISTED_STEPS = 16_384  # 0.999^16384 vanishes beside 1 in float32; 256 KiB.


def _head(config: SparseOptimizerConfig, *own: float) -> npt.NDArray[np.float64]:
    return np.array([config.learning_rate, *own])


def _adam_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    steps = np.arange(1, _LISTED_STEPS + 1, dtype=np.float64)
    corrections = np.stack([1.0 - config.beta1**steps, np.sqrt(1.0 - config.beta2**steps)], axis=1)
    return np.concatenate([_head(config, config.eps, config.beta1, config.beta2), corrections.ravel()])


def _adagrad_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    return _head(config, config.eps)


def _sgd_settings(config: SparseOptimizerConfig) -> npt.NDArray[np.float64]:
    return _head(config, config.momentum)


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
