"""Parquet and CSV files as streams of batches that fit a schema; each mistake names its file."""

from __future__ import annotations

import csv
import glob
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_type, check_columns, conform
from dormouse.errors import InvalidData, one_line
from dormouse.model.schema import Schema
from dormouse.model.types import BYTES, STRING, TIMESTAMP
from dormouse.model.values import bytes_of_base64

BATCH_ROWS = 65_536
CSV_BLOCK_BYTES = 8 * 1024 * 1024
PARQUET, CSV = {".parquet", ".pq"}, {".csv"}
_GLOB = set("*?[")
_TEXTS = {TIMESTAMP, BYTES}
"""What is read as text first."""

_CSV_COLUMN = re.compile(r"In CSV column #(\d+)")


def find_files(paths: Any) -> list[Path]:
    """The files that paths, folders and patterns name, in order; `InvalidData` when one names none."""
    listed = [paths] if isinstance(paths, str | os.PathLike) else paths
    return [file for path in listed for file in _files_of(os.fspath(path))]


def _files_of(text: str) -> list[Path]:
    path = Path(text)
    if path.is_dir():
        found = sorted(p for p in path.iterdir() if _is_data(p))
        if not found:
            raise InvalidData(f"folder {text!r} has no .parquet or .csv files")
        return found
    if path.exists():
        if path.suffix.lower() not in PARQUET | CSV:
            raise InvalidData(f"file {text!r} is neither .parquet nor .csv")
        return [path]
    if not _GLOB & set(text):
        raise InvalidData(f"path {text!r} does not exist")
    found = sorted(p for p in map(Path, glob.glob(text, recursive=True)) if _is_data(p))  # noqa: PTH207
    if not found:
        raise InvalidData(f"pattern {text!r} matches no .parquet or .csv files")
    return found


def _is_data(path: Path) -> bool:
    """A data file; names that begin with a dot or an underscore are others' bookkeeping."""
    return path.is_file() and path.suffix.lower() in PARQUET | CSV and path.name[0] not in "._"


def count_rows(files: Sequence[Path], schema: Schema) -> int | None:
    """All rows, when the files say it; refuses files that cannot be read or have the wrong columns."""
    found = [_metadata(file, schema) for file in files]
    known = [metadata.num_rows for metadata in found if metadata is not None]
    return sum(known) if len(known) == len(found) else None


def row_group_bytes(file: Path, schema: Schema) -> list[int] | None:
    """The size of each row group, before compression; None for CSV. Refuses as `count_rows` does."""
    metadata = _metadata(file, schema)
    if metadata is None:
        return None
    return [metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups)]


def _metadata(file: Path, schema: Schema) -> pq.FileMetaData | None:
    """What the footer says, None for CSV; refuses a file that cannot be read or has the wrong columns."""
    with _naming(file):
        if file.suffix.lower() in CSV:
            _open_csv(file, schema).close()
            return None
        with pq.ParquetFile(file) as parquet:
            check_columns(parquet.schema_arrow, schema)
            return parquet.metadata


def read_file(
    file: Path, schema: Schema, row_groups: Sequence[int] | None = None
) -> Iterator[pa.RecordBatch]:
    """The rows of a file, or of some row groups of a Parquet file, streamed, as the schema has them."""
    batches = _csv_batches(file, schema) if file.suffix.lower() in CSV else _parquet(file, schema, row_groups)
    with _naming(file):
        yield from batches


def _parquet(file: Path, schema: Schema, row_groups: Sequence[int] | None) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(file, memory_map=True, page_checksum_verification=True) as parquet:
        check_columns(parquet.schema_arrow, schema)
        row = _first_row(parquet.metadata, row_groups)
        for batch in parquet.iter_batches(BATCH_ROWS, row_groups=row_groups, use_threads=False):
            yield conform(batch, schema, row)
            row += batch.num_rows


