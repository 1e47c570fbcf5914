"""The filters of queries as DuckDB's SQL.

DuckDB orders values as Dormouse does: NaN is the largest number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from dormouse.data.transform import quoted
from dormouse.model.region import KeyRanges, Range, number_of_value
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
    time_text,
)
from dormouse.reading.row_filter import Engine, InRanges, every, rendered
from dormouse.reading.row_sets import RowSet

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


def type_name(kind: DataType) -> str:
    """Returns DuckDB's name of a type."""
    if kind.precision is not None:
        return f"DECIMAL({kind.precision}, {kind.scale})"
    if kind.parts:
        return f"STRUCT({', '.join(f'{quoted(part.name)} {type_name(part.type)}' for part in kind.parts)})"
    if kind.element is None:
        return _TYPES[kind]
    if kind.key is None:
        return f"{type_name(kind.element)}[]"
    return f"MAP({type_name(kind.key)}, {type_name(kind.element)})"


def literal(field: Field, value: Any) -> str:
    """Returns a value as an SQL literal with its type; the field's type must not be nested."""
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
        # unquoted digits are parsed as a DECIMAL first, which would round a DOUBLE twice; and DuckDB cannot
        # cast an exponent to a DECIMAL without whole digits
        return f"'{value if field.type.is_floating else format(value, 'f')}'::{kind}"
    return f"{str(value).lower()}::{kind}" if value >= 0 else f"({value})::{kind}"


def literal_of(value: Any) -> str:  # noqa: PLR0911 one a type
    """Returns a value of Python as an SQL literal of the type that DuckDB gives it as a parameter.

    A text has no type of its own, so that it becomes what it is compared with.
    """
    match value:
        case None:
            return "NULL"
        case bool():
            return str(value).lower()
        case int():
            return str(value) if value >= 0 else f"({value})"
        case str():
            return text(value)
        case bytes():
            return f"from_hex('{value.hex()}')"
        case datetime():
            return f"'{time_text(value)}'::{'TIMESTAMP' if value.tzinfo is None else 'TIMESTAMPTZ'}"
        case date():
            return f"'{value.isoformat()}'::DATE"
        case time():
            return f"'{value.isoformat()}'::{'TIME' if value.tzinfo is None else 'TIMETZ'}"
        case timedelta(days=days, seconds=seconds, microseconds=microseconds):
            return f"'{days} days {seconds * 1_000_000 + microseconds} microseconds'::INTERVAL"
        case UUID():
            return f"'{value}'::UUID"
        case Decimal() if value.is_finite():
            _, digits, exponent = value.as_tuple()
            scale = max(-int(exponent), 0)
            precision = max(len(digits) + max(int(exponent), 0), scale, 1)
            return f"'{value:f}'::DECIMAL({precision}, {scale})"
        case list():
            return f"[{', '.join(map(literal_of, value))}]"
    return f"'{float(value)!r}'::DOUBLE"


LISTED_MAX = 16
"""The most values that are listed in an expression. DuckDB compares with each; it hashes rows of VALUES."""


class DuckDb(Engine[str]):
    """An engine that renders filters as DuckDB's SQL; `column` returns the expression of a column."""

    def __init__(self, column: Callable[[Field], str] = lambda field: quoted(field.name)) -> None:
        self._column = column

    def always(self, value: bool) -> str:
        return str(value).lower()

    def among(self, field: Field, values: Sequence[Any]) -> str:
        return f"{self._column(field)} IN ({', '.join(literal(field, value) for value in values)})"

    def among_rows(self, fields: Sequence[Field], rows: Sequence[Sequence[Any]]) -> str:
        if len(rows) <= LISTED_MAX:
            return super().among_rows(fields, rows)
        columns = ", ".join(self._column(field) for field in fields)
        listed = (
            ", ".join(literal(field, value) for field, value in zip(fields, row, strict=True)) for row in rows
        )
        return f"({columns}) IN (FROM (VALUES {', '.join(f'({row})' for row in listed)}))"

    def one_of(self, rows: RowSet, ranges: KeyRanges) -> str:
        # DuckDB compares structs as by IS NOT DISTINCT FROM
        tested = _struct(map(self._column, rows.fields), rows.fields)
        listed = _struct(map(quoted, rows.columns), rows.fields)
        read = f"read_parquet([{', '.join(map(text, rows.local_paths()))}], hive_partitioning = false)"
        stored = {field.name: quoted(name) for field, name in zip(rows.fields, rows.columns, strict=True)}
        bounded = [one for one in rows.fields if Range() not in ranges.get(one.name, [Range()])]
        near = [InRanges(one, tuple(ranges[one.name])) for one in bounded]
        # row groups of other keys are skipped
        where = rendered(every(near), DuckDb(lambda field: stored[field.name]))
        return f"{tested} IN (SELECT {listed} FROM {read} WHERE {where})"

    def searched(self, field: Field, point: Any, below: str, rest: str) -> str:
        return f"CASE WHEN {self.compared(field, '<', point)} THEN {below} ELSE {rest} END"

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


def _struct(columns: Iterable[str], fields: Iterable[Field]) -> str:
    parts = (
        f"'c{n}': CAST({one} AS {type_name(field.type)})"
        for n, (one, field) in enumerate(zip(columns, fields, strict=True))
    )
    return f"{{{', '.join(parts)}}}"


DUCKDB: Engine[str] = DuckDb()


def all_of(parts: Iterable[str | None]) -> str | None:
    """Returns the conjunction of conditions. None stands for a condition that every row meets."""
    return DUCKDB.all_of([part for part in parts if part is not None]) or None


def text(value: str) -> str:
    """Returns a text as an SQL literal."""
    if value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    # encoded, as SQL text cannot have some characters, and tools that show a view's text mishandle others
    return f"decode(from_hex('{value.encode().hex()}'))"
