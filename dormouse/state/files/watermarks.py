"""Looks at what has changed: maintenance finds its work without reading all that is there.

A look finds the partitions to which references were added since the last one, by the transactions that the
last one's snapshot did not see, and those that are marked. It marks again what is due, and remembers its own
snapshot. Once a day, and when the table's properties are others, it looks at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import psycopg
from psycopg.types.json import Jsonb

from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import allow_scans, rows_of
from dormouse.state.files.layout import OwnTables

Purpose = Literal["jobs", "splits", "pushes", "merges"]
_QUERIES = load(__package__ or "", "watermarks")
ITS_PARTITION = _QUERIES["its_partition"]


def look(
    own: OwnTables,
    purpose: Purpose,
    facts: Mapping[str, Any],
    query: Callable[[], Query],
    values: Mapping[str, Any] | None = None,
) -> Any:
    """One look, by one statement in one transaction; gives the first value of its row.

    The statement is given the partitions to look at (`changed`), and what it remembers (`remembered`); it
    takes `facts` and `values`. Looks of one purpose wait for each other. `facts` is how it looks: when that
    is another than last time, it looks at everything.
    """
    key = {"table_id": own.table.table_id, "purpose": purpose, "facts": Jsonb(facts)}

    def once(conn: psycopg.Connection[Any]) -> Any:
        till, epoch, is_fresh = conn.execute(_QUERIES["hold"].on(), key).fetchall()[0]
        if not is_fresh:
            allow_scans(conn)
        changed = _QUERIES["changed" if is_fresh else "everything"]
        parts = {"changed": changed, "its_partition": ITS_PARTITION, "remembered": _QUERIES["remembered"]}
        statement = own.on(query().including(**parts))
        found = {**facts, **(values or {}), **key, "till": till, "epoch": epoch, "whole": not is_fresh}
        return rows_of(statement, found)(conn)[0][0]

    return own.run(once, operation=f"look for {purpose}")
