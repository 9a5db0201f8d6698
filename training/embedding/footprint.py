"""How much memory an embedding table takes, known before anything is allocated. Free of numba and numpy, for whoever only plans.

The numbers are those of ``training.embedding.table``, ``optimizers`` and ``parameter_server``; a test holds them together.
"""

from __future__ import annotations

import math

from training.config import SparseOptimizerConfig
from training.embedding.slots import TableSpec

STATE = {"sgd": (0, False), "momentum_sgd": (1, False), "adagrad": (1, False), "rowwise_adagrad": (0, True), "adam": (2, True)}
"""Optimizer -> state buffers per row, each as wide as the row, and whether one float32 per row is kept beside."""
VALUE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_FLOAT_BYTES = 4
_WAYS = 7
_BUCKET_BYTES = 64
"""Index of 7 slots: their signs and one word of recency."""
_SLOTS_PER_ROW = 1.2
_MIN_BUCKETS, _MAX_BLOCK_BUCKETS = 4, 512
_FILTER_BYTES_PER_SLOT = 4
_FILTER_LINE = 64
_SPREAD = 5.0
"""Standard deviations of room for an uneven spread of the signs over several servers."""


def state_of(optimizer: SparseOptimizerConfig) -> tuple[int, bool]:
    """Entry of ``STATE`` of a configured optimizer; SGD keeps a buffer only if it has momentum."""
    return STATE["momentum_sgd" if optimizer.name == "sgd" and optimizer.momentum > 0.0 else optimizer.name]


def server_rows(capacity_rows: int, num_servers: int) -> int:
    """Rows that each of several servers has room for, so that together they hold ``capacity_rows``."""
    mean = -(-capacity_rows // num_servers)
    return mean + int(_SPREAD * math.sqrt(mean)) if num_servers > 1 else mean


def blocks_of(capacity_rows: int) -> tuple[int, int]:
    """Blocks of a table on one server, and places in each; more than rows, so that it runs full before it evicts."""
    buckets = max(_MIN_BUCKETS, -int(-capacity_rows * _SLOTS_PER_ROW // _WAYS))
    blocks = -(-buckets // _MAX_BLOCK_BUCKETS)
    return blocks, -(-buckets // blocks) * _WAYS


def table_bytes(spec: TableSpec, *, capacity_rows: int, num_servers: int) -> int:
    """Bytes of a table with ``capacity_rows`` rows over all its servers: index, rows, optimizer state, admission counters."""
    blocks, block_slots = blocks_of(server_rows(capacity_rows, num_servers))
    slots = blocks * block_slots
    buffers, scalar = state_of(spec.optimizer)
    values = -(-spec.dim * VALUE_BYTES[spec.row_dtype] // _FLOAT_BYTES)
    rows = slots * _FLOAT_BYTES * (values + spec.dim * buffers + scalar)
    counters = blocks * -(-block_slots * _FILTER_BYTES_PER_SLOT // _FILTER_LINE) * _FILTER_LINE if spec.min_count > 1 else 0
    return num_servers * (slots // _WAYS * _BUCKET_BYTES + rows + counters)
