"""Databases that were copied into another cluster by their rows, as pg_dump and logical replication do.

References, their log and what rounds remember carry transaction ids, which begin anew in another cluster.
Where those of the copy are ahead of it, they are replaced, in the same order. Sequences that did not come
along go on. (Snapshots of disks, copies of files and pg_upgrade keep ids and counter together.)
"""

from __future__ import annotations

from typing import Any

import psycopg

from dormouse.postgres.limits import ALONE
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import bounded

_QUERIES = load(__file__, "copied")
_RENUMBERING = ("renumber_references", "renumber_removals", "renumber_collections", "forget_looks")


def settle(conn: psycopg.Connection[Any]) -> None:
    """Makes the database at home in its cluster; for a user that may write all of it, alone with it."""
    with bounded(conn, ALONE):
        if conn.execute(_QUERIES["is_ahead"].on()).fetchall()[0][0]:
            for name in _RENUMBERING:
                conn.execute(_QUERIES[name].on())
        # which asks what restores undid
        if conn.execute(_QUERIES["knows_deletions"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["renumber_deletions"].on())
        if conn.execute(_QUERIES["knows_history"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["forget_history"].on())
            conn.execute(_QUERIES["begin_history"].on())
        if conn.execute(_QUERIES["knows_dropped"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["forget_dropped"].on())
        if conn.execute(_QUERIES["knows_payloads"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["begin_days_anew"].on())
        if conn.execute(_QUERIES["knows_schemas"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["renumber_schemas"].on())
        if conn.execute(_QUERIES["knows_incarnations"].on()).fetchall()[0][0]:
            conn.execute(_QUERIES["note_copy"].on())
        conn.execute(_QUERIES["advance_sequences"].on())
        conn.execute(_QUERIES["settle"].on())
