"""Files as they were written: which columns they have, and what these were called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa
from datafusion import DataFrame, Expr, literal

from dormouse.data.arrow_schema import arrow_type, check_columns
from dormouse.data.expressions import column
from dormouse.model.reshaping import is_as_stored, pairs
from dormouse.model.schema import Schema
from dormouse.model.shape import Column
from dormouse.model.types import BYTES, STRING, Field
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


# Rows with the columns of one version of a table's schema as rows with those of another, in DataFusion.

_VIEWS = {STRING: pa.string_view(), BYTES: pa.binary_view()}


def reshaped(rows: DataFrame, stored: Schema, schema: Schema, *, views: bool = False) -> DataFrame:
    """Rows with the columns of one schema of a table, as rows with those of another.

    `views`: whether texts and bytes travel as Arrow's views.
    """
    if is_as_stored(stored, schema):
        return rows.select(*map(column, schema.names))
    return rows.select(*(_now(*one, views=views) for one in pairs(stored, schema)))


def _now(field: Field, one: Column, before: Field | None, *, views: bool) -> Expr:
    if before is None:
        return _default(field, one.default, views=views).alias(field.name)
    found = column(before.name)
    if before.type != field.type:
        return found.cast(arrow_type(field.type)).alias(field.name)
    return found if before.name == field.name else found.alias(field.name)


def _default(field: Field, default: Any, *, views: bool) -> Expr:
    kind = _VIEWS[field.type] if views and field.type in _VIEWS else arrow_type(field.type)
    # of lists and structs there is no literal that is null
    return literal(None).cast(kind) if default is None else literal(pa.scalar(default, kind))


def numbered(rows: DataFrame, schema: Schema) -> DataFrame:
    """The rows, whose columns have their ids in files that are written."""
    named = zip(schema.names, schema.shape.columns, strict=True)
    kinds = {field.name: arrow_type(field.type) for field in schema.fields}
    return rows.select(*(column(name).alias(name, metadata_of(kinds[name], one)) for name, one in named))
