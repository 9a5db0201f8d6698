"""The nn_worker: forward, backward and the optimizer step of the dense network, synchronous over ranks.

Convention: the loss is the mean over the records of all ranks, for rows and dense network alike, so W ranks of B records equal one
rank of W*B. DDP averages gradients over ranks, so each rank's loss is its sum over the global number of records, times W.
A step whose loss or gradients are not finite on any rank is skipped by both halves and counted.
Axes: N records, D dense features, E sum of slot widths.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812 - the name everybody uses
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from training.board import Board
from training.checkpoint import FORMAT_VERSION, CheckpointManifest, ServerPart, digests, new_checkpoint
from training.config import Config
from training.data.manifest import Manifest
from training.data.shards import ShardReader
from training.dense.feeder import FedBatch, Feeder
from training.dense.models import build_model, build_optimizer
from training.dense.placement import PlacementSearch
from training.embedding.embedding_worker import Ids
from training.embedding.messages import Kind
from training.embedding.schedule import rate_at
from training.embedding.slots import tables
from training.embedding.transport import Connection, Message
from training.errors import CheckpointError, SatrapError, TrainingError
from training.events import EventLog
from training.job import total_steps, usable_cores
from training.metrics import binary_metrics
from training.profile import latencies

# A run whose every step is skipped would "succeed" with an untrained model.
MAX_SKIPPED_IN_A_ROW = 100
SKIPPED = (
    "their loss or gradient was NaN or infinite. "
    "Lower training.dense_optimizer.learning_rate and embedding.optimizer.learning_rate, or standardise the dense features"
)
PROGRESS_SECONDS = 0.25


@dataclass
class Progress:
    """What a resumed run must know beside the weights; saved in ``dense.pt``."""

    step: int = 0
    skipped_steps: int = 0
    best_metric: float | None = None
    best_step: int | None = None
    evaluations_since_best: int = 0
    stopped_early: bool = False
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Surroundings:
    """What a rank works with: opened by whoever builds it, closed by them too."""

    feeder: Feeder
    servers: Sequence[Connection]
    """Rank 0: a connection to every parameter server, for checkpoints and statistics."""
    events: EventLog
    board: Board | None
    """Rank 0 only."""
    valid: ShardReader | None
    """Rank 0 only; None where the valid split is empty."""
    boundary_group: dist.ProcessGroup | None = None
    """For waits as long as an evaluation or checkpoint takes; None with one rank."""


class NNWorker:
    """One rank of the dense network."""

    def __init__(self, config: Config, manifest: Manifest, surroundings: Surroundings, *, rank: int, output_dir: Path) -> None:
        self.config = config
        self.training = config.training
        self.manifest = manifest
        self.rank = rank
        self.output_dir = output_dir
        self.progress = Progress()
        self.around = surroundings
        self.world = config.training.roles.nn_worker
        rows_per_step = config.training.batch_size * self.world
        self.steps_per_epoch = -(-manifest.rows("train") // rows_per_step)
        self.last_step = total_steps(config, manifest)
        self.model = build_model(config)
        self.optimizer = build_optimizer(config, self.model)
        self.network: nn.Module = self.model
        self.placement = PlacementSearch.of(config.training, cores=usable_cores(), agree=self._mean)
        self._skipped_in_a_row = 0
        self._window = _Window()

    # ---- the loop

    def run(self) -> Path:
        """Train to the end; returns the final checkpoint's directory. Raises what a peer reported."""
        if self.world > 1 and self.training.mode != "async":
            self.network = DistributedDataParallel(self.model)
        self.network.train()
        self._place()
        self._allow_to_boundary()
        while (batch := self.around.feeder.next()) is not None:
            self._step(batch)
            if self.placement.step(time.perf_counter()):
                self._place()
            if self.progress.step == self._boundary and self._at_boundary():
                break
        return self._finish()

    def _step(self, batch: FedBatch) -> None:
        embeddings_NE = torch.from_numpy(batch.embeddings).requires_grad_()
        started = time.perf_counter_ns()
        if self.config.model.dropout:
            # Seeded per step and rank, so that a resumed run draws what an uninterrupted one would have.
            torch.manual_seed((self.training.seed + batch.step * self.world + self.rank) % 2**63)
        self.optimizer.zero_grad(set_to_none=True)
        logits_N = self.network(torch.from_numpy(batch.dense), embeddings_NE)
        summed = F.binary_cross_entropy_with_logits(logits_N, torch.from_numpy(batch.label), reduction="sum")
        (summed * (self.world / batch.global_rows)).backward()  # type: ignore[no-untyped-call]
        gradient_NE = embeddings_NE.grad
        assert gradient_NE is not None
        if self._all_finite(summed, gradient_NE):
            self.around.feeder.push(batch, (gradient_NE / self.world if self.world > 1 else gradient_NE).numpy())
            self.optimizer.step()
            self._skipped_in_a_row = 0
        else:
            self.around.feeder.push(batch, None)
            self._skip(batch.step)
        self.progress.step = batch.step + 1
        if self.training.mode == "async" and self.world > 1 and self.progress.step % self.training.averaging_period == 0:
            self._average()
        self._window.add(batch, float(summed.detach()))
        self.around.feeder.timeline.add("dense", batch.step, started=started, ended=time.perf_counter_ns())
        self._report()

    def _all_finite(self, loss: Tensor, gradient_NE: Tensor) -> bool:
        """The decision both halves take; the same on every rank unless the mode is async."""
        finite = torch.isfinite(loss) & torch.isfinite(gradient_NE).all()
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                finite = finite & torch.isfinite(parameter.grad).all()
        if self.world > 1 and self.training.mode != "async":
            flag = finite.to(torch.int32)
            dist.all_reduce(flag, op=dist.ReduceOp.MIN)
            return bool(flag.item())
        return bool(finite)

    def _skip(self, step: int) -> None:
        self.progress.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingError(f"{self._skipped_in_a_row} steps in a row up to {step} were skipped: {SKIPPED}")

    def _average(self) -> None:
        """Mode async: make the dense network of all ranks their mean."""
        with torch.no_grad():
            for tensor in self.model.state_dict().values():
                if tensor.is_floating_point():
                    dist.all_reduce(tensor)
                    tensor /= self.world

    def _place(self) -> None:
        """Have this rank, and as rank 0 the servers, use the threads that the search wants now."""
        search = self.placement
        torch.set_num_threads(search.current.dense_threads)
        if self.rank != 0:
            return
        for server in self.around.servers:
            server.request(Message(Kind.THREADS, {"threads": search.current.server_threads}))
        if search.done:
            self.around.events.emit("note", stage="train", message=str(search))
        if self.around.board is not None:
            points = {f"placement/{name}": value for name, value in asdict(search.current).items()}
            self.around.board.scalars(self.progress.step, points)

    def _mean(self, seconds: float) -> float:
        """Over all ranks."""
        if self.world == 1:
            return seconds
        total = torch.tensor([seconds], dtype=torch.float64)
        dist.all_reduce(total)
        return float(total.item()) / self.world

    # ---- boundaries: evaluation and checkpoints, with nothing in flight

    def _allow_to_boundary(self) -> None:
        done = self.progress.step
        ends = [
            self.last_step,
            *((done // every + 1) * every for every in (self._evaluate_every, self.training.checkpoint_every_steps) if every),
        ]
        self._boundary = min(end for end in ends if end > done) if done < self.last_step else self.last_step
        self.around.feeder.allow(self._boundary)

    @property
    def _evaluate_every(self) -> int:
        return self.training.evaluate_every_steps or self.steps_per_epoch

    def _at_boundary(self) -> bool:
        """Evaluate and save what is due; True if training ends here."""
        self.around.feeder.drain()
        self._barrier()  # Every rank's updates are in the rows before any of them is looked at.
        if self.world > 1 and self.training.mode == "async":
            self._average()
        step = self.progress.step
        improved = False
        if step % self._evaluate_every == 0 or step == self.last_step:
            improved = self._evaluate()
        every = self.training.checkpoint_every_steps
        stop = self._stopping()
        ending = stop or step == self.last_step
        if self.rank == 0 and (ending or improved or (every and step % every == 0)):
            self._save()
        self._barrier()
        self._window.restart()
        self.placement.interrupted()
        if not ending:
            self._allow_to_boundary()
        return stop

    def _evaluate(self) -> bool:
        """Rank 0 scores the valid split; True if early stopping's metric improved."""
        if self.rank != 0 or self.around.valid is None:
            return False
        logits, labels = self._score_valid(self.around.valid)
        if not np.isfinite(logits).all():
            raise TrainingError(
                f"the model has diverged: at step {self.progress.step} it scores {np.sum(~np.isfinite(logits)):,} of {len(logits):,} valid "
                "records as NaN or infinite. Lower training.dense_optimizer.learning_rate and embedding.optimizer.learning_rate"
            )
        metrics = binary_metrics(logits, labels)
        self.progress.metrics = {name: value for name, value in metrics.items() if np.isfinite(value)}
        step = self.progress.step
        self.around.events.emit("metrics", stage="train", step=step, values={f"valid_{k}": v for k, v in self.progress.metrics.items()})
        if self.around.board is not None:
            self.around.board.scalars(step, {f"valid/{name}": value for name, value in self.progress.metrics.items()})
            self.around.board.pr_curve(step, logits, labels)
        return self._improved()

    def _improved(self) -> bool:
        stopping = self.training.early_stopping
        if stopping is None:
            return False
        if stopping.metric not in self.progress.metrics:
            raise TrainingError(
                f"training.early_stopping.metric: {stopping.metric} is undefined on this valid split (one class?); remove early_stopping"
            )
        value = self.progress.metrics[stopping.metric] * (1.0 if stopping.metric == "auc" else -1.0)
        best = self.progress.best_metric
        if best is None or value > best + stopping.min_delta:
            self.progress.best_metric, self.progress.best_step, self.progress.evaluations_since_best = value, self.progress.step, 0
            return True
        self.progress.evaluations_since_best += 1
        return False

    def _score_valid(self, valid: ShardReader) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        self.model.eval()
        logits, labels = [], []
        size = self.config.evaluation.batch_size
        with torch.no_grad():
            for number, start in enumerate(range(0, valid.rows, size)):
                batch = valid.read(start, min(start + size, valid.rows))
                ids = Ids(batch.signs, [(bag.offsets, bag.values) for bag in batch.bags])
                embeddings_NE = torch.from_numpy(self.around.feeder.embeddings_of(number, ids.packed()))
                logits.append(self.model(torch.from_numpy(np.array(batch.dense)), embeddings_NE).numpy())
                labels.append(np.array(batch.label, np.float32))
        self.model.train()
        return np.concatenate(logits), np.concatenate(labels)

    def _stopping(self) -> bool:
        """Whether early stopping ends the run: rank 0 decides, all follow."""
        stopping = self.training.early_stopping
        stop = stopping is not None and self.progress.evaluations_since_best >= stopping.patience
        if self.world > 1:
            flag = torch.tensor([int(stop)])
            dist.broadcast(flag, src=0, group=self.around.boundary_group)
            stop = bool(flag.item())
        self.progress.stopped_early = stop
        return stop

    def _barrier(self) -> None:
        if self.world > 1:
            dist.barrier(group=self.around.boundary_group)

    # ---- checkpoints

    def restore_dense(self, checkpoint: Path, *, resume: bool) -> None:
        """Load network and optimizer; with ``resume`` also the position."""
        try:
            state = torch.load(checkpoint / "dense.pt", weights_only=True)
            self.model.load_state_dict(state["model"])
            configured = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
            self.optimizer.load_state_dict(state["optimizer"])
        except (OSError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{checkpoint / 'dense.pt'}: does not fit this model: {' '.join(str(error).split())[:300]}") from None
        for group, (rate, decay) in zip(self.optimizer.param_groups, configured, strict=True):
            group["lr"], group["weight_decay"] = rate, decay  # A warm start may ask for others; a resumed run has the same.
        if resume:
            self.progress = Progress(**json.loads(state["progress"]))
            self.progress.stopped_early = False

    def _save(self) -> None:
        final = self._checkpoint_of(self.progress.step)
        with new_checkpoint(final) as building:
            self._write(building)
        saved = sorted(final.parent.glob("step-*"))
        for old in saved[: -self.training.keep_checkpoints]:
            if self.progress.best_step is None or old != self._checkpoint_of(self.progress.best_step):
                _remove(old)

    def _checkpoint_of(self, step: int) -> Path:
        return self.output_dir / "checkpoints" / f"step-{step:08d}"

    def _write(self, building: Path) -> None:
        parts = self._snapshot_servers(building)
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": json.dumps(asdict(self.progress)),
        }
        torch.save(state, building / "dense.pt")
        (building / "config.json").write_text(self.config.to_json(), encoding="utf-8")
        statistics = self._statistics()
        rows = {spec.name: sum(server["tables"][spec.name]["rows"] for server in statistics) for spec in tables(self.config)}
        manifest = CheckpointManifest(
            format_version=FORMAT_VERSION,
            name=self.config.name,
            step=self.progress.step,
            steps_per_epoch=self.steps_per_epoch,
            config_digest=self.config.digest,
            feature_digest=self.manifest.feature_digest,
            fingerprint=self.manifest.fingerprint,
            rows=rows,
            parts=parts,
            metrics=self.progress.metrics,
            best_step=self.progress.best_step,
            files=digests(building),
        )
        with (building / "manifest.json").open("w", encoding="utf-8") as file:
            file.write(manifest.model_dump_json(indent=1))
            file.flush()
            os.fsync(file.fileno())

    def _snapshot_servers(self, building: Path) -> list[ServerPart]:
        """Every server writes its part, all at once."""
        servers = self.around.servers
        names = [f"embedding/server-{i}-of-{len(servers)}" for i in range(len(servers))]
        for name, server in zip(names, servers, strict=True):
            server.send(Message(Kind.SNAPSHOT, {"directory": str(building / name)}))
        # Every answer is awaited before the first failure counts: a server still writing would outlive the directory's removal.
        replies = [_outcome(server) for server in servers]
        for reply in replies:
            if isinstance(reply, SatrapError):
                raise reply
        return [
            ServerPart(directory=name, tables=reply.meta["tables"])
            for name, reply in zip(names, replies, strict=True)
            if not isinstance(reply, SatrapError)
        ]

    def _statistics(self) -> list[dict[str, Any]]:
        return [server.request(Message(Kind.STATISTICS)).meta for server in self.around.servers]

    def _finish(self) -> Path:
        """The checkpoint that is the run's result: the best under early stopping, else the last."""
        self._count_skipped()
        best = self.progress.best_step if self.training.early_stopping else None
        result = self._checkpoint_of(self.progress.step if best is None else best)
        if self.rank == 0 and not self.placement.done:
            text = f"training ended {self.placement.steps_left} steps before it was measured how threads serve best"
            self.around.events.emit("note", stage="train", message=f"{text}; set training.dense_threads and server_threads to skip that")
        if self.rank == 0 and self.around.board is not None:
            final = {**self.progress.metrics, "skipped_steps": float(self.progress.skipped_steps)}
            self.around.board.hyper_parameters(self.progress.step, self.config, final)
            self._project(self.around.board)
        return result

    def _count_skipped(self) -> None:
        """Over all ranks in mode async, where each decides for itself. A run that skipped most of its steps has learned nothing to keep."""
        if self.world > 1 and self.training.mode == "async":
            total = torch.tensor([self.progress.skipped_steps])
            dist.all_reduce(total)
            self.progress.skipped_steps = int(total.item())
        steps = self.progress.step * (self.world if self.training.mode == "async" else 1)
        if 2 * self.progress.skipped_steps > steps:
            raise TrainingError(f"{self.progress.skipped_steps} of {steps} steps were skipped: {SKIPPED}")

    def _project(self, board: Board) -> None:
        count = self.training.projector_rows
        for index, spec in enumerate(tables(self.config) if count else ()):
            share = -(-count // len(self.around.servers))
            replies = [server.request(Message(Kind.SAMPLE, {"table": index, "count": share})) for server in self.around.servers]
            signs = np.concatenate([reply.arrays[0] for reply in replies])
            values = np.concatenate([reply.arrays[1] for reply in replies])
            if len(signs):
                board.projector(f"rows/{spec.name}", signs[:count], values[:count], self.progress.step)

    # ---- what a watcher sees

    def _report(self) -> None:
        if self.rank != 0:
            return
        step = self.progress.step
        if self._window.progress_due() or step == self.last_step:
            self.around.events.emit(
                "progress",
                stage="train",
                done=step,
                total=self.last_step,
                epoch=(step - 1) // self.steps_per_epoch + 1,
                **self._window.progress(),
            )
        if step % self.training.log_every_steps == 0 and self.around.board is not None:
            self._log(self.around.board, step)

    def _log(self, board: Board, step: int) -> None:
        window, feeder = self._window, self.around.feeder
        board.scalars(
            step,
            {
                "train/loss": window.loss,
                "train/skipped_steps": self.progress.skipped_steps,
                "throughput/samples_per_second": window.samples_per_second,
                **latencies("", [feeder.timeline.take()]),
                **latencies("worker_", feeder.worker_phases()),
                "queue/ready_batches": feeder.queue_depth,
                "embedding/unique_ratio": float(np.mean(window.unique_ratio)),
                "learning_rate/dense": self.optimizer.param_groups[0]["lr"],
                **{f"learning_rate/{spec.name}": rate_at(spec.optimizer, step - 1) for spec in tables(self.config)},
            },
        )
        board.staleness(step, np.array(window.staleness), bound=self.training.staleness_bound)
        board.servers(step, self._statistics())
        window.restart()


class _Window:
    """Averages since the last TensorBoard point."""

    def __init__(self) -> None:
        self._last_progress = 0.0
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._loss_sum = 0.0
        self._rows = 0
        self._global_rows = 0
        self.staleness: list[int] = []
        self.unique_ratio: list[float] = []

    def add(self, batch: FedBatch, loss_sum: float) -> None:
        if np.isfinite(loss_sum):
            self._loss_sum += loss_sum
            self._rows += len(batch.label)
        self._global_rows += batch.global_rows
        self.staleness.append(batch.staleness)
        self.unique_ratio.append(batch.unique_ratio)

    @property
    def loss(self) -> float:
        """Mean over the records of steps that were not skipped; NaN if there was none."""
        return self._loss_sum / self._rows if self._rows else float("nan")

    @property
    def samples_per_second(self) -> float:
        return self._global_rows / max(1e-9, time.perf_counter() - self._started)

    def progress_due(self) -> bool:
        now = time.perf_counter()
        if now - self._last_progress < PROGRESS_SECONDS:
            return False
        self._last_progress = now
        return True

    def progress(self) -> dict[str, float | None]:
        return {
            "loss": round(self.loss, 5) if self._rows else None,
            "samples_per_second": round(self.samples_per_second, 1),
            "staleness": round(float(np.mean(self.staleness)), 2) if self.staleness else 0.0,
        }


def _outcome(server: Connection) -> Message | SatrapError:
    try:
        return server.receive()
    except SatrapError as error:
        return error


def _remove(checkpoint: Path) -> None:
    """Delete a checkpoint, manifest first, so that a half-deleted one is never taken for whole."""
    (checkpoint / "manifest.json").unlink(missing_ok=True)
    shutil.rmtree(checkpoint, ignore_errors=True)
