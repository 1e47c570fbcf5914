"""Scheduled retention and garbage collection, one table after another within the given time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from dormouse.aws.schedules.work import Turn, utc_now
from dormouse.errors import TableNotFound
from dormouse.jobs import claims
from dormouse.model.table import TableRecord
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import restart_leases
from dormouse.state.catalog import Catalog
from dormouse.state.commits import pointers
from dormouse.state.context import TableContext
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.garbage import GarbageCollector, GarbageReport
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.history.due import Kind, due_kinds
from dormouse.state.history.retention import apply_retention

KIND = "garbage"
FAILED_AGAIN_SECONDS = 3_600.0
"""The wait after the failure of a table. Immediate retries would keep the database awake."""

_LAST = "last_table"
_KINDS: tuple[Kind, ...] = ("cut", "collection")
"""The kinds of maintenance that a round does."""
_NOTHING = GarbageReport(0, (), (), 0)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GarbageRound:
    """The result of a round of garbage collection.

    `orphaned_bytes` is the size of unreferenced files that still exist. `due_at` is the time at which more
    work is certain. `last_table` is the id of the last examined table, after which the next round begins.
    """

    tables: int
    tables_left: int
    tables_failed: int
    deleted_files: int
    failed_objects: int
    orphaned_files: int
    orphaned_bytes: int
    due_at: datetime | None
    last_table: int

    @property
    def memory(self) -> dict[str, int]:
        """The values that the next round needs."""
        return {_LAST: self.last_table}


def collect(
    supplier: Supplier,
    objects: ObjectStore,
    turn: Turn,
    *,
    seconds_left: Callable[[], float],
    now: Callable[[], datetime] = utc_now,
) -> GarbageRound:
    """Runs one round over the tables, until `seconds_left` returns 0. Each table has its own transactions.

    A failure of one table is logged, and does not stop the others.
    """
    attempts = WriteAttempts(supplier, objects)
    attempts.collect_abandoned()
    _tidy(supplier, objects)
    order = _after(Catalog(supplier, attempts).tables(), turn.last.memory.get(_LAST, 0) if turn.last else 0)
    reports: list[tuple[TableRecord, GarbageReport | None, tuple[int, int]]] = []
    for table, kinds in zip(order, due_kinds(supplier, order), strict=True):
        if seconds_left() <= 0:
            break
        has_work = not kinds.isdisjoint(_KINDS)
        reports.append((table, *_collect_table(supplier, objects, attempts, table, seconds_left, has_work)))
    return _round(order, reports, now())


def _tidy(supplier: Supplier, objects: ObjectStore) -> None:
    works: list[tuple[str, Callable[[Supplier], object]]] = [
        ("deleting bodies of commit requests", partial(pointers.sweep_bodies, objects=objects)),
        # first, because a wrong clock may have dated what the others examine
        ("restarting leases", restart_leases),
        ("making days of the log of removals", removal_log.roll),
        ("making days of jobs", claims.roll),
    ]
    for what, work in works:
        try:
            work(supplier)
        except Exception:
            logger.exception("%s failed in this round", what)


def _after(tables: Sequence[TableRecord], last: int) -> list[TableRecord]:
    """Returns the tables in the order of their ids, first those after the id `last`, then the others.

    So in time each table is examined.
    """
    return sorted(tables, key=lambda table: (table.table_id <= last, table.table_id))


def _collect_table(
    supplier: Supplier,
    objects: ObjectStore,
    attempts: WriteAttempts,
    table: TableRecord,
    seconds_left: Callable[[], float],
    has_work: bool,
) -> tuple[GarbageReport | None, tuple[int, int]]:
    store = FileReferenceStore(supplier, table)
    try:
        if not has_work:
            return _NOTHING, store.orphaned()
        apply_retention(TableContext("", supplier, objects, table))
        collector = GarbageCollector(supplier, store, objects, attempts)
        report = collector.collect(lambda: seconds_left() <= 0, rolls_log=False)
        for name, error in report.failed:
            logger.warning("%s could not be deleted: %s", name, error, extra={"table": table.name})
        return report, store.orphaned()
    except TableNotFound:
        logger.info("table %s was dropped meanwhile", table.name)
        return _NOTHING, (0, 0)
    except Exception:
        logger.exception("no garbage of table %s in this round", table.name, extra={"table": table.name})
        return None, (0, 0)


def _round(
    order: Sequence[TableRecord],
    reports: Sequence[tuple[TableRecord, GarbageReport | None, tuple[int, int]]],
    now: datetime,
) -> GarbageRound:
    in_time = len(reports) == len(order) and all(report is None or report.whole for _, report, _ in reports)
    waits = [table.properties.files_kept_seconds for table, _, orphaned in reports if orphaned[0]]
    waits += [FAILED_AGAIN_SECONDS for _, report, _ in reports if report is None]
    due_at = now + timedelta(seconds=min(waits)) if waits else None
    return GarbageRound(
        tables=len(reports),
        tables_left=len(order) - len(reports),
        tables_failed=sum(report is None for _, report, _ in reports),
        deleted_files=sum(report.deleted for _, report, _ in reports if report),
        failed_objects=sum(report.failures for _, report, _ in reports if report),
        orphaned_files=sum(orphaned[0] for _, _, orphaned in reports),
        orphaned_bytes=sum(orphaned[1] for _, _, orphaned in reports),
        due_at=due_at if in_time else now,
        last_table=reports[-1][0].table_id if reports else 0,
    )
