"""Indexes of row tables are never stale, are updated once, and are repaired, moved, dropped and rebuilt."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.errors import IndexNotReady, InstanceError, PageExpired
from dormouse.rows import indexes
from dormouse.rows.builds import Builds
from dormouse.rows.cluster import Placed
from dormouse.rows.indexing import balanced
from tests.row_indexes import (
    COLUMNS,
    all_pages,
    builds_of,
    indexing_of,
    is_as_the_files,
    made,
    query_when_ready,
    rows_of,
    same,
)
from tests.support.api import Instance
from tests.support.rows import RowTable

TEXT = "select row_id, row_version, name, n, x, d, b from t"


@pytest.fixture
def objects(tmp_path: Path) -> str:
    return f"file://{tmp_path}/objects"


@pytest.fixture
def instance(dsn: str, objects: str) -> Iterator[Instance]:
    with dm.connect(dsn, objects) as instance:
        yield instance


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    return made(instance)


@pytest.mark.slow
def test_an_index_that_is_behind_refuses_and_is_updated(instance: Instance, rows: RowTable) -> None:
    for _ in range(3):
        with pytest.raises(IndexNotReady, match="being updated: try again"):
            rows.query(TEXT, wait_seconds=0)
        assert is_as_the_files(rows)
        rows.change([dm.Insert(rows_of(10))])
    assert rows.query("select count(*) from t", wait_seconds=60).rows == [(230,)]
    assert {job.kind for job in instance.jobs.list(state="COMPLETE")} == {"index_rows"}


@pytest.mark.slow
def test_no_answer_is_older_than_its_query(rows: RowTable) -> None:
    for number in range(15):
        version = rows.change([dm.Patch([(1, None, {"n": 1_000 + number})])]).versions[-1]
        text = "select n from t where row_id = 1"
        page = rows.query(text, wait_seconds=60) if number % 2 else query_when_ready(rows, text)
        assert page.rows == [(1_000 + number,)]
        assert (page.version, page.row_versions) == (version, [version])


def test_a_page_needs_no_separate_read_of_the_build(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = query_when_ready(rows, TEXT).rows
    monkeypatch.setattr(Builds, "read", lambda *given: pytest.fail("it was looked at"))
    pages = [rows.query(TEXT, 150)]
    pages.append(rows.query(page=pages[0].next_page))
    assert same([row for page in pages for row in page.rows], expected)


@pytest.mark.parametrize("page_rows", [100, 1_000])
def test_a_page_of_two_statements_is_of_one_version(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch, page_rows: int
) -> None:
    """Rows with nulls and rows without come from two statements. Between them, the table is changed and
    indexed.
    """
    rows.change([dm.Patch([(row_id, None, {"n": None}) for row_id in range(1, 200, 2)])])
    text = "select row_id, n from t order by n desc, row_id"
    expected = query_when_ready(rows, text, page_rows).rows
    rows_at, is_changed = Builds.rows_at, []

    def changed_after(*given: Any) -> list[tuple[Any, ...]]:
        found = rows_at(*given)
        if not is_changed:
            is_changed.append(True)
            rows.change([dm.Patch([(row_id, None, {"n": None}) for row_id in range(2, 201, 2)])])
            indexing_of(instance).bring(rows)
        return found

    monkeypatch.setattr(Builds, "rows_at", changed_after)
    assert rows.query(text, page_rows).rows == expected
    assert is_changed


@pytest.mark.slow
def test_the_index_follows_changes_of_rows_and_columns(rows: RowTable) -> None:
    assert is_as_the_files(rows)
    page = rows.query("select n, x from t order by n", 50)
    before = [tuple(row) for row in rows.query("select n, x from t order by n", 200).rows]
    rows.change([dm.Patch([(i, None, {"n": -i}) for i in range(1, 100)]), dm.Remove([(150, 1), (151, 1)])])
    assert is_as_the_files(rows)
    rows.change([dm.AddColumn(dm.Column("more", "STRING", default="it's")), dm.RenameColumn("n", "number")])
    assert is_as_the_files(rows)
    rows.change([dm.RetypeColumn("number", "STRING", default="7"), dm.DropColumn("x")])
    assert is_as_the_files(rows)
    rows.change([dm.RetypeColumn("d", "INTEGER"), dm.AddColumn(dm.Column("x", "INTEGER", default=4))])
    rows.change([dm.Insert([{"name": "new"}]), dm.Patch([(1, None, {"x": None, "number": None})])])
    assert is_as_the_files(rows)
    # queries that began earlier keep the columns and rows of their version
    assert same([row for one in all_pages(rows, page) for row in one.rows], before)


KILLED = """
import os, signal, sys
import dormouse as dm
from dormouse.rows import builds
dsn, objects, where = sys.argv[1:]
real = builds._csv
def killing(batch):
    if where == "amid":
        os.kill(os.getpid(), signal.SIGKILL)
    return real(batch)
