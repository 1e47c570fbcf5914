"""What the database knows of one row table: versions, columns, ranges of rows, changes, snapshots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any
from uuid import UUID

import psycopg
from psycopg.types.json import Jsonb

from dormouse.errors import CommitIdReused, RowLockLost, SnapshotExists, SnapshotNotFound, TableNotFound
from dormouse.model.keyed import check_keyed
from dormouse.model.properties import ROW_DELETED, ROW_ID, ROW_VERSION, TableProperties
from dormouse.model.schema import Schema
from dormouse.model.table import TableRecord
from dormouse.model.text import check_printed
from dormouse.model.types import BOOLEAN, LONG, Field
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import booleans, integers, load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.rows.columns import Column, check_columns, check_new, from_jsonb, to_jsonb
from dormouse.state.catalog import Catalog

if TYPE_CHECKING:  # a client has no numpy
    from dormouse.rows.ranges import Ints, Ranges

RANGES_AT_ONCE = 50_000
NAME_BYTES_MAX = 200
HISTORY_PAGE = 1_000
_KEYS = (Field(ROW_ID, LONG), Field(ROW_VERSION, LONG), Field(ROW_DELETED, BOOLEAN))
_QUERIES = load(__package__ or "", "store")


@dataclass(frozen=True, slots=True)
class TableState:
    """A row table at one moment: its newest version, 0 when it is empty; its columns, since a version."""

    version: int
    next_id: int
    changed_at: datetime
    columns_since: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class RowChange:
    """One change, as the history has it."""

    first_version: int
    last_version: int
    changed_at: datetime
    changed_by: str
    inserted: int
    updated: int
    deleted: int
    columns_changed: Sequence[str]


@dataclass(frozen=True, slots=True)
class RowSnapshot:
    """A name for a version of a table."""

    name: str
    version: int
    taken_at: datetime


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a change did, as it is recorded with it."""

    first_version: int
    last_version: int
    first_id: int
    inserted: int
    updated: int
    deleted: int
    unchanged: int


def create(conn: psycopg.Connection[Any], table: TableRecord, columns: Sequence[Column]) -> None:
    """Part of making a table: its rows are edited. The columns have their ids."""
    values = {"table_id": table.table_id, "columns": _json(columns)}
    conn.execute(_QUERIES["create"].on(), values)


def create_table(
    catalog: Catalog, name: str, columns: Sequence[Column], properties: TableProperties | None
) -> TableRecord:
    """Makes a table whose rows are edited. Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`."""
    listed = [
        replace(check_new(column), column_id=n)
        for n, column in enumerate(check_columns(columns), len(_KEYS) + 1)
    ]
    schema = Schema(
        _KEYS[:1], _KEYS[1:2], [_KEYS[2], *(Field(c.name, c.stored, nullable=True) for c in listed)]
    )
    given = (properties or TableProperties()).model_dump(exclude_defaults=True)
    edited = TableProperties(**{**given, "rows": "edited"})
    check_keyed(schema, edited)
    return catalog.create(name, schema, edited, with_it=partial(create, columns=listed))


