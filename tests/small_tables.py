"""Small tables, which split and compact early, for tests that read earlier states."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pyarrow as pa

import dormouse as dm
from tests.stored import query
from tests.support.api import Instance, Table

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
SMALL = {"compaction_strategy": "basic", "compaction_batch_files": 2, "split_threshold_rows": 60}


def made(instance: Instance, name: str = "t", layout: str = "file_table", **properties: Any) -> Table:
    given = dm.TableProperties(**{**SMALL, "split_min_rows": 2, **properties})
    return instance.create_table(name, SCHEMA, layout=layout, properties=given)


def add(table: Table, first: int, rows: int = 20, v: int = 0) -> None:
    keys = range(first, first + rows)
    table.ingest(pa.table({"k": keys, "v": [v] * rows}))


def keys(table: Table, as_of: Any = None) -> list[int]:
    return [row["k"] for batch in table.query(columns=["k"], as_of=as_of) for row in batch.to_pylist()]


def clock(instance: Instance) -> datetime:
    found: datetime = query(instance._supplier, "select clock_timestamp()")[0][0]
    return found
