"""A consumer reads while processes ingest, edit, compact, split and collect, and while its readers die.

Edits count themselves in the rows that they change. The consumer gets each as a deletion and an insert.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import dedent

import pyarrow as pa
import pytest

import dormouse as dm
from benchmarks.harness.processes import remotes
from tests.support.api import Instance
from tests.support.state import LAYOUTS

WRITERS, INGESTS, ROWS = 3, 6, 20
READER = dedent("""
    import sys
    import dormouse as dm

    with dm.connect(*sys.argv[1:3]) as instance:
        consumer = instance.table("t").consumer("etl")
        print(sorted(consumer.read().read_all()["number"].to_pylist()), flush=True)
        sys.stdin.read()
        consumer.acknowledge()
""")
SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG)], values=[dm.Field("number", dm.LONG), dm.Field("edits", dm.LONG)]
)


@dataclass(frozen=True)
class Writer:
    """A process that ingests, edits, compacts, splits and collects."""

    dsn: str
    objects: str
    number: int

    def run(self) -> int:
        """Returns the number of rows that it has edited."""
        with dm.connect(self.dsn, self.objects) as instance:
            table, edited = instance.table("t"), 0
            count = {"edits": dm.sql("edits + 1")}
            for turn in range(INGESTS):
                first = (self.number * INGESTS + turn) * ROWS
                keys = [(first + n) * 7919 % 100_003 for n in range(ROWS)]
                numbers = {"number": range(first, first + ROWS), "edits": [0] * ROWS}
                table.ingest(pa.table({"key": keys, **numbers}), engine="local")
                for where in ({"number": dm.Range(first - ROWS, first + 3)}, dm.sql(f"key % 9 = {turn}")):
                    if turn % 4 == self.number or isinstance(where, dict):
                        edited += table.update(where, count, attempts_max=1_000).rows
                if turn % 2 == self.number % 2:
                    table.compact(engine="local")
                if turn % 3 == 0:
                    table.split()
                table.collect_garbage()
            return edited


@pytest.fixture
def objects(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


@pytest.fixture
def instance(dsn: str, objects: str) -> Iterator[Instance]:
    with dm.connect(dsn, objects) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_missed_and_nothing_comes_twice_in_a_storm(
    instance: Instance, dsn: str, objects: str, layout: str
) -> None:
    properties = dm.TableProperties(
        gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=100,
        split_min_rows=20,
    )  # fmt: skip
    table = instance.create_table("t", SCHEMA, layout=layout, properties=properties)
    consumer = table.consumer("etl")
    slow = table.consumer("slow")
    came = Counter[tuple[int, int]]()
    with remotes(
        [partial(nullcontext, Writer(dsn, objects, number)) for number in range(WRITERS)]
    ) as writers:
        for writer in writers:
            writer.begin("run")
        while True:
            is_over = all(writer.has_answered() for writer in writers)
            apply(consumer.read(), came)
            consumer.acknowledge()
            if is_over:
                break
        edits = sum(writer.result() for writer in writers)
    everything = Counter((row["number"], row["edits"]) for row in table.query().read_all().to_pylist())
    assert sorted(number for number, _ in everything.elements()) == [*range(WRITERS * INGESTS * ROWS)]
    assert sum(count for _, count in everything) == edits, "an edit is lost, or applied twice"
    assert +came == everything
    apply(slow.read(), of_slow := Counter[tuple[int, int]]())
    assert +of_slow == everything
    assert table.partitions.tree().leaf_count > 1


def apply(reader: pa.RecordBatchReader, rows: Counter[tuple[int, int]]) -> None:
    """Applies changes to rows, by number and edits, each with the times that it is there."""
    for change in reader.read_all().to_pylist():
        rows[change["number"], change["edits"]] += -1 if change["_change"] == "delete" else 1


@pytest.mark.slow
def test_rows_not_acknowledged_by_a_dead_reader_are_read_again(
    instance: Instance, dsn: str, objects: str
) -> None:
    table = instance.create_table("t", SCHEMA)
    consumer = table.consumer("etl")

    def add(number: int) -> None:
        table.ingest(pa.table({"key": [number], "number": [number], "edits": [0]}), engine="local")

    add(1)
    command = [sys.executable, "-c", READER, dsn, objects]
    for kill in (True, False):
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout and process.stdin
        assert process.stdout.readline() == "[1]\n"
        if kill:
            process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == (-signal.SIGKILL if kill else 0)
    add(2)
    assert consumer.read().read_all()["number"].to_pylist() == [2]
