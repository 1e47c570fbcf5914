"""Partitions page by page; never more than a page in memory."""

from __future__ import annotations

from dormouse.model.partition_tree import Partition
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text
from dormouse.partitions.rows import partition_from_row
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_transaction

_QUERIES = load(__package__ or "", "pages")


def partition_page(
    supplier: Supplier, table: TableRecord, after: str, limit: int, *, leaves: bool = False
) -> list[Partition]:
    """At most `limit` partitions, by id, whose id is greater than `after`; the leaves alone when told so."""
    values = {"table_id": table.table_id, "after": after, "limit": limit, "leaves": leaves}
    work = rows_of(_QUERIES["partition_page"], values)
    if not is_text(after):
        return []
    rows = run_transaction(supplier, work, read_only=True, operation="partition_page")
    return [partition_from_row(table.schema, row) for row in rows]
