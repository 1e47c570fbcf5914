"""The ranges to which the conditions in a plan restrict row keys.

An expression that is not understood restricts nothing: the plan may then read too much, but never too little,
and DuckDB filters the rows again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from operator import eq, ge, gt, le, lt
from typing import Any

from dormouse.errors import InvalidKey
from dormouse.model.region import (
    KeyRanges,
    Range,
    check_key,
    min_value,
    united,
    value_of_number,
)
from dormouse.model.schema import Field
from dormouse.model.types import INT, LONG, STRING
from dormouse.reading.sql.constants import UNKNOWN, WHOLE, Node, constant, value_of
from dormouse.reading.sql.inverses import LIMITS, Span, column_of, compared
from dormouse.reading.sql.time_parts import span_of_text, spans_of_part, text_of_time

_EXACT_BELOW = {"DOUBLE": 1 << 53, "FLOAT": 1 << 24}
"""The number below which a type represents each whole number exactly, so that a cast keeps a key's value."""
_OPERATORS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOT_DISTINCT_FROM": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_FLIPPED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_LISTS = {"list_contains", "list_has", "array_contains", "array_has", "contains"}
_PREFIXES = {"prefix": "", "starts_with": "", "^@": "", "~~": "%_\\", "like_escape": "%_\\", "~~~": "*?[\\"}
"""Functions of a text and a pattern, each with the characters that end a pattern's literal prefix."""
_CODE_POINT_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


@dataclass(frozen=True, slots=True)
class Key:
    """A row key, or another column of a type of keys, in one scan of a plan.

    The same column of another scan is another `Key`.
    """

    name: str
    """The column's name in the plan, unique among all scans."""
    field: Field
    is_copy: bool = False
    """True if the key is a copy of another column, so that conditions on the copy do not restrict it."""
    is_row_key: bool = True
    """False for other columns, which may be null, or have a time that no key can have."""


Known = Sequence[Key | None]
"""The columns of a plan's node: a column of a scan for each, None for a column that is computed."""
Columns = Known | None
"""The columns of a plan's node; None if not even their number is known."""


def met(condition: Node, columns: Columns) -> KeyRanges:  # noqa: PLR0911 one a kind
    """Returns ranges of keys that contain every row that meets a condition, by the keys' names."""
    match condition:
        case {"type": "CONJUNCTION_AND", "children": parts}:
            return reduce(KeyRanges.intersect, (met(part, columns) for part in parts), KeyRanges())
        case {"type": "CONJUNCTION_OR", "children": parts}:
            return united([met(part, columns) for part in parts])
        case {"type": "COMPARE_IN", "children": [left, *items]}:
            return _among(left, [constant(item) for item in items], columns)
        case {"expression_class": "BOUND_BETWEEN", "input": one, "lower": low, "upper": high}:
            above = ">=" if condition["lower_inclusive"] else ">"
            below = "<=" if condition["upper_inclusive"] else "<"
            lower = _compared(one, above, constant(low), columns)
            return lower.intersect(_compared(one, below, constant(high), columns))
        case {"expression_class": "BOUND_COMPARISON", "type": kind, "left": left, "right": right}:
            return _comparison(kind, left, right, columns)
        case {"expression_class": "BOUND_FUNCTION", "name": name, "children": [one, *others]}:
            return _function(name, one, others, columns)
    return KeyRanges()


def met_by_column(filter_: Node, key: Key) -> KeyRanges:  # noqa: PLR0911 one a kind
    """Returns ranges of a key that contain every value that meets a filter, which is part of a scan."""
    match filter_:
        case {"filter_type": "CONJUNCTION_AND", "child_filters": parts}:
            return reduce(KeyRanges.intersect, (met_by_column(part, key) for part in parts), KeyRanges())
        case {"filter_type": "CONJUNCTION_OR", "child_filters": parts}:
            return united([met_by_column(part, key) for part in parts])
        case {"filter_type": "OPTIONAL_FILTER", "child_filter": dict() as part}:
            return met_by_column(part, key)
        case {"filter_type": "CONSTANT_COMPARISON", "comparison_type": kind, "constant": constant}:
            if kind in _OPERATORS:
                return _bounded(key, _OPERATORS[kind], value_of(constant), constant["type"]["id"])
        case {"filter_type": "IN_FILTER", "values": values}:
            return _any_of(key, list(map(value_of, values)), values[0]["type"]["id"])
        case {"filter_type": "EXPRESSION_FILTER", "expr": condition}:
            return met(condition, [key])
    return KeyRanges()


