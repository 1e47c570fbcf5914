"""How much was ingested between two moments: between cuts by what is known with them, beside them by the
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.errors import InvalidCut
from dormouse.model.cut import Position, When
from dormouse.postgres.queries import load
from dormouse.state.context import TableContext
from dormouse.state.history.changes import ends_between, expired
from dormouse.state.history.ends import ENDS
from dormouse.state.history.moments import now, position_of

_QUERIES = load(__package__ or "", "sizes")
_SINCE, _BETWEEN = (
    _QUERIES[name].including(ends=ENDS, ingested=_QUERIES["ingested"]) for name in ("since", "between")
)
_COMMITTED_AT = load(__package__ or "", "moments")["committed_at"]


@dataclass(frozen=True, slots=True)
class Size:
    """What was ingested: its rows, and the bytes of its files."""

    row_count: int
    byte_count: int


def size_between(context: TableContext, a: When | None = None, b: When | None = None) -> Size:
    """The rows and bytes that were ingested after one moment and up to another, exact.

    `a` None: from the table's beginning; `b` None: till now. Also of cuts that cannot be read any more,
    unless between them none was recorded for longer than the history is kept.
    Raises `InvalidCut`, when b is before a too, and `CutExpired`.
    """
    ends = ends_between(context, a, b)
    rows = context.store.own.looked_up(_BETWEEN, ends.values, operation="measure changes")
    [(told, row_count, byte_count, is_unknown)] = rows
    # what was ingested till a cut is known also when the cut cannot be read any more
    after, till = ends.positions(ends.found(told), reads=False)
    if till.at < after.at:
        raise InvalidCut(f"{till.at} is before {after.at}: give the earlier moment first")
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def size_since(context: TableContext, after: Position, till: Position | None = None) -> Size:
    """What was ingested after a moment, up to another or till now, told by its files. `CutExpired`."""
    values = {"after": after.snapshot, "till": till and till.snapshot, "at": after.at}
    [(row_count, byte_count, is_unknown)] = context.store.own.rows(
        _SINCE, values, operation="measure changes", scans=True
    )
    if is_unknown:
        raise expired(context, after)
    return Size(int(row_count), int(byte_count))


def portion_since(context: TableContext, after: Position, rows_max: int) -> Position:
    """The latest moment till which no more rows came after another; at least one commit's, which is whole.

    The present where all did, or where the database's clock was set back. `CutExpired`; `InvalidCut` where
    the database does not know when they came.
    """
    own, present = context.store.own, now(context, after)
    query = _QUERIES["portion"].including(committed_at=_COMMITTED_AT)
    values = {"after": after.snapshot, "till": present.snapshot, "limit": rows_max}
    is_known, is_all, at = own.rows(query, values, operation="measure changes", scans=True)[0]
    if is_all:
        return present
    if not is_known:
        raise InvalidCut(
            f"the changes of table {context.table.name!r} cannot be taken in portions: the database does not "
            "know the times of all commits (track_commit_timestamp was off, or they are so old that it has "
            "forgotten them): leave max_rows_per_batch out"
        )
    try:
        # what was visible then had been committed by then; another may have come a moment before
        return position_of(context, max(at, after.at))
    except InvalidCut:
        # the clock was set back, and tells no portion of what came then
        return present
