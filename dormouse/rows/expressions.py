"""The parts of a query of a row table, as immutable values. Names and types in them are resolved already."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

Kind: TypeAlias = Literal["INTEGER", "DOUBLE", "STRING", "BOOLEAN", "DATE", "JSON", "NULL"]
"""The kind of an expression, which comparisons need.

ENTITY, LINK and FILE are STRINGs, a literal null is NULL.
"""

Operator: TypeAlias = Literal[
    "+", "-", "*", "/", "%", "negate", "=", "<>", "<", "<=", ">", ">=", "and", "or", "not", "is null", "in",
    "like", "as double", "as text", "case", "coalesce", "nullif", "||", "length", "trim", "abs",
    "is distinct from", "is not distinct from",
]  # fmt: skip
Function: TypeAlias = Literal["count", "sum", "avg", "min", "max"]

ROW_ID_COLUMN, ROW_VERSION_COLUMN = -1, -2
"""The column ids of ROW_ID and ROW_VERSION, which are not columns of the table."""


@dataclass(frozen=True, slots=True)
class Value:
    """A literal value of the statement. The database gets it as a parameter."""

    kind: Kind
    value: int | float | str | bool | None


class ValueNeeded(Exception):
    """A sign that binding a statement needs the value of a parameter, and not only the type."""


class Parameter(Value):
    """A parameter whose value is not known. Reading or comparing the value raises `ValueNeeded`."""

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
    """The value of a column in a row."""

    kind: Kind
    column_id: int


@dataclass(frozen=True, slots=True)
class Apply:
    """An operator with its operands.

    - "and", "or", "in" and "coalesce" take any number of operands.
    - "like" may have the escape character as a third operand.
    - "case" has pairs of a condition and a value. The last operand is the value if no condition is true.
    """

    kind: Kind
    operator: Operator
    operands: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """An aggregate over the rows of a group. `operand` is None for `count(*)`."""

    kind: Kind
    function: Function
    operand: Expression | None
    distinct: bool = False


Expression: TypeAlias = Value | Cell | Apply | Aggregate

ROW_ID_CELL, ROW_VERSION_CELL = Cell("INTEGER", ROW_ID_COLUMN), Cell("INTEGER", ROW_VERSION_COLUMN)


@dataclass(frozen=True, slots=True)
class Selected:
    """An item of the select list."""

    name: str
    type: str
    expression: Expression

    @property
    def column_id(self) -> int | None:
        """The id of the column if the item is a column of the table, or else None. ROW_ID also has None."""
        column_id = self.expression.column_id if isinstance(self.expression, Cell) else 0
        return column_id if column_id > 0 else None


@dataclass(frozen=True, slots=True)
class Order:
    """An expression of an ORDER BY."""

    expression: Expression
    descending: bool = False
    nulls_first: bool = False


@dataclass(frozen=True, slots=True)
class Statement:
    """A query.

    It `is_plain` if it has no groups and no DISTINCT, so that each of its rows is a row of the table.
    """

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
    """Yields the conditions that a WHERE joins with AND."""
    if isinstance(where, Apply) and where.operator == "and":
        for operand in where.operands:
            yield from conditions(operand)
    elif where is not None:
        yield where


def compared(condition: Expression) -> Expression | None:
    """Returns the expression that a condition compares with values, or None for other conditions.

    In rows for which the condition is true, the expression is not null.
    """
    if isinstance(condition, Apply) and condition.operator in {"=", "<", "<=", ">", ">=", "<>", "in", "like"}:
        return condition.operands[0]
    if isinstance(condition, Apply) and condition.operator == "not":
        (inner,) = condition.operands
        if isinstance(inner, Apply) and inner.operator in {"is null", "in", "like"}:
            return inner.operands[0]
    return None


def depth(statement: Statement) -> int:
    """Returns the nesting depth of a statement, including the condition that later pages add."""
    level = [item.expression for item in statement.selected]
    level += [
        *statement.groups,
        *conditions(statement.where),
        *conditions(statement.having),
        *(order.expression for order in statement.orders),
    ]
    levels = 2 * len(statement.orders)
    while level:
        levels += 1
        level = [operand for expression in level for operand in _operands(expression)]
    return levels


def _operands(expression: Expression) -> Sequence[Expression]:
    if isinstance(expression, Apply):
        return expression.operands
    operand = expression.operand if isinstance(expression, Aggregate) else None
    return () if operand is None else (operand,)


def filled(expression: Expression, values: Mapping[str, Value]) -> Expression:
    """Returns an expression after replacing its parameters by their values."""
    if isinstance(expression, Parameter):
        return values[expression.name]
    if isinstance(expression, Apply):
        operands = tuple(filled(operand, values) for operand in expression.operands)
        return Apply(expression.kind, expression.operator, operands)
    return expression


def has_parameter(expression: Expression) -> bool:
    """Returns whether an expression has a parameter whose value is not known."""
    return isinstance(expression, Parameter) or any(map(has_parameter, _operands(expression)))


def has_aggregate(expression: Expression) -> bool:
    """Returns whether an expression is or contains an aggregate."""
    if isinstance(expression, Apply):
        return any(map(has_aggregate, expression.operands))
    return isinstance(expression, Aggregate)
