"""Keyed tables with changed columns. Readers get each key's newest row from old and new files."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from tests.support.api import Instance, Table

SCHEMA = dm.Schema([dm.Field("id", dm.LONG)], values=[dm.Field("name", dm.STRING), dm.Field("n", dm.INT)])
NEWEST = [(2, "B", 20, "q"), (3, "c", 3, "x"), (4, "D", 40, None)]


@pytest.fixture(params=[None, "n"])
def table(instance: Instance, request: pytest.FixtureRequest) -> Table:
    """A table with rows of two schema versions, of which some replace others, and with a deletion mark."""
    given = dm.TableProperties(
        keep="newest_row", newest_by=request.param, compaction_strategy="basic", compaction_batch_files=3
    )
    made = instance.create_table("t", SCHEMA, properties=given)
    made.upsert(pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"], "n": pa.array([1, 2, 3], pa.int32())}))
    made.history.record_cut("before")
    made.add_column(dm.Field("note", dm.STRING, nullable=True), default="x")
    made.rename_column("name", "called")
    if request.param is not None:
        made.rename_column("n", "m")
        made.rename_column("m", "n")
    made.widen_column("n", dm.LONG)
    changed = {"id": [2, 4], "called": ["B", "D"], "n": [20, 40], "note": ["q", None], "gone": [False, False]}
    made.upsert(pa.table(changed), deletes="gone")
    made.upsert(
        pa.table({"id": [1], "called": ["-"], "n": [50], "note": [None], "gone": [True]}), deletes="gone"
    )
    return made


def rows(reader: Any) -> list[tuple[Any, ...]]:
    return sorted(tuple(row.values()) for row in reader.read_all().to_pylist())


@pytest.mark.slow
def test_each_reader_gets_the_newest_rows_before_and_after_compaction(
    instance: Instance, table: Table
) -> None:
    for _ in range(2):
        assert rows(table.query()) == NEWEST
        assert rows(table.sql("select * from t")) == NEWEST
        with instance.duckdb() as db:
            assert sorted(db.sql("from t").fetchall()) == NEWEST
        assert rows(table.query({"note": "x"}, ["id"])) == [(3,)]
        assert rows(table.query(as_of="before")) == [(1, "a", 1), (2, "b", 2), (3, "c", 3)]
        assert rows(table.sql("select * from t", as_of="before")) == [
            (1, "a", 1),
            (2, "b", 2),
            (3, "c", 3),
        ]
        assert rows(table.changes("before", columns=["id", "called"])) == [
            (1, None, "delete"), (2, "B", "upsert"), (4, "D", "upsert")
        ]  # fmt: skip
        assert not instance.check(deep=True).problems
        table.compact()
    assert table.status().files == 1


def test_a_column_dropped_and_added_again_has_no_old_values(table: Table) -> None:
    table.drop_column("note")
    table.add_column(dm.Field("note", dm.LONG, nullable=True))
    for _ in range(2):
        assert rows(table.query()) == [(*row[:3], None) for row in NEWEST]
        assert rows(table.sql("select * from t")) == [(*row[:3], None) for row in NEWEST]
        table.compact()


def test_deletes_by_values_and_restores_use_the_changed_columns(table: Table) -> None:
    table.delete({"called": "B"})
    assert rows(table.query(columns=["id"])) == [(3,), (4,)]
    table.restore("before")
    assert rows(table.query()) == [(1, "a", 1, "x"), (2, "b", 2, "x"), (3, "c", 3, "x")]
