"""Deletes of rows by a condition that is recorded.

A delete by SQL, or from a keyed table by a condition on values, reads rows: see `plain_changes.Replace`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from dormouse.errors import InvalidQuery
from dormouse.reading.checked_files import on_current
from dormouse.reading.executor import query
from dormouse.reading.table_view import key_bounds
from dormouse.reading.where import ALL, DeleteWhere, Question, condition_of, question
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import NewDeletion

DELETES = "__deletes"
DELETE = "delete from"
"""The beginning of errors of a deletion."""


@dataclass(frozen=True, slots=True)
class DeleteReport:
    """The result of a delete.

    - If a condition was recorded, `deletion_id` and `deleted_at` are set. The rows are not counted.
    - After a dry run, or for a condition that no row can meet, only `rows` is set.
    - If rows were read, `rows` is set, and `deleted_at`, unless the database was lost after the commit.
    """

    deletion_id: int | None
    deleted_at: datetime | None
    rows: int | None


def _record(context: TableContext, where: DeleteWhere, *, dry_run: bool = False) -> DeleteReport:
    """Records a deletion as one row of the database, which hides matching rows from all readers at once.

    It applies to rows that were committed before. Rows that are committed later stay. `dry_run` counts the
    rows and changes nothing. Raises `InvalidQuery` for an invalid condition, and `SchemaMoved`.
    """
    rows, deletion = asked_to_delete(context, where)
    if dry_run:
        matching = query(context, None if where is ALL else where, [context.schema.row_keys[0].name])
        return DeleteReport(None, None, sum(batch.num_rows for batch in matching))
    if rows.is_empty:
        return DeleteReport(None, None, 0)
    deletion_id, at = context.deletions.record(deletion)
    return DeleteReport(deletion_id, at, None)


def names_values(context: TableContext, where: DeleteWhere, verb: str = DELETE) -> bool:
    """Returns whether a condition names columns other than keys. Raises the errors of `delete`."""
    return asked_to_delete(context, where, verb)[1].by_values


def asked_to_delete(
    context: TableContext, where: DeleteWhere, verb: str = DELETE
) -> tuple[Question, NewDeletion]:
    """Returns the parsed condition, and the deletion that is recorded for it.

    Raises `InvalidQuery`, which begins with `verb`, for a condition that is invalid, that limits nothing, or
    that is too long.
    """
    rows = asked_rows(context, where, f"{verb} table {context.table.name!r}")
    return rows, deletion_of(context, rows)


def asked_rows(context: TableContext, where: DeleteWhere, what: str) -> Question:
    """Returns the parsed condition of a change of rows, which must limit something.

    Raises `InvalidQuery`, whose text begins with `what`.
    """
    if where is not ALL and not where:
        raise InvalidQuery(
            f"{what}: {where!r} is no condition; say which rows, or dm.ALL (--all) for all of them"
        )
    rows = question(context.schema, None if where is ALL else where, None, None)
    if unbounded := rows.unbounded:
        raise InvalidQuery(
            f"{what}: the range of {unbounded[0]!r} is open at both ends, which bounds nothing; give it an "
            "end, leave it out, or say dm.ALL (--all) for all rows"
        )
    return rows


def deletion_of(context: TableContext, rows: Question) -> NewDeletion:
    """Returns the deletion of the rows that a question selects; raises `InvalidQuery` if it is too long."""
    by_values = any(one.field.name not in context.schema.key_names for one in rows.conditions)
    bounds = key_bounds(context.schema, rows.ranges)
    return NewDeletion(condition_of(context.schema, rows), bounds, by_values)


def delete(context: TableContext, where: DeleteWhere, *, dry_run: bool = False) -> DeleteReport:
    """Deletes the rows that match a condition, but from keyed tables only by keys; see `Table.delete`."""
    return on_current(context, lambda now: _record(now, where, dry_run=dry_run))
