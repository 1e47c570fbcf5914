"""Transactions: their commits, their rollbacks and their retries."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from itertools import count
from typing import Any

import psycopg
import pytest
from counters import Connection, increment, value
from psycopg.pq import TransactionStatus

from dormouse.errors import (
    CommitFailed,
    ConnectionsExhausted,
    InstanceError,
    InstanceReadOnly,
    TooManyRetries,
)
from dormouse.model.loops import BACKOFF_SECONDS_MAX, backoff_seconds
from dormouse.postgres import ConnectionSupplier, Isolation, Retries, run_statement, run_transaction
from dormouse.postgres import transaction as transaction_module


def test_the_work_is_committed_and_its_result_returned(counted: ConnectionSupplier) -> None:
    def work(conn: Connection) -> str:
        increment(conn)
        return "done"

    assert run_transaction(counted, work) == "done"
    assert value(counted) == 1


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize("read_only", [False, True])
def test_isolation_and_access_are_as_requested(
    supplier: ConnectionSupplier, isolation: Isolation, read_only: bool
) -> None:
    def work(conn: Connection) -> tuple[object, ...]:
        query = "select current_setting('transaction_isolation'), current_setting('transaction_read_only')"
        return conn.execute(query).fetchone() or ()

    found = run_transaction(supplier, work, isolation=isolation, read_only=read_only)
    assert found == (isolation.value, "on" if read_only else "off")


@pytest.mark.parametrize("error", [ValueError("mine"), psycopg.errors.UniqueViolation("mine"), SystemExit(3)])
def test_an_error_of_the_work_rolls_back_and_propagates_unchanged(
    counted: ConnectionSupplier, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    def work(conn: Connection) -> None:
        increment(conn)
        raise error

    with pytest.raises(type(error)) as caught:
        run_transaction(counted, work)
    assert caught.value is error
    assert value(counted) == 0
    assert caplog.records == []  # the pool would warn of an open transaction


def test_a_failed_statement_rolls_back_what_came_before(counted: ConnectionSupplier) -> None:
    def work(conn: Connection) -> None:
        increment(conn)
        conn.execute("insert into counter values (1, 0)")

    with pytest.raises(psycopg.errors.UniqueViolation):
        run_transaction(counted, work)
    assert value(counted) == 0


def test_a_failed_statement_that_the_work_hides_fails_the_commit(counted: ConnectionSupplier) -> None:
    """PostgreSQL answers COMMIT with a silent rollback in that case."""

    def work(conn: Connection) -> None:
        increment(conn)
        with suppress(psycopg.errors.DivisionByZero):
            conn.execute("select 1 / 0")

    with pytest.raises(CommitFailed, match="hid a failed statement"):
        run_transaction(counted, work)
    assert value(counted) == 0


def test_work_that_ends_its_transaction_itself_is_refused(counted: ConnectionSupplier) -> None:
    with pytest.raises(CommitFailed, match="ended its transaction itself"):
        run_transaction(counted, lambda conn: conn.rollback())


def test_a_part_of_the_work_may_be_undone_with_a_savepoint(counted: ConnectionSupplier) -> None:
    def work(conn: Connection) -> None:
        increment(conn)
        with conn.transaction(force_rollback=True):
            increment(conn)

    run_transaction(counted, work)
    assert value(counted) == 1


def test_serialization_failures_are_tried_again_until_all_are_applied(
    counted: ConnectionSupplier, retries: Retries, caplog: pytest.LogCaptureFixture
) -> None:
    """Threads read and then write one counter, which only one of them can do at a time."""
    both_have_read, firsts = threading.Barrier(2), count()

    def work(conn: Connection) -> None:
        (n,) = conn.execute("select n from counter where id = 1").fetchone() or (None,)
        if next(firsts) < 2:
            both_have_read.wait(60)
        conn.execute("update counter set n = %s where id = 1", [n + 1])

    def run() -> None:
        run_transaction(
            counted,
            work,
            isolation=Isolation.SERIALIZABLE,
            attempts_max=200,
            operation="count up",
        )

    with caplog.at_level(logging.INFO, transaction_module.__name__), ThreadPoolExecutor(6) as threads:
        for future in [threads.submit(run) for _ in range(24)]:
            future.result()
    assert value(counted) == 24
    assert retries.count("count up") == retries.count() == len(caplog.records) > 0
    assert retries.by_operation() == {"count up": retries.count()}
    assert retries.snapshot() == {"count up": {"retries": retries.count(), "exhausted": 0, "unknown": 0}}
    assert "count up: attempt 1 of 200 failed: SerializationFailure" in caplog.text


def test_deadlocks_are_tried_again(counted: ConnectionSupplier, retries: Retries) -> None:
    both_hold_one = threading.Barrier(2)

    def work(first: int, second: int) -> Callable[[Connection], None]:
        attempts = iter(range(10))

        def lock_both(conn: Connection) -> None:
            conn.execute("set local deadlock_timeout = '20ms'")
            increment(conn, first)
            if next(attempts) == 0:
                both_hold_one.wait(60)
            increment(conn, second)

        return lock_both

    with ThreadPoolExecutor(2) as threads:
        runs = [threads.submit(run_transaction, counted, work(*o)) for o in ((1, 2), (2, 1))]
        for future in runs:
            future.result()
    assert (value(counted, 1), value(counted, 2)) == (2, 2)
    assert retries.count() >= 1


def test_retries_are_bounded(counted: ConnectionSupplier, retries: Retries) -> None:
    attempts = []

    def work(conn: Connection) -> None:
        attempts.append(1)
        increment(conn)
        conn.execute("do $$ begin raise exception 'no luck' using errcode = '40001'; end $$")

    with pytest.raises(
        TooManyRetries, match=r"add files was tried 3 times; nothing was applied.*no luck"
    ) as caught:
        run_transaction(counted, work, attempts_max=3, operation="add files")
    assert len(attempts) == 3
    assert retries.snapshot() == {"add files": {"retries": 2, "exhausted": 1, "unknown": 0}}
    assert isinstance(caught.value.__cause__, psycopg.errors.SerializationFailure)
    assert value(counted) == 0


def test_zero_attempts_are_refused(supplier: ConnectionSupplier) -> None:
    with pytest.raises(ValueError, match="attempts_max"):
        run_transaction(supplier, lambda conn: None, attempts_max=0)


def test_backoff_is_jittered_grows_and_is_bounded() -> None:
    early = [backoff_seconds(1) for _ in range(50)]
    late = [backoff_seconds(30) for _ in range(50)]
    assert len(set(early)) > 1
    assert max(early) <= 0.01 < max(late) <= BACKOFF_SECONDS_MAX


def test_a_waiting_retry_holds_no_connection(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = iter(range(2))

    def work(conn: Connection) -> None:
        if next(attempts) == 0:
            raise psycopg.errors.SerializationFailure

    with closing(ConnectionSupplier(dsn, connections_max=1, wait_seconds_max=1)) as supplier:

        def backoff(attempt: int) -> float:
            with supplier.connection():
                return 0

        monkeypatch.setattr(transaction_module, "backoff_seconds", backoff)
        run_transaction(supplier, work)


def test_an_exhausted_supplier_raises_its_own_error(dsn: str) -> None:
    with (
        closing(ConnectionSupplier(dsn, connections_max=1, wait_seconds_max=0.05)) as supplier,
        supplier.connection(),
        pytest.raises(ConnectionsExhausted),
    ):
        run_transaction(supplier, lambda conn: None)


@pytest.mark.parametrize("isolation", list(Isolation))
def test_a_statement_is_committed_and_its_result_returned(
    counted: ConnectionSupplier, isolation: Isolation
) -> None:
    def work(conn: Connection) -> tuple[object, ...] | None:
        return conn.execute("""
            update counter set n = n + 1 where id = 1
            returning n, current_setting('transaction_isolation')""").fetchone()

    assert run_statement(counted, work, isolation=isolation) == (1, isolation.value)
    assert value(counted) == 1


def test_a_statement_at_read_committed_is_a_transaction_of_its_own(counted: ConnectionSupplier) -> None:
    def status(conn: Connection) -> TransactionStatus:
        increment(conn)
        return TransactionStatus(conn.pgconn.transaction_status)

    assert run_statement(counted, status) == TransactionStatus.IDLE
    assert run_statement(counted, status, isolation=Isolation.SERIALIZABLE) == TransactionStatus.INTRANS
    assert value(counted) == 2


@pytest.mark.parametrize("error", [ValueError("mine"), CommitFailed("mine"), SystemExit(3)])
def test_an_error_after_the_statement_is_raised_unchanged(
    counted: ConnectionSupplier, error: BaseException
) -> None:
    def work(conn: Connection) -> None:
        increment(conn)
        raise error

    with pytest.raises(type(error)) as caught:
        run_statement(counted, work)
    assert caught.value is error
    assert value(counted) == 1


def test_a_failed_statement_propagates_unchanged(counted: ConnectionSupplier) -> None:
    with pytest.raises(psycopg.errors.UniqueViolation):
        run_statement(counted, lambda conn: conn.execute("insert into counter values (1, 0)"))


@pytest.mark.parametrize("state", ["40001", "40P01"])
def test_a_statement_that_conflicts_is_retried(
    counted: ConnectionSupplier, retries: Retries, state: str
) -> None:
    """The text of the error does not matter, because servers have messages in many languages."""
    with counted.connection() as conn:
        conn.execute("create sequence luck")

    def work(conn: Connection) -> None:
        conn.execute(f"""
            do $$ begin
                update counter set n = n + 1 where id = 1;
                if nextval('luck') < 3 then
                    raise exception 'konnte Zugriff nicht serialisieren' using errcode = '{state}';
                end if;
            end $$""")

    run_statement(counted, work, operation="add files")
    assert (value(counted), retries.count("add files")) == (1, 2)


@pytest.mark.parametrize("run", [run_transaction, run_statement])
def test_a_full_disk_of_the_database_is_reported_in_one_line(supplier: ConnectionSupplier, run: Any) -> None:
    fail = "do $$ begin raise disk_full using message = 'no space left on device'; end $$"
    with pytest.raises(InstanceError) as caught:
        run(supplier, lambda conn: conn.execute(fail), operation="add_files")
    assert str(caught.value) == (
        "add_files: the disk of the database is full; nothing was applied: make room, and try again "
        "(DiskFull: no space left on device)"
    )


def test_a_read_only_database_is_reported(dsn: str) -> None:
    with (
        closing(ConnectionSupplier(dsn, read_only=True)) as supplier,
        pytest.raises(InstanceReadOnly, match=r"^add files: "),
    ):
        run_statement(supplier, lambda conn: conn.execute("create table t ()"), operation="add files")


@pytest.mark.parametrize("run", [run_transaction, run_statement])
def test_a_connection_to_a_primary_that_became_a_standby_is_not_kept(
    dsn: str, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    demoted = set[int]()
    parameter_status_of = psycopg.ConnectionInfo.parameter_status

    def status(self: psycopg.ConnectionInfo, name: str) -> str | None:
        return (
            "on"
            if name == "in_hot_standby" and self.backend_pid in demoted
            else parameter_status_of(self, name)
        )

    def work(conn: Connection) -> int:
        if conn.info.backend_pid in demoted:
            conn.execute("do $$ begin raise read_only_sql_transaction; end $$")
        return conn.info.backend_pid

    monkeypatch.setattr(psycopg.ConnectionInfo, "parameter_status", status)
    with closing(ConnectionSupplier(dsn)) as supplier:
        demoted.add(run(supplier, work))
        assert run(supplier, work) not in demoted, "the name resolves to another server now"

        def refused(conn: Connection) -> int:
            demoted.add(conn.info.backend_pid)
            return work(conn)

        with pytest.raises(InstanceReadOnly):  # no other server is reachable yet
            run(supplier, refused, attempts_max=3)
        assert run(supplier, work) not in demoted, "connections to the standby were closed"
    demoted.clear()
    monkeypatch.setattr(psycopg.ConnectionInfo, "parameter_status", lambda self, name: "on")
    with closing(ConnectionSupplier(dsn, read_only=True)) as supplier:
        demoted.add(run(supplier, lambda conn: conn.info.backend_pid))
        with pytest.raises(InstanceReadOnly):
            run(supplier, work)
        assert run(supplier, lambda conn: conn.info.backend_pid) in demoted, (
            "a read-only supplier keeps connections to a standby"
        )


def test_plans_do_not_depend_on_the_values(supplier: ConnectionSupplier) -> None:
    with supplier.connection() as conn:
        assert conn.execute("show plan_cache_mode").fetchone() == ("force_generic_plan",)
        assert (conn.prepare_threshold, conn.prepared_max) == (2, 2_000)
