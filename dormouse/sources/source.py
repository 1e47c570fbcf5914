"""The reading of any kind of given data as one stream of batches that fit a schema."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from dormouse.data.arrow_schema import arrow_field, check_columns, conform
from dormouse.errors import InvalidData, ObjectStoreError
from dormouse.model.loops import chained_ahead, mapped_ahead, portions
from dormouse.model.schema import Schema, Shape
from dormouse.model.types import LONG, Field
from dormouse.sources.data_files import Files, find_files
from dormouse.sources.given_rows import INDEX, are_paths, as_arrow, is_of
from dormouse.sources.source_files import (
    BATCH_ROWS,
    FilePart,
    count_rows,
    parts_of,
    prepared,
    read_file,
    sorted_keys,
)

# A digest of the data of a load detects that an ingest id is reused with other data.

DIGEST_BYTES = 16
NO_ROWS = hashlib.blake2b(b"no rows", digest_size=DIGEST_BYTES).digest()
"""The digest of data without rows, of any kind."""
STREAM = hashlib.blake2b(b"stream", digest_size=DIGEST_BYTES).digest()
"""A stand-in for the digest of a stream, which can be read only once. It is not recorded.

A repeated load of a stream counts as the same data, unless the recorded load had no rows.
"""
PIECE_BYTES, PIECES_MAX = 64 * 1024, 64
"""The bytes of a piece, and the most pieces of a file that its digest covers.

The digest covers files of up to 4 MiB whole, and evenly spread pieces of larger files.
"""
PIECES_MIN, PIECES_IN_ALL = 2, 16_384
ROWS_AT_ONCE = 65_536
TABLE_BYTES_MAX = 64 * 2**20
"""The largest size of a table that its digest covers whole.

