"""A page of a query's rows: its statements, and how it is read, whichever database answers.

Rows of the table come after the place of the last one in their order, so that a page costs what it gives.
Groups and distinct rows are few: they are counted off.
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
    """Groups, or distinct rows."""
    emitter = Emitter(dialect)
    text = _grouped(emitter, statement, source)
    numbers: dict[Expression, int] = {}
    for number, item in enumerate(statement.selected, start=1):
        numbers.setdefault(item.expression, number)
    text += emitter.orders(total_order(statement), numbers)
    return _bounded(emitter, text, rows, offset), emitter.values


def count_statement(statement: Statement, source: str, dialect: Dialect) -> tuple[str, dict[str, Any]]:
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
    items = _named(emitter.expression(item.expression) for item in statement.selected)
    groups = ", ".join(emitter.expression(one) for one in statement.groups)
    return (
        f"select {'distinct ' if statement.distinct else ''}{items} from {source}"
        f"{emitter.conditions(tuple(conditions(statement.where)))}{f' group by {groups}' if groups else ''}"
        f"{f' having {emitter.expression(statement.having)}' if statement.having is not None else ''}"
    )


def _named(expressions: Iterable[str]) -> str:
    """Returns the list of a SELECT.

    PostgreSQL would call a cast as the column within it, and ORDER BY looks for names of the list first.
    """
    return ", ".join(f"{text} as i{number}" for number, text in enumerate(expressions, start=1))


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


PAGE_ROWS, PAGE_ROWS_MAX = 1_000, 100_000
PAGE_BYTES = 64 * 1024 * 1024
"""Of the largest rows that there can be, a page has so many: but one at least."""
JSON_BYTES_MAX = 16 * 1024 * 1024
"""A page ends with the row whose JSON reaches so many bytes of text: its values take some times more."""
_JSON_BYTES = 4_000

Ask = Callable[[str, dict[str, Any]], list[tuple[Any, ...]]]
"""Executes a statement with its parameters."""


@dataclass(frozen=True, slots=True)
class SelectColumn:
    """A column of the answer; `column_id` when it is one of the table's as it is."""

    name: str
    type: str
    column_id: int | None = None


@dataclass(frozen=True)
class Page(Frames):
    """Some rows of an answer, and how to get those that follow; `arrow()`, `df()` and `pl()` have these rows.

    `row_ids` and `row_versions` are of each row, and None where rows are groups. All pages of a query are of
    one `version`, which was committed at `changed_at`. A page has at most `max_rows`.
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
        """How many rows the answer has, all pages together: counted when it is asked for, at the version.

        Raises what `query` does: `PageExpired` for instance.
        """
        return self._count()

    def beside_keys(self) -> list[int]:
        """Returns the numbers of the columns that do not repeat `row_ids` and `row_versions`."""
        keys = () if self.row_ids is None else (ROW_ID, ROW_VERSION)
        return [number for number, one in enumerate(self.columns) if one.name.upper() not in keys]

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema of `read_all`: ROW_ID and ROW_VERSION, unless rows are groups, and the columns."""
        columns = [self.columns[number] for number in self.beside_keys()]
        fields = [field_of(one.name, cast("ColumnType", one.type)) for one in columns]
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
        """Gives the rows of this page to what takes Arrow's streams, like `pa.table(page)`."""
        return self.read_all().__arrow_c_stream__(requested_schema)

    def to_json(self, *, count: bool = False) -> dict[str, Any]:
        """As an object of JSON; `count` costs a count of the answer."""
        found = {
            "columns": [
                {"name": one.name, "type": one.type, "column_id": one.column_id} for one in self.columns
            ],
            "rows": [list(row) for row in self.rows],
            "row_ids": self.row_ids,
            "row_versions": self.row_versions,
            "next_page": self.next_page,
            "max_rows": self.max_rows,
            "version": self.version,
            "changed_at": self.changed_at.isoformat(),
        }
        return {**found, "count": self.count} if count else found


@dataclass(frozen=True, slots=True)
class Rows:
    """What was read for a page: `place` and `given` say where the next one begins, if `more` rows follow."""

    rows: list[tuple[Any, ...]]
    row_ids: list[int] | None
    row_versions: list[int] | None
    place: list[Any] | None
    given: int
    more: bool


