"""Through the queue in PostgreSQL: how long one request takes, and how many a second, end to end."""

from __future__ import annotations

import logging
import multiprocessing
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median, quantiles
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import dormouse as dm
from benchmarks.commits.bench import Bench
from dormouse.commits.requests import AddFiles
from dormouse.files.store import FileReferenceStore
from dormouse.instance import Instance
from dormouse.model.file_reference import FileReference, group_by_file
from dormouse.postgres import ConnectionSupplier

_LOOK_SECONDS = 0.0002
_POLL_SECONDS = 0.05
_IDLE_SECONDS = (0.02, 0.06)
_PATIENCE_SECONDS = 300.0
_forkserver = multiprocessing.get_context("forkserver")


def idle_latency(bench: Bench) -> dict[str, Any]:
    """Milliseconds from `submit` to when the commit is visible, of a request that comes alone."""
    record = bench.tables.empty("idle", bench.layout)
    supplier = ConnectionSupplier(bench.dsn, connections_max=1)
    milliseconds = []
    with _open(bench) as instance, _committer(bench):
        store = FileReferenceStore(supplier, record)
        for number in range(bench.plan.latencies + 5):
            name = f"{record.object_prefix}{uuid4()}.parquet"
            reference = FileReference(filename=name, partition_id="0-0", row_count=1)
            request = AddFiles(commit_id=name, table=record.name, files=tuple(group_by_file([reference])))
            time.sleep(random.uniform(*_IDLE_SECONDS))
            began = time.monotonic()
            instance.submit([request])
            while not store.is_applied(name):
                _check(began)
                time.sleep(_LOOK_SECONDS)
            if number >= 5:  # the first ones connect and plan
                milliseconds.append(1_000 * (time.monotonic() - began))
    supplier.close()
    return {
        "idle_latency_ms": round(median(milliseconds), 2),
        "idle_latency_p99_ms": round(quantiles(milliseconds, n=100, method="inclusive")[98], 2),
        "idle_latencies": len(milliseconds),
    }


def through_queue(bench: Bench) -> dict[str, Any]:
    """Compaction commits a second, from the first `submit` until all are applied, beside one committer."""
    table = bench.tables.with_leaves("queueing", bench.plan.jobs_of_queue, bench.layout)
    requests = [table.envelope(job).request for job in bench.shuffled(table)]
    with _open(bench) as instance, _committer(bench):
        began = time.monotonic()
        sender = Thread(target=instance.submit, args=(requests,), daemon=True)
        sender.start()
        while bench.tables.applied(table) < table.jobs:
            _check(began)
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - began
        sender.join()
    return {"queue_commits_per_s": round(table.jobs / seconds, 1)}


def _check(began: float) -> None:
    if time.monotonic() - began > _PATIENCE_SECONDS:
        raise RuntimeError(f"what was submitted is not applied after {_PATIENCE_SECONDS:g} s")


def _open(bench: Bench) -> Instance:
    return dm.connect(bench.dsn, f"file://{bench.folder}/instance")


@contextmanager
def _committer(bench: Bench) -> Iterator[None]:
    """A committer in a process of its own, as `dormouse committer` is."""
    ours, theirs = _forkserver.Pipe()
    process = _forkserver.Process(target=_run, args=(theirs, bench.dsn, str(bench.folder)), daemon=True)
    process.start()
    theirs.close()
    try:
        ours.recv()
        yield
    finally:
        ours.close()
        process.join(30)
        if process.is_alive():
            process.kill()
            process.join()


def _run(pipe: Connection, dsn: str, folder: str) -> None:
    logging.getLogger("dormouse").setLevel(logging.ERROR)
    stop = Event()
    with dm.connect(dsn, f"file://{folder}/instance") as instance:
        running = Thread(target=instance.committer().run, args=(stop,))
        running.start()
        pipe.send("ready")
        try:
            pipe.recv()
        except (EOFError, ConnectionError):
            stop.set()
        running.join()
