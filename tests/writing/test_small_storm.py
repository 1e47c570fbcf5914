"""Processes that add few rows a commit to a table, while it is edited, compacted, divided and read.

Some processes are killed. Each writer notes the beginning and the acknowledgement of each change. A writer
that takes the place of a killed one repeats its last ingest with the same id. Editors write rows again with
the values that they have. A read must return each row whose ingest was acknowledged before it, once, and no
row whose deletion was acknowledged before it.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import CutExpired, ObjectNotFound, QueryOvertaken
from tests.runners import EXPIRE_LEASE
from tests.storming import PATIENCE_SECONDS, STORM_SECONDS, Workers
from tests.support.api import Table
from tests.support.state import LAYOUTS

WORKER = dedent("""
    import json, os, random, sys, time
    from contextlib import suppress
    from pathlib import Path
    import dormouse as dm
    from dormouse.errors import (
        EditConflict, FileReferenceAssignedToJob, InvalidRange, ObjectNotFound, PartitionError, QueryOvertaken
    )
    from tests.storming import hurry
    from tests.writing.test_small_storm import INGESTS_MAX, KEYS, WRITERS, keys_of, rows_of

    hurry()
    dsn, objects, folder, role = sys.argv[1:5]
    stop = Path(folder, "stop")

    def write(table):
        writer = int(role.split()[1])
        path = Path(folder, f"log {writer}")
        notes = [json.loads(line) for line in path.open() if line.endswith("\\n")] if path.exists() else []
        begun = [note["number"] for note in notes if note["kind"] == "insert"]
        added = {note["number"] for note in notes if note["kind"] == "inserted"}
        unknown = sorted({*begun} - added)
        number = unknown[0] if unknown else 1 + max(begun, default=0)
        if number > INGESTS_MAX:
            time.sleep(0.05)
            return
        with path.open("a") as log:
            def note(kind, number):
                log.write(json.dumps({"kind": kind, "number": number}) + "\\n")
                log.flush()
            if notes and not path.read_bytes().endswith(b"\\n"):
                log.write("\\n")  # the process was killed in the middle of a line
            note("insert", number)
            table.ingest(rows_of(writer, number), ingest_id=f"{writer}-{number}", engine="local")
            note("inserted", number)
            gone = {note["number"] for note in notes if note["kind"] == "deleted"}
            if random.random() < 0.3 and (left := sorted(added - gone)):
                of = random.choice(left)
                note("delete", of)
                by_key = {"k": keys_of(writer, of)}
                table.delete(random.choice([by_key, {"number": of, "writer": writer}]))
                note("deleted", of)

    def edit(table):
        writer, number = random.randrange(WRITERS), random.randint(1, INGESTS_MAX)
        text = {"text": dm.sql("k || ':' || number")}
        with suppress(EditConflict):
            match random.randrange(3):
                case 0:
                    table.update({"number": dm.Range(number, number + 9), "writer": writer}, text)
                case 1:
                    table.update(dm.sql(f"k % 7 = {number % 7} and writer = {writer}"), text)
                case _:
                    when = [dm.WhenMatched(update="*")]
                    table.merge_into(rows_of(writer, number), ["k", "writer", "number"], when)

    def split(table):
        table.split()
        table.merge()
        with suppress(PartitionError, InvalidRange, FileReferenceAssignedToJob):
            leaf = random.choice(table.partitions.leaves()).partition_id
            table.partitions.split(leaf, random.randrange(KEYS))

    def collect(table):
        table.collect_garbage()
        time.sleep(0.2)  # it would otherwise take half of the machine

    work = {
        "write": write,
        "edit": edit,
        "split": split,
        "compact": lambda table: table.compact(engine="local"),
        "flush": lambda table: table.compact(engine="local", full=True),
        "collect": collect,
    }[role.split()[0]]
    with dm.connect(dsn, objects) as instance:
        table = instance.table("t")
        Path(folder, f"begun {os.getpid()}").touch()
        while not stop.exists():
            # happens because files are collected without a delay: nothing was done
            with suppress(ObjectNotFound, QueryOvertaken):
                work(table)
