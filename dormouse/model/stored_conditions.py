"""Stored conditions of deletions. They use the names that the columns had then.

No column has the name `VERSION` or `ROWS`, since names of columns do not begin with two underscores.
"""

from __future__ import annotations

from dataclasses import dataclass
from json import dumps, loads
from typing import Any

from dormouse.errors import InvalidQuery
from dormouse.model.schema import Schema

VERSION = "__schema"
"""The key of the schema's version in a stored condition. The key is missing if the version is 1."""
ROWS = "__rows"
"""The key, in a stored condition, of the rows that a deletion of rows lists."""
CONDITION_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class ListedRows:
    """The rows that a deletion of rows lists: distinct tuples of values of some columns.

    `content` is the name of a Parquet file in the database that has the tuples in `columns`. Instead, the
    condition may have them in `values`, as JSON. `names` are the present names of the columns, and `version`
    is that of the schema in which they had the others.
    """

    columns: tuple[str, ...]
    names: tuple[str, ...]
    count: int
    version: int
    content: str | None = None
    values: list[list[Any]] | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the rows as they stand in a stored condition."""
        named = {"content": self.content, "values": self.values}
        present = {name: value for name, value in named.items() if value is not None}
        return {"columns": self.columns, "count": self.count, **present}


@dataclass(frozen=True, slots=True)
class StoredCondition:
    """The condition of a deletion: its `where` as JSON, by column, and the rows that it lists, if any."""

    where: dict[str, Any]
    rows: ListedRows | None

    @property
    def columns(self) -> set[str]:
        """The columns that the condition names."""
        return {*self.where, *(() if self.rows is None else self.rows.names)}


def stored_condition(schema: Schema, condition: dict[str, Any], rows: ListedRows | None = None) -> str:
    """Returns a condition on the columns of a schema as JSON, in the form in which it is stored."""
    version = {} if schema.version == 1 else {VERSION: schema.version}
    listed = {} if rows is None else {ROWS: rows.to_json()}
    return dumps({**condition, **listed, **version})


def given_condition(condition: str) -> str:
    """Returns a stored condition without the schema's version, as the user gave it.

    The rows of a deletion of rows are shown by their columns and their number.
    """
    found = loads(condition)
    if ROWS in found:
        found[ROWS].pop("content", None)
    return dumps({name: wanted for name, wanted in found.items() if name != VERSION})


def current_condition(schema: Schema, condition: str) -> StoredCondition:
    """Returns a stored condition, with its columns' names replaced by their names in `schema`.

    Raises `InvalidQuery` if a column was dropped, and `SchemaMoved` if the condition's version is newer.
    """
    found = loads(condition)
    version = found.pop(VERSION, 1)
    rows = found.pop(ROWS, None)
    schema.shape.check_known(version)
    names = {}
    for name, one in zip(schema.names, schema.shape.columns, strict=True):
        if (then := one.at(version)) is not None:
            names[then.name] = name
    columns = () if rows is None else tuple(rows.pop("columns"))
    if gone := [name for name in (*found, *columns) if name not in names]:
        raise InvalidQuery(f"a deletion names column {gone[0]!r}, which no longer exists")
    listed = rows and ListedRows(columns, tuple(names[name] for name in columns), version=version, **rows)
    return StoredCondition({names[name]: wanted for name, wanted in found.items()}, listed)
