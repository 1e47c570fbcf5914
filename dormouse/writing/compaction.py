"""Rounds of compaction, which create jobs, run them in this process or on Spark, and report the results."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from dormouse.model.loops import Progress, no_progress
from dormouse.model.text import plural
from dormouse.postgres.lease import PULSES, Pulse
from dormouse.state.context import TableContext
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    Cancellation,
    CompactionResult,
    run_compaction,
    runners_died,
)
from dormouse.writing.deletion_marks import with_marks_to_drop
from dormouse.writing.engines import check_engine, choose_engine

# Compaction jobs on threads of this process: merges run in native code, in parallel.

THREADS_MAX = 4
WAIT_SECONDS = 0.5
LEASE_SECONDS = 300.0
"""The lease of a job, which this process renews while it runs the job."""


def compact_in_threads(
    context: TableContext, now_ms: int, *, threads: int | None = None, run_id: str | None = None
) -> Generator[CompactionResult, None, None]:
    """Takes and runs jobs until none is due, and yields results as jobs end.

    With `run_id`, it takes only the jobs of that run. Closing the iterator, or Ctrl-C, does not wait for
    running merges: it discards their attempts, so that they cannot commit, and puts back their jobs.
    """
    workers = _Workers(context, now_ms, threads or min(THREADS_MAX, os.cpu_count() or 1), run_id)
    try:
        workers.start()
        yield from workers.results()
    finally:
        workers.stop()


class _Workers:
    """A set of threads, each of which takes and runs one job after the other.

    They are daemon threads, so that a running merge does not delay the end of the process.
    """

    def __init__(self, context: TableContext, now_ms: int, threads: int, run_id: str | None) -> None:
        self._context = context
        self._run_id = run_id
        self._now_ms = now_ms
        self._cancellation = Cancellation()
        self._taking = threading.Lock()
        # by thread, as another thread can take a failed job again before the first one goes on
        self._taken: dict[int, CompactionJob] = {}
        self._results: queue.SimpleQueue[CompactionResult | BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"dormouse-compaction-{number}", daemon=True)
            for number in range(threads)
        ]
        self._pulse = Pulse(self._renew, LEASE_SECONDS / PULSES, "dormouse-compaction-leases")

    def start(self) -> None:
        self._pulse.start()
        for thread in self._threads:
            thread.start()

    def results(self) -> Generator[CompactionResult, None, None]:
        working = len(self._threads)
        while working:
            try:
                # short waits, as a Ctrl-C just before a wait begins is handled only when the wait ends
                result = self._results.get(timeout=WAIT_SECONDS)
            except queue.Empty:
                continue
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result

    def stop(self) -> None:
        """Puts back the jobs that still run, and ends their attempts, without waiting for the threads."""
        self._pulse.close()
        self._cancellation.stop()
        if unfinished := self._unfinished():
            self._cancellation.discard(self._context.attempts)
            self._context.jobs.put_back(unfinished)

    def _unfinished(self) -> list[CompactionJob]:
        with self._taking:
            return list(self._taken.values())

    def _renew(self) -> None:
        self._context.jobs.renew(self._unfinished(), LEASE_SECONDS)

    def _work(self) -> None:
        try:
            while job := self._take():
                result = run_compaction(self._context, job, self._now_ms, cancellation=self._cancellation)
                del self._taken[threading.get_ident()]
                self._results.put(result)
            self._results.put(None)
        except BaseException as error:
            self._results.put(error)

    def _take(self) -> CompactionJob | None:
        # the lock lets `stop` see every job that was taken, so that it puts all of them back
        with self._taking:
            if self._cancellation.is_cancelled:
                return None
            for job in self._context.jobs.take(
                1,
                LEASE_SECONDS,
                run_id=self._run_id,
                given_up=lambda job: self._results.put(runners_died(job)),
            ):
                self._taken[threading.get_ident()] = job
                return job
        return None


RunsJobs = Callable[[TableContext, int], Generator[CompactionResult, None, None]]
"""A function that runs jobs until none is due, and yields their results.

