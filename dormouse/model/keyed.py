"""Keyed tables, which keep one row a key, the newest: their rules, and what their files have of each row."""

from __future__ import annotations

from dataclasses import replace

from dormouse.errors import InvalidInput, InvalidProperties
from dormouse.model.properties import TableProperties
from dormouse.model.schema import FIELDS_MAX, Field, Schema
from dormouse.model.shape import Column, Stage
from dormouse.model.types import BOOLEAN, LONG, TIMESTAMP, DataType

SEQUENCE = "__sequence"
"""The place of a row's load among the loads."""
DELETED_AT = "__deleted_at"
"""When a row was marked as deleted; null: it is there."""
HIDDEN = (SEQUENCE, DELETED_AT)
_HIDDEN_IDS = ((1 << 31) - 3, (1 << 31) - 2)
"""Of the two: no column that is added gets so far."""
NEWEST_ROW = "newest_row"


def is_keyed(properties: TableProperties) -> bool:
    return properties.keep == NEWEST_ROW


def stored_schema(schema: Schema, properties: TableProperties) -> Schema:
    """The columns of the table's files.

    Those of a keyed table have two more; and as a mark of deletion has no values but the one that its place
    is told by, all others may be null.
    """
    if not is_keyed(properties):
        return schema
    hidden = (unchecked(SEQUENCE, LONG), unchecked(DELETED_AT, TIMESTAMP, nullable=True))
    columns = [
        Column(number, (Stage(1, field.name, field.type),))
        for number, field in zip(_HIDDEN_IDS, hidden, strict=True)
    ]
    shape = replace(schema.shape, columns=(*schema.shape.columns, *columns))
    return Schema(schema.row_keys, (), [*_of_marks(schema, properties), *hidden], shape=shape)


def given_schema(schema: Schema, properties: TableProperties, deletes: str | None) -> Schema:
    """The columns of data for a keyed table; `deletes` marks rows, of which other values may be null."""
    if deletes is None:
        return schema
    if not isinstance(deletes, str) or not deletes:
        raise InvalidInput(f"deletes is the name of a boolean column of the data, not {deletes!r}")
    if deletes in schema:
        raise InvalidInput(
            f"deletes: {deletes!r} is a column of the table; name a boolean column that the data alone has"
        )
    marks = unchecked(deletes, BOOLEAN)
    column = Column(_HIDDEN_IDS[0], (Stage(1, deletes, BOOLEAN),))
    shape = replace(schema.shape, columns=(*schema.shape.columns, column))
    return Schema(schema.row_keys, (), [*_of_marks(schema, properties), marks], shape=shape)


def _of_marks(schema: Schema, properties: TableProperties) -> list[Field]:
    """The values as a mark of deletion has them: null, but for the one that its place is told by."""
    return [
        field if field.name == properties.newest_by else Field(field.name, field.type, nullable=True)
        for field in schema.values
    ]


def newest_first(properties: TableProperties) -> tuple[str, ...]:
    """What rows of equal key are ordered by, the largest first."""
    return (SEQUENCE,) if properties.newest_by is None else (properties.newest_by, SEQUENCE)


def check_keyed(schema: Schema, properties: TableProperties) -> None:
    """`InvalidProperties` when what is asked for does not fit the schema, or each other."""
    if properties.rows == "edited" and (is_keyed(properties) or properties.filter or properties.aggregate):
        raise InvalidProperties("rows: a row table keeps every version: it has no keep, filter or aggregate")
    if not is_keyed(properties):
        for name in ("newest_by", "deletion_marks_seconds"):
            if getattr(properties, name) is not None:
                raise InvalidProperties(f"{name}: only a table with keep='newest_row' has it")
        return
    if schema.sort_keys:
        raise InvalidProperties(
            "keep: a table with keep='newest_row' has one row for its row keys, and so no sort keys; "
            f"make {schema.sort_keys[0].name!r} a row key or a value"
        )
    if properties.aggregate is not None:
        raise InvalidProperties(
            "aggregate: with keep='newest_row' a row replaces another, and merges with none"
        )
    if len(schema.fields) + len(HIDDEN) > FIELDS_MAX:
        raise InvalidProperties(
            f"keep: a table with keep='newest_row' has at most {FIELDS_MAX - len(HIDDEN)} columns"
        )
    _check_newest_by(schema, properties)


def check_upsert(name: str, properties: TableProperties) -> None:
    """`InvalidInput` for a table of which no row replaces another."""
    if not is_keyed(properties):
        raise InvalidInput(
            f"table {name!r} keeps every row, so that none replaces another: ingest the rows, or make the "
            "table with keep='newest_row'"
        )


def check_kept(now: TableProperties, changed: TableProperties) -> None:
    """`InvalidProperties` for a change of what compaction has acted upon already."""
    if now.rows != changed.rows:
        raise InvalidProperties(f"rows is chosen when a table is made, and stays {now.rows!r}")
    for name in ("keep", "newest_by"):
        if getattr(now, name) != getattr(changed, name):
            raise InvalidProperties(
                f"{name} is chosen when a table is made, and stays {getattr(now, name)!r}: what compaction "
                "left out does not come back; make another table, and ingest the rows into it"
            )


def unchecked(name: str, kind: DataType, *, nullable: bool = False) -> Field:
    """A field of any name; those of a table's columns do not begin with two underscores."""
    field = object.__new__(Field)
    for attribute, value in (("name", name), ("type", kind), ("nullable", nullable)):
        object.__setattr__(field, attribute, value)
    return field


def _check_newest_by(schema: Schema, properties: TableProperties) -> None:
    name = properties.newest_by
    if name is None:
        if properties.deletion_marks_seconds is not None:
            raise InvalidProperties(
                "deletion_marks_seconds: without newest_by marks of deletion go when no older row can come"
            )
        return
    field = next((one for one in schema.values if one.name == name), None)
    if field is None:
        values = ", ".join(one.name for one in schema.values) or "none"
        raise InvalidProperties(f"newest_by: {name!r} is not a value column; the values are {values}")
    if field.type.is_nested:
        raise InvalidProperties(f"newest_by: {name!r} is {field.type}, which has no order")
    if field.nullable:
        raise InvalidProperties(f"newest_by: {name!r} may be null, and null is neither newer nor older")
