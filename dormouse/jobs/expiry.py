"""Days of jobs: made ahead, and dropped with all that belongs to their jobs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, date, datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING
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
from dormouse.postgres.transaction import rows_of, run_lookup

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


def expire(supplier: Supplier, objects: ObjectStore, payloads: PayloadStore, retention_days: int) -> int:
    """Drops the days that ended more than so many days ago; gives how many.

    What belongs to a day's jobs goes before the day, so that whatever is interrupted is done again. What a
    backup or an adoption holds stays as long. Objects go, too, that were sent for a job which never was
    started; after an adoption they may be another timeline's, and are orphans.
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
        for keys, names in _belongings(supplier, objects, day):
            payloads.delete_many(keys)
            _delete(objects, names)
        dropped += DAYS.attempt(supplier, lambda conn, day=day: DAYS.drop(conn, day))  # type: ignore[misc]
    if not last_adopted(supplier):
        _delete(objects, _of_no_job(supplier, objects))
    return dropped


def _delete(objects: ObjectStore, names: Iterable[str]) -> None:
    if failed := objects.delete(names):
        name, why = failed[0]
        raise ObjectStoreError(f"{len(failed):,} objects of jobs are not deleted, first {name}: {why}")


def _of_no_job(supplier: Supplier, objects: ObjectStore) -> Iterator[str]:
    """Objects that are a day old and whose job is not there."""
    before = datetime.now(UTC) - timedelta(days=1)
    old = (name for name, _, written_at in objects.list_dated(ANSWERS) if written_at < before)
    while some := list(islice(old, PAGE_JOBS)):
        yield from of_jobs(some).keys() - known(supplier, some)


def _belongings(
    supplier: Supplier, objects: ObjectStore, day: date
) -> Iterator[tuple[list[PayloadKey], list[str]]]:
    """Page by page the payloads of a day's jobs, and the objects that they may have written."""
    query = _QUERIES["page"].on(day=DAYS.name(day))
    after = _FIRST
    while True:
        values = {"after": after, "limit": PAGE_JOBS}
        rows = run_lookup(supplier, rows_of(query, values), operation="look at jobs of a day")
        if not rows:
            return
        keys: list[PayloadKey] = []
        names: list[str] = []
        for key, given_id, kind, token, started_at in rows:
            job_id = given_id or str(key)
            keys += [request_key(job_id, started_at)]
            keys += [result_key(job_id, attempt, started_at) for attempt in range(1, token + 1)]
            if kind in ANSWERING:
                names += answer_names(job_id, 1, token)
            if kind in SENT:
                names += [name for name, _ in objects.list(objects_of(job_id))]
        yield keys, names
        after = rows[-1][0]
