"""The file reference store: which files hold a table, and which partitions refer to them.

The semantics are those of GCHQ Sleeper's FileReferenceStore; every update is one set-based statement whose
checks are part of it, in a transaction of its own unless it is given one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from dormouse.errors import (
    DormouseError,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    MetadataDamaged,
    ReplaceRequestsFailed,
    SplitRequestsFailed,
)
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
    group_by_file,
)
from dormouse.model.text import narrow_id
from dormouse.postgres.transaction import run_alone
from dormouse.state.files.holds import lock_history
from dormouse.state.files.layout import reference_arrays, reference_from_row
from dormouse.state.files.operations import Commit, CommitResult, Kind
from dormouse.state.files.updates import Updates


class FileReferenceStore(Updates):
    """Every operation on the files of one table.

    Updates take `commit_id`: a commit that is applied already is not applied again, and the update returns
    False, or raises again what was refused of it. It is kept for ever, unless the commit `commit_expires`:
    then garbage collection forgets it after `history_retention_seconds`. They also take `conn`, a connection
    inside a transaction that the update becomes part of.
    """

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
        self._rows("unassign_job", {"job_id": job_id, "partition_id": partition_id}, conn)

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
            return int(self._execute(conn, "stamp_unreferenced", {}).fetchall()[0][0])

        # at read committed, whatever the table's isolation: its snapshot is later than the lock
        return self.own.run(work, operation="stamp_unreferenced")

    def orphaned(self) -> tuple[int, int]:
        """How many files nothing refers to that garbage collection has not deleted yet, and their bytes."""
        [(files, byte_count)] = self._rows("orphaned")
        return int(files), int(byte_count)

    def forget_expired_commits(self, limit: int) -> int:
        """Forgets commits that expired, at most so many; gives how many."""
        rows = self._rows("forget_expired_commits", {"limit": limit}, operation="forget commits")
        return int(rows[0][0])

    def create(self, conn: psycopg.Connection[Any]) -> None:
        """Makes the table's own PostgreSQL tables; part of creating the table."""
        conn.execute(self._layout.create(self.table.table_id))

    def is_unused(self, conn: psycopg.Connection[Any]) -> bool:
        """Whether the table never had rows; part of dropping it, when no other can add any."""
        [(unused,)] = self._execute(conn, "is_unused", {}).fetchall()
        return bool(unused)

    def drop(self, conn: psycopg.Connection[Any]) -> None:
        """Drops what `create` made; part of dropping the table."""
        self._execute(conn, "forget_table", {})
        # last: it locks the parents, which all tables need
        conn.execute(self._layout.on("drop", self.table.table_id))

    def keep_writers_out(self, conn: psycopg.Connection[Any]) -> None:
        """Waits for what adds references, and lets no other until the transaction ends; for `run_alone`."""
        self._execute(conn, "keep_writers_out", {})

    def clear(self) -> None:
        """Forgets every file of this table, of no other. Updates are before it or after it, whole."""

        def work(conn: psycopg.Connection[Any]) -> None:
            self.keep_writers_out(conn)
            self._execute(conn, "clear", {})

        self._run(work, "clear", None, run=run_alone)

    def restore(
        self,
        snapshot: str,
        at: datetime,
        replaced: Callable[[list[FileReference]], list[FileReference]],
        conn: psycopg.Connection[Any],
    ) -> None:
        """Makes the references what they were in a snapshot, in a transaction that keeps writers out.

        Jobs give up what they hold. `replaced` says which references stand for those that come back.
        """
        references = replaced(self.gone_since(snapshot, conn))
        self._execute(conn, "restore_remove", {"snapshot": snapshot})
        self._execute(conn, "restore_add", {**reference_arrays("ref", references), "at": at})

    def gone_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> list[FileReference]:
        """The references that a snapshot had and that were removed since; the log must reach back to it."""
        rows = self._execute(conn, "gone_since_snapshot", {"snapshot": snapshot}).fetchall()
        if any(row[0] is None for row in rows):
            raise MetadataDamaged(
                f"table {self.table.name!r}: the database has lost rows of files that it had to keep: "
                f"'dormouse check --table {self.table.name}' tells more"
            )
        return [reference_from_row(row) for row in rows]

    def come_since(self, snapshot: str, conn: psycopg.Connection[Any]) -> tuple[int, int, bool]:
        """How many references came since a snapshot, their rows, and whether all of these are exact."""
        [(references, rows, exact)] = self._execute(conn, "come_since_snapshot", {"snapshot": snapshot})
        return references, rows, exact

    def is_assigned(self, requests: Iterable[CheckAssignmentRequest]) -> bool:
        """True when all are assigned to their job, False when any is unassigned.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` when another job holds one.
        """
        keys = [(r, name) for r in requests for name in r.filenames]
        states = self._states([(r.partition_id, f) for r, f in keys])
        for (request, filename), (_, found, job_id, _) in zip(keys, states, strict=True):
            if not found:
                raise FileReferenceNotFound(self.table.name, filename, request.partition_id, request.job_id)
            if job_id not in (None, request.job_id):
                raise FileReferenceAssignedToJob(self.table.name, filename, request.partition_id, job_id)
        return all(job_id is not None for _, _, job_id, _ in states)

    def is_applied(self, commit_id: str) -> bool:
        """Whether the commit is applied: what to ask after `CommitOutcomeUnknown`."""
        return bool(self._rows("applied_source", {"commit_key": narrow_id(commit_id)}))

    def is_of_source(self, commit_id: str, is_source: Callable[[bytes], bool]) -> bool | None:
        """Returns whether an applied commit may be of this data; None when it is not applied.

        `is_source` says whether the data has a digest. It is called only when one was recorded.
        """
        rows = self._rows("applied_source", {"commit_key": narrow_id(commit_id)})
        if not rows:
            return None
        recorded: UUID | None = rows[0][0]
        return recorded is None or is_source(recorded.bytes)

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


def _divided(
    requests: Sequence[Any], result: CommitResult
) -> tuple[list[Any], list[tuple[Any, DormouseError]]]:
    """What succeeded, and what failed with its error."""
    failed = dict(result.failed)
    succeeded = [request for number, request in enumerate(requests) if number not in failed]
    return succeeded, [(requests[number], error) for number, error in result.failed]
