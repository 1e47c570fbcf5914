"""What changed a table's rows at once between two moments: deletions, and restores to a moment.

Each waited until no other changed the table, so they have an order, and the moments just before and just
after each are exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple, TypeAlias

from dormouse.errors import InvalidCut
from dormouse.model.cut import Position
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.state.context import TableContext
from dormouse.state.files.reads import DeletionRows

# The lives of a database: one ends when it is restored, copied or adopted.


class Life(NamedTuple):
    """`began_xid`: the tables' transactions of this life come after it; None: not known."""

    life_id: str
    began_xid: int | None


FIRST = Life("", None)


def lives(context: TableContext) -> list[Life]:
    """Those that the database remembers, the first one first, the one of now last."""
    work = rows_of(_QUERIES["lives"].on(), {})
    return [FIRST, *(Life(*row) for row in run_lookup(context.supplier, work, operation="look up the lives"))]


def is_of_life(known: Sequence[Life], life_id: str, position: Position) -> bool:
    """Whether the database has all that a position of a life has seen: it may have been put back since."""
    ids = [one.life_id for one in known]
    if life_id not in ids:
        return False
    after = known[ids.index(life_id) + 1 :]
    return not after or (after[0].began_xid is not None and _seen_till(position) <= after[0].began_xid)


def _seen_till(position: Position) -> int:
    """The first transaction that its snapshot cannot have seen."""
    return int(position.snapshot.split(":")[1])


_QUERIES = load(__package__ or "", "events")


@dataclass(frozen=True, slots=True)
class PastDeletion:
    """A deletion, what its `where` said, as JSON, and the moment just before it."""

    deletion_id: int
    condition: str
    before: Position


@dataclass(frozen=True, slots=True)
class PastRestore:
    """A restore to a moment, by its transaction, and the moments just before and just after it."""

    xid: str
    before: Position
    after: Position


PastEvent: TypeAlias = PastDeletion | PastRestore


def events_between(context: TableContext, after: Position, till: Position) -> list[PastEvent]:
    """The deletions and restores of after one moment and up to another, in their order.

    `InvalidCut` for a restore of which an older Dormouse did not note the moment.
    """
    values = {"after": after.snapshot, "till": till.snapshot}
    found: list[PastEvent] = []
    latest = after.at
    rows = context.store.own.rows(_QUERIES["between"], values, operation="look up deletions and restores")
    for deletion_id, condition, xid, moment, epoch, at, snapshot_before, snapshot_after in rows:
        if snapshot_after is None:
            raise _not_told(context, moment, at)
        # one that was slow is of a moment before another that it came after
        latest = max(latest, at)
        before = Position(epoch, snapshot_before, latest)
        found.append(
            PastRestore(xid, before, replace(before, snapshot=snapshot_after))
            if deletion_id is None
            else PastDeletion(deletion_id, condition, before)
        )
    return found


def has_events_since(context: TableContext, after: Position) -> bool:
    """Whether rows were deleted, or the table was restored, since a moment."""
    rows = context.store.own.rows(
        _QUERIES["any_since"], {"after": after.snapshot}, operation="look for deletions and restores"
    )
    return bool(rows[0][0])


def touched(context: TableContext, restore: PastRestore) -> tuple[list[str], DeletionRows]:
    """Where a restore changed rows: the partitions of its references, and the deletions that it changed."""
    own, values = context.store.own, {"xid": restore.xid}
    partitions = own.rows(_QUERIES["touched"], values, operation="look up a restore")
    deletions = own.rows(_QUERIES["deletions_of"], values, operation="look up a restore")
    return [row[0] for row in partitions], deletions


def _not_told(context: TableContext, moment: datetime, at: datetime) -> InvalidCut:
    return InvalidCut(
        f"table {context.table.name!r} was restored at {at}, to what it was at {moment}, by an old Dormouse, "
        "which noted too little of it to tell changes across it: ask for those after it, and read the table "
        "as of then"
    )
