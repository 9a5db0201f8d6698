"""Request and reply between roles: a small struct header and raw arrays over TCP or Unix sockets.

Frame, little-endian::

    u32 magic | u16 kind | u16 num_arrays | u64 request_id | u32 meta_bytes | u32 reserved      24 bytes
    per array: u8 dtype | u8 ndim | 6 pad | u64 rows | u64 columns                             24 bytes
    meta: JSON object                                                                          meta_bytes
    arrays, each padded to 8 bytes

Arrays have one or two axes. A reply carries its request's id. A server answers a failed request with kind ``ERROR``; the client
raises ``TransportError`` with its text. Received arrays are views of the connection's buffer: they live until the next message
on that connection, so whoever keeps them copies them.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.embedding.messages import Kind
from training.errors import SatrapError, TransportError

Array = npt.NDArray[Any]

MAGIC = 0x31525453  # "STR1"
HEADER = struct.Struct("<IHHQII")
DESCRIPTOR = struct.Struct("<BB6xQQ")
DTYPES = tuple(np.dtype(name) for name in ("u1", "u2", "u4", "u8", "i1", "i2", "i4", "i8", "f2", "f4", "f8"))
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES)}
MAX_META_BYTES = 16 << 20
# A frame beyond this is taken for garbage rather than allocated.
MAX_PAYLOAD_BYTES = 8 << 30


@dataclass(frozen=True)
class Message:
    """One request or reply."""

    kind: Kind
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[Array] = ()


Handler = Callable[[Message], Message]


class Connection(Protocol):
    """A client's end. Not for several threads at once."""

    def send(self, message: Message) -> None:
        """Send a request without waiting; exactly one ``receive`` must follow before the next ``send``."""

    def receive(self) -> Message:
        """Wait for the reply; raises ``TransportError`` if the peer failed, vanished or is too late."""

    def request(self, message: Message) -> Message:
        """``send`` and ``receive``."""

    def close(self) -> None:
        """Close; idempotent."""


class Server(Protocol):
    """A running service; a context manager."""

    address: str

    def __enter__(self) -> Server: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...


class Transport(Protocol):
    """How roles reach one another."""

    def connect(self, address: str, *, peer: str) -> Connection:
        """Open a connection; ``peer`` names the role in errors. Raises ``TransportError``."""

    def serve(self, handler: Handler, address: str) -> Server:
        """Answer requests at an address until the server is closed. The handler runs in one thread per connection."""


class SocketTransport:
    """Unix sockets (``unix:/path``) and TCP (``tcp:host:port``; port 0 takes a free one)."""

    def __init__(self, timeout_seconds: float) -> None:
        self.timeout_seconds = timeout_seconds

    def connect(self, address: str, *, peer: str) -> Connection:
        """See ``Transport.connect``."""
        family, target = _parse(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout_seconds)
            sock.connect(target)
            _tune(sock)
        except OSError as error:
            sock.close()
            raise TransportError(f"{peer} at {address} cannot be reached: {error}") from None
        return SocketConnection(sock, peer, self.timeout_seconds)

    def serve(self, handler: Handler, address: str) -> SocketServer:
        """See ``Transport.serve``."""
        return SocketServer.bind(handler, address)


class SocketConnection:
    """A client's end of a socket."""

    def __init__(self, sock: socket.socket, peer: str, timeout_seconds: float) -> None:
        self._sock = sock
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._buffer = _Buffer()
        self._request_id = 0

    def send(self, message: Message) -> None:
        """See ``Connection.send``."""
        self._request_id += 1
        try:
            _send(self._sock, message, self._request_id)
        except OSError as error:
            raise self._failed(message.kind.name, error) from None

    def receive(self) -> Message:
        """See ``Connection.receive``."""
        try:
            received = _receive(self._sock, self._buffer)
        except OSError as error:
            raise self._failed("the reply", error) from None
        if received is None:
            raise TransportError(f"{self._peer} closed the connection; see its log for the reason")
        message, request_id = received
        if request_id != self._request_id:
            raise TransportError(f"{self._peer} answered request {request_id} instead of {self._request_id}: the stream is out of step")
        if message.kind == Kind.ERROR:
            raise TransportError(f"{self._peer}: {message.meta['error']}")
        return message

    def request(self, message: Message) -> Message:
        """See ``Connection.request``."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """See ``Connection.close``."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # Wakes a thread that waits in receive; close alone does not.
        self._sock.close()

    def _failed(self, what: str, error: OSError) -> TransportError:
        if isinstance(error, TimeoutError):
            return TransportError(
                f"{self._peer}: no progress on {what} within {self._timeout_seconds:g} s (training.request_timeout_seconds)"
            )
        return TransportError(f"{self._peer}: {what} failed: {error}")


