"""Conversion of a table to another layout: the references stay, their files are tracked in another way."""

from __future__ import annotations

from typing import Any

import psycopg

from dormouse.files.layout import composed, layout
from dormouse.model.table import TableRecord
from dormouse.postgres.queries import load

_QUERIES = load(__package__ or "", "conversion")


def convert(conn: psycopg.Connection[Any], table: TableRecord, target_name: str) -> None:
    """Part of a transaction, which holds the table's row: waits for those that use the table; converts it.

    What nothing refers to keeps its time; what was added keeps its own. Raises UndefinedTable when the table
    has not the layout of the record.
    """
    source, target, table_id = layout(table.layout), layout(target_name), table.table_id
    values = {"table_id": table_id, "salt_buckets": table.properties.salt_buckets}
    conn.execute(source.on("lock", table_id))
    # what is unreferenced is known by its time from here on
    conn.execute(source.on("stamp_unreferenced", table_id), values)
    old = source.names(table_id)
    names = {**old, **target.tables(table_id), "old_reference": old["file_reference"]}
    conn.execute(composed(_QUERIES["rename_references"], names))
    made = {**names, "unreferenced": target.names(table_id)["unreferenced"]}
    conn.execute(composed(target.own["create_files"], made))
    adopt = _QUERIES["adopt_files"].including(file_facts=source.own["file_facts"], adopt=target.own["adopt"])
    conn.execute(composed(adopt, names), values)
    conn.execute(composed(target.own["attach_files"].literally(table_id=table_id), names))
    conn.execute(composed(source.own["drop_files"], names))
