"""Cuts: recorded, exact positions in a table's life, which hold what a read of them needs."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Literal

from dormouse.errors import InvalidCut, InvalidInput, TableNotFound
from dormouse.model.cut import BEGINNING, Cut, When, when_of_text
from dormouse.model.text import check_printed
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of
from dormouse.state.context import TableContext
from dormouse.state.history.ends import Ends, oldest
from dormouse.state.history.moments import end_of

INTERVAL_SECONDS = 1_800.0
PAGE_CUTS = 1_000
_QUERIES = load(__package__ or "", "cuts")


def record_cut(context: TableContext, name: str | None = None, *, kept_seconds: float | None = None) -> Cut:
    """Records the present of a table; without a name it is kept for `kept_seconds`, or as the history.

    `InvalidCut` for a name that is taken, or looks like a time.
    """
    if name is not None:
        _check_name(name)
    retention = context.properties.history_retention_seconds
    values = {"name": name, "kept_seconds": retention if kept_seconds is None else kept_seconds}

    def work(conn: Any) -> list[Any] | None:
        if not _execute(context, conn, "lock", {}):
            return None
        return _execute(context, conn, "record", values)

    made = context.store.own.run(work, operation="record a cut")
    if made is None:
        raise TableNotFound.gone(context.table.name)
    if not made:
        raise InvalidCut(
            f"table {context.table.name!r} has a cut {name!r} already; drop it first, or take another name"
        )
    return _cut(made[0])


def record_if_due(context: TableContext, interval_seconds: float = INTERVAL_SECONDS) -> Cut | None:
    """Records a cut when the last is so old and the table has changed since; forgets those that ended."""
    rows = _run(context, "is_due", {"interval_seconds": interval_seconds})
    if not rows or not rows[0][0]:
        return None
    _run(context, "forget", {})
    # where files go at once, nobody has asked for theirs to stay
    return record_cut(context, kept_seconds=context.properties.files_kept_seconds)


def cuts(context: TableContext) -> Iterator[Cut]:
    """All cuts of a table, the oldest first; in pages, and bounded in memory. Raises `TableNotFound`."""
    after = 0
    while page := _run(context, "cuts", {"after": after, "limit": PAGE_CUTS}):
        yield from map(_cut, page)
        after = page[-1][0]
    if after == 0:
        oldest(context)  # which refuses a table that is gone


def cut(context: TableContext, which: Cut | str | int) -> Cut:
    """The cut itself, or of a name or id, as it is there. `InvalidCut`."""
    return Ends(context, which).look_up()[0].cut(context)


def drop_cut(context: TableContext, which: Cut | str | int) -> None:
    """Forgets a cut; what it alone has kept is collected. `InvalidCut`."""
    found = cut(context, which)
    if not _run(context, "drop", {"cut_id": found.cut_id})[0][0]:
        raise InvalidCut(f"table {context.table.name!r} has no cut {found.name or found.cut_id!r} any more")


def compare(context: TableContext, a: When, b: When) -> Literal["before", "equal", "after"]:
    """Where a moment of a table lies, seen from another. `InvalidCut`, and `CutExpired`."""
    ends = Ends(context, *(end_of(context, when) for when in (a, b)))
    first, second = ((found.at, found.cut_id or 0) for found in ends.look_up())
    return "before" if first < second else "equal" if first == second else "after"


def _check_name(name: object) -> None:
    try:
        check_printed("the name of a cut", name)
    except InvalidInput as error:
        raise InvalidCut(str(error)) from None
    text = str(name)
    if text != text.strip():
        raise InvalidCut(f"the name of a cut has no blanks at its ends, unlike {name!r}")
    if text == BEGINNING or isinstance(when_of_text(text), datetime):
        raise InvalidCut(f"a cut named {name!r} could not be told from a time; take another name")


def _cut(row: list[Any]) -> Cut:
    cut_id, name, recorded_at, epoch, table_id = row
    return Cut(cut_id, name, recorded_at.astimezone(UTC), epoch, table_id)


def _run(context: TableContext, name: str, values: dict[str, Any]) -> list[Any]:
    return context.store.own.rows(_QUERIES[name], values, operation="cuts")


def _execute(context: TableContext, conn: Any, name: str, values: dict[str, Any]) -> list[Any]:
    statement = context.store.own.on(_QUERIES[name])
    return rows_of(statement, {**values, "table_id": context.table.table_id})(conn)
