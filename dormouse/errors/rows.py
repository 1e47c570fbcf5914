"""What is wrong with a change of a row table, or with what is asked of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from dormouse.errors.base import DormouseError, Told

__all__ = [
    "AmbiguousRows", "IndexNotReady", "InvalidColumn", "InvalidPage", "InvalidRow", "NotARowTable",
    "PageExpired", "RowConflict", "RowError", "RowLockHeld", "RowLockLost", "RowNotFound", "SnapshotExists",
    "SnapshotNotFound",
]  # fmt: skip

_NAMED_MAX = 10
ROWS_TOLD_MAX = 1_000
"""How many rows of a conflict another process is told."""


def _conflicts(rows: Sequence[Sequence[int]]) -> list[tuple[int, int, int]]:
    return [(row_id, sent, now) for row_id, sent, now in rows]


class RowError(DormouseError):
    """The row table does not allow it."""


class InvalidRow(RowError, ValueError):
    """A row that cannot be: a value that does not fit, a repeated or unknown id, a missing version."""

    column = Told[str]()


class InvalidColumn(RowError, ValueError):
    """A column that cannot be, or values that would not fit it; nothing was changed."""

    column = Told[str]()


class InvalidPage(RowError, ValueError):
    """The page token was not given by this table for this query."""


class AmbiguousRows(RowError, ValueError):
    """Two rows have the values by which an upsert looks for one."""


class NotARowTable(RowError, ValueError):
    """The table is not a row table, or it is one and is changed by its rows alone."""

    table = Told[str]()


class RowNotFound(RowError, LookupError):
    """The table has no such row, or not that version of it."""

    table = Told[str]()
    row_id = Told[int]()
    version = Told[int]()


class RowConflict(RowError):
    """Rows were changed since they were read: `rows` has (row id, version that was sent, version of now).

    Of a conflict that another process met, the first 1,000.
    """

    table = Told[str]()
    rows = Told(_conflicts)

    def __init__(self, table: str = "", rows: Sequence[tuple[int, int, int]] = ()) -> None:
        named = ", ".join(f"row {i} (sent {sent}, now {now})" for i, sent, now in rows[:_NAMED_MAX])
        more = f" and {len(rows) - _NAMED_MAX:,} more" if len(rows) > _NAMED_MAX else ""
        super().__init__(
            f"table {table!r}: changed since they were read: {named}{more}; nothing was changed: read them "
            "again, and send the change with their versions of now",
            table=table,
            rows=[list(row) for row in rows[:ROWS_TOLD_MAX]],
        )
        vars(self)["rows"] = list(rows)  # here all of them are known

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.table, self.rows)


class RowLockHeld(RowError):
    """Another worker holds the table's lock: try again when it is done."""

    table = Told[str]()
    holder = Told[str]()


class RowLockLost(RowError):
    """The table's lock was given to another worker; nothing was changed."""

    table = Told[str]()


class IndexNotReady(RowError):
    """The index is behind the table's rows: it is being worked on, ask again."""

    table = Told[str]()
    seconds = Told[float]()


class PageExpired(RowError):
    """The rows of the page's version are kept no longer: begin the query again."""

    table = Told[str]()

    @classmethod
    def of(cls, table: str, why: str) -> Self:
        """Returns the error of a table's page."""
        return cls(f"table {table!r}: {why}", table=table)


class SnapshotNotFound(RowError, LookupError):
    """The table has no snapshot of this name."""

    table = Told[str]()
    snapshot = Told[str]()


class SnapshotExists(RowError):
    """The table has a snapshot of this name already."""

    table = Told[str]()
    snapshot = Told[str]()
