"""Queries of row tables compared with DuckDB, page by page, from the index and from the files."""

from __future__ import annotations

import itertools
import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.errors import InvalidInput, InvalidPage, InvalidQuery, SnapshotNotFound
from dormouse.rows import pages
from tests.row_indexes import COLUMNS, all_pages, of_files, query_when_ready, rows_of, same
from tests.row_queries import grouped, plain
from tests.support.api import Instance
from tests.support.jobs import JobStore
from tests.support.rows import RowTable
from tests.support.verbs import rows as row_verbs
from tests.support.verbs import start_query

_names = itertools.count(1)


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    return module_instance


@pytest.fixture(scope="module")
def table(instance: Instance) -> RowTable:
    """Returns a table with a history: of its 300 rows, some were changed and some deleted."""
    rows = instance.create_row_table("t", COLUMNS)
    rows.change([dm.Insert(rows_of(300))])
    rows.snapshot("first")
    rows.change([dm.Patch([{"ROW_ID": i, "ROW_VERSION": 1, "n": 3, "name": "new"} for i in range(1, 40)])])
    rows.change([dm.Remove([(i, 1) for i in range(200, 230)])])
    query_when_ready(rows, "select * from t")
    return rows


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    rows = instance.create_row_table(f"r{next(_names)}", COLUMNS)
    rows.change([dm.Insert(rows_of(120))])
    return rows


@cache
def _read(rows: RowTable, version: int | None) -> pa.Table:
    with rows.current(version) as reader:
        return reader.read_all()


def judged(rows: RowTable, text: str, version: int | None = None) -> list[tuple[Any, ...]]:
    """Returns DuckDB's answer to the same query, over the rows that the files have."""
    with duckdb.connect() as judge:
        # a copy, because filters that DuckDB hands to Arrow leave out NaN
        judge.register("given", _read(rows, version))
        judge.execute("create table t as select * from given")
        if text.startswith("select *"):
            text = text.replace("*", "* exclude (row_id, row_version)", 1)
        return judge.execute(text).fetchall()


def shown(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns rows in DuckDB's form, with JSON as text."""
    return [
        tuple(v for v in row if not isinstance(v, dict) and not str(v).startswith('{"i"')) for row in rows
    ]


@given(st.one_of(plain(), grouped()), st.sampled_from([7, 40, 300]))
def test_an_answer_equals_duckdbs_over_the_same_rows(table: RowTable, text: str, page_rows: int) -> None:
    found = all_pages(table, table.query(text, page_rows))
    rows = [row for page in found for row in page.rows]
    expected = judged(table, text)
    assert same(shown(rows), shown(expected)), text
    assert found[0].count == len(expected)
    assert [len(page.rows) for page in found[:-1]] == [page_rows] * (len(found) - 1)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.one_of(plain(), grouped()), st.sampled_from([90, 400]))
def test_an_older_version_is_answered_from_the_files(table: RowTable, text: str, page_rows: int) -> None:
    first = table.query(text, page_rows, version=1)
    found = all_pages(table, first)
    rows = [row for page in found for row in page.rows]
    assert same(shown(rows), shown(judged(table, text, 1))), text
    assert first.count == len(rows)
    assert table.query(text, page_rows, snapshot="first").rows == first.rows or "nan" in repr(first.rows)


def test_rows_come_with_their_ids_and_versions_and_groups_without(table: RowTable) -> None:
    page = table.query("select n as number, j from t where row_id in (1, 4, 100) order by row_id")
    assert [one.column_id for one in table.query("select row_id, name, n + 1 from t", 1).columns][::2] == [
        None
    ] * 2
    assert (page.row_ids, page.row_versions) == ([1, 4, 100], [2, 2, 1])
    assert [(c.name, c.type, c.column_id) for c in page.columns] == [
        ("number", "INTEGER", 5),
        ("j", "JSON", 9),
    ]
    assert page.rows[0] == (3, {"i": 0, "text": "\"\\'\u0000"})
    assert (page.count, page.next_page, page.version, page.max_rows) == (3, None, 3, 1_000)
    assert page.to_json(count=True)["count"] == 3
    counted = table.query("select count(*) from t")
    assert (counted.rows, counted.row_ids, counted.row_versions) == ([(270,)], None, None)


