"""Tests of write attempts: a dead writer's objects are found, and live objects are never deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest
from psycopg.errors import OutOfMemory

from dormouse.errors import AttemptAbandoned, CommitOutcomeUnknown, ObjectStoreError, TableNotFound
from dormouse.postgres import run_transaction
from dormouse.state.files import attempts as module
from tests.stored import at_once, blocked, live, query, ref, transaction, wait_until
from tests.support.objects import SKETCHES_SUFFIX
from tests.support.state import Catalog, TableContext, WriteAttempt, WriteAttempts


@pytest.fixture
def table(new_table: Callable[..., TableContext]) -> TableContext:
    """Returns a table in the shared database, after collecting what other tests' dropped tables have left."""
    table = new_table()
    table.attempts.collect_abandoned(0)
    return table


def put(table: TableContext, attempt: WriteAttempt, number: int = 0) -> str:
    name = replace(attempt, number=number).object_name("root")
    table.objects.put(name, b"x")
    return name


def names(table: TableContext) -> list[str]:
    return sorted(name for name, _ in table.objects.list())


def commit(table: TableContext, attempt: WriteAttempt, name: str) -> None:
    def work(conn: psycopg.Connection) -> None:
        table.store.add_files([ref(name)], conn=conn)
        table.attempts.finish(conn, attempt.table_id, [attempt.attempt_id])

    run_transaction(table.supplier, work)


def expire(table: TableContext) -> None:
    text = "update write_attempt set started_at = started_at - interval '1 week' where table_id = %s"
    query(table.supplier, text, table.table.table_id)


def test_the_objects_of_a_committed_attempt_stay(table: TableContext) -> None:
    with table.attempts.attempt(table.table) as attempt:
        name = put(table, attempt)
        commit(table, attempt, name)
    expire(table)
    assert table.attempts.collect(table.table) == 0
    assert names(table) == [name]


def test_the_objects_of_a_job_that_raises_are_deleted_at_once(table: TableContext) -> None:
    with pytest.raises(ZeroDivisionError), table.attempts.attempt(table.table) as attempt:
        put(table, attempt)
        raise ZeroDivisionError
    assert names(table) == []
    assert remembered(table) == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_error_after_the_commit_does_not_delete_live_files(
    table: TableContext, error: type[BaseException]
) -> None:
    """KeyboardInterrupt may come while COMMIT is on its way, or just after it."""
    with pytest.raises(error), table.attempts.attempt(table.table) as attempt:
        name = put(table, attempt)
        commit(table, attempt, name)
        raise error
    assert names(table) == [name]


def test_an_error_while_the_commit_is_on_its_way_waits_for_it(table: TableContext) -> None:
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    with transaction(table) as conn:
        table.store.add_files([ref(name)], conn=conn)
        table.attempts.finish(conn, attempt.table_id, [attempt.attempt_id])
        discarding = threading.Thread(target=table.attempts.discard, args=[attempt])
        discarding.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    discarding.join(60)
    assert names(table) == [name]
    assert [f for _, f, _, _ in live(table.store)] == [name]


def test_after_an_unknown_outcome_nothing_is_removed_until_it_expires(table: TableContext) -> None:
    with pytest.raises(CommitOutcomeUnknown), table.attempts.attempt(table.table) as attempt:
        name = put(table, attempt)
        raise CommitOutcomeUnknown
    assert table.attempts.collect(table.table) == 0
    assert names(table) == [name]
    expire(table)
    assert table.attempts.collect(table.table) == 1
    assert names(table) == []


def test_expiry_deletes_a_dead_writers_objects_and_no_others(
    new_table: Callable[..., TableContext],
) -> None:
    table, other = new_table(), new_table()
    dead = [table.attempts.begin(table.table) for _ in range(2)]
    for number in range(3):
        put(table, dead[0], number)
    theirs = put(other, other.attempts.begin(other.table))
    expire(table)
    mine = put(table, table.attempts.begin(table.table))
    assert table.attempts.collect(table.table) == 2
    assert names(table) == sorted([mine, theirs])


def test_a_late_finish_fails_and_applies_nothing(table: TableContext) -> None:
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    expire(table)
    table.attempts.collect(table.table)
    with pytest.raises(AttemptAbandoned, match=attempt.attempt_id):
        commit(table, attempt, name)
    assert table.store.has_no_files()


def test_an_abandoned_attempt_whose_objects_are_not_deleted_yet_cannot_finish(table: TableContext) -> None:
    attempt = table.attempts.begin(table.table)
    table.attempts.abandon_all()
    with pytest.raises(AttemptAbandoned):
        commit(table, attempt, put(table, attempt))
    assert table.store.has_no_files()


def test_an_attempt_finishes_once(table: TableContext) -> None:
    attempt = table.attempts.begin(table.table)
    outcomes = at_once(*[lambda n=n: commit(table, attempt, f"f{n}") for n in range(4)])
    assert outcomes.count(None) == 1
    assert sum(isinstance(o, AttemptAbandoned) for o in outcomes) == 3
    assert len(live(table.store)) == 1


