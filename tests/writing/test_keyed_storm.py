"""Processes that change a keyed table while it is read. Some of them are killed.

They upsert, edit, delete, compact, split, merge and collect. Each key has one writer, which notes the
beginning and the acknowledgement of each change. Editors write rows again with the values that they have. A
read may return the last change that was acknowledged before it, or any change that began later.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import ObjectNotFound, QueryOvertaken
from tests.storming import STORM_SECONDS, Workers
from tests.support.api import Table

WORKER = dedent("""
    import json, os, random, sys
    from contextlib import suppress
    from pathlib import Path
    import pyarrow as pa
    import dormouse as dm
    from dormouse.errors import (
        EditConflict, FileReferenceAssignedToJob, InvalidRange, ObjectNotFound, PartitionError, QueryOvertaken
    )
    from tests.storming import hurry

    hurry()
    dsn, objects, folder, role = sys.argv[1:5]
    stop = Path(folder, "stop")
    def upsert(table):
        writer = int(role.split()[1])
        path = Path(folder, f"log {writer}")
        number = 1 + (sum(1 for line in path.open() if line.endswith("\\n")) if path.exists() else 0)
        keys = random.sample(range(writer, 60, 3), random.randint(1, 6))
        kind = random.choice(["upsert", "upsert", "upsert", "merge", "mark", "keys", "values", "matches"])
        note = {"number": number, "kind": kind, "keys": keys}
        with path.open("a") as log:
            log.write(json.dumps(note) + "\\n")
            log.flush()
            if kind == "keys":
                table.delete({"k": keys})
            elif kind == "values":
                table.delete({"k": keys, "w": writer})
            elif kind in ("merge", "matches"):
                given = {"k": keys, "n": [number] * len(keys), "w": [writer] * len(keys)}
                merged = [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")]
                when = merged if kind == "merge" else [dm.WhenMatched(delete=True)]
                table.merge_into(given, ["k"], when, attempts_max=1_000)
            else:
                given = {"k": keys, "n": [number] * len(keys), "w": [writer] * len(keys)}
                marks = pa.array([kind == "mark"] * len(keys))
                rows = pa.table(given).append_column("gone", marks)
                table.upsert(rows, deletes="gone", engine="local")
            log.write(json.dumps({**note, "acknowledged": True}) + "\\n")

    def edit(table):
        number = random.randrange(60)
        with suppress(EditConflict):
            if number % 2:
                table.update({"k": dm.Range(number, number + 9)}, {"w": dm.sql("w + 0")})
            else:
                table.update(dm.sql(f"k % 5 = {number % 5} and n > 0"), {"w": dm.sql("w")})

    def split(table):
        table.split()
        table.merge()
        with suppress(PartitionError, InvalidRange, FileReferenceAssignedToJob):
            leaf = random.choice(table.partitions.leaves()).partition_id
            table.partitions.split(leaf, random.randrange(60))

    work = {
        "upsert": upsert,
        "edit": edit,
        "split": split,
        "compact": lambda table: table.compact(engine="local"),
        "collect": lambda table: table.collect_garbage(),
    }[role.split()[0]]
    with dm.connect(dsn, objects) as instance:
        table = instance.table("t")
        Path(folder, f"begun {os.getpid()}").touch()
        while not stop.exists():
            # happens because files are collected without a delay: nothing was done
            with suppress(ObjectNotFound, QueryOvertaken):
                work(table)
""")
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("n", dm.LONG), dm.Field("w", dm.LONG)])
WRITERS = 3
GONE = 0
READS_MAX = 100


class Notes:
    """The notes of all writers: for each key, the changes that began, in order, and the last acknowledged
    one.
    """

    def __init__(self, folder: Path) -> None:
        self.begun: dict[int, list[tuple[int, bool]]] = defaultdict(lambda: [(GONE, False)])
        self.acknowledged: dict[int, int] = defaultdict(int)
        for writer in range(WRITERS):
            path = folder / f"log {writer}"
            for line in path.read_text().splitlines() if path.exists() else ():
                self._note(json.loads(line))

    def _note(self, note: dict[str, Any]) -> None:
        for key in note["keys"]:
            if "acknowledged" in note:
                self.acknowledged[key] = note["number"]
            else:
                self.begun[key].append((note["number"], note["kind"] in ("upsert", "merge")))


def check(rows: dict[int, int], before: Notes, after: Notes) -> None:
    """Checks the rows of a read. `before` are notes from its beginning, `after` from its end."""
    for key in range(60):
        may = [one for one in after.begun[key] if one[0] >= before.acknowledged[key]]
        allowed = {number if is_row else GONE for number, is_row in may}
        assert rows.get(key, GONE) in allowed, (key, rows.get(key), may)


def read(table: Table, way: int) -> dict[int, int]:
    for left in reversed(range(READS_MAX)):
        try:
            rows = table.query(columns=["k", "n"]) if way else table.sql("select k, n from t order by k")
            pairs = [tuple(row.values()) for row in rows.read_all().to_pylist()]
            break
        except (ObjectNotFound, QueryOvertaken):  # happens because files are collected without a delay
            if not left:
                raise
    assert len(dict(pairs)) == len(pairs), "a key has two rows"
    return dict(pairs)


def storm(dsn: str, folder: Path, roles: list[str], seconds: float, kills: bool, **properties: Any) -> None:
    objects, rng = (folder / "objects").as_uri(), random.Random(27)
    given = dm.TableProperties(
        keep="newest_row",
        compaction_strategy="basic",
        compaction_batch_files=2,
        gc_delay_seconds=1,
        split_threshold_rows=40,
        split_min_rows=4,
        merge_threshold_rows=20,
        **properties,
    )
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", SCHEMA, properties=given)
        workers = Workers(WORKER, roles, dsn, objects, folder=folder)

        def turn(number: int) -> None:
            before = Notes(folder)
            found = read(table, number % 2)
            check(found, before, Notes(folder))

        workers.storm(turn, seconds, lambda: len(Notes(folder).acknowledged) >= 50, rng if kills else None)
        notes = Notes(folder)
        found = read(table, 0)
        check(found, notes, notes)
        while table.compact(engine="local").jobs_run:
            assert read(table, 1) == found
        table.collect_garbage()
        assert read(table, 0) == found
        assert instance.check(deep=True).problems == ()


@pytest.mark.slow
def test_reads_see_acknowledged_changes_in_a_short_storm(dsn: str, tmp_path: Path) -> None:
    storm(dsn, tmp_path, ["upsert 0", "upsert 1", "upsert 2", "compact", "split"], STORM_SECONDS, kills=False)


@pytest.mark.slow
@pytest.mark.parametrize("inline_bytes_max", [0, 65_536])
@pytest.mark.parametrize("newest_by", [None, "n"])
def test_reads_see_acknowledged_changes_in_a_long_storm_with_kills(
    dsn: str, tmp_path: Path, newest_by: str | None, inline_bytes_max: int
) -> None:
    roles = ["upsert 0", "upsert 1", "upsert 2", "edit", "compact", "compact", "split", "collect"]
    given = {"newest_by": newest_by, "inline_bytes_max": inline_bytes_max}
    storm(dsn, tmp_path, roles, 2 * STORM_SECONDS, kills=True, **given)
