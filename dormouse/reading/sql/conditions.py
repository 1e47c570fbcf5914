"""What queries ask of columns, as DuckDB's SQL. Its order of values is ours: NaN is the largest number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dormouse.data.transform import quoted
from dormouse.model.region import Range, number_of_value
from dormouse.model.schema import Field, Schema
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
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.where import Condition, Deletion

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


def in_slices(schema: Schema, slices: Iterable[KeyRanges]) -> str | None:
    """Whether a row lies in any of the slices; None when every row does."""
    return _any([_in_slice(schema, ranges) for ranges in slices])


def meets(condition: Condition, value: str | None = None) -> str | None:
    """Whether a row meets a condition; None when every row does. `value`: how the column is computed."""
    name = value or quoted(condition.field.name)
    found = _in_ranges(condition.field, condition.ranges, name)
    if found is None:
        return None if condition.or_null else f"{name} IS NOT NULL"
    return f"({found}) OR ({name} IS NULL)" if condition.or_null else found


def remains(
    schema: Schema,
    deletions: Iterable[Deletion],
    value: Callable[[Field], str],
    where: Callable[[Deletion], str | None] = lambda _: None,
) -> str | None:
    """Whether a row is none that a deletion is of; None without deletions.

    `value` computes columns, `where` says of which rows a deletion may be; None: of all.
    """
    gone = [all_of([where(one), _is_of(schema, one, value)]) for one in deletions]
    return f"NOT coalesce({' OR '.join(f'({one})' for one in gone)}, false)" if gone else None


def _is_of(schema: Schema, deletion: Deletion, value: Callable[[Field], str]) -> str:
    met = (meets(one, value(one.field)) for one in deletion.conditions)
    return all_of([in_slices(schema, [deletion.ranges]), *met]) or "true"


def all_of(parts: Iterable[str | None]) -> str | None:
    """Whether a row meets all of the conditions; None when every row does."""
    return " AND ".join(f"({part})" for part in parts if part is not None) or None


def _in_slice(schema: Schema, ranges: KeyRanges) -> str | None:
    return all_of(
        _in_ranges(field, ranges[field.name], quoted(field.name))
        for field in schema.row_keys
        if field.name in ranges
    )


def _in_ranges(field: Field, ranges: Sequence[Range], name: str) -> str | None:
    exact = [literal(field, item.min) for item in ranges if item.is_exact]
    listed = f"{name} IN ({', '.join(exact)})"
    return _any(
        [*([listed] if exact else []), *(_in_range(field, one, name) for one in ranges if not one.is_exact)]
    )


def _in_range(field: Field, item: Range, name: str) -> str | None:
    above = (
        None
        if item.min is None
        else f"{name} {'>=' if item.min_inclusive else '>'} {literal(field, item.min)}"
    )
    below = (
        None
        if item.max is None
        else f"{name} {'<=' if item.max_inclusive else '<'} {literal(field, item.max)}"
    )
    return all_of([above, below])


def _any(parts: Sequence[str | None]) -> str | None:
    if None in parts:
        return None
    return " OR ".join(f"({part})" for part in parts) or "false"


def text(value: str) -> str:
    """A text as a literal."""
    if value.isprintable():
        return "'" + value.replace("'", "''") + "'"
    # what SQL's text cannot have, or what readers of a view's text would stumble over
    return f"decode(from_hex('{value.encode().hex()}'))"
