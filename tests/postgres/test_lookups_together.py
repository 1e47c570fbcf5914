"""Statements that only read and are sent together: one snapshot, or no answer."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from counters import increment
from psycopg import sql
from psycopg.pq import TransactionStatus

from dormouse.postgres import ConnectionSupplier, run_lookups
from dormouse.postgres.queries import Call, Statement

VALUE = Statement(sql.SQL("select n, pg_current_snapshot()::text from counter where id = %(id)s::integer"))
SETTINGS = Statement(
    sql.SQL("select current_setting('transaction_isolation'), current_setting('transaction_read_only')")
)
FAILING = Statement(sql.SQL("select 1 / %(id)s::integer"))
ENDING = Statement(sql.SQL("select pg_terminate_backend(pg_backend_pid()), %(id)s::integer"))
CHANGING = Statement(sql.SQL("update counter set n = 7 where id = %(id)s::integer"))


def looks(number: int) -> list[Call]:
    return [(VALUE, {"id": 1})] * number


def test_statements_that_are_sent_together_only_read_and_see_one_snapshot(
    counted: ConnectionSupplier,
) -> None:
    stop = threading.Event()

    def change() -> None:
        while not stop.is_set():
            with counted.connection() as conn:
                increment(conn)

    changing = threading.Thread(target=change)
    changing.start()
    try:
        for _ in range(50):
            found = run_lookups(counted, looks(20))
            assert found is not None
            assert len({row for [row] in found}) == 1
    finally:
        stop.set()
        changing.join()
    assert run_lookups(counted, [(SETTINGS, {})]) == [[("repeatable read", "on")]]


@pytest.mark.parametrize("bad", [FAILING, ENDING, CHANGING])
def test_one_failure_leaves_no_answer_and_a_connection_that_works(
    counted: ConnectionSupplier, bad: Statement, caplog: pytest.LogCaptureFixture
) -> None:
    for before, after in ((0, 1), (1, 0), (2, 2)):
        calls = [*looks(before), (bad, {"id": 0}), *looks(after)]
        with counted.connection() as conn:
            process = conn.info.backend_pid
        assert run_lookups(counted, calls) is None
        with counted.connection() as conn:
            assert (conn.info.backend_pid == process) is (bad is not ENDING)
            assert conn.pgconn.transaction_status == TransactionStatus.IDLE
            assert conn.execute("select n from counter where id = 1").fetchone() == (0,)
        assert not caplog.records
        found = run_lookups(counted, looks(2))
        assert [[row[0] for row in rows] for rows in found or ()] == [[0], [0]]


def test_statements_are_prepared_again_after_the_server_forgot_them(counted: ConnectionSupplier) -> None:
    def forget(conn: psycopg.Connection[Any]) -> None:
        conn.execute("drop table if exists nothing")  # psycopg then deallocates all statements

    for _ in range(3):
        assert [len(rows) for rows in run_lookups(counted, looks(2)) or ()] == [1, 1]
        with counted.connection() as conn:
            forget(conn)
