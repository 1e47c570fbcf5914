"""The days of payloads: their sizes, the work on them, and the lease of the worker on a day.

Every transaction of the work checks the token of the lease (`dormouse.postgres.lease`). A worker that was
frozen for longer than its lease finds another token and commits nothing.
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
"""The first number (`classid`) of the advisory locks that mark a session as a reader of a day."""

_QUERIES = load(__package__ or "", "days")


class LeaseLost(PayloadDayBusy):
    """An error: this worker has lost the lease of a day, and another worker has it now."""


@dataclass(frozen=True, slots=True)
class DayRow:
    """The record in the database of the work on a day."""

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
        """The last key that the present phase of the work has finished, or None."""
        if self.after_kind is None or self.after_tenant is None or self.after_id is None or not self.after_at:
            return None
        return PayloadKey(self.after_tenant, self.after_id, self.after_at, self.after_kind)


@dataclass(eq=False)
class DayLease(Lease):
    """The lease that gives one worker the right to work on a day."""

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
        """Records the phase and its progress.

        Raises `LeaseLost`. Must be the first statement of a transaction.
        """
        counts = {"payloads": 0, "bytes_in": 0, "bytes_out": 0, "objects": 0, **done}
        self.fence(conn, "advance", **place_values("after", after), **counts, phase=phase)

    def end(self, conn: psycopg.Connection[Any], state: str) -> None:
        """Records the end of the work and the day's new state. Raises `LeaseLost`."""
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
    """Takes the lease of a day for the block, if the day is in one of the states or this work has begun.

    Records an error of the block in the record of the day. Raises `PayloadDayBusy` if another worker has the
    lease.
    """
    values = {"day": day, "lease_seconds": seconds}
    request = {**values, "work": work, "worker": this_holder(), "states": list(states)}
    taken = run_transaction(supplier, rows_of(_QUERIES["take"], request), operation="lease a day")
    if not taken:
        # if a wrong clock made the lease too long, begins its time again, so that it ends
        restart_leases(supplier)
        raise PayloadDayBusy(_refusal(supplier, day, work))
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
    """Returns the record of a day, or None if there was never any work on it."""
    rows = run_lookup(supplier, rows_of(_QUERIES["read"], {"day": day}), operation="read a day")
    return DayRow(*rows[0]) if rows else None


def mark_reader(conn: psycopg.Connection[Any], day: date) -> None:
    """Marks a transaction as a long read of a day, so that the day's next worker can end the transaction."""
    conn.execute(_QUERIES["mark_reader"].on(), _reader_of(day))


def reading(
    day: date, work: Callable[[psycopg.Connection[Any]], T]
) -> Callable[[psycopg.Connection[Any]], T]:
    """Returns a function that marks its transaction as a long read of a day, and then does the work."""

    def marked(conn: psycopg.Connection[Any]) -> T:
        mark_reader(conn, day)
        return work(conn)

    return marked


def _end_readers(conn: psycopg.Connection[Any], day: date) -> None:
    # PostgreSQL checks the right to end sessions by the login role, not by a role set later
    conn.execute("set local role none")
    conn.execute(_QUERIES["end_readers"].on(), _reader_of(day))


def _reader_of(day: date) -> dict[str, int]:
    return {"class": _READERS, "number": day.toordinal()}


def _refusal(supplier: Supplier, day: date, work: str) -> str:
    row = read(supplier, day)
    if row is not None and row.worker is not None:
        until = row.leased_until or datetime.now(UTC)
        return f"payloads of {day}: {held_by(row.worker, 'has the day', until)}"
    doing = f"a {row.work} of it is not done" if row and row.work else "it was done meanwhile"
    return f"payloads of {day}: no {work} of it can begin now: {doing}"


STATES = ("open", "offloaded", "folding", "folded")
"""The states of days that have payloads."""


