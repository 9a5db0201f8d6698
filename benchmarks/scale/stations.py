"""Stations of the simulated cluster: whoever needs one takes it in order of arrival and is told when it is done.

All are first come, first served, so that a visit is one reservation instead of a process: requests that pass several stations in the same
order may reserve all of them on arrival. Long messages go over a link in pieces, between which those of others pass.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PIECE_BYTES = 1 << 20


@dataclass
class Station:
    """``places`` servers of one queue."""

    places: int = 1
    busy_seconds: float = 0.0
    """Work taken on so far, over all places."""
    _free: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._free = [0.0] * self.places

    def take(self, now: float, seconds: float) -> float:
        """When work of ``seconds`` that arrives ``now`` (or later than all before it) is done."""
        begin = max(now, self._free[0])
        heapq.heapreplace(self._free, begin + seconds)
        self.busy_seconds += seconds
        return begin + seconds


@dataclass
class Link:
    """One direction of a machine's network."""

    bytes_per_second: float
    station: Station = field(default_factory=Station)

    def take(self, now: float, num_bytes: float) -> float:
        """When the last byte has passed."""
        return self.station.take(now, num_bytes / self.bytes_per_second)

    def pieces(self, environment: Any, num_bytes: float) -> Iterator[Any]:
        """A simpy process that ends when the last byte has passed, others' pieces in between."""
        left = num_bytes
        while left > 0:
            now = environment.now
            yield environment.timeout(self.take(now, min(left, PIECE_BYTES)) - now)
            left -= PIECE_BYTES


@dataclass
class Network:
    """Both directions of a machine."""

    out: Link
    into: Link

    @classmethod
    def of(cls, gbps: float) -> Network:
        """Equal bandwidth each way."""
        return cls(Link(gbps * 1e9 / 8), Link(gbps * 1e9 / 8))
