"""A whole trainer with one rank in this process: every role is the real one, called directly instead of through sockets.

For tests, debugging and notebooks; results equal those of processes in mode sync.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from training.board import Board
from training.checkpoint import CheckpointManifest
from training.config import Config
from training.data.data_loader import DataLoader, LoaderSettings
from training.data.manifest import Manifest
from training.data.shards import BatchPlan, ShardReader
from training.dense.feeder import Feeder, FeederSettings
from training.dense.nn_worker import NNWorker, Surroundings
from training.dense.session import restore_rows
from training.embedding.embedding_worker import EmbeddingWorker
from training.embedding.parameter_server import ParameterServer
from training.embedding.slots import slots, tables
from training.embedding.transport import InProcessTransport
from training.errors import ConfigError
from training.events import EventLog
from training.job import total_steps


@contextmanager
def in_process_trainer(
    config: Config,
    data_dir: Path,
    output_dir: Path,
    *,
    events: EventLog,
    resume: Path | None = None,
    tensorboard: bool = False,
    wrap: Callable[[ParameterServer], ParameterServer] = lambda server: server,
) -> Iterator[NNWorker]:
    """An ``NNWorker`` ready to ``run()``. ``wrap`` may replace each parameter server by one that observes it."""
    if config.training.roles.nn_worker != 1:
        raise ConfigError([f"training.roles.nn_worker: a trainer in one process has 1 rank, not {config.training.roles.nn_worker}"])
    training, manifest, transport = config.training, Manifest.load(data_dir), InProcessTransport()
    first_step = CheckpointManifest.load(resume).step if resume else 0
    with ExitStack() as stack:
        servers = _servers(config, transport, stack, wrap)
        workers = []
        for i in range(training.roles.embedding_worker):
            worker = EmbeddingWorker(slots(config), transport, servers, wire_dtype=training.wire_dtype, sync=training.mode == "sync")
            stack.enter_context(worker)
            workers.append(stack.enter_context(transport.serve(worker.handle, f"embedding_worker-{i}")).address)
        loaders = _loaders(
            config, data_dir, transport, workers, first_step=first_step, last_step=total_steps(config, manifest), stack=stack
        )
        connections = [transport.connect(address, peer=address) for address in servers]
        if resume:
            restore_rows(connections, resume)
        settings = FeederSettings(0, first_step, training.staleness_bound, training.wire_dtype)
        feeder = stack.enter_context(Feeder(transport, loaders, workers, settings=settings))
        valid = stack.enter_context(ShardReader.open(data_dir, "valid")) if manifest.rows("valid") else None
        board = stack.enter_context(Board(output_dir / "tensorboard", first_step=first_step)) if tensorboard else None
        rank = NNWorker(config, manifest, Surroundings(feeder, connections, events, board, valid), rank=0, output_dir=output_dir)
        if resume:
            rank.restore_dense(resume, resume=True)
        yield rank


def _servers(
    config: Config, transport: InProcessTransport, stack: ExitStack, wrap: Callable[[ParameterServer], ParameterServer]
) -> list[str]:
    training, addresses = config.training, []
    for i in range(training.roles.parameter_server):
        server = ParameterServer.create(
            tables(config),
            num_servers=training.roles.parameter_server,
            seed=training.seed,
            wire_dtype=training.wire_dtype,
            threads=training.server_threads,
        )
        server = wrap(stack.enter_context(server))
        addresses.append(stack.enter_context(transport.serve(server.handle, f"parameter_server-{i}")).address)
    return addresses


def _loaders(
    config: Config, data_dir: Path, transport: InProcessTransport, workers: list[str], *, first_step: int, last_step: int, stack: ExitStack
) -> list[str]:
    training, addresses = config.training, []
    for i in range(training.roles.data_loader):
        reader = stack.enter_context(ShardReader.open(data_dir, "train"))
        plan = BatchPlan(
            reader.shard_starts,
            rows_per_step=training.batch_size,
            seed=training.seed,
            shuffle=training.shuffle,
            window_shards=training.shuffle_window_shards,
        )
        settings = LoaderSettings(
            index=i,
            num_loaders=training.roles.data_loader,
            num_ranks=1,
            batch_size=training.batch_size,
            first_step=first_step,
            last_step=last_step,
            depth=training.staleness_bound + 2,
            timeout_seconds=training.request_timeout_seconds,
        )
        loader = stack.enter_context(DataLoader(reader, plan, transport, workers, settings=settings))
        addresses.append(stack.enter_context(transport.serve(loader.handle, f"data_loader-{i}")).address)
    return addresses
