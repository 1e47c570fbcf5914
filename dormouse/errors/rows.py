"""What is wrong with a change of a row table, or with what is asked of one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

from dormouse.errors.base import DormouseError

__all__ = [
    "AmbiguousRows", "IndexNotReady", "InvalidColumn", "InvalidPage", "InvalidRow", "NotARowTable",
    "PageExpired", "RowConflict", "RowError", "RowLockHeld", "RowLockLost", "RowNotFound", "SnapshotExists",
    "SnapshotNotFound",
]  # fmt: skip

_NAMED_MAX = 10
ROWS_TOLD_MAX = 1_000
"""How many rows of a conflict another process is told."""


class RowError(DormouseError):
    """The row table does not allow it."""


class InvalidRow(RowError, ValueError):
    """A row that cannot be: a value that does not fit, a repeated or unknown id, a missing version."""


class InvalidColumn(RowError, ValueError):
    """A column that cannot be, or values that would not fit it; nothing was changed."""


class InvalidPage(RowError, ValueError):
    """The page token was not given by this table for this query."""


class AmbiguousRows(RowError, ValueError):
    """Two rows have the values by which an upsert looks for one."""


class NotARowTable(RowError, ValueError):
    """The table is not a row table, or it is one and is changed by its rows alone."""


class RowNotFound(RowError, LookupError):
    """The table has no such row, or not that version of it."""


class RowConflict(RowError):
    """Rows were changed since they were read: `rows` has (row id, version that was sent, version of now)."""

    def __init__(self, table: str = "", rows: Sequence[tuple[int, int, int]] = ()) -> None:
        self.table = table
        self.rows = list(rows)
        self.data = {"table": table, "rows": [list(row) for row in self.rows[:ROWS_TOLD_MAX]]}
        named = ", ".join(f"row {i} (sent {sent}, now {now})" for i, sent, now in self.rows[:_NAMED_MAX])
        more = f" and {len(self.rows) - _NAMED_MAX:,} more" if len(self.rows) > _NAMED_MAX else ""
        super().__init__(
            f"table {table!r}: changed since they were read: {named}{more}; nothing was changed: read them "
            "again, and send the change with their versions of now"
        )

    @classmethod
    def told(cls, message: str, data: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Returns a conflict that another process met; it has the first 1,000 of its rows."""
        error = super().told(message, data)
        error.table = str(data.get("table", ""))
        error.rows = [(row_id, sent, now) for row_id, sent, now in data.get("rows", ())]
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self.rows)


class RowLockHeld(RowError):
    """Another worker holds the table's lock: try again when it is done."""


class RowLockLost(RowError):
    """The table's lock was given to another worker; nothing was changed."""


class IndexNotReady(RowError):
    """The index is behind the table's rows: it is being worked on, ask again."""


class PageExpired(RowError):
    """The rows of the page's version are kept no longer: begin the query again."""


class SnapshotNotFound(RowError, LookupError):
    """The table has no snapshot of this name."""


class SnapshotExists(RowError):
    """The table has a snapshot of this name already."""
