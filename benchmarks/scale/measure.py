"""Measures on this machine the costs that the simulation takes as given, and writes them to ``constants.json`` beside this file.

    python -m benchmarks.scale measure            # tables up to 1e7 rows, under a minute
    python -m benchmarks.scale measure --large    # and 1e8 rows: 10 GiB of memory

Everything runs the product's own code on one core. Each figure is a median with the lowest and highest of its repetitions.
"""

from __future__ import annotations

import datetime
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own_rows import spec_of
from benchmarks.results import Spread, machine
from benchmarks.streams import NUM_SLOTS, draw, signs_of, write_data
from training.data.shards import ShardReader
from training.embedding.codec import bits_of, decode, encode
from training.embedding.dedup import dedup, read_only, route
from training.embedding.messages import Kind
from training.embedding.pooling import expand, expand_backward_half
from training.embedding.sockets import SocketTransport
from training.embedding.table import EmbeddingTable
from training.embedding.transport import Message

CONSTANTS = Path(__file__).with_name("constants.json")
DIMS = (8, 16, 64, 128)
BATCH = 100_000
RECORDS = 4096


def measure(
    *, large: bool = False, rows: tuple[int, ...] = (10**6, 10**7), dims: tuple[int, ...] = DIMS, repetitions: int = 15
) -> dict[str, Any]:
    """All constants with the machine, the date and the command. ``large`` adds a table of 1e8 rows."""
    sizes = (*rows, 10**8) if large else rows
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "command": "python -m benchmarks.scale measure" + (" --large" if large else ""),
        "machine": machine(),
        "table_by_dim": [table_costs(sizes[0], dim, repetitions) for dim in dims],
        "table_by_rows": [table_costs(size, 16, repetitions) for size in sizes],
        "worker": worker_costs(repetitions),
        "rpc": rpc_costs(repetitions),
        "loader": loader_costs(repetitions),
    }


def save(constants: dict[str, Any], path: Path = CONSTANTS) -> Path:
    """Write them where the simulation reads them."""
    path.write_text(json.dumps(constants, indent=1) + "\n", encoding="utf-8")
    return path


def per_item(call: Callable[[int], object], items: int, repetitions: int) -> dict[str, float]:
    """Nanoseconds of this thread's CPU per item: {median, low, high}. The first call warms up."""
    call(0)
    times = []
    for number in range(1, repetitions + 1):
        started = time.thread_time()
        call(number)
        times.append(1e9 * (time.thread_time() - started) / items)
    return Spread.of(times).__dict__


