"""What queries ask of columns, as DuckDB's SQL. Its order of values is ours: NaN is the largest number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dormouse.data.transform import quoted
from dormouse.model.region import number_of_value
from dormouse.model.schema import Field
from dormouse.model.types import (
    BOOLEAN,
    BYTES,
    DATE,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    STRING,
    TIMESTAMP,
    DataType,
)
from dormouse.reading.row_filter import Engine

_TYPES = {
    INT: "INTEGER",
    LONG: "BIGINT",
    STRING: "VARCHAR",
    BYTES: "BLOB",
    DOUBLE: "DOUBLE",
    FLOAT: "FLOAT",
    BOOLEAN: "BOOLEAN",
    TIMESTAMP: "TIMESTAMPTZ",
    DATE: "DATE",
}


def type_name(found: DataType) -> str:
    """A type as DuckDB calls it."""
    if found.precision is not None:
        return f"DECIMAL({found.precision}, {found.scale})"
    if found.parts:
        return f"STRUCT({', '.join(f'{quoted(part.name)} {type_name(part.type)}' for part in found.parts)})"
    if found.element is None:
        return _TYPES[found]
    if found.key is None:
        return f"{type_name(found.element)}[]"
    return f"MAP({type_name(found.key)}, {type_name(found.element)})"


def literal(field: Field, value: Any) -> str:
    """A value of a field that is not nested, with its type."""
    if field.type == STRING:
        return text(value)
    if field.type == BYTES:
        return f"from_hex('{value.hex()}')"
    if field.type == TIMESTAMP:
        return f"make_timestamptz({number_of_value(value)})"
    kind = type_name(field.type)
    if field.type == DATE:
        return f"'{value.isoformat()}'::DATE"
    if field.type.precision is not None or field.type.is_floating:
        # without quotes digits are a DECIMAL first: a DOUBLE would be rounded twice. And DuckDB casts no
        # exponent to a DECIMAL that has no whole digits
        return f"'{value if field.type.is_floating else format(value, 'f')}'::{kind}"
    return f"{str(value).lower()}::{kind}" if value >= 0 else f"({value})::{kind}"


class DuckDb(Engine[str]):
    """Filters as DuckDB's SQL; `column` says how a column is computed."""

    def __init__(self, column: Callable[[Field], str] = lambda field: quoted(field.name)) -> None:
        self._column = column

    def always(self, value: bool) -> str:
        return str(value).lower()

    def among(self, field: Field, values: Sequence[Any]) -> str:
        return f"{self._column(field)} IN ({', '.join(literal(field, value) for value in values)})"

    def compared(self, field: Field, sign: str, value: Any) -> str:
        return f"{self._column(field)} {sign} {literal(field, value)}"

    def is_null(self, field: Field) -> str:
        return f"{self._column(field)} IS NULL"

    def is_not_null(self, field: Field) -> str:
        return f"{self._column(field)} IS NOT NULL"

    def all_of(self, parts: Sequence[str]) -> str:
        return " AND ".join(f"({part})" for part in parts)

    def any_of(self, parts: Sequence[str]) -> str:
        return " OR ".join(f"({part})" for part in parts)

    def fails(self, part: str) -> str:
        return f"NOT coalesce({part}, false)"


DUCKDB: Engine[str] = DuckDb()


def all_of(parts: Iterable[str | None]) -> str | None:
    """Returns whether a row meets all of some conditions; None when every row does."""
    return DUCKDB.all_of([part for part in parts if part is not None]) or None


def text(value: str) -> str:
    """A text as a literal."""
    if value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    # what SQL's text cannot have, or what readers of a view's text would stumble over
    return f"decode(from_hex('{value.encode().hex()}'))"
