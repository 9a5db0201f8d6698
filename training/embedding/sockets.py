"""Messages between processes: Unix sockets and TCP, arrays through shared memory where both ends are on one machine and want it.

Every connection begins with a greeting: the job's token, which a server checks before anything else, and the client's session. A session
outlives its connection for a while: a client whose connection breaks connects again once and sends its request again; the server
recognises the id, and answers what it has answered (or is about to) without doing the work twice.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Array, Staging
from training.embedding.frames import Channel, receive_greeting, send_greeting
from training.embedding.messages import Kind
from training.embedding.shared_memory import Segment
from training.embedding.transport import Connection, Handler, Message, answered
from training.errors import TransportError

# How long a server keeps the session of a client that is gone, and its last reply, should it come back.
RESUME_SECONDS = 60.0
GREETING_SECONDS = 20.0


class SocketTransport:
    """Unix sockets (``unix:/path``) and TCP (``tcp:host:port``; port 0 takes a free one).

    ``shared_memory`` offers servers on Unix sockets to exchange arrays through memory; where that cannot be had the socket takes them.
    TCP listens on loopback only unless ``open_to_network``.
    """

    def __init__(self, timeout_seconds: float, token: str, *, shared_memory: bool = False, open_to_network: bool = False) -> None:
        self.timeout_seconds = timeout_seconds
        self._token = token
        self._shared_memory = shared_memory
        self._open_to_network = open_to_network

    def connect(self, address: str, *, peer: str) -> Connection:
        """See ``Transport.connect``."""
        connection = SocketConnection(address, peer, self.timeout_seconds, self._token, shared_memory=self._shared_memory)
        connection.open()
        return connection

    def serve(self, handler: Handler, address: str) -> SocketServer:
        """See ``Transport.serve``."""
        family, target = _parse(address)
        if family == socket.AF_INET and not self._open_to_network and not is_loopback(target[0]):
            raise TransportError(f"{address} can be reached from other machines; listen on 127.0.0.1, or set training.tcp_host to mean it")
        return SocketServer.bind(handler, address, self._token)


class SocketConnection:
    """A client's end of a socket."""

    def __init__(self, address: str, peer: str, timeout_seconds: float, token: str, *, shared_memory: bool) -> None:
        self._address = address
        self._peer = peer
        self._timeout_seconds = timeout_seconds
        self._token = token
        self._shared_memory = shared_memory and address.startswith("unix:")
        self._session = secrets.token_hex(8)
        self._segment: Segment | None = None
        self._staging = Staging()
        self._request_id = 0
        self._pending: Message | None = None
        self._may_resend = True
        self._closed = threading.Event()
        self._channel: Channel

    @property
    def shares_memory(self) -> bool:
        """Whether requests go through shared memory."""
        return self._segment is not None

    def open(self) -> None:
        """Connect; raises ``TransportError`` if the peer cannot be reached or refuses."""
        if self._shared_memory:
            with contextlib.suppress(OSError, ValueError):  # The socket takes the arrays, too.
                self._segment = Segment.create()
        try:
            self._channel = self._greeted(resume=False)
        except OSError as error:
            self._forget_segment()
            raise TransportError(f"{self._peer} at {self._address} cannot be reached: {error}") from None
        except TransportError:
            self._forget_segment()
            raise
        if self._segment is not None:
            self._staging = Staging(self._segment.memory)

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """See ``Connection.array``."""
        return self._staging.array(shape, dtype)

    def send(self, message: Message) -> None:
        """See ``Connection.send``."""
        self._request_id += 1
        self._may_resend = True
        self._pending = _placed(message, self._staging, self._segment)
        try:
            self._channel.send(self._pending, self._request_id)
        except OSError as error:
            self._send_again(self._pending, error)

    def receive(self) -> Message:
        """See ``Connection.receive``."""
        pending = self._pending
        if pending is None:
            raise TransportError(f"{self._peer}: receive without a request")
        try:
            message, request_id = self._reply_to(pending)
        finally:
            self._pending = None
            self._staging.restart()
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
        if self._closed.is_set():
            return
        self._closed.set()
        sock = self._channel.sock
        with contextlib.suppress(OSError):
            if self._pending is None:
                self._channel.send(Message(Kind.GOODBYE), 0)
            sock.shutdown(socket.SHUT_RDWR)  # Wakes a thread that waits in receive; close alone does not.
        self._channel.close()
        self._forget_segment()
        self._staging = Staging()

    def _reply_to(self, pending: Message) -> tuple[Message, int]:
        while True:
            try:
                received = self._channel.receive()
                if received is not None:
                    return received
                error = OSError("it closed the connection; see its log for the reason")
            except OSError as failure:
                error = failure
            self._send_again(pending, error)

    def _greeted(self, *, resume: bool) -> Channel:
        """A new connection of this session. Raises ``OSError`` or, if refused, ``TransportError``."""
        family, target = _parse(self._address)
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._timeout_seconds)
            sock.connect(target)
            _tune(sock)
            send_greeting(sock, Kind.HELLO, {"token": self._token, "session": self._session, "resume": resume}, self._segment)
            kind, meta, incoming = receive_greeting(sock)
        except BaseException:
            sock.close()
            raise
        if kind != Kind.OK:
            sock.close()
            raise TransportError(f"{self._peer} at {self._address} refused the connection: {meta.get('error')}")
        _limit_waiting(sock, self._timeout_seconds)
        if incoming is None:
            self._forget_segment()
        return Channel(sock, outgoing=self._segment, incoming=incoming)

    def _send_again(self, pending: Message, error: OSError) -> None:
        """Connect anew and repeat the request, once; raises ``TransportError``. A peer too slow to answer is not asked twice."""
        if isinstance(error, TimeoutError | BlockingIOError):
            raise TransportError(
                f"{self._peer}: no progress on {pending.kind.name} within {self._timeout_seconds:g} s (training.request_timeout_seconds)"
            ) from None
        if self._closed.is_set() or not self._may_resend:
            raise TransportError(f"{self._peer}: {pending.kind.name} failed: {error}") from None
        self._may_resend = False
        self._channel.close()
        try:
            self._channel = self._greeted(resume=True)
            if self._closed.is_set():
                self._channel.close()
                raise TransportError(f"{self._peer}: closed while {pending.kind.name} was under way")
            self._channel.send(pending, self._request_id)
        except OSError as second:
            raise TransportError(f"{self._peer}: {pending.kind.name} failed: {error}; connecting again: {second}") from None

    def _forget_segment(self) -> None:
        if self._segment is not None:
            self._segment.close()
            self._segment = None


