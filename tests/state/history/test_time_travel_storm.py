"""Cuts that are read repeatedly while their table is ingested into, edited, split, merged and collected."""

from __future__ import annotations

import pickle
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidRange, PartitionError
from dormouse.state.files import holds
from tests.support.api import Instance, Table

INGESTS, CUTS, READS = 24, 5, 12
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("ingest", dm.LONG)])


def rows_of(number: int) -> list[int]:
    rng = random.Random(number)
    return sorted(rng.sample(range(1_000), 20))


def read(table: Table, when: Any) -> list[tuple[int, int]]:
    return sorted((row["k"], row["ingest"]) for row in table.query(as_of=when).read_all().to_pylist())


PROPERTIES = dm.TableProperties(
    gc_delay_seconds=0,
    history_retention_seconds=0,
    compaction_strategy="basic",
    compaction_batch_files=2,
    split_threshold_rows=60,
    split_min_rows=2,
)


def noting(work: Callable[[], None], failed: list[BaseException]) -> Callable[[], None]:
    def run() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    return run


@pytest.mark.slow
def test_readers_of_cuts_get_the_same_answer_each_time(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA, properties=PROPERTIES)
    begun, done = 0, 0
    over, failed = threading.Event(), list[BaseException]()

    def ingesting() -> None:
        nonlocal begun, done
        for number in range(INGESTS):
            begun = number + 1
            keys = rows_of(number)
            table.ingest(pa.table({"k": keys, "ingest": [number] * len(keys)}))
            done = number + 1

    def editing() -> None:
        """Writes rows again with the values that they have."""
        while not over.is_set():
            number = begun % 7
            where = {"k": dm.Range(100 * number, 200 * number)} if begun % 2 else dm.sql(f"k % 7 = {number}")
            table.update(where, {"ingest": dm.sql("ingest + 0")}, attempts_max=1_000)

    def upkeep() -> None:
        while not over.is_set():
            table.compact()
            table.split()
            leaves = [one.partition_id for one in table.partitions.leaves()]
            with suppress(PartitionError, InvalidRange):  # the leaves are not adjacent, or have shared files
                table.partitions.merge(leaves[:2])
            table.collect_garbage()

    def reading() -> None:
        for n in range(CUTS):
            before = done
            cut = table.history.record_cut(f"cut {n}")
            after = begun
            first = read(table, cut)
            seen = {ingest for _, ingest in first}
            assert set(range(before)) <= seen <= set(range(after)), "what was committed then"
            assert first == sorted((k, one) for one in seen for k in rows_of(one)), "each whole, and once"
            answers.append((cut, first))
        for n in range(READS):
            cut, first = answers[n % CUTS]
            assert read(table, cut) == first

    answers: list[tuple[Any, list[tuple[int, int]]]] = []
    threads = [threading.Thread(target=noting(work, failed)) for work in (ingesting, reading)]
    others = [threading.Thread(target=noting(work, failed)) for work in (editing, upkeep)]
    for thread in (*threads, *others):
        thread.start()
    for thread in threads:
        thread.join()
    over.set()
    for thread in others:
        thread.join()
    assert failed == []
    table.collect_garbage()
    for cut, first in answers:
        assert read(table, cut) == first
    assert instance.check().problems == ()
    for cut, _ in answers:
        table.history.drop_cut(cut)
    table.collect_garbage()
    assert len(read(table, None)) == 20 * INGESTS


DYING = """
import os, pickle, signal, sys
from pathlib import Path
from dormouse.state.history import moments as cuts
from dormouse.postgres import transaction

commit, when = transaction._commit, sys.argv[2]

def dying(conn, operation):
    if operation == "record a cut":
        if when == "after":
            commit(conn, operation)
        os.kill(os.getpid(), signal.SIGKILL)
    commit(conn, operation)

transaction._commit = dying
with pickle.loads(Path(sys.argv[1]).read_bytes()).open() as context:
    cuts.record_cut(context, "a")
"""


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_process_that_is_killed_leaves_a_whole_cut_or_none(
    instance: Instance, tmp_path: Path, when: str
) -> None:
    table = instance.create_table("t", SCHEMA)
    (tmp_path / "address").write_bytes(pickle.dumps(table.context.address))
    command = [sys.executable, "-c", DYING, str(tmp_path / "address"), when]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    kept = ["a"] if when == "after" else []
    assert [one.name for one in table.history.cuts()] == kept
    assert len(holds.holds(instance._supplier)) == len(kept)
    table.history.record_cut("b")
    assert [one.name for one in table.history.cuts()] == [*kept, "b"]
    for name in (*kept, "b"):
        assert read(table, name) == []
