"""Tables of keys, texts and small numbers. Compaction merges their files two at a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

import dormouse as dm

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)], values=[dm.Field("s", dm.STRING, nullable=True), dm.Field("v", dm.LONG)]
)


def made(instance: dm.Instance, texts: list[str], **properties: Any) -> dm.Table:
    given = {"compaction_strategy": "basic", "compaction_batch_files": 2, **properties}
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(**given))
    table.ingest(data(texts), engine="local")
    return table


def data(texts: list[str], first: int = 0) -> pa.Table:
    keys = list(range(first, first + len(texts)))
    return pa.table({"k": keys, "s": texts, "v": [k % 5 for k in keys]})


def keys(table: dm.Table) -> list[int]:
    return [row["k"] for row in table.query(columns=["k"]).read_all().to_pylist()]
