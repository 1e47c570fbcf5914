"""Ranges that conditions set row keys, read from the expressions of DuckDB's serialized plans.

What is not understood bounds nothing: too much is read, never too little, and DuckDB filters again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce
from typing import Any

from dormouse.errors import InvalidKey
from dormouse.model.region import KeyValue, Range, check_key, min_value, value_of_number
from dormouse.model.schema import Field
from dormouse.model.types import DATE, INT, LONG, STRING, TIMESTAMP
from dormouse.reading.key_ranges import KeyRanges, united

Node = dict[str, Any]

_WHOLE = {f"{sign}{name}" for name in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT") for sign in "U"}
_WHOLE |= {name[1:] for name in _WHOLE}
_EXACT_BELOW = {"DOUBLE": 1 << 53, "FLOAT": 1 << 24}
"""Up to it they have every whole number, so that a key made one is still itself."""
_OPERATORS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOT_DISTINCT_FROM": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_TIMES = {"TIMESTAMP WITH TIME ZONE": TIMESTAMP, "DATE": DATE}
_FLIPPED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_LISTS = {"list_contains", "list_has", "array_contains", "array_has", "contains"}
_PREFIXES = {"prefix": "", "starts_with": "", "^@": "", "~~": "%_\\", "like_escape": "%_\\", "~~~": "*?[\\"}
"""Functions of a text and a pattern, and what ends its prefix."""
_CODE_POINT_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_ESCAPED = re.compile(r"\\x([0-9A-F]{2})")


class _Unknown:
    """A value that is not understood."""


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Key:
    """A row key where a plan scans it."""

    name: str
    """Of its own in the plan."""
    field: Field
    is_copy: bool = False
    """Whether conditions on it do not bound the scan."""


Known = Sequence[Key | None]
"""The columns of a plan's node; None for what is no key."""
Columns = Known | None
"""None when not even their number is known."""


def met(condition: Node, columns: Columns) -> KeyRanges:  # noqa: PLR0911 one a kind
    """Ranges of keys, by their names in the plan, that every row has that meets a condition."""
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


def met_by_column(found: Node, key: Key) -> KeyRanges:  # noqa: PLR0911 one a kind
    """The same, for what was pushed down into the scan of a column."""
    match found:
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


def key_of(expression: Node, columns: Columns) -> tuple[Key, str | None] | None:
    """The key that an expression is, and the type of number that it is cast to."""
    match expression:
        case {"expression_class": "BOUND_CAST", "try_cast": True}:
            # null, where it fails; and null may be what is asked for
            return None
        case {"expression_class": "BOUND_CAST", "child": child, "return_type": {"id": cast}}:
            found = key_of(child, columns)
            number = cast in _WHOLE or cast in _EXACT_BELOW or cast == "DECIMAL"
            if found is None or found[1] is not None or not number or found[0].field.type not in (INT, LONG):
                return None
            return found[0], cast
        case {"expression_class": "BOUND_REF", "index": index} if columns and index < len(columns):
            key = columns[index]
            return None if key is None else (key, None)
    return None


def is_whole(cast: str | None) -> bool:
    """Whether the cast leaves whole numbers what they are."""
    return cast is None or cast in _WHOLE


def value_of(constant: Node) -> Any:  # noqa: PLR0911 one a type
    """A constant in Python: None, a number, str, bytes, datetime, date, tuple or list; else `UNKNOWN`."""
    match constant:
        case {"is_null": True}:
            return None
        case {"type": {"id": name}, "value": {"upper": int(upper), "lower": int(lower)}} if name in _WHOLE:
            return (upper << 64) + lower
        case {"type": {"id": name}, "value": int(value)} if name in _WHOLE:
            return value
        case {"type": {"id": "DECIMAL", "type_info": {"scale": scale}}, "value": value}:
            number = value if isinstance(value, int) else (value["upper"] << 64) + value["lower"]
            return Fraction(number, 10**scale)
        case {"type": {"id": "DOUBLE" | "FLOAT"}, "value": float() | int() as value}:
            return float(value)
        case {"type": {"id": name}, "value": int(value)} if name in _TIMES:
            return _time(name, value)
        case {"type": {"id": "VARCHAR"}, "value": str(value)}:
            return value
        case {"type": {"id": "BLOB"}, "value": str(value)}:
            return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value).encode("latin-1")
        case {"type": {"id": "STRUCT"}, "value": {"children": list(children)}}:
            return tuple(map(value_of, children))
        case {"type": {"id": "LIST" | "ARRAY"}, "value": {"children": list(children)}}:
            return list(map(value_of, children))
    return UNKNOWN


