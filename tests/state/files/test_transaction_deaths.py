"""Tests of transactions whose connection, commit or process dies.

Each transaction is applied once, or not at all, or raises that its outcome is unknown.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest
from counters import Connection, increment, value
from cutting import CuttingProxy, until

from dormouse.errors import CommitOutcomeUnknown, TooManyRetries
from dormouse.postgres import (
    ConnectionSupplier,
    Retries,
    migrate,
    run_statement,
    run_transaction,
    transaction,
)
from dormouse.postgres.migrate import lacking
from tests.stored import wait_until


def terminate(dsn: str, pid: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])


def test_a_connection_that_dies_during_the_work_is_replaced_and_the_work_done_once(
    dsn: str, counted: ConnectionSupplier, retries: Retries
) -> None:
    pids = []

    def work(conn: Connection) -> None:
        increment(conn)
        pids.append(conn.info.backend_pid)
        if len(pids) == 1:
            terminate(dsn, conn.info.backend_pid)
        increment(conn, 2)

    with closing(ConnectionSupplier(dsn)) as supplier:
        run_transaction(supplier, work)
    assert len(set(pids)) == 2
    assert (value(counted, 1), value(counted, 2), retries.count()) == (1, 1, 1)


def test_a_connection_that_dies_after_the_last_statement_is_noticed_before_commit(
    dsn: str, counted: ConnectionSupplier
) -> None:
    pids = []

    def work(conn: Connection) -> None:
        increment(conn)
        pids.append(conn.info.backend_pid)
        if len(pids) == 1:
            terminate(dsn, conn.info.backend_pid)

    run_transaction(counted, work)
    assert len(set(pids)) == 2
    assert value(counted) == 1


def test_a_session_that_idles_too_long_before_commit_is_replaced(
    counted: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process was frozen, and the server ends the session in the instant that COMMIT is sent."""
    pids = []

    def work(conn: Connection) -> None:
        increment(conn)
        pids.append(conn.info.backend_pid)
        if len(pids) == 1:
            conn.execute("set local idle_in_transaction_session_timeout = 50")
            wait_until(lambda: is_gone(counted, pids[0]))

    monkeypatch.setattr(transaction, "is_alive", lambda _: True)
    run_transaction(counted, work)
    assert (len(set(pids)), value(counted)) == (2, 1)


def is_gone(supplier: ConnectionSupplier, pid: int) -> bool:
    with supplier.connection() as conn:
        found = conn.execute("select from pg_stat_activity where pid = %s", [pid]).fetchall()
    return not found


def test_a_connection_that_always_dies_is_given_up(dsn: str, counted: ConnectionSupplier) -> None:
    def work(conn: Connection) -> None:
        increment(conn)
        terminate(dsn, conn.info.backend_pid)

    with pytest.raises(TooManyRetries):
        run_transaction(counted, work, attempts_max=2)
    assert value(counted) == 0


def test_a_deferred_check_that_fails_at_commit_is_no_unknown_outcome(counted: ConnectionSupplier) -> None:
    with counted.connection() as conn:
        conn.execute("create table once (id integer unique deferrable initially deferred)")

    def work(conn: Connection) -> None:
        conn.execute("insert into once values (1), (1)")

    with pytest.raises(psycopg.errors.UniqueViolation):
        run_transaction(counted, work)
    with counted.connection() as conn:
        assert conn.execute("select count(*) from once").fetchone() == (0,)


def at_commit(supplier: ConnectionSupplier, statement: str) -> None:
    """Makes every commit that changes the counters run a statement as its last action."""
    with supplier.connection() as conn:
        conn.execute(f"""
            create function at_commit() returns trigger language plpgsql as
            $$ begin {statement}; return null; end $$;
            create constraint trigger at_commit after update on counter
            deferrable initially deferred for each row execute function at_commit();""")


def test_a_serialization_failure_at_commit_is_tried_again(
    counted: ConnectionSupplier, retries: Retries
) -> None:
    at_commit(counted, "if nextval('luck') < 3 then raise exception using errcode = '40001'; end if")
    with counted.connection() as conn:
        conn.execute("create sequence luck")
    run_transaction(counted, increment)
    assert (value(counted), retries.count()) == (1, 2)


