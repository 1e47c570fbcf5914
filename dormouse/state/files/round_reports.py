"""Reports of ingests and rounds, which are listed among the jobs, and the last round of each kind.

A background thread writes the reports of many ingests in one statement, and no ingest waits for it. The end
of each round is recorded, but of rounds that found no work, at most one in a minute. A failure to record it
is logged, and does not make the round fail.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

import psycopg

from dormouse.errors import (
    ConnectionsExhausted,
    InstanceError,
    JobCancelled,
    JobLost,
    TableNotFound,
    one_line,
)
from dormouse.model.locks import process_lock
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement

WAIT_SECONDS = 1.0
PENDING_MAX = 10_000
"""The most reports that are kept while the database cannot be reached; further reports are dropped."""
CHARACTERS_MAX = 1_000
logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "round_reports")
RoundKind = Literal["compaction", "split", "merge", "collection"]
IDLE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class _Report:
    table: str
    began: float
    ended: float
    message: str | None
    error: str | None


@dataclass(slots=True)
class Reported:
    """An ingest that is running. The ingest sets `message` to its result."""

    message: str | None = None


@dataclass
class RoundReports:
    """The reports of one process. Threads share it."""

    supplier: Supplier
    _lock: threading.Lock = field(default_factory=process_lock)
    _pending: list[_Report] = field(default_factory=list)
    _is_writing: bool = False
    _closed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def ingest(self, table: str) -> Iterator[Reported]:
        """Reports an ingest of a table when the context ends, with the message that it set or its error."""
        current, began = Reported(), time.monotonic()
        try:
            yield current
        except (InstanceError, TableNotFound, JobCancelled, JobLost):
            raise
        except Exception as error:
            self._add(_Report(table, began, time.monotonic(), None, _storable(one_line(error))))
            raise
        if current.message is not None:
            self._add(_Report(table, began, time.monotonic(), _storable(current.message), None))

    def close(self) -> None:
        """Writes the pending reports. Ingests that end later are not reported."""
        self._closed.set()
        self._write()

    def _add(self, report: _Report) -> None:
        with self._lock:
            if len(self._pending) < PENDING_MAX:
                self._pending.append(report)
            if self._is_writing or self._closed.is_set():
                return
            self._is_writing = True
        with suppress(RuntimeError):  # no thread can start while the interpreter shuts down
            threading.Thread(target=self._write_soon, name="round reports", daemon=True).start()

    def _write_soon(self) -> None:
        while not self._closed.wait(WAIT_SECONDS):
            self._write()
            with self._lock:
                if not self._pending:
                    self._is_writing = False
                    return

    def _write(self) -> None:
        with self._lock:
            reports, self._pending = self._pending, []
        if not reports:
            return
        now = time.monotonic()
        values = {
            "kind": "round:ingest",
            "worker": process_name(),
            "tables": [report.table for report in reports],
            "seconds": [report.ended - report.began for report in reports],
            "ages": [now - report.ended for report in reports],
            "messages": [report.message for report in reports],
            "errors": [report.error for report in reports],
        }
        try:
            run_statement(self.supplier, rows_of(_QUERIES["report"], values), operation="report ingests")
        except Exception as error:
            logger.warning("%d ingests could not be reported: %s", len(reports), one_line(error))


def process_name() -> str:
    """Returns a name of this process for people: its process id and host."""
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _storable(text: str) -> str:
    return text.replace("\0", "�").encode(errors="replace").decode()[:CHARACTERS_MAX]


@dataclass(frozen=True, slots=True)
class LastRound:
    """The last round of a kind. Times are by the database's clock, and None before a round has ended.

    `error` is the reason, in one line, for which the round failed or a job was given up since; None without
    failures. `failures` counts consecutive rounds that failed.
    """

    kind: RoundKind
    began_at: datetime | None
    ended_at: datetime | None
    error: str | None
    failures: int
    failing_since: datetime | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The number of compaction jobs given up so far, with the reason and time of the last one."""

    jobs: int = 0
    reason: str | None = None
    at: datetime | None = None