@dataclass(frozen=True, slots=True)
class PayloadDay:
    """A day of payloads.

    - `state`: open (in rows), offloaded (pointers to objects), folding, folded (blocks) or expired.
    - `rows`: an estimate of the number of rows in its partition.
    - `payloads`: the number of payloads in its `objects`.
    - `work`: the work that has begun, or None. `phase`, `worker` and `leased_until` belong to this work.
    - `work_payloads`, `bytes_in`, `bytes_out`, `work_seconds`: the amounts and duration of the last work.
    - `swap_lock_ms`: the milliseconds for which the last exchange held up readers and writers.
    - `error`: the reason why the last try failed.
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
        """True if the day waits to be offloaded: it is open and cool, and was not rehydrated lately."""
        return self.is_cool and self.state == "open" and not self.is_rehydrated and self.work != "rehydrate"


@dataclass(frozen=True, slots=True)
class PayloadStatus:
    """The status of payloads: the number of days in each state, and the backlog of days to offload.

    - `backlog_rows`: an estimate. `oldest_waiting`: the oldest day of the backlog.
    - `payloads_per_second` and the other rates: averages over the last seven finished days.
    - `cold_read_ms_p50`, `cold_read_ms_p99`: percentiles of the durations of the last thousand reads from
      objects, by this `PayloadStore` alone.
    - `mismatches`: the number of payloads that this `PayloadStore` found corrupt.
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
    """Returns the days of payloads, the oldest first. With `expired`, also returns days that were dropped.

    A day counts as cool if it ended at least `hot_seconds` ago.
    """
    work = rows_of(_QUERIES["days"], {"expired": expired, "hot_seconds": hot_seconds})
    rows = run_transaction(supplier, work, read_only=True, scans=True, operation="read the days of payloads")
    return [PayloadDay(*row) for row in rows]


def has_rows(supplier: Supplier, day: date) -> bool:
    """Returns whether the partition of a day has any rows."""
    query = _QUERIES["has_rows"].on(day=DAYS.name(day))
    return bool(run_lookup(supplier, rows_of(query), operation="read a day")[0][0])


def count_rows(supplier: Supplier, day: date, limit: int) -> int:
    """Returns the number of rows in the partition of a day. Stops counting at the limit."""
    query = _QUERIES["count_rows"].on(day=DAYS.name(day))
    count: int = run_lookup(supplier, rows_of(query, {"limit": limit}), operation="read a day")[0][0]
    return count


def cools_at(supplier: Supplier, listed: Iterable[PayloadDay], hot_seconds: float) -> datetime | None:
    """Returns the time at which the next open day with payloads will be cool, or None without such a day."""
    for day in listed:
        if day.state == "open" and not day.is_cool and has_rows(supplier, day.day):
            ends = datetime.combine(day.day + timedelta(days=1), datetime.min.time(), UTC)
            return ends + timedelta(seconds=hot_seconds)
    return None


def status(
    listed: Sequence[PayloadDay], objects: PayloadObjects, reads: ColdReads | None = None
) -> PayloadStatus:
    """Returns the status of the given days, and of the reads from objects if these are given."""
    waiting = [day for day in listed if day.waits]
    done = [day for day in listed if day.work is None and day.work_payloads and day.work_seconds][-7:]
    payloads = sum(day.work_payloads or 0 for day in done)
    seconds = sum(day.work_seconds or 0 for day in done)
    bytes_in = sum(day.bytes_in or 0 for day in done)
    bytes_out = sum(day.bytes_out or 0 for day in done)
    took_ms = sorted(reads.took_ms) if reads else []
    in_objects = sum(day.payloads for day in listed)
    orphaned_objects, orphaned_bytes = objects.orphaned()
    count = sum(day.objects for day in listed)
    states = Counter(day.state for day in listed)
    return PayloadStatus(
        **{f"{state}_days": states[state] for state in STATES},
        backlog_days=len(waiting),
        backlog_rows=sum(day.rows for day in waiting),
        backlog_bytes=sum(day.postgres_bytes for day in waiting),
        oldest_waiting=waiting[0].day if waiting else None,
        failing_days=sum(day.error is not None for day in listed),
        postgres_bytes=sum(day.postgres_bytes for day in listed),
        objects=count,
        object_bytes=sum(day.object_bytes for day in listed),
        orphaned_objects=orphaned_objects,
        orphaned_bytes=orphaned_bytes,
        payloads_per_second=round(payloads / seconds, 1) if seconds else None,
        bytes_in_per_second=round(bytes_in / seconds) if seconds else None,
        bytes_out_per_second=round(bytes_out / seconds) if seconds else None,
        compression_ratio=round(bytes_in / bytes_out, 2) if bytes_out else None,
        puts_per_million=round(1e6 * count / in_objects, 1) if in_objects else None,
        swap_lock_ms_max=max((round(day.swap_lock_ms, 3) for day in done if day.swap_lock_ms), default=None),
        cold_read_ms_p50=_percentile(took_ms, 50),
        cold_read_ms_p99=_percentile(took_ms, 99),
        mismatches=reads.corrupt if reads else 0,
    )


def _percentile(ascending: Sequence[float], percent: int) -> float | None:
    return round(ascending[len(ascending) * percent // 100], 3) if ascending else None
