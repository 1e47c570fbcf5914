"""Which days are worked on: the oldest first, each by one worker, and a bad one holds up no other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import InstanceError, InvalidInput, PayloadDayBusy, PayloadExpired, one_line
from dormouse.payloads.exchange import Names
from dormouse.payloads.fold import fold_day
from dormouse.payloads.lease import Lease, Work, leased, read
from dormouse.payloads.offload import Tools, is_empty, offload_day
from dormouse.payloads.pack import PayloadObjects
from dormouse.payloads.rows import DAYS
from dormouse.payloads.status import PayloadDay, days
from dormouse.payloads.verifying import warm_day
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load

# Days that are past their retention: first the partition, then its objects.

TRIES = 20
_QUERIES = load(__package__ or "", "cooling")


def expire(supplier: Supplier, before: date, *, dry_run: bool = False) -> tuple[list[date], list[date]]:
    """Drops the days before one; gives them, and those that are worked on or used all the time, and stay."""
    due = [one.day for one in days(supplier, 0) if one.day < before]
    if dry_run:
        return due, []
    gone, busy = list[date](), list[date]()
    for day in due:
        try:
            done = DAYS.attempt(supplier, partial(_drop, day=day), attempts=TRIES)
        except PayloadDayBusy:
            done = False
        (gone if done else busy).append(day)
    return gone, busy


def _drop(conn: psycopg.Connection[Any], day: date) -> None:
    names = Names(day)
    if not conn.execute(_QUERIES["expire"].on(), {"day": day, "name": names.day}).fetchall():
        raise PayloadDayBusy(f"payloads of {day}: somebody works on the day")
    if conn.execute(_QUERIES["is_partition"].on(), {"name": names.day}).fetchall()[0][0]:
        DAYS.drop(conn, day)
    conn.execute(_QUERIES["drop_work"].on(copy=names.copy, written=names.written, old=names.old))
    conn.execute(_QUERIES["drop_mirror"].on(mirror=names.mirror))
    PayloadObjects.change(conn, day, ["live", "staged", "block", "pending"], "dead")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DayReport:
    """What was done with a day, by all slices of the work: payloads, bytes of JSON in, bytes of objects out.

    `finished` False: a slice was over, or `error` says why not; what was done is gone on with. In a dry run,
    `payloads` are about those that there are.
    """

    day: date
    work: str
    finished: bool
    payloads: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    objects: int = 0
    seconds: float = 0.0
    swap_lock_ms: float | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class OffloadReport:
    """What a run did, day by day; `days_left` wait for another."""

    days: tuple[DayReport, ...]
    days_left: int
    dry_run: bool = False

    @property
    def payloads(self) -> int:
        return sum(one.payloads for one in self.days)

    @property
    def errors(self) -> tuple[str, ...]:
        """One line for each day that failed."""
        return tuple(one.error for one in self.days if one.error is not None)


@dataclass(frozen=True)
class Job:
    """A kind of work with days: in which states they are for it, and what goes on with one."""

    work: Work
    states: Sequence[str]
    on: Callable[[Tools, Lease], bool]

    def run(self, tools: Tools, day: date) -> DayReport:
        """Raises what goes wrong."""
        with leased(tools.supplier, day, self.work, self.states, tools.options.lease_seconds) as lease:
            tools.step("leased")
            try:
                finished = self.on(tools, lease)
            except psycopg.Error as error:
                raise InstanceError(
                    f"payloads of {day}: {one_line(error)}; it is gone on with later"
                ) from error
        return self.report(tools, day, finished)

    def report(self, tools: Tools, day: date, finished: bool, error: str | None = None) -> DayReport:
        row = read(tools.supplier, day)
        if row is None:
            return DayReport(day, self.work, finished, error=error)
        done = (row.payloads, row.bytes_in, row.bytes_out, row.objects, row.seconds, row.swap_lock_ms)
        return DayReport(day, self.work, finished, *done, error=error)


def _offload(tools: Tools, lease: Lease) -> bool:
    if lease.row().phase == "prepare" and is_empty(tools, lease.day):
        tools.exchange(lease).end("offloaded")
        return True
    return offload_day(tools, lease)


def _fold(tools: Tools, lease: Lease) -> bool:
    row, objects = lease.row(), tools.known.of_day(lease.day, "live", "block")
    if (row.phase, row.state) == ("prepare", "offloaded") and not objects and is_empty(tools, lease.day):
        tools.exchange(lease).end("folded")
        return True
    return fold_day(tools, lease)


OFFLOAD = Job("offload", ("open",), _offload)
FOLD = Job("fold", ("offloaded", "folding", "folded"), _fold)
FOLD_AGAIN_BYTES = 2**20
"""Of a folded day's partition: then it is folded again."""


