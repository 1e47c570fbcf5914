"""A table's schema from the columns of a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import data_type
from dormouse.errors import InvalidData, InvalidSchema
from dormouse.model.schema import Field, Schema


def schema_like(file: Path, row_keys: Sequence[str], sort_keys: Sequence[str]) -> Schema:
    """The file's columns with these keys; the others are values, nullable as the file says.

    Raises `InvalidData` when it is not a Parquet file, `InvalidSchema` when a column has no type of ours.
    """
    columns = _columns(file)
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


def _field(column: pa.Field, *, key: bool) -> Field:
    found = data_type(column.type)
    if found is None:
        raise InvalidSchema(f"column {column.name!r} is {column.type}, which no table has: convert it")
    return Field(column.name, found, nullable=column.nullable and not key)
