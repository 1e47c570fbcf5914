"""The file reference store: the files of a table, and the partitions that refer to them.

The semantics are those of GCHQ Sleeper's FileReferenceStore. Every update is one set-based statement that
includes its checks. It runs in a transaction of its own unless the caller gives one. Each read sees one
consistent snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from typing import Any
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
from dormouse.postgres.queries import Call, Uuids
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_alone, run_statement, run_transaction
from dormouse.state.files.facts import (
    FACTS,
    DeletionRows,
    FileDeletions,
    FileFacts,
    FilesDeletions,
    KeyBounds,
    KnownPlan,
    Planned,
    PlannedRows,
    file_of_row,
    files_of_rows,
    shown_by,
)
from dormouse.state.files.holds import lock_history
from dormouse.state.files.inlined import InlinedContent
from dormouse.state.files.layout import (
    OwnTables,
    key_arrays,
    reference_arrays,
    reference_from_row,
)
from dormouse.state.files.operations import Commit, CommitResult, Kind
from dormouse.state.files.totals import Differences, TableTotals
from dormouse.state.files.updates import Whole, apply_commits, whole_statement

PAGE_ROWS = 10_000


class FileReferenceStore:
    """The file reference store of one table.

    Updates take a `commit_id`. If that commit was applied before, the update changes nothing. It then returns
    False, or raises the errors of its refused items again. The id is kept without limit. With
    `commit_expires`, garbage collection deletes it after `history_retention_seconds`. With `conn`, a
    connection inside a transaction, the update is part of that transaction.
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
        """Applies commits of one kind; returns the result of each. A refused one does not affect the others.

        The batch is one transaction, or part of the transaction of `conn`. Raises the errors of
        `run_transaction`. After such an error, nothing was applied, or the outcome is unknown. If the attempt
        of a commit was abandoned, raises `AttemptAbandoned` and applies nothing.
        """
        return apply_commits(self.own, kind, commits, conn=conn)

    def whole(
        self, kind: Kind, commits: Sequence[Commit], names: Sequence[str] = (), ending: Sequence[str] = ()
    ) -> Whole | None:
        """Returns a faster statement that applies all commits in its own transaction, or None if none can.

        It fails unless the table's name is in `names`, if any, and the attempts `ending` can end.
        """
        return whole_statement(self.own, kind, commits, names, ending)

    def add_files(
        self,
        references: Iterable[FileReference],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Adds files by their references.

        Raises `FileAlreadyExists`, and adds no file, if one of them is tracked already.
        """
        return self.add_files_with_references(group_by_file(references), commit_id=commit_id, conn=conn)

    def add_files_with_references(
        self,
        files: Iterable[FileWithReferences],
        *,
        commit_id: str | None = None,
        source: bytes | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Adds files with their references, if any.

        Raises `FileAlreadyExists`, and adds no file, if one of them is tracked already. `source` is a digest
        of the files' data. It is recorded with the commit id for `is_of_source`.
        """
        return self._all_or_none("add_files", list(files), commit_id, conn, source=source)

    def assign_job_ids(
        self,
        requests: Iterable[AssignJobIdRequest],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Assigns all the references to jobs, or none of them.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` if a job holds one of them already.
        """
        return self._all_or_none("assign_job_ids", list(requests), commit_id, conn)

    def unassign_job(
        self, job_id: str, *, partition_id: str | None = None, conn: psycopg.Connection[Any] | None = None
    ) -> None:
        """Releases all references that a job holds.

        With `partition_id`, which must be the job's partition, it reads only the references of that
        partition.
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
        """Replaces the inputs of jobs by their outputs.

        Applies the valid requests in one transaction. If there are invalid ones, then raises
        `ReplaceRequestsFailed` with these and the error of each.
        """
        listed = list(requests)
        result = self._apply_one("replace_file_references", listed, commit_id, conn, expires=commit_expires)
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
        """Replaces references by others to the same files.

        Applies the valid requests in one transaction. If there are invalid ones, then raises
        `SplitRequestsFailed` with these and the error of each.
        """
        listed = list(requests)
        result = self._apply_one("split_file_references", listed, commit_id, conn)
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
        """Deletes the records of unreferenced files, all or none.

        Raises `FileNotFound` or `FileHasReferences` if one of the files cannot be forgotten.
        """
        return self._all_or_none("delete_collected_files", sorted(set(filenames)), commit_id, conn)

    def stamp_unreferenced(self) -> int:
        """Stamps the files that lost their last reference; returns their number.

        This is stage one of garbage collection.
        """

        def work(conn: psycopg.Connection[Any]) -> int:
            # a separate statement, so that the next one sees references restored during the wait
            lock_history(conn, self.table.table_id)
            return int(self.own.execute(conn, "stamp_unreferenced", {}).fetchall()[0][0])

        # at read committed, whatever the table's isolation: its snapshot must be later than the lock
        return self.own.run(work, operation="stamp_unreferenced")

    def orphaned(self) -> tuple[int, int]:
        """Returns the number and bytes of the unreferenced files that are not deleted yet."""
        [(files, byte_count)] = self.own.fetch("orphaned")
        return int(files), int(byte_count)

    def forget_expired_commits(self, limit: int) -> int:
        """Deletes the ids of at most `limit` expired commits; returns the number of deleted ids."""
        rows = self.own.fetch("forget_expired_commits", {"limit": limit}, operation="forget commits")
        return int(rows[0][0])

    def create(self, conn: psycopg.Connection[Any]) -> None:
        """Creates the table's PostgreSQL tables, in the transaction that creates the table."""
        conn.execute(self.own.layout.create(self.table.table_id))

    def is_unused(self, conn: psycopg.Connection[Any]) -> bool:
        """Returns True if the table never had rows. The caller's transaction must keep writers out."""
        [(unused,)] = self.own.execute(conn, "is_unused", {}).fetchall()
        return bool(unused)

    def drop(self, conn: psycopg.Connection[Any]) -> None:
        """Drops the table's PostgreSQL tables, in the transaction that drops the table."""
        self.own.execute(conn, "forget_table", {})
        # last: it locks the parents, which all tables need
        conn.execute(self.own.layout.on("drop", self.table.table_id))

    def keep_writers_out(self, conn: psycopg.Connection[Any]) -> None:
        """Locks out writers that add references until the transaction, one of `run_alone`, ends."""
        self.own.execute(conn, "keep_writers_out", {})

    def clear(self) -> None:
        """Deletes the records of all files of this table.

        A concurrent update takes effect entirely before it or entirely after it.
        """

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
        """Restores the references of a snapshot, in a transaction that keeps writers out.

        Releases the references that jobs hold. `references` are the result of `removed_since`, which are
        added again.
        """
        self.own.execute(conn, "restore_remove", {"snapshot": snapshot})
        self.own.execute(conn, "restore_add", {**reference_arrays("ref", references), "at": at})

    def removed_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> list[FileReference]:
        """Returns the references in a snapshot, back to which the removal log reaches, removed after it."""
        rows = self.own.execute(conn, "gone_since_snapshot", {"snapshot": snapshot}).fetchall()
        if any(row[0] is None for row in rows):
            raise MetadataDamaged(
                f"table {self.table.name!r}: the database has lost rows of files that it had to keep; "
                f"for details, run 'dormouse check --table {self.table.name}'"
            )
        return [reference_from_row(row) for row in rows]

    def added_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> tuple[int, int, bool]:
        """Returns the number of references added after a snapshot, their rows, and True if rows are exact."""
        [(references, rows, exact)] = self.own.execute(conn, "come_since_snapshot", {"snapshot": snapshot})
        return references, rows, exact

    def is_assigned(self, requests: Iterable[CheckAssignmentRequest]) -> bool:
        """Returns True if all files are assigned to the job in their request, False if one is unassigned.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` when another job holds one of them.
        """
        keys = [(r, name) for r in requests for name in r.filenames]
        states = self.own.fetch("reference_states", key_arrays((r.partition_id, f) for r, f in keys))
        for (request, filename), (_, exists, job_id, _) in zip(keys, states, strict=True):
            if not exists:
                raise FileReferenceNotFound(self.table.name, filename, request.partition_id, request.job_id)
            if job_id not in (None, request.job_id):
                raise FileReferenceAssignedToJob(self.table.name, filename, request.partition_id, job_id)
        return all(job_id is not None for _, _, job_id, _ in states)

    def is_applied(self, commit_id: str, conn: psycopg.Connection[Any] | None = None) -> bool:
        """Returns True if a commit is applied. Call it after `CommitOutcomeUnknown`."""
        look_up = self.own.looked_up if conn is None else partial(self.own.fetch, conn=conn)
        return bool(look_up("applied_source", {"commit_key": narrow_id(commit_id)}, operation="find id"))

    def is_of_source(self, commit_id: str, is_source: Callable[[bytes], bool]) -> bool | None:
        """Returns True if an applied commit may contain the caller's data, and None if it is not applied.

        `is_source` is called with the recorded digest, if one was recorded. It returns True if the caller's
        data has this digest.
        """
        rows = self.own.looked_up("applied_source", {"commit_key": narrow_id(commit_id)}, operation="find id")
        if not rows:
            return None
        recorded: UUID | None = rows[0][0]
        return recorded is None or is_source(recorded.bytes)

    # Reads: each sees one consistent snapshot.

    def file_references(self) -> Iterator[FileReference]:
        """Yields all references, sorted by partition and filename, in bounded memory."""
        return map(reference_from_row, self.own.stream("references", {}, PAGE_ROWS))

    def unassigned_file_references(self) -> Iterator[FileReference]:
        """Yields the references that no job holds, sorted by partition and filename."""
        return map(reference_from_row, self.own.stream("unassigned_references", {}, PAGE_ROWS))

    def file_references_in(self, partition_ids: Iterable[str]) -> list[FileReference]:
        """Returns the references of some partitions, sorted by partition and filename."""
        possible = [partition_id for partition_id in partition_ids if is_text(partition_id)]
        return [
            reference_from_row(row) for row in self.own.fetch("references_in", {"partition_ids": possible})
        ]

    def files_in(
        self, partition_ids: Iterable[str], *, conn: psycopg.Connection[Any] | None = None
    ) -> list[FileWithReferences]:
        """Returns the files of some partitions, sorted by name, each with its references from these."""
        wanted = list(partition_ids)

        def work(c: psycopg.Connection[Any]) -> list[FileWithReferences]:
            rows = self.own.execute(c, "files_in", {"partition_ids": wanted}).fetchall()
            if any(row[0] is None for row in rows):
                raise self._unknown_file(wanted, c)
            return files_of_rows(rows)

        return self.own.following_in(work, "files_in", conn)

    def planned_on(
        self,
        partition_ids: Sequence[str],
        bounds: KeyBounds,
        conn: psycopg.Connection[Any],
        known: KnownPlan | None = None,
    ) -> Planned:
        """Returns the data with which a query of some partitions is planned, from one statement.

        `conn` is a connection inside the caller's transaction. See `plan_call` for `known`.
        """
        statement, values = self.plan_call(partition_ids, bounds, known)
        found = self.planned_from(statement.fetch(conn, values))
        if found is None:
            raise self._unknown_file(partition_ids, conn)
        return found

    def plan_call(
        self, partition_ids: Sequence[str], bounds: KeyBounds, known: KnownPlan | None = None
    ) -> Call:
        """Returns the statement that plans a query of some partitions: only what is new, if `known` holds."""
        now = self.table.properties
        shown = shown_by(now.aggregate, now.filter, now.newest_by, now.verify_reads or None)
        values = {"partition_ids": partition_ids, "shown_by": shown, "name": self.table.name}
        values |= bounds.arrays()
        name, new = ("plan", {}) if known is None else ("plan_since", known.values())
        return self.own.statement(name), self.own.values({**values, **new})

    def planned_from(self, rows: Sequence[Sequence[Any]]) -> Planned | None:
        """Returns the data of a plan from the rows of `plan_call`; None if a reference has no file.

        Raises `TableNotFound` without rows, since the table was dropped.
        """
        head, *others = rows or (None,)
        if head is None or head[0] is None:
            raise TableNotFound.gone(self.table.name)
        if not all(row[12] for row in others):
            return None
        contents = [(row[4], row[13]) for row in others if row[13] is not None] if len(head) > 13 else []
        files, is_same = others[: len(others) - len(contents)], head[13:] == (None, True)
        added = [row[3:12] for row in files if row[14]] if is_same else ()
        found = [row[3:12] for row in files]
        planned = PlannedRows(found, head[2] or (), contents, head[4], is_same, added=added)
        return Planned(head[0], head[6], head[9], head[5], head[1], planned)

    def count_files_in(self, partition_ids: Sequence[str], references_max: int) -> int:
        """Returns the number of files of the first `references_max` references of some partitions."""
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
        """Returns the data with which a query of some partitions as of a snapshot is planned.

        Returns:

        1. the time, in microseconds since 1970, from which the removal log and the files are complete
        2. True if the log has all removals since the snapshot
        3. the references and deletions; if the snapshot is older than the log, references may be missing

        Each reference has one more value, True if its file is still known. A collected file has its id as
        name. `remembered` are facts about a cut. Raises `SchemaMoved` if they are outdated.
        """
        known = remembered or Remembered(-1, -1, "{}")
        values = {"partition_ids": partition_ids, "snapshot": snapshot, **bounds.arrays(), **known._asdict()}
        head, *rows = self.own.execute(conn, "plan_at", values).fetchall() or (None,)
        if head is None:
            raise TableNotFound.gone(self.table.name)
        if remembered is not None and not head[3]:
            raise SchemaMoved(f"the columns of table {self.table.name!r} were changed, or the cut deleted")
        return head[4], head[10], PlannedRows([row[1:] for row in rows], head[0] or ())

    def has_same_rows(
        self, partition_ids: Sequence[str], bounds: KeyBounds, snapshot: str
    ) -> tuple[bool, DeletionRows]:
        """Returns True if partitions still have the rows of a snapshot, and a list of deletions.

        The list has the deletions since the snapshot that may affect rows within the bounds. Compactions and
        splits do not change rows. Returns False if the answer is not known, for example because the removal
        log begins after the snapshot.
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
        """Returns the pending deletions that, by the keys of some files, may match rows of these files.

        With `retired_too`, also returns the retired deletions, which a restore could make pending again.
        """
        values = {
            "file_ids": Uuids(list(map(narrow_bytes, filenames))),
            "retired_too": retired_too,
        }
        till, deletions, *facts = self.own.fetch("deletions_of", values, run=run_statement)[0]
        return FilesDeletions(till, deletions or (), list(map(FileDeletions, *facts)))

    def digests(self, filenames: Sequence[str]) -> dict[str, bytes | None]:
        """Returns the digests of tracked files, by name; the digest is None for a file without one."""
        values = {"file_ids": Uuids(list(map(narrow_bytes, filenames)))}
        return dict(self.own.fetch("digests", values, run=run_statement))

    def partition_to_filenames(self) -> dict[str, list[str]]:
        """Returns the filenames of each partition, by partition id. Partitions without files are absent."""
        return dict(self.own.fetch("partition_to_filenames", run=partial(run_transaction, scans=True)))

    def files_ready_for_gc(self, before: datetime) -> Iterator[str]:
        """Yields the names of files whose last reference was removed before a time.

        Reads pages by id, so the caller can delete the files while it iterates.
        """
        after = UUID(int=0)
        limits = {"before": before, "limit": PAGE_ROWS}
        while page := self.own.fetch("ready_for_gc", {**limits, "after": after}):
            yield from (filename for _, filename in page)
            after = page[-1][0]

    def all_files(self, max_unreferenced: int) -> AllFiles:
        """Returns all referenced files with their references, and at most `max_unreferenced` other files.

        The other files are the first ones by name.
        """
        limit = {"limit": max_unreferenced + 1}

        def work(conn: psycopg.Connection[Any]) -> AllFiles:
            referenced = self.own.execute(conn, "referenced_files", {}).fetchall()
            if lost := [row[len(FACTS) + 1] for row in referenced if row[0] is None]:
                raise self._unknown_file(lost, conn)
            unreferenced = self.own.execute(conn, "unreferenced_files", limit).fetchall()
            files = [
                *files_of_rows(referenced),
                *(file_of_row(row) for row in unreferenced[:max_unreferenced]),
            ]
            return AllFiles(tuple(files), more_than_max=len(unreferenced) > max_unreferenced)

        snapshot = Isolation.REPEATABLE_READ
        return self.own.run(work, isolation=snapshot, read_only=True, scans=True, operation="all_files")

    def page(self, after: str | None, limit: int) -> list[FileFacts]:
        """Returns at most `limit` files, sorted by id. They follow the file `after`, if it is given."""
        if after is not None and not is_text(after):
            return []
        values = {"after": UUID(int=0) if after is None else narrow_id(after), "limit": limit}

        def work(conn: psycopg.Connection[Any]) -> list[FileFacts]:
            return [FileFacts(*row) for row in self.own.execute(conn, "file_page", values)]

        return self.own.run(work, read_only=True, operation="file_page")

    @property
    def totals(self) -> TableTotals:
        """The totals of the table: files, rows, bytes and partitions."""
        return TableTotals(self.own)

    @property
    def inlined(self) -> InlinedContent:
        """The content of the table's inlined files."""
        return InlinedContent(self.own)

    @property
    def differences(self) -> Differences:
        """The differences, such as lost references, that counts of the table have found."""
        return Differences(self.own)

    def have_several_files(self) -> bool:
        """Returns True if a partition has more than one file."""
        return bool(self.own.fetch("several_files", run=partial(run_transaction, scans=True))[0][0])

    def has_no_files(self) -> bool:
        """Returns True if no file is tracked. Files without references are tracked, too."""
        return not self.own.fetch("has_files")[0][0]

    def _all_or_none(
        self,
        kind: Kind,
        items: Sequence[Any],
        commit_id: str | None,
        conn: psycopg.Connection[Any] | None,
        *,
        source: bytes | None = None,
    ) -> bool:
        """Applies all items as one commit, or raises the commit's error.

        Returns False if the commit was applied before.
        """
        result = self._apply_one(kind, items, commit_id, conn, source=source)
        if result.error is not None:
            raise result.error
        return result.state == "applied"

    def _apply_one(
        self,
        kind: Kind,
        items: Sequence[Any],
        commit_id: str | None,
        conn: psycopg.Connection[Any] | None,
        *,
        expires: bool = False,
        source: bytes | None = None,
    ) -> CommitResult:
        # the caller's id names its job, which may be repeated with files of other names
        commit = Commit(items, commit_id, expires=expires, same_content=False, source=source)
        return self.apply(kind, [commit], conn=conn)[0]

    def _unknown_file(self, partition_ids: Sequence[str], conn: psycopg.Connection[Any]) -> Exception:
        """Returns the error for a reference of some partitions to a file that is not known.

        Either the file's row is lost, or the table was converted to another layout.
        """
        values = {"partition_ids": partition_ids, "layout": self.own.layout.name}
        for filename, partition_id in self.own.execute(conn, "lost_file", values).fetchall():
            return MetadataDamaged(
                f"table {self.table.name!r}: the database has lost its row of file {filename!r} of partition "
                f"{partition_id!r}; for details, run 'dormouse check --table {self.table.name}'"
            )
        return pg.SerializationFailure("the layout was converted after the transaction's snapshot")


def _divided(
    requests: Sequence[Any], result: CommitResult
) -> tuple[list[Any], list[tuple[Any, DormouseError]]]:
    """Returns two lists: the requests that succeeded, and those that failed with their errors."""
    failed = dict(result.failed)
    succeeded = [request for number, request in enumerate(requests) if number not in failed]
    return succeeded, [(requests[number], error) for number, error in result.failed]
