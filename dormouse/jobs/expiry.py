"""Days of jobs: made ahead, and dropped with all that belongs to their jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple
from uuid import UUID

from dormouse.durability.incarnations import last_adopted
from dormouse.durability.job_objects import known, of_jobs
from dormouse.errors import InvalidInput, ObjectStoreError
from dormouse.jobs.answers import ANSWERING, SENT, answer_names, objects_of
from dormouse.jobs.documents import request_key, result_key
from dormouse.objects import ObjectStore
from dormouse.objects.names import ANSWERS
from dormouse.payloads import PayloadKey
from dormouse.postgres.connection import Supplier
from dormouse.postgres.days import DayPartitions, days_ahead
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

if TYPE_CHECKING:
    from dormouse.payloads import PayloadStore

RETENTION_DAYS = 30
PAGE_JOBS = 1_000
RETENTION_DAYS_MAX = 36_500
DAYS = DayPartitions("ended_job")
_QUERIES = load(__package__ or "", "expiry")
_FIRST = UUID(int=0)


def roll(supplier: Supplier) -> None:
    """Makes the coming days; what came too late for its day is moved there. Busy days wait for next time."""
    today = DAYS.today(supplier)
    late = run_lookup(supplier, rows_of(_QUERIES["late_days"]), operation="days of jobs")
    ahead = days_ahead(today)
    # those of a clock that went wrong stay where they are
    wanted = ahead | {day for (day,) in late if day < today}
    DAYS.make(supplier, sorted(wanted - set(DAYS.days(supplier))))


def expire(
    supplier: Supplier,
    objects: ObjectStore,
    payloads: PayloadStore,
    retention_days: int,
    is_over: Callable[[], bool] = lambda: False,
) -> int:
    """Drops the days that ended more than so many days ago; gives how many.

    What belongs to jobs goes before them, and these page by page before their day, so that what is
    interrupted is gone on with: also when the time `is_over`, after a page at least. What a backup or an
    adoption holds stays as long. Objects go, too, that were sent for a job which never was started; after
    an adoption they may be another timeline's, and are orphans.
    """
    if type(retention_days) is not int or not 1 <= retention_days <= RETENTION_DAYS_MAX:
        raise InvalidInput(f"retention_days must be from 1 to {RETENTION_DAYS_MAX:,}, not {retention_days!r}")
    roll(supplier)
    if not DAYS.may_roll(supplier):
        return 0  # those who own the days do it
    # a copy that was made since may know of later days; it drops earlier ones itself
    held = run_lookup(supplier, rows_of(_QUERIES["held_since"]), operation="look for holds")[0][0]
    first_kept = min(DAYS.today(supplier), held or date.max) - timedelta(days=retention_days)
    dropped = 0
    for day in [day for day in DAYS.days(supplier) if day < first_kept]:
        for page in _pages(supplier, objects, day):
            payloads.delete_many(page.payloads)
            _delete(objects, page.objects)
            forget = rows_of(_QUERIES["forget"].on(day=DAYS.name(day)), {"job_keys": page.job_keys})
            run_transaction(supplier, forget, operation="forget jobs")
            if is_over():
                return dropped
        dropped += DAYS.attempt(supplier, lambda conn, day=day: DAYS.drop(conn, day))  # type: ignore[misc]
    if not last_adopted(supplier):
        _delete(objects, _of_no_job(supplier, objects, is_over))
    return dropped


def _delete(objects: ObjectStore, names: Iterable[str]) -> None:
    if failed := objects.delete(names):
        name, why = failed[0]
        raise ObjectStoreError(f"{len(failed):,} objects of jobs are not deleted, first {name}: {why}")


def _of_no_job(supplier: Supplier, objects: ObjectStore, is_over: Callable[[], bool]) -> Iterator[str]:
    """Objects that are a day old and whose job is not there."""
    before = datetime.now(UTC) - timedelta(days=1)
    old = (name for name, _, written_at in objects.list_dated(ANSWERS) if written_at < before)
    while not is_over() and (some := list(islice(old, PAGE_JOBS))):
        yield from of_jobs(some).keys() - known(supplier, some)


class _Page(NamedTuple):
    """Jobs of a day, their payloads, and the objects that they may have written."""

    job_keys: list[UUID]
    payloads: list[PayloadKey]
    objects: list[str]


def _pages(supplier: Supplier, objects: ObjectStore, day: date) -> Iterator[_Page]:
    query = _QUERIES["page"].on(day=DAYS.name(day))
    after = _FIRST
    while True:
        values = {"after": after, "limit": PAGE_JOBS}
        rows = run_lookup(supplier, rows_of(query, values), operation="look at jobs of a day")
        if not rows:
            return
        page = _Page([], [], [])
        for key, given_id, kind, token, started_at in rows:
            job_id = given_id or str(key)
            page.job_keys.append(key)
            page.payloads.append(request_key(job_id, started_at))
            page.payloads.extend(result_key(job_id, attempt, started_at) for attempt in range(1, token + 1))
            if kind in ANSWERING:
                page.objects.extend(answer_names(job_id, 1, token))
            if kind in SENT:
                page.objects.extend(name for name, _ in objects.list(objects_of(job_id)))
        yield page
        after = rows[-1][0]