def table_costs(rows: int, dim: int, repetitions: int) -> dict[str, Any]:
    """A table that holds ``rows`` rows, different uniform signs: look-up of training, update (row-wise Adagrad), insertion at capacity."""
    batch = min(BATCH, rows // 10)
    rng = np.random.default_rng(0)
    out, gradients = np.empty((batch, dim), np.float32), rng.standard_normal((batch, dim)).astype(np.float32)
    with EmbeddingTable.create(spec_of("rowwise_adagrad", dim, rows), capacity_rows=rows, seed=0, num_servers=1) as table:
        for start in range(0, rows, batch):
            signs, _ = dedup(signs_of(np.arange(start, min(start + batch, rows))))
            table.lookup(signs, out[: len(signs)], insert=True)
        known = [dedup(signs_of(np.unique(rng.integers(0, rows, batch))))[0] for _ in range(repetitions + 1)]
        count = len(known[0])
        look_up = per_item(lambda k: table.lookup(known[k], out[: len(known[k])], insert=True), count, repetitions)
        update = per_item(lambda k: table.update(known[k], gradients[: len(known[k])]), count, repetitions)
        new = [dedup(signs_of(np.arange(k * batch, (k + 1) * batch) + 2**40))[0] for k in range(repetitions + 1)]
        insert = per_item(lambda k: table.lookup(new[k], out, insert=True), batch, repetitions)
    return {"rows": rows, "dim": dim, "look_up_ns_per_row": look_up, "update_ns_per_row": update, "insert_ns_per_row": insert}


def worker_costs(repetitions: int) -> dict[str, Any]:
    """A batch of 4096 x 26 ids (Zipf 1.05 over 1e6 per slot) in an embedding worker; what moves values is given per value of width 16."""
    rng = np.random.default_rng(1)
    dim, ids = 16, RECORDS * NUM_SLOTS
    batches = [
        signs_of(draw(rng, 10**6, ids, 1.05).reshape(RECORDS, NUM_SLOTS) + np.arange(NUM_SLOTS) * 10**6).reshape(-1)
        for _ in range(repetitions + 1)
    ]
    unique, inverse = dedup(batches[0])
    rows = rng.standard_normal((len(unique), dim)).astype(np.float32)
    half, scale = encode(rows, np.dtype(np.float16))
    columns = np.arange(NUM_SLOTS, dtype=np.int64) * dim
    out = np.empty((RECORDS, NUM_SLOTS * dim), np.float16)
    back, summed = np.empty_like(rows), np.zeros_like(rows)
    gradient, _ = encode(rng.standard_normal((RECORDS, NUM_SLOTS * dim)).astype(np.float32), np.dtype(np.float16))

    def move(_: int) -> None:
        expand(read_only(half).view(np.float32), read_only(inverse), columns // 2, out.view(np.float32))

    def sum_up(_: int) -> None:
        expand_backward_half(bits_of(gradient), np.float32(1.0), read_only(inverse), columns, summed)

    return {
        "dedup_ns_per_id": per_item(lambda k: route(dedup(batches[k])[0], 30), ids, repetitions),
        "expand_ns_per_value": per_item(move, ids * dim, repetitions),
        "sum_ns_per_value": per_item(sum_up, ids * dim, repetitions),
        "encode_ns_per_value": per_item(lambda _: encode(rows, np.dtype(np.float16), half), rows.size, repetitions),
        "decode_ns_per_value": per_item(lambda _: decode(half, scale, back), rows.size, repetitions),
    }


def rpc_costs(repetitions: int) -> dict[str, Any]:
    """Round trips over TCP on loopback, both ends in this process: wall time of a small one, CPU per message end, CPU per byte."""
    small = Message(Kind.ROWS_OF, {"insert": True, "step": 0}, [np.zeros(1, np.uint64)])
    payload = np.zeros(4 << 20, np.uint8)
    large = Message(Kind.ROWS_OF, {"insert": True, "step": 0}, [payload])
    transport = SocketTransport(60.0, "benchmark")
    trips, calls = 400, max(4, repetitions)
    with transport.serve(lambda _: Message(Kind.OK), "tcp:127.0.0.1:0") as server:
        connection = transport.connect(server.address, peer="server")
        try:
            for _ in range(trips):
                connection.request(small)
            walls, cpus = [], []
            for _ in range(repetitions):
                clock, started = time.perf_counter(), time.process_time()
                for _ in range(trips):
                    connection.request(small)
                walls.append((time.perf_counter() - clock) / trips)
                cpus.append((time.process_time() - started) / trips)
            byte_times = []
            for _ in range(calls):
                started = time.process_time()
                connection.request(large)
                byte_times.append(1e9 * (time.process_time() - started) / payload.nbytes)
        finally:
            connection.close()
    return {
        "round_trip_seconds": Spread.of(walls).__dict__,
        # A round trip is two messages, each handled at two ends.
        "cpu_seconds_per_message_end": Spread.of([cpu / 4 for cpu in cpus]).__dict__,
        "cpu_ns_per_byte_both_ends": Spread.of(byte_times).__dict__,
    }


def loader_costs(repetitions: int) -> dict[str, Any]:
    """Reading batches of 4096 records of 26 ids and 13 dense features from shards, and copying them into a message."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        records = RECORDS * (repetitions + 1)
        write_data(data, records=records, ids_per_slot=10**6, alpha=1.05)
        with ShardReader.open(data, "train") as reader:

            def read(k: int) -> None:
                batch = reader.read(k * RECORDS, (k + 1) * RECORDS)
                for part in (batch.signs, batch.dense, batch.label):
                    np.array(part)

            return {"read_ns_per_record": per_item(read, RECORDS, repetitions)}


def unique_share(ids_per_slot: int, records: int, alpha: float, seed: int = 0) -> float:
    """Different ids per occurrence in a batch of ``records`` x 26, drawn. ``ids_per_slot`` may be far beyond what a table holds."""
    uniform = np.random.default_rng(seed).random((NUM_SLOTS, records))
    if alpha == 0.0:
        ids = uniform * ids_per_slot
    else:
        power = 1.0 - alpha
        ids = (1.0 + uniform * ((ids_per_slot + 1.0) ** power - 1.0)) ** (1.0 / power)
    return sum(len(np.unique(np.floor(slot))) for slot in ids) / uniform.size
