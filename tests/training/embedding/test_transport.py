"""Requests reach the handler and come back whole, over every transport; failures come back as errors with the peer's name."""

import contextlib
import socket
import threading

import numpy as np
import pytest

from training.embedding.messages import Kind
from training.embedding.transport import HEADER, MAGIC, InProcessTransport, Message, SocketTransport
from training.errors import TransportError

ARRAYS = [
    [],
    [np.arange(5, dtype=np.uint64)],
    [np.zeros((0, 7), np.float32), np.arange(3, dtype=np.uint8), np.ones((2, 3), np.float16)],
    [np.full((300_000, 4), 2**64 - 1, np.uint64)],
    [np.arange(12, dtype=np.int64).reshape(3, 4).T],
]


def echo(message: Message) -> Message:
    return Message(Kind.OK, message.meta, [array.copy() for array in message.arrays])


@pytest.fixture(params=["unix", "tcp", "in process"])
def served(request, tmp_path_factory):
    """transport, address to serve at"""
    if request.param == "in process":
        return InProcessTransport(), "echo"
    if request.param == "tcp":
        return SocketTransport(5.0), "tcp:127.0.0.1:0"
    return SocketTransport(5.0), f"unix:{tmp_path_factory.mktemp('s')}/echo"


@pytest.mark.parametrize("arrays", ARRAYS)
def test_arrays_and_meta_come_back_equal(served, arrays):
    transport, address = served
    with transport.serve(echo, address) as server:
        connection = transport.connect(server.address, peer="echo")
        for _ in range(2):
            reply = connection.request(Message(Kind.LOOK_UP, {"a": [1, "ü"]}, arrays))
            assert reply.meta == {"a": [1, "ü"]}
            assert len(reply.arrays) == len(arrays)
            for sent, received in zip(arrays, reply.arrays, strict=True):
                assert received.dtype == sent.dtype
                np.testing.assert_array_equal(received, sent)
        connection.close()


def test_a_failing_handler_answers_with_its_text_and_the_connection_lives_on(served):
    transport, address = served

    def handler(message):
        if message.kind == Kind.UPDATE:
            raise ValueError("no such row")
        return Message(Kind.OK)

    with transport.serve(handler, address) as server:
        connection = transport.connect(server.address, peer="embedding_worker-3")
        with pytest.raises(TransportError, match=r"embedding_worker-3: UPDATE failed: ValueError: no such row"):
            connection.request(Message(Kind.UPDATE))
        assert connection.request(Message(Kind.LOOK_UP)).kind == Kind.OK
        connection.close()


def test_connecting_to_nothing_names_the_peer(served):
    transport, address = served
    with pytest.raises(TransportError, match=r"parameter_server-1.*cannot be reached"):
        transport.connect(address.replace(":0", ":1"), peer="parameter_server-1")


def test_clients_are_answered_at_the_same_time(tmp_path):
    barrier = threading.Barrier(3, timeout=10)

    def handler(message):
        barrier.wait()
        return Message(Kind.OK)

    transport = SocketTransport(10.0)
    with transport.serve(handler, f"unix:{tmp_path}/s") as server:
        connections = [transport.connect(server.address, peer="s") for _ in range(3)]
        for connection in connections:
            connection.send(Message(Kind.LOOK_UP))
        assert [connection.receive().kind for connection in connections] == [Kind.OK] * 3
        for connection in connections:
            connection.close()


def test_a_silent_peer_is_an_error_not_a_hang(tmp_path):
    release = threading.Event()
    transport = SocketTransport(0.2)

    def handler(message):
        release.wait(10)
        return Message(Kind.OK)

    with transport.serve(handler, f"unix:{tmp_path}/s") as server:
        connection = transport.connect(server.address, peer="embedding_worker-0")
        with pytest.raises(TransportError, match=r"embedding_worker-0: no progress on the reply within 0\.2 s"):
            connection.request(Message(Kind.LOOK_UP))
        release.set()
        connection.close()


def test_a_vanished_server_is_an_error(tmp_path):
    transport = SocketTransport(5.0)
    server = transport.serve(echo, f"unix:{tmp_path}/s")
    with server:
        connection = transport.connect(server.address, peer="embedding_worker-0")
        connection.request(Message(Kind.LOOK_UP))
    with pytest.raises(TransportError, match="embedding_worker-0"):
        connection.request(Message(Kind.LOOK_UP))
    connection.close()
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        HEADER.pack(MAGIC, 21, 1, 1, 0, 0) + bytes([99]) + bytes(23),
        HEADER.pack(MAGIC, 21, 1, 1, 0, 0) + bytes([3, 2]) + bytes(6) + b"\xff" * 16,
        HEADER.pack(MAGIC, 21, 0, 1, 5, 0) + b"{{{{{",
        HEADER.pack(MAGIC, 999, 0, 1, 0, 0),
    ],
    ids=["another protocol", "unknown dtype", "absurd size", "broken meta", "unknown kind"],
)
def test_garbage_closes_its_connection_and_harms_nobody_else(tmp_path, garbage):
    transport = SocketTransport(5.0)
    with transport.serve(echo, f"unix:{tmp_path}/s") as server:
        intruder = socket.socket(socket.AF_UNIX)
        intruder.settimeout(5.0)
        intruder.connect(f"{tmp_path}/s")
        intruder.sendall(garbage)
        with contextlib.suppress(ConnectionResetError):
            assert intruder.recv(1) == b""
        intruder.close()
        connection = transport.connect(server.address, peer="echo")
        assert connection.request(Message(Kind.LOOK_UP, {"x": 1})).meta == {"x": 1}
        connection.close()