def _first_row(metadata: pq.FileMetaData, row_groups: Sequence[int] | None) -> int:
    """The row of the file that the first of some consecutive row groups begins with."""
    before = range(row_groups[0]) if row_groups else ()
    return sum(metadata.row_group(number).num_rows for number in before)


def _csv_batches(file: Path, schema: Schema) -> Iterator[pa.RecordBatch]:
    with _open_csv(file, schema) as reader:
        row = 0
        for batch in reader:
            if batch.num_rows:
                yield conform(_from_text(batch, schema), schema, row)
                row += batch.num_rows


def _open_csv(file: Path, schema: Schema) -> pacsv.CSVStreamingReader:
    nested = next((field for field in schema.fields if field.type.is_nested), None)
    if nested is not None:
        raise InvalidData(f"column {nested.name!r} is {nested.type}, which CSV cannot hold; use Parquet")
    types = {f.name: pa.string() if f.type in _TEXTS else arrow_type(f.type) for f in schema.fields}
    reader = pacsv.open_csv(
        file,
        # one thread: only then an error tells its row
        read_options=pacsv.ReadOptions(use_threads=False, block_size=CSV_BLOCK_BYTES),
        parse_options=pacsv.ParseOptions(newlines_in_values=True),
        convert_options=as_ingested(types),
    )
    missing = [name for name in schema.names if name not in reader.schema.names]
    if missing or len(reader.schema.names) != len(schema.names):
        check_columns(reader.schema, schema)
    return reader


def as_ingested(types: Mapping[str, pa.DataType] | None = None) -> pacsv.ConvertOptions:
    """What is null in CSV: nothing at all, but not two quotes."""
    return pacsv.ConvertOptions(
        column_types=types, null_values=[""], strings_can_be_null=True, quoted_strings_can_be_null=False
    )


def _from_text(batch: pa.RecordBatch, schema: Schema) -> pa.RecordBatch:
    """What CSV says only as text: times, bytes, and an empty text where a column has no nulls."""
    columns = {name: batch.column(name) for name in batch.schema.names}
    for field in schema.fields:
        if field.type == TIMESTAMP:
            columns[field.name] = _times(columns[field.name], field.name)
        elif field.type == BYTES:
            columns[field.name] = _bytes(columns[field.name], field.name)
        elif field.type == STRING and not field.nullable:
            columns[field.name] = pc.fill_null(columns[field.name], "")
    return pa.RecordBatch.from_pydict(columns)


def _times(column: pa.Array, name: str) -> pa.Array:
    """Times with a zone, or without one as UTC."""
    zoned = arrow_type(TIMESTAMP)
    try:
        return column.cast(zoned)
    except pa.ArrowInvalid:
        pass
    try:
        return pc.assume_timezone(column.cast(pa.timestamp("us")), "UTC")
    except pa.ArrowInvalid as error:
        raise InvalidData(f"column {name!r} does not fit timestamp: {one_line(error)}") from None


def _bytes(column: pa.Array, name: str) -> pa.Array:
    try:
        found = [None if text is None else bytes_of_base64(text) for text in column.to_pylist()]
    except ValueError:
        raise InvalidData(f"column {name!r} does not fit bytes: in CSV they are base64") from None
    return pa.array(found, pa.binary())


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Puts the file's name before what is wrong with it."""
    try:
        yield
    except InvalidData as error:
        raise InvalidData(f"file {str(file)!r}: {error}") from None
    except (pa.ArrowException, OSError) as error:
        why = _with_column_names(file, one_line(error))
        raise InvalidData(f"file {str(file)!r} cannot be read: {why}") from None


def _with_column_names(file: Path, text: str) -> str:
    """What Arrow says of a CSV file, which counts its columns from 0."""
    found = _CSV_COLUMN.search(text)
    if found is None:
        return text
    with file.open(encoding="utf-8-sig", errors="replace", newline="") as lines:
        names = next(csv.reader(lines), [])
    number = int(found[1])
    return text.replace(found[0], f"column {names[number]!r}", 1) if number < len(names) else text
