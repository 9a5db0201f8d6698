"""Source files: finding them, naming their columns, cutting them into chunks, reading a chunk.

A chunk is a run of whole records: a byte range of a csv, tsv or jsonl file, a row group of a Parquet file, or all of a gz file,
which cannot be entered in the middle. gz files are read piece by piece, so memory stays bounded.
A new format is one entry of ``_Naming.of``, ``plan_chunks`` and ``read_chunk``.
"""

from __future__ import annotations

import difflib
import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from training.config import DataConfig
from training.data import jsonl, parquet
from training.data.delimited import parse_delimited, split_header
from training.data.lines import LINES, Dialect, Piece, cut_pieces
from training.data.manifest import SourceEntry
from training.data.raw import RawRecords, Wanted
from training.errors import SourceError

_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")
_DIGEST_BLOCK = 1 << 22
_ENTIRE = -1


@dataclass(frozen=True)
class SourceFile:
    """One input file and what its head told about it."""

    index: int
    path: str
    bytes: int
    packed: bool
    """Whether it is compressed with gzip."""
    columns: tuple[str, ...]
    """Names of its fields in order (csv, tsv, parquet); empty for jsonl."""
    offset: int
    """Bytes (unpacked) before the first record: byte order mark and header."""
    first_line: int
    """Line number of the first byte after ``offset``."""
    header: bool
    """Whether its first record is a header."""


@dataclass(frozen=True)
class Chunk:
    """A part of a source file that is read at once."""

    file: SourceFile
    index: int
    start: int
    """First byte; Parquet: number of the row group."""
    stop: int
    """Byte after the last; -1: to the end of the file."""
    first_line: int

    @property
    def input_bytes(self) -> int:
        """Bytes of the file it stands for, for progress; 0 for all but the first row group of a Parquet file."""
        if self.stop == _ENTIRE:
            return self.file.bytes if self.index == 0 else 0
        return self.stop - self.start


