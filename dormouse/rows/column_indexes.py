"""The indexes of single columns of a build: made beside readers and changes, and dropped without use.

Each is on (column, row id), which also gives the order of the rows by the column.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Collection
from contextlib import closing
from typing import Any

import psycopg

from dormouse.postgres.connection import ConnectionSupplier
from dormouse.postgres.limits import LONG
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_alone, run_lookup, run_statement, run_transaction
from dormouse.rows.emit import column_name

INDEXED_BYTES_MAX = 2_600
"""PostgreSQL refuses an entry of more than 2,704 bytes, with the row's id, that it cannot compress."""

SLOW_QUERIES = 3
"""After so many slow queries, a column that they look for rows in gets an index.

A query that is asked once is not worth an index, which each change of the rows pays for.
"""

_ENDED = (psycopg.errors.QueryCanceled, psycopg.errors.LockNotAvailable)
_QUERIES = load(__package__ or "", "column_indexes")

logger = logging.getLogger(__name__)


class SlowColumns:
    """The columns that slow queries of this process looked for rows in. Threads may share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[int, int]] = Counter()

    def wanted(self, table_id: int, column_ids: Collection[int]) -> list[int]:
        """Counts one slow query of these columns; returns those of them that are to get an index now."""
        keys = [(table_id, one) for one in column_ids]
        with self._lock:
            self._counts.update(keys)
            wanted = [key for key in keys if self._counts[key] >= SLOW_QUERIES]
            for key in wanted:
                del self._counts[key]
        return [column_id for _, column_id in wanted]


class ColumnIndexes:
    """The column indexes of the builds of one database. Threads may share it."""

    def __init__(self, supplier: ConnectionSupplier) -> None:
        self._supplier = supplier

    def add(self, build_id: int, column_id: int) -> None:
        """Gives a column an index, unless a text of it is too long for one.

        Queries and changes go on meanwhile. A change of columns ends it: the column then has no index.
        """
        name, values = index_name(build_id, column_id), _values(build_id, column_id)
        found = run_lookup(
            self._supplier, rows_of(_QUERIES["state"], values), operation="look at an index of a column"
        )
        if not found:
            return
        is_there, is_valid, is_made = found[0]
        if is_made and not is_valid:
            return  # by another process
        is_needed = run_transaction(
            self._supplier,
            lambda conn: fits(conn, build_id, column_id),
            read_only=True,
            scans=True,
            operation="look at the texts of a column",
        )
        if is_needed and not is_valid:
            made = self._create(build_id, column_id, name if is_there else None)
            if made is None:
                return
            is_needed = made
        mark = rows_of(_QUERIES["mark"], {**values, "is_needed": is_needed})
        run_statement(self._supplier, mark, operation="record an index of a column")

    def cancel(self, build_id: int) -> None:
        """Ends the work on column indexes of a build, whose tables are about to be changed."""
        cancel = rows_of(_QUERIES["cancel"], {"current": f"current_{build_id}"})
        run_lookup(self._supplier, cancel, operation="stop indexing columns of rows")

    def drop_texts(self, build_id: int) -> None:
        """Drops the indexes of columns of text for good: a text came that is too long for one."""

        def work(conn: psycopg.Connection[Any]) -> None:
            values = {"current": f"current_{build_id}"}
            for (name,) in conn.execute(_QUERIES["of_texts"].on(), values).fetchall():
                conn.execute(f"drop index if exists {name}")

        self.cancel(build_id)
        run_alone(self._supplier, work, operation="drop an index of a column of rows")

    def drop_unused(self, build_id: int, unused_seconds: float) -> None:
        """Drops the indexes that no statement used for so long."""
        values = {"build_id": build_id, "unused_seconds": unused_seconds}
        run_statement(self._supplier, rows_of(_QUERIES["note_use"], values), operation="note uses of indexes")
        unused = run_statement(
            self._supplier, rows_of(_QUERIES["forget_unused"], values), operation="forget unused indexes"
        )
        for (column_id,) in unused:
            logger.info("an index of column %d in build %d was not used, and is dropped", column_id, build_id)
            self._run(f"drop index concurrently if exists {index_name(build_id, column_id)}")

    def _create(self, build_id: int, column_id: int, left_over: str | None) -> bool | None:
        """Returns whether the index was made; False: a text is too long for it; None: it was ended."""
        name = index_name(build_id, column_id)
        try:
            if left_over is not None:
                self._run(f"drop index concurrently if exists {left_over}")
            self._run(f"create index concurrently if not exists {name} {_on(build_id, column_id)}")
            self._run(f"analyze current_{build_id}")
        except psycopg.errors.ProgramLimitExceeded:
            self._run(f"drop index concurrently if exists {name}")
            return False
        except _ENDED as error:
            logger.info("an index of column %d in build %d was not made: %s", column_id, build_id, error)
            return None
        return True

    def _run(self, statement: str) -> None:
        """Executes a statement that no transaction may hold, and that may take long."""
        with closing(self._supplier.limited(**LONG)) as patient:
            run_statement(
                patient,
                lambda conn: conn.execute(statement.encode(), prepare=False),
                operation="index a column of rows",
            )


def index_name(build_id: int, column_id: int) -> str:
    """Returns the name of the index of a column."""
    return f"current_{build_id:d}_{column_name(column_id)}"


def create_all(conn: psycopg.Connection[Any], build_id: int, column_ids: Collection[int]) -> list[int]:
    """Gives columns an index each, within the transaction that makes their build; returns `column_ids`."""
    for one in column_ids:
        if fits(conn, build_id, one):
            conn.execute(f"create index {index_name(build_id, one)} {_on(build_id, one)}".encode())
    return list(column_ids)


def fits(conn: psycopg.Connection[Any], build_id: int, column_id: int) -> bool:
    """Returns whether all values of a column are short enough for an index."""
    text = f"select max(octet_length({column_name(column_id)}::text)) from current_{build_id:d}"
    ((size,),) = conn.execute(text.encode()).fetchall()
    return (size or 0) <= INDEXED_BYTES_MAX


def _on(build_id: int, column_id: int) -> str:
    return f"on current_{build_id:d} ({column_name(column_id)}, row_id)"


def _values(build_id: int, column_id: int) -> dict[str, Any]:
    return {
        "build_id": build_id,
        "column_id": column_id,
        "current": f"current_{build_id:d}",
        "index": index_name(build_id, column_id),
    }
