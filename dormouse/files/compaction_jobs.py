"""Compaction jobs: made set-based in SQL, in the transaction that assigns their files."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from typing import Any, Literal

import psycopg
from psycopg import errors as pg

from dormouse.files.own_tables import OwnTables
from dormouse.files.store import FileReferenceStore
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

logger = logging.getLogger(__name__)

LEASE_SECONDS = 6 * 3600.0
Fate = Literal["retry", "given_up", "superseded"]
_QUERIES = load(__package__ or "", "compaction_jobs")


@dataclass(frozen=True, slots=True)
class CompactionInput:
    """A file of a job; `whole`: all its rows are the partition's; `exact`: so many rows are, for certain."""

    filename: str
    row_count: int
    whole: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class CompactionJob:
    """A claim on files of one leaf, to be merged into one. `attempt` counts from 1."""

    job_id: str
    partition_id: str
    attempt: int
    inputs: tuple[CompactionInput, ...]

    @property
    def row_count(self) -> int:
        return sum(item.row_count for item in self.inputs)


@dataclass(frozen=True, slots=True)
class DueJobs:
    """Jobs that nobody runs; bytes as the files' facts tell, in proportion to their rows."""

    jobs: int
    row_count: int
    byte_count: int


class CompactionJobs:
    """The compaction jobs of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord, store: FileReferenceStore) -> None:
        self._supplier = supplier
        self._table = table
        self._own = OwnTables(supplier, table)
        self._store = store

    def create(self) -> int:
        """Makes jobs by the table's strategy and assigns their files; gives how many."""
        properties = self._table.properties
        values = {
            "table_id": self._table.table_id,
            "batch_files": properties.compaction_batch_files,
            "size_ratio": properties.size_ratio,
            "jobs_max": properties.compaction_jobs_max,
        }
        name = f"create_{properties.compaction_strategy}"

        def work(conn: psycopg.Connection[Any]) -> int:
            query = self._own.on(name)
            jobs, whole = conn.execute(query, values).fetchall()[0]
            if not whole:
                raise pg.SerializationFailure("another transaction assigned some of the files meanwhile")
            return int(jobs)

        return self._own.following(
            lambda: run_transaction(self._supplier, work, scans=True, operation="create compaction jobs")
        )

    def take(
        self,
        limit: int,
        lease_seconds: float = LEASE_SECONDS,
        *,
        given_up: Callable[[CompactionJob], object] = lambda _: None,
    ) -> list[CompactionJob]:
        """Leases jobs that nobody runs; none only when none is due.

        A job whose files are gone is forgotten, and one whose runners died at every attempt is given up:
        `given_up` is told of it.
        """
        while jobs := self._lease(limit, lease_seconds):
            hopeless = {job.job_id for job in jobs if self._is_hopeless(job)}
            for job_id in sorted(hopeless):
                self._store.unassign_job(job_id)
            for job in jobs:
                if self._is_spent(job):
                    given_up(job)
            if len(hopeless) < len(jobs):
                return [job for job in jobs if job.job_id not in hopeless]
        return []

    def _lease(self, limit: int, lease_seconds: float) -> list[CompactionJob]:
        values = {"table_id": self._table.table_id, "limit": limit, "lease_seconds": lease_seconds}

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            return conn.execute(self._own.on("take"), values).fetchall()

        rows = self._own.following(lambda: run_transaction(self._supplier, work, operation="take jobs"))
        return [_job(list(group)) for _, group in groupby(rows, key=itemgetter(0, 1))]

    def _is_hopeless(self, job: CompactionJob) -> bool:
        if self._is_spent(job):
            logger.warning(
                "compaction of partition %s of table %s is given up: whoever ran it died, at every attempt",
                job.partition_id,
                self._table.name,
            )
            return True
        return not job.inputs

    def _is_spent(self, job: CompactionJob) -> bool:
        return job.attempt > self._table.properties.compaction_attempts_max

    def fail(self, job: CompactionJob, error: str) -> Fate:
        """Puts a failed job back, or gives it up after its last attempt and releases its files.

        Neither when it is not this attempt's any more: then another has taken or ended it.
        """
        values = self._attempt(job)

        def work(conn: psycopg.Connection[Any]) -> Fate:
            if conn.execute(_QUERIES["hold"].on(), values).fetchone() is None:
                return "superseded"
            if job.attempt >= self._table.properties.compaction_attempts_max:
                self._store.unassign_job(job.job_id, conn=conn)
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

    def due(self) -> DueJobs:
        """What could be taken now."""

        def work(conn: psycopg.Connection[Any]) -> Sequence[Any]:
            rows = conn.execute(self._own.on("due"), {"table_id": self._table.table_id}).fetchall()
            return list(rows[0])

        found = self._own.following(
            lambda: run_transaction(self._supplier, work, scans=True, operation="due jobs")
        )
        return DueJobs(*map(int, found))

    def count(self) -> tuple[int, int]:
        """How many jobs there are, and how many of them are being run."""
        with self._supplier.connection() as conn:
            row = conn.execute(_QUERIES["count"].on(), {"table_id": self._table.table_id}).fetchone()
        return (row[0], row[1]) if row else (0, 0)

    def _attempt(self, job: CompactionJob) -> dict[str, Any]:
        return {
            "table_id": self._table.table_id,
            "job_id": job.job_id,
            "partition_id": job.partition_id,
            "attempt": job.attempt,
        }


def _job(rows: Sequence[Any]) -> CompactionJob:
    job_id, partition_id, attempt = rows[0][:3]
    inputs = tuple(CompactionInput(*row[3:]) for row in rows if row[3] is not None)
    return CompactionJob(job_id, partition_id, attempt, inputs)
