"""The types of expressions, and the functions of their values, whichever database computes them.

They say which values can meet, and as which kind, so that PostgreSQL and DuckDB answer alike.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlglot import exp

from dormouse.errors import InvalidQuery, InvalidRow
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.model.text import plural
from dormouse.rows.columns import Column, value_of
from dormouse.rows.expressions import (
    ROW_ID_CELL,
    ROW_VERSION_CELL,
    Aggregate,
    Apply,
    Cell,
    Expression,
    Function,
    Kind,
    Operator,
    Selected,
    Value,
)
from dormouse.rows.sql import ELSEWHERE

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
_DIGITS_MAX = 400
_NUMBER = re.compile(r"\d+(\.\d*)?([eE][+-]?\d+)?|\.\d+([eE][+-]?\d+)?")
_KINDS: dict[str, Kind] = {
    "INTEGER": "INTEGER",
    "DOUBLE": "DOUBLE",
    "DATE": "DATE",
    "BOOLEAN": "BOOLEAN",
    "JSON": "JSON",
}


def cell(column: Column) -> Cell:
    """A column as it is."""
    return Cell(_KINDS.get(column.type, "STRING"), column.column_id or 0)


def number(text: str) -> Value:
    """A literal, which is a DOUBLE when it has a point, or more than 64 bits."""
    if len(text) > _DIGITS_MAX:
        raise InvalidQuery(f"{text[:40]}… is no number that a column can have")
    if text.removeprefix("-").isdigit() and INTEGER_MIN <= (value := int(text)) <= INTEGER_MAX:
        return Value("INTEGER", value)
    if math.isinf(found := float(text)):
        raise InvalidQuery(f"{text[:40]} is larger than any DOUBLE")
    return Value("DOUBLE", found)


def numeral(text: str) -> str:
    """Returns the text of a number; `InvalidQuery` for another."""
    if not text.isascii() or not _NUMBER.fullmatch(text):
        raise InvalidQuery(f"{text[:40]!r} is no number")
    return text


def of_kind(expression: Expression, kind: Kind) -> Expression:
    """The same as another kind: of a null, of an integer as a double."""
    if expression.kind == kind:
        return expression
    if isinstance(expression, Value):
        if expression.kind == "NULL":
            return Value(kind, None)
        if expression.kind == "INTEGER" and kind == "DOUBLE":
            return Value(kind, float(expression.value))  # type: ignore[arg-type]
    if expression.kind == "INTEGER" and kind == "DOUBLE":
        return Apply(kind, "as double", (expression,))
    raise InvalidQuery(f"{expression.kind} and {kind} cannot be compared or combined")


def alike(expressions: Sequence[Expression]) -> list[Expression]:
    """Expressions that are compared with each other, as one kind; `InvalidQuery`."""
    for expression in expressions:
        check_comparable(expression, "a comparison")
    kinds = {e.kind for e in expressions if not (isinstance(e, Value) and e.kind in ("STRING", "NULL"))}
    texts = [e for e in expressions if isinstance(e, Value) and e.kind == "STRING"]
    if kinds == {"INTEGER", "DATE"}:
        # a date is its milliseconds
        kinds = {"DATE"}
        expressions = [
            Value("DATE", e.value) if isinstance(e, Value) and e.kind == "INTEGER" else e for e in expressions
        ]
    if kinds == {"INTEGER", "DOUBLE"}:
        # as an index of integers has them, where it can be
        expressions = [_whole(e) for e in expressions]
        kinds = {e.kind for e in expressions} - {"STRING", "NULL"}
        kinds = {"DOUBLE"} if len(kinds) > 1 else kinds
    if not kinds and texts:
        kinds = {"STRING"}
    if len(kinds) > 1:
        raise InvalidQuery(f"{' and '.join(sorted(kinds))} cannot be compared")
    kind: Kind = next(iter(kinds), "STRING")
    return [read(e, kind) if e in texts and kind != "STRING" else of_kind(e, kind) for e in expressions]


def _whole(expression: Expression) -> Expression:
    """A literal such as 1e3 as the integer that it is; above 2^53, doubles leave integers out."""
    value = expression.value if isinstance(expression, Value) else None
    if isinstance(value, float) and abs(value) <= 1 << 53 and value.is_integer():
        return Value("INTEGER", int(value))
    return expression


def check_comparable(expression: Expression, where: str) -> None:
    """`InvalidQuery` for JSON, which has no order."""
    if expression.kind == "JSON":
        raise InvalidQuery(f"{where} takes no JSON: it can be selected, counted, and asked for IS NULL")


def check_keys(selected: Sequence[Selected]) -> None:
    """`InvalidQuery` for another value with the name of a row's id or version, which an upload would take."""
    keys = {ROW_ID: ROW_ID_CELL, ROW_VERSION: ROW_VERSION_CELL}
    for item in selected:
        if keys.get(item.name.upper(), item.expression) != item.expression:
            raise InvalidQuery(f"the query calls another value {item.name}: give it another name")