@dataclass(slots=True)
class Round:
    """A round that is running.

    `worked` is True if it did any work. `errors` are those in spite of which it continued.
    """

    worked: bool = False
    errors: list[str] = field(default_factory=list)
    outcome: str | None = None
    """The result of the round, in a line for people."""
    goes_on: bool = False
    """True if another process does the rest of the work, and records the round's end."""


class LastRounds:
    """The last rounds of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table

    @contextmanager
    def round(self, kind: RoundKind) -> Iterator[Round]:
        """Runs a round, and records its end, with the error that it raised or those in `Round.errors`.

        First corrects leases that a wrong clock made too long. The end is not recorded when the round was
        interrupted or cancelled, or when the table or the database is not available.
        """
        current, started = Round(), time.monotonic()
        try:
            self._restart_leases()
            yield current
        except (InstanceError, ConnectionsExhausted, TableNotFound, JobCancelled, JobLost):
            raise
        except Exception as error:
            self._remember(kind, started, current, one_line(error))
            raise
        if not current.goes_on:
            self._remember(kind, started, current, _in_one_line(current.errors))

    def _restart_leases(self) -> None:
        try:
            restart_leases(self._supplier)
        except Exception as failure:  # the round itself raises if the database fails
            logger.warning("leases could not be checked: %s", one_line(failure))

    def read(self) -> tuple[tuple[LastRound, ...], GivenUp]:
        """Returns the last round of each kind, and the jobs that were given up."""
        work = rows_of(_QUERIES["rounds"], {"table_id": self._table.table_id})
        rows = run_lookup(self._supplier, work, operation="look up the last rounds")
        given_up = [GivenUp(*row[6:]) for row in rows if row[0] == "compaction"]
        return tuple(LastRound(*row[:6]) for row in rows), (given_up or [GivenUp()])[0]

    def _remember(self, kind: RoundKind, started: float, ended: Round, error: str | None) -> None:
        values = {
            "table_id": self._table.table_id,
            "kind": kind,
            "seconds": time.monotonic() - started,
            "error": error and _without_nul(error),
            "worked": ended.worked,
            "idle_seconds": IDLE_SECONDS,
            "job_kind": f"round:{kind}",
            "outcome": ended.outcome and _without_nul(ended.outcome),
            "worker": process_name(),
        }
        try:
            work = rows_of(_QUERIES["record"], values)
            run_statement(self._supplier, work, operation="record a round")
        except Exception as failure:
            logger.warning(
                "the end of a %s of table %s could not be recorded: %s",
                kind,
                self._table.name,
                one_line(failure),
            )


def count_given_up(conn: psycopg.Connection[Any], table: TableRecord, reason: str) -> None:
    """Counts a compaction job as given up.

    It runs in the transaction that gives the job up, so that the count is exact.
    """
    values = {"table_id": table.table_id, "error": _without_nul(" ".join(reason.split()))}
    conn.execute(_QUERIES["count_given_up"].on(), values)


def jobs_given_up(supplier: Supplier, table_ids: Iterable[int]) -> dict[int, int]:
    """Returns the number of jobs that were given up so far, by table id. Tables without any may be absent."""
    work = rows_of(_QUERIES["given_up"], {"table_ids": list(table_ids)})
    return dict(run_lookup(supplier, work, operation="count jobs given up"))


def rounds_failing(supplier: Supplier) -> int:
    """Returns the number of failing rounds, over all tables and kinds of rounds.

    A kind is failing on a table if its last round failed or gave up jobs.
    """
    work = rows_of(_QUERIES["failing"])
    return int(run_lookup(supplier, work, operation="count rounds that fail")[0][0])


def _in_one_line(errors: list[str]) -> str | None:
    if not errors:
        return None
    first = " ".join(errors[0].split())
    return first if len(errors) == 1 else f"{first} (and {len(errors) - 1:,} more)"


def _without_nul(text: str) -> str:
    return text.replace("\0", "")[:1_000]
