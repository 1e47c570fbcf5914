"""Looks at what has changed: maintenance finds its work without reading all that is there.

A look finds the partitions to which references were added since the last one, by the transactions that the
last one's snapshot did not see, and those that are marked. It marks again what is due, and remembers its own
snapshot. Once a day, and when the table's properties are others, it looks at everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import psycopg
from psycopg.types.json import Jsonb

from dormouse.files.own_tables import OwnTables
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import allow_scans

Purpose = Literal["jobs", "splits", "pushes"]
T = TypeVar("T")
_QUERIES = load(__package__ or "", "watermarks")


def looking(query: Query, *, whole: bool) -> Query:
    """The statement of a look: with the partitions to look at, and with what it remembers."""
    return query.including(
        changed=_QUERIES["everything" if whole else "changed"], remembered=_QUERIES["remembered"]
    )


def look(
    own: OwnTables,
    purpose: Purpose,
    facts: Mapping[str, Any],
    work: Callable[[psycopg.Connection[Any], bool, dict[str, Any]], T],
) -> T:
    """One look, in one transaction: `work` is given the connection, whether all is looked at, and values.

    It runs one statement of `looking`. Looks of one purpose wait for each other. `facts` is how it looks:
    when that is another than last time, it looks at everything.
    """
    key = {"table_id": own.table.table_id, "purpose": purpose, "facts": Jsonb(facts)}

    def once(conn: psycopg.Connection[Any]) -> T:
        till, epoch, is_fresh = conn.execute(_QUERIES["hold"].on(), key).fetchall()[0]
        if not is_fresh:
            allow_scans(conn)
        return work(conn, not is_fresh, {**key, "till": till, "epoch": epoch, "whole": not is_fresh})

    return own.run(once, operation=f"look for {purpose}")
