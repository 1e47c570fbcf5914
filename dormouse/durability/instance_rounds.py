"""Rounds of maintenance that are of the instance, not of a table: when they are due, and how they ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from dormouse.errors import InstanceLocked, one_line
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

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
    def alone(self) -> Iterator[None]:
        """Keeps others from maintaining the instance meanwhile; `InstanceLocked` when another does."""
        # a transaction keeps its session through a pooler, too, and while it is idle no snapshot
        with self._supplier.connection() as conn, conn.transaction():
            # a prepared statement would keep its snapshot until the end, for which payloads wait
            if not conn.execute(_QUERIES["alone"].on(), prepare=False).fetchall()[0][0]:
                raise InstanceLocked("another process maintains this instance: one is enough")
            yield

    def _record(self, kind: str, began: float, error: str | None) -> None:
        values = {"kind": kind, "seconds": time.monotonic() - began, "error": error}
        run_transaction(self._supplier, rows_of(_QUERIES["record"], values), operation="remember a round")
