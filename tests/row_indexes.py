"""Helpers for tests of row tables' indexes: rows of all kinds, and queries that wait for the index."""

from __future__ import annotations

from typing import Any

import dormouse as dm
from dormouse.api.instance import Instance
from dormouse.api.row_table import RowTable
from dormouse.errors import IndexNotReady
from dormouse.rows.builds import Builds
from dormouse.rows.indexing import Indexing
from dormouse.rows.pages import Page
from tests.pauses import pauses

COLUMNS = [
    dm.Column("name", "STRING", size_max=50),
    dm.Column("n", "INTEGER"),
    dm.Column("x", "DOUBLE"),
    dm.Column("d", "DATE"),
    dm.Column("b", "BOOLEAN"),
    dm.Column("j", "JSON"),
]
_NAMES = [
    "a",
    "ab",
    "abc",
    "%",
    "_",
    "b\\c",
    "it's",
    "",
    "Ä",
    "z9",
    "\uffff",
    "\U0001f600",
    "; drop table t",
    None,
]


def made(instance: Instance) -> RowTable:
    """Returns the table `t` with 200 rows."""
    rows = instance.create_row_table("t", COLUMNS)
    rows.change([dm.Insert(rows_of(200))])
    return rows


def indexing_of(instance: Instance) -> Indexing:
    return instance.row_indexes.indexing


def rows_of(count: int) -> list[dict[str, Any]]:
    """Returns rows with nulls, NaN, infinities and text that is special in SQL or in patterns."""
    doubles = [0.5, -1.0, None, float("nan"), 2.25, float("inf"), 100.0, -0.0, 0.125]
    return [
        {
            "name": _NAMES[i % len(_NAMES)],
            "n": None if i % 11 == 0 else i % 17 - 5,
            "x": doubles[i % len(doubles)],
            "d": None if i % 13 == 0 else (i % 5) * 43_200_000,
            "b": (None, True, False)[i % 3],
            "j": None if i % 4 else {"i": i, "text": "\"\\'\u0000"},
        }
        for i in range(count)
    ]


def query_when_ready(rows: RowTable, *args: Any, seconds_max: float = 60, **more: Any) -> Page:
    """Queries a row table; retries while the table's index is not ready."""
    for _ in pauses(seconds_max):
        try:
            return rows.query(*args, **more)
        except IndexNotReady as error:
            refused = error
    raise refused


def all_pages(rows: RowTable, page: Page) -> list[Page]:
    """Returns a page and all pages that follow it."""
    found = [page]
    while found[-1].next_page:
        found.append(rows.query(page=found[-1].next_page))
    return found


def builds_of(instance: dm.Instance, rows: RowTable) -> tuple[Builds, int]:
    """Returns the builds in the database that has a table's index, and the id of that index's build."""
    looked = instance.row_indexes.indexing.placements.look(rows.table_id)
    assert looked.database is not None
    assert looked.build_id is not None
    return instance.row_indexes.indexing.builds(looked.database), looked.build_id


def of_files(rows: RowTable, version: int | None = None) -> list[tuple[Any, ...]]:
    """Returns the rows as the table's files have them, by id."""
    with rows.current(version) as reader:
        return [tuple(row.values()) for row in reader.read_all().to_pylist()]


def of_index(rows: RowTable) -> list[tuple[Any, ...]]:
    """Returns the rows as the index has them, by id."""
    names = ", ".join(column.name for column in rows.columns() if column.type != "JSON")
    page = query_when_ready(rows, f"select row_id, row_version, {names} from {rows.name}", 100_000)
    return page.rows


def same(left: Any, right: Any) -> bool:
    """Returns whether rows are equal. NaN equals NaN, and doubles may differ by a rounding error."""
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float) and isinstance(right, float | int):
        return left == right or (left != left and right != right) or abs(left - right) <= 1e-9 * abs(left)
    return bool(left == right) and type(left) is type(right)


def is_as_the_files(rows: RowTable) -> bool:
    """Returns whether the index has the same rows as the files; JSON columns are not compared."""
    columns = [n for n, column in enumerate(rows.columns(), start=2) if column.type != "JSON"]
    return same(of_index(rows), [tuple(row[n] for n in (0, 1, *columns)) for row in of_files(rows)])
