"""Memory that is used again, so that a step allocates nothing once the largest batch has been seen.

``Staging``: the arrays of one message. ``Scratch``: one thread's arrays between kernels. ``Shelf``: buffers that are held for a while
and come back from another thread. Fresh memory of a batch's size costs its page faults every step: 0.3-0.6 ms per MiB were measured.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64


def aligned(num_bytes: int) -> int:
    """Rounded up to whole cache lines."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class Staging:
    """Lays arrays one after another into one piece of memory, until ``restart``. One thread at a time."""

    def __init__(self, memory: Bytes | None = None) -> None:
        self._memory = np.empty(0, np.uint8) if memory is None else memory
        self._grows = memory is None
        self._used = 0
        self.overflows = 0
        """Arrays that found no room and got memory of their own."""

    def array(self, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """An uninitialised C-contiguous array; it may be written until it is sent, and lives until ``restart``."""
        kind = np.dtype(dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        start, self._used = self._used, self._used + aligned(num_bytes)
        if self._used > len(self._memory):
            self.overflows += 1
            return np.empty(shape, kind)  # Restarting makes room for as much.
        return self._memory[start : start + num_bytes].view(kind).reshape(shape)

    def restart(self) -> None:
        """Nobody reads the arrays any more."""
        if self._grows and self._used > len(self._memory):
            self._memory = np.empty(self._used + self._used // 4, np.uint8)
        self._used = 0


class Scratch(threading.local):
    """Arrays by name, of the calling thread; each grows to the largest asked for."""

    def __init__(self) -> None:
        self._memory: dict[str, Bytes] = {}

    def array(self, name: str, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
        """Uninitialised and C-contiguous; the thread's next call with this name takes the same memory."""
        kind = np.dtype(dtype)
        num_bytes = math.prod(shape) * kind.itemsize
        memory = self._memory.get(name)
        if memory is None or len(memory) < num_bytes:
            memory = self._memory[name] = np.empty(num_bytes + num_bytes // 4, np.uint8)
        return memory[:num_bytes].view(kind).reshape(shape)


class Shelf:
    """Buffers to take and to put back. Safe for all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[Bytes] = []
        self.allocations = 0
        """Buffers ever made: stands still once there are as many as are held at once."""

    def take(self, num_bytes: int) -> Bytes:
        """A buffer of at least ``num_bytes``, not initialised."""
        with self._lock:
            for index in range(len(self._free) - 1, -1, -1):  # The last one back is the likeliest to be in the cache.
                if len(self._free[index]) >= num_bytes:
                    return self._free.pop(index)
            if self._free:
                self._free.pop()  # Too small now: it will not be asked for again.
            self.allocations += 1
        return np.empty(num_bytes + num_bytes // 4, np.uint8)

    def put(self, buffer: Bytes) -> None:
        """Give back what ``take`` returned; nobody may use it any more."""
        with self._lock:
            self._free.append(buffer)
