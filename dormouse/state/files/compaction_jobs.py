"""Compaction jobs: one SQL statement makes many jobs and assigns their files to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import psycopg

from dormouse.model.table import REPLACED_ROWS_MAX, ROWS_MAX, TableProperties, TableRecord, is_keyed
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import COMPACTION_SECONDS
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import allow_scans, rows_of, run_transaction
from dormouse.state.files.layout import OwnTables
from dormouse.state.files.round_reports import count_given_up
from dormouse.state.files.store import FileReferenceStore

logger = logging.getLogger(__name__)

LEASE_SECONDS = COMPACTION_SECONDS
RELEASE_BATCH_JOBS = 10_000
OLD_SECONDS = 7 * 24 * 3600.0
"""The age, in seconds, from which a deletion counts as old.

Files with rows of an old pending deletion are merged.
"""

KEYED_SIZE_RATIO_MAX = 0.25
"""The largest `size_ratio` of a keyed table.

The files of a leaf are merged into one when the rows of all files but the largest are at least this fraction
of the largest file's rows.
"""

INLINED_FILES = 500
"""The most inlined files that one job merges."""
KEYED_SIZE_RATIO_MIN = 1 / 16
"""The `size_ratio` of a keyed table whose files beside a leaf's largest have over `REPLACED_ROWS_MAX` rows.

Readers then pay about twice as much, so that fewer rows are enough to merge the files.
"""

REREAD_SECONDS = 3600.0
LOOKED_UP_MAX = 10_000
Fate = Literal["retry", "given_up", "superseded"]
_OF_NO_RUN: dict[str, Any] = {"looks": False, "run_id": None, "run_seconds": 0.0}
_QUERIES = load(__package__ or "", "compaction_jobs")


@dataclass(frozen=True, slots=True)
class CompactionInput:
    """A file that a job merges.

    `whole` is True if all rows of the file belong to the partition. `exact` is True if `row_count` is no
    estimate. `byte_count` and `digest` were recorded when the file was written; they may be missing.
    """

    filename: str
    row_count: int
    whole: bool
    exact: bool
    byte_count: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A claim on files of one leaf, to merge them into one. `attempt` counts from 1.

    A job with `looks` first counts the rows that deletions remove from the files. It merges the files only if
    these rows are many.
    """

    job_id: str
    partition_id: str
    attempt: int
    inputs: tuple[CompactionInput, ...]
    looks: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """The key of the job. The id alone is not unique, as callers may use it for several partitions."""
        return self.job_id, self.partition_id

    @property
    def row_count(self) -> int:
        return sum(item.row_count for item in self.inputs)

    @property
    def row_bytes(self) -> float:
        """The largest average size of a row, in bytes, among the inputs for which an average is known."""
        return max(map(self._row_bytes_of, self.inputs), default=0.0)

    @property
    def byte_count(self) -> float:
        """An estimate of the bytes of all input rows."""
        return sum(each.row_count * (self._row_bytes_of(each) or self.row_bytes) for each in self.inputs)

    @staticmethod
    def _row_bytes_of(file: CompactionInput) -> float:
        """Returns the average size of a row in bytes, or 0 if the file also has rows of other partitions."""
        return (file.byte_count or 0) / file.row_count if file.whole and file.row_count else 0.0

    @property
    def runners_died(self) -> str:
        """The reason for which the job is given up after it was taken more often than allowed."""
        return f"the process that compacted partition {self.partition_id} died, at every attempt"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """The state of a job: how often it was taken, the run of Spark that has it, and its last error."""

    job_id: str
    partition_id: str
    created_at: datetime
    attempts: int
    is_running: bool
    run_id: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class DueJobs:
    """The numbers of jobs that no process runs, and of their rows and bytes.

    The bytes of a file are counted in proportion to the rows of the job's partition.
    """

    jobs: int
    row_count: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class ReleasedJobs:
    """The number of jobs that a run did not finish, and the number of their files, which were released."""

    jobs: int
    files: int


