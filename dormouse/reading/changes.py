"""A stream of the rows that were added to a table and removed from it between two moments.

Files are read as they were written.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, groupby
from operator import attrgetter
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, ExecutionPlan, Expr, SessionContext, functions, literal

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.datafusion_session import column, key_order, reshaped
from dormouse.data.transform import Transform
from dormouse.errors import InvalidCut, InvalidInput, InvalidQuery
from dormouse.model.cut import Position
from dormouse.model.loops import portions
from dormouse.model.region import KeyRanges, united
from dormouse.model.schema import Schema
from dormouse.model.table import is_keyed
from dormouse.reading.checked_files import named_failures
from dormouse.reading.keyed_changes import KeyedChanges
from dormouse.reading.planner import Scan
from dormouse.reading.row_filter import is_of, rendered
from dormouse.reading.scan_session import (
    DATAFUSION,
    FILES_A_SCAN,
    executed,
    key_session,
    planned,
    rows,
    stored_rows,
)
from dormouse.reading.streams import Interruption, batches_ahead
from dormouse.reading.table_moments import milliseconds_at, reading_at
from dormouse.reading.table_view import differing_groups, plan_query
from dormouse.reading.where import deletions_of, question
from dormouse.state.context import TableContext
from dormouse.state.history.changes import ChangedFile, pages_between
from dormouse.state.history.consumers import Consumers, ConsumerState
from dormouse.state.history.moments import now
from dormouse.state.history.retention import PastDeletion, PastEvent, PastRestore, events_between, touched

# The rows that a restore changed: the differences between the moments just before and just after it.

COUNT = "_change"
"""The column with the number of rows that have these values and were added; negative for removed rows.

