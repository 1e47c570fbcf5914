"""The metadata of one row table in PostgreSQL: versions, columns, ranges of rows, changes, snapshots, locks.

Either many readers or one writer can lock a table. Each lock has a lease (`dormouse.postgres.lease`).
"""

from __future__ import annotations

import math
import os
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from uuid import UUID
from weakref import WeakValueDictionary

import psycopg
from psycopg import errors
from psycopg.types.json import Jsonb

from dormouse.errors import (
    CommitIdReused,
    RowLockHeld,
    RowLockLost,
    SnapshotExists,
    SnapshotNotFound,
    TableNotFound,
)
from dormouse.model.schema import Schema
from dormouse.model.table import ROW_DELETED, ROW_ID, ROW_VERSION, TableProperties, TableRecord, check_keyed
from dormouse.model.text import check_printed
from dormouse.model.types import BOOLEAN, LONG, Field
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import (
    MARGIN_SECONDS,
    ROW_LOCK_SECONDS,
    Lease,
    held_by,
    restart_leases,
    this_holder,
    wait_for,
)
from dormouse.postgres.queries import booleans, integers, load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.rows.columns import Column, check_columns, check_new, from_jsonb, to_jsonb
from dormouse.state.catalog import Catalog

if TYPE_CHECKING:
    from dormouse.rows.batches import Ints, Ranges

LEASE_SECONDS = ROW_LOCK_SECONDS
QUEUE_SECONDS_MAX = 1.0
QUERY_SECONDS_MIN = 1.0
"""The shortest timeout, in seconds, of a statement that takes a table's lock.

Even a caller that does not want to wait for the lock waits so long for another transaction on the same row.
"""

Kind = Literal["read", "write"]
_QUERIES = load(__package__ or "", "store")

_queues: WeakValueDictionary[tuple[int, str | None], threading.Lock] = WeakValueDictionary()
"""A mutex for each table, so that only one of a process's writers at a time polls for the table's lock."""


@dataclass(slots=True)
class HeldLock:
    """A granted lock, with the newest version and the next row id that the table had when it was granted.

    `given_back` is True after the commit of the change has released the lock.
    """

    lease: Lease
    version: int
    next_id: int
    given_back: bool = False

    @property
    def token(self) -> UUID:
        """The fencing token of the lock."""
        token: UUID = self.lease.values["token"]
        return token


@dataclass(frozen=True, slots=True)
class LockHolder:
    """The holder of a lock, with the time at which its lease ends unless the holder renews it."""

    kind: str
    holder: str
    leased_until: datetime


