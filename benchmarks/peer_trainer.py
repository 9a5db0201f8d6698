"""Contenders in training: one process with the very dense network of the trainer, and somebody else's embedding, or none.

Kinds: ``dense`` (rows given, gradients thrown away: the ceiling), ``bags`` (one nn.EmbeddingBag per slot, sparse Adagrad), ``joined``
(the same rows in one table), ``fbgemm`` (table-batched, fused row-wise Adagrad), ``torchrec`` (DistributedModelParallel over a fused
EmbeddingBagCollection, one rank). Needs torch, numpy, pydantic, yaml; FBGEMM and TorchRec for the last two.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contenders import serve
from benchmarks.streams import NUM_SLOTS
from training.config_file import parse_config
from training.dense.models import build_model, build_optimizer

RATE, EPS, SCALE = 0.02, 1e-8, 0.01


class Given(nn.Module):
    """The rows are there already."""

    def __init__(self, batch_size: int, dim: int) -> None:
        super().__init__()
        self._out = torch.randn(8, batch_size, NUM_SLOTS * dim) * SCALE
        self._turn = itertools.cycle(range(8))

    def forward(self, _rows_NS: Tensor) -> Tensor:
        return self._out[next(self._turn)].detach().requires_grad_()

    def step(self) -> None:
        """Nothing learns here."""


class Bags(nn.Module):
    """nn.EmbeddingBag per slot, or one table for all slots, with torch's sparse Adagrad."""

    def __init__(self, rows: int, dim: int, *, joined: bool) -> None:
        super().__init__()
        self._dim, self._joined, self._per_slot = dim, joined, rows // NUM_SLOTS
        count, size = (1, rows) if joined else (NUM_SLOTS, self._per_slot)
        self.tables = nn.ModuleList(nn.EmbeddingBag(size, dim, mode="sum", sparse=True) for _ in range(count))
        for table in self.tables:
            nn.init.uniform_(table.weight, -SCALE, SCALE)  # type: ignore[arg-type]
        self._optimizer = torch.optim.Adagrad(self.parameters(), lr=RATE, eps=EPS)

    def forward(self, rows_NS: Tensor) -> Tensor:
        if self._joined:
            flat = rows_NS.reshape(-1)
            out: Tensor = self.tables[0](flat, torch.arange(len(flat)))
            return out.view(len(rows_NS), -1)
        ones = torch.arange(len(rows_NS))
        return torch.cat([table(rows_NS[:, s] - s * self._per_slot, ones) for s, table in enumerate(self.tables)], dim=1)

    def step(self) -> None:
        self._optimizer.step()
        self._optimizer.zero_grad()


class FBGEMM(nn.Module):
    """26 tables in one operator; the backward pass updates them."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._per_slot = rows // NUM_SLOTS
        self.module = SplitTableBatchedEmbeddingBagsCodegen(
            [(self._per_slot, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)] * NUM_SLOTS,
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=RATE,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
        )
        for weight in self.module.split_embedding_weights():
            weight.uniform_(-SCALE, SCALE)

    def forward(self, rows_NS: Tensor) -> Tensor:
        ids = (rows_NS - torch.arange(NUM_SLOTS) * self._per_slot).T.reshape(-1)
        return self.module(ids, torch.arange(len(ids) + 1))  # type: ignore[no-any-return]

    def step(self) -> None:
        """Done in the backward pass."""


class TorchRec(nn.Module):
    """DistributedModelParallel with one rank, table-wise, fused row-wise Adagrad."""

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        import torch.distributed as dist
        import torchrec
        from torch.distributed.optim import _apply_optimizer_in_backward as in_backward  # type: ignore[attr-defined]
        from torchrec.distributed.model_parallel import DistributedModelParallel
        from torchrec.optim import RowWiseAdagrad

        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20_000 + os.getpid() % 20_000)}
        dist.init_process_group("gloo", rank=0, world_size=1)
        self._per_slot, self._jagged = rows // NUM_SLOTS, torchrec.KeyedJaggedTensor
        self._names = [f"C{s}" for s in range(NUM_SLOTS)]
        tables = [
            torchrec.EmbeddingBagConfig(name=f"t_{name}", embedding_dim=dim, num_embeddings=self._per_slot, feature_names=[name])
            for name in self._names
        ]
        for table in tables:
            table.init_fn = lambda weight: nn.init.uniform_(weight, -SCALE, SCALE)
        collection = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
        in_backward(RowWiseAdagrad, collection.parameters(), {"lr": RATE, "eps": EPS})
        self.module = DistributedModelParallel(collection, device=torch.device("cpu"))

    def forward(self, rows_NS: Tensor) -> Tensor:
        ids = (rows_NS - torch.arange(NUM_SLOTS) * self._per_slot).T.reshape(-1)
        jagged = self._jagged(keys=self._names, values=ids, lengths=torch.ones(len(ids), dtype=torch.int32))
        return self.module(jagged).values()  # type: ignore[no-any-return]

    def step(self) -> None:
        """Done in the backward pass."""


class PeerTrainer:
    """State between requests."""

    def open(self, *, kind: str, settings: dict[str, Any], rows: int, threads: int, data: str) -> dict[str, Any]:
        """Build everything. ``data`` is a directory of ``benchmarks.streams.write_data``."""
        torch.set_num_threads(threads)
        torch.sparse.check_sparse_tensor_invariants.disable()
        torch.manual_seed(0)
        config = parse_config(json.dumps(settings))
        self._size, dim = config.training.batch_size, config.embedding.dim
        folder = Path(data)
        self._rows, self._dense, self._label = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("rows", "dense", "label"))
        self._model = build_model(config)
        self._optimizer = build_optimizer(config, self._model)
        self._embedding: Any = {
            "dense": lambda: Given(self._size, dim),
            "bags": lambda: Bags(rows, dim, joined=False),
            "joined": lambda: Bags(rows, dim, joined=True),
            "fbgemm": lambda: FBGEMM(rows, dim),
            "torchrec": lambda: TorchRec(rows, dim),
        }[kind]()
        self._step = 0
        return {}

    def train(self, *, warm: int, steps: int) -> dict[str, Any]:
        """Some steps to get going, then ``steps`` timed ones."""
        for _ in range(warm):
            self._train_step()
        started = time.perf_counter()
        outcome = [self._train_step() for _ in range(steps)]
        seconds = time.perf_counter() - started
        logits, labels = (torch.cat([pair[k] for pair in outcome]) for k in (0, 1))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels).item()
        return {"seconds": seconds, "samples_per_second": steps * self._size / seconds, "log_loss": loss}

    def _train_step(self) -> tuple[Tensor, Tensor]:
        first = self._step * self._size % len(self._label)
        part = slice(first, first + self._size)
        rows, dense, label = (torch.from_numpy(np.array(array[part])) for array in (self._rows, self._dense, self._label))
        self._step += 1
        self._optimizer.zero_grad(set_to_none=True)
        logits = self._model(dense, self._embedding(rows))
        nn.functional.binary_cross_entropy_with_logits(logits, label).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._embedding.step()
        return logits.detach(), label


def main() -> None:
    """Serve requests."""
    peer = PeerTrainer()
    serve(lambda request: getattr(peer, request.pop("what"))(**request))


if __name__ == "__main__":
    main()
