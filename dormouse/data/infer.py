"""A table's schema from the columns of a Parquet or CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import data_type
from dormouse.data.source_files import CSV, as_ingested
from dormouse.errors import InvalidData, InvalidSchema, one_line
from dormouse.model.schema import Field, Schema

CSV_BYTES = 64 * 1024 * 1024
"""Of a CSV file, which types are told by."""


def schema_like(file: Path | str, row_keys: Sequence[str], sort_keys: Sequence[str] = ()) -> Schema:
    """The file's columns with these keys; the others are values, nullable as the file says.

    Of a CSV file types are those that all values of its first `CSV_BYTES` have, and values are nullable.
    Raises `InvalidData` when it is neither a Parquet nor a CSV file, `InvalidSchema` when a column has no
    type of ours.
    """
    file = Path(file)
    columns = _csv_columns(file) if file.suffix.lower() in CSV else _columns(file)
    keys = [name.partition(":")[0] for name in (*row_keys, *sort_keys)]
    missing = [name for name in keys if name not in columns.names]
    if missing:
        raise InvalidSchema(
            f"{file} has no column {missing[0]!r}; its columns are {', '.join(columns.names)}"
        )
    values = [_field(columns.field(name), key=False) for name in columns.names if name not in keys]
    split = len(row_keys)
    fields = [_field(columns.field(name), key=True) for name in keys]
    return Schema(fields[:split], fields[split:], values)


def _columns(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except OSError as error:
        raise InvalidData(f"cannot read {file}: {error.strerror or error}") from None
    except pa.ArrowInvalid:
        raise InvalidData(f"{file} is not a Parquet file, or is damaged") from None


def _csv_columns(file: Path) -> pa.Schema:
    options = pacsv.ReadOptions(use_threads=False, block_size=CSV_BYTES)
    try:
        with pacsv.open_csv(
            file, options, pacsv.ParseOptions(newlines_in_values=True), as_ingested()
        ) as reader:
            found = reader.schema
    except (pa.ArrowInvalid, OSError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise InvalidData(f"cannot read {file} as CSV: {why}") from None
    doubled = next((name for name in found.names if found.names.count(name) > 1), None)
    if doubled is not None:
        raise InvalidData(f"{file} has two columns {doubled!r}")
    return pa.schema([(column.name, _of_text(column.type)) for column in found])


def _of_text(found: pa.DataType) -> pa.DataType:
    """What a column is read as whose values look like this."""
    if pa.types.is_timestamp(found):
        return pa.timestamp("us", "UTC")
    # times of a day, and what has no values
    return pa.string() if pa.types.is_time(found) or pa.types.is_null(found) else found


def _field(column: pa.Field, *, key: bool) -> Field:
    found = data_type(column.type)
    if found is None:
        raise InvalidSchema(f"column {column.name!r} is {column.type}, which no table has: convert it")
    return Field(column.name, found, nullable=column.nullable and not key)