@pytest.mark.parametrize("column", ["n", "name", "row_id", "row_version"])
def test_rows_are_ordered_by_a_column_that_is_also_selected_as_a_text(table: RowTable, column: str) -> None:
    text = f"select cast({column} as varchar), {column} from t where row_id < 9 order by {column}, row_id"
    page = table.query(text)
    assert [value for _, value in page.rows] == [
        value
        for (value,) in table.query(f"select {column} from t where row_id < 9 order by {column}, row_id").rows
    ]


def test_special_characters_in_texts_have_no_meaning(rows: RowTable) -> None:
    evil = [
        "'; drop table t; --",
        "%s",
        "%(p0)s",
        "$1",
        "\\",
        "a\nb",
        "\t",
        '"',
        "''",
        "NULL",
        "\\N",
        "\\.",
        ",",
        " ",
    ]
    rows.change([dm.Insert([{"name": one, "j": {"evil": one}} for one in evil])])
    query_when_ready(rows, f"select * from {rows.name}")
    for one in evil:
        quoted = one.replace("'", "''")
        page = rows.query(f"select name, j from {rows.name} where name = '{quoted}'")
        assert page.rows == [(one, {"evil": one})], one


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "order", ["n", "n desc", "n nulls first, x desc", "x desc nulls first", "name desc, n", "b, d desc"]
)
def test_pages_give_each_row_once_while_others_write(instance: Instance, rows: RowTable, order: str) -> None:
    expected = {row[0]: row[1] for row in of_files(rows)}
    page = query_when_ready(rows, f"select name, n from {rows.name} order by {order}", 7)
    stop = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if stop.is_set():
                return
            rows.change([dm.Insert(rows_of(3)), dm.Patch([(number % 100 + 1, None, {"n": number})])])
            instance.row_indexes.indexing.bring(rows)

    writer = threading.Thread(target=write)
    writer.start()
    found, seen = page, dict(zip(page.row_ids or [], page.row_versions or [], strict=True))
    count = len(seen)
    while found.next_page:
        found = rows.query(page=found.next_page)
        seen.update(zip(found.row_ids or [], found.row_versions or [], strict=True))
        count += len(found.rows)
    stop.set()
    writer.join()
    assert (seen, count, page.count) == (expected, len(expected), len(expected))
    assert rows.version() > page.version


def test_a_token_belongs_to_one_query_of_one_table(
    instance: Instance, table: RowTable, rows: RowTable
) -> None:
    page = table.query("select n from t", 5).next_page
    assert page is not None
    older = table.query("select n from t", 5, version=1).next_page
    query_when_ready(rows, f"select n from {rows.name}")
    with pytest.raises(InvalidPage, match="another query"):
        table.query("select n from t ", page=page)
    with pytest.raises(InvalidPage, match="does not belong to this table"):
        rows.query(page=page)
    with pytest.raises(InvalidPage, match="does not belong to this table"):
        table.query(page=page[:-2] + ("AA" if page[-2:] != "AA" else "BB"))
    for token, version in ((page, 3), (page, 1), (older, 2)):
        with pytest.raises(InvalidPage, match="another version"):
            table.query(page=token, version=version)
    assert table.query("select n from t", page=page).rows == table.query("select n from t offset 5", 5).rows
    assert (
        table.query(page=older, version=1).rows == table.query("select n from t offset 5", 5, version=1).rows
    )


def test_values_are_given_as_parameters_on_each_page(table: RowTable) -> None:
    """An older version, which is read from the files, is queried too."""
    hostile = "x'; drop table t; --"
    text = "select name from t where row_id > $least and (name <> $name or name is null) limit $most"
    literal = "where row_id > 40 and (name <> 'x''; drop table t; --' or name is null) limit 150"
    values = {"least": 40, "name": hostile, "most": 150}
    for version in (None, 1):
        expected = table.query(f"select name from t {literal}", 1_000, version=version).rows
        page = table.query(text, 60, parameters=values, version=version)
        found = list(page.rows)
        assert page.count == len(expected) == 150
        with pytest.raises(InvalidPage, match="another query"):
            table.query(text, page=page.next_page, parameters=values | {"most": 151})
        following = table.query(text, page=page.next_page, parameters=values)
        while page.next_page:
            page = table.query(page=page.next_page)
            found += page.rows
        assert found == expected
        assert following.rows == expected[60:120]
    with table.rows_of("select name from t where row_id > $1", parameters=[298]) as reader:
        assert reader.read_all().column("ROW_ID").to_pylist() == [299, 300]


