"""Tests of the log of removed references: one partition a day, made ahead, dropped only when not needed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import CutExpired
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.days import DAYS_AHEAD
from dormouse.state.commits import committer
from dormouse.state.files import removal_log
from dormouse.state.files.holds import moment_held
from dormouse.state.history import changes, consumers, ends, moments
from dormouse.state.history import moments as cuts
from tests.standard import OF_K
from tests.stored import assign, at_once, blocked, query, ref, remove, replace, transaction, wait_until
from tests.support.commits import Committer, Tables
from tests.support.model import Position, TableProperties
from tests.support.objects import open_store
from tests.support.state import Catalog, TableContext, WriteAttempts

LONG_AGO = datetime.now(UTC).date() - timedelta(days=30)


def today() -> date:
    """Returns the current date, read at each call: midnight may come during a test run."""
    return datetime.now(UTC).date()


@pytest.fixture
def table(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> Iterator[TableContext]:
    """Yields a table in a database of its own, whose removal log has no daily partitions."""
    with supplier.connection() as conn:
        for day in removal_log.DAYS.days(supplier):
            removal_log.DAYS.drop(conn, day)
    objects = open_store(tmp_path)
    catalog = Catalog(supplier, WriteAttempts(supplier, objects))
    record = catalog.create("t", OF_K, TableProperties())
    yield TableContext(dsn, supplier, objects, record)


def days(table: TableContext) -> list[date]:
    return removal_log.DAYS.days(table.supplier)


def make_day(table: TableContext, day: date) -> None:
    removal_log.DAYS.make(table.supplier, [day])


def age(table: TableContext, day: date) -> None:
    """Sets the time of every removal to noon of a day."""
    query(table.supplier, "update removal set removed_at = %s::date + interval '12 hours'", day)


def logged(table: TableContext) -> int:
    return int(query(table.supplier, "select count(*) from removal")[0][0])


def test_the_coming_days_are_made_ahead(table: TableContext) -> None:
    removal_log.roll(table.supplier)
    expected = [today() + timedelta(days=n) for n in range(DAYS_AHEAD)]
    assert days(table) == expected
    removal_log.roll(table.supplier)
    assert days(table) == expected


def test_a_removal_is_logged_in_its_day(table: TableContext) -> None:
    removal_log.roll(table.supplier)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    day = removal_log.DAYS.name(today())
    assert query(table.supplier, f"select count(*) from {day}") == [(1,)]


def test_making_a_day_keeps_its_removals_from_the_default_partition(table: TableContext) -> None:
    table.store.add_files([ref("a"), ref("b")])
    remove(table.store, "a")
    removal_log.roll(table.supplier)
    remove(table.store, "b")
    assert logged(table) == 2
    assert table.store.stamp_unreferenced() == 2


def in_default(table: TableContext) -> int:
    return int(query(table.supplier, "select count(*) from removal_default")[0][0])


def test_removals_that_no_day_was_made_for_are_moved_and_dropped_like_others(table: TableContext) -> None:
    """The log has no partitions for new days if only a committer ran for a long time."""
    table.store.add_files([ref("a"), ref("b")])
    table.store.totals.bring_forward()
    remove(table.store, "a")
    age(table, LONG_AGO)
    remove(table.store, "b")
    assert in_default(table) == 2
    removal_log.roll(table.supplier)
    assert (in_default(table), logged(table)) == (0, 2)
    assert {LONG_AGO, today()} <= set(days(table))
    assert table.store.totals.read().files == 0
    assert table.store.stamp_unreferenced() == 2
    table.store.totals.bring_forward()
    removal_log.roll(table.supplier)
    assert (logged(table), LONG_AGO in days(table)) == (1, False)


def test_removals_of_a_clock_that_was_ahead_are_those_of_today(table: TableContext) -> None:
    removal_log.roll(table.supplier)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    age(table, today() + timedelta(days=3_000))
    assert in_default(table) == 1
    removal_log.roll(table.supplier)
    assert query(table.supplier, f"select count(*) from {removal_log.DAYS.name(today())}") == [(1,)]
    assert table.store.stamp_unreferenced() == 1


def test_days_follow_the_clock_of_the_database(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Wrong:
            return cls(2_001, 1, 1, tzinfo=UTC)

    monkeypatch.setattr(removal_log, "datetime", Wrong, raising=False)
    removal_log.roll(table.supplier)
    assert days(table)[0] == today()


def test_a_committer_rolls_the_log(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "REPORT_SECONDS", 0.01)
    with Committer(Tables(table.supplier), [])._reporting():
        wait_until(lambda: len(days(table)) == DAYS_AHEAD)


def test_rolling_at_once_is_no_error(table: TableContext) -> None:
    assert at_once(*[lambda: removal_log.roll(table.supplier)] * 4) == [None] * 4
    removal_log.roll(table.supplier)
    assert len(days(table)) == DAYS_AHEAD


def test_an_old_day_that_was_collected_is_dropped(table: TableContext) -> None:
    make_day(table, LONG_AGO)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    age(table, LONG_AGO)
    table.store.stamp_unreferenced()
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)


def test_an_old_day_that_was_not_collected_yet_stays(table: TableContext) -> None:
    make_day(table, LONG_AGO)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    age(table, LONG_AGO)
    removal_log.roll(table.supplier)
    assert LONG_AGO in days(table)
    assert table.store.stamp_unreferenced() == 1


def test_a_day_that_was_not_counted_yet_stays(table: TableContext) -> None:
    make_day(table, LONG_AGO)
    table.store.add_files([ref("a"), ref("b")])
    table.store.totals.bring_forward()
    remove(table.store, "a")
    age(table, LONG_AGO)
    table.store.stamp_unreferenced()
    removal_log.roll(table.supplier)
    assert LONG_AGO in days(table)
    assert table.store.totals.read().files == 1
    table.store.totals.bring_forward()
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)
    assert table.store.totals.read().files == 1


def test_a_day_within_a_tables_history_stays(table: TableContext) -> None:
    make_day(table, LONG_AGO)
    catalog = Catalog(table.supplier, table.attempts)
    catalog.change_properties(
        catalog.get("t"), lambda _: TableProperties(history_retention_seconds=60 * 86_400)
    )
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    age(table, LONG_AGO)
    table.store.stamp_unreferenced()
    removal_log.roll(table.supplier)
    assert LONG_AGO in days(table)
    catalog.change_properties(catalog.get("t"), lambda _: TableProperties())
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)


def test_the_removals_of_a_dropped_table_keep_no_day(table: TableContext) -> None:
    make_day(table, LONG_AGO)
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    age(table, LONG_AGO)
    Catalog(table.supplier, table.attempts).drop("t")
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)


def test_a_removal_that_commits_while_its_day_is_checked_is_not_lost(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The removal has the time at which its transaction began: on the day that is checked, long ago."""
    monkeypatch.setattr("dormouse.postgres.days.LOCK_WAIT_MS_MAX", 60_000)
    make_day(table, LONG_AGO)
    table.store.add_files([ref("a")])
    table.store.assign_job_ids([assign("j", "root", "a")])
    with transaction(table) as conn:
        table.store.replace_file_references([replace("j", ["a"], None)], conn=conn)
        conn.execute("update removal set removed_at = %s::date", [LONG_AGO])
        work = threading.Thread(
            target=removal_log.DAYS.attempt,
            args=(table.supplier, lambda c: removal_log._drop_unless_needed(c, LONG_AGO)),
        )
        work.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    work.join(60)
    assert not work.is_alive()
    assert logged(table) == 1
    assert table.store.stamp_unreferenced() == 1


