"""Tests of conversions to another layout: only the tracking of files changes, and every process follows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace as changed
from datetime import datetime, timedelta
from itertools import count, cycle, permutations
from typing import Any

import pytest

from dormouse.errors import InvalidInput, TableNotFound
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_transaction
from dormouse.state.files.layout import layout as known_layout
from tests.stored import (
    assign,
    at_once,
    blocked,
    clock,
    file,
    live,
    query,
    ref,
    remove,
    replace,
    split,
    transaction,
    wait_until,
)
from tests.support.state import LAYOUTS, Catalog, TableContext

PAIRS = list(permutations(LAYOUTS, 2))
pairs = pytest.mark.parametrize(("source", "target"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
NewTable = Callable[..., TableContext]
FACTS: dict[str, Any] = {"byte_count": 900, "row_count": 80, "min_key": b"\x01", "max_key": b"\xfe\x00"}
FACTS["digest"] = bytes(range(16))


def convert(table: TableContext, layout: str) -> TableContext:
    """Converts the table, and returns it as the converting process knows it."""
    return changed(table, table=Catalog(table.supplier, table.attempts).convert_layout(table.table, layout))


def filled(new_table: NewTable, layout: str, **properties: Any) -> TableContext:
    """Returns a table with referenced, assigned, split, unreferenced and stamped files."""
    table = new_table(layout=layout, split_points=[10], **properties)
    leaf = table.partitions.leaves()[0].partition_id
    store = table.store
    store.add_files_with_references(
        [file(name, ref(name, leaf, 80), ref(name, "p", 7), **FACTS) for name in ("a", "b", "c", "d")]
    )
    store.add_files_with_references([file("free", **FACTS), file("gone early", ref("gone early", "p"))])
    remove(store, "gone early", partition_id="p")
    store.stamp_unreferenced()
    store.add_files([ref("gone late", "p"), ref("half gone", "p"), ref("half gone", "q")])
    remove(store, "gone late", "half gone", partition_id="p")
    store.assign_job_ids([assign("j", leaf, "a", "b")])
    (reference,) = (r for r in store.file_references_in(["p"]) if r.filename == "c")
    store.split_file_references([split(reference)])
    return table


def state(table: TableContext) -> dict[str, Any]:
    """Returns everything of a table that callers can see."""
    store = table.store
    return {
        "references": list(store.file_references()),
        "files": sorted(store.all_files(100).files, key=lambda f: f.filename),
        "counts": store.totals.read(),
        "jobs": table.jobs.count(),
        "due": table.jobs.due(),
        "leaf rows": table.partitions.leaf_rows(),
        "ready": sorted(store.files_ready_for_gc(clock(store))),
    }


def own_tables(table: TableContext) -> set[str]:
    rows = query(
        table.supplier,
        r"select relname from pg_class where relkind = 'r' and relname ~ ('_' || %s || '$')",
        str(table.table.table_id),
    )
    return {name for (name,) in rows}


def tables_of(table: TableContext, layout: str) -> set[str]:
    """Returns the names of the PostgreSQL tables that a table has in a layout."""
    number = table.table.table_id
    return {*known_layout(layout).tables(number).values(), f"file_content_{number}"}


def free_since(table: TableContext) -> dict[str, datetime | None]:
    return {f.filename: f.last_updated for f in table.store.all_files(100).unreferenced}


@pairs
def test_a_conversion_keeps_files_references_and_jobs(new_table: NewTable, source: str, target: str) -> None:
    table = filled(new_table, source)
    # the last removed file is not stamped yet: the conversion stamps it
    before = state(table)
    assert before.pop("ready") == ["free", "gone early"]
    converted = convert(table, target)
    after = state(converted)
    assert after.pop("ready") == ["free", "gone early", "gone late"]
    unstamped = {f.filename: f for f in before["files"] if f.last_updated is None and not f.references}
    assert set(unstamped) == {"gone late"}
    before["files"] = [f for f in before["files"] if f.filename not in unstamped]
    after["files"] = [f for f in after["files"] if f.filename not in unstamped]
    assert after == before
    assert own_tables(converted) == tables_of(table, target)
    assert Catalog(table.supplier, table.attempts).get(table.table.name).layout == target


@pairs
def test_a_conversion_and_its_reverse_restore_the_table(
    new_table: NewTable, source: str, target: str
) -> None:
    table = filled(new_table, source)
    table.store.stamp_unreferenced()
    before = state(table)
    back = convert(convert(table, target), source)
    assert state(back) == before
    assert state(convert(back, target))["files"] == before["files"]


@pairs
def test_a_converted_table_works_as_before(new_table: NewTable, source: str, target: str) -> None:
    table = convert(filled(new_table, source), target)
    store = table.store
    leaf = table.partitions.leaves()[0].partition_id
    store.replace_file_references([replace("j", ["a", "b"], "out", leaf)])
    for name, partition_id in (("a", "p"), ("b", "p"), ("c", "L"), ("c", "R"), ("c", leaf)):
        remove(store, name, partition_id=partition_id)
    store.stamp_unreferenced()
    ready = ["a", "b", "c", "free", "gone early", "gone late"]
    assert sorted(store.files_ready_for_gc(clock(store))) == ready
    store.delete_collected_files(ready)
    assert sorted(f.filename for f in store.all_files(9).files) == ["d", "half gone", "out"]
    with pytest.raises(Exception, match="tracked already"):
        store.add_files([ref("d", "new")])
    store.add_files([ref("a", "p")])
    store.clear()
    assert store.has_no_files()


@pairs
def test_a_conversion_keeps_the_time_since_which_files_are_free(
    new_table: NewTable, source: str, target: str
) -> None:
    """Files keep the time of their last removal, even if stage one had not stamped them yet."""
    table = filled(new_table, source)
    table.store.stamp_unreferenced()
    between = clock(table.store)
    remove(table.store, "d", partition_id="p")
    remove(table.store, "d", partition_id=table.partitions.leaves()[0].partition_id)
    converted = convert(table, target)
    moments = free_since(converted)
    assert set(moments) == {"free", "gone early", "gone late", "d"}
    assert between < (moments.pop("d") or between) < clock(table.store)
    assert all(moment is not None and moment < between for moment in moments.values())
    assert sorted(converted.store.files_ready_for_gc(between)) == sorted(moments)
    assert list(converted.store.files_ready_for_gc(between - timedelta(days=1))) == []


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_to_the_same_layout_does_nothing(new_table: NewTable, layout: str) -> None:
    table = filled(new_table, layout)
    before, tables = state(table), own_tables(table)
    assert convert(table, layout).table == table.table
    assert (state(table), own_tables(table)) == (before, tables)


def test_an_unknown_layout_is_refused(new_table: NewTable) -> None:
    table = filled(new_table, "file_table")
    before = state(table)
    with pytest.raises(InvalidInput, match="layout 'nope' is not known; use file_table, salted_counts or"):
        convert(table, "nope")
    assert state(table) == before


def test_a_table_that_was_dropped_is_not_converted(new_table: NewTable) -> None:
    table = new_table()
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    with pytest.raises(TableNotFound, match=table.table.name):
        convert(table, "salted_counts")


def test_a_conversion_that_fails_changes_nothing(new_table: NewTable) -> None:
    table = filled(new_table, "file_table")
    before, tables = state(table), own_tables(table)
    query(table.supplier, f"create table file_count_{table.table.table_id} ()")
    with pytest.raises(Exception, match="already exists"):
        convert(table, "salted_counts")
    query(table.supplier, f"drop table file_count_{table.table.table_id}")
    assert (state(table), own_tables(table)) == (before, tables)


@pytest.mark.parametrize(
    "isolation", [level.value for level in Isolation if level is not Isolation.REPEATABLE_READ]
)
@pairs
def test_other_processes_follow(new_table: NewTable, source: str, target: str, isolation: str) -> None:
    """Each service of a process that does not know of the conversion follows it."""
    table = filled(
        new_table, source, isolation=isolation, compaction_strategy="basic", compaction_batch_files=2
    )
    leaf = table.partitions.leaves()[0].partition_id
    expected = state(convert(table, target))

    def stale() -> TableContext:
        return changed(table)

    for name, found in state(stale()).items():
        assert found == expected[name], name
    assert list(stale().store.file_references()) == expected["references"]
    assert stale().store.all_files(100).files
    assert [leaf_rows.partition_id for leaf_rows in stale().partitions.leaf_rows()] == [leaf]
    assert list(stale().partitions.references_above_leaves()) == []
    assert stale().jobs.create() == 1
    assert len(stale().jobs.take(9)) == 2
    assert stale().store.stamp_unreferenced() == 0
    stale().store.add_files([ref("new", leaf)])
    stale().store.assign_job_ids([assign("k", leaf, "new")])
    follower = stale().store
    follower.replace_file_references([replace("k", ["new"], "newer", leaf)])
    assert follower.table.layout == target
    assert [f.filename for f in follower.files_in([leaf])] == ["a", "b", "c", "d", "newer"]
    assert own_tables(table) == tables_of(table, target)


@pairs
def test_a_transaction_of_the_caller_is_retried(new_table: NewTable, source: str, target: str) -> None:
    table = filled(new_table, source)
    convert(table, target)
    runs = []

    def work(conn: Any) -> None:
        runs.append(conn)
        table.store.add_files([ref("x")], conn=conn)
        table.store.add_files([ref("y")], conn=conn)

    run_transaction(table.supplier, work)
    assert len(runs) == 2
    assert {"x", "y"} <= {name for _, name, _, _ in live(table.store)}


def test_a_dropped_table_is_not_taken_for_a_converted_one(new_table: NewTable) -> None:
    table = filled(new_table, "salted_counts")
    Catalog(table.supplier, table.attempts).drop(convert(table, "file_table").table.name)
    for work in (
        lambda: list(table.store.file_references()),
        lambda: table.store.add_files([ref("x")]),
        lambda: run_transaction(table.supplier, lambda conn: table.store.add_files([ref("x")], conn=conn)),
        lambda: table.store.all_files(9),
        table.jobs.create,
        table.jobs.due,
        table.partitions.leaf_rows,
    ):
        with pytest.raises(TableNotFound, match="no longer exists"):
            work()
    assert own_tables(table) == set()


@pairs
def test_a_reader_with_an_older_snapshot_is_retried(new_table: NewTable, source: str, target: str) -> None:
    """A reader that knows the new layout and has an older snapshot is retried on a newer one."""
    table = filled(new_table, source)
    converted = changed(table, table=changed(table.table, layout=target))
    runs = []

    def work(conn: Any) -> list[str]:
        runs.append(conn.execute("select count(*) from tables").fetchone())
        if len(runs) == 1:
            convert(table, target)
        return [f.filename for f in converted.store.files_in(["p"], conn=conn)]

    found = run_transaction(table.supplier, work, isolation=Isolation.REPEATABLE_READ, read_only=True)
    assert found == ["a", "b", "d"]
    assert len(runs) == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_conversion_waits_for_an_open_commit(new_table: NewTable, layout: str) -> None:
    table = filled(new_table, layout)
    target = next(name for name in LAYOUTS if name != layout)
    with transaction(table) as conn:
        table.store.add_files([ref("x")], commit_id="c", conn=conn)
        thread = threading.Thread(target=convert, args=(table, target))
        thread.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    thread.join(60)
    assert not thread.is_alive()
    assert "x" in {name for _, name, _, _ in live(table.store)}
    assert table.store.table.layout == target


@pytest.mark.slow
def test_a_conversion_waits_until_a_stream_is_read_to_its_end(new_table: NewTable) -> None:
    table = new_table(layout="file_table")
    table.store.add_files(ref(f"f{n:05}") for n in range(10_500))
    stream = table.store.file_references()
    names = [next(stream).filename]
    thread = threading.Thread(target=convert, args=(table, "dummy_reference"))
    thread.start()
    wait_until(lambda: blocked(table.supplier))
    names += [r.filename for r in stream]
    thread.join(60)
    assert not thread.is_alive()
    assert names == [f"f{n:05}" for n in range(10_500)]
    assert len(list(table.store.file_references())) == 10_500


def test_commits_go_on_while_a_table_is_converted_again_and_again(new_table: NewTable) -> None:
    """Nothing is lost or applied twice, and no collection deletes a referenced file."""
    table = new_table(layout="file_table")
    steps: list[str] = []
    names: list[str] = []
    converted: list[str] = []
    done = threading.Event()

    def commits(worker: int) -> None:
        mine = changed(table)  # with services of its own, which know the old layout
        for n in count():
            if n >= 10 and (len(converted) >= 3 or n >= 500):
                return
            name, job = f"{worker}-{n}", f"j{worker}-{n}"
            mine.store.add_files([ref(name, f"p{worker}"), ref(name, "shared")], commit_id=name)
            steps.append(name)
            mine.store.assign_job_ids([assign(job, f"p{worker}", name)])
            request = replace(job, [name], f"out{name}", f"p{worker}")
            mine.store.replace_file_references([request], commit_id=job)
            steps.append(job)
            names.append(name)

    def conversions() -> None:
        for layout in cycle(("salted_counts", "dummy_reference", "file_table")):
            seen = len(steps)
            convert(table, layout)
            converted.append(layout)
            mine = changed(table)
            mine.store.stamp_unreferenced()
            assert list(mine.store.files_ready_for_gc(clock(mine.store))) == []
            # pause, so that commits get their turn
            wait_until(lambda seen=seen: done.is_set() or len(steps) > seen + 5, 60)  # type: ignore[misc]
            if done.is_set():
                return

    def all_commits() -> None:
        try:
            outcomes = at_once(*(lambda n=n: commits(n) for n in range(3)))  # type: ignore[misc]
            assert outcomes == [None] * 3
        finally:
            done.set()

    assert at_once(conversions, all_commits) == [None, None]
    assert len(converted) >= 3
    expected = [(f"p{name[0]}", f"out{name}", 100, None) for name in names]
    expected += [("shared", name, 100, None) for name in names]
    assert sorted(live(table.store)) == sorted(expected)
    salted = convert(table, "salted_counts")
    counts = known_layout("salted_counts").tables(table.table.table_id)["file_count"]
    wrong = query(
        table.supplier,
        f"""select file_id from {counts} group by file_id
            having coalesce(sum(count), 0) <> 1 or count(*) filter (where salt = -1) <> 1""",
    )
    assert wrong == []
    for name in names:
        remove(salted.store, name, partition_id="shared")
    salted.store.stamp_unreferenced()
    assert sorted(salted.store.files_ready_for_gc(clock(salted.store))) == sorted(names)
