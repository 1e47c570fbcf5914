"""The deletions of one table: each is one row of metadata, however many rows it deletes.

While a deletion is recorded, it keeps out writers that add references. So each file was there before the
deletion or came after it. In a file from before, the matching rows are deleted. In a file from after it, all
rows stay.

An erasure is a deletion that also removes the files with matching rows from the history.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import takewhile
from typing import Any, NamedTuple
from uuid import UUID

import psycopg

from dormouse.errors import InvalidCut, InvalidProperties, InvalidQuery, TableNotFound
from dormouse.model.region import decode_value, encode_key
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.stored_conditions import current_condition, given_condition
from dormouse.model.text import narrow_bytes, narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Call, Statement, Uuids, load
from dormouse.postgres.transaction import rows_of, run_alone, run_lookup
from dormouse.state.files.facts import KeyBounds
from dormouse.state.files.holds import lock_history
from dormouse.state.files.layout import MAY_BE_OF
from dormouse.state.files.store import FileReferenceStore

_QUERIES = load(__package__ or "", "deletions")
_RECORD, _RECORD_WHOLE = (
    Statement(_QUERIES[name].including(recorded=_QUERIES["recorded"]).on())
    for name in ("record", "record_whole")
)
PAGE_FILES = 256
_CANDIDATES = _QUERIES["candidates"].including(may_be_of=MAY_BE_OF)


@dataclass(frozen=True, slots=True)
class RecordedDeletion:
    """A recorded deletion. `condition` is its `where` as JSON. Readers apply it while it is `pending`."""

    deletion_id: int
    condition: str
    by_values: bool
    deleted_at: datetime
    pending: bool


@dataclass(frozen=True, slots=True)
class RowsContent:
    """The Parquet file with the rows that a deletion lists, and its name in the deletion's condition."""

    name: str
    content: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class NewDeletion:
    """A deletion to record: its `where` as JSON, and the bounds of its row keys.

    `by_values` means that the condition names columns that are no keys. `rows` are those that it lists, if
    any.
    """

    condition: str
    bounds: KeyBounds
    by_values: bool
    rows: RowsContent | None = None


@dataclass(frozen=True, slots=True)
class Noted:
    """The result of a look at a file for rows of the deletions with numbers up to `till`.

    Only the deletions `left` match rows of the file.
    """

    filename: str
    till: int
    left: Sequence[int]


def encoded_beginning(schema: Schema, values: Sequence[bytes | None]) -> bytes:
    """Returns the encoded key of the encoded bounds of the first row keys, until one has no bound."""
    fields = schema.row_keys
    known = takewhile(lambda pair: pair[1] is not None, zip(fields, values, strict=False))
    return encode_key(fields, [decode_value(field.type, value or b"") for field, value in known])