def test_a_day_of_a_busy_log_is_dropped_later(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writers must not wait long behind a day that is dropped."""
    monkeypatch.setattr("dormouse.postgres.days.LOCK_WAIT_MS_MAX", 20)
    monkeypatch.setattr("dormouse.postgres.days.DAYS_AHEAD", 2)
    with transaction(table) as conn:
        conn.execute("lock table removal in row exclusive mode")
        removal_log.roll(table.supplier)
        assert days(table) == []
    removal_log.roll(table.supplier)
    assert len(days(table)) == 2


def test_a_day_is_kept_for_the_cuts_that_need_it(table: TableContext) -> None:
    """Moments before the end of a dropped day can no longer be read."""
    table.store.add_files([ref("a"), ref("b")])
    cut = cuts.record_cut(table, "needs it")
    remove(table.store, "a")
    later = cuts.record_cut(table, "later")
    make_day(table, LONG_AGO)
    age(table, LONG_AGO)
    table.store.stamp_unreferenced()
    count_whole(table)
    removal_log.roll(table.supplier)
    assert LONG_AGO in days(table)
    assert moments.position_of(table, cut).snapshot
    cuts.drop_cut(table, cut)
    query(table.supplier, "update tables set created_at = '2000-01-01', history_since = '2000-01-01'")
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)
    since = ends.oldest(table)
    assert since.date() == LONG_AGO, "what was removed may have been committed a while later"
    with pytest.raises(CutExpired):
        moments.position_of(table, since - timedelta(seconds=1))
    assert moments.position_of(table, later).at == later.recorded_at


def test_a_day_that_is_needed_is_not_locked(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock on the day would make all commits wait until each row of the day was checked."""
    record = Catalog(table.supplier, table.attempts).create("other", table.schema, TableProperties())
    other = TableContext(table.dsn, table.supplier, table.objects, record)
    other.store.add_files([ref("a")])
    cut = cuts.record_cut(other, "needs it")
    removed_long_ago(table)
    remove(other.store, "a")
    other.store.stamp_unreferenced()
    age(table, LONG_AGO)
    tried: list[date] = []
    drop = removal_log._drop_unless_needed
    trying = lambda conn, day: (tried.append(day), drop(conn, day))  # noqa: E731
    monkeypatch.setattr(removal_log, "_drop_unless_needed", trying)
    with transaction(table) as conn:
        conn.execute(f"lock table {removal_log.DAYS.name(LONG_AGO)} in access share mode")
        removal_log.roll(table.supplier)
        assert (tried, LONG_AGO in days(table)) == ([], True)
    cuts.drop_cut(other, cut)
    removal_log.roll(table.supplier)
    assert (tried, LONG_AGO in days(table)) == ([LONG_AGO], False)


def test_a_reader_of_a_day_that_is_being_dropped_reads_all_of_it_or_fails(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dormouse.postgres.days.LOCK_WAIT_MS_MAX", 60_000)
    before = removed_long_ago(table)
    began: list[bool] = []

    def read() -> None:
        with moment_held(table.supplier, table.table.table_id, before.at, before.snapshot) as is_held:
            began.append(is_held)
            assert not is_held or logged(table) == 3

    with transaction(table) as conn:
        conn.execute("select from instance for update")  # between the reader's check and its end
        dropping = threading.Thread(target=removal_log.roll, args=(table.supplier,))
        dropping.start()
        wait_until(lambda: blocked(table.supplier))
        failed: list[BaseException] = []
        reading = threading.Thread(target=noting, args=(read, failed))
        reading.start()
        wait_until(lambda: began or blocked(table.supplier) > 1)
        conn.execute("set local lock_timeout = 100")  # the checks of a day block no reader
        assert conn.execute("select count(*) from removal").fetchall() == [(1,)]
        conn.execute("commit")
    dropping.join()
    reading.join()
    assert failed == [] and began == [LONG_AGO in days(table)]


def noting(work: Callable[[], None], failed: list[BaseException]) -> None:
    try:
        work()
    except BaseException as error:
        failed.append(error)


@pytest.mark.parametrize("what", ["changes", "references"])
def test_a_read_whose_day_is_dropped_meanwhile_fails(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(changes, "PAGE_REFERENCES", 1)
    before = removed_long_ago(table)
    found: Iterator[Any]
    if what == "changes":
        found = changes.pages_between(table, Position(0, changes.BEFORE_ALL, before.at), before)
    else:
        found = changes.references_at(table, before)
    next(found)
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)
    with pytest.raises(CutExpired, match="does not reach back"):
        list(found)


def test_moments_just_before_a_consumers_position_cannot_be_read_without_their_day(
    table: TableContext,
) -> None:
    """The consumer keeps the files, but only the dropped log recorded which files there were."""
    before = removed_long_ago(table)
    consumers.Consumers(table).create("etl", None)
    position_at = before.at + timedelta(hours=12, minutes=5)
    query(table.supplier, "update consumer set position_at = %s", position_at)
    query(table.supplier, "update hold set since = %s::timestamptz - interval '10 minutes'", position_at)
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)
    assert ends.oldest(table) == position_at
    assert [one.rows_behind for one in consumers.Consumers(table).statuses()] == [0]


def test_holds_of_all_tables_do_not_keep_moments_whose_log_was_dropped(
    table: TableContext,
) -> None:
    """Reading a moment needs the log. Holds of adoptions and backups keep files, and not the log."""
    before = removed_long_ago(table)
    statement = "insert into hold (holder, since, until) values ('adoption 2', 'epoch', 'infinity')"
    query(table.supplier, statement)
    removal_log.roll(table.supplier)
    assert LONG_AGO not in days(table)
    with pytest.raises(CutExpired):
        moments.position_of(table, before.at + timedelta(hours=1))


def removed_long_ago(table: TableContext) -> Position:
    """Adds three files and removes them, dated `LONG_AGO`. Nothing holds the files.

    Returns the position before the removals.
    """
    table.store.add_files([ref("a"), ref("b"), ref("c")])
    long_ago = datetime(LONG_AGO.year, LONG_AGO.month, LONG_AGO.day, tzinfo=UTC)
    here = moments.now(table)
    before = Position(here.epoch, here.snapshot, long_ago)
    remove(table.store, "a", "b", "c")
    make_day(table, LONG_AGO)
    age(table, LONG_AGO)
    table.store.stamp_unreferenced()
    count_whole(table)
    query(table.supplier, "update tables set created_at = '2000-01-01', history_since = '2000-01-01'")
    return before


def count_whole(table: TableContext) -> None:
    """Updates the table's totals, as if all files had just been counted.

    So the totals need no removals of earlier days.
    """
    table.store.totals.bring_forward()
    query(table.supplier, "update watermark set whole_at = clock_timestamp() where purpose = 'totals'")
