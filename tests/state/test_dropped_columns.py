"""Tests of undone and retired deletions that name a column which was dropped since."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability.erasing import _Erasing
from dormouse.reading.scan_session import look_at
from tests.support.api import Instance, Table

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    values=[dm.Field("note", dm.STRING, nullable=True), dm.Field("v", dm.LONG)],
)
PROPERTIES: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}


@pytest.fixture
def table(instance: Instance) -> Table:
    return instance.create_table("t", SCHEMA, properties=dm.TableProperties(**PROPERTIES))


def add(table: Table, *keys: int, note: str = "x") -> None:
    table.ingest(pa.table({"k": keys, "note": [note] * len(keys), "v": [k % 3 for k in keys]}))


def keys(table: Table, as_of: Any = None) -> list[int]:
    return [row["k"] for row in table.query(columns=["k"], as_of=as_of).read_all().to_pylist()]


def changes_after(table: Table, after: Any) -> list[tuple[str, int]]:
    rows = table.changes(after=after).read_all().to_pylist()
    return [(row["_change"], row["k"]) for row in rows]


@pytest.mark.slow
def test_rows_are_erased_though_an_undone_deletion_names_a_dropped_column(table: Table) -> None:
    add(table, 1, 2)
    add(table, 5, note="y")
    cut = table.history.record_cut("cut")
    table.delete({"note": "x"})
    deleted = table.history.record_cut("deleted")
    table.restore(cut)
    table.drop_column("note")
    assert changes_after(table, deleted) == [("insert", 1), ("insert", 2)]
    look_at(table.context.followed(), [(one.filename, one.byte_count) for one in table.file_page()])
    assert keys(table, deleted) == [5], "a look does not make it forgotten there"
    assert table.erase({"k": 5}).is_finished
    assert table.erase({"k": 5}, dry_run=True).rows == 0
    assert keys(table) == [1, 2]


@pytest.mark.slow
def test_files_are_examined_though_a_retired_deletion_names_a_dropped_column(table: Table) -> None:
    add(table, 1, 2, 3)
    add(table, 4, 5)
    table.delete({"k": dm.Range(1, 6), "note": "x"})
    table.compact()
    add(table, 100, 101, 102, 200)
    with table.context.supplier.connection() as conn:
        conn.execute("update file set deletions_till = 0")
    table.collect_garbage()
    assert not table.deletions()
    table.drop_column("note")
    table.delete({"v": 2})
    assert table.compact().given_up == 0
    assert keys(table) == [100, 102]


def test_an_erasure_fails_when_its_column_is_dropped_meanwhile(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(table, 1, 2)
    rewrite = _Erasing.rewrite

    def dropped(self: _Erasing) -> None:
        with table.context.supplier.connection() as conn:
            conn.execute("update deletion set retired_xid = pg_current_xact_id(), retired_at = now()")
        table.drop_column("note")
        table.delete({"v": 9})  # so that the look uses the current columns
        rewrite(self)

    monkeypatch.setattr(_Erasing, "rewrite", dropped)
    with pytest.raises(dm.errors.InvalidQuery, match="a column that the erasure names was dropped"):
        table.erase({"note": "x"})


def test_changes_over_a_restore_have_the_current_columns(table: Table) -> None:
    """Two rows that differ only in a dropped column count as equal, so they cancel each other."""
    add(table, 1, 2)
    cut = table.history.record_cut("cut")
    add(table, 7, note="y")
    table.delete({"k": 1, "note": "x"})
    add(table, 1, note="z")
    after = table.history.record_cut("after")
    table.restore(cut)
    table.rename_column("v", "value")
    assert sorted(changes_after(table, after)) == [("delete", 1), ("delete", 7), ("insert", 1)]
    table.rename_column("k", "key")
    table.drop_column("note")
    table.add_column(dm.Field("more", dm.LONG), default=4)
    rows = table.changes(after=after).read_all().to_pylist()
    assert rows == [{"key": 7, "value": 1, "more": 4, "_change": "delete"}]
