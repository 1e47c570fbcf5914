"""Whatever holds rows, as one stream of batches that fit a schema."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from dormouse.data.arrow_schema import arrow_field, check_columns, conform
from dormouse.errors import InvalidData
from dormouse.model.ahead import chained_ahead, mapped_ahead
from dormouse.model.portions import portions
from dormouse.model.schema import Schema
from dormouse.model.shape import Shape
from dormouse.model.types import LONG, Field
from dormouse.sources.data_files import Files, are_paths, find_files
from dormouse.sources.given_rows import INDEX, as_arrow
from dormouse.sources.sorted_files import sorted_keys
from dormouse.sources.source_files import (
    BATCH_ROWS,
    FilePart,
    count_rows,
    parts_of,
    prepared,
    read_file,
)

# Many files, or parts of them, as one stream: the next are read while the rows of the last are used.

F = TypeVar("F")
T = TypeVar("T")
THREADS = 2
BATCHES_EARLY = 2
"""That wait of each file, or part, that is read."""
FILES_TOGETHER = 16
_BYTES_TOGETHER = 1 << 20
_ROWS_TOGETHER = 16_384
"""Few batches cost less than many."""
_WIDE_ROWS_BYTES = 64 << 20
"""Of which fewer rows are together: texts of more than 2 GiB are not in one piece."""


def each_file(function: Callable[[F], T], files: Sequence[F]) -> Iterator[T]:
    """What a function tells of each file, in order; of many files several at once."""

    def told(some: Sequence[F]) -> list[T]:
        return list(map(function, some))

    if len(files) <= FILES_TOGETHER:
        yield from told(files)
        return
    parts = (files[start : start + FILES_TOGETHER] for start in range(0, len(files), FILES_TOGETHER))
    with closing(mapped_ahead(told, parts, THREADS)) as made:
        yield from chain.from_iterable(made)


def read_files(
    files: Iterable[F], read: Callable[[F], Iterator[pa.RecordBatch]], size_of: Callable[[F], int]
) -> Generator[pa.RecordBatch, None, None]:
    """The rows of all files, or parts, in the order of these; `size_of` tells bytes.

    What is wrong with a file is raised when its turn comes, whatever is read at once.
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
    """Conformed batches, of bounded size, and how many rows they have in all, if that is known."""

    batches: Iterator[pa.RecordBatch]
    rows_total: int | None
    sorted_keys: Callable[[], Iterator[pa.RecordBatch] | None] = lambda: None
    """Gives the keys alone, in the order of the rows, where these seem to be sorted; else None."""


def open_source(data: Any, schema: Schema) -> Source:
    """Rows of what `as_arrow` takes, of an iterable of batches, or of files given by path or `Files`.

    Files are checked before the first row is read. `InvalidData` in one line when the data does not fit.
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
    """The rows with running numbers in a column that the files have not."""
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
    """A schema of the other columns; its keys are only to be read, so that any may be one."""
    others = [field for field in schema.fields if field.name != name]
    if not others:
        raise InvalidData(f"there is no column beside {name!r}")
    keys = [field for field in schema.key_fields if field.name != name]
    named = zip(schema.names, schema.shape.columns, strict=True)
    shape = replace(schema.shape, columns=tuple(column for other, column in named if other != name))
    if not keys:
        return _Unkeyed(others, shape)
    return Schema(keys, [], [field for field in others if field not in keys], shape=shape)


class _Unkeyed(Schema):
    """Columns without a key, of a table whose key the data has not."""

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
    """Conformed piece by piece, so that what a cast makes is never held whole."""
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
