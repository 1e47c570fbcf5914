"""Committers at once: threads of a few processes, each with the bounded connections of its process."""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.state_tables import StateTable
from dormouse.files.store import FileReferenceStore
from dormouse.postgres import RETRIES, ConnectionSupplier

PROCESSES = 4
CONNECTIONS_MAX = 8
"""Of each process: a supplier's default, and as many in all as the server works well with."""

_START_SECONDS = 0.05
_forkserver = multiprocessing.get_context("forkserver")


@dataclass
class Storm:
    """What became of the jobs; seconds from the call to its answer, with the wait for a connection."""

    began: float = 0.0
    ended: float = 0.0
    seconds: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    retries: int = 0

    @property
    def per_second(self) -> float:
        return len(self.seconds) / (self.ended - self.began)

    def percentile_ms(self, percent: int) -> float:
        if len(self.seconds) < 2:
            return 1_000 * sum(self.seconds)
        return 1_000 * statistics.quantiles(self.seconds, n=100, method="inclusive")[percent - 1]


class Committers:
    """The processes, which stay for every storm."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def storm(self, table: StateTable, committers: int) -> Storm:
        """Commits all the table's jobs by so many threads in all, each one by one."""
        dealt = deal(table.jobs, committers)
        for number, pipe in enumerate(self._pipes):
            pipe.send((table, dealt[number :: len(self._pipes)]))
        for pipe in self._pipes:
            _received(pipe)
        start = time.monotonic() + _START_SECONDS
        for pipe in self._pipes:
            pipe.send(start)
        return merged([_received(pipe) for pipe in self._pipes])


def deal(jobs: int, committers: int) -> list[list[int]]:
    """The numbers of jobs for each committer; those for whom there is none are left out."""
    return [list(range(first, jobs, committers)) for first in range(min(jobs, committers))]


def merged(parts: Sequence[Storm]) -> Storm:
    """The parts of each process as one."""
    return Storm(
        began=min(part.began for part in parts),
        ended=max(part.ended for part in parts),
        seconds=[each for part in parts for each in part.seconds],
        errors=[each for part in parts for each in part.errors],
        retries=sum(part.retries for part in parts),
    )


@contextmanager
def committers(dsn: str) -> Iterator[Committers]:
    """Starts the processes, and ends them."""
    pairs = [_forkserver.Pipe() for _ in range(PROCESSES)]
    workers = [_forkserver.Process(target=_work, args=(theirs, dsn), daemon=True) for _, theirs in pairs]
    try:
        for worker, (_, theirs) in zip(workers, pairs, strict=True):
            worker.start()
            theirs.close()
        yield Committers([ours for ours, _ in pairs])
    finally:
        for worker, (ours, _) in zip(workers, pairs, strict=True):
            ours.close()
            worker.join(5)
            if worker.is_alive():
                worker.kill()
                worker.join()


def _received(pipe: Connection) -> Any:
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def _work(pipe: Connection, dsn: str) -> None:
    """A process's main: a storm for each message, until the benchmark ends."""
    supplier = ConnectionSupplier(dsn, connections_max=CONNECTIONS_MAX)
    try:
        while True:
            table, dealt = pipe.recv()
            pipe.send(_run(supplier, table, dealt, pipe))
    except (EOFError, ConnectionError):
        pass  # the benchmark ended
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        supplier.close()


def _run(
    supplier: ConnectionSupplier, table: StateTable, dealt: Sequence[Sequence[int]], pipe: Connection
) -> Storm:
    store = FileReferenceStore(supplier, table.record)
    found, lock = Storm(), threading.Lock()
    gate = threading.Event()

    def commit_all(requests: Sequence[Any]) -> None:
        gate.wait()
        for request, commit_id in requests:
            began = time.monotonic()
            error = None
            try:
                store.replace_file_references([request], commit_id=commit_id)
            except Exception as failure:
                error = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            seconds = time.monotonic() - began
            with lock:
                if error is None:
                    found.seconds.append(seconds)
                else:
                    found.errors.append(error)

    work = [[(table.request(job), table.commit_id(job)) for job in jobs] for jobs in dealt]
    threads = [threading.Thread(target=commit_all, args=(each,), daemon=True) for each in work]
    for thread in threads:
        thread.start()
    gc.collect()
    retries = RETRIES.count()
    pipe.send("ready")
    time.sleep(max(0.0, pipe.recv() - time.monotonic()))
    found.began = time.monotonic()
    gate.set()
    for thread in threads:
        thread.join()
    found.ended = time.monotonic()
    found.retries = RETRIES.count() - retries
    return found
