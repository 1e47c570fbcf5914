"""A storm of simultaneous processes, some of them killed, and the rows that each read may return.

The processes ingest, edit, delete, erase, compact, split, merge and collect. Editors move rows to other keys.
All record the beginning and the acknowledgement of each change, by one clock. From this follows which rows
each read must return, which rows it must not return, and which rows no file on the disk may have.
"""

from __future__ import annotations

import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.errors import QueryOvertaken
from tests.storming import STORM_SECONDS, Workers
from tests.support.api import Table

WORKER = dedent("""
    import json, os, random, sys, time
    from contextlib import suppress
    from pathlib import Path
    import pyarrow as pa
    import dormouse as dm
    from dormouse.errors import (
        EditConflict, FileReferenceAssignedToJob, InvalidRange, PartitionError, QueryOvertaken
    )
    from tests.storming import hurry

    hurry()
    dsn, objects, folder, role = sys.argv[1:5]
    stop, log = Path(folder, "stop"), Path(folder, "log " + role).open("a")
    rng = random.Random()

    def note(**said):
        log.write(json.dumps({**said, "at": time.monotonic()}) + "\\n")
        log.flush()

    def ingest(table):
        load = f"{role} {os.getpid()} {time.monotonic_ns()}"
        persons = [rng.randrange(12) for _ in range(rng.randint(1, 6))]
        rows = [
            {"k": rng.randrange(60), "person": person, "id": f"{load} {n}"}
            for n, person in enumerate(persons)
        ]
        note(load=load, rows=[[row["id"], row["person"]] for row in rows])
        table.ingest(pa.Table.from_pylist(rows), engine="local")
        note(load=load)

    def change(table, erases):
        # each has its own persons: erasures of the same rows at once are one
        person = rng.choice([n for n in range(12) if n % 3 == int(role.split()[1])])
        name = f"{role} {os.getpid()} {time.monotonic_ns()}"
        note(change=name, person=person)
        done = False
        if erases:
            done = table.erase({"person": person}, engine="local", wait_seconds=20.0).is_finished
        else:
            table.delete({"person": person})
        note(change=name, erased=done)

    def edit(table):
        # only one process edits: each row that it chose has moved once, and no other
        key, person = rng.randrange(60), rng.randrange(12)
        of_values = dm.sql(f"k % 5 = {key % 5} and person <> {person}")
        where, is_chosen = rng.choice([
            ({"person": person}, lambda k, of: of == person),
            ({"k": key}, lambda k, of: k == key),
            (of_values, lambda k, of: k % 5 == key % 5 and of != person),
        ])
        before, step = places(table), 7
        try:
            table.update(where, {"k": dm.sql("(k + 7) % 60")})
        except EditConflict:
            step = 0
        after = places(table)
        for name in before.keys() & after.keys():
            k, of = before[name]
            assert after[name] == ((k + step * is_chosen(k, of)) % 60, of), (name, k, after[name], where)

    def places(table):
        while True:
            with suppress(QueryOvertaken):  # which is said of files that are erased at once
                return {row["id"]: (row["k"], row["person"]) for row in table.query().read_all().to_pylist()}

    def split(table):
        table.split()
        table.merge()
        with suppress(PartitionError, InvalidRange, FileReferenceAssignedToJob):
            leaf = rng.choice(table.partitions.leaves()).partition_id
            table.partitions.split(leaf, rng.randrange(60))

    work = {
        "ingest": ingest,
        "edit": edit,
        "delete": lambda table: change(table, False),
        "erase": lambda table: change(table, True),
        "split": split,
        "compact": lambda table: table.compact(engine="local"),
        "collect": lambda table: table.collect_garbage(),
    }[role.split()[0]]
    # what makes work waits for what does it, on a machine that is busy, too
    waits = {
        "ingest": lambda table: len(table.file_page(limit=150)) == 150,
        "delete": lambda table: len(table.deletions()) > 20,
        "edit": lambda table: len(table.deletions()) > 20,
        "split": lambda table: len(table.partitions.leaves()) > 30,
    }.get(role.split()[0], lambda table: False)
    with dm.connect(dsn, objects) as instance:
        table = instance.table("t")
        Path(folder, f"begun {os.getpid()}").touch()
        while not stop.exists():
            if not waits(table):
                work(table)
            if waits(table) or role.split()[0] in ("edit", "delete", "erase"):
                time.sleep(0.1)
""")
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("person", dm.LONG), dm.Field("id", dm.STRING)])


@dataclass
class Change:
    """The deletion or erasure of a person's rows, with its beginning and end."""

    who: int
    began: float
    ended: float = math.inf
    is_erased: bool = False


@dataclass
class Row:
    who: int
    began: float
    ended: float = math.inf


