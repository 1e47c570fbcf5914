"""The deletions of one table: each is one row, whatever it deletes, and has its place among the files.

A deletion and what adds references come one after the other: it keeps the others out for the moment in which
it is recorded. So each file was there before it, and its rows are deleted, or came after it, and they stay.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg

from dormouse.errors import InvalidQuery, TableNotFound
from dormouse.files.reads import KeyBounds
from dormouse.files.store import FileReferenceStore
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_alone

_QUERIES = load(__package__ or "", "deletions")


@dataclass(frozen=True, slots=True)
class RecordedDeletion:
    """A deletion; `condition` is what its `where` said, as JSON. `pending`: readers apply it."""

    deletion_id: int
    condition: str
    by_values: bool
    deleted_at: datetime
    pending: bool


class Deletions:
    """The deletions of one table."""

    def __init__(self, store: FileReferenceStore) -> None:
        self._store = store
        self._own = store.own

    def record(self, condition: str, bounds: KeyBounds, *, by_values: bool) -> tuple[int, datetime]:
        """Deletes what is there and matches; gives its number, and when it was.

        `by_values`: whether it names columns that are no keys. Waits for a moment in which no transaction
        adds references. Raises `InvalidQuery` for one by values where rows of equal key are merged,
        `TableNotFound`, `TableBusy`.
        """
        name, key = self._own.table.name, {"table_id": self._own.table.table_id}
        values = {**key, **bounds.arrays(), "condition": condition, "by_values": by_values}

        def work(conn: psycopg.Connection[Any]) -> tuple[int, datetime]:
            is_merged = conn.execute(_QUERIES["aggregates"].on(), key).fetchall() == [(True,)]
            self._store.keep_writers_out(conn)
            if is_merged and by_values:
                raise InvalidQuery(
                    f"rows of equal key of table {name!r} are merged, so that a value is not that of a row: "
                    "delete by row keys and sort keys"
                )
            rows = conn.execute(_QUERIES["record"].on(), values).fetchall()
            if not rows:
                raise TableNotFound(f"table {name!r} does not exist any more")
            return rows[0]

        return self._own.following(
            lambda: run_alone(self._store.supplier, work, operation=f"delete from table {name!r}")
        )

    def list(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """By number."""
        rows = self._own.rows(_QUERIES["list"], {"all": not pending_only}, operation="list deletions")
        return [RecordedDeletion(*row) for row in rows]

    def count_pending(self) -> int:
        return int(self._own.rows(_QUERIES["count_pending"], operation="count deletions")[0][0])
