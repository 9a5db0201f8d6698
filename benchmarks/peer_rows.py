"""Contenders that are told where their rows lie: torch.index_select and sparse optimizers, and FBGEMM's table on the CPU.

Runs in the peers' environment too: needs torch and numpy, and fbgemm_gpu for FBGEMM. Requests name a method.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from benchmarks.contenders import serve, timed
from benchmarks.streams import gradients_of

RATE, EPS = 0.02, 1e-8


class PeerRows:
    """State between requests."""

    def close(self) -> dict[str, Any]:
        """Give all memory back."""
        self._table = None
        return {}

    def open(self, *, kind: str, rows: int, dim: int, optimizer: str, threads: int, batches: str) -> dict[str, Any]:
        """``kind``: torch or fbgemm. Rows start at zero."""
        self.close()
        torch.set_num_threads(threads)
        torch.sparse.check_sparse_tensor_invariants.disable()
        given = np.load(batches)
        # As they come, and sorted: the best an owner of known rows can be given.
        self._batches = {
            "given": [torch.from_numpy(batch.copy()) for batch in given],
            "sorted": [torch.from_numpy(np.sort(batch)) for batch in given],
        }
        self._gradients = {
            order: [torch.from_numpy(gradients_of(batch.numpy(), dim)) for batch in batches_] for order, batches_ in self._batches.items()
        }
        self._table = FBGEMM(rows, dim) if kind == "fbgemm" else Torch(rows, dim, optimizer)
        return {}

    def lookup(self, *, calls: int, order: str) -> dict[str, Any]:
        """Values of different rows."""
        batches = self._batches[order]
        return timed(lambda k: self._table.read(batches[k % len(batches)]), calls)

    def update(self, *, calls: int, order: str) -> dict[str, Any]:
        """Backward and optimizer step alone: what comes before it is not timed."""
        batches, gradients = self._batches[order], self._gradients[order]
        return self._updates(batches, gradients, calls)

    def occurrences(self, *, calls: int, path: str) -> dict[str, Any]:
        """A batch with repeated ids: forward, then backward with the step."""
        batches = [torch.from_numpy(batch) for batch in np.load(path)]
        zeros = torch.zeros(len(batches[0]), self._table.dim)
        return {
            "forward": timed(lambda k: self._table.read(batches[k % len(batches)]), calls),
            "backward": self._updates(batches, [zeros] * len(batches), calls),
        }

    def values(self, *, count: int) -> dict[str, Any]:
        """Values of the lowest ``count`` row numbers of the first batch."""
        return {"values": self._table.read(self._batches["sorted"][0][:count]).tolist()}

    def _updates(self, batches: list[torch.Tensor], gradients: list[torch.Tensor], calls: int) -> dict[str, Any]:
        seconds: dict[str, list[float]] = {"cpu": [], "wall": []}
        for k in range(calls + 1):
            out = self._table.forward(batches[k % len(batches)])
            one = timed_once(lambda out=out, k=k: self._table.step(out, gradients[k % len(gradients)]))  # type: ignore[misc]
            if k:
                seconds["cpu"].append(one[0])
                seconds["wall"].append(one[1])
        return seconds


def timed_once(call: Any) -> tuple[float, float]:
    """Seconds of one call without a warm one before."""
    import time

    clock, started = time.perf_counter(), time.process_time()
    call()
    return time.process_time() - started, time.perf_counter() - clock


class Torch:
    """A tensor, and for updates the sparse gradient of an embedding with torch's own optimizer."""

    def __init__(self, rows: int, dim: int, optimizer: str) -> None:
        self.dim = dim
        self._layer = torch.nn.Embedding(rows, dim, sparse=True, _weight=torch.zeros(rows, dim))
        self._out = torch.empty(0)
        parameters = list(self._layer.parameters())
        if optimizer == "adam":
            self._optimizer: torch.optim.Optimizer = torch.optim.SparseAdam(parameters, lr=RATE, eps=EPS)
        else:
            self._optimizer = torch.optim.Adagrad(parameters, lr=RATE, eps=EPS)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        if self._out.shape != (len(rows), self.dim):
            self._out = torch.empty(len(rows), self.dim)
        with torch.no_grad():
            return torch.index_select(self._layer.weight, 0, rows, out=self._out)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._optimizer.zero_grad()
        return self._layer(rows)  # type: ignore[no-any-return]

    def step(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        out.backward(gradient)
        self._optimizer.step()


class FBGEMM:
    """Table-batched embedding with fused row-wise Adagrad."""

    def __init__(self, rows: int, dim: int) -> None:
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, PoolingMode
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            OptimType,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self.dim = dim
        self._module = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, dim, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=OptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=RATE,
            eps=EPS,
            pooling_mode=PoolingMode.SUM,
        )
        self._module.split_embedding_weights()[0].zero_()
        self._offsets = torch.arange(0)

    def read(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.forward(rows)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if len(self._offsets) != len(rows) + 1:
            self._offsets = torch.arange(len(rows) + 1)
        return self._module(rows, self._offsets)  # type: ignore[no-any-return]

    def step(self, out: torch.Tensor, gradient: torch.Tensor) -> None:
        out.backward(gradient)


def main() -> None:
    """Serve requests."""
    peer = PeerRows()
    serve(lambda request: getattr(peer, request.pop("what"))(**request))


if __name__ == "__main__":
    main()
