"""The SQL of PostgreSQL and DuckDB for bound statements.

The SQL has only fixed words, generated names and parameters: no text of the user's query gets into it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from dormouse.rows.expressions import (
    ROW_ID_CELL,
    ROW_ID_COLUMN,
    ROW_VERSION_CELL,
    ROW_VERSION_COLUMN,
    Aggregate,
    Apply,
    Cell,
    Expression,
    Kind,
    Order,
    Value,
)


@dataclass(frozen=True)
class Dialect:
    """The SQL syntax that differs between PostgreSQL and DuckDB, for one of these databases."""

    parameter: str
    types: dict[Kind, str]
    text: str
    """A template for text parameters, which makes the database compare them byte by byte."""
    modulo: str
    escape: str
    """The clause after a LIKE pattern that makes the backslash its escape character."""
    of_booleans: dict[str, str]
    bytes_of: str
    """The function that returns the size of a text in bytes."""
    trim: str
    """The function that removes characters at both ends of a text."""


POSTGRES = Dialect(
    parameter="%({})s",
    types={"INTEGER": "bigint", "DATE": "bigint", "DOUBLE": "float8", "BOOLEAN": "boolean", "STRING": "text"},
    text='({} collate "C")',
    modulo="%%",
    escape="",
    of_booleans={"min": "bool_and", "max": "bool_or"},
    bytes_of="octet_length",
    trim="btrim",
)
DUCKDB = Dialect(
    parameter="${}",
    types={
        "INTEGER": "bigint",
        "DATE": "bigint",
        "DOUBLE": "double",
        "BOOLEAN": "boolean",
        "STRING": "varchar",
    },
    text="{}",
    modulo="%",
    escape=" escape '\\'",
    of_booleans={},
    bytes_of="strlen",
    trim="trim",
)


def column_name(column_id: int) -> str:
    """Returns the name that the column with an id has in the tables of an index."""
    special = {ROW_ID_COLUMN: "row_id", ROW_VERSION_COLUMN: "row_version"}
    return special.get(column_id) or f"c_{column_id:d}"


@dataclass
class Emitter:
    """A writer of the parts of one SQL statement.

    Equal values share a parameter. So equal expressions have equal SQL, which GROUP BY needs, for example.
    """

    dialect: Dialect
    values: dict[str, Any] = field(default_factory=dict)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)

    def expression(self, expression: Expression) -> str:
        if isinstance(expression, Cell):
            return column_name(expression.column_id)
        if isinstance(expression, Value):
            return self._parameter(expression.kind, expression.value)
        if isinstance(expression, Aggregate):
            return self._aggregate(expression)
        return _WRITERS.get(expression.operator, Emitter._infix)(self, expression)

    def conditions(self, conditions: Sequence[Expression]) -> str:
        """Returns a WHERE clause of all conditions, or an empty text without conditions."""
        return f" where {' and '.join(map(self.expression, conditions))}" if conditions else ""

    def orders(self, orders: Sequence[Order], numbers: dict[Expression, int] | None = None) -> str:
        """Returns an ORDER BY clause, or an empty text without orders.

        `numbers` has the numbers of selected items, which the clause uses in place of their SQL.
        """
        if not orders:
            return ""
        return f" order by {', '.join(self._order(order, numbers or {}) for order in orders)}"

    def count(self, rows: int) -> str:
        """Returns the SQL of a parameter for LIMIT or OFFSET, whose value is a number of rows."""
        return self._parameter("INTEGER", rows)

    def size(self, texts: Sequence[Expression]) -> str:
        """Returns the SQL of an expression for the size of several texts together, in bytes."""
        kind, written = self.dialect.types["INTEGER"], map(self.expression, texts)
        return " + ".join(f"coalesce(cast({self.dialect.bytes_of}({text}) as {kind}), 0)" for text in written)

    def _order(self, order: Order, numbers: dict[Expression, int]) -> str:
        number = numbers.get(order.expression)
        written = self.expression(order.expression) if number is None else str(number)
        direction = " desc" if order.descending else ""
        if order.expression in (ROW_ID_CELL, ROW_VERSION_CELL):
            return written + direction  # never null; without "nulls" an index can give the order
        return f"{written}{direction} nulls {'first' if order.nulls_first else 'last'}"

    def _parameter(self, kind: Kind, value: Any) -> str:
        key = (kind, repr(value))
        if (name := self._names.get(key)) is None:
            self._names[key] = name = f"p{len(self._names)}"
            self.values[name] = value
        cast = f"cast({self.dialect.parameter.format(name)} as {self.dialect.types[kind]})"
        return self.dialect.text.format(cast) if kind == "STRING" else cast

    def _infix(self, applied: Apply) -> str:
        operator = self.dialect.modulo if applied.operator == "%" else applied.operator
        return f"({f' {operator} '.join(map(self.expression, applied.operands))})"

    def _division(self, applied: Apply) -> str:
        """Returns the SQL of a division or modulo. The result is null if the divisor is 0."""
        left, right = map(self.expression, applied.operands)
        operator = self.dialect.modulo if applied.operator == "%" else applied.operator
        return f"({left} {operator} nullif({right}, {self.expression(Value(applied.operands[1].kind, 0))}))"

    def _prefix(self, applied: Apply) -> str:
        sign = {"negate": "-", "not": "not"}[applied.operator]
        return f"({sign} {self.expression(applied.operands[0])})"

    def _is_null(self, applied: Apply) -> str:
        return f"({self.expression(applied.operands[0])} is null)"

    def _as_double(self, applied: Apply) -> str:
        return f"cast({self.expression(applied.operands[0])} as {self.dialect.types['DOUBLE']})"

    def _as_text(self, applied: Apply) -> str:
        written = f"cast({self.expression(applied.operands[0])} as {self.dialect.types['STRING']})"
        return self.dialect.text.format(written)

    def _call(self, applied: Apply) -> str:
        return f"{applied.operator}({', '.join(map(self.expression, applied.operands))})"

    def _length(self, applied: Apply) -> str:
        return f"cast({self._call(applied)} as {self.dialect.types['INTEGER']})"

    def _trim(self, applied: Apply) -> str:
        text, space = self.expression(applied.operands[0]), self._parameter("STRING", " ")
        return f"{self.dialect.trim}({text}, {space})"

    def _case(self, applied: Apply) -> str:
        *pairs, default = map(self.expression, applied.operands)
        whens = [f"when {pairs[n]} then {pairs[n + 1]}" for n in range(0, len(pairs), 2)]
        return f"(case {' '.join(whens)} else {default} end)"

    def _in(self, applied: Apply) -> str:
        value, *others = map(self.expression, applied.operands)
        return f"({value} in ({', '.join(others)}))"

    def _like(self, applied: Apply) -> str:
        text, pattern, *escapes = applied.operands
        assert isinstance(pattern, Value)  # noqa: S101 it was bound as one
        given = escapes[0].value if escapes and isinstance(escapes[0], Value) else None
        written = None if pattern.value is None else _with_backslashes(str(pattern.value), given)
        escape = self.dialect.escape if written and "\\" in written else ""
        return f"({self.expression(text)} like {self._parameter('STRING', written)}{escape})"

    def _aggregate(self, aggregate: Aggregate) -> str:
        if aggregate.operand is None:
            return "count(*)"
        name = str(aggregate.function)
        if aggregate.operand.kind == "BOOLEAN":
            name = self.dialect.of_booleans.get(name, name)
        distinct = "distinct " if aggregate.distinct else ""
        written = f"{name}({distinct}{self.expression(aggregate.operand)})"
        if aggregate.function in ("sum", "avg"):
            return f"cast({written} as {self.dialect.types[aggregate.kind]})"
        return written


_WRITERS: dict[str, Callable[[Emitter, Apply], str]] = {
    "/": Emitter._division,
    "%": Emitter._division,
    "negate": Emitter._prefix,
    "not": Emitter._prefix,
    "is null": Emitter._is_null,
    "as double": Emitter._as_double,
    "as text": Emitter._as_text,
    "coalesce": Emitter._call,
    "nullif": Emitter._call,
    "abs": Emitter._call,
    "length": Emitter._length,
    "trim": Emitter._trim,
    "case": Emitter._case,
    "in": Emitter._in,
    "like": Emitter._like,
}


def _with_backslashes(pattern: str, escape: Any) -> str:
    """Returns a LIKE pattern after replacing its escape character by the backslash."""
    written, characters = [], iter(pattern)
    for character in characters:
        if character == escape:
            written.append("\\" + next(characters))
        else:
            written.append("\\\\" if character == "\\" else character)
    return "".join(written)
