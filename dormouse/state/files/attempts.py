"""Write attempts: a writer records itself before it writes, so that the objects of dead writers are found.

The names of an attempt's objects begin with the same prefix. The transaction that commits the objects ends
the attempt. An abandoned attempt can commit nothing, so its objects are never live files. They can be
deleted.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import (
    AttemptAbandoned,
    CommitFailed,
    CommitOutcomeUnknown,
    DormouseError,
    QueryOvertaken,
    TableBusy,
    TableNotFound,
)
from dormouse.model.cut import Position
from dormouse.model.loops import backoff_seconds, tries
from dormouse.model.table import TableProperties, TableRecord, is_edited, is_keyed
from dormouse.model.text import narrow_id
from dormouse.objects.ledger import sweep, unknown_pages
from dormouse.objects.names import ROW_FILES, SKETCHES_SUFFIX, parquet_suffix
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.lease import SessionLock, wait_for
from dormouse.postgres.queries import Call, Statement, execute_each, load
from dormouse.postgres.transaction import rows_of, run_statement, run_transaction
from dormouse.state.files.layout import OwnTables

# Running numbers of a table's rows: only one load at a time assigns them, so that none is assigned twice.

WAIT_SECONDS_MAX = 600.0


class Numbering:
    """The exclusive right to give running numbers to new rows of a table.

    It ends with its database session.
    """

    def __init__(self, lock: SessionLock, table: TableRecord) -> None:
        self._lock = lock
        self._table = table

    def check(self, conn: psycopg.Connection[Any]) -> None:
        """Checks that the right was not lost since the rows got their numbers.

        The transaction that adds the rows calls it. A load that gets the right later waits until this
        transaction has ended, and then sees its numbers. Raises `CommitFailed` when the session was lost,
        because another load may then have given the same numbers.
        """
        conn.execute(_QUERIES["begin_commit"].on(), {"table_id": self._table.table_id})
        self._lock.fence(conn, _QUERIES["is_alone"])


@contextmanager
def numbering(supplier: ConnectionSupplier, table: TableRecord) -> Iterator[Numbering]:
    """Waits for other loads with the exclusive right to number rows of the table, then takes this right.

    The load calls `check` as it commits. Raises `TableBusy` after waiting `WAIT_SECONDS_MAX`.
    """
    values = {"table_id": table.table_id}
    busy = TableBusy(
        f"table {table.name!r}: another load gives its rows running numbers for more than "
        f"{WAIT_SECONDS_MAX:g} s; nothing was added, try again later",
        table=table.name,
    )
    lost = partial(
        CommitFailed,
        f"table {table.name!r}: the database was lost, or this process was frozen, while rows got running "
        "numbers, which another load may have given meanwhile; nothing was added: run it again",
    )
    # connections of their own, so that waiting loads take none from the load that they wait for
    with (
        closing(supplier.limited()) as apart,
        SessionLock(apart, _QUERIES["number_alone"], values, lost=lost) as lock,
    ):
        wait_for(lambda _: lock.take() or busy, WAIT_SECONDS_MAX)
        run_statement(supplier, rows_of(_QUERIES["await_commit"], values), operation="number rows")
        yield Numbering(lock, table)


LISTED_NAMES_MAX = 10_000
NO_TABLE = 0
"""The id of no table. `collect_abandoned` with this id collects only for dropped tables."""

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "attempts")
_PLAN, _OLDER = (Statement(_QUERIES[name].on()) for name in ("plan", "older"))
OLDER_SECONDS_MAX = 3.0


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a load in the order of a keyed table's loads and deletions.

    It is before the places of all loads and deletions that begin later. `deletions_till` is the number of the
    last deletion before it.
    """

    sequence: int
    deletions_till: int
    taken_at: datetime


@dataclass(frozen=True, slots=True)
class WriteAttempt:
    """One try of a job that writes objects, with the version of the schema that it writes.

    Only a load of a keyed table has a place. An attempt that was only planned is not recorded until it is
    confirmed.
    """

    table_id: int
    attempt_id: str
    object_prefix: str
    table_uuid: str | None = None
    place: Place | None = None
    schema_version: int = 1
    last_deletion: int | None = None
    """The number of the table's last deletion when the attempt was planned; None if it was begun."""
    number: int = 0
    """A part of the names of objects, which distinguishes those of several loads of the attempt."""

    def object_name(self, partition_id: str) -> str:
        """Returns a name for an object with rows of a partition."""
        return f"{self.object_prefix}{self.number}-{partition_id}{parquet_suffix(self.schema_version)}"

    @property
    def _key(self) -> dict[str, Any]:
        return {"table_id": self.table_id, "attempt_id": self.attempt_id}