def _time(name: str, number: int) -> KeyValue | _Unknown:
    try:
        return value_of_number(_TIMES[name], number)
    except (ValueError, OverflowError):
        # infinity, or of a year that no key has
        return UNKNOWN


def constant(expression: Node) -> Any:
    """The value of an expression that is a constant."""
    known = expression.get("expression_class") == "BOUND_CONSTANT"
    return value_of(expression["value"]) if known else UNKNOWN


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
        # what is cast may be null
        return KeyRanges()
    return _compared(left, operator, value, columns)


def _is_true(expression: Node) -> bool:
    match expression:
        case {"expression_class": "BOUND_CONSTANT", "value": {"is_null": False, "value": True}}:
            return True
    return False


def _function(name: str, one: Node, others: Sequence[Node], columns: Columns) -> KeyRanges:
    values = [constant(other) for other in others]
    if name in _PREFIXES and all(isinstance(value, str) for value in values) and len(values) <= 2:
        found = key_of(one, columns)
        if found is not None and found[0].field.type == STRING:
            return _beginning(found[0], values[0], _PREFIXES[name] + "".join(values[1:]))
    if name in _LISTS and len(others) == 1 and isinstance(items := constant(one), list):
        return _among(others[0], items, columns)
    return KeyRanges()


def _beginning(key: Key, pattern: str, wildcards: str) -> KeyRanges:
    ends = (n for n, character in enumerate(pattern) if character in wildcards)
    prefix = pattern[: next(ends, len(pattern))]
    if not prefix or key.is_copy:
        return KeyRanges()
    return KeyRanges({key.name: [Range(prefix, after_prefix(prefix))]})


def after_prefix(prefix: str) -> str | None:
    """The smallest text that is above all that begin with the prefix; None when there is none."""
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
    return united([_compared(left, "=", value, columns) for value in values])


def _any_of(key: Key, values: Sequence[Any], type_name: str | None) -> KeyRanges:
    """A key among values; there may be thousands."""
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
    found = key_of(left, columns)
    if found is None or found[0].is_copy:
        return KeyRanges()
    return _bounded(found[0], operator, value, found[1])


def _together(parts: Sequence[Node], operator: str, values: tuple[Any, ...], columns: Columns) -> KeyRanges:
    """Several at once: (a, b) = (1, 2), or (a, b) > (1, 2), of which the first decide."""
    if operator != "=":
        parts, operator = parts[:1], f"{operator[0]}="
    # within a row, null equals null
    found = [
        _compared(part, operator, UNKNOWN if value is None else value, columns)
        for part, value in zip(parts, values, strict=False)
    ]
    return reduce(KeyRanges.intersect, found, KeyRanges())


def _bounded(key: Key, operator: str, value: Any, type_name: str | None) -> KeyRanges:
    ranges = _ranges(key.field, operator, value, type_name)
    return KeyRanges() if ranges is None else KeyRanges({key.name: ranges})


def _ranges(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """Where a key, or what it is as the named type, compares so with a value of that type; None: anywhere."""
    if value is None:
        return []
    if field.type in (INT, LONG):
        return _numbers(field, operator, value, type_name)
    try:
        return [_range(operator, check_key(field, value))]
    except InvalidKey:
        return None


def _numbers(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """The whole numbers that surely compare so with a number."""
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
    # beyond what the key can be: each of its values meets it, or none
    return None if _range(operator, low).contains(smallest) else []


def _range(operator: str, value: Any) -> Range:
    if operator == "=":
        return Range.exactly(value)
    if operator[0] == "<":
        return Range(max=value, max_inclusive=operator == "<=")
    return Range(min=value, min_inclusive=operator == ">=")
