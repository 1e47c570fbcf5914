"""Edits of rows as values: expressions, the clauses of a merge, and what an edit did."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dormouse.errors import InvalidInput

TARGET, SOURCE = "t", "s"
"""The names of the rows of a table, and of the rows of a merge's source, in expressions."""
COMPUTED_MAX = 5
"""How often an edit is computed, by default, before it is refused with `EditConflict`."""
Every = Literal["*"]
"""All columns of the table, each from the source's column of the same name."""


@dataclass(frozen=True, slots=True)
class Sql:
    """An SQL expression in DuckDB's dialect, over the columns of the rows that an edit reads."""

    text: str

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text.strip():
            raise InvalidInput(f"dm.sql needs the text of an expression, not {self.text!r}")


def sql(text: str) -> Sql:
    """Returns an SQL expression, in DuckDB's dialect, for `Table.update` and `Table.merge_into`.

    In an update, it names columns of the row as it was. In a merge, it may also name them as `t.column` and
    those of the source as `s.column`. It reads no other table.
    """
    return Sql(text)


Condition = str | Sql | None
"""A condition over the columns of the target `t` and of the source `s`; None holds for every row."""
Columns = Every | Sequence[str] | Mapping[str, Any] | None
"""The columns that a clause sets: all, some from the source, or each to a constant or an `Sql`."""


@dataclass(frozen=True, slots=True)
class WhenMatched:
    """A clause for rows of the table that a row of the source matches: update, delete, or do nothing."""

    condition: Condition = None
    update: Columns = None
    delete: bool = False


@dataclass(frozen=True, slots=True)
class WhenNotMatched:
    """A clause for rows of the source that match no row of the table: insert, or do nothing."""

    condition: Condition = None
    insert: Columns = None


@dataclass(frozen=True, slots=True)
class WhenNotMatchedBySource:
    """A clause for rows of the table that no row of the source matches: update, delete, or do nothing.

    Its condition and values can name only columns of the table.
    """

    condition: Condition = None
    update: Mapping[str, Any] | None = None
    delete: bool = False


When = WhenMatched | WhenNotMatched | WhenNotMatchedBySource


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """The rows that an update changed, or would change, and how often they were computed.

    `applied` is False after a dry run, and when an earlier edit with the same id was applied. Then `rows` is
    0.
    """

    edit_id: str | None
    rows: int
    attempts: int
    applied: bool


@dataclass(frozen=True, slots=True)
class ReplaceReport:
    """The rows that a replacement added, and how often they were computed.

    `deleted` is the number of deleted rows, or of those that a dry run would delete; None if a condition was
    recorded, which counts no rows. `applied` is False after a dry run, and when an earlier replacement with
    the same id was applied. Then `inserted` is 0.
    """

    ingest_id: str | None
    inserted: int
    deleted: int | None
    attempts: int
    applied: bool


@dataclass(frozen=True, slots=True)
class MergeReport:
    """The rows that a merge inserted, updated and deleted, or would, and how often they were computed.

    `applied` is False after a dry run, and when an earlier edit with the same id was applied. Then the
    numbers are 0.
    """

    edit_id: str | None
    inserted: int
    updated: int
    deleted: int
    attempts: int
    applied: bool

    @staticmethod
    def of(counts: Mapping[str, int], edit_id: str | None, attempts: int, *, applied: bool) -> MergeReport:
        """Returns the report of an edit with these numbers of rows, by kind."""
        inserted, updated, deleted = (counts.get(kind, 0) for kind in ("inserted", "updated", "deleted"))
        return MergeReport(edit_id, inserted, updated, deleted, attempts, applied)


@dataclass(frozen=True, slots=True)
class ExecuteReport:
    """The rows that a statement changed, or would change, and how often they were computed.

    `statement` is "insert", "update", "delete" or "merge". `inserted` also counts the rows that INSERT OR
    REPLACE replaced. `deleted` is None if the rows were not read, because a condition on columns describes
    them. `applied` is False after a dry run, which has no id, and when an earlier edit with the same id
    was applied. Then the numbers are 0.
    """

    statement: str
    table: str
    edit_id: str | None
    inserted: int
    updated: int
    deleted: int | None
    attempts: int
    applied: bool
