"""What a statement surely wants of a table's row keys, read from the filters of DataFusion's optimized plan.

Whatever is not understood bounds nothing: too much is read, never too little, and DataFusion filters anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from decimal import Decimal
from functools import reduce
from typing import Any

import pyarrow as pa
from datafusion import Expr
from datafusion.expr import TableScan

from dormouse.errors import InvalidKey
from dormouse.model.keys import KeyValue, check_key, min_value
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import INT, LONG, STRING
from dormouse.query.key_ranges import KeyRanges, united

EXACT_DOUBLE_MAX = 1 << 53
"""Up to it DOUBLE has every whole number, so that a key made a DOUBLE is still itself."""
_CODE_POINT_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_WILDCARDS = "%_\\"
_RANGES: dict[str, Callable[[KeyValue], Range]] = {
    "=": Range.exactly,
    "<": lambda value: Range(max=value),
    "<=": lambda value: Range(max=value, max_inclusive=True),
    ">": lambda value: Range(min=value, min_inclusive=False),
    ">=": lambda value: Range(min=value),
}


def scans(plan: Any) -> Iterator[TableScan]:
    """The scans of a logical plan, but for those of subqueries that stand in expressions."""
    stack = [plan]
    while stack:
        node = stack.pop()
        stack.extend(node.inputs())
        if node.display().startswith("TableScan"):
            yield node.to_variant()


def wanted(schema: Schema, filters: Iterable[Expr]) -> KeyRanges:
    """Ranges that every row has that meets all of the filters."""
    return reduce(KeyRanges.intersect, (_ranges(schema, one) for one in filters), KeyRanges())


def _ranges(schema: Schema, expr: Expr) -> KeyRanges:
    match expr.variant_name():
        case "BinaryExpr":
            return _binary(schema, expr)
        case "InList" if not expr.to_variant().negated():
            column, *items = expr.rex_call_operands()
            return united([_compared(schema, column, "=", item) for item in items])
        case "Like" if not expr.to_variant().negated():
            return _like(schema, expr)
        case "IsTrue":
            [condition] = expr.rex_call_operands()
            return _ranges(schema, condition)
    return KeyRanges()


def _binary(schema: Schema, expr: Expr) -> KeyRanges:
    operator, (left, right) = expr.rex_call_operator(), expr.rex_call_operands()
    if operator == "AND":
        return reduce(KeyRanges.intersect, (_ranges(schema, one) for one in _terms(expr, "AND")))
    if operator == "OR":
        return united([_ranges(schema, one) for one in _terms(expr, "OR")])
    if operator == "IS NOT DISTINCT FROM":
        # of a key, which is never null, the same
        operator = "="
    if operator not in _RANGES:
        return KeyRanges()
    # the optimizer has put literals on the right
    return _compared(schema, left, operator, right)


def _terms(expr: Expr, operator: str) -> Iterator[Expr]:
    """The terms of a chain of ANDs or ORs, however long."""
    stack = [expr]
    while stack:
        one = stack.pop()
        if one.variant_name() == "BinaryExpr" and one.rex_call_operator() == operator:
            stack.extend(one.rex_call_operands())
        else:
            yield one


def _compared(schema: Schema, column: Expr, operator: str, literal: Expr) -> KeyRanges:
    if column.variant_name() == "ScalarFunction":
        return _together(schema, column, operator, literal)
    field, scalar = _row_key(schema, column), _scalar(literal)
    return KeyRanges() if field is None or scalar is None else _bounded(field, operator, scalar)


def _bounded(field: Field, operator: str, scalar: pa.Scalar) -> KeyRanges:
    value = _python(scalar)
    if field.type in (INT, LONG) and isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        return _number(field, operator, scalar)
    try:
        return KeyRanges({field.name: [_RANGES[operator](check_key(field, value))]})
    except InvalidKey:
        return KeyRanges()


def _number(field: Field, operator: str, scalar: pa.Scalar) -> KeyRanges:
    """A whole number compared with any number: the whole numbers that surely meet it."""
    value = scalar.as_py()
    if not isinstance(value, int):
        if not _is_exact(scalar):
            return KeyRanges()
        low, high = math.ceil(value), math.floor(value)
        if low != high:
            if operator == "=":
                return KeyRanges({field.name: []})
            operator, value = ("<=", high) if operator in ("<", "<=") else (">=", low)
        else:
            value = low
    smallest = min_value(field.type)
    assert isinstance(smallest, int)  # noqa: S101 it is of a number
    if smallest <= value < -smallest:
        return KeyRanges({field.name: [_RANGES[operator](value)]})
    # beyond what the key can be: each of its values meets it, or none
    return KeyRanges() if _RANGES[operator](value).contains(smallest) else KeyRanges({field.name: []})


def _is_exact(scalar: pa.Scalar) -> bool:
    """Whether whole numbers near it are still themselves when they are made of its type."""
    value = scalar.as_py()
    if pa.types.is_decimal(scalar.type):
        return bool(scalar.type.scale >= 0)
    return bool(scalar.type == pa.float64() and math.isfinite(value) and abs(value) < EXACT_DOUBLE_MAX)


def _together(schema: Schema, expr: Expr, operator: str, literal: Expr) -> KeyRanges:
    """Several columns compared at once: (a, b) = (1, 2)."""
    scalar = _scalar(literal)
    columns = expr.rex_call_operands()
    if operator != "=" or not isinstance(scalar, pa.StructScalar) or len(scalar.type) != len(columns):
        return KeyRanges()
    if not expr.canonical_name().startswith("struct("):
        return KeyRanges()
    parts = [
        _bounded(field, "=", scalar[n])
        for n, column in enumerate(columns)
        if (field := _row_key(schema, column)) is not None
    ]
    return reduce(KeyRanges.intersect, parts, KeyRanges())


def _like(schema: Schema, expr: Expr) -> KeyRanges:
    """Text that begins with what stands before the first wildcard."""
    column, pattern = expr.rex_call_operands()
    field, scalar = _row_key(schema, column), _scalar(pattern)
    text = None if scalar is None else _python(scalar)
    like = expr.to_variant()
    if (
        field is None
        or field.type != STRING
        or not isinstance(text, str)
        or " ILIKE " in expr.canonical_name()
    ):
        return KeyRanges()
    wildcards = _WILDCARDS + (like.escape_char() or "")
    ends = (n for n, character in enumerate(text) if character in wildcards)
    prefix = text[: next(ends, len(text))]
    return KeyRanges({field.name: [Range(prefix, after_prefix(prefix))]}) if prefix else KeyRanges()


def after_prefix(prefix: str) -> str | None:
    """The smallest text that is above all that begin with the prefix; None when there is none."""
    for end in range(len(prefix), 0, -1):
        following = ord(prefix[end - 1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _CODE_POINT_MAX:
            return prefix[: end - 1] + chr(following)
    return None


def _row_key(schema: Schema, expr: Expr) -> Field | None:
    if expr.variant_name() == "Cast":
        # a cast that changes the value's kind is told by the literal, which is then not of the field's type
        [expr] = expr.rex_call_operands()
    if expr.variant_name() != "Column":
        return None
    name = expr.to_variant().name()
    return schema.field(name) if name in schema.row_key_names else None


def _scalar(expr: Expr) -> pa.Scalar | None:
    """The literal, when it is one that Python knows."""
    if expr.variant_name() != "Literal":
        return None
    try:
        found: pa.Scalar = expr.python_value()
    except (AttributeError, NotImplementedError, TypeError, ValueError):
        return None
    return found


def _python(scalar: pa.Scalar) -> Any:
    """Its value; None when Python has none for it."""
    try:
        return scalar.as_py()
    except (NotImplementedError, OverflowError, TypeError, ValueError, UnicodeDecodeError):
        return None
