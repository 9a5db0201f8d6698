"""What every source format is turned into first: columns of raw text spans, with line numbers and structural faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from training.config import Config
from training.data.dead_letters import Faults

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Wanted:
    """The columns a configuration uses."""

    scalars: tuple[str, ...]
    """Columns read as one value per record, in order of first use."""
    lists: tuple[str, ...]
    """Columns read as several values per record; text with a separator may stand for a list."""

    @property
    def columns(self) -> list[str]:
        """All of them, each once."""
        return list(dict.fromkeys((*self.scalars, *self.lists)))

    @classmethod
    def by(cls, config: Config) -> Wanted:
        """The columns of the label, time, features and split."""
        schema, split = config.schema_, config.split
        single = [feature.source for feature in schema.categorical if not feature.multi_valued]
        several = [feature.source for feature in schema.categorical if feature.multi_valued]
        scalars = [schema.label.column, *([schema.time.column] if schema.time else [])]
        scalars += [feature.source for feature in schema.dense] + single
        scalars += ([split.column] if split.column else []) + split.key
        return cls(tuple(dict.fromkeys(scalars)), tuple(dict.fromkeys(several)))


@dataclass(frozen=True)
class RawColumn:
    """One value per record: ``data[starts[i]:ends[i]]``; a negative start is a null."""

    data: U8
    starts: I64
    ends: I64

    def take(self, rows: I64) -> RawColumn:
        """The chosen records; the bytes are shared."""
        return RawColumn(self.data, self.starts[rows], self.ends[rows])


@dataclass(frozen=True)
class RawList:
    """Several values per record: record i has the spans ``offsets[i]`` to ``offsets[i+1]``."""

    data: U8
    offsets: I64
    starts: I64
    ends: I64


@dataclass(frozen=True)
class RawRecords:
    """N records as they were read."""

    piece: int
    """Number of this piece within its chunk."""
    lines: I64
    scalars: dict[str, RawColumn]
    lists: dict[str, RawList]
    """Values that were lists in the file (jsonl, parquet)."""
    faults: Faults
    record: Callable[[int], bytes]
    """The record as it stands in the file, for dead letters."""
    identity: tuple[RawColumn, ...]
    """What the hash of a whole record is taken of, one column after another."""
    present: frozenset[str] = field(default=frozenset())
    """Wanted columns that occur (jsonl: as a key of some record)."""

    def __len__(self) -> int:
        return len(self.lines)
