"""Functions of rows' values: their operands as one kind, as PostgreSQL and DuckDB answer alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from sqlglot import exp

from dormouse.errors import InvalidQuery
from dormouse.model.text import plural
from dormouse.rows import types
from dormouse.rows.expressions import Apply, Expression, Function, Kind, Operator, Value
from dormouse.rows.sql import ELSEWHERE

Operands = Sequence[Expression]
ARITHMETIC: dict[type, Operator] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}
COMPARED: dict[type, Operator] = {
    exp.EQ: "=", exp.NEQ: "<>", exp.LT: "<", exp.LTE: "<=", exp.GT: ">", exp.GTE: ">=",
}  # fmt: skip
AGGREGATES: dict[type, Function] = {
    exp.Count: "count", exp.Sum: "sum", exp.Avg: "avg", exp.Min: "min", exp.Max: "max",
}  # fmt: skip
_KINDS: Mapping[object, Kind] = {
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
    values = types.alike(values)
    pairs = [one for pair in zip(conditions, values, strict=False) for one in pair]
    return Apply(values[-1].kind, "case", (*pairs, values[-1]))


def cast(operand: Expression, kind: exp.DataType) -> Expression:
    """A value as another kind where all databases have the same of it; `InvalidQuery`."""
    to = _KINDS.get(kind.this)
    if operand.kind == to:
        return operand
    if to is not None and operand.kind == "NULL":
        return Value(to, None)
    if to is not None and isinstance(operand, Value) and operand.kind == "STRING":
        return types.read(operand, to)
    if (operand.kind, to) == ("INTEGER", "DOUBLE"):
        return types.of_kind(operand, "DOUBLE")
    if to == "STRING" and operand.kind in ("INTEGER", "BOOLEAN"):
        return Apply("STRING", "as text", (operand,))
    raise InvalidQuery(
        f"the query has a cast of {operand.kind} to {kind.sql()}, which is not allowed; {ELSEWHERE}"
    )


def _same(operator: Operator) -> Callable[[Operands], Expression]:
    def apply(operands: Operands) -> Expression:
        found = types.alike(operands)
        return Apply(found[0].kind, operator, tuple(found))

    return apply


def _distinct(operator: Operator) -> Callable[[Operands], Expression]:
    return lambda operands: Apply("BOOLEAN", operator, tuple(types.alike(operands)))


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
    operand = types.numeric(operands[0], "abs")
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