The digest of a larger table covers the number of rows, the columns, and the first and last rows.
"""


class Hash(Protocol):
    """A hash object, such as those of hashlib."""

    def update(self, data: Any, /) -> None: ...


class GivenData:
    """The data of one load. It is located, downloaded or converted once, for its digest or for reading."""

    def __init__(self, data: Any, deletes: str | None = None) -> None:
        self.data = data
        self._deletes = deletes

    def digest(self) -> bytes | None:  # noqa: PLR0911 one a kind
        """Returns 16 bytes, `STREAM` for a stream of rows, or None for files that cannot be found or read.

        Replaces `data` by data that can still be loaded, because digesting a stream takes its first batch.
        Raises `InvalidData` for rows that Arrow cannot hold.
        """
        found = hashlib.blake2b(repr(self._deletes).encode(), digest_size=DIGEST_BYTES)
        if are_paths(self.data):
            try:
                files = find_files(self.data)
                add_files(found, [(file.path, file.folders) for file in files])
            except (InvalidData, ObjectStoreError, OSError):
                return None
            given = self.data if isinstance(self.data, Files) else Files(self.data)
            self.data = replace(given, found=files)
            return found.digest()
        rows, is_frame = as_arrow(self.data), is_of(self.data, "polars")
        if isinstance(rows, pa.RecordBatchReader) and is_frame:
            rows = rows.read_all()
        if isinstance(rows, pa.RecordBatchReader):
            self.data, has_rows = _peeked(rows)
            self.data = pa.RecordBatchReader.from_batches(rows.schema, self.data)
            return STREAM if has_rows else NO_ROWS
        if rows is None:
            if not isinstance(self.data, Iterable) or isinstance(self.data, bytes):
                return None
            self.data, has_rows = _peeked(self.data)
            return STREAM if has_rows else NO_ROWS
        self.data = rows
        if not rows.num_rows:
            return NO_ROWS
        _add_table(found, rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows]))
        return found.digest()


def is_same(given: bytes | None, recorded: bytes) -> bool:
    """Returns whether data with the digest `given` can be the data with the digest `recorded`.

    None and `STREAM` are unknown digests; `STREAM` is known to have rows.
    """
    return given in (None, recorded) or (given == STREAM and recorded != NO_ROWS)


def _peeked(batches: Iterable[Any]) -> tuple[Iterator[Any], bool]:
    """Returns the batches and whether any has rows. Reads ahead up to the first batch with rows."""
    others = iter(batches)
    empty: list[Any] = []
    for batch in others:
        if getattr(batch, "num_rows", 1):
            return chain(empty, [batch], others), True
        empty.append(batch)
    return iter(empty), False


def add_files(digest: Hash, files: Sequence[tuple[Path, object]]) -> None:
    """Adds the size and content of each file, and the object paired with it, to the digest.

    Of large files, adds only pieces. Raises `OSError`.
    """
    pieces = max(PIECES_MIN, min(PIECES_MAX, PIECES_IN_ALL // max(1, len(files))))
    for path, known in files:
        size = path.stat().st_size
        digest.update(repr((size, known)).encode())
        with path.open("rb") as source:
            for start in _starts(size, pieces):
                source.seek(start)
                digest.update(source.read(PIECE_BYTES))


def _starts(size: int, pieces: int) -> Iterator[int]:
    """Yields the offsets of the pieces of a file. The first is 0, and the last piece ends with the file."""
    if size <= pieces * PIECE_BYTES:
        yield from range(0, size, PIECE_BYTES)
        return
    for number in range(pieces):
        yield number * (size - PIECE_BYTES) // (pieces - 1)


def _add_table(digest: Hash, table: pa.Table) -> None:
    """Adds the columns of a table to a digest, in the order of their names."""
    if table.nbytes > TABLE_BYTES_MAX and table.num_rows > 2 * ROWS_AT_ONCE:
        digest.update(repr(table.num_rows).encode())
        last = table.slice(table.num_rows - ROWS_AT_ONCE)
        table = pa.concat_tables([table.slice(0, ROWS_AT_ONCE), last])
    names = table.column_names
    for number in sorted(range(len(names)), key=names.__getitem__):
        name, column = names[number], table.column(number)
        digest.update(repr((name, str(column.type), len(column))).encode())
        for start in range(0, len(column), ROWS_AT_ONCE):
            piece = column.slice(start, ROWS_AT_ONCE)
            _add_values(digest, pa.concat_arrays(piece.chunks))


def _add_values(digest: Hash, values: pa.Array) -> None:
    """Adds the validity of each value, and the valid values. The bytes behind a null are undefined."""
    digest.update(np.packbits(values.is_valid().to_numpy(zero_copy_only=False)))
    kind, there = values.type, values.drop_null()
    if kinds.is_dictionary(kind):
        _add_values(digest, there.dictionary_decode())
    elif kinds.is_struct(kind):
        for part in there.flatten():
            _add_values(digest, part)
    elif kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind):
        ends = there.offsets.to_numpy()
        digest.update(np.diff(ends))
        for part in [there.keys, there.items] if kinds.is_map(kind) else [there.values]:
            _add_values(digest, part.slice(ends[0], ends[-1] - ends[0]))
    else:
        if kinds.is_string_view(kind) or kinds.is_binary_view(kind):
            there = there.cast(pa.large_binary())
        digest.update(pa.record_batch([there], ["values"]).serialize())


# Many files, or parts of them, are read as one stream. The next ones are read while the caller uses rows.

F = TypeVar("F")
T = TypeVar("T")
THREADS = 2
BATCHES_EARLY = 2
"""The number of batches that are read ahead from each file or part."""
FILES_TOGETHER = 16
_BYTES_TOGETHER = 1 << 20
_ROWS_TOGETHER = 16_384
"""The number of rows up to which small batches are joined, since many batches cost more than few."""
_WIDE_ROWS_BYTES = 64 << 20
"""The size up to which batches of wide rows are joined: Arrow limits the texts of a column to 2 GiB."""


def each_file(function: Callable[[F], T], files: Sequence[F]) -> Iterator[T]:
    """Yields the result of a function for each file, in order. Runs in threads if there are many files."""

    def results(some: Sequence[F]) -> list[T]:
        return list(map(function, some))

    if len(files) <= FILES_TOGETHER:
        yield from results(files)
        return
    parts = (files[start : start + FILES_TOGETHER] for start in range(0, len(files), FILES_TOGETHER))
    with closing(mapped_ahead(results, parts, THREADS)) as made:
        yield from chain.from_iterable(made)


def read_files(
    files: Iterable[F], read: Callable[[F], Iterator[pa.RecordBatch]], size_of: Callable[[F], int]
) -> Generator[pa.RecordBatch, None, None]:
    """Yields the rows of all files or parts, in their order.

    `read` reads one file, and `size_of` returns its size in bytes. Files are read ahead, but the error of a
    file is raised only after the rows of the files before it.
    """
    least = _BYTES_TOGETHER // FILES_TOGETHER
    small_ones_together = portions(files, lambda file: max(size_of(file), least), _BYTES_TOGETHER)
    streams = (_joined(chain.from_iterable(map(read, some))) for some in small_ones_together)
    with closing(chained_ahead(streams, THREADS, BATCHES_EARLY)) as batches:
        yield from batches


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    def share(batch: pa.RecordBatch) -> float:
        return float(max(batch.num_rows / _ROWS_TOGETHER, batch.nbytes / _WIDE_ROWS_BYTES))

    for some in portions(batches, share, 1):
        yield some[0] if len(some) == 1 else pa.concat_batches(some)


@dataclass(frozen=True)
class Source:
    """A stream of batches of limited size that fit the schema, and its number of rows, or None if unknown."""

    batches: Iterator[pa.RecordBatch]
    rows_total: int | None
    sorted_keys: Callable[[], Iterator[pa.RecordBatch] | None] = lambda: None
    """A function that returns batches of the keys alone, or None if the rows seem not to be sorted."""


def open_source(data: Any, schema: Schema) -> Source:
    """Returns the rows of data that `as_arrow` takes, of an iterable of batches, or of files.

    Files are checked before the first row is read. Raises `InvalidData` if the data does not fit the schema.
    """
    if are_paths(data):
        return _of_files(data, schema)
    found = as_arrow(data, {name: schema.default(name) for name in schema.names})
    if isinstance(found, pa.RecordBatchReader):
        names = [name for name in found.schema.names if not name.startswith(INDEX) or name in schema]
        check_columns(pa.schema([found.schema.field(name) for name in names]), schema)
        return Source(_from_batches((batch.select(names) for batch in found), schema), None)
    if found is not None:
        check_columns(found.schema, schema)
        return Source(_pieces(found, schema), found.num_rows)
    if isinstance(data, Iterable) and not isinstance(data, str | bytes):
        return Source(_from_batches(data, schema), None)
    raise _unknown(data)


def _of_files(data: Any, schema: Schema) -> Source:
    if isinstance(data, Files) and data.row_number is not None:
        return _numbered(data, data.row_number, schema)
    files = list(each_file(lambda file: prepared(file, schema), find_files(data)))

    def read(part: FilePart) -> Iterator[pa.RecordBatch]:
        return read_file(part.file, schema, part.row_groups)

    batches = read_files(parts_of(files), read, attrgetter("bytes"))
    return Source(batches, count_rows(files), partial(sorted_keys, files, schema))


def _numbered(data: Files, name: str, schema: Schema) -> Source:
    """Returns the rows of files with consecutive numbers in an additional column."""
    if name not in schema or schema.field(name).type != LONG:
        raise InvalidData(f"column {name!r}, for running numbers, must be LONG in the schema")
    inner = _of_files(Files(**{**vars(data), "row_number": None}), without(schema, name))
    kind = arrow_field(schema.field(name))

    def batches() -> Iterator[pa.RecordBatch]:
        first = data.first_row_number
        for batch in inner.batches:
            numbers = pa.array(np.arange(first, first + batch.num_rows, dtype=np.int64))
            yield conform(batch.append_column(kind, numbers), schema, first - data.first_row_number)
            first += batch.num_rows

    return Source(batches(), inner.rows_total)


def without(schema: Schema, name: str) -> Schema:
    """Returns the schema without one column, to read files that lack it. The result may have no key.

    Raises `InvalidData` if there is no other column.
    """
    others = [field for field in schema.fields if field.name != name]
    if not others:
        raise InvalidData(f"there is no column besides {name!r}")
    keys = [field for field in schema.key_fields if field.name != name]
    named = zip(schema.names, schema.shape.columns, strict=True)
    shape = replace(schema.shape, columns=tuple(column for other, column in named if other != name))
    if not keys:
        return _Unkeyed(others, shape)
    return Schema(keys, [], [field for field in others if field not in keys], shape=shape)


def unkeyed(fields: Sequence[Field]) -> Schema:
    """Returns the schema of rows that are no rows of a table, and so need no key."""
    return _Unkeyed(fields, Shape.first(fields))


class _Unkeyed(Schema):
    """A schema without keys, for data that lacks the table's key."""

    def __init__(self, fields: Iterable[Field], shape: Shape) -> None:
        parts = {"row_keys": (), "sort_keys": (), "values": tuple(fields), "shape": shape}
        for part, value in parts.items():
            object.__setattr__(self, part, value)


