"""Deleting rows: a condition that is recorded, and which of them it is of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import Enum
from typing import Any, Literal

from dormouse.errors import InvalidQuery
from dormouse.model.region import Region
from dormouse.reading.table_view import key_bounds
from dormouse.reading.where import Question, condition_of, question
from dormouse.state.context import TableContext
from dormouse.state.files.store import KeyBounds


class _All(Enum):
    ALL = "all"

    def __repr__(self) -> str:
        return "dm.ALL"


ALL: Literal[_All.ALL] = _All.ALL
"""All rows of a table, as they are to be deleted."""
DeleteWhere = Mapping[str, Any] | Region | Literal[_All.ALL]


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """A deletion: its number and its moment, None of one that was only tried; `rows` then are exact.

    One of which no row can be, as no value is wanted, is as one that was tried: nothing is recorded. One that
    is a load of marks, on a keyed table, has no number, and tells its rows.
    """

    deletion_id: int | None
    deleted_at: datetime | None
    rows: int | None


def delete(context: TableContext, where: DeleteWhere, *, dry_run: bool = False) -> DeleteReport:
    """Deletes the rows that match: one row in the database, at once, for every reader.

    Of the rows that were committed before; what is committed later stays, also when it is equal. `dry_run`
    counts, and changes nothing. Raises `InvalidQuery` for a condition that is none, or does not fit, and
    `SchemaMoved`.
    """
    asked, condition = asked_to_delete(context, where)
    if dry_run:
        return DeleteReport(None, None, sum(batch.num_rows for batch in _matching(context, where)))
    if asked.is_empty:
        return DeleteReport(None, None, 0)
    bounds, by_values = bounds_to_delete(context, asked)
    deletion_id, at = context.deletions.record(condition, bounds, by_values=by_values)
    return DeleteReport(deletion_id, at, None)


def names_values(context: TableContext, where: DeleteWhere) -> bool:
    """Whether a condition names columns that are no keys; raises as `delete` does."""
    return bounds_to_delete(context, asked_to_delete(context, where)[0])[1]


def asked_to_delete(context: TableContext, where: DeleteWhere) -> tuple[Question, str]:
    """Returns what is to be deleted, and the text by which it is kept.

    Raises `InvalidQuery` for a condition that is none, that bounds nothing, or that is too long.
    """
    if where is not ALL and not where:
        raise InvalidQuery(
            f"delete from table {context.table.name!r}: {where!r} is no condition; say which rows, or dm.ALL "
            "(--all) for all of them"
        )
    asked = question(context.schema, None if where is ALL else where, None, None)
    if unbounded := asked.unbounded:
        raise InvalidQuery(
            f"delete from table {context.table.name!r}: the range of {unbounded[0]!r} is open at both ends, "
            "which bounds nothing; give it an end, leave it out, or say dm.ALL (--all) for all rows"
        )
    return asked, condition_of(context.schema, asked)


def bounds_to_delete(context: TableContext, asked: Question) -> tuple[KeyBounds, bool]:
    """Between which row keys that is, and whether it names columns that are no keys."""
    by_values = any(one.field.name not in context.schema.key_names for one in asked.conditions)
    return key_bounds(context.schema, asked.ranges), by_values


def _matching(context: TableContext, where: DeleteWhere) -> Iterator[Any]:
    """The rows that match now, their first key alone."""
    from dormouse.reading.executor import query

    return iter(query(context, None if where is ALL else where, [context.schema.row_keys[0].name]))
