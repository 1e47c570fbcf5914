"""The positions of moments (a cut, a cut's name, or a time), cuts, and restores of a table to a moment.

A time means everything that was committed at or before it, by PostgreSQL's times of commits. So the same time
always gives the same rows. A slow transaction belongs to the time of its commit.

A restore gives a table the rows that it had at a moment, in one commit. The table's partitions stay.
References that were added since then are removed, and references that were removed since then are added
again. Such a reference returns to its partition, or after a merge, to the smallest partition that contains
this one.
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
"""How far a given time may be in the future, in seconds, as a client's clock may be ahead.

The call waits until the time is past.
"""
UNFINISHED_SECONDS_MAX = 60.0
READ_SECONDS = 3_600.0
"""How long a read may take without a hold, in seconds.

A hold is not needed if the files of the read cannot be collected within that time.
"""
_QUERIES = load(__package__ or "", "moments")
IS_OLD = _QUERIES["is_old"]
INTERVAL_SECONDS = 1_800.0
PAGE_CUTS = 1_000


def position_of(context: TableContext, when: When) -> Position:
    """Returns the position of a moment.

    Raises:

    - `InvalidCut` for a time that is naive, in the future or before the table was created, and for a cut that
      the table does not have.
    - `CutExpired` for a moment that can no longer be read. The error contains the oldest moment that can.
    """
    if isinstance(when, datetime):
        return _position_at(context, when)
    ends = Ends(context, when)
    return ends.positions(ends.look_up())[0]


def moment_of(context: TableContext, when: When) -> tuple[TableContext, Position]:
    """Returns the services of a table as it was at a moment, and the position of the moment.

    Raises the errors of `position_of`. For a cut, both results may come from a cache. If they are no longer
    valid, the planner raises `SchemaMoved`.
    """
    if isinstance(when, Cut):
        return context.at_cut(when, lambda: position_of(context, when))
    at = position_of(context, when)
    return context.as_of(at), at


def end_of(context: TableContext, when: When) -> Cut | str | Position:
    """Returns a moment in a form for `Ends`, where a time is replaced by its position.

    Raises the errors of `position_of`.
    """
    return _position_at(context, when) if isinstance(when, datetime) else when


def now(context: TableContext, after: Position | None = None) -> Position:
    """Returns the position of the present, which is neither recorded nor held.

    Its time is not before that of `after`, even if the database's clock was set back since.
    """
    present = _present(context, _rows(context, "now"))
    return present if after is None else replace(present, at=max(present.at, after.at))


def now_together(contexts: Sequence[TableContext]) -> list[Position]:
    """Returns the positions of several tables of one instance at the same moment.

    Raises `TableNotFound`.
    """
    if not contexts:
        return []

    def work(conn: Any) -> list[Position]:
        # all are read before any error is raised
        presents = [(context, _rows(context, "now", conn)) for context in contexts]
        return [_present(context, rows) for context, rows in presents]

    return run_transaction(
        contexts[0].supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        operation="find a moment",
    )


@contextmanager
def kept(context: TableContext, position: Position) -> Iterator[None]:
    """Keeps the files of a moment from collection while the block runs, even if their retention ends.

    If the database is read-only, there is no hold. A read then fails if one of its files was collected.
    Raises `CutExpired`.
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
    """Returns the error for a moment if some of its files were erased since then; otherwise None.

    `files` are names or ids. None means any file of the table.
    """
    erasure = erased_by(context.store, files, at)
    if erasure is None or erasure.ended_at < at:
        return None
    return CutExpired(
        f"the moment {text_of(at)} of table {context.table.name!r} can no longer be read for these keys: "
        f"rows of that time were erased from {text_of(erasure.began_at)} on (deletion "
        f"{erasure.deletion_id}), with the files that had them; other keys can be read, and these from "
        f"{text_of(erasure.ended_at)} on",
        erasure.ended_at.astimezone(UTC),
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
            f"{what} of table {context.table.name!r} cannot be found: the database does not know the times "
            "of all commits since the last cut before it (track_commit_timestamp was off, or they are so old "
            "that it has forgotten them): name a cut; times from the next one on can be read",
            table=context.table.name,
        )
    if not is_once:
        raise InvalidCut(
            f"{what} of table {context.table.name!r} cannot be found: the database's clock was set back "
            "then, so that it was that time twice; name a cut, or give a time after the next one"
        )
    return Position(epoch or 0, snapshot, at, made_at)


