"""A worker: a thread that claims, hands over and finishes; threads that run; one that tells that it lives.

While there is work, all that ended meanwhile is one transaction, and all that may be claimed one statement.
Without work it sleeps on one connection until it is notified; after `idle_seconds` it lets that go, too.
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

# Threads that are kept for the next work; one that never comes back is replaced by another.


class Threads:
    """Runs each work at once, in a thread that is free or a new one; how many there are is the caller's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._all = 0

    def run(self, work: Callable[[], object]) -> None:
        """`work` must not raise."""
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
        """Those that are free end, and others when they become free."""
        for _ in range(self._all):
            self._work.put(None)

    def _serve(self, work: Callable[[], object] | None) -> None:
        while work is not None:
            work()
            del work
            with self._lock:
                self._free += 1
            work = self._work.get()


# From which job on a worker looks, of each kind: what was claimed weighs on the index until vacuum.

EVERYWHERE_SECONDS = 1.0


class Sight:
    """Mostly from the first of the last jobs claimed on; once a second everywhere.

    That finds what was started in a long transaction, and what others gave back.
    """

    def __init__(self) -> None:
        self._since: dict[int, int] = {}
        self._everywhere_at = float("-inf")

    def since(self) -> Mapping[int, int]:
        """The numbers by kind."""
        now = time.monotonic()
        if now - self._everywhere_at < EVERYWHERE_SECONDS:
            return self._since
        self._everywhere_at = now
        return {}

    def saw(self, claimed: Iterable[tuple[int, int]]) -> None:
        """What was claimed, as kinds and numbers."""
        firsts: dict[int, int] = {}
        for kind_id, number in claimed:
            firsts[kind_id] = min(number, firsts.get(kind_id, number))
        self._since |= firsts

    def look_everywhere(self) -> None:
        self._everywhere_at = float("-inf")


THREADS_MAX = 1_000
LOOK_SECONDS_MAX, BUSY_LOOK_SECONDS = WORKER_IDLE_SECONDS, 5.0
"""How often a worker looks for dead ones, limits, and jobs that it was not told of; with work more often."""

FIRST_WAIT_SECONDS = 0.005
"""A start may just miss that a worker went to sleep: it looks soon after, and then ever more rarely."""

ASK_SECONDS = 15.0
"""How often one without a connection asks the object store whether there was any activity."""

