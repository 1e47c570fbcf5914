"""Files page by page, for who looks at them; never more than a page in memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

import psycopg

from dormouse.files.layout import composed
from dormouse.files.own_tables import OwnTables
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text, narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

_QUERIES = load(__package__ or "", "pages")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What is known of a file. `unreferenced_at`: when its last reference went, if collection knows."""

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: bytes | None
    max_key: bytes | None
    added_at: datetime | None
    unreferenced_at: datetime | None


def file_page(supplier: Supplier, table: TableRecord, after: str | None, limit: int) -> list[FileFacts]:
    """At most `limit` files after the file `after`, or from the first on, in the order of their ids."""
    if after is not None and not is_text(after):
        return []
    own = OwnTables(supplier, table)
    values = {"after": UUID(int=0) if after is None else narrow_id(after), "limit": limit}

    def work(conn: psycopg.Connection[Any]) -> list[FileFacts]:
        query = _QUERIES["file_page"].including(file_facts=own.layout.own["file_facts"])
        return [FileFacts(*row) for row in conn.execute(composed(query, own.names), values)]

    return own.following(lambda: run_transaction(supplier, work, read_only=True, operation="file_page"))
