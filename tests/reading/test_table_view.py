"""Plans of queries are never stale, and all their pages show one moment, whatever is committed meanwhile."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from trees import leaf_of

from dormouse.errors import InvalidQuery, QueryOvertaken, TableNotFound
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import table_view
from dormouse.reading.checked_files import FileGone
from dormouse.reading.planner import Scan
from dormouse.reading.table_view import Moment, plan_tables, summary
from dormouse.state.files import removal_log
from dormouse.state.history import moments
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.model import Range, TableProperties, encode_key
from tests.support.objects import open_store
from tests.support.reading import KeyRanges, plan_query
from tests.support.state import Catalog, TableContext, TreeCache, WriteAttempts

SCHEMA = OF_KEYS
LEAVES = 40
EVERYTHING = KeyRanges()
NewTable = Callable[..., TableContext]


@contextmanager
def sent(supplier: ConnectionSupplier, tmp_path: Path) -> Iterator[list[str]]:
    """Yields a list that is filled at the end, with the kinds of messages sent to PostgreSQL."""
    trace, found = tmp_path / "trace", list[str]()
    with trace.open("w") as file:
        with supplier.connection() as conn:
            conn.pgconn.trace(file.fileno())
        yield found
        with supplier.connection() as conn:
            conn.pgconn.untrace()  # this writes the rest of the trace
    found += re.findall(r"\tF\t\d+\t(Query|Parse|Execute)\t", trace.read_text())


@pytest.fixture
def new_table(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> NewTable:
    objects = open_store(tmp_path / "objects")

    def make(leaves: int = LEAVES, layout: str = "file_table", **properties: Any) -> TableContext:
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            "t", SCHEMA, TableProperties(**properties), layout, range(1, leaves)
        )
        return TableContext(dsn, supplier, objects, record)

    return make


def again(table: TableContext) -> TableContext:
    """Returns the same table as opened by a new process."""
    return TableContext(table.dsn, table.supplier, table.objects, table.table, trees=TreeCache())


def leaf(table: TableContext, key: int) -> str:
    return leaf_of(table.partitions.tree(), {"key": key}).partition_id


def add(table: TableContext, key: int, name: str, **facts: Any) -> None:
    reference = FileReference(filename=name, partition_id=leaf(table, key), row_count=1)
    table.store.add_files_with_references(
        [FileWithReferences(filename=name, references=(reference,), **facts)]
    )


def compact(table: TableContext, key: int, names: list[str], output: str) -> None:
    partition, job = leaf(table, key), f"job of {output}"
    table.store.assign_job_ids(
        [AssignJobIdRequest(job_id=job, partition_id=partition, filenames=tuple(names))]
    )
    made = FileReference(filename=output, partition_id=partition, row_count=len(names))
    table.store.replace_file_references(
        [
            ReplaceFileReferencesRequest(
                job_id=job, partition_id=partition, input_filenames=tuple(names), new_reference=made
            )
        ]
    )


def split(table: TableContext, key: int, point: int) -> None:
    """Divides a leaf, and moves its references down."""
    parent = leaf(table, key)
    left, right = table.partitions.split(parent, point)
    table.store.split_file_references(
        [
            SplitFileReferenceRequest.split_to_children(one, left.partition_id, right.partition_id)
            for one in table.store.file_references_in([parent])
        ]
    )


def names(groups: Any) -> list[str]:
    return [scan.filename for group in groups for scan in group]


def at(low: int, high: int) -> KeyRanges:
    return KeyRanges({"key": [Range(low, high)]})


def test_committed_files_are_in_the_next_plan(new_table: NewTable) -> None:
    """Covers processes that know an outdated tree, or none."""
    table = new_table()
    knowing = again(table)
    assert names(plan_query(knowing, EVERYTHING)) == []
    for n in range(5):
        add(table, 7, f"f{n}")
        for view in (table, knowing, again(table)):
            assert names(plan_query(view, at(7, 8))) == [f"f{m}" for m in range(n + 1)]
    split(table, LEAVES - 1, 1_000)
    add(table, 1_000, "right")
    add(table, 999, "left")
    for view in (table, knowing, again(table)):
        assert names(plan_query(view, at(1_000, 2_000))) == ["right"]
        assert names(plan_query(view, at(999, 1_000))) == ["left"]
        assert names(plan_query(view, EVERYTHING)) == [*(f"f{m}" for m in range(5)), "left", "right"]


@pytest.mark.parametrize("layout", ["file_table", "dummy_reference", "salted_counts"])
def test_all_pages_see_the_moment_at_which_the_plan_began(
    new_table: NewTable, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first pages, files are added, removed and pushed down. Later pages show none of it."""
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 2)
    monkeypatch.setattr(table_view, "PAGE_GROWTH", 1)
    table = new_table(layout=layout)
    for key in range(LEAVES):
        add(table, key, f"a{key:02}")
        add(table, key, f"b{key:02}")
    plan = plan_query(table, EVERYTHING)
    found = [next(plan), next(plan)]
    for key in range(4, LEAVES, 3):
        compact(table, key, [f"a{key:02}", f"b{key:02}"], f"c{key:02}")
    for key in range(5, LEAVES, 3):
        add(table, key, f"new{key:02}")
    for key in range(6, LEAVES - 1, 3):
        compact(table, key, [f"a{key:02}"], f"d{key:02}")
        compact(table, key, [f"d{key:02}"], f"e{key:02}")
    split(table, LEAVES - 1, 1_000)
    assert names([*found, *plan]) == [f"{x}{key:02}" for key in range(LEAVES) for x in "ab"]
    now = names(plan_query(table, EVERYTHING))
    assert {"c04", "new05", "e06"} <= set(now)
    assert not {"a04", "a06", "d06"} & set(now)


