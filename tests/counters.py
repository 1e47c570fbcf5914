"""Helpers for tests that update the counters of the fixture `counted`."""

from __future__ import annotations

import psycopg

from dormouse.postgres import ConnectionSupplier

Connection = psycopg.Connection


def increment(conn: Connection, counter: int = 1) -> None:
    conn.execute("update counter set n = n + 1 where id = %s", [counter])


def value(supplier: ConnectionSupplier, counter: int = 1) -> int:
    with supplier.connection() as conn:
        row = conn.execute("select n from counter where id = %s", [counter]).fetchone()
    assert row is not None
    return int(row[0])
