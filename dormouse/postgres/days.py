"""Tables with one partition for each day, in UTC: made ahead of time, and dropped when no longer needed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.model.loops import tries
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

DAYS_AHEAD = 7
LOCK_WAIT_MS_MAX = 500
_QUERIES = load(__package__, "days")


@dataclass(frozen=True)
class DayPartitions:
    """The partitions of a table that is partitioned by day."""

    table: str

    def name(self, day: date) -> str:
        return f"{self.table}_{day.isoformat().replace('-', '')}"

    def may_roll(self, supplier: Supplier) -> bool:
        """Returns whether the session has the rights of the table's owner, and so may drop partitions."""
        return bool(self._column(supplier, "may_roll")[0])

    def today(self, supplier: Supplier) -> date:
        """Returns the present day, by the database's clock."""
        found: date = self._column(supplier, "today")[0]
        return found

    def days(self, supplier: Supplier) -> list[date]:
        """Returns the days that have a partition, the oldest first."""
        return self._column(supplier, "partition_days")

    def add(self, conn: psycopg.Connection[Any], day: date) -> None:
        """Makes the partition of a day if it does not exist. Any role that may write rows may do this."""
        conn.execute(_QUERIES["add_day"].on(), {"table": self.table, "day": day})

    def drop(self, conn: psycopg.Connection[Any], day: date) -> None:
        """Drops the partition of a day, with its rows."""
        conn.execute(_QUERIES["drop_day"].on(day=self.name(day)))

    def make(self, supplier: Supplier, days: Iterable[date]) -> None:
        """Makes the partitions of days. Skips a day if another process holds a lock; call it again later."""
        for day in days:
            self.attempt(supplier, partial(self.add, day=day))

    def attempt(
        self, supplier: Supplier, work: Callable[[psycopg.Connection[Any]], None], *, attempts: int = 1
    ) -> bool:
        """Runs work that briefly locks a partition or the whole table; returns False if all attempts fail.

        An attempt fails if a lock is busy, or another process made or dropped the partition meanwhile.
        """
        for _ in tries(tries_max=attempts, pause=0):
            try:
                run_transaction(supplier, work, lock_ms=LOCK_WAIT_MS_MAX, operation=f"days of {self.table}")
            except (pg.LockNotAvailable, pg.DuplicateTable, pg.UndefinedTable):
                continue  # busy, or another process did it: no row is lost
            return True
        return False

    def _column(self, supplier: Supplier, name: str) -> list[Any]:
        work = rows_of(_QUERIES[name], {"table": self.table})
        return [row[0] for row in run_lookup(supplier, work, operation=f"days of {self.table}")]


def days_ahead(today: date) -> set[date]:
    """Returns the days whose partitions should exist already: today and the next few."""
    return {today + timedelta(days=n) for n in range(DAYS_AHEAD)}
