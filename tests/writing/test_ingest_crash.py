"""Ingests whose process is killed. They add nothing, and a repetition adds all rows once."""

from __future__ import annotations

import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ingested import attempts, check_holds, check_untouched, flights, flights_table

from dormouse.postgres import ConnectionSupplier
from tests.support.state import Catalog, TableContext
from tests.support.writing import ingest_in_process as ingest

pytestmark = pytest.mark.objects

WAIT_SECONDS_MAX = 180
ROWS = 50_000
CHILD = """
import pickle, sys
from pathlib import Path
from dormouse.writing.ingest import ingest_in_process as ingest
address, data = pickle.loads(Path(sys.argv[1]).read_bytes()), sys.argv[2]
with address.open() as context:
    print(ingest(context, data, ingest_id="july", memory_bytes=1).applied)
"""

NEVER_COMMITS = (
    """
import time
from dormouse.writing import ingest as module
module.check_ingested = lambda *_: time.sleep(1000)
"""
    + CHILD
)

DRIVER = """
import os, pickle, signal, sys
from pathlib import Path
from dormouse.writing import ingest as in_process
from dormouse.sources.source import open_source
from dormouse.state.files.attempts import WriteAttempts
from dormouse.spark import ingest as bulk

def write(context, attempt, source, spark, keyed):
    context.objects.put(attempt.object_name("twice"), b"rows")
    rows = open_source(sys.argv[2], context.schema)
    return in_process.write_leaves(context, attempt, rows, lambda *_: None, 1 << 28)

bulk.write_files = write
WriteAttempts.delete_leftovers = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with pickle.loads(Path(sys.argv[1]).read_bytes()).open() as context:
    bulk.ingest_with_spark(context, sys.argv[2], ingest_id="july", spark="none")
"""

WRITER = """
import pickle, sys
from dataclasses import replace
from itertools import count
from pathlib import Path
with pickle.loads(Path(sys.argv[1]).read_bytes()).open() as context:
    with context.attempts.attempt(context.table) as attempt:
        for number in count():
            context.objects.put(replace(attempt, number=number).object_name("root"), b"rows")
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def rows() -> pa.Table:
    return flights(ROWS)


@pytest.fixture
def table(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> TableContext:
    points = [chr(letter) for letter in range(ord("A"), ord("Z"))]
    return flights_table(dsn, supplier, tmp_path, split_points=points, attempt_expiry_seconds=0)


@pytest.fixture
def start(table: TableContext, rows: pa.Table, tmp_path: Path) -> Iterator[Start]:
    """A function that starts a process which ingests the rows with the id "july"."""
    address, data = tmp_path / "address", tmp_path / "flights.parquet"
    address.write_bytes(pickle.dumps(table.address))
    pq.write_table(rows, data)
    with ExitStack() as stack:

        def started(program: str = CHILD) -> subprocess.Popen[str]:
            command = [sys.executable, "-c", program, str(address), str(data)]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            return process

        yield started


def has_begun(table: TableContext) -> bool:
    return attempts(table) > 0


def has_written(table: TableContext) -> bool:
    return next(table.objects.list(), None) is not None


def is_committing(table: TableContext) -> bool:
    """Returns whether a process waits for a lock.

    The test has locked the row of the process's attempt, so a commit waits for it.
    """
    with table.supplier.connection() as conn:
        waiting = conn.execute("select count(*) from pg_locks where not granted").fetchone()
    return waiting is not None and waiting[0] > 0


def wait_until(moment: Callable[[TableContext], bool], table: TableContext) -> None:
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while not moment(table):
        assert time.monotonic() < deadline, f"{moment.__name__} never came"
        time.sleep(0.001)


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def check_recovers(table: TableContext, rows: pa.Table) -> None:
    assert table.store.has_no_files()
    assert attempts(table) == 1
    table.garbage.collect()
    check_untouched(table)
    assert ingest(table, rows, ingest_id="july").applied
    check_holds(table, rows)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [has_written, has_begun])
def test_an_ingest_killed_before_its_commit_adds_nothing(
    table: TableContext, start: Start, rows: pa.Table, moment: Callable[[TableContext], bool]
) -> None:
    process = start(NEVER_COMMITS)
    wait_until(moment, table)
    kill(process)
    check_recovers(table, rows)


@pytest.mark.slow
def test_an_ingest_killed_within_its_commit_adds_nothing(
    table: TableContext, start: Start, rows: pa.Table
) -> None:
    process = start()
    wait_until(has_begun, table)
    with table.supplier.connection() as conn, conn.transaction():
        conn.execute("select from write_attempt for update")
        wait_until(is_committing, table)
        kill(process)
    wait_until(lambda t: not is_committing(t), table)
    check_recovers(table, rows)


@pytest.mark.slow
def test_a_spark_driver_killed_after_its_commit_has_added_all_rows(
    table: TableContext, start: Start, rows: pa.Table, tmp_path: Path
) -> None:
    """This includes the collection of an object of a repeated task. The driver is a real process, Spark is
    not.
    """
    process = start(DRIVER)
    assert process.wait(WAIT_SECONDS_MAX) == -signal.SIGKILL
    assert any("twice" in name for name, _ in table.objects.list())
    table.garbage.collect()
    check_holds(table, rows)
    assert not ingest(table, tmp_path / "flights.parquet", ingest_id="july").applied


@pytest.mark.slow
def test_two_processes_with_one_id_add_the_rows_once(
    table: TableContext, start: Start, rows: pa.Table
) -> None:
    processes = [start(), start()]
    answers = sorted(process.communicate(timeout=WAIT_SECONDS_MAX)[0].strip() for process in processes)
    assert answers == ["False", "True"]
    check_holds(table, rows)
    assert attempts(table) == 0


def drop(table: TableContext) -> None:
    """Drops the table, like `Instance.drop_table`."""
    Catalog(table.supplier, table.attempts).drop(table.table.name)
    table.attempts.collect_abandoned(table.table.table_id)


def objects(table: TableContext) -> list[str]:
    return [name for name, _ in table.objects.list()]


@pytest.mark.slow
def test_an_ingest_whose_table_is_dropped_leaves_no_objects(table: TableContext, start: Start) -> None:
    process = start()
    wait_until(has_written, table)
    drop(table)
    assert process.wait(WAIT_SECONDS_MAX) == 1
    assert objects(table) == []


def test_objects_written_after_a_table_was_dropped_are_collected(table: TableContext, start: Start) -> None:
    process = start(WRITER)
    wait_until(has_written, table)
    drop(table)
    wait_until(has_written, table)
    kill(process)
    table.attempts.collect_abandoned(0)
    assert objects(table) == []
