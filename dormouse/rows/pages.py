"""The pages of a query's rows, and the SQL statements that read them from PostgreSQL or DuckDB.

A page of a table's rows begins after the last row of the page before, by the place of this row in the order.
So the cost of a page depends only on its own rows. Pages of groups and of distinct rows use OFFSET, because
such rows are few.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

import pyarrow as pa

from dormouse.errors import InvalidInput
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.reading.streams import Frames
from dormouse.rows.columns import LINK_MAX, Column, ColumnType
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
from dormouse.rows.values import field_of

if TYPE_CHECKING:
    from dormouse.errors import IndexNotReady
    from dormouse.reading.streams import Interruption

NEVER_NULL = (ROW_ID_CELL, ROW_VERSION_CELL)
_NOTHING: Expression = Value("BOOLEAN", False)


@dataclass(frozen=True)
class Part:
    """A part of a page's rows, which one SQL statement reads.

    The rows of the next part come later in the order.
    """

    conditions: tuple[Expression, ...]
    orders: tuple[Order, ...]


def total_order(statement: Statement) -> tuple[Order, ...]:
    """Returns the order of a statement, extended by expressions so that no two rows are equal in it."""
    orders = list(statement.orders)
    if statement.is_plain:
        more: Sequence[Expression] = [ROW_ID_CELL]
    else:
        more = [item.expression for item in statement.selected] if statement.distinct else statement.groups
    # in the direction of the first column, so that an index over both gives the order, forwards or backwards
    descending = bool(orders) and orders[0].descending
    orders += [Order(expression, descending and statement.is_plain) for expression in more]
    seen: dict[Expression, Order] = {}
    for order in orders:
        seen.setdefault(order.expression, order)
        if statement.is_plain and order.expression == ROW_ID_CELL:
            break
    return tuple(seen.values())


def parts(statement: Statement, place: Sequence[Any] | None) -> list[Part]:
    """Returns the parts of a plain statement's rows that come after a place in the order.

    `place` has the values of the expressions of `total_order`, or is None for all rows. Rows with a null in
    the first expression are one part, and all other rows are another. In each part, an index has the rows in
    order, so the database finds the place without a scan.
    """
    orders = total_order(statement)
    first, rest = orders[0], orders[1:]
    wanted = tuple(conditions(statement.where))
    if first.expression in NEVER_NULL or any(compared(condition) == first.expression for condition in wanted):
        with_value: tuple[Expression, ...] = ()
        kinds = [False]
    else:
        with_value = (_not(_is_null(first.expression)),)
        kinds = [first.nulls_first, not first.nulls_first]
    listed = []
    for of_nulls in kinds:
        if place is not None and (place[0] is None) != of_nulls:
            # the whole part lies before the place, or after it
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
            listed.append(Part((*wanted, _is_null(first.expression), *reached), rest))
        else:
            natural = Order(first.expression, first.descending, first.descending)
            listed.append(Part((*wanted, *with_value, *reached), (natural, *rest)))
    return listed


def plain_items(statement: Statement) -> tuple[list[Expression], list[int]]:
    """Returns the expressions that a plain statement reads of each row, and positions of the order's values.

    The expressions are the selected ones, then the row's id and version, then other expressions of the order.
    The positions tell where the values of `total_order` are among these expressions.
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
    """Returns the selected expressions of type JSON, whose values may be long."""
    return [item.expression for item in statement.selected if item.type == "JSON"]


def plain(
    statement: Statement, part: Part, source: str, dialect: Dialect, rows: int, offset: int, json_bytes: int
) -> tuple[str, dict[str, Any]]:
    """Returns SQL and its parameters for the rows of a part, with the columns of `plain_items`.

    If the statement selects JSON, it ends at the row at which the sum of JSON sizes reaches `json_bytes`.
    Then it has two more columns: the size of the row's JSON in bytes, and the sum of the sizes so far.
    """
    emitter = Emitter(dialect)
    items = _named(map(emitter.expression, plain_items(statement)[0]))
    which = emitter.conditions(part.conditions) + emitter.orders(part.orders)
    if not (texts := texts_of_json(statement)):
        text = f"select {items} from {source}{which}"
        return _bounded(emitter, text, rows, offset), emitter.values
    text = f"select {items}, {emitter.size(texts)} as size from {source}{which}"
    return (
        "select * from (select *, sum(size) over (rows unbounded preceding) as total "
        f"from ({_bounded(emitter, text, rows, offset)}) as sized) as summed "
        f"where total - size < {emitter.count(json_bytes)}"
    ), emitter.values


