"""Queries by key: rows in key order across partitions and files, streamed with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, takewhile
from threading import Event

import pyarrow as pa
from datafusion import ExecutionPlan, Expr

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.datafusion_session import column, key_order
from dormouse.data.newest import laid_over
from dormouse.data.transform import Transform
from dormouse.errors import ObjectNotFound
from dormouse.model.cut import Position, When
from dormouse.model.loops import portions
from dormouse.model.region import Range
from dormouse.model.schema import Schema, SchemaMoved
from dormouse.model.table import is_keyed
from dormouse.reading.checked_files import FileGone, named_failures, on_current, verify
from dormouse.reading.gone_rows import without
from dormouse.reading.group_parts import are_narrow, divided, first_divided, is_large
from dormouse.reading.key_lists import KEYS_MAX, count_of
from dormouse.reading.keyed import GONE, HeldBack, KeyedScans, Reached, read_from, wanted_of
from dormouse.reading.look_ups import is_look_up, list_looked_up, looked_up, may_answer
from dormouse.reading.overlaps import clusters
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.row_filter import after, every, meets, rendered
from dormouse.reading.row_numbers import Finder, left_by_key
from dormouse.reading.scan_session import (
    DATAFUSION,
    LARGE_BATCH_ROWS,
    executed,
    key_session,
    planned,
    rows,
)
from dormouse.reading.streams import Ahead, Interruption, batches_ahead
from dormouse.reading.table_moments import milliseconds_at, reading_at
from dormouse.reading.table_view import Foreseen, Moment, plan_query
from dormouse.reading.where import Question, Where, question
from dormouse.state.context import TableContext
from dormouse.state.history.moments import moment_of, position_of

Groups = Iterator[tuple[Scan, ...]]
_Prepared = Iterator[tuple[Sequence[Scan], Iterable[pa.RecordBatch]]]
BEGUN_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of the next group that are prepared while the rows of the current group are read."""
REPLANS_MAX = 10
PART_BYTES = 128 * 1024 * 1024


def query(
    context: TableContext,
    where: Where = None,
    columns: Sequence[str] | Callable[[Schema], Sequence[str]] | None = None,
    limit: int | None = None,
    *,
    interruption: Interruption | None = None,
    as_of: When | None = None,
) -> pa.RecordBatchReader:
    """Returns the rows that `where` selects, ordered by the row keys, then the sort keys.

    `where` gives for each column a value, a `dm.Range`, or a list of them. Row keys choose the files that are
    read. The reader has exactly the wanted columns, even without rows: `columns` are their names, or a
    function that returns them for a schema. Columns are those that the table has when the query begins, or
    had at `as_of`.

    The reader sees the rows that the table has now, or had at `as_of`. Commits made while it reads do not
    change these rows, even if a file that it has not read yet is compacted and collected.

    Raises `InvalidQuery`, `InvalidRange`, `InvalidCut` or `CutExpired`. While it is read, raises:

    - `ObjectNotFound` for a file that is lost,
    - `QueryOvertaken` when a file was collected and rows were added or removed meanwhile,
    - `ObjectDamaged` for a file whose content changed,
    - `DormouseError` when `interruption` is set, also in a thread that waits for the next batch.

    Dropping the reader stops the query.
    """
    interruption = interruption or Interruption()
    if as_of is not None:
        then, at = moment_of(context, as_of)
        try:
            return _query(then, where, columns, limit, interruption, at)
        except SchemaMoved:
            context.forget_cuts()
            at = position_of(context, as_of)
            return _query(context.as_of(at), where, columns, limit, interruption, at)
    return on_current(context, lambda now: _query(now, where, columns, limit, interruption, None))


def _query(
    context: TableContext,
    where: Where,
    columns: Sequence[str] | Callable[[Schema], Sequence[str]] | None,
    limit: int | None,
    interruption: Interruption,
    at: Position | None,
) -> pa.RecordBatchReader:
    names = columns(context.schema) if callable(columns) else columns
    checked = question(context.schema, where, names, limit)
    schema = columns_of(context.schema, checked.columns)
    return pa.RecordBatchReader.from_batches(schema, _rows_of(context, checked, interruption, at))


