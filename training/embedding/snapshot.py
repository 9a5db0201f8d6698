"""Files of a table's snapshot: .npy arrays written in pieces, flushed to disk, and checked by size and digest when read.

A snapshot names each file with its rows and xxh3 digest, so that a damaged one is refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from training.errors import CheckpointError

PIECE_BYTES = 8 * 1024 * 1024


class ArrayWriter:
    """Writes a .npy file of known shape piece by piece; complete and on disk once the context ends."""

    def __init__(self, path: Path, shape: tuple[int, ...], dtype: Any) -> None:
        self._path = path
        self._shape = shape
        self._dtype = np.dtype(dtype)
        self._digest = xxhash.xxh3_64()
        self._file: BinaryIO | None = None

    def __enter__(self) -> ArrayWriter:
        self._file = self._path.open("wb")
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": self._shape}
        np.lib.format.write_array_header_1_0(self._file, header)
        return self

    def write(self, piece: npt.NDArray[Any]) -> None:
        """Append elements in C order."""
        assert self._file is not None
        data = np.ascontiguousarray(piece, self._dtype).reshape(-1).view(np.uint8).data
        self._digest.update(data)
        self._file.write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._file is not None
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    @property
    def meta(self) -> dict[str, Any]:
        """What ``ArrayReader`` needs to trust the file."""
        return {"shape": list(self._shape), "dtype": self._dtype.str, "xxh3": self._digest.hexdigest()}


class ArrayReader:
    """A .npy file of a snapshot. Opening verifies shape, dtype, size and digest; raises ``CheckpointError`` naming the file."""

    def __init__(self, path: Path, meta: dict[str, Any]) -> None:
        self.path = path
        self._shape = tuple(meta["shape"])
        self._dtype = np.dtype(meta["dtype"])
        self._start = self._verified(str(meta["xxh3"]))

    def __len__(self) -> int:
        return int(self._shape[0])

    def pieces(self, rows_per_piece: int) -> Iterator[npt.NDArray[Any]]:
        """The array in order, some rows at a time."""
        with self.path.open("rb") as file:
            file.seek(self._start)
            for first in range(0, len(self), rows_per_piece):
                shape = (min(rows_per_piece, len(self) - first), *self._shape[1:])
                yield np.fromfile(file, self._dtype, int(np.prod(shape))).reshape(shape)

    def all(self) -> npt.NDArray[Any]:
        """The array in memory."""
        return next(self.pieces(max(1, len(self))), np.empty(self._shape, self._dtype))

    def mapped(self) -> npt.NDArray[Any]:
        """The array mapped from disk, for reading in any order."""
        if 0 in self._shape:
            return np.empty(self._shape, self._dtype)
        return np.memmap(self.path, self._dtype, mode="r", offset=self._start, shape=self._shape)

    def _verified(self, expected_digest: str) -> int:
        """Offset of the first element."""
        try:
            with self.path.open("rb") as file:
                version = np.lib.format.read_magic(file)
                if version != (1, 0):
                    raise CheckpointError(f"{self.path}: .npy version {version}, expected (1, 0); {_REMEDY}")
                shape, _, dtype = np.lib.format.read_array_header_1_0(file)
                start = file.tell()
                wanted = start + int(np.prod(self._shape)) * self._dtype.itemsize
                size = os.fstat(file.fileno()).st_size
                if (shape, dtype, size) != (self._shape, self._dtype, wanted):
                    raise CheckpointError(
                        f"{self.path}: holds {dtype} {list(shape)} in {size} bytes, "
                        f"expected {self._dtype} {list(self._shape)} in {wanted}; {_REMEDY}"
                    )
                digest = xxhash.xxh3_64()
                while piece := file.read(PIECE_BYTES):
                    digest.update(piece)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: missing; {_REMEDY}") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be read ({error}); {_REMEDY}") from None
        if digest.hexdigest() != expected_digest:
            raise CheckpointError(f"{self.path}: its content changed since it was written (xxh3 {digest.hexdigest()}); {_REMEDY}")
        return start


_REMEDY = "the checkpoint is damaged, use an older one"