def offload(tools: Tools, day: date | None, dry_run: bool) -> OffloadReport:
    """One day, also a hot one, or all that wait. What fails with one of many is in the report."""
    found = tools.days()
    if day is not None:
        one = _named(tools, day, found)
        if one.state != "open":
            return OffloadReport((), 0, dry_run)
        waiting = [one]
    else:
        waiting = [one for one in found if one.waits]
    if dry_run:
        reports = [DayReport(one.day, "offload", False, payloads=one.rows) for one in waiting]
        return OffloadReport(tuple(reports), len(waiting), dry_run=True)
    if day is not None:
        return OffloadReport((done := OFFLOAD.run(tools, day),), int(not done.finished))
    # one that was to be hot again, and was left half done
    warm = [(WARM, one) for one in found if one.work == "rehydrate"]
    return drain(tools, [*warm, *((OFFLOAD, one) for one in waiting)])


WARM = Job("rehydrate", ("offloaded", "folded"), warm_day)


def rehydrate(tools: Tools, day: date) -> int:
    """Makes a day hot again; gives how many payloads were cold."""
    if _named(tools, day, tools.days()).state == "open":
        return 0
    return WARM.run(tools, day).payloads


def fold(tools: Tools, day: date | None) -> OffloadReport:
    """Folds one day, or each that has been cold for long enough, or was written to since."""
    found = tools.days()
    if day is not None:
        one = _named(tools, day, found)
        if one.state == "open":
            raise InvalidInput(f"the payloads of {day} are not offloaded yet: do that first")
        return OffloadReport((done := FOLD.run(tools, day),), int(not done.finished))
    last = DAYS.today(tools.supplier) - timedelta(days=tools.options.pointer_days)
    return drain(tools, [(FOLD, one) for one in found if _is_to_be_folded(one, last)])


def _is_to_be_folded(one: PayloadDay, last: date) -> bool:
    if one.work is not None:
        return one.work == "fold"
    if one.state == "folded":
        return one.postgres_bytes >= FOLD_AGAIN_BYTES
    return one.state == "offloaded" and one.day < last


def drain(tools: Tools, work: Iterable[tuple[Job, PayloadDay]]) -> OffloadReport:
    """Does the work in its order, until a slice is over; days that failed last come last."""
    todo = sorted(work, key=lambda one: one[1].error is not None)
    done: list[DayReport] = []
    for job, day in ((job, one.day) for job, one in todo):
        if done and tools.is_over():
            break
        try:
            done.append(job.run(tools, day))
        except PayloadDayBusy as error:
            logger.info("%s", error)
            done.append(job.report(tools, day, finished=False))
        except Exception as error:
            logger.warning("payloads of %s: their %s failed in this round: %s", day, job.work, error)
            done.append(job.report(tools, day, finished=False, error=one_line(error)))
    left = len(todo) - sum(one.finished for one in done)
    return OffloadReport(tuple(done), left)


def _named(tools: Tools, day: date, found: Sequence[PayloadDay]) -> PayloadDay:
    """The day that is asked for; one clear error when it cannot be cooled down."""
    check_day(day)
    by_day = {one.day: one for one in found}
    if day not in by_day:
        if (row := read(tools.supplier, day)) is not None and row.state == "expired":
            raise PayloadExpired(f"payloads of {day} are past their retention, and were dropped")
        raise InvalidInput(f"there are no payloads of {day}: 'dormouse payloads days' lists what there is")
    if not by_day[day].is_closed:
        today = DAYS.today(tools.supplier)
        raise InvalidInput(f"the day {day} is not over: {today - timedelta(days=1)} is the last that is")
    return by_day[day]


def check_day(day: object) -> None:
    """A date, and no datetime, which is of some zone."""
    if type(day) is not date:
        raise InvalidInput(f"a day must be a datetime.date, not {day!r}")
