"""Where a table's own PostgreSQL tables are: their users follow when the layout is converted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg
from psycopg import sql

from dormouse.errors import TableNotFound
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Query, Statement, load
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.state.files.layout import Layout, composed, layout

T = TypeVar("T")
LOOKUPS_MAX = 20

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "own_tables")


class OwnTables:
    """The own PostgreSQL tables of one table, as its layout names them. Safe to share between threads."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._state = (table, layout(table.layout))
        self._outdated = False

    @property
    def table(self) -> TableRecord:
        """The table, with the layout that it has as far as is known here."""
        return self._state[0]

    @property
    def layout(self) -> Layout:
        return self._state[1]

    def on(self, query: str | Query) -> sql.Composed:
        """A statement of the layout, by its name, or another query with its parts, on the own tables."""
        table, known = self._state
        if isinstance(query, Query):
            return composed(query.including(**known.parts), known.names(table.table_id))
        return known.on(query, table.table_id)

    def statement(self, name: str) -> Statement:
        """As `on`, for what runs often."""
        table, known = self._state
        return known.statement(name, table.table_id)

    def following(self, work: Callable[[], T], conn: psycopg.Connection[Any] | None = None) -> T:
        """Does the work, again when the layout was converted meanwhile; `TableNotFound` when it is gone.

        With `conn`, of the caller's transaction, that is tried again: `SerializationFailure` tells so.
        """
        if conn is not None:
            return self._following_within(conn, work)
        with dropped_tables(self.table):
            for _ in range(LOOKUPS_MAX):
                try:
                    return work()
                except pg.UndefinedTable:
                    # outside the transaction that failed: its connection is back
                    with self._supplier.connection() as other:
                        self._look_up(other)
            return work()

    def run(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        *,
        operation: str,
        isolation: Isolation = Isolation.READ_COMMITTED,
        read_only: bool = False,
        scans: bool = False,
    ) -> T:
        """As `run_transaction`; again when the layout was converted meanwhile."""

        def once() -> T:
            return run_transaction(
                self._supplier,
                work,
                isolation=isolation,
                read_only=read_only,
                scans=scans,
                operation=operation,
            )

        return self.following(once)

    def rows(
        self,
        query: str | Query,
        values: Mapping[str, Any] | None = None,
        *,
        operation: str,
        scans: bool = False,
    ) -> list[Any]:
        """What one statement, as of `on`, gives; its values have `table_id` too."""
        key = {**(values or {}), "table_id": self.table.table_id}

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            return rows_of(self.on(query), key)(conn)  # composed at each try: the names may be others

        return self.run(work, operation=operation, scans=scans)

    def looked_up(self, query: str | Query, values: Mapping[str, Any], *, operation: str) -> list[Any]:
        """As `rows`, of a query that only looks rows up: in one round trip."""
        key = {**values, "table_id": self.table.table_id}

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            return rows_of(self.on(query), key)(conn)

        return self.following(lambda: run_lookup(self._supplier, work, operation=operation))

    def still(self, conn: psycopg.Connection[Any]) -> None:
        """At the begin of a transaction: its snapshots see all of the layout's tables and of the log.

        None is converted, or dropped, until it ends.
        """
        tables = self.layout.tables(self.table.table_id).values()
        names = sql.SQL(", ").join(map(sql.Identifier, tables))
        # a day of the log is dropped only by who locks all of it
        conn.execute(sql.SQL("lock table only removal, {} in access share mode").format(names))

    def _following_within(self, conn: psycopg.Connection[Any], work: Callable[[], T]) -> T:
        with dropped_tables(self.table):
            if self._outdated:
                self._look_up(conn)
                self._outdated = False
            try:
                return work()
            except pg.UndefinedTable as error:
                # the transaction is over: the layout is looked up when it is tried again
                self._outdated = True
                raise pg.SerializationFailure(
                    f"table {self.table.name!r} was dropped, or its layout was converted meanwhile"
                ) from error

    def _look_up(self, conn: psycopg.Connection[Any]) -> None:
        table = self.table
        row = conn.execute(_QUERIES["layout"].on(), {"table_id": table.table_id}).fetchone()
        if row is None:
            raise TableNotFound.gone(table.name)
        if row[0] != table.layout:
            logger.info("table %s: its layout is %s now, no longer %s", table.name, row[0], table.layout)
            self._state = (replace(table, layout=row[0]), layout(row[0]))


@contextmanager
def dropped_tables(table: TableRecord) -> Iterator[None]:
    """Says that the table is gone, when its PostgreSQL tables are."""
    try:
        yield
    except (pg.UndefinedTable, pg.ForeignKeyViolation):
        raise TableNotFound.gone(table.name) from None
