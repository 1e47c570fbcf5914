"""How much was ingested between two moments: between cuts by what is known with them, beside them by the
files.
"""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.context import TableContext
from dormouse.errors import InvalidCut
from dormouse.history.changes import beginning, expired
from dormouse.history.moments import find_cut, now, position_of
from dormouse.model.cut import Cut, Position, When
from dormouse.postgres.queries import load

_QUERIES = load(__package__ or "", "sizes")
_COMMITTED_AT = load(__package__ or "", "moments")["committed_at"]


@dataclass(frozen=True, slots=True)
class Size:
    """What was ingested: its rows, and the bytes of its files."""

    row_count: int
    byte_count: int

    def __add__(self, other: Size) -> Size:
        return Size(self.row_count + other.row_count, self.byte_count + other.byte_count)


def size_between(context: TableContext, a: When | None = None, b: When | None = None) -> Size:
    """The rows and bytes that were ingested after one moment and up to another, exact.

    `a` None: from the table's beginning; `b` None: till now. Of two cuts it is one look-up, also when they
    cannot be read any more, unless between them none was recorded for longer than the history is kept.
    Raises `InvalidCut`, when b is before a too, and `CutExpired`.
    """
    after = beginning(context) if a is None else _position(context, a)
    till = now(context, after) if b is None else _position(context, b)
    if till.at < after.at:
        raise InvalidCut(f"{till.at} is before {after.at}: give the earlier moment first")
    times = {"after": after.at, "till": till.at}
    rows = context.store.own.looked_up(_QUERIES["of_cuts"], times, operation="measure changes")
    if not rows:
        return size_since(context, after, till)
    [(*ends, row_count, byte_count)] = rows
    first, last = (Position(*end) for end in (ends[:3], ends[3:]))
    found = Size(int(row_count), int(byte_count))
    # a cut is where it is
    before = size_since(context, after, first) if after.snapshot != first.snapshot else Size(0, 0)
    beyond = size_since(context, last, till) if till.snapshot != last.snapshot else Size(0, 0)
    return before + found + beyond


def size_since(context: TableContext, after: Position, till: Position | None = None) -> Size:
    """What was ingested after a moment, up to another or till now, told by its files. `CutExpired`."""
    own = context.store.own
    values = {"after": after.snapshot, "till": till and till.snapshot, "at": after.at}
    rows, byte_count, unknown = own.rows(
        _QUERIES["between"], values, operation="measure changes", scans=True
    )[0]
    if unknown:
        raise expired(context, after)
    return Size(int(rows), int(byte_count))


def portion_since(context: TableContext, after: Position, rows_max: int) -> Position:
    """The latest moment till which no more rows came after another; at least one commit's, which is whole.

    The present where all did. `InvalidCut` where the database does not know when they came; `CutExpired`.
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
    # what was visible then had been committed by then; another may have come a moment before
    return position_of(context, max(at, after.at))


def _position(context: TableContext, when: When) -> Position:
    """Of a cut also when it cannot be read any more: what was ingested till then is known."""
    if isinstance(when, Cut | str):
        found = find_cut(context, when)
        if found.snapshot is not None:
            return Position(found.cut.epoch, found.snapshot, found.cut.recorded_at)
    return position_of(context, when)