No table whose changes are read has a column of this name.
"""
BATCH_ROWS = 8_192


class Restored:
    """The rows that one restore of a table removed or brought back.

    Rows that the table's filter hides are left out. If the table merges rows of equal key, the merged rows
    are compared. Rows are read with the columns that the table had at the restore, and returned with those of
    the context.
    """

    def __init__(self, context: TableContext, past: PastRestore) -> None:
        self._schema = context.schema
        self._then = context.as_of(past.before)
        self._transform = Transform.parse(self._then.schema, self._then.properties)
        self._past = past
        self._now_ms = milliseconds_at(past.before)

    def groups(self) -> Iterator[tuple[list[Scan], list[Scan]]]:
        """Yields for groups of leaves the scans just before and just after the restore, where they differ.

        Scans that are equal before and after are left out, unless the table merges rows.
        """
        ranges = self._ranges()
        if ranges is None:
            return
        past = self._past
        for before, after in differing_groups(self._then, ranges, past.before, past.after):
            if self._transform.aggregates:
                # a row of one side may be merged from rows that both sides have
                yield before, after
            else:
                same = set(before).intersection(after)
                yield [one for one in before if one not in same], [one for one in after if one not in same]

    def frame(self, ctx: SessionContext, before: Sequence[Scan], after: Sequence[Scan]) -> DataFrame:
        """Returns the rows that occur more often on one side, in key order, with the column `COUNT`.

        Each row is returned once. `COUNT` is the number of times that the restore added it; negative if
        removed.
        """
        schema = self._schema
        sides = [self._rows(ctx, scans, sign) for scans, sign in ((before, -1), (after, 1)) if scans]
        keys = key_order(schema.key_names)
        if len(sides) == 1:
            return sides[0].sort(*keys)
        count: list[Expr] = [functions.sum(column(COUNT)).alias(COUNT)]
        # the input is sorted by the keys, so the aggregation holds only the rows of one key in memory
        found = sides[0].union(sides[1]).sort(*keys).aggregate([column(name) for name in schema.names], count)
        return found.filter(column(COUNT) != literal(0))

    def _rows(self, ctx: SessionContext, scans: Sequence[Scan], sign: int) -> DataFrame:
        found = rows(ctx, self._then.objects, self._transform, scans, self._now_ms)
        # dropped columns are removed before counting, so that rows that differ only by them are equal
        found = reshaped(found, self._then.schema, self._schema)
        return found.with_column(COUNT, literal(pa.scalar(sign, pa.int64())))

    def _ranges(self) -> KeyRanges | None:
        """Returns ranges around all rows that the restore may have changed; None if there are none."""
        partition_ids, conditions = touched(self._then, self._past)
        parts = [deletion.ranges for deletion in deletions_of(self._then.schema, conditions)]
        if partition_ids:
            tree = self._then.partitions.at(self._past.before.epoch)
            regions = (tree[partition_id].region for partition_id in partition_ids)
            parts += map(KeyRanges.of, regions)
        return united(parts) if parts else None


def one_each(batch: pa.RecordBatch, counts: pa.Array) -> Iterator[pa.RecordBatch]:
    """Yields each row as many times as the absolute value of its count."""
    ends = np.cumsum(pc.abs(counts).to_numpy(zero_copy_only=False))
    total = int(ends[-1]) if len(ends) else 0
    if total == len(ends):
        yield batch
        return
    for start in range(0, total, BATCH_ROWS):
        places = np.arange(start, min(start + BATCH_ROWS, total))
        yield batch.take(pa.array(np.searchsorted(ends, places, side="right")))


CHANGE = COUNT
"""The column with the kind of a change: "insert", "upsert", or "delete"."""
INSERT, DELETE = "insert", "delete"
_Pages: TypeAlias = Iterator[list[ChangedFile]]


@dataclass(frozen=True, slots=True)
class Near:
    """A limit of changes to rows with keys in some ranges, and to some of the added files if these are known.

    More rows of the files and of restores may be read. In a keyed table, each key that was touched since is a
    change, even if its row is as before: a reader in between may have seen another one.
    """

    ranges: KeyRanges = field(default_factory=KeyRanges)
    files: frozenset[str] | None = None

    def pages(self, pages: _Pages) -> _Pages:
        files = self.files
        if files is None:
            return pages
        return ([one for one in page if one.filename in files] for page in pages)


def changes(
    context: TableContext,
    after: Position,
    till: Position,
    columns: Sequence[str] | None = None,
    *,
    interruption: Interruption | None = None,
    at_end: Callable[[], object] = lambda: None,
    as_known: bool = False,
    near: Near | None = None,
) -> pa.RecordBatchReader:
    """Returns the rows ingested after one moment and up to another, each once, as they were ingested.

    Also returns the rows that deletions removed, as they were just before, and the rows that a restore
    removed or brought back. A reader that applies all changes in order gets the rows of the later moment. For
    a keyed table, returns each key whose newest row changed, once: "upsert" with that row, or "delete" with
    its key.

    The columns are the wanted ones of the table at the later moment, and `_change`. With `as_known` they are
    the context's columns instead. Between two deletions or restores, rows are in no particular order.
    `at_end` is called after the last row. `near` limits the rows.

    Raises `InvalidQuery`, and the errors of `pages_between` and `events_between`. While it is read, raises
    `CutExpired` when a file is collected meanwhile, `ObjectNotFound` for a lost file, and `ObjectDamaged` for
    a file whose content changed.
    """
    context = context if as_known else context.as_of(till)
    schema = columns_of_changes(context, columns)
    names = schema.names[:-1]
    interruption = interruption or Interruption()
    # errors about what cannot be read are raised here, before the first row
    pages, events = pages_between(context, after, till), events_between(context, after, till)
    touched, near = near is not None, near or Near()
    pages = near.pages(pages)
    if is_keyed(context.properties):
        keyed = KeyedChanges(context, after, till, interruption, schema, near.ranges, touched)
        rows = _of_keys(keyed, pages, events, near.ranges)
    else:
        steps = _steps(pages, events)
        rows = _Reading(context, names, schema, after, interruption, near.ranges).rows(steps)
    found = batches_ahead(rows, interruption.set)
    return pa.RecordBatchReader.from_batches(schema, _followed(found, at_end))


@dataclass(frozen=True, slots=True)
class ChangesPart:
    """A part of the changes between two moments, for one task.

    It has the changes of some added files, or of one deletion or restore, or all changes.
    """

    after: Position
    till: Position
    columns: tuple[str, ...] | None
    only: tuple[ChangedFile, ...] | PastEvent | None
    as_known: bool = False

    def rows(self, context: TableContext) -> Iterator[pa.RecordBatch]:
        """Yields the changes of this part; raises the errors that reading the result of `changes` raises."""
        if self.only is None:
            yield from changes(context, self.after, self.till, self.columns, as_known=self.as_known)
            return
        context, found = context if self.as_known else context.as_of(self.till), Interruption()
        schema = columns_of_changes(context, self.columns)
        reading = _Reading(context, schema.names[:-1], schema, self.after, found)
        one = self.only if isinstance(self.only, PastEvent) else iter([list(self.only)])
        yield from batches_ahead(reading.rows([one]), found.set)


def changes_parts(
    context: TableContext,
    after: Position,
    till: Position,
    columns: tuple[str, ...] | None,
    bytes_max: int,
    *,
    as_known: bool = False,
) -> Iterator[ChangesPart]:
    """Yields the result of `changes` in parts, in order, each of about `bytes_max` bytes of files.

    A deletion or a restore is one part. All changes of a keyed table are one part, since each key is compared
    at both moments. With `as_known`, rows have the context's columns instead of those at the later moment.
    Raises the errors of `changes`.
    """
    context = context if as_known else context.as_of(till)
    made = partial(ChangesPart, after, till, columns, as_known=as_known)
    pages, events = pages_between(context, after, till), events_between(context, after, till)
    if is_keyed(context.properties):
        yield made(None)
        return
    for step in _steps(pages, events):
        if isinstance(step, PastEvent):
            yield made(step)
            continue
        # the references of a file are consecutive
        files = (list(found) for _, found in groupby(chain.from_iterable(step), key=attrgetter("filename")))
        for some in portions(files, lambda found: found[0].byte_count or 0, bytes_max):
            yield made(tuple(chain.from_iterable(some)))


def columns_of_changes(context: TableContext, columns: Sequence[str] | None) -> pa.Schema:
    """Returns the schema of `changes`: the wanted columns and `_change`; raises `InvalidQuery`.

    In the schema of a keyed table, all columns but the row keys may be null, since a deleted key has no
    values.
    """
    if CHANGE in context.schema:
        raise InvalidQuery(
            f"table {context.table.name!r} has a column named {CHANGE!r}, which changes need for themselves"
        )
    named = (
        None if columns is None or isinstance(columns, str) else [name for name in columns if name != CHANGE]
    )
    names = question(context.schema, None, columns if named is None else named, None).columns
    whole, known = arrow_schema(context.schema), context.schema.row_key_names
    fields = [whole.field(name) for name in names]
    if is_keyed(context.properties):
        fields = [field.with_nullable(field.name not in known) for field in fields]
    return pa.schema([*fields, pa.field(CHANGE, pa.string(), nullable=False)])


def _steps(pages: _Pages, events: Sequence[PastEvent]) -> Iterator[_Pages | PastEvent]:
    """Yields the steps in order: the files added before each event, the event, and then all later files.

    `pages` contain all added files. The caller must read each step to its end before the next one.
    """
    coming = _Coming(pages)
    for event in events:
        yield coming.seen_in(event.before.snapshot)
        yield event
    yield coming.rest()


class _Coming:
    """A stream of added files, read once and divided at ascending moments.

    Each moment's snapshot sees all files that the snapshots before it see. A file of a transaction that was
    still running at a moment is kept for later moments. Such files are few, since events wait for all
    transactions that change the table.
    """

    def __init__(self, pages: _Pages) -> None:
        self._pages = pages
        self._late: list[ChangedFile] = []
        self._page: list[ChangedFile] = []

    def seen_in(self, snapshot: str) -> _Pages:
        """Yields the files that this snapshot sees and the snapshot of the call before did not see."""
        _, xmax, running = snapshot.split(":")
        unseen = set(map(int, filter(None, running.split(","))))
        late, self._late = self._late, []
        yield self._seen(late, unseen)
        while True:
            self._page = self._page or next(self._pages, [])
            count = bisect_left(self._page, int(xmax), key=attrgetter("xid"))
            begun, self._page = self._page[:count], self._page[count:]
            yield self._seen(begun, unseen)
            if self._page or not begun:
                return

    def _seen(self, files: list[ChangedFile], unseen: Container[int]) -> list[ChangedFile]:
        self._late += [one for one in files if one.xid in unseen]
        return [one for one in files if one.xid not in unseen]

    def rest(self) -> _Pages:
        yield self._late
        yield self._page
        yield from self._pages


def _followed(batches: Iterator[pa.RecordBatch], at_end: Callable[[], object]) -> Iterator[pa.RecordBatch]:
    yield from batches
    at_end()


def _of_keys(
    keyed: KeyedChanges, pages: Iterable[Sequence[ChangedFile]], events: Sequence[PastEvent], near: KeyRanges
) -> Iterator[pa.RecordBatch]:
    with reading_at(keyed.context, keyed.after):
        scans = chain.from_iterable(_scans_together(page, near) for page in pages)
        yield from keyed.batches(scans, events)


class _Reading:
    def __init__(
        self,
        context: TableContext,
        names: Sequence[str],
        schema: pa.Schema,
        after: Position,
        interruption: Interruption,
        near: KeyRanges | None = None,
    ) -> None:
        self._near = near or KeyRanges()
        self._context = context
        self._names = names
        self._schema = schema
        self._after = after
        self._interruption = interruption
        self._transform = Transform.parse(context.schema, context.properties)
        self._kinds: dict[str, pa.Array] = {}

    def rows(self, steps: Iterable[_Pages | PastEvent]) -> Iterator[pa.RecordBatch]:
        with reading_at(self._context, self._after):
            for step in steps:
                if isinstance(step, PastRestore):
                    yield from self._restored(step)
                elif isinstance(step, PastDeletion):
                    yield from self._deleted(step)
                else:
                    for scans in chain.from_iterable(_scans_together(page, self._near) for page in step):
                        yield from self._rows_of(scans, INSERT, self._context.schema)

    def _deleted(self, past: PastDeletion) -> Iterator[pa.RecordBatch]:
        """Yields the rows that a deletion removed, as they were just before it."""
        then = self._context.as_of(past.before)
        schema = then.schema
        rows = [(past.deletion_id, past.condition)]
        [deletion] = deletions_of(schema, rows, objects=then.objects) or [None]
        has_same_keys = schema.row_key_names == self._context.schema.row_key_names
        near = self._near if has_same_keys else KeyRanges()
        if deletion is None or (ranges := deletion.ranges.intersect(near)).is_empty:
            return
        # the moment may include the deletion's own transaction
        before = deletion.deletion_id
        for scans in plan_query(then, ranges, at=past.before, bundles=True, deletions_before=before):
            yield from self._rows_of(scans, DELETE, schema, rendered(is_of(schema, deletion), DATAFUSION))

    def _restored(self, past: PastRestore) -> Iterator[pa.RecordBatch]:
        """Yields the rows that a restore removed, as they were before it, and those that it brought back."""
        found = Restored(self._context, past)
        for before, after in found.groups():
            # one plan for both sides, which may read different rows of the same file
            plan = partial(self._differing, found, before, after)
            for batch in self._batches([*before, *after], plan, may_search=True):
                for change, counts in ((DELETE, pc.less), (INSERT, pc.greater)):
                    rows = batch.filter(counts(batch[COUNT], 0))
                    for part in one_each(rows.drop_columns(COUNT), rows[COUNT]):
                        yield self._marked(part, change)

    def _differing(self, restored: Restored, before: Sequence[Scan], after: Sequence[Scan]) -> ExecutionPlan:
        frame = restored.frame(key_session(self._context.objects), before, after)
        return frame.select(*map(column, [*self._names, COUNT])).execution_plan()

    def _rows_of(
        self, scans: Sequence[Scan], change: str, schema: Schema, condition: Expr | None = None
    ) -> Iterator[pa.RecordBatch]:
        plan = partial(self._physical, scans, schema, condition)
        for batch in self._batches(scans, plan, may_search=condition is not None):
            yield self._marked(batch, change)

    def _batches(
        self, scans: Sequence[Scan], physical: Callable[[], ExecutionPlan], *, may_search: bool
    ) -> Iterator[pa.RecordBatch]:
        """Runs a plan and yields its batches.

        `may_search` is true if the plan may read many rows for each row that it returns.
        """
        with named_failures(self._context, scans, self._transform):
            plan = planned(self._context, scans, physical, self._interruption)
            yield from executed(self._context, plan, self._interruption, may_search=may_search)

    def _physical(self, scans: Sequence[Scan], then: Schema, condition: Expr | None) -> ExecutionPlan:
        """Returns a plan of the scans' rows that meet the condition; `then` is the schema of both."""
        objects = self._context.objects
        frame = stored_rows(key_session(objects), objects, then, scans)
        if condition is not None:
            frame = frame.filter(condition)
        if then.version != self._context.schema.version:
            frame = reshaped(frame, then, self._context.schema)
        # each file is sorted, so merging them gives one stream while the files are read side by side
        return (
            frame.sort(*key_order(self._context.schema.key_names))
            .select(*map(column, self._names))
            .execution_plan()
        )

    def _marked(self, batch: pa.RecordBatch, change: str) -> pa.RecordBatch:
        kinds = self._kinds.get(change)
        if kinds is None or len(kinds) < batch.num_rows:
            # most batches have the same size, so the column is made once
            kinds = self._kinds[change] = pa.repeat(pa.scalar(change), batch.num_rows)
        columns = [*batch.columns, kinds[: batch.num_rows]]
        return exact(pa.RecordBatch.from_arrays(columns, names=self._schema.names), self._schema)


