"""What the file reference store answers without changing anything."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg

from dormouse.errors import MetadataDamaged, TableNotFound
from dormouse.errors.moved import SchemaMoved
from dormouse.model.cut import Remembered
from dormouse.model.file_reference import AllFiles, FileReference, FileWithReferences
from dormouse.model.keyed import is_keyed
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text, narrow_bytes, narrow_id
from dormouse.postgres.connection import Isolation, Supplier
from dormouse.postgres.limits import PAGED
from dormouse.postgres.queries import Uuids, bytes_
from dormouse.postgres.transaction import bounded, fetched, run_statement, run_transaction
from dormouse.state.files.layout import (
    Layout,
    OwnTables,
    Parameters,
    dropped_tables,
    key_arrays,
    reference_from_row,
)
from dormouse.state.files.operations import ReferenceState
from dormouse.state.files.totals import Differences, TableTotals

T = TypeVar("T")
DeletionRows = Sequence[tuple[int, str] | tuple[int, str, bool]]
"""Deletions by their numbers, in no order, each with its condition as JSON, and whether it is an erasure."""
PAGE_ROWS = 10_000
_FACTS = ("filename", "byte_count", "row_count", "min_key", "max_key", "last_updated", "digest")
ATTEMPTS_MAX = 30
"""Of a transaction that loses to others: enough when hundreds want the same rows, and serializable."""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of a file. `unreferenced_at`: when its last reference went, if collection knows."""

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: bytes | None
    max_key: bytes | None
    added_at: datetime | None
    unreferenced_at: datetime | None
    digest: bytes | None


class KeyBounds(NamedTuple):
    """What some rows' row keys lie between, each encoded; None: unbounded. Without any, they are all rows."""

    min_keys: Sequence[bytes | None] = ()
    max_keys: Sequence[bytes | None] = ()

    def arrays(self) -> Parameters:
        return {"min_keys": bytes_(self.min_keys), "max_keys": bytes_(self.max_keys)}


class PlannedRows(NamedTuple):
    """What a plan is made of, of one moment.

    Of each reference: partition, filename, whether the file has rows of it alone; the file's bytes, smallest
    and largest key, the number of the last deletion that is not to be applied to it, and those up to that
    which are.
    """

    references: list[Sequence[Any]]
    deletions: DeletionRows


class FileDeletions(NamedTuple):
    """Of a file the number of the last deletion that is not to be applied to it, and its outermost keys.

    And the deletions up to that number which are `left` to be. All None for one that is not tracked.
    """

    till: int | None
    min_key: bytes | None
    max_key: bytes | None
    left: list[int] | None


class FilesDeletions(NamedTuple):
    """The number of the last deletion of a table, deletions, and files by turn."""

    till: int
    deletions: DeletionRows
    files: list[FileDeletions]


