"""A rank as a process: opens everything an ``NNWorker`` works with, restores a checkpoint, trains, and publishes the result."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from training.board import Board
from training.checkpoint import CheckpointManifest
from training.data.manifest import Manifest
from training.data.shards import ShardReader
from training.dense.feeder import Feeder, FeederSettings
from training.dense.nn_worker import NNWorker, Surroundings
from training.embedding.messages import Kind
from training.embedding.transport import Connection, Message
from training.errors import CheckpointError, TrainingError
from training.events import EventLog
from training.job import Job, Rendezvous

# How long an evaluation or a checkpoint may take. A role that hangs meanwhile is found by its missing heartbeat.
BOUNDARY_SECONDS = 24 * 3600.0


def train_rank(job: Job, rank: int, rendezvous: Rendezvous) -> None:
    """Run one rank to its end. Rank 0 leaves ``result.json`` in the rendezvous directory: the checkpoint, metrics and steps.

    Whoever wrote the job has checked that its checkpoint is whole and fits.
    """
    config, manifest = job.config, Manifest.load(Path(job.data_dir))
    torch.set_num_interop_threads(1)
    try:
        with ExitStack() as stack:
            if config.training.roles.nn_worker > 1:
                stack.enter_context(
                    _ProcessGroup(Path(job.rendezvous), rank, config.training.roles.nn_worker, config.training.request_timeout_seconds)
                )
            worker = _opened(job, rank, rendezvous, manifest, stack)
            checkpoint = worker.run()
            if rank == 0:
                result = {"checkpoint": str(checkpoint), "steps": worker.progress.step}
                result["skipped_steps"] = worker.progress.skipped_steps
                result["stopped_early"] = worker.progress.stopped_early
                result["best_step"] = worker.progress.best_step
                Path(job.rendezvous, "result.json").write_text(json.dumps(result))
    except RuntimeError as error:
        if "Connection" in str(error) or "gloo" in str(error).lower() or "timed out" in str(error).lower():
            raise TrainingError("another nn_worker rank is gone or hangs; see the logs of the others") from error
        raise


def _opened(job: Job, rank: int, rendezvous: Rendezvous, manifest: Manifest, stack: ExitStack) -> NNWorker:
    config, training = job.config, job.config.training
    transport, patient = job.transport(), job.transport(timeout_seconds=BOUNDARY_SECONDS)
    first_step = job.first_step
    servers: list[Connection] = []
    if rank == 0:
        for i, address in enumerate(rendezvous.addresses("parameter_server", job.count("parameter_server"))):
            servers.append(patient.connect(address, peer=f"parameter_server-{i}"))
            stack.callback(servers[-1].close)
        if job.resume or job.warm_start:
            restore_rows(servers, Path(job.resume or job.warm_start or ""))
        rendezvous.announce("nn_worker", 0, "rows are ready")
    else:
        rendezvous.addresses("nn_worker", 1)  # No look-up before rank 0 has put the checkpoint's rows in place.
    events = stack.enter_context(EventLog(Path(job.events)))
    board = stack.enter_context(Board(Path(job.output_dir) / "tensorboard", first_step=first_step)) if rank == 0 else None
    valid = stack.enter_context(ShardReader.open(Path(job.data_dir), "valid")) if rank == 0 and manifest.rows("valid") else None
    workers = rendezvous.addresses("embedding_worker", job.count("embedding_worker"))
    loaders = rendezvous.addresses("data_loader", job.count("data_loader"))
    settings = FeederSettings(rank=rank, first_step=first_step, max_staleness=training.staleness_bound, wire_dtype=training.wire_dtype)
    timeline = stack.enter_context(job.timeline("nn_worker", rank))
    feeder = stack.enter_context(Feeder(transport, loaders, workers, settings=settings, timeline=timeline))
    worker = NNWorker(
        config,
        manifest,
        Surroundings(feeder, servers, events, board, valid, _boundary_group(training.roles.nn_worker)),
        rank=rank,
        output_dir=Path(job.output_dir),
    )
    if job.resume or job.warm_start:
        worker.restore_dense(Path(job.resume or job.warm_start or ""), resume=job.resume is not None)
    return worker


def restore_rows(servers: list[Connection], checkpoint: Path) -> None:
    """Have every server take its rows out of a checkpoint, whatever the number of servers that wrote it."""
    manifest = CheckpointManifest.load(checkpoint, verify=False)
    parts = [
        {"directory": str(checkpoint / part.directory), "server": i, "num_servers": len(manifest.parts), "tables": part.tables}
        for i, part in enumerate(manifest.parts)
    ]
    for index, server in enumerate(servers):
        server.send(Message(Kind.RESTORE, {"parts": parts, "index": index, "num_servers": len(servers)}))
    rows = sum(int(server.receive().meta["rows"]) for server in servers)
    expected = sum(manifest.rows.values())
    if rows < expected:
        raise CheckpointError(f"{checkpoint}: {expected} rows were saved, {rows} fit the tables now: raise embedding.capacity_rows")


def _boundary_group(world: int) -> dist.ProcessGroup | None:
    """Where ranks wait for rank 0's evaluations and checkpoints, which may take longer than any request."""
    return dist.new_group(timeout=timedelta(seconds=BOUNDARY_SECONDS)) if world > 1 else None


class _ProcessGroup:
    """The ranks' gloo group; a context manager."""

    def __init__(self, rendezvous: Path, rank: int, world: int, timeout_seconds: float) -> None:
        self._rendezvous = rendezvous
        self._rank = rank
        self._world = world
        self._timeout_seconds = timeout_seconds

    def __enter__(self) -> _ProcessGroup:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self._rendezvous}/gloo",
            rank=self._rank,
            world_size=self._world,
            timeout=timedelta(seconds=self._timeout_seconds),
        )
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()
