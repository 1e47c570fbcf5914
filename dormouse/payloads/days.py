"""The days of payloads: how much each has, what is being done with it, and the lease of the worker on it.

Every transaction of the work checks the token of the lease (`dormouse.postgres.lease`): a worker that was
frozen for longer than the lease finds another token, and commits nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import psycopg

from dormouse.errors import PayloadDayBusy, one_line
from dormouse.payloads.keys import PayloadKey, place_values
from dormouse.payloads.pack import PayloadObjects
from dormouse.payloads.reading import ColdReads
from dormouse.payloads.rows import DAYS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import PAYLOAD_DAY_SECONDS, Lease, held_by, restart_leases, this_holder
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

T = TypeVar("T")
LEASE_SECONDS = PAYLOAD_DAY_SECONDS
Work = Literal["offload", "fold", "rehydrate", "rebuild"]
_READERS = 723_615_409
"""Of the advisory locks of those that read a day."""

_QUERIES = load(__package__ or "", "days")


class LeaseLost(PayloadDayBusy):
    """Another worker has taken the day over."""


@dataclass(frozen=True, slots=True)
class DayRow:
    """What is known of a day that was worked on."""

    day: date
    state: str
    work: str | None
    phase: str | None
    token: int
    worker: str | None
    leased_until: datetime | None
    after_kind: str | None
    after_tenant: str | None
    after_id: str | None
    after_at: datetime | None
    verified_till: str | None
    payloads: int
    bytes_in: int
    bytes_out: int
    objects: int
    seconds: float
    swap_lock_ms: float | None
    error: str | None
    failed_at: datetime | None
    changed_at: datetime

    @property
    def after(self) -> PayloadKey | None:
        """The last key that the phase is done with."""
        if self.after_kind is None or self.after_tenant is None or self.after_id is None or not self.after_at:
            return None
        return PayloadKey(self.after_tenant, self.after_id, self.after_at, self.after_kind)


@dataclass(eq=False)
class DayLease(Lease):
    """The right to work on a day."""

    @property
    def day(self) -> date:
        day: date = self.values["day"]
        return day

    @property
    def token(self) -> int:
        token: int = self.values["token"]
        return token

    def advance(
        self, conn: psycopg.Connection[Any], phase: str, after: PayloadKey | None = None, **done: int
    ) -> None:
        """First in a transaction: notes the phase and how far it is. Raises `LeaseLost`."""
        counts = {"payloads": 0, "bytes_in": 0, "bytes_out": 0, "objects": 0, **done}
        self.fence(conn, "advance", **place_values("after", after), **counts, phase=phase)

    def end(self, conn: psycopg.Connection[Any], state: str) -> None:
        """The work is done, and the day is in another state. Raises `LeaseLost`."""
        self.fence(conn, "end", state=state)

    def row(self) -> DayRow:
        row = read(self.supplier, self.day)
        if row is None or row.token != self.token:
            raise self.lost()
        return row


@contextmanager
def leased(
    supplier: Supplier, day: date, work: Work, states: Sequence[str], seconds: float = LEASE_SECONDS
) -> Iterator[DayLease]:
    """A day to work on, if it is in one of the states, or the work was begun.

    Raises `PayloadDayBusy` when another has it. What the work raises is noted with the day.
    """
    values = {"day": day, "lease_seconds": seconds}
    asked = {**values, "work": work, "worker": this_holder(), "states": list(states)}
    taken = run_transaction(supplier, rows_of(_QUERIES["take"], asked), operation="lease a day")
    if not taken:
        # for the next try: a lease that a wrong clock made too long is over a while from now
        restart_leases(supplier)
        raise PayloadDayBusy(_why_not(supplier, day, work))
    values["token"] = taken[0][0]
    lost = partial(LeaseLost, f"payloads of {day}: another worker has taken the day over")
    lease = DayLease(supplier, "payload day", str(day), _QUERIES, values, lost)
    run_transaction(supplier, lambda conn: _end_readers(conn, day), operation="lease a day")
    began, error = time.monotonic(), None
    try:
        with lease.pulse():
            yield lease
    except BaseException as raised:
        error = one_line(raised)
        raise
    finally:
        lease.release(seconds=time.monotonic() - began, error=error)


def read(supplier: Supplier, day: date) -> DayRow | None:
    """A day as it is; None when nothing was ever done with it."""
    rows = run_lookup(supplier, rows_of(_QUERIES["read"], {"day": day}), operation="look at a day")
    return DayRow(*rows[0]) if rows else None


def mark_reader(conn: psycopg.Connection[Any], day: date) -> None:
    """In a transaction that reads much of a day: whoever takes the day over ends it."""
    conn.execute(_QUERIES["mark_reader"].on(), _reader_of(day))


def reading(
    day: date, work: Callable[[psycopg.Connection[Any]], T]
) -> Callable[[psycopg.Connection[Any]], T]:
    """The same work, in a transaction that is marked first."""

    def marked(conn: psycopg.Connection[Any]) -> T:
        mark_reader(conn, day)
        return work(conn)

    return marked


def _end_readers(conn: psycopg.Connection[Any], day: date) -> None:
    # a session may end those of whom it logged in as, and not those of a role that it acts as
    conn.execute("set local role none")
    conn.execute(_QUERIES["end_readers"].on(), _reader_of(day))


def _reader_of(day: date) -> dict[str, int]:
    return {"class": _READERS, "number": day.toordinal()}


def _why_not(supplier: Supplier, day: date, work: str) -> str:
    found = read(supplier, day)
    if found is not None and found.worker is not None:
        until = found.leased_until or datetime.now(UTC)
        return f"payloads of {day}: {held_by(found.worker, 'has the day', until)}"
    doing = f"a {found.work} of it is not done" if found and found.work else "it was done meanwhile"
    return f"payloads of {day}: no {work} of it can begin now: {doing}"


STATES = ("open", "offloaded", "folding", "folded")
"""Of the days that there are payloads of."""


@dataclass(frozen=True, slots=True)
class PayloadDay:
    """A day of payloads. `state`: open (inline), offloaded (pointers), folding, folded (blocks) or expired.

    `rows` of its partition are about as many; `payloads` are those of its `objects`. The last work with it
    took `work_seconds`, put `work_payloads` of `bytes_in` into `bytes_out`, and kept readers and writers out
    for `swap_lock_ms`. `error` says why the last try failed.
    """

    day: date
    state: str
    work: str | None
    phase: str | None
    worker: str | None
    leased_until: datetime | None
    rows: int
    postgres_bytes: int
    objects: int
    object_bytes: int
    payloads: int
    work_payloads: int | None
    bytes_in: int | None
    bytes_out: int | None
    work_seconds: float | None
    swap_lock_ms: float | None
    error: str | None
    failed_at: datetime | None
    is_rehydrated: bool
    is_closed: bool
    is_cool: bool

    @property
    def waits(self) -> bool:
        """Returns whether the day is to be offloaded: it is open, and has been over for long enough."""
        return self.is_cool and self.state == "open" and not self.is_rehydrated and self.work != "rehydrate"


@dataclass(frozen=True, slots=True)
class PayloadStatus:
    """How far the payloads are cooled down: days by state, and the backlog.

    Of the rows of a day that waits, their number is an estimate.
    `oldest_waiting` is the oldest day of the backlog. The rates are those of the last days that were done.
    Cold reads, and `mismatches`, which are payloads that were not what was written, are of the store that is
    asked: its last thousand reads, and all that it found.
    """

    open_days: int
    offloaded_days: int
    folding_days: int
    folded_days: int
    backlog_days: int
    backlog_rows: int
    backlog_bytes: int
    oldest_waiting: date | None
    failing_days: int
    postgres_bytes: int
    objects: int
    object_bytes: int
    orphaned_objects: int
    orphaned_bytes: int
    payloads_per_second: float | None
    bytes_in_per_second: float | None
    bytes_out_per_second: float | None
    compression_ratio: float | None
    puts_per_million: float | None
    swap_lock_ms_max: float | None
    cold_read_ms_p50: float | None
    cold_read_ms_p99: float | None
    mismatches: int


def days(supplier: Supplier, hot_seconds: float, *, expired: bool = False) -> list[PayloadDay]:
    """Those that there are, the oldest first; with `expired`, those that were dropped too.

    A day is cool when it has been over for `hot_seconds`.
    """
    work = rows_of(_QUERIES["days"], {"expired": expired, "hot_seconds": hot_seconds})
    rows = run_transaction(
        supplier, work, read_only=True, scans=True, operation="look at the days of payloads"
    )
    return [PayloadDay(*row) for row in rows]


def has_rows(supplier: Supplier, day: date) -> bool:
    """Whether the partition of a day has any."""
    query = _QUERIES["has_rows"].on(day=DAYS.name(day))
    return bool(run_lookup(supplier, rows_of(query), operation="look at a day")[0][0])


def count_rows(supplier: Supplier, day: date, limit: int) -> int:
    """How many rows the partition of a day has, up to a limit."""
    query = _QUERIES["count_rows"].on(day=DAYS.name(day))
    found: int = run_lookup(supplier, rows_of(query, {"limit": limit}), operation="look at a day")[0][0]
    return found


def cools_at(supplier: Supplier, found: Iterable[PayloadDay], hot_seconds: float) -> datetime | None:
    """Returns when the next of these days that has payloads and is hot will be cool; None: there is none."""
    for one in found:
        if one.state == "open" and not one.is_cool and has_rows(supplier, one.day):
            ends = datetime.combine(one.day + timedelta(days=1), datetime.min.time(), UTC)
            return ends + timedelta(seconds=hot_seconds)
    return None


def status(
    found: Sequence[PayloadDay], objects: PayloadObjects, reads: ColdReads | None = None
) -> PayloadStatus:
    """Returns the status of all days, as they were found in one look, and of a store's reads."""
    waiting = [one for one in found if one.waits]
    done = [one for one in found if one.work is None and one.work_payloads and one.work_seconds][-7:]
    payloads = sum(one.work_payloads or 0 for one in done)
    seconds = sum(one.work_seconds or 0 for one in done)
    bytes_in = sum(one.bytes_in or 0 for one in done)
    bytes_out = sum(one.bytes_out or 0 for one in done)
    took_ms = sorted(reads.took_ms) if reads else []
    in_objects = sum(one.payloads for one in found)
    orphaned_objects, orphaned_bytes = objects.orphaned()
    count = sum(one.objects for one in found)
    states = Counter(one.state for one in found)
    return PayloadStatus(
        **{f"{state}_days": states[state] for state in STATES},
        backlog_days=len(waiting),
        backlog_rows=sum(one.rows for one in waiting),
        backlog_bytes=sum(one.postgres_bytes for one in waiting),
        oldest_waiting=waiting[0].day if waiting else None,
        failing_days=sum(one.error is not None for one in found),
        postgres_bytes=sum(one.postgres_bytes for one in found),
        objects=count,
        object_bytes=sum(one.object_bytes for one in found),
        orphaned_objects=orphaned_objects,
        orphaned_bytes=orphaned_bytes,
        payloads_per_second=round(payloads / seconds, 1) if seconds else None,
        bytes_in_per_second=round(bytes_in / seconds) if seconds else None,
        bytes_out_per_second=round(bytes_out / seconds) if seconds else None,
        compression_ratio=round(bytes_in / bytes_out, 2) if bytes_out else None,
        puts_per_million=round(1e6 * count / in_objects, 1) if in_objects else None,
        swap_lock_ms_max=max((round(one.swap_lock_ms, 3) for one in done if one.swap_lock_ms), default=None),
        cold_read_ms_p50=_percentile(took_ms, 50),
        cold_read_ms_p99=_percentile(took_ms, 99),
        mismatches=reads.corrupt if reads else 0,
    )


def _percentile(ascending: Sequence[float], percent: int) -> float | None:
    return round(ascending[len(ascending) * percent // 100], 3) if ascending else None
