"""The days of payloads: how much each has, and what is being done with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from dormouse.payloads.pack import PayloadObjects
from dormouse.payloads.reading import ColdReads
from dormouse.payloads.rows import DAYS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

_QUERIES = load(__package__ or "", "status")
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
