"""The types of expressions and the rules for combining them.

The rules define the type of each result, so that PostgreSQL and DuckDB give the same answers.
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
    """Returns the expression that reads a column."""
    return Cell(_KINDS.get(column.type, "STRING"), column.column_id or 0)


def number(text: str) -> Value:
    """Returns the value of a numeric literal: an INTEGER if it is a whole number of 64 bits, else a DOUBLE.

    Raises `InvalidQuery` for numbers that no DOUBLE can hold.
    """
    if len(text) > _DIGITS_MAX:
        raise InvalidQuery(f"{text[:40]}… is no number that a column can have")
    if text.removeprefix("-").isdigit() and INTEGER_MIN <= (value := int(text)) <= INTEGER_MAX:
        return Value("INTEGER", value)
    if math.isinf(found := float(text)):
        raise InvalidQuery(f"{text[:40]} is larger than any DOUBLE")
    return Value("DOUBLE", found)


def numeral(text: str) -> str:
    """Returns the text unchanged if it is a number. Raises `InvalidQuery` for other texts."""
    if not text.isascii() or not _NUMBER.fullmatch(text):
        raise InvalidQuery(f"{text[:40]!r} is no number")
    return text


def of_kind(expression: Expression, kind: Kind) -> Expression:
    """Returns an expression converted to a kind. A null becomes any kind, and an INTEGER becomes a DOUBLE.

    Raises `InvalidQuery` for other conversions.
    """
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
    """Returns expressions that are compared with each other, after converting them to a common kind.

    Raises `InvalidQuery` if there is none.
    """
    for expression in expressions:
        check_comparable(expression, "a comparison")
    kinds = {e.kind for e in expressions if not (isinstance(e, Value) and e.kind in ("STRING", "NULL"))}
    texts = [e for e in expressions if isinstance(e, Value) and e.kind == "STRING"]
    if kinds == {"INTEGER", "DATE"}:
        # an integer stands for a date in milliseconds
        kinds = {"DATE"}
        expressions = [
            Value("DATE", e.value) if isinstance(e, Value) and e.kind == "INTEGER" else e for e in expressions
        ]
    if kinds == {"INTEGER", "DOUBLE"}:
        # whole numbers stay integers, so that the database can use an index of integers
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
    """Returns a DOUBLE literal such as 1e3 as an INTEGER if it is whole, else the expression unchanged.

    Doubles above 2^53 stay, because they cannot represent every integer.
    """
    value = expression.value if isinstance(expression, Value) else None
    if isinstance(value, float) and abs(value) <= 1 << 53 and value.is_integer():
        return Value("INTEGER", int(value))
    return expression


def check_comparable(expression: Expression, where: str) -> None:
    """Raises `InvalidQuery` for an expression of JSON, which has no order."""
    if expression.kind == "JSON":
        raise InvalidQuery(f"{where} takes no JSON: it can be selected, counted, and tested with IS NULL")


def check_keys(selected: Sequence[Selected]) -> None:
    """Raises `InvalidQuery` if an item has the name ROW_ID or ROW_VERSION but another value.

    An upload of such a result would change wrong rows.
    """
    keys = {ROW_ID: ROW_ID_CELL, ROW_VERSION: ROW_VERSION_CELL}
    for item in selected:
        if keys.get(item.name.upper(), item.expression) != item.expression:
            raise InvalidQuery(f"the query calls another value {item.name}: give it another name")


def numeric(expression: Expression, operator: str) -> Expression:
    """Returns the expression if it is a number. Raises `InvalidQuery` for other kinds."""
    if expression.kind == "NULL":
        return Value("INTEGER", None)
    if expression.kind not in ("INTEGER", "DOUBLE"):
        raise InvalidQuery(f"{operator!r} takes numbers, not {expression.kind}")
    return expression


def arithmetic(operator: Operator, left: Expression, right: Expression) -> Expression:
    """Returns an arithmetic expression.

    Two integers give an integer, except with `/`. A division by 0 gives null.
    """
    left, right = numeric(left, operator), numeric(right, operator)
    if operator == "%":
        if "DOUBLE" in (left.kind, right.kind):
            raise InvalidQuery("'%' takes integers")
        return Apply("INTEGER", operator, (left, right))
    if operator == "/" or left.kind != right.kind:
        left, right = of_kind(left, "DOUBLE"), of_kind(right, "DOUBLE")
    return Apply(left.kind, operator, (left, right))


def like(operands: Sequence[Expression]) -> Expression:
    """Returns a LIKE of a text, a pattern and optionally an escape character. Raises `InvalidQuery`."""
    text, pattern, *escapes = [
        of_kind(operand, "STRING") if operand.kind == "NULL" else operand for operand in operands
    ]
    if text.kind != "STRING" or not isinstance(pattern, Value) or pattern.kind != "STRING":
        raise InvalidQuery("LIKE compares a text with a pattern in quotes")
    for escape in escapes:
        if not isinstance(escape, Value) or not isinstance(escape.value, str) or len(escape.value) != 1:
            raise InvalidQuery("ESCAPE takes one character in quotes")
        _check_escapes(pattern.value, escape.value)
    return Apply("BOOLEAN", "like", (text, pattern, *escapes))


def aggregate(function: Function, operand: Expression, *, distinct: bool) -> Expression:
    """Returns an aggregate. Raises `InvalidQuery` for a kind that the function cannot take."""
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
    """Returns a text literal as a value of `kind`, the kind of the expression with which it is compared.

    Raises `InvalidQuery` if the text is not such a value.
    """
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
    for character in characters:
        if character == escape and next(characters, None) not in ("%", "_", escape):
            raise InvalidQuery(f"in a pattern, {escape!r} may only stand before %, _ or itself")


def check_grouped(expression: Expression, groups: tuple[Expression, ...]) -> None:
    """Raises `InvalidQuery` for an expression that can have several values within a group."""
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
    """Returns a CASE expression.

    Its result is the value of the first true condition, or else the last value.
    """
    values = alike(values)
    pairs = [operand for pair in zip(conditions, values, strict=False) for operand in pair]
    return Apply(values[-1].kind, "case", (*pairs, values[-1]))


def cast(operand: Expression, kind: exp.DataType) -> Expression:
    """Returns a cast to another kind.

    Raises `InvalidQuery` for casts with different results in the two databases.
    """
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
        texts = [Value("STRING", None) if operand.kind == "NULL" else operand for operand in operands]
        for text in texts:
            if text.kind != "STRING":
                raise InvalidQuery(f"{operator!r} takes texts, not {text.kind}")
        return Apply(kind, operator, tuple(texts))

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
"""The functions that make an expression from a call, by the class of the call's sqlglot node.

The operands of a call are in the arguments `this`, `expression` and `expressions` of the node.
"""
