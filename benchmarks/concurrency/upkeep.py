"""A writer, a compactor and a garbage collector that change the table, each in a separate process."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event
from typing import Any

import pyarrow as pa

import dormouse as dm
from benchmarks.concurrency.clients import Target
from benchmarks.concurrency.ledger import KEYS_PER_LEAF, RECENT, SCHEMA, Ledger, row
from benchmarks.harness.processes import FORKSERVER, remotes

KEYS_PER_INGEST = 16
LEAVES_AT_ONCE = 32
"""The number of leaves to which the writer adds rows for a while.

They are few, so that they soon have enough files for a compaction.
"""

INGESTS_IN_PLACE = 8
"""The number of ingests after which the writer changes to other leaves."""
COUNTS = ("ingests", "jobs", "collected")
Step = Callable[[dm.Table, Ledger, "Counts"], None]


class Counts:
    """The numbers of ingests, compaction jobs and collected files so far, shared by all processes."""

    def __init__(self) -> None:
        self._numbers = FORKSERVER.RawArray("q", len(COUNTS))

    def add(self, name: str, number: int) -> None:
        self._numbers[COUNTS.index(name)] += number

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[COUNTS.index(name)])


def prepare(target: Target, ledger: Ledger, gc_delay_seconds: float) -> None:
    """Makes the table and ingests version 1 of every key."""
    properties = dm.TableProperties(
        gc_delay_seconds=gc_delay_seconds,
        history_retention_seconds=gc_delay_seconds,
        compaction_strategy="basic",
        compaction_batch_files=4,
    )
    with dm.connect(target.dsn, target.objects) as instance:
        table = instance.create_table(
            target.table, SCHEMA, split_points=ledger.split_points(), properties=properties
        )
        _ingest(table, ledger, range(ledger.keys))
        for place in range(RECENT):
            ledger.recent[place] = place % ledger.keys


@contextmanager
def upkeep(target: Target, ledger: Ledger, counts: Counts) -> Iterator[Callable[[], list[str]]]:
    """Starts the writer, the compactor and the collector, each in a process.

    Yields a function that stops them and returns a text for each of their failures.
    """
    over = FORKSERVER.Event()
    steps = (_write, _compact, _collect)
    with remotes([partial(_working, step, target, ledger, counts, over) for step in steps]) as processes:
        for process in processes:
            process.begin("run")

        def stop() -> list[str]:
            over.set()
            return [text for process in processes for text in process.result()]

        yield stop


class _Work:
    """The loop of one of the three processes."""

    def __init__(self, step: Step, over: Event, *given: Any) -> None:
        self._step = step
        self._over = over
        self._given = given

    def run(self) -> list[str]:
        """Repeats the step until the event `over` is set; returns a text for each failure."""
        failures: list[str] = []
        while not self._over.is_set():
            try:
                self._step(*self._given)
            except Exception as error:
                failures.append(f"{self._step.__name__}: {type(error).__name__}: {error}")
                if self._step is _write:
                    break  # it is not known whether the rows were added
        return failures


@contextmanager
def _working(step: Step, target: Target, ledger: Ledger, counts: Counts, over: Any) -> Iterator[_Work]:
    with dm.connect(target.dsn, target.objects) as instance:
        yield _Work(step, over, instance.table(target.table), ledger, counts)


def _write(table: dm.Table, ledger: Ledger, counts: Counts) -> None:
    """Ingests the next version of some keys, of a few leaves that change every INGESTS_IN_PLACE ingests."""
    number = counts["ingests"]
    chance = random.Random(number // INGESTS_IN_PLACE)
    leaves = {chance.randrange(ledger.leaves) for _ in range(LEAVES_AT_ONCE)}
    among = sorted(leaf * KEYS_PER_LEAF + n for leaf in leaves for n in range(KEYS_PER_LEAF))
    keys = random.Random(number).sample(among, min(KEYS_PER_INGEST, len(among)))
    _ingest(table, ledger, keys)
    counts.add("ingests", 1)
    for place, key in enumerate(keys, number * KEYS_PER_INGEST):
        ledger.recent[place % RECENT] = key


def _ingest(table: dm.Table, ledger: Ledger, keys: Any) -> None:
    """Ingests the next version of each key.

    Records the version as sent before the commit, and as acknowledged after the commit.
    """
    rows = [row(key, ledger.sent[key] + 1) for key in keys]
    for key, version, _ in rows:
        ledger.sent[key] = version
    columns = zip(*rows, strict=True)
    table.ingest(pa.table(dict(zip(SCHEMA.names, map(list, columns), strict=True))), engine="local")
    for key, version, _ in rows:
        ledger.acknowledged[key] = version


def _compact(table: dm.Table, ledger: Ledger, counts: Counts) -> None:
    report = table.compact(engine="local")
    counts.add("jobs", report.jobs_run)
    if report.errors:
        raise RuntimeError("; ".join(report.errors))
    if not report.jobs_run:
        time.sleep(0.05)


def _collect(table: dm.Table, ledger: Ledger, counts: Counts) -> None:
    report = table.collect_garbage()
    counts.add("collected", len(report.deleted_files))
    if report.failed:
        raise RuntimeError(f"not deleted: {report.failed[0]}")
    time.sleep(0.1)
