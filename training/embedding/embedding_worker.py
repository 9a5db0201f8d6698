"""The embedding worker: keeps a batch's ids, dedups and routes them, gathers and pools rows, and takes the gradient the same way back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.codec import WIRE_DTYPES, decode, encode
from training.embedding.dedup import dedup, route
from training.embedding.messages import Kind
from training.embedding.pooling import expand, expand_backward, pool, pool_backward
from training.embedding.slots import Slot
from training.embedding.transport import Connection, Message, Transport
from training.errors import TransportError
from training.profile import Timeline

Rows = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Ids:
    """The ids of a batch of N records, as they travel."""

    signs: npt.NDArray[np.uint64]
    """[N, S]: the single-valued slots."""
    bags: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64]]]
    """offsets [N + 1] and values per multi-valued slot."""

    @classmethod
    def unpacked(cls, arrays: Sequence[npt.NDArray[Any]], *, copy: bool) -> Ids:
        """From the arrays of a message; copied if they must outlive it."""
        own = [array.copy() for array in arrays] if copy else list(arrays)
        return cls(own[0], list(zip(own[1::2], own[2::2], strict=True)))

    def packed(self) -> list[npt.NDArray[Any]]:
        """The arrays of a message."""
        return [self.signs, *(array for bag in self.bags for array in bag)]


@dataclass(frozen=True)
class _Segment:
    """Where one slot's occurrences lie: in the ids, in its table's concatenation, and in the output's columns."""

    single: int | None
    bag: int | None
    mean: bool
    offset: int


@dataclass
class _TableBatch:
    """One table's share of a batch."""

    unique: npt.NDArray[np.uint64]
    inverse: npt.NDArray[np.uint32]
    bounds: list[int]
    """Where each segment's occurrences start in ``inverse``."""
    starts: npt.NDArray[np.int64]
    """[num_servers + 1]: which unique signs each server holds."""


@dataclass
class _Held:
    """A batch between its arrival and its update."""

    ids: Ids
    rank: int
    step: int
    tables: list[_TableBatch] | None = None


