"""Files page by page; never more than a page in memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from dormouse.files.own_tables import OwnTables
from dormouse.model.table import TableRecord
from dormouse.model.text import is_text, narrow_id
from dormouse.postgres.connection import Supplier


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
    values = {"after": UUID(int=0) if after is None else narrow_id(after), "limit": limit}
    own = OwnTables(supplier, table)
    return [FileFacts(*row) for row in own.rows("file_page", values, read_only=True, operation="file_page")]