def _when_finished(context: TableContext, at: datetime) -> datetime:
    """Waits until all commits before a time are visible; returns the oldest moment that can be read.

    Raises `TableBusy` after `UNFINISHED_SECONDS_MAX`.
    """
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
                    f"the moment {text_of(at)} cannot be read yet: a transaction that may belong to it has "
                    f"been changing table "
                    f"{context.table.name!r} for {UNFINISHED_SECONDS_MAX:g} s; try again later",
                    table=context.table.name,
                )
        time.sleep(max(ahead + 0.001, backoff_seconds(min(attempt, 5))))


def _corrected(context: TableContext) -> bool:
    """Corrects times that a wrong clock wrote; returns True if there were any."""
    with suppress(InstanceReadOnly, InstanceForbidden):
        return restart_leases(context.supplier) is not None
    return False


def _check_time(
    context: TableContext, at: datetime, created: datetime, clock: datetime, tracked: bool
) -> None:
    table = context.table.name
    if not tracked:
        raise InvalidCut(
            "the database does not record the times of commits (track_commit_timestamp is off), so a moment "
            "cannot be given as a time: set it and restart the server, or name a cut"
        )
    if at < created:
        raise InvalidCut(f"table {table!r} was made at {text_of(created)}, after {text_of(at)}")
    if (at - clock).total_seconds() > AHEAD_SECONDS_MAX:
        raise InvalidCut(f"the moment {text_of(at)} is in the future: it is {text_of(clock)}")


def _check_replayed(at: datetime, is_standby: bool, replayed_at: datetime | None) -> None:
    """Raises `InvalidCut` if the database is a standby that has not yet replayed all commits up to a time."""
    if is_standby and (replayed_at is None or at >= replayed_at):
        till = "no commit yet" if replayed_at is None else f"the commits till {text_of(replayed_at)}"
        raise InvalidCut(
            f"the moment {text_of(at)} cannot be found here: the database is a standby, which has replayed "
            f"{till}: give an earlier time, or a cut's name, or ask the primary"
        )


def _rows(context: TableContext, statement: str, conn: Any = None, **values: Any) -> list[Any]:
    """Returns the rows of one statement, in one round trip."""
    own, query = context.store.own, _QUERIES[statement].including(committed_at=_QUERIES["committed_at"])
    if conn is None:
        return own.looked_up(query, values, operation="find a moment")
    return own.rows_in(conn, query, values)


def record_cut(context: TableContext, name: str | None = None, *, kept_seconds: float | None = None) -> Cut:
    """Records a cut like `History.record_cut`.

    A cut without a name is kept for `kept_seconds`, by default the table's `history_retention_seconds`.
    """
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
    """Records a cut if the last one is old enough and the table has changed since; returns the cut or None.

    If it records one, it first deletes expired cuts.
    """
    query = _QUERIES["is_due"].including(is_old=IS_OLD)
    rows = context.store.own.rows(query, {"interval_seconds": interval_seconds}, operation="cuts")
    if not rows or not rows[0][0]:
        return None
    _run(context, "forget", {})
    # such a cut keeps files no longer than the table keeps files without references
    return record_cut(context, kept_seconds=context.properties.files_kept_seconds)


def cuts(context: TableContext) -> Iterator[Cut]:
    """Yields all cuts of a table, the oldest first, with one page of them in memory.

    Raises `TableNotFound`.
    """
    after = 0
    while page := _run(context, "cuts", {"after": after, "limit": PAGE_CUTS}):
        yield from map(_cut, page)
        after = page[-1][0]
    if after == 0:
        oldest(context)  # raises if the table was dropped


def cut(context: TableContext, which: Cut | str | int) -> Cut:
    """Returns a cut as the database has it; it is given as a cut, a name or an id.

    Raises `InvalidCut`.
    """
    return Ends(context, which).look_up()[0].cut(context)


def drop_cut(context: TableContext, which: Cut | str | int) -> None:
    """Deletes a cut. The files that only this cut kept are then collected. Raises `InvalidCut`."""
    dropped = cut(context, which)
    if not _run(context, "drop", {"cut_id": dropped.cut_id})[0][0]:
        raise InvalidCut(
            f"table {context.table.name!r} no longer has the cut {dropped.name or dropped.cut_id!r}"
        )


def compare(context: TableContext, a: When, b: When) -> Literal["before", "equal", "after"]:
    """Returns "before", "equal" or "after", for moment `a` relative to moment `b`.

    Raises `InvalidCut` and `CutExpired`.
    """
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
        raise InvalidCut(f"the name {name!r} of a cut looks like a time; take another name")


