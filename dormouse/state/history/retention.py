"""How much of a table's history is kept: truncation at a cut, and retention, which picks the cut.

What lies wholly before a truncation cannot be read any more, and its files may be collected; collection alone
deletes objects. Named cuts and consumers stand in the way: retention stops at the oldest, a truncation past
one is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias

from dormouse.errors import CutExpired, InvalidCut, InvalidInput
from dormouse.model.cut import Cut, Position
from dormouse.model.table import SECONDS_MAX
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction
from dormouse.state.context import TableContext
from dormouse.state.files.holds import lock_history
from dormouse.state.files.store import DeletionRows
from dormouse.state.history.changes import size_since
from dormouse.state.history.moments import cut as cut_of
from dormouse.state.history.moments import record_if_due

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
    # the first transaction that its snapshot cannot have seen
    unseen = int(position.snapshot.split(":")[1])
    return not after or (after[0].began_xid is not None and unseen <= after[0].began_xid)


# What changed a table's rows at once between two moments: deletions, and restores to a moment.


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
            raise InvalidCut(
                f"table {context.table.name!r} was restored at {at}, to what it was at {moment}, by an old "
                "Dormouse, which noted too little of it to tell changes across it: ask for those after it, "
                "and read the table as of then"
            )
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


_QUERIES = load(__package__ or "", "retention")


@dataclass(frozen=True, slots=True)
class Holder:
    """A named cut or a consumer (`kind`), and since when it keeps a table's history; until when, if not for
    ever.
    """

    kind: str
    name: str
    since: datetime
    until: datetime | None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """What retention did, or, when `dry_run`, would do.

    `truncated_at`: the cut from which on history is kept now; None when there was nothing to let go.
    `wanted`: the cut that the limits alone would let it go up to: it is another where `held_by` are in the
    way.
    """

    wanted: Cut | None
    truncated_at: Cut | None
    cuts_dropped: int
    held_by: tuple[Holder, ...]
    recorded: Cut | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TruncationReport:
    """What a truncation did, or, when `dry_run`, would do: where the history begins, and the cuts dropped.

    `changed`, and so the report as a truth value: False when it began there already.
    """

    at: Cut
    changed: bool
    cuts_dropped: int
    epochs: int
    """Those that cannot be read any more; collection forgets them."""
    dry_run: bool

    def __bool__(self) -> bool:
        return self.changed


def truncate(context: TableContext, cut: Cut | str, *, dry_run: bool = False) -> TruncationReport:
    """As `History.truncate`; cuts without a name before the cut are dropped."""
    wanted = cut_of(context, cut)

    def work(conn: Any) -> TruncationReport:
        rows = partial(_rows_in, context, conn)
        if not dry_run:
            lock_history(conn, context.table.table_id)
        before = rows("truncation")
        for truncated, at, _ in before:
            if wanted.cut_id == truncated:
                return TruncationReport(wanted, False, 0, 0, dry_run)
            if wanted.cut_id < truncated:
                raise InvalidCut(
                    f"cut {wanted.cut_id} is before {at}, where table {context.table.name!r} is truncated "
                    "already: give a later one"
                )
        if lost := [one for one in starmap(Holder, rows("holders")) if one.since < wanted.recorded_at]:
            raise InvalidCut(
                f"{', '.join(map(str, lost))} of table {context.table.name!r} would be lost: drop what is "
                "not needed any more, or give an earlier cut"
            )
        if not dry_run and not rows("truncate", cut_id=wanted.cut_id):
            raise InvalidCut(f"cut {wanted.cut_id} of table {context.table.name!r} is not there any more")
        [(dropped,)] = rows("count_cuts" if dry_run else "forget_cuts", last=wanted.cut_id - 1)
        head = max((epoch for *_, epoch in before), default=0)
        return TruncationReport(wanted, True, dropped, wanted.epoch - head, dry_run)

    return run_transaction(context.supplier, work, read_only=dry_run, operation="truncate a history")


def apply_retention(
    context: TableContext,
    byte_count: int | None = None,
    seconds: float | None = None,
    *,
    dry_run: bool = False,
) -> RetentionReport:
    """As `History.apply_retention`.

    Truncates at the newest cut since which at least `byte_count` bytes were ingested, and which is at least
    `seconds` old: where both are given, both are kept. The cuts up to it without a name are dropped.
    """
    if byte_count is None and seconds is None:
        seconds = context.properties.history_retention_seconds
    _check_limits(context, byte_count, seconds)
    recorded, bytes_now = _head(context, needs_bytes=byte_count is not None, dry_run=dry_run)
    limits = {"byte_count": byte_count, "seconds": seconds, "bytes_now": bytes_now}

    def work(conn: Any) -> RetentionReport:
        rows = partial(_rows_in, context, conn)
        if not dry_run:
            lock_history(conn, context.table.table_id)
        found = {is_free: Cut(*cut) for *cut, is_free in rows("candidates", **limits)}
        wanted, free = found.get(False), found.get(True)
        holding = starmap(Holder, rows("holders"))
        held_by = [one for one in holding if wanted and one.since < wanted.recorded_at]
        dropped = 0
        if free is not None:
            if not dry_run:
                rows("truncate", cut_id=free.cut_id)
            [(dropped,)] = rows("count_cuts" if dry_run else "forget_cuts", last=free.cut_id)
        return RetentionReport(wanted, free, dropped, tuple(held_by), recorded, dry_run)

    return run_transaction(context.supplier, work, read_only=dry_run, operation="apply retention")


def holders(context: TableContext) -> tuple[Holder, ...]:
    """The named cuts and consumers that keep a table's history, the oldest first."""
    rows = context.store.own.looked_up(_QUERIES["holders"], {}, operation="look up what is held")
    return tuple(starmap(Holder, rows))


def _check_limits(context: TableContext, byte_count: object, seconds: object) -> None:
    if byte_count is not None and (type(byte_count) is not int or byte_count < 0):
        raise InvalidInput(f"byte_count must be a whole number from 0 on, not {byte_count!r}")
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= SECONDS_MAX:
        raise InvalidInput(f"seconds must be a number from 0 to {int(SECONDS_MAX)}, not {seconds!r}")
    if seconds < context.properties.gc_delay_seconds:
        raise InvalidInput(
            f"retention of {seconds:g} s is shorter than the gc_delay_seconds of table "
            f"{context.table.name!r}, {context.properties.gc_delay_seconds:g}: queries that run now need "
            "what was there then"
        )


def _head(context: TableContext, *, needs_bytes: bool, dry_run: bool) -> tuple[Cut | None, int | None]:
    """The cut that was recorded, as the last was old; and the bytes that were ingested till now since the
    first.
    """
    recorded = None if dry_run else record_if_due(context)
    if not needs_bytes:
        return recorded, None
    rows = context.store.own.looked_up(_QUERIES["last_cut"], {}, operation="look up the last cut")
    if not rows:
        return recorded, None
    [(bytes_till, *position)] = rows
    try:
        since = size_since(context, Position(*position)).byte_count
    except CutExpired:  # some of it was erased: so little is kept for longer
        since = 0
    return recorded, int(bytes_till) + since


def _rows_in(context: TableContext, conn: Any, query: str, **values: Any) -> list[Any]:
    return context.store.own.rows_in(conn, _QUERIES[query], values)