def abandoned(which: str) -> AttemptAbandoned:
    """Returns the error for an abandoned attempt."""
    return AttemptAbandoned(
        f"attempt {which} took longer than attempt_expiry_seconds, or its table was dropped; nothing was "
        "applied: run it again"
    )


class WriteAttempts:
    """The write attempts of an instance."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects

    @contextmanager
    def attempt(
        self, table: TableRecord, *, loads: bool = False, leftovers: bool = False, durable: bool = True
    ) -> Iterator[WriteAttempt]:
        """Yields an attempt for the duration of a job; deletes the attempt's objects if the job fails.

        After `CommitOutcomeUnknown`, the objects may be live, so nothing is deleted. `collect` decides when
        the attempt has expired. `loads` means that the job adds rows and does not only rewrite existing ones.
        For `leftovers`, see `discard`; for `durable`, see `begin`.
        """
        attempt = self.begin(table, loads=loads, durable=durable)
        try:
            yield attempt
        except CommitOutcomeUnknown:
            raise
        except AttemptAbandoned:
            self.withdraw(attempt, leftovers=leftovers)
            raise
        except BaseException:
            self.discard(attempt, leftovers=leftovers)
            raise

    def begin(self, table: TableRecord, *, loads: bool = False, durable: bool = True) -> WriteAttempt:
        """Records a new attempt; raises `TableNotFound` when the table was dropped.

        If not `durable`, the disk is not flushed: a crash of the server may lose the record, and the attempt
        can then commit nothing. Call `confirm` before it writes an object.
        """
        attempt_id, has_place = uuid.uuid4().hex, loads and is_keyed(table.properties)
        values = {"table_id": table.table_id, "attempt_id": attempt_id, "prefix": table.object_prefix}
        values["durable"] = durable
        rows = self._rows("begin", {**values, "no_place": 0 if has_place else None})
        # a second transaction, so that a process that sees a larger place also sees this attempt
        places = self._rows("take_place", values) if rows and has_place else []
        if not rows or (has_place and not places):
            raise TableNotFound.gone(table.name)
        place = Place(*places[0]) if places else None
        return WriteAttempt(table.table_id, attempt_id, rows[0][0], table.uuid, place, rows[0][1])

    def plan(
        self, table: TableRecord, name: str | None = None, then: Call | None = None
    ) -> tuple[WriteAttempt, Position, Sequence[Sequence[Any]] | None]:
        """Returns an attempt that is not recorded, the present position of the table, and the rows of `then`.

        If a `name` is given, the table must still have it. `then` is a statement that only reads, and runs
        next, in the same round trip. Its rows are None if it failed.

        It may commit files that inline their rows, if its commit checks that no other commit changed rows of
        its keys since. Call `confirm` before it writes an object. Raises `TableNotFound`.
        """
        attempt_id, has_place = uuid.uuid4().hex, is_keyed(table.properties)
        values = {"table_id": table.table_id, "attempt_id": attempt_id, "prefix": table.object_prefix}
        values |= {"has_place": has_place, "name": name}

        def work(conn: psycopg.Connection[Any]) -> tuple[Sequence[Any], Sequence[Any] | None]:
            if then is None:
                return _PLAN.fetch(conn, values), None
            # each is a transaction, so the second one sees no earlier moment
            first, second = execute_each(conn, [(_PLAN, values), then], repeats_reads=True)
            if isinstance(first, psycopg.Error):
                raise first
            return first, None if isinstance(second, psycopg.Error) else second

        try:
            rows, found = run_statement(self._supplier, work, operation="plan an edit")
        except CommitOutcomeUnknown:  # it changes nothing, so a lost answer can be asked for again
            rows, found = run_statement(self._supplier, work, operation="plan an edit")
        if not rows:
            raise TableNotFound.gone(table.name)
        [(prefix, version, sequence, last, taken_at, epoch, snapshot)] = rows
        place = Place(sequence, last, taken_at) if has_place else None
        attempt = WriteAttempt(table.table_id, attempt_id, prefix, table.uuid, place, version, last)
        return attempt, Position(epoch, snapshot, taken_at), found

    def wait_for_older(self, attempt: WriteAttempt) -> None:
        """Waits for the loads of a keyed table that began before a planned attempt, for some seconds.

        When they commit first, the attempt's edit sees the rows that they added. Otherwise they count as
        older than rows that the edit inserts.
        """
        if attempt.place is None:
            return
        values = {"table_id": attempt.table_id, "sequence": attempt.place.sequence}
        for _ in tries(OLDER_SECONDS_MAX, pause=partial(backoff_seconds, seconds_min=0.01, seconds_max=0.2)):
            older = run_statement(
                self._supplier, lambda conn: _OLDER.fetch(conn, values), operation="find older loads"
            )
            if not older[0][0]:
                return

    def confirm(self, attempt: WriteAttempt) -> None:
        """Makes an attempt durable.

        Raises `AttemptAbandoned` if it was abandoned or lost. Raises `QueryOvertaken` for a planned attempt
        if rows were deleted since.
        """
        if attempt.last_deletion is None:
            if not self._execute("confirm", attempt._key):
                raise abandoned(attempt.attempt_id)
            return
        place = attempt.place
        values = {
            **attempt._key,
            "prefix": attempt.object_prefix,
            "sequence": 0 if place is None else place.sequence,
            "deletions_till": 0 if place is None else place.deletions_till,
            "version": attempt.schema_version,
            "last_deletion": attempt.last_deletion,
        }
        if not self._execute("announce", values):
            raise QueryOvertaken("rows of the table were deleted while they were read")

    @staticmethod
    def finish(
        conn: psycopg.Connection[Any], table_id: int, attempt_ids: Sequence[str], *, leftovers: bool = False
    ) -> None:
        """Ends attempts, inside the transaction that commits their files.

        With `leftovers`, other processes may still write objects of the attempts that are not part of the
        commit. `collect` deletes these after `attempt_expiry_seconds`, when no process can write any. Raises
        `AttemptAbandoned` when any attempt was abandoned.
        """
        query = _QUERIES["finish_for_now" if leftovers else "finish"]
        values = {"table_id": table_id, "attempt_ids": list(attempt_ids)}
        if len(conn.execute(query.on(), values).fetchall()) < len(attempt_ids):
            which = attempt_ids[0] if len(attempt_ids) == 1 else f"of {len(attempt_ids)}, one or more,"
            raise abandoned(which)

    def abandon(self, attempt: WriteAttempt) -> bool:
        """Abandons an attempt, which then can commit nothing.

        Returns False if the attempt has committed already or was collected. Waits for a transaction that is
        ending the attempt.
        """
        return self._execute("abandon", attempt._key)

    def discard(self, attempt: WriteAttempt, *, leftovers: bool = False) -> None:
        """Abandons an attempt and deletes its objects, now or at the next collection.

        Does nothing to an attempt that has committed, as its objects are live. With `leftovers`, other
        processes may still write objects of the attempt; `collect` deletes these objects later.
        """
        values = {"table_id": attempt.table_id, "attempt_ids": [attempt.attempt_id]}
        if leftovers and self._execute("finish_for_now", values):
            self._delete_objects(attempt.object_prefix)
            return
        if self.abandon(attempt) and not self._delete_objects(attempt.object_prefix):
            self._execute("forget", attempt._key)
        if leftovers:
            # it was abandoned and perhaps collected: record it again, so that later objects are found, too
            self._execute("remember", {**attempt._key, "prefix": attempt.object_prefix})

    def withdraw(self, attempt: WriteAttempt, *, leftovers: bool = False) -> None:
        """Discards an abandoned attempt, and deletes the objects that were written after its collection."""
        self._delete_objects(attempt.object_prefix)
        self.discard(attempt, leftovers=leftovers)

    def abandon_each(self, attempt_ids: Sequence[str], table: TableRecord) -> None:
        """Abandons attempts of a table; `collect` deletes their objects."""
        for attempt_id in attempt_ids:
            self._execute("abandon", {"table_id": table.table_id, "attempt_id": attempt_id})

    def abandon_all(self) -> None:
        """Abandons all attempts. An embedded instance calls it as it starts: all earlier writers are dead."""
        self._execute("abandon_all", {})

    def abandon_table(self, conn: psycopg.Connection[Any], table: TableRecord) -> None:
        """Abandons a table's attempts, and leaves all its objects to `collect`.

        Part of the transaction that drops the table.
        """
        of_cells = [f"{ROW_FILES}/{table.uuid}/"] if is_edited(table.properties) else []
        values = {"table_id": table.table_id, "object_prefixes": [*table.object_prefixes, *of_cells]}
        conn.execute(_QUERIES["abandon_table"].on(), values)

    def collect(self, table: TableRecord) -> int:
        """Deletes the objects of a table's expired or abandoned attempts; returns the number of attempts.

        Also deletes objects that late writers left behind after the commit of their attempt.
        """
        expiry = {"table_id": table.table_id, "expiry_seconds": table.properties.attempt_expiry_seconds}
        self._execute("abandon_expired", expiry)
        own = OwnTables(self._supplier, table)
        for attempt in self._attempts("finished", expiry):
            if self.delete_leftovers(attempt, own):
                self._execute("forget", attempt._key)
        return self.collect_abandoned(table.table_id)

    def delete_leftovers(self, attempt: WriteAttempt, own: OwnTables) -> bool:
        """Deletes those objects of a committed attempt that are not part of the table.

        Returns False if some of them could not be deleted.
        """
        try:
            return not sweep(self._objects, self._untracked(attempt, own)).warn().failed
        except (DormouseError, psycopg.Error) as error:  # go on with the other attempts
            logger.warning(
                "%s is no longer needed but could not be deleted: %s", attempt.object_prefix, error
            )
            return False

    def collect_abandoned(self, table_id: int = NO_TABLE) -> int:
        """Deletes the objects of a table's abandoned attempts, and those of dropped tables.

        Returns the number of attempts whose records were deleted, too. The records of a dropped table's
        attempts are kept until no writer can still be writing.
        """
        collected = 0
        for attempt in self._attempts("abandoned", {"table_id": table_id}):
            if not self._delete_objects(attempt.object_prefix):
                values = {**attempt._key, "expiry_seconds": TableProperties().attempt_expiry_seconds}
                collected += self._execute("forget_collected", values)
        return collected

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns those of the objects' names that belong to no attempt."""
        work = rows_of(_QUERIES["of_attempts"], {"names": list(names)})
        operation = "find attempts"
        rows = run_transaction(self._supplier, work, read_only=True, scans=True, operation=operation)
        known = {name for (name,) in rows}
        return [name for name in names if name not in known]

    def _attempts(self, query: str, values: dict[str, Any]) -> list[WriteAttempt]:
        work = rows_of(_QUERIES[query], values)
        rows = run_transaction(self._supplier, work, read_only=True, operation=f"attempts {query}")
        return [WriteAttempt(row[0], str(row[1]), row[2]) for row in rows]

    def _untracked(self, attempt: WriteAttempt, own: OwnTables) -> Iterator[list[tuple[str, int]]]:
        """Yields batches of the attempt's objects that are not part of the table, as pairs of name and size.

        The table's objects are its files and their sketches.
        """

        def untracked(names: list[str]) -> list[str]:
            files = {name: narrow_id(name.removesuffix(SKETCHES_SUFFIX)) for name in names}
            # on this table's partition: a query of the parent would lock the partitions of all tables
            values = {"file_ids": list(files.values())}
            tracked = {row[0] for row in own.rows("tracked", values, operation="find leftovers")}
            return [name for name, file_id in files.items() if file_id not in tracked]

        return unknown_pages(self._objects.list(attempt.object_prefix), untracked, LISTED_NAMES_MAX)

    def _delete_objects(self, prefix: str) -> list[tuple[str, Exception]]:
        return self._objects.delete(name for name, _ in self._objects.list(prefix))

    def _execute(self, name: str, values: dict[str, Any]) -> bool:
        """Executes a statement; returns True if the statement returned a row."""
        return bool(self._rows(name, values))

    def _rows(self, name: str, values: dict[str, Any]) -> list[Any]:
        return run_statement(self._supplier, rows_of(_QUERIES[name], values), operation=f"attempt {name}")
