"""A worker of jobs: one thread claims and finishes jobs, others run them, and one renews the lease.

While there is work, one transaction finishes all jobs that ended meanwhile, and one statement claims new
ones. Without work the worker sleeps on one connection until it is notified. After `idle_seconds` it closes
that, too.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg

from dormouse.durability.incarnations import this_process
from dormouse.errors import (
    CommitOutcomeUnknown,
    ConnectionsExhausted,
    DormouseError,
    InstanceError,
    InstanceForbidden,
    InstanceReadOnly,
    InstanceTooNew,
    InvalidInput,
    InvalidPayload,
    JobLost,
    NotAnInstance,
    ObjectStoreError,
    PayloadExpired,
    PayloadUnavailable,
    TooManyRetries,
    one_line,
)
from dormouse.jobs.claims import AGAIN_SECONDS, CANCELLED, CHANNEL, LIMITS, Claims, Ending, KindsBusy
from dormouse.jobs.job import Claim, encode_result, read_requests
from dormouse.jobs.runs import JobFunction, Progress, Run, WorkerPulse, refused, unkept
from dormouse.model.loops import backoff_seconds
from dormouse.objects.store import ObjectStore, is_noted_since, is_shared
from dormouse.payloads.store import PayloadStore
from dormouse.postgres.lease import WORKER_ASLEEP_SECONDS, WORKER_IDLE_SECONDS
from dormouse.postgres.listening import Listening


class Threads:
    """A pool of threads. Work starts at once, in a free thread or a new one; the caller limits their number.

    A thread whose work never returns is replaced by a new one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._all = 0

    def run(self, work: Callable[[], object]) -> None:
        """Runs `work`, which must not raise, in another thread."""
        with self._lock:
            if needs_another := self._free == 0:
                self._all += 1
            else:
                self._free -= 1
            number = self._all
        if needs_another:
            # a function that hangs must not keep the program from ending
            name = f"{self._name}-{number}"
            threading.Thread(target=self._serve, args=(work,), name=name, daemon=True).start()
        else:
            self._work.put(work)

    def close(self) -> None:
        """Ends the free threads, and the others when they become free."""
        for _ in range(self._all):
            self._work.put(None)

    def _serve(self, work: Callable[[], object] | None) -> None:
        while work is not None:
            work()
            del work
            with self._lock:
                self._free += 1
            work = self._work.get()


EVERYWHERE_SECONDS = 1.0


class Sight:
    """The numbers of the jobs, one for each kind, at which a worker begins its search.

    Starting there skips index entries of dead rows. Usually the number is the first of the jobs claimed last.
    Once a second the worker searches all jobs, to find jobs that a long transaction started or that other
    workers gave back.
    """

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._everywhere_at = float("-inf")

    def since(self) -> Mapping[int, int]:
        """Returns the number by kind id at which to begin; an empty mapping to search all jobs."""
        now = time.monotonic()
        if now - self._everywhere_at < EVERYWHERE_SECONDS:
            return self._since
        self._everywhere_at = now
        return {}

    def saw(self, claimed: Iterable[tuple[int, int]]) -> None:
        """Records the jobs that were just claimed, each given as (kind id, job number)."""
        firsts: dict[int, int] = {}
        for kind_id, number in claimed:
            firsts[kind_id] = min(number, firsts.get(kind_id, number))
        self._since |= firsts

    def look_everywhere(self) -> None:
        self._everywhere_at = float("-inf")


THREADS_MAX = 1_000
LOOK_SECONDS_MAX, BUSY_LOOK_SECONDS = WORKER_IDLE_SECONDS, 5.0
"""The seconds between two searches for dead workers, limits, and jobs without a notification.

The second number is for workers with jobs.
"""

FIRST_WAIT_SECONDS = 0.005
"""The first sleep. It is short, because a job may have been started just before; each next sleep is twice as
long.
"""

ASK_SECONDS = 15.0
"""The seconds after which a worker without a connection asks the object store again if there was activity."""