def _scans_together(files: Iterable[ChangedFile], near: KeyRanges) -> Iterator[list[Scan]]:
    """Yields the files' scans in groups; DataFusion can read all files of one group at the same time."""
    return portions((scan.within(near) for scan in _scans(files)), lambda _: 1, FILES_A_SCAN)


def _scans(files: Iterable[ChangedFile]) -> Iterator[Scan]:
    """Yields a scan for each file, whose references must be consecutive."""
    for filename, found in groupby(files, key=attrgetter("filename")):
        parts = list(found)
        is_exact = not any(part.count_approximate for part in parts)
        # where the references cover all rows of the file, no row needs a check
        is_whole = is_exact and sum(part.row_count for part in parts) == parts[0].file_row_count
        slices = () if is_whole else tuple(KeyRanges.of(part.region or {}) for part in parts)
        yield Scan(filename, slices or (KeyRanges(),), parts[0].partition_id, parts[0].byte_count)


# Consumers, as users see them: a consumer misses no change, and reads none twice once it is acknowledged.


@dataclass(slots=True)
class _Read:
    """The last read: its start, the moment up to which it reads, and whether all rows were taken."""

    start: ConsumerState
    till: Position
    is_whole: bool = False

    def end(self) -> None:
        self.is_whole = True


class Consumer:
    """A named position in a table's history, returned by `Table.consumer`. Only one thread may use it."""

    def __init__(self, context: TableContext, name: str, check_writable: Callable[[], None]) -> None:
        self.name = name
        self._context = context
        self._consumers = Consumers(context)
        self._check_writable = check_writable
        self._read: _Read | None = None

    def __repr__(self) -> str:
        return f"Consumer({self._context.table.name!r}, {self.name!r})"

    def read(
        self, columns: Sequence[str] | None = None, *, interruption: Interruption | None = None
    ) -> pa.RecordBatchReader:
        """Returns the changes since the consumer's position, up to now, in the form of `Table.changes`.

        Until they are acknowledged, each `read` returns them again, with any newer changes. Raises
        `ConsumerExpired`, `InvalidInput` when the consumer was dropped, and the errors of `Table.changes`.
        Raises `InvalidCut` when an old release of Dormouse restored the table since the position.
        """
        self._read = None
        self._context = self._context.followed()
        start = self._consumers.get(self.name)
        position = self._consumers.checked(start)
        self._read = read = _Read(start, now(self._context, position))
        try:
            return changes(
                self._context, position, read.till, columns, interruption=interruption, at_end=read.end
            )
        except InvalidCut as error:
            how = self._consumers.how_to_go_on(self.name)
            raise InvalidCut(f"consumer {self.name!r} cannot continue: {error}. {how}") from None

    def acknowledge(self) -> None:
        """Moves the position to the end of the last read. Call it once those rows are safely stored.

        Raises `InvalidInput` when not all of the rows were taken, and `ConsumerExpired`. Raises
        `ConsumerOvertaken` when another reader has acknowledged changes since: discard what was made of these
        rows.
        """
        self._check_writable()
        read = self._read
        if read is None:
            raise InvalidInput(f"consumer {self.name!r}: nothing was read since the last acknowledge")
        if not read.is_whole:
            raise InvalidInput(
                f"consumer {self.name!r}: not all rows of the last read were taken, and acknowledging would "
                "skip the others: read them to the end first"
            )
        self._consumers.acknowledge(read.start, read.till)
        self._read = None
