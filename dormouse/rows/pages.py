"""A page of a query's rows, and how one is read, whichever database answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from operator import itemgetter
from typing import Any, cast

import pyarrow as pa

from dormouse.errors import InvalidInput
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.reading.streams import Frames
from dormouse.rows import paging
from dormouse.rows.columns import LINK_MAX, Column
from dormouse.rows.emit import Dialect
from dormouse.rows.expressions import Statement
from dormouse.rows.kinds import ColumnType
from dormouse.rows.values import field_of

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
        text, values = paging.grouped(statement, source, dialect, wanted, statement.offset + given)
        found = ask(text, values)
        kept = _shown(statement, found[:left])
        return Rows(kept, None, None, None, given + len(kept), len(found) > left)
    found, is_cut = _plain(statement, ask, source, dialect, wanted, place)
    width = len(statement.selected)
    kept = found[:left]
    ids, versions = (list(map(itemgetter(number), kept)) for number in (width, width + 1))
    last = [kept[-1][number] for number in paging.plain_items(statement)[1]] if kept else None
    more = len(found) > left or (is_cut and len(found) < wanted)
    return Rows(_shown(statement, kept), ids, versions, last, given + len(kept), more)


def count(statement: Statement, ask: Ask, source: str, dialect: Dialect) -> int:
    """How many rows a statement has."""
    found = int(ask(*paging.count(statement, source, dialect))[0][0])
    found = max(0, found - statement.offset)
    return found if statement.limit is None else min(found, statement.limit)


def _plain(
    statement: Statement, ask: Ask, source: str, dialect: Dialect, wanted: int, place: Sequence[Any] | None
) -> tuple[list[tuple[Any, ...]], bool]:
    """The rows, and whether they end where they had bytes enough."""
    found: list[tuple[Any, ...]] = []
    bytes_left, has_sizes = JSON_BYTES_MAX, bool(paging.texts_of_json(statement))
    offset = statement.offset if place is None else 0
    parts = paging.parts(statement, place)
    for number, part in enumerate(parts):
        rows = wanted - len(found)
        some = ask(*paging.plain(statement, part, source, dialect, rows, offset, bytes_left))
        if has_sizes and some:
            bytes_left -= int(some[-1][-1])
            some = [row[:-2] for row in some]
        found += some
        if bytes_left <= 0:
            return found, True
        if len(found) >= wanted or number + 1 == len(parts):
            break
        if offset and not found:
            # how many of those to leave out were in this part
            offset = max(0, offset - int(ask(*paging.count_part(part, source, dialect))[0][0]))
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