builds._csv = killing
with dm.connect(dsn, objects) as instance:
    indexing = instance.row_indexes.indexing
    placed = indexing.placements.built
    def built(*args):
        if where == "built":
            os.kill(os.getpid(), signal.SIGKILL)
        return placed(*args)
    object.__setattr__(indexing.placements, "built", built)
    indexing.bring(instance.row_table("t"))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["amid", "built", "after"])
@pytest.mark.parametrize("is_new", [True, False])
def test_an_index_is_updated_once_though_a_process_is_killed(
    instance: Instance, rows: RowTable, dsn: str, objects: str, where: str, is_new: bool
) -> None:
    if not is_new:
        assert is_as_the_files(rows)
    rows.change([dm.Insert(rows_of(50)), dm.Patch([(i, None, {"n": i}) for i in range(1, 60)])])
    command = [sys.executable, "-c", KILLED, dsn, objects, where]
    assert subprocess.run(command, cwd=Path(__file__).parents[2], check=False).returncode == -signal.SIGKILL
    assert is_as_the_files(rows)
    builds, build_id = builds_of(instance, rows)
    (mine,) = [
        one for one in builds.all(indexing_of(instance).placements.instance_id()) if one.build_id == build_id
    ]
    assert (mine.row_count, mine.version) == (250, rows.version())
    indexing_of(instance).upkeep(instance.row_table)
    rest = [
        one
        for one in builds.all(indexing_of(instance).placements.instance_id())
        if one.retired_seconds is None
    ]
    assert [one.build_id for one in rest] == [build_id]


def test_superseded_rows_are_deleted_and_pages_expire(instance: Instance, rows: RowTable) -> None:
    page = query_when_ready(rows, TEXT, 50)
    rows.change([dm.Remove([(i, 1) for i in range(1, 100)])])
    indexing_of(instance).bring(rows)
    assert len(rows.query(page=page.next_page).rows) == 50
    indexing_of(instance).page_seconds = 0
    time.sleep(0.01)
    indexing_of(instance).bring(rows)
    for call in (lambda: rows.query(page=page.next_page), lambda: page.count):
        with pytest.raises(PageExpired, match="begin the query again"):
            call()
    builds, build_id = builds_of(instance, rows)
    with builds._supplier.connection() as conn:
        assert conn.execute(f"select count(*) from superseded_{build_id}".encode()).fetchone() == (0,)


def databases_of(dsn: str) -> list[str]:
    return [f"{conninfo_to_dict(dsn)['dbname']}_rows_{number}" for number in (1, 2)]


@pytest.mark.slow
def test_a_dropped_database_is_made_again(rows: RowTable, dsn: str) -> None:
    page = query_when_ready(rows, TEXT, 50)
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name in databases_of(dsn):
            conn.execute(sql.SQL("drop database if exists {} with (force)").format(sql.Identifier(name)))
    with pytest.raises(IndexNotReady):
        rows.query(TEXT, wait_seconds=0)
    assert is_as_the_files(rows)
    with pytest.raises(PageExpired, match="begin the query again"):
        rows.query(page=page.next_page)


