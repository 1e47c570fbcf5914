"""The work on days of payloads: offload, fold, rehydrate and expire.

Only one worker at a time works on a day. The oldest day comes first. If the work on a day fails, the work on
other days goes on.
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

# Expiry: drops a day's partition, and marks its objects for garbage collection.

TRIES = 20
_QUERIES = load(__package__ or "", "cooling")


def expire(supplier: Supplier, before: date, *, dry_run: bool = False) -> tuple[list[date], list[date]]:
    """Drops the days before a date and marks their objects as dead.

    Returns two lists: the dropped days, and the days that were too busy to drop. With `dry_run`, drops
    nothing and returns all days before the date as the first list.
    """
    due = [each.day for each in days(supplier, 0) if each.day < before]
    if dry_run:
        return due, []
    dropped, busy = list[date](), list[date]()
    for day in due:
        try:
            done = DAYS.attempt(supplier, partial(_drop, day=day), attempts=TRIES)
        except PayloadDayBusy:
            done = False
        (dropped if done else busy).append(day)
    return dropped, busy


def _drop(conn: psycopg.Connection[Any], day: date) -> None:
    names = Names(day)
    if not conn.execute(_QUERIES["expire"].on(), {"day": day, "name": names.day}).fetchall():
        raise PayloadDayBusy(f"payloads of {day}: another worker holds the day")
    if conn.execute(_QUERIES["is_partition"].on(), {"name": names.day}).fetchall()[0][0]:
        DAYS.drop(conn, day)
    conn.execute(_QUERIES["drop_work"].on(copy=names.copy, written=names.written, old=names.old))
    conn.execute(_QUERIES["drop_mirror"].on(mirror=names.mirror))
    PayloadObjects.change(conn, day, ["live", "staged", "block", "pending"], "dead")


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DayReport:
    """The progress of one kind of work on a day, summed over all runs of this work.

    `bytes_in` counts bytes of JSON, and `bytes_out` bytes of objects. `finished` is False if a time limit
    ended the run, or if the work failed with `error`. The next run then continues the work. In a dry run,
    `payloads` is an estimate of the day's payloads.
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
    """The results of a run, with one report for each day.

    `days_left` is the number of days left for the next run.
    """

    days: tuple[DayReport, ...]
    days_left: int
    dry_run: bool = False

    @property
    def payloads(self) -> int:
        return sum(day.payloads for day in self.days)

    @property
    def errors(self) -> tuple[str, ...]:
        """The error messages of the days that failed."""
        return tuple(day.error for day in self.days if day.error is not None)


# Offload: packs a day's payloads into objects, and puts pointers to them into a copy of its partition.


def offload_day(tools: Tools, lease: DayLease) -> bool:
    """Offloads a day, beginning with the phase at which an earlier run stopped.

    Returns False if the time limit ends the work early. Raises `PayloadsDiffer` if the copy differs from the
    day. The day is then unchanged, and the next try begins from the start.
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
        # removes what an abandoned copy has left
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
    """Copies the payloads after the last key that was copied.

    Returns False if the time limit ends the copy early.
    """
    row = lease.row()
    done, options = row.payloads, tools.options
    pages = Pages(tools.supplier, lease.day, options.page_rows_max, tools.step)
    uploads = Uploads(tools.known, lease, options, tools.step)
    with closing(pages.payloads(row.after)) as payloads:
        slice_ = Slice(tools.is_over)
        written = uploads.done(slice_.of(Units(lease.day, options).of(payloads)))
        # packs the next unit while the pointers of one are added
        with closing(written), closing(ahead(written, 1)) as units:
            for unit in units:
                commit_pointers(lease, exchange.names.copy, unit, tools.step)
                tools.step("committed")
                done += 0 if unit.packed is None else len(unit.packed.entries)
                tools.progress(done, None)
    return not slice_.was_ended


def is_empty(tools: Tools, day: date) -> bool:
    """Returns whether the partition of a day is empty."""
    return not has_rows(tools.supplier, day)


@dataclass(frozen=True)
class Job:
    """A kind of work on days: the states in which it can begin, and the function that does it."""

    work: Work
    states: Sequence[str]
    on: Callable[[Tools, DayLease], bool]

    def run(self, tools: Tools, day: date) -> DayReport:
        """Takes the lease of a day, does the work and returns a report. Raises the errors of the work."""
        with leased(tools.supplier, day, self.work, self.states, tools.options.lease_seconds) as lease:
            tools.step("leased")
            try:
                finished = self.on(tools, lease)
            except psycopg.Error as error:
                raise InstanceError(
                    f"payloads of {day}: {one_line(error)}; the next run continues with the day"
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
    """Makes the cold payloads of a day hot. Returns False if the time limit ends the work early.

    Raises `PayloadCorrupt` if a payload is lost. The day then stays cold, but the payloads that this call has
    already made hot stay hot.
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
        cold = (payload for payload in contents.current(rows, blocks, None) if payload.content is None)
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
    """Yields the payloads in portions that are small enough for one SQL statement each."""
    portion, size = list[tuple[Payload, bytes]](), 0
    for payload, content in given:
        portion.append((payload, content))
        size += len(content)
        if size >= STATEMENT_CHARACTERS_MAX or len(portion) >= STATEMENT_ROWS_MAX:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def warm(
    supplier: Supplier, day: date, portion: Sequence[tuple[Payload, bytes]], lease: DayLease | None = None
) -> None:
    """Puts the contents of payloads back into rows of the day. Skips payloads that changed after the read.

    With a lease of the day, also records the progress, and raises `LeaseLost` if another worker has the day.
    """
    given = [(payload, content.decode()) for payload, content in portion]

    def work(conn: psycopg.Connection[Any]) -> None:
        if lease is not None:
            lease.advance(conn, "copy", payloads=len(portion))
        # locks the day's state before its rows, in the order of the day's workers: this avoids deadlocks
        state = conn.execute(_QUERIES["lock_state"].on(), {"day": day}).fetchall()
        pointed = [(payload, text) for payload, text in given if not payload.in_block]
        in_blocks = [(payload, text) for payload, text in given if payload.in_block]
        name = DAYS.name(day)
        if pointed:
            values = _values(pointed)
            conn.execute(_QUERIES["warm"].on(day=name), values)
        # if the day no longer has blocks, these payloads are hot already, or deleted
        if in_blocks and state in ([("folded",)], [("folding",)]):
            conn.execute(_QUERIES["unfold"].on(day=name), _values(in_blocks))

    run_transaction(supplier, work, operation="rehydrate payloads")