def test_of_a_concurrent_expiry_and_commit_one_succeeds(table: TableContext) -> None:
    for _ in range(10):
        attempt = table.attempts.begin(table.table)
        name = put(table, attempt)
        expire(table)
        committed, _ = at_once(
            lambda attempt=attempt, name=name: commit(table, attempt, name),
            lambda: table.attempts.collect(table.table),
        )
        is_live = name in [f for _, f, _, _ in live(table.store)]
        assert is_live is (committed is None)
        assert (name in names(table)) is is_live


def test_objects_that_could_not_be_deleted_are_deleted_by_the_next_collection(table: TableContext) -> None:
    class Broken:
        def __getattr__(self, name: str) -> object:
            return getattr(table.objects, name)

        def delete(self, names: object) -> list[tuple[str, Exception]]:
            return [(name, OSError("broken")) for name in names]  # type: ignore[attr-defined]

    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    WriteAttempts(table.supplier, Broken()).discard(attempt)  # type: ignore[arg-type]
    assert names(table) == [name]
    assert table.attempts.collect(table.table) == 1
    assert names(table) == []


def test_the_objects_of_a_dropped_table_are_collected_by_any_table(
    new_table: Callable[..., TableContext],
) -> None:
    table, other = new_table(), new_table()
    kept = put(other, other.attempts.begin(other.table))
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    commit(table, attempt, name)
    writing = table.attempts.begin(table.table)
    put(table, writing)
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    with pytest.raises((AttemptAbandoned, TableNotFound)):
        commit(table, writing, "late")
    with pytest.raises(TableNotFound, match=table.table.name):
        table.attempts.begin(table.table)
    other.attempts.collect(other.table)
    assert names(table) == [kept]


@pytest.mark.parametrize("of_all", [False, True])
def test_only_holds_of_all_tables_keep_the_objects_of_a_dropped_table(
    new_table: Callable[..., TableContext], of_all: bool
) -> None:
    """A backup holds the objects of all tables; a cut of one table holds nothing of another."""
    table, other = new_table(), new_table()
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    commit(table, attempt, name)
    query(
        table.supplier,
        "insert into hold (holder, table_id, since, until) values ('test', %s, now(), 'infinity')",
        None if of_all else other.table.table_id,
    )
    try:
        Catalog(table.supplier, table.attempts).drop(table.table.name)
        other.attempts.collect(other.table)
        assert names(table) == ([name] if of_all else [])
    finally:
        query(table.supplier, "delete from hold where holder = 'test'")
    other.attempts.collect(other.table)
    assert names(table) == []


def test_a_writer_that_outlives_its_table_removes_its_objects_itself(table: TableContext) -> None:
    with pytest.raises(AttemptAbandoned), table.attempts.attempt(table.table) as attempt:
        Catalog(table.supplier, table.attempts).drop(table.table.name)
        table.attempts.collect_abandoned(0)
        put(table, attempt)
        finish = partial(WriteAttempts.finish, table_id=attempt.table_id, attempt_ids=[attempt.attempt_id])
        run_transaction(table.supplier, finish)
    assert names(table) == []


def commit_for_now(table: TableContext, attempt: WriteAttempt, name: str) -> None:
    def work(conn: psycopg.Connection) -> None:
        table.store.add_files([ref(name)], conn=conn)
        table.attempts.finish(conn, attempt.table_id, [attempt.attempt_id], leftovers=True)

    run_transaction(table.supplier, work)


def remembered(table: TableContext) -> int:
    return len(query(table.supplier, "select 1 from write_attempt where table_id = %s", table.table.table_id))


def expire_commits(table: TableContext) -> None:
    text = "update write_attempt set finished_at = finished_at - interval '1 week' where table_id = %s"
    query(table.supplier, text, table.table.table_id)


