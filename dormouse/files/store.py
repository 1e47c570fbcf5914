"""The file reference store: which files hold a table, and which partitions refer to them.

The semantics are those of GCHQ Sleeper's FileReferenceStore; every update is one set-based statement whose
checks are part of it, in a transaction of its own unless it is given one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeVar

import psycopg
from psycopg import errors as pg

from dormouse.errors import (
    DormouseError,
    FileAlreadyExists,
    FileHasReferences,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    ReplaceRequestsFailed,
    SplitRequestsFailed,
)
from dormouse.files import batches, diagnosis
from dormouse.files.parameters import (
    Parameters,
    file_arrays,
    key_arrays,
    narrow_id,
    replace_arrays,
    split_arrays,
)
from dormouse.files.reads import FileReferenceReads
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    CheckAssignmentRequest,
    FileReference,
    FileWithReferences,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
    check_text,
    group_by_file,
    is_text,
)

T = TypeVar("T")
R = TypeVar("R", ReplaceFileReferencesRequest, SplitFileReferenceRequest)
Work = Callable[[psycopg.Connection[Any]], T]


class _LostRace(pg.SerializationFailure):
    """Another transaction changed the same files meanwhile: try the whole transaction again."""


class FileReferenceStore(FileReferenceReads):
    """Every operation on the files of one table.

    Updates take `commit_id`: a commit that is applied already is not applied again, and the update returns
    False. It is kept for ever, unless the commit `commit_expires`: then garbage collection forgets it after
    `history_retention_seconds`. They also take `conn`, a connection inside a transaction that the update
    becomes part of.
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
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Adds files, with references or none; `FileAlreadyExists`, and none added, when one is tracked."""
        listed = list(files)
        if not listed and commit_id is None:
            return True
        self._check_distinct(listed)
        return self._commit(lambda c: self._add(c, listed), "add_files", commit_id, conn)

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
        listed = list(requests)
        if not listed:
            return True
        return self._commit(lambda c: self._assign(c, listed), "assign_job_ids", commit_id, conn)

    def unassign_job(self, job_id: str, *, conn: psycopg.Connection[Any] | None = None) -> None:
        """Releases every reference that the job holds; a job that holds none is no error."""
        values = {"job_id": job_id}
        self._run(lambda c: self._execute(c, "unassign_job", values), "unassign_job", conn)

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
        failed = self._commit_batch(
            listed,
            batches.touched_by_replacement,
            self._replace,
            "replace_file_references",
            commit_id,
            conn,
            expires=commit_expires,
        )
        if failed:
            raise ReplaceRequestsFailed(*batches.outcome(listed, failed))
        return failed is not None

    def split_file_references(
        self,
        requests: Iterable[SplitFileReferenceRequest],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Replaces references by others to the same files; batches as for `replace_file_references`."""
        listed = list(requests)
        failed = self._commit_batch(
            listed, batches.touched_by_split, self._split, "split_file_references", commit_id, conn
        )
        if failed:
            raise SplitRequestsFailed(*batches.outcome(listed, failed))
        return failed is not None

    def delete_collected_files(
        self,
        filenames: Iterable[str],
        *,
        commit_id: str | None = None,
        conn: psycopg.Connection[Any] | None = None,
    ) -> bool:
        """Forgets files that nothing refers to: all, or none and `FileNotFound` or `FileHasReferences`."""
        names = sorted(set(filenames))
        if not names:
            return True
        for name in names:
            if not is_text(name):
                raise FileNotFound(self.table.name, name)
        return self._commit(lambda c: self._forget(c, names), "delete_collected_files", commit_id, conn)

    def stamp_unreferenced(self) -> int:
        """Garbage collection, stage one: stamps files that lost their last reference; gives how many."""
        rows = self._run(
            lambda c: self._execute(c, "stamp_unreferenced", {}).fetchall(), "stamp_unreferenced", None
        )
        return int(rows[0][0])

    def forget_expired_commits(self, limit: int) -> int:
        """Forgets commits that expired, at most so many; gives how many."""
        values = {"limit": limit}
        rows = self._run(
            lambda c: self._execute(c, "forget_expired_commits", values).fetchall(), "forget commits", None
        )
        return int(rows[0][0])

    def create(self, conn: psycopg.Connection[Any]) -> None:
        """Makes the table's own PostgreSQL tables; part of creating the table."""
        conn.execute(self._layout.create(self.table.table_id))

    def drop(self, conn: psycopg.Connection[Any]) -> None:
        """Drops what `create` made; part of dropping the table."""
        conn.execute(self._layout.on("drop", self.table.table_id))

    def clear(self) -> None:
        """Forgets every file of this table, of no other."""
        self._run(lambda c: self._execute(c, "clear", {}), "clear", None)

    def is_assigned(self, requests: Iterable[CheckAssignmentRequest]) -> bool:
        """True when all are assigned to their job, False when any is unassigned.

        Raises `FileReferenceNotFound`, or `FileReferenceAssignedToJob` when another job holds one.
        """
        keys = [(r, name) for r in requests for name in r.filenames]
        states = self._run(
            lambda c: self._states(c, [(r.partition_id, f) for r, f in keys]), "is_assigned", None
        )
        for (request, filename), (_, found, job_id) in zip(keys, states, strict=True):
            if not found:
                raise FileReferenceNotFound(self.table.name, filename, request.partition_id, request.job_id)
            if job_id not in (None, request.job_id):
                raise FileReferenceAssignedToJob(self.table.name, filename, request.partition_id, job_id)
        return all(job_id is not None for _, _, job_id in states)

    def is_applied(self, commit_id: str) -> bool:
        """Whether the commit is applied: what to ask after `CommitOutcomeUnknown`."""
        key = {"commit_key": narrow_id(commit_id)}
        return bool(
            self._run(lambda c: self._execute(c, "is_applied", key).fetchall(), "is_applied", None)[0][0]
        )

    def _commit(
        self, work: Work[None], operation: str, commit_id: str | None, conn: psycopg.Connection[Any] | None
    ) -> bool:
        def recorded(c: psycopg.Connection[Any]) -> bool:
            if not self._record(c, commit_id):
                return False
            work(c)
            return True

        return self._run(recorded, operation, conn)

    def _record(self, conn: psycopg.Connection[Any], commit_id: str | None, *, expires: bool = False) -> bool:
        if commit_id is None:
            return True
        check_text("commit_id", commit_id)
        kept = self.table.properties.history_retention_seconds if expires else None
        values = {"commit_key": narrow_id(commit_id), "commit_id": commit_id, "kept_seconds": kept}
        return self._execute(conn, "record_commit", values).fetchone() is not None

    def _commit_batch(
        self,
        requests: list[R],
        touched: Callable[[R], Collection[Any]],
        apply: Callable[[psycopg.Connection[Any], Sequence[R]], dict[int, DormouseError]],
        operation: str,
        commit_id: str | None,
        conn: psycopg.Connection[Any] | None,
        *,
        expires: bool = False,
    ) -> dict[int, DormouseError] | None:
        """The errors by request number; None when the commit was applied before."""
        if not requests:
            return {}

        def work(c: psycopg.Connection[Any]) -> dict[int, DormouseError] | None:
            if not self._record(c, commit_id, expires=expires):
                return None
            failed: dict[int, DormouseError] = {}
            for numbers in batches.without_conflicts(requests, touched):
                errors = apply(c, [requests[n] for n in numbers])
                failed.update({numbers[n]: error for n, error in errors.items()})
            if len(failed) == len(requests):
                raise batches.AllFailed(failed)
            return failed

        try:
            return self._run(work, operation, conn)
        except batches.AllFailed as all_failed:
            return all_failed.failed

    def _check_distinct(self, files: Sequence[FileWithReferences]) -> None:
        names: set[str] = set()
        for file in files:
            if file.filename in names:
                raise FileAlreadyExists(self.table.name, file.filename)
            names.add(file.filename)
            doubled = batches.first_doubled([reference.partition_id for reference in file.references])
            if doubled is not None:
                raise FileReferenceAlreadyExists(self.table.name, file.filename, doubled)

    def _add(self, conn: psycopg.Connection[Any], files: Sequence[FileWithReferences]) -> None:
        existing = self._execute(conn, "add_files", file_arrays(files)).fetchall()
        if existing:
            raise FileAlreadyExists(self.table.name, existing[0][0])

    def _assign(self, conn: psycopg.Connection[Any], requests: Sequence[AssignJobIdRequest]) -> None:
        keys = [(r, name) for r in requests for name in r.filenames]
        pairs = [(r.partition_id, name) for r, name in keys]
        doubled = batches.first_doubled(pairs)
        if doubled is None:
            values = {**key_arrays(pairs), "job_ids": [r.job_id for r, _ in keys]}
            row = self._execute(conn, "assign", values).fetchone()
            if row is not None and row[0] == len(keys):
                return
        mine = {pair: r.job_id for (r, _), pair in zip(reversed(keys), reversed(pairs), strict=True)}
        for (partition_id, name), (_, found, job) in zip(pairs, self._states(conn, pairs), strict=True):
            if not found:
                raise FileReferenceNotFound(self.table.name, name, partition_id, mine[partition_id, name])
            if job is not None:
                raise FileReferenceAssignedToJob(self.table.name, name, partition_id, job)
        if doubled is None:
            raise _LostRace("the references were released meanwhile")
        partition_id, name = doubled
        raise FileReferenceAssignedToJob(self.table.name, name, partition_id, mine[doubled])

    def _replace(
        self, conn: psycopg.Connection[Any], requests: Sequence[ReplaceFileReferencesRequest]
    ) -> dict[int, DormouseError]:
        failed = diagnosis.outputs_among_inputs(self.table.name, requests)
        numbers = [n for n in range(len(requests)) if n not in failed]
        valid = self._apply(conn, "replace", replace_arrays([requests[n] for n in numbers]))
        refused = [n for i, n in enumerate(numbers) if i not in valid]
        failed.update({n: diagnosis.replacement(self, conn, requests[n]) for n in refused})
        return failed

    def _split(
        self, conn: psycopg.Connection[Any], requests: Sequence[SplitFileReferenceRequest]
    ) -> dict[int, DormouseError]:
        valid = self._apply(conn, "split", split_arrays(requests))
        return {
            n: diagnosis.split(self, conn, request) for n, request in enumerate(requests) if n not in valid
        }

    def _apply(self, conn: psycopg.Connection[Any], name: str, values: Parameters) -> set[int]:
        row = self._execute(conn, name, values).fetchone()
        if row is None or not all(row[1:]):
            raise _LostRace(f"a file or reference of this {name} was made by another transaction")
        return set(row[0])

    def _forget(self, conn: psycopg.Connection[Any], names: Sequence[str]) -> None:
        values = {"file_ids": [narrow_id(name) for name in names], "filenames": names}
        for filename, tracked in self._execute(conn, "forget", values):
            raise (FileHasReferences if tracked else FileNotFound)(self.table.name, filename)