class _Session:
    """A client as the server knows it, over all its connections."""

    def __init__(self, segment: Segment | None) -> None:
        self.segment = segment
        self.outbox = Staging(segment.memory if segment else None)
        self.connections = 0
        self.left = time.monotonic()
        """When its last connection ended, on the monotonic clock."""
        self._lock = threading.Lock()
        self._last_id = 0
        self._reply = Message(Kind.OK)

    def reply_to(self, message: Message, request_id: int, handler: Handler) -> Message:
        """The handler's answer; the one given before if this request was answered already."""
        with self._lock:  # Held by an earlier connection's thread if that is still at work on the same request.
            if request_id == self._last_id:
                return self._reply
            if request_id != self._last_id + 1:
                return Message(Kind.ERROR, {"error": f"request {request_id} came after {self._last_id}: the stream is out of step"})
            self.outbox.restart()
            self._reply = _placed(answered(handler, message), self.outbox, self.segment)
            self._last_id = request_id
            return self._reply

    def close(self) -> None:
        if self.segment is not None:
            self.segment.close()


class SocketServer:
    """Listens and answers, one thread per connection."""

    def __init__(self, sock: socket.socket, handler: Handler, address: str, token: str) -> None:
        self.address = address
        self._sock = sock
        self._handler = handler
        self._token = token
        self._closing = False
        self._lock = threading.Lock()
        self._clients: set[socket.socket] = set()
        self._sessions: dict[str, _Session] = {}
        self._threads: list[threading.Thread] = []

    @classmethod
    def bind(cls, handler: Handler, address: str, token: str) -> SocketServer:
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
        return cls(sock, handler, address, token)

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
        for session in self._sessions.values():
            session.close()
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
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            thread = threading.Thread(target=self._answer, args=(client,), name="serve", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _answer(self, client: socket.socket) -> None:
        try:
            _tune(client)
            client.settimeout(GREETING_SECONDS)
            if (welcomed := self._welcomed(client)) is not None:
                client.settimeout(None)
                self._converse(*welcomed)
        except OSError:
            pass  # The client went away, or this server is closing; whoever waits for the reply reports it.
        finally:
            with self._lock:
                self._clients.discard(client)
            client.close()

    def _welcomed(self, client: socket.socket) -> tuple[Channel, str, _Session] | None:
        """The channel and session of a client with the right token; others are told and let go."""
        kind, meta, incoming = receive_greeting(client)
        refusal = None
        name, resume = str(meta.get("session")), bool(meta.get("resume"))
        if kind != Kind.HELLO or not hmac.compare_digest(str(meta.get("token")).encode(), self._token.encode()):
            refusal = "wrong token; every job has its own, in its job.json"
        else:
            session = self._session(name, resume=resume, shared=incoming is not None)
            if session is None:
                refusal = "it does not know this client any more: it was started anew, or the client was away for too long"
        if refusal is not None:
            if incoming is not None:
                incoming.close()
            send_greeting(client, Kind.ERROR, {"error": refusal}, None)
            return None
        assert session is not None
        if session.segment is None and incoming is not None:
            incoming.close()
            incoming = None
        send_greeting(client, Kind.OK, {}, session.segment)
        return Channel(client, outgoing=session.segment, incoming=incoming), name, session

    def _session(self, name: str, *, resume: bool, shared: bool) -> _Session | None:
        now = time.monotonic()
        with self._lock:
            for other in [key for key, s in self._sessions.items() if not s.connections and now - s.left > RESUME_SECONDS]:
                self._sessions.pop(other).close()
            if resume:
                session = self._sessions.get(name)
            else:
                segment = None
                if shared:
                    with contextlib.suppress(OSError, ValueError):  # The socket takes the arrays, too.
                        segment = Segment.create()
                session = self._sessions[name] = _Session(segment)
        return session

    def _converse(self, channel: Channel, name: str, session: _Session) -> None:
        said_goodbye = False
        with self._lock:
            session.connections += 1
        try:
            while (received := channel.receive(session.outbox)) is not None:
                message, request_id = received
                if message.kind == Kind.GOODBYE:
                    said_goodbye = True
                    return
                channel.send(session.reply_to(message, request_id, self._handler), request_id)
        finally:
            channel.close()
            with self._lock:
                session.connections -= 1
                session.left = time.monotonic()
                if said_goodbye and self._sessions.get(name) is session:
                    self._sessions.pop(name).close()


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a host name or address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _placed(message: Message, staging: Staging, segment: Segment | None) -> Message:
    """The message with all arrays in the segment, if there is one and it has room."""
    if segment is None or not message.arrays:
        return message
    arrays: list[Array] = []
    for item in message.arrays:
        own = np.ascontiguousarray(item)
        if segment.offset_of(own) is None:
            own = staging.array(item.shape, item.dtype)
            np.copyto(own, item)
        arrays.append(own)
    return replace(message, arrays=arrays)


def _parse(address: str) -> tuple[int, Any]:
    scheme, _, rest = address.partition(":")
    if scheme == "unix":
        return socket.AF_UNIX, rest
    if scheme == "tcp" and rest.rpartition(":")[2].isdigit():
        host, _, port = rest.rpartition(":")
        return socket.AF_INET, (host, int(port))
    raise TransportError(f"{address!r} is no address; use unix:/path or tcp:host:port")


def _limit_waiting(sock: socket.socket, seconds: float) -> None:
    """Have the kernel end a call without progress (BlockingIOError).

    Python's own timeout makes the socket non-blocking: a poll and a wake-up per 200 KiB instead of one call per message.
    """
    sock.settimeout(None)
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6) + (seconds < 1e-6))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


def _tune(sock: socket.socket) -> None:
    if sock.family == socket.AF_INET:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