def _from_batches(batches: Iterable[Any], schema: Schema) -> Iterator[pa.RecordBatch]:
    first_row = 0
    for batch in batches:
        if not isinstance(batch, pa.Table | pa.RecordBatch):
            raise _unknown(batch)
        yield from _pieces(batch, schema, first_row)
        first_row += batch.num_rows


def _pieces(data: pa.Table | pa.RecordBatch, schema: Schema, first_row: int = 0) -> Iterator[pa.RecordBatch]:
    """Yields batches that fit the schema. Converts piece by piece, so that memory stays limited."""
    for start in range(0, data.num_rows, BATCH_ROWS):
        piece = (
            pa.table(data.slice(start, BATCH_ROWS))
            if isinstance(data, pa.RecordBatch)
            else data.slice(start, BATCH_ROWS)
        )
        yield from conform(piece, schema, first_row + start).to_batches()
    if not data.num_rows:
        conform(data, schema)


def _unknown(data: Any) -> InvalidData:
    return InvalidData(
        f"cannot ingest {type(data).__name__}; give a pyarrow Table, RecordBatch or RecordBatchReader, "
        "a DataFrame of pandas or Polars, a dict of columns, a list of dicts, an iterable of batches, or the "
        "paths of Parquet, CSV or JSON files"
    )