def rows_max(columns: Sequence[Column], page_rows: int | None) -> int:
    """How many rows a page has at most; `InvalidInput`."""
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
    """The next rows of a statement, after those that were given."""
    left = rows if statement.limit is None else min(rows, statement.limit - given)
    if left <= 0:
        return Rows([], [], [], None, given, False)
    # one more tells whether there are others
    wanted = left + (statement.limit is None or statement.limit - given > left)
    if not statement.is_plain:
        text, values = grouped(statement, source, dialect, wanted, statement.offset + given)
        found = ask(text, values)
        kept = _shown(statement, found[:left])
        return Rows(kept, None, None, None, given + len(kept), len(found) > left)
    found, is_cut = _plain(statement, ask, source, dialect, wanted, place)
    width = len(statement.selected)
    kept = found[:left]
    ids, versions = (list(map(itemgetter(number), kept)) for number in (width, width + 1))
    last = [kept[-1][number] for number in plain_items(statement)[1]] if kept else None
    more = len(found) > left or (is_cut and len(found) < wanted)
    return Rows(_shown(statement, kept), ids, versions, last, given + len(kept), more)


def count(statement: Statement, ask: Ask, source: str, dialect: Dialect) -> int:
    """How many rows a statement has."""
    found = int(ask(*count_statement(statement, source, dialect))[0][0])
    found = max(0, found - statement.offset)
    return found if statement.limit is None else min(found, statement.limit)


def _plain(
    statement: Statement, ask: Ask, source: str, dialect: Dialect, wanted: int, place: Sequence[Any] | None
) -> tuple[list[tuple[Any, ...]], bool]:
    """The rows, and whether they end where they had bytes enough."""
    found: list[tuple[Any, ...]] = []
    bytes_left, has_sizes = JSON_BYTES_MAX, bool(texts_of_json(statement))
    offset = statement.offset if place is None else 0
    page_parts = parts(statement, place)
    for number, part in enumerate(page_parts):
        rows = wanted - len(found)
        some = ask(*plain(statement, part, source, dialect, rows, offset, bytes_left))
        if has_sizes and some:
            bytes_left -= int(some[-1][-1])
            some = [row[:-2] for row in some]
        found += some
        if bytes_left <= 0:
            return found, True
        if len(found) >= wanted or number + 1 == len(page_parts):
            break
        if offset and not found:
            # how many of those to leave out were in this part
            offset = max(0, offset - int(ask(*count_part(part, source, dialect))[0][0]))
        else:
            offset = 0
    return found, False


def _shown(statement: Statement, rows: Sequence[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """What was selected, with JSON as the values that it is."""
    width = len(statement.selected)
    texts = [number for number, item in enumerate(statement.selected) if item.type == "JSON"]
    if not texts:
        return list(map(itemgetter(slice(width)), rows))
    shown = []
    for row in rows:
        cells = list(row[:width])
        for number in texts:
            cells[number] = None if cells[number] is None else json.loads(cells[number])
        shown.append(tuple(cells))
    return shown


def _width(column: Column) -> int:
    """Bytes of a value, in Python's memory."""
    if column.type == "JSON":
        return _JSON_BYTES
    if column.stored.name != "string":
        return 32
    return 50 + 4 * (column.size_max or LINK_MAX)


INDEX_WAIT_SECONDS = 10.0
"""How long a query waits for the index of its table by default."""

WAIT_SECONDS_MIN, WAIT_SECONDS_MAX = 0.02, 0.25
"""How long a query that waits for an index pauses before it looks again; the longer, the more rarely."""


class Wait:
    """The wait of one query for its index."""

    def __init__(self, seconds: float, interruption: Interruption | None) -> None:
        self._began = time.monotonic()
        self._seconds = seconds
        self._interruption = interruption

    def pause(self, refusal: IndexNotReady) -> None:
        """Sleeps before the next look; raises the refusal when the time is over."""
        waited = time.monotonic() - self._began
        if waited >= self._seconds:
            refusal.data = {**refusal.data, "seconds": round(waited, 3)}
            raise refusal
        if self._interruption is not None:
            self._interruption.check()
        pause = min(max(waited / 10, WAIT_SECONDS_MIN), WAIT_SECONDS_MAX)
        time.sleep(min(pause, self._seconds - waited))
