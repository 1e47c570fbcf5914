"""Files as they were written: which columns they have, and what these were called."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa

from dormouse.data.arrow_schema import check_columns
from dormouse.model.schema import Column, Schema
from dormouse.objects.names import schema_version_of

FIELD_ID = "PARQUET:field_id"
"""Arrow's name, in the metadata of a field, for Parquet's `field_id`."""


def written_schema(schema: Schema, filename: str) -> Schema:
    """Those of the columns that a file has, by what they were when it was written."""
    return schema.as_written(schema_version_of(filename))


def check_stored(found: pa.Schema, schema: Schema, filename: str) -> None:
    """`InvalidData` when a file has not the columns that it was written with, of those that still are."""
    written = written_schema(schema, filename)
    if written is not schema:
        # what was dropped since is in it, too
        found = pa.schema([field for field in found if field.name in written])
    check_columns(found, written, has_all=True)


def with_ids(fields: Iterable[pa.Field], schema: Schema) -> pa.Schema:
    """Arrow's fields of the schema's columns, with their ids."""
    numbered = zip(fields, schema.shape.columns, strict=True)
    return pa.schema([field.with_metadata(metadata_of(field.type, one)) for field, one in numbered])


def metadata_of(kind: pa.DataType, column: Column) -> dict[str, str]:
    """A column's id, but for bytes: of a column of bytes that has one DataFusion prunes no row group."""
    return (
        {} if pa.types.is_binary(kind) or pa.types.is_binary_view(kind) else {FIELD_ID: str(column.column_id)}
    )