class RowStore:
    """The database's part of one row table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self.supplier = supplier
        self.table = table
        self._key = {"table_id": table.table_id}

    def state(self) -> TableState:
        """`TableNotFound` when it was dropped."""
        rows = self._rows("state")
        if not rows:
            raise TableNotFound.gone(self.table.name)
        version, next_id, changed_at, columns_since, columns = rows[0]
        return TableState(version, next_id, changed_at, columns_since, _columns(columns))

    def columns_at(self, version: int) -> tuple[Column, ...]:
        """The columns as of a version."""
        rows = self._rows("columns", version=version)
        if not rows:
            raise TableNotFound.gone(self.table.name)
        return _columns(rows[0][0])

    def ranges(self, spans: Sequence[tuple[int, int]]) -> Ranges:
        """The ranges that rows of the spans lie in, by their ids."""
        from dormouse.rows.ranges import Ranges

        firsts, lasts = zip(*spans, strict=True) if spans else ((), ())
        rows = self._rows("ranges", firsts=integers(firsts), lasts=integers(lasts))
        return Ranges.of(sorted(set(rows)))

    def changed_ranges(self, after: int) -> Ints:
        """First and last ids of the rows whose version is newer than one: two columns."""
        import numpy as np

        rows = self._rows("changed_ranges", after=after)
        return np.array(rows, np.int64).reshape(-1, 2)

    def fence(self, conn: psycopg.Connection[Any], token: UUID) -> None:
        """First in the transaction of a commit: gives the lock back in it. `RowLockLost`."""
        if not conn.execute(_QUERIES["fence"].on(), {**self._key, "token": token}).fetchall():
            raise self._lock_lost()

    def _lock_lost(self) -> RowLockLost:
        return RowLockLost(
            f"table {self.table.name!r}: the lock was given to another worker while this one wrote; "
            "nothing was changed: try again",
            table=self.table.name,
        )

    def replace_ranges(self, conn: psycopg.Connection[Any], gone: Ranges, come: Ranges) -> None:
        """Part of a commit."""
        for start in range(0, len(gone.first), RANGES_AT_ONCE):
            firsts = gone.first[start : start + RANGES_AT_ONCE].tolist()
            conn.execute(_QUERIES["remove_ranges"].on(), {**self._key, "firsts": integers(firsts)})
        for start in range(0, len(come.first), RANGES_AT_ONCE):
            first, last, version, deleted = (
                column[start : start + RANGES_AT_ONCE].tolist() for column in come
            )
            values = {
                "firsts": integers(first),
                "lasts": integers(last),
                "versions": integers(version),
                "deleted": booleans(deleted),
            }
            conn.execute(_QUERIES["add_ranges"].on(), {**self._key, **values})

    def record(
        self,
        conn: psycopg.Connection[Any],
        done: Recorded,
        *,
        next_id: int,
        changed_by: str,
        change_id: str | None,
        digest: bytes | None,
        columns_changed: Sequence[str],
        columns: Sequence[tuple[int, Sequence[Column]]],
    ) -> None:
        """Part of a commit; `columns` are those that there are from some versions on."""
        values = {
            **{name: getattr(done, name) for name in Recorded.__slots__},
            "next_id": next_id,
            "changed_by": changed_by,
            "change_id": change_id,
            "digest": _uuid(digest),
            "columns_changed": list(columns_changed),
        }
        conn.execute(_QUERIES["record"].on(), {**self._key, **values})
        for version, some in columns:
            values = {"version": version, "columns": _json(some)}
            conn.execute(_QUERIES["record_columns"].on(), {**self._key, **values})

    def record_unchanged(self, token: UUID, done: Recorded, change_id: str, digest: bytes | None) -> None:
        """Keeps the id of a change that changed nothing, under its lock. Raises `RowLockLost`."""
        values = {"token": token, "change_id": change_id, "digest": _uuid(digest)}
        values |= {"last_version": done.last_version, "unchanged": done.unchanged}
        if not self._written("record_unchanged", **values):
            raise self._lock_lost()

    def change_of_id(self, change_id: str, digest: bytes | None) -> Recorded | None:
        """Returns what the change of this id did; None when there was none.

        Raises `CommitIdReused` when it was another change, as far as the digests of both are known.
        """
        rows = self._rows("change_of_id", change_id=change_id, digest=_uuid(digest))
        if not rows:
            return None
        is_same, *done = rows[0]
        if not is_same:
            raise CommitIdReused(
                f"change id {change_id!r} was used before, for another change of table {self.table.name!r}; "
                "nothing was changed: give each change an id of its own",
                commit_id=change_id,
                table=self.table.name,
            )
        return Recorded(*done)

    def history(self, before: int, limit: int) -> list[RowChange]:
        """Changes of before a version, the newest first."""
        rows = self._rows("history", before=before, limit=limit)
        return [RowChange(*row) for row in rows]

    def add_snapshot(self, name: str) -> RowSnapshot:
        """Names the newest version; `SnapshotExists`."""
        check_printed("the name of a snapshot", name, NAME_BYTES_MAX)
        rows = self._written("add_snapshot", name=name)
        if not rows:
            said = f"table {self.table.name!r} has a snapshot {name!r} already"
            raise SnapshotExists(said, table=self.table.name, snapshot=name)
        return RowSnapshot(*rows[0])

    def snapshots(self) -> list[RowSnapshot]:
        """By name."""
        return [RowSnapshot(*row) for row in self._rows("snapshots")]

    def snapshot(self, name: str) -> RowSnapshot:
        """`SnapshotNotFound`."""
        found = self.snapshots()
        for one in found:
            if one.name == name:
                return one
        known = ", ".join(one.name for one in found) or "none"
        said = f"table {self.table.name!r} has no snapshot {name!r}; it has {known}"
        raise SnapshotNotFound(said, table=self.table.name, snapshot=name)

    def drop_snapshot(self, name: str) -> None:
        """`SnapshotNotFound`."""
        if not self._written("drop_snapshot", name=name):
            self.snapshot(name)

    def _rows(self, query: str, **values: Any) -> list[Any]:
        work = rows_of(_QUERIES[query], {**self._key, **values})
        return run_lookup(self.supplier, work, operation=f"row table {query}")

    def _written(self, query: str, **values: Any) -> list[Any]:
        work = rows_of(_QUERIES[query], {**self._key, **values})
        return run_transaction(self.supplier, work, operation=f"row table {query}")


def _uuid(digest: bytes | None) -> UUID | None:
    return None if digest is None else UUID(bytes=digest)


def _json(columns: Sequence[Column]) -> Jsonb:
    return Jsonb([to_jsonb(column) for column in columns])


def _columns(found: list[Any]) -> tuple[Column, ...]:
    return tuple(map(from_jsonb, found))
