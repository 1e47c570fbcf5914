"""Indexes on single columns of row tables, which delay no change; and new builds of a table's index."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest

import dormouse as dm
from dormouse.rows import indexes, indexing
from tests.row_indexes import all_pages, builds_of, indexing_of, is_as_the_files, made, same
from tests.support.api import Instance
from tests.support.rows import RowTable
from tests.working import until

TEXT = "select row_id, name, n, x from t order by row_id"


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    """Returns the table `t`, with an index that is up to date."""
    rows = made(instance)
    assert is_as_the_files(rows)
    return rows


@pytest.fixture
def any_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes, "SLOW_SECONDS", 0)
    monkeypatch.setattr(indexes, "INDEXED_ROWS_MIN", 0)


def ids_of(rows: RowTable, *names: str) -> list[int]:
    return [column.column_id or 0 for name in names for column in rows.columns() if column.name == name]


def asked_of_index(instance: Instance, rows: RowTable, text: str, *given: Any) -> list[tuple[Any, ...]]:
    builds, _ = builds_of(instance, rows)
    with builds._supplier.connection() as conn:
        return conn.execute(text.encode(), given or None).fetchall()


def column_indexes(instance: Instance, rows: RowTable) -> list[tuple[str, bool]]:
    """Returns for each database index its first column, and True if the index is valid."""
    _, build_id = builds_of(instance, rows)
    text = """select a.attname::text, i.indisvalid from pg_index i
        join pg_attribute a on a.attrelid = i.indrelid and a.attnum = i.indkey[0]
        where i.indrelid = to_regclass(%s) and not i.indisprimary order by 1"""
    return asked_of_index(instance, rows, text, f"current_{build_id}")


def is_indexing(instance: Instance, rows: RowTable) -> bool:
    text = "select from pg_stat_activity where query ilike 'create index%' and wait_event_type = 'Lock'"
    return bool(asked_of_index(instance, rows, text))


@contextmanager
def no_index_ends(instance: Instance, rows: RowTable, statement: str) -> Iterator[psycopg.Connection[Any]]:
    """Holds a transaction open, so that a statement that makes a database index cannot finish."""
    looked = indexing_of(instance).placements.look(rows.table_id)
    supplier = indexing_of(instance).cluster.supplier(str(looked.database))
    with supplier.connection() as conn, conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        conn.execute(statement.format(looked.build_id).encode())
        yield conn


@pytest.mark.slow
def test_changes_reach_queries_while_columns_are_indexed(
    instance: Instance, rows: RowTable, any_is_slow: None
) -> None:
    def ask() -> None:
        """Queries each column. If one query cannot start the work on an index, the next query starts it."""
        for name in ("n", "x", "d", "name"):
            rows.query(f"select row_id from t order by {name} desc limit 5")

    with no_index_ends(instance, rows, "lock table current_{} in row exclusive mode"):
        for _ in range(3):
            ask()
        until(lambda: is_indexing(instance, rows))
        for number in range(3):
            rows.change([dm.Patch([(1, None, {"n": 1_000 + number})])])
            assert rows.query("select n from t where row_id = 1").rows == [(1_000 + number,)]
        assert is_indexing(instance, rows)
    wanted = [(f"c_{one}", True) for one in ids_of(rows, "name", "n", "x", "d")]
    until(lambda: column_indexes(instance, rows) == wanted or ask())
    assert is_as_the_files(rows)


@pytest.mark.slow
def test_a_change_of_columns_cancels_an_index_which_is_made_later(instance: Instance, rows: RowTable) -> None:
    (column_id,) = ids_of(rows, "n")
    work = threading.Thread(target=lambda: indexing_of(instance).bring(rows, columns=[column_id]))
    with no_index_ends(instance, rows, "select from build"):
        work.start()
        until(lambda: is_indexing(instance, rows))
        rows.change([dm.AddColumn(dm.Column("more", "INTEGER", default=3))])
        assert rows.query("select more from t limit 1").rows == [(3,)]
        work.join(60)
        assert column_indexes(instance, rows) == [(f"c_{column_id}", False)]
    indexing_of(instance).bring(rows, columns=[column_id])
    assert column_indexes(instance, rows) == [(f"c_{column_id}", True)]
    assert is_as_the_files(rows)


def test_a_single_slow_sort_makes_no_index(instance: Instance, rows: RowTable, any_is_slow: None) -> None:
    for name in ("n", "x", "d"):
        rows.query(f"select row_id from t order by {name} desc limit 5")
    assert instance.jobs.list(kind="index_row_columns") == []
    for _ in range(2):
        rows.query("select row_id from t order by n limit 5")
    until(lambda: column_indexes(instance, rows) == [(f"c_{one}", True) for one in ids_of(rows, "n")])


@pytest.mark.slow
def test_an_index_of_a_column_that_no_query_uses_is_dropped(instance: Instance) -> None:
    rows = instance.create_row_table("t", [dm.Column("n", "INTEGER"), dm.Column("m", "INTEGER")])
    rows.change([dm.Insert([{"n": n, "m": -n} for n in range(20_000)])])
    n, m = ids_of(rows, "n", "m")
    work = indexing_of(instance)
    work.bring(rows, columns=[n, m])
    work.upkeep(instance.row_table)
    assert column_indexes(instance, rows) == [(f"c_{n}", True), (f"c_{m}", True)]
    asked_of_index(
        instance, rows, "update column_index set scanned_at = scanned_at - interval '2 days' returning 1"
    )
    assert rows.query("select m from t order by n desc limit 1").rows == [(-19_999,)]
    _, build_id = builds_of(instance, rows)
    scans = f"select idx_scan from pg_stat_user_indexes where indexrelname = 'current_{build_id}_c_{n}'"
    until(lambda: asked_of_index(instance, rows, scans) != [(0,)])
    work.upkeep(instance.row_table)
    assert column_indexes(instance, rows) == [(f"c_{n}", True)]
    work.bring(rows, columns=[m])  # a query that uses the column makes the index again
    assert column_indexes(instance, rows) == [(f"c_{n}", True), (f"c_{m}", True)]


@pytest.mark.slow
def test_an_index_is_rebuilt_if_that_costs_less_than_an_update(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexing, "REBUILT_ROWS_MIN", 1)
    indexing_of(instance).bring(rows, columns=ids_of(rows, "n"))
    page, expected = rows.query(TEXT, 50), rows.query(TEXT, 200).rows
    _, before = builds_of(instance, rows)
    rows.change([dm.Patch([(row_id, None, {"n": 1}) for row_id in range(1, 101)])])  # half
    assert is_as_the_files(rows)
    assert builds_of(instance, rows)[1] == before
    rows.change([dm.Patch([(row_id, None, {"n": 2}) for row_id in range(1, 102)])])
    assert is_as_the_files(rows)
    assert builds_of(instance, rows)[1] != before
    assert column_indexes(instance, rows) == [(f"c_{one}", True) for one in ids_of(rows, "n")]
    assert same([row for one in all_pages(rows, page) for row in one.rows], expected)
