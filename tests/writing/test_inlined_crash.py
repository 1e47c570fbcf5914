"""Processes killed at any step of an inlined ingest, or of its files' compaction, lose and double nothing."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from ingested import attempts

from dormouse.postgres import ConnectionSupplier
from tests.support.model import LONG, Field, Schema, TableProperties, is_inlined
from tests.support.objects import open_store
from tests.support.reading import query
from tests.support.state import Catalog, TableContext, WriteAttempts
from tests.support.writing import ingest_in_process as ingest

OPEN = """
import pickle, sys, time, os, signal
from pathlib import Path
import pyarrow as pa
from dormouse.writing import ingest as module
from dormouse.state.files import updates
opened = pickle.loads(Path(sys.argv[1]).read_bytes()).open()
context = opened.__enter__()
def add(number):
    rows = pa.table({"key": pa.array([number], pa.int64())})
    return module.ingest_in_process(context, rows, ingest_id=str(number))
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
"""
BEFORE_THE_STATEMENT = OPEN + "module.commit_inlined = die\nadd(1)"
AFTER_THE_COMMIT = (
    OPEN
    + """
ran = updates._apply_whole
updates._apply_whole = lambda *given: (ran(*given), die())
add(1)
"""
)
WRITER = OPEN + "for n in range(int(sys.argv[2]), 10_000):\n    add(n)\n    print(n, flush=True)"
COMPACTOR = (
    OPEN
    + """
from dormouse.writing import compaction
while True:
    compaction.compact(context, engine="local")
"""
)
AT_A_STEP = (
    OPEN
    + """
from dormouse.writing import compaction, compaction_job
for one in (compaction, compaction_job):
    if hasattr(one, sys.argv[2]):
        setattr(one, sys.argv[2], die)
compaction.compact(context, engine="local")
"""
)

KEEPS = ["every_row", "newest_row"]

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(params=KEEPS)
def table(
    request: pytest.FixtureRequest, dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> TableContext:
    objects = open_store(tmp_path / "objects")
    properties = TableProperties(
        inline_bytes_max=65_536,
        keep=request.param,
        attempt_expiry_seconds=0,
        gc_delay_seconds=0,
        history_retention_seconds=0,
        compaction_batch_files=4,
    )
    schema = Schema([Field("key", LONG)])
    record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
        "t", schema, properties, "file_table", ()
    )
    return TableContext(dsn, supplier, objects, record)


@pytest.fixture
def start(table: TableContext, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a program on the table; its processes are killed at the end."""
    address = tmp_path / "address"
    address.write_bytes(pickle.dumps(table.address))
    with ExitStack() as stack:

        def started(program: str, *arguments: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", program, str(address), *arguments]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield started


def keys_of(table: TableContext) -> list[int]:
    keys: list[int] = query(table).read_all().column("key").to_pylist()
    return keys


def one_row(number: int) -> object:
    import pyarrow as pa

    return pa.table({"key": pa.array([number], pa.int64())})


def files_of(table: TableContext) -> list[str]:
    return [file.filename for file in table.store.all_files(0).files]


@pytest.mark.parametrize(("program", "kept"), [(BEFORE_THE_STATEMENT, []), (AFTER_THE_COMMIT, [1])])
def test_a_killed_ingest_adds_all_or_nothing_and_is_repeated_once(
    table: TableContext, start: Start, program: str, kept: list[int]
) -> None:
    if table.properties.keep == "newest_row":
        pytest.skip("a keyed table's ingest commits otherwise; the storm below kills it")
    assert start(program).wait() == -9
    assert keys_of(table) == kept
    assert attempts(table) == 0
    assert not [name for name, _ in table.objects.list("data")]
    assert ingest(table, one_row(1), ingest_id="1").applied == (not kept)
    assert keys_of(table) == [1]
    assert table.store.inlined.total()[0] == 1


STEPS = ["staged_file", "merge_inputs", "_request", "commit_output"]


@pytest.mark.parametrize(
    ("table", "step"),
    [
        pytest.param(keep, step, marks=[pytest.mark.slow] * (number != 2 * kind + 1))
        for kind, keep in enumerate(KEEPS)
        for number, step in enumerate(STEPS)
    ],
    indirect=["table"],
)
def test_a_killed_compaction_of_inlined_files_leaves_them_as_they_are(
    table: TableContext, start: Start, step: str
) -> None:
    for number in range(5):
        ingest(table, one_row(number))
    before = files_of(table)
    assert start(AT_A_STEP, step).wait() == -9
    assert files_of(table) == before
    assert keys_of(table) == [0, 1, 2, 3, 4]
    ingest(table, one_row(5))
    assert keys_of(table) == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_writers_and_compactors_killed_at_any_moment_lose_and_double_nothing(
    table: TableContext, start: Start
) -> None:
    chosen, acknowledged = random.Random(58), 0
    compactor = start(COMPACTOR)
    for number in range(6):
        writer = start(WRITER, str(acknowledged))
        lines = writer.stdout
        assert lines is not None
        for _ in range(chosen.randint(1, 40)):
            acknowledged = int(lines.readline()) + 1
        time.sleep(chosen.random() / 20)
        writer.kill()
        acknowledged = max([acknowledged, *(int(line) + 1 for line in lines if line.endswith("\n"))])
        writer.wait()
        found = keys_of(table)
        # at most the row that was on its way was added without an answer
        assert found in (list(range(acknowledged)), list(range(acknowledged + 1)))
        if number % 2:
            compactor.kill()
            compactor.wait()
            compactor = start(COMPACTOR)
    compactor.kill()
    compactor.wait()
    ingest(table, one_row(acknowledged), ingest_id=str(acknowledged))
    assert keys_of(table) == list(range(acknowledged + 1))
    table.garbage.collect()
    assert keys_of(table) == list(range(acknowledged + 1))
    inlined = sum(map(is_inlined, files_of(table)))
    assert table.store.inlined.total()[0] == inlined
