"""Indexes of row tables when an event comes between two steps, or when something was left over."""

from __future__ import annotations

import math
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

import dormouse as dm
from dormouse import postgres
from dormouse.errors import DormouseError, InstanceError, InvalidQuery, PageExpired
from dormouse.rows import cluster, indexes
from dormouse.rows import indexes as locating
from dormouse.rows.builds import Builds
from tests.embedded import postmaster
from tests.row_indexes import (
    COLUMNS,
    all_pages,
    indexing_of,
    is_as_the_files,
    made,
    of_files,
    query_when_ready,
    rows_of,
)
from tests.stored import wait_until
from tests.support.api import Instance
from tests.support.reading import Interruption
from tests.support.rows import RowTable

TEXT = "select row_id, row_version, n from t"


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    return made(instance)


@pytest.mark.few(1)
@pytest.mark.parametrize("page_rows", [50, 1_000])
def test_an_index_that_overtakes_a_query_answers_as_of_its_own_version(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    """A row changes twice between two updates of the index. No page shows it after only the first change."""
    query_when_ready(rows, TEXT)
    changed, twice = [(1, None, {"n": 100}), (2, None, {"n": 100})], [(2, None, {"n": 101})]
    rows.change([dm.Patch(changed), dm.Remove([(3, 1)])])
    rows_at, is_overtaken = Builds.rows_at, []

    def overtaken(*given: Any) -> list[tuple[Any, ...]]:
        if not is_overtaken:
            is_overtaken.append(True)
            rows.change([dm.Patch(twice), dm.Remove([(4, 1)])])
            indexing_of(instance).bring(rows)
        return rows_at(*given)

    monkeypatch.setattr(Builds, "rows_at", overtaken)
    page = rows.query(TEXT, page_rows)
    found = [row for one in all_pages(rows, page) for row in one.rows]
    expected = [(row[0], row[1], row[3]) for row in of_files(rows, page.version)]
    assert (sorted(found), page.count) == (expected, len(expected))
    assert is_overtaken


@pytest.mark.slow
def test_an_empty_answer_needs_no_separate_read_of_the_build(
    rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ("select n from t where n = -500", "select count(*) as c from t where n = -500 group by name")
    for text in texts:
        assert query_when_ready(rows, text).rows == []
    with monkeypatch.context() as patched:
        # after a slow query, the build is read to choose columns for an index
        patched.setattr(indexes, "SLOW_SECONDS", math.inf)
        patched.setattr(Builds, "read", Mock(side_effect=AssertionError("a transaction")))
        for text in texts:
            page = rows.query(text)
            assert (page.rows, page.next_page) == ([], None)
        assert rows.query("select n from t where n = -500 or n = -501 order by n", 10).rows == []
    rows.change([dm.Patch([(1, None, {"n": -500})])])
    # an index that is behind has no rows either, and must not answer
    for text in texts:
        assert len(rows.query(text, wait_seconds=60).rows) == 1


def is_ended(rows: RowTable) -> bool:
    """Returns whether another thread can interrupt a query that would wait without limit."""
    interruption = Interruption()
    threading.Timer(0.1, interruption.set).start()
    began = time.monotonic()
    with pytest.raises(DormouseError, match="the query was interrupted"):
        rows.query(TEXT, wait_seconds=20, interruption=interruption)
    return time.monotonic() - began < 5


def test_a_query_that_waits_for_its_index_is_ended(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexes.RowIndexes, "_start", lambda *_: None)
    assert is_ended(rows)


def test_a_query_that_its_index_answers_slowly_is_ended(instance: Instance, rows: RowTable) -> None:
    expected = query_when_ready(rows, TEXT).rows
    looked = indexing_of(instance).placements.look(rows.table_id)
    with indexing_of(instance).cluster.supplier(str(looked.database)).connection() as conn:
        with conn.transaction():
            conn.execute(f"lock table current_{looked.build_id} in access exclusive mode".encode())
            assert is_ended(rows)
        assert rows.query(TEXT, interruption=Interruption()).rows == expected


@pytest.mark.slow
def test_older_rows_have_the_default_with_which_a_column_was_added(rows: RowTable) -> None:
    """The column is retyped before the index is updated."""
    assert is_as_the_files(rows)
    rows.change([dm.AddColumn(dm.Column("y", "STRING", default="a"))])
    rows.change([dm.RetypeColumn("y", "STRING", 100), dm.Insert([{"name": "new"}])])
    assert is_as_the_files(rows)
    assert [row[-1] for row in of_files(rows)] == ["a"] * 200 + [None]


@pytest.mark.few(1)
@pytest.mark.parametrize(("kind", "value"), [("STRING", "1"), ("INTEGER", 1)])
def test_a_column_that_is_added_and_retyped_in_one_change_keeps_its_default(
    rows: RowTable, kind: str, value: Any
) -> None:
    assert is_as_the_files(rows)
    rows.change(
        [
            dm.Insert([{"name": "new"}]),
            dm.AddColumn(dm.Column("y", "STRING", default="1")),
            dm.Patch([(1, None, {"n": 7})]),
            dm.RetypeColumn("y", kind),
            dm.Patch([(2, None, {"n": 8})]),
        ]
    )
    assert [row[-1] for row in of_files(rows)] == [value] * 201
    assert is_as_the_files(rows)


def wide() -> str:
    """Returns a text of random characters that is too long for an index entry."""
    return "".join(chr(random.Random(seed).randrange(0x4E00, 0x9F00)) for seed in range(1_000))


def indexed(instance: Instance, rows: RowTable, column: str) -> tuple[str | None, int | None]:
    """Gives a column an index; returns the index database of the table and the id of the index's build."""
    (column_id,) = [one.column_id or 0 for one in rows.columns() if one.name == column]
    indexing_of(instance).bring(rows, columns=[column_id])
    looked = indexing_of(instance).placements.look(rows.table_id)
    found = indexing_of(instance).builds(str(looked.database)).all(looked.instance_id)
    assert looked.build_id in [one.build_id for one in found if one.retired_seconds is None]
    return looked.database, looked.build_id


def test_a_column_whose_texts_are_too_wide_for_an_index_has_none(instance: Instance) -> None:
    rows = instance.create_row_table("wide", [dm.Column("n", "INTEGER"), dm.Column("s", "STRING", 1_000)])
    rows.change([dm.Insert([{"n": 1, "s": "a"}, {"n": 2, "s": wide()}])])
    before = indexed(instance, rows, "n")
    assert [indexed(instance, rows, "s") for _ in range(2)] == [before] * 2
    assert query_when_ready(rows, "select n from wide order by s").rows == [(1,), (2,)]


def test_a_text_too_wide_for_its_columns_index_drops_the_index(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_ROW_INDEXES", "1")
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        rows = instance.create_row_table("wide", [dm.Column("n", "INTEGER"), dm.Column("s", "STRING", 1_000)])
        rows.change([dm.Insert([{"n": 1, "s": "a"}])])
        before = indexed(instance, rows, "s")
        rows.change([dm.Insert([{"n": 2, "s": wide()}])])
        assert indexed(instance, rows, "s") == before
        assert is_as_the_files(rows)


def are_built_once_each(instance: Instance, *tables: RowTable) -> bool:
    """Updates the indexes of the tables in this order; returns whether each table then has an index built
    once.
    """
    for one in tables:
        indexing_of(instance).bring(one)
    looks = [indexing_of(instance).placements.look(one.table_id) for one in tables]
    builds = [indexing_of(instance).builds(str(one.database)).all(one.instance_id) for one in looks]
    there = {(one.build_id, one.table_uuid) for listed in builds for one in listed}
    return there == {(one.build_id, one.table_uuid) for one in looks} and all(map(is_as_the_files, tables))


@pytest.mark.slow
def test_tables_of_a_database_that_is_made_again_leave_each_others_indexes_alone(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_ROW_INDEXES", "1")
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        first, second = (instance.create_row_table(name, COLUMNS) for name in ("first", "second"))
        for one in (first, second):
            one.change([dm.Insert(rows_of(10))])
            indexing_of(instance).bring(one)
        indexing_of(instance).cluster.lost("1")
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute(f"drop database {conninfo_to_dict(dsn)['dbname']}_rows_1 with (force)".encode())
        assert are_built_once_each(instance, second, first)


@pytest.mark.slow
def test_tables_leave_each_others_indexes_alone_after_a_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash empties the unlogged tables of indexes, but does not drop them."""
    monkeypatch.setenv("DORMOUSE_ROW_INDEXES", "1")
    with dm.local(tmp_path / "lake") as instance:
        for name in ("first", "second"):
            one = instance.create_row_table(name, COLUMNS)
            one.change([dm.Insert(rows_of(10))])
            indexing_of(instance).bring(one)
        server = postmaster(tmp_path / "lake")
        server.send_signal(signal.SIGQUIT)  # "immediate"
        server.wait(60)
    with dm.local(tmp_path / "lake") as instance:
        assert are_built_once_each(instance, *map(instance.row_table, ("second", "first")))
        assert [job.error for job in instance.jobs.list(state="FAILED")] == []


def test_a_worker_that_comes_late_leaves_no_session(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker of indexes may open a database while its instance is closed, or afterwards."""
    opened = cluster.IndexCluster(dsn)
    migrated = postgres.migrate

    def closed_meanwhile(supplier: Any, *given: Any) -> None:
        migrated(supplier, *given)
        opened.close()

    monkeypatch.setattr("dormouse.rows.cluster.migrate", closed_meanwhile)
    for _ in range(2):
        with pytest.raises(InstanceError, match="the instance is closed"):
            opened.supplier("1")
    left = "select count(*) from pg_stat_activity where datname = current_database() || '_rows_1'"
    with psycopg.connect(dsn, autocommit=True) as conn:
        wait_until(lambda: conn.execute(left).fetchone() == (0,), 10)


def test_keys_with_nulls_are_looked_up_as_quickly_as_others(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing each key with each row would take about five seconds."""
    monkeypatch.setattr(cluster, "QUERY_SECONDS_MAX", 3)
    rows = instance.create_row_table("t", COLUMNS)
    rows.change([dm.Insert([{"n": n} for n in range(10_000)])])
    done = rows.upsert([{"n": n, "name": None, "b": True} for n in range(5_000, 15_000)], on=["name", "n"])
    assert (done.changed["updated"], done.changed["inserted"]) == (5_000, 5_000)


def test_an_upsert_fails_if_its_look_up_takes_too_long(
    rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(*given: Any, **how: Any) -> None:
        raise psycopg.errors.QueryCanceled

    monkeypatch.setattr(locating, "located", cancelled)
    with pytest.raises(InvalidQuery, match="took longer than 300 s"):
        rows.upsert([{"n": 1, "name": "new"}], on=["name", "n"])


def test_a_reader_gets_its_answer_though_it_cannot_index_the_column(
    instance: Instance, rows: RowTable, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "SLOW_SECONDS", 0)
    monkeypatch.setattr(indexes, "INDEXED_ROWS_MIN", 0)
    indexing_of(instance).bring(rows)
    with dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reading:
        page = reading.row_table("t").query("select row_id from t where n = 3 order by row_id")
        assert page.rows == [(row[0],) for row in of_files(rows) if row[3] == 3]


def test_a_reader_pages_through_an_older_version_of_a_table_without_an_index(
    instance: Instance, rows: RowTable, dsn: str, tmp_path: Path
) -> None:
    """Another process, which had opened the instance for writing, made the key with which page tokens are
    signed.
    """
    with instance._supplier.connection() as conn:
        conn.execute("delete from row_page_key")  # an instance of an earlier release has no key
    with dm.connect(dsn, (tmp_path / "objects").as_uri()):
        pass
    with dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reading:
        first = reading.row_table("t").query(TEXT, 150, version=1)
        assert [len(page.rows) for page in all_pages(reading.row_table("t"), first)] == [150, 50]


def test_pages_of_an_older_version_end_with_a_restore_of_the_database(
    instance: Instance, rows: RowTable
) -> None:
    """After a restore, the version may have other rows than before."""
    page = rows.query(TEXT, 150, version=1)
    assert len(rows.query(page=page.next_page).rows) == 50
    with instance._supplier.connection() as conn:
        conn.execute(
            """insert into incarnation (number, reason, system_identifier, timeline, database_oid)
               select max(number) + 1, 'adoption', 0, 0, 0 from incarnation"""
        )
    with pytest.raises(PageExpired, match="was restored"):
        rows.query(page=page.next_page)


def test_a_page_of_an_older_version_has_the_time_of_its_commit(rows: RowTable) -> None:
    first = query_when_ready(rows, TEXT, 100)
    rows.snapshot("then")
    rows.change([dm.Insert(rows_of(1))])
    newest = query_when_ready(rows, TEXT)
    following = rows.query(page=first.next_page)
    older = [rows.query(TEXT, version=1), rows.query(TEXT, snapshot="then")]
    assert [first.changed_at, newest.changed_at] == [one.changed_at for one in reversed(rows.history())]
    assert [one.changed_at for one in (following, *older)] == [first.changed_at] * 3
