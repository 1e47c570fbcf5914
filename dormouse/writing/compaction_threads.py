"""Compaction jobs on threads of this process: the merges run in native code, side by side."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Generator
from contextlib import suppress

from dormouse.state.context import TableContext
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    Cancellation,
    CompactionResult,
    run_compaction,
    runners_died,
)

THREADS_MAX = 4
WAIT_SECONDS = 0.5


def compact_in_threads(
    context: TableContext, now_ms: int, *, threads: int | None = None, run_id: str | None = None
) -> Generator[CompactionResult, None, None]:
    """Takes and runs jobs until none is due; results come as they are ready. With `run_id`, that run's alone.

    Closing the iterator, or Ctrl-C, does not wait for merges that run: their attempts are discarded, so
    that they can commit nothing, and their jobs are due again.
    """
    workers = _Workers(context, now_ms, threads or min(THREADS_MAX, os.cpu_count() or 1), run_id)
    try:
        workers.start()
        yield from workers.results()
    finally:
        workers.stop()


class _Workers:
    """Threads that take one job at a time; daemons, so that no merge holds up the end of the process."""

    def __init__(self, context: TableContext, now_ms: int, threads: int, run_id: str | None) -> None:
        self._context = context
        self._run_id = run_id
        self._now_ms = now_ms
        self._cancellation = Cancellation()
        self._taking = threading.Lock()
        self._taken: dict[tuple[str, str], CompactionJob] = {}
        self._results: queue.SimpleQueue[CompactionResult | BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"dormouse-compaction-{number}", daemon=True)
            for number in range(threads)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def results(self) -> Generator[CompactionResult, None, None]:
        working = len(self._threads)
        while working:
            result = self._next()
            if isinstance(result, BaseException):
                raise result
            if result is None:
                working -= 1
            else:
                yield result

    def _next(self) -> CompactionResult | BaseException | None:
        """In short waits: a Ctrl-C that comes just before a wait begins is heard when it ends."""
        while True:
            with suppress(queue.Empty):
                return self._results.get(timeout=WAIT_SECONDS)

    def stop(self) -> None:
        """Whatever is not finished is put back at once; nothing to do after the last result."""
        self._cancellation.stop()
        with self._taking:
            unfinished = list(self._taken.values())
        if unfinished:
            self._cancellation.discard(self._context.attempts)
            self._context.jobs.put_back(unfinished)

    def _work(self) -> None:
        try:
            while job := self._take():
                self._results.put(self._run(job))
            self._results.put(None)
        except BaseException as error:
            self._results.put(error)

    def _take(self) -> CompactionJob | None:
        # `stop` must learn of every job that was taken, or it would not be put back
        with self._taking:
            if self._cancellation.is_cancelled:
                return None
            for job in self._context.jobs.take(
                1, run_id=self._run_id, given_up=lambda job: self._results.put(runners_died(job))
            ):
                self._taken[job.key] = job
                return job
        return None

    def _run(self, job: CompactionJob) -> CompactionResult:
        result = run_compaction(self._context, job, self._now_ms, cancellation=self._cancellation)
        del self._taken[job.key]
        return result
