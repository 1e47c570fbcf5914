"""The run of one job by a worker, which calls the job's function and records the result as the job's end."""

from __future__ import annotations

import math
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from uuid import UUID

from dormouse.errors import (
    DormouseError,
    InvalidInput,
    InvalidPayload,
    JobCancelled,
    JobError,
    JobLost,
    one_line,
)
from dormouse.jobs.claims import Claims, Ending
from dormouse.jobs.job import TRACEBACK_CHARACTERS_MAX, Claim, shortened
from dormouse.postgres.lease import Pulse

COUNT_MAX = (1 << 63) - 1


class Progress:
    """The object through which a job's function reports its progress and learns that it should end.

    `progress(3, 10, "third of ten")` reports how far the function is; this costs no statement. The call
    raises `JobCancelled` when the job was cancelled, and `JobLost` when another worker has the job. The
    function should not catch these two errors.
    """

    def __init__(self, job_id: str, owner: str | None = None, attempt: int = 1) -> None:
        self.job_id = job_id
        self.owner = owner
        self.attempt = attempt
        self._lock = threading.Lock()
        self._end: JobError | None = None
        self._reported: tuple[int | None, int | None, str | None] = (None, None, None)
        self._has_news = False
        self._calls: list[Callable[[], object]] = []

    def __call__(
        self, current: int | None = None, total: int | None = None, message: str | None = None
    ) -> None:
        """Reports how far the function is; None keeps the value that was reported before.

        Raises `InvalidInput`, `JobCancelled` and `JobLost`.
        """
        for value in (current, total):
            if value is not None and not (type(value) is int and 0 <= value <= COUNT_MAX):
                raise InvalidInput(f"progress is counted in whole numbers of 0 and more, not {value!r}")
        if message is not None and not isinstance(message, str):
            raise InvalidInput(f"a message is text, not {message!r}")
        values = (current, total, shortened(message))
        with self._lock:
            if any(value is not None for value in values):
                pairs = zip(values, self._reported, strict=True)
                self._reported = tuple(new if new is not None else old for new, old in pairs)  # type: ignore[assignment]
                self._has_news = True
        self.check()

    def check(self) -> None:
        """Raises `JobCancelled` or `JobLost` if the job should end; reports nothing."""
        if self._end is not None:
            raise self._end

    def end(self, why: JobError) -> None:
        """Makes the next call raise `why`, unless an earlier reason was given."""
        with self._lock:
            self._end = self._end or why
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def at_end(self, call: Callable[[], object]) -> None:
        """Registers a function that another thread calls when the job should end.

        Use it to interrupt work that cannot call `check`.
        """
        with self._lock:
            if self._end is None:
                self._calls.append(call)
                return
        call()

    @property
    def is_cancelled(self) -> bool:
        """True if the job was cancelled."""
        return isinstance(self._end, JobCancelled)

    @property
    def is_lost(self) -> bool:
        """True if another worker has the job, or will have it."""
        return isinstance(self._end, JobLost)

    @property
    def reported(self) -> tuple[int | None, int | None, str | None]:
        """The current count, the total and the message that were reported last."""
        return self._reported

    def take_news(self) -> bool:
        """Returns whether something was reported since the last call."""
        with self._lock:
            news, self._has_news = self._has_news, False
        return news


JobFunction = Callable[[Any, Progress], Any]
"""A job's function: it gets the request and the progress, and returns the result, a JSON value."""


@dataclass(eq=False)
class Run:
    """A claimed job, whose function runs in a thread."""

    claim: Claim
    function: JobFunction
    progress: Progress
    began: float = field(default_factory=time.monotonic)
    is_given_up: bool = False

    def ended(self, request: Any, encode: Callable[[Claim, Any], str]) -> tuple[Ending | None, str | None]:
        """Calls the job's function; returns the job's end and the JSON of the result.

        The end is None if another worker is to run the job; the JSON is None without a result.
        """
        try:
            result = encode(self.claim, self.function(request, self.progress))
        except InvalidPayload as error:
            return unkept(Ending(self.claim, "COMPLETE", self.progress.reported), error), None
        except BaseException as error:  # also SystemExit, which would end the thread
            return self._ending_of(error), self._data_of(error, encode)
        return Ending(self.claim, "COMPLETE", self.progress.reported), result

    def _data_of(self, error: BaseException, encode: Callable[[Claim, Any], str]) -> str | None:
        """Returns an error's data as JSON, to store in place of a result; None if the error has no data."""
        if not isinstance(error, DormouseError) or not error.data:
            return None
        try:
            return encode(self.claim, dict(error.data))
        except InvalidPayload:
            return None

    def overdue(self, seconds_max: float) -> Ending:
        """Returns the end of a job whose function does not return in time."""
        self.progress.end(JobLost("the job was given up, as it ran for too long"))
        return self._failed(f"its function did not return within {seconds_max:g} s", None)

    def _ending_of(self, error: BaseException) -> Ending | None:
        causes = list(_chain(error))
        if self.progress.is_lost and any(isinstance(each, JobLost) for each in causes):
            return None
        if self.progress.is_cancelled and any(isinstance(each, JobCancelled) for each in causes):
            return Ending(self.claim, "CANCELLED", self.progress.reported)
        text = one_line(error)
        if isinstance(error, SystemExit):
            text = f"its function ended the thread by SystemExit({error.code!r})"
        else:
            text = f"{type(error).__name__}: {text}"
        return self._failed(text, "".join(traceback.format_exception(error)))

    def _failed(self, error: str, trace: str | None) -> Ending:
        reported = self.progress.reported
        return Ending(
            self.claim, "FAILED", reported, shortened(error), shortened(trace, TRACEBACK_CHARACTERS_MAX)
        )


