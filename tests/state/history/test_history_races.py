"""Races between cuts, collection, the removal log and readers; and wrong clocks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any

import psycopg
import pytest

from dormouse.errors import CutExpired, InvalidCut
from dormouse.reading.changes import Consumer
from dormouse.state.files.holds import lock_history
from dormouse.state.history import changes, moments
from dormouse.state.history import moments as cuts
from dormouse.state.history.changes import changes_between, references_at, size_between
from dormouse.state.history.consumers import Consumers
from dormouse.state.history.moments import restore
from dormouse.state.history.retention import truncate
from tests.stored import assign, blocked, query, ref, remove, transaction, wait_until
from tests.stored import replace as replace_by_none
from tests.support.model import Range
from tests.support.reading import KeyRanges, plan_query
from tests.support.state import LAYOUTS, FileReferenceStore, TableContext

NewTable = Callable[..., TableContext]


def clock(table: TableContext) -> datetime:
    found: datetime = query(table.supplier, "select clock_timestamp()")[0][0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_stamped_while_a_cut_is_recorded_have_a_later_time(new_table: NewTable, layout: str) -> None:
    """The cut may not have seen their removal, and then needs the files."""
    table = new_table(layout=layout)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    with transaction(table) as conn:
        lock_history(conn, table.table.table_id)
        collecting = threading.Thread(target=table.store.stamp_unreferenced)
        collecting.start()
        wait_until(lambda: blocked(table.supplier))
        recorded_at = clock(table)
        conn.execute("commit")
    collecting.join()
    assert list(table.store.files_ready_for_gc(recorded_at)) == []
    assert list(table.store.files_ready_for_gc(clock(table))) == ["a"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_keeps_files_removed_after_it_though_the_clock_was_set_back(
    new_table: NewTable, layout: str
) -> None:
    table = new_table(layout=layout, gc_delay_seconds=0)
    table.store.add_files([ref("a")])
    cut = cuts.record_cut(table, "kept")
    # as if it had been recorded before the clock was set back
    ahead = "with late as (update cut set recorded_at = recorded_at + interval '1 hour' where table_id = %s)"
    query(table.supplier, ahead + " update hold set since = since + interval '1 hour'", table.table.table_id)
    remove(table.store, "a")
    assert [table.garbage.collect().deleted for _ in range(2)] == [0, 0]
    assert moments.position_of(table, "kept").at == cut.recorded_at + timedelta(hours=1)
    query(table.supplier, "delete from hold where table_id = %s", table.table.table_id)


def test_a_cut_is_not_taken_for_another_with_the_same_id(new_table: NewTable) -> None:
    """Covers a database that was restored to a moment before the cut and then recorded another cut."""
    table = new_table()
    cut = cuts.record_cut(table)
    lost: Any = replace(cut, recorded_at=cut.recorded_at + timedelta(seconds=1))
    with pytest.raises(InvalidCut, match=f"has no cut {cut.cut_id}"):
        moments.position_of(table, lost)
    assert moments.position_of(table, cut).at == cut.recorded_at


def test_transactions_with_equal_lower_id_halves_are_not_confused(new_table: NewTable) -> None:
    table = new_table()
    table.store.add_files([ref("a")])
    when = clock(table)
    assert moments.position_of(table, when)
    own = f"file_reference_{table.table.table_id}"
    shifted = "(added_xid::text::numeric + 4294967296)::text::xid8"
    query(table.supplier, f"update {own} set added_xid = {shifted}")
    with pytest.raises(CutExpired, match="cannot be found"):
        moments.position_of(table, when)


def test_a_cached_tree_of_epochs_that_the_server_lost_is_not_used(new_table: NewTable) -> None:
    """Covers a database that was restored to an earlier moment under a running process."""
    table = new_table()
    table.partitions.split("root", 10)
    assert table.partitions.tree().leaf_count == 2
    gone = [
        "delete from partition where table_id = %s and created_epoch = 1",
        "delete from epoch where table_id = %s and epoch = 1",
        "update tables set epoch = 0 where table_id = %s",
        "update partition set sealed_epoch = null, split_key = null, split_point = null, left_id = null, "
        "right_id = null where table_id = %s",
    ]
    for statement in gone:
        query(table.supplier, statement, table.table.table_id)
    other = TableContext(table.dsn, table.supplier, table.objects, table.table)
    low, _ = other.partitions.split("root", 100)
    other.store.add_files([ref("a", low.partition_id)])
    cut = cuts.record_cut(other)
    ranges = KeyRanges({"key": (Range(50, 51),)})
    for when in (cut, clock(table)):
        [group] = plan_query(table, ranges, at=moments.position_of(table, when))
        assert [scan.filename for scan in group] == ["a"], when


def test_a_clock_that_is_set_back_holds_up_no_consumer(new_table: NewTable) -> None:
    table = new_table()
    consumers = Consumers(table)
    consumers.create("etl", None)
    query(
        table.supplier,
        "update consumer set position_at = position_at + interval '1 hour' where table_id = %s",
        table.table.table_id,
    )
    consumer = Consumer(table, "etl", lambda: None)
    assert consumer.read().read_all().num_rows == 0
    consumer.acknowledge()
    cut = cuts.record_cut(table)
    query(
        table.supplier,
        "update cut set recorded_at = recorded_at + interval '1 hour' where table_id = %s",
        table.table.table_id,
    )
    late = replace(cut, recorded_at=cut.recorded_at + timedelta(hours=1))
    assert list(changes_between(table, late, None)) == []
    assert size_between(table, late).row_count == 0


def test_a_merge_counts_references_with_the_salts_of_their_partitions(new_table: NewTable) -> None:
    table = new_table(layout="salted_counts", split_points=[10])
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    table.store.add_files([ref("a", leaves[0]), ref("b", leaves[1])])
    above = ref("above", "root", only_contains_data_for_this_partition=False)
    table.store.add_files([above])
    merged = table.partitions.merge(leaves).partition_id
    counted = f"select salt, count from file_count_{table.table.table_id} where salt >= 0 and count <> 0"
    salt = "(hashtextextended(%s, 0) & 9223372036854775807) %% %s::bigint"
    [(expected,)] = query(table.supplier, f"select {salt}", merged, table.table.properties.salt_buckets)
    assert query(table.supplier, counted) == [(expected, 1)] * 3


def test_files_added_beside_a_slow_transaction_are_in_exactly_one_span(new_table: NewTable) -> None:
    """The slow transaction has a smaller id than the other one, but commits after it and after a cut."""
    table = new_table()
    first = cuts.record_cut(table)
    with closing(psycopg.connect(table.dsn, options="-c search_path=dormouse")) as slow:
        table.store.add_files([ref("slow", rows=3)], conn=slow)
        table.store.add_files([ref("quick", rows=5), ref("gone", rows=7)])
        remove(table.store, "gone")
        middle = cuts.record_cut(table)
        slow.commit()
    last = cuts.record_cut(table)
    for removed in (False, True):
        for after, till, names, rows in ((first, middle, {"quick", "gone"}, 12), (middle, last, {"slow"}, 3)):
            assert {one.filename for one in changes_between(table, after, till)} == names, removed
            assert size_between(table, after, till).row_count == rows
        assert len(list(changes_between(table, first, last))) == 3
        assert [one.filename for one in references_at(table, middle)] == ["quick"]
        if not removed:
            remove(table.store, "slow", "quick")
    for cut in (middle, last):
        cuts.drop_cut(table, cut)
    assert size_between(table, first, cuts.record_cut(table)).row_count == 15


def test_added_files_are_found_after_an_older_transaction_removed_them(new_table: NewTable) -> None:
    """The removing transaction begins before the first cut, and commits after the last one."""
    table = new_table()
    with closing(psycopg.connect(table.dsn, options="-c search_path=dormouse")) as older:
        older.execute("select pg_current_xact_id()")
        table.store.add_files([ref("before")])
        first = cuts.record_cut(table)
        table.store.add_files([ref("a", rows=3)])
        table.store.assign_job_ids([assign("job", "root", "a")])
        last = cuts.record_cut(table)
        table.store.replace_file_references([replace_by_none("job", ["a"], None)], conn=older)
        older.commit()
    assert [one.filename for one in changes_between(table, first, last)] == ["a"]
    assert {one.filename for one in references_at(table, last)} == {"before", "a"}
    assert [one.filename for one in references_at(table, first)] == ["before"]
    cuts.drop_cut(table, last)
    assert size_between(table, first, cuts.record_cut(table)).row_count == 3
    assert restore(table, first).references_removed == 0


def test_files_of_a_moment_come_in_pages(new_table: NewTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table = new_table()
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        table.store.add_files([ref(name)])
    cut = cuts.record_cut(table)
    for page in (1, 2, 5):
        monkeypatch.setattr(changes, "PAGE_REFERENCES", page)
        assert sorted(one.filename for one in islice(references_at(table, cut), 9)) == names
    remove(table.store, "a", "c", "d")
    for page in (1, 2, 5):
        monkeypatch.setattr(changes, "PAGE_REFERENCES", page)
        assert sorted(one.filename for one in islice(references_at(table, cut), 9)) == names


def test_the_size_of_changes_is_refused_if_files_were_collected_uncounted(new_table: NewTable) -> None:
    table = new_table(gc_delay_seconds=0)
    first = cuts.record_cut(table, kept_seconds=0)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    assert sum(table.garbage.collect().deleted for _ in range(2)) == 1
    second = cuts.record_cut(table)
    table.store.add_files([ref("b")])
    third = cuts.record_cut(table)
    for till in (second, third):
        with pytest.raises(CutExpired, match="does not reach back"):
            size_between(table, first, till)
    assert size_between(table, second, third).row_count == 100


@pytest.mark.parametrize("how", ["collected", "truncated"])
def test_a_consumer_cannot_begin_at_a_moment_that_expired_meanwhile(new_table: NewTable, how: str) -> None:
    table = new_table()
    position = moments.position_of(table, cuts.record_cut(table))
    if how == "truncated":
        truncate(table, cuts.record_cut(table))
    else:
        later = "update tables set history_since = clock_timestamp() where table_id = %s"
        query(table.supplier, later, table.table.table_id)
    consumers = Consumers(table)
    with pytest.raises(CutExpired, match="'etl' cannot begin at"):
        consumers.create("etl", position)
    assert consumers.all() == []


def test_a_restore_waits_for_a_collection_and_fails_if_its_moment_expired(new_table: NewTable) -> None:
    table = new_table()
    table.store.add_files([ref("a")])
    cut = cuts.record_cut(table)
    remove(table.store, "a")
    refused: list[Exception] = []

    def restoring() -> None:
        try:
            restore(table, cut)
        except CutExpired as error:
            refused.append(error)

    with transaction(table) as conn:
        later = "update tables set history_since = clock_timestamp() where table_id = %s"
        conn.execute(later, [table.table.table_id])
        thread = threading.Thread(target=restoring)
        thread.start()
        wait_until(lambda: blocked(table.supplier) == 1)
        conn.execute("commit")
        thread.join(60)
    assert len(refused) == 1
    assert list(table.store.file_references()) == []


def test_a_cut_is_due_after_splits_or_removals_alone(new_table: NewTable) -> None:
    table = new_table()
    table.store.add_files([ref("a")])
    assert cuts.record_if_due(table, 0)
    assert cuts.record_if_due(table, 0) is None
    remove(table.store, "a")
    assert cuts.record_if_due(table, 0)
    table.partitions.split("root", 10)
    assert cuts.record_if_due(table, 0)
    assert cuts.record_if_due(table, 0) is None


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_restored_while_stage_one_waits_are_not_stamped(
    new_table: NewTable, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """A stamp is the time since which a file has no references; collection deletes files with old stamps.

    A wrong stamp would make collection delete the file, when it is removed again, though a later cut needs
    it.
    """
    table = new_table(layout=layout, gc_delay_seconds=0, history_retention_seconds=0)
    table.store.add_files([ref("a")])
    cut = cuts.record_cut(table)
    remove(table.store, "a")
    collecting = threading.Thread(target=table.store.stamp_unreferenced)
    restored = FileReferenceStore.restore

    def while_stage_one_waits(*args: Any) -> None:
        collecting.start()
        wait_until(lambda: blocked(table.supplier))
        restored(*args)

    monkeypatch.setattr(FileReferenceStore, "restore", while_stage_one_waits)
    restore(table, cut)
    collecting.join()
    [file] = table.store.page(None, 2)
    assert file.unreferenced_at is None
    kept = cuts.record_cut(table, "kept")
    remove(table.store, "a")
    assert [table.garbage.collect().deleted for _ in range(2)] == [0, 0]
    assert [one.filename for one in references_at(table, kept)] == ["a"]
    cuts.drop_cut(table, kept)
