"""What a query of a row table consists of, once its names and types are known: pure values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

Kind: TypeAlias = Literal["INTEGER", "DOUBLE", "STRING", "BOOLEAN", "DATE", "JSON", "NULL"]
"""What counts for comparisons: an ENTITY, LINK or FILE is a STRING, a bare null is NULL."""

Operator: TypeAlias = Literal[
    "+", "-", "*", "/", "%", "negate", "=", "<>", "<", "<=", ">", ">=", "and", "or", "not", "is null", "in",
    "like", "as double", "as text", "case", "coalesce", "nullif", "||", "length", "trim", "abs",
    "is distinct from", "is not distinct from",
]  # fmt: skip
Function: TypeAlias = Literal["count", "sum", "avg", "min", "max"]

ROW_ID_COLUMN, ROW_VERSION_COLUMN = -1, -2
"""What stands for a column's id."""


@dataclass(frozen=True, slots=True)
class Value:
    """What stood in the statement as itself; it travels as a parameter."""

    kind: Kind
    value: int | float | str | bool | None


class ValueNeeded(Exception):
    """What a statement means depends on the value of a parameter."""


class Parameter(Value):
    """A parameter whose value is not known; who wants to know it, or compares it, gets `ValueNeeded`."""

    __slots__ = ("name",)
    name: str

    def __init__(self, kind: Kind, name: str) -> None:
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "name", name)

    @property
    def value(self) -> NoReturn:
        raise ValueNeeded

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Value):
            raise ValueNeeded
        return NotImplemented

    __hash__ = Value.__hash__


@dataclass(frozen=True, slots=True)
class Cell:
    """A column of the row."""

    kind: Kind
    column_id: int


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator on its operands: of "and", "or", "in" and "coalesce" any number.

    "like" has a third that escapes.
    "case" has pairs of a condition and a value, and then the value of none.
    """

    kind: Kind
    operator: Operator
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Of the rows of a group; `operand` is None for `count(*)`."""

    kind: Kind
    function: Function
    operand: Expression | None
    distinct: bool = False


Expression: TypeAlias = Value | Cell | Apply | Aggregate

ROW_ID_CELL, ROW_VERSION_CELL = Cell("INTEGER", ROW_ID_COLUMN), Cell("INTEGER", ROW_VERSION_COLUMN)


@dataclass(frozen=True, slots=True)
class Selected:
    """An item of the select list; `column_id` when it is a column as it is."""

    name: str
    type: str
    expression: Expression

    @property
    def column_id(self) -> int | None:
        """Of a column of the table as it is; ROW_ID and ROW_VERSION are none."""
        found = self.expression.column_id if isinstance(self.expression, Cell) else 0
        return found if found > 0 else None


@dataclass(frozen=True, slots=True)
class Order:
    """A part of the order of the rows."""

    expression: Expression
    descending: bool = False
    nulls_first: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A query. It `is_plain` when each of its rows is one of the table's."""

    selected: tuple[Selected, ...]
    distinct: bool = False
    where: Expression | None = None
    groups: tuple[Expression, ...] = ()
    is_grouped: bool = False
    orders: tuple[Order, ...] = ()
    limit: int | None = None
    offset: int = 0
    having: Expression | None = None

    @property
    def is_plain(self) -> bool:
        return not (self.distinct or self.is_grouped)


def conditions(where: Expression | None) -> Iterator[Expression]:
    """What must all be true."""
    if isinstance(where, Apply) and where.operator == "and":
        for operand in where.operands:
            yield from conditions(operand)
    elif where is not None:
        yield where


def compared(condition: Expression) -> Expression | None:
    """What a condition compares with values, and so is never null where it is true."""
    if isinstance(condition, Apply) and condition.operator in {"=", "<", "<=", ">", ">=", "<>", "in", "like"}:
        return condition.operands[0]
    if isinstance(condition, Apply) and condition.operator == "not":
        (inner,) = condition.operands
        if isinstance(inner, Apply) and inner.operator in {"is null", "in", "like"}:
            return inner.operands[0]
    return None


def depth(statement: Statement) -> int:
    """How deep its expressions are, and the condition of being after a place in its order."""
    level = [item.expression for item in statement.selected]
    level += [
        *statement.groups,
        *conditions(statement.where),
        *conditions(statement.having),
        *(one.expression for one in statement.orders),
    ]
    found = 2 * len(statement.orders)
    while level:
        found += 1
        level = [operand for one in level for operand in _operands(one)]
    return found


def _operands(expression: Expression) -> Sequence[Expression]:
    if isinstance(expression, Apply):
        return expression.operands
    operand = expression.operand if isinstance(expression, Aggregate) else None
    return () if operand is None else (operand,)


def filled(expression: Expression, values: Mapping[str, Value]) -> Expression:
    """With the values of its parameters."""
    if isinstance(expression, Parameter):
        return values[expression.name]
    if isinstance(expression, Apply):
        operands = tuple(filled(one, values) for one in expression.operands)
        return Apply(expression.kind, expression.operator, operands)
    return expression


def has_parameter(expression: Expression) -> bool:
    """Whether it has one whose value is not known."""
    return isinstance(expression, Parameter) or any(map(has_parameter, _operands(expression)))


def has_aggregate(expression: Expression) -> bool:
    """Whether it is of a group, somewhere within."""
    if isinstance(expression, Apply):
        return any(map(has_aggregate, expression.operands))
    return isinstance(expression, Aggregate)
