"""Reports of ingests and rounds: what each did, listed among the jobs, and how the last of each kind ended.

Ingests are reported many in one statement, a moment later; none waits for it. How a round of a table ended is
remembered at its end, wherever it runs. Rounds that find nothing to do are remembered once a minute at most;
what cannot be remembered is logged, and fails no round.
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
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement

WAIT_SECONDS = 1.0
PENDING_MAX = 10_000
"""While the database does not take them, no more than so many are kept."""
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
    """An ingest while it runs; `message` is what came of it."""

    message: str | None = None


@dataclass
class RoundReports:
    """The reports of one process; threads share it."""

    supplier: Supplier
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: list[_Report] = field(default_factory=list)
    _is_writing: bool = False
    _closed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def ingest(self, table: str) -> Iterator[Reported]:
        """One of a table: told of with its message, or with what it raises."""
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
        """Writes what is left; an ingest that ends later is not told of."""
        self._closed.set()
        self._write()

    def _add(self, report: _Report) -> None:
        with self._lock:
            if len(self._pending) < PENDING_MAX:
                self._pending.append(report)
            if self._is_writing or self._closed.is_set():
                return
            self._is_writing = True
        with suppress(RuntimeError):  # no thread starts while the program ends
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
            "worker": who(),
            "tables": [one.table for one in reports],
            "seconds": [one.ended - one.began for one in reports],
            "ages": [now - one.ended for one in reports],
            "messages": [one.message for one in reports],
            "errors": [one.error for one in reports],
        }
        try:
            run_statement(self.supplier, rows_of(_QUERIES["report"], values), operation="report ingests")
        except Exception as error:
            logger.warning("%d ingests are not told of: %s", len(reports), one_line(error))


def who() -> str:
    """The process that works, for people."""
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _storable(text: str) -> str:
    return text.replace("\0", "�").encode(errors="replace").decode()[:CHARACTERS_MAX]


@dataclass(frozen=True, slots=True)
class LastRound:
    """How the last round of a kind ended, with times of the database's clock; None before one has ended.

    `error` is why it failed, or a job was given up since, in one line; None when all is well. `failures`
    counts the rounds that failed one after the other.
    """

    kind: RoundKind
    began_at: datetime | None
    ended_at: datetime | None
    error: str | None
    failures: int
    failing_since: datetime | None


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Compaction jobs that were given up in all, and why and when the last one was."""

    jobs: int = 0
    reason: str | None = None
    at: datetime | None = None


@dataclass(slots=True)
class Round:
    """A round while it runs: whether it did anything, and what failed in it though it went on."""

    worked: bool = False
    errors: list[str] = field(default_factory=list)
    outcome: str | None = None
    """What came of it, in a line for people."""
    goes_on: bool = False
    """Its work is done elsewhere, where its end is remembered."""


class LastRounds:
    """The last rounds of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table

    @contextmanager
    def round(self, kind: RoundKind) -> Iterator[Round]:
        """A round, whose end is remembered: with what it raises, or with the errors that it tells.

        It begins by restarting the leases that a wrong clock made too long. The end of a round that was
        interrupted or cancelled is not remembered, nor where there is nothing to remember it in.
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
        except Exception as failure:  # the round itself says what is wrong
            logger.warning("leases were not looked at: %s", one_line(failure))

    def read(self) -> tuple[tuple[LastRound, ...], GivenUp]:
        """The last round of each kind that there was, and the jobs that were given up."""
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
            "worker": who(),
        }
        try:
            work = rows_of(_QUERIES["record"], values)
            run_statement(self._supplier, work, operation="remember a round")
        except Exception as failure:
            logger.warning(
                "the end of a %s of table %s is not remembered: %s", kind, self._table.name, one_line(failure)
            )


def count_given_up(conn: psycopg.Connection[Any], table: TableRecord, reason: str) -> None:
    """Counts a compaction job in the transaction that gives it up, so that it is never lost."""
    values = {"table_id": table.table_id, "error": _without_nul(" ".join(reason.split()))}
    conn.execute(_QUERIES["count_given_up"].on(), values)


def jobs_given_up(supplier: Supplier, table_ids: Iterable[int]) -> dict[int, int]:
    """How many jobs of these tables were given up in all, by id; tables without any may be absent."""
    work = rows_of(_QUERIES["given_up"], {"table_ids": list(table_ids)})
    return dict(run_lookup(supplier, work, operation="count jobs given up"))


def rounds_failing(supplier: Supplier) -> int:
    """How many kinds of rounds fail, of all tables: their last one did, or gave up jobs."""
    work = rows_of(_QUERIES["failing"])
    return int(run_lookup(supplier, work, operation="count rounds that fail")[0][0])


def _in_one_line(errors: list[str]) -> str | None:
    if not errors:
        return None
    first = " ".join(errors[0].split())
    return first if len(errors) == 1 else f"{first} (and {len(errors) - 1:,} more)"


def _without_nul(text: str) -> str:
    return text.replace("\0", "")[:1_000]