The number is the current time in milliseconds, from which the ages of rows are measured.
"""


@dataclass(frozen=True, slots=True)
class CompactionReport:
    """The result of a round. Rows and files are those of the committed jobs.

    - `jobs_run`: the number of jobs that were merged and committed.
    - `jobs_failed`: the number of failed runs, including those of jobs that succeeded later.
    - `given_up`: the number of jobs that failed in their last attempt, or killed their process. `errors` has
      the reasons.
    - `superseded`: the number of runs whose job another run committed or released.
    - `jobs_looked`: the number of jobs that left their files as they are, since few of the rows are deleted.
    """

    jobs_created: int
    jobs_run: int
    jobs_failed: int
    given_up: int
    superseded: int
    rows_read: int
    rows_written: int
    files_in: int
    files_out: int
    seconds: float
    errors: tuple[str, ...] = ()
    jobs_looked: int = 0


def compact(
    context: TableContext,
    *,
    engine: str = "auto",
    create: bool = True,
    full: bool = False,
    progress: Progress | None = None,
    on_spark: RunsJobs | None = None,
) -> CompactionReport:
    """Runs one round of compaction: creates jobs, and runs jobs until they are done or given up.

    - `engine`: `auto` chooses Spark (`on_spark`) by the bytes of the jobs' files; see `choose_engine`.
    - `create`: create jobs by the table's strategy, and do not only run existing jobs.
    - `full`: merge all files of each leaf, whatever the strategy, and rewrite files that have deleted rows or
      rows of other leaves. Repeats this until each leaf has one plain file of its own, or no more jobs can be
      finished.
    - `progress`: called with the number of finished jobs and of all jobs.

    Ctrl-C puts unfinished jobs back at once.
    """
    check_engine(engine)
    started = time.monotonic()
    with context.last_rounds.round("compaction") as current:
        created, tally = 0, _Tally(progress or no_progress, current.errors)
        while True:
            if create:
                created += context.jobs.create(full=full) + context.jobs.create_of_deleted(full=full)
                if full:
                    leaves = (leaf.partition_id for leaf in context.partitions.leaves())
                    created += context.jobs.create_of_shared(leaves)
                    created += context.jobs.create_of_shared(with_marks_to_drop(context), whole=True)
            due, before = context.jobs.due(), tally.finished
            current.worked |= bool(created or due.jobs)
            tally.begin(due.jobs)
            if due.jobs:
                run_jobs = choose_engine(
                    engine, partial(getattr, due, "byte_count"), compact_in_threads, on_spark
                )
                with closing(run_jobs(context, int(time.time() * 1000))) as results:
                    for result in results:
                        tally.add(result)
            if not full or tally.finished == before:
                break
        # readers count from these totals, as they cannot store what they counted
        context.store.totals.bring_forward()
        current.outcome = tally.outcome
    return tally.report(created, time.monotonic() - started)


def compacted(jobs: int, rows: int) -> str:
    """Returns a text about a round: the numbers of jobs and of merged rows."""
    return f"{plural(jobs, 'job')}, {plural(rows, 'row')} merged"


class _Tally:
    """The sums of the results of jobs. Reports progress; adds the reasons of given-up jobs to `errors`."""

    def __init__(self, progress: Progress, errors: list[str]) -> None:
        self._jobs = 0
        self._progress = progress
        self._outcomes: Counter[str] = Counter()
        self._sums = dict.fromkeys(("rows_read", "rows_written", "files_in", "files_out"), 0)
        self._errors = errors

    def begin(self, jobs: int) -> None:
        """Adds to the total number of jobs, before these jobs run."""
        self._jobs += jobs

    @property
    def finished(self) -> int:
        return self._outcomes["committed"] + self._outcomes["looked"]

    def add(self, result: CompactionResult) -> None:
        self._outcomes[result.outcome] += 1
        if result.outcome == "looked":
            self._report_progress()
            return
        self._sums["rows_read"] += result.rows_read
        self._sums["rows_written"] += result.rows_written
        self._sums["files_in"] += result.files_read
        self._sums["files_out"] += result.filename is not None
        if result.outcome == "given_up" and result.error:
            self._errors.append(result.error)
        if result.outcome != "retry":
            self._report_progress()

    def _report_progress(self) -> None:
        done = self._outcomes.total() - self._outcomes["retry"]
        self._progress(done, max(done, self._jobs))

    @property
    def outcome(self) -> str:
        failed = self._outcomes["given_up"] + self._outcomes["retry"]
        done = compacted(self._outcomes["committed"], self._sums["rows_read"])
        return f"{done}, {failed:,} failed" if failed else done

    def report(self, created: int, seconds: float) -> CompactionReport:
        return CompactionReport(
            jobs_created=created,
            jobs_run=self._outcomes["committed"],
            jobs_failed=self._outcomes["retry"] + self._outcomes["given_up"],
            given_up=self._outcomes["given_up"],
            superseded=self._outcomes["superseded"],
            seconds=seconds,
            errors=tuple(self._errors),
            jobs_looked=self._outcomes["looked"],
            **self._sums,
        )