def _cut(row: list[Any]) -> Cut:
    cut_id, name, recorded_at, epoch, table_id = row
    return Cut(cut_id, name, recorded_at.astimezone(UTC), epoch, table_id)


def _run(context: TableContext, name: str, values: dict[str, Any]) -> list[Any]:
    return context.store.own.rows(_QUERIES[name], values, operation="cuts")


@dataclass(frozen=True, slots=True)
class RestoreReport:
    """The report of a restore to the moment `at`, or of a dry run.

    - `references_removed`, `references_restored`: the numbers of references removed and added again.
    - `rows_removed`, `rows_restored`: the rows of these references.
    - `exact`: False if some of these numbers of rows are estimates.
    - `deletions`: the number of deletions that were undone or made pending again.
    """

    at: datetime
    references_removed: int
    references_restored: int
    rows_removed: int
    rows_restored: int
    exact: bool
    deletions: int = 0


def restore(context: TableContext, to: When, *, dry_run: bool = False) -> RestoreReport:
    """Gives the table the rows that it had at a moment; returns a report.

    The table's compaction jobs are given up. Raises `InvalidCut`, `CutExpired` or `TableBusy`, and then
    changes nothing. Also raises `NotWhole`, if partitions were merged since and had only a part of a file's
    rows.
    """
    position = position_of(context, to)

    def work(conn: Any) -> RestoreReport:
        if not dry_run and not lock_history(conn, context.table.table_id):
            raise TableNotFound.gone(context.table.name)
        # checked under the lock of the history, so collection cannot delete files after the check
        check_since(context, position.at, conn=conn)
        if not dry_run:
            # rows that writers add meanwhile would stay, and would be missing in the report
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
    removed, rows_removed, exact = store.added_since(position.snapshot, conn)
    then = context.partitions.at(position.epoch, conn, made_at=position.made_at)
    now = context.partitions.tree_in(conn)
    back = placed(_removed_since(context, position, conn), then, now)
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
        sum(each.row_count for each in back),
        exact and not any(each.count_approximate for each in back),
        deletions,
    )


def _removed_since(context: TableContext, position: Position, conn: Any) -> list[FileReference]:
    """Returns the references that were removed since a moment.

    Raises `CutExpired` if rows of these references were erased since, or are being erased.
    """
    values = {"snapshot": position.snapshot}
    if context.store.own.rows_in(conn, _QUERIES["erased_since"], values) != [(False,)]:
        raise expired_by_erasure(context, position.at) or CutExpired(
            f"rows of table {context.table.name!r} of {position.at} are being erased",
            table=context.table.name,
        )
    return context.store.removed_since(position.snapshot, conn)


def placed(
    references: Iterable[FileReference], then: PartitionTree, now: PartitionTree
) -> list[FileReference]:
    """Returns references of the tree `then`, with their partitions replaced by those of the tree `now`.

    References of a file to merged partitions become one reference. Raises `NotWhole` if this reference would
    show rows that were not in the table.
    """
    result: list[FileReference] = []
    moved: dict[tuple[str, int], list[FileReference]] = defaultdict(list)
    for reference in references:
        if now.node(reference.partition_id) is not None:
            result.append(reference)
        else:
            region = then[reference.partition_id].region
            moved[reference.filename, _enclosing(now, region)].append(reference)
    for (_, node), group in moved.items():
        if not all(each.only_contains_data_for_this_partition for each in group):
            _check_whole(then, now, node, group)
        result.append(
            replace(
                group[0],
                partition_id=now.node_id(node),
                row_count=sum(each.row_count for each in group),
                count_approximate=any(each.count_approximate for each in group),
                only_contains_data_for_this_partition=group[0].only_contains_data_for_this_partition,
            )
        )
    return result


def _check_whole(then: PartitionTree, now: PartitionTree, node: int, group: list[FileReference]) -> None:
    """Raises `NotWhole` unless the references of a file covered the whole region of a partition of `now`."""
    region = now.region_of(node)
    place = _enclosing(then, region)
    if then.region_of(place) != region or not _covered(then, place, {each.partition_id for each in group}):
        raise NotWhole(
            f"the rows cannot be restored: partition {group[0].partition_id!r} was merged since, and its "
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
    """Returns the node of the smallest partition that contains a region."""
    node = tree.root_node
    while True:
        children = tree.children(node) or ()
        inner = next((child for child in children if region.lies_in(tree.region_of(child))), None)
        if inner is None:
            return node
        node = inner
