"""Restores of a table to the rows of a moment, in one commit."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from dormouse.errors import NotWhole, QueryOvertaken
from dormouse.reading import table_view
from dormouse.reading.table_view import Moment
from dormouse.writing import compaction_job
from tests.small_tables import add, clock, keys, made
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges, plan_query
from tests.support.state import LAYOUTS, FileReferenceStore


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_restore_puts_back_the_rows_of_a_moment(instance: Instance, layout: str) -> None:
    table = made(instance, layout=layout)
    add(table, 0, 40)
    add(table, 20, 40)
    good, rows = table.history.record_cut("good"), keys(table)
    add(table, 30, 40)
    table.compact()
    table.split()
    table.compact()
    add(table, 0, 100)
    table.collect_garbage()
    bad = clock(instance)
    bad_rows, epoch = keys(table), table.partitions.tree().epoch
    assert epoch > 0
    planned = table.restore(good, dry_run=True)
    assert keys(table) == bad_rows, "nothing is done yet"
    done = table.restore("good")
    assert done == planned and done.at == good.recorded_at
    assert (keys(table), table.partitions.tree().epoch) == (rows, epoch)
    assert keys(table, bad) == bad_rows, "what it was before can be read"
    again = table.restore("good")
    assert (again.rows_removed, keys(table)) == (again.rows_restored, rows)
    table.restore(bad)
    assert keys(table) == bad_rows, "and be restored from"
    table.restore(good)
    for _ in range(3):
        table.split()
        table.compact()
        table.collect_garbage()
    assert keys(table) == rows
    assert instance.check().problems == ()
    add(table, 0, 5)
    assert keys(table) == sorted([*rows, *range(5)])


@pytest.mark.slow
def test_restored_files_are_collected_when_they_are_removed_again(instance: Instance) -> None:
    for layout in LAYOUTS:
        table = made(instance, f"t_{layout}", layout=layout, gc_delay_seconds=0, history_retention_seconds=0)
        add(table, 0)
        table.history.record_cut("a")
        before = {one.filename for one in table.files.file_references()}
        add(table, 5)
        table.compact()
        table.collect_garbage()
        table.restore("a")
        table.history.drop_cut("a")
        table.collect_garbage()
        table.collect_garbage()
        assert keys(table) == list(range(20)), "they are not what was free once"
        assert {one.filename for one in table.file_page()} == before
        assert [one.unreferenced_at for one in table.file_page()] == [None], "it is not free since then"
        add(table, 5)
        table.compact()
        table.collect_garbage()
        assert before.isdisjoint(one.filename for one in table.file_page())
        assert keys(table) == sorted([*range(20), *range(5, 25)])


def test_a_compaction_that_runs_while_its_table_is_restored_is_given_up(instance: Instance) -> None:
    table = made(instance)
    add(table, 0)
    table.history.record_cut("a")
    add(table, 5)
    assert table.context.jobs.create() == 1
    [job] = table.context.jobs.take(1)
    table.restore("a")
    assert keys(table) == list(range(20))
    assert [one.job_id for one in table.files.file_references()] == [None]
    assert table.context.jobs.count() == (0, 0)
    assert compaction_job.run_compaction(table.context, job, 0).outcome != "committed"
    assert keys(table) == list(range(20))


@pytest.mark.slow
def test_rows_written_while_a_restore_counts_are_kept(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(instance)
    add(table, 0)
    table.history.record_cut("a")
    add(table, 20)
    count = FileReferenceStore.added_since
    writing = threading.Thread(target=add, args=(table, 40))

    def counting(store: FileReferenceStore, *given: Any) -> Any:
        found = count(store, *given)
        writing.start()
        writing.join(1)
        return found

    monkeypatch.setattr(FileReferenceStore, "added_since", counting)
    done = table.restore("a")
    writing.join()
    assert (done.rows_removed, keys(table)) == (20, [*range(20), *range(40, 60)])


@pytest.mark.parametrize("properties", [{}, {"filter": "age_off(v, 1000)"}])
def test_a_query_does_not_see_a_later_restore(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, properties: dict[str, str]
) -> None:
    """A query must not take the restore for a compaction, which may also remove files and rows."""
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 1)
    table = made(instance, gc_delay_seconds=0, split_threshold_rows=10**6, **properties)
    context = table.context
    table.partitions.split("root", 20)
    add(table, 0, 40)
    good = table.history.record_cut()
    add(table, 20, 5)
    rows, moment = KeyRanges(), Moment(context.schema)
    whole = list(plan_query(context, rows, moment))
    plan = plan_query(context, rows)
    found = [next(plan)]
    table.restore(good)
    assert [*found, *plan] == whole
    with pytest.raises(QueryOvertaken):
        plan_query(context, rows, moment)


def test_a_query_does_not_see_later_rows_that_a_merge_moved(instance: Instance) -> None:
    """The later rows are in a leaf that replaced the leaf to which they were added."""
    table = made(instance, gc_delay_seconds=0, split_threshold_rows=10**6)
    context = table.context
    table.partitions.split("root", 20)
    add(table, 0, 40)
    rows, moment = KeyRanges(), Moment(context.schema)
    list(plan_query(context, rows, moment))
    table.partitions.split(merged_whole(table), 20)
    assert list(plan_query(context, rows, moment))
    add(table, 20, 5)
    merged_whole(table)
    with pytest.raises(QueryOvertaken):
        plan_query(context, rows, moment)


def merged_whole(table: Table) -> str:
    """Compacts the table, so that no leaves share a file; merges all leaves and returns the new id."""
    table.compact()
    leaves = [one.partition_id for one in table.partitions.leaves()]
    return table.partitions.merge(leaves).partition_id


@pytest.mark.slow
def test_a_restore_across_a_merge_puts_files_into_the_current_partition(instance: Instance) -> None:
    table = made(instance, compaction_batch_files=2, split_threshold_rows=10**6)
    table.partitions.split("root", 20)
    add(table, 0, 40)
    add(table, 10, 20)
    cut, rows = table.history.record_cut(), keys(table)
    at = clock(instance)
    halves = table.partitions.split(merged_whole(table), 5)
    add(table, 0, 7)
    table.split()
    assert table.partitions.tree().epoch == 3
    assert keys(table, cut) == keys(table, at) == rows
    table.restore(cut)
    assert keys(table) == rows
    for _ in range(3):
        table.split()
        table.compact()
    assert keys(table) == rows
    assert {one.partition_id for one in table.files.file_references()} <= {one.partition_id for one in halves}
    assert instance.check().problems == ()


@pytest.mark.objects
@pytest.mark.slow
def test_a_restore_that_would_show_other_rows_is_refused(instance: Instance) -> None:
    """A file has rows of two leaves. Before the moment, a compaction of one leaf replaced its half."""
    table = made(instance, compaction_batch_files=2, split_threshold_rows=10**6)
    add(table, 0, 40)
    table.partitions.split("root", 20)
    table.split()
    add(table, 0, 5)
    table.compact()
    cut, rows = table.history.record_cut(), keys(table)
    assert not all(one.only_contains_data_for_this_partition for one in table.files.file_references())
    add(table, 30, 5)
    merged_whole(table)
    now = keys(table)
    with pytest.raises(NotWhole, match=r"the rows cannot be restored: partition .* was merged since"):
        table.restore(cut)
    assert (keys(table), keys(table, cut)) == (now, rows)
