"""Whatever holds rows, as one stream of batches that fit a schema."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import check_columns, conform
from dormouse.data.source_files import BATCH_ROWS, count_rows, find_files, read_file
from dormouse.errors import InvalidData
from dormouse.model.schema import Schema


@dataclass(frozen=True)
class Source:
    """Conformed batches, of bounded size, and how many rows they have in all, if that is known."""

    batches: Iterator[pa.RecordBatch]
    rows_total: int | None


def are_paths(data: Any) -> bool:
    """Whether the data is given as the path, or paths, of files."""
    if isinstance(data, list | tuple):
        return bool(data) and all(isinstance(item, str | os.PathLike) for item in data)
    return isinstance(data, str | os.PathLike)


def open_source(data: Any, schema: Schema) -> Source:
    """Rows of a pyarrow Table, RecordBatch, reader or iterable of batches, or of files given by path.

    Files are checked before the first row is read. `InvalidData` in one line when the data does not fit.
    """
    if are_paths(data):
        files = find_files(data)
        rows = count_rows(files, schema)
        return Source((batch for file in files for batch in read_file(file, schema)), rows)
    if isinstance(data, pa.Table | pa.RecordBatch):
        check_columns(data.schema, schema)
        return Source(_pieces(data, schema), data.num_rows)
    if hasattr(data, "__arrow_c_stream__"):
        reader = pa.RecordBatchReader.from_stream(data)
        check_columns(reader.schema, schema)
        return Source(_from_batches(reader, schema), None)
    if isinstance(data, Iterable) and not isinstance(data, bytes | dict):
        return Source(_from_batches(data, schema), None)
    raise _unknown(data)


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
        "an iterable of them, or the path of Parquet or CSV files"
    )
