"""Which position a moment is: a cut, a cut's name, or a time, as a table's metadata are read.

A time means all that was committed at or before it, by PostgreSQL's own times of commits. So it gives the
same rows whenever it is asked for: a transaction that was slow is of the moment of its commit.

A restore puts a table's rows back to what they were at a moment, in one commit; its partitions stay as they
are. References that came since go, and those that went since come back: to their own partition where it is
one still; else, after merges, to the smallest partition of now that has all of it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

from dormouse.errors import (
    CutExpired,
    InstanceForbidden,
    InstanceReadOnly,
    InvalidCut,
    InvalidInput,
    NotWhole,
    TableBusy,
    TableNotFound,
)
from dormouse.model.cut import BEGINNING, Cut, Position, When, when_of_text
from dormouse.model.file_reference import FileReference
from dormouse.model.loops import backoff_seconds
from dormouse.model.partition_tree import PartitionTree
from dormouse.model.region import Region
from dormouse.model.text import check_printed
from dormouse.postgres.lease import restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.session import LONG, Isolation
from dormouse.postgres.transaction import run_alone, run_transaction
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import erased_by
from dormouse.state.files.holds import is_held, lock_history, moment_held
from dormouse.state.history.ends import Ends, check_since, oldest, refuse_before, text_of

AHEAD_SECONDS_MAX = 60.0
"""How far a client's clock may be ahead of the database's: a time that is not yet past is waited for."""
UNFINISHED_SECONDS_MAX = 60.0
READ_SECONDS = 3_600.0
"""How long a read may take without holding what it reads, where collection comes later than that."""
_QUERIES = load(__package__ or "", "moments")
# Cuts: recorded, exact positions in a table's life, which hold what a read of them needs.

INTERVAL_SECONDS = 1_800.0
PAGE_CUTS = 1_000


def position_of(context: TableContext, when: When) -> Position:
    """Where a moment is.

    Raises `InvalidCut` for a time that is naive, in the future or before the table was made, and for no cut
    of the table; `CutExpired` for one that cannot be read any more, with the oldest that can.
    """
    if isinstance(when, datetime):
        return _position_at(context, when)
    ends = Ends(context, when)
    return ends.positions(ends.look_up())[0]


def moment_of(context: TableContext, when: When) -> tuple[TableContext, Position]:
    """The services of a table as it was, and where the moment is; raises as `position_of`.

    Of a cut both may be remembered: who plans then has `SchemaMoved` where they hold no more.
    """
    if isinstance(when, Cut):
        return context.at_cut(when, lambda: position_of(context, when))
    at = position_of(context, when)
    return context.as_of(at), at


def end_of(context: TableContext, when: When) -> Cut | str | Position:
    """A moment as a statement can find it by itself: of a time, where it is; raises as `position_of` then."""
    return _position_at(context, when) if isinstance(when, datetime) else when


def now(context: TableContext, after: Position | None = None) -> Position:
    """The present; nothing is recorded of it, nor held.

    It is not before a position that was known, also when the clock was set back since.
    """
    found = _present(context, _rows(context, "now"))
    return found if after is None else replace(found, at=max(found.at, after.at))


def now_together(contexts: Sequence[TableContext]) -> list[Position]:
    """The present of some tables of one instance, each its position at one moment. `TableNotFound`."""
    if not contexts:
        return []

    def work(conn: Any) -> list[Position]:
        found = [(context, _rows(context, "now", conn)) for context in contexts]
        return [_present(context, rows) for context, rows in found]

    return run_transaction(
        contexts[0].supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        operation="find a moment",
    )


@contextmanager
def kept(context: TableContext, position: Position) -> Iterator[None]:
    """What a moment needs stays until the end, also when retention ends meanwhile.

    As far as the database may be written to: else a file that is gone says so. Raises `CutExpired`.
    """
    table, supplier = context.table, context.supplier
    kept_seconds = max(table.properties.gc_delay_seconds, table.properties.files_kept_seconds)
    old = datetime.now(UTC) - timedelta(seconds=kept_seconds - READ_SECONDS)
    with ExitStack() as stack:
        if position.at < old and not is_held(supplier, table.table_id, position.snapshot, READ_SECONDS):
            with suppress(InstanceReadOnly, InstanceForbidden):
                held = moment_held(supplier, table.table_id, position.at, position.snapshot)
                if not stack.enter_context(held):
                    check_since(context, position.at)
        yield


def _present(context: TableContext, rows: list[Any]) -> Position:
    if not rows:
        raise TableNotFound.gone(context.table.name)
    return Position(*rows[0])


def expired_by_erasure(
    context: TableContext, at: datetime, files: Sequence[str] | None = None
) -> CutExpired | None:
    """Why a moment cannot be read where files, given by names or ids, were erased since; None: they were not.

    Without files, whether any were.
    """
    found = erased_by(context.store, files, at)
    if found is None or found.ended_at < at:
        return None
    return CutExpired(
        f"the moment {text_of(at)} of table {context.table.name!r} cannot be read any more for these keys: "
        f"rows of then were erased for ever from {text_of(found.began_at)} on (deletion "
        f"{found.deletion_id}), with the files that had them; other keys can be read, and these from "
        f"{text_of(found.ended_at)} on",
        found.ended_at.astimezone(UTC),
        table=context.table.name,
    )


def _position_at(context: TableContext, at: datetime) -> Position:
    if at.tzinfo is None or at.utcoffset() is None:
        raise InvalidCut(
            f"the time {at} has no zone: give one that is aware, such as datetime.now(timezone.utc) or "
            "at.astimezone()"
        )
    try:
        at = at.astimezone(UTC)
    except OverflowError:
        raise InvalidCut(f"the time {at} is in no year from 1 to 9999 in UTC") from None
    since = _when_finished(context, at)
    what = f"the moment {text_of(at)}"
    refuse_before(context, at, since, what)
    rows = _rows(context, "as_of", at=at)
    if not rows:
        raise TableNotFound.gone(context.table.name)
    epoch, made_at, snapshot, since, times_known, is_once = rows[0]
    refuse_before(context, at, since, what)
    if not times_known:
        raise CutExpired(
            f"{what} of table {context.table.name!r} cannot be told: the database does not know the times of "
            "all commits since the last cut before it (track_commit_timestamp was off, or they are so old "
            "that it has forgotten them): name a cut; times from the next one on can be read",
            table=context.table.name,
        )
    if not is_once:
        raise InvalidCut(
            f"{what} of table {context.table.name!r} cannot be told: the database's clock was set back then, "
            "so that it was that time twice; name a cut, or give a time after the next one"
        )
    return Position(epoch or 0, snapshot, at, made_at)


def _when_finished(context: TableContext, at: datetime) -> datetime:
    """Waits until all of a moment can be seen; gives the oldest that can be read."""
    attempt, give_up = 0, float("inf")
    while True:
        attempt += 1
        rows = _rows(context, "range", at=at)
        if not rows:
            raise TableNotFound.gone(context.table.name)
        created, since, clock, tracked, unfinished, *replayed = rows[0]
        _check_time(context, at, created, clock, tracked)
        _check_replayed(at, *replayed)
        ahead = (at - clock).total_seconds()
        if since > clock and attempt == 1 and _corrected(context):
            continue
        if ahead < 0 and not unfinished:
            return since  # type: ignore[no-any-return]
        if ahead < 0:
            give_up = min(give_up, time.monotonic() + UNFINISHED_SECONDS_MAX)
            if time.monotonic() > give_up:
                raise TableBusy(
                    f"a transaction that may be of the moment {text_of(at)} has been changing table "
                    f"{context.table.name!r} for {UNFINISHED_SECONDS_MAX:g} s since; try again later",
                    table=context.table.name,
                )
        time.sleep(max(ahead + 0.001, backoff_seconds(min(attempt, 5))))


def _corrected(context: TableContext) -> bool:
    """Corrects times that a wrong clock wrote; returns whether there were any."""
    with suppress(InstanceReadOnly, InstanceForbidden):
        return restart_leases(context.supplier) is not None
    return False


def _check_time(
    context: TableContext, at: datetime, created: datetime, clock: datetime, tracked: bool
) -> None:
    table = context.table.name
    if not tracked:
        raise InvalidCut(
            "the database does not note the times of commits (track_commit_timestamp is off), so that a time "
            "tells no moment: set it, restart the server, or name a cut"
        )
    if at < created:
        raise InvalidCut(f"table {table!r} was made at {text_of(created)}, after {text_of(at)}")
    if (at - clock).total_seconds() > AHEAD_SECONDS_MAX:
        raise InvalidCut(f"the moment {text_of(at)} is in the future: it is {text_of(clock)}")


def _check_replayed(at: datetime, is_standby: bool, replayed_at: datetime | None) -> None:
    """A standby has what the primary committed up to some time; what it has not may be of any time since."""
    if is_standby and (replayed_at is None or at >= replayed_at):
        till = "no commit yet" if replayed_at is None else f"the commits till {text_of(replayed_at)}"
        raise InvalidCut(
            f"the moment {text_of(at)} cannot be told here: the database is a standby, which has replayed "
            f"{till}: give an earlier time, or a cut's name, or ask the primary"
        )


def _rows(context: TableContext, statement: str, conn: Any = None, **values: Any) -> list[Any]:
    """What one statement gives, in one round trip."""
    own, query = context.store.own, _QUERIES[statement].including(committed_at=_QUERIES["committed_at"])
    if conn is None:
        return own.looked_up(query, values, operation="find a moment")
    return own.rows_in(conn, query, values)


def record_cut(context: TableContext, name: str | None = None, *, kept_seconds: float | None = None) -> Cut:
    """As `History.record_cut`; without a name it is kept for `kept_seconds`, or as the history."""
    if name is not None:
        _check_name(name)
    retention = context.properties.history_retention_seconds
    values = {"name": name, "kept_seconds": retention if kept_seconds is None else kept_seconds}

    own = context.store.own

    def work(conn: Any) -> list[Any] | None:
        if not lock_history(conn, context.table.table_id):
            return None
        return own.rows_in(conn, _QUERIES["record"], values)

    made = own.run(work, operation="record a cut")
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


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """What a restore to the moment `at` did, or would do: references that went and came back, and their rows.

    `deletions` were undone, as they came later, or are pending again.

    Rows are `exact` unless a file's rows in a partition were only estimated.
    """

    at: datetime
    references_removed: int
    references_restored: int
    rows_removed: int
    rows_restored: int
    exact: bool
    deletions: int = 0


def restore(context: TableContext, to: When, *, dry_run: bool = False) -> RestoreReport:
    """Makes the table's rows what they were at a moment.

    Jobs that compact it are given up. Raises `InvalidCut`, `CutExpired`, `NotWhole` when partitions were
    merged since that had files in part, and `TableBusy`; nothing is changed then.
    """
    position = position_of(context, to)

    def work(conn: Any) -> RestoreReport:
        if not dry_run and not lock_history(conn, context.table.table_id):
            raise TableNotFound.gone(context.table.name)
        # collection, which would let files go, waits for the row that is locked
        check_since(context, position.at, conn=conn)
        if not dry_run:
            # what they add meanwhile would stay, and be counted by nobody
            context.store.keep_writers_out(conn)
        return _restored(context, position, conn, dry_run=dry_run)

    def once() -> RestoreReport:
        name = f"restore {context.table.name}"
        if dry_run:
            return run_transaction(context.supplier, work, read_only=True, operation=name)
        return run_alone(context.supplier, work, limits=LONG, operation=name)

    return context.store.own.following(once)


def _restored(context: TableContext, position: Position, conn: Any, *, dry_run: bool) -> RestoreReport:
    store = context.store
    removed, rows_removed, exact = store.come_since(position.snapshot, conn)
    then = context.partitions.at(position.epoch, conn, made_at=position.made_at)
    now = context.partitions.tree_in(conn)
    back = placed(_gone_since(context, position, conn), then, now)
    context.deletions.check_restorable(context.shapes.of(conn).schema, position.snapshot, conn)
    deletions = context.deletions.count_restored(position.snapshot, conn)
    if not dry_run and (removed or back or deletions):
        store.restore(position.snapshot, position.at, back, conn)
        context.deletions.restore(position.snapshot, conn)
    return RestoreReport(
        position.at,
        removed,
        len(back),
        rows_removed,
        sum(one.row_count for one in back),
        exact and not any(one.count_approximate for one in back),
        deletions,
    )


def _gone_since(context: TableContext, position: Position, conn: Any) -> list[FileReference]:
    """What is to come back; `CutExpired` when rows of it were erased since, or are being erased."""
    values = {"snapshot": position.snapshot}
    if context.store.own.rows_in(conn, _QUERIES["erased_since"], values) != [(False,)]:
        raise expired_by_erasure(context, position.at) or CutExpired(
            f"rows of table {context.table.name!r} of {position.at} are being erased",
            table=context.table.name,
        )
    return context.store.gone_since(position.snapshot, conn)


def placed(
    references: Iterable[FileReference], then: PartitionTree, now: PartitionTree
) -> list[FileReference]:
    """Where references of an older tree are in one of now; `NotWhole` where that would show other rows."""
    found: list[FileReference] = []
    moved: dict[tuple[str, int], list[FileReference]] = defaultdict(list)
    for one in references:
        if now.node(one.partition_id) is not None:
            found.append(one)
        else:
            region = then[one.partition_id].region
            moved[one.filename, _enclosing(now, region)].append(one)
    for (_, node), group in moved.items():
        if not all(one.only_contains_data_for_this_partition for one in group):
            _check_whole(then, now, node, group)
        found.append(
            replace(
                group[0],
                partition_id=now.node_id(node),
                row_count=sum(one.row_count for one in group),
                count_approximate=any(one.count_approximate for one in group),
                only_contains_data_for_this_partition=group[0].only_contains_data_for_this_partition,
            )
        )
    return found


def _check_whole(then: PartitionTree, now: PartitionTree, node: int, group: list[FileReference]) -> None:
    """Whether a file's references cover all that a partition of now has of it."""
    region = now.region_of(node)
    place = _enclosing(then, region)
    if then.region_of(place) != region or not _covered(then, place, {one.partition_id for one in group}):
        raise NotWhole(
            f"the rows cannot be put back: partition {group[0].partition_id!r} was merged since, and its "
            f"file {group[0].filename!r} also holds rows that were not the table's in partition "
            f"{now.node_id(node)!r}; read the moment with as_of, and ingest what is missing"
        )


def _covered(tree: PartitionTree, node: int, partition_ids: set[str]) -> bool:
    pending = [node]
    while pending:
        at = pending.pop()
        if tree.node_id(at) in partition_ids:
            continue
        children = tree.children(at)
        if children is None:
            return False
        pending += children
    return True


def _enclosing(tree: PartitionTree, region: Region) -> int:
    """The smallest partition that has all of a region."""
    node = tree.root_node
    while True:
        children = tree.children(node) or ()
        inner = next((child for child in children if region.lies_in(tree.region_of(child))), None)
        if inner is None:
            return node
        node = inner
