"""A consumer reads while processes ingest, edit, compact, split and collect, and while its readers die.

Edits write rows again with the values that they have: the consumer gets each as a deletion and an insert.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pyarrow as pa
import pytest

import dormouse as dm
from tests.support.api import Instance
from tests.support.state import LAYOUTS

WRITERS, INGESTS, ROWS = 3, 12, 20
WRITER = dedent("""
    import sys
    import pyarrow as pa
    import dormouse as dm

    dsn, objects, number, ingests, rows = *sys.argv[1:3], *map(int, sys.argv[3:])
    with dm.connect(dsn, objects) as instance:
        table = instance.table("t")
        for turn in range(ingests):
            first = (number * ingests + turn) * rows
            keys = [(first + n) * 7919 % 100_003 for n in range(rows)]
            table.ingest(pa.table({"key": keys, "number": range(first, first + rows)}), engine="local")
            table.update({"number": dm.Range(first - rows, first + 3)}, {"number": dm.sql("number + 0")})
            if turn % 4 == number:
                table.update(dm.sql(f"key % 9 = {turn}"), {"number": dm.sql("number")}, attempts_max=1_000)
            if turn % 2 == number % 2:
                table.compact(engine="local")
            if turn % 3 == 0:
                table.split()
            table.collect_garbage()
""")
READER = dedent("""
    import sys
    import dormouse as dm

    with dm.connect(*sys.argv[1:3]) as instance:
        consumer = instance.table("t").consumer("etl")
        print(sorted(consumer.read().read_all()["number"].to_pylist()), flush=True)
        sys.stdin.read()
        consumer.acknowledge()
""")
SCHEMA = dm.Schema([dm.Field("key", dm.LONG)], values=[dm.Field("number", dm.LONG)])


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
    command = [sys.executable, "-c", WRITER, dsn, objects]
    writers = [
        subprocess.Popen([*command, *map(str, (number, INGESTS, ROWS))], stderr=subprocess.PIPE, text=True)
        for number in range(WRITERS)
    ]
    came = Counter[int]()
    while True:
        is_over = all(writer.poll() is not None for writer in writers)
        apply(consumer.read(), came)
        consumer.acknowledge()
        if is_over:
            break
    for writer in writers:
        assert writer.wait() == 0, writer.communicate()[1]
    everything = list(range(WRITERS * INGESTS * ROWS))
    assert +came == Counter(everything)
    apply(slow.read(), of_slow := Counter[int]())
    assert +of_slow == Counter(everything)
    assert table.partitions.tree().leaf_count > 1


def apply(reader: pa.RecordBatchReader, numbers: Counter[int]) -> None:
    """Applies changes to numbers of rows, each with the times that it is there."""
    for change in reader.read_all().to_pylist():
        numbers[change["number"]] += -1 if change["_change"] == "delete" else 1


@pytest.mark.slow
def test_rows_not_acknowledged_by_a_dead_reader_are_read_again(
    instance: Instance, dsn: str, objects: str
) -> None:
    table = instance.create_table("t", SCHEMA)
    consumer = table.consumer("etl")

    def add(number: int) -> None:
        table.ingest(pa.table({"key": [number], "number": [number]}), engine="local")

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