def is_exact(filter_: Node, key: Key) -> bool:
    """Returns whether exactly the values in the ranges of `met_by_column` meet a filter."""
    match filter_:
        case {"filter_type": "CONJUNCTION_AND", "child_filters": parts}:
            return all(is_exact(part, key) for part in parts)
        case {"filter_type": "CONSTANT_COMPARISON", "comparison_type": kind, "constant": {"is_null": False}}:
            return kind in _OPERATORS and key.name in met_by_column(filter_, key)
    return False


def key_of(expression: Node, columns: Columns) -> tuple[Key, str | None] | None:
    """Returns the row key that an expression refers to, and the numeric type to which it is cast, if any.

    Returns None if the expression is no row key.
    """
    match expression:
        case {"expression_class": "BOUND_CAST", "try_cast": True}:
            # a failed cast gives null, which may be the wanted value
            return None
        case {"expression_class": "BOUND_CAST", "child": child, "return_type": {"id": cast}}:
            found = key_of(child, columns)
            number = cast in WHOLE or cast in _EXACT_BELOW or cast == "DECIMAL"
            if found is None or found[1] is not None or not number or found[0].field.type not in (INT, LONG):
                return None
            return found[0], cast
        case {"expression_class": "BOUND_REF", "index": index} if columns and index < len(columns):
            key = columns[index]
            return None if key is None else (key, None)
    return None


def is_whole(cast: str | None) -> bool:
    """Returns whether a cast to the named type leaves whole numbers unchanged."""
    return cast is None or cast in WHOLE


def _comparison(kind: str, left: Node, right: Node, columns: Columns) -> KeyRanges:
    operator = _OPERATORS.get(kind)
    if operator is None:
        return KeyRanges()
    value = constant(right)
    if value is UNKNOWN:
        if operator == "=" and _is_true(right):
            return met(left, columns)
        left, operator, value = right, _FLIPPED[operator], constant(left)
    if value is None and kind == "COMPARE_NOT_DISTINCT_FROM":
        # casts may make nulls, so nothing is known
        return KeyRanges()
    return _compared(left, operator, value, columns)


def _is_true(expression: Node) -> bool:
    match expression:
        case {"expression_class": "BOUND_CONSTANT", "value": {"is_null": False, "value": True}}:
            return True
    return False


def _function(name: str, first: Node, others: Sequence[Node], columns: Columns) -> KeyRanges:
    values = [constant(other) for other in others]
    if name in _PREFIXES and all(isinstance(value, str) for value in values) and len(values) <= 2:
        found = key_of(first, columns)
        prefix = _prefix(values[0], _PREFIXES[name] + "".join(values[1:]))
        if found is not None and found[0].field.type == STRING:
            return _beginning(found[0], prefix)
        if found is None and prefix:
            after = after_prefix(prefix)
            return _with_text(first, (prefix, True), None if after is None else (after, False), columns)
    if name in _LISTS and len(others) == 1 and isinstance(items := constant(first), list):
        return _among(others[0], items, columns)
    return KeyRanges()


def _prefix(pattern: str, wildcards: str) -> str:
    ends = (n for n, character in enumerate(pattern) if character in wildcards)
    return pattern[: next(ends, len(pattern))]


def _beginning(key: Key, prefix: str) -> KeyRanges:
    if not prefix or key.is_copy:
        return KeyRanges()
    return KeyRanges({key.name: [Range(prefix, after_prefix(prefix))]})


