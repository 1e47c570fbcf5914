"""How the last round of each kind ended, of a table, and its compaction jobs that were given up.

Remembered at the end of each round, wherever it runs. Rounds that find nothing to do are remembered once a
minute at most; what cannot be remembered is logged, and fails no round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
from dormouse.postgres.leases import restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement
from dormouse.state.files.round_reports import who

RoundKind = Literal["compaction", "split", "merge", "collection"]
IDLE_SECONDS = 60.0

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "last_rounds")


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
            "error": error and _storable(error),
            "worked": ended.worked,
            "idle_seconds": IDLE_SECONDS,
            "job_kind": f"round:{kind}",
            "outcome": ended.outcome and _storable(ended.outcome),
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
    values = {"table_id": table.table_id, "error": _storable(" ".join(reason.split()))}
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


def _storable(text: str) -> str:
    return text.replace("\0", "")[:1_000]
