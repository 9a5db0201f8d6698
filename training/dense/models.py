"""The dense networks. A new model is one class here, one row in ``MODELS``, one name in ``ModelConfig.name``.

Axes: N records, D dense features, S slots, E sum of slot widths, K width of one slot where all are equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from training.config import Config, ModelConfig
from training.embedding.slots import slots


class DenseModel(nn.Module):
    """Logits from dense inputs and pooled embeddings: ``forward(dense_ND, embeddings_NE) -> logits_N``."""

    def __init__(self, *, num_dense: int, dims: Sequence[int], config: ModelConfig) -> None:
        super().__init__()
        self.num_dense = num_dense
        self.dims = tuple(dims)
        self.config = config


class DNN(DenseModel):
    """A multi-layer perceptron over everything concatenated, the shape Persia was measured with (4096-2048-1024-512-256)."""

    def __init__(self, *, num_dense: int, dims: Sequence[int], config: ModelConfig) -> None:
        super().__init__(num_dense=num_dense, dims=dims, config=config)
        self.top = _mlp(num_dense + sum(dims), [*config.hidden, 1], config.dropout)

    def forward(self, dense_ND: Tensor, embeddings_NE: Tensor) -> Tensor:
        """See ``DenseModel``."""
        out: Tensor = self.top(torch.cat([dense_ND, embeddings_NE], dim=1))
        return out.squeeze(1)


class DLRM(DenseModel):
    """Dot products of all pairs of slots and of the bottom MLP's output (Naumov et al., arXiv 1906.00091)."""

    def __init__(self, *, num_dense: int, dims: Sequence[int], config: ModelConfig) -> None:
        super().__init__(num_dense=num_dense, dims=dims, config=config)
        width = dims[0]
        self.bottom = _mlp(num_dense, [*config.bottom_hidden, width], config.dropout) if num_dense else None
        num_vectors = len(dims) + (1 if num_dense else 0)
        pairs = list(itertools.combinations(range(num_vectors), 2))
        self.register_buffer("pairs", torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T, persistent=False)
        self.top = _mlp((width if num_dense else 0) + len(pairs), [*config.hidden, 1], config.dropout)
        self.pairs: Tensor

    def forward(self, dense_ND: Tensor, embeddings_NE: Tensor) -> Tensor:
        """See ``DenseModel``."""
        vectors_NSK = embeddings_NE.view(len(embeddings_NE), len(self.dims), self.dims[0])
        parts = []
        if self.bottom is not None:
            bottom_NK = torch.relu(self.bottom(dense_ND))
            vectors_NSK = torch.cat([bottom_NK.unsqueeze(1), vectors_NSK], dim=1)
            parts.append(bottom_NK)
        dots_NSS = vectors_NSK @ vectors_NSK.transpose(1, 2)
        parts.append(dots_NSS[:, self.pairs[0], self.pairs[1]])
        out: Tensor = self.top(torch.cat(parts, dim=1))
        return out.squeeze(1)


class DeepFM(DenseModel):
    """First-order weights, factorisation machine and MLP over shared embeddings (Guo et al., arXiv 1703.04247).

    The first element of every row is the id's first-order weight, the rest its factor.
    """

    def __init__(self, *, num_dense: int, dims: Sequence[int], config: ModelConfig) -> None:
        super().__init__(num_dense=num_dense, dims=dims, config=config)
        self.linear = nn.Linear(num_dense, 1) if num_dense else None
        self.bias = nn.Parameter(torch.zeros(1))
        self.top = _mlp(num_dense + len(dims) * (dims[0] - 1), [*config.hidden, 1], config.dropout)

    def forward(self, dense_ND: Tensor, embeddings_NE: Tensor) -> Tensor:
        """See ``DenseModel``."""
        vectors_NSK = embeddings_NE.view(len(embeddings_NE), len(self.dims), self.dims[0])
        factors_NSF = vectors_NSK[:, :, 1:]
        first_N = vectors_NSK[:, :, 0].sum(dim=1) + self.bias
        if self.linear is not None:
            first_N = first_N + self.linear(dense_ND).squeeze(1)
        second_N = 0.5 * (factors_NSF.sum(dim=1).square() - factors_NSF.square().sum(dim=1)).sum(dim=1)
        deep: Tensor = self.top(torch.cat([dense_ND, factors_NSF.flatten(1)], dim=1))
        return first_N + second_N + deep.squeeze(1)


MODELS: dict[str, type[DenseModel]] = {"dnn": DNN, "dlrm": DLRM, "deepfm": DeepFM}


def build_model(config: Config) -> DenseModel:
    """The configured network, initialised from ``training.seed`` alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.training.seed)
        dims = [slot.dim for slot in slots(config)]
        return MODELS[config.model.name](num_dense=len(config.schema_.dense), dims=dims, config=config.model)


def build_optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    """The configured torch.optim optimizer over the network's parameters."""
    own = config.training.dense_optimizer
    kind = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}[own.name]
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=own.learning_rate, weight_decay=own.weight_decay)
    return optimizer


def _mlp(width: int, hidden: Sequence[int], dropout: float) -> nn.Sequential:
    """Linear layers with ReLU (and dropout) between; none after the last."""
    layers: list[nn.Module] = []
    for i, out in enumerate(hidden):
        layers.append(nn.Linear(width, out))
        if i + 1 < len(hidden):
            layers.append(nn.ReLU())
            if dropout:
                layers.append(nn.Dropout(dropout))
        width = out
    return nn.Sequential(*layers)
