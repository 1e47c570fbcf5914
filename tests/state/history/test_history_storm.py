"""Processes ingest, edit, split, merge, compact and collect, and are killed, while cuts are read.

The editor counts its edits in the rows. A consumer reads on meanwhile. At the end retention truncates the
history.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import CutExpired
from tests import forks
from tests.storming import STORM_SECONDS
from tests.support.api import Table
from tests.support.state import LAYOUTS

SECONDS = dict.fromkeys(LAYOUTS, STORM_SECONDS) | {"file_table": 3 * STORM_SECONDS}
PATIENCE_SECONDS = 600
CUTS, WRITERS, ROWS = 5, 3, 20
UPKEEP = ("split", "merge", "compact", "compact", "collect")
ROLES = (*(f"ingest {n}" for n in range(WRITERS)), "edit", *UPKEEP)
WORKER = dedent("""
    import os, random, sys
    from pathlib import Path
    from contextlib import suppress
    import pyarrow as pa
    import dormouse as dm
    from dormouse.errors import (
        EditConflict, FileReferenceAssignedToJob, InvalidRange, ObjectNotFound, PartitionError, QueryOvertaken
    )

    CANNOT = (PartitionError, InvalidRange, FileReferenceAssignedToJob)

    dsn, objects, folder, role, rows = *sys.argv[1:5], int(sys.argv[5])
    stop = Path(folder, "stop")

    def ingest(table, turn):
        number = int(role.split()[1])
        path = Path(folder, f"begun {number}")
        # killed in the midst of one: it is sent again, and may have been committed
        again = turn == 0 and path.exists()
        one = int(path.read_text() or 0) if again else ingest.next
        ingest.next = one + 1
        half = path.with_suffix(".new")
        half.write_text(str(one))
        half.replace(path)
        first = one * rows
        keys = [(number * 31 + first + n) * 7919 % 1_009 for n in range(rows)]
        numbers = {"writer": [number] * rows, "number": range(first, first + rows)}
        data = pa.table({"key": keys, **numbers, "edits": [0] * rows})
        assert table.ingest(data, ingest_id=f"{number} {one}", engine="local").applied or again

    def edit(table, turn):
        # only one process edits: it finds each of its edits once
        low, part = turn * 31 % 1_000, turn % 11
        where = {"key": dm.Range(low, low + 50)} if turn % 2 else dm.sql(f"number % 11 = {part}")
        before, done = counted(table), True
        try:
            table.update(where, {"edits": dm.sql("edits + 1")})
        except EditConflict:
            done = False
        after = counted(table)
        for (key, writer, number), edits in before.items():
            is_chosen = low <= key < low + 50 if turn % 2 else number % 11 == part
            assert after[key, writer, number] == edits + (done and is_chosen), (key, writer, number)

    def counted(table):
        while True:
            with suppress(ObjectNotFound, QueryOvertaken):  # files are collected without a delay
                found = [tuple(row.values()) for row in table.query().read_all().to_pylist()]
                return {row[:3]: row[3] for row in found}

    def merge(table, turn):
        table.merge()
        leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
        with suppress(*CANNOT):  # not below one, not whole, or others were faster
            at = random.randrange(len(leaves))
            table.partitions.merge(leaves[at : at + random.choice([2, 3])])
        with suppress(*CANNOT):
            halves = table.partitions.split(random.choice(leaves), random.randrange(1_009))
            table.partitions.merge([half.partition_id for half in halves])

    def split(table, turn):
        table.split()
        leaf = random.choice(table.partitions.leaves()).partition_id
        with suppress(*CANNOT):
            table.partitions.split(leaf, random.randrange(1_009))

    ingest.next = 0
    work = {
        "ingest": ingest,
        "edit": edit,
        "split": split,
        "merge": merge,
        "compact": lambda table, turn: table.compact(engine="local"),
        "collect": lambda table, turn: table.collect_garbage(),
    }[role.split()[0]]
    with dm.connect(dsn, objects) as instance:
        table, turn = instance.table("t"), 0
        while not stop.exists():
            work(table, turn)
            turn += 1
            Path(folder, f"turned {os.getpid()}").touch()