def numeric(expression: Expression, operator: str) -> Expression:
    """`InvalidQuery` for what cannot be calculated with."""
    if expression.kind == "NULL":
        return Value("INTEGER", None)
    if expression.kind not in ("INTEGER", "DOUBLE"):
        raise InvalidQuery(f"{operator!r} takes numbers, not {expression.kind}")
    return expression


def arithmetic(operator: Operator, left: Expression, right: Expression) -> Expression:
    """Integers stay integers but for `/`; what is divided by 0 is null."""
    left, right = numeric(left, operator), numeric(right, operator)
    if operator == "%":
        if "DOUBLE" in (left.kind, right.kind):
            raise InvalidQuery("'%' takes integers")
        return Apply("INTEGER", operator, (left, right))
    if operator == "/" or left.kind != right.kind:
        left, right = of_kind(left, "DOUBLE"), of_kind(right, "DOUBLE")
    return Apply(left.kind, operator, (left, right))


def like(operands: Sequence[Expression]) -> Expression:
    """A text and a pattern, and what takes the meaning of the pattern's next character."""
    text, pattern, *escapes = [of_kind(one, "STRING") if one.kind == "NULL" else one for one in operands]
    if text.kind != "STRING" or not isinstance(pattern, Value) or pattern.kind != "STRING":
        raise InvalidQuery("LIKE compares a text with a pattern in quotes")
    for escape in escapes:
        if not isinstance(escape, Value) or not isinstance(escape.value, str) or len(escape.value) != 1:
            raise InvalidQuery("ESCAPE takes one character in quotes")
        _check_escapes(pattern.value, escape.value)
    return Apply("BOOLEAN", "like", (text, pattern, *escapes))


def aggregate(function: Function, operand: Expression, *, distinct: bool) -> Expression:
    """`InvalidQuery` for a kind that the function cannot take."""
    if function == "count":
        if distinct:
            check_comparable(operand, "count(DISTINCT …)")
        return Aggregate(
            "INTEGER", function, of_kind(operand, "STRING") if operand.kind == "NULL" else operand, distinct
        )
    if function in ("sum", "avg"):
        operand = numeric(operand, function)
        return Aggregate("DOUBLE" if function == "avg" else operand.kind, function, operand, distinct)
    check_comparable(operand, function)
    operand = of_kind(operand, "STRING") if operand.kind == "NULL" else operand
    return Aggregate(operand.kind, function, operand)


def read(text: Expression, kind: Kind) -> Value:
    """A text that is compared with what is none, as a value of that kind; `InvalidQuery`."""
    assert isinstance(text, Value) and isinstance(text.value, str)  # noqa: S101
    value: Any = text.value
    if kind in ("DATE", "DOUBLE"):
        try:
            value = value_of(Column("value", kind), value, "it")
            return Value(kind, value)
        except InvalidRow:
            pass
    if kind in ("INTEGER", "DOUBLE", "DATE"):
        try:
            found = number(value)
        except ValueError:
            pass
        else:
            if kind == "DOUBLE" or found.kind == "INTEGER":
                return Value(kind, float(found.value) if kind == "DOUBLE" else found.value)  # type: ignore[arg-type]
    if kind == "BOOLEAN" and value.lower() in ("true", "false"):
        return Value(kind, value.lower() == "true")
    raise InvalidQuery(f"{value[:60]!r} is no {kind}, with which it is compared")