class FileReferenceReads:
    """The reads of one table's file reference store; each sees one consistent snapshot."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self.own = OwnTables(supplier, table)
        self._isolation = Isolation(table.properties.isolation)

    @property
    def table(self) -> TableRecord:
        return self.own.table

    @property
    def supplier(self) -> Supplier:
        return self._supplier

    @property
    def _layout(self) -> Layout:
        return self.own.layout

    def file_references(self) -> Iterator[FileReference]:
        """All references, by partition then filename; streamed, and bounded in memory."""
        return map(reference_from_row, self._stream("references", {}))

    def unassigned_file_references(self) -> Iterator[FileReference]:
        """The references that no job holds, by partition then filename; streamed."""
        return map(reference_from_row, self._stream("unassigned_references", {}))

    def file_references_in(self, partition_ids: Iterable[str]) -> list[FileReference]:
        """The references of some partitions, by partition then filename."""
        possible = [partition_id for partition_id in partition_ids if is_text(partition_id)]
        return [reference_from_row(row) for row in self._rows("references_in", {"partition_ids": possible})]

    def files_in(
        self, partition_ids: Iterable[str], *, conn: psycopg.Connection[Any] | None = None
    ) -> list[FileWithReferences]:
        """The files that some partitions refer to, by name, with their references on those alone."""
        wanted = list(partition_ids)

        def work(c: psycopg.Connection[Any]) -> list[FileWithReferences]:
            rows = self._execute(c, "files_in", {"partition_ids": wanted}).fetchall()
            if any(row[0] is None for row in rows):
                raise self._unknown_file(wanted, c)
            return _files(rows)

        return self._run(work, "files_in", conn)

    def planned_on(
        self, partition_ids: Sequence[str], bounds: KeyBounds, conn: psycopg.Connection[Any]
    ) -> tuple[int, int, int, bool, str, PlannedRows]:
        """The table's epoch, when that was made, the schema's version, and references.

        Before these, whether the properties by which rows are merged, hidden and verified are still those
        that are known, and the snapshot.
        All of one moment; those of some partitions, and the pending deletions that may be of rows within the
        bounds. One statement; `conn` is as `following` wants it.
        """
        known = self.table.properties
        shown_by = json.dumps([known.aggregate, known.filter, known.newest_by, known.verify_reads or None])
        values = {"partition_ids": partition_ids, "shown_by": shown_by, **bounds.arrays()}
        head, *rows = self._execute(conn, "plan", values).fetchall() or (None,)
        if head is None or head[0] is None:
            raise TableNotFound.gone(self.table.name)
        if not all(row[-1] for row in rows):
            raise self._unknown_file(partition_ids, conn)
        planned = PlannedRows([row[3:11] for row in rows], head[2] or ())
        return head[0], head[6], head[9], head[5], head[1], planned

    def count_files_in(self, partition_ids: Sequence[str], references_max: int) -> int:
        """How many files some partitions refer to; at least so many, when they have more references."""
        rows = self._rows("count_files", {"partition_ids": partition_ids, "limit": references_max})
        return int(rows[0][0])

    def planned_at(
        self,
        partition_ids: Sequence[str],
        bounds: KeyBounds,
        snapshot: str,
        conn: psycopg.Connection[Any],
        remembered: Remembered | None = None,
    ) -> tuple[int, bool, PlannedRows]:
        """As `planned_on`, as a snapshot had them; of references last whether the file is still known.

        First from when on the log of removals and the files are whole, in microseconds: of an older snapshot
        some references may be missing; and whether the log has all that went since this one. The file of one
        that was collected meanwhile is told by its id. `SchemaMoved` when what is `remembered` of the cut
        with this snapshot holds no more.
        """
        known = remembered or Remembered(-1, -1, "{}")
        values = {"partition_ids": partition_ids, "snapshot": snapshot, **bounds.arrays(), **known._asdict()}
        head, *rows = self._execute(conn, "plan_at", values).fetchall() or (None,)
        if head is None:
            raise TableNotFound.gone(self.table.name)
        if remembered is not None and not head[3]:
            raise SchemaMoved(f"the columns of table {self.table.name!r} were changed, or the cut is gone")
        return head[4], head[9], PlannedRows([row[1:] for row in rows], head[0] or ())

    def has_same_rows(
        self, partition_ids: Sequence[str], bounds: KeyBounds, snapshot: str
    ) -> tuple[bool, DeletionRows]:
        """Whether some partitions still have the rows that a snapshot had; False when that cannot be told.

        Compactions and splits change none. As long as the log of removals reaches back. And the deletions
        since then that may be of rows within the bounds.
        """
        properties = self.table.properties
        is_transformed = properties.filter or properties.aggregate or is_keyed(properties)
        values = {
            "partition_ids": list(partition_ids),
            "snapshot": snapshot,
            "is_transformed": bool(is_transformed),
            **bounds.arrays(),
        }
        rows = self._rows("has_same_rows", values, run=partial(run_transaction, read_only=True, scans=True))
        return bool(rows[0][0]), rows[0][1] or ()

    def deletions_of(self, filenames: Sequence[str], *, retired_too: bool = False) -> FilesDeletions:
        """The deletions that may be of rows of some files, as their keys tell, as they are now.

        Those that readers apply; or all that a restore could make pending again, too.
        """
        values = {
            "file_ids": Uuids(list(map(narrow_bytes, filenames))),
            "retired_too": retired_too,
        }
        till, deletions, *facts = self._rows("deletions_of", values, run=run_statement)[0]
        return FilesDeletions(till, deletions or (), list(map(FileDeletions, *facts)))

    def digests(self, filenames: Sequence[str]) -> dict[str, bytes | None]:
        """Returns the digests of files by name, None for one without; a file that is not known is absent."""
        values = {"file_ids": Uuids(list(map(narrow_bytes, filenames)))}
        return dict(self._rows("digests", values, run=run_statement))

    def partition_to_filenames(self) -> dict[str, list[str]]:
        """The filenames of each partition; partitions without files are absent."""
        return dict(self._rows("partition_to_filenames", run=partial(run_transaction, scans=True)))

    def files_ready_for_gc(self, before: datetime) -> Iterator[str]:
        """Files whose last reference went strictly before a time.

        In pages by id, so that the stream stays whole while its files are deleted.
        """
        after = UUID(int=0)
        limits = {"before": before, "limit": PAGE_ROWS}
        while page := self._rows("ready_for_gc", {**limits, "after": after}):
            yield from (filename for _, filename in page)
            after = page[-1][0]

    def all_files(self, max_unreferenced: int) -> AllFiles:
        """Every referenced file with its references, and the first unreferenced ones by name."""
        limit = {"limit": max_unreferenced + 1}

        def work(conn: psycopg.Connection[Any]) -> AllFiles:
            referenced = self._execute(conn, "referenced_files", {}).fetchall()
            if lost := [row[len(_FACTS) + 1] for row in referenced if row[0] is None]:
                raise self._unknown_file(lost, conn)
            unreferenced = self._execute(conn, "unreferenced_files", limit).fetchall()
            files = [*_files(referenced), *(_file(row) for row in unreferenced[:max_unreferenced])]
            return AllFiles(tuple(files), more_than_max=len(unreferenced) > max_unreferenced)

        snapshot = Isolation.REPEATABLE_READ
        return self.own.run(work, isolation=snapshot, read_only=True, scans=True, operation="all_files")

    def page(self, after: str | None, limit: int) -> list[FileFacts]:
        """At most `limit` files after the file `after`, or from the first on, in the order of their ids."""
        if after is not None and not is_text(after):
            return []
        values = {"after": UUID(int=0) if after is None else narrow_id(after), "limit": limit}

        def work(conn: psycopg.Connection[Any]) -> list[FileFacts]:
            return [FileFacts(*row) for row in self._execute(conn, "file_page", values)]

        return self.own.run(work, read_only=True, operation="file_page")

    def pages(self) -> Iterator[list[FileFacts]]:
        """All files that are tracked, referenced or not, a page at a time."""
        after: str | None = None
        while found := self.page(after, PAGE_ROWS):
            yield found
            after = found[-1].filename

    @property
    def totals(self) -> TableTotals:
        """How much there is of everything."""
        return TableTotals(self.own)

    @property
    def differences(self) -> Differences:
        """What was found to be lost."""
        return Differences(self.own)

    def have_several_files(self) -> bool:
        """Whether any partition has more than one file."""
        return bool(self._rows("several_files", run=partial(run_transaction, scans=True))[0][0])

    def has_no_files(self) -> bool:
        """Whether nothing is tracked; files without references are tracked too."""
        return not self._rows("has_files")[0][0]

    def _unknown_file(self, partition_ids: Sequence[str], conn: psycopg.Connection[Any]) -> Exception:
        """Why a file of some partitions is not known: a conversion meanwhile, or its row is lost."""
        values = {"partition_ids": partition_ids, "layout": self._layout.name}
        for filename, partition_id in self._execute(conn, "lost_file", values).fetchall():
            return MetadataDamaged(
                f"table {self.table.name!r}: the database has lost its row of file {filename!r}, which "
                f"partition {partition_id!r} refers to: 'dormouse check --table {self.table.name}' tells more"
            )
        return pg.SerializationFailure("the layout was converted after the transaction's snapshot")

    def _states(
        self, keys: Sequence[tuple[str, str]], conn: psycopg.Connection[Any] | None = None
    ) -> list[ReferenceState]:
        """Of (partition id, filename)."""
        return self._rows("reference_states", key_arrays(keys), conn)

    def _rows(
        self,
        name: str,
        values: Mapping[str, Any] | None = None,
        conn: psycopg.Connection[Any] | None = None,
        *,
        operation: str | None = None,
        run: Callable[..., list[Any]] = run_transaction,
    ) -> list[Any]:
        """What one statement gives, in a transaction of its own unless it is given a connection in one."""

        def work(c: psycopg.Connection[Any]) -> list[Any]:
            return fetched(self._execute(c, name, values or {}))

        return self._run(work, operation or name, conn, run=run)

    def _stream(self, name: str, values: Parameters) -> Iterator[Sequence[Any]]:
        cursor, stack = self.own.following(lambda: self._open(name, values))
        with dropped_tables(self.table), stack:
            yield from cursor

    def _open(self, name: str, values: Parameters) -> tuple[psycopg.ServerCursor[Any], ExitStack]:
        with ExitStack() as stack:
            conn = stack.enter_context(self._supplier.connection())
            stack.enter_context(bounded(conn, PAGED))
            cursor = stack.enter_context(conn.cursor(name=f"dormouse_{name}"))
            cursor.itersize = PAGE_ROWS
            cursor.execute(self.own.on(name), self._values(values))
            return cursor, stack.pop_all()

    def _execute(
        self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]
    ) -> psycopg.Cursor[Any]:
        return self.own.statement(name).execute(conn, self._values(values))

    def _wait_for_deletions(self, conn: psycopg.Connection[Any]) -> None:
        """First in a transaction that is serializable: its snapshot would be of before it waits for one."""
        if self._isolation is Isolation.SERIALIZABLE:
            conn.execute(self.own.on("wait_for_deletions"))

    def _values(self, values: Mapping[str, Any]) -> Parameters:
        """With what the parts of every layout take."""
        table = self.table
        return {**values, "table_id": table.table_id, "salt_buckets": table.properties.salt_buckets}

    def _run(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        operation: str,
        conn: psycopg.Connection[Any] | None,
        *,
        run: Callable[..., T] = run_transaction,
    ) -> T:
        def once() -> T:
            if conn is not None:
                return work(conn)
            return run(
                self._supplier,
                work,
                isolation=self._isolation,
                attempts_max=ATTEMPTS_MAX,
                operation=operation,
            )

        return self.own.following(once, conn)


def _files(rows: Iterable[Sequence[Any]]) -> list[FileWithReferences]:
    """Of rows that have a file's facts and one of its references each, by file."""
    files = []
    for (filename, *facts), found in groupby(rows, key=itemgetter(*range(len(_FACTS)))):
        references = [reference_from_row(row[len(_FACTS) :]) for row in found]
        files.append(_file((filename, *facts), references))
    return files


def _file(facts: Sequence[Any], references: Sequence[FileReference] = ()) -> FileWithReferences:
    return FileWithReferences(**dict(zip(_FACTS, facts, strict=True)), references=tuple(references))