""")
SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG)], values=[dm.Field(name, dm.LONG) for name in ("writer", "number", "edits")]
)
PROPERTIES = dm.TableProperties(
    gc_delay_seconds=0,
    compaction_strategy="basic",
    compaction_batch_files=3,
    split_threshold_rows=200,
    split_min_rows=20,
    merge_threshold_rows=90,
)
Row = tuple[int, ...]
Rows = list[Row]


def rows_of(reader: pa.RecordBatchReader) -> Rows:
    return sorted(tuple(row.values()) for row in reader.read_all().to_pylist())


def apply(reader: pa.RecordBatchReader, rows: Counter[Row]) -> None:
    """Applies changes to rows, each with the number of times that it is there."""
    for change in reader.read_all().to_pylist():
        rows[tuple(change[name] for name in SCHEMA.names)] += -1 if change["_change"] == "delete" else 1


class Workers:
    """Processes that are killed at random and started again."""

    def __init__(self, *arguments: str, folder: Path) -> None:
        self._command = [WORKER, *arguments, str(folder)]
        self._folder = folder
        self._running = {at: self._start(role) for at, role in enumerate(ROLES)}
        self.killed = 0

    def _start(self, role: str) -> ForkServerProcess:
        return forks.start(*self._command, role, ROWS, errors=self._folder / "errors")

    def kill_one(self, rng: random.Random) -> None:
        """Chooses a random process; freezes it for up to 1 s, kills and restarts it, or does both.

        Does nothing if the process has not done any work yet. Otherwise processes on a slow machine would
        only be started and killed.
        """
        at = rng.randrange(len(ROLES))
        process = self._running[at]
        if not (self._folder / f"turned {process.pid}").exists():
            return
        if rng.random() < 0.5:
            forks.send(process, signal.SIGSTOP)
            time.sleep(rng.random())
        if rng.random() < 0.5:
            forks.send(process, signal.SIGCONT)
        else:
            process.kill()
            self._ended(process, -signal.SIGKILL)
            self._running[at] = self._start(ROLES[at])
            self.killed += 1

    def check(self) -> None:
        for process in self._running.values():
            if process.exitcode is not None:
                self._ended(process, 0)

    def end(self) -> None:
        (self._folder / "stop").touch()
        for process in self._running.values():
            forks.send(process, signal.SIGCONT)
        for process in self._running.values():
            self._ended(process, 0)

    def _ended(self, process: ForkServerProcess, code: int) -> None:
        process.join()
        assert process.exitcode == code, (self._folder / "errors").read_text()

    def end_all_processes(self) -> None:
        for process in self._running.values():
            process.kill()
            process.join()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_cuts_and_a_consumer_in_a_storm(dsn: str, tmp_path: Path, layout: str) -> None:
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout, properties=PROPERTIES)
        consumer = table.consumer("etl")
        came = Counter[Row]()
        answers: list[tuple[Any, Rows]] = []
        over, failed = threading.Event(), list[BaseException]()

        def consuming() -> None:
            is_over = over.is_set()
            apply(consumer.read(), came)
            consumer.acknowledge()
            if is_over:
                raise StopIteration

        def reading() -> None:
            when, first = random.choice(answers)
            assert rows_of(table.query(as_of=when)) == first, when
            if over.is_set():
                raise StopIteration

        def going_on(work: Callable[[], None]) -> threading.Thread:
            def run() -> None:
                try:
                    while not failed:
                        work()
                except StopIteration:
                    pass
                except BaseException as error:
                    failed.append(error)

            thread = threading.Thread(target=run)
            thread.start()
            return thread

        workers = Workers(dsn, objects, folder=tmp_path)
        try:
            threads = [going_on(consuming)]
            storm(table, workers, answers, failed, lambda: threads.extend(map(going_on, [reading] * 2)))
            workers.end()
        finally:
            over.set()
            for thread in threads:
                thread.join()
            workers.end_all_processes()
        assert failed == []
        assert workers.killed > 1
        everything = rows_of(table.query())
        assert max(Counter(row[:3] for row in everything).values()) == 1
        assert +came == Counter(everything)
        ingests = Counter((writer, number // ROWS) for _, writer, number, _ in everything)
        for writer in range(WRITERS):
            # the last ingest of a killed process may have been committed or not
            begun = tmp_path / f"begun {writer}"
            last = int(begun.read_text()) if begun.exists() else 0
            assert {ingests[writer, number] for number in range(last)} <= {ROWS}
            assert ingests[writer, last] in (0, ROWS)
        assert instance.check().problems == ()
        assert is_scaled(table)
        let_go(table, answers, everything)
        assert instance.check().problems == ()


def storm(
    table: Table, workers: Workers, answers: list[Any], failed: list[BaseException], read: Callable[[], None]
) -> None:
    """Records cuts, and the rows at each, in `answers`, while processes work and are killed.

    Ends when enough cuts, kills, splits and merges have happened, or when `failed` has an error. Calls `read`
    once, after the first cut.
    """
    rng, began, lasts = random.Random(26), time.monotonic(), SECONDS[table.context.table.layout]
    while not failed and (seconds := time.monotonic() - began) < PATIENCE_SECONDS:
        if seconds > lasts and len(answers) == 2 * CUTS and workers.killed > 1 and is_scaled(table):
            break
        workers.check()
        if len(answers) < 2 * CUTS and seconds > len(answers) // 2 * lasts / CUTS:
            cut = table.history.record_cut()
            answers.append((cut, rows_of(table.query(as_of=cut))))
            now = datetime.now(UTC)
            answers.append((now, rows_of(table.query(as_of=now))))
            if len(answers) == 2:
                read()
        workers.kill_one(rng)
        time.sleep(0.5)


def is_scaled(table: Table) -> bool:
    """Returns whether the table was split at least twice and merged at least twice."""
    epochs = list(table.history.epochs())
    return sum(one.splits for one in epochs) > 1 < sum(one.merges for one in epochs)


def let_go(table: Table, answers: list[tuple[Any, Rows]], everything: Rows) -> None:
    """Checks that retention truncates at the newest cut, but keeps the moments that a consumer needs."""
    cuts = [cut for cut, _ in answers[::2]]
    slow = table.consumer("slow", from_=cuts[1])
    table.drop_consumer("etl")
    last = table.history.record_cut()
    table.history.apply_retention(seconds=0)
    table.collect_garbage()
    for when, rows in answers:
        if when in (cuts[0], answers[1][0]):
            with pytest.raises(CutExpired):
                table.query(as_of=when)
        else:
            assert rows_of(table.query(as_of=when)) == rows
    later = Counter[Row](answers[2][1])
    apply(slow.read(), later)
    assert later == Counter(everything)
    slow.acknowledge()
    report = table.history.apply_retention(seconds=0)
    assert report.truncated_at == last
    table.collect_garbage()
    for when, _ in answers:
        with pytest.raises(CutExpired):
            table.query(as_of=when)
    assert rows_of(table.query(as_of=last)) == rows_of(table.query()) == everything