def test_a_death_during_commit_leaves_the_outcome_unknown(counted: ConnectionSupplier) -> None:
    at_commit(counted, "perform pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(CommitOutcomeUnknown, match="between COMMIT and its answer: whether add files"):
        run_transaction(counted, increment, operation="add files")
    assert value(counted) == 0


@contextmanager
def interrupted_asleep(dsn: str) -> Iterator[None]:
    """Sends SIGINT to this process once a backend of the database sleeps."""
    sleeping = "select exists (select from pg_stat_activity where wait_event = 'PgSleep' and datname = %s)"

    def interrupt() -> None:
        with psycopg.connect(dsn, autocommit=True) as conn:
            wait_until(lambda: conn.execute(sleeping, [conn.info.dbname]).fetchone() == (True,))
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    yield
    thread.join()


def test_ctrl_c_during_commit_is_not_taken_for_a_failed_commit(dsn: str, counted: ConnectionSupplier) -> None:
    at_commit(counted, "perform pg_sleep(20)")
    with interrupted_asleep(dsn), pytest.raises(KeyboardInterrupt):
        run_transaction(counted, increment)
    assert value(counted) == 0


@pytest.fixture
def cut_dsn(dsn: str) -> Iterator[str]:
    """Yields the DSN of a proxy before the database, which drops the answer to a COMMIT."""
    with closing(CuttingProxy(dsn, until(b"COMMIT\x00"))) as proxy:
        yield proxy.dsn


def test_a_commit_whose_answer_is_lost_is_applied_and_not_repeated(
    cut_dsn: str, counted: ConnectionSupplier
) -> None:
    runs = []

    def work(conn: Connection) -> None:
        runs.append(1)
        increment(conn)

    with closing(ConnectionSupplier(cut_dsn)) as supplier, pytest.raises(CommitOutcomeUnknown):
        run_transaction(supplier, work)
    assert (len(runs), value(counted)) == (1, 1)


def test_a_transaction_that_only_reads_has_no_unknown_outcome(cut_dsn: str) -> None:
    runs: list[int] = []
    with closing(ConnectionSupplier(cut_dsn)) as supplier, pytest.raises(TooManyRetries):
        run_transaction(supplier, lambda _: runs.append(1), read_only=True, attempts_max=2)
    assert len(runs) == 2


@pytest.mark.slow
def test_a_process_killed_in_its_transaction_leaves_nothing(dsn: str, counted: ConnectionSupplier) -> None:
    script = """
import sys, time
from dormouse.postgres import ConnectionSupplier, run_transaction
def work(conn):
    conn.execute("update counter set n = n + 1")
    print("updated", flush=True)
    time.sleep(60)
run_transaction(ConnectionSupplier(sys.argv[1]), work)
"""
    with subprocess.Popen([sys.executable, "-c", script, dsn], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"updated\n"
        process.kill()
    run_transaction(counted, increment)
    assert value(counted) == 1


def test_a_statement_whose_connection_was_dead_before_is_sent_on_another(
    dsn: str, counted: ConnectionSupplier
) -> None:
    with counted.connection() as conn:
        pid = conn.info.backend_pid
    terminate(dsn, pid)
    run_statement(counted, increment)
    assert value(counted) == 1


class Careless:
    """A fake supplier that lends connections without checking that they work."""

    def __init__(self, supplier: ConnectionSupplier, dsn: str) -> None:
        self._supplier = supplier
        self._dsn = dsn
        self.lent = 0

    @contextmanager
    def connection(self) -> Iterator[Connection]:
        with self._supplier.connection() as conn:
            self.lent += 1
            if self.lent == 1:
                terminate(self._dsn, conn.info.backend_pid)
            yield conn

    def close(self) -> None:
        """Does nothing, since the supplier belongs to another object."""


def test_a_statement_is_not_sent_on_a_connection_that_is_seen_to_be_dead(
    dsn: str, counted: ConnectionSupplier, retries: Retries
) -> None:
    supplier = Careless(counted, dsn)
    run_statement(supplier, increment)
    assert (supplier.lent, retries.count(), value(counted)) == (2, 1, 1)


def test_an_instance_is_opened_while_the_server_ends_its_sessions(
    dsn: str, counted: ConnectionSupplier
) -> None:
    """The server ends sessions, for example, when it recovers from a crash."""
    supplier = Careless(counted, dsn)
    assert (migrate(supplier), supplier.lent) == ([], 2)
    supplier = Careless(counted, dsn)
    assert (lacking(supplier), supplier.lent) == ([], 2)


def test_a_death_during_a_statement_leaves_the_outcome_unknown(
    counted: ConnectionSupplier, retries: Retries
) -> None:
    with pytest.raises(CommitOutcomeUnknown, match="between the statement and its answer: whether add files"):
        run_statement(
            counted,
            lambda conn: conn.execute("select pg_terminate_backend(pg_backend_pid()), pg_sleep(20)"),
            operation="add files",
        )
    assert retries.snapshot() == {"add files": {"retries": 0, "exhausted": 0, "unknown": 1}}


def test_a_statement_that_fails_as_it_commits_is_no_unknown_outcome(counted: ConnectionSupplier) -> None:
    at_commit(counted, "raise unique_violation")
    with pytest.raises(psycopg.errors.UniqueViolation):
        run_statement(counted, increment)
    assert value(counted) == 0


def test_a_death_while_a_statement_is_committed_leaves_the_outcome_unknown(
    counted: ConnectionSupplier,
) -> None:
    """The server has already sent that the statement is complete."""
    at_commit(counted, "perform pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(CommitOutcomeUnknown):
        run_statement(counted, increment)
    assert value(counted) == 0


def test_a_statement_whose_answer_is_lost_is_applied_and_not_repeated(
    dsn: str, counted: ConnectionSupplier
) -> None:
    proxy = CuttingProxy(dsn, until(b"UPDATE 1\x00"))
    runs = []

    def work(conn: Connection) -> None:
        runs.append(1)
        increment(conn)

    with (
        closing(proxy),
        closing(ConnectionSupplier(proxy.dsn)) as supplier,
        pytest.raises(CommitOutcomeUnknown),
    ):
        run_statement(supplier, work)
    assert (len(runs), value(counted)) == (1, 1)


def test_ctrl_c_during_a_statement_raises_keyboard_interrupt(dsn: str, counted: ConnectionSupplier) -> None:
    with interrupted_asleep(dsn), pytest.raises(KeyboardInterrupt):
        run_statement(counted, lambda conn: conn.execute("select pg_sleep(20)"))
    run_statement(counted, increment)
    assert value(counted) == 1
