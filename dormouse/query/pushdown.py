"""What a statement surely wants of a table's row keys, read from the filters of DataFusion's optimized plan.

Whatever is not understood bounds nothing: too much is read, never too little, and DataFusion filters anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import reduce
from typing import Any

from datafusion import Expr
from datafusion.expr import TableScan

from dormouse.errors import InvalidKey
from dormouse.model.keys import KeyValue, check_key
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.query.key_ranges import KeyRanges, united

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
            found = [_compared(schema, column, "=", item) for item in items]
            return united(found)
    return KeyRanges()


def _binary(schema: Schema, expr: Expr) -> KeyRanges:
    operator, (left, right) = expr.rex_call_operator(), expr.rex_call_operands()
    if operator == "AND":
        return _ranges(schema, left).intersect(_ranges(schema, right))
    if operator == "OR":
        return united([_ranges(schema, one) for one in _alternatives(expr)])
    if operator not in _RANGES:
        return KeyRanges()
    # the optimizer has put literals on the right
    return _compared(schema, left, operator, right)


def _alternatives(expr: Expr) -> Iterator[Expr]:
    """The terms of a chain of ORs, however long."""
    stack = [expr]
    while stack:
        one = stack.pop()
        if one.variant_name() == "BinaryExpr" and one.rex_call_operator() == "OR":
            stack.extend(one.rex_call_operands())
        else:
            yield one


def _compared(schema: Schema, column: Expr, operator: str, literal: Expr) -> KeyRanges:
    field = _row_key(schema, column)
    value = None if field is None else _value(field, literal)
    if field is None or value is None:
        return KeyRanges()
    return KeyRanges({field.name: [_RANGES[operator](value)]})


def _row_key(schema: Schema, expr: Expr) -> Field | None:
    if expr.variant_name() == "Cast":
        # a cast that changes the value's kind is told by the literal, which is then not of the field's type
        [expr] = expr.rex_call_operands()
    if expr.variant_name() != "Column":
        return None
    name = expr.to_variant().name()
    return schema.field(name) if name in schema.row_key_names else None


def _value(field: Field, expr: Expr) -> KeyValue | None:
    """The literal, when it is one of the field's type."""
    if expr.variant_name() != "Literal":
        return None
    try:
        return check_key(field, expr.python_value().as_py())
    except (InvalidKey, AttributeError, NotImplementedError, TypeError, ValueError):
        return None
