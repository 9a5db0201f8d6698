"""A role process under measurement: what ``training.roles`` runs, with parts put around it that the product does not have.

``SATRAP_BENCH`` holds JSON. parameter_server: ``prefill`` (row numbers that get rows at start), ``delay_seconds`` (of every look-up and
update, as a distant server has), bytes per message. nn_worker: ``control`` (Unix socket of the driver, which says how many steps to do),
``dense_seconds`` (wait so long instead of the dense network's step), and no checkpoint at the end.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from training import roles

Wrapped = Callable[..., Any]


def main() -> int:
    """Run the role of the command line under measurement."""
    settings: dict[str, Any] = json.loads(os.environ["SATRAP_BENCH"])
    role = sys.argv[1]
    if role == "parameter_server":
        _measure_server(settings, sys.argv)
    elif role == "nn_worker":
        _measure_rank(settings)
    return roles.main()


def _measure_server(settings: dict[str, Any], arguments: list[str]) -> None:
    from training.embedding.messages import Kind
    from training.embedding.parameter_server import ParameterServer
    from training.embedding.transport import Message

    index = int(arguments[arguments.index("--index") + 1])
    create = ParameterServer.create

    def created(*given: Any, **named: Any) -> ParameterServer:
        server = create(*given, **named)
        fill(server, index, named["num_servers"], settings["prefill"])
        handle, count = server.handle, {"requests": 0, "bytes": 0}

        def counted(message: Message) -> Message:
            if message.kind not in (Kind.ROWS_OF, Kind.APPLY):
                reply = handle(message)
                return Message(reply.kind, {**reply.meta, "wire": dict(count)}, reply.arrays) if message.kind == Kind.STATISTICS else reply
            if settings["delay_seconds"]:
                time.sleep(settings["delay_seconds"])
            reply = handle(message)
            count["requests"] += 1
            count["bytes"] += sum(array.nbytes for array in (*message.arrays, *reply.arrays))
            return reply

        server.handle = counted  # type: ignore[method-assign]
        return server

    ParameterServer.create = created  # type: ignore[method-assign, assignment]


def fill(server: Any, index: int, num_servers: int, rows: int) -> None:
    """Give rows to the signs of row numbers 0 .. rows-1 that are this server's."""
    from benchmarks.streams import signs_of
    from training.embedding.dedup import dedup, route

    out = np.empty((500_000, server.tables[0].dim), np.float32)
    for start in range(0, rows, len(out)):
        signs, _ = dedup(signs_of(np.arange(start, min(start + len(out), rows))))
        starts = route(signs, num_servers)
        part = signs[starts[index] : starts[index + 1]]
        server.tables[0].lookup(part, out[: len(part)], insert=True)


def _measure_rank(settings: dict[str, Any]) -> None:
    from training.dense.nn_worker import NNWorker

    slices = _Slices(settings["control"])
    step = _waiting_step(settings["dense_seconds"]) if settings["dense_seconds"] else NNWorker._step
    NNWorker._step = lambda worker, batch: slices.around(worker, batch, step)  # type: ignore[method-assign]
    NNWorker._save = lambda _: None  # type: ignore[method-assign]


def _waiting_step(seconds: float) -> Wrapped:
    """In place of the dense network: waits, and pushes a gradient."""
    gradients: dict[tuple[int, ...], Any] = {}

    def step(worker: Any, batch: Any) -> None:
        shape = batch.embeddings.shape
        if shape not in gradients:
            gradients[shape] = np.random.default_rng(0).standard_normal(shape).astype(np.float32) * np.float32(1e-4)
        time.sleep(seconds)
        worker.around.feeder.push(batch, gradients[shape])
        worker.progress.step = batch.step + 1

    return step


class _Slices:
    """Does as many steps as the driver asks for: some to get going, then some that are timed; at the end nothing is in flight."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lines: Any = None
        self._left: list[int] = [0, 0]
        self._logits: list[Any] = []

    def around(self, worker: Any, batch: Any, step: Wrapped) -> None:
        if self._lines is None:
            self._connect(worker)
        if sum(self._left) == 0:
            self._next()
        timed = self._left[0] == 0
        if timed and self._started is None:
            self._started = time.perf_counter()
        step(worker, batch)
        if timed:
            self._labels.append(batch.label)
            self._staleness.append(batch.staleness)
        else:
            self._logits.clear()
        self._left[1 if timed else 0] -= 1
        if sum(self._left) == 0:
            self._answer(worker)

    def _connect(self, worker: Any) -> None:
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        control.connect(self._address)
        self._lines = control.makefile("rw")
        worker.model.register_forward_hook(lambda _module, _inputs, output: self._logits.append(output.detach()))

    def _next(self) -> None:
        line = self._lines.readline()
        if not line:
            raise SystemExit(0)
        self._left = json.loads(line)
        self._started: float | None = None
        self._labels: list[Any] = []
        self._staleness: list[int] = []

    def _answer(self, worker: Any) -> None:
        assert self._started is not None
        seconds = time.perf_counter() - self._started
        worker.around.feeder.drain()
        servers = [server["wire"]["bytes"] for server in worker._statistics()]
        answer: dict[str, Any] = {"seconds": seconds, "wire_bytes": sum(servers), "staleness": max(self._staleness)}
        answer["threads"] = _torch_threads()
        if self._logits:
            answer |= _quality(self._logits, self._labels)
        self._lines.write(json.dumps(answer) + "\n")
        self._lines.flush()


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _quality(logits: list[Any], labels: list[Any]) -> dict[str, float]:
    """Loss and AUC on batches that were not trained on yet."""
    from training.metrics import binary_metrics

    metrics = binary_metrics(np.concatenate([part.numpy() for part in logits]), np.concatenate(labels))
    return {"log_loss": metrics["log_loss"], "auc": metrics["auc"]}


if __name__ == "__main__":
    sys.exit(main())