def test_invalid_queries_give_an_error_of_one_line(table: RowTable) -> None:
    wrong: list[tuple[type[Exception], dict[str, Any]]] = [
        (InvalidQuery, {"sql": None}),
        (InvalidQuery, {"sql": "select * from t", "version": 9}),
        (InvalidQuery, {"sql": "select * from t", "version": -1}),
        (InvalidInput, {"sql": "select * from t", "page_rows": 0}),
        (InvalidInput, {"sql": "select * from t", "page_rows": 1_000_000}),
        (InvalidInput, {"sql": "select * from t", "wait_seconds": -1}),
        (InvalidInput, {"sql": "select * from t", "version": 1, "snapshot": "first"}),
        (SnapshotNotFound, {"sql": "select * from t", "snapshot": "none"}),
        (InvalidQuery, {"sql": "select sum(n * 9223372036854775807) from t"}),
        (InvalidQuery, {"sql": "select sum(n * 9223372036854775807) from t", "version": 1}),
    ]
    for kind, how in wrong:
        with pytest.raises(kind) as refused:
            table.query(**how)
        assert "\n" not in str(refused.value)


def test_a_page_has_no_more_rows_than_its_size_allows(instance: Instance) -> None:
    wide = instance.create_row_table(
        "wide", [dm.Column(f"c{i}", "STRING", size_max=1_000) for i in range(150)]
    )
    wide.change([dm.Insert([{"c1": "x"}] * 300)])
    page = query_when_ready(wide, "select c1 from wide")
    assert page.max_rows == len(page.rows) == 110
    assert len(all_pages(wide, page)) == 3


@pytest.mark.parametrize("version", [None, 1])
def test_a_page_ends_early_if_its_json_is_large(
    table: RowTable, monkeypatch: pytest.MonkeyPatch, version: int | None
) -> None:
    text = "select j, n from t where row_id < 100 order by n desc nulls first limit 90 offset 3"
    whole = table.query(text, version=version)
    assert (len(whole.rows), whole.next_page) == (90, None)
    monkeypatch.setattr(pages, "JSON_BYTES_MAX", 150)
    found = all_pages(table, table.query(text, version=version))
    assert [row for page in found for row in page.rows] == whole.rows
    sizes = [sum(len(str(j)) for j, _ in page.rows if j is not None) for page in found]
    assert len(found) > 3 and max(sizes) < 300


def test_locate_finds_the_rows_with_the_given_keys(instance: Instance, table: RowTable) -> None:
    keys = pa.record_batch(
        {"name": ["new", None, "no such", "Ä"], "n": pa.array([3, 3, 3, None], pa.int64())}
    )
    found = instance.row_indexes.locate(table, ["name", "n"], keys, table.version())
    expected = [
        (position, row[0], row[1])
        for position, key in enumerate(zip(*keys.to_pydict().values(), strict=True))
        for row in of_files(table)
        if row[2:4] == key
    ]
    columns = [found.column(name).to_pylist() for name in ("position", "ROW_ID", "ROW_VERSION")]
    assert list(zip(*columns, strict=True)) == expected
    assert found.column_names[3:] == [column.name for column in table.columns()]


def test_a_repeated_query_rarely_looks_for_its_job(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job fails each time in some cases."""
    looks = 0
    status = JobStore.status

    def look(*given: Any) -> Any:
        nonlocal looks
        looks += 1
        return status(*given)

    def fail(request: Any, progress: Any) -> None:
        raise InvalidQuery("no")

    def ask() -> str:
        return start_query(instance, {"table": rows.name}, None)

    with monkeypatch.context() as patched:
        patched.setattr(row_verbs, "time", SimpleNamespace(time=lambda: now))
        now = 1_000 * 3_600.0
        first = ask()
        assert ask() == first
        patched.setattr(JobStore, "status", look)
        ids = set()
        for _ in range(5):
            instance.jobs.worker({"row_query": fail}).run(drain=True)
            ids.add(ask())
        assert (len(ids | {first}), looks) == (6, 10)
        for _ in range(5):
            now += instance.row_page_seconds / 2
            ids.add(ask())
        assert (len(ids), looks) == (10, 15)
        instance.jobs.worker({"row_query": fail}).run(drain=True)
        assert ask() == ask() and ask() not in ids  # there is one job while it waits
    instance.jobs.worker({"row_query": fail}).run(drain=True)
