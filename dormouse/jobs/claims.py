"""The statements of workers: they claim jobs, renew leases, finish jobs, and take over from dead workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta
from itertools import takewhile
from typing import Any, NamedTuple
from uuid import UUID

from psycopg import errors as pg

from dormouse.durability.incarnations import last_adopted
from dormouse.durability.ledgers import JobObjects, of_jobs
from dormouse.errors import InvalidInput, ObjectStoreError
from dormouse.jobs.job import (
    ANSWERING,
    REQUEST,
    SENT,
    TENANT,
    Claim,
    JobState,
    Payloads,
    answer_names,
    objects_of,
    request_key,
    result_key,
    result_of_claim,
)
from dormouse.model.table import KEPT_SECONDS
from dormouse.objects.ledger import unknown_pages
from dormouse.objects.names import ANSWERS
from dormouse.objects.store import ObjectStore
from dormouse.payloads.keys import PayloadKey, columns
from dormouse.payloads.rows import DAYS as PAYLOAD_DAYS
from dormouse.payloads.rows import PUT, with_days, write
from dormouse.postgres.connection import Supplier
from dormouse.postgres.days import DayPartitions, days_ahead
from dormouse.postgres.lease import restart_leases
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction

RETENTION_DAYS = 30
PAGE_JOBS = 1_000
RETENTION_DAYS_MAX = 36_500
ENDED_DAYS = DayPartitions("ended_job")
_FIRST = UUID(int=0)


def roll(supplier: Supplier) -> None:
    """Makes partitions for the coming days, and moves jobs that ended before their day had a partition into
    it.

    Skips days that are locked; the next call makes them.
    """
    today = ENDED_DAYS.today(supplier)
    late = run_lookup(supplier, rows_of(_QUERIES["late_days"]), operation="days of jobs")
    ahead = days_ahead(today)
    # jobs with a day in the future, from a wrong clock, stay where they are
    wanted = ahead | {day for (day,) in late if day < today}
    ENDED_DAYS.make(supplier, sorted(wanted - set(ENDED_DAYS.days(supplier))))


def expire(
    supplier: Supplier,
    objects: ObjectStore,
    payloads: Payloads,
    retention_days: int,
    is_over: Callable[[], bool] = lambda: False,
    *,
    kept_seconds: float = KEPT_SECONDS,
) -> int:
    """Drops the days of jobs that ended more than `retention_days` ago; returns the number of dropped days.

    Each step deletes one page: the payloads and objects of jobs, then the jobs themselves. Their day's
    partition is dropped last. So an interrupted call can be continued; a call also stops after a page when
    `is_over` returns True. Days that a backup or an adoption holds stay.

    The call also deletes objects older than `kept_seconds` that were sent for a job that was never started.
    After an adoption it does not, because another timeline may own them.
    """
    if type(retention_days) is not int or not 1 <= retention_days <= RETENTION_DAYS_MAX:
        raise InvalidInput(f"retention_days must be from 1 to {RETENTION_DAYS_MAX:,}, not {retention_days!r}")
    roll(supplier)
    if not ENDED_DAYS.may_roll(supplier):
        return 0  # only the role that owns the partitions may drop them
    # a hold keeps days for copies of the database; they drop days from before the hold themselves
    held = run_lookup(supplier, rows_of(_QUERIES["held_since"]), operation="find holds")[0][0]
    first_kept = min(ENDED_DAYS.today(supplier), held or date.max) - timedelta(days=retention_days)
    dropped = 0
    for day in [day for day in ENDED_DAYS.days(supplier) if day < first_kept]:
        for page in _pages(supplier, objects, day):
            payloads.delete_many(page.payloads)
            _delete(objects, page.objects)
            forget = rows_of(_QUERIES["forget"].on(day=ENDED_DAYS.name(day)), {"job_keys": page.job_keys})
            run_transaction(supplier, forget, operation="forget jobs")
            if is_over():
                return dropped
        dropped += ENDED_DAYS.attempt(supplier, lambda conn, day=day: ENDED_DAYS.drop(conn, day))  # type: ignore[misc]
    if not last_adopted(supplier):
        before = datetime.now(UTC) - timedelta(seconds=kept_seconds)
        _delete(objects, _of_no_job(supplier, objects, before, is_over))
    return dropped


def _delete(objects: ObjectStore, names: Iterable[str]) -> None:
    if failed := objects.delete(names):
        name, why = failed[0]
        raise ObjectStoreError(f"{len(failed):,} objects of jobs are not deleted, first {name}: {why}")


def _of_no_job(
    supplier: Supplier, objects: ObjectStore, before: datetime, is_over: Callable[[], bool]
) -> Iterator[str]:
    """Yields objects that were written before a time and whose job does not exist."""
    old = (item for item in objects.list_dated(ANSWERS) if item[2] < before)
    pages = unknown_pages(old, lambda names: of_jobs(JobObjects(supplier).unknown(names)), PAGE_JOBS)
    return (name for page in takewhile(lambda page: not is_over(), pages) for name, *_ in page)


class _Page(NamedTuple):
    """A page of the jobs of a day, with their payloads and the objects that they may have written."""

    job_keys: list[UUID]
    payloads: list[PayloadKey]
    objects: list[str]


def _pages(supplier: Supplier, objects: ObjectStore, day: date) -> Iterator[_Page]:
    query = _QUERIES["page"].on(day=ENDED_DAYS.name(day))
    after = _FIRST
    while True:
        values = {"after": after, "limit": PAGE_JOBS}
        rows = run_lookup(supplier, rows_of(query, values), operation="read jobs of a day")
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


CHANNEL = "dormouse_jobs"
CANCELLED, LIMITS = "cancelled", "limits"
"""The texts of notifications of cancelled jobs and of changed limits; any other text is a kind of job."""

DEATHS_MAX = 3
"""The number of workers that may die while they run a job before the job fails, because it may be the cause.
"""

GRACE_SECONDS_MAX = 30.0
"""The longest time in which a worker can still renew a lease that another worker found expired.