def find_files(patterns: Sequence[str]) -> list[Path]:
    """Files of all patterns, each once: patterns in their order, matches of one in alphabetical order. Raises ``SourceError``."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        if "://" in pattern:
            raise SourceError(f"data.paths: {pattern}: only files of a mounted file system can be read; mount the bucket or copy the files")
        matches = [Path(match) for match in sorted(glob.glob(pattern, recursive=True))]  # noqa: PTH207 - patterns may be absolute
        if not matches and Path(pattern).exists():
            matches = [Path(pattern)]
        files = [match for match in matches if match.is_file()]
        if not files:
            what = "only a directory matches; append /* to read its files" if matches else "no file matches"
            raise SourceError(f"data.paths: {pattern}: {what}; relative patterns start at the folder of the configuration file")
        found.update(dict.fromkeys(files))
    return list(found)


def digest_files(files: Sequence[Path]) -> list[SourceEntry]:
    """Size and xxh3-128 of every file; raises ``SourceError`` for unreadable ones."""
    entries = []
    for path in files:
        digest, size = xxhash.xxh3_128(), 0
        try:
            with path.open("rb") as file:
                while block := file.read(_DIGEST_BLOCK):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None
        entries.append(SourceEntry(path=str(path), bytes=size, digest=digest.hexdigest()))
    return entries


def open_sources(files: Sequence[Path], data: DataConfig, wanted: Wanted) -> list[SourceFile]:
    """Read the head of every file and check its columns. Files without a record are left out.

    Raises ``SourceError`` if wanted columns are missing, or no file has a record.
    """
    opened: list[SourceFile] = []
    naming = _Naming(data, wanted)
    for path in files:
        head = _Head.read(path, data)
        if head.empty:
            continue
        columns, skip = naming.of(path, head)
        _check_columns(path, columns, wanted, data)
        if skip and not head.more_than_header:
            continue
        offset = head.bom + (head.header_bytes if skip else 0)
        first_line = 1 + (head.header_lines if skip else 0)
        size = path.stat().st_size
        opened.append(SourceFile(len(opened), str(path), size, head.packed, columns, offset, first_line, header=skip))
    if not opened:
        listed = ", ".join(str(path) for path in files[:3]) + (", ..." if len(files) > 3 else "")
        raise SourceError(f"data.paths: no records in {len(files)} file(s): {listed}")
    return opened


def plan_chunks(file: SourceFile, data: DataConfig) -> Iterator[Chunk]:
    """Cut a file into chunks, in order. Text files are read through once, for their record boundaries and line numbers."""
    if data.format == "parquet":
        for group, first_row in parquet.row_groups(file.path):
            yield Chunk(file, group, group, _ENTIRE, first_row)
    elif file.packed:
        yield Chunk(file, 0, 0, _ENTIRE, file.first_line)
    else:
        with Path(file.path).open("rb") as stream:
            for index, piece in enumerate(_pieces(stream, file, data)):
                yield Chunk(file, index, piece.offset, piece.offset + len(piece.data), piece.first_line)


def read_chunk(chunk: Chunk, data: DataConfig, wanted: Wanted) -> Iterator[RawRecords]:
    """Parse a chunk, one piece after another. Raises ``SourceError`` if the file is damaged."""
    file = chunk.file
    if data.format == "parquet":
        yield from parquet.read_row_group(file.path, chunk.start, first_row=chunk.first_line, wanted=wanted)
        return
    if not file.packed:
        with Path(file.path).open("rb") as stream:
            stream.seek(chunk.start)
            content = np.frombuffer(bytearray(stream.read(chunk.stop - chunk.start)), np.uint8)
        yield _parse(Piece(chunk.start, chunk.first_line, content), 0, file, data, wanted)
        return
    try:
        with gzip.open(file.path, "rb") as stream:
            for number, piece in enumerate(_pieces(stream, file, data)):
                yield _parse(piece, number, file, data, wanted)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise SourceError(f"{file.path}: damaged gzip file: {error}; copy it again") from None


def _parse(piece: Piece, number: int, file: SourceFile, data: DataConfig, wanted: Wanted) -> RawRecords:
    content = piece.data
    if data.encoding != "utf-8":
        content = np.frombuffer(bytearray(content.tobytes().decode(data.encoding).encode()), np.uint8)
    if data.format == "jsonl":
        return jsonl.parse_jsonl(content, piece=number, first_line=piece.first_line, wanted=wanted)
    dialect = Dialect.of(_delimiter(data), quoting=data.quoting, strip=data.strip_whitespace)
    return parse_delimited(content, piece=number, first_line=piece.first_line, names=file.columns, dialect=dialect, wanted=wanted)


def _delimiter(data: DataConfig) -> str:
    return "\t" if data.format == "tsv" else data.delimiter or ","


def _file_dialect(data: DataConfig) -> Dialect:
    """The dialect of a file's bytes in its own encoding."""
    if data.format == "jsonl":
        return LINES
    return Dialect.of(_delimiter(data), quoting=data.quoting, strip=data.strip_whitespace, encoding=data.encoding)


def _pieces(stream: BinaryIO | gzip.GzipFile, file: SourceFile, data: DataConfig) -> Iterator[Piece]:
    left = file.offset
    while left:
        left -= len(stream.read(min(left, _DIGEST_BLOCK)))
    return cut_pieces(
        stream.read, _file_dialect(data), piece_bytes=data.chunk_bytes, name=file.path, offset=file.offset, first_line=file.first_line
    )


@dataclass(frozen=True)
class _Head:
    """The first record of a file."""

    packed: bool
    bom: int
    first: bytes
    """First record without its line end (text formats)."""
    header_bytes: int
    header_lines: int
    empty: bool
    more_than_header: bool

    @classmethod
    def read(cls, path: Path, data: DataConfig) -> _Head:
        try:
            packed = _is_packed(path)
            if data.format == "parquet":
                return cls(
                    packed=False, bom=0, first=b"", header_bytes=0, header_lines=0, empty=parquet.num_rows(path) == 0, more_than_header=True
                )
            with gzip.open(path, "rb") if packed else path.open("rb") as stream:
                return cls._of_text(stream, path, data, packed=packed)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise SourceError(f"{path}: damaged gzip file: {error}; copy it again") from None
        except OSError as error:
            raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from None

    @classmethod
    def _of_text(cls, stream: BinaryIO | gzip.GzipFile, path: Path, data: DataConfig, *, packed: bool) -> _Head:
        start = stream.read(4)
        bom = 3 if data.encoding == "utf-8" and start.startswith(_UTF8_BOM) else 0
        if start[:2] in _UTF16_BOMS and b"\0" in start:
            raise SourceError(f"{path}: is UTF-16; convert it to UTF-8, for example with `iconv -f UTF-16 -t UTF-8`")
        stream.seek(bom)
        # Pieces of at least one byte: the first is the first record, the second shows whether there is another.
        pieces = cut_pieces(stream.read, _file_dialect(data), piece_bytes=1, name=str(path))
        size, lines, first, more = 0, 0, b"", False
        for piece in pieces:
            if first:
                more = True
                break
            size += len(piece.data)
            first = piece.data.tobytes().rstrip(b"\r\n")
            lines = piece.first_line
        return cls(packed, bom, first, size, _last_line(lines, first), empty=not first, more_than_header=more)