def planned_in_pages(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, **properties: object
) -> tuple[TableContext, Iterator[tuple[Scan, ...]]]:
    """Returns a table with one file in each leaf, and a plan of all rows that has one leaf in each page."""
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 1)
    table = new_table(**properties)
    for key in range(LEAVES):
        add(table, key, f"a{key:02}")
    return table, plan_query(table, EVERYTHING)


def test_a_collected_file_of_a_later_page_is_an_error(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, plan = planned_in_pages(new_table, monkeypatch)
    next(plan)
    compact(table, LEAVES - 1, [f"a{LEAVES - 1:02}"], "c")
    table.store.stamp_unreferenced()
    table.store.delete_collected_files([f"a{LEAVES - 1:02}"])
    with pytest.raises(FileGone):
        list(plan)


def test_pages_go_on_from_a_later_moment_when_files_may_be_collected(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, plan = planned_in_pages(new_table, monkeypatch, gc_delay_seconds=0)
    found = [next(plan)]
    compact(table, LEAVES - 1, [f"a{LEAVES - 1:02}"], "c")
    table.store.stamp_unreferenced()
    table.store.delete_collected_files([f"a{LEAVES - 1:02}"])
    assert names([*found, *plan]) == [*(f"a{key:02}" for key in range(LEAVES - 1)), "c"]


def test_pages_stay_at_their_moment_when_rows_were_added(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, plan = planned_in_pages(new_table, monkeypatch, gc_delay_seconds=0)
    found = [next(plan)]
    add(table, LEAVES - 1, "new")
    assert names([*found, *plan]) == [f"a{key:02}" for key in range(LEAVES)]


def test_a_plan_takes_one_statement(
    new_table: NewTable, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    table = new_table()
    add(table, 3, "f")
    table.partitions.tree()
    for _ in range(2):  # now the connection has both statements prepared
        plan_query(table, at(3, 4))
    with sent(supplier, tmp_path) as statements:
        assert names(plan_query(table, at(3, 4))) == ["f"]
    assert statements == ["Execute"]


def test_a_process_that_plans_once_does_not_read_the_whole_tree(new_table: NewTable) -> None:
    table = again(new_table())
    plan_query(table, at(3, 4))
    assert table.partitions.cached() is None
    plan_query(table, at(3, 4))
    assert table.partitions.cached() is not None


def test_a_limit_needs_no_more_pages(
    new_table: NewTable, supplier: ConnectionSupplier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 2)
    table = new_table()
    for key in range(LEAVES):
        add(table, key, f"a{key:02}")
    table.partitions.tree()
    plan_query(table, at(3, 4))  # now the connection has the statement prepared
    with sent(supplier, tmp_path) as statements:
        assert [scan.filename for scan in next(plan_query(table, EVERYTHING))] == ["a00"]
    assert statements == ["Execute"]


def test_a_summary_counts_all_pages(new_table: NewTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that several pages contain is counted once."""
    monkeypatch.setattr(table_view, "PAGE_LEAVES_MAX", 2)
    table = new_table()
    smallest, largest = (encode_key(SCHEMA.row_keys, [key]) for key in (100, 101))
    for key in range(LEAVES):
        add(table, key, f"a{key:02}", byte_count=10)
    ids = [p.partition_id for p in table.partitions.leaves()]
    wide = tuple(
        FileReference(
            filename="wide", partition_id=one, row_count=1, only_contains_data_for_this_partition=False
        )
        for one in ids
    )
    table.store.add_files_with_references(
        [FileWithReferences(filename="wide", references=wide, byte_count=7)]
    )
    add(table, LEAVES - 1, "further", min_key=smallest, max_key=largest)
    found = summary(again(table), EVERYTHING)
    assert (found.partitions, found.partitions_total) == (LEAVES, LEAVES)
    assert (found.files, found.files_pruned, found.byte_count) == (LEAVES + 2, 0, 10 * LEAVES + 7)
    whole = KeyRanges({"key": [Range(-9, 1_000)]})
    assert summary(again(table), whole) == found
    found = summary(again(table), at(LEAVES - 1, 50))
    assert (found.partitions, found.partitions_total) == (1, LEAVES)
    assert (found.files, found.files_pruned, found.byte_count) == (2, 1, 17)


def test_a_dropped_table_is_an_error(new_table: NewTable, supplier: ConnectionSupplier) -> None:
    table = new_table()
    plan_query(table, EVERYTHING)
    table.partitions.tree()
    Catalog(supplier, WriteAttempts(supplier, table.objects)).drop("t")
    for view in (table, again(table)):
        for work in (plan_query, summary):
            with pytest.raises(TableNotFound, match="'t' no longer exists"):
                work(view, EVERYTHING)


def test_too_many_files_of_many_leaves_are_refused_before_they_are_planned(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_view, "MANY_LEAVES", 5)
    table = new_table()
    empty = moments.now(table)
    for key in range(LEAVES):
        add(table, key, f"a{key:02}")
    for then in (None, [moments.now(table)]):
        with pytest.raises(InvalidQuery, match="more than 3 files of table 't': narrow its row keys"):
            plan_tables([(table, EVERYTHING)], files_max=3, at=then)
    assert plan_tables([(table, EVERYTHING)], files_max=3, at=[empty])[0].filenames == ()
    [plan] = plan_tables([(table, at(3, 5))], files_max=3)
    assert plan.filenames == ("a03", "a04")


def test_tables_of_one_moment_are_planned_with_the_trees_that_are_known(
    new_table: NewTable, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    """Each table takes one statement, if the cached trees are those of the moment."""
    table = new_table(2)
    view = again(table)
    both = [(view, EVERYTHING), (view, at(1, 2))]
    for number, name in enumerate("abc"):
        add(table, -15, name)
        assert [plan.filenames for plan in plan_tables(both)] == [tuple("abc"[: number + 1]), ()]
        with sent(supplier, tmp_path) as found:
            plan_tables(both)
        assert len([kind for kind in found if kind != "Parse"]) == 4  # begin, two plans, commit
        split(table, -15, -10 - number)


def test_tables_are_planned_in_one_round_trip_unless_a_known_tree_is_outdated(
    new_table: NewTable, supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = new_table(2)
    add(table, 1, "a")
    view, catalog = again(table), Catalog(supplier, WriteAttempts(supplier, table.objects))
    both = [(view, EVERYTHING), (view, at(1, 2))]
    in_turn = list[object]()
    one_by_one = table_view._in_one_snapshot

    def counted(*given: Any) -> Any:
        in_turn.append(given)
        return one_by_one(*given)

    monkeypatch.setattr(table_view, "_in_one_snapshot", counted)

    def turns(expected: tuple[str, ...]) -> int:
        in_turn.clear()
        assert [plan.filenames for plan in plan_tables(both)] == [expected, expected]
        return len(in_turn)

    assert (turns(("a",)), turns(("a",))) == (1, 0)  # the first reads the tree
    add(table, 1, "b")
    assert turns(("a", "b")) == 0
    split(table, 1, 5)
    assert (turns(("a", "b")), turns(("a", "b"))) == (1, 0)
    catalog.convert_layout(table.table, "salted_counts")
    assert (turns(("a", "b")), turns(("a", "b"))) == (1, 0)
    catalog.drop("t")
    with pytest.raises(TableNotFound, match="'t' no longer exists"):
        plan_tables(both)


@pytest.mark.slow
def test_plans_are_right_while_leaves_are_split_and_files_replaced(
    new_table: NewTable, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers with outdated trees always find the one current file of each key."""
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 3)
    monkeypatch.setattr(table_view, "EPOCHS_CHASED_MAX", 1)
    table = new_table(8)
    for key in range(8):
        add(table, key, f"{key}-0")
    stop = threading.Event()
    failures: list[BaseException] = []

    def read() -> None:
        try:
            view = again(table)
            while not stop.is_set():
                keys = [name.partition("-")[0] for name in names(plan_query(view, EVERYTHING))]
                assert sorted(set(keys)) == [str(key) for key in range(8)]
                for asked in ([(view, at(7, 8))], [(view, at(7, 8))] * 2):
                    live = {name for plan in plan_tables(asked) for name in plan.filenames}
                    assert {name.partition("-")[0] for name in live} == {"7"}
                    assert len(live) == 1
        except BaseException as error:  # the test's thread raises it
            failures.append(error)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for n in range(1, 13):
            for key in range(7):
                compact(table, key, [f"{key}-{n - 1}"], f"{key}-{n}")
            split(table, 7, 10_000 - n)
    finally:
        stop.set()
        for reader in readers:
            reader.join()
    assert not failures, failures


def drop_log(table: TableContext, xid: str | None = None) -> None:
    """Dates all removals 30 days back, runs stage one of collection, and drops the log of that day.

    With `xid`, the removals also seem to be made by this transaction.
    """
    day = date.today() - timedelta(days=30)
    removal_log.DAYS.make(table.supplier, [day])
    aged = "update removal set removed_at = %s::date, removed_xid = coalesce(%s::xid8, removed_xid)"
    query(table.supplier, aged, day, xid)
    table.store.stamp_unreferenced()
    removal_log.roll(table.supplier)
    assert query(table.supplier, "select count(*) from removal") == [(0,)]


@pytest.mark.parametrize(("drop", "left"), [(lambda t: t.store.clear(), 0), (drop_log, LEAVES)])
def test_a_plan_fails_if_the_log_does_not_reach_back_to_its_moment(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, drop: Callable[[TableContext], None], left: int
) -> None:
    """The plan needs the log to find the files that were removed since it began."""
    table, plan = planned_in_pages(new_table, monkeypatch)
    plan_query(table, EVERYTHING, moment := Moment(table.schema))
    next(plan)
    compact(table, LEAVES - 1, [f"a{LEAVES - 1:02}"], "c")
    drop(table)
    with pytest.raises(QueryOvertaken, match="no longer has the log of references"):
        list(plan)
    with pytest.raises(QueryOvertaken, match="or may have been"):
        plan_query(table, EVERYTHING, moment)
    assert len(names(plan_query(table, EVERYTHING))) == left


def test_a_plan_goes_on_if_the_log_lacks_only_removals_before_it(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = planned_in_pages(new_table, monkeypatch)
    compact(table, LEAVES - 1, [f"a{LEAVES - 1:02}"], "c")
    plan = plan_query(table, EVERYTHING)
    found = [next(plan)]
    drop_log(table, "3")  # so that activity in other databases makes no difference
    assert names([*found, *plan]) == [*(f"a{key:02}" for key in range(LEAVES - 1)), "c"]