FAILED_SECONDS_MAX = 10.0
PASSING = (
    psycopg.OperationalError, InstanceError, ConnectionsExhausted, TooManyRetries, CommitOutcomeUnknown,
    ObjectStoreError, PayloadUnavailable,
)  # fmt: skip
LASTING = (InstanceReadOnly, InstanceForbidden, InstanceTooNew, NotAnInstance)
"""What a worker tries again after, but for these."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """Of `JobStore.worker`; `InvalidInput`."""

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
    """How the jobs ended that a worker ran; `lost` are those that another one runs, or ran."""

    complete: int = 0
    failed: int = 0
    cancelled: int = 0
    lost: int = 0


class Worker:
    """Runs jobs of some kinds; made by `JobStore.worker`. It runs once."""

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
        """What was done so far."""
        return WorkerReport(*(self._done[state] for state in ("COMPLETE", "FAILED", "CANCELLED", "lost")))

    def stop(self) -> None:
        """Takes no more jobs; `run` returns when those that run have ended. Again: others run them."""
        self._stops += 1
        self._line.end_soon()
        self._line.wake()

    def run(self, *, drain: bool = False) -> WorkerReport:
        """Runs jobs until `stop`; with `drain` until none is left that may run now.

        What a database or an object store cannot do for the moment is tried again. When it raises, as at
        Ctrl-C, the jobs that run are given back, and others run them.
        """
        failures = 0
        with closing(self._line), closing(self._threads), closing(self._pulse):
            try:
                while not self._is_over(drain=drain):
                    try:
                        if failures:
                            # as the database may have it, the worker claimed what it was not told of
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
        """One round: what ended is finished, what may run is claimed; or it waits for either."""
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
            if not self._running:  # no pulse renews the lease any more
                self._is_announced = False
        elif self._running or not drain:
            self._wait()

    def _register(self) -> None:
        # by a new name: the one of before may be known, though it was not told so
        self._worker_id = uuid4()
        self._claims.register(self._worker_id, list(self._functions), self._name, self._options.lease_seconds)
        self._pulse.begin(self._worker_id)
        self._is_registered, self._found_nothing = True, False
        self._look_at = time.monotonic()

    def _lose(self) -> None:
        """The lease is over: others have the jobs, and this is another worker from now on."""
        logger.warning("worker: it was found dead; %d jobs are others' now", len(self._running))
        # first, and again if that fails: a job must not fail because its workers were not heard for a while
        self._claims.lives(self._worker_id, self._running)
        self._drop(self._running.values(), "its worker told nothing for so long that others took it over")
        self._pulse.close()
        with suppress(DormouseError, psycopg.Error):
            self._claims.leave(self._worker_id)
        self._is_registered = self._is_announced = False
        self._register()

    def _drop(self, runs: Any, why: str) -> None:
        for run in list(runs):
            run.progress.end(JobLost(f"job {run.claim.job_id!r} is not this worker's any more: {why}"))
            self._forget(run)
            self._done["lost"] += 1

    def _forget(self, run: Run) -> None:
        if self._running.get(run.claim.job_key) is run:
            del self._running[run.claim.job_key]
            self._pulse.ended(run)

    # what runs

    def _claim(self) -> int:
        """Claims what may run, and has threads run it; gives how many jobs that were."""
        if not (free := self._free()):
            return 0
        claims = self._claims.claim(self._worker_id, free, self._sight.since())
        self._sight.saw((claim.kind_id, claim.number) for claim in claims)
        unread = self._begin(claims)
        count = len(claims)
        if limited := {kind_id: most for kind_id, most in self._free().items() if kind_id in self._limited}:
            try:
                claims = self._claims.claim(self._worker_id, limited, {}, limited=True)
            except KindsBusy:  # it has others to run and to finish
                self._is_sure = False
            else:
                unread += self._begin(claims)
                count += len(claims)
        if unread:  # the next turn gives their jobs back
            raise unread[0]
        return count

    def _free(self) -> dict[int, int]:
        """How many more of each kind may run here; without those that are full."""
        busy = Counter(run.claim.kind_id for run in self._running.values())
        free = {kind_id: self._options.threads - busy[kind_id] for kind_id in self._functions}
        return {kind_id: count for kind_id, count in free.items() if count > 0}

    def _begin(self, claims: Sequence[Claim]) -> list[PayloadUnavailable]:
        """Has threads run them. Gives why requests cannot be read now: of jobs that it does not run."""
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
        """In a thread."""
        self._ended.put((run, *run.ended(request, encode_result)))
        self._line.wake()

    # what has ended

    def _finish(self) -> int:
        """Ends the jobs whose functions have returned, in one transaction; gives how many there were."""
        self._give_up_overdue()
        with suppress(queue.Empty):
            while True:
                self._to_finish.append(self._ended.get_nowait())
        # the others were lost, or given up, before their functions returned
        mine = [one for one in self._to_finish if self._running.get(one[0].claim.job_key) is one[0]]
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
            # one that cannot be kept keeps no other from its end
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
        """Sleeps until there may be something to do. Before, it says so, and then looks once more."""
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
        """Looks at what it was notified of."""
        if CANCELLED in heard:
            self._pulse.now()
        if LIMITS in heard:
            self._look_at = time.monotonic()
        if heard:
            self._sight.look_everywhere()

    def _look(self) -> None:
        """Says that it may be notified, takes over from the dead, and learns which kinds have a limit."""
        kind_ids, lease_seconds = list(self._functions), self._options.lease_seconds
        if not self._running:  # of one that has jobs, these are others' soon after it dies
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
        # it says so again before that is over
        most = LOOK_SECONDS_MAX / 2
        self._look_at = time.monotonic() + (most if seconds is None else min(max(seconds, 0) + 0.05, most))
        self._sight.look_everywhere()

    def _sleep(self) -> None:
        """Lets the connection go until there may be work, for a day at most; the lease lasts as long."""
        seconds_max = WORKER_ASLEEP_SECONDS if is_shared(self._objects) else 2 * ASK_SECONDS
        self._claims.sleep(self._worker_id, seconds_max + self._options.lease_seconds)
        self._line.disconnect()
        self._is_announced = False
        slept_at, until = datetime.now(UTC), time.monotonic() + WORKER_ASLEEP_SECONDS
        while not self._stops and time.monotonic() < until:
            self._line.wait(ASK_SECONDS)
            if self._may_have_work(slept_at):
                break
        # found nothing, it lets go again at once
        self._claims.awake(self._worker_id, self._options.lease_seconds)

    def _may_have_work(self, since: datetime) -> bool:
        """Activity is noted in a store that is shared; a server beside a folder costs nothing to be asked."""
        try:
            return not is_shared(self._objects) or is_noted_since(self._objects, since)
        except ObjectStoreError as error:
            logger.warning("worker: it cannot ask whether there is work: %s", one_line(error))
            return False

    def _leave(self) -> None:
        self._drop(self._running.values(), "the worker is being stopped")
        with suppress(DormouseError, psycopg.Error):
            self._claims.give_back(self._worker_id, list(self._functions))
            self._claims.leave(self._worker_id)