class RowLocks:
    """The locks of one table. Each lock is a row of the database, which a separate transaction adds."""

    def __init__(self, supplier: Supplier, table: TableRecord, lease_seconds: float = LEASE_SECONDS) -> None:
        self._supplier = supplier
        self._table = table
        self._lease_seconds = lease_seconds

    @contextmanager
    def read(self) -> Iterator[HeldLock]:
        """Locks the table for reading, so that no process changes its rows while the block runs.

        Raises `RowLockHeld` at once if a writer holds the lock or waits for it.
        """
        with self._held("read", 0.0) as lock:
            yield lock

    @contextmanager
    def write(self, wait_seconds: float = 0.0) -> Iterator[HeldLock]:
        """Locks the table for writing, until the block ends or the commit of the change releases the lock.

        Waits up to `wait_seconds` for readers and for another writer. New readers get no lock meanwhile.
        Raises `RowLockHeld` if the lock is not free in time.
        """
        deadline = time.monotonic() + wait_seconds
        queue = _queues.setdefault((os.getpid(), self._table.uuid), threading.Lock())
        # a short wait: the thread ahead may be frozen, and may have lost its lock to another process
        is_first = queue.acquire(timeout=min(max(wait_seconds, 0.0), QUEUE_SECONDS_MAX))
        try:
            with self._held("write", max(deadline - time.monotonic(), 0.0)) as lock:
                yield lock
        finally:
            if is_first:
                queue.release()

    def holders(self) -> list[LockHolder]:
        """Returns the holders of the table's locks."""
        return [LockHolder(*row) for row in run_lookup(self._supplier, rows_of(_QUERIES["locks"], self._key))]

    def lease(self) -> Lease:
        """Returns a new lease for a lock of the table. The lease is not taken yet."""
        values = {
            **self._key,
            "token": uuid.uuid4(),
            "lease_seconds": self._lease_seconds,
            "margin_seconds": MARGIN_SECONDS,
        }
        return Lease(self._supplier, "row lock", repr(self._table.name), _QUERIES, values, self._lost)

    def _lost(self) -> RowLockLost:
        return RowLockLost(
            f"table {self._table.name!r}: the lock was given to another worker while this one wrote; "
            "nothing was changed: try again",
            table=self._table.name,
        )

    @contextmanager
    def _held(self, kind: Kind, wait_seconds: float) -> Iterator[HeldLock]:
        lease, lock = self.lease(), None
        try:
            lock = wait_for(partial(self._take, kind, lease), wait_seconds)
            with lease.pulse():
                yield lock
        finally:
            if lock is None or not lock.given_back:
                lease.release()  # releases also a precursor, or a lock whose grant was lost on the way

    def _take(self, kind: Kind, lease: Lease, seconds_left: float) -> HeldLock | RowLockHeld:
        """Tries once to take the lock. Returns the lock, or an error that names its present holder.

        A writer that waits for readers leaves a precursor row, because of which new readers get no lock.
        """
        try:
            [(state, held_kind, holder, until, version, next_id, is_too_long)] = lease.execute(
                "take",
                lock_ms=math.ceil(1_000 * max(seconds_left, QUERY_SECONDS_MIN)),
                kind=kind,
                holder=this_holder(),
            )
        except errors.LockNotAvailable:
            return RowLockHeld(
                f"table {self._table.name!r}: a transaction that changes it has not ended; try again later",
                table=self._table.name,
            )
        if state == "gone":
            raise TableNotFound.gone(self._table.name)
        if state == "granted":
            return HeldLock(lease, version, next_id)
        if is_too_long:  # a wrong clock made it: begin its time again, so that it ends
            restart_leases(self._supplier)
        does = {"write": "is changing it", "precursor": "waits to change it"}.get(held_kind, "reads it")
        return RowLockHeld(
            f"table {self._table.name!r}: {held_by(holder, does, until)}",
            table=self._table.name,
            holder=str(holder),
        )

    @property
    def _key(self) -> dict[str, Any]:
        return {"table_id": self._table.table_id}


RANGES_AT_ONCE = 50_000
NAME_BYTES_MAX = 200
HISTORY_PAGE = 1_000
_KEYS = (Field(ROW_ID, LONG), Field(ROW_VERSION, LONG), Field(ROW_DELETED, BOOLEAN))


@dataclass(frozen=True, slots=True)
class TableState:
    """A row table at one moment.

    `version` is the newest version, or 0 before the first change. The table has had the same `columns` since
    version `columns_since`.
    """

    version: int
    next_id: int
    changed_at: datetime
    columns_since: int
    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class RowChange:
    """One change of a table, as its history shows it."""

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
    """The record of a change: its versions, the first of its new row ids, and its numbers of rows."""

    first_version: int
    last_version: int
    first_id: int
    inserted: int
    updated: int
    deleted: int
    unchanged: int


def create(conn: psycopg.Connection[Any], table: TableRecord, columns: Sequence[Column]) -> None:
    """Records a new table as a row table, within the transaction that creates the table.

    The columns must have their ids.
    """
    values = {"table_id": table.table_id, "columns": _json(columns)}
    conn.execute(_QUERIES["create"].on(), values)


def create_table(
    catalog: Catalog, name: str, columns: Sequence[Column], properties: TableProperties | None
) -> TableRecord:
    """Creates a row table. Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`."""
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
    return catalog.create(name, schema, edited, on_created=partial(create, columns=listed))