def _check_escapes(pattern: Any, escape: str) -> None:
    characters = iter(pattern or "")
    for one in characters:
        if one == escape and next(characters, None) not in ("%", "_", escape):
            raise InvalidQuery(f"in a pattern, {escape!r} stands before %, _ or itself")


def check_grouped(expression: Expression, groups: tuple[Expression, ...]) -> None:
    """`InvalidQuery` for what has several values within a group."""
    if expression in groups or isinstance(expression, Aggregate | Value):
        return
    if isinstance(expression, Cell):
        raise InvalidQuery(
            "with aggregates or GROUP BY, a column that is selected or ordered by must be in GROUP BY"
        )
    for operand in expression.operands:
        check_grouped(operand, groups)


Operands = Sequence[Expression]
ARITHMETIC: dict[type, Operator] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
COMPARED: dict[type, Operator] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
AGGREGATES: dict[type, Function] = {
    exp.Count: "count", exp.Sum: "sum", exp.Avg: "avg", exp.Min: "min", exp.Max: "max",
}  # fmt: skip
_CASTS: Mapping[object, Kind] = {
    exp.DataType.Type.INT: "INTEGER",
    exp.DataType.Type.BIGINT: "INTEGER",
    exp.DataType.Type.DOUBLE: "DOUBLE",
    exp.DataType.Type.VARCHAR: "STRING",
    exp.DataType.Type.TEXT: "STRING",
    exp.DataType.Type.BOOLEAN: "BOOLEAN",
    exp.DataType.Type.DATE: "DATE",
}


def case(conditions: Operands, values: Operands) -> Expression:
    """The value of the first condition that is true; the last value is that of none."""
    values = alike(values)
    pairs = [one for pair in zip(conditions, values, strict=False) for one in pair]
    return Apply(values[-1].kind, "case", (*pairs, values[-1]))


def cast(operand: Expression, kind: exp.DataType) -> Expression:
    """A value as another kind where all databases have the same of it; `InvalidQuery`."""
    to = _CASTS.get(kind.this)
    if operand.kind == to:
        return operand
    if to is not None and operand.kind == "NULL":
        return Value(to, None)
    if to is not None and isinstance(operand, Value) and operand.kind == "STRING":
        return read(operand, to)
    if (operand.kind, to) == ("INTEGER", "DOUBLE"):
        return of_kind(operand, "DOUBLE")
    if to == "STRING" and operand.kind in ("INTEGER", "BOOLEAN"):
        return Apply("STRING", "as text", (operand,))
    raise InvalidQuery(
        f"the query has a cast of {operand.kind} to {kind.sql()}, which is not allowed; {ELSEWHERE}"
    )


def _same(operator: Operator) -> Callable[[Operands], Expression]:
    def apply(operands: Operands) -> Expression:
        found = alike(operands)
        return Apply(found[0].kind, operator, tuple(found))

    return apply


def _distinct(operator: Operator) -> Callable[[Operands], Expression]:
    return lambda operands: Apply("BOOLEAN", operator, tuple(alike(operands)))


def _texts(kind: Kind, operator: Operator, count: int = 1) -> Callable[[Operands], Expression]:
    def apply(operands: Operands) -> Expression:
        if len(operands) != count:
            raise InvalidQuery(f"{operator!r} takes {plural(count, 'text')}")
        found = [Value("STRING", None) if one.kind == "NULL" else one for one in operands]
        for one in found:
            if one.kind != "STRING":
                raise InvalidQuery(f"{operator!r} takes texts, not {one.kind}")
        return Apply(kind, operator, tuple(found))

    return apply


def _absolute(operands: Operands) -> Expression:
    operand = numeric(operands[0], "abs")
    return Apply(operand.kind, "abs", (operand,))


CALLS: Mapping[type, Callable[[Operands], Expression]] = {
    exp.Coalesce: _same("coalesce"),
    exp.Nullif: _same("nullif"),
    exp.NullSafeNEQ: _distinct("is distinct from"),
    exp.NullSafeEQ: _distinct("is not distinct from"),
    exp.DPipe: _texts("STRING", "||", 2),
    exp.Length: _texts("INTEGER", "length"),
    exp.Trim: _texts("STRING", "trim"),
    exp.Abs: _absolute,
}
"""What is made of the operands of each, which stand in `this`, `expression` and `expressions`."""
