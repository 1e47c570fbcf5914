"""Write attempts: writers announce themselves before they write, so that the objects of the dead are found.

An attempt's objects share a prefix. The transaction that commits them ends the attempt; one that was
abandoned can commit nothing, so that collecting its objects can never take a live file away.
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
    TableBusy,
    TableNotFound,
)
from dormouse.model.table import TableProperties, TableRecord, is_edited, is_keyed
from dormouse.model.text import narrow_id
from dormouse.objects.ledger import sweep, unknown_pages
from dormouse.objects.names import ROW_FILES, SKETCHES_SUFFIX, parquet_suffix
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.lease import SessionLock, wait_for
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_statement, run_transaction
from dormouse.state.files.layout import OwnTables

# Running numbers of a table's rows: one load gives them at a time, so that none is given twice.

WAIT_SECONDS_MAX = 600.0


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
        conn.execute(_QUERIES["begin_commit"].on(), {"table_id": self._table.table_id})
        self._lock.fence(conn, _QUERIES["is_alone"])


@contextmanager
def numbering(supplier: ConnectionSupplier, table: TableRecord) -> Iterator[Numbering]:
    """Waits for the load that numbers rows of the table, and keeps other loads waiting until the end.

    The load calls `check` as it commits. Raises `TableBusy` when the wait takes too long.
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
    # loads that wait take no session from the load that they wait for
    with (
        closing(supplier.limited()) as apart,
        SessionLock(apart, _QUERIES["number_alone"], values, lost=lost) as lock,
    ):
        wait_for(lambda _: lock.take() or busy, WAIT_SECONDS_MAX)
        run_statement(supplier, rows_of(_QUERIES["await_commit"], values), operation="number rows")
        yield Numbering(lock, table)


