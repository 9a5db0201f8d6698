"""Messages on a stream socket: a small struct header and raw arrays, which go through the socket or lie in shared memory.

Frame, little-endian::

    u32 magic | u16 kind | u16 num_arrays | u64 request_id | u32 meta_bytes | u32 flags        24 bytes
    per array: u8 dtype | u8 ndim | 6 pad | u64 rows | u64 columns | u64 offset                32 bytes
    meta: JSON object                                                                          meta_bytes
    arrays, each padded to 8 bytes                                                             unless flag 1

With flag 1 the arrays lie at their offsets in the sender's segment (``training.embedding.shared_memory``). Arrays have one or two axes.
"""

from __future__ import annotations

import array
import json
import math
import os
import socket
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from training.embedding.buffers import Array, Staging
from training.embedding.messages import Kind
from training.embedding.shared_memory import Segment
from training.embedding.transport import Message

MAGIC = 0x32525453  # "STR2"
HEADER = struct.Struct("<IHHQII")
DESCRIPTOR = struct.Struct("<BB6xQQQ")
IN_SEGMENT = 1
DTYPES = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MAX_META_BYTES = 16 << 20
# A frame beyond this is taken for garbage rather than allocated.
MAX_PAYLOAD_BYTES = 8 << 30
# Before a peer has shown its token it may make us hold no more than this.
MAX_GREETING_BYTES = 4096


class Channel:
    """One end of an established connection. Sending and receiving may each have a thread of their own, not more."""

    def __init__(self, sock: socket.socket, *, outgoing: Segment | None = None, incoming: Segment | None = None) -> None:
        self.sock = sock
        self._outgoing = outgoing
        self._incoming = incoming
        self._buffer = np.empty(1 << 16, np.uint8)

    def send(self, message: Message, request_id: int) -> None:
        """Send a whole message; arrays that lie in the outgoing segment are only pointed to. Raises ``OSError``."""
        arrays = [np.ascontiguousarray(item) for item in message.arrays]
        offsets = [self._outgoing.offset_of(item) for item in arrays] if self._outgoing else []
        if arrays and offsets and None not in offsets:
            _send_all(self.sock, [memoryview(_head(message, request_id, arrays, offsets, IN_SEGMENT))])
            return
        views = [memoryview(_head(message, request_id, arrays, [0] * len(arrays), 0))]
        for item in arrays:
            if item.nbytes:
                views.append(item.reshape(-1).view(np.uint8).data)
            if spare := _padded(item.nbytes) - item.nbytes:
                views.append(memoryview(bytes(spare)))
        _send_all(self.sock, views)

    def receive(self, outbox: Staging | None = None) -> tuple[Message, int] | None:
        """The next message and its request id, or None if the peer closed between messages. Raises ``OSError``.

        Arrays are views that live until the next message. ``outbox`` is where a handler may put its answer.
        """
        head = bytearray(HEADER.size)
        if not _fill(self.sock, memoryview(head), may_end=True):
            return None
        magic, kind, num_arrays, request_id, meta_bytes, flags = HEADER.unpack(head)
        if magic != MAGIC or meta_bytes > MAX_META_BYTES:
            raise ConnectionError("the bytes received are not a message")
        tail = bytearray(num_arrays * DESCRIPTOR.size + meta_bytes)
        _fill(self.sock, memoryview(tail))
        layout = [_layout(DESCRIPTOR.unpack_from(tail, i * DESCRIPTOR.size)) for i in range(num_arrays)]
        arrays = self._shared(layout) if flags & IN_SEGMENT else self._streamed(layout)
        return Message(_kind(kind), _meta(tail[num_arrays * DESCRIPTOR.size :]), arrays, outbox), request_id

    def close(self) -> None:
        """Close the socket and let go of the peer's segment; the own one belongs to who made it."""
        self.sock.close()
        if self._incoming is not None:
            self._incoming.close()

    def _shared(self, layout: list[_Layout]) -> list[Array]:
        if self._incoming is None:
            raise ConnectionError("the peer points to shared memory that it never handed over")
        arrays = []
        for dtype, shape, num_bytes, offset in layout:
            if offset % dtype.itemsize or offset + num_bytes > len(self._incoming.memory):
                raise ConnectionError(f"an array of {num_bytes} bytes at {offset} does not lie in the shared memory")
            arrays.append(self._incoming.memory[offset : offset + num_bytes].view(dtype).reshape(shape))
        return arrays

    def _streamed(self, layout: list[_Layout]) -> list[Array]:
        total = sum(_padded(num_bytes) for _, _, num_bytes, _ in layout)
        if total > MAX_PAYLOAD_BYTES:
            raise ConnectionError(f"a message of {total} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
        if len(self._buffer) < total:
            self._buffer = np.empty(total + total // 2, np.uint8)
        _fill(self.sock, self._buffer[:total].data)
        arrays, offset = [], 0
        for dtype, shape, num_bytes, _ in layout:
            arrays.append(self._buffer[offset : offset + num_bytes].view(dtype).reshape(shape))
            offset += _padded(num_bytes)
        return arrays


def send_greeting(sock: socket.socket, kind: Kind, meta: dict[str, Any], segment: Segment | None) -> None:
    """The first message either way; hands the sender's segment over if there is one. Raises ``OSError``."""
    frame = _head(Message(kind, meta), 0, [], [], 0)
    if segment is None:
        sock.sendall(frame)
    else:
        socket.send_fds(sock, [frame], [segment.descriptor])


def receive_greeting(sock: socket.socket) -> tuple[Kind, dict[str, Any], Segment | None]:
    """The peer's first message and its segment, if it sent one. Raises ``OSError``."""
    head, descriptors = _receive_descriptors(sock, HEADER.size) if sock.family == socket.AF_UNIX else (sock.recv(HEADER.size), [])
    try:
        rest = bytearray(HEADER.size - len(head))
        _fill(sock, memoryview(rest))
        magic, kind, num_arrays, _, meta_bytes, _ = HEADER.unpack(head + rest)
        if magic != MAGIC or num_arrays or meta_bytes > MAX_GREETING_BYTES:
            raise ConnectionError("the bytes received are not a greeting of this version")
        tail = bytearray(meta_bytes)
        _fill(sock, memoryview(tail))
        greeting = _kind(kind), _meta(tail)
        segment = Segment.received(descriptors.pop()) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return *greeting, segment


def _receive_descriptors(sock: socket.socket, num_bytes: int) -> tuple[bytes, list[int]]:
    """Like ``socket.recv_fds`` for one descriptor, but closed on exec."""
    descriptors = array.array("i")
    data, ancillary, _, _ = sock.recvmsg(num_bytes, socket.CMSG_SPACE(descriptors.itemsize), socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) - len(content) % descriptors.itemsize])
    return data, list(descriptors)


