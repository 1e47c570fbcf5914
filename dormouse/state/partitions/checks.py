"""What of a partition tree and its epochs does not agree: told by sets, and only read."""

from __future__ import annotations

from typing import Any

import psycopg

from dormouse.model.partition_tree import ROOT
from dormouse.model.table import Problem, TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_transaction

FOUND_MAX = 1_000
_QUERIES = load(__package__ or "", "checks")


def tree_problems(supplier: Supplier, table: TableRecord) -> list[Problem]:
    """Gaps, overlaps, lost partitions and lost epochs, in one snapshot; none of a table that is dropped."""

    def work(conn: psycopg.Connection[Any]) -> list[Problem]:
        values = {"table_id": table.table_id, "root": ROOT, "limit": FOUND_MAX}
        queries = [
            _QUERIES[n].including(forgotten=_QUERIES["forgotten"]) for n in ("check_tree", "check_epochs")
        ]
        return [
            Problem("partitions", table.name, partition_id, None, detail)
            for query in queries
            for partition_id, detail in conn.execute(query.on(), values)
        ]

    return run_transaction(
        supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        scans=True,
        operation="check partitions",
    )
