"""The embedding worker: keeps a batch's ids, dedups and routes them, gathers and pools rows, and takes the gradient the same way back."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Bytes, Scratch, Shelf, Staging, aligned
from training.embedding.codec import WIRE_DTYPES, bits_of, decode, encode, rescale
from training.embedding.dedup import dedup, read_only, route
from training.embedding.messages import Kind
from training.embedding.pooling import expand, expand_backward, expand_backward_half, pool, pool_backward
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
    def unpacked(cls, arrays: Sequence[npt.NDArray[Any]]) -> Ids:
        """From the arrays of a message, as views of it."""
        return cls(arrays[0], list(zip(arrays[1::2], arrays[2::2], strict=True)))

    def packed(self) -> list[npt.NDArray[Any]]:
        """The arrays of a message."""
        return [self.signs, *(array for bag in self.bags for array in bag)]


@dataclass(frozen=True)
class _BagPlace:
    """A multi-valued slot of a table."""

    bag: int
    mean: bool
    offset: int
    """Its first column in the output."""


@dataclass(frozen=True)
class _TableLayout:
    """Where a table's slots lie in the ids and in the output's columns."""

    dim: int
    singles: npt.NDArray[np.int64]
    """Columns of ``Ids.signs``, one per single-valued slot."""
    columns: npt.NDArray[np.int64]
    """Their first columns in the output."""
    bags: Sequence[_BagPlace]


@dataclass
class _TableBatch:
    """One table's share of a batch: occurrences are those of the single-valued slots, record by record, then bag after bag."""

    unique: npt.NDArray[np.uint64]
    inverse: npt.NDArray[np.uint32]
    bounds: list[int]
    """Where the single-valued slots end and each bag does in ``inverse``."""
    starts: npt.NDArray[np.int64]
    """[num_servers + 1]: which unique signs each server holds."""

    def part(self, server: int) -> slice:
        """A server's share of the unique rows."""
        return slice(int(self.starts[server]), int(self.starts[server + 1]))


