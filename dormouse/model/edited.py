"""Row tables, whose rows are edited: what their readers see, and what is refused on the table below one."""

from __future__ import annotations

from dataclasses import replace

from dormouse.errors import NotARowTable
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema

ROW_ID, ROW_VERSION, ROW_DELETED = "ROW_ID", "ROW_VERSION", "ROW_DELETED"
HIDDEN = "_dropped_"
"""The names of columns that were dropped begin with it: older versions of rows still have them."""
VERSIONS = "$versions"
"""A row table's name with it at the end means every version of its rows."""


def is_edited(properties: TableProperties) -> bool:
    """Whether it is the table of a row table."""
    return properties.rows == "edited"


def named_versions(name: object) -> str | None:
    """Returns the name of the row table whose versions a name means; None for any other name."""
    if not isinstance(name, str) or not name.lower().endswith(VERSIONS):
        return None
    return name[: -len(VERSIONS)]


def current_schema(schema: Schema) -> Schema:
    """Returns the columns of a row table's current rows: without the mark of deletion and dropped columns."""
    kept = [
        number
        for number, name in enumerate(schema.names)
        if name != ROW_DELETED and not name.startswith(HIDDEN)
    ]
    keys = len(schema.key_fields)
    columns = tuple(schema.shape.columns[number] for number in kept)
    values = [schema.fields[number] for number in kept if number >= keys]
    return Schema(schema.row_keys, schema.sort_keys, values, shape=replace(schema.shape, columns=columns))


def check_not_edited(name: str, properties: TableProperties, instead: str) -> None:
    """`NotARowTable` for what would leave the versions of rows wrong; `instead` is what to do."""
    if is_edited(properties):
        raise NotARowTable(
            f"table {name!r} is a row table, whose rows and columns are changed as such alone: {instead}",
            table=name,
        )
