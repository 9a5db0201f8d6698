"""What a training run shows in TensorBoard; one place for every tag.

Scalars: ``train/loss``, ``train/skipped_steps``, ``valid/<metric>``, ``throughput/samples_per_second``, ``staleness/mean|max``,
``latency_ms/<phase>`` of the rank, ``latency_ms/worker_<phase>``, ``latency_ms/server_<phase>``,
``queue/ready_batches``, ``embedding/unique_ratio``, ``placement/dense_threads|server_threads``,
``table_<name>/rows|evicted|fill``, ``learning_rate/dense|<table>``.
Histogram: ``staleness/batches``. Curves: ``valid/pr``. HParams at the end. Projector: ``rows/<slot table>`` if asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.tensorboard import SummaryWriter

from training.config import Config
from training.profile import latencies


class Board:
    """Writes one run's event files. A context manager."""

    def __init__(self, directory: Path, *, first_step: int = 0) -> None:
        self._writer = SummaryWriter(str(directory), purge_step=first_step or None, flush_secs=5)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Points at a step, by tag."""
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def staleness(self, step: int, values: npt.NDArray[np.int64], *, bound: int) -> None:
        """Histogram of staleness since the last point, in bins of one batch from 0 to the bound."""
        self._writer.add_histogram("staleness/batches", values, step, bins=np.arange(-0.5, bound + 1.5).tolist())
        self.scalars(step, {"staleness/mean": float(values.mean()), "staleness/max": float(values.max())})

    def servers(self, step: int, statistics: list[dict[str, Any]]) -> None:
        """Rows, evictions and fill per table over all servers, and mean server time per request since the last point."""
        points: dict[str, float] = {}
        for name in statistics[0]["tables"]:
            parts = [server["tables"][name] for server in statistics]
            rows, capacity = sum(p["rows"] for p in parts), sum(p["capacity"] for p in parts)
            points[f"table_{name}/rows"] = rows
            points[f"table_{name}/evicted"] = sum(p["evicted"] for p in parts)
            points[f"table_{name}/fill"] = rows / capacity
            points[f"table_{name}/memory_mib"] = sum(p["memory_bytes"] for p in parts) / 2**20
        points |= latencies("server_", [server["phases"] for server in statistics])
        points["embedding/absent_updates"] = sum(server["absent_updates"] for server in statistics)
        self.scalars(step, points)

    def pr_curve(self, step: int, logits: npt.NDArray[np.float32], labels: npt.NDArray[np.float32]) -> None:
        """Precision-recall curve on the valid split."""
        self._writer.add_pr_curve("valid/pr", torch.from_numpy(labels), torch.sigmoid(torch.from_numpy(logits)), step)

    def projector(self, tag: str, signs: npt.NDArray[np.uint64], values: npt.NDArray[np.float32], step: int) -> None:
        """A sample of rows for the embedding projector, labelled by sign."""
        self._writer.add_embedding(torch.from_numpy(values.copy()), [f"{sign:016x}" for sign in signs], tag=tag, global_step=step)

    def hyper_parameters(self, step: int, config: Config, metrics: Mapping[str, float]) -> None:
        """The run's settings beside its final metrics, for the HParams tab; written into the run's own directory."""
        training, embedding = config.training, config.embedding
        settings: dict[str, str | float | int] = {
            "model": config.model.name,
            "hidden": "-".join(map(str, config.model.hidden)),
            "mode": training.mode,
            "batch_size": training.batch_size,
            "max_staleness": training.staleness_bound,
            "nn_workers": training.roles.nn_worker,
            "epochs": training.epochs,
            "seed": training.seed,
            "dim": embedding.dim,
            "row_optimizer": embedding.optimizer.name,
            "row_learning_rate": embedding.optimizer.learning_rate,
            "dense_optimizer": training.dense_optimizer.name,
            "dense_learning_rate": training.dense_optimizer.learning_rate,
            "wire_dtype": training.wire_dtype,
        }
        self._writer.add_hparams(settings, {f"final/{name}": value for name, value in metrics.items()}, run_name=".", global_step=step)
