"""Rounds of maintenance that are of the instance, not of a table: when they are due, and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

import psycopg

from dormouse.errors import InstanceError, InstanceLocked, MaintenanceTakenOver, one_line
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

if TYPE_CHECKING:
    from dormouse.postgres.session_lock import SessionLock

AGAIN_SECONDS = 3_600.0
"""After which a round that failed is tried again."""

_QUERIES = load(__file__, "instance_rounds")


@dataclass(frozen=True, slots=True)
class InstanceRound:
    """How the last round of a kind ended; `error` is why it failed, `well_at` when one went well last."""

    kind: str
    began_at: datetime
    ended_at: datetime
    error: str | None
    well_at: datetime | None


class Alone:
    """The right to maintain the instance. It ends with a session of the database, which may be lost."""

    def __init__(self, lock: SessionLock) -> None:
        self._lock = lock

    def check(self) -> None:
        """Takes the right anew when the session that had it was lost.

        Raises `MaintenanceTakenOver` when another process has it now, and `InstanceError` when the database
        cannot be reached.
        """
        if not self._lock.is_held() and not self.take():
            raise MaintenanceTakenOver(
                "the database was lost for a moment, and another process maintains this instance since: one "
                "is enough, so this one ends"
            )

    def take(self) -> bool:
        """Tries once to get the right, and returns whether this process has it; raises `InstanceError`."""
        try:
            return self._lock.take()
        except (psycopg.OperationalError, psycopg.InternalError) as error:
            raise InstanceError(f"the database ended the session: {one_line(error)}") from error


class InstanceRounds:
    """The rounds of an instance."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier

    def read(self) -> list[InstanceRound]:
        """How the last of each kind ended."""
        rows = run_lookup(self._supplier, rows_of(_QUERIES["rounds"]), operation="look at rounds")
        return [InstanceRound(*row) for row in rows]

    def is_due(self, kind: str, every_seconds: float) -> bool:
        """Whether so long has passed since the last one, or an hour since one that failed."""
        values = {"kind": kind, "every_seconds": every_seconds, "again_seconds": AGAIN_SECONDS}
        work = rows_of(_QUERIES["is_due"], values)
        return bool(run_lookup(self._supplier, work, operation="look at rounds")[0][0])

    def run(self, kind: str, work: Callable[[], object]) -> None:
        """Runs one, and remembers how it ended."""
        began = time.monotonic()
        try:
            work()
        except Exception as error:
            self._record(kind, began, one_line(error))
            raise
        self._record(kind, began, None)

    def divide(self, kind: str, into: Sequence[str]) -> None:
        """Ends a kind for others: what failed of it failed of each of them, until it is done."""
        values = {"kind": kind, "into": list(into)}
        run_transaction(self._supplier, rows_of(_QUERIES["divide"], values), operation="divide a round")

    @contextmanager
    def alone(self) -> Iterator[Alone]:
        """Keeps other processes from maintaining the instance until the end.

        Raises `InstanceLocked` when another process does it.
        """
        from dormouse.postgres.session_lock import SessionLock

        lock = SessionLock(self._supplier, _QUERIES["alone"])
        try:
            alone = Alone(lock)
            if not alone.take():
                raise InstanceLocked("another process maintains this instance: one is enough")
            yield alone
        finally:
            lock.release()

    def _record(self, kind: str, began: float, error: str | None) -> None:
        values = {"kind": kind, "seconds": time.monotonic() - began, "error": error}
        run_transaction(self._supplier, rows_of(_QUERIES["record"], values), operation="remember a round")
