"""Shards: the records the trainer reads, as memory-mapped Arrow IPC files, and the order in which it reads them.

A shard is one uncompressed record batch of at most ``SHARD_ROWS`` records. Its columns, in order: ``label`` int8; ``time`` int64
seconds (if the schema has a time); ``dense`` FixedSizeList<float32>[D] (if D > 0); ``signs`` FixedSizeList<uint64>[S1], the
single-valued slots in schema order (if there are any); ``bag:<slot>`` LargeList<uint64> per multi-valued slot; ``slice:<slot>``
dictionary<int32, string> per slot in ``evaluation.slices``. A reader compares a shard's content with its manifest before it uses it.

N: records, D: dense features, S1: single-valued slots, V: ids of a bag.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from training.config import SplitName
from training.data.manifest import Manifest, ShardEntry
from training.data.spans import gather_lists
from training.errors import ManifestError

SHARD_ROWS = 65_536
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Bag:
    """The ids of a multi-valued slot: record i has ``values[offsets[i]:offsets[i+1]]``."""

    offsets: I64
    """int64 [N+1], starting at 0."""
    values: npt.NDArray[np.uint64]
    """uint64 [V], V = ``offsets[-1]``."""


@dataclass(frozen=True)
class Batch:
    """N records, in arrays the holder owns and may write to."""

    label: npt.NDArray[np.float32]
    """float32 [N], 0 or 1."""
    dense: npt.NDArray[np.float32]
    """float32 [N, D]; D may be 0."""
    signs: npt.NDArray[np.uint64]
    """uint64 [N, S1]; S1 may be 0."""
    bags: tuple[Bag, ...]
    """One per multi-valued slot, in schema order."""
    time: I64 | None
    """int64 [N] seconds since the epoch (UTC), if the schema has a time."""

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class ShardColumns:
    """The columns of N records as arrays; those of an opened shard are views of its memory map."""

    label: npt.NDArray[np.int8]
    time: I64 | None
    dense: npt.NDArray[np.float32]
    signs: npt.NDArray[np.uint64]
    bags: dict[str, Bag]
    slices: dict[str, pa.Array]
    """Value texts per slot of ``evaluation.slices``: string or dictionary arrays [N]; "" is missing."""

    def __len__(self) -> int:
        return len(self.label)

    def take(self, rows: I64) -> ShardColumns:
        """The chosen records in the order of ``rows``, copied."""
        bags = {name: _take_bag(bag, rows) for name, bag in self.bags.items()}
        slices = {name: texts.take(pa.array(rows)) for name, texts in self.slices.items()}
        time = None if self.time is None else self.time[rows]
        return ShardColumns(self.label[rows], time, self.dense[rows], self.signs[rows], bags, slices)

    def slice(self, start: int, stop: int) -> ShardColumns:
        """Records ``start`` to ``stop``; nothing is copied but bag offsets."""
        bags = {name: _slice_bag(bag, start, stop) for name, bag in self.bags.items()}
        slices = {name: texts.slice(start, stop - start) for name, texts in self.slices.items()}
        time = None if self.time is None else self.time[start:stop]
        return ShardColumns(self.label[start:stop], time, self.dense[start:stop], self.signs[start:stop], bags, slices)

    @classmethod
    def concatenate(cls, parts: Sequence[ShardColumns]) -> ShardColumns:
        """The records of all ``parts``, one after another; there must be at least one part."""
        first = parts[0]
        return cls(
            np.concatenate([part.label for part in parts]),
            None if first.time is None else np.concatenate([part.time for part in parts if part.time is not None]),
            np.concatenate([part.dense for part in parts]),
            np.concatenate([part.signs for part in parts]),
            {name: _concatenate_bags([part.bags[name] for part in parts]) for name in first.bags},
            {name: pa.concat_arrays([part.slices[name].cast(pa.string()) for part in parts]) for name in first.slices},
        )


def write_shard(path: Path, columns: ShardColumns) -> str:
    """Write ``columns`` as one shard and return the hex xxh3-128 of its logical content. The file appears whole or not at all."""
    slices = {name: _sorted_dictionary(texts) for name, texts in columns.slices.items()}
    batch = _record_batch(columns, slices)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
    partial.replace(path)
    return _content_digest(columns, slices)


def open_shard(path: Path) -> ShardColumns:
    """Memory-map a shard. The map lives as long as any of the arrays. Raises ``ManifestError`` for what is no shard."""
    batch = _mapped(path)
    rows = batch.num_rows
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    bags = {name[4:]: Bag(_view(c.offsets), _view(c.values)) for name, c in columns.items() if name.startswith("bag:")}
    slices = {name[6:]: c for name, c in columns.items() if name.startswith("slice:")}
    dense = _matrix(columns.get("dense"), rows, np.float32)
    signs = _matrix(columns.get("signs"), rows, np.uint64)
    time = _view(columns["time"]) if "time" in columns else None
    return ShardColumns(_view(columns["label"]), time, dense, signs, bags, slices)


def check_shard(data_dir: Path, entry: ShardEntry) -> None:
    """Compare a shard with its manifest entry; raises ``ManifestError``. An unchanged file is read once per process."""
    path = data_dir / entry.file
    try:
        status = path.stat()
    except OSError:
        raise ManifestError(f"{path}: missing; run `satrap preprocess` again") from None
    _check_content(path.absolute(), entry.digest, (status.st_ino, status.st_mtime_ns, status.st_size))


@lru_cache(maxsize=1 << 16)
def _check_content(path: Path, digest: str, stamp: tuple[int, int, int]) -> None:
    """``stamp`` is part of the key alone: a file that was replaced is read again. What raises is not remembered."""
    del stamp
    columns = open_shard(path)
    if _content_digest(columns, columns.slices) != digest:
        raise _damaged(path)


class ShardReader:
    """Random and sequential access to the records of one split; a context manager."""

    def __init__(self, data_dir: Path, entries: Sequence[ShardEntry]) -> None:
        self._data_dir = data_dir
        self._entries = list(entries)
        self._opened: dict[int, ShardColumns] = {}
        self.shard_starts: I64 = np.cumsum([0, *(entry.rows for entry in entries)], dtype=np.int64)
        """First record of every shard, and the number of records: int64 [num_shards + 1]."""

    @classmethod
    def open(cls, data_dir: Path, split: SplitName) -> ShardReader:
        """Open a split of a finished data directory; raises ``ManifestError`` for an unfinished or damaged one."""
        manifest = Manifest.load(data_dir)
        entries = [entry for entry in manifest.shards if entry.split == split]
        for entry in entries:
            path = data_dir / entry.file
            if not path.is_file() or path.stat().st_size != entry.bytes:
                raise ManifestError(f"{path}: missing or of another size than its manifest says; run `satrap preprocess` again")
        return cls(data_dir, entries)

    @property
    def rows(self) -> int:
        """Number of records."""
        return int(self.shard_starts[-1])

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Let go of the memory maps."""
        self._opened.clear()

    def read(self, start: int, stop: int) -> Batch:
        """Records ``start`` to ``stop`` in manifest order, across shards. Raises ``IndexError`` outside the split."""
        if not 0 <= start <= stop <= self.rows:
            raise IndexError(f"records {start} to {stop} of a split of {self.rows}")
        return _batch([self._shard(s).slice(a, b) for s, a, b in self._ranges(start, stop)] or [self._nothing()])

    def take(self, rows: I64) -> Batch:
        """Records by number, in the order of ``rows`` (int64 [N]), repeats allowed. Raises ``IndexError`` outside the split."""
        if len(rows) == 0:
            return _batch([self._nothing()])
        if rows.min() < 0 or rows.max() >= self.rows:
            raise IndexError(f"records {rows.min()} to {rows.max()} of a split of {self.rows}")
        shard_of = np.searchsorted(self.shard_starts, rows, side="right") - 1
        order = np.argsort(shard_of, kind="stable")
        involved, firsts = np.unique(shard_of[order], return_index=True)
        bounds = np.append(firsts, len(rows))
        parts = []
        for shard, (a, b) in zip(involved.tolist(), pairwise(bounds.tolist()), strict=True):
            parts.append((self._shard(shard), rows[order[a:b]] - self.shard_starts[shard], order[a:b]))
        return _scattered(parts, len(rows))

    def slice_values(self, slot: str, start: int, stop: int) -> npt.NDArray[np.str_]:
        """Value texts of a slot of ``evaluation.slices`` for records ``start`` to ``stop``; "" is missing. ``KeyError`` for others."""
        parts = [self._shard(s).slices[slot].slice(a, b - a).cast(pa.string()) for s, a, b in self._ranges(start, stop)]
        texts = pa.chunked_array(parts, pa.string()).to_pylist() if parts else []
        return np.array(texts, dtype=np.str_)

    def _shard(self, index: int) -> ShardColumns:
        if index not in self._opened:
            check_shard(self._data_dir, self._entries[index])
            self._opened[index] = open_shard(self._data_dir / self._entries[index].file)
        return self._opened[index]

    def _nothing(self) -> ShardColumns:
        if not self._entries:
            empty = np.empty((0, 0), np.float32)
            return ShardColumns(np.empty(0, np.int8), None, empty, empty.astype(np.uint64), {}, {})
        return self._shard(0).slice(0, 0)

    def _ranges(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first, last) of every shard that holds some of the records."""
        shard = int(np.searchsorted(self.shard_starts, start, side="right")) - 1
        while start < stop:
            first, following = int(self.shard_starts[shard]), int(self.shard_starts[shard + 1])
            yield shard, start - first, min(stop, following) - first
            start, shard = following, shard + 1


@dataclass(frozen=True)
class _Epoch:
    """The order of the shards in one epoch, and the place in it where each window begins (and the last ends)."""

    number: int
    shard_order: I64
    window_starts: I64


@dataclass(frozen=True)
class _Window:
    """The record numbers of one window of one epoch, permuted."""

    epoch: int
    number: int
    rows: I64


class BatchPlan:
    """The trainer's order: which records step s of epoch e reads. A pure function of its arguments, so a resumed run needs no state.

    Threads may share a plan. Shuffled, each epoch puts the shards in a new order, takes ``window_shards`` of them at a time and
    permutes the records of that window. The permutation sorts hashed record numbers (splitmix64), which no library version can change.
    """

    def __init__(self, shard_starts: I64, *, rows_per_step: int, seed: int, shuffle: bool, window_shards: int) -> None:
        self._starts = np.asarray(shard_starts, np.int64)
        self._rows_per_step = rows_per_step
        self._seed = seed
        self._shuffle = shuffle
        self._window_shards = window_shards
        self._rows = int(self._starts[-1])
        self.steps_per_epoch = -(-self._rows // rows_per_step)
        """Steps that cover every record once; the last may be short."""
        # Two caches that several threads share. Each is replaced whole, in one assignment, and its entries say what they are of.
        self._epoch: _Epoch | None = None
        self._windows: tuple[_Window, ...] = ()

    def rows(self, epoch: int, step: int) -> I64 | slice:
        """Record numbers of a step: a slice if not shuffled, else int64 [N]. Raises ``IndexError`` beyond the epoch."""
        if not 0 <= step < self.steps_per_epoch:
            raise IndexError(f"step {step} of an epoch of {self.steps_per_epoch}")
        start = step * self._rows_per_step
        stop = min(start + self._rows_per_step, self._rows)
        if not self._shuffle:
            return slice(start, stop)
        order = self._order(epoch)
        parts = []
        window = int(np.searchsorted(order.window_starts, start, side="right")) - 1
        while start < stop:
            first, following = int(order.window_starts[window]), int(order.window_starts[window + 1])
            parts.append(self._window(order, window)[start - first : min(stop, following) - first])
            start, window = following, window + 1
        return np.concatenate(parts)

    def _order(self, epoch: int) -> _Epoch:
        known = self._epoch
        if known is not None and known.number == epoch:
            return known
        num_shards = len(self._starts) - 1
        shard_order = np.argsort(self._keys(np.arange(num_shards), epoch=epoch, stream=1), kind="stable")
        sizes = np.diff(self._starts)[shard_order]
        window_sizes = np.add.reduceat(sizes, np.arange(0, num_shards, self._window_shards))
        made = _Epoch(epoch, shard_order, np.concatenate([np.zeros(1, np.int64), np.cumsum(window_sizes)]))
        self._epoch = made
        return made

    def _window(self, order: _Epoch, window: int) -> I64:
        known = self._windows
        for kept in known:
            if (kept.epoch, kept.number) == (order.number, window):
                return kept.rows
        members = order.shard_order[window * self._window_shards : (window + 1) * self._window_shards]
        rows = np.concatenate([np.arange(self._starts[shard], self._starts[shard + 1]) for shard in members])
        rows = rows[np.argsort(self._keys(rows, epoch=order.number, stream=2), kind="stable")]
        self._windows = (*known[-1:], _Window(order.number, window, rows))
        return rows

    def _keys(self, numbers: I64, *, epoch: int, stream: int) -> npt.NDArray[np.uint64]:
        """A pseudo-random 64-bit key per number, different for every seed, epoch and stream."""
        text = f"{self._seed}/{epoch}/{stream}"
        offset = np.uint64(xxhash.xxh64_intdigest(text.encode(), 0))
        mixed = numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + offset
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)), np.uint64)


def _batch(parts: list[ShardColumns]) -> Batch:
    columns = ShardColumns.concatenate([_without_slices(part) for part in parts])
    return Batch(columns.label.astype(np.float32), columns.dense, columns.signs, tuple(columns.bags.values()), columns.time)


def _scattered(parts: list[tuple[ShardColumns, I64, I64]], count: int) -> Batch:
    """A batch of ``count`` records; each part is (columns, its records, their places in the batch)."""
    first = parts[0][0]
    label = np.empty(count, np.float32)
    dense = np.empty((count, first.dense.shape[1]), np.float32)
    signs = np.empty((count, first.signs.shape[1]), np.uint64)
    time = None if first.time is None else np.empty(count, np.int64)
    back = np.empty(count, np.int64)
    done = 0
    for columns, rows, places in parts:
        label[places], dense[places], signs[places] = columns.label[rows], columns.dense[rows], columns.signs[rows]
        if time is not None and columns.time is not None:
            time[places] = columns.time[rows]
        back[places] = np.arange(done, done + len(rows))
        done += len(rows)
    bags = []
    for name in first.bags:
        gathered = _concatenate_bags([_take_bag(columns.bags[name], rows) for columns, rows, _ in parts])
        bags.append(gathered if len(parts) == 1 else _take_bag(gathered, back))
    return Batch(label, dense, signs, tuple(bags), time)


def _take_bag(bag: Bag, rows: I64) -> Bag:
    offsets, index = gather_lists(bag.offsets, rows)
    return Bag(offsets, bag.values[index])


def _without_slices(columns: ShardColumns) -> ShardColumns:
    if not columns.slices:
        return columns
    return ShardColumns(columns.label, columns.time, columns.dense, columns.signs, columns.bags, {})


def _slice_bag(bag: Bag, start: int, stop: int) -> Bag:
    first, last = bag.offsets[start], bag.offsets[stop]
    return Bag(bag.offsets[start : stop + 1] - first, bag.values[first:last])


def _concatenate_bags(bags: list[Bag]) -> Bag:
    lengths = np.concatenate([np.diff(bag.offsets) for bag in bags])
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return Bag(offsets, np.concatenate([bag.values for bag in bags]))


def _mapped(path: Path) -> pa.RecordBatch:
    """The record batch of a shard, checked so far that no damage can make a later access leave the map."""
    try:
        with pa.memory_map(str(path)) as source:
            batch = pa.ipc.open_file(source).get_batch(0)
        batch.validate(full=True)
        names = batch.schema.names
    except FileNotFoundError:
        raise ManifestError(f"{path}: missing; run `satrap preprocess` again") from None
    except (pa.ArrowException, UnicodeDecodeError, OSError):
        raise _damaged(path) from None
    known = all(_is_shard_type(name, batch.schema.field(i).type) for i, name in enumerate(names))
    if not known or "label" not in names or len(set(names)) < len(names) or any(column.null_count for column in batch.columns):
        raise _damaged(path)
    return batch


def _is_shard_type(name: str, type_: pa.DataType) -> bool:
    if name in ("dense", "signs"):
        inner = pa.float32() if name == "dense" else pa.uint64()
        return bool(pa.types.is_fixed_size_list(type_) and type_.list_size > 0 and type_.value_type == inner)
    if name.startswith("bag:"):
        return bool(pa.types.is_large_list(type_) and type_.value_type == pa.uint64())
    if name.startswith("slice:"):
        return bool(type_ == pa.dictionary(pa.int32(), pa.string()))
    return bool(type_ == {"label": pa.int8(), "time": pa.int64()}.get(name))


def _damaged(path: Path) -> ManifestError:
    return ManifestError(f"{path}: damaged: its content differs from the manifest; run `satrap preprocess` again")


def _view(array: pa.Array) -> npt.NDArray[Any]:
    return array.to_numpy(zero_copy_only=True)  # type: ignore[no-any-return]


def _matrix(column: pa.Array | None, rows: int, dtype: type[np.generic]) -> npt.NDArray[Any]:
    if column is None:
        return np.empty((rows, 0), dtype)
    return _view(column.values).reshape(rows, -1) if rows else np.empty((0, column.type.list_size), dtype)


def _sorted_dictionary(texts: pa.Array) -> pa.DictionaryArray:
    """Encode with an ascending dictionary, so that equal content gives equal bytes."""
    if pa.types.is_dictionary(texts.type):
        texts = texts.cast(pa.string())
    values, codes = np.unique(np.array(texts.to_pylist(), dtype=np.str_), return_inverse=True)
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), pa.array(values.tolist(), pa.string()))


def _record_batch(columns: ShardColumns, slices: dict[str, pa.DictionaryArray]) -> pa.RecordBatch:
    arrays: dict[str, pa.Array] = {"label": pa.array(columns.label)}
    if columns.time is not None:
        arrays["time"] = pa.array(columns.time)
    for name, matrix in (("dense", columns.dense), ("signs", columns.signs)):
        if matrix.shape[1]:
            arrays[name] = pa.FixedSizeListArray.from_arrays(pa.array(np.ascontiguousarray(matrix).reshape(-1)), matrix.shape[1])
    for name, bag in columns.bags.items():
        arrays[f"bag:{name}"] = pa.LargeListArray.from_arrays(pa.array(bag.offsets), pa.array(bag.values))
    for name, texts in slices.items():
        arrays[f"slice:{name}"] = texts
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _content_digest(columns: ShardColumns, slices: dict[str, pa.DictionaryArray]) -> str:
    digest = xxhash.xxh3_128()

    def feed(name: str, values: npt.NDArray[np.generic]) -> None:
        digest.update(f"{name}:{values.dtype.str}:{values.shape};".encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8).reshape(-1).data)

    feed("label", columns.label)
    if columns.time is not None:
        feed("time", columns.time)
    feed("dense", columns.dense)
    feed("signs", columns.signs)
    for name, bag in columns.bags.items():
        feed(f"bag:{name}:offsets", bag.offsets)
        feed(f"bag:{name}:values", bag.values)
    for name, texts in slices.items():
        feed(f"slice:{name}", texts.indices.to_numpy(zero_copy_only=True))
        digest.update("\0".join(texts.dictionary.to_pylist()).encode())
    return digest.hexdigest()
