"""Cuts and moments: a past state of a table is the same at every read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from datetime import datetime, timedelta
from typing import Any

import psycopg
import pytest

from dormouse.state.history import moments
from dormouse.state.history import moments as cuts
from dormouse.state.history.changes import size_between
from tests.stored import blocked, case, query, ref, remove, split, transaction, wait_until
from tests.support.model import Cut, Position
from tests.support.state import LAYOUTS, KeyBounds, TableContext

NewTable = Callable[..., TableContext]


def files_at(table: TableContext, position: Position) -> set[tuple[str, str]]:
    """Returns the (partition, file) of each reference at a position."""
    with table.supplier.connection() as conn:
        *_, planned = table.store.planned_at(_ids(table), KeyBounds(), position.snapshot, conn)
    assert all(row[-1] for row in planned.references), "all files are known"
    return {(row[0], row[1]) for row in planned.references}


def _ids(table: TableContext) -> list[str]:
    found = query(
        table.supplier, "select partition_id from partition where table_id = %s", table.table.table_id
    )
    return [row[0] for row in found]


def at(table: TableContext, when: Any) -> set[tuple[str, str]]:
    return files_at(table, moments.position_of(table, when))


def clock(table: TableContext) -> datetime:
    found: datetime = query(table.supplier, "select clock_timestamp()")[0][0]
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moment_has_the_same_files_whatever_comes_later(new_table: NewTable, layout: str) -> None:
    table = new_table(layout=layout)
    seen: list[tuple[Any, set[tuple[str, str]], int]] = []

    def note(name: str | None = None) -> None:
        files = {(r.partition_id, r.filename) for r in table.store.file_references()}
        epoch = table.partitions.tree().epoch
        seen.extend([(clock(table), files, epoch), (cuts.record_cut(table, name), files, epoch)])

    note()
    table.store.add_files([ref("a"), ref("b")])
    note("first")
    left, right = table.partitions.split("root", 10)
    note()
    table.store.split_file_references([split(ref("a"), left.partition_id, right.partition_id)])
    note("divided")
    remove(table.store, "b")
    remove(table.store, "a", partition_id=left.partition_id)
    table.garbage.collect()
    note()
    table.store.add_files([ref("c", right.partition_id)])
    table.garbage.collect()
    for when, files, epoch in seen:
        with case(when):
            assert at(table, when) == files
            assert moments.position_of(table, when).epoch == epoch
    assert at(table, "divided") == seen[7][1]
    assert files_at(table, moments.now(table)) == {
        (right.partition_id, "a"), (right.partition_id, "c"),
    }  # fmt: skip
    recorded = [when for when, _, _ in seen if isinstance(when, Cut)]
    assert list(cuts.cuts(table)) == recorded == sorted(recorded)


def test_a_slow_transaction_counts_at_the_moment_of_its_commit(new_table: NewTable) -> None:
    """It begins long before, and other transactions begin and commit while it runs."""
    table = new_table()
    table.store.add_files([ref("before")])
    with closing(psycopg.connect(table.dsn, options="-c search_path=dormouse")) as slow:
        table.store.add_files([ref("slow")], conn=slow)
        table.store.add_files([ref("quick")])
        remove(table.store, "before")
        open_at, cut = clock(table), cuts.record_cut(table)
        without = {("root", "quick")}
        assert at(table, open_at) == at(table, cut) == without
        slow.commit()
    closed_at, later = clock(table), cuts.record_cut(table)
    table.store.add_files([ref("after")])
    for bases in ("cuts", "none"):
        with case(bases):
            assert at(table, open_at) == without
            assert at(table, closed_at) == without | {("root", "slow")}
        if bases == "cuts":
            assert (at(table, cut), at(table, later)) == (without, without | {("root", "slow")})
            for recorded in (cut, later):
                cuts.drop_cut(table, recorded)


@contextmanager
def commits_held_back(dsn: str) -> Iterator[None]:
    """Makes commits wait for a standby that does not exist, until the context ends.

    A waiting commit already has its commit time, but other transactions do not see it.
    """
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("alter system set synchronous_standby_names = 'absent'")
        conn.execute("select pg_reload_conf()")
        try:
            yield
        finally:
            conn.execute("alter system reset synchronous_standby_names")
            conn.execute("select pg_reload_conf()")


def test_a_moment_waits_for_a_commit_that_is_not_visible_yet(new_table: NewTable) -> None:
    table = new_table()
    table.store.add_files([ref("before")])
    before = clock(table)
    options = "-c search_path=dormouse -c synchronous_commit=on"
    with commits_held_back(table.dsn), closing(psycopg.connect(table.dsn, options=options)) as late:
        table.store.add_files([ref("late")], conn=late)
        committing = threading.Thread(target=late.commit)
        committing.start()
        waits = "select pid from pg_stat_activity where wait_event = 'SyncRep' and pid = %s"
        wait_until(lambda: query(table.supplier, waits, late.info.backend_pid))
        now = clock(table)
        assert at(table, before) == {("root", "before")}
        asked: list[set[tuple[str, str]]] = []
        asking = threading.Thread(target=lambda: asked.append(at(table, now)))
        asking.start()
        asking.join(0.3)
        assert asking.is_alive(), "its rows are not known yet"
        query(table.supplier, "select pg_cancel_backend(%s)", late.info.backend_pid)
        committing.join()
        asking.join(60)
    assert asked == [{("root", "before"), ("root", "late")}] == [at(table, now)]


def test_a_moment_does_not_wait_for_an_idle_transaction(new_table: NewTable) -> None:
    table = new_table()
    with closing(psycopg.connect(table.dsn, options="-c search_path=dormouse")) as slow:
        table.store.add_files([ref("slow")], conn=slow)
        assert at(table, clock(table)) == set()
        slow.commit()


def test_a_moment_in_the_near_future_is_waited_for(new_table: NewTable) -> None:
    table = new_table()
    soon = clock(table) + timedelta(seconds=0.3)
    assert at(table, soon) == set()
    assert clock(table) > soon


def test_a_commit_during_a_read_of_a_moment_is_not_seen(new_table: NewTable) -> None:
    """The moment is read before and after the commit. Its snapshot excludes the commit in both cases."""
    table = new_table()
    with closing(psycopg.connect(table.dsn, options="-c search_path=dormouse")) as slow:
        table.store.add_files([ref("slow")], conn=slow)
        table.store.add_files([ref("quick")])
        position = moments.position_of(table, clock(table))
        assert files_at(table, position) == {("root", "quick")}
        slow.commit()
    assert files_at(table, position) == {("root", "quick")}


def test_a_cut_is_ordered_with_splits_and_with_the_first_stage_of_collection(new_table: NewTable) -> None:
    table = new_table()
    made: list[Cut] = []
    with transaction(table) as splitting:
        table.partitions.split("root", 10, conn=splitting)
        recording = threading.Thread(target=lambda: made.append(cuts.record_cut(table)))
        recording.start()
        wait_until(lambda: blocked(table.supplier) == 1)
        splitting.execute("commit")
        recording.join(60)
    assert [one.epoch for one in made] == [1]


def test_commits_during_the_recording_of_a_cut_count_before_its_time(new_table: NewTable) -> None:
    """A commit during the recording is not in the cut, although the cut's recorded time is later.

    A time between the commit and that time must still include the commit.
    """
    table = new_table()
    cuts.record_cut(table)
    recorded = cuts.record_cut(table)
    table.store.add_files([ref("meanwhile")])
    between = clock(table)
    late = "update cut set recorded_at = clock_timestamp() where table_id = %s and cut_id = %s"
    query(table.supplier, late, table.table.table_id, recorded.cut_id)
    assert size_between(table, between).row_count == 0
    table.store.add_files([ref("later")])
    assert size_between(table, between).row_count == 100
    cuts.record_cut(table)
    assert size_between(table, between).row_count == 100
    # also without a cut between two times
    begin = clock(table)
    table.store.add_files([ref("beside")])
    end = clock(table)
    table.store.add_files([ref("after")])
    cuts.record_cut(table)
    assert size_between(table, begin, end).row_count == 100
