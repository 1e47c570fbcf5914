"""The file reference store: which files hold a table, and which partitions refer to them.

The semantics are those of GCHQ Sleeper's FileReferenceStore; every update is one set-based statement whose
checks are part of it, in a transaction of its own unless it is given one. Each read sees one consistent
snapshot.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from uuid import UUID

import psycopg
from psycopg import errors as pg

from dormouse.errors import (
    DormouseError,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    MetadataDamaged,
    ReplaceRequestsFailed,
    SplitRequestsFailed,
    TableNotFound,
)
from dormouse.model.cut import Remembered
from dormouse.model.file_reference import (
    AllFiles,
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
    group_by_file,
)
from dormouse.model.schema import SchemaMoved
from dormouse.model.table import TableRecord, is_keyed
from dormouse.model.text import narrow_bytes, narrow_id
from dormouse.model.types import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Uuids, bytes_
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_alone, run_statement, run_transaction
from dormouse.state.files.holds import lock_history
from dormouse.state.files.layout import (
    OwnTables,
    Parameters,
    key_arrays,
    reference_arrays,
    reference_from_row,
)
from dormouse.state.files.operations import Commit, CommitResult, Kind
from dormouse.state.files.totals import Differences, TableTotals
from dormouse.state.files.updates import Whole, apply_commits, whole_statement

DeletionRows = Sequence[tuple[int, str] | tuple[int, str, bool]]
"""Deletions by their numbers, in no order, each with its condition as JSON, and whether it is an erasure."""
PAGE_ROWS = 10_000
_FACTS = ("filename", "byte_count", "row_count", "min_key", "max_key", "last_updated", "digest")


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


class FileReferenceStore:
    """Every operation on the files of one table.

    Updates take `commit_id`: a commit that is applied already is not applied again, and the update returns
    False, or raises again what was refused of it. It is kept for ever, unless the commit `commit_expires`:
    then garbage collection forgets it after `history_retention_seconds`. They also take `conn`, a connection
    inside a transaction that the update becomes part of.
    """

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self.supplier = supplier
        self.own = OwnTables(supplier, table)

    @property
    def table(self) -> TableRecord:
        return self.own.table

    def apply(
        self, kind: Kind, commits: Sequence[Commit], *, conn: psycopg.Connection[Any] | None = None
    ) -> list[CommitResult]:
        """Applies commits of one kind; gives what became of each.

        One does not harm another. Without `conn` the batch is one transaction; with it, part of that one.
        Raises what `run_transaction` raises; then nothing was applied, or its outcome is unknown; and
        `AttemptAbandoned` when an attempt was, and nothing is applied.
        """
        return apply_commits(self.own, kind, commits, conn=conn)

    def whole(self, kind: Kind, commits: Sequence[Commit], names: Sequence[str] = ()) -> Whole | None:
        """The quicker statement for all of them, as a transaction of its own; None where that takes more.

        It fails, too, unless `names` are what the table is called.
        """
        return whole_statement(self.own, kind, commits, names)

    def add_files(
        self,
        references: Iterable[FileReference],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Adds files by their references; `FileAlreadyExists` and nothing added when one is tracked."""
        return self.add_files_with_references(group_by_file(references), commit_id=commit_id, conn=conn)

    def add_files_with_references(
        self,
        files: Iterable[FileWithReferences],
        *,
        commit_id: str | None = None,
        source: bytes | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Adds files, with references or none; `FileAlreadyExists`, and none added, when one is tracked.

        `source` is recorded with the commit id: see `is_of_source`.
        """
        return self._whole("add_files", list(files), commit_id, conn, source=source)

    def assign_job_ids(
        self,
        requests: Iterable[AssignJobIdRequest],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Claims references for jobs: all of them, or none.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` when any job has one already.
        """
        return self._whole("assign_job_ids", list(requests), commit_id, conn)

    def unassign_job(
        self, job_id: str, *, partition_id: str | None = None, conn: psycopg.Connection[Any] | None = None
    ) -> None:
        """Releases every reference that the job holds; a job that holds none is no error.

        With the job's partition, only that one's references are looked at.
        """
        self.own.fetch("unassign_job", {"job_id": job_id, "partition_id": partition_id}, conn)

    def replace_file_references(
        self,
        requests: Iterable[ReplaceFileReferencesRequest],
        *,
        commit_id: str | None = None,
        commit_expires: bool = False,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Replaces jobs' inputs by their outputs.

        The valid requests are applied in one transaction, the others reported in `ReplaceRequestsFailed`,
        with the error of each and no trace of them left.
        """
        listed = list(requests)
        result = self._one("replace_file_references", listed, commit_id, conn, expires=commit_expires)
        if result.failed:
            raise ReplaceRequestsFailed(*_divided(listed, result))
        return result.state == "applied"

    def split_file_references(
        self,
        requests: Iterable[SplitFileReferenceRequest],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Replaces references by others to the same files; batches as for `replace_file_references`."""
        listed = list(requests)
        result = self._one("split_file_references", listed, commit_id, conn)
        if result.failed:
            raise SplitRequestsFailed(*_divided(listed, result))
        return result.state == "applied"

    def delete_collected_files(
        self,
        filenames: Iterable[str],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Forgets files that nothing refers to: all, or none and `FileNotFound` or `FileHasReferences`."""
        return self._whole("delete_collected_files", sorted(set(filenames)), commit_id, conn)

    def stamp_unreferenced(self) -> int:
        """Garbage collection, stage one: stamps files that lost their last reference; gives how many."""

        def work(conn: psycopg.Connection[Any]) -> int:
            # a statement of its own, so that the next one sees what was restored while it waited
            lock_history(conn, self.table.table_id)
            return int(self.own.execute(conn, "stamp_unreferenced", {}).fetchall()[0][0])

        # at read committed, whatever the table's isolation: its snapshot is later than the lock
        return self.own.run(work, operation="stamp_unreferenced")

    def orphaned(self) -> tuple[int, int]:
        """How many files nothing refers to that garbage collection has not deleted yet, and their bytes."""
        [(files, byte_count)] = self.own.fetch("orphaned")
        return int(files), int(byte_count)

    def forget_expired_commits(self, limit: int) -> int:
        """Forgets commits that expired, at most so many; gives how many."""
        rows = self.own.fetch("forget_expired_commits", {"limit": limit}, operation="forget commits")
        return int(rows[0][0])

    def create(self, conn: psycopg.Connection[Any]) -> None:
        """Makes the table's own PostgreSQL tables; part of creating the table."""
        conn.execute(self.own.layout.create(self.table.table_id))

    def is_unused(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether the table never had rows; part of dropping it, when no other can add any."""
        [(unused,)] = self.own.execute(conn, "is_unused", {}).fetchall()
        return bool(unused)

    def drop(self, conn: psycopg.Connection[Any]) -> None:
        """Drops what `create` made; part of dropping the table."""
        self.own.execute(conn, "forget_table", {})
        # last: it locks the parents, which all tables need
        conn.execute(self.own.layout.on("drop", self.table.table_id))

    def keep_writers_out(self, conn: psycopg.Connection[Any]) -> None:
        """Waits for what adds references, and lets no other until the transaction ends; for `run_alone`."""
        self.own.execute(conn, "keep_writers_out", {})

    def clear(self) -> None:
        """Forgets every file of this table, of no other. Updates are before it or after it, whole."""

        def work(conn: psycopg.Connection[Any]) -> None:
            self.keep_writers_out(conn)
            self.own.execute(conn, "clear", {})

        self.own.following_in(work, "clear", None, run=run_alone)

    def restore(
        self,
        snapshot: str,
        at: datetime,
        references: Sequence[FileReference],
        conn: psycopg.Connection[Any],
    ) -> None:
        """Makes the references what they were in a snapshot, in a transaction that keeps writers out.

        Jobs give up what they hold. `references` stand for those that come back, as of `gone_since`.
        """
        self.own.execute(conn, "restore_remove", {"snapshot": snapshot})
        self.own.execute(conn, "restore_add", {**reference_arrays("ref", references), "at": at})

    def gone_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> list[FileReference]:
        """The references that a snapshot had and that were removed since; the log must reach back to it."""
        rows = self.own.execute(conn, "gone_since_snapshot", {"snapshot": snapshot}).fetchall()
        if any(row[0] is None for row in rows):
            raise MetadataDamaged(
                f"table {self.table.name!r}: the database has lost rows of files that it had to keep: "
                f"'dormouse check --table {self.table.name}' tells more"
            )
        return [reference_from_row(row) for row in rows]

    def come_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> tuple[int, int, bool]:
        """How many references came since a snapshot, their rows, and whether all of these are exact."""
        [(references, rows, exact)] = self.own.execute(conn, "come_since_snapshot", {"snapshot": snapshot})
        return references, rows, exact

    def is_assigned(self, requests: Iterable[CheckAssignmentRequest]) -> bool:
        """True when all are assigned to their job, False when any is unassigned.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` when another job holds one.
        """
        keys = [(r, name) for r in requests for name in r.filenames]
        states = self.own.fetch("reference_states", key_arrays((r.partition_id, f) for r, f in keys))
        for (request, filename), (_, found, job_id, _) in zip(keys, states, strict=True):
            if not found:
                raise FileReferenceNotFound(self.table.name, filename, request.partition_id, request.job_id)
            if job_id not in (None, request.job_id):
                raise FileReferenceAssignedToJob(self.table.name, filename, request.partition_id, job_id)
        return all(job_id is not None for _, _, job_id, _ in states)

    def is_applied(self, commit_id: str) -> bool:
        """Whether the commit is applied: what to ask after `CommitOutcomeUnknown`."""
        return bool(self.own.fetch("applied_source", {"commit_key": narrow_id(commit_id)}))

    def is_of_source(self, commit_id: str, is_source: Callable[[bytes], bool]) -> bool | None:
        """Returns whether an applied commit may be of this data; None when it is not applied.

        `is_source` says whether the data has a digest. It is called only when one was recorded.
        """
        rows = self.own.fetch("applied_source", {"commit_key": narrow_id(commit_id)})
        if not rows:
            return None
        recorded: UUID | None = rows[0][0]
        return recorded is None or is_source(recorded.bytes)

    # Reads: each sees one consistent snapshot.

    def file_references(self) -> Iterator[FileReference]:
        """All references, by partition then filename; streamed, and bounded in memory."""
        return map(reference_from_row, self.own.stream("references", {}, PAGE_ROWS))

    def unassigned_file_references(self) -> Iterator[FileReference]:
        """The references that no job holds, by partition then filename; streamed."""
        return map(reference_from_row, self.own.stream("unassigned_references", {}, PAGE_ROWS))

    def file_references_in(self, partition_ids: Iterable[str]) -> list[FileReference]:
        """The references of some partitions, by partition then filename."""
        possible = [partition_id for partition_id in partition_ids if is_text(partition_id)]
        return [
            reference_from_row(row) for row in self.own.fetch("references_in", {"partition_ids": possible})
        ]

    def files_in(
        self, partition_ids: Iterable[str], *, conn: psycopg.Connection[Any] | None = None
    ) -> list[FileWithReferences]:
        """The files that some partitions refer to, by name, with their references on those alone."""
        wanted = list(partition_ids)

        def work(c: psycopg.Connection[Any]) -> list[FileWithReferences]:
            rows = self.own.execute(c, "files_in", {"partition_ids": wanted}).fetchall()
            if any(row[0] is None for row in rows):
                raise self._unknown_file(wanted, c)
            return _files(rows)

        return self.own.following_in(work, "files_in", conn)

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
        head, *rows = self.own.execute(conn, "plan", values).fetchall() or (None,)
        if head is None or head[0] is None:
            raise TableNotFound.gone(self.table.name)
        if not all(row[-1] for row in rows):
            raise self._unknown_file(partition_ids, conn)
        planned = PlannedRows([row[3:11] for row in rows], head[2] or ())
        return head[0], head[6], head[9], head[5], head[1], planned

    def count_files_in(self, partition_ids: Sequence[str], references_max: int) -> int:
        """How many files some partitions refer to; at least so many, when they have more references."""
        rows = self.own.fetch("count_files", {"partition_ids": partition_ids, "limit": references_max})
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
        head, *rows = self.own.execute(conn, "plan_at", values).fetchall() or (None,)
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
        rows = self.own.fetch(
            "has_same_rows", values, run=partial(run_transaction, read_only=True, scans=True)
        )
        return bool(rows[0][0]), rows[0][1] or ()

    def deletions_of(self, filenames: Sequence[str], *, retired_too: bool = False) -> FilesDeletions:
        """The deletions that may be of rows of some files, as their keys tell, as they are now.

        Those that readers apply; or all that a restore could make pending again, too.
        """
        values = {
            "file_ids": Uuids(list(map(narrow_bytes, filenames))),
            "retired_too": retired_too,
        }
        till, deletions, *facts = self.own.fetch("deletions_of", values, run=run_statement)[0]
        return FilesDeletions(till, deletions or (), list(map(FileDeletions, *facts)))

    def digests(self, filenames: Sequence[str]) -> dict[str, bytes | None]:
        """Returns the digests of files by name, None for one without; a file that is not known is absent."""
        values = {"file_ids": Uuids(list(map(narrow_bytes, filenames)))}
        return dict(self.own.fetch("digests", values, run=run_statement))

    def partition_to_filenames(self) -> dict[str, list[str]]:
        """The filenames of each partition; partitions without files are absent."""
        return dict(self.own.fetch("partition_to_filenames", run=partial(run_transaction, scans=True)))

    def files_ready_for_gc(self, before: datetime) -> Iterator[str]:
        """Files whose last reference went strictly before a time.

        In pages by id, so that the stream stays whole while its files are deleted.
        """
        after = UUID(int=0)
        limits = {"before": before, "limit": PAGE_ROWS}
        while page := self.own.fetch("ready_for_gc", {**limits, "after": after}):
            yield from (filename for _, filename in page)
            after = page[-1][0]

    def all_files(self, max_unreferenced: int) -> AllFiles:
        """Every referenced file with its references, and the first unreferenced ones by name."""
        limit = {"limit": max_unreferenced + 1}

        def work(conn: psycopg.Connection[Any]) -> AllFiles:
            referenced = self.own.execute(conn, "referenced_files", {}).fetchall()
            if lost := [row[len(_FACTS) + 1] for row in referenced if row[0] is None]:
                raise self._unknown_file(lost, conn)
            unreferenced = self.own.execute(conn, "unreferenced_files", limit).fetchall()
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
            return [FileFacts(*row) for row in self.own.execute(conn, "file_page", values)]

        return self.own.run(work, read_only=True, operation="file_page")

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
        return bool(self.own.fetch("several_files", run=partial(run_transaction, scans=True))[0][0])

    def has_no_files(self) -> bool:
        """Whether nothing is tracked; files without references are tracked too."""
        return not self.own.fetch("has_files")[0][0]

    def _whole(
        self,
        kind: Kind,
        items: Sequence[Any],
        commit_id: str | None,
        conn: psycopg.Connection[Any] | None,
        *,
        source: bytes | None = None,
    ) -> bool:
        """One commit, all or nothing; False when it was applied before."""
        result = self._one(kind, items, commit_id, conn, source=source)
        if result.error is not None:
            raise result.error
        return result.state == "applied"

    def _one(
        self,
        kind: Kind,
        items: Sequence[Any],
        commit_id: str | None,
        conn: psycopg.Connection[Any] | None,
        *,
        expires: bool = False,
        source: bytes | None = None,
    ) -> CommitResult:
        # an id given here means the caller's job, which may come again with files of other names
        commit = Commit(items, commit_id, expires=expires, same_content=False, source=source)
        return self.apply(kind, [commit], conn=conn)[0]

    def _unknown_file(self, partition_ids: Sequence[str], conn: psycopg.Connection[Any]) -> Exception:
        """Why a file of some partitions is not known: a conversion meanwhile, or its row is lost."""
        values = {"partition_ids": partition_ids, "layout": self.own.layout.name}
        for filename, partition_id in self.own.execute(conn, "lost_file", values).fetchall():
            return MetadataDamaged(
                f"table {self.table.name!r}: the database has lost its row of file {filename!r}, which "
                f"partition {partition_id!r} refers to: 'dormouse check --table {self.table.name}' tells more"
            )
        return pg.SerializationFailure("the layout was converted after the transaction's snapshot")


def _divided(
    requests: Sequence[Any], result: CommitResult
) -> tuple[list[Any], list[tuple[Any, DormouseError]]]:
    """What succeeded, and what failed with its error."""
    failed = dict(result.failed)
    succeeded = [request for number, request in enumerate(requests) if number not in failed]
    return succeeded, [(requests[number], error) for number, error in result.failed]


def _files(rows: Iterable[Sequence[Any]]) -> list[FileWithReferences]:
    """Of rows that have a file's facts and one of its references each, by file."""
    files = []
    for (filename, *facts), found in groupby(rows, key=itemgetter(*range(len(_FACTS)))):
        references = [reference_from_row(row[len(_FACTS) :]) for row in found]
        files.append(_file((filename, *facts), references))
    return files


def _file(facts: Sequence[Any], references: Sequence[FileReference] = ()) -> FileWithReferences:
    return FileWithReferences(**dict(zip(_FACTS, facts, strict=True)), references=tuple(references))
