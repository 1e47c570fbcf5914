"""A page of a query as statements: after which row it begins, in which order rows come.

Rows of the table come after the place of the last one in their order, so that a page costs what it gives.
Groups and distinct rows are few: they are counted off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dormouse.rows.emit import Dialect, Emitter
from dormouse.rows.expressions import (
    ROW_ID_CELL,
    ROW_VERSION_CELL,
    Apply,
    Cell,
    Expression,
    Order,
    Statement,
    Value,
    compared,
    conditions,
)

NEVER_NULL = (ROW_ID_CELL, ROW_VERSION_CELL)
_NOTHING: Expression = Value("BOOLEAN", False)


@dataclass(frozen=True)
class Part:
    """Some of the rows of a page, in their order, as one statement; those of the next part follow them."""

    conditions: tuple[Expression, ...]
    orders: tuple[Order, ...]


def total_order(statement: Statement) -> tuple[Order, ...]:
    """The order in which no two rows are equal."""
    orders = list(statement.orders)
    if statement.is_plain:
        more: Sequence[Expression] = [ROW_ID_CELL]
    else:
        more = [item.expression for item in statement.selected] if statement.distinct else statement.groups
    # as an index has both, also backwards
    descending = bool(orders) and orders[0].descending
    orders += [Order(expression, descending and statement.is_plain) for expression in more]
    seen: dict[Expression, Order] = {}
    for order in orders:
        seen.setdefault(order.expression, order)
        if statement.is_plain and order.expression == ROW_ID_CELL:
            break
    return tuple(seen.values())


def parts(statement: Statement, place: Sequence[Any] | None) -> list[Part]:
    """The rows of a plain statement after a place, which are values of `total_order`.

    Those with a value of what comes first in the order, and those without, are two: an index has each in
    order, and to find the place takes no scan.
    """
    orders = total_order(statement)
    first, rest = orders[0], orders[1:]
    wanted = tuple(conditions(statement.where))
    if first.expression in NEVER_NULL or any(compared(one) == first.expression for one in wanted):
        with_value: tuple[Expression, ...] = ()
        kinds = [False]
    else:
        with_value = (_not(_is_null(first.expression)),)
        kinds = [first.nulls_first, not first.nulls_first]
    found = []
    for of_nulls in kinds:
        if place is not None and (place[0] is None) != of_nulls:
            # before the place, or all of it after
            if kinds.index(of_nulls) < kinds.index(place[0] is None):
                continue
            reached: tuple[Expression, ...] = ()
        elif place is None:
            reached = ()
        elif of_nulls:
            reached = (_after(rest, place[1:]),)
        else:
            bound = Apply(
                "BOOLEAN", "<=" if first.descending else ">=", (first.expression, _value(first, place[0]))
            )
            reached = (bound, _after(orders, place, nulls=False)) if rest else (_after(orders, place),)
        if of_nulls:
            found.append(Part((*wanted, _is_null(first.expression), *reached), rest))
        else:
            natural = Order(first.expression, first.descending, first.descending)
            found.append(Part((*wanted, *with_value, *reached), (natural, *rest)))
    return found


def plain_items(statement: Statement) -> tuple[list[Expression], list[int]]:
    """What a plain statement reads of each row, and where in it its place in the order is.

    First what is selected, then the row's id and version, then what is missing of the order.
    """
    items: list[Expression] = [
        *(item.expression for item in statement.selected),
        ROW_ID_CELL,
        ROW_VERSION_CELL,
    ]
    first: dict[Expression, int] = {ROW_ID_CELL: len(items) - 2, ROW_VERSION_CELL: len(items) - 1}
    for number, item in enumerate(statement.selected):
        first.setdefault(item.expression, number)
    places = []
    for order in total_order(statement):
        if order.expression not in first:
            first[order.expression] = len(items)
            items.append(order.expression)
        places.append(first[order.expression])
    return items, places


def texts_of_json(statement: Statement) -> list[Expression]:
    """What is selected that may be long."""
    return [item.expression for item in statement.selected if item.type == "JSON"]


def plain(
    statement: Statement, part: Part, source: str, dialect: Dialect, rows: int, offset: int, json_bytes: int
) -> tuple[str, dict[str, Any]]:
    """The rows of a part, as `plain_items` are.

    Of a statement with JSON only up to that row whose JSON reaches so many bytes, and with two columns more:
    how many bytes the row has, and those before it with it.
    """
    emitter = Emitter(dialect)
    items = map(emitter.expression, plain_items(statement)[0])
    which = emitter.conditions(part.conditions) + emitter.orders(part.orders)
    if not (texts := texts_of_json(statement)):
        text = f"select {', '.join(items)} from {source}{which}"
        return _bounded(emitter, text, rows, offset), emitter.values
    text = f"select {', '.join(items)}, {emitter.size(texts)} as size from {source}{which}"
    return (
        "select * from (select *, sum(size) over (rows unbounded preceding) as total "
        f"from ({_bounded(emitter, text, rows, offset)}) as sized) as summed "
        f"where total - size < {emitter.count(json_bytes)}"
    ), emitter.values


def grouped(
    statement: Statement, source: str, dialect: Dialect, rows: int, offset: int
) -> tuple[str, dict[str, Any]]:
    """Groups, or distinct rows."""
    emitter = Emitter(dialect)
    text = _grouped(emitter, statement, source)
    numbers: dict[Expression, int] = {}
    for number, item in enumerate(statement.selected, start=1):
        numbers.setdefault(item.expression, number)
    text += emitter.orders(total_order(statement), numbers)
    return _bounded(emitter, text, rows, offset), emitter.values


def count(statement: Statement, source: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """How many rows there are, whatever LIMIT and OFFSET say."""
    emitter = Emitter(dialect)
    if statement.is_plain:
        return (
            f"select count(*) from {source}{emitter.conditions(tuple(conditions(statement.where)))}",
            emitter.values,
        )
    return f"select count(*) from ({_grouped(emitter, statement, source)}) as counted", emitter.values


def count_part(part: Part, source: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """How many rows a part has."""
    emitter = Emitter(dialect)
    return f"select count(*) from {source}{emitter.conditions(part.conditions)}", emitter.values


def sought(statement: Statement) -> list[int]:
    """The ids of columns in which an index would find rows, or their order; the most useful first."""
    found = [compared(one) for one in conditions(statement.where) if _narrows(one)]
    if statement.is_plain and statement.orders:
        found.append(statement.orders[0].expression)
    ids = [cell.column_id for cell in found if isinstance(cell, Cell) and cell.column_id > 0]
    return list(dict.fromkeys(ids))


def _narrows(condition: Expression) -> bool:
    if not isinstance(condition, Apply) or condition.operator not in (
        "=",
        "<",
        "<=",
        ">",
        ">=",
        "in",
        "like",
    ):
        return False
    if condition.operator != "like":
        return all(isinstance(operand, Value) for operand in condition.operands[1:])
    pattern = condition.operands[1]
    return isinstance(pattern, Value) and not str(pattern.value or "%").startswith(("%", "_"))


def _grouped(emitter: Emitter, statement: Statement, source: str) -> str:
    written = [emitter.expression(item.expression) for item in statement.selected]
    items = ", ".join(f"{one} as i{number}" for number, one in enumerate(written, start=1))
    groups = ", ".join(emitter.expression(one) for one in statement.groups)
    return (
        f"select {'distinct ' if statement.distinct else ''}{items} from {source}"
        f"{emitter.conditions(tuple(conditions(statement.where)))}{f' group by {groups}' if groups else ''}"
        f"{f' having {emitter.expression(statement.having)}' if statement.having is not None else ''}"
    )


def _bounded(emitter: Emitter, text: str, rows: int, offset: int) -> str:
    text += f" limit {emitter.count(rows)}"
    return f"{text} offset {emitter.count(offset)}" if offset else text


def _after(orders: Sequence[Order], place: Sequence[Any], *, nulls: bool = True) -> Expression:
    """Being after a place; the first has no nulls unless `nulls`."""
    order, value = orders[0], place[0]
    expression = order.expression
    if value is None:
        later = _not(_is_null(expression)) if order.nulls_first else _NOTHING
        same = _is_null(expression)
    else:
        given = _value(order, value)
        later = Apply("BOOLEAN", "<" if order.descending else ">", (expression, given))
        if nulls and not order.nulls_first and expression not in NEVER_NULL:
            later = Apply("BOOLEAN", "or", (later, _is_null(expression)))
        same = Apply("BOOLEAN", "=", (expression, given))
    if len(orders) == 1:
        return later
    return Apply("BOOLEAN", "or", (later, Apply("BOOLEAN", "and", (same, _after(orders[1:], place[1:])))))


def _value(order: Order, value: Any) -> Value:
    return Value(order.expression.kind, value)


def _is_null(expression: Expression) -> Apply:
    return Apply("BOOLEAN", "is null", (expression,))


def _not(expression: Expression) -> Apply:
    return Apply("BOOLEAN", "not", (expression,))
