"""Queries of row tables that wait for an index that is behind, or whose database is unavailable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.errors import IndexNotReady, PageExpired
from tests.row_indexes import indexing_of, made, rows_of
from tests.serving import http_post, serving
from tests.support.api import Instance

TEXT = "select row_id, n from t order by row_id"


def in_server(dsn: str, statement: str, name: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL(statement).format(sql.Identifier(name)))


@pytest.fixture
def two_databases(dsn: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields the names of two index databases. A database that is dropped is not made again."""
    names = [f"{conninfo_to_dict(dsn)['dbname']}_index_{letter}" for letter in "ab"]
    given = conninfo_to_dict(make_conninfo(dsn))
    host = str(given["host"]).replace("/", "%2F")
    for name in names:
        in_server(dsn, "create database {} template template0", name)
    urls = [f"postgresql://{given['user']}@{host}:{given.get('port') or 5432}/{name}" for name in names]
    monkeypatch.setenv("DORMOUSE_ROW_INDEXES", " ".join(urls))
    yield names
    for name in names:
        in_server(dsn, "drop database if exists {} with (force)", name)


@pytest.mark.slow
def test_the_first_query_after_a_change_is_answered(instance: Instance) -> None:
    rows = made(instance)
    assert len(rows.query(TEXT, 1_000).rows) == 200
    for number in range(5):
        rows.change([dm.Patch([(1, None, {"n": 100 + number})])])
        assert rows.query("select n from t where row_id = 1").rows == [(100 + number,)]


@pytest.mark.slow
def test_a_service_waits_for_the_index_by_default(instance: Instance) -> None:
    made(instance)
    with serving(instance) as url:
        answer = http_post(f"{url}/v1/rows/t/query", json={"sql": "select count(*) as c from t"}, timeout=60)
    assert (answer.status_code, answer.json()["rows"]) == (200, [[200]])


@pytest.mark.slow
def test_a_query_waits_for_an_index_whose_database_is_unavailable(
    dsn: str, tmp_path: Path, two_databases: list[str]
) -> None:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        rows = made(instance)
        expected = rows.query(TEXT, 1_000, wait_seconds=60).rows
        page = rows.query(TEXT, 50)
        before = indexing_of(instance).placements.look(rows.table_id).database or ""
        name = before.rpartition("/")[2]
        in_server(dsn, "drop database {} with (force)", name)
        assert rows.query(TEXT, 1_000, wait_seconds=60).rows == expected
        after = indexing_of(instance).placements.look(rows.table_id).database
        assert {before.rpartition("/")[2], str(after).rpartition("/")[2]} == set(two_databases)
        with pytest.raises(PageExpired, match="begin the query again"):
            rows.query(page=page.next_page, wait_seconds=60)


@pytest.mark.slow
def test_no_refusal_names_the_address_of_the_index(
    dsn: str, tmp_path: Path, two_databases: list[str]
) -> None:
    host = str(conninfo_to_dict(dsn)["host"])
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        rows = made(instance)
        page = rows.query(TEXT, 50, wait_seconds=60)
        for name in two_databases:
            in_server(dsn, "drop database {} with (force)", name)
        refusals = []
        for call in (
            lambda: rows.query(TEXT, wait_seconds=0),  # its database is lost during a query
            lambda: rows.query(page=page.next_page, wait_seconds=0),
            lambda: rows.upsert([{"name": "new"}], on=["name"]),  # an upsert updates the index itself
            lambda: rows.query(TEXT, wait_seconds=0),  # the last attempt failed
        ):
            with pytest.raises((IndexNotReady, PageExpired)) as refused:
                call()
            refusals.append(str(refused.value))
    assert [one for one in refusals if host in one or any(name in one for name in two_databases)] == []


def test_a_page_goes_on_after_a_lost_connection(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    """After one lost connection, the index does not count as lost."""
    rows = made(instance)
    page = rows.query(TEXT, 150, wait_seconds=60)
    is_lost: list[bool] = []
    found = indexing_of(instance).builds

    def lost_once(database: str) -> object:
        if not is_lost:
            is_lost.append(True)
            raise psycopg.OperationalError("the server closed the connection")
        return found(database)

    monkeypatch.setattr(indexing_of(instance), "builds", lost_once)
    assert [row[0] for row in rows.query(page=page.next_page).rows] == list(range(151, 201))
    assert is_lost


@pytest.mark.slow
def test_a_reader_waits_for_the_work_of_another_process(instance: Instance, dsn: str, tmp_path: Path) -> None:
    """A read-only process cannot start the work on the index itself."""
    rows = made(instance)
    rows.query(TEXT, wait_seconds=60)
    with dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reading:
        read = reading.row_table("t")
        rows.change([dm.Insert(rows_of(5))])
        with pytest.raises(IndexNotReady, match="read-only"):
            read.query(TEXT, wait_seconds=0)
        looked_first = read._indexes._answer

        def brought_meanwhile(*given: object) -> object:
            try:
                return looked_first(*given)  # type: ignore[arg-type]
            finally:
                indexing_of(instance).bring(rows)

        read._indexes._answer = brought_meanwhile  # type: ignore[method-assign, assignment]
        assert len(read.query(TEXT, 1_000).rows) == 205