def after_prefix(prefix: str) -> str | None:
    """Returns the smallest text above all texts with a prefix; None when there is none."""
    for end in range(len(prefix), 0, -1):
        following = ord(prefix[end - 1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _CODE_POINT_MAX:
            return prefix[: end - 1] + chr(following)
    return None


def _among(left: Node, values: Sequence[Any], columns: Columns) -> KeyRanges:
    found = key_of(left, columns)
    if found is not None and not found[0].is_copy:
        return _any_of(found[0], values, found[1])
    # nothing equals null
    return united([_compared(left, "=", value, columns) for value in values if value is not None])


def _any_of(key: Key, values: Sequence[Any], type_name: str | None) -> KeyRanges:
    """Returns the ranges of a key that has one of some values, of which there may be thousands."""
    found = [_ranges(key.field, "=", value, type_name) for value in values]
    if any(ranges is None for ranges in found):
        return KeyRanges()
    return KeyRanges({key.name: [one for ranges in found for one in ranges or ()]})


def _compared(left: Node, operator: str, value: Any, columns: Columns) -> KeyRanges:
    match left:
        case {"expression_class": "BOUND_FUNCTION", "name": "row", "children": parts}:
            if isinstance(value, tuple) and len(value) == len(parts):
                return _together(parts, operator, value, columns)
            return KeyRanges()
        case {"type": "OPERATOR_COALESCE", "children": [first, *_]}:
            found = key_of(first, columns)
            is_first = found is not None and found[0].is_row_key
            return _compared(first, operator, value, columns) if is_first else KeyRanges()
    found = key_of(left, columns)
    if found is None:
        return _inverted(left, operator, value, columns)
    return KeyRanges() if found[0].is_copy else _bounded(found[0], operator, value, found[1])


def _inverted(left: Node, operator: str, value: Any, columns: Columns) -> KeyRanges:
    """Returns ranges for a comparison of a function of a key."""
    if isinstance(value, str):
        low, high = (value, operator != ">"), (value, operator != "<")
        return _with_text(
            left, None if operator[0] == "<" else low, None if operator[0] == ">" else high, columns
        )
    if isinstance(value, int) and (parts := spans_of_part(left, lambda n: _HOLDS[operator](n, value))):
        return united([_within(parts[0], span, columns) for span in parts[1]])
    span = compared(left, operator, value)
    return KeyRanges() if span is None else _within(left, span, columns)


_HOLDS: Mapping[str, Callable[[int, int], bool]] = {
    "=": eq, "<": lt, "<=": le, ">": gt, ">=": ge,
}  # fmt: skip


def _with_text(
    expression: Node, low: tuple[str, bool] | None, high: tuple[str, bool] | None, columns: Columns
) -> KeyRanges:
    """Returns ranges of a key whose text lies between two ends, each a text and whether it is included."""
    found = text_of_time(expression)
    if found is None:
        return KeyRanges()
    time, text = found
    return _within(time, span_of_text(time, text, low, high), columns, row_keys_only=True)


def _within(left: Node, span: Span, columns: Columns, *, row_keys_only: bool = False) -> KeyRanges:
    """Returns ranges of the key in an expression that has a value in a span."""
    step = column_of(left, span)
    found = None if step is None else key_of(step[0], columns)
    if step is None or found is None or found[0].is_copy or (row_keys_only and not found[0].is_row_key):
        return KeyRanges()
    key, (_, span) = found[0], step
    smallest, largest = LIMITS.get(key.field.type, (0, -1))
    low = smallest if span.low is None else max(smallest, math.ceil(span.low))
    high = largest if span.high is None else min(largest, math.floor(span.high))
    if smallest > largest or (low, high) == (smallest, largest):
        return KeyRanges()
    if low > high:
        return KeyRanges({key.name: []})
    first, last = (value_of_number(key.field.type, end) for end in (low, high))
    return KeyRanges(
        {
            key.name: [
                Range(
                    None if low == smallest else first,
                    None if high == largest else last,
                    max_inclusive=high < largest,
                )
            ]
        }
    )


def _together(parts: Sequence[Node], operator: str, values: tuple[Any, ...], columns: Columns) -> KeyRanges:
    """Returns ranges for a comparison of tuples of columns: (a, b) = (1, 2), or (a, b) > (1, 2).

    An inequality restricts only the first column.
    """
    if operator != "=":
        parts, operator = parts[:1], f"{operator[0]}="
    # within a row comparison, null equals null, and is above all values
    found = [
        _compared(part, operator, UNKNOWN if value is None else value, columns)
        for part, value in zip(parts, values, strict=False)
        if operator == "=" or ((key := key_of(part, columns)) and not key[0].field.nullable)
    ]
    return reduce(KeyRanges.intersect, found, KeyRanges())


def _bounded(key: Key, operator: str, value: Any, type_name: str | None) -> KeyRanges:
    ranges = _ranges(key.field, operator, value, type_name)
    return KeyRanges() if ranges is None else KeyRanges({key.name: ranges})


def _ranges(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """Returns the ranges of a key, cast to a type, that meet a comparison; None if any key may meet it."""
    if value is None:
        return []
    if field.type in (INT, LONG):
        return _numbers(field, operator, value, type_name)
    try:
        return [_range(operator, check_key(field, value))]
    except InvalidKey:
        return None


def _numbers(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """Returns the ranges of whole numbers that meet a comparison with a number; None if any may meet it."""
    if isinstance(value, float):
        if not math.isfinite(value) or abs(value) >= _EXACT_BELOW.get(type_name or "", 0):
            return None
    elif not isinstance(value, int | Fraction):
        return None
    low, high = math.ceil(value), math.floor(value)
    if low != high:
        if operator == "=":
            return []
        operator, low = ("<=", high) if operator in ("<", "<=") else (">=", low)
    smallest = min_value(field.type)
    assert isinstance(smallest, int)  # noqa: S101 it is of a number
    if smallest <= low < -smallest:
        return [_range(operator, low)]
    # the value is out of the key's range: either all keys meet the comparison, or none
    return None if _range(operator, low).contains(smallest) else []


def _range(operator: str, value: Any) -> Range:
    if operator == "=":
        return Range.exactly(value)
    if operator[0] == "<":
        return Range(max=value, max_inclusive=operator == "<=")
    return Range(min=value, min_inclusive=operator == ">=")
