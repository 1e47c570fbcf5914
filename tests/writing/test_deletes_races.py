"""Deletions at the same time as ingests, edits and compactions, and deletions by a process that is killed."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.model.file_reference import FileWithReferences
from tests.commits import assignment
from tests.stored import query, wait_until
from tests.support.api import Instance, Table
from tests.support.commits import AddFiles
from tests.support.state import LAYOUTS, KeyBounds, NewDeletion
from tests.support.writing import open_source, write_leaves

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("number", dm.LONG)])
KEYS, INGESTS, DELETES, JOBS, EDITS = 4, 12, 8, 6, 6


class Storm:
    """The steps done to a table, each with the ticks of its beginning and its acknowledgement."""

    def __init__(self, table: Table) -> None:
        self.table = table
        self.ticks = itertools.count()
        self.ingested: dict[int, tuple[int, int, int]] = {}
        self.deleted: list[tuple[int, int, int]] = []
        self.over = threading.Event()

    def ingest(self, writer: int) -> None:
        for step in range(INGESTS):
            first = (writer * INGESTS + step) * KEYS
            numbers = range(first, first + KEYS)
            began = next(self.ticks)
            self.table.ingest(pa.table({"k": list(range(KEYS)), "number": list(numbers)}), engine="local")
            ended = next(self.ticks)
            self.ingested.update({n: (n - first, began, ended) for n in numbers})

    def delete(self, writer: int) -> None:
        for step in range(DELETES):
            key = (writer + step) % KEYS
            began = next(self.ticks)
            self.table.delete({"k": key})
            self.deleted.append((key, began, next(self.ticks)))

    def edit(self) -> None:
        """Writes rows again with the values that they have."""
        for step in range(EDITS):
            where = {"k": step % KEYS} if step % 2 else dm.sql(f"number % 3 = {step % 3}")
            self.table.update(where, {"number": dm.sql("number + 0")}, attempts_max=1_000)

    def compact(self) -> None:
        for _ in range(JOBS):
            assert not self.table.compact(engine="local").errors
            self.table.collect_garbage()

    def read(self) -> None:
        """Reads in a loop, and checks that a row that has disappeared does not come back."""
        gone = set[int]()
        while not self.over.is_set():
            acknowledged = set(self.ingested)
            seen = self.rows()
            assert not gone & seen
            gone |= acknowledged - seen

    def rows(self) -> set[int]:
        return set(self.table.query(columns=["number"]).read_all()["number"].to_pylist())

    def check(self) -> set[int]:
        """Checks the rows by the recorded steps.

        Rows older than a matching deletion must be absent, and rows newer than all of them present.
        """
        seen = self.rows()
        for number, (key, began, ended) in self.ingested.items():
            of_it = [(start, end) for one, start, end in self.deleted if one == key]
            if any(ended < start for start, _ in of_it):
                assert number not in seen, f"{number} was there when it was deleted"
            if all(end < began for _, end in of_it):
                assert number in seen, f"{number} came after all deletions"
        return seen


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_deleted_amid_ingests_edits_and_compactions_never_returns(
    instance: Instance, layout: str
) -> None:
    properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    storm = Storm(instance.create_table("t", SCHEMA, layout=layout, properties=properties))
    work: list[Callable[[], object]] = [storm.compact, storm.compact, storm.edit]
    work += [lambda n=n: storm.ingest(n) for n in range(2)]  # type: ignore[misc]
    work += [lambda n=n: storm.delete(n) for n in range(2)]  # type: ignore[misc]
    with ThreadPoolExecutor(len(work) + 1) as threads:
        reading = threads.submit(storm.read)
        running = [threads.submit(each) for each in work]
        try:
            for each in running:
                each.result()
        finally:
            storm.over.set()
        reading.result()
    seen = storm.check()
    for _ in range(3):
        storm.table.compact(engine="local")
        storm.table.collect_garbage()
        assert storm.rows() == seen
    found: Any = instance.sql("select number from t").read_all()["number"].to_pylist()
    assert set(found) == seen
    assert len(found) == len(seen)


def added_alone(instance: Instance, files: list[FileWithReferences], known: str) -> None:
    instance.table("t").context.store.add_files_with_references(files)


def added_in_a_batch(instance: Instance, files: list[FileWithReferences], known: str) -> None:
    """Commits the files and an assignment of a job in one transaction."""
    add = AddFiles(commit_id="add", table="t", files=tuple(files))
    [one, other] = instance.commit([add, assignment("t", "job", known)])
    assert (one.state, other.state) == ("applied", "applied")


@pytest.mark.parametrize("added", [added_alone, added_in_a_batch])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_serializable_commit_that_waits_for_a_delete_comes_after_it(
    instance: Instance, layout: str, added: Callable[[Instance, list[FileWithReferences], str], None]
) -> None:
    """The commit must take its snapshot after the wait. An earlier snapshot would miss the deletion."""
    properties = dm.TableProperties(isolation="serializable")
    table = instance.create_table("t", SCHEMA, layout=layout, properties=properties)
    start, context = table.history.record_cut("start"), table.context
    table.ingest(pa.table({"k": [1, 2], "number": [1, 2]}))
    [known] = table.file_page()
    waits = (
        "select true from pg_locks l join pg_database d on d.oid = l.database "
        "where not granted and datname = current_database()"
    )
    with context.attempts.attempt(context.table) as attempt, ThreadPoolExecutor(1) as threads:
        source = open_source(pa.table({"k": [1, 3], "number": [3, 4]}), SCHEMA)
        files = list(write_leaves(context, attempt, source, lambda *_: None, 1 << 20))
        running = []

        def meanwhile(conn: object, deletion_id: int) -> None:
            running.append(threads.submit(added, instance, files, known.filename))
            wait_until(lambda: query(instance._supplier, waits) != [])

        context.deletions.record(NewDeletion('{"k": 1}', KeyBounds(), by_values=False), meanwhile)
        running[0].result()
        found = table.changes(after=start).read_all().to_pylist()
        copy = [row["number"] for row in found if row["_change"] == "insert"]
        for row in found:
            if row["_change"] == "delete":
                copy.remove(row["number"])
        assert sorted(copy) == sorted(table.query(columns=["number"]).read_all()["number"].to_pylist())
        assert sorted(copy) == [2, 3, 4], "the commit that waited comes after the deletion"


DELETER = """
import sys, dormouse as dm
with dm.connect(sys.argv[1], sys.argv[2]) as instance:
    table = instance.table("t")
    for key in range(10_000):
        print(key, flush=True)
        table.delete({"k": key})
"""


@pytest.mark.slow
def test_a_killed_process_leaves_complete_deletions_and_no_lock(
    instance: Instance, dsn: str, tmp_path: Path
) -> None:
    table = instance.create_table("t", SCHEMA)
    table.ingest(pa.table({"k": list(range(1_000)), "number": list(range(1_000))}))
    process = subprocess.Popen(
        [sys.executable, "-c", DELETER, dsn, (tmp_path / "objects").as_uri()],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    begun = [int(process.stdout.readline()) for _ in range(6)]
    process.kill()
    begun += [int(line) for line in process.stdout if line.endswith("\n")]
    process.wait()
    last = begun[-1]
    assert table.delete({"k": 999}).deletion_id in (last + 1, last + 2), (
        "the last deletion is complete or absent"
    )
    left = table.query(columns=["k"]).read_all()["k"].to_pylist()
    first = left[0]
    assert first in (last, last + 1)
    assert left == list(range(first, 999))
