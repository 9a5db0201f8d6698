"""The memory of tables."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from training.embedding.memory import HUGE_PAGE_BYTES, Arena, available_bytes

MEMINFO = "MemTotal:       16000000 kB\nMemFree:          100000 kB\nMemAvailable:    4000000 kB\n"


@pytest.mark.parametrize(
    ("meminfo", "limit", "expected"),
    [
        (MEMINFO, None, 4_096_000_000),
        (MEMINFO, "max", 4_096_000_000),
        (MEMINFO, "1000000", 900_000),
        (MEMINFO, "50000", 0),
        ("nothing here", "1000000", 900_000),
        (None, None, None),
    ],
)
def test_what_is_available_is_the_tighter_of_machine_and_container(
    tmp_path: Path, meminfo: str | None, limit: str | None, expected: int | None
) -> None:
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    if limit is not None:
        (tmp_path / "memory.max").write_text(limit + "\n")
        (tmp_path / "memory.current").write_text("100000\n")
    assert available_bytes(tmp_path, tmp_path) == expected


def test_arrays_are_zero_aligned_and_apart() -> None:
    arena = Arena.allocate([(1000, np.uint64), (3_000_000, np.float32), (0, np.float32), (7, np.uint8)])
    index, rows, none, counters = arena.arrays
    assert (len(index), len(rows), len(none), len(counters)) == (1000, 3_000_000, 0, 7)
    assert arena.used_bytes == 8000 + 12_000_000 + 7
    for array in (index, rows, counters):
        assert array.ctypes.data % HUGE_PAGE_BYTES == 0
        assert not array.any()
        array.fill(1)
    assert (index == 1).all()
    assert (rows == 1).all()
    del index, rows, none, counters, array
    arena.close()
    assert arena.arrays == []