FAILED_SECONDS_MAX = 10.0
PASSING = (
    psycopg.OperationalError, InstanceError, ConnectionsExhausted, TooManyRetries, CommitOutcomeUnknown,
    ObjectStoreError, PayloadUnavailable,
)  # fmt: skip
LASTING = (InstanceReadOnly, InstanceForbidden, InstanceTooNew, NotAnInstance)
"""The errors after which a worker ends. After any other error in `PASSING`, it tries again."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """The options of `JobStore.worker`. Raises `InvalidInput`."""

    threads: int
    idle_seconds: float
    lease_seconds: float
    seconds_max: float

    def __post_init__(self) -> None:
        if type(self.threads) is not int or not 1 <= self.threads <= THREADS_MAX:
            raise InvalidInput(f"threads must be from 1 to {THREADS_MAX:,}, not {self.threads!r}")
        for name in ("idle_seconds", "lease_seconds", "seconds_max"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1e9:
                raise InvalidInput(f"{name} must be a number of seconds above 0, not {value!r}")


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """The number of jobs that a worker ran, by the way they ended; `lost` jobs were taken over by another
    worker.
    """

    complete: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0


class Worker:
    """A worker that runs jobs of some kinds. `JobStore.worker` makes it, and it can run only once."""

    def __init__(
        self,
        claims: Claims,
        objects: ObjectStore,
        functions: Mapping[int, JobFunction],
        options: WorkerOptions,
    ) -> None:
        self._line = Listening(claims.supplier, CHANNEL)
        self._claims = claims.over(self._line)
        self._payloads = PayloadStore(self._line, objects)
        self._objects = objects
        self._functions = dict(functions)
        self._options = options
        self._name = str(this_process())
        self._worker_id = uuid4()
        self._running: dict[UUID, Run] = {}
        self._ended: queue.SimpleQueue[tuple[Run, Ending | None, str | None]] = queue.SimpleQueue()
        self._to_finish: list[tuple[Run, Ending | None, str | None]] = []
        self._threads = Threads("dormouse-job")
        self._pulse = WorkerPulse(claims, list(self._functions), options.lease_seconds, self._line.wake)
        self._sight = Sight()
        self._limited: frozenset[int] = frozenset()
        self._is_registered = self._is_announced = self._found_nothing = self._is_sure = False
        self._wait_seconds = FIRST_WAIT_SECONDS
        self._look_at = self._idle_since = time.monotonic()
        self._stops = 0
        self._done: Counter[str] = Counter()

    @property
    def report(self) -> WorkerReport:
        """The numbers of jobs that this worker has run so far."""
        return WorkerReport(*(self._done[state] for state in ("COMPLETE", "FAILED", "CANCELLED", "lost")))

    def stop(self) -> None:
        """Stops claiming jobs, so that `run` returns when the running jobs have ended.

        A second call gives the running jobs back to other workers, and `run` returns at once.
        """
        self._stops += 1
        self._line.end_soon()
        self._line.wake()

    def run(self, *, drain: bool = False) -> WorkerReport:
        """Runs jobs until `stop` is called; with `drain`, until no job is left that may run now.

        The worker retries while the database or the object store cannot be reached. If `run` raises, as at
        Ctrl-C, it gives the running jobs back first, and other workers run them.
        """
        failures = 0
        with closing(self._line), closing(self._threads), closing(self._pulse):
            try:
                while not self._is_over(drain=drain):
                    try:
                        if failures:
                            # a claim may have succeeded although its answer was lost
                            self._claims.give_back(self._worker_id, list(self._functions), self._running)
                        self._turn(drain=drain)
                        failures = 0
                    except PASSING as error:
                        if isinstance(error, LASTING):
                            raise
                        failures += 1
                        self._found_nothing = False
                        logger.warning("worker: %s", one_line(error))
                        self._hear(self._line.wait(min(backoff_seconds(failures), FAILED_SECONDS_MAX)))
            finally:
                self._leave()
        return self.report

    def _is_over(self, *, drain: bool) -> bool:
        if self._stops > 1 or self._line.is_cut:
            return True
        works = self._running or self._to_finish or not self._ended.empty()
        return not works and (self._stops > 0 or (drain and self._found_nothing))

    def _turn(self, *, drain: bool) -> None:
        """Finishes jobs that ended and claims new ones; waits if there are neither."""
        if not self._is_registered:
            self._register()
        if self._pulse.is_lost:
            self._lose()
        if time.monotonic() >= self._look_at and not self._stops:
            self._look()
        self._is_sure = True
        finished, claimed = self._finish(), 0 if self._stops else self._claim()
        self._found_nothing = self._is_sure and not claimed
        if claimed or finished:
            now = time.monotonic()
            self._wait_seconds, self._idle_since = FIRST_WAIT_SECONDS, now
            self._look_at = min(self._look_at, now + BUSY_LOOK_SECONDS)
            if not self._running:  # the pulse no longer renews the lease
                self._is_announced = False
        elif self._running or not drain:
            self._wait()

    def _register(self) -> None:
        # a new id, as an earlier attempt to register may have succeeded although its answer was lost
        self._worker_id = uuid4()
        self._claims.register(self._worker_id, list(self._functions), self._name, self._options.lease_seconds)
        self._pulse.begin(self._worker_id)
        self._is_registered, self._found_nothing = True, False
        self._look_at = time.monotonic()

    def _lose(self) -> None:
        """Drops all running jobs after the lease was lost, because other workers have them; registers as a
        new worker.
        """
        logger.warning("the worker was taken for dead; other workers have its %d jobs", len(self._running))
        # first, and retried: an outage must not count as a death of its jobs' worker
        self._claims.lives(self._worker_id, self._running)
        self._drop(self._running.values(), "its worker did not renew its lease, and another one took it over")
        self._pulse.close()
        with suppress(DormouseError, psycopg.Error):
            self._claims.leave(self._worker_id)
        self._is_registered = self._is_announced = False
        self._register()

    def _drop(self, runs: Any, why: str) -> None:
        for run in list(runs):
            run.progress.end(JobLost(f"job {run.claim.job_id!r} no longer belongs to this worker: {why}"))
            self._forget(run)
            self._done["lost"] += 1

    def _forget(self, run: Run) -> None:
        if self._running.get(run.claim.job_key) is run:
            del self._running[run.claim.job_key]
            self._pulse.ended(run)

    # what runs

    def _claim(self) -> int:
        """Claims jobs and starts them in threads; returns how many it claimed."""
        if not (free := self._free()):
            return 0
        claims = self._claims.claim(self._worker_id, free, self._sight.since())
        self._sight.saw((claim.kind_id, claim.number) for claim in claims)
        unread = self._begin(claims)
        count = len(claims)
        if limited := {kind_id: most for kind_id, most in self._free().items() if kind_id in self._limited}:
            try:
                claims = self._claims.claim(self._worker_id, limited, {}, limited=True)
            except KindsBusy:  # not waited for, as there is other work
                self._is_sure = False
            else:
                unread += self._begin(claims)
                count += len(claims)
        if unread:  # the next turn gives their jobs back
            raise unread[0]
        return count

    def _free(self) -> dict[int, int]:
        """Returns how many more jobs of each kind this worker may start; kinds without a free place are left
        out.
        """
        busy = Counter(run.claim.kind_id for run in self._running.values())
        free = {kind_id: self._options.threads - busy[kind_id] for kind_id in self._functions}
        return {kind_id: count for kind_id, count in free.items() if count > 0}

    def _begin(self, claims: Sequence[Claim]) -> list[PayloadUnavailable]:
        """Starts claimed jobs in threads; returns the errors of requests that cannot be read now.

        Jobs with such a request are not started.
        """
        if not claims:
            return []
        requests = read_requests(self._payloads, claims)
        unread = [request for request in requests.values() if isinstance(request, PayloadUnavailable)]
        for claim in claims:
            if isinstance(requests[claim], PayloadUnavailable):
                continue
            run = Run(claim, self._functions[claim.kind_id], Progress(claim.job_id, claim.owner, claim.token))
            self._running[claim.job_key] = run
            self._pulse.began(run)
            request = requests[claim]
            if isinstance(request, DormouseError):
                self._ended.put((run, refused(claim, request), None))
            else:
                self._threads.run(lambda run=run, request=request: self._run(run, request))  # type: ignore[misc]
        if self._is_announced:
            self._claims.awake(self._worker_id, self._options.lease_seconds)
            self._is_announced = False
        return unread

    def _run(self, run: Run, request: Any) -> None:
        """Runs a job's function; a thread calls this for each job."""
        self._ended.put((run, *run.ended(request, encode_result)))
        self._line.wake()

    # what has ended

    def _finish(self) -> int:
        """Records the end of all jobs whose functions have returned, in one transaction; returns their
        number.
        """
        self._give_up_overdue()
        with suppress(queue.Empty):
            while True:
                self._to_finish.append(self._ended.get_nowait())
        # skips those that were lost, or given up, before their functions returned
        mine = [each for each in self._to_finish if self._running.get(each[0].claim.job_key) is each[0]]
        self._end([(ending, result) for _, ending, result in mine if ending is not None])
        self._done["lost"] += sum(ending is None for _, ending, _ in mine)
        for run, _, _ in mine:
            self._forget(run)
        self._to_finish.clear()
        return len(mine)

    def _end(self, endings: Sequence[tuple[Ending, str | None]]) -> None:
        if not endings:
            return
        results = [(ending.claim, result) for ending, result in endings if result is not None]
        try:
            ended = self._claims.finish(self._worker_id, [ending for ending, _ in endings], results)
        except (PayloadExpired, InvalidPayload, psycopg.DataError) as error:
            # one by one, so that a result that cannot be stored does not stop the other jobs
            for ending, _ in endings:
                self._end([(unkept(ending, error), None)] if len(endings) == 1 else [(ending, _)])
            return
        for ending, _ in endings:
            self._done[ending.state if ending.claim.job_key in ended else "lost"] += 1

    def _give_up_overdue(self) -> None:
        latest = time.monotonic() - self._options.seconds_max
        for run in list(self._running.values()):
            if run.began < latest and not run.is_given_up:
                run.is_given_up = True
                self._to_finish.append((run, run.overdue(self._options.seconds_max), None))

    # what waits

    def _wait(self) -> None:
        """Sleeps until there may be work.

        Before its first sleep, the worker subscribes to notifications and returns without sleeping. The
        caller then looks for work once more, so that no job is missed.
        """
        now, options = time.monotonic(), self._options
        if self._running or self._stops:
            began = min((run.began for run in self._running.values()), default=now)
            until = began + options.seconds_max
        elif (until := self._idle_since + options.idle_seconds) <= now:
            self._sleep()
            return
        is_open = not self._stops and bool(self._free())
        if is_open and not self._is_announced:
            self._look()
            return
        seconds = min(until - now, self._wait_seconds) if is_open else until - now
        if not self._stops:
            seconds = min(seconds, self._look_at - now)
        self._hear(self._line.wait(max(seconds, 0.001)))
        self._wait_seconds = min(2 * self._wait_seconds, LOOK_SECONDS_MAX)

    def _hear(self, heard: Collection[str]) -> None:
        """Handles the texts of notifications: a cancelled job, a changed limit, or a new job."""
        if CANCELLED in heard:
            self._pulse.now()
        if LIMITS in heard:
            self._look_at = time.monotonic()
        if heard:
            self._sight.look_everywhere()

    def _look(self) -> None:
        """Subscribes to notifications, takes over the jobs of dead workers, and reads which kinds have a
        limit.
        """
        kind_ids, lease_seconds = list(self._functions), self._options.lease_seconds
        if not self._running:  # a longer lease; with jobs it is short, so that they are soon taken over
            lease_seconds += LOOK_SECONDS_MAX
        look = self._claims.look(self._worker_id, kind_ids, lease_seconds, LOOK_SECONDS_MAX)
        if not look.is_alive:
            self._lose()
            return
        seconds = look.next_death_seconds
        if seconds is not None and seconds <= 0:
            self._claims.take_over()
            seconds = AGAIN_SECONDS
        self._is_announced, self._limited = True, look.limited
        # it subscribes again before the subscription ends
        most = LOOK_SECONDS_MAX / 2
        self._look_at = time.monotonic() + (most if seconds is None else min(max(seconds, 0) + 0.05, most))
        self._sight.look_everywhere()

    def _sleep(self) -> None:
        """Closes the connection until there may be work, for a day at most; extends the lease for
        that time.
        """
        seconds_max = WORKER_ASLEEP_SECONDS if is_shared(self._objects) else 2 * ASK_SECONDS
        self._claims.sleep(self._worker_id, seconds_max + self._options.lease_seconds)
        self._line.disconnect()
        self._is_announced = False
        slept_at, until = datetime.now(UTC), time.monotonic() + WORKER_ASLEEP_SECONDS
        while not self._stops and time.monotonic() < until:
            self._line.wait(ASK_SECONDS)
            if self._may_have_work(slept_at):
                break
        # if there is no work, the next `_wait` closes the connection again
        self._claims.awake(self._worker_id, self._options.lease_seconds)

    def _may_have_work(self, since: datetime) -> bool:
        """Returns whether there may be work since a time.

        In a store that hosts share, a newer note of activity shows it. For a folder the answer is always
        True, because a look at its own server costs nothing.
        """
        try:
            return not is_shared(self._objects) or is_noted_since(self._objects, since)
        except ObjectStoreError as error:
            logger.warning("the worker cannot look for jobs: %s", one_line(error))
            return False

    def _leave(self) -> None:
        self._drop(self._running.values(), "the worker is being stopped")
        with suppress(DormouseError, psycopg.Error):
            self._claims.give_back(self._worker_id, list(self._functions))
            self._claims.leave(self._worker_id)
