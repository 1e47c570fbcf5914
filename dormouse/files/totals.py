"""What a table consists of: counted whole once, and from then on by what has changed.

What was counted is remembered with the snapshot that it was counted in. References that this did not see are
new, and the log of removals has those that are gone. So a count costs what has changed since the last, and is
always exact; where it cannot be told, as a file was forgotten with its size, all is counted again. So it is
once a day, by collection: whatever an older Dormouse did to the log meanwhile is made good.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from dormouse.errors import InstanceForbidden, InstanceReadOnly
from dormouse.files.own_tables import OwnTables
from dormouse.postgres.transaction import allow_scans


@dataclass(frozen=True, slots=True)
class Totals:
    """Of one table at one moment; `approximate`: references whose rows are estimated."""

    references: int
    row_count: int
    approximate: int
    files: int
    byte_count: int
    unreferenced_files: int
    partitions: int
    leaves: int

    @property
    def rows_exact(self) -> bool:
        return not self.approximate


@dataclass(frozen=True, slots=True)
class _Count:
    """Totals, as of a snapshot and an epoch; `version`: of what was remembered; `whole`: counted anew.

    `looked_at` is not after the snapshot.
    """

    totals: Totals
    till: str
    epoch: int
    version: int | None
    changes: int
    looked_at: datetime
    whole: bool


class TableTotals:
    """The totals of one table. Each is of one snapshot."""

    def __init__(self, own: OwnTables) -> None:
        self._own = own

    def read(self) -> Totals:
        """The totals; changes nothing, and costs what has changed since they were remembered."""
        return self._count().totals

    def bring_forward(self, *, daily: bool = False) -> Totals:
        """The totals; remembers them where anything has changed, unless the role may only read.

        `daily`: counts all when that was not done for a day.
        """
        found = self._count(daily=daily)
        if found.whole or found.changes:
            with suppress(InstanceForbidden, InstanceReadOnly):
                self._remember(found)
        return found.totals

    def _count(self, *, daily: bool = False) -> _Count:
        # always read committed: days of the log are dropped, whatever an older snapshot could see of them
        return self._own.run(lambda conn: self._count_in(conn, daily), operation="count what there is")

    def _count_in(self, conn: psycopg.Connection[Any], daily: bool) -> _Count:
        key = {"table_id": self._own.table.table_id}
        rows = conn.execute(self._own.on("count_since"), key).fetchall()
        if rows:
            *numbers, till, epoch, version, is_fresh, unknown, changes, looked_at = rows[0]
            if not unknown and (is_fresh or not daily):
                return _Count(
                    Totals(*map(int, numbers)), till, epoch, version, int(changes), looked_at, whole=False
                )
        allow_scans(conn)
        *numbers, till, epoch, version, looked_at = conn.execute(self._own.on("count_all"), key).fetchall()[0]
        return _Count(Totals(*map(int, numbers)), till, epoch, version, 0, looked_at, whole=True)

    def _remember(self, found: _Count) -> None:
        values = {
            "till": found.till,
            "epoch": found.epoch,
            "facts": Jsonb(asdict(found.totals)),
            "version": found.version,
            "looked_at": found.looked_at,
            "whole": found.whole,
        }
        self._own.rows("remember_totals", values, operation="remember totals")
