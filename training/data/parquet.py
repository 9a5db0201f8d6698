"""Parquet: row groups as raw text spans, read in batches of bounded size.

Every value becomes its text: integers in decimal, floats with a whole value like integers (a float column is often an integer one
that had nulls), booleans as ``true`` and ``false``, timestamps as ISO 8601. List columns stay lists.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet

from training.data.dead_letters import Faults
from training.data.raw import RawColumn, RawList, RawRecords, Wanted
from training.errors import SourceError

I64 = npt.NDArray[np.int64]
_BATCH_ROWS = 65_536


def num_rows(path: object) -> int:
    """Records of a file; raises ``SourceError``."""
    with _open(path) as file:
        return int(file.metadata.num_rows)


def column_names(path: object) -> tuple[str, ...]:
    """Top-level columns of a file; raises ``SourceError``."""
    with _open(path) as file:
        return tuple(file.schema_arrow.names)


def row_groups(path: object) -> Iterator[tuple[int, int]]:
    """(number of the group, number of its first row from 1) of every row group that has rows; raises ``SourceError``."""
    with _open(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    for group, first in enumerate(accumulate([1, *sizes[:-1]])):
        if sizes[group]:
            yield group, first


def read_row_group(path: object, group: int, *, first_row: int, wanted: Wanted) -> Iterator[RawRecords]:
    """Read a row group, at most 65,536 records at a time; raises ``SourceError`` for a damaged file or a column of records."""
    with _open(path) as file:
        piece = 0
        try:
            for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=wanted.columns):
                yield _raw_records(batch, path, piece=piece, first_row=first_row, wanted=wanted)
                first_row += batch.num_rows
                piece += 1
        except (pa.ArrowException, OSError) as error:
            raise SourceError(f"{path}: damaged Parquet file: {error}; copy it again") from None


def _open(path: object) -> pyarrow.parquet.ParquetFile:
    try:
        return pyarrow.parquet.ParquetFile(str(path))
    except (pa.ArrowException, OSError) as error:
        raise SourceError(f"{path}: cannot be read as Parquet: {error}") from None


def _raw_records(batch: pa.RecordBatch, path: object, *, piece: int, first_row: int, wanted: Wanted) -> RawRecords:
    faults = Faults(batch.num_rows)
    scalars: dict[str, RawColumn] = {}
    lists: dict[str, RawList] = {}
    for name in wanted.columns:
        column = batch.column(batch.schema.names.index(name))
        if not _is_list(column.type):
            scalars[name] = _text_column(column, path, name)
        elif name in wanted.scalars:
            raise SourceError(f"{path}: column {name!r} holds lists; read it as a multi-valued slot (separator) and as nothing else")
        else:
            offsets, values = _list_parts(column)
            text = _text_column(values, path, name)
            lists[name] = RawList(text.data, offsets, text.starts, text.ends)
    identity = [scalars[name] if name in scalars else _joined(lists[name]) for name in wanted.columns]

    def record(row: int) -> bytes:
        return json.dumps(batch.slice(row, 1).to_pylist()[0], default=str, ensure_ascii=False).encode()

    lines = np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)
    return RawRecords(piece, lines, scalars, lists, faults, record, tuple(identity), frozenset(wanted.columns))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _list_parts(column: pa.Array) -> tuple[I64, pa.Array]:
    """Offsets int64 [N+1] from 0 and the values; a null is an empty list."""
    lengths = pa.compute.fill_null(pa.compute.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = np.zeros(len(column) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets, pa.compute.list_flatten(column)


def _text_column(column: pa.Array, path: object, name: str) -> RawColumn:
    text = _as_text(column, path, name)
    offsets = np.frombuffer(text.buffers()[1], np.int64)[text.offset : text.offset + len(text) + 1]
    content = text.buffers()[2]
    data = np.frombuffer(content, np.uint8).copy() if content is not None else np.empty(0, np.uint8)
    starts = offsets[:-1].copy()
    if text.null_count:
        starts[np.asarray(text.is_null())] = -1
    return RawColumn(data, starts, offsets[1:].copy())


def _as_text(column: pa.Array, path: object, name: str) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kind = column.type
    if pa.types.is_null(kind):
        return pa.nulls(len(column), pa.large_string()).fill_null("")
    if pa.types.is_floating(kind):
        return _float_text(column)
    try:
        return column.cast(pa.large_string())
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise SourceError(f"{path}: column {name!r} of type {kind} cannot be read as text: {error}") from None


def _float_text(column: pa.Array) -> pa.Array:
    column = column.cast(pa.float64())
    text = column.cast(pa.large_string())
    values = column.to_numpy(zero_copy_only=False)
    with np.errstate(invalid="ignore"):
        whole = (values == np.floor(values)) & (np.abs(values) < 2.0**53)
    if not whole.any():
        return text
    integers = pa.array(np.where(whole, values, 0.0).astype(np.int64)).cast(pa.large_string())
    return pa.compute.if_else(pa.array(whole), integers, text)


def _joined(lists: RawList) -> RawColumn:
    """The bytes of each record's values as one span. The values of a Parquet column lie one after another."""
    ends = np.append(lists.ends, 0)
    starts = np.append(np.maximum(lists.starts, 0), 0)
    empty = lists.offsets[1:] == lists.offsets[:-1]
    first = np.where(empty, 0, starts[np.minimum(lists.offsets[:-1], len(starts) - 1)])
    last = np.where(empty, 0, ends[np.maximum(lists.offsets[1:] - 1, 0)])
    return RawColumn(lists.data, first, np.maximum(last, first))