def job_criteria(properties: TableProperties) -> dict[str, Any]:
    """Returns the criteria by which a table's strategy makes jobs."""
    # the other files of a batch cannot have more rows than this many times the largest file's
    others = properties.compaction_batch_files - 1
    ratio = properties.size_ratio if properties.size_ratio < others else others / 2
    many, least = ROWS_MAX, ratio
    if is_keyed(properties):
        # readers look up each row's key in all other files, so a single file is worth more rewriting
        ratio = min(ratio, KEYED_SIZE_RATIO_MAX)
        many, least = REPLACED_ROWS_MAX, KEYED_SIZE_RATIO_MIN
    return {
        "strategy": properties.compaction_strategy,
        "batch_files": properties.compaction_batch_files,
        "size_ratio": ratio,
        "many_rows": many,
        "many_ratio": least,
    }


def inlined_criteria(properties: TableProperties) -> dict[str, Any]:
    """Returns the criteria by which inlined files get jobs: their number, their age and all their bytes."""
    return {
        "files_min": properties.compaction_batch_files,
        "old_seconds": properties.inline_seconds_max,
        "bytes_max": properties.inline_total_bytes_max // 2,
    }


class CompactionJobs:
    """The compaction jobs of one table.

    A job can be assigned to a run of Spark, whose id is a UUID. Until the run's deadline, only processes of
    the run take the job.
    """

    def __init__(self, supplier: Supplier, table: TableRecord, store: FileReferenceStore) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)
        self._store = store

    def create(self, jobs_max: int | None = None, *, full: bool = False) -> int:
        """Makes jobs by the table's strategy and assigns their files; returns the number of new jobs.

        Makes at most `compaction_jobs_max` of the table's properties, or `jobs_max` if that is less. Inlined
        files come first. Examines the leaves that have changed since the last call, and once a day all
        leaves. With `full`, makes jobs for all files of each leaf that has several files, and for inlined
        files, whatever the strategy.
        """
        properties = self._table.properties
        limit = properties.compaction_jobs_max
        limit = limit if jobs_max is None else min(limit, jobs_max)
        made = self._create_of_inlined(limit, inlined_criteria(properties)["files_min"]) if not full else 0
        chosen_by = job_criteria(properties)
        if full:
            # no file is too large for the others
            chosen_by |= {"strategy": "size_ratio", "size_ratio": 0.0}
        values = {"jobs_max": limit - made, **_OF_NO_RUN}
        name = f"create_{chosen_by['strategy']}"
        made += int(self._own.look("jobs", chosen_by, lambda: self._own.layout.queries[name], values))
        return made + (self._create_of_inlined(limit - made, 1) if full else 0)

    def _create_of_inlined(self, jobs_max: int, files_min: int) -> int:
        """Makes jobs that write inlined files as objects; returns the number of new jobs.

        A leaf gets jobs if it has `files_min` inlined files or an old one, or if the table has many bytes.
        """
        values = {
            **inlined_criteria(self._table.properties),
            "inlined_files": INLINED_FILES,
            "files_min": files_min,
            "jobs_max": jobs_max,
            **_OF_NO_RUN,
        }
        return int(self._own.rows("create_of_inlined", values, operation="create jobs")[0][0])

    def create_of_deleted(self, jobs_max: int | None = None, *, full: bool = False) -> int:
        """Makes jobs only because of pending deletions; returns the number of new jobs.

        Some jobs only count the rows that deletions match (`looks`). They are made for files that no job has
        yet read for a deletion by values or for an old deletion. Other jobs merge. They are made for files
        with more than `deletions_max` pending deletions, or with rows of an old deletion. With `full`, each
        deletion counts as old.
        """
        properties = self._table.properties
        limit = properties.compaction_jobs_max if jobs_max is None else jobs_max
        values = {
            "deletions_max": properties.deletions_max,
            "batch_files": properties.compaction_batch_files,
            "old_seconds": 0.0 if full else OLD_SECONDS,
            "reread_seconds": 0.0 if full else REREAD_SECONDS,
            **_OF_NO_RUN,
        }
        made = 0
        for statement, looks in (("create_of_unread", True), ("create_of_deleted", False)):
            chosen = {**values, "looks": looks, "jobs_max": limit - made}
            rows = self._own.rows(statement, chosen, scans=True, operation="create jobs")
            made += int(rows[0][0])
        return made

    def create_of_shared(self, partition_ids: Iterable[str], *, whole: bool = False) -> int:
        """Makes jobs for files of these leaves that also have rows of other partitions; with `whole`, of all.

        Returns the number of new jobs.
        """
        values = {
            "partition_ids": list(partition_ids),
            "whole": whole,
            "batch_files": self._table.properties.compaction_batch_files,
            "jobs_max": self._table.properties.compaction_jobs_max,
            **_OF_NO_RUN,
        }
        return int(self._own.rows("create_of_shared", values, operation="create jobs")[0][0])

    def create_of_erased(self, run_id: str, seconds: float) -> int:
        """Makes jobs for the files in which erasures have found rows; returns the number of new jobs.

        The jobs are assigned to the run `run_id`, which counts as dead after `seconds`.
        """
        values = {
            "batch_files": self._table.properties.compaction_batch_files,
            "jobs_max": self._table.properties.compaction_jobs_max,
            "looks": False,
            "run_id": run_id,
            "run_seconds": seconds,
        }
        return int(self._own.rows("create_of_erased", values, operation="create jobs")[0][0])

    def take(
        self,
        limit: int,
        lease_seconds: float = LEASE_SECONDS,
        *,
        run_id: str | None = None,
        given_up: Callable[[CompactionJob], object] = lambda _: None,
    ) -> list[CompactionJob]:
        """Leases at most `limit` jobs that no process runs; returns an empty list only if no job is due.

        With `run_id`, leases only jobs of that run, at most until the run's deadline. Otherwise, leases only
        jobs that belong to no live run. Deletes jobs that have no files left. Gives up a job whose processes
        died at every attempt, and calls `given_up` with it.
        """
        while jobs := self._lease(limit, lease_seconds, run_id):
            attempts_max = self._table.properties.compaction_attempts_max
            due = []
            for job in jobs:
                if job.inputs and job.attempt <= attempts_max:
                    due.append(job)
                elif not job.inputs:
                    self._store.unassign_job(job.job_id, partition_id=job.partition_id)
                elif self.fail(job, job.runners_died) == "given_up":
                    logger.warning("table %s: a job is given up: %s", self._table.name, job.runners_died)
                    given_up(job)
            if due:
                return due
        return []

    def _lease(self, limit: int, lease_seconds: float, run_id: str | None) -> list[CompactionJob]:
        values = {**self._key(run_id), "limit": limit, "lease_seconds": lease_seconds}
        rows = self._own.rows("take", values, operation="take jobs")
        return [_job(list(group)) for _, group in groupby(rows, key=itemgetter(0, 1))]

    def fail(self, job: CompactionJob, error: str) -> Fate:
        """Makes a failed job available again, or gives it up after its last attempt.

        Returns "retry" or "given_up". Giving up counts the job and releases its files. Returns "superseded",
        and changes nothing, when another process has taken or ended the job.
        """
        values = self._attempt(job)

        def work(conn: psycopg.Connection[Any]) -> Fate:
            if conn.execute(_QUERIES["hold"].on(), values).fetchone() is None:
                return "superseded"
            if job.attempt >= self._table.properties.compaction_attempts_max:
                self._store.unassign_job(job.job_id, partition_id=job.partition_id, conn=conn)
                # last, since it locks a row that other transactions which give up jobs wait for
                count_given_up(conn, self._table, error)
                return "given_up"
            conn.execute(_QUERIES["release"].on(), {**values, "error": error.replace("\0", "")[:1000]})
            return "retry"

        return run_transaction(self._supplier, work, operation="release job")

    def put_back(self, jobs: Iterable[CompactionJob]) -> None:
        """Makes jobs that were taken and not finished available again; does not count this attempt."""
        self._each("put_back", jobs, "return unfinished jobs")

    def renew(self, jobs: Iterable[CompactionJob], lease_seconds: float) -> None:
        """Extends the leases of jobs, except of those that this process lost."""
        self._each("renew", jobs, "renew leases of jobs", lease_seconds=lease_seconds)

    def _each(self, query: str, jobs: Iterable[CompactionJob], operation: str, **more: Any) -> None:
        listed = [{**self._attempt(job), **more} for job in jobs]

        def work(conn: psycopg.Connection[Any]) -> None:
            for values in sorted(listed, key=itemgetter("job_id")):
                conn.execute(_QUERIES[query].on(), values)

        if listed:
            run_transaction(self._supplier, work, operation=operation)

    def hand_over(self, run_id: str, limit: int, seconds: float) -> list[str]:
        """Assigns up to `limit` idle jobs to a run, which counts as dead after `seconds`.

        Returns the ids of the jobs that the run has now, in order. A run that already has jobs of the table
        gets no others, so the call may be repeated.
        """
        values = {**self._key(run_id), "limit": limit, "seconds": seconds}

        def work(conn: psycopg.Connection[Any]) -> list[str]:
            conn.execute(_QUERIES["one_at_a_time"].on(), values)
            return [row[0] for row in conn.execute(_QUERIES["hand_over"].on(), values)]

        return run_transaction(self._supplier, work, operation="assign jobs to a run")

    def release_run(self, run_id: str) -> ReleasedJobs:
        """Deletes the unfinished jobs of a run and releases their files.

        Processes of the run can then commit nothing for these jobs.
        """
        values = {**self._key(run_id), "limit": RELEASE_BATCH_JOBS}
        operation, jobs, files = "release jobs of a run", 0, 0
        while (released := self._own.rows("release_run", values, scans=True, operation=operation)[0])[0]:
            jobs, files = jobs + released[0], files + released[1]
        return ReleasedJobs(jobs, files)

    def due(self, run_id: str | None = None) -> DueJobs:
        """Returns the numbers of the jobs that could be taken now; with `run_id`, by that run."""

        def work(conn: psycopg.Connection[Any]) -> Sequence[Any]:
            # a few jobs are looked up one by one; for many, allow scans
            if conn.execute(self._own.on("count_open"), self._key(run_id)).fetchall()[0][0] > LOOKED_UP_MAX:
                allow_scans(conn)
            rows = conn.execute(self._own.on("due"), self._key(run_id)).fetchall()
            return list(rows[0])

        return DueJobs(*map(int, self._own.run(work, operation="due jobs")))

    def page(self, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[JobFacts]:
        """Returns at most `limit` jobs, sorted by id and partition, that follow the key `after`."""
        values = {
            "table_id": self._table.table_id,
            "job_id": after[0],
            "partition_id": after[1],
            "limit": limit,
        }
        rows = run_transaction(
            self._supplier, rows_of(_QUERIES["page"], values), scans=True, operation="list jobs"
        )
        return [JobFacts(*row) for row in rows]

    def count(self) -> tuple[int, int]:
        """Returns two numbers: all jobs, and those that are running."""
        with self._supplier.connection() as conn:
            row = conn.execute(_QUERIES["count"].on(), {"table_id": self._table.table_id}).fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def _key(self, run_id: str | None) -> dict[str, Any]:
        return {"table_id": self._table.table_id, "run_id": run_id}

    def _attempt(self, job: CompactionJob) -> dict[str, Any]:
        return {
            "table_id": self._table.table_id,
            "job_id": job.job_id,
            "partition_id": job.partition_id,
            "attempt": job.attempt,
        }


def tables_of_run(supplier: Supplier, run_id: str) -> dict[int, int]:
    """Returns the number of jobs that a run has of each table, by table id.

    First deletes its jobs of dropped tables.
    """

    def work(conn: psycopg.Connection[Any]) -> dict[int, int]:
        conn.execute(_QUERIES["forget_run"].on(), {"run_id": run_id})
        return dict(conn.execute(_QUERIES["tables_of_run"].on(), {"run_id": run_id}).fetchall())

    return run_transaction(supplier, work, operation="tables of a run")


def open_jobs(supplier: Supplier, run_id: str) -> dict[int, int]:
    """Returns the number of jobs of each table, by table id, that the run has or could get."""
    work = rows_of(_QUERIES["open_jobs"], {"run_id": run_id})
    return dict(run_transaction(supplier, work, scans=True, operation="open jobs"))


def _job(rows: Sequence[Any]) -> CompactionJob:
    job_id, partition_id, attempt, looks = rows[0][:4]
    inputs = tuple(CompactionInput(*row[4:]) for row in rows if row[4] is not None)
    return CompactionJob(job_id, partition_id, attempt, inputs, looks)