def rows_of(
    context: TableContext, question: Question, ahead: Foreseen | None = None
) -> Iterator[pa.RecordBatch]:
    """Returns the rows that a question selects now, with the columns that it names, in batches.

    `ahead` has the answer for the question's ranges, which is not of a row table. Raises `SchemaMoved` if the
    table has other columns, and the errors of `query`.
    """
    return _rows_of(context, question, Interruption(), None, ahead)


def _rows_of(
    context: TableContext,
    checked: Question,
    interruption: Interruption,
    at: Position | None,
    ahead: Foreseen | None = None,
) -> Iterator[pa.RecordBatch]:
    read, wanted = read_from(context, checked)
    moment = Moment(read.schema)
    groups = plan_query(read, checked.ranges, moment, at=at, bundles=True, ahead=ahead)
    schema = columns_of(context.schema, checked.columns)
    execution = _Execution(read, wanted, moment, interruption, at)
    found: Iterable[pa.RecordBatch] | None = None
    if at is None and is_of_one_key(read.schema, wanted) and not read.verifies:
        first = list(islice(groups, 1))  # the only group, since the key lies in one leaf
        if (found := execution.at_once(*first)) is not None:
            found = interruption.checked(list(wanted_of(context, checked, iter(found))))
        groups = iter(first)
    if found is None:
        rows = wanted_of(context, checked, execution.rows(groups))
        found = batches_ahead(rows, interruption.set)
    names = schema.names
    return (exact(batch if batch.schema.names == names else batch.select(names), schema) for batch in found)


def is_of_one_key(schema: Schema, question: Question) -> bool:
    """Returns whether a question has exactly one value for each row key."""
    wanted = [question.ranges.get(name, ()) for name in schema.row_key_names]
    return all(len(ranges) == 1 and ranges[0].is_exact for ranges in wanted)


@dataclass(frozen=True)
class Part:
    """A part of a query's plan, which another process reads as of the plan's moment.

    `digests` are the recorded digests of the files, if the query verifies them: the reading process compares
    them with the files.
    """

    question: Question
    groups: tuple[tuple[Scan, ...], ...]
    now_ms: int
    digests: Mapping[str, bytes | None] | None = None

    def rows(self, context: TableContext) -> Iterator[pa.RecordBatch]:
        """Yields the rows in key order, with the question's columns.

        It needs the database only for files in it, and for rows that deletions list. Raises the errors of
        reading a query, and `FileGone`.
        """
        schema = columns_of(context.schema, self.question.columns)
        if self.digests is not None:
            verify(context, [scan for group in self.groups for scan in group], digests=self.digests)
        read, wanted = read_from(context, self.question)
        reading = _Execution(read, wanted, Moment(read.schema), Interruption(), None)
        reading.now_ms = self.now_ms
        groups = (tuple(scan.bound(context.objects) for scan in group) for group in self.groups)
        for batch in wanted_of(context, self.question, reading.planned(groups, None)):
            yield exact(batch.select(self.question.columns), schema)


def parts(
    context: TableContext, question: Question, at: Position, bytes_max: int = PART_BYTES
) -> Iterator[Part]:
    """Yields parts of a query as of a moment, in key order, each of about `bytes_max` bytes of files.

    Each part has whole groups of leaves. A file that several parts read counts in each. The context has the
    columns of that moment. Raises the errors of `query`.
    """
    now_ms = milliseconds_at(at)
    planned_groups = plan_query(context, question.ranges, at=at)
    for groups in portions(planned_groups, bytes_of, bytes_max):
        names = {scan.filename for group in groups for scan in group} if context.verifies else None
        digests = None if names is None else context.store.digests(sorted(names))
        yield Part(question, tuple(groups), now_ms, digests)


def columns_of(schema: Schema, names: Sequence[str]) -> pa.Schema:
    """Returns some columns of a table as an Arrow schema."""
    whole = arrow_schema(schema)
    return whole if tuple(names) == schema.names else pa.schema([whole.field(name) for name in names])


