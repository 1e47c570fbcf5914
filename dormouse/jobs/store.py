"""The public object for the jobs of an instance, which starts, lists and cancels jobs, and makes workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from dormouse.errors import (
    CommitIdReused,
    DormouseError,
    InvalidInput,
    JobCancelled,
    JobFailed,
    JobIdTaken,
    JobNotEnded,
    JobNotFound,
    PayloadExpired,
    PayloadNotFound,
)
from dormouse.jobs.claims import Claims, expire
from dormouse.jobs.job import (
    ENDED_STATES,
    Job,
    JobPlace,
    JobState,
    KindOfJob,
    Payloads,
    check_kind,
    check_listed_kind,
    check_new_id,
    check_owner,
    check_state,
    compared,
    encode_request,
    is_key,
    job_key,
    new_job_id,
    request_key,
    request_of,
    result_of,
)
from dormouse.model.table import KEPT_SECONDS
from dormouse.objects.store import ObjectStore, is_shared, note_activity
from dormouse.payloads.keys import decode
from dormouse.payloads.rows import with_days, write
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement

if TYPE_CHECKING:
    from dormouse.jobs.runs import JobFunction
    from dormouse.jobs.worker import Worker

LIMIT, LIMIT_MAX = 100, 10_000
COUNTED_MAX = 10_000
RUNNING_MAX = (1 << 31) - 1
CANCEL_TRIES_MAX = 100

_QUERIES = load(__package__ or "", "jobs")
_WORKS = {"works": _QUERIES["works"]}
_SHOWN = {"shown": _QUERIES["shown"].including(**_WORKS), "shown_ended": _QUERIES["shown_ended"]}
_KINDS = _QUERIES["kinds"].including(**_WORKS)
_START = _QUERIES["start"].including(wake=_QUERIES["wake"])
_FIND = _QUERIES["find"].including(**_SHOWN)
_AFTER = {name: _QUERIES[name] for name in ("unended_after", "ended_after")}
_LIST = _QUERIES["list"].including(**_SHOWN, **_AFTER)


class JobStore:
    """The jobs of one instance, as `Instance.jobs`. Threads may share it.

    A job may have an `owner`. A call with an owner sees only that owner's jobs, without tracebacks. A call
    without an owner sees all jobs.
    """

    def __init__(
        self,
        supplier: Supplier,
        objects: ObjectStore,
        payloads: Payloads,
        check_writable: Callable[[], None],
    ) -> None:
        self._supplier = supplier
        self._objects = objects
        self._is_shared = is_shared(objects)
        self._payloads = payloads
        self._check_writable = check_writable
        self._kind_ids: dict[str, int] = {}
        self._workers: WeakSet[Worker] = WeakSet()

    def start(self, kind: str, request: Any, owner: str | None = None, *, job_id: str | None = None) -> str:
        """Records a job, which a worker will run when it can; returns the job's id.

        `request` is a JSON value. A repetition with the same `job_id`, kind, owner and request starts no
        second job. Nothing starts if the call raises one of these errors:

        - `InvalidInput`.
        - `InvalidPayload` for a request that is no JSON value.
        - `JobIdTaken` for the id of a job of another kind or owner.
        - `CommitIdReused` for the id of a job with another request, if the job's request still exists.

        After `CommitOutcomeUnknown`, call `start` again with the same id.
        """
        self._check_writable()
        check_kind(kind)
        check_owner(owner)
        if job_id is not None:
            check_new_id(job_id)
        chosen = job_id or new_job_id()
        key = job_key(chosen)
        text = encode_request(chosen, request)
        values = {
            "job_key": key,
            "kind_id": self._kind_id(kind),
            "job_id": None if is_key(chosen) else chosen,
            "owner": owner,
        }

        kept = request_key(chosen, datetime.now(UTC))

        def work(conn: Any) -> bool:
            nonlocal kept
            if not (started := conn.execute(_START.on(), values).fetchall()):
                return False
            if job_id is not None and conn.execute(_QUERIES["has_ended"].on(), values).fetchone()[0]:
                raise _Known
            kept = request_key(chosen, started[0][0])
            write(conn, {kept: text})
            return True

        try:
            is_new = with_days(self._supplier, work, lambda: {kept.day}, operation="start a job")
        except _Known:
            is_new = False
        if not is_new:
            self._check_same(chosen, kind, owner, text)
        if self._is_shared:  # workers that closed their connections look for this note
            note_activity(self._objects)
        return chosen

    def status(self, job_id: str, owner: str | None = None) -> Job:
        """Returns the state of a job. Raises `JobNotFound`."""
        return self._found(job_id, owner)

    def request(self, job_id: str, owner: str | None = None) -> Any:
        """Returns the request of a job.

        Raises `JobNotFound`, and the errors of the payload store if the request no longer exists.
        """
        job = self._found(job_id, owner)
        return request_of(self._payloads, job)

    def result(self, job_id: str, owner: str | None = None) -> Any:
        """Returns the result of a job's function.

        Raises `JobNotFound`, `JobNotEnded` or `JobCancelled`. A failed job raises `JobFailed`, with the
        message and the `data` of the function's error. If the result no longer exists, raises the error of
        the payload store.
        """
        job = self._found(job_id, owner)
        if not job.has_ended:
            raise JobNotEnded(f"job {job_id!r} has not ended: ask again later", job_id=job_id)
        if job.state == "CANCELLED":
            raise JobCancelled(f"job {job_id!r} was cancelled", job_id=job_id)
        if job.state == "FAILED":
            data: Any = {}
            with suppress(DormouseError):  # most errors have no data
                data = result_of(self._payloads, job)
            raise JobFailed.from_message(f"job {job_id!r} failed: {job.error}", {**data, "job_id": job_id})
        return result_of(self._payloads, job)

    def cancel(self, job_id: str, owner: str | None = None) -> Job:
        """Ends a waiting job, or asks the function of a running job to end; returns the job as it is now.

        A job that has ended stays as it is. Raises `JobNotFound`.
        """
        self._check_writable()
        job = self._found(job_id, owner)
        for _ in range(CANCEL_TRIES_MAX):
            if job.has_ended or (job.is_cancelled and not job.is_waiting):
                break
            work = rows_of(_QUERIES["cancel"], {"job_key": job_key(job_id)})
            run_statement(self._supplier, work, operation="cancel a job")
            # repeated, as a worker may have taken it or given it back at the same moment
            job = self._found(job_id, owner)
        return job

    def kinds(self) -> list[KindOfJob]:
        """Returns all kinds of jobs: for each its limit, its workers, and its numbers of jobs by state.

        Ended jobs are counted if they ended within a day.
        """
        work = rows_of(_KINDS, {"counted_max": COUNTED_MAX, "states": list(ENDED_STATES)})
        return [KindOfJob(*row) for row in run_lookup(self._supplier, work, operation="list kinds of jobs")]

    def list(
        self,
        kind: str | None = None,
        state: JobState | None = None,
        *,
        owner: str | None = None,
        limit: int = LIMIT,
        after: Job | JobPlace | None = None,
    ) -> list[Job]:
        """Returns jobs and rounds: first those that have not ended, newest first, then the last ended ones.

        Pass the last job of a page as `after` to get the next page; a job that ends meanwhile may come again.
        Rounds have the kinds "round:ingest", "round:compaction", "round:split", "round:merge" and
        "round:collection".
        """
        if kind is not None:
            check_listed_kind(kind)
        if state is not None:
            check_state(state)
        check_owner(owner)
        if type(limit) is not int or not 1 <= limit <= LIMIT_MAX:
            raise InvalidInput(f"limit must be from 1 to {LIMIT_MAX:,}, not {limit!r}")
        place = JobPlace.of(after) if isinstance(after, Job) else after
        values = {
            "kind": kind,
            "state": state,
            "owner": owner,
            "limit": limit,
            "after_ended": "infinity" if place is None or place.ended_at is None else place.ended_at,
            "after_started": None if place is None else place.started_at,
            "after_key": None if place is None else place.key,
        }
        rows = run_lookup(self._supplier, rows_of(_LIST, values), operation="list jobs")
        return [_job(row, owner) for row in rows]

    def limit(self, kind: str, running_max: int | None) -> None:
        """Sets how many jobs of a kind may run at once in the whole cluster; None removes the limit.

        If a limit is lowered, the running jobs continue.
        """
        self._check_writable()
        check_kind(kind)
        if running_max is not None and not (type(running_max) is int and 1 <= running_max <= RUNNING_MAX):
            raise InvalidInput(
                f"running_max must be a whole number of 1 or more, or None, not {running_max!r}"
            )
        values = {"kind_id": self._kind_id(kind), "running_max": running_max}
        run_statement(self._supplier, rows_of(_QUERIES["limit"], values), operation="limit a kind of job")

    def worker(
        self,
        functions: Mapping[str, JobFunction],
        threads: int = 4,
        *,
        idle_seconds: float = 300.0,
        lease_seconds: float = 30.0,
        seconds_max: float = 86_400.0,
    ) -> Worker:
        """Returns a worker for some kinds of jobs. Call its `run()` to begin, and its `stop()` to end it.

        - `functions`: the function of each kind, called as `function(request, progress)`. It returns a JSON
          value.
        - `threads`: the number of jobs of one kind that run at once.
        - `idle_seconds`: after this time without work, the worker closes its connection, and then looks for
          work from time to time.
        - `lease_seconds`: the time in which a worker must renew its lease. If it does not, another worker
          finds the lease expired. After another half of this time, the worker counts as dead, and other
          workers run its jobs. After an outage of the database, the worker continues.
        - `seconds_max`: the time after which a running job fails.

        Raises `InvalidInput`.
        """
        self._check_writable()
        # imported here, as lambdas start jobs but never run them
        from dormouse.jobs.worker import Worker, WorkerOptions

        options = WorkerOptions(threads, idle_seconds, lease_seconds, seconds_max)
        if not isinstance(functions, Mapping) or not functions:
            raise InvalidInput("a worker needs functions, like {'report': make_report}")
        for kind, function in functions.items():
            check_kind(kind)
            if not callable(function):
                raise InvalidInput(f"the function of kind {kind!r} cannot be called: {function!r}")
        by_id = {self._kind_id(kind): function for kind, function in functions.items()}
        made = Worker(Claims(self._supplier), self._objects, by_id, options)
        self._workers.add(made)
        return made

    def close(self) -> None:
        """Stops the workers of this object; workers of other processes run their jobs again."""
        for worker in list(self._workers):
            worker.stop()
            worker.stop()

    def expire(self, retention_days: int, kept_seconds: float = KEPT_SECONDS) -> int:
        """Deletes jobs that ended more than `retention_days` ago, with their requests, results and answers.

        Deletes whole days, in UTC; returns how many. Jobs that have not ended stay. Data that was sent for a
        job that was never started is deleted after `kept_seconds`. Raises `InvalidInput`.
        """
        self._check_writable()
        return expire(
            self._supplier, self._objects, self._payloads, retention_days, kept_seconds=kept_seconds
        )

    def _found(self, job_id: str, owner: str | None) -> Job:
        check_owner(owner)
        work = rows_of(_FIND, {"job_key": job_key(job_id)})
        rows = run_lookup(self._supplier, work, operation="find a job")
        job = _job(rows[0], owner) if rows else None
        if job is None or (owner is not None and job.owner != owner):
            raise JobNotFound(f"there is no job {job_id!r}, or it is another owner's", job_id=job_id)
        return job

    def _check_same(self, job_id: str, kind: str, owner: str | None, text: str) -> None:
        job = self._found(job_id, None)
        if (job.kind, job.owner) != (kind, owner):
            raise JobIdTaken(
                f"the id {job_id!r} belongs to another job: give each job its own", job_id=job_id
            )
        try:
            before = request_of(self._payloads, job)
        except (PayloadExpired, PayloadNotFound):
            return
        if compared(kind, before) != compared(kind, decode(text)):
            raise CommitIdReused(
                f"the id {job_id!r} belongs to a job with another request; nothing was started: give each "
                "job its own",
                commit_id=job_id,
            )

    def _kind_id(self, kind: str) -> int:
        if (kind_id := self._kind_ids.get(kind)) is None:
            work = rows_of(_QUERIES["kind"], {"name": kind})
            kind_id = run_statement(self._supplier, work, operation="find a kind of job")[0][0]
            self._kind_ids[kind] = kind_id
        return kind_id


class _Known(Exception):
    """An error that rolls back a start, because a job with this id has already ended."""


def _job(row: Any, owner: str | None) -> Job:
    (key, job_id, *values) = row
    job = Job(job_id or str(key), *values)
    return job if owner is None else replace(job, traceback=None)
