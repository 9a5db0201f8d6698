"""The program people write without satrap: one process, nn.Embedding with sparse gradients, torch.optim, synchronous.

Same shards, same order, same network class as the hybrid trainer; nothing else of ours. The quality reference of ``benchmarks.quality``.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from training.config import Config, SparseOptimizerConfig
from training.data.shards import Batch, BatchPlan, ShardReader
from training.dense.models import build_model, build_optimizer
from training.embedding.slots import Slot, slots, tables
from training.metrics import binary_metrics


class PlainEmbeddings(nn.Module):
    """One nn.Embedding per table; row 0 stands for every id the train split lacks and stays zero."""

    def __init__(self, config: Config, train: Batch) -> None:
        super().__init__()
        self._slots = slots(config)
        self._known: list[npt.NDArray[np.uint64]] = []
        self.rows = nn.ModuleList()
        for index, spec in enumerate(tables(config)):
            signs = [_ids(train, self._slots, position)[0] for position, slot in enumerate(self._slots) if slot.table == index]
            self._known.append(np.unique(np.concatenate(signs)))
            layer = nn.Embedding(len(self._known[-1]) + 1, spec.dim, sparse=True, padding_idx=0)
            with torch.no_grad():
                if spec.initializer.kind == "uniform":
                    layer.weight[1:].uniform_(-spec.initializer.scale, spec.initializer.scale)
                elif spec.initializer.kind == "normal":
                    layer.weight[1:].normal_(0.0, spec.initializer.scale)
                else:
                    layer.weight.zero_()
            self.rows.append(layer)

    def forward(self, batch: Batch) -> Tensor:
        """Pooled rows [N, E]."""
        parts = []
        for position, slot in enumerate(self._slots):
            signs, offsets = _ids(batch, self._slots, position)
            known = self._known[slot.table]
            place = np.minimum(np.searchsorted(known, signs), len(known) - 1)
            index = torch.from_numpy(np.where(known[place] == signs, place + 1, 0))
            weight = self.rows[slot.table].weight
            if offsets is None:
                parts.append(nn.functional.embedding(index, weight, padding_idx=0, sparse=True))
            else:
                bags = torch.from_numpy(offsets[:-1])
                parts.append(nn.functional.embedding_bag(index, weight, bags, mode=slot.pooling, sparse=True))
        return torch.cat(parts, dim=1)


def train_plain(config: Config, data_dir: Path, split: str = "test") -> dict[str, float]:
    """Train as configured (mode, roles and wire apart) and return metrics on a split."""
    training = config.training
    torch.manual_seed(training.seed)
    torch.sparse.check_sparse_tensor_invariants.disable()  # The default, said aloud: otherwise torch warns.
    with ShardReader.open(data_dir, "train") as reader:
        embeddings = PlainEmbeddings(config, reader.read(0, reader.rows))
        model = build_model(config)
        optimizers = [build_optimizer(config, model)]
        optimizers += [_row_optimizer(spec.optimizer, layer) for spec, layer in zip(tables(config), embeddings.rows, strict=True)]
        plan = BatchPlan(
            reader.shard_starts,
            rows_per_step=training.batch_size * training.roles.nn_worker,
            seed=training.seed,
            shuffle=training.shuffle,
            window_shards=training.shuffle_window_shards,
        )
        for epoch in range(training.epochs):
            for step in range(plan.steps_per_epoch):
                rows = plan.rows(epoch, step)
                batch = reader.read(rows.start, rows.stop) if isinstance(rows, slice) else reader.take(rows)
                for optimizer in optimizers:
                    optimizer.zero_grad()
                logits = model(torch.from_numpy(np.array(batch.dense)), embeddings(batch))
                nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(np.array(batch.label))).backward()
                for optimizer in optimizers:
                    optimizer.step()
    model.eval()
    with ShardReader.open(data_dir, split) as reader, torch.no_grad():  # type: ignore[arg-type]
        batch = reader.read(0, reader.rows)
        logits = model(torch.from_numpy(np.array(batch.dense)), embeddings(batch))
    return binary_metrics(logits.numpy(), batch.label)


def _ids(batch: Batch, all_slots: tuple[Slot, ...], position: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64] | None]:
    """Signs and, for a multi-valued slot, offsets."""
    before = sum(slot.multi_valued for slot in all_slots[:position])
    if all_slots[position].multi_valued:
        return batch.bags[before].values, batch.bags[before].offsets
    return batch.signs[:, position - before], None


def _row_optimizer(own: SparseOptimizerConfig, layer: nn.Module) -> torch.optim.Optimizer:
    parameters = list(layer.parameters())
    if own.name == "adam":
        return torch.optim.SparseAdam(parameters, lr=own.learning_rate, betas=(own.beta1, own.beta2), eps=own.eps)
    if own.name == "sgd":
        return torch.optim.SGD(parameters, lr=own.learning_rate, momentum=own.momentum)
    return torch.optim.Adagrad(parameters, lr=own.learning_rate, eps=own.eps, initial_accumulator_value=own.initial_accumulator)