def _values(given: Iterable[tuple[Payload, str]]) -> dict[str, Any]:
    listed = list(given)
    return {
        **columns(payload.key for payload, _ in listed),
        "contents": [text for _, text in listed],
        "object_keys": [payload.object_key for payload, _ in listed],
        "starts": [payload.entry and payload.entry.start for payload, _ in listed],
    }


def _end(conn: psycopg.Connection[Any], lease: DayLease) -> None:
    name = DAYS.name(lease.day)
    lease.advance(conn, "finish")
    # waits for deletions that began while the day had blocks: they insert rows marked as deleted
    conn.execute(_QUERIES["lock_writers"].on(day=name))
    conn.execute(_QUERIES["forget_deleted"].on(day=name))
    conn.execute(_QUERIES["note_warm"].on(), {"day": lease.day})
    PayloadObjects.change(conn, lease.day, ["live", "block"], "dead")
    lease.end(conn, "open")


OFFLOAD = Job("offload", ("open",), _offload)
FOLD = Job("fold", ("offloaded", "folding", "folded"), _fold)
FOLD_AGAIN_BYTES = 2**20
"""The size of a folded day's partition, in bytes, at which the day is folded again."""


def offload(tools: Tools, day: date | None, dry_run: bool) -> OffloadReport:
    """Offloads the given day, even if it is not cool yet. Without a day, offloads all days that are due.

    Raises the error if the given day fails. Without a day, puts errors into the report.
    """
    all_days = tools.days()
    if day is not None:
        named = _named(tools, day, all_days)
        if named.state != "open":
            return OffloadReport((), 0, dry_run)
        waiting = [named]
    else:
        waiting = [each for each in all_days if each.waits]
    if dry_run:
        reports = [DayReport(each.day, "offload", False, payloads=each.rows) for each in waiting]
        return OffloadReport(tuple(reports), len(waiting), dry_run=True)
    if day is not None:
        return OffloadReport((done := OFFLOAD.run(tools, day),), int(not done.finished))
    # also finishes days whose rehydration was left half done
    warm = [(WARM, each) for each in all_days if each.work == "rehydrate"]
    return drain(tools, [*warm, *((OFFLOAD, each) for each in waiting)])


WARM = Job("rehydrate", ("offloaded", "folded"), warm_day)


def rehydrate(tools: Tools, day: date) -> int:
    """Makes a day hot again, and returns the number of payloads that were cold."""
    if _named(tools, day, tools.days()).state == "open":
        return 0
    return WARM.run(tools, day).payloads


def fold(tools: Tools, day: date | None) -> OffloadReport:
    """Folds the given day. Without a day, folds all days that are due.

    A day is due if it was offloaded long enough ago, or if it was folded and has many new rows.
    """
    all_days = tools.days()
    if day is not None:
        if _named(tools, day, all_days).state == "open":
            raise InvalidInput(f"the payloads of {day} are not offloaded yet: do that first")
        return OffloadReport((done := FOLD.run(tools, day),), int(not done.finished))
    last = DAYS.today(tools.supplier) - timedelta(days=tools.options.pointer_days)
    return drain(tools, [(FOLD, each) for each in all_days if _is_to_be_folded(each, last)])


