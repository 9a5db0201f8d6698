"""Request and reply between roles: what a message is, and the interface of whatever carries it.

``training.embedding.sockets`` carries messages between processes, ``InProcessTransport`` calls. A server answers a failed request with
kind ``ERROR``; the client raises ``TransportError`` with its text. Received arrays live until the next message on their connection, so
whoever keeps them copies them. Arrays made by ``Connection.array`` and ``Message.array`` are sent without being copied or allocated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Array, Staging
from training.embedding.messages import Kind
from training.errors import SatrapError, TransportError


@dataclass(frozen=True)
class Message:
    """One request or reply."""

    kind: Kind
    meta: dict[str, Any] = field(default_factory=dict)
    arrays: Sequence[Array] = ()
    outbox: Staging | None = field(default=None, repr=False, compare=False)
    """A request's: where its answer's arrays may be made."""

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array for the answer to this request; its memory is used again for the next one's."""
        return np.empty(shape, dtype) if self.outbox is None else self.outbox.array(shape, dtype)


Handler = Callable[[Message], Message]


class Connection(Protocol):
    """A client's end. Not for several threads at once."""

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An uninitialised array for the next request; its memory is used again once the reply is there."""

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

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """See ``Connection.array``; here every array is a new one."""
        return np.empty(shape, dtype)

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
