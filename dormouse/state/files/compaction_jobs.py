"""Compaction jobs: made set-based in SQL, in the transaction that assigns their files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import psycopg

from dormouse.model.table import TableRecord, is_keyed
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
"""A deletion that is pending for longer is worth merging each file that has rows of it."""

KEYED_SIZE_RATIO_MAX = 0.25
"""Rows of a keyed table's other files, in those of the largest, from which on a leaf becomes one file."""

REREAD_SECONDS = 3600.0
LOOKED_UP_MAX = 10_000
Fate = Literal["retry", "given_up", "superseded"]
_OF_NO_RUN: dict[str, Any] = {"looks": False, "run_id": None, "run_seconds": 0.0}
_QUERIES = load(__package__ or "", "compaction_jobs")


@dataclass(frozen=True, slots=True)
class CompactionInput:
    """A file of a job; `whole`: all its rows are the partition's; `exact`: so many rows are, for certain.

    `byte_count` and `digest` are those that were recorded when it was written, if they were.
    """

    filename: str
    row_count: int
    whole: bool
    exact: bool
    byte_count: int | None = None
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A claim on files of one leaf, to be merged into one. `attempt` counts from 1.

    One that `looks` first finds out how many rows deletions take of them, and merges where these are many.
    """

    job_id: str
    partition_id: str
    attempt: int
    inputs: tuple[CompactionInput, ...]
    looks: bool = False

    @property
    def key(self) -> tuple[str, str]:
        """Which it is of all jobs: callers may give one id to files of several partitions."""
        return self.job_id, self.partition_id

    @property
    def row_count(self) -> int:
        return sum(item.row_count for item in self.inputs)

    @property
    def row_bytes(self) -> float:
        """How wide rows are in the widest of the inputs of which it is known."""
        return max(map(self._row_bytes_of, self.inputs), default=0.0)

    @property
    def byte_count(self) -> float:
        """About how many bytes the rows have, as far as it is known."""
        return sum(one.row_count * (self._row_bytes_of(one) or self.row_bytes) for one in self.inputs)

    @staticmethod
    def _row_bytes_of(one: CompactionInput) -> float:
        """Of a file that is the partition's alone."""
        return (one.byte_count or 0) / one.row_count if one.whole and one.row_count else 0.0

    @property
    def runners_died(self) -> str:
        """Why it is given up when it is taken once more than it may be."""
        return f"the process that compacted partition {self.partition_id} died, at every attempt"


@dataclass(frozen=True, slots=True)
class JobFacts:
    """What is known of a job: how often it was taken, by which run of Spark, and how it failed last."""

    job_id: str
    partition_id: str
    created_at: datetime
    attempts: int
    is_running: bool
    run_id: str | None
    last_error: str | None


@dataclass(frozen=True, slots=True)
class DueJobs:
    """Jobs that no process runs; bytes as the files' facts tell, in proportion to their rows."""

    jobs: int
    row_count: int
    byte_count: int


@dataclass(frozen=True, slots=True)
class ReleasedJobs:
    """Jobs that a run did not finish, and the files that are free again."""

    jobs: int
    files: int