def _is_to_be_folded(day: PayloadDay, last: date) -> bool:
    if day.work is not None:
        return day.work == "fold"
    if day.state == "folded":
        return day.postgres_bytes >= FOLD_AGAIN_BYTES
    return day.state == "offloaded" and day.day < last


def drain(tools: Tools, work: Iterable[tuple[Job, PayloadDay]]) -> OffloadReport:
    """Does each given work in order until the time limit is reached. Days whose last try failed come last.

    Errors are in the report.
    """
    todo = sorted(work, key=lambda pair: pair[1].error is not None)
    done: list[DayReport] = []
    for job, day in ((job, payload_day.day) for job, payload_day in todo):
        if done and tools.is_over():
            break
        try:
            done.append(job.run(tools, day))
        except PayloadDayBusy as error:
            logger.info("%s", error)
            done.append(job.report(tools, day, finished=False))
        except Exception as error:
            logger.warning("payloads of %s: %s failed in this round: %s", day, job.work, error)
            done.append(job.report(tools, day, finished=False, error=one_line(error)))
    left = len(todo) - sum(report.finished for report in done)
    return OffloadReport(tuple(done), left)


def _named(tools: Tools, day: date, all_days: Sequence[PayloadDay]) -> PayloadDay:
    """Returns the payload day of a date.

    Raises `PayloadExpired` if the day was dropped, and `InvalidInput` if it has no payloads or is not over.
    """
    check_day(day)
    by_day = {each.day: each for each in all_days}
    if day not in by_day:
        if (row := read(tools.supplier, day)) is not None and row.state == "expired":
            raise PayloadExpired(f"payloads of {day} are past their retention, and were dropped")
        raise InvalidInput(f"there are no payloads of {day}: 'dormouse payloads days' lists the days")
    if not by_day[day].is_closed:
        today = DAYS.today(tools.supplier)
        raise InvalidInput(
            f"the day {day} is not over: the last day that is over is {today - timedelta(days=1)}"
        )
    return by_day[day]


def check_day(day: object) -> None:
    """Raises `InvalidInput` unless a value is a date.

    Refuses a datetime, because its day depends on the time zone.
    """
    if type(day) is not date:
        raise InvalidInput(f"a day must be a datetime.date, not {day!r}")


KIND = "payloads"
"""The kind of round under which an instance records the rounds of payload work (`run_round`)."""


@dataclass(frozen=True, slots=True)
class PayloadRound:
    """The results of a round.

    - `days_left`: the number of unfinished days that did not fail. The next round can continue them at once.
    - `backlog_days`: the number of days that wait to be offloaded.
    - `cools_at`: the time at which the next day is due to be offloaded.
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
        """Raises `PayloadRoundFailed` if any part of the round failed."""
        if self.errors:
            more = f" (and {len(self.errors) - 1} more)" if len(self.errors) > 1 else ""
            raise PayloadRoundFailed(f"{self.errors[0]}{more}")


def run_round(tools: Tools, retention_days: int | None) -> PayloadRound:
    """Runs one round of all payload work, within the time limit of the tools.

    Creates the partitions of the coming days, drops days older than `retention_days`, recovers pointers after
    an adoption, offloads days, folds days, and deletes unneeded objects. A part that fails is in `errors`,
    and does not stop the other parts.
    """
    errors: list[str] = []

    def tried(part: str, work: Callable[[], object]) -> object:
        try:
            return work()
        except Exception as error:
            logger.warning("payloads: %s failed: %s", part, error)
            errors.append(one_line(error))
            return None

    today = DAYS.today(tools.supplier)
    tried("making days", lambda: _make_ahead(tools))
    expired = 0
    if not DAYS.may_roll(tools.supplier):
        return _report_round(tools, 0, (), 0, errors)
    if retention_days is not None:
        before = today - timedelta(days=retention_days)
        dropped = tried("expiry", lambda: expire(tools.supplier, before))
        expired = len(dropped[0]) if isinstance(dropped, tuple) else 0
    reports = []
    if was_adopted_lately(tools.supplier):
        tried("recovery", lambda: recover_pointers(tools))
    for part, work in (
        ("offload", lambda: offload(tools, None, dry_run=False)),
        ("fold", lambda: fold(tools, None)),
    ):
        if isinstance(done := tried(part, work), OffloadReport):
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
    may_look = DAYS.may_roll(tools.supplier)  # other roles may lack the right to read the partitions
    days = tools.days()
    now = status(days, tools.known)
    return PayloadRound(
        days_expired=expired,
        days_done=sum(day.finished for report in reports for day in report.days),
        days_left=sum(report.days_left - len(report.errors) for report in reports),
        payloads=sum(report.payloads for report in reports),
        objects_deleted=deleted,
        backlog_days=now.backlog_days,
        cools_at=cools_at(tools.supplier, days, tools.options.hot_seconds) if may_look else None,
        orphaned_bytes=now.orphaned_bytes,
        errors=tuple(errors),
    )