def _last_line(first_line: int, record: bytes) -> int:
    """Line on which a record that begins on ``first_line`` ends."""
    return first_line + len(record.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")) - 1


def _is_packed(path: Path) -> bool:
    """Whether the content is gzip: the suffix says so, and the content must agree."""
    if path.suffix != ".gz":
        return False
    with path.open("rb") as file:
        magic = file.read(2)
    if magic not in (b"\x1f\x8b", b""):
        raise SourceError(f"{path}: is called .gz but is not a gzip file; rename or compress it")
    return magic != b""


class _Naming:
    """Names the columns of one file after the other, and says whether a file's first record is a header to skip.

    A file whose first record holds no wanted name but as many fields as the files before it goes on where they ended. With both a
    header and declared columns, the declared names take the place of the header's. Without ``header``, a first record equal to the
    declared columns is a header all the same.
    """

    def __init__(self, data: DataConfig, wanted: Wanted) -> None:
        self._data, self._wanted = data, wanted
        self._names: tuple[str, ...] = tuple(data.columns)
        self._header: tuple[str, ...] = () if data.header else self._names

    def of(self, path: Path, head: _Head) -> tuple[tuple[str, ...], bool]:
        """(columns, whether to skip the first record); raises ``SourceError``."""
        data = self._data
        if data.format == "parquet":
            return parquet.column_names(path), False
        if data.format == "jsonl":
            return (), False
        first = split_header(head.first, _file_dialect(data), data.encoding)
        if not data.header or (data.columns and self._header):
            return self._names, first == self._header
        if data.columns and len(first) != len(data.columns):
            raise SourceError(f"{path}: the header has {len(first)} fields, data.columns {len(data.columns)} names; make them match")
        if self._names and not data.columns and self._continues(first):
            return self._names, False
        if twice := sorted({name for name in first if first.count(name) > 1} & set(self._wanted.columns)):
            raise SourceError(f"{path}: column {twice[0]!r} occurs twice in the header; rename one of them")
        self._header = self._header or first
        self._names = self._names or first
        return (self._names if data.columns else first), True

    def _continues(self, first: tuple[str, ...]) -> bool:
        return not set(first) & set(self._wanted.columns) and len(first) in (len(self._names), len(self._names) - 1)


def _check_columns(path: Path, columns: tuple[str, ...], wanted: Wanted, data: DataConfig) -> None:
    if data.format == "jsonl":
        return
    if lacking := [name for name in wanted.columns if name not in columns]:
        hint = "" if data.header or data.format == "parquet" else " (data.columns)"
        names = ", ".join(map(repr, lacking))
        raise SourceError(f"{path}: no column {names}{_advice(lacking, columns)}; columns present{hint}: {_listed(columns)}")


def _advice(lacking: list[str], columns: tuple[str, ...]) -> str:
    """What most likely is the matter: another format, another separator, a slip of the pen."""
    if any(not name.replace("\t", "").isprintable() for name in columns):
        return " (the file does not look like text: is data.format right?)"
    marks = {"\t": "data.format: tsv", ";": "data.delimiter: ';'", ",": "data.delimiter: ','", "|": "data.delimiter: '|'"}
    for mark, setting in marks.items():
        if len(columns) == 1 and mark in columns[0]:
            return f" (the header looks separated by {mark!r}: set {setting})"
    near = difflib.get_close_matches(lacking[0], columns, n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _listed(columns: tuple[str, ...], limit: int = 400) -> str:
    text = ", ".join(map(repr, columns))
    return text if len(text) <= limit else f"{text[:limit]}... ({len(columns)} in all)"
