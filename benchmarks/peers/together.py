"""Workers, each in a process of its own, that start at the same moment and stop after some seconds."""

from __future__ import annotations

import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.harness.processes import FORKSERVER, Opener
from benchmarks.peers.peer import Refused, Steps

START_SECONDS_MAX = 120.0
"""How long a worker may take to open its table."""
_TOGETHER_SECONDS = 0.1

PRELOAD = (
    "benchmarks.peers.__main__",
    "dormouse.commits.requests",
    "duckdb",
    "duckdb_extension_ducklake",
    "duckdb_extension_postgres_scanner",
    "deltalake.writer",
    "pyarrow.dataset",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
    "sqlalchemy.dialects.postgresql.psycopg2",
)


@dataclass(frozen=True)
class Task:
    """What a worker does: steps until the time is over, or so many have succeeded.

    A `helper` goes on until all the others are done, and what they left to it.
    """

    open: Opener
    steps_max: int | None = None
    helper: bool = False


class Done(NamedTuple):
    """A step that made commits: when it ended, in seconds after the start, and how long it took."""

    ended: float
    seconds: float
    commits: int


@dataclass
class Tally:
    """What a worker did."""

    done: list[Done] = field(default_factory=list)
    refused: int = 0
    retries: int | None = None
    unfinished: int = 0
    """1 when its last step did not end in time: it was still trying."""
    exhausted: bool = False
    """All its work was done."""
    error: str | None = None


@dataclass(frozen=True)
class Result:
    """All workers of a run."""

    seconds: float
    """From the start until the time was over, or all work done."""
    commits: int
    latencies: tuple[float, ...]
    refused: int
    retries: int | None
    unfinished: int

    @property
    def per_second(self) -> float:
        return self.commits / self.seconds

    def percentile(self, percent: int) -> float:
        """Of the seconds of the steps that ended; the whole time when none did."""
        if len(self.latencies) < 2:
            return self.latencies[0] if self.latencies else self.seconds
        return statistics.quantiles(self.latencies, n=100, method="inclusive")[percent - 1]


def run_together(tasks: Sequence[Task], seconds: float, grace_seconds: float) -> list[Tally]:
    """Runs all tasks at once for so many seconds; a step that began may end in the grace after them."""
    with _started(tasks, seconds, grace_seconds) as pipes:
        for pipe in pipes:
            _check(_answer(pipe, START_SECONDS_MAX))
        start = time.monotonic() + _TOGETHER_SECONDS
        for pipe in pipes:
            _send(pipe, start)
        patience = seconds + grace_seconds + START_SECONDS_MAX
        answers: dict[int, Tally] = {}
        # helpers come last, and are told that the others are done
        for number in sorted(range(len(tasks)), key=lambda n: tasks[n].helper):
            if tasks[number].helper:
                _send(pipes[number], None)
            answers[number] = _check(_answer(pipes[number], patience))
        return [answers[number] for number in range(len(tasks))]


def summary(tallies: Sequence[Tally], seconds: float) -> Result:
    """What ended within the seconds; fewer seconds when all the work was done before."""
    done = [step for tally in tallies for step in tally.done]
    within = [step for step in done if step.ended <= seconds]
    counted = [tally.retries for tally in tallies if tally.retries is not None]
    ended_early = all(tally.exhausted for tally in tallies) and len(within) == len(done)
    return Result(
        seconds=max(step.ended for step in within) if ended_early and within else seconds,
        commits=sum(step.commits for step in within),
        latencies=tuple(step.seconds for step in done),
        refused=sum(tally.refused for tally in tallies),
        retries=sum(counted) if counted else None,
        unfinished=sum(tally.unfinished for tally in tallies),
    )


@contextmanager
def _started(tasks: Sequence[Task], seconds: float, grace_seconds: float) -> Iterator[list[Connection]]:
    pairs = [FORKSERVER.Pipe() for _ in tasks]
    workers = [
        FORKSERVER.Process(target=_work, args=(theirs, task, seconds, grace_seconds), daemon=True)
        for (_, theirs), task in zip(pairs, tasks, strict=True)
    ]
    try:
        for worker, (_, theirs) in zip(workers, pairs, strict=True):
            worker.start()
            theirs.close()
        yield [ours for ours, _ in pairs]
    except BaseException:
        for worker in workers:
            if worker.pid is not None:
                worker.kill()
        raise
    finally:
        for worker, (ours, _) in zip(workers, pairs, strict=True):
            ours.close()
            _end(worker)


def _end(worker: Any) -> None:
    if worker.pid is None:
        return
    worker.join(timeout=5)
    if worker.is_alive():
        worker.kill()
        worker.join()


def _send(pipe: Connection, message: float | None) -> None:
    with suppress(ConnectionError):  # it died, and its answer says so
        pipe.send(message)


def _answer(pipe: Connection, seconds_max: float) -> Tally:
    with suppress(EOFError, ConnectionError):
        if pipe.poll(seconds_max):
            tally: Tally = pipe.recv()
            return tally
        return Tally(error=f"no answer within {seconds_max:g} s")
    return Tally(error="it died")


def _check(tally: Tally) -> Tally:
    if tally.error is not None:
        raise RuntimeError(f"a measured worker failed: {tally.error}")
    return tally


def _work(pipe: Connection, task: Task, seconds: float, grace_seconds: float) -> None:
    """A worker's process. It answers twice: when it is ready, and when it is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answer = _Answer(pipe)
    try:
        with task.open() as steps:
            pipe.send(Tally())
            start = float(pipe.recv())
            deadline = start + seconds
            time.sleep(max(0.0, start - time.monotonic()))
            if task.helper:
                _step_while(lambda: not (pipe.poll() and steps.is_idle()), start, task, steps, answer.tally)
            else:
                answer.watch(steps, deadline + grace_seconds)
                _step_while(lambda: time.monotonic() < deadline, start, task, steps, answer.tally)
            answer.send()
    except (EOFError, BrokenPipeError):
        pass  # the benchmark ended
    except Exception as error:  # whatever it is, the benchmark should say it
        answer.tally.error = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        answer.send()


def _step_while(goes_on: Callable[[], bool], start: float, task: Task, steps: Steps, tally: Tally) -> None:
    number = 0
    while goes_on():
        if task.steps_max is not None and number >= task.steps_max:
            tally.exhausted = True
            return
        began = time.monotonic()
        try:
            commits = steps.step(number)
        except Refused:
            tally.refused += 1
            continue
        ended = time.monotonic()
        if commits:
            tally.done.append(Done(ended - start, ended - began, commits))
            number += 1


class _Answer:
    """What a worker says in the end; or before, when its last step takes too long."""

    def __init__(self, pipe: Connection) -> None:
        self.tally = Tally()
        self._pipe = pipe
        self._lock = threading.Lock()
        self._sent = False
        self._retries: Callable[[], int | None] = lambda: None

    def watch(self, steps: Steps, deadline: float) -> None:
        before = steps.retries()
        if before is not None:
            self._retries = lambda: (steps.retries() or 0) - before
        timer = threading.Timer(deadline - time.monotonic(), self._give_up)
        timer.daemon = True
        timer.start()

    def send(self, *, unfinished: int = 0) -> None:
        with self._lock:
            if self._sent:
                return
            self._sent = True
            self.tally.retries, self.tally.unfinished = self._retries(), unfinished
            with suppress(BrokenPipeError):  # the benchmark ended
                self._pipe.send(self.tally)

    def _give_up(self) -> None:
        if self._sent:
            return
        try:
            self.send(unfinished=1)
        finally:
            os._exit(0)  # the step is in a library's hands and cannot be ended otherwise
