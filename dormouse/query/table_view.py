"""What queries plan on: the tree in memory, the references in the index, both of one moment.

The tree that is known tells which partitions to ask for. One statement gives their references, the snapshot,
and the epoch that the table is at: if it is another, the tree is brought there and asked again. So a plan
takes one round trip, and misses nothing that was committed before it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from dormouse.context import TableContext
from dormouse.errors import CommitOutcomeUnknown, InvalidQuery
from dormouse.model.partition_tree import PartitionTree
from dormouse.postgres import Isolation, run_statement, run_transaction
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.planner import (
    Page,
    PlannedReference,
    PlanSummary,
    QueryPlan,
    Scan,
    added_up,
    first_page,
    plan,
    whole_page,
)
from dormouse.query.streams import FileGone
from dormouse.query.where import Where, question

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
OPERATION = "plan a query"
PAGE_LEAVES = 64
"""Of a plan's first page; of the further ones each has PAGE_GROWTH times as many, up to PAGE_LEAVES_MAX."""
PAGE_LEAVES_MAX = 2_048
PAGE_GROWTH = 4
MANY_LEAVES = 10_000
"""A statement that reads more may have far too many files to be planned whole."""
EPOCHS_CHASED_MAX = 5
"""Epochs that pass while a plan is made; then it is made in a transaction that sees only one."""
CUT_SHARE_MAX = 0.5
"""Of gc_delay_seconds: how old the snapshot of later pages may get, as their files are still to be read."""


@dataclass(frozen=True, slots=True)
class _Page:
    """A plan of a part of what is wanted, the rest, and the moment that it sees."""

    plan: QueryPlan
    rest: KeyRanges | None
    tree: PartitionTree
    snapshot: str


class PagedPlan:
    """A plan that is made as it is read: `groups` as in a `QueryPlan`, to be iterated once."""

    def __init__(self, groups: Iterator[tuple[Scan, ...]]) -> None:
        self.groups = groups


def plan_query(context: TableContext, ranges: KeyRanges) -> PagedPlan:
    """A plan of a query; its first leaves are planned now, the others when they are come to.

    All of it sees the moment at which it began for half of the table's `gc_delay_seconds`; then what is left
    is planned as of a later moment, since files may be collected. Raises `TableNotFound`; its groups also
    `FileGone`.
    """
    view = _View(context)
    page = view.now(ranges, PAGE_LEAVES)
    return PagedPlan(group for one in view.pages(page) for group in one.plan.groups)


def plan_tables(
    wanted: Sequence[tuple[TableContext, KeyRanges]], *, files_max: int | None = None
) -> list[QueryPlan]:
    """A plan in one group for each table of one instance; all of them see the same moment.

    `InvalidQuery`, at once, when many leaves of a table have more than `files_max` files.
    """
    if files_max is not None:
        for context, ranges in wanted:
            _View(context).check_files(ranges, files_max)
    if len(wanted) == 1:
        [(context, ranges)] = wanted
        return [_View(context).now(ranges, None).plan]
    if not wanted:
        return []

    def work(conn: psycopg.Connection[Any]) -> list[QueryPlan]:
        views = [(_View(context), ranges) for context, ranges in wanted]
        return [view.within(conn, ranges, None).plan for view, ranges in views]

    return _in_one_snapshot(wanted[0][0], work)


def explain(context: TableContext, where: Where = None) -> PlanSummary:
    """What a query would read."""
    return summary(context, question(context.schema, where, None, None).ranges)


def summary(context: TableContext, ranges: KeyRanges) -> PlanSummary:
    """What a query of some ranges would read; in memory it has a page of the plan at a time."""
    view = _View(context)
    leaves = context.partitions.tree().leaf_count
    if not ranges and leaves > PAGE_LEAVES_MAX:
        # all of a large table: its totals are known
        counts = context.store.counts()
        return PlanSummary(leaves, leaves, counts["files"], 0, counts["byte_count"])
    first = view.now(ranges, PAGE_LEAVES_MAX, whole_tree=True)
    return added_up(page.plan for page in view.pages(first, PAGE_LEAVES_MAX))


