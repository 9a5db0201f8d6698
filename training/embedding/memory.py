"""Memory of a table: one anonymous map, in huge pages where the kernel has them, checked against what the machine can give."""

from __future__ import annotations

import contextlib
import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

HUGE_PAGE_BYTES = 2 * 1024 * 1024
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python 3.11 has no name for it.


class Arena:
    """Zeroed arrays in one private map. ``close`` drops them; whoever still holds a view keeps the map alive."""

    def __init__(self, memory: mmap.mmap, arrays: list[npt.NDArray[Any]], used_bytes: int) -> None:
        self._memory = memory
        self.arrays = arrays
        self.used_bytes = used_bytes

    @classmethod
    def allocate(cls, shapes: list[tuple[int, Any]]) -> Arena:
        """One array per (length, dtype), each on a 2-MiB boundary, its pages already there: a machine too small shows it now.

        Raises ``OSError`` or ``ValueError`` if the map is refused.
        """
        sizes = [length * np.dtype(dtype).itemsize for length, dtype in shapes]
        total = sum(_rounded(size) for size in sizes)
        memory = mmap.mmap(-1, total + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, np.uint8)
        offset = -whole.ctypes.data % HUGE_PAGE_BYTES
        arrays = []
        for (length, dtype), size in zip(shapes, sizes, strict=True):
            _prepare(memory, offset, size)
            arrays.append(whole[offset : offset + size].view(dtype)[:length])
            offset += _rounded(size)
        return cls(memory, arrays, sum(sizes))

    def close(self) -> None:
        """Give the memory back."""
        self.arrays = []
        with contextlib.suppress(BufferError):  # A view is still out; its death frees the map.
            self._memory.close()


def _rounded(size: int) -> int:
    return -(-size // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _prepare(memory: mmap.mmap, offset: int, size: int) -> None:
    """Huge pages and first touch, as far as this kernel knows them. Small arrays stay in small pages."""
    start = offset - offset % mmap.PAGESIZE
    if size >= HUGE_PAGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE, start, size)
    if size:
        with contextlib.suppress(OSError):
            memory.madvise(_MADV_POPULATE_WRITE, start, size)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What this process may still allocate: MemAvailable, or less inside a memory-limited container. None where unknown."""
    limits = []
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (proc / "meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    with contextlib.suppress(OSError, ValueError):  # "max" is no number: no limit.
        limits.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return max(0, min(limits)) if limits else None