def test_leftovers_written_after_a_commit_are_deleted_when_the_attempt_expires(
    table: TableContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTED_NAMES_MAX", 2)
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    commit_for_now(table, attempt, name)
    table.objects.put(name + SKETCHES_SUFFIX, b"x")
    late = [put(table, attempt, number) for number in (1, 2)]
    table.objects.put(late[0] + SKETCHES_SUFFIX, b"x")
    expire(table)
    table.attempts.collect(table.table)
    assert (late[1] in names(table), remembered(table)) == (True, 1)
    expire_commits(table)
    assert table.garbage.collect().abandoned_attempts == 0
    assert (names(table), remembered(table)) == ([name, name + SKETCHES_SUFFIX], 0)


@pytest.mark.parametrize("is_collected", [False, True])
def test_leftovers_written_after_an_attempt_was_discarded_are_deleted_later(
    table: TableContext, is_collected: bool
) -> None:
    with (
        pytest.raises(OSError, match="a task failed"),
        table.attempts.attempt(table.table, leftovers=True) as attempt,
    ):
        put(table, attempt)
        if is_collected:
            table.attempts.abandon(attempt)
            assert (table.attempts.collect(table.table), remembered(table)) == (1, 0)
        raise OSError("a task failed")
    assert names(table) == []
    late = put(table, attempt, 1)
    with pytest.raises(AttemptAbandoned):
        commit(table, attempt, late)
    table.attempts.collect(table.table)
    assert (names(table), remembered(table)) == ([late], 1)
    expire_commits(table)
    table.attempts.collect(table.table)
    assert (names(table), remembered(table)) == ([], 0)


def test_an_attempt_that_is_discarded_after_its_table_was_dropped_leaves_no_row(table: TableContext) -> None:
    """No collection would find its row, since a table's attempts are collected with the table."""
    with (
        pytest.raises(OSError, match="a task failed"),
        table.attempts.attempt(table.table, leftovers=True) as attempt,
    ):
        put(table, attempt)
        Catalog(table.supplier, table.attempts).drop(table.table.name)
        raise OSError("a task failed")
    rows = query(table.supplier, "select 1 from write_attempt where attempt_id = %s", attempt.attempt_id)
    assert (names(table), rows) == ([], [])


def test_an_attempt_that_finished_with_leftovers_cannot_be_abandoned(table: TableContext) -> None:
    attempt = table.attempts.begin(table.table)
    name = put(table, attempt)
    commit_for_now(table, attempt, name)
    assert not table.attempts.abandon(attempt)
    table.attempts.discard(attempt)
    table.attempts.abandon_all()
    expire(table)
    table.attempts.collect(table.table)
    for again in (commit, commit_for_now):
        with pytest.raises(AttemptAbandoned):
            again(table, attempt, replace(attempt, number=9).object_name("root"))
    assert names(table) == [name]


def test_leftovers_are_looked_for_without_a_lock_of_other_tables(
    table: TableContext, new_table: Callable[..., TableContext]
) -> None:
    other = new_table()
    attempt = table.attempts.begin(table.table)
    name, late = put(table, attempt), put(table, attempt, 1)
    commit_for_now(table, attempt, name)
    expire_commits(table)
    with transaction(other) as conn:
        conn.execute(other.store.own.layout.on("lock", other.table.table_id))
        collecting = threading.Thread(target=table.attempts.collect, args=[table.table])
        collecting.start()
        wait_until(lambda: blocked(table.supplier) or not collecting.is_alive())
        assert not blocked(table.supplier)
    collecting.join(60)
    assert (late in names(table), name in names(table)) == (False, True)


@pytest.mark.parametrize("error", [OutOfMemory("shared memory"), ObjectStoreError("broken")])
def test_collection_goes_on_after_leftovers_that_cannot_be_looked_for(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    attempt = table.attempts.begin(table.table)
    commit_for_now(table, attempt, put(table, attempt))
    expire_commits(table)

    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(WriteAttempts, "_untracked", fail)
    assert table.garbage.collect().whole
    assert remembered(table) == 1


def test_leftovers_that_cannot_be_deleted_are_tried_again(
    table: TableContext, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempt = table.attempts.begin(table.table)
    late = put(table, attempt, 1)
    commit_for_now(table, attempt, put(table, attempt))
    expire_commits(table)
    monkeypatch.setattr(
        type(table.objects), "delete", lambda self, found: [(name, OSError("broken")) for name in found]
    )
    table.attempts.collect(table.table)
    assert f"{late} is no longer needed but could not be deleted: broken" in caplog.text
    monkeypatch.undo()
    table.attempts.collect(table.table)
    assert (late in names(table), remembered(table)) == (False, 0)


def test_a_dropped_table_is_remembered_until_no_writer_can_be_left(table: TableContext) -> None:
    finished, writing = (table.attempts.begin(table.table) for _ in range(2))
    commit_for_now(table, finished, put(table, finished))
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    for number in range(2):
        put(table, writing, number)
        assert table.attempts.collect_abandoned(table.table.table_id) == 0
        assert (names(table), remembered(table)) == ([], 2)
    text = "update write_attempt set abandoned_at = abandoned_at - interval '1 week' where table_id = %s"
    query(table.supplier, text, table.table.table_id)
    put(table, writing)
    assert table.attempts.collect_abandoned(0) == 2
    assert (names(table), remembered(table)) == ([], 0)


def test_a_writer_that_begins_while_its_table_is_dropped_is_too_late(table: TableContext) -> None:
    with transaction(table) as conn:
        conn.execute("delete from tables where table_id = %s", [table.table.table_id])
        outcomes: list[object] = []
        beginning = threading.Thread(target=lambda: outcomes.extend(at_once(lambda: begin(table))))
        beginning.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    beginning.join(60)
    assert isinstance(outcomes[0], TableNotFound)


def begin(table: TableContext) -> WriteAttempt:
    return table.attempts.begin(table.table)