class RowStore:
    """The metadata of one row table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self.supplier = supplier
        self.table = table
        self._key = {"table_id": table.table_id}

    def state(self) -> TableState:
        """Returns the table as it is now. Raises `TableNotFound` if it was dropped."""
        rows = self._rows("state")
        if not rows:
            raise TableNotFound.gone(self.table.name)
        version, next_id, changed_at, columns_since, columns = rows[0]
        return TableState(version, next_id, changed_at, columns_since, _columns(columns))

    def columns_at(self, version: int) -> tuple[Column, ...]:
        """Returns the columns as of a version. Raises `TableNotFound`."""
        rows = self._rows("columns", version=version)
        if not rows:
            raise TableNotFound.gone(self.table.name)
        return _columns(rows[0][0])

    def ranges(self, spans: Sequence[tuple[int, int]]) -> Ranges:
        """Returns the ranges that overlap some (first id, last id) pairs, sorted by id."""
        from dormouse.rows.batches import Ranges

        firsts, lasts = zip(*spans, strict=True) if spans else ((), ())
        rows = self._rows("ranges", firsts=integers(firsts), lasts=integers(lasts))
        return Ranges.of(sorted(set(rows)))

    def changed_ranges(self, after: int) -> Ints:
        """Returns the ranges of rows that changed after a version, as an array of first and last ids."""
        import numpy as np

        rows = self._rows("changed_ranges", after=after)
        return np.array(rows, np.int64).reshape(-1, 2)

    def replace_ranges(self, conn: psycopg.Connection[Any], old: Ranges, new: Ranges) -> None:
        """Replaces old ranges by new ones, within the transaction of a commit."""
        for start in range(0, len(old.first), RANGES_AT_ONCE):
            firsts = old.first[start : start + RANGES_AT_ONCE].tolist()
            conn.execute(_QUERIES["remove_ranges"].on(), {**self._key, "firsts": integers(firsts)})
        for start in range(0, len(new.first), RANGES_AT_ONCE):
            first, last, version, deleted = (
                column[start : start + RANGES_AT_ONCE].tolist() for column in new
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
        """Records a change, within the transaction of a commit.

        `columns` has a (version, columns) pair for each version at which the columns changed.
        """
        values = {
            **{name: getattr(done, name) for name in Recorded.__slots__},
            "next_id": next_id,
            "changed_by": changed_by,
            "change_id": change_id,
            "digest": _uuid(digest),
            "columns_changed": list(columns_changed),
        }
        conn.execute(_QUERIES["record"].on(), {**self._key, **values})
        for version, columns_then in columns:
            values = {"version": version, "columns": _json(columns_then)}
            conn.execute(_QUERIES["record_columns"].on(), {**self._key, **values})

    def record_unchanged(self, lease: Lease, done: Recorded, change_id: str, digest: bytes | None) -> None:
        """Records the id and digest of a change that changed nothing.

        Raises `RowLockLost` if its lock has expired.
        """
        values = {"token": lease.values["token"], "change_id": change_id, "digest": _uuid(digest)}
        values |= {"last_version": done.last_version, "unchanged": done.unchanged}
        lease.must(self._written("record_unchanged", **values))

    def change_of_id(self, change_id: str, digest: bytes | None) -> Recorded | None:
        """Returns the record of the change with this id, or None if there is none.

        Raises `CommitIdReused` if both digests are known and differ, because the id was used for another
        change.
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
        """Returns at most `limit` changes before a version, the newest first."""
        rows = self._rows("history", before=before, limit=limit)
        return [RowChange(*row) for row in rows]

    def add_snapshot(self, name: str) -> RowSnapshot:
        """Gives the newest version a name. Raises `SnapshotExists`."""
        check_printed("the name of a snapshot", name, NAME_BYTES_MAX)
        rows = self._written("add_snapshot", name=name)
        if not rows:
            message = f"table {self.table.name!r} has a snapshot {name!r} already"
            raise SnapshotExists(message, table=self.table.name, snapshot=name)
        return RowSnapshot(*rows[0])

    def snapshots(self) -> list[RowSnapshot]:
        """Returns all snapshots of the table, sorted by name."""
        return [RowSnapshot(*row) for row in self._rows("snapshots")]

    def snapshot(self, name: str) -> RowSnapshot:
        """Returns the snapshot with a name. Raises `SnapshotNotFound`."""
        snapshots = self.snapshots()
        for snapshot in snapshots:
            if snapshot.name == name:
                return snapshot
        known = ", ".join(snapshot.name for snapshot in snapshots) or "none"
        message = f"table {self.table.name!r} has no snapshot {name!r}; it has {known}"
        raise SnapshotNotFound(message, table=self.table.name, snapshot=name)

    def drop_snapshot(self, name: str) -> None:
        """Deletes the snapshot with a name. Raises `SnapshotNotFound`."""
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


def _columns(values: list[Any]) -> tuple[Column, ...]:
    return tuple(map(from_jsonb, values))