def grouped(
    statement: Statement, source: str, dialect: Dialect, rows: int, offset: int
) -> tuple[str, dict[str, Any]]:
    """Returns SQL and its parameters for a page of groups or distinct rows."""
    emitter = Emitter(dialect)
    text = _grouped(emitter, statement, source)
    numbers: dict[Expression, int] = {}
    for number, item in enumerate(statement.selected, start=1):
        numbers.setdefault(item.expression, number)
    text += emitter.orders(total_order(statement), numbers)
    return _bounded(emitter, text, rows, offset), emitter.values


def count_statement(statement: Statement, source: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """Returns SQL and its parameters for the number of rows, without LIMIT and OFFSET."""
    emitter = Emitter(dialect)
    if statement.is_plain:
        return (
            f"select count(*) from {source}{emitter.conditions(tuple(conditions(statement.where)))}",
            emitter.values,
        )
    return f"select count(*) from ({_grouped(emitter, statement, source)}) as counted", emitter.values


def count_part(part: Part, source: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
    """Returns SQL and its parameters for the number of a part's rows."""
    emitter = Emitter(dialect)
    return f"select count(*) from {source}{emitter.conditions(part.conditions)}", emitter.values


def sought(statement: Statement) -> list[int]:
    """Returns the ids of columns whose index would help to find or sort rows, the most useful first."""
    useful = [compared(condition) for condition in conditions(statement.where) if _narrows(condition)]
    if statement.is_plain and statement.orders:
        useful.append(statement.orders[0].expression)
    ids = [cell.column_id for cell in useful if isinstance(cell, Cell) and cell.column_id > 0]
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
    items = _named(emitter.expression(item.expression) for item in statement.selected)
    groups = ", ".join(emitter.expression(group) for group in statement.groups)
    return (
        f"select {'distinct ' if statement.distinct else ''}{items} from {source}"
        f"{emitter.conditions(tuple(conditions(statement.where)))}{f' group by {groups}' if groups else ''}"
        f"{f' having {emitter.expression(statement.having)}' if statement.having is not None else ''}"
    )


def _named(expressions: Iterable[str]) -> str:
    """Returns the select list of a statement, in which each expression has a name of its own.

    Otherwise PostgreSQL would give a cast the name of the column in it, and ORDER BY would find that name
    first.
    """
    return ", ".join(f"{text} as i{number}" for number, text in enumerate(expressions, start=1))


def _bounded(emitter: Emitter, text: str, rows: int, offset: int) -> str:
    text += f" limit {emitter.count(rows)}"
    return f"{text} offset {emitter.count(offset)}" if offset else text


def _after(orders: Sequence[Order], place: Sequence[Any], *, nulls: bool = True) -> Expression:
    """Returns the condition that a row comes after a place in the order.

    `nulls` is False if no row has a null in the first expression of the order.
    """
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


PAGE_ROWS, PAGE_ROWS_MAX = 1_000, 100_000
PAGE_BYTES = 64 * 1024 * 1024
"""The most bytes of a page in Python's memory, computed with the largest size of each value.

A page has at least one row.
"""
JSON_BYTES_MAX = 16 * 1024 * 1024
"""The size of JSON text at which a page ends, in bytes: parsed values take several times as much memory."""
_JSON_BYTES = 4_000

Ask = Callable[[str, dict[str, Any]], list[tuple[Any, ...]]]
"""A function that executes a statement with its parameters, and returns the rows."""


@dataclass(frozen=True, slots=True)
class SelectColumn:
    """A column of the answer. `column_id` is set if it is an unchanged column of the table."""

    name: str
    type: str
    column_id: int | None = None


@dataclass(frozen=True)
class Page(Frames):
    """Some rows of an answer, and the token of the next page. `arrow()`, `df()` and `pl()` have these rows.

    `row_ids` and `row_versions` have one entry for each row, or are None if rows are groups. All pages of a
    query show the same `version` of the table, which was committed at `changed_at`. A page has at most
    `max_rows` rows.
    """

    rows: list[tuple[Any, ...]]
    columns: tuple[SelectColumn, ...]
    row_ids: list[int] | None
    row_versions: list[int] | None
    next_page: str | None
    max_rows: int
    version: int
    changed_at: datetime
    _count: Callable[[], int] = field(repr=False, compare=False)

    @property
    def count(self) -> int:
        """The number of rows of the whole answer in the page's version. Each access counts the rows again.

        Raises the errors of `query`, for example `PageExpired`.
        """
        return self._count()

    def beside_keys(self) -> list[int]:
        """Returns the positions of the columns other than ROW_ID and ROW_VERSION."""
        keys = () if self.row_ids is None else (ROW_ID, ROW_VERSION)
        return [number for number, column in enumerate(self.columns) if column.name.upper() not in keys]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of `read_all`: ROW_ID and ROW_VERSION, unless rows are groups, and the columns."""
        columns = [self.columns[number] for number in self.beside_keys()]
        fields = [field_of(column.name, cast("ColumnType", column.type)) for column in columns]
        if self.row_ids is not None:
            fields = [pa.field(ROW_ID, pa.int64()), pa.field(ROW_VERSION, pa.int64()), *fields]
        return pa.schema(fields)

    def read_all(self) -> pa.Table:
        """Returns the rows of this page as a table of Arrow, with JSON as text."""
        return pa.Table.from_batches([self.batch()])

    def batch(self) -> pa.RecordBatch:
        """Returns the rows of this page as a batch of Arrow, with JSON as text."""
        schema = self.schema
        cells: list[Any] = [] if self.row_ids is None else [self.row_ids, self.row_versions]
        for number in self.beside_keys():
            values = [row[number] for row in self.rows]
            if self.columns[number].type == "JSON":
                values = [None if one is None else json.dumps(one, ensure_ascii=False) for one in values]
            cells.append(values)
        arrays = [pa.array(values, field.type) for values, field in zip(cells, schema, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Returns the rows of this page as an Arrow stream, so that for example `pa.table(page)` works."""
        return self.read_all().__arrow_c_stream__(requested_schema)

    def to_json(self, *, count: bool = False) -> dict[str, Any]:
        """Returns the page as a JSON object. With `count`, counts the rows of the whole answer."""
        page = {
            "columns": [
                {"name": column.name, "type": column.type, "column_id": column.column_id}
                for column in self.columns
            ],
            "rows": [list(row) for row in self.rows],
            "row_ids": self.row_ids,
            "row_versions": self.row_versions,
            "next_page": self.next_page,
            "max_rows": self.max_rows,
            "version": self.version,
            "changed_at": self.changed_at.isoformat(),
        }
        return {**page, "count": self.count} if count else page


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows that were read for a page.

    `given` is the number of rows of this and all earlier pages. If `more` is True, the next page begins after
    `place`, the place of the last row in the order. Pages of groups have no `place` and begin after `given`
    rows.
    """

    rows: list[tuple[Any, ...]]
    row_ids: list[int] | None
    row_versions: list[int] | None
    place: list[Any] | None
    given: int
    more: bool


def rows_max(columns: Sequence[Column], page_rows: int | None) -> int:
    """Returns the most rows that a page may have. Raises `InvalidInput` for an invalid `page_rows`."""
    if page_rows is not None and (type(page_rows) is not int or not 1 <= page_rows <= PAGE_ROWS_MAX):
        raise InvalidInput(f"page_rows must be from 1 to {PAGE_ROWS_MAX:,}, not {page_rows!r}")
    width = sum(map(_width, columns)) or 1
    return max(1, min(page_rows or PAGE_ROWS, PAGE_BYTES // width))


def read(
    statement: Statement,
    ask: Ask,
    source: str,
    dialect: Dialect,
    *,
    rows: int,
    place: Sequence[Any] | None,
    given: int,
) -> Rows:
    """Returns the next rows of a statement, after the `given` rows of earlier pages."""
    left = rows if statement.limit is None else min(rows, statement.limit - given)
    if left <= 0:
        return Rows([], [], [], None, given, False)
    # one row more shows whether another page follows
    wanted = left + (statement.limit is None or statement.limit - given > left)
    if not statement.is_plain:
        text, values = grouped(statement, source, dialect, wanted, statement.offset + given)
        answer = ask(text, values)
        kept = _selected(statement, answer[:left])
        return Rows(kept, None, None, None, given + len(kept), len(answer) > left)
    answer, is_cut = _plain(statement, ask, source, dialect, wanted, place)
    width = len(statement.selected)
    kept = answer[:left]
    ids, versions = (list(map(itemgetter(number), kept)) for number in (width, width + 1))
    last = [kept[-1][number] for number in plain_items(statement)[1]] if kept else None
    more = len(answer) > left or (is_cut and len(answer) < wanted)
    return Rows(_selected(statement, kept), ids, versions, last, given + len(kept), more)


def count(statement: Statement, ask: Ask, source: str, dialect: Dialect) -> int:
    """Returns the number of rows of a statement, with its LIMIT and OFFSET."""
    rows = int(ask(*count_statement(statement, source, dialect))[0][0])
    rows = max(0, rows - statement.offset)
    return rows if statement.limit is None else min(rows, statement.limit)


def _plain(
    statement: Statement, ask: Ask, source: str, dialect: Dialect, wanted: int, place: Sequence[Any] | None
) -> tuple[list[tuple[Any, ...]], bool]:
    """Returns up to `wanted` rows, and True if they end early because their JSON reached its limit."""
    read_rows: list[tuple[Any, ...]] = []
    bytes_left, has_sizes = JSON_BYTES_MAX, bool(texts_of_json(statement))
    offset = statement.offset if place is None else 0
    page_parts = parts(statement, place)
    for number, part in enumerate(page_parts):
        rows = wanted - len(read_rows)
        part_rows = ask(*plain(statement, part, source, dialect, rows, offset, bytes_left))
        if has_sizes and part_rows:
            bytes_left -= int(part_rows[-1][-1])
            part_rows = [row[:-2] for row in part_rows]
        read_rows += part_rows
        if bytes_left <= 0:
            return read_rows, True
        if len(read_rows) >= wanted or number + 1 == len(page_parts):
            break
        if offset and not read_rows:
            # OFFSET skipped the whole part: the next part skips the rest
            offset = max(0, offset - int(ask(*count_part(part, source, dialect))[0][0]))
        else:
            offset = 0
    return read_rows, False


def _selected(statement: Statement, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns the selected columns of rows, with JSON parsed."""
    width = len(statement.selected)
    texts = [number for number, item in enumerate(statement.selected) if item.type == "JSON"]
    if not texts:
        return list(map(itemgetter(slice(width)), rows))
    parsed = []
    for row in rows:
        cells = list(row[:width])
        for number in texts:
            cells[number] = None if cells[number] is None else json.loads(cells[number])
        parsed.append(tuple(cells))
    return parsed


def _width(column: Column) -> int:
    """Returns an upper estimate of a value's size in Python's memory, in bytes."""
    if column.type == "JSON":
        return _JSON_BYTES
    if column.stored.name != "string":
        return 32
    return 50 + 4 * (column.size_max or LINK_MAX)


INDEX_WAIT_SECONDS = 10.0
"""The seconds for which a query waits, by default, for the index of its table."""

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.02, 0.25
"""The shortest and longest pause, in seconds, before a waiting query checks the index again.

The pause grows with the time that the query has waited.
"""


class Wait:
    """The wait of one query for its index."""

    def __init__(self, seconds: float, interruption: Interruption | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._interruption = interruption

    def pause(self, refusal: IndexNotReady) -> None:
        """Sleeps before the next check of the index. Raises `refusal` if the query has waited too long."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            refusal.data = {**refusal.data, "seconds": round(waited, 3)}
            raise refusal
        if self._interruption is not None:
            self._interruption.check()
        pause = min(max(waited / 10, WAIT_SECONDS_MIN), WAIT_SECONDS_MAX)
        time.sleep(min(pause, self._seconds - waited))
