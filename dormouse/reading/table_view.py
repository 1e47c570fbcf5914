"""The plans of queries, made from the partition tree in memory and the references in the database.

Both are of one moment. The known tree gives the partitions whose references are needed. One statement then
returns their references, a snapshot, and the table's epoch. If the tree's epoch differs, the tree is brought
to that epoch and the statement runs again. So a plan takes one round trip, and misses nothing that was
committed before it began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from dormouse.errors import (
    InvalidQuery,
    QueryOvertaken,
)
from dormouse.model.cut import Position, When
from dormouse.model.partition_tree import PartitionTree
from dormouse.model.region import KeyRanges, encode_value, number_of_value
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.postgres import Isolation, run_lookup, run_lookups, run_transaction
from dormouse.postgres.queries import Call
from dormouse.reading.checked_files import FileGone, keeping_columns, on_current
from dormouse.reading.known_plans import Knowledge, known_plan, to_inlined
from dormouse.reading.planner import (
    Page,
    PlanSummary,
    QueryPlan,
    Scan,
    added_up,
    first_page,
    plan,
    whole_page,
)
from dormouse.reading.table_moments import at_moment, gone_of_moment
from dormouse.reading.where import Where, deletions_of, question
from dormouse.state.context import TableContext
from dormouse.state.files.facts import KeyBounds, PlannedRows, References
from dormouse.state.history.ends import check_since

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")
OPERATION = "plan a query"
PAGE_LEAVES = 64
"""The number of leaves in a plan's first page.

Each further page has PAGE_GROWTH times as many, up to PAGE_LEAVES_MAX.
"""
PAGE_LEAVES_MAX = 2_048
PAGE_GROWTH = 4
MANY_LEAVES = 10_000
"""The number of leaves above which the files of a statement are counted before it is planned."""
EPOCHS_CHASED_MAX = 5
"""The most epochs that may begin while a plan is made.

If more begin, the plan is made in a repeatable-read transaction.
"""
CUT_SHARE_MAX = 0.5
"""The share of gc_delay_seconds during which further pages are planned as of the first page's snapshot.

Garbage collection must not delete the files of these pages before they are read.
"""


class _PlannedPage(NamedTuple):
    """A page, its plan, and the snapshot that the plan sees."""

    page: Page
    plan: QueryPlan
    snapshot: str

    @staticmethod
    def of(
        context: TableContext, page: Page, ranges: KeyRanges, rows: PlannedRows, snapshot: str
    ) -> _PlannedPage:
        deletions = deletions_of(page.tree.schema, rows.deletions, ranges, context.objects)
        made = plan(page, rows.references, deletions)
        inlined = rows.inlined
        if inlined is None:
            inlined = References((to_inlined(rows.references),))
        if inlined:
            made = replace(made, inlined=inlined, ranges=ranges)
        return _PlannedPage(page, made, snapshot)


class Request(NamedTuple):
    """A page, and the statement that plans it."""

    page: Page
    known: Knowledge
    call: Call


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The first page of a query, which is planned by a statement that the caller sends with its own.

    `rows` are those of the request's statement.
    """

    request: Request
    rows: Sequence[Sequence[Any]] = ()

    @staticmethod
    def of(context: TableContext, ranges: KeyRanges) -> Foreseen | None:
        """Returns what has to be asked for some ranges; None if this process has no tree of the table."""
        request = _View(context).request(ranges, PAGE_LEAVES)
        return None if request is None else Foreseen(request)


@dataclass(slots=True)
class Moment:
    """The snapshot that a query reads, and the columns that it had in its first plan.

    `schema` has these columns, and also knows later versions of them, with which files may have been written
    since.
    """

    schema: Schema
    snapshot: str | None = None