The time is half the lease if that is shorter.
"""

AGAIN_SECONDS = 1.0
"""The pause of a worker that found another's expired lease, before it looks when that other counts as dead.
"""

RESTART_SECONDS = 60.0
"""The seconds between two corrections of leases that a wrong clock made too long."""

FORGET_SECONDS = 3_600.0
FROZEN_MS_MAX = 10_000
"""The longest pause between two statements of a transaction; after that the server ends it and its locks."""

LOCK_MS_MAX = 1_000
"""The longest wait of a claim for other claims of kinds with a limit; only a frozen process holds longer."""


_QUERIES = load(__package__ or "", "claims")
_CLAIM = {
    (kinds, requests): _QUERIES["claim"].including(
        wanted=_QUERIES[kinds], me=_QUERIES["me"], requests=_QUERIES[requests]
    )
    for kinds in ("any_number", "limited")
    for requests in ("with_requests", "without_requests")
}
_ENDING = {name: _QUERIES[name] for name in ("me", "wake_limited")}
_PUT = PUT.including(such=_QUERIES["of_ended"])
_KEEP = _QUERIES["keep"].including(put=replace(_PUT, text=_PUT.text.rstrip(";")))
_FINISH_KEEPING = _QUERIES["finish"].including(kept=_KEEP, **_ENDING)
_FINISH = _QUERIES["finish"].including(kept=replace(_KEEP, text=""), **_ENDING)
_LOOK, _TAKE_OVER = (
    _QUERIES[name].including(found_dead_at=_QUERIES["found_dead_at"]) for name in ("look", "take_over")
)
_KEPT_CHARACTERS_MAX = 4 * 2**20
"""The longest results that the statement that ends their jobs can store. Longer results get a statement of
their own.
"""


class KindsBusy(Exception):
    """An error: other workers have locked the kinds with a limit that this claim needs."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a job, with the progress (current, total, message) that its function reported last."""

    claim: Claim
    state: JobState
    reported: tuple[int | None, int | None, str | None]
    error: str | None = None
    traceback: str | None = None


