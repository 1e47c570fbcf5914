"""The first calls of a new user: the number of rows, the first rows, the files; and `exist_ok`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery, TableAlreadyExists, TableNotFound
from dormouse.reading.sql import parsed
from dormouse.reading.sql.selects import Select
from tests.support.api import Instance, Table
from tests.support.reading import selects as together

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [],
    [dm.Field("name", dm.STRING, nullable=True), dm.Field("x", dm.DOUBLE)],
)


def rows(start: int, end: int) -> pa.Table:
    numbers = range(start, end)
    return pa.table({"k": numbers, "name": [f"n{n % 7}" for n in numbers], "x": [n / 4 for n in numbers]})


@pytest.fixture
def table(instance: Instance) -> Table:
    made = instance.create_table("order", SCHEMA, split_points=[500])
    made.ingest(rows(0, 1_000))
    made.ingest(rows(800, 1_200))
    return made


def read_by_duckdb(table: Table, copies: Path, as_of: Any = None) -> list[tuple[Any, ...]]:
    found = []
    for file in table.live_files(as_of, inlined_to=copies):
        where = f" where {file.condition}" if file.condition else ""
        found += duckdb.execute(f"select * from read_parquet(?){where}", [file.path]).fetchall()
    return sorted(found)


def test_count_follows_conditions_deletions_and_moments(table: Table) -> None:
    assert table.count() == 1_400
    assert table.count({"k": dm.Range(790, 810)}) == 30
    assert table.count({"k": -1}) == 0
    before = table.history.record_cut("before")
    table.delete({"name": "n3"})
    assert table.count() == table.query().read_all().num_rows < 1_400
    assert table.count({"k": 3}) == 0
    assert table.count(as_of=before) == 1_400


def test_head_returns_the_first_rows_in_order(table: Table) -> None:
    assert table.head(3).to_pylist() == rows(0, 3).to_pylist()
    assert table.head(2, ["name"]).to_pylist() == [{"name": "n0"}, {"name": "n1"}]
    assert table.head().num_rows == 10
    assert table.head(0).num_rows == 0


@pytest.mark.slow
def test_descending_queries_return_the_last_rows_first(
    instance: Instance, table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list may be too long for a statement, and a handle may not know that a column was renamed."""
    monkeypatch.setattr(parsed, "STATEMENT_CHARACTERS_MAX", 1_000)
    before, old_handle = table.history.record_cut(), instance.table(table.name)
    where = {"k": [*range(100, 900, 3), dm.Range(990, 995)], "name": ["n1", "n2", None], "x": dm.Range(26.0)}
    expected = table.query(where).read_all().sort_by([("k", "descending")])
    assert expected.num_rows > 50
    assert table.query(where, descending=True).read_all() == expected
    assert table.query(where, limit=7, offset=3, descending=True).read_all() == expected.slice(3, 7)
    assert table.query({"k": []}, descending=True).read_all().num_rows == 0
    table.rename_column("k", "key")
    last = [{"key": 1_199}]
    assert old_handle.query({"name": "n2"}, ["key"], descending=True, limit=1).read_all().to_pylist() == last
    assert table.query(where, descending=True, as_of=before).read_all() == expected


def test_keys_in_many_leaves_are_one_scan_after_a_column_was_dropped(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("v", dm.LONG), dm.Field("gone", dm.LONG)])
    monkeypatch.setattr(together, "SCANS_MAX", 2)
    table = instance.create_table("many", schema, split_points=[10, 20, 30])
    keys = [*range(40)]
    table.ingest(pa.table({"k": keys, "v": keys, "gone": keys}))
    table.drop_column("gone")
    selects: list[str] = []
    of = Select.of
    monkeypatch.setattr(Select, "of", lambda *given: selects.append(of(*given)) or selects[-1])
    where = {"k": [*keys[::10], dm.Range(3, 5)], "v": dm.Range(3)}
    found = table.query(where, ["k"], descending=True).read_all()["k"].to_pylist()
    assert found == [*keys[::10][:0:-1], 4, 3]
    assert [one.count("read_parquet(") for one in selects] == [1]


