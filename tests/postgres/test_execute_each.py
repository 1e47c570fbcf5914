"""Statements that are sent together. Each is its own transaction, regardless of their number and size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg import errors, sql
from psycopg.pq import TransactionStatus

from dormouse.postgres import ConnectionSupplier, queries
from dormouse.postgres.queries import Call, Statement, execute_each, execute_together
from tests.stored import query

ADD = Statement(sql.SQL("update counter set n = n + %(by)s::integer where id = %(id)s::integer"))
DIVIDE = Statement(sql.SQL("update counter set n = n / %(by)s::integer where id = %(id)s::integer"))


@pytest.fixture
def conn(counted: ConnectionSupplier) -> Iterator[psycopg.Connection[Any]]:
    with counted.connection() as conn:
        yield conn


def add(by: int, of: int = 1) -> Call:
    return ADD, {"by": by, "id": of}


def values(supplier: ConnectionSupplier) -> list[int]:
    return [n for (n,) in query(supplier, "select n from counter order by id")]


def prepared(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select count(*) from pg_prepared_statements where name like 'each%'").fetchone()
    return int(row[0]) if row else 0


def test_each_statement_is_committed_alone_and_a_failure_affects_no_other(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    found = execute_each(conn, [add(1), (DIVIDE, {"by": 0, "id": 1}), add(10), add(100, of=2), add(2**40)])
    assert [type(answer) for answer in found] == [
        list,
        errors.DivisionByZero,
        list,
        list,
        errors.NumericValueOutOfRange,
    ]
    assert values(counted) == [11, 100]
    assert execute_each(conn, []) == []
    assert conn.execute("select 1").fetchone() == (1,)


def test_statements_are_sent_without_waiting_for_answers(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    """The first statement waits for a lock, which is released only while the second statement is
    being made.
    """
    other = psycopg.connect(conn.info.dsn, options="-c search_path=dormouse")

    def calls() -> Iterator[Call]:
        other.execute("update counter set n = 5 where id = 1")
        yield add(1)
        other.rollback()
        yield add(2)

    with other:
        assert execute_each(conn, calls()) == [[], []]
    assert values(counted) == [3, 0]


def test_statements_and_answers_may_be_larger_than_a_buffer(
    conn: psycopg.Connection[Any],
) -> None:
    echo = Statement(sql.SQL("select %(text)s::text, 1 / %(one)s::integer"))
    calls = [(echo, {"text": "x" * 500_000, "one": n % 3}) for n in range(60)]
    found = execute_each(conn, calls)
    sizes = [0 if isinstance(answer, psycopg.Error) else len(answer[0][0]) for answer in found]
    assert sizes == [500_000 if n % 3 else 0 for n in range(60)]


def test_a_statement_is_prepared_once_and_the_oldest_is_forgotten(
    conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        assert execute_each(conn, [add(1), add(2)]) == [[], []]
    assert prepared(conn) == 1
    monkeypatch.setattr(queries, "PREPARED_MAX", 3)
    many = [Statement(sql.SQL("select {}, %(n)s::integer").format(n)) for n in range(5)]
    for _ in range(2):
        assert execute_each(conn, [(one, {"n": 1}) for one in many]) == [[(n, 1)] for n in range(5)]
        assert prepared(conn) == 3


def test_a_statement_that_failed_to_prepare_is_prepared_again(conn: psycopg.Connection[Any]) -> None:
    missing = Statement(sql.SQL("insert into later values (%(n)s::integer)"))
    (error, worked) = execute_each(conn, [(missing, {"n": 1}), add(1)])
    assert (type(error), worked) == (errors.UndefinedTable, [])
    conn.execute("create table later (n integer primary key)")
    assert execute_each(conn, [(missing, {"n": 1}), (missing, {"n": 2})]) == [[], []]
    (error,) = execute_each(conn, [(missing, {"n": 2})])
    assert type(error) is errors.UniqueViolation
    assert prepared(conn) == 2


def test_a_statement_whose_first_run_fails_is_prepared_once(conn: psycopg.Connection[Any]) -> None:
    again = Statement(sql.SQL("insert into counter values (%(n)s::integer, 0)"))
    for _ in range(3):
        assert [type(one) for one in execute_each(conn, [(again, {"n": 1})])] == [errors.UniqueViolation]
    assert prepared(conn) == 1


@pytest.mark.parametrize("ends", ["rollback", "drop table gone"])
def test_statements_that_psycopg_deallocated_are_prepared_again(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any], ends: str
) -> None:
    conn.execute("create table gone (n integer)")
    assert execute_each(conn, [add(1)]) == [[]]
    for _ in range(2):
        conn.execute("select %s::integer", [1], prepare=True)
        conn.execute("begin")
        conn.execute(ends)
        conn.execute("commit")
        conn.execute("select 1")
        assert prepared(conn) == 0
        assert execute_each(conn, [add(1), (DIVIDE, {"by": 0, "id": 1}), add(1)])[::2] == [[], []]
        conn.execute("create table if not exists gone (n integer)")
    assert values(counted) == [5, 0]


def test_through_a_pooler_nothing_is_prepared(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    conn.prepare_threshold = None
    assert execute_each(conn, [add(1), add(2)]) == [[], []]
    assert (prepared(conn), values(counted)) == (0, [3, 0])


def test_outcomes_are_unknown_when_the_connection_dies(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    def calls() -> Iterator[Call]:
        yield add(1)
        query(counted, "select pg_terminate_backend(%s)", conn.info.backend_pid)
        yield from [add(2)] * 1_000

    with pytest.raises(psycopg.OperationalError):
        execute_each(conn, calls())
    assert conn.closed


def test_an_interrupted_call_leaves_no_answers_to_later_calls(conn: psycopg.Connection[Any]) -> None:
    def calls() -> Iterator[Call]:
        yield add(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        execute_each(conn, calls())
    assert conn.closed


NUMBERS = Statement(sql.SQL("select id, n / %(by)s::integer, null::text from counter order by id"))


def test_the_rows_of_one_statement_are_fetched_as_by_a_cursor(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "PREPARED_MAX", 2)
    execute_each(conn, [add(40)])
    expected = [(1, 10, None), (2, 0, None)]
    for _ in range(3):
        assert NUMBERS.fetch(conn, {"by": 4}) == expected
    with pytest.raises(errors.DivisionByZero):
        NUMBERS.fetch(conn, {"by": 0})
    conn.execute("deallocate all")
    assert NUMBERS.fetch(conn, {"by": 4}) == expected
    with conn.transaction():
        assert NUMBERS.fetch(conn, {"by": 4}) == expected
    for number in range(4):  # older ones make room
        other = Statement(sql.SQL(f"select {number} + %(by)s::integer"))
        assert other.fetch(conn, {"by": 4}) == [(number + 4,)]
    assert prepared(conn) == 2
    with pytest.raises(errors.UndefinedTable):
        Statement(sql.SQL("select * from no_such_table where %(by)s::integer = 1")).fetch(conn, {"by": 4})
    assert NUMBERS.fetch(conn, {"by": 4}) == expected
    monkeypatch.setattr(conn, "prepare_threshold", None)  # as behind a pooler
    assert NUMBERS.fetch(conn, {"by": 4}) == expected


def test_a_fetch_on_a_dead_connection_raises(conn: psycopg.Connection[Any]) -> None:
    assert NUMBERS.fetch(conn, {"by": 1})
    conn.pgconn.finish()
    with pytest.raises(psycopg.OperationalError):
        NUMBERS.fetch(conn, {"by": 1})


def test_statements_of_one_transaction_are_applied_all_or_none(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    assert execute_together(conn, [add(1), add(100, of=2)]) is None
    assert values(counted) == [1, 100]
    error = execute_together(conn, [add(1), (DIVIDE, {"by": 0, "id": 1}), add(1)])
    assert isinstance(error, errors.DivisionByZero)
    assert values(counted) == [1, 100]
    assert conn.info.transaction_status == TransactionStatus.IDLE


@pytest.mark.parametrize("lost", ["deallocate all", "begin; deallocate all; rollback"])
def test_a_transaction_is_whole_after_its_prepared_statements_are_lost(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any], lost: str
) -> None:
    for _ in range(2):
        assert execute_together(conn, [add(1), add(1, of=2)]) is None
    conn.execute(lost, prepare=False)
    assert execute_together(conn, [add(1), add(1, of=2)]) is None
    assert values(counted) == [3, 3]
    conn.execute(lost, prepare=False)
    assert isinstance(execute_together(conn, [add(1), (DIVIDE, {"by": 0, "id": 1})]), errors.DivisionByZero)
    assert values(counted) == [3, 3]
    assert conn.info.transaction_status == TransactionStatus.IDLE


def test_the_server_skips_what_follows_an_error_and_the_prepared_statements_stay(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    assert execute_together(conn, [add(1)]) is None
    later = Statement(sql.SQL("update counter set n = %(n)s::integer where id = 2"))
    for _ in range(2):
        error = execute_together(conn, [(DIVIDE, {"by": 0, "id": 1}), (later, {"n": 7})])
        assert isinstance(error, errors.DivisionByZero)
        assert prepared(conn) == len(["begin", "add", "commit", "divide"])
    assert execute_together(conn, [(later, {"n": 8}), add(1)]) is None
    assert (prepared(conn), values(counted)) == (5, [2, 8])
    conn.execute("deallocate all")
    assert isinstance(execute_together(conn, [(DIVIDE, {"by": 0, "id": 1})]), errors.DivisionByZero)
    assert conn.info.transaction_status == TransactionStatus.IDLE


def test_reads_keep_their_order_when_a_prepared_statement_is_lost(conn: psycopg.Connection[Any]) -> None:
    first, second = (
        Statement(sql.SQL(f"select clock_timestamp(), {n} where %(yes)s::boolean")) for n in (1, 2)
    )
    execute_each(conn, [(first, {"yes": True})])
    conn.execute("deallocate all")
    found = execute_each(conn, [(first, {"yes": True}), (second, {"yes": True})], repeats_reads=True)
    [[(before, _)], [(after, _)]] = found
    assert before <= after


def test_a_statement_that_is_prepared_anew_before_an_older_loss_is_known(
    counted: ConnectionSupplier, conn: psycopg.Connection[Any]
) -> None:
    sleep = Statement(sql.SQL("select pg_sleep(%(seconds)s::float8)"))
    for _ in range(2):
        execute_each(conn, [add(1), (sleep, {"seconds": 0})])

    def groups() -> Iterator[list[Call]]:
        yield [(sleep, {"seconds": 0.2}), add(1)]
        yield [(sleep, {"seconds": 0.5}), add(1)]
        time.sleep(0.35)  # the first answer is there, and the second is not
        yield [add(1)]

    held = queries._prepared[conn].names
    lost = next(name for key, name in held.items() if key[0].startswith(b"update"))
    conn.execute(b"deallocate " + lost)
    found = queries._answers(conn, groups())
    assert [isinstance(one, errors.InvalidSqlStatementName) for one in found] == [True, True, False]
    assert values(counted) == [3, 0]
    assert execute_each(conn, [add(1)]) == [[]]


def test_texts_are_right_in_any_encoding_of_the_client(dsn: str) -> None:
    echo = Statement(sql.SQL("select %(text)s::text, length(%(text)s)"))
    with psycopg.connect(dsn, autocommit=True, client_encoding="latin1") as conn:
        for text in ("é", "a"):
            assert echo.fetch(conn, {"text": text}) == [(text, 1)]
            assert execute_each(conn, [(echo, {"text": text})]) == [[(text, 1)]]
