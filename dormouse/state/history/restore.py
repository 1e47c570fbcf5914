"""A table's rows put back to what they were at a moment, in one commit; its partitions stay as they are.

References that came since go, and those that went since come back: to their own partition where it is one
still; else, after merges, to the smallest partition of now that has all of it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from dormouse.errors import CutExpired, NotWhole, TableNotFound
from dormouse.model.cut import Position, When
from dormouse.model.file_reference import FileReference
from dormouse.model.partition_tree import PartitionTree
from dormouse.model.region import Region
from dormouse.postgres.limits import LONG
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_alone, run_transaction
from dormouse.state.context import TableContext
from dormouse.state.history.ends import check_since
from dormouse.state.history.moments import expired_by_erasure, position_of

_QUERIES = load(__package__ or "", "restore")


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
        lock = _QUERIES["lock"].on()
        if not dry_run and not conn.execute(lock, {"table_id": context.table.table_id}).fetchall():
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
    values = {"table_id": context.table.table_id, "snapshot": position.snapshot}
    if conn.execute(context.store.own.on(_QUERIES["erased_since"]), values).fetchall() != [(False,)]:
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
        inner = next((child for child in children if _has(tree.region_of(child), region)), None)
        if inner is None:
            return node
        node = inner


def _has(outer: Region, inner: Region) -> bool:
    return all(item.intersect(inner.range(name)) == inner.range(name) for name, item in outer.items())