@pytest.mark.slow
def test_dropped_or_emptied_tables_are_made_again(instance: Instance, rows: RowTable) -> None:
    for statement in (
        "drop table current_{}",
        "drop table incoming_{}",
        "delete from build where build_id = {}",
    ):
        assert is_as_the_files(rows)
        builds, build_id = builds_of(instance, rows)
        with builds._supplier.connection() as conn:
            conn.execute(statement.format(build_id).encode())
        rows.change([dm.Insert(rows_of(5))])
        assert is_as_the_files(rows)


@pytest.mark.slow
def test_another_database_is_used_if_one_is_down_or_full(
    dsn: str, objects: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, full = (make_conninfo(dsn, dbname=name) for name in databases_of(dsn))
    down = make_conninfo(dsn, host="127.0.0.1", port=1, dbname="down")
    with dm.connect(dsn, objects) as instance:
        rows = instance.create_row_table("t", COLUMNS)
        rows.change([dm.Insert(rows_of(200))])
        for name in instance.row_indexes.indexing.cluster.names:
            instance.row_indexes.indexing.builds(name)  # so that both databases exist
    with psycopg.connect(full, autocommit=True) as conn:
        # PostgreSQL's error
        conn.execute(
            """create or replace function public.no_room() returns event_trigger language plpgsql as $$
               begin
                   raise exception 'could not extend file: No space left on device' using errcode = '53100';
               end $$"""
        )
        conn.execute(
            """create event trigger no_room on ddl_command_end when tag in ('CREATE TABLE')
               execute function public.no_room()"""
        )
    try:
        for addresses, works in (
            (f"{url(down)} {url(full)}", False),
            (f"{url(down)} {url(full)} {url(good)}", True),
        ):
            monkeypatch.setenv("DORMOUSE_ROW_INDEXES", addresses)
            with dm.connect(dsn, objects) as instance:
                rows = instance.row_table("t")
                if works:
                    assert is_as_the_files(rows)
                    continue
                with pytest.raises(InstanceError, match=r"cannot connect|disk of the database is full"):
                    indexing_of(instance).bring(rows)
                with pytest.raises(IndexNotReady, match=r"the last attempt failed: .*(connect|disk)") as told:
                    rows.query(TEXT, wait_seconds=0)
                assert "\n" not in str(told.value)
    finally:
        with psycopg.connect(full, autocommit=True) as conn:
            conn.execute("drop event trigger no_room")


def url(conninfo: str) -> str:
    given = conninfo_to_dict(conninfo)
    host = str(given["host"]).replace("/", "%2F")
    return f"postgresql://{given['user']}@{host}:{given.get('port') or 5432}/{given['dbname']}"


def test_an_idle_index_is_dropped_and_made_again(instance: Instance, rows: RowTable) -> None:
    assert is_as_the_files(rows)
    indexing_of(instance).upkeep(instance.row_table)
    builds, build_id = builds_of(instance, rows)
    indexing_of(instance).idle_seconds = indexing_of(instance).page_seconds = 0
    indexing_of(instance).upkeep(instance.row_table)
    indexing_of(instance).upkeep(instance.row_table)
    assert build_id not in [
        one.build_id for one in builds.all(indexing_of(instance).placements.instance_id())
    ]
    with pytest.raises(IndexNotReady):
        rows.query(TEXT, wait_seconds=0)
    assert is_as_the_files(rows)


@pytest.mark.slow
def test_loads_are_balanced_and_pages_go_on_where_they_began(instance: Instance, rows: RowTable) -> None:
    others = [instance.create_row_table(f"t{number}", COLUMNS) for number in range(3)]
    for one in others:
        one.change([dm.Insert(rows_of(10))])
        query_when_ready(one, f"select * from {one.name}")
    page = query_when_ready(rows, TEXT, 50)
    placements = indexing_of(instance).placements
    assert {one.database for one in placements.all()} == {"1", "2"}
    home = placements.look(rows.table_id).database
    neighbour = next(one for one in others if placements.look(one.table_id).database == home)
    placements.used(rows.table_id, 500)
    placements.used(neighbour.table_id, 1_000)
    indexing_of(instance).upkeep(instance.row_table)
    moved = [one for one in (rows, neighbour) if placements.look(one.table_id).database != home]
    assert len(moved) == 1
    assert all(is_as_the_files(one) for one in (rows, *others))
    rows.change([dm.Remove([(i, 1) for i in range(1, 201)])])
    assert query_when_ready(rows, TEXT).rows == []
    assert [i for one in all_pages(rows, page) for i in one.row_ids or []] == list(range(1, 201))


def test_balancing_moves_the_busiest_table_of_an_overloaded_database() -> None:
    def placed(table_id: int, database: str, load: float) -> Placed:
        return Placed(table_id, "t", database, table_id, load, 0.0)

    assert balanced([placed(1, "a", 1_000)], ["a", "b"]) is None
    assert balanced([placed(1, "a", 30), placed(2, "a", 20)], ["a", "b"]) is None
    busy = [placed(1, "a", 100), placed(2, "a", 60), placed(3, "a", 40), placed(4, "b", 20)]
    assert balanced(busy, ["a", "b"]) == (busy[0], "b")


@pytest.mark.slow
def test_columns_in_conditions_of_slow_queries_get_an_index(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(indexes, "SLOW_SECONDS", 0)
    monkeypatch.setattr(indexes, "INDEXED_ROWS_MIN", 0)
    texts = [
        "select x from t where n = 3",
        "select x from t order by d desc",
        "select x from t where name like 'a%'",
    ]
    wanted = {column.column_id for column in rows.columns() if column.name in ("n", "d", "name")}
    deadline, found = time.monotonic() + 60, set()
    while not wanted <= found and time.monotonic() < deadline:
        for text in texts:
            query_when_ready(rows, text)
        builds, build_id = builds_of(instance, rows)
        looked = indexing_of(instance).placements.look(rows.table_id)
        found = set(builds.read(looked, build_id, lambda conn, build: build.indexed_ids) or ())
        time.sleep(0.02)
    assert found == wanted
    for text in texts:
        first = rows.query(text, 5)
        assert len([row for page in all_pages(rows, first) for row in page.rows]) == first.count


@pytest.mark.slow
def test_another_incarnation_of_the_database_has_another_index(instance: Instance, rows: RowTable) -> None:
    """After a restore, a version may have other rows than those that were indexed."""
    assert is_as_the_files(rows)
    _, before = builds_of(instance, rows)
    with instance._supplier.connection() as conn:
        conn.execute(
            """insert into incarnation (number, reason, system_identifier, timeline, database_oid)
               select max(number) + 1, 'adoption', 0, 0, 0 from incarnation"""
        )
    assert is_as_the_files(rows)
    assert builds_of(instance, rows)[1] != before


def test_a_read_only_instance_refuses_if_the_index_is_behind(
    instance: Instance, rows: RowTable, dsn: str, objects: str
) -> None:
    query_when_ready(rows, TEXT)
    with dm.connect(dsn, objects, read_only=True) as reading:
        assert len(reading.row_table("t").query(TEXT).rows) == 200
        rows.change([dm.Insert(rows_of(5))])
        with pytest.raises(IndexNotReady, match="read-only"):
            reading.row_table("t").query(TEXT, wait_seconds=0)
        query_when_ready(rows, TEXT)
        assert len(reading.row_table("t").query(TEXT).rows) == 205


@pytest.mark.slow
def test_a_damaged_index_is_rebuilt(tmp_path: Path) -> None:
    """The index's file is damaged while the embedded server is stopped."""
    with dm.local(tmp_path / "lake") as instance:
        rows = instance.create_row_table("t", COLUMNS)
        rows.change([dm.Insert(rows_of(500))])
        assert is_as_the_files(rows)
        builds, build_id = builds_of(instance, rows)
        with builds._supplier.connection() as conn:
            ((name,),) = conn.execute("select pg_relation_filepath(%s)", [f"current_{build_id}"]).fetchall()
    (path,) = (tmp_path / "lake").rglob(name)
    with path.open("r+b") as file:
        file.seek(8_192 + 100)
        file.write(os.urandom(4_000))
    with dm.local(tmp_path / "lake") as instance:
        rows = instance.row_table("t")
        with pytest.raises(IndexNotReady):
            rows.query(TEXT, wait_seconds=0)
        assert is_as_the_files(rows)
        assert builds_of(instance, rows)[1] != build_id