class _Execution:
    """One running query, which is planned again when a file of its plan no longer exists."""

    def __init__(
        self,
        context: TableContext,
        question: Question,
        moment: Moment,
        interruption: Interruption,
        at: Position | None,
    ) -> None:
        self._at = at
        self._context = context
        self._question = question
        self._moment = moment
        self._interruption = interruption
        self._transform = Transform.parse(context.schema, context.properties)
        self.now_ms = milliseconds_at(at)
        self._remaining = question.limit
        self._may_look_up = True
        self._is_keyed = is_keyed(context.properties)
        self._is_awaited = Event()
        self._held = HeldBack(context.schema.key_names)
        self._small: tuple[Sequence[Scan], list[pa.RecordBatch]] | None = None

    def rows(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        """Yields the rows, with the wanted columns and the keys."""
        if self._at is None:
            yield from self._rows(groups)
            return
        with reading_at(self._context, self._at):
            yield from self._limited(self.planned(groups, None))

    def at_once(self, scans: Sequence[Scan] = ()) -> Iterable[pa.RecordBatch] | None:
        """Returns the rows of a group, read by a look-up in this thread; None if a query engine is needed."""
        self._interruption.check()
        with self._naming(scans):
            found = looked_up(self._context, self._moment.schema, self._question, self._transform, scans)
        self._may_look_up = found is not None
        return None if found is None else self._limited(iter(found))

    def _rows(self, groups: Groups | None) -> Iterator[pa.RecordBatch]:
        gone: set[str] = set()
        futile = 0
        while groups is not None and self._remaining != 0:
            start, missing = self._held.reached, None
            try:
                yield from self._limited(self.planned(groups, start))
            except FileGone as error:
                missing = error
            groups = None
            if missing is not None:
                self._check_can_resume(missing, gone)
                gone.add(str(missing.filename))
                # rows of the last key are not returned, since the new plan's files may have them in
                # another order
                yield from self._limited(self._held.interrupt())
                # a collector that is faster than the reader must not make it plan again without end
                futile = futile + 1 if self._held.reached == start else 0
                groups = self._again(missing, futile)

    def _again(self, missing: FileGone, futile: int) -> Groups:
        """Returns a new plan, which begins at the first row key of the position that was reached.

        The plan may include rows that were already returned. `futile` is the number of consecutive plans
        without progress. Raises `ObjectNotFound` after too many of them.
        """
        if futile == REPLANS_MAX:
            raise ObjectNotFound(
                f"files of table {self._context.table.name!r} are collected faster than they are read, the "
                f"last one {missing.filename!r}; raise the table's property gc_delay_seconds"
            ) from missing
        ranges, reached = self._question.ranges, self._held.reached
        if reached is not None:
            ranges = ranges.clipped(self._context.schema.row_keys[0].name, Range(min=reached.key[0]))
        return plan_query(self._context, ranges, self._moment, bundles=True)

    def planned(self, groups: Groups, start: Reached | None) -> Iterator[pa.RecordBatch]:
        """Yields a plan's rows after the position `start`, group by group.

        The rows of the last key are held back until a larger key comes.
        """
        groups = self._verified(groups)
        if start is None and self._lists_keys:
            for scans in groups:
                found = self._listed(scans)
                if found is None:
                    yield from self._engine_rows(iter([scans]), start)
                else:
                    yield from self._held.whole(found)
            return
        yield from self._engine_rows(groups, start)

    def _engine_rows(self, groups: Groups, start: Reached | None) -> Iterator[pa.RecordBatch]:
        groups = self._settled(groups)
        if self._question.limit is not None:  # the next group may not be needed
            parts = first_divided(groups, self._moment, self._question.limit)
            yield from self._used(self._prepared(parts, start))
            return
        parts = divided(groups, self._context.objects, self._moment)
        first = list(islice(parts, 2))
        prepared = self._prepared(chain(first, parts), start)
        if len(first) < 2:  # there is no next group to prepare
            yield from self._used(prepared)
            return
        with Ahead(self._begun(prepared)) as made:
            if is_large(first[0]):
                made.begin()
            yield from self._used(made)

    @cached_property
    def _lists_keys(self) -> bool:
        """Returns whether several values of the first row key are wanted, which look-ups may answer."""
        first = self._context.schema.row_keys[0]
        if self._question.limit is not None or not may_answer(self._question, self._transform):
            return False
        return 1 < count_of(first, self._question.ranges.get(first.name, ())) <= KEYS_MAX

    def _listed(self, scans: Sequence[Scan]) -> Iterable[pa.RecordBatch] | None:
        """Returns the rows of a group, read by a look-up of a list of keys; None if an engine is needed."""
        self._interruption.check()
        # this reads fewer rows than would be read to find all that deletions match
        finder = Finder(self._context, self._question.ranges, self._interruption, reads=False)
        settles = not self._is_keyed and any(scan.deletions for scan in scans)
        settled = finder.settled(scans) if settles else scans
        with self._naming(scans):
            return list_looked_up(
                self._context,
                self._moment.schema,
                self._question,
                self._transform,
                settled,
                self._interruption,
            )

    def _verified(self, groups: Groups) -> Groups:
        for scans in groups:
            verify(self._context, scans, self._interruption)
            yield scans

    def _settled(self, groups: Groups) -> Groups:
        """Yields groups with rows to leave out by their keys instead of deletions, where this is possible."""
        # a query with a limit may end before it has read a whole file
        reads = self._question.limit is None
        finder = Finder(self._context, self._question.ranges, self._interruption, reads=reads)
        for scans in groups:
            if self._is_keyed or self._transform.aggregates or not any(scan.deletions for scan in scans):
                yield scans
            elif is_look_up(self._moment.schema, scans):
                yield tuple(finder.settled(scans))
            else:
                alone = [scan for cluster in clusters(scans) if len(cluster) == 1 for scan in cluster]
                found = {scan.filename: scan for scan in finder.settled(alone)}
                yield tuple(found.get(scan.filename, scan) for scan in scans)

    def _used(self, prepared: _Prepared) -> Iterator[pa.RecordBatch]:
        while True:
            self._is_awaited.set()
            found = next(prepared, None)
            self._is_awaited.clear()
            if found is None:
                return
            scans, batches = found
            with self._naming(scans):
                for batch in batches:
                    yield from self._held.take(batch)
                    if self._remaining is not None and self._held.row_count >= self._remaining:
                        break
            yield from self._held.end()

    def _planned(self, scans: Sequence[Scan], start: Reached | None) -> Iterator[pa.RecordBatch]:
        """Returns the rows of a group; raises at once for files that no longer exist or are damaged."""
        if not self._is_keyed:
            scans = left_by_key(scans)
            plan = partial(self._physical, scans, start)
            found = self._executed(planned(self._context, scans, plan, self._interruption), scans)
            gone = [scan.gone for scan in scans if scan.gone is not None]
            return without(found, self._context.schema.key_names, gone) if gone else found
        keyed = self._keyed(scans)
        if (both := keyed.layers(self._context.objects)) is None:
            return self._newest(keyed, start)
        large, small = both
        above = self._newest(small, start) if start or not small.in_parts else self._in_memory(small)
        return laid_over(self._newest(large, start), above, keyed.schema.row_key_names, GONE)

    def _in_memory(self, small: KeyedScans) -> Iterator[pa.RecordBatch]:
        """Returns the rows of small files in a part of a group; reads those of all parts once."""
        group = small.of_group()
        if self._small is None or self._small[0] != group.scans:
            self._small = group.scans, list(self._newest(group, None))
        return small.in_part(self._small[1])

    def _newest(self, keyed: KeyedScans, start: Reached | None) -> Iterator[pa.RecordBatch]:
        context, after = self._context, self._after(start)
        plan = partial(keyed.plan, key_session(context.objects), context.objects, after)
        return keyed.newest(
            self._executed(planned(context, keyed.scans, plan, self._interruption), keyed.scans)
        )

    def _executed(self, physical: ExecutionPlan, scans: Sequence[Scan]) -> Iterator[pa.RecordBatch]:
        """Yields the batches of a plan, which starts when the first batch is requested."""
        return executed(
            self._context,
            physical,
            self._interruption,
            of_large_batches=self._may_be_many(scans),
            may_search=self._may_search or any(scan.deletions for scan in scans),
        )

    def _keyed(self, scans: Sequence[Scan]) -> KeyedScans:
        context, question = self._context, self._question
        names = tuple(dict.fromkeys((*context.schema.key_names, *question.columns)))
        return KeyedScans(context.schema, context.properties, scans, question.conditions, self.now_ms, names)

    def _may_be_many(self, scans: Sequence[Scan]) -> bool:
        """Returns whether the query may use large batches.

        If there are several files, all of their rows must be returned. No query with a limit uses large
        batches.
        """
        if self._question.limit is not None or self._transform.aggregates:
            return False  # the caller of a limited query waits for its first rows
        if len(scans) > 1:
            leaves_marks_out = self._is_keyed and not self._keyed(scans).merges
            if self._may_search or leaves_marks_out or any(scan.deletions for scan in scans):
                return False
        return are_narrow(scans, self._context.objects, self._moment.schema, LARGE_BATCH_ROWS)

    @cached_property
    def _conditions(self) -> Expr:
        """The conditions on columns that are not row keys, rendered once, since they may list many values."""
        return rendered(every(map(meets, self._question.conditions)), DATAFUSION)

    @cached_property
    def _may_search(self) -> bool:
        """Returns whether many unwanted rows may have to be read between two wanted ones.

        This is so if there is a condition on a column outside a prefix of the sort order.
        """
        wanted = [self._question.ranges.get(name, ()) for name in self._context.schema.row_key_names]
        exact = takewhile(lambda ranges: ranges and all(one.is_exact for one in ranges), wanted)
        beyond = wanted[len(list(exact)) + 1 :]
        return bool(self._question.conditions or self._transform.age_off or any(beyond))

    def _prepared(self, groups: Iterable[Sequence[Scan]], start: Reached | None) -> _Prepared:
        """Yields each group with its rows, found by a look-up of one key if possible, or by DataFusion."""
        for scans in groups:
            with self._naming(scans):
                self._interruption.check()
                found: Iterable[pa.RecordBatch] | None = None
                if start is None and self._may_look_up:
                    found = looked_up(
                        self._context, self._moment.schema, self._question, self._transform, scans
                    )
                if found is None:
                    found = self._planned(scans, start)
            yield scans, found

    def _begun(self, prepared: _Prepared) -> _Prepared:
        """Yields the groups; prepares the first rows of a large group while the one before it is read."""
        for scans, batches in prepared:
            if not is_large(scans):
                yield scans, batches
                continue
            made, rest, byte_count = list[pa.RecordBatch](), iter(batches), 0
            with self._naming(scans):
                for batch in rest:
                    made.append(batch)
                    byte_count += batch.nbytes
                    if self._is_awaited.is_set() or byte_count >= BEGUN_BYTES_MAX:
                        break
            yield scans, chain(made, rest)

    def _naming(self, scans: Sequence[Scan]) -> AbstractContextManager[None]:
        return named_failures(self._context, scans, self._transform)

    def _physical(self, scans: Sequence[Scan], start: Reached | None) -> ExecutionPlan:
        schema, objects = self._moment.schema, self._context.objects
        ctx = key_session(objects)
        after = self._after(start)
        frame = rows(ctx, objects, replace(self._transform, schema=schema), scans, self.now_ms)
        if self._question.conditions:
            frame = frame.filter(self._conditions)
        if after is not None:
            frame = frame.filter(after)
        frame = frame.sort(*key_order(schema.key_names))
        names = dict.fromkeys((*schema.key_names, *self._question.columns))
        return frame.select(*map(column, names)).execution_plan()

    def _after(self, start: Reached | None) -> Expr | None:
        """Returns the condition for keys after the position `start`; None without a position."""
        if start is None:
            return None
        beyond = after(self._moment.schema.key_fields, start.key, inclusive=not start.given)
        return rendered(beyond, DATAFUSION)

    def _limited(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches up to the limit.

        DataFusion's own limit is not used: below a merge it may skip row groups out of order.
        """
        for batch in batches:
            part = batch if self._remaining is None else batch.slice(0, self._remaining)
            if self._remaining is not None:
                self._remaining -= part.num_rows
            yield part
            if self._remaining == 0:
                return

    def _check_can_resume(self, missing: FileGone, gone: set[str]) -> None:
        filename = missing.filename
        if filename in gone:
            # this plan was made after the file was found missing, and still refers to it
            raise missing.lost() from missing
        if self._held.is_in_part:
            raise ObjectNotFound(
                f"file {filename!r} no longer exists: it was collected while rows with one key were read, "
                f"which are too many to hold in memory; run the query again, or raise the table's property "
                "gc_delay_seconds"
            ) from missing
