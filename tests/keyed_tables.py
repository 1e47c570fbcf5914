"""Helpers for tests of keyed tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import pyarrow as pa

import dormouse as dm
from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.writing.ingest import commit_files, keyed_rows, write_leaves

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    values=[dm.Field("v", dm.LONG), dm.Field("s", dm.STRING, nullable=True)],
)
"""The schema of the test tables. A row is (k, v, s); s may be omitted."""
MARKS = "is_deleted"
Row = tuple[Any, ...]


def keyed(instance: Instance, name: str = "t", layout: str = "file_table", **properties: Any) -> Table:
    given = {"keep": "newest_row", "compaction_strategy": "basic", "compaction_batch_files": 2, **properties}
    return instance.create_table(name, SCHEMA, layout=layout, properties=dm.TableProperties(**given))


def data(rows: Iterable[Row], marks: Sequence[bool] | None = None) -> pa.Table:
    listed = [(*row, *(None,) * (3 - len(row))) for row in rows]
    columns = {
        "k": pa.array([row[0] for row in listed], pa.int64()),
        "v": pa.array([row[1] for row in listed], pa.int64()),
        "s": pa.array([row[2] for row in listed], pa.string()),
    }
    if marks is not None:
        columns[MARKS] = pa.array(marks, pa.bool_())
    return pa.table(columns)


def upsert(table: Table, *rows: Row) -> None:
    table.upsert(data(rows), engine="local")


def delete_keys(table: Table, *keys: int, v: int | None = None) -> None:
    """Deletes keys by upserting rows with deletion marks."""
    table.upsert(data([(key, v) for key in keys], [True] * len(keys)), deletes=MARKS, engine="local")


def seen(table: Table, instance: Instance, **how: Any) -> dict[int, int]:
    """Returns the value of each key; asserts that all readers agree. `how` has options of `query`."""
    where = how.pop("where", None)
    listed = table.query(where, ["k", "v"], **how).read_all().to_pylist()
    found = {row["k"]: row["v"] for row in listed}
    assert [row["k"] for row in listed] == sorted(found), "a key is there twice, or out of order"
    assert table.query(where, ["v"], **how).read_all().num_rows == len(found)
    if where is None:
        said = instance.sql(f"select k, v from {table.name}", **how).read_all().to_pylist()
        assert sorted((row["k"], row["v"]) for row in said) == sorted(found.items())
        with instance.duckdb(**how) as opened:
            viewed = opened.execute(f"select k, v from {table.name}").fetchall()
        assert sorted(viewed) == sorted(found.items())
    return found


def begun(table: Table, *rows: Row, marks: list[bool] | None = None) -> Callable[[], None]:
    """Begins a load and writes its files; returns a function that commits the load."""
    context, stack = table.context, ExitStack()
    attempt = stack.enter_context(context.attempts.attempt(context.table, loads=True))
    load = keyed_rows(context, attempt, None if marks is None else MARKS)
    assert load is not None
    files = write_leaves(context, attempt, load.opened(data(rows, marks)), lambda *_: None, 1 << 20)

    def commit() -> None:
        assert commit_files(context, attempt, files, attempt.attempt_id)
        stack.close()

    return commit
