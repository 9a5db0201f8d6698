"""Where a look-up found its signs, remembered until the update of the same signs, which then need not search."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from training.embedding.buffers import Bytes, Shelf, Staging, aligned

KEPT_BYTES = 64 << 20
"""Of look-ups whose updates have not come; those of a batch with 100,000 signs take 0.8 MB."""


@dataclass
class Places:
    """Where a look-up of a table found its signs. An update of the same signs that is given them is up to twice as fast.

    They are a hint: signs without a row, and those whose rows have gone since, are searched for. Results are the same as without.
    """

    slots: npt.NDArray[np.int64]
    """[U], C-contiguous; the look-up fills it, whatever it holds."""
    version: int = 0
    """``EmbeddingTable.version`` before the look-up."""


@dataclass(frozen=True)
class BatchPlaces:
    """Of one batch."""

    memory: Bytes
    of_table: list[Places | None]
    """None: search."""


class KeptPlaces:
    """Places by number, each until its update comes; beyond ``KEPT_BYTES`` the oldest are forgotten. Safe for all threads."""

    def __init__(self) -> None:
        self.shelf = Shelf()
        self._lock = threading.Lock()
        self._kept: dict[int, BatchPlaces] = {}
        self._numbers = itertools.count()
        self._bytes = 0

    def new(self, counts: Sequence[int]) -> BatchPlaces:
        """Places for so many signs of each table, to be kept."""
        memory = self.shelf.take(sum(aligned(8 * count) for count in counts))
        staging = Staging(memory)
        return BatchPlaces(memory, [Places(staging.array((count,), np.int64)) for count in counts])

    def keep(self, places: BatchPlaces) -> int:
        """Until ``take`` with the number that is returned."""
        forgotten = []
        with self._lock:
            number = next(self._numbers)
            self._kept[number] = places
            self._bytes += len(places.memory)
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                forgotten.append(self._kept.pop(next(iter(self._kept))))
                self._bytes -= len(forgotten[-1].memory)
        for old in forgotten:
            self.done(old)
        return number

    def take(self, number: int | None) -> BatchPlaces | None:
        """What was kept, no longer kept, and to be given to ``done``; None if it is forgotten or there is no number."""
        with self._lock:
            places = None if number is None else self._kept.pop(number, None)
            self._bytes -= len(places.memory) if places else 0
        return places

    def done(self, places: BatchPlaces) -> None:
        """Nobody uses them any more."""
        self.shelf.put(places.memory)