@dataclass
class _Held:
    """A batch between its arrival and its update. Its arrays lie in ``memory``, which goes back to the shelf with the update."""

    memory: Bytes
    num_records: int
    tables: list[_TableBatch]
    offsets: list[npt.NDArray[np.int64]]
    """[N + 1] per bag."""
    rank: int
    step: int
    looked_up: bool = False
    places: list[int | None] = field(default_factory=list)
    """Under which number each server remembers where it found the signs."""


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
        self._layout, self.width = _layout(slots)
        # Where no sum is taken on the way forward, float16 rows are moved to the records as they came, without becoming float32.
        self._moves_halves = wire_dtype == "float16" and all(table.dim % 8 == 0 and not table.bags for table in self._layout)
        self._held: dict[int, _Held] = {}
        self._lock = threading.Lock()
        self._local = threading.local()
        self._scratch = Scratch()
        self.shelf = Shelf()
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
                return self._put(message)
            case Kind.LOOK_UP:
                held = self._batch(int(message.meta["ref"]))
                held.looked_up = True
                return self._look_up(held, message)
            case Kind.LOOK_UP_IDS:
                held = self._deduped(Ids.unpacked(message.arrays), rank=0, step=-1)
                try:
                    return self._look_up(held, message)
                finally:
                    self.shelf.put(held.memory)
            case Kind.UPDATE:
                return self._update(message)
            case Kind.STATISTICS:
                return Message(Kind.OK, {"phases": self._timeline.take()})
        raise TransportError(f"an embedding_worker does not answer {message.kind.name}")

    def _put(self, message: Message) -> Message:
        """Ids are of no use once they are deduplicated: that is done at once, ahead of the look-up."""
        held = self._deduped(Ids.unpacked(message.arrays), rank=int(message.meta["rank"]), step=int(message.meta["step"]))
        with self._lock:
            before = self._held.get(int(message.meta["ref"]))
            self._held[int(message.meta["ref"])] = held
        if before is not None:
            self.shelf.put(before.memory)
        return Message(Kind.OK)

    def _batch(self, ref: int) -> _Held:
        with self._lock:
            if ref not in self._held:
                raise TransportError(f"batch {ref} is not held by this embedding_worker: it was never put or its update came already")
            return self._held[ref]

    # ---- forward

    def _deduped(self, ids: Ids, *, rank: int, step: int) -> _Held:
        with self._timeline.span("dedup", step):
            counts = [len(table.singles) * len(ids.signs) + sum(len(ids.bags[b.bag][1]) for b in table.bags) for table in self._layout]
            needed = sum(aligned(4 * n) + aligned(8 * (n + 1)) for n in counts) + sum(aligned(offsets.nbytes) for offsets, _ in ids.bags)
            memory = self.shelf.take(needed)
            place = Staging(memory)
            batches = []
            for table, count in zip(self._layout, counts, strict=True):
                signs, bounds = self._occurrences(ids, table, count)
                outputs = {"unique": place.array((count + 1,), np.uint64), "inverse": place.array((count,), np.uint32)}
                unique, inverse = dedup(signs, **outputs)
                batches.append(_TableBatch(unique, inverse, bounds, route(unique, len(self._server_addresses))))
            offsets = []
            for theirs, _ in ids.bags:
                offsets.append(place.array(theirs.shape, theirs.dtype))
                np.copyto(offsets[-1], theirs)
        return _Held(memory, len(ids.signs), batches, offsets, rank, step)

    def _occurrences(self, ids: Ids, table: _TableLayout, count: int) -> tuple[npt.NDArray[np.uint64], list[int]]:
        """All signs of a table, [count], and where its kinds of slots end; without a copy if they lie together."""
        bounds = [len(table.singles) * len(ids.signs)]
        for bag in table.bags:
            bounds.append(bounds[-1] + len(ids.bags[bag.bag][1]))
        if not table.bags and len(table.singles) == ids.signs.shape[1]:
            return np.ascontiguousarray(ids.signs).reshape(-1), bounds
        signs = self._scratch.array("signs", (count,), np.uint64)
        if len(table.singles):
            np.take(ids.signs, table.singles, axis=1, out=signs[: bounds[0]].reshape(len(ids.signs), len(table.singles)), mode="clip")
        for bag, first, last in zip(table.bags, bounds, bounds[1:], strict=False):
            signs[first:last] = ids.bags[bag.bag][1]
        return signs, bounds

    def _look_up(self, held: _Held, message: Message) -> Message:
        replies = self._rows(held)
        block, scale = self._moved(held, replies, message) if self._moves_halves else self._pooled(held, replies, message)
        occurrences = sum(len(batch.inverse) for batch in held.tables)
        unique = sum(len(batch.unique) for batch in held.tables)
        return Message(Kind.EMBEDDINGS, {"scale": scale, "unique_ratio": unique / max(1, occurrences)}, [block])

    def _rows(self, held: _Held) -> list[Message]:
        """Every server's rows of its unique signs; all servers are asked before any is awaited."""
        servers, span, step = self._servers(), self._timeline.span, held.step
        for s, server in enumerate(servers):
            with span("send", step):
                signs = [batch.unique[batch.part(s)] for batch in held.tables]
                server.send(Message(Kind.ROWS_OF, {"insert": step >= 0, "step": step}, signs))
        with span("wait_rows", step):
            replies = [server.receive() for server in servers]
        held.places = [reply.meta["places"] for reply in replies]
        return replies

    def _moved(self, held: _Held, replies: list[Message], message: Message) -> tuple[npt.NDArray[Any], float]:
        """The output in float16, from rows in float16: all get the smallest scale, then they are moved."""
        scale = min(float(value) for reply in replies for value in reply.meta["scales"])
        out = message.array((held.num_records, self.width), np.float16)
        with self._timeline.span("pool", held.step):
            for t, (table, batch) in enumerate(zip(self._layout, held.tables, strict=True)):
                rows = replies[0].arrays[t]
                if len(replies) > 1 or replies[0].meta["scales"][t] != scale:
                    rows = self._scratch.array("halves", (len(batch.unique), table.dim), np.float16)
                    for s, reply in enumerate(replies):
                        rescale(reply.arrays[t], scale / reply.meta["scales"][t], rows[batch.part(s)])
                pairs = read_only(rows).view(np.float32)
                expand(pairs, read_only(batch.inverse), table.columns // 2, out.view(np.float32))
        return out, scale

    def _pooled(self, held: _Held, replies: list[Message], message: Message) -> tuple[npt.NDArray[Any], float]:
        """The output by way of float32."""
        shape, full = (held.num_records, self.width), self._wire_dtype == np.float32
        out_NE = message.array(shape, np.float32) if full else self._scratch.array("output", shape, np.float32)
        with self._timeline.span("pool", held.step):
            for t, (table, batch) in enumerate(zip(self._layout, held.tables, strict=True)):
                rows_UD = self._scratch.array("rows", (len(batch.unique), table.dim), np.float32)
                for s, reply in enumerate(replies):
                    decode(reply.arrays[t], reply.meta["scales"][t], rows_UD[batch.part(s)])
                rows_UD, inverse = read_only(rows_UD), read_only(batch.inverse)
                expand(rows_UD, inverse[: batch.bounds[0]], table.columns, out_NE)
                for bag, first, last in zip(table.bags, batch.bounds, batch.bounds[1:], strict=False):
                    pool(rows_UD, inverse[first:last], read_only(held.offsets[bag.bag]), bag.mean, out_NE, bag.offset)
        if full:
            return out_NE, 1.0
        with self._timeline.span("encode", held.step):
            return encode(out_NE, self._wire_dtype, message.array(shape, self._wire_dtype))

    # ---- backward

    def _update(self, message: Message) -> Message:
        ref = int(message.meta["ref"])
        held = self._batch(ref)
        if not held.looked_up:
            raise TransportError(f"batch {ref} was never looked up, so it has no update")
        if not message.meta["skip"]:
            with self._timeline.span("sum", held.step):
                summed = self._summed(held, message.arrays[0], float(message.meta["scale"]))
            self._push(held, summed)
        elif self._sync:
            self._push(held, [])  # The other ranks' updates of the step wait for this one.
        with self._lock:
            del self._held[ref]
        self.shelf.put(held.memory)
        return Message(Kind.OK)

    def _summed(self, held: _Held, gradient: npt.NDArray[Any], scale: float) -> list[Rows]:
        """Gradients per unique row and table, [U, dim]: a sign in two slots of a table is merged here."""
        halves = self._moves_halves and gradient.dtype == np.float16
        if not halves:
            gradient = read_only(decode(gradient, scale, self._scratch.array("gradient", gradient.shape, np.float32)))
        summed = []
        for t, (table, batch) in enumerate(zip(self._layout, held.tables, strict=True)):
            out_UD = self._scratch.array(f"summed {t}", (len(batch.unique), table.dim), np.float32)
            out_UD.fill(0.0)
            inverse = read_only(batch.inverse)
            if halves:
                expand_backward_half(bits_of(gradient), np.float32(1.0 / scale), inverse, table.columns, out_UD)
            else:
                expand_backward(gradient, inverse[: batch.bounds[0]], table.columns, out_UD)
            for bag, first, last in zip(table.bags, batch.bounds, batch.bounds[1:], strict=False):
                pool_backward(gradient, inverse[first:last], read_only(held.offsets[bag.bag]), bag.mean, bag.offset, out_UD)
            summed.append(out_UD)
        return summed

    def _push(self, held: _Held, summed: list[Rows]) -> None:
        servers, span = self._servers(), self._timeline.span
        for s, server in enumerate(servers):
            arrays: list[npt.NDArray[Any]] = []
            scales = []
            with span("push_encode", held.step):
                for batch, rows_UD in zip(held.tables, summed, strict=False):
                    own = rows_UD[batch.part(s)]
                    block, scale = encode(own, self._wire_dtype, server.array(own.shape, self._wire_dtype))
                    arrays += [batch.unique[batch.part(s)], block]
                    scales.append(scale)
            meta = {"step": held.step, "rank": held.rank, "scales": scales, "places": held.places[s]}
            with span("push_send", held.step):
                server.send(Message(Kind.APPLY, meta, arrays))
        with span("wait_applied", held.step):
            for server in servers:
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


def _layout(slots: Sequence[Slot]) -> tuple[list[_TableLayout], int]:
    """Per table, and the width of all slots together."""
    num_tables = 1 + max(slot.table for slot in slots)
    singles: list[list[tuple[int, int]]] = [[] for _ in range(num_tables)]
    bags: list[list[_BagPlace]] = [[] for _ in range(num_tables)]
    dims = [0] * num_tables
    single = bag = offset = 0
    for slot in slots:
        dims[slot.table] = slot.dim
        if slot.multi_valued:
            bags[slot.table].append(_BagPlace(bag, slot.pooling == "mean", offset))
            bag += 1
        else:
            singles[slot.table].append((single, offset))
            single += 1
        offset += slot.dim
    places = [np.array(pairs, np.int64).reshape(-1, 2) for pairs in singles]
    layouts = [_TableLayout(dim, p[:, 0].copy(), p[:, 1].copy(), own) for dim, p, own in zip(dims, places, bags, strict=True)]
    return layouts, offset
