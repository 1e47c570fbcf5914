"""Changes of a table's columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dormouse.data.transform import Transform
from dormouse.errors import (
    InvalidKey,
    InvalidProperties,
    InvalidQuery,
    InvalidSchema,
)
from dormouse.model.reshaping import (
    properties_naming,
    property_changes,
    with_added_column,
    with_properties,
    with_renamed_column,
    with_widened_column,
    without_column,
)
from dormouse.model.schema import Schema
from dormouse.model.stored_conditions import current_condition
from dormouse.model.table import TableRecord
from dormouse.model.types import DataType, Field
from dormouse.reading.where import value_of
from dormouse.state.context import TableContext
from dormouse.state.files.shapes import Change, NextShape

if TYPE_CHECKING:
    import psycopg
# Each change of a table's columns is one row in the database: no file is rewritten.


def add_column(context: TableContext, field: Field, default: Any = None) -> TableContext:
    """Adds a value column, and returns the new context. Rows written without the column have its default."""
    if not isinstance(field, Field):
        raise InvalidSchema(f"a column is a dm.Field, not {field!r}")
    value = None if default is None else _checked_default(field, default)

    def change(table: TableRecord, _: psycopg.Connection[Any]) -> NextShape:
        schema = with_added_column(table.schema, field, value)
        shown = "" if value is None else f", by default {value!r}"
        null = " null" if field.nullable else ""
        said = f"added {field.name}: {field.type}{null}{shown}"
        return NextShape(_fitting(table, schema), said)

    return _changed(context, change)


def add_missing(context: TableContext, columns: Mapping[str, DataType]) -> TableContext:
    """Adds the columns that the table lacks, as values that may be null, and returns the new context.

    Another writer may add the same columns at the same time.
    """
    context = context.followed()
    for name, kind in columns.items():
        if name in context.schema:
            continue
        try:
            context = add_column(context, Field(name, kind, nullable=True))
        except InvalidSchema:
            context = context.followed()
            if name not in context.schema:
                raise
    return context


def rename_column(context: TableContext, name: str, new_name: str) -> TableContext:
    """Renames a column, also in the properties that name it, and returns the new context."""

    def change(table: TableRecord, _: psycopg.Connection[Any]) -> NextShape:
        schema = with_renamed_column(table.schema, name, new_name)
        changes = property_changes(table.properties, lambda known: new_name if known == name else known)
        properties = with_properties(table.properties, changes)
        return NextShape(
            _fitting(replace(table, properties=properties), schema), f"renamed {name} to {new_name}"
        )

    return _changed(context, change)


def widen_column(context: TableContext, name: str, to: DataType) -> TableContext:
    """Changes a value column's type to one that can represent all its values, and returns the new context."""

    def change(table: TableRecord, _: psycopg.Connection[Any]) -> NextShape:
        before = table.schema.field(name).type if name in table.schema else None
        schema = with_widened_column(table.schema, name, to)
        return NextShape(_fitting(table, schema), f"widened {name} from {before} to {to}")

    return _changed(context, change)


def drop_column(context: TableContext, name: str, *, dry_run: bool = False) -> TableContext:
    """Drops a value column, and returns the new context.

    Raises `InvalidSchema` if a property or a pending deletion names the column. With `dry_run`, only checks.
    """

    def change(table: TableRecord, conn: psycopg.Connection[Any]) -> NextShape:
        schema = without_column(table.schema, name)
        if named := properties_naming(table.properties, name):
            raise InvalidSchema(
                f"column {name!r} of table {table.name!r} is used by {' and '.join(named)}: change "
                f"{'this property' if len(named) == 1 else 'these properties'} first (dormouse table set)"
            )
        for deletion_id, condition in context.shapes.pending_conditions(conn):
            if name in current_condition(table.schema, condition).columns:
                raise InvalidSchema(
                    f"column {name!r} of table {table.name!r} is used by pending deletion {deletion_id}: "
                    "compact the table and collect its garbage first, until 'dormouse table "
                    "deletions' no longer lists it"
                )
        return NextShape(_fitting(table, schema), f"dropped {name}")

    if dry_run:
        context.shapes.try_change(change)
        return context
    return _changed(context, change)


def _changed(context: TableContext, change: Change) -> TableContext:
    return replace(context, table=context.shapes.change(change))


def _fitting(table: TableRecord, schema: Schema) -> TableRecord:
    """Returns the table's record with a new schema; raises `InvalidSchema` if properties do not fit it."""
    try:
        Transform.check(schema, table.properties)
    except InvalidProperties as error:
        raise InvalidSchema(f"a property of table {table.name!r} would no longer be valid: {error}") from None
    return replace(table, schema=schema)


def _checked_default(field: Field, default: Any) -> Any:
    if field.type.is_nested:
        raise InvalidSchema(f"column {field.name!r} is {field.type}, which has no default: make it nullable")
    try:
        return value_of(field, default)
    except (InvalidQuery, InvalidKey) as error:
        raise InvalidSchema(f"the default does not fit: {error}") from None
