"""Between the dense network and the roles that feed it: batches in step order, look-ups ahead, gradients behind, bounded staleness.

A batch takes a permit before its look-up and gives it back when its row update is acknowledged. With ``max_staleness`` + 1 permits,
at most ``max_staleness`` earlier batches of this rank are unacknowledged at a look-up. The staleness reported is counted from
requests sent and acknowledgements received, not from the permits.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Bytes, Shelf, Staging
from training.embedding.codec import WIRE_DTYPES, decode, encode
from training.embedding.messages import Kind
from training.embedding.transport import Connection, Message, Transport
from training.errors import SatrapError, TrainingError
from training.profile import Timeline

# More threads than this do not help: each only waits for its worker's answer.
MAX_REQUEST_THREADS = 8


@dataclass
class FedBatch:
    """One step of one rank. N records, D dense features, E sum of slot widths."""

    step: int
    ref: int
    worker: int
    global_rows: int
    dense: npt.NDArray[np.float32]
    """[N, D]"""
    label: npt.NDArray[np.float32]
    """[N]"""
    embeddings: npt.NDArray[np.float32]
    """[N, E]"""
    staleness: int
    unique_ratio: float
    memory: Bytes
    """What ``embeddings`` lie in; used again after ``Feeder.push``."""


@dataclass(frozen=True)
class FeederSettings:
    """What a feeder must know beyond its peers."""

    rank: int
    first_step: int
    max_staleness: int
    wire_dtype: str


class Feeder:
    """Feeds one rank. A context manager: its threads run while it is open. Methods are for the rank's main thread."""

    def __init__(
        self,
        transport: Transport,
        loader_addresses: Sequence[str],
        worker_addresses: Sequence[str],
        *,
        settings: FeederSettings,
        timeline: Timeline | None = None,
    ) -> None:
        self.timeline = timeline or Timeline(f"nn_worker-{settings.rank}")
        self._transport = transport
        self._loader_addresses = loader_addresses
        self._worker_addresses = worker_addresses
        self._settings = settings
        self._wire_dtype = WIRE_DTYPES[settings.wire_dtype]
        permits = settings.max_staleness + 1
        self._permits = threading.Semaphore(permits)
        self._ready: queue.Queue[Future[FedBatch] | None | SatrapError] = queue.Queue()
        self._threads = ThreadPoolExecutor(2 * min(permits, MAX_REQUEST_THREADS), thread_name_prefix="request")
        self._dispatcher = threading.Thread(target=self._dispatch, name="dispatch", daemon=True)
        self._local = threading.local()
        self._shelf = Shelf()
        self._changed = threading.Condition()
        self._limit = settings.first_step
        self._closing = False
        self._unacknowledged = 0
        self._pending_updates = 0
        self._failure: SatrapError | None = None
        self._connections: list[Connection] = []

    def __enter__(self) -> Feeder:
        self._dispatcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            connections = list(self._connections)
        self._permits.release()
        if kind is not None:
            for connection in connections:
                connection.close()  # Wakes threads that wait for an answer nobody needs any more.
        self._dispatcher.join(timeout=5.0)
        self._threads.shutdown(wait=kind is None, cancel_futures=True)
        for connection in connections:
            connection.close()

    def allow(self, limit: int) -> None:
        """Let look-ups of steps below ``limit`` start. A boundary (evaluation, checkpoint) is a limit not yet raised."""
        with self._changed:
            self._limit = limit
            self._changed.notify_all()

    def next(self) -> FedBatch | None:
        """The next step's batch with its embeddings; None after the last. Raises what a peer reported."""
        started = time.perf_counter_ns()
        item = self._ready.get()
        if isinstance(item, SatrapError):
            raise item
        batch = None if item is None else item.result()
        if batch is not None:
            self.timeline.add("wait", batch.step, started=started, ended=time.perf_counter_ns())
        self._raise_failure()
        return batch

    def push(self, batch: FedBatch, gradient_NE: npt.NDArray[np.float32] | None) -> None:
        """Send the batch's gradient (None: the step is skipped) and go on; the permit returns on acknowledgement.

        The batch's embeddings must not be used any more.
        """
        self._shelf.put(batch.memory)
        with self._changed:
            self._pending_updates += 1
        self._threads.submit(self._update, batch, gradient_NE)

    def drain(self) -> None:
        """Wait until every update sent is acknowledged. Raises what a peer reported."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending_updates == 0 or self._failure is not None)
        self._raise_failure()

    def worker_phases(self) -> list[dict[str, tuple[int, float]]]:
        """Per embedding worker: calls and seconds per phase since it was last asked."""
        return [self._worker(index).request(Message(Kind.STATISTICS)).meta["phases"] for index in range(len(self._worker_addresses))]

    @property
    def queue_depth(self) -> int:
        """Batches whose look-up has started and that the rank has not taken yet."""
        return self._ready.qsize()

    def embeddings_of(self, worker: int, arrays: list[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
        """Evaluation: rows for ids that no update will follow; inserts nothing. [N, E]"""
        reply = self._worker(worker % len(self._worker_addresses)).request(Message(Kind.LOOK_UP_IDS, {}, arrays))
        return np.array(decode(reply.arrays[0], reply.meta["scale"]))

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _dispatch(self) -> None:
        """Fetch batches in step order, take a permit for each, and have its look-up done by a request thread."""
        step = self._settings.first_step
        try:
            loaders = [self._connect(address, f"data_loader-{i}") for i, address in enumerate(self._loader_addresses)]
            while True:
                request = Message(Kind.NEXT_BATCH, {"rank": self._settings.rank, "step": step})
                reply = loaders[step % len(loaders)].request(request)
                if reply.kind == Kind.END_OF_DATA:
                    self._ready.put(None)
                    return
                meta, (dense, label) = reply.meta, (array.copy() for array in reply.arrays)
                if not self._admitted(step):
                    return
                self._ready.put(self._threads.submit(self._look_up, meta, dense, label))
                step += 1
        except Exception as error:  # noqa: BLE001 - handed to the rank, which would wait for ever
            self._ready.put(_as_satrap_error(error))

    def _admitted(self, step: int) -> bool:
        """Wait for the boundary and a permit; False if the feeder is closing."""
        with self._changed:
            self._changed.wait_for(lambda: step < self._limit or self._closing)
        self._permits.acquire()
        return not self._closing

    def _look_up(self, meta: dict[str, Any], dense: npt.NDArray[np.float32], label: npt.NDArray[np.float32]) -> FedBatch:
        worker = self._worker(meta["worker"])
        with self._changed:
            staleness = self._unacknowledged
            self._unacknowledged += 1
        with self.timeline.span("look_up", meta["step"]):
            reply = worker.request(Message(Kind.LOOK_UP, {"ref": meta["ref"]}))
        with self.timeline.span("decode", meta["step"]):
            shape = reply.arrays[0].shape
            memory = self._shelf.take(4 * int(np.prod(shape)))
            embeddings = decode(reply.arrays[0], reply.meta["scale"], Staging(memory).array(shape, np.float32))
        return FedBatch(
            meta["step"],
            meta["ref"],
            meta["worker"],
            meta["global_rows"],
            dense,
            label,
            embeddings,
            staleness,
            reply.meta["unique_ratio"],
            memory,
        )

    def _update(self, batch: FedBatch, gradient_NE: npt.NDArray[np.float32] | None) -> None:
        meta: dict[str, Any] = {"ref": batch.ref, "skip": gradient_NE is None, "scale": 1.0}
        arrays = []
        try:
            worker = self._worker(batch.worker)
            if gradient_NE is not None:
                with self.timeline.span("encode", batch.step):
                    block, meta["scale"] = encode(gradient_NE, self._wire_dtype, worker.array(gradient_NE.shape, self._wire_dtype))
                    arrays.append(block)
            with self.timeline.span("update", batch.step):
                worker.request(Message(Kind.UPDATE, meta, arrays))
        except Exception as error:  # noqa: BLE001 - handed to the rank, which would wait for ever
            failure = _as_satrap_error(error)
            with self._changed:
                self._failure = self._failure or failure
                self._changed.notify_all()
            self._ready.put(failure)  # The rank may be waiting for a batch that will never be admitted.
            return
        with self._changed:
            self._unacknowledged -= 1
            self._pending_updates -= 1
            self._changed.notify_all()
        self._permits.release()

    def _worker(self, index: int) -> Connection:
        """This thread's connection to an embedding worker."""
        if not hasattr(self._local, "workers"):
            self._local.workers = {}
        workers: dict[int, Connection] = self._local.workers
        if index not in workers:
            workers[index] = self._connect(self._worker_addresses[index], f"embedding_worker-{index}")
        return workers[index]

    def _connect(self, address: str, peer: str) -> Connection:
        connection = self._transport.connect(address, peer=peer)
        with self._changed:
            self._connections.append(connection)
        return connection


def _as_satrap_error(error: Exception) -> SatrapError:
    return error if isinstance(error, SatrapError) else TrainingError(f"unexpected {type(error).__name__}: {error}")