class EmbeddingWorker:
    """Handles the messages of one embedding worker. A context manager. Safe for concurrent calls."""

    def __init__(
        self,
        slots: Sequence[Slot],
        transport: Transport,
        server_addresses: Sequence[str],
        *,
        wire_dtype: str,
        sync: bool,
        timeline: Timeline | None = None,
    ) -> None:
        self._timeline = timeline or Timeline("embedding_worker")
        self._transport = transport
        self._server_addresses = server_addresses
        self._wire_dtype = WIRE_DTYPES[wire_dtype]
        self._sync = sync
        self._layout, self._dims, self.width = _layout(slots)
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._connections: list[Connection] = []

    def __enter__(self) -> EmbeddingWorker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            for connection in self._connections:
                connection.close()

    def handle(self, message: Message) -> Message:
        """Answer one request; see ``training.embedding.messages``."""
        match message.kind:
            case Kind.PUT_IDS:
                held = _Held(Ids.unpacked(message.arrays, copy=True), int(message.meta["rank"]), int(message.meta["step"]))
                with self._lock:
                    self._held[int(message.meta["ref"])] = held
                return Message(Kind.OK)
            case Kind.LOOK_UP:
                held = self._batch(int(message.meta["ref"]))
                held.tables, reply = self._look_up(held.ids, step=held.step)
                return reply
            case Kind.LOOK_UP_IDS:
                return self._look_up(Ids.unpacked(message.arrays, copy=False), step=-1)[1]
            case Kind.UPDATE:
                return self._update(message)
            case Kind.STATISTICS:
                return Message(Kind.OK, {"phases": self._timeline.take()})
        raise TransportError(f"an embedding_worker does not answer {message.kind.name}")

    def _batch(self, ref: int) -> _Held:
        with self._lock:
            if ref not in self._held:
                raise TransportError(f"batch {ref} is not held by this embedding_worker: it was never put or its update came already")
            return self._held[ref]

    def _look_up(self, ids: Ids, *, step: int) -> tuple[list[_TableBatch], Message]:
        span = self._timeline.span
        with span("dedup", step):
            batches = [self._deduped(ids, table) for table in range(len(self._layout))]
        rows = self._fetch(batches, step=step)
        out_NE = np.empty((len(ids.signs), self.width), np.float32)
        with span("pool", step):
            for segments, batch, rows_UD in zip(self._layout, batches, rows, strict=True):
                for segment, first, last in zip(segments, batch.bounds, batch.bounds[1:], strict=False):
                    inverse = batch.inverse[first:last]
                    if segment.bag is None:
                        expand(rows_UD, inverse, out_NE, segment.offset)
                    else:
                        pool(rows_UD, inverse, ids.bags[segment.bag][0], segment.mean, out_NE, segment.offset)
        with span("encode", step):
            block, scale = encode(out_NE, self._wire_dtype)
        occurrences = sum(len(batch.inverse) for batch in batches)
        unique = sum(len(batch.unique) for batch in batches)
        return batches, Message(Kind.EMBEDDINGS, {"scale": scale, "unique_ratio": unique / max(1, occurrences)}, [block])

    def _deduped(self, ids: Ids, table: int) -> _TableBatch:
        parts, bounds = [], [0]
        for segment in self._layout[table]:
            part = ids.signs[:, segment.single] if segment.bag is None else ids.bags[segment.bag][1]
            parts.append(part)
            bounds.append(bounds[-1] + len(part))
        unique, inverse = dedup(np.concatenate(parts))
        return _TableBatch(unique, inverse, bounds, route(unique, len(self._server_addresses)))

    def _fetch(self, batches: list[_TableBatch], *, step: int) -> list[Rows]:
        """Unique rows per table, [U, dim] float32; all servers are asked before any is awaited."""
        rows = [np.empty((len(batch.unique), dim), np.float32) for batch, dim in zip(batches, self._dims, strict=True)]
        servers, span = self._servers(), self._timeline.span
        for s, server in enumerate(servers):
            with span("send", step):
                server.send(
                    Message(Kind.ROWS_OF, {"insert": step >= 0, "step": step}, [b.unique[b.starts[s] : b.starts[s + 1]] for b in batches])
                )
        for s, server in enumerate(servers):
            with span("wait_rows", step):
                reply = server.receive()
            with span("decode", step):
                for t, (batch, block) in enumerate(zip(batches, reply.arrays, strict=True)):
                    rows[t][batch.starts[s] : batch.starts[s + 1]] = decode(block, reply.meta["scales"][t])
        return rows

    def _update(self, message: Message) -> Message:
        ref = int(message.meta["ref"])
        held = self._batch(ref)
        if held.tables is None:
            raise TransportError(f"batch {ref} was never looked up, so it has no update")
        skip = bool(message.meta["skip"])
        if not skip:
            with self._timeline.span("sum", held.step):
                gradient_NE = decode(message.arrays[0], message.meta["scale"])
                summed = self._summed(held, gradient_NE)
            self._push(held, summed)
        elif self._sync:
            self._push(held, [])  # The other ranks' updates of the step wait for this one.
        with self._lock:
            del self._held[ref]
        return Message(Kind.OK)

    def _summed(self, held: _Held, gradient_NE: Rows) -> list[Rows]:
        """Gradients per unique row and table, [U, dim]: a sign in two slots of a table is merged here."""
        summed = []
        for segments, batch, dim in zip(self._layout, held.tables or [], self._dims, strict=True):
            out_UD = np.zeros((len(batch.unique), dim), np.float32)
            for segment, first, last in zip(segments, batch.bounds, batch.bounds[1:], strict=False):
                inverse = batch.inverse[first:last]
                if segment.bag is None:
                    expand_backward(gradient_NE, inverse, segment.offset, out_UD)
                else:
                    pool_backward(gradient_NE, inverse, held.ids.bags[segment.bag][0], segment.mean, segment.offset, out_UD)
            summed.append(out_UD)
        return summed

    def _push(self, held: _Held, summed: list[Rows]) -> None:
        servers, span = self._servers(), self._timeline.span
        for s, server in enumerate(servers):
            arrays: list[npt.NDArray[Any]] = []
            scales = []
            with span("push_encode", held.step):
                for batch, rows_UD in zip(held.tables or [], summed, strict=False):
                    part = slice(batch.starts[s], batch.starts[s + 1])
                    block, scale = encode(rows_UD[part], self._wire_dtype)
                    arrays += [batch.unique[part], block]
                    scales.append(scale)
            with span("push_send", held.step):
                server.send(Message(Kind.APPLY, {"step": held.step, "rank": held.rank, "scales": scales}, arrays))
        for server in servers:
            with span("wait_applied", held.step):
                server.receive()

    def _servers(self) -> list[Connection]:
        """This thread's connections to all servers."""
        if not hasattr(self._local, "servers"):
            self._local.servers = [
                self._transport.connect(address, peer=f"parameter_server-{i}") for i, address in enumerate(self._server_addresses)
            ]
            with self._lock:
                self._connections.extend(self._local.servers)
        servers: list[Connection] = self._local.servers
        return servers


def _layout(slots: Sequence[Slot]) -> tuple[list[list[_Segment]], list[int], int]:
    """Segments and width per table, and the width of all slots together."""
    num_tables = 1 + max(slot.table for slot in slots)
    segments: list[list[_Segment]] = [[] for _ in range(num_tables)]
    dims = [0] * num_tables
    single = bag = offset = 0
    for slot in slots:
        place = _Segment(None, bag, slot.pooling == "mean", offset) if slot.multi_valued else _Segment(single, None, False, offset)
        segments[slot.table].append(place)
        dims[slot.table] = slot.dim
        bag, single = (bag + 1, single) if slot.multi_valued else (bag, single + 1)
        offset += slot.dim
    return segments, dims, offset