class _View:
    """One table as its plans see it."""

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._store = context.store
        self._partitions = context.partitions
        self._seen_at = time.monotonic()

    def check_files(self, ranges: KeyRanges, files_max: int) -> None:
        """`InvalidQuery` when the first of many leaves have too many files already."""
        page = _asked(self._tree(ranges, whole=False), ranges, MANY_LEAVES)
        if page.page.rest is None:
            return
        if self._store.count_files_in(page.partition_ids, 2 * files_max) > files_max:
            name = self._context.table.name
            raise InvalidQuery(
                f"the statement would read more than {files_max:,} files of table {name!r}: narrow its row "
                "keys, or compact the table"
            )

    def now(
        self,
        ranges: KeyRanges,
        leaves_max: int | None,
        *,
        whole_tree: bool = False,
    ) -> _Page:
        """The first page of what is wanted, as it is now; without `leaves_max` all, as one group."""
        self._seen_at = time.monotonic()
        tree = self._tree(ranges, whole=whole_tree)
        for _ in range(EPOCHS_CHASED_MAX):
            page = _asked(tree, ranges, leaves_max)
            epoch, made_at, snapshot, rows = self._alone(partial(self._store.planned_on, page.partition_ids))
            if epoch == tree.epoch and tree.arrays.agrees(epoch, made_at):
                return page.planned(rows, snapshot)
            tree = self._partitions.at(epoch, made_at=made_at)
        return _in_one_snapshot(self._context, lambda conn: self.within(conn, ranges, leaves_max))

    def within(self, conn: psycopg.Connection[Any], ranges: KeyRanges, leaves_max: int | None) -> _Page:
        """As `now`, as a REPEATABLE READ transaction sees it."""
        page = _asked(self._partitions.tree_in(conn), ranges, leaves_max)
        found = self._store.following(lambda: self._store.planned_on(page.partition_ids, conn), conn)
        _, _, snapshot, rows = found
        return page.planned(rows, snapshot)

    def pages(self, page: _Page, leaves_max: int = PAGE_LEAVES) -> Iterator[_Page]:
        """A first page and all further ones."""
        cut_seconds_max = self._context.properties.gc_delay_seconds * CUT_SHARE_MAX
        while True:
            yield page
            if page.rest is None:
                return
            leaves_max = min(leaves_max * PAGE_GROWTH, PAGE_LEAVES_MAX)
            is_old = time.monotonic() - self._seen_at > cut_seconds_max
            page = self.now(page.rest, leaves_max) if is_old else self._later(page, page.rest, leaves_max)

    def _later(self, before: _Page, ranges: KeyRanges, leaves_max: int) -> _Page:
        """The first page of what is left, as of the moment that the page before saw."""
        page = _asked(before.tree, ranges, leaves_max)
        rows = self._alone(partial(self._store.planned_at, page.partition_ids, before.snapshot))
        for row in rows:
            if not row[-1]:
                raise FileGone(row[1])
        return page.planned([row[:-1] for row in rows], before.snapshot)

    def _tree(self, ranges: KeyRanges, *, whole: bool) -> PartitionTree:
        """What is known of the tree; who asks once reads only the part that has the ranges."""
        cached = self._partitions.cached()
        if cached is not None:
            return cached
        if not whole and not self._partitions.is_asked_again():
            hull = {name: ranges.enclosing(name) for name in ranges}
            found = run_transaction(
                self._context.supplier,
                lambda conn: self._partitions.walk(conn, hull),
                read_only=True,
                operation=OPERATION,
            )
            if found is not None:
                return found
        return self._partitions.tree()

    def _alone(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """One statement in one round trip."""
        supplier = self._context.supplier

        def once() -> T:
            try:
                return run_statement(supplier, work, operation=OPERATION)
            except CommitOutcomeUnknown:
                # it only reads: whatever became of it, it can be asked again
                return run_transaction(supplier, work, read_only=True, operation=OPERATION)

        return self._store.following(once)


@dataclass(frozen=True, slots=True)
class _Asked:
    """A page before its references are known."""

    tree: PartitionTree
    page: Page
    partition_ids: list[str]
    in_key_order: bool

    def planned(self, rows: Iterable[Sequence[Any]], snapshot: str) -> _Page:
        references = map(PlannedReference._make, rows)
        made = plan(self.tree, references, self.page, in_key_order=self.in_key_order)
        return _Page(made, self.page.rest, self.tree, snapshot)


def _asked(tree: PartitionTree, ranges: KeyRanges, leaves_max: int | None) -> _Asked:
    page = whole_page(tree, ranges) if leaves_max is None else first_page(tree, ranges, leaves_max)
    return _Asked(tree, page, page.partition_ids(tree), in_key_order=leaves_max is not None)


def _in_one_snapshot(context: TableContext, work: Callable[[psycopg.Connection[Any]], T]) -> T:
    return run_transaction(
        context.supplier, work, isolation=Isolation.REPEATABLE_READ, read_only=True, operation=OPERATION
    )
