"""How large the parts of an embedding table are and how a row lies in memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from training.embedding import kernels
from training.embedding.hashing import GOLDEN

SLOTS_PER_ROW = 1.2
"""At this room two choices of 7 ways lose 0.1 % of ``capacity_rows`` different signs before the table is full."""
MAX_BLOCK_BUCKETS = 512
"""Both buckets of a sign lie within one block: 32 KiB of index, and rows in few pages."""
MIN_BUCKETS = 4
"""So that there are signs that belong into other buckets than sign 0, see ``kernels.prepare``."""
FILTER_BYTES_PER_SLOT = 4


@dataclass(frozen=True)
class Geometry:
    """Where a sign may stand. Snapshots restore exactly into equal geometry only."""

    num_blocks: int
    block_buckets: int
    num_servers: int
    """How many servers share the signs by ``dedup.route``; 0: this table may get any sign."""

    @classmethod
    def of(cls, capacity_rows: int, num_servers: int) -> Geometry:
        """The smallest geometry with ``SLOTS_PER_ROW`` slots for each of the rows."""
        buckets = max(MIN_BUCKETS, -int(-capacity_rows * SLOTS_PER_ROW // kernels.WAYS))
        num_blocks = -(-buckets // MAX_BLOCK_BUCKETS)
        return cls(num_blocks, -(-buckets // num_blocks), num_servers)

    @property
    def num_buckets(self) -> int:
        """Buckets of 7 slots."""
        return self.num_blocks * self.block_buckets

    @property
    def num_slots(self) -> int:
        """Rows that fit in if spread evenly."""
        return self.num_buckets * kernels.WAYS

    @property
    def filter_bytes(self) -> int:
        """Admission counters: whole lines of 64 for every block."""
        lines = -(-self.block_buckets * kernels.WAYS * FILTER_BYTES_PER_SLOT // kernels.FILTER_LINE)
        return self.num_blocks * lines * kernels.FILTER_LINE

    @property
    def arguments(self) -> tuple[np.uint64, np.uint64, np.uint64]:
        """As the kernels take it. hash * num_servers spreads the hashes of one server's signs over all 64 bits, in order."""
        multiplier = np.uint64(self.num_servers) if self.num_servers else GOLDEN
        return multiplier, np.uint64(self.num_blocks), np.uint64(self.block_buckets)


@dataclass(frozen=True)
class Layout:
    """How a row lies in memory."""

    dim: int
    itemsize: int
    """Bytes of a value."""
    buffers: int

    @property
    def head(self) -> int:
        """float32 words of the values; the state follows."""
        return -(-self.dim * self.itemsize // 4)

    @property
    def stride(self) -> int:
        """float32 words of a row."""
        return self.head + self.dim * self.buffers

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As the kernels take it."""
        return self.stride, self.stride * 4 // self.itemsize, self.head, self.dim
