"""Conditions in SQL as conditions on columns, where both mean exactly the same."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.model.region import Range
from dormouse.model.schema import Schema
from dormouse.model.types import BOOLEAN, DATE, INT, LONG, STRING, TIMESTAMP, Field, time_of_text
from dormouse.reading.sql.clauses import Comparison, Constant, Expression
from dormouse.reading.sql.constants import WHOLE, ZONED
from dormouse.reading.sql.inverses import LIMITS
from dormouse.reading.where import question

_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_TIME = re.compile(r"\d{4}-\d\d-\d\d([ T]\d\d:\d\d(:\d\d(\.\d{1,6})?)?(?P<zone>Z|[+-]\d\d(:\d\d)?)?)?")
_TIMES = {"VARCHAR", "TIMESTAMP", ZONED}
_ENDS = {">": "min", ">=": "min", "<": "max", "<=": "max"}


class _Otherwise(Exception):
    """The condition is none on columns."""


def plain_where(schema: Schema, table: str, expression: Expression) -> dict[str, Any] | None:
    """Returns a condition as `Table.query` takes it; None if it cannot be one with exactly this meaning.

    `table` is the name by which the expression calls the table.
    """
    if expression.comparisons is None:
        return None
    by_column: dict[str, list[Comparison]] = defaultdict(list)
    names = {name.lower(): name for name in schema.names}
    try:
        for one in expression.comparisons:
            *qualifier, column = one.column
            is_of_table = not qualifier or [part.lower() for part in qualifier] == [table.lower()]
            if not is_of_table or column.lower() not in names or one.other:
                return None
            by_column[names[column.lower()]].append(one)
        where = {name: _wanted(schema.field(name), found) for name, found in by_column.items()}
        question(schema, where, None, None)
    except (_Otherwise, InvalidInput):
        return None
    return where


def _wanted(field: Field, comparisons: Sequence[Comparison]) -> Any:
    match comparisons:
        case [Comparison(sign="is null")] if field.nullable:
            return None
        case [Comparison(sign="=", constants=(constant,))]:
            return _value(field, constant)
        case [Comparison(sign="in", constants=constants)]:
            return [_value(field, constant) for constant in constants]
    ends: dict[str, Any] = {}
    for one in comparisons:
        end = _ENDS.get(one.sign)
        if end is None or end in ends:
            raise _Otherwise
        [constant] = one.constants
        ends |= {end: _value(field, constant), f"{end}_inclusive": one.sign.endswith("=")}
    return Range(**ends)


def _value(field: Field, constant: Constant) -> Any:
    """Returns a constant as a value of a column, for types that DuckDB compares without rounding either."""
    kind, value = constant
    # a text that is cast is only as DuckDB reads it
    if field.type in (INT, LONG) and kind in WHOLE and isinstance(value, int):
        low, high = LIMITS[field.type]
        if low <= value <= high:
            return value
    elif field.type == STRING and kind == "VARCHAR":
        return value
    elif field.type == BOOLEAN and kind == "BOOLEAN" and value in ("t", "f"):
        return value == "t"
    elif field.type == DATE and kind in {"VARCHAR", "DATE"} and _DAY.fullmatch(value):
        with suppress(ValueError):
            return date.fromisoformat(value)
    elif field.type == TIMESTAMP and kind in _TIMES and (found := _TIME.fullmatch(value)):
        # without a zone, a time is in UTC; what DuckDB makes of a zone depends on the type
        with suppress(ValueError):
            if kind != "TIMESTAMP" or not found["zone"]:
                return time_of_text(value)
    raise _Otherwise
