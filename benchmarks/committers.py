"""Committers for benchmarks: threads of one or several processes that begin at the same moment."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from benchmarks.harness.processes import Remote, begin_together, remotes, wait_until
from benchmarks.harness.report import percentile
from benchmarks.state_tables import StateTable
from dormouse.model.file_reference import ReplaceFileReferencesRequest
from dormouse.postgres import RETRIES, ConnectionSupplier
from dormouse.postgres.queries import Queries
from dormouse.state.commits.apply import Tables, apply
from dormouse.state.commits.outcomes import CommitOutcome
from dormouse.state.commits.requests import Envelope
from dormouse.state.files import layout
from dormouse.state.files.store import FileReferenceStore

PRELOAD = ("benchmarks.committers",)


@dataclass
class Storm:
    """The results of a storm: of the calls that many committers made at the same time."""

    began: float = 0.0
    ended: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """The duration of each successful call, including the wait for a connection."""
    errors: list[str] = field(default_factory=list)
    retries: int = 0

    @property
    def elapsed_seconds(self) -> float:
        return self.ended - self.began

    @property
    def per_second(self) -> float:
        return len(self.seconds) / self.elapsed_seconds

    def percentile_ms(self, percent: int) -> float:
        return 1_000 * percentile(self.seconds, percent)


def merged(parts: Sequence[Storm]) -> Storm:
    """Merges the results of several threads or processes."""
    return Storm(
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        seconds=[each for part in parts for each in part.seconds],
        errors=[each for part in parts for each in part.errors],
        retries=sum(part.retries for part in parts),
    )


def deal(jobs: Sequence[int], committers: int) -> list[list[int]]:
    """Distributes the jobs; returns the jobs of each committer. Committers without jobs are left out."""
    count = min(len(jobs), committers)
    return [list(jobs[first::count]) for first in range(count)]


class Committers:
    """The processes of the committers. They run until all calls of `storm` are over."""

    def __init__(self, processes: Sequence[Remote]) -> None:
        self._processes = processes

    def storm(self, table: StateTable, jobs: Sequence[int], committers: int, batch: int = 0) -> Storm:
        """Commits the jobs with `committers` threads in all.

        `batch` is the number of commits in a batch; 0 commits one by one with the store's synchronous call.
        """
        dealt = deal(jobs, committers)
        for number, process in enumerate(self._processes):
            process.begin("prepare", table, dealt[number :: len(self._processes)], batch)
        for process in self._processes:
            process.result()
        begin_together(self._processes)
        return merged([process.result() for process in self._processes])


@contextmanager
def committers(
    dsn: str, processes: int, connections_max: int, *, logged: bool = True
) -> Iterator[Committers]:
    """Starts the processes, with at most `connections_max` connections each, and ends them."""
    with remotes([partial(_committing, dsn, connections_max, logged=logged)] * processes) as made:
        yield Committers(made)


def rate(
    dsn: str,
    table: StateTable,
    jobs: Sequence[int],
    batch: int,
    threads: int = 1,
    processes: int = 1,
    *,
    logged: bool = True,
) -> float:
    """Returns the commits per second of `processes` processes with `threads` threads each.

    Without `logged`, the statement writes no removal log. Raises RuntimeError if a commit fails.
    """
    with committers(dsn, processes, threads, logged=logged) as them:
        storm = them.storm(table, jobs, threads * processes, batch)
    if storm.errors:
        raise RuntimeError(storm.errors[0])
    return len(jobs) / storm.elapsed_seconds


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def apply_all(tables: Tables, envelopes: Sequence[Envelope]) -> list[CommitOutcome]:
    """Applies a batch. Raises RuntimeError unless every commit of it is applied."""
    outcomes = apply(tables, envelopes)
    for outcome in outcomes:
        if outcome.state != "applied":
            raise RuntimeError(f"a commit is {outcome.state}: {outcome.error}")
    return outcomes


class _Committing:
    """The committers of this process."""

    def __init__(self, supplier: ConnectionSupplier, connections_max: int) -> None:
        self._supplier = supplier
        self._connections_max = connections_max
        self._gate = threading.Event()
        self._threads: list[threading.Thread] = []
        self._parts: list[Storm] = []

    def prepare(self, table: StateTable, dealt: Sequence[Sequence[int]], batch: int) -> None:
        """Makes all requests, starts the threads and connects, so that `run` only commits."""
        self._gate.clear()
        self._parts = [Storm() for _ in dealt]
        self._threads = [
            threading.Thread(target=self._do_all, args=(self._calls(table, jobs, batch), part), daemon=True)
            for jobs, part in zip(dealt, self._parts, strict=True)
        ]
        for thread in self._threads:
            thread.start()
        with ExitStack() as stack:
            for _ in range(min(len(dealt), self._connections_max)):
                stack.enter_context(self._supplier.connection())
        # a real committer does not hold all requests at once: keep garbage collections from scanning them
        gc.collect()
        gc.freeze()

    def run(self, start: float) -> Storm:
        retries = RETRIES.count()
        wait_until(start)
        began = time.monotonic()
        self._gate.set()
        for thread in self._threads:
            thread.join()
        whole = Storm(began=began, ended=time.monotonic(), retries=RETRIES.count() - retries)
        for part in self._parts:
            whole.seconds += part.seconds
            whole.errors += part.errors
        gc.unfreeze()
        return whole

    def _calls(self, table: StateTable, jobs: Sequence[int], batch: int) -> list[Callable[[], object]]:
        if batch == 0:
            store = FileReferenceStore(self._supplier, table.record)
            return [partial(_replace, store, table.request(job), table.commit_id(job)) for job in jobs]
        tables = Tables(self._supplier)
        tables.named([(table.record.table_id, "")])
        return [
            partial(apply_all, tables, [table.envelope(job) for job in some]) for some in batches(jobs, batch)
        ]

    def _do_all(self, calls: Sequence[Callable[[], object]], results: Storm) -> None:
        self._gate.wait()
        for call in calls:
            began = time.monotonic()
            try:
                call()
            except Exception as error:
                results.errors.append(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
            else:
                results.seconds.append(time.monotonic() - began)


@contextmanager
def _committing(dsn: str, connections_max: int, *, logged: bool) -> Iterator[_Committing]:
    if not logged:
        parts = layout._SHARED_PARTS
        of_job, _ = parts["logged"].text.split("logged as (")
        nothing = replace(parts["logged"], text=f"{of_job}logged as (select)")
        layout._SHARED_PARTS = Queries("parts.sql", {**parts, "logged": nothing})
    with closing(ConnectionSupplier(dsn, connections_max=connections_max)) as supplier:
        yield _Committing(supplier, connections_max)


def _replace(store: FileReferenceStore, request: ReplaceFileReferencesRequest, commit_id: str) -> None:
    if not store.replace_file_references([request], commit_id=commit_id):
        raise RuntimeError("a commit was applied before")
