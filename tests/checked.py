"""An instance to be checked, and helpers that list the problems that a check finds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

import dormouse as dm
from dormouse.api.instance import Instance

SCHEMA = dm.Schema(
    row_keys=[dm.Field("key", dm.LONG), dm.Field("name", dm.STRING)],
    sort_keys=[dm.Field("time", dm.LONG)],
    values=[dm.Field("value", dm.STRING, nullable=True)],
)
LAYOUTS = ["file_table", "salted_counts", "dummy_reference"]
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)


def rows(start: int, count: int = 100) -> pa.Table:
    keys = list(range(start, start + count))
    return pa.table(
        {
            "key": keys,
            "name": [f"name {key % 7}" for key in keys],
            "time": keys,
            "value": [None if key % 5 == 0 else f"value {key}" for key in keys],
        }
    )


@contextmanager
def lake_of(dsn: str, folder: Path, layout: str) -> Iterator[Instance]:
    """Yields an instance with a table `t` of two leaves and five files.

    Four files are in one leaf each, and one file is in both leaves.
    """
    with dm.connect(dsn, (folder / "objects").as_uri()) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout, split_points=[1_000], properties=PROMPT)
        for start in (0, 500, 1_000, 1_500):
            table.ingest(rows(start))
        table.set_properties(ingest_file_writing="one_reference_per_leaf")
        table.ingest(rows(950))
        yield instance


def sql(instance: Instance, text: str) -> int:
    """Runs a statement on the table's own PostgreSQL tables; returns the number of changed rows."""
    table = instance.table("t").files
    with instance._supplier.connection() as conn:
        return conn.execute(text.format(**table.own.layout.tables(table.table.table_id))).rowcount


def problem_kinds(instance: Instance, **how: bool) -> set[str]:
    return {problem.kind for problem in instance.check(**how).problems}


def names(instance: Instance) -> list[str]:
    return sorted({reference.filename for reference in instance.table("t").files.file_references()})


def names_of_leaves(instance: Instance) -> list[str]:
    return [leaf.partition_id for leaf in instance.table("t").partitions.leaves()]