def refused(claim: Claim, why: DormouseError) -> Ending:
    """Returns the end of a job whose request cannot be read."""
    return Ending(
        claim, "FAILED", (None, None, None), shortened(f"its request cannot be read: {one_line(why)}")
    )


def unkept(ending: Ending, why: Exception) -> Ending:
    """Returns the end of a job whose result cannot be stored."""
    return replace(ending, state="FAILED", error=shortened(f"its result cannot be kept: {one_line(why)}"))


def _chain(error: BaseException | None) -> Any:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


# The lease of a worker while jobs run.

NEWS_SECONDS = 1.0
"""The shortest time between two writes of the progress that a function reports."""


class WorkerPulse:
    """A thread that renews a worker's lease, stores the progress of its jobs, and cancels jobs.

    The thread runs its own statements, so that storing a large result does not delay it. When the lease is
    lost, it calls `wake`.
    """

    def __init__(
        self, claims: Claims, kind_ids: Sequence[int], lease_seconds: float, wake: Callable[[], object]
    ) -> None:
        self._claims = claims
        self._kind_ids = kind_ids
        self._lease_seconds = lease_seconds
        self._wake = wake
        self._runs: dict[UUID, Run] = {}
        self._pulse: Pulse | None = None
        self._is_asked = False
        self._renewed_at = 0.0

    @property
    def is_lost(self) -> bool:
        """True if the worker was found dead before it renewed its lease."""
        return self._pulse is not None and self._pulse.is_lost

    def begin(self, worker_id: UUID) -> None:
        """Starts the thread for a worker that was just registered."""
        self.close()
        self._runs, self._renewed_at = {}, time.monotonic()
        tell, lose = partial(self._tell, worker_id, self._runs), partial(self._lose, self._runs)
        self._pulse = Pulse(tell, math.inf, "dormouse-job-pulse", lose)
        self._pulse.start()

    def began(self, run: Run) -> None:
        self._runs[run.claim.job_key] = run
        if len(self._runs) == 1 and self._pulse is not None:
            self._pulse.seconds = min(NEWS_SECONDS, self._lease_seconds / 3)
            self._pulse.now()

    def ended(self, run: Run) -> None:
        if self._runs.get(run.claim.job_key) is run:
            del self._runs[run.claim.job_key]
        if not self._runs and self._pulse is not None:
            self._pulse.seconds = math.inf

    def now(self) -> None:
        """Makes the thread check at once for cancelled jobs."""
        self._is_asked = True
        if self._pulse is not None:
            self._pulse.now()

    def close(self) -> None:
        if self._pulse is not None:
            self._pulse.close()

    def _tell(self, worker_id: UUID, by_key: Mapping[UUID, Run]) -> bool:
        """Renews the lease and stores progress, if either is due; returns False if the worker was
        found dead.
        """
        if not (runs := list(by_key.values())):
            return True
        news = [(run.claim, run.progress.reported) for run in runs if run.progress.take_news()]
        began = time.monotonic()
        if not (news or self._is_asked) and began - self._renewed_at < self._lease_seconds / 3:
            return True
        self._is_asked = False
        is_alive, cancelled = self._claims.pulse(worker_id, self._kind_ids, news, self._lease_seconds)
        self._renewed_at = began
        for run in runs:
            if run.claim.job_key in cancelled:
                run.progress.end(JobCancelled(f"job {run.claim.job_id!r} was cancelled"))
        return is_alive

    def _lose(self, runs: Mapping[UUID, Run]) -> None:
        for run in list(runs.values()):
            run.progress.end(JobLost(f"job {run.claim.job_id!r} now belongs to another worker"))
        self._wake()