_Layout = tuple[np.dtype[Any], tuple[int, ...], int, int]


def _layout(descriptor: tuple[int, int, int, int, int]) -> _Layout:
    """dtype, shape, bytes, offset."""
    code, ndim, rows, columns, offset = descriptor
    if code >= len(DTYPES) or ndim not in (1, 2):
        raise ConnectionError(f"an array of dtype code {code} and {ndim} axes is unknown")
    shape = (rows, columns)[:ndim]
    return DTYPES[code], shape, math.prod(shape) * DTYPES[code].itemsize, offset


def _head(message: Message, request_id: int, arrays: Sequence[Array], offsets: Sequence[int | None], flags: int) -> bytes:
    meta = json.dumps(message.meta).encode() if message.meta else b""
    parts = [HEADER.pack(MAGIC, message.kind, len(arrays), request_id, len(meta), flags)]
    for item, offset in zip(arrays, offsets, strict=True):
        rows, columns = (*item.shape, 0)[:2]
        parts.append(DESCRIPTOR.pack(DTYPE_CODES[item.dtype], item.ndim, rows, columns, offset))
    return b"".join(parts) + meta


def _kind(number: int) -> Kind:
    try:
        return Kind(number)
    except ValueError as error:
        raise ConnectionError(f"the message received is broken: {error}") from None


def _meta(text: bytearray) -> dict[str, Any]:
    try:
        meta = json.loads(text) if text else {}
    except ValueError as error:
        raise ConnectionError(f"the message received is broken: {error}") from None
    if not isinstance(meta, dict):
        raise ConnectionError("the message received is broken: its meta is no object")
    return meta


def _padded(num_bytes: int) -> int:
    return (num_bytes + 7) & ~7


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + 512])
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]


def _fill(sock: socket.socket, view: memoryview, *, may_end: bool = False) -> bool:
    done = 0
    while done < len(view):
        received = sock.recv_into(view[done:], 0, socket.MSG_WAITALL)
        if received == 0:
            if may_end and done == 0:
                return False
            raise ConnectionError("the peer closed the connection in the middle of a message")
        done += received
    return True
