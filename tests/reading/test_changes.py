"""The rows ingested between two moments: each is returned once, whatever happened to its files meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dormouse.errors import CutExpired, InvalidCut, InvalidQuery, ObjectNotFound
from dormouse.postgres import ConnectionSupplier
from dormouse.reading.changes import changes
from dormouse.state.history import changes as files_of
from dormouse.state.history.changes import pages_between, span
from tests.small_tables import add as add_rows
from tests.small_tables import made
from tests.support.api import Instance, Table
from tests.support.model import LONG, Cut, Field, Position, Schema, TableProperties
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, TableContext, WriteAttempts
from tests.support.writing import compact, ingest, open_source, split, write_leaves

SCHEMA = Schema([Field("key", LONG)], values=[Field("value", LONG)])
NewTable = Callable[..., TableContext]


@pytest.fixture
def new_table(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> NewTable:
    objects = open_store(tmp_path / "objects")

    def make(
        layout: str = "file_table", split_points: tuple[int, ...] = (), **properties: Any
    ) -> TableContext:
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            "t", SCHEMA, TableProperties(**properties), layout, split_points
        )
        return TableContext(dsn, supplier, objects, record)

    return make


def now(table: TableContext) -> Position:
    with table.supplier.connection() as conn:
        query = (
            "select t.epoch, pg_current_snapshot()::text, clock_timestamp() from tables t where table_id = %s"
        )
        return Position(*conn.execute(query, [table.table.table_id]).fetchall()[0])


def add(table: TableContext, *keys: int, value: int = 0) -> None:
    rows = pa.table({"key": list(keys), "value": [value] * len(keys)})
    ingest(table, rows, ingest_id=None, engine="local", progress=None)


def read(table: TableContext, after: Position, till: Position | None = None) -> list[tuple[int, int]]:
    found = changes(table, after, till or now(table)).read_all()
    assert set(found["_change"].to_pylist()) <= {"insert"}
    return sorted(zip(found["key"].to_pylist(), found["value"].to_pylist(), strict=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("writing", ["one_file_per_leaf", "one_reference_per_leaf"])
def test_changes_return_each_row_once_across_compactions_and_splits(
    new_table: NewTable, layout: str, writing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_of, "PAGE_REFERENCES", 2)
    monkeypatch.setattr(files_of, "PAGE_GROWTH", 1)
    table = new_table(
        layout, (7, 14), compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=8,
        split_min_rows=2, ingest_file_writing=writing,
    )  # fmt: skip
    start = now(table)
    add(table, *range(20))
    middle = now(table)
    add(table, *range(0, 20, 2), value=1)
    add(table, 5, 5, 15, value=2)
    first = [(key, 0) for key in range(20)]
    later = sorted([*((key, 1) for key in range(0, 20, 2)), (5, 2), (5, 2), (15, 2)])
    for step in (
        lambda: None,
        lambda: compact(table, engine="local"),
        lambda: split(table),
        lambda: split(table),
    ):
        step()
        assert read(table, middle) == later
        assert read(table, start, middle) == first
        assert read(table, start) == sorted(first + later)
        assert read(table, span(table, None, None)[0]) == sorted(first + later)
    assert table.partitions.tree().leaf_count > 3
    assert read(table, now(table)) == []


def test_changes_return_rows_as_they_were_ingested(new_table: NewTable) -> None:
    table = new_table(aggregate="sum(value)")
    start = now(table)
    add(table, 1, value=1)
    add(table, 1, value=2)
    assert read(table, start) == [(1, 1), (1, 2)]


def test_changes_return_only_the_requested_columns(new_table: NewTable) -> None:
    table = new_table()
    start = now(table)
    add(table, 1, 2)
    found = changes(table, start, now(table), ["value"])
    assert found.schema.names == ["value", "_change"]
    assert found.read_all().num_rows == 2
    again = changes(table, start, now(table), found.schema.names).read_all()
    assert again.schema.names == ["value", "_change"]
    with pytest.raises(InvalidQuery, match="did you mean 'value'"):
        changes(table, start, now(table), ["vallue"])


def test_moments_in_the_wrong_order_are_refused(new_table: NewTable) -> None:
    table = new_table()
    start, later = now(table), now(table)
    with pytest.raises(InvalidCut, match="give the earlier moment first"):
        changes(table, later, start)


@pytest.mark.objects  # it loses an object
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collected_changes_are_an_error_before_the_first_row(
    new_table: NewTable, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_of, "PAGE_REFERENCES", 2)
    monkeypatch.setattr(files_of, "PAGE_GROWTH", 1)
    table = new_table(
        layout, (100,), gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=3
    )
    start = now(table)
    add(table, 200)
    add(table, 201)
    low = now(table)
    for key in range(3):
        add(table, key)
    compact(table, engine="local")
    middle = now(table)
    add(table, 7)
    end = now(table)
    _, _, first, *_, last = [file.filename for page in pages_between(table, start, end) for file in page]
    table.objects.delete([last])
    with pytest.raises(ObjectNotFound, match="it is lost, not collected"):
        read(table, middle)
    reader = changes(table, start, end)
    table.garbage.collect()
    table.garbage.collect()
    with pytest.raises(ObjectNotFound):
        table.objects.size(first)
    with pytest.raises(CutExpired, match="can no longer be read"):
        reader.read_all()
    for after in (start, low):
        with pytest.raises(CutExpired, match="does not reach back"):
            changes(table, after, end)


def kinds_and_keys(table: Table, after: Cut) -> list[tuple[str, int]]:
    rows = table.changes(after=after).read_all().to_pylist()
    return [(row["_change"], row["k"]) for row in rows]


@pytest.mark.slow
def test_the_files_are_looked_up_once_however_many_deletions_there_are(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look-up of files is costly: it reads all of the removal log since the cut."""
    monkeypatch.setattr(files_of, "PAGE_REFERENCES", 3)
    monkeypatch.setattr(files_of, "PAGE_GROWTH", 1)
    table = made(instance)
    cut = table.history.record_cut()
    looks: list[int] = []
    look = files_of._ChangePages.next_page
    monkeypatch.setattr(files_of._ChangePages, "next_page", lambda self: looks.append(1) or look(self))
    expected = []
    for n in range(10):
        add_rows(table, 10 * n, 2)
        expected += [("insert", 10 * n), ("insert", 10 * n + 1)]
    for deletions in range(15):
        if deletions:
            table.delete({"k": 10 * (deletions % 10)})
            expected += [("delete", 10 * (deletions % 10))] * (deletions < 11)
        looks.clear()
        assert kinds_and_keys(table, cut) == expected
        assert len(looks) == 4
    add_rows(table, 500, 1)
    assert kinds_and_keys(table, cut) == [*expected, ("insert", 500)]


@pytest.mark.objects
@pytest.mark.slow
def test_rows_that_an_older_transaction_adds_after_a_deletion_come_after_it(instance: Instance) -> None:
    """The transaction has a smaller id than the deletion, but commits after it."""
    table = made(instance)
    cut = table.history.record_cut()
    context = table.context
    with ExitStack() as stack:
        slow = stack.enter_context(context.supplier.connection())
        attempt = stack.enter_context(context.attempts.attempt(context.table))
        late = open_source(pa.table({"k": [70, 71], "v": [0, 0]}), context.schema)
        files = write_leaves(context, attempt, late, lambda *_: None, 1 << 20)
        with slow.transaction():
            slow.execute("select pg_current_xact_id()")
            add_rows(table, 0, 3)
            table.delete({"k": 1})
            add_rows(table, 10, 2)
            table.delete({"k": 2})
            context.store.add_files_with_references(files, conn=slow)
    table.delete({"k": 11})
    assert kinds_and_keys(table, cut) == [
        ("insert", 0), ("insert", 1), ("insert", 2), ("delete", 1), ("insert", 10), ("insert", 11),
        ("delete", 2), ("insert", 70), ("insert", 71), ("delete", 11),
    ]  # fmt: skip