class Deletions:
    """The deletions of one table."""

    def __init__(self, store: FileReferenceStore) -> None:
        self._store = store
        self._own = store.own

    def record(
        self,
        deletion: NewDeletion,
        on_recorded: Callable[[psycopg.Connection[Any], int], object] = lambda conn, deletion_id: None,
    ) -> tuple[int, datetime]:
        """Records a deletion of the current rows that match a condition; returns its number and time.

        Waits until no transaction adds references. Calls `on_recorded` with the number inside the
        transaction. Raises the errors of `record_in`, and `TableBusy` when the wait takes too long.
        """

        def work(conn: psycopg.Connection[Any]) -> tuple[int, datetime]:
            found = self.record_in(conn, deletion)
            on_recorded(conn, found[0])
            return found

        operation = f"delete from table {self._own.table.name!r}"
        return self._own.following(lambda: run_alone(self._store.supplier, work, operation=operation))

    def record_in(self, conn: psycopg.Connection[Any], deletion: NewDeletion) -> tuple[int, datetime]:
        """Records a deletion in a transaction of `run_alone`, and keeps writers out until it ends.

        Returns the deletion's number and time. Raises:

        - `InvalidQuery` for a deletion by values if the table merges rows of equal key;
        - `SchemaMoved` when the table's columns are no longer those of the condition;
        - `TableNotFound`.
        """
        name, key = self._own.table.name, {"table_id": self._own.table.table_id}
        values, schema = self._values(deletion), self._own.table.schema
        is_merged, version = conn.execute(_QUERIES["aggregates"].on(), key).fetchone() or (False, None)
        if version not in (None, schema.version):
            raise SchemaMoved(f"the columns of table {name!r} were changed")
        self._store.keep_writers_out(conn)
        if is_merged and deletion.by_values:
            raise InvalidQuery(
                f"table {name!r} merges rows of equal key, so that a value is not that of one row: "
                "delete by row keys and sort keys, or by a condition in SQL, as dm.sql(…)"
            )
        rows = _RECORD.fetch(conn, values)
        if not rows:
            raise TableNotFound.gone(name)
        [(deletion_id, deleted_at)] = rows
        return deletion_id, deleted_at

    def record_whole(self, deletion: NewDeletion) -> Call:
        """Returns a call that records a deletion, or fails, once writers are kept out."""
        return _RECORD_WHOLE, self._values(deletion)

    def _values(self, deletion: NewDeletion) -> dict[str, Any]:
        listed, schema, bounds = deletion.rows, self._own.table.schema, deletion.bounds
        return {
            **bounds.arrays(),
            "table_id": self._own.table.table_id,
            "version": schema.version,
            "condition": deletion.condition,
            "by_values": deletion.by_values,
            "min_key": encoded_beginning(schema, bounds.min_keys),
            "max_key": encoded_beginning(schema, bounds.max_keys),
            "content_id": None if listed is None else narrow_id(listed.name),
            "content": None if listed is None else listed.content,
        }

    def list(self, *, pending_only: bool = True) -> list[RecordedDeletion]:
        """Returns the pending deletions, or all deletions without `pending_only`, sorted by number."""
        rows = self._own.rows(_QUERIES["list"], {"all": not pending_only}, operation="list deletions")
        return [RecordedDeletion(row[0], given_condition(row[1]), *row[2:]) for row in rows]

    def note(
        self,
        looks: Sequence[Noted],
        on_noted: Callable[[psycopg.Connection[Any]], object] = lambda conn: None,
    ) -> None:
        """Records the results of looks at files, except for a file that has the result of a later look.

        Calls `on_noted` inside the transaction.
        """
        values = {
            "file_ids": Uuids([narrow_bytes(look.filename) for look in looks]),
            "till": [look.till for look in looks],
            "left": [f"{{{','.join(map(str, look.left))}}}" if look.left else None for look in looks],
        }

        def work(conn: psycopg.Connection[Any]) -> None:
            # garbage collection finds files by row ids (ctid), which this update changes
            lock_history(conn, self._own.table.table_id)
            conn.execute(self._own.on("note_deletions"), values)
            on_noted(conn)

        self._own.run(work, operation="note deletions")

    def count_restored(self, snapshot: str, conn: psycopg.Connection[Any]) -> int:
        """Returns the number of deletions that a restore to a snapshot undoes or makes pending again."""
        return int(self._of_snapshot("count_restored", snapshot, conn).fetchall()[0][0])

    def check_restorable(self, schema: Schema, snapshot: str, conn: psycopg.Connection[Any]) -> None:
        """Raises `InvalidCut` if a deletion that was pending in a snapshot names a dropped column."""
        for deletion_id, condition in self._of_snapshot("then_pending", snapshot, conn).fetchall():
            try:
                current_condition(schema, condition)
            except InvalidQuery as error:
                raise InvalidCut(
                    f"table {self._own.table.name!r} cannot be restored: deletion {deletion_id} was pending "
                    f"then, and {error}; read the moment with as_of, and ingest what is missing"
                ) from None

    def restore(self, snapshot: str, conn: psycopg.Connection[Any]) -> None:
        """Makes exactly the deletions pending that were pending in a snapshot.

        The caller keeps writers out meanwhile.
        """
        self._of_snapshot("restore", snapshot, conn)

    def _of_snapshot(self, name: str, snapshot: str, conn: psycopg.Connection[Any]) -> psycopg.Cursor[Any]:
        query = _QUERIES[name].including(pending_then=_QUERIES["pending_then"])
        return conn.execute(query.on(), {"table_id": self._own.table.table_id, "snapshot": snapshot})

    def check_mergeable(self) -> None:
        """Raises `InvalidProperties` while a deletion by values is pending.

        Such a deletion needs the values of single rows, which are lost when rows are merged.
        """
        for deletion in self.list():
            if deletion.by_values:
                raise InvalidProperties(
                    f"aggregate: deletion {deletion.deletion_id} of table {self._own.table.name!r} names "
                    "values, which merged rows lose; first compact the table and collect its garbage, until "
                    "'dormouse table deletions' no longer lists it"
                )

    def count_pending(self) -> int:
        return int(self._own.rows(_QUERIES["count_pending"], operation="count deletions")[0][0])


class Candidate(NamedTuple):
    """A file that may have rows of an erasure; `is_found` is True if such rows were found in it."""

    file_id: UUID
    filename: str
    byte_count: int | None
    is_found: bool


class ErasedBy(NamedTuple):
    """An erasure that removed files from the history, with its start and end by the database's clock."""

    deletion_id: int
    began_at: datetime
    ended_at: datetime