class CompactionJobs:
    """The compaction jobs of one table.

    A job can be handed to a run of Spark, whose id is a UUID; until the run's deadline no other takes it.
    """

    def __init__(self, supplier: Supplier, table: TableRecord, store: FileReferenceStore) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)
        self._store = store

    def create(self, jobs_max: int | None = None, *, full: bool = False) -> int:
        """Makes jobs by the table's strategy and assigns their files; gives how many.

        At most `compaction_jobs_max` of the table's properties, or `jobs_max` when that is less. It looks at
        the leaves that have changed since the last time, and once a day at all. With `full`, all files of
        each leaf that has several get jobs, whatever the strategy.
        """
        properties = self._table.properties
        limit = properties.compaction_jobs_max
        # so many others cannot add up to more of the largest
        others = properties.compaction_batch_files - 1
        strategy = "size_ratio" if full else properties.compaction_strategy
        chosen_by = {
            "strategy": strategy,
            "batch_files": properties.compaction_batch_files,
            "size_ratio": properties.size_ratio if properties.size_ratio < others else others / 2,
        }
        if is_keyed(properties):
            # readers look for each row's key in the other files: one file is worth more rewriting
            chosen_by["size_ratio"] = min(chosen_by["size_ratio"], KEYED_SIZE_RATIO_MAX)
        if full:
            chosen_by["size_ratio"] = 0.0  # no file is too large for the others
        values = {"jobs_max": limit if jobs_max is None else min(limit, jobs_max), **_OF_NO_RUN}
        name = f"create_{strategy}"
        return int(self._own.look("jobs", chosen_by, lambda: self._own.layout.queries[name], values))

    def create_of_deleted(self, jobs_max: int | None = None) -> int:
        """Makes jobs of files for their pending deletions alone; how many.

        Each that was not read yet for rows of one by values, or that is old, is to be looked at. Those with
        more than `deletions_max`, or with rows of one that is old, are to be merged.
        """
        properties = self._table.properties
        limit = properties.compaction_jobs_max if jobs_max is None else jobs_max
        values = {
            "deletions_max": properties.deletions_max,
            "batch_files": properties.compaction_batch_files,
            "old_seconds": OLD_SECONDS,
            "reread_seconds": REREAD_SECONDS,
            **_OF_NO_RUN,
        }
        made = 0
        for statement, looks in (("create_of_unread", True), ("create_of_deleted", False)):
            chosen = {**values, "looks": looks, "jobs_max": limit - made}
            rows = self._own.rows(statement, chosen, scans=True, operation="create jobs")
            made += int(rows[0][0])
        return made

    def create_of_shared(self, partition_ids: Iterable[str]) -> int:
        """Makes jobs of the files of leaves that also hold other partitions' rows; gives how many."""
        values = {
            "partition_ids": list(partition_ids),
            "batch_files": self._table.properties.compaction_batch_files,
            "jobs_max": self._table.properties.compaction_jobs_max,
            **_OF_NO_RUN,
        }
        return int(self._own.rows("create_of_shared", values, operation="create jobs")[0][0])

    def create_of_erased(self, run_id: str, seconds: float) -> int:
        """Makes jobs of the files that erasures have found rows in; how many.

        They are the run's, which is taken for dead after so long.
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
        """Leases jobs that no process runs; none only when none is due.

        With `run_id`, those of that run, until its deadline at most; without, those that no live run has. A
        job whose files are gone is forgotten, and one whose runners died at every attempt is given up:
        `given_up` is told of it.
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
        """Puts a failed job back, or gives it up after its last attempt, counts it and releases its files.

        Neither when it is not this attempt's any more: then another has taken or ended it.
        """
        values = self._attempt(job)

        def work(conn: psycopg.Connection[Any]) -> Fate:
            if conn.execute(_QUERIES["hold"].on(), values).fetchone() is None:
                return "superseded"
            if job.attempt >= self._table.properties.compaction_attempts_max:
                self._store.unassign_job(job.job_id, partition_id=job.partition_id, conn=conn)
                # last: the next one to be given up waits for this row
                count_given_up(conn, self._table, error)
                return "given_up"
            conn.execute(_QUERIES["release"].on(), {**values, "error": error.replace("\0", "")[:1000]})
            return "retry"

        return run_transaction(self._supplier, work, operation="release job")

    def put_back(self, jobs: Iterable[CompactionJob]) -> None:
        """Returns jobs that were taken and not finished, as if they had not been taken."""
        listed = [self._attempt(job) for job in jobs]

        def work(conn: psycopg.Connection[Any]) -> None:
            for values in sorted(listed, key=itemgetter("job_id")):
                conn.execute(_QUERIES["put_back"].on(), values)

        if listed:
            run_transaction(self._supplier, work, operation="put jobs back")

    def hand_over(self, run_id: str, limit: int, seconds: float) -> list[str]:
        """Hands up to `limit` jobs, that no process runs, to a run that is taken for dead after `seconds`.

        Gives the ids of the jobs that the run has now, in order. A run that has jobs of the table gets no
        others, so it may be asked again.
        """
        values = {**self._key(run_id), "limit": limit, "seconds": seconds}

        def work(conn: psycopg.Connection[Any]) -> list[str]:
            conn.execute(_QUERIES["one_at_a_time"].on(), values)
            return [row[0] for row in conn.execute(_QUERIES["hand_over"].on(), values)]

        return run_transaction(self._supplier, work, operation="hand jobs over")

    def release_run(self, run_id: str) -> ReleasedJobs:
        """Forgets what a run did not finish, and frees its files; what still runs of it commits nothing."""
        values = {**self._key(run_id), "limit": RELEASE_BATCH_JOBS}
        operation, jobs, files = "release jobs of a run", 0, 0
        while (released := self._own.rows("release_run", values, scans=True, operation=operation)[0])[0]:
            jobs, files = jobs + released[0], files + released[1]
        return ReleasedJobs(jobs, files)

    def due(self, run_id: str | None = None) -> DueJobs:
        """What could be taken now; with `run_id`, by that run."""

        def work(conn: psycopg.Connection[Any]) -> Sequence[Any]:
            # few are looked up one by one, and many by reading all that there is
            if conn.execute(self._own.on("count_open"), self._key(run_id)).fetchall()[0][0] > LOOKED_UP_MAX:
                allow_scans(conn)
            rows = conn.execute(self._own.on("due"), self._key(run_id)).fetchall()
            return list(rows[0])

        return DueJobs(*map(int, self._own.run(work, operation="due jobs")))

    def page(self, after: tuple[str, str] = ("", ""), limit: int = 100) -> list[JobFacts]:
        """At most `limit` jobs, in the order of their ids and partitions, after one's."""
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
        """How many jobs there are, and how many of them are being run."""
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
    """How many jobs a run has of each table, by id, after those of dropped tables are forgotten."""

    def work(conn: psycopg.Connection[Any]) -> dict[int, int]:
        conn.execute(_QUERIES["forget_run"].on(), {"run_id": run_id})
        return dict(conn.execute(_QUERIES["tables_of_run"].on(), {"run_id": run_id}).fetchall())

    return run_transaction(supplier, work, operation="tables of a run")


def open_jobs(supplier: Supplier, run_id: str) -> dict[int, int]:
    """How many jobs of each table, by id, a run has or could be handed."""
    work = rows_of(_QUERIES["open_jobs"], {"run_id": run_id})
    return dict(run_transaction(supplier, work, scans=True, operation="open jobs"))


def _job(rows: Sequence[Any]) -> CompactionJob:
    job_id, partition_id, attempt, looks = rows[0][:4]
    inputs = tuple(CompactionInput(*row[4:]) for row in rows if row[4] is not None)
    return CompactionJob(job_id, partition_id, attempt, inputs, looks)
