"""A table whose files are replaced while it is read, and helpers for its rows."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from itertools import count
from typing import Any

import pyarrow as pa
from query_lake import Lake

from dormouse.errors import ObjectNotFound
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, INT, LONG, STRING
from dormouse.writing.compaction import compact

EVENTS = Schema(
    [Field("name", STRING), Field("code", BYTES)],
    [Field("time", INT)],
    [Field("n", LONG)],
)
GONE = {"gc_delay_seconds": 0, "compaction_strategy": "basic", "compaction_batch_files": 2}
NewLake = Callable[..., Lake]
_numbers = count()


def event(rng: random.Random, names: str = "abcdefgh") -> dict[str, Any]:
    """Returns a random row. There are only some hundred keys, so many rows have equal keys."""
    return {
        "name": rng.choice(names),
        "code": rng.choice([b"", b"\x00", b"\xff", b"\xff\x00"]),
        "time": rng.choice([-(2**31), -1, 0, 1, 2**31 - 1]),
        "n": next(_numbers),
    }


def filled(new_lake: NewLake, files: int = 3, rows: int = 400, **more: Any) -> Lake:
    lake = new_lake(**{"split_points": ["d", "f"], **more})
    # so that opening a file does not read all of it
    lake.row_group_rows = 20
    rng = random.Random(1)
    for n in range(files):
        lake.add([event(rng) for _ in range(rows)], one_file=n == 1)
    return lake


def replace_all_files(lake: Lake) -> set[str]:
    """Compacts every leaf and collects the old files; returns the names of the deleted files."""
    before = filenames(lake)
    for leaf in lake.context.partitions.leaves():
        files = len(list(lake.context.store.file_references_in([leaf.partition_id])))
        for _ in range(files % 2 or 2):
            lake.add_file(lake.table([]), {leaf.partition_id: 0})
    compact(lake.context, engine="local")
    lake.context.garbage.collect()
    gone = {name for name in before if not is_there(lake, name)}
    assert gone == before
    return gone


def filenames(lake: Lake) -> set[str]:
    return {reference.filename for reference in lake.context.store.file_references()}


def is_there(lake: Lake, name: str) -> bool:
    try:
        return lake.context.objects.size(name) > 0
    except ObjectNotFound:
        return False


def bag(rows: Iterable[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in rows)


def read(lake: Lake, reader: pa.RecordBatchReader, at: Collection[int]) -> list[dict[str, Any]]:
    """Returns all rows of the reader. After each batch whose number is in `at`, replaces all files of the
    table.
    """
    found: list[dict[str, Any]] = []
    for n, batch in enumerate(reader):
        found += batch.to_pylist()
        if n in at:
            replace_all_files(lake)
    return found


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """Returns the key by which files are sorted."""
    return row["name"], row["code"], row["time"]