class Erasure:
    """One erasure. After an interruption at any step, the same methods continue it."""

    def __init__(self, store: FileReferenceStore, deletion_id: int) -> None:
        self._store = store
        self._own = store.own
        self.deletion_id = deletion_id

    @property
    def run_id(self) -> str:
        """The run id of the erasure's compaction jobs.

        It never changes, so a continued erasure finds the jobs that it made before the interruption.
        """
        return str(uuid.uuid5(UUID(self._own.table.uuid), f"erasure {self.deletion_id}"))

    def candidates(self) -> Iterator[list[Candidate]]:
        """Yields pages of the files that may have rows of the erasure."""
        after = UUID(int=0)
        while True:
            page = [Candidate(*row) for row in self._rows(_CANDIDATES, after=after, limit=PAGE_FILES)]
            if page:
                yield page
            if len(page) < PAGE_FILES:
                return
            after = page[-1].file_id

    def looked(
        self,
        rows: Mapping[str, int],
        looked: int,
        conn: psycopg.Connection[Any] | None = None,
        *,
        is_freed: bool = False,
    ) -> None:
        """Records that `looked` files were examined, and the number of matching rows in each file.

        `rows` has these numbers by filename. `is_freed` means that the objects of these files were deleted
        already.
        """
        matches = {name: count for name, count in rows.items() if count}
        values = {
            "file_ids": [narrow_id(name) for name in matches],
            "filenames": list(matches),
            "row_counts": list(matches.values()),
            "looked": looked,
            "is_freed": is_freed,
        }
        if conn is None:
            self._rows("looked", **values)
        else:
            conn.execute(_QUERIES["looked"].on(), self._values(values))

    def referenced(self) -> tuple[int, int]:
        """Returns the number of references to files with rows, and the number of those that no job holds."""
        [(all_of_them, free)] = self._rows("referenced")
        return all_of_them, free

    def is_undone(self) -> bool:
        """Returns True if a restore to an earlier moment has undone the erasure's deletion."""
        return bool(self._rows("is_undone")[0][0])

    def release_others(self, *, running_too: bool) -> int:
        """Releases the files with rows that other jobs hold; returns the number of jobs that keep files.

        Running jobs keep their files, unless `running_too`. Also releases the files of the erasure's own
        expired jobs. A job that lost its files can commit nothing.
        """
        left = 0
        for job_id, partition_id, is_running in self._rows("held_by_others", run_id=self.run_id):
            if is_running and not running_too:
                left += 1
            else:
                self._store.unassign_job(job_id, partition_id=partition_id)
        return left

    def to_free(self) -> list[str]:
        """Returns some of the unreferenced files that had rows, and an empty list when all are freed."""
        return [row[0] for row in self._rows("to_free", limit=PAGE_FILES)]

    def freed(self, filenames: Sequence[str]) -> None:
        self._rows("freed", filenames=list(filenames))

    def consumers_behind(self) -> list[str]:
        return [row[0] for row in self._rows("consumers_behind")]

    def writers(self) -> list[tuple[str, str]]:
        """Returns the ids and object prefixes of open write attempts that began before the erasure."""
        return [(row[0], row[1]) for row in self._rows("writers")]

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of the files that were examined, of those that had rows, and of these rows."""
        [(looked, files, rows)] = self._rows("counts")
        return looked, files, rows

    def filenames(self) -> list[str]:
        return [row[0] for row in self._rows("filenames")]

    def finish(self, report: str, *, is_finished: bool) -> None:
        self._rows("finish", report=report, is_finished=is_finished)

    def _rows(self, query: Any, **values: Any) -> list[Any]:
        statement = _QUERIES[query] if isinstance(query, str) else query
        return self._own.rows(statement, self._values(values), operation="erase")

    def _values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**values, "table_id": self._own.table.table_id, "deletion_id": self.deletion_id}


def begin_erasure(
    store: FileReferenceStore, deletions: Deletions, deletion: NewDeletion
) -> tuple[Erasure, datetime, list[Erasure]]:
    """Records a deletion and its erasure in one transaction.

    Returns the erasure, its time, and the unfinished erasures with the same condition, which it takes over.
    The erasure has a deletion of its own. So rows that were committed since the older deletions are erased,
    too.
    """
    older: list[Erasure] = []

    def begin(conn: psycopg.Connection[Any], deletion_id: int) -> None:
        key = {"table_id": store.table.table_id, "deletion_id": deletion_id, "condition": deletion.condition}
        older[:] = [Erasure(store, row[0]) for row in conn.execute(_QUERIES["begin"].on(), key).fetchall()]

    deletion_id, at = deletions.record(deletion, begin)
    return Erasure(store, deletion_id), at, older


def erasure_proofs(store: FileReferenceStore) -> list[str]:
    """Returns the reports of the table's erasures, as JSON, the oldest first."""
    return [row[0] for row in store.own.rows(_QUERIES["proofs"], operation="list erasures")]


def erased_by(store: FileReferenceStore, files: Sequence[str] | None, at: datetime) -> ErasedBy | None:
    """Returns the erasure that removed `files`, given by names or ids, from the history; None without one.

    If `files` is None, returns the last erasure that was still active after the time `at`.
    """
    values = {"files": None if files is None else list(files), "at": at}
    rows = store.own.rows(_QUERIES["erased"], values, operation="find erasures")
    return ErasedBy(*rows[0]) if rows else None


def backups_taken(supplier: Supplier) -> dict[str, list[str]]:
    """Returns the names of the backups that were begun, by the place where they are stored."""
    return dict(run_lookup(supplier, rows_of(_QUERIES["backups_taken"]), operation="find backups"))
