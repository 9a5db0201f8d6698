"""The data loader: reads shards, hands the ids of a batch to an embedding worker and its dense part to the rank that asks.

A step's records are those of ``BatchPlan``; rank r of W gets the r-th run of ``batch_size`` records. Loader i of L owns the steps
congruent to i modulo L. Reading runs ahead of the ranks by a bounded number of batches.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from training.data.shards import Batch, BatchPlan, ShardReader
from training.embedding.embedding_worker import Ids
from training.embedding.messages import Kind
from training.embedding.transport import Message, Transport
from training.errors import RoleError, SatrapError, SourceError, TransportError
from training.profile import Timeline


@dataclass(frozen=True)
class LoaderSettings:
    """What a loader must know beyond the data."""

    index: int
    num_loaders: int
    num_ranks: int
    batch_size: int
    """Records per rank and step."""
    first_step: int
    """Steps before it were trained by the run that is resumed."""
    last_step: int
    """Steps from it on do not exist."""
    depth: int
    """Batches read ahead per rank."""
    timeout_seconds: float


class DataLoader:
    """Handles the messages of one loader. A context manager: its threads run while it is open."""

    def __init__(
        self,
        reader: ShardReader,
        plan: BatchPlan,
        transport: Transport,
        worker_addresses: Sequence[str],
        *,
        settings: LoaderSettings,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline or Timeline("data_loader")
        self._reader = reader
        self._plan = plan
        self._transport = transport
        self._worker_addresses = worker_addresses
        self._settings = settings
        self._queues: list[queue.Queue[Message | SatrapError]] = [queue.Queue(settings.depth) for _ in range(settings.num_ranks)]
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(rank,), name=f"load {rank}", daemon=True) for rank in range(settings.num_ranks)
        ]

    def __enter__(self) -> DataLoader:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=10.0)

    def handle(self, message: Message) -> Message:
        """Answer ``NEXT_BATCH``: the rank's next batch in step order, or ``END_OF_DATA``."""
        if message.kind != Kind.NEXT_BATCH:
            raise TransportError(f"a data_loader does not answer {message.kind.name}")
        rank, step = int(message.meta["rank"]), int(message.meta["step"])
        if step >= self._settings.last_step:
            return Message(Kind.END_OF_DATA)
        try:
            # Sooner than the rank gives up on this answer, so that the reason below reaches it.
            batch = self._queues[rank].get(timeout=0.8 * self._settings.timeout_seconds)
        except queue.Empty:
            raise RoleError(
                f"no batch for step {step} within {self._settings.timeout_seconds:g} s: the embedding_worker or the disk hangs"
            ) from None
        if isinstance(batch, SatrapError):
            raise batch
        if batch.meta["step"] != step:
            raise TransportError(f"rank {rank} asks for step {step}, next here is {batch.meta['step']}: it was asked twice or out of order")
        return batch

    def _run(self, rank: int) -> None:
        own = self._settings
        connections = {}
        try:
            first = own.first_step + (own.index - own.first_step) % own.num_loaders
            for step in range(first, own.last_step, own.num_loaders):
                ref = step * own.num_ranks + rank
                worker = ref % len(self._worker_addresses)
                if worker not in connections:
                    connections[worker] = self._transport.connect(self._worker_addresses[worker], peer=f"embedding_worker-{worker}")
                with self._timeline.span("read", step):
                    batch, global_rows = self._read(step, rank)
                ids = Ids(batch.signs, [(bag.offsets, bag.values) for bag in batch.bags])
                with self._timeline.span("put_ids", step):
                    connections[worker].request(Message(Kind.PUT_IDS, {"ref": ref, "rank": rank, "step": step}, ids.packed()))
                meta = {"ref": ref, "worker": worker, "step": step, "rows": len(batch), "global_rows": global_rows}
                if not self._hand_over(rank, Message(Kind.BATCH, meta, [batch.dense, batch.label])):
                    return
        except SatrapError as error:
            self._hand_over(rank, error)
        except Exception as error:  # noqa: BLE001 - handed to the rank, which would wait for ever
            self._hand_over(rank, SourceError(f"a shard cannot be read: {type(error).__name__}: {error}; run `satrap preprocess` again"))
        finally:
            for connection in connections.values():
                connection.close()

    def _read(self, step: int, rank: int) -> tuple[Batch, int]:
        """The rank's records of a step (none for late ranks of a short last step), and the step's records over all ranks."""
        own = self._settings
        rows = self._plan.rows(step // self._plan.steps_per_epoch, step % self._plan.steps_per_epoch)
        if isinstance(rows, slice):
            start = min(rows.start + rank * own.batch_size, rows.stop)
            return self._reader.read(start, min(start + own.batch_size, rows.stop)), rows.stop - rows.start
        return self._reader.take(np.asarray(rows[rank * own.batch_size : (rank + 1) * own.batch_size])), len(rows)

    def _hand_over(self, rank: int, item: Message | SatrapError) -> bool:
        """Queue an item; False if the loader is closing."""
        while not self._stop.is_set():
            try:
                self._queues[rank].put(item, timeout=0.2)
            except queue.Full:
                continue
            return True
        return False