LISTED_NAMES_MAX = 10_000
NO_TABLE = 0
"""The id of none: with it, attempts are only those of tables that are gone."""

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "attempts")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a load of a keyed table is among its loads and its deletions: before what comes from here on."""

    sequence: int
    deletions_till: int
    taken_at: datetime


@dataclass(frozen=True, slots=True)
class WriteAttempt:
    """One try of a job that writes objects, by a version of the schema; a load has its place."""

    table_id: int
    attempt_id: str
    object_prefix: str
    table_uuid: str | None = None
    place: Place | None = None
    schema_version: int = 1

    def object_name(self, partition_id: str, number: int = 0) -> str:
        """A name for an object of this attempt."""
        return f"{self.object_prefix}{number}-{partition_id}{parquet_suffix(self.schema_version)}"

    @property
    def _key(self) -> dict[str, Any]:
        return {"table_id": self.table_id, "attempt_id": self.attempt_id}


def abandoned(which: str) -> AttemptAbandoned:
    """The error of an attempt that can commit nothing any more."""
    return AttemptAbandoned(
        f"attempt {which} took longer than attempt_expiry_seconds, or its table was dropped; nothing was "
        "applied: run it again"
    )


class WriteAttempts:
    """The attempts of an instance."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects

    @contextmanager
    def attempt(
        self, table: TableRecord, *, loads: bool = False, leftovers: bool = False
    ) -> Iterator[WriteAttempt]:
        """An attempt for the length of a job; when the job raises, its objects are removed.

        After `CommitOutcomeUnknown` they may be live: then nothing is removed, and expiry decides later.
        `loads`: it adds rows, and not only other files of those that there are. `leftovers`: see `discard`.
        """
        attempt = self.begin(table, loads=loads)
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

    def begin(self, table: TableRecord, *, loads: bool = False) -> WriteAttempt:
        """Announces a writer; `TableNotFound` when the table is gone."""
        attempt_id, has_place = uuid.uuid4().hex, loads and is_keyed(table.properties)
        values = {"table_id": table.table_id, "attempt_id": attempt_id, "prefix": table.object_prefix}
        rows = self._rows("begin", {**values, "no_place": 0 if has_place else None})
        # apart, so that no larger place than its own is known to who did not see it
        places = self._rows("take_place", values) if rows and has_place else []
        if not rows or (has_place and not places):
            raise TableNotFound.gone(table.name)
        place = Place(*places[0]) if places else None
        return WriteAttempt(table.table_id, attempt_id, rows[0][0], table.uuid, place, rows[0][1])

    @staticmethod
    def finish(
        conn: psycopg.Connection[Any], table_id: int, attempt_ids: Sequence[str], *, leftovers: bool = False
    ) -> None:
        """Ends attempts, inside the transaction that commits their files; raises when any was abandoned.

        With `leftovers` others may still write objects of the attempts, which are no part of the commit:
        `collect` looks for them when none can any more, after `attempt_expiry_seconds`.
        """
        query = _QUERIES["finish_for_now" if leftovers else "finish"]
        values = {"table_id": table_id, "attempt_ids": list(attempt_ids)}
        if len(conn.execute(query.on(), values).fetchall()) < len(attempt_ids):
            which = attempt_ids[0] if len(attempt_ids) == 1 else f"of {len(attempt_ids)}, one or more,"
            raise abandoned(which)

    def abandon(self, attempt: WriteAttempt) -> bool:
        """The attempt commits nothing any more; False when it has committed (or is collected) already.

        A transaction that is just ending the attempt is waited for.
        """
        return self._execute("abandon", attempt._key)

    def discard(self, attempt: WriteAttempt, *, leftovers: bool = False) -> None:
        """The attempt commits nothing any more, and its objects go now, or at the next collection.

        One that has committed is left alone: its objects are live. With `leftovers` others may still write
        objects of it, which go as those after `finish`.
        """
        one = {"table_id": attempt.table_id, "attempt_ids": [attempt.attempt_id]}
        if leftovers and self._execute("finish_for_now", one):
            self._delete_objects(attempt.object_prefix)
            return
        if self.abandon(attempt) and not self._delete_objects(attempt.object_prefix):
            self._execute("forget", attempt._key)
        if leftovers:
            # it was abandoned, and perhaps collected: what is written after that is looked for, too
            self._execute("remember", {**attempt._key, "prefix": attempt.object_prefix})

    def withdraw(self, attempt: WriteAttempt, *, leftovers: bool = False) -> None:
        """As `discard`, of an attempt that was abandoned: also what was written after its collection goes."""
        self._delete_objects(attempt.object_prefix)
        self.discard(attempt, leftovers=leftovers)

    def abandon_each(self, attempt_ids: Sequence[str], table: TableRecord) -> None:
        """Attempts of a table commit nothing any more; `collect` deletes their objects."""
        for attempt_id in attempt_ids:
            self._execute("abandon", {"table_id": table.table_id, "attempt_id": attempt_id})

    def abandon_all(self) -> None:
        """For the embedded instance that starts its database: all earlier writers are dead."""
        self._execute("abandon_all", {})

    def abandon_table(self, conn: psycopg.Connection[Any], table: TableRecord) -> None:
        """Part of dropping a table: its objects are left to `collect`, and its writers commit nothing."""
        of_cells = [f"{ROW_FILES}/{table.uuid}/"] if is_edited(table.properties) else []
        values = {"table_id": table.table_id, "object_prefixes": [*table.object_prefixes, *of_cells]}
        conn.execute(_QUERIES["abandon_table"].on(), values)

    def collect(self, table: TableRecord) -> int:
        """Deletes the objects of attempts that expired or were abandoned; gives how many attempts.

        Also what late writers left of attempts that committed.
        """
        expiry = {"table_id": table.table_id, "expiry_seconds": table.properties.attempt_expiry_seconds}
        self._execute("abandon_expired", expiry)
        own = OwnTables(self._supplier, table)
        for attempt in self._attempts("finished", expiry):
            if self.delete_leftovers(attempt, own):
                self._execute("forget", attempt._key)
        return self.collect_abandoned(table.table_id)

    def delete_leftovers(self, attempt: WriteAttempt, own: OwnTables) -> bool:
        """Deletes a committed attempt's objects that are no part of the table; False: some are left."""
        try:
            return not sweep(self._objects, self._untracked(attempt, own)).warn().failed
        except (DormouseError, psycopg.Error) as error:  # there is more to collect
            logger.warning("%s is not needed and could not be deleted: %s", attempt.object_prefix, error)
            return False

    def collect_abandoned(self, table_id: int = NO_TABLE) -> int:
        """Deletes the objects of a table's abandoned attempts, and of tables that are gone.

        Gives how many attempts are done with; those of tables that are gone are looked at again until no
        writer can be left that still writes.
        """
        collected = 0
        for attempt in self._attempts("abandoned", {"table_id": table_id}):
            if not self._delete_objects(attempt.object_prefix):
                values = {**attempt._key, "expiry_seconds": TableProperties().attempt_expiry_seconds}
                collected += self._execute("forget_collected", values)
        return collected

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Of some objects those that no attempt writes, or has left for collection."""
        work = rows_of(_QUERIES["of_attempts"], {"names": list(names)})
        operation = "look for attempts"
        rows = run_transaction(self._supplier, work, read_only=True, scans=True, operation=operation)
        known = {name for (name,) in rows}
        return [name for name in names if name not in known]

    def _attempts(self, query: str, values: dict[str, Any]) -> list[WriteAttempt]:
        work = rows_of(_QUERIES[query], values)
        rows = run_transaction(self._supplier, work, read_only=True, operation=f"attempts {query}")
        return [WriteAttempt(row[0], str(row[1]), row[2]) for row in rows]

    def _untracked(self, attempt: WriteAttempt, own: OwnTables) -> Iterator[list[tuple[str, int]]]:
        """The attempt's objects that are neither a file of the table nor the sketches of one."""

        def untracked(names: list[str]) -> list[str]:
            files = {name: narrow_id(name.removesuffix(SKETCHES_SUFFIX)) for name in names}
            # of the table's own tables: a look at those of all tables would lock each of them
            values = {"file_ids": list(files.values())}
            tracked = {row[0] for row in own.rows("tracked", values, operation="look for leftovers")}
            return [name for name, file_id in files.items() if file_id not in tracked]

        return unknown_pages(self._objects.list(attempt.object_prefix), untracked, LISTED_NAMES_MAX)

    def _delete_objects(self, prefix: str) -> list[tuple[str, Exception]]:
        return self._objects.delete(name for name, _ in self._objects.list(prefix))

    def _execute(self, name: str, values: dict[str, Any]) -> bool:
        """Whether the statement gives a row."""
        return bool(self._rows(name, values))

    def _rows(self, name: str, values: dict[str, Any]) -> list[Any]:
        return run_statement(self._supplier, rows_of(_QUERIES[name], values), operation=f"attempt {name}")
