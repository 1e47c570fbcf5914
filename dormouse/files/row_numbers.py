"""Running numbers of a table's rows: one load gives them at a time, so that none is given twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg

from dormouse.errors import CommitFailed, TableBusy
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.postgres.queries import load
from dormouse.postgres.session_lock import SessionLock
from dormouse.postgres.transaction import fetched, rows_of, run_statement

WAIT_SECONDS_MAX = 600.0
_AGAIN_SECONDS = 0.2

_QUERIES = load(__package__ or "", "row_numbers")


class Numbering:
    """The right to give rows of a table running numbers. It ends with a session of the database."""

    def __init__(self, lock: SessionLock, table: TableRecord) -> None:
        self._lock = lock
        self._table = table

    def check(self, conn: psycopg.Connection[Any]) -> None:
        """Checks, in the transaction that adds the rows, that the right was not lost since they got numbers.

        A load that gets the right later waits until that transaction has ended, and sees its numbers. Raises
        `CommitFailed` when the session was lost: another load may have given the same numbers.
        """
        values = {"table_id": self._table.table_id}
        conn.execute(_QUERIES["begin_commit"].on(), values)
        is_alone = self._lock.session is not None and fetched(
            conn.execute(_QUERIES["is_alone"].on(), {**values, **self._lock.session})
        ) == [(True,)]
        if not is_alone:
            raise CommitFailed(
                f"table {self._table.name!r}: the database was lost, or this process was frozen, while rows "
                "got running numbers, which another load may have given meanwhile; nothing was added: run it "
                "again"
            )


@contextmanager
def numbering(supplier: ConnectionSupplier, table: TableRecord) -> Iterator[Numbering]:
    """Waits for the load that numbers rows of the table, and keeps other loads waiting until the end.

    The load calls `check` as it commits. Raises `TableBusy` when the wait takes too long.
    """
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    values = {"table_id": table.table_id}
    # loads that wait take no session from the load that they wait for
    with closing(supplier.limited()) as apart:
        lock = SessionLock(apart, _QUERIES["number_alone"], values)
        try:
            while not lock.take():
                if time.monotonic() > deadline:
                    raise TableBusy(
                        f"table {table.name!r}: another load gives its rows running numbers for more than "
                        f"{WAIT_SECONDS_MAX:g} s; nothing was added, try again later",
                        table=table.name,
                    )
                time.sleep(_AGAIN_SECONDS)
            run_statement(supplier, rows_of(_QUERIES["await_commit"], values), operation="number rows")
            yield Numbering(lock, table)
        finally:
            lock.release()