def plan_query(
    context: TableContext,
    ranges: KeyRanges,
    moment: Moment | None = None,
    *,
    filtered_again: bool = False,
    begun: bool = False,
    at: Position | None = None,
    descending: bool = False,
    leaves_max: int | None = None,
    bundles: bool = False,
    deletions_before: int | None = None,
    ahead: Foreseen | None = None,
) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups of a query's plan. The first page is planned at once, the others when reached.

    The first page has about `leaves_max` leaves, by default PAGE_LEAVES. With `descending`, the last groups
    come first.

    The whole plan has the rows of the moment at which it began, or of the position `at`. Files may be
    collected meanwhile: once half of the table's `gc_delay_seconds` has passed, the remaining pages are
    planned as of a later moment, if that moment has the same rows.

    A query that plans again passes its `moment`. A query that has `begun` keeps its columns and properties.
    With `bundles`, scans may be of bundles of inlined files, which only this process can read. At a
    position, only deletions with numbers below `deletions_before` apply. `ahead` has the answer for these
    ranges; it is used if its tree is still the newest.

    Raises:

    - `TableNotFound`,
    - `SchemaMoved` when the columns or the name changed, or the properties by which rows are merged and
      hidden, unless `begun`,
    - `QueryOvertaken` when a query plans again and the rows changed or a column was dropped,
    - `FileGone` from the iterator.
    """
    view = _View(
        context,
        filtered_again=filtered_again,
        begun=begun,
        at=at,
        moment=moment,
        descending=descending,
        deletions_before=deletions_before,
    )
    leaves_max = leaves_max or PAGE_LEAVES
    answered = None if ahead is None else view.answered(ahead.request, ranges, ahead.rows)
    first = answered or view.first(ranges, leaves_max)
    if moment is not None and at is None:
        if moment.snapshot is not None and not view.has_same_rows(ranges, moment.snapshot):
            raise QueryOvertaken(
                f"files of table {context.table.name!r} were collected while the query ran, and rows were "
                "added or removed since it began, or may have been; run it again, or raise the table's "
                "property gc_delay_seconds"
            )
        moment.snapshot = moment.snapshot or first.snapshot
    step = -1 if descending else 1
    return (
        group
        for planned in view.pages(first, leaves_max)
        for group in _readable(context, planned.plan, bundles).groups[::step]
    )


def differing_groups(
    context: TableContext, ranges: KeyRanges, before: Position, after: Position
) -> Iterator[tuple[list[Scan], list[Scan]]]:
    """Yields for each group of leaves its scans at two moments, where these differ, in key order.

    Both moments must be in the same epoch. The iterator raises `FileGone`.
    """
    # both moments have one tree, so their pages match
    views = [_View(context, at=position) for position in (before, after)]
    pages = [view.pages(view.first(ranges, PAGE_LEAVES)) for view in views]
    for both in zip(*pages, strict=True):
        plans = [_readable(context, page.plan) for page in both]
        groups = [dict(zip(made.numbers, made.groups, strict=True)) for made in plans]
        for number in sorted({number for side in groups for number in side}):
            one, other = (list(side.get(number, ())) for side in groups)
            if one != other:
                yield one, other


def plan_tables(
    wanted: Sequence[tuple[TableContext, KeyRanges]],
    *,
    files_max: int | None = None,
    filtered_again: bool = False,
    begun: bool = False,
    at: Sequence[Position] | None = None,
    bundles: bool = False,
) -> list[QueryPlan]:
    """Returns a plan for each of several tables of one instance; each plan has one group.

    All plans are of one moment, or each is of its own position in `at`. With `begun`, no error is raised if
    properties have changed. For `bundles`, see `plan_query`. Raises the errors of `plan_query`. Also raises
    `InvalidQuery`, before planning, if a table with many leaves has more than `files_max` files in them.
    """
    if files_max is not None:
        for (context, ranges), position in zip(wanted, at or repeat(None), strict=False):
            check_files(context, ranges, files_max, position)
    if at is not None:
        plans = [
            _View(context, filtered_again=filtered_again, at=position).first(ranges, None).plan
            for (context, ranges), position in zip(wanted, at, strict=True)
        ]
    elif len(wanted) == 1:
        [(context, ranges)] = wanted
        plans = [_View(context, filtered_again=filtered_again, begun=begun).now(ranges, None).plan]
    elif wanted:
        plans = _planned_together(wanted, filtered_again=filtered_again, begun=begun)
    else:
        plans = []
    return [_readable(context, made, bundles) for (context, _), made in zip(wanted, plans, strict=True)]


def _readable(context: TableContext, made: QueryPlan, bundles: bool = False) -> QueryPlan:
    """Returns the plan, after the content of its inlined files was read, with bundles of them if wanted."""
    if not made.inlined:
        return made
    if bundles:
        from dormouse.reading.bundles import bundled  # plans import no pyarrow

        groups = tuple(bundled(context, group, made.inlined, made.ranges) for group in made.groups)
        made = replace(made, groups=groups)
    context.inlined.fetch(scan.filename for group in made.groups for scan in group)
    return made


def _planned_together(
    wanted: Sequence[tuple[TableContext, KeyRanges]], *, filtered_again: bool, begun: bool
) -> list[QueryPlan]:
    """Returns the plans of several tables, made in one snapshot."""

    views = [
        (_View(context, filtered_again=filtered_again, begun=begun), ranges) for context, ranges in wanted
    ]
    found = _at_once(wanted[0][0], views)
    if found is not None:
        return found

    def work(conn: psycopg.Connection[Any]) -> list[QueryPlan]:
        return [view.within(conn, ranges, None).plan for view, ranges in views]

    return _in_one_snapshot(wanted[0][0], work)


def check_files(context: TableContext, ranges: KeyRanges, files_max: int, at: Position | None = None) -> None:
    """Raises `InvalidQuery` if a query of many leaves would read more than `files_max` files.

    It counts only the files of the first leaves, now or at a position.
    """
    view = _View(context, at=at)
    tree = view.tree(ranges)
    if tree.leaf_count <= MANY_LEAVES:
        return
    page = first_page(tree, ranges, MANY_LEAVES)
    if page.rest is None:
        return
    if at is None:
        files = context.store.count_files_in(page.partition_ids, 2 * files_max)
    else:
        files = view.first(ranges, MANY_LEAVES).plan.summary.files
    if files > files_max:
        raise InvalidQuery(
            f"the statement would read more than {files_max:,} files of table {context.table.name!r}: narrow "
            "its row keys, or compact the table"
        )


def explain(context: TableContext, where: Where = None, as_of: When | None = None) -> PlanSummary:
    """Returns the numbers of partitions, files and bytes that a query would read."""
    if as_of is None:
        return on_current(context, lambda now: summary(now, question(now.schema, where, None, None).ranges))
    then, at = at_moment(context, as_of)
    return summary(then, question(then.schema, where, None, None).ranges, at)


def summary(context: TableContext, ranges: KeyRanges, at: Position | None = None) -> PlanSummary:
    """Returns what a query of some ranges would read, with only one page of the plan in memory at a time."""
    # the summary does not depend on the properties that merge and hide rows
    view = _View(context, begun=True, at=at, reads=False)
    leaves = context.partitions.tree().leaf_count
    if at is None and not ranges and leaves > PAGE_LEAVES_MAX:
        # all of a large table: the running totals have the answer
        totals = context.store.totals.read()
        return PlanSummary(leaves, leaves, totals.files, 0, totals.byte_count)
    first = view.first(ranges, PAGE_LEAVES_MAX, whole_tree=True)
    return added_up(planned.plan for planned in view.pages(first, PAGE_LEAVES_MAX))


class _View:
    """The state of a table that all plans of one query see."""

    def __init__(
        self,
        context: TableContext,
        *,
        filtered_again: bool = False,
        begun: bool = False,
        at: Position | None = None,
        moment: Moment | None = None,
        descending: bool = False,
        reads: bool = True,
        deletions_before: int | None = None,
    ) -> None:
        self._context = context
        self._deletions_before = deletions_before
        self._descending = descending
        self._reads = reads
        self._moment = moment
        self._at = at
        self._filtered_again = filtered_again
        self._has_begun = begun or (moment is not None and moment.snapshot is not None)
        self._is_further = False
        self._store = context.store
        self._partitions = context.partitions
        self._seen_at = time.monotonic()

    def first(self, ranges: KeyRanges, leaves_max: int | None, *, whole_tree: bool = False) -> _PlannedPage:
        """Returns the first page as of the view's moment.

        Without `leaves_max`, the page has all leaves in one group.
        """
        if self._at is None:
            return self.now(ranges, leaves_max, whole_tree=whole_tree)
        return self._as_of(self.tree(ranges), self._at.snapshot, ranges, leaves_max)

    def now(self, ranges: KeyRanges, leaves_max: int | None, *, whole_tree: bool = False) -> _PlannedPage:
        """Returns the first page as of now.

        Without `leaves_max`, the page has all leaves in one group.
        """
        self._seen_at = time.monotonic()
        tree = self.tree(ranges, whole=whole_tree)
        for _ in range(EPOCHS_CHASED_MAX):
            page = self._page(tree, ranges, leaves_max)
            ids, bounds = page.partition_ids, self._bounds(ranges)
            known = known_plan(self._context, ids, ranges) if self._reads else None
            request = known.request if known else None
            epoch, made_at, version, is_shown_so, snapshot, rows = self._alone(
                partial(self._store.planned_on, ids, bounds, known=request)
            )
            rows = known.completed(snapshot, rows) if known else rows
            if _is_of(tree, epoch, made_at):
                self._check_known(version, is_shown_so)
                return _PlannedPage.of(self._context, page, ranges, rows, snapshot)
            # a split committed meanwhile: ask for the new partitions
            tree = self._partitions.at(epoch, made_at=made_at)
        return _in_one_snapshot(self._context, lambda conn: self.within(conn, ranges, leaves_max))

    def within(
        self, conn: psycopg.Connection[Any], ranges: KeyRanges, leaves_max: int | None
    ) -> _PlannedPage:
        """Returns the first page as the REPEATABLE READ transaction of `conn` sees it."""
        known = self._partitions.cached()
        while True:
            tree = self._partitions.tree_in(conn) if known is None else known
            page = self._page(tree, ranges, leaves_max)
            plan = partial(self._store.planned_on, page.partition_ids, self._bounds(ranges), conn)
            epoch, made_at, version, is_shown_so, snapshot, rows = self._store.own.following(plan, conn)
            if known is None or _is_of(tree, epoch, made_at):
                self._check_known(version, is_shown_so)
                return _PlannedPage.of(self._context, page, ranges, rows, snapshot)
            known = None  # the known tree is of another moment than the transaction

    def request(self, ranges: KeyRanges, leaves_max: int | None = None) -> Request | None:
        """Returns the first page of the cached tree, and its statement; None without such a tree.

        Without `leaves_max`, the page has all leaves in one group.
        """
        known = self._partitions.cached()
        if known is None:
            return None
        page = self._page(known, ranges, leaves_max)
        ids = page.partition_ids
        knowledge = known_plan(self._context, ids, ranges)
        return Request(page, knowledge, self._store.plan_call(ids, self._bounds(ranges), knowledge.request))

    def answered(
        self, request: Request, ranges: KeyRanges, rows: Sequence[Sequence[Any]]
    ) -> _PlannedPage | None:
        """Returns the page's plan from the rows of its statement; None if its tree is not the newest."""
        page, found = request.page, self._store.planned_from(rows)
        if found is None or not _is_of(page.tree, found.epoch, found.made_at):
            return None
        self._check_known(found.schema_version, found.is_shown_so)
        completed = request.known.completed(found.snapshot, found.rows)
        return _PlannedPage.of(self._context, page, ranges, completed, found.snapshot)

    def pages(self, planned: _PlannedPage, leaves_max: int = PAGE_LEAVES) -> Iterator[_PlannedPage]:
        """Yields a first page and all further ones."""
        cut_seconds_max = self._context.properties.gc_delay_seconds * CUT_SHARE_MAX
        while True:
            yield planned
            rest = planned.page.rest
            if rest is None:
                return
            leaves_max = min(leaves_max * PAGE_GROWTH, PAGE_LEAVES_MAX)
            self._is_further = True
            # files of an old snapshot may be collected soon: a later snapshot may show the same rows
            is_old = self._at is None and time.monotonic() - self._seen_at > cut_seconds_max
            later = None
            if is_old:
                with suppress(SchemaMoved, QueryOvertaken):  # the columns changed: keep the snapshot
                    later = self.now(rest, leaves_max)
            if later is None or not self.has_same_rows(rest, planned.snapshot):
                later = self._as_of(planned.page.tree, planned.snapshot, rest, leaves_max)
            planned = later

    def has_same_rows(self, ranges: KeyRanges, snapshot: str) -> bool:
        """Returns whether the wanted rows have stayed the same from a snapshot until this call."""
        page = self._page(self._partitions.tree(), ranges, None)
        bounds = self._bounds(ranges)
        is_same, deletions = self._store.has_same_rows(page.partition_ids, bounds, snapshot)
        return is_same and not deletions_of(self._context.schema, deletions, ranges)

    def _as_of(
        self, tree: PartitionTree, snapshot: str, ranges: KeyRanges, leaves_max: int | None
    ) -> _PlannedPage:
        """Returns the first page as a snapshot saw it; the tree must be of the snapshot's epoch."""
        page = self._page(tree, ranges, leaves_max)
        # once the first page is planned, the cut is no longer needed
        remembered = None if self._at is None or self._is_further else self._at.remembered
        since, is_logged, rows = self._alone(
            partial(
                self._store.planned_at,
                page.partition_ids,
                self._bounds(ranges),
                snapshot,
                remembered=remembered,
            )
        )
        if self._at is None and not is_logged:
            raise QueryOvertaken(
                f"table {self._context.table.name!r} no longer has the log of references removed since the "
                "query began: it was cleared or dropped; run the query again, or raise the table's property "
                "history_retention_seconds"
            )
        if self._at is not None and since > number_of_value(self._at.at):
            check_since(self._context, self._at.at)
        for _, filename, *_, is_there in rows.references:
            # compacted after that moment, and collected: only a later plan can do without it
            if not is_there:
                gone = FileGone(filename, self._context.table.name)
                raise gone if self._at is None else gone_of_moment(self._context, self._at, gone)
        before = self._deletions_before
        deletions = [row for row in rows.deletions if before is None or row[0] < before]
        known = PlannedRows([row[:-1] for row in rows.references], deletions)
        return _PlannedPage.of(self._context, page, ranges, known, snapshot)

    def _check_known(self, version: int, is_shown_so: bool) -> None:
        """Raises `SchemaMoved` when columns, properties or name changed, unless the query has begun."""
        has_begun = self._has_begun or self._is_further
        if self._context.schema.knows(version) and (is_shown_so or has_begun):
            return
        if self._moment is None or self._moment.snapshot is None:
            raise SchemaMoved(
                f"columns, properties or name of table {self._context.table.name!r} were changed"
            )
        self._moment.schema = keeping_columns(self._context).schema

    def tree(self, ranges: KeyRanges, *, whole: bool = False) -> PartitionTree:
        """Returns the cached tree, or reads it.

        The first request reads only the part that overlaps the ranges.
        """
        if self._at is not None:
            return self._partitions.at(self._at.epoch, made_at=self._at.made_at)
        cached = self._partitions.cached()
        if cached is not None:
            return cached
        if not whole and not self._partitions.is_requested_again():
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

    def _page(self, tree: PartitionTree, ranges: KeyRanges, leaves_max: int | None) -> Page:
        if leaves_max is None:
            page = whole_page(tree, ranges, in_key_order=False)
        else:
            page = first_page(tree, ranges, leaves_max, descending=self._descending)
        # a leaf may reach beyond the page, whose end a reader that filters again does not know
        is_whole = page.rest is None and not self._is_further
        return replace(page, filtered_again=self._filtered_again and is_whole, is_only=is_whole)

    def _bounds(self, ranges: KeyRanges) -> KeyBounds:
        return key_bounds(self._context.schema, ranges)

    def _alone(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Runs one statement in one round trip."""
        supplier = self._context.supplier
        return self._store.own.following(lambda: run_lookup(supplier, work, operation=OPERATION))


def _is_of(tree: PartitionTree, epoch: int, made_at: int) -> bool:
    """Returns whether a tree is the one of an epoch, which was made at a time in microseconds since 1970."""
    return epoch == tree.epoch and tree.arrays.agrees(epoch, made_at)


def _at_once(context: TableContext, views: Sequence[tuple[_View, KeyRanges]]) -> list[QueryPlan] | None:
    """Returns plans of one moment, made in one round trip; None if that fails or a tree is not the newest."""
    requests = [view.request(ranges) for view, ranges in views]
    calls = [one.call for one in requests if one is not None]
    found = run_lookups(context.supplier, calls) if len(calls) == len(views) else None
    plans = []
    for (view, ranges), one, rows in zip(views, requests, found or (), strict=False):
        planned = None if one is None else view.answered(one, ranges, rows)
        if planned is None:
            return None
        plans.append(planned.plan)
    return plans or None


def _in_one_snapshot(context: TableContext, work: Callable[[psycopg.Connection[Any]], T]) -> T:
    return run_transaction(
        context.supplier, work, isolation=Isolation.REPEATABLE_READ, read_only=True, operation=OPERATION
    )


def key_bounds(schema: Schema, ranges: KeyRanges) -> KeyBounds:
    """Returns encoded lower and upper bounds of each row key, which contain all rows in the ranges."""
    hulls = [(key.type, ranges.enclosing(key.name)) for key in schema.row_keys]
    return KeyBounds(
        [None if hull.min is None else encode_value(kind, hull.min) for kind, hull in hulls],
        [None if hull.max is None else encode_value(kind, hull.max) for kind, hull in hulls],
    )
