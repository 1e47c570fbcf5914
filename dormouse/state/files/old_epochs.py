"""Old epochs go: what a table's history has of before its truncation, and nobody can ask for any more.

Piece by piece, each a transaction that is short, whatever the length of the history; who stops in between
goes on later. Kept are the partitions that were in the tree at the truncation or came later, the epochs from
it on, and of those before it the ones that made its leaves. Ids are not given again: each has its epoch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg

from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

PIECE_EPOCHS = 1_000
PIECE_PARTITIONS = 10_000
"""What ends or begins in one piece, unless one epoch alone does more."""
MARGIN_SECONDS = 60.0
"""Longer than it takes from an epoch's time to its commit, and from a look at the tree to a write attempt."""

_QUERIES = load(__package__ or "", "old_epochs")


class Piece(NamedTuple):
    """How many went. Of the epochs up to `bound` those up to `till` are done, `since` of them before."""

    epochs: int
    partitions: int
    since: int
    till: int
    bound: int


def forget(supplier: Supplier, table: TableRecord) -> Iterator[Piece]:
    """Forgets piece by piece, as they are asked for, until nothing is left that can go."""
    values: dict[str, Any] = {
        "table_id": table.table_id,
        "delay_seconds": table.properties.gc_delay_seconds,
        "margin_seconds": MARGIN_SECONDS,
        "epochs_max": PIECE_EPOCHS,
        "partitions_max": PIECE_PARTITIONS,
    }

    def work(conn: psycopg.Connection[Any]) -> list[Any]:
        conn.execute(_QUERIES["lock_history"].on(), values)
        return conn.execute(_QUERIES["forget"].on(), values).fetchall()

    while rows := run_transaction(supplier, work, operation="forget old epochs"):
        piece = Piece(*rows[0])
        if piece.till == piece.since:
            return
        yield piece