@pytest.mark.slow
def test_a_handle_does_not_read_a_new_table_with_its_old_name(instance: Instance, table: Table) -> None:
    renamed, dropped = instance.table("order"), instance.create_table("other", SCHEMA)
    instance.rename_table("order", "before")
    instance.drop_table("other")
    for name in ("order", "other"):
        instance.create_table(name, SCHEMA).ingest(rows(0, 5))
    assert renamed.count() == renamed.query(descending=True).read_all().num_rows == 1_400
    for read in (dropped.query, dropped.count, lambda: dropped.query(descending=True)):
        with pytest.raises(TableNotFound):
            read()


@pytest.mark.slow
def test_other_handles_follow_a_changed_aggregate_or_filter(instance: Instance, tmp_path: Path) -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("n", dm.LONG), dm.Field("time", dm.LONG)])
    table = instance.create_table("t", schema)
    for _ in range(2):
        table.ingest(pa.table({"k": [1, 2], "n": [3, 4], "time": [0, 1 << 60]}))
    for changes in (
        {"aggregate": "sum(n), max(time)"},
        {"aggregate": None, "filter": "age_off(time, 1000)"},
        {"filter": None},
    ):
        handles = [instance.table("t") for _ in range(6)]
        table.set_properties(**changes)
        expected = instance.sql("select * from t order by all").read_all().to_pylist()
        assert handles[0].query().read_all().to_pylist() == expected
        assert handles[1].query({"k": 2}).read_all().to_pylist() == [one for one in expected if one["k"] == 2]
        assert handles[2].count({"n": dm.Range(0)}) == len(expected)
        assert handles[3].count() == len(expected)
        assert handles[4].query(descending=True).read_all().to_pylist() == expected[::-1]
        if table.properties.aggregate or table.properties.filter:
            with pytest.raises(InvalidQuery, match="alone do not show its rows"):
                handles[5].live_files()
        else:
            assert len(handles[5].live_files(inlined_to=tmp_path / "copies")) == 2


@pytest.mark.slow
def test_live_files_give_the_rows_without_dormouse(table: Table, tmp_path: Path) -> None:
    """DuckDB reads the files with the conditions, after splits and deletions and at other moments."""

    def expected(as_of: Any = None) -> list[tuple[Any, ...]]:
        return sorted(tuple(row.values()) for row in table.query(as_of=as_of).read_all().to_pylist())

    assert all(
        file.condition is None and Path(file.path).stat().st_size == file.byte_count
        for file in table.live_files(inlined_to=tmp_path)
    )
    assert read_by_duckdb(table, tmp_path) == expected()
    cut = table.history.record_cut()
    table.partitions.scale([one.partition_id for one in table.partitions.leaves()][:1], [("k", 250)])
    table.split()
    table.delete({"name": ["n1", None]})
    table.delete({"k": dm.Range(240, 260)})
    assert any(file.condition for file in table.live_files(inlined_to=tmp_path))
    assert read_by_duckdb(table, tmp_path) == expected() != expected(cut)
    assert read_by_duckdb(table, tmp_path, cut) == expected(cut)
    table.compact()
    assert read_by_duckdb(table, tmp_path) == expected()


def test_live_files_are_refused_if_conditions_cannot_give_the_rows(instance: Instance, table: Table) -> None:
    table.add_column(dm.Field("more", dm.LONG, nullable=True))
    with pytest.raises(InvalidQuery, match="was written before its columns were changed: compact the table"):
        table.live_files()
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("x", dm.LONG)])
    for name, value in (("keep", "newest_row"), ("aggregate", "max(x)"), ("filter", "age_off(k, 5)")):
        made = instance.create_table(name, schema, properties=dm.TableProperties(**{name: value}))
        with pytest.raises(InvalidQuery, match=f"the files of table '{name}' alone do not show"):
            made.live_files()


def test_exist_ok_opens_a_table_with_the_same_columns(instance: Instance, table: Table) -> None:
    with pytest.raises(TableAlreadyExists):
        instance.create_table(table.name, SCHEMA)
    again = instance.create_table(table.name, SCHEMA, exist_ok=True)
    assert again.count() == 1_400
    with pytest.raises(TableAlreadyExists, match="exists already, with other columns: k "):
        instance.create_table(table.name, dm.Schema([dm.Field("k", dm.STRING)]), exist_ok=True)
    assert instance.create_table("fresh", SCHEMA, exist_ok=True).count() == 0