class Notes:
    """The notes of all processes, by the names of rows and changes."""

    def __init__(self, folder: Path) -> None:
        self.rows: dict[str, Row] = {}
        self.changes: dict[str, Change] = {}
        self.of: dict[int, list[Change]] = defaultdict(list)
        loads: dict[str, list[str]] = {}
        for path in folder.glob("log *"):
            for line in path.read_text().split("\n")[:-1]:
                note = json.loads(line)
                if "rows" in note:
                    loads[note["load"]] = [name for name, _ in note["rows"]]
                    self.rows |= {name: Row(who, note["at"]) for name, who in note["rows"]}
                elif "load" in note:
                    for name in loads[note["load"]]:
                        self.rows[name].ended = note["at"]
                elif "person" in note:
                    made = self.changes[note["change"]] = Change(note["person"], note["at"])
                    self.of[made.who].append(made)
                else:
                    ended = self.changes[note["change"]]
                    ended.ended, ended.is_erased = note["at"], note["erased"]

    def must_have(self, name: str, since: float, till: float) -> bool:
        """Returns whether every read that begins at `since` and ends by `till` must return the row."""
        row = self.rows[name]
        return row.ended < since and not any(
            one.began < till and one.ended > row.began for one in self.of[row.who]
        )

    def must_not_have(self, name: str, since: float, *, on_disk: bool = False) -> bool:
        """Returns whether a read that begins at `since` must not return the row.

        With `on_disk`, returns whether no file may have the row at `since`.
        """
        row = self.rows[name]
        return any(
            row.ended < one.began and one.ended < since and (one.is_erased or not on_disk)
            for one in self.of[row.who]
        )


def read(table: Table, way: int) -> list[str]:
    while True:
        try:
            rows = table.query(columns=["k", "id"]) if way else table.sql("select k, id from t")
            return [row["id"] for row in rows.read_all().to_pylist()]
        except QueryOvertaken:  # which is said of files that are erased at once
            continue


def check_read(table: Table, way: int, folder: Path) -> None:
    since = time.monotonic()
    found = read(table, way)
    till = time.monotonic()
    notes = Notes(folder)
    assert [name for name, count in Counter(found).items() if count > 1] == [], "rows are returned twice"
    assert [
        name for name in notes.rows if notes.must_have(name, since, till) and name not in set(found)
    ] == []
    assert [name for name in found if notes.must_not_have(name, since)] == [], (
        "deleted rows are visible again"
    )


def check_files(folder: Path) -> None:
    """Checks that files on the disk have no rows that were erased before the files were listed."""
    since, on_disk = time.monotonic(), set()
    for path in _files(folder):
        on_disk |= set(_names_in(path))
    notes = Notes(folder)
    assert [name for name in on_disk if notes.must_not_have(name, since, on_disk=True)] == [], (
        "erased rows are in files"
    )


def _files(folder: Path) -> list[Path]:
    """Returns the Parquet files that exist. Meanwhile, other processes may make and delete folders."""
    walked = os.walk(folder / "objects")
    return [Path(place, name) for place, _, names in walked for name in names if name.endswith(".parquet")]


def _names_in(path: Path) -> list[str]:
    try:
        return [str(name) for name in pq.read_table(path, columns=["id"])["id"].to_pylist()]
    except (OSError, ValueError):
        if path.exists() and ".staging" not in path.parts:
            raise
        return []  # the file was deleted, or is being written


def storm(dsn: str, folder: Path, roles: list[str], erasures: int) -> None:
    objects, rng = (folder / "objects").as_uri(), random.Random(27)
    properties = dm.TableProperties(
        compaction_strategy="basic",
        compaction_batch_files=2,
        split_threshold_rows=40,
        split_min_rows=4,
        merge_threshold_rows=20,
        deletions_max=3,
    )
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", SCHEMA, properties=properties)
        workers = Workers(WORKER, roles, dsn, objects, folder=folder)

        def turn(number: int) -> None:
            check_read(table, number % 2, folder)
            check_files(folder)

        workers.storm(turn, 2 * STORM_SECONDS, lambda: _erased(folder) >= erasures, rng)
        found = sorted(read(table, 0))
        while table.compact(engine="local").jobs_run:
            assert sorted(read(table, 1)) == found
        check_read(table, 1, folder)
        check_files(folder)
        assert all(table.erase({"person": person}, abandon_writers=True).is_finished for person in range(12))
        assert read(table, 0) == []
        assert all(not _names_in(path) for path in _files(folder))
        assert instance.check(deep=True).problems == ()


def _erased(folder: Path) -> int:
    return sum(one.is_erased for one in Notes(folder).changes.values())


@pytest.mark.slow
def test_erased_rows_stay_away_and_all_others_stay_in_a_storm(dsn: str, tmp_path: Path) -> None:
    roles = ["ingest 0", "ingest 1", "edit", "erase 0", "erase 1", "delete 2", "compact", "split", "collect"]
    storm(dsn, tmp_path, roles, erasures=3)
