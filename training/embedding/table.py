"""One embedding table's part on one parameter server: 64-bit signs to rows with their optimizer state, in fixed memory.

U is the number of signs of a call, dim the width of a row. Rows beside their state, two-choice buckets with exact LRU order and the
kernels are described in ``training.embedding.kernels``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import Executor, wait
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from training.embedding import kernels
from training.embedding.dedup import read_only
from training.embedding.first_values import INITIALIZERS
from training.embedding.geometry import Geometry, Layout
from training.embedding.hashing import GOLDEN, mix_reference
from training.embedding.memory import Arena, available_bytes
from training.embedding.optimizers import RATE, optimizer_entry
from training.embedding.places import Places
from training.embedding.precision import ROW_DTYPES, decoded
from training.embedding.slots import TableSpec
from training.embedding.snapshot import ArrayReader, ArrayWriter
from training.errors import CapacityError, CheckpointError, ConfigError, TrainingError

Signs = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.float32]
Keep = Callable[[Signs], npt.NDArray[np.bool_]]

MAX_MIN_COUNT = 255
FORMAT_VERSION = 2
SIGNS_PER_THREAD = 8192
"""A call is given to several threads if each gets this many signs: below, handing over costs more than it saves."""
_PIECE_BUCKETS = 8192


@dataclass(frozen=True)
class LookupCounts:
    """What became of the signs of a look-up; absent ones of a reading look-up are in none of the counts."""

    hits: int
    inserted: int
    refused: int
    """Not admitted yet: seen fewer than min_count times."""
    evicted: int
    """Rows that had to go for inserted ones."""


@dataclass(frozen=True)
class UpdateCounts:
    """What became of the gradients of an update."""

    applied: int
    absent: int
    """Their signs have no row (evicted since the look-up, or never admitted): skipped."""


@dataclass(frozen=True)
class _Arrays:
    index: Signs
    rows: Rows
    """[num_slots * stride], a row being its values and then its state."""
    scalars: Rows
    """[num_slots], or empty."""
    counters: npt.NDArray[np.uint8]
    """Admission filter, or empty."""


class EmbeddingTable:
    """A context manager that frees its memory. One writer at a time: the caller holds the lock; the kernels run without the GIL.

    Signs of a call are meant to be unique and in the order of ``dedup``; other orders give the same rows, slower, and a sign that
    stands twice in an update is updated twice. Any 64-bit sign is a sign. Results depend on the sequence of calls only.
    Gradients must be finite: a NaN goes into its row.
    With ``crew`` large calls are shared by ``threads`` threads, each in blocks of its own; results are the same.
    """

    def __init__(
        self,
        spec: TableSpec,
        geometry: Geometry,
        arena: Arena,
        *,
        capacity_rows: int,
        seed: int,
        crew: Executor | None = None,
        threads: int = 1,
    ) -> None:
        self.dim = spec.dim
        self.capacity_rows = capacity_rows
        self.geometry = geometry
        self.rows = 0
        self.evicted_total = 0
        self.version = 0
        """Another one whenever a row may have gone from its place."""
        self._counted = 0
        self._spec = spec
        self._arena: Arena | None = arena
        self._entry = optimizer_entry(spec.optimizer)
        self._value_dtype, itemsize = ROW_DTYPES[spec.row_dtype]
        self._layout = Layout(spec.dim, itemsize, self._entry.buffers)
        self._crew = crew
        self.threads = threads
        """That share a large call; may be changed between calls. One without a crew."""
        self._settings = self._entry.settings(spec.optimizer)
        mixed_seed = mix_reference(np.array([seed % 2**64], np.uint64) + GOLDEN)[0]
        scale, state = np.float64(spec.initializer.scale), np.float32(self._entry.start(spec.optimizer))
        self._initial = (mixed_seed, INITIALIZERS[spec.initializer.kind], scale, state)
        self._slots = np.empty(2, np.int64)
        kernels.prepare((self._open().index, *geometry.arguments), self._slots)

    @classmethod
    def create(
        cls,
        spec: TableSpec,
        *,
        capacity_rows: int,
        seed: int,
        num_servers: int | None = None,
        crew: Executor | None = None,
        threads: int = 1,
    ) -> EmbeddingTable:
        """A table with room for ``capacity_rows`` rows, its memory allocated and touched.

        ``num_servers`` says that this table gets one server's share of signs by ``dedup.route`` over so many servers; look-ups in the
        order of ``dedup`` then walk through memory in one direction. None: signs may be any.
        ``crew`` runs parts of large calls, at most ``threads`` - 1 at a time beside the caller.
        Raises ``CapacityError`` if memory cannot hold it, ``ConfigError`` for a min_count beyond 255.
        """
        if capacity_rows < 1:
            raise CapacityError(
                f"table {spec.name}: capacity_rows is {capacity_rows}; raise embedding.capacity_rows to at least 1 per server"
            )
        if spec.min_count > MAX_MIN_COUNT:
            raise ConfigError([f"min_count: table {spec.name} asks for {spec.min_count}, admission counts to {MAX_MIN_COUNT}; lower it"])
        geometry = Geometry.of(capacity_rows, num_servers or 0)
        shapes = _shapes(spec, geometry)
        needed = sum(length * np.dtype(dtype).itemsize for length, dtype in shapes)
        available = available_bytes()
        if available is not None and needed > available:
            raise CapacityError(_too_large(spec, capacity_rows, needed, available))
        try:
            arena = Arena.allocate(shapes)
        except (OSError, ValueError, OverflowError) as error:
            raise CapacityError(f"{_too_large(spec, capacity_rows, needed, available)} ({error})") from error
        return cls(spec, geometry, arena, capacity_rows=capacity_rows, seed=seed, crew=crew, threads=threads)

    def __enter__(self) -> EmbeddingTable:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_arena", None) is not None:
            warnings.warn(f"table {self._spec.name} was not closed", ResourceWarning, stacklevel=2, source=self)
            self.close()

    def close(self) -> None:
        """Free the memory; later calls raise ``TrainingError``."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of index, rows, state and admission counters, all allocated at start."""
        return self._arena.used_bytes if self._arena is not None else 0

    @property
    def learning_rate(self) -> float:
        """The rate of the next update."""
        return float(self._settings[RATE])

    def set_learning_rate(self, value: float) -> None:
        """Change the step size of later updates. It is not part of a snapshot."""
        self._settings[RATE] = value

    def lookup(self, signs: Signs, out: Rows, *, insert: bool, places: Places | None = None) -> LookupCounts:
        """Write the values of ``signs`` [U] to ``out`` float32 [U, dim] (C-contiguous); zeros where there is no row.

        insert=True is a look-up of training: a sign without a row gets one at its min_count-th, taking the least recently used place of
        one of its two buckets if both are full; recency is refreshed. Counts towards min_count fade: they are halved after every
        num_slots * min_count / 2 look-ups of signs without a row. Now and then (< 10 %) a sign is taken for another and let in earlier.
        insert=False changes nothing. ``places`` is filled for the update of these signs.
        """
        arrays = self._open()
        _check(signs, "signs", np.uint64, (len(signs),))
        _check(out, "out", np.float32, (len(signs), self.dim))
        if not (out.flags.c_contiguous and out.flags.aligned and out.flags.writeable):
            raise ValueError("out must be C-contiguous, aligned and writable")
        signs, flat, values, slots = read_only(signs), out.reshape(-1), self._values(arrays), self._slots_for(signs, places)
        if places is not None:
            places.version = self.version
        where, layout, dim = (arrays.index, *self.geometry.arguments), self._layout.arguments, self.dim
        if not insert:

            def read(a: int, b: int) -> tuple[int, ...]:
                return (kernels.read(where, values, arrays.rows, layout, signs[a:b], slots[a:b], flat[a * dim : b * dim]),)

            return LookupCounts(self._shared(where, signs, read)[0], 0, 0, 0)
        admission = (arrays.counters, self._spec.min_count)

        def read_or_insert(a: int, b: int) -> tuple[int, ...]:
            into = flat[a * dim : b * dim]
            counts: tuple[int, ...] = kernels.read_or_insert(
                where, admission, values, arrays.rows, arrays.scalars, layout, signs[a:b], slots[a:b], into, self._initial
            )
            return counts

        counts = LookupCounts(*self._shared(where, signs, read_or_insert))
        self.rows += counts.inserted - counts.evicted
        self.evicted_total += counts.evicted
        self.version += counts.evicted
        self._fade(arrays.counters, counts)
        return counts

    def update(self, signs: Signs, gradients: Rows, *, draw: int = 0, places: Places | None = None) -> UpdateCounts:
        """Apply ``gradients`` float32 [U, dim] to the rows of ``signs`` [U]. Absent signs are skipped; no other row changes.

        ``draw`` numbers the update: with the sign it decides how rows of 16 bits are rounded. ``places`` are those of a look-up of the
        same signs in the same order; the result does not depend on it.
        """
        arrays = self._open()
        _check(signs, "signs", np.uint64, (len(signs),))
        _check(gradients, "gradients", np.float32, (len(signs), self.dim))
        signs, flat, slots = read_only(signs), read_only(gradients).reshape(-1), self._slots_for(signs, places)
        known = kernels.PROBE if places is None else kernels.TRUST if places.version == self.version else kernels.CHECK
        where, tables, dim = (arrays.index, *self.geometry.arguments), (self._values(arrays), arrays.rows, arrays.scalars), self.dim
        options = (self._spec.optimizer.weight_decay or None, self._spec.optimizer.clip_norm, np.uint64(draw % 2**64), known)

        def apply(a: int, b: int) -> tuple[int, ...]:
            part = flat[a * dim : b * dim]
            return (self._entry.kernel(where, tables, self._layout.arguments, signs[a:b], slots[a:b], part, self._settings, options),)

        (applied,) = self._shared(where, signs, apply)
        return UpdateCounts(applied, len(signs) - applied)

    def _shared(self, where: Any, signs: Signs, work: Callable[[int, int], tuple[int, ...]]) -> tuple[int, ...]:
        """Sum of what ``work`` returns for ranges of the signs: of all, or one per thread where no two share a block."""
        parts = min(self.threads, len(signs) // SIGNS_PER_THREAD)
        bounds = np.empty(max(parts, 1) + 1, np.int64)
        if self._crew is None or parts < 2 or not kernels.split(where, signs, bounds):
            return work(0, len(signs))
        others = [self._crew.submit(work, int(a), int(b)) for a, b in pairwise(bounds[1:])]
        try:
            counts = [work(0, int(bounds[1]))]
        finally:  # Nothing may still write when this call ends.
            wait(others)
        counts += [other.result() for other in others]
        return tuple(sum(column) for column in zip(*counts, strict=True))

    def sample(self, count: int) -> tuple[Signs, Rows]:
        """Up to ``count`` rows, evenly spread over the table: signs [C], values [C, dim]."""
        arrays = self._open()
        picks = np.linspace(0, self.rows - 1, max(0, min(count, self.rows))).astype(np.int64)
        signs, slots = np.empty(len(picks), np.uint64), np.empty(len(picks), np.int64)
        first = 0
        for piece_signs, piece_slots, _ in self._occupied(arrays):
            low, high = np.searchsorted(picks, [first, first + len(piece_signs)])
            signs[low:high] = piece_signs[picks[low:high] - first]
            slots[low:high] = piece_slots[picks[low:high] - first]
            first += len(piece_signs)
        return signs, decoded(self._values(arrays).reshape(self.geometry.num_slots, -1)[slots, : self.dim])

    def snapshot(self, directory: Path) -> dict[str, Any]:
        """Write signs, slots, recency, rows with state, scalars and admission counters as .npy files into an existing directory.

        Returns the JSON-able description that ``restore`` takes. Files are on disk when it returns. The caller keeps writers out.
        """
        arrays = self._open()
        kinds: dict[str, tuple[tuple[int, ...], Any]] = {
            "signs": ((self.rows,), np.uint64),
            "slots": ((self.rows,), np.int64),
            "recency": ((self.rows,), np.uint8),
            "rows": ((self.rows, self._layout.stride), np.float32 if self._spec.row_dtype == "float32" else np.uint32),
            "scalars": ((self.rows if self._entry.scalar else 0,), np.float32),
            "counters": ((len(arrays.counters),), np.uint8),
        }
        files = {}
        for name, (shape, dtype) in kinds.items():
            with ArrayWriter(directory / f"{name}.npy", shape, dtype) as writer:
                for piece in self._pieces(name, arrays):
                    writer.write(piece)
            files[name] = writer.meta
        return {
            **self._identity(),
            "format_version": FORMAT_VERSION,
            "rows": self.rows,
            "evicted_total": self.evicted_total,
            "counted": self._counted,
            "files": files,
        }

    def restore(self, directory: Path, meta: dict[str, Any], *, keep: Keep | None = None) -> int:
        """Take the rows of a snapshot; ``meta`` is what ``snapshot`` returned. Returns how many rows it took.

        Into an empty table of equal geometry and without ``keep``: exactly, so that going on equals never having stopped. Otherwise
        rows for which ``keep`` (bool [n] of signs [n]) holds are inserted from oldest to newest beside those there are, and admission
        counts anew for signs without a row. Raises ``CheckpointError`` for another table's snapshot or a damaged file.
        """
        arrays = self._open()
        self._check_identity(directory, meta)
        self.version += 1
        files = {name: ArrayReader(directory / f"{name}.npy", file) for name, file in meta["files"].items()}
        if keep is None and self.rows == 0 and meta["geometry"] == self._identity()["geometry"]:
            self._restore_exactly(arrays, files, meta)
            return self.rows
        return self._reinsert(arrays, files, keep)

    def _fade(self, counters: npt.NDArray[np.uint8], counts: LookupCounts) -> None:
        """Halve the admission counters now and then: once full of passers-by they would admit everyone."""
        if len(counters):
            self._counted += counts.refused + counts.inserted
            if self._counted >= self.geometry.num_slots * self._spec.min_count // 2:
                self._counted = 0
                np.right_shift(counters, 1, out=counters)

    def _open(self) -> _Arrays:
        if self._arena is None:
            raise TrainingError(f"table {self._spec.name} is closed")
        return _Arrays(*self._arena.arrays)

    def _slots_for(self, signs: Signs, places: Places | None) -> npt.NDArray[np.int64]:
        if places is not None:
            _check(places.slots, "places.slots", np.int64, (len(signs),))
            return places.slots
        if len(self._slots) < len(signs):
            self._slots = np.empty(len(signs), np.int64)
        return self._slots[: len(signs)]

    def _values(self, arrays: _Arrays) -> npt.NDArray[Any]:
        """The rows' memory in the type of their values."""
        return arrays.rows.view(self._value_dtype)

    def _identity(self) -> dict[str, Any]:
        optimizer = self._spec.optimizer
        shape = [self.geometry.num_blocks, self.geometry.block_buckets, self.geometry.num_servers, self._spec.min_count > 1]
        return {
            "dim": self.dim,
            "row_dtype": self._spec.row_dtype,
            "optimizer": optimizer.name,
            "stride": self._layout.stride,
            "scalar": self._entry.scalar,
            "geometry": shape,
        }

    def _check_identity(self, directory: Path, meta: dict[str, Any]) -> None:
        if meta.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{directory}: table format {meta.get('format_version')}, this version reads {FORMAT_VERSION}; use the one that wrote it"
            )
        for name, own in self._identity().items():
            if name != "geometry" and meta.get(name) != own:
                raise CheckpointError(
                    f"{directory}: its rows have {name} {meta.get(name)!r}, table {self._spec.name} has {own!r}; use its own config"
                )

    def _occupied(self, arrays: _Arrays) -> Any:
        """Pieces (signs, slots, recency) of all rows in slot order."""
        size = min(_PIECE_BUCKETS, self.geometry.num_buckets) * kernels.WAYS
        signs, slots, recency = np.empty(size, np.uint64), np.empty(size, np.int64), np.empty(size, np.uint8)
        for first in range(0, self.geometry.num_buckets, _PIECE_BUCKETS):
            last = min(first + _PIECE_BUCKETS, self.geometry.num_buckets)
            n = kernels.occupied(arrays.index, first, last, signs, slots, recency)
            yield signs[:n], slots[:n], recency[:n]

    def _pieces(self, name: str, arrays: _Arrays) -> Any:
        if name == "counters":
            yield arrays.counters
            return
        if name == "scalars" and not self._entry.scalar:
            return
        rows = arrays.rows.view(np.uint32).reshape(-1, self._layout.stride)
        for signs, slots, recency in self._occupied(arrays):
            match name:
                case "rows":
                    yield rows[slots].view(np.float32) if self._spec.row_dtype == "float32" else rows[slots]
                case "scalars":
                    yield arrays.scalars[slots]
                case _:
                    yield {"signs": signs, "slots": slots, "recency": recency}[name]

    def _restore_exactly(self, arrays: _Arrays, files: dict[str, ArrayReader], meta: dict[str, Any]) -> None:
        signs, slots, recency = (files[name].all() for name in ("signs", "slots", "recency"))
        if len(slots) and (slots.min() < 0 or slots.max() >= self.geometry.num_slots or recency.max() >= kernels.WAYS):
            raise CheckpointError(f"{files['slots'].path}: slots beyond the table; the checkpoint is damaged, use an older one")
        kernels.place_exactly(arrays.index, signs, slots, recency)
        first = 0
        for piece in files["rows"].pieces(_PIECE_BUCKETS * kernels.WAYS):
            self._copy(piece, arrays.rows, self._layout.stride, slots[first : first + len(piece)])
            first += len(piece)
        if self._entry.scalar:
            arrays.scalars[slots] = files["scalars"].all()
        arrays.counters[:] = files["counters"].all()
        self.rows = len(signs)
        self.evicted_total = int(meta["evicted_total"])
        self._counted = int(meta["counted"])

    def _reinsert(self, arrays: _Arrays, files: dict[str, ArrayReader], keep: Keep | None) -> int:
        signs = files["signs"].all()
        # Oldest first; mixed among equals, for placing in hash order would balance the buckets badly (0.8 % lost at load 0.8, not 0.1 %).
        mixed = np.random.default_rng(0).permutation(len(signs))
        order = mixed[np.argsort(-files["recency"].all()[mixed].astype(np.int8), kind="stable")]
        if keep is not None:
            order = order[keep(signs[order])]
        rows, scalars, before = files["rows"].mapped(), files["scalars"].mapped(), self.rows
        for first in range(0, len(order), _PIECE_BUCKETS):
            piece = order[first : first + _PIECE_BUCKETS]
            slots = np.empty(len(piece), np.int64)
            _, inserted, _, evicted = self._insert_without_values(arrays, signs[piece], slots)
            self.rows += inserted - evicted
            self.version += evicted
            self._copy(rows[piece], arrays.rows, self._layout.stride, slots)
            if self._entry.scalar:
                self._copy(scalars[piece], arrays.scalars, 1, slots)
        return self.rows - before

    def _insert_without_values(self, arrays: _Arrays, signs: Signs, slots: npt.NDArray[np.int64]) -> tuple[int, int, int, int]:
        counts: tuple[int, int, int, int] = kernels.insert(
            (arrays.index, *self.geometry.arguments), (arrays.counters[:0], 1), arrays.rows, read_only(signs), slots
        )
        return counts

    @staticmethod
    def _copy(source: npt.NDArray[Any], into: Rows, stride: int, slots: npt.NDArray[np.int64]) -> None:
        kernels.copy_rows(read_only(source).reshape(-1).view(np.uint32), into.view(np.uint32), stride, slots)


def _shapes(spec: TableSpec, geometry: Geometry) -> list[tuple[int, Any]]:
    """Length and dtype of the arrays of ``_Arrays``."""
    entry = optimizer_entry(spec.optimizer)
    layout = Layout(spec.dim, ROW_DTYPES[spec.row_dtype][1], entry.buffers)
    return [
        (geometry.num_buckets * kernels.LINE, np.uint64),
        (geometry.num_slots * layout.stride, np.float32),
        (geometry.num_slots if entry.scalar else 0, np.float32),
        (geometry.filter_bytes if spec.min_count > 1 else 0, np.uint8),
    ]


def _too_large(spec: TableSpec, capacity_rows: int, needed: int, available: int | None) -> str:
    there = "more than the system gives" if available is None else f"{available / 2**30:.1f} GiB available"
    return (
        f"table {spec.name} needs {needed / 2**30:.1f} GiB, {there}: lower embedding.capacity_rows from {spec.capacity_rows} "
        f"({capacity_rows} on this server) or add parameter servers"
    )


def _check(array: npt.NDArray[Any], name: str, dtype: Any, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise ValueError(f"{name} must be {np.dtype(dtype)} {list(shape)}, got {array.dtype} {list(array.shape)}")
