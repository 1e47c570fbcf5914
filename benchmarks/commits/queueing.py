"""Commits through the queue in PostgreSQL: the latency of one request, and the rate from end to end."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from threading import Event, Thread
from typing import Any
from uuid import uuid4

import dormouse as dm
from benchmarks.commits.bench import Bench
from benchmarks.harness.processes import Remote, remote
from benchmarks.harness.report import percentile
from benchmarks.state_tables import new_file
from dormouse.api.instance import Instance
from dormouse.state.commits.requests import AddFiles
from dormouse.state.files.store import FileReferenceStore

_LOOK_SECONDS = 0.0002
_POLL_SECONDS = 0.05
_IDLE_SECONDS = (0.02, 0.06)
_PATIENCE_SECONDS = 300.0


def idle_latency(bench: Bench) -> dict[str, Any]:
    """Measures the milliseconds from `submit` until the commit is visible, for requests on an idle system."""
    record = bench.tables.empty("idle", bench.layout)
    milliseconds = []
    with bench.supplier() as supplier, _open(bench) as instance, _committer(bench):
        store = FileReferenceStore(supplier, record)
        for number in range(bench.plan.latencies + 5):
            name = f"{record.object_prefix}{uuid4()}.parquet"
            files = (new_file(name, "0-0", (bytes(9), bytes(9))),)
            request = AddFiles(commit_id=name, table=record.name, files=files)
            time.sleep(random.uniform(*_IDLE_SECONDS))
            began = time.monotonic()
            instance.submit([request])
            while not store.is_applied(name):
                _check(began)
                time.sleep(_LOOK_SECONDS)
            if number >= 5:  # the first requests connect and plan, so they do not count
                milliseconds.append(1_000 * (time.monotonic() - began))
    return {
        "idle_latency_ms": round(median(milliseconds), 2),
        "idle_latency_p99_ms": round(percentile(milliseconds, 99), 2),
        "idle_latencies": len(milliseconds),
    }


def through_queue(bench: Bench) -> dict[str, Any]:
    """Measures compaction commits per second of one committer, from the first `submit` to the last commit."""
    table, jobs = bench.claimed("queueing", bench.plan.jobs_of_queue)
    requests = [table.envelope(job).request for job in jobs]
    with _open(bench) as instance, _committer(bench):
        began = time.monotonic()
        sender = Thread(target=instance.submit, args=(requests,), daemon=True)
        sender.start()
        while bench.tables.applied(table) < table.leaves:
            _check(began)
            time.sleep(_POLL_SECONDS)
        seconds = time.monotonic() - began
        sender.join()
    return {"queue_commits_per_s": round(table.leaves / seconds, 1)}


def _check(began: float) -> None:
    if time.monotonic() - began > _PATIENCE_SECONDS:
        raise RuntimeError(f"the submitted commits are not applied after {_PATIENCE_SECONDS:g} s")


def _open(bench: Bench) -> Instance:
    return dm.connect(bench.dsn, bench.place.objects)


def _committer(bench: Bench) -> AbstractContextManager[Remote]:
    return remote(_committing, bench.dsn, bench.place.objects)


@contextmanager
def _committing(dsn: str, objects: str) -> Iterator[None]:
    """Runs a committer in a thread, as `dormouse committer` does, and stops it at the end."""
    logging.getLogger("dormouse").setLevel(logging.ERROR)
    stop = Event()
    with dm.connect(dsn, objects) as instance:
        running = Thread(target=instance.committer().run, args=(stop,))
        running.start()
        try:
            yield
        finally:
            stop.set()
            running.join()
