"""Row updates against torch.optim."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding.dedup import dedup
from training.embedding.optimizers import OPTIMIZERS, optimizer_entry
from training.embedding.slots import TableSpec
from training.embedding.table import EmbeddingTable

ROWS = 40


class RowwiseAdagrad(torch.optim.Optimizer):
    """One accumulator per parameter (a row): the mean of its squared gradient."""

    def __init__(self, params: Iterable[torch.Tensor], lr: float, eps: float, weight_decay: float, start: float) -> None:
        super().__init__(params, {"lr": lr, "eps": eps, "weight_decay": weight_decay})
        self.sums = {id(p): torch.tensor(start) for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    g = p.grad + group["weight_decay"] * p
                    self.sums[id(p)] += g.square().mean()
                    p -= group["lr"] * g / (self.sums[id(p)].sqrt() + group["eps"])


Maker = Callable[[list[torch.Tensor]], torch.optim.Optimizer]
CASES: dict[str, tuple[SparseOptimizerConfig, Maker]] = {
    "sgd": (SparseOptimizerConfig(name="sgd", learning_rate=0.1), lambda p: torch.optim.SGD(p, lr=0.1)),
    "sgd decay": (
        SparseOptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.02),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    ),
    "sgd momentum": (
        SparseOptimizerConfig(name="sgd", learning_rate=0.05, momentum=0.9, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    ),
    "adagrad": (SparseOptimizerConfig(name="adagrad", learning_rate=0.1), lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-8)),
    "adagrad settings": (
        SparseOptimizerConfig(name="adagrad", learning_rate=0.1, eps=1e-3, initial_accumulator=0.1, weight_decay=0.02),
        lambda p: torch.optim.Adagrad(p, lr=0.1, eps=1e-3, initial_accumulator_value=0.1, weight_decay=0.02),
    ),
    "rowwise_adagrad": (
        SparseOptimizerConfig(name="rowwise_adagrad", learning_rate=0.1, initial_accumulator=0.1, weight_decay=0.02),
        lambda p: RowwiseAdagrad(p, 0.1, 1e-8, 0.02, 0.1),
    ),
    "sgd clipped": (
        SparseOptimizerConfig(name="sgd", learning_rate=0.1, weight_decay=0.02, clip_norm=0.5),
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.02),
    ),
    "adam clipped": (SparseOptimizerConfig(name="adam", learning_rate=0.01, clip_norm=0.3), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam": (SparseOptimizerConfig(name="adam", learning_rate=0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    "adam settings": (
        SparseOptimizerConfig(name="adam", learning_rate=0.01, beta1=0.7, beta2=0.95, eps=1e-4, weight_decay=0.02),
        lambda p: torch.optim.Adam(p, lr=0.01, betas=(0.7, 0.95), eps=1e-4, weight_decay=0.02),
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dim", [1, 7, 8, 16, 19])
def test_random_steps_equal_torch(name: str, dim: int) -> None:
    """Each row is a parameter of its own in torch, so that only touched rows step, as in sparse training."""
    config, maker = CASES[name]
    signs, _ = dedup(np.random.default_rng(1).integers(0, 2**64, ROWS, dtype=np.uint64))
    spec = TableSpec("t", dim, config, InitializerConfig(kind="normal", scale=1.0), 1, ROWS)
    rng = np.random.default_rng(2)
    with EmbeddingTable.create(spec, capacity_rows=100, seed=0) as table:
        values = np.empty((ROWS, dim), np.float32)
        table.lookup(signs, values, insert=True)
        parameters = [torch.tensor(row, requires_grad=True) for row in values]
        reference = maker(parameters)
        for _ in range(60):
            touched = np.flatnonzero(rng.random(ROWS) < 0.4)
            gradients = (rng.standard_normal((len(touched), dim)) * 10.0 ** rng.integers(-3, 2, (len(touched), 1))).astype(np.float32)
            for parameter in parameters:
                parameter.grad = None
            for row, gradient in zip(touched, gradients, strict=True):
                parameters[row].grad = torch.from_numpy(gradient.copy())
                if config.clip_norm is not None:
                    torch.nn.utils.clip_grad_norm_(parameters[row], config.clip_norm)
            reference.step()
            table.update(signs[touched], gradients)
        table.lookup(signs, values, insert=False)
    expected = torch.stack(parameters).detach().numpy()
    np.testing.assert_allclose(values, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adagrad settings"])
def test_a_dense_embedding_under_torch_gives_the_same_rows(name: str) -> None:
    """Without decay an untouched row has a zero gradient and stays; with decay torch.optim would move it, so every row is touched there."""
    config, maker = CASES[name]
    dim, rng = 16, np.random.default_rng(5)
    signs, _ = dedup(np.arange(ROWS, dtype=np.uint64))
    with EmbeddingTable.create(TableSpec("t", dim, config, InitializerConfig(scale=0.1), 1, ROWS), capacity_rows=ROWS, seed=0) as table:
        values = np.empty((ROWS, dim), np.float32)
        table.lookup(signs, values, insert=True)
        embedding = torch.nn.Embedding.from_pretrained(torch.tensor(values), freeze=False)
        reference = maker([embedding.weight])
        for _ in range(50):
            ids = rng.integers(0, ROWS, 64) if config.weight_decay == 0.0 else rng.permutation(ROWS)
            upstream = rng.standard_normal((len(ids), dim)).astype(np.float32)
            reference.zero_grad()
            (embedding(torch.from_numpy(ids)) * torch.from_numpy(upstream)).sum().backward()
            assert embedding.weight.grad is not None
            gradients = embedding.weight.grad.numpy().copy()
            reference.step()
            touched = np.unique(ids)
            table.update(signs[touched], gradients[touched])
        table.lookup(signs, values, insert=False)
    np.testing.assert_allclose(values, embedding.weight.detach().numpy(), rtol=2e-6, atol=2e-6)


def test_adam_steps_beyond_the_listed_corrections_go_on_as_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.embedding.optimizers._LISTED_STEPS", 3)
    test_random_steps_equal_torch("adam", 8)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_writes_beyond_its_row(name: str) -> None:
    """Neighbouring slots keep their exact bytes whatever the width."""
    config = SparseOptimizerConfig(name="sgd", momentum=0.9) if name == "momentum_sgd" else SparseOptimizerConfig(name=name)
    assert optimizer_entry(config) is OPTIMIZERS[name]
    for dim in (1, 3, 8, 9, 23):
        with EmbeddingTable.create(TableSpec("t", dim, config, InitializerConfig(), 1, 60), capacity_rows=60, seed=0) as table:
            signs, _ = dedup(np.arange(60, dtype=np.uint64))
            before = np.empty((60, dim), np.float32)
            table.lookup(signs, before, insert=True)
            for _ in range(3):
                table.update(signs[::2].copy(), np.full((30, dim), 3.0, np.float32))
            after = np.empty_like(before)
            table.lookup(signs, after, insert=False)
            np.testing.assert_array_equal(after[1::2], before[1::2])
            assert (after[::2] != before[::2]).all()
            table.update(signs[1::2].copy(), np.zeros((30, dim), np.float32))  # Their state must be untouched, too.
            table.lookup(signs, after, insert=False)
            np.testing.assert_array_equal(after[1::2], before[1::2])
