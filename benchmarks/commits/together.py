"""Committers: threads in one process or in several, that begin at the same moment."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from benchmarks.state_tables import StateTable
from dormouse.commits.apply import apply
from dormouse.commits.requests import Envelope
from dormouse.commits.table_cache import Tables
from dormouse.files.store import FileReferenceStore
from dormouse.model.file_reference import ReplaceFileReferencesRequest
from dormouse.postgres import ConnectionSupplier

_processes = multiprocessing.get_context("forkserver")
_START_SECONDS = 0.05


class Span(NamedTuple):
    """When a worker began and ended, by the clock that processes share."""

    began: float
    ended: float


@dataclass(frozen=True)
class Share:
    """The jobs that one process commits, in batches, with so many threads."""

    table: StateTable
    jobs: Sequence[int]
    batch: int
    """0: one by one, each by the store's synchronous call and not by a committer."""
    threads: int = 1


def rate(dsn: str, shares: Sequence[Share]) -> float:
    """Commits a second of all shares together; one is this process's, more have a process each."""
    spans = [_committed(dsn, shares[0])] if len(shares) == 1 else _in_processes(dsn, shares)
    commits = sum(len(share.jobs) for share in shares)
    return commits / (max(span.ended for span in spans) - min(span.began for span in spans))


def divided(jobs: Sequence[int], shares: int) -> list[list[int]]:
    """The jobs, dealt out."""
    return [list(jobs[number::shares]) for number in range(shares)]


def batches(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[first : first + size] for first in range(0, len(items), size)]


def _committed(dsn: str, share: Share, wait: Callable[[], object] = lambda: None) -> Span:
    supplier = ConnectionSupplier(dsn, connections_max=share.threads)
    try:
        work = [_work_of(supplier, share, jobs) for jobs in divided(share.jobs, share.threads)]
        ready = threading.Barrier(share.threads + 1)
        # a committer does not hold all its requests at once: they should not cost at every collection
        gc.collect()
        gc.freeze()
        with ThreadPoolExecutor(share.threads) as pool:
            running = [pool.submit(_do_all, supplier, each, ready) for each in work]
            ready.wait()
            wait()
            began = time.monotonic()
            ready.wait()
            ended = max(each.result() for each in running)
        return Span(began, ended)
    finally:
        supplier.close()
        gc.unfreeze()


def _work_of(supplier: ConnectionSupplier, share: Share, jobs: Sequence[int]) -> list[Callable[[], object]]:
    """What a thread does: a call for each batch, whose requests are made already."""
    table = share.table
    if share.batch == 0:
        store = FileReferenceStore(supplier, table.record)
        return [partial(_replace, store, table.request(job), table.commit_id(job)) for job in jobs]
    tables = Tables(supplier)
    tables.named([(table.record.table_id, "")])
    return [
        partial(apply_all, tables, [table.envelope(job) for job in batch])
        for batch in batches(jobs, share.batch)
    ]


def apply_all(tables: Tables, envelopes: Sequence[Envelope]) -> None:
    """Applies a batch; RuntimeError unless all of it is applied."""
    for outcome in apply(tables, envelopes):
        if outcome.state != "applied":
            raise RuntimeError(f"a commit is {outcome.state}: {outcome.error}")


def _replace(store: FileReferenceStore, request: ReplaceFileReferencesRequest, commit_id: str) -> None:
    if not store.replace_file_references([request], commit_id=commit_id):
        raise RuntimeError("a commit was applied before")


def _do_all(
    supplier: ConnectionSupplier, calls: Sequence[Callable[[], object]], ready: threading.Barrier
) -> float:
    with supplier.connection():
        ready.wait()  # every thread has one now
    ready.wait()
    for call in calls:
        call()
    return time.monotonic()


def _in_processes(dsn: str, shares: Sequence[Share]) -> list[Span]:
    pipes, workers = [], []
    try:
        for share in shares:
            ours, theirs = _processes.Pipe()
            worker = _processes.Process(target=_work, args=(theirs, dsn, share), daemon=True)
            worker.start()
            theirs.close()
            pipes.append(ours)
            workers.append(worker)
        for pipe in pipes:
            _received(pipe)
        start = time.monotonic() + _START_SECONDS
        for pipe in pipes:
            pipe.send(start)
        return [Span(*_received(pipe)) for pipe in pipes]
    finally:
        for pipe in pipes:
            pipe.close()
        for worker in workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()


def _received(pipe: Connection) -> Any:
    found = pipe.recv()
    if isinstance(found, Exception):
        raise found
    return found


def _work(pipe: Connection, dsn: str, share: Share) -> None:
    def wait() -> None:
        pipe.send("ready")
        time.sleep(max(0.0, pipe.recv() - time.monotonic()))

    try:
        pipe.send(tuple(_committed(dsn, share, wait)))
    except (EOFError, ConnectionError):
        pass  # the benchmark ended
    except Exception as error:
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
