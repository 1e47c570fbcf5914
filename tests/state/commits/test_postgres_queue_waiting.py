"""Waiting receivers of the queue in PostgreSQL are notified; senders do not notify if no receiver waits."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest
from queues import WAIT_SECONDS, bodies, receiver

from dormouse.errors import CommitQueueError
from dormouse.postgres import ConnectionSupplier
from dormouse.state.commits import postgres_queue as module
from tests.stored import query, wait_until
from tests.support.commits import PostgresQueue


def in_background(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(work())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def waiters(lender: ConnectionSupplier, number: int) -> int:
    return int(query(lender, "select count(*) from commit_waiter where queue = %s", number)[0][0])


@pytest.mark.slow
def test_a_waiting_receiver_is_notified(
    queue: PostgresQueue,
    lender: ConnectionSupplier,
    dsn_of_all: str,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message of another process wakes the receiver without polling."""
    monkeypatch.setattr(module, "POLL_SECONDS", WAIT_SECONDS)
    thread, outcome = in_background(lambda: bodies(queue.receive(10, 50)))
    # the receiver must already wait, and not only be registered
    asleep = """select count(*) from pg_stat_activity
                where state = 'idle' and query like '%%commit_message%%' and query like '%%skip locked%%'
                    and datname = current_database()"""
    wait_until(lambda: waiters(lender, number) == 1 and query(lender, asleep)[0][0], WAIT_SECONDS)
    with receiver(dsn_of_all, "queue.send(['a'])", number, 1) as process:
        assert process.wait(WAIT_SECONDS) == 0
    wait_until(lambda: outcome, 30)  # without a notification it would look again only after 50 s
    thread.join(WAIT_SECONDS)
    assert outcome == [["a"]]
    assert waiters(lender, number) == 0


def test_a_receiver_that_missed_the_notification_polls(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    thread, outcome = in_background(lambda: bodies(queue.receive(10, 50)))
    wait_until(lambda: waiters(lender, number) == 1, WAIT_SECONDS)
    text = "insert into commit_message (queue, commit_key, body) values (%s, gen_random_uuid(), 'a')"
    query(lender, text, number)
    thread.join(WAIT_SECONDS)
    assert outcome == [["a"]]


def test_senders_do_not_notify_without_waiting_receivers(dsn_of_all: str, queue: PostgresQueue) -> None:
    """Notifications make all commits of the database wait for each other."""
    with psycopg.connect(dsn_of_all, autocommit=True) as conn:
        conn.execute(f"listen {queue._channel}")
        queue.send(["a"])
        conn.execute("select 1")
        assert list(conn.notifies(timeout=0)) == []


def test_a_wait_without_messages_leaves_nothing_behind(dsn_of_all: str, number: int) -> None:
    supplier = ConnectionSupplier(dsn_of_all, connections_max=1)
    queue = PostgresQueue(supplier, number)
    try:
        assert queue.receive(10, 0.05) == []
        assert query(supplier, "select pg_listening_channels()") == []
        assert waiters(supplier, number) == 0
    finally:
        supplier.close()


def test_waiting_receivers_that_died_are_forgotten(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    text = """insert into commit_waiter
              values (%s, gen_random_uuid(), clock_timestamp() - interval '1 hour'),
                     (%s, gen_random_uuid(), clock_timestamp() + interval '1 year')"""
    query(lender, text, number, number)
    queue.receive(1, 0.01)
    assert waiters(lender, number) == 0


def test_a_lost_connection_of_a_waiting_receiver_is_an_error_and_the_next_call_works(
    dsn_of_all: str, lender: ConnectionSupplier, number: int
) -> None:
    supplier = ConnectionSupplier(dsn_of_all, application_name=f"waiter {number}")
    queue = PostgresQueue(supplier, number)
    try:
        thread, outcome = in_background(lambda: queue.receive(10, 50))
        wait_until(lambda: waiters(lender, number) == 1, WAIT_SECONDS)
        kill = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = %s"
        query(lender, kill, f"waiter {number}")
        thread.join(WAIT_SECONDS)
        assert [type(error) for error in outcome] == [CommitQueueError]
        queue.send(["a"])
        assert bodies(queue.receive(10, WAIT_SECONDS)) == ["a"]
    finally:
        supplier.close()
