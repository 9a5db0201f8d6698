"""A whole trainer with one rank in this process: every role is the real one, called directly instead of through sockets.

For tests, debugging and notebooks; results equal those of processes in mode sync.
"""

from __future__ import annotations

import secrets
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
from training.embedding.sockets import SocketTransport
from training.embedding.transport import Connection, Handler, InProcessTransport, Server, Transport
from training.errors import ConfigError
from training.events import EventLog
from training.job import total_steps
from training.profile import FOLDER, Timeline


class _Here:
    """Serves and finds roles by name, by calls or over sockets."""

    def __init__(self, sockets: Path | None, timeout_seconds: float) -> None:
        self._sockets = sockets
        self._transport: Transport = InProcessTransport()
        if sockets is not None:
            self._transport = SocketTransport(timeout_seconds, secrets.token_hex(16), shared_memory=True)

    def connect(self, address: str, *, peer: str) -> Connection:
        """See ``Transport.connect``."""
        return self._transport.connect(address, peer=peer)

    def serve(self, handler: Handler, address: str) -> Server:
        """See ``Transport.serve``; the address is a role's name."""
        return self._transport.serve(handler, address if self._sockets is None else f"unix:{self._sockets}/{address}")


@contextmanager
def in_process_trainer(
    config: Config,
    data_dir: Path,
    output_dir: Path,
    *,
    events: EventLog,
    resume: Path | None = None,
    tensorboard: bool = False,
    sockets: Path | None = None,
    wrap: Callable[[ParameterServer], ParameterServer] = lambda server: server,
) -> Iterator[NNWorker]:
    """An ``NNWorker`` ready to ``run()``.

    ``sockets``: a directory (of a short path) for Unix sockets; roles then talk as processes do, arrays through shared memory.
    ``wrap`` may replace each parameter server by one that observes it.
    """
    if config.training.roles.nn_worker != 1:
        raise ConfigError([f"training.roles.nn_worker: a trainer in one process has 1 rank, not {config.training.roles.nn_worker}"])
    training, manifest = config.training, Manifest.load(data_dir)
    transport = _Here(sockets, training.request_timeout_seconds)
    first_step = CheckpointManifest.load(resume).step if resume else 0
    with ExitStack() as stack:

        def timeline(name: str) -> Timeline:
            return stack.enter_context(
                Timeline(name, steps=range(first_step, first_step + training.profile_steps), folder=output_dir / FOLDER)
            )

        servers = _servers(config, transport, stack, wrap, timeline)
        workers = []
        for i in range(training.roles.embedding_worker):
            name, sync = f"embedding_worker-{i}", training.mode == "sync"
            worker = EmbeddingWorker(slots(config), transport, servers, wire_dtype=training.wire_dtype, sync=sync, timeline=timeline(name))
            stack.enter_context(worker)
            workers.append(stack.enter_context(transport.serve(worker.handle, name)).address)
        steps = first_step, total_steps(config, manifest)
        loaders = _loaders(config, data_dir, transport, workers, steps=steps, stack=stack, timeline=timeline)
        connections = [transport.connect(address, peer=f"parameter_server-{i}") for i, address in enumerate(servers)]
        for connection in connections:
            stack.callback(connection.close)
        if resume:
            restore_rows(connections, resume)
        settings = FeederSettings(0, first_step, training.staleness_bound, training.wire_dtype)
        feeder = stack.enter_context(Feeder(transport, loaders, workers, settings=settings, timeline=timeline("nn_worker-0")))
        valid = stack.enter_context(ShardReader.open(data_dir, "valid")) if manifest.rows("valid") else None
        board = stack.enter_context(Board(output_dir / "tensorboard", first_step=first_step)) if tensorboard else None
        rank = NNWorker(config, manifest, Surroundings(feeder, connections, events, board, valid), rank=0, output_dir=output_dir)
        if resume:
            rank.restore_dense(resume, resume=True)
        yield rank


def _servers(
    config: Config,
    transport: _Here,
    stack: ExitStack,
    wrap: Callable[[ParameterServer], ParameterServer],
    timeline: Callable[[str], Timeline],
) -> list[str]:
    training, addresses = config.training, []
    count = training.roles.parameter_server
    for i in range(count):
        name = f"parameter_server-{i}"
        server = ParameterServer.create(
            tables(config),
            num_servers=count,
            seed=training.seed,
            wire_dtype=training.wire_dtype,
            timeline=timeline(name),
        )
        server = wrap(stack.enter_context(server))
        addresses.append(stack.enter_context(transport.serve(server.handle, name)).address)
    return addresses


def _loaders(
    config: Config,
    data_dir: Path,
    transport: _Here,
    workers: list[str],
    *,
    steps: tuple[int, int],
    stack: ExitStack,
    timeline: Callable[[str], Timeline],
) -> list[str]:
    """``steps``: the first, and the one after the last."""
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
            first_step=steps[0],
            last_step=steps[1],
            depth=training.staleness_bound + 2,
            timeout_seconds=training.request_timeout_seconds,
        )
        name = f"data_loader-{i}"
        loader = stack.enter_context(DataLoader(reader, plan, transport, workers, settings=settings, timeline=timeline(name)))
        addresses.append(stack.enter_context(transport.serve(loader.handle, name)).address)
    return addresses
