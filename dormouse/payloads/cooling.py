"""The work on days: each is cooled, folded, warmed or dropped, the oldest first, each by one worker.

A day that fails holds up no other.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import (
    InstanceError,
    InvalidInput,
    PayloadCorrupt,
    PayloadDayBusy,
    PayloadExpired,
    PayloadRoundFailed,
    PayloadsDiffer,
    one_line,
)
from dormouse.model.loops import ahead
from dormouse.payloads.copying import Contents, Pages, Payload, Slice, Units, Uploads, commit_pointers
from dormouse.payloads.days import DayLease, PayloadDay, Work, cools_at, days, has_rows, leased, read, status
from dormouse.payloads.exchange import Exchange, Names, Tools, check_objects
from dormouse.payloads.fold import fold_day
from dormouse.payloads.keys import columns
from dormouse.payloads.pack import PayloadObjects
from dormouse.payloads.rebuilding import recover_pointers, was_adopted_lately
from dormouse.payloads.rows import DAYS, STATEMENT_CHARACTERS_MAX, STATEMENT_ROWS_MAX
from dormouse.postgres.connection import Supplier
from dormouse.postgres.days import days_ahead
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

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


# A day cools down: its payloads go into objects, and a copy of its partition has pointers to them.


def offload_day(tools: Tools, lease: DayLease) -> bool:
    """Goes on with a day wherever it is; False when the slice is over before it is done.

    Raises `PayloadsDiffer` when the copy is not what the day has: then nothing has changed, and the next try
    begins anew.
    """
    exchange = Exchange(tools, lease)
    try:
        return _phases(tools, lease, exchange)
    except PayloadsDiffer:
        exchange.give_up("open", lambda conn: PayloadObjects.unstage(conn, lease.day, exchange.names.day))
        raise


def _phases(tools: Tools, lease: DayLease, exchange: Exchange) -> bool:
    phase = lease.row().phase
    if phase == "prepare":
        # what a copy that was given up has left
        exchange.prepare(lambda conn: PayloadObjects.unstage(conn, lease.day, exchange.names.day))
        phase = "copy"
    if phase == "copy":
        if not _copy(tools, lease, exchange):
            return False
        exchange.note_copied()
    if phase in {"copy", "verify"}:
        if not check_objects(tools, lease.day):
            return False
        exchange.verify()
        phase = lease.row().phase
    if phase == "swap":
        if not exchange.wait_for_readers():
            return False
        exchange.swap()
        phase = "finish"
    if phase == "finish":
        exchange.finish("offloaded")
        return True
    return False


def _copy(tools: Tools, lease: DayLease, exchange: Exchange) -> bool:
    """Everything after the last key that is done; False when the slice is over before all is."""
    row = lease.row()
    done, options = row.payloads, tools.options
    pages = Pages(tools.supplier, lease.day, options.page_rows_max, tools.step)
    uploads = Uploads(tools.known, lease, options, tools.step)
    with closing(pages.payloads(row.after)) as payloads:
        slice_ = Slice(tools.is_over)
        written = uploads.done(slice_.of(Units(lease.day, options).of(payloads)))
        # the next unit is packed while the pointers of one are added
        with closing(written), closing(ahead(written, 1)) as units:
            for unit in units:
                commit_pointers(lease, exchange.names.copy, unit, tools.step)
                tools.step("committed")
                done += 0 if unit.packed is None else len(unit.packed.entries)
                tools.progress(done, None)
    return not slice_.was_ended


def is_empty(tools: Tools, day: date) -> bool:
    """Whether there is nothing to cool down."""
    return not has_rows(tools.supplier, day)


@dataclass(frozen=True)
class Job:
    """A kind of work with days: in which states they are for it, and what goes on with one."""

    work: Work
    states: Sequence[str]
    on: Callable[[Tools, DayLease], bool]

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


def _offload(tools: Tools, lease: DayLease) -> bool:
    if lease.row().phase == "prepare" and is_empty(tools, lease.day):
        Exchange(tools, lease).end("offloaded")
        return True
    return offload_day(tools, lease)


def _fold(tools: Tools, lease: DayLease) -> bool:
    row, objects = lease.row(), tools.known.of_day(lease.day, "live", "block")
    if (row.phase, row.state) == ("prepare", "offloaded") and not objects and is_empty(tools, lease.day):
        Exchange(tools, lease).end("folded")
        return True
    return fold_day(tools, lease)


def warm_day(tools: Tools, lease: DayLease) -> bool:
    """Goes on with a day; what is hot already is left. False when the slice is over before all is.

    When something is lost the day is as it was, but for what is hot by now.
    """
    try:
        return _warm_day(tools, lease)
    except PayloadCorrupt:
        Exchange(tools, lease).end(lease.row().state)
        raise


def _warm_day(tools: Tools, lease: DayLease) -> bool:
    contents = Contents(tools.objects, tools.known)
    done = 0
    pages = Pages(tools.supplier, lease.day, tools.options.page_rows_max, tools.step)
    blocks = tools.known.of_day(lease.day, "block")
    with closing(pages.payloads(None)) as rows:
        cold = (one for one in contents.current(rows, blocks, None) if one.content is None)
        for portion in portions(contents.each(cold)):
            warm(tools.supplier, lease.day, portion, lease)
            done += len(portion)
            tools.step("warmed")
            tools.progress(done, None)
            if tools.is_over():
                return False
    run_transaction(tools.supplier, lambda conn: _end(conn, lease), operation="rehydrate a day")
    return True


def portions(given: Iterable[tuple[Payload, bytes]]) -> Iterator[list[tuple[Payload, bytes]]]:
    """As many at once as a statement is for."""
    portion, size = list[tuple[Payload, bytes]](), 0
    for one, content in given:
        portion.append((one, content))
        size += len(content)
        if size >= STATEMENT_CHARACTERS_MAX or len(portion) >= STATEMENT_ROWS_MAX:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def warm(
    supplier: Supplier, day: date, portion: Sequence[tuple[Payload, bytes]], lease: DayLease | None = None
) -> None:
    """Has payloads be inline that are in objects still as they were when they were read.

    With the lease of one that works on the day, raises `LeaseLost`.
    """
    given = [(one, content.decode()) for one, content in portion]

    def work(conn: psycopg.Connection[Any]) -> None:
        if lease is not None:
            lease.advance(conn, "copy", payloads=len(portion))
        # first, as those do that work on the day: neither waits for the other's rows
        state = conn.execute(_QUERIES["lock_state"].on(), {"day": day}).fetchall()
        pointed = [(one, text) for one, text in given if not one.in_block]
        in_blocks = [(one, text) for one, text in given if one.in_block]
        name = DAYS.name(day)
        if pointed:
            values = _values(pointed)
            conn.execute(_QUERIES["warm"].on(day=name), values)
        # in a day that has no blocks any more they are hot, or deleted
        if in_blocks and state in ([("folded",)], [("folding",)]):
            conn.execute(_QUERIES["unfold"].on(day=name), _values(in_blocks))

    run_transaction(supplier, work, operation="rehydrate payloads")


def _values(given: Iterable[tuple[Payload, str]]) -> dict[str, Any]:
    found = list(given)
    return {
        **columns(one.key for one, _ in found),
        "contents": [text for _, text in found],
        "object_keys": [one.object_key for one, _ in found],
        "starts": [one.entry and one.entry.start for one, _ in found],
    }


def _end(conn: psycopg.Connection[Any], lease: DayLease) -> None:
    name = DAYS.name(lease.day)
    lease.advance(conn, "finish")
    # who has just deleted something knew of blocks, and said so in a row
    conn.execute(_QUERIES["lock_writers"].on(day=name))
    conn.execute(_QUERIES["forget_deleted"].on(day=name))
    conn.execute(_QUERIES["note_warm"].on(), {"day": lease.day})
    PayloadObjects.change(conn, lease.day, ["live", "block"], "dead")
    lease.end(conn, "open")


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


KIND = "payloads"
"""Of the rounds of an instance."""


@dataclass(frozen=True, slots=True)
class PayloadRound:
    """What a round did. `days_left` have not failed, and can be gone on with at once.

    `backlog_days` are not offloaded yet; at `cools_at` there is another to be offloaded.
    """

    days_expired: int
    days_done: int
    days_left: int
    payloads: int
    objects_deleted: int
    backlog_days: int
    cools_at: datetime | None
    orphaned_bytes: int
    errors: tuple[str, ...]

    def check(self) -> None:
        """Raises `PayloadRoundFailed` when something failed."""
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            raise PayloadRoundFailed(f"{self.errors[0]}{more}")


def run_round(tools: Tools, retention_days: int | None) -> PayloadRound:
    """One round, within the slice that the tools have."""
    errors: list[str] = []

    def tried(what: str, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception as error:
            logger.warning("payloads: %s failed: %s", what, error)
            errors.append(one_line(error))
            return None

    today = DAYS.today(tools.supplier)
    tried("making days", lambda: _make_ahead(tools))
    expired = 0
    if not DAYS.may_roll(tools.supplier):
        return _report_round(tools, 0, (), 0, errors)
    if retention_days is not None:
        before = today - timedelta(days=retention_days)
        gone = tried("expiry", lambda: expire(tools.supplier, before))
        expired = len(gone[0]) if isinstance(gone, tuple) else 0
    reports = []
    if was_adopted_lately(tools.supplier):
        tried("recovery", lambda: recover_pointers(tools))
    for what, work in (
        ("offload", lambda: offload(tools, None, dry_run=False)),
        ("fold", lambda: fold(tools, None)),
    ):
        if isinstance(done := tried(what, work), OffloadReport):
            reports.append(done)
            errors += done.errors
    collected = tried("collection", partial(tools.known.collect, tools.options.kept_seconds))
    deleted = getattr(collected, "deleted", 0)
    return _report_round(tools, expired, tuple(reports), deleted, errors)


def _make_ahead(tools: Tools) -> None:
    have = set(DAYS.days(tools.supplier))
    DAYS.make(tools.supplier, sorted(days_ahead(DAYS.today(tools.supplier)) - have))


def _report_round(
    tools: Tools, expired: int, reports: tuple[OffloadReport, ...], deleted: int, errors: list[str]
) -> PayloadRound:
    may_look = DAYS.may_roll(tools.supplier)  # into days of any owner
    days = tools.days()
    now = status(days, tools.known)
    return PayloadRound(
        days_expired=expired,
        days_done=sum(one.finished for report in reports for one in report.days),
        days_left=sum(report.days_left - len(report.errors) for report in reports),
        payloads=sum(report.payloads for report in reports),
        objects_deleted=deleted,
        backlog_days=now.backlog_days,
        cools_at=cools_at(tools.supplier, days, tools.options.hot_seconds) if may_look else None,
        orphaned_bytes=now.orphaned_bytes,
        errors=tuple(errors),
    )