@dataclass(frozen=True, slots=True)
class Look:
    """The facts that a worker without work needs."""

    is_alive: bool
    """False if another worker has found this one dead."""
    next_death_seconds: float | None
    """The seconds until another worker that has jobs may be found dead; None if no other worker has jobs."""
    limited: frozenset[int]
    """The ids of the worker's kinds that have a limit."""


class Claims:
    """The statements of workers, as methods. Each method is one transaction."""

    def __init__(self, supplier: Supplier) -> None:
        self.supplier = supplier
        self._restart_at = time.monotonic()

    def over(self, supplier: Supplier) -> Claims:
        """Returns the same statements, to run on connections of another supplier."""
        return Claims(supplier)

    def register(self, worker_id: UUID, kind_ids: Sequence[int], name: str, lease_seconds: float) -> None:
        values = {"kind_ids": list(kind_ids), "name": name, "lease_seconds": lease_seconds}
        self._run("register", worker_id=worker_id, **values)

    def claim(
        self, worker_id: UUID, free: Mapping[int, int], since: Mapping[int, int], *, limited: bool = False
    ) -> list[Claim]:
        """Claims jobs; returns them in the order of their start. Claims none if the worker was found dead.

        - `free`: the largest number of jobs to claim of each kind.
        - `since`: the number of the job at which to begin the search, for each kind.
        - `limited`: True claims only kinds with a limit, and may raise `KindsBusy`; False claims only other
          kinds.
        """
        values = {
            "worker_id": worker_id,
            "kind_ids": list(free),
            "free": list(free.values()),
            "since": [since.get(kind_id, 0) for kind_id in free],
            "tenant": TENANT,
            "request": REQUEST,
        }
        kinds = "limited" if limited else "any_number"
        try:
            day = PAYLOAD_DAYS.name(datetime.now(UTC).date())
            rows = self._claimed(_CLAIM[kinds, "with_requests"].on(day=day), values, limited=limited)
        except pg.UndefinedTable:  # no payload was stored on this day yet
            rows = self._claimed(_CLAIM[kinds, "without_requests"].on(), values, limited=limited)
        claims = [Claim(key, job_id or str(key), *others) for key, job_id, *others in rows]
        return sorted(claims, key=lambda claim: claim.number)

    def _claimed(self, claim: Any, values: Mapping[str, Any], *, limited: bool) -> list[Any]:
        if not limited:
            return run_statement(self.supplier, rows_of(claim, values), operation="jobs: claim")

        def work(conn: Any) -> list[Any]:
            conn.execute(_QUERIES["lock_limits"].on(), {**values, "frozen_ms": FROZEN_MS_MAX})
            return list(conn.execute(claim, values).fetchall())

        try:
            return run_transaction(self.supplier, work, lock_ms=LOCK_MS_MAX, operation="jobs: claim")
        except pg.LockNotAvailable:
            raise KindsBusy from None

    def pulse(
        self,
        worker_id: UUID,
        kind_ids: Sequence[int],
        reports: Sequence[tuple[Claim, tuple[int | None, int | None, str | None]]],
        lease_seconds: float,
    ) -> tuple[bool, set[UUID]]:
        """Renews the lease, and stores the progress of jobs as (current, total, message).

        Returns two things: False if the worker was found dead and so has no lease, and the keys of the jobs
        to cancel.
        """
        ((is_alive, cancelled),) = self._run(
            "pulse",
            worker_id=worker_id,
            kind_ids=list(kind_ids),
            job_keys=[claim.job_key for claim, _ in reports],
            currents=[current for _, (current, _, _) in reports],
            totals=[total for _, (_, total, _) in reports],
            messages=[message for _, (_, _, message) in reports],
            lease_seconds=lease_seconds,
        )
        return is_alive, set(cancelled)

    def finish(
        self, worker_id: UUID, endings: Sequence[Ending], results: Sequence[tuple[Claim, str]]
    ) -> set[UUID]:
        """Ends jobs and stores their results as JSON, in one transaction.

        Returns the keys of the jobs that still belonged to this worker; other jobs are not changed. Raises
        `PayloadExpired` if the day of a result was dropped.
        """
        values = {
            "worker_id": worker_id,
            "job_keys": [each.claim.job_key for each in endings],
            "tokens": [each.claim.token for each in endings],
            "states": [each.state for each in endings],
            "currents": [each.reported[0] for each in endings],
            "totals": [each.reported[1] for each in endings],
            "messages": [each.reported[2] for each in endings],
            "errors": [each.error for each in endings],
            "tracebacks": [each.traceback for each in endings],
        }
        if not results:
            return {key for key, _ in self._rows(_FINISH, values)}
        contents = {result_of_claim(claim): text for claim, text in results}
        days = {key.day for key in contents}
        if len(days) == 1 and sum(map(len, contents.values())) <= _KEPT_CHARACTERS_MAX:
            keeping = {**values, **columns(contents), "contents": list(contents.values())}
            statement = rows_of(_FINISH_KEEPING.on(day=PAYLOAD_DAYS.name(*days)), keeping)
            with suppress(pg.UndefinedTable):  # its day has no partition yet: made below
                return {key for key, _ in run_statement(self.supplier, statement, operation="jobs: finish")}

        def work(conn: Any) -> set[UUID]:
            conn.execute(_QUERIES["end_if_frozen"].on(), {"frozen_ms": FROZEN_MS_MAX})
            ended = {key for key, _ in conn.execute(_FINISH.on(), values).fetchall()}
            write(conn, {result_of_claim(claim): text for claim, text in results if claim.job_key in ended})
            return ended

        return with_days(self.supplier, work, lambda: days, operation="jobs: finish")

    def give_back(self, worker_id: UUID, kind_ids: Sequence[int], running: Iterable[UUID] = ()) -> None:
        """Makes all jobs of a worker wait again, except those in `running`.

        This includes jobs whose claim the worker never learned of. Jobs whose cancellation was requested end
        instead.
        """
        self._run("give_back", worker_id=worker_id, kind_ids=list(kind_ids), running=list(running))

    def take_over(self) -> int:
        """Makes the jobs of dead workers wait again, or ends them; returns the number of jobs.

        A worker is dead when its lease was found expired, and was not renewed for some time after that.
        """
        values = {"deaths_max": DEATHS_MAX, "grace_seconds_max": GRACE_SECONDS_MAX}
        again, ended, _ = self._rows(_TAKE_OVER, values)[0]
        self._run("suspect")
        return int(again + ended)

    def lives(self, worker_id: UUID, job_keys: Iterable[UUID]) -> None:
        """Subtracts from jobs' counts of dead workers the death of this worker, which is alive after all."""
        self._run("lives", worker_id=worker_id, job_keys=list(job_keys))

    def look(
        self, worker_id: UUID, kind_ids: Sequence[int], lease_seconds: float, wait_seconds: float
    ) -> Look:
        """Renews the lease, and subscribes the worker to notifications for `wait_seconds`."""
        if (now := time.monotonic()) >= self._restart_at:
            self._restart_at = now + RESTART_SECONDS
            restart_leases(self.supplier)
        values = {"kind_ids": list(kind_ids), "lease_seconds": lease_seconds, "wait_seconds": wait_seconds}
        values |= {"worker_id": worker_id, "grace_seconds_max": GRACE_SECONDS_MAX}
        is_alive, seconds, limited = self._rows(_LOOK, values)[0]
        return Look(is_alive, seconds, frozenset(limited))

    def awake(self, worker_id: UUID, lease_seconds: float) -> None:
        self._run("awake", worker_id=worker_id, lease_seconds=lease_seconds)

    def sleep(self, worker_id: UUID, seconds: float) -> None:
        self._run("sleep", worker_id=worker_id, seconds=seconds)

    def leave(self, worker_id: UUID) -> None:
        self._run("leave", worker_id=worker_id, forget_seconds=FORGET_SECONDS)

    def _run(self, name: str, /, **values: Any) -> list[Any]:
        return self._rows(_QUERIES[name], values)

    def _rows(self, query: Query, values: Mapping[str, Any]) -> list[Any]:
        return run_statement(self.supplier, rows_of(query, values), operation=f"jobs: {query.name}")
