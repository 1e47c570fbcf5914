"""Truncation of a table's history at a cut, and retention, which chooses that cut.

History before a truncation can no longer be read. Its files may be collected, but only collection deletes
objects. Named cuts and consumers keep history: retention stops at the oldest of them. A truncation after one
of them is refused.
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
from dormouse.state.files.facts import DeletionRows
from dormouse.state.files.holds import lock_history
from dormouse.state.history.changes import size_since
from dormouse.state.history.moments import cut as cut_of
from dormouse.state.history.moments import record_if_due

# The lives of a database (not of a partition): one ends when it is restored, copied or adopted.


class Life(NamedTuple):
    """A life of the database: the time from one restore, copy or adoption of it to the next.

    All transactions of a life that change tables come after `began_xid`, which is None where it is not known.
    """

    life_id: str
    began_xid: int | None


FIRST = Life("", None)


def lives(context: TableContext) -> list[Life]:
    """Returns the lives that the database has recorded, from the first to the current one."""
    work = rows_of(_QUERIES["lives"].on(), {})
    return [FIRST, *(Life(*row) for row in run_lookup(context.supplier, work, operation="look up the lives"))]


def is_of_life(known: Sequence[Life], life_id: str, position: Position) -> bool:
    """Returns True if the database still has everything that a position in a life has seen.

    It may lack some of it if it was restored to an earlier moment since then.
    """
    ids = [life.life_id for life in known]
    if life_id not in ids:
        return False
    after = known[ids.index(life_id) + 1 :]
    # the first transaction that its snapshot cannot have seen
    unseen = int(position.snapshot.split(":")[1])
    return not after or (after[0].began_xid is not None and unseen <= after[0].began_xid)


# Deletions and restores, which change many rows of a table at once.


@dataclass(frozen=True, slots=True)
class PastDeletion:
    """A deletion in the past, with its `where` condition as JSON and the moment just before it."""

    deletion_id: int
    condition: str
    before: Position


@dataclass(frozen=True, slots=True)
class PastRestore:
    """A restore in the past, with its transaction and the moments just before and just after it."""

    xid: str
    before: Position
    after: Position


PastEvent: TypeAlias = PastDeletion | PastRestore


def events_between(context: TableContext, after: Position, till: Position) -> list[PastEvent]:
    """Returns the deletions and restores after one moment and up to another, in their order.

    Raises `InvalidCut` for a restore by an older Dormouse, which did not record the moment after it.
    """
    values = {"after": after.snapshot, "till": till.snapshot}
    events: list[PastEvent] = []
    latest = after.at
    rows = context.store.own.rows(_QUERIES["between"], values, operation="look up deletions and restores")
    for deletion_id, condition, xid, moment, epoch, at, snapshot_before, snapshot_after in rows:
        if snapshot_after is None:
            raise InvalidCut(
                f"table {context.table.name!r} was restored at {at}, to what it was at {moment}, by an old "
                "Dormouse, which recorded too little to find changes across it: ask for the changes after "
                "it, and read the table as of then"
            )
        # a slow one has an earlier time than one that it was committed after
        latest = max(latest, at)
        before = Position(epoch, snapshot_before, latest)
        events.append(
            PastRestore(xid, before, replace(before, snapshot=snapshot_after))
            if deletion_id is None
            else PastDeletion(deletion_id, condition, before)
        )
    return events


def has_events_since(context: TableContext, after: Position) -> bool:
    """Returns True if a deletion or a restore of the table happened after a moment."""
    rows = context.store.own.rows(
        _QUERIES["any_since"], {"after": after.snapshot}, operation="find deletions and restores"
    )
    return bool(rows[0][0])


def touched(context: TableContext, restore: PastRestore) -> tuple[list[str], DeletionRows]:
    """Returns the partitions in which a restore changed references, and the deletions that it changed."""
    own, values = context.store.own, {"xid": restore.xid}
    partitions = own.rows(_QUERIES["touched"], values, operation="look up a restore")
    deletions = own.rows(_QUERIES["deletions_of"], values, operation="look up a restore")
    return [row[0] for row in partitions], deletions


_QUERIES = load(__package__ or "", "retention")
CANDIDATES = _QUERIES["candidates"]


@dataclass(frozen=True, slots=True)
class Holder:
    """A named cut or a consumer that keeps a table's history from the moment `since` on.

    `kind` names which of the two it is. `until` is None if it keeps the history without limit.
    """

    kind: str
    name: str
    since: datetime
    until: datetime | None

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


@dataclass(frozen=True, slots=True)
class RetentionReport:
    """The report of retention, or of a `dry_run`, which changes nothing.

    - `truncated_at`: the cut at which the history was truncated; None if it was not.
    - `wanted`: the cut that the limits alone would choose. It differs from `truncated_at` when the cuts and
      consumers in `held_by` keep more.
    - `cuts_dropped`: the number of cuts deleted.
    - `recorded`: the cut that was recorded first, if one was due.
    """

    wanted: Cut | None
    truncated_at: Cut | None
    cuts_dropped: int
    held_by: tuple[Holder, ...]
    recorded: Cut | None
    dry_run: bool


@dataclass(frozen=True, slots=True)
class TruncationReport:
    """The report of a truncation, or of a `dry_run`, which changes nothing.

    - `at`: the cut at which the history begins.
    - `changed`: False if the history began at this cut before. The report has the same truth value.
    - `cuts_dropped`: the number of cuts deleted.
    """

    at: Cut
    changed: bool
    cuts_dropped: int
    epochs: int
    """The number of epochs that can no longer be read; collection deletes them."""
    dry_run: bool

    def __bool__(self) -> bool:
        return self.changed


def truncate(context: TableContext, cut: Cut | str, *, dry_run: bool = False) -> TruncationReport:
    """Truncates a history like `History.truncate`.

    Also deletes the cuts without a name that are before the cut.
    """
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
        if lost := [each for each in starmap(Holder, rows("holders")) if each.since < wanted.recorded_at]:
            raise InvalidCut(
                f"{', '.join(map(str, lost))} of table {context.table.name!r} would be lost: drop what is no "
                "longer needed, or give an earlier cut"
            )
        if not dry_run and not rows("truncate", cut_id=wanted.cut_id):
            raise InvalidCut(f"cut {wanted.cut_id} of table {context.table.name!r} no longer exists")
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
    """Applies retention like `History.apply_retention`.

    Truncates at the newest cut that meets all given limits: it is at least `seconds` old, and at least
    `byte_count` bytes were ingested since. Deletes this cut and earlier ones, if they have no name.
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
        candidates = {is_free: Cut(*cut) for *cut, is_free in rows("candidates", **limits)}
        wanted, free = candidates.get(False), candidates.get(True)
        holding = starmap(Holder, rows("holders"))
        held_by = [each for each in holding if wanted and each.since < wanted.recorded_at]
        dropped = 0
        if free is not None:
            if not dry_run:
                rows("truncate", cut_id=free.cut_id)
            [(dropped,)] = rows("count_cuts" if dry_run else "forget_cuts", last=free.cut_id)
        return RetentionReport(wanted, free, dropped, tuple(held_by), recorded, dry_run)

    return run_transaction(context.supplier, work, read_only=dry_run, operation="apply retention")


def holders(context: TableContext) -> tuple[Holder, ...]:
    """Returns the named cuts and consumers that keep a table's history, the oldest first."""
    rows = context.store.own.looked_up(_QUERIES["holders"], {}, operation="look up holders of history")
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
            f"{context.table.name!r}, {context.properties.gc_delay_seconds:g}: running queries may need "
            "older files"
        )


def _head(context: TableContext, *, needs_bytes: bool, dry_run: bool) -> tuple[Cut | None, int | None]:
    """Records a cut if one is due; returns the cut, or None, and a number of bytes.

    The number is all bytes that were ever ingested. It is None without `needs_bytes`.
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
    except CutExpired:  # some files were erased: the bytes since the cut are left out, and more is kept
        since = 0
    return recorded, int(bytes_till) + since


def _rows_in(context: TableContext, conn: Any, query: str, **values: Any) -> list[Any]:
    return context.store.own.rows_in(conn, _QUERIES[query], values)
