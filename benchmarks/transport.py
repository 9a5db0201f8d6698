"""Round trips of 100k signs and their float16 rows of width 16, against a bare socket that moves the same bytes.

Client processes and one server process; all transports in turn in every round, so that a busy machine hits all alike. Only ratios to the
bare socket are printed: requests per second of all clients together, and CPU time of both ends per request; medians and spread of rounds.
``bare``: sendall and recv_into on preallocated memory, thread per connection, nothing else. ``unix``, ``tcp``, ``shared`` are satrap's
transports with a handler that answers from a prebuilt array; in ``shared`` it copies that into the segment, as encoding would.
``+table`` looks the signs up in a table and encodes their rows: the whole request of a training step.

    python -m benchmarks.transport            # about a minute
    python -m benchmarks.transport --quick    # under 15 s
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np

from training.config import InitializerConfig, SparseOptimizerConfig
from training.embedding.dedup import dedup
from training.embedding.messages import Kind
from training.embedding.parameter_server import ParameterServer
from training.embedding.slots import TableSpec
from training.embedding.sockets import SocketTransport
from training.embedding.transport import Message

SIGNS, DIM, ROWS = 100_000, 16, 1_000_000
TOKEN = "benchmark"
META = {"insert": False, "step": -1}
CASES = {"bare": "bare", "unix": "plain", "shared": "plain", "bare tcp": "bare tcp", "tcp": "plain tcp"}
CASES |= {"unix+table": "table", "shared+table": "table"}
BASES = {"bare": "bare", "unix": "bare", "shared": "bare", "bare tcp": "bare tcp", "tcp": "bare tcp"}
BASES |= {"unix+table": "unix+table", "shared+table": "unix+table"}


def signs_of(seed: int) -> np.ndarray:
    return dedup(np.random.default_rng(seed).choice(ROWS, SIGNS, replace=False).astype(np.uint64) + np.uint64(1))[0].copy()


def fill(sock: socket.socket, view: memoryview) -> bool:
    done = 0
    while done < len(view):
        if (received := sock.recv_into(view[done:])) == 0:
            return False
        done += received
    return True


def serve_bare(listener: socket.socket, reply: np.ndarray) -> None:
    def converse(sock: socket.socket) -> None:
        request = np.empty(SIGNS, np.uint64).view(np.uint8)
        with sock:
            while fill(sock, request.data):
                sock.sendall(reply.data)

    while True:
        sock, _ = listener.accept()
        threading.Thread(target=converse, args=(sock,), daemon=True).start()


def serve(folder: str, pipe: Pipe) -> None:
    """The server process: every kind of server at once; answers each message with its CPU time until told None."""
    reply = np.random.default_rng(0).integers(0, 255, (SIGNS, DIM * 2), dtype=np.uint8)
    rows = reply.view(np.float16)
    addresses: dict[str, Any] = {}
    for name, family, target in (("bare", socket.AF_UNIX, f"{folder}/bare"), ("bare tcp", socket.AF_INET, ("127.0.0.1", 0))):
        listener = socket.socket(family)
        listener.bind(target)
        listener.listen()
        addresses[name] = listener.getsockname()
        threading.Thread(target=serve_bare, args=(listener, reply.reshape(-1)), daemon=True).start()

    def plain(message: Message) -> Message:
        if not message.meta["shared"]:
            return Message(Kind.ROWS, {}, [rows])
        out = message.array(rows.shape, rows.dtype)
        np.copyto(out, rows)
        return Message(Kind.ROWS, {}, [out])

    spec = TableSpec("t", DIM, SparseOptimizerConfig(), InitializerConfig(), 1, ROWS)
    with ExitStack() as stack:
        server = stack.enter_context(ParameterServer.create([spec], num_servers=1, seed=0, wire_dtype="float16"))
        for signs in np.array_split(np.arange(1, ROWS + 1, dtype=np.uint64), 10):
            server.handle(Message(Kind.ROWS_OF, {"insert": True, "step": 0}, [dedup(signs)[0]]))
        transport = SocketTransport(60.0, TOKEN)
        addresses["plain"] = stack.enter_context(transport.serve(plain, f"unix:{folder}/plain")).address
        addresses["plain tcp"] = stack.enter_context(transport.serve(plain, "tcp:127.0.0.1:0")).address
        addresses["table"] = stack.enter_context(transport.serve(server.handle, f"unix:{folder}/table")).address
        pipe.send(addresses)
        while pipe.recv() is not None:
            pipe.send(time.process_time())


def requester(case: str, address: Any, signs: np.ndarray) -> tuple[Callable[[], object], Callable[[], None]]:
    """One round trip, and how to end it."""
    if case.startswith("bare"):
        sock = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
        sock.connect(address)
        reply = np.empty(SIGNS * DIM * 2, np.uint8)
        return lambda: (sock.sendall(signs.view(np.uint8).data), fill(sock, reply.data)), sock.close
    shared = case.startswith("shared")
    connection = SocketTransport(60.0, TOKEN, shared_memory=shared).connect(address, peer="server")
    meta = META | {"shared": shared}
    return lambda: connection.request(Message(Kind.ROWS_OF, meta, [signs])), connection.close


def client(seed: int, addresses: dict[str, Any], pipe: Pipe) -> None:
    """A client process: told (case, seconds), answers (requests, its CPU seconds)."""
    signs = signs_of(seed)
    while (job := pipe.recv()) is not None:
        case, seconds = job
        call, close = requester(case, addresses[CASES[case]], signs)
        call()
        call()
        pipe.send("ready")
        pipe.recv()
        cpu, count, end = time.process_time(), 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            call()
            count += 1
        pipe.send((count, time.process_time() - cpu))
        close()


def measure(case: str, seconds: float, clients: list[Pipe], server: Pipe) -> tuple[float, float]:
    """Requests per second of all clients, and CPU seconds of both ends per request."""
    for pipe in clients:
        pipe.send((case, seconds))
    for pipe in clients:
        pipe.recv()
    server.send("cpu")
    before = server.recv()
    for pipe in clients:
        pipe.send("go")
    results = [pipe.recv() for pipe in clients]
    server.send("cpu")
    count = sum(result[0] for result in results)
    return count / seconds, (server.recv() - before + sum(result[1] for result in results)) / max(1, count)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer clients and rounds: under 15 s")
    quick = parser.parse_args(arguments).quick
    counts, rounds, seconds = ((1, 2), 3, 0.15) if quick else ((1, 2, 4), 7, 0.3)
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="satrap-") as folder:
        server, theirs = context.Pipe()
        processes = [context.Process(target=serve, args=(folder, theirs), daemon=True)]
        processes[0].start()
        addresses = server.recv()
        clients = []
        for seed in range(max(counts)):
            own, theirs = context.Pipe()
            clients.append(own)
            processes.append(context.Process(target=client, args=(seed, addresses, theirs), daemon=True))
            processes[-1].start()
        for count in counts:
            report(count, [{case: measure(case, seconds, clients[:count], server) for case in CASES} for _ in range(rounds)])
        for pipe in (*clients, server):
            pipe.send(None)
        for process in processes:
            process.join()


def report(count: int, rounds: list[dict[str, tuple[float, float]]]) -> None:
    print(f"{count} client(s){'':6}{'against':14}{'rate: median (spread)':>26}{'CPU: median (spread)':>26}")
    for case, base in BASES.items():
        if case == base:
            continue
        rates = sorted(result[case][0] / result[base][0] for result in rounds)
        costs = sorted(result[case][1] / result[base][1] for result in rounds)
        cells = [f"{v[len(v) // 2]:.2f}x ({v[0]:.2f}-{v[-1]:.2f})" for v in (rates, costs)]
        print(f"  {case:14}{base:14}{cells[0]:>26}{cells[1]:>26}", flush=True)


if __name__ == "__main__":
    main()