class SocketServer:
    """Listens and answers, one thread per connection."""

    def __init__(self, sock: socket.socket, handler: Handler, address: str) -> None:
        self.address = address
        self._sock = sock
        self._handler = handler
        self._closing = False
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    @classmethod
    def bind(cls, handler: Handler, address: str) -> SocketServer:
        """Bind and listen; raises ``TransportError`` if the address is taken."""
        family, target = _parse(address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family == socket.AF_INET:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(target)
            sock.listen(128)
        except OSError as error:
            sock.close()
            raise TransportError(f"cannot listen at {address}: {error}") from None
        if family == socket.AF_INET:
            host, port = sock.getsockname()
            address = f"tcp:{host}:{port}"
        return cls(sock, handler, address)

    def __enter__(self) -> SocketServer:
        thread = threading.Thread(target=self._accept, name=f"accept {self.address}", daemon=True)
        self._threads.append(thread)
        thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._lock:
            self._closing = True
            clients = list(self._clients)
        for sock in (self._sock, *clients):
            # A thread blocked in accept or recv wakes on shutdown, not on close.
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=5.0)
        self._sock.close()
        if self.address.startswith("unix:"):
            Path(self.address.removeprefix("unix:")).unlink(missing_ok=True)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._sock.accept()
            except OSError:
                return
            with self._lock:
                if self._closing:
                    client.close()
                    return
                self._clients.add(client)
            thread = threading.Thread(target=self._answer, args=(client,), name=f"serve {self.address}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, client: socket.socket) -> None:
        buffer = _Buffer()
        try:
            _tune(client)
            while (received := _receive(client, buffer)) is not None:
                message, request_id = received
                _send(client, answered(self._handler, message), request_id)
        except OSError:
            pass  # The client went away, or this server is closing; whoever waits for the reply reports it.
        finally:
            with self._lock:
                self._clients.discard(client)
            client.close()


class InProcessTransport:
    """The same requests as plain calls in the caller's thread: for tests, and for a whole trainer in one process."""

    def __init__(self) -> None:
        self._handlers: dict[str, Handler] = {}

    def connect(self, address: str, *, peer: str) -> Connection:
        """See ``Transport.connect``."""
        if address not in self._handlers:
            raise TransportError(f"{peer} at {address} cannot be reached: nothing is served there")
        return InProcessConnection(self._handlers[address], peer)

    def serve(self, handler: Handler, address: str) -> InProcessServer:
        """See ``Transport.serve``."""
        return InProcessServer(self._handlers, handler, address)


class InProcessConnection:
    """Calls the handler at ``send``."""

    def __init__(self, handler: Handler, peer: str) -> None:
        self._handler = handler
        self._peer = peer
        self._reply: Message | None = None

    def send(self, message: Message) -> None:
        """See ``Connection.send``."""
        self._reply = answered(self._handler, message)

    def receive(self) -> Message:
        """See ``Connection.receive``."""
        reply, self._reply = self._reply, None
        if reply is None:
            raise TransportError(f"{self._peer}: receive without a request")
        if reply.kind == Kind.ERROR:
            raise TransportError(f"{self._peer}: {reply.meta['error']}")
        return reply

    def request(self, message: Message) -> Message:
        """See ``Connection.request``."""
        self.send(message)
        return self.receive()

    def close(self) -> None:
        """See ``Connection.close``."""


class InProcessServer:
    """Makes a handler reachable while open."""

    def __init__(self, handlers: dict[str, Handler], handler: Handler, address: str) -> None:
        self.address = address
        self._handlers = handlers
        self._handler = handler

    def __enter__(self) -> InProcessServer:
        self._handlers[self.address] = self._handler
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._handlers.pop(self.address, None)


def answered(handler: Handler, message: Message) -> Message:
    """The handler's reply, or its failure as an ``ERROR`` message: a bad request must not end the server's thread."""
    try:
        return handler(message)
    except SatrapError as error:
        return Message(Kind.ERROR, {"error": str(error)})
    except Exception as error:  # noqa: BLE001 - the peer must learn of any failure; its text crosses the wire
        return Message(Kind.ERROR, {"error": f"{message.kind.name} failed: {type(error).__name__}: {error}"})


class _Buffer:
    """Memory that received arrays lie in; grows to the largest message and is then reused."""

    def __init__(self) -> None:
        self._memory: npt.NDArray[np.uint8] = np.empty(1 << 16, np.uint8)

    def reserve(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        if len(self._memory) < num_bytes:
            self._memory = np.empty(num_bytes + num_bytes // 2, np.uint8)
        return self._memory[:num_bytes]


def _parse(address: str) -> tuple[int, Any]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return socket.AF_UNIX, rest
    if scheme == "tcp" and rest.rpartition(":")[2].isdigit():
        host, _, port = rest.rpartition(":")
        return socket.AF_INET, (host, int(port))
    raise TransportError(f"{address!r} is no address; use unix:/path or tcp:host:port")


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _padded(num_bytes: int) -> int:
    return (num_bytes + 7) & ~7


def _send(sock: socket.socket, message: Message, request_id: int) -> None:
    meta = json.dumps(message.meta).encode() if message.meta else b""
    arrays = [np.ascontiguousarray(array) for array in message.arrays]
    head = [HEADER.pack(MAGIC, message.kind, len(arrays), request_id, len(meta), 0)]
    for array in arrays:
        rows, columns = (*array.shape, 0)[:2]
        head.append(DESCRIPTOR.pack(DTYPE_CODES[array.dtype], array.ndim, rows, columns))
    views = [memoryview(b"".join(head) + meta)]
    for array in arrays:
        if array.nbytes:
            views.append(array.reshape(-1).view(np.uint8).data)
        if spare := _padded(array.nbytes) - array.nbytes:
            views.append(memoryview(bytes(spare)))
    _send_all(sock, views)


def _send_all(sock: socket.socket, views: list[memoryview]) -> None:
    first = 0
    while first < len(views):
        sent = sock.sendmsg(views[first : first + 512])
        while first < len(views) and sent >= len(views[first]):
            sent -= len(views[first])
            first += 1
        if sent:
            views[first] = views[first][sent:]


def _receive(sock: socket.socket, buffer: _Buffer) -> tuple[Message, int] | None:
    """The next message and its request id, or None if the peer closed between messages."""
    head = bytearray(HEADER.size)
    if not _fill(sock, memoryview(head), may_end=True):
        return None
    magic, kind, num_arrays, request_id, meta_bytes, _ = HEADER.unpack(head)
    if magic != MAGIC or meta_bytes > MAX_META_BYTES:
        raise ConnectionError("the bytes received are not a message")
    tail = bytearray(num_arrays * DESCRIPTOR.size + meta_bytes)
    _fill(sock, memoryview(tail))
    layout = [_layout(DESCRIPTOR.unpack_from(tail, i * DESCRIPTOR.size)) for i in range(num_arrays)]
    total = sum(_padded(num_bytes) for _, _, num_bytes in layout)
    if total > MAX_PAYLOAD_BYTES:
        raise ConnectionError(f"a message of {total} bytes is above the limit of {MAX_PAYLOAD_BYTES}")
    memory = buffer.reserve(total)
    _fill(sock, memory.data)
    arrays, offset = [], 0
    for dtype, shape, num_bytes in layout:
        arrays.append(memory[offset : offset + num_bytes].view(dtype).reshape(shape))
        offset += _padded(num_bytes)
    try:
        meta = json.loads(tail[num_arrays * DESCRIPTOR.size :]) if meta_bytes else {}
        return Message(Kind(kind), meta, arrays), request_id
    except ValueError as error:
        raise ConnectionError(f"the message received is broken: {error}") from None


def _layout(descriptor: tuple[int, int, int, int]) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    code, ndim, rows, columns = descriptor
    if code >= len(DTYPES) or ndim not in (1, 2):
        raise ConnectionError(f"an array of dtype code {code} and {ndim} axes is unknown")
    shape = (rows, columns)[:ndim]
    return DTYPES[code], shape, int(np.prod(shape, dtype=np.object_)) * DTYPES[code].itemsize


def _fill(sock: socket.socket, view: memoryview, *, may_end: bool = False) -> bool:
    done = 0
    while done < len(view):
        received = sock.recv_into(view[done:])
        if received == 0:
            if may_end and done == 0:
                return False
            raise ConnectionError("the peer closed the connection in the middle of a message")
        done += received
    return True
