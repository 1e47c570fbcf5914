"""What a query of a row table wants: its text read once, with the values of its parameters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import date, datetime
from functools import lru_cache
from typing import Any

from sqlglot import exp

from dormouse.errors import InvalidQuery
from dormouse.model import values as parameters
from dormouse.model.values import Parameters
from dormouse.rows import types
from dormouse.rows.binding import Binding
from dormouse.rows.columns import Column
from dormouse.rows.expressions import (
    Kind,
    Parameter,
    Statement,
    Value,
    ValueNeeded,
    depth,
    filled,
    has_parameter,
)
from dormouse.rows.sql import parse

Given = tuple[tuple[str, Value], ...]
"""The values of parameters, by their names in small letters."""

DEPTH_MAX = 200
"""Of expressions: each takes three frames of the 1,000 that Python has, whoever calls."""
INTEGER_BITS_MAX = 1_400
"""Of a parameter: more than any DOUBLE has, and fewer than Python makes no text of."""
REMEMBERED_CHARACTERS_MAX = 10_000
"""Of a text, with its values, that is remembered: trees are some hundred times as large."""


def given(values: Parameters | None) -> Given:
    """Parameters as users give them: a list for $1, $2, …, or a dict for $name; `InvalidQuery`."""
    if not values:
        return ()
    found = parameters.given(values)
    named = found.items() if isinstance(found, dict) else ((str(n), one) for n, one in enumerate(found, 1))
    return tuple(sorted((name.lower(), _value(name, value)) for name, value in named))


def statement_of(text: str, table: str, columns: Sequence[Column], values: Given = ()) -> Statement:
    """What a query wants of a table of these columns; `InvalidQuery`."""
    columns = tuple(columns)
    if not isinstance(text, str) or len(text) > REMEMBERED_CHARACTERS_MAX:
        return _bound(text, table, columns, values)
    if values:
        kinds = tuple((name, one.kind) for name, one in values)
        if (found := _of_kinds(text, table, columns, kinds)) is not None and found.where is not None:
            return replace(found, where=filled(found.where, dict(values)))
    sizes = (len(one.value) for _, one in values if isinstance(one.value, str))
    is_short = len(text) + sum(sizes) <= REMEMBERED_CHARACTERS_MAX
    return (_remembered if is_short else _bound)(text, table, columns, values)


@lru_cache(maxsize=256)
def _of_kinds(
    text: str, table: str, columns: tuple[Column, ...], kinds: tuple[tuple[str, Kind], ...]
) -> Statement | None:
    """What a query is whatever its parameters are, all in its condition; None: it depends on their values."""
    try:
        found = _bound(text, table, columns, tuple((name, Parameter(kind, name)) for name, kind in kinds))
    except (ValueNeeded, InvalidQuery):
        return None
    others = [item.expression for item in found.selected]
    others += [] if found.having is None else [found.having]
    others += [*found.groups, *(order.expression for order in found.orders)]
    return None if any(map(has_parameter, others)) else found


def _bound(text: str, table: str, columns: tuple[Column, ...], values: Given) -> Statement:
    try:
        is_short = isinstance(text, str) and len(text) <= REMEMBERED_CHARACTERS_MAX
        tree = _tree(text) if values and is_short else parse(text)
        found = Binding(tree, table, columns, dict(values)).statement()
    except RecursionError:
        raise InvalidQuery("the query is nested too deeply") from None
    if depth(found) > DEPTH_MAX:
        raise InvalidQuery("the query is nested too deeply, or in the order of too many columns")
    return found


_remembered = lru_cache(maxsize=256)(_bound)


@lru_cache(maxsize=64)
def _tree(text: str) -> exp.Select:
    """Of a text that is sent with other values again; nobody changes it."""
    return parse(text)


def _value(name: str, value: Any) -> Value:
    """As the literal of it would be bound."""
    if value is None:
        return Value("NULL", None)
    if isinstance(value, bool):
        return Value("BOOLEAN", value)
    if isinstance(value, int) and value.bit_length() <= INTEGER_BITS_MAX:
        return types.number(str(value))
    if isinstance(value, float) and math.isfinite(value):
        return Value("DOUBLE", value)
    if isinstance(value, str):
        return Value("STRING", value)
    if isinstance(value, datetime | date):
        return Value("STRING", value.isoformat())
    shown = "a number of too many digits" if isinstance(value, int) else repr(value)
    raise InvalidQuery(
        f"parameter ${name} is {shown:.60}: give a finite number, a text, true or false, a date, or None"
    )
