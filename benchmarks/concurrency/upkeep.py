"""Who changes the table meanwhile, each in a process of its own: a writer, a compactor, a collector."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

import pyarrow as pa

import dormouse as dm
from benchmarks.concurrency.clients import Target, received, worker
from benchmarks.concurrency.ledger import PROCESSES, RECENT, SCHEMA, Ledger, row

KEYS_PER_INGEST = 16
LEAVES_AT_ONCE = 32
"""The writer stays with so many leaves for a while, so that they soon have enough files to be compacted."""

INGESTS_IN_PLACE = 8
_COUNTS = ("ingests", "jobs", "collected")


class Counts:
    """What was done so far: ingests, jobs of compaction, files collected."""

    def __init__(self) -> None:
        self._numbers = PROCESSES.RawArray("q", len(_COUNTS))

    def add(self, name: str, number: int) -> None:
        self._numbers[_COUNTS.index(name)] += number

    def __getitem__(self, name: str) -> int:
        return int(self._numbers[_COUNTS.index(name)])


def prepare(target: Target, ledger: Ledger, gc_delay_seconds: float) -> None:
    """Makes the table, with version 1 of every key."""
    properties = dm.TableProperties(
        gc_delay_seconds=gc_delay_seconds, compaction_strategy="basic", compaction_batch_files=4
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
    """Starts the three; gives what stops them, and tells what went wrong."""
    with ExitStack() as stack:
        pipes = [
            stack.enter_context(worker(_work, step, target, ledger, counts))
            for step in (_write, _compact, _collect)
        ]
        for pipe in pipes:
            received(pipe)

        def stop() -> list[str]:
            for pipe in pipes:
                pipe.send("stop")
            return [text for pipe in pipes for text in received(pipe)]

        yield stop


def _work(pipe: Connection, step: Callable[..., Iterator[None]], *arguments: Any) -> None:
    """A process's main: step by step until it is told to stop; then the failures, in words."""
    target, ledger, counts = arguments
    failures: list[str] = []
    try:
        with dm.connect(target.dsn, target.objects) as instance:
            steps = step(instance.table(target.table), ledger, counts)
            pipe.send("ready")
            while not pipe.poll():
                try:
                    next(steps)
                except Exception as error:
                    failures.append(f"{step.__name__}: {type(error).__name__}: {error}")
                    steps = step(instance.table(target.table), ledger, counts)
                    if step is _write:
                        break  # what was added is not known any more
            pipe.recv()
            pipe.send(failures)
    except (EOFError, ConnectionError):
        pass  # the benchmark ended


def _write(table: dm.Table, ledger: Ledger, counts: Counts) -> Iterator[None]:
    """Ever larger versions of known keys."""
    chance = random.Random(1)
    per_leaf = ledger.keys // ledger.leaves
    place = 0
    while True:
        leaves = [chance.randrange(ledger.leaves) for _ in range(LEAVES_AT_ONCE)]
        for _ in range(INGESTS_IN_PLACE):
            among = sorted({leaf * per_leaf + n for leaf in leaves for n in range(per_leaf)})
            keys = chance.sample(among, min(KEYS_PER_INGEST, len(among)))
            _ingest(table, ledger, keys)
            counts.add("ingests", 1)
            for key in keys:
                ledger.recent[place % RECENT] = key
                place += 1
            yield


def _ingest(table: dm.Table, ledger: Ledger, keys: Any) -> None:
    """The next version of each key; sent first, and acknowledged when it is committed."""
    rows = [row(key, ledger.sent[key] + 1) for key in keys]
    for key, version, _ in rows:
        ledger.sent[key] = version
    columns = zip(*rows, strict=True)
    table.ingest(pa.table(dict(zip(SCHEMA.names, map(list, columns), strict=True))), engine="local")
    for key, version, _ in rows:
        ledger.acknowledged[key] = version


def _compact(table: dm.Table, ledger: Ledger, counts: Counts) -> Iterator[None]:
    while True:
        report = table.compact(engine="local")
        counts.add("jobs", report.jobs_run)
        if report.errors:
            raise RuntimeError("; ".join(report.errors))
        if not report.jobs_run:
            time.sleep(0.05)
        yield


def _collect(table: dm.Table, ledger: Ledger, counts: Counts) -> Iterator[None]:
    while True:
        report = table.collect_garbage()
        counts.add("collected", len(report.deleted_files))
        if report.failed:
            raise RuntimeError(f"not deleted: {report.failed[0]}")
        time.sleep(0.1)
        yield
