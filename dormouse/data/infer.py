"""A table's schema from the columns of a Parquet file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.errors import InvalidData, InvalidSchema
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, MAP, STRING, TIMESTAMP, DataType

_INT_BITS_MAX = 32


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


def data_type(found: pa.DataType) -> DataType | None:
    """The type that holds every value of an Arrow type; None when there is none."""
    is_ = pa.types
    if is_.is_dictionary(found) or is_.is_run_end_encoded(found):
        return data_type(found.value_type)
    if is_.is_map(found):
        key, value = data_type(found.key_type), data_type(found.item_type)
        return MAP(key, value) if key and value else None
    if is_.is_list(found) or is_.is_large_list(found) or is_.is_fixed_size_list(found):
        element = data_type(found.value_type)
        return LIST(element) if element else None
    if is_.is_integer(found):
        width = found.bit_width + is_.is_unsigned_integer(found)  # an unsigned one needs a bit more
        return INT if width <= _INT_BITS_MAX else LONG
    plain = {
        STRING: (is_.is_string, is_.is_large_string, is_.is_string_view),
        BYTES: (is_.is_binary, is_.is_large_binary, is_.is_fixed_size_binary, is_.is_binary_view),
        DOUBLE: (is_.is_floating,),
        BOOLEAN: (is_.is_boolean,),
        TIMESTAMP: (is_.is_timestamp,),
    }
    return next((kind for kind, tests in plain.items() if any(test(found) for test in tests)), None)
