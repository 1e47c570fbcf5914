"""The rows of keyed tables in DuckDB's SQL: the newest of each key first, then what is asked of values."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.data.transform import quoted
from dormouse.model.edited import ROW_DELETED, ROW_VERSION
from dormouse.model.keyed import DELETED_AT, newest_first
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema

GONE = "__gone"
THERE = f"{quoted(DELETED_AT)} IS NULL"
"""Whether a row is no mark of deletion."""


def told_by(properties: TableProperties, remains: str | None) -> Sequence[str]:
    """What `newest` needs beside the table's columns; `remains`: what rows meet that no deletion is of."""
    gone = f"NOT ({THERE})" if remains is None else f"NOT ({THERE} AND {remains})"
    return [*map(quoted, _hidden(properties)), f"{gone} AS {GONE}"]


def without_keys(schema: Schema, rows: str, others: str) -> str:
    """Returns a select of the rows whose key is in none of `others`; conditions on values go below it."""
    return f"SELECT {', '.join(map(quoted, schema.names))} FROM ({rows}) {_joined('ANTI', schema, others)}"


def with_keys(schema: Schema, properties: TableProperties, rows: str, others: str) -> str:
    """Returns a select of the rows whose key is in `others`, with what `told_by` adds."""
    columns = [*schema.names, *_hidden(properties), GONE]
    return f"SELECT {', '.join(map(quoted, columns))} FROM ({rows}) {_joined('SEMI', schema, others)}"


def _joined(kind: str, schema: Schema, others: str) -> str:
    keys = ", ".join(map(quoted, schema.row_key_names))
    return f"{kind} JOIN (SELECT {keys} FROM ({others})) USING ({keys})"


def _hidden(properties: TableProperties) -> list[str]:
    return [name for name in newest_first(properties) if name.startswith("__")]


def newest(schema: Schema, properties: TableProperties, rows: str) -> str:
    """The newest row of each key, if it is there."""
    return _first_of_keys(schema, newest_first(properties), rows, GONE)


def newest_versions(schema: Schema, rows: str) -> str:
    """Returns a select of the newest version of each row of a row table, unless it is a deletion."""
    return _first_of_keys(schema, [ROW_VERSION], rows, ROW_DELETED)


def _first_of_keys(schema: Schema, newest_by: Sequence[str], rows: str, gone: str) -> str:
    keys = ", ".join(quoted(field.name) for field in schema.row_keys)
    order = ", ".join(f"{quoted(name)} DESC" for name in newest_by)
    columns = ", ".join(map(quoted, schema.names))
    # conditions on the keys go below it, and no others
    place = f"row_number() OVER (PARTITION BY {keys} ORDER BY {order})"
    numbered = f"SELECT *, {place} AS __place FROM ({rows})"
    return f"SELECT {columns} FROM ({numbered}) WHERE __place = 1 AND NOT {quoted(gone)}"