""")
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [],
    [dm.Field("writer", dm.LONG), dm.Field("number", dm.LONG), dm.Field("text", dm.STRING)],
)
WRITERS = 3
INGESTS_MAX = 120
"""The ingests of a writer, so that reads do not take ever longer."""
KEYS, PRIME = 100_003, 7_919
READS_MAX = 100
Ingest = tuple[int, int]
"""A writer and the number of one of its ingests."""


def keys_of(writer: int, number: int) -> list[int]:
    """Returns keys of an ingest that no other ingest has, spread over the whole range of keys."""
    return [((number * 3 + step) * WRITERS + writer) * PRIME % KEYS for step in range(1 + number % 3)]


def rows_of(writer: int, number: int) -> list[dict[str, Any]]:
    keys = keys_of(writer, number)
    return [{"k": key, "writer": writer, "number": number, "text": f"{key}:{number}"} for key in keys]


class Notes:
    """The ingests that each writer has begun, added, begun to delete and deleted."""

    def __init__(self, folder: Path) -> None:
        self.of: dict[str, set[Ingest]] = {
            kind: set() for kind in ("insert", "inserted", "delete", "deleted")
        }
        for writer in range(WRITERS):
            path = folder / f"log {writer}"
            for line in path.read_text().split("\n")[:-1] if path.exists() else ():
                if line.endswith("}"):
                    note = json.loads(line)
                    self.of[note["kind"]].add((writer, note["number"]))


def check(rows: list[dict[str, Any]], before: Notes, after: Notes) -> None:
    """Checks the rows of a read. `before` are notes from its beginning, `after` from its end."""
    found = Counter((row["writer"], row["number"]) for row in rows)
    assert not [row for row in rows if row not in rows_of(row["writer"], row["number"])]
    for writer, number in after.of["insert"] | found.keys():
        one, count = (writer, number), found[writer, number]
        whole = len(keys_of(writer, number))
        if one in before.of["deleted"] or one not in after.of["insert"]:
            assert count == 0, f"{one} was deleted, or never added, and has {count} rows"
        elif one in before.of["inserted"] and one not in after.of["delete"]:
            assert count == whole, f"{one} has {count} rows of {whole}"
        else:
            assert count in (0, whole), f"{one} has {count} rows of {whole}"


def read(table: Table, way: int) -> list[dict[str, Any]]:
    for left in reversed(range(READS_MAX)):
        try:
            return _read(table, way % 3)
        except (ObjectNotFound, QueryOvertaken, CutExpired):  # files are kept only for seconds
            if not left:
                raise
    raise AssertionError


def _read(table: Table, way: int) -> list[dict[str, Any]]:
    if way == 0:
        return list(table.query().read_all().to_pylist())
    if way == 1:
        return list(table.sql("select * from t").read_all().to_pylist())
    cut = table.history.record_cut()
    try:
        return list(table.query(as_of=cut).read_all().to_pylist())
    finally:
        table.history.drop_cut(cut)


def storm(dsn: str, folder: Path, roles: list[str], seconds: float, *, kills: bool, layout: str) -> None:
    objects, rng = (folder / "objects").as_uri(), random.Random(58)
    given = dm.TableProperties(
        compaction_strategy="basic",
        compaction_batch_files=3,
        gc_delay_seconds=10,
        history_retention_seconds=10,
        split_threshold_rows=80,
        split_min_rows=8,
        merge_threshold_rows=40,
        inline_bytes_max=65_536,
        inline_total_bytes_max=1 << 20,
    )
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout, properties=given)
        workers = Workers(WORKER, roles, dsn, objects, folder=folder)

        def turn(number: int) -> None:
            before = Notes(folder)
            found = read(table, number)
            check(found, before, Notes(folder))

        workers.storm(turn, seconds, lambda: len(Notes(folder).of["inserted"]) >= 30, rng if kills else None)
        notes = Notes(folder)
        found = read(table, 0)
        check(found, notes, notes)
        with table.context.supplier.connection() as conn:  # killed processes leave jobs and holds
            conn.execute(EXPIRE_LEASE, [table.context.table.table_id])
            conn.execute("update hold set until = now()")
        while table.compact(engine="local", full=True).jobs_run:
            assert same(read(table, 1), found)
        assert same(read(table, 0), found)
        assert table.count() == len(found)
        assert instance.check(deep=True).problems == ()
        empty_soon(table)
        assert same(read(table, 1), found)


def same(rows: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    return sorted(map(repr, rows)) == sorted(map(repr, others))


def empty_soon(table: Table) -> None:
    """Waits until the content of all merged files is collected: no file is inlined any more."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while table.context.store.inlined.total() != (0, 0):
        assert time.monotonic() < deadline, table.context.store.inlined.total()
        table.collect_garbage()
        time.sleep(0.1)


@pytest.mark.slow
def test_reads_see_acknowledged_rows_in_a_short_storm(dsn: str, tmp_path: Path) -> None:
    roles = ["write 0", "write 1", "write 2", "compact"]
    storm(dsn, tmp_path, roles, 1, kills=False, layout="file_table")


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_reads_see_acknowledged_rows_in_a_long_storm_with_kills(
    dsn: str, tmp_path: Path, layout: str
) -> None:
    roles = ["write 0", "write 1", "write 2", "edit", "edit", "compact", "flush", "split", "collect"]
    storm(dsn, tmp_path, roles, 3 * STORM_SECONDS, kills=True, layout=layout)
