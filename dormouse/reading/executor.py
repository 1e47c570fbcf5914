"""Queries by key: rows in key order across partitions and files, streamed with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, islice, takewhile
from threading import Event
from typing import Any

import pyarrow as pa
from datafusion import ExecutionPlan, Expr

from dormouse.data.arrow_schema import arrow_schema, exact, written_schema
from dormouse.data.datafusion_session import column, key_order
from dormouse.data.newest import laid_over
from dormouse.data.transform import Transform
from dormouse.errors import ObjectNotFound
from dormouse.model.cut import Position, When
from dormouse.model.loops import portions
from dormouse.model.region import Range, compare, decode_key
from dormouse.model.schema import Schema, SchemaMoved, is_as_stored
from dormouse.model.table import is_keyed
from dormouse.objects.store import ObjectStore
from dormouse.reading.checked_files import FileGone, named_failures, on_current, verify
from dormouse.reading.keyed import GONE, HeldBack, KeyedScans, Reached, read_from, wanted_of
from dormouse.reading.page_reads import looked_up, row_group_starts, row_groups_in_memory
from dormouse.reading.planner import Scan, bytes_of, may_hold
from dormouse.reading.row_filter import after, every, meets, rendered
from dormouse.reading.scan_session import (
    DATAFUSION,
    LARGE_BATCH_ROWS,
    executed,
    key_session,
    planned,
    rows,
)
from dormouse.reading.streams import Ahead, Interruption, batches_ahead
from dormouse.reading.table_view import Moment, milliseconds_at, plan_query, reading_at
from dormouse.reading.where import Question, Where, question
from dormouse.state.context import TableContext
from dormouse.state.history.moments import moment_of, position_of

Groups = Iterator[tuple[Scan, ...]]
_Prepared = Iterator[tuple[Sequence[Scan], Iterable[pa.RecordBatch]]]
BEGUN_BYTES_MAX = 64 * 1024 * 1024
"""Of rows of the next group, made while others are used."""
REPLANS_MAX = 10
PART_BYTES = 128 * 1024 * 1024
FIRST_FILES_MIN = 16
"""Of a group: fewer files are opened sooner than they are told apart."""
FIRST_FILES_GROWTH = 8
"""How many times as many files each further part begins with, if the parts before had too few rows."""
PART_ROWS = 131_072
PART_BYTES_MIN = 4 * 1024 * 1024
"""Of a group, as stored: a plan for each part costs milliseconds."""
BATCHES_BYTES_MAX = 64 * 1024 * 1024
"""In memory, of a batch of each file of a group, and of one made of them: many queries share 2 GiB."""
ROW_GROUPS_BYTES_MAX = 256 * 1024 * 1024
"""Of a row group of each file: a few rows may have all its bytes, and then a batch has, too."""
FILES_MAX = 64
"""Of a group: of more files each is read too little for parts to pay."""


def query(
    context: TableContext,
    where: Where = None,
    columns: Sequence[str] | Callable[[Schema], Sequence[str]] | None = None,
    limit: int | None = None,
    *,
    interruption: Interruption | None = None,
    as_of: When | None = None,
) -> pa.RecordBatchReader:
    """The rows that `where` asks for, ordered by the row keys, then the sort keys.

    `where` gives for a column a value, a `dm.Range`, or a list of them; row keys choose the files that are
    read. The reader has exactly the columns asked for, also when there are no rows. It sees the rows that the
    table has now, whatever is committed while it is read; also when a file that it has not read yet is
    compacted and collected meanwhile. `as_of` asks for those of another moment.

    Its columns are those that the table has when it begins, or had at that moment; of those that are told by
    a schema, as it calls them.

    Raises `InvalidQuery`, `InvalidRange`, `InvalidCut` or `CutExpired`; while it is read, `ObjectNotFound`
    for a file that is lost, `QueryOvertaken` when one was collected and rows were added or removed meanwhile,
    `ObjectDamaged` for one that is not what was written. A reader that is dropped stops; so does one that
    waits for its next batch in another thread, when `interruption` is set, and raises `DormouseError`.
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
    asked = question(context.schema, where, names, limit)
    read, wanted = read_from(context, asked)
    moment = Moment(read.schema)
    groups = plan_query(read, asked.ranges, moment, at=at)
    schema = columns_of(context.schema, asked.columns)
    rows = wanted_of(context, asked, _Execution(read, wanted, moment, interruption, at).rows(groups))
    found = batches_ahead(rows, interruption.set)
    batches = (exact(batch.select(asked.columns), schema) for batch in found)
    return pa.RecordBatchReader.from_batches(schema, batches)


@dataclass(frozen=True)
class Part:
    """Some groups of a query's plan, which another process reads: `rows` of the moment of the plan.

    `digests` of the files where the query verifies: the process that reads compares them.
    """

    asked: Question
    groups: tuple[tuple[Scan, ...], ...]
    now_ms: int
    digests: Mapping[str, bytes | None] | None = None

    def rows(self, context: TableContext) -> Iterator[pa.RecordBatch]:
        """In key order, the columns asked for. Needs no database; raises as a query does, and `FileGone`."""
        schema = columns_of(context.schema, self.asked.columns)
        if self.digests is not None:
            verify(context, [scan for group in self.groups for scan in group], digests=self.digests)
        read, wanted = read_from(context, self.asked)
        reading = _Execution(read, wanted, Moment(read.schema), Interruption(), None)
        reading.now_ms = self.now_ms
        for batch in wanted_of(context, self.asked, reading.planned(iter(self.groups), None)):
            yield exact(batch.select(self.asked.columns), schema)


def parts(
    context: TableContext, asked: Question, at: Position, bytes_max: int = PART_BYTES
) -> Iterator[Part]:
    """A query of a moment, by groups of leaves that have about so many bytes of files, in key order.

    The services are those for the columns of that moment. Each file counts as often as it is read. Raises as
    `query` does.
    """
    now_ms = milliseconds_at(at)
    planned_groups = plan_query(context, asked.ranges, at=at)
    for groups in portions(planned_groups, bytes_of, bytes_max):
        names = {scan.filename for group in groups for scan in group} if context.verifies else None
        digests = None if names is None else context.store.digests(sorted(names))
        yield Part(asked, tuple(groups), now_ms, digests)


def columns_of(schema: Schema, names: Sequence[str]) -> pa.Schema:
    """Some columns of a table as Arrow has them."""
    whole = arrow_schema(schema)
    return whole if tuple(names) == schema.names else pa.schema([whole.field(name) for name in names])


class _Execution:
    """One query while it is read; it plans again when a file of its plan is gone."""

    def __init__(
        self,
        context: TableContext,
        asked: Question,
        moment: Moment,
        interruption: Interruption,
        at: Position | None,
    ) -> None:
        self._at = at
        self._context = context
        self._asked = asked
        self._moment = moment
        self._interruption = interruption
        self._transform = Transform.parse(context.schema, context.properties)
        self.now_ms = milliseconds_at(at)
        self._remaining = asked.limit
        self._is_keyed = is_keyed(context.properties)
        self._is_awaited = Event()
        self._held = HeldBack(context.schema.key_names)

    def rows(self, groups: Groups) -> Iterator[pa.RecordBatch]:
        """The rows, with the keys among the columns."""
        if self._at is None:
            yield from self._rows(groups)
            return
        with reading_at(self._context, self._at):
            yield from self._limited(self.planned(groups, None))

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
                # rows of the newest key stay back: the new plan's files have them in another order
                yield from self._limited(self._held.interrupt())
                # a collector that is faster than the reader must not keep it planning for ever
                futile = futile + 1 if self._held.reached == start else 0
                groups = self._again(missing, futile)

    def _again(self, missing: FileGone, futile: int) -> Groups:
        """A plan of at least what is wanted from the key that was reached on."""
        if futile == REPLANS_MAX:
            raise ObjectNotFound(
                f"files of table {self._context.table.name!r} are collected faster than they are read, the "
                f"last one {missing.filename!r}; raise the table's property gc_delay_seconds"
            ) from missing
        ranges, reached = self._asked.ranges, self._held.reached
        if reached is not None:
            ranges = ranges.clipped(self._context.schema.row_keys[0].name, Range(min=reached.key[0]))
        return plan_query(self._context, ranges, self._moment)

    def planned(self, groups: Groups, start: Reached | None) -> Iterator[pa.RecordBatch]:
        """A plan's rows from a key on, but for those that are held back, group after group."""
        groups = self._verified(groups)
        if self._asked.limit is not None:  # the next group may be needless
            parts = first_divided(groups, self._moment, self._asked.limit)
            yield from self._used(self._prepared(parts, start))
            return
        parts = divided(groups, self._context.objects, self._moment)
        first = list(islice(parts, 2))
        prepared = self._prepared(chain(first, parts), start)
        if len(first) < 2:  # nothing is to be made ahead
            yield from self._used(prepared)
            return
        with Ahead(self._begun(prepared)) as made:
            if is_large(first[0]):
                made.begin()
            yield from self._used(made)

    def _verified(self, groups: Groups) -> Groups:
        for scans in groups:
            verify(self._context, scans, self._interruption)
            yield scans

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
        """Plans how the rows of a group are read; raises for files that are gone or damaged."""
        if not self._is_keyed:
            plan = partial(self._physical, scans, start)
            return self._executed(planned(self._context, scans, plan, self._interruption), scans)
        keyed = self._keyed(scans)
        if (both := keyed.layers(self._context.objects)) is None:
            return self._newest(keyed, start)
        large, small = (self._newest(one, start) for one in both)
        return laid_over(large, small, keyed.schema.row_key_names, GONE)

    def _newest(self, keyed: KeyedScans, start: Reached | None) -> Iterator[pa.RecordBatch]:
        context, after = self._context, self._after(start)
        plan = partial(keyed.plan, key_session(context.objects), context.objects, after)
        return keyed.newest(
            self._executed(planned(context, keyed.scans, plan, self._interruption), keyed.scans)
        )

    def _executed(self, physical: ExecutionPlan, scans: Sequence[Scan]) -> Iterator[pa.RecordBatch]:
        """Yields what a plan gives, which begins when the first batch is asked for."""
        return executed(
            self._context,
            physical,
            self._interruption,
            of_large_batches=self._may_be_many(scans),
            may_search=self._may_search or any(scan.deletions for scan in scans),
        )

    def _keyed(self, scans: Sequence[Scan]) -> KeyedScans:
        context, asked = self._context, self._asked
        names = tuple(dict.fromkeys((*context.schema.key_names, *asked.columns)))
        return KeyedScans(context.schema, context.properties, scans, asked.conditions, self.now_ms, names)

    def _may_be_many(self, scans: Sequence[Scan]) -> bool:
        """Whether batches may have many rows; of several files where they are merged as they lie in them."""
        if self._asked.limit is not None or self._transform.aggregates:
            return False  # who asks for few rows waits for the first
        if len(scans) > 1:
            leaves_marks_out = self._is_keyed and not self._keyed(scans).merges
            if self._may_search or leaves_marks_out or any(scan.deletions for scan in scans):
                return False
        return are_narrow(scans, self._context.objects, self._moment.schema, LARGE_BATCH_ROWS)

    @cached_property
    def _conditions(self) -> Expr:
        """What rows must meet beside their keys, made once for all groups: it may have many values."""
        return rendered(every(map(meets, self._asked.conditions)), DATAFUSION)

    @cached_property
    def _may_search(self) -> bool:
        """Whether much may be read between two wanted rows: files are not sorted by all that is asked."""
        wanted = [self._asked.ranges.get(name, ()) for name in self._context.schema.row_key_names]
        exact = takewhile(lambda ranges: ranges and all(one.is_exact for one in ranges), wanted)
        beyond = wanted[len(list(exact)) + 1 :]
        return bool(self._asked.conditions or self._transform.age_off or any(beyond))

    def _prepared(self, groups: Iterable[Sequence[Scan]], start: Reached | None) -> _Prepared:
        """The groups, each with its rows: those of a look-up, or what DataFusion's plan is going to give."""
        for scans in groups:
            with self._naming(scans):
                self._interruption.check()
                found: Iterable[pa.RecordBatch] | None = None
                if start is None:
                    found = looked_up(self._context, self._moment.schema, self._asked, self._transform, scans)
                if found is None:
                    found = self._planned(scans, start)
            yield scans, found

    def _begun(self, prepared: _Prepared) -> _Prepared:
        """The groups; the first rows of large ones are made as long as the group before them is used."""
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
        if self._asked.conditions:
            frame = frame.filter(self._conditions)
        if after is not None:
            frame = frame.filter(after)
        frame = frame.sort(*key_order(schema.key_names))
        names = dict.fromkeys((*schema.key_names, *self._asked.columns))
        return frame.select(*map(column, names)).execution_plan()

    def _after(self, start: Reached | None) -> Expr | None:
        """Returns the condition of the keys that were not reached yet."""
        if start is None:
            return None
        beyond = after(self._moment.schema.key_fields, start.key, inclusive=not start.given)
        return rendered(beyond, DATAFUSION)

    def _limited(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches up to the limit; DataFusion's own may skip row groups out of order below a merge."""
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
            # a plan that was made after the file was gone refers to it
            raise missing.lost() from missing
        if self._held.is_in_part:
            raise ObjectNotFound(
                f"file {filename!r} is gone: it was collected amidst rows of equal key that are too many to "
                "be held back; run the query again, or raise the table's property gc_delay_seconds"
            ) from missing


# Groups in parts: large ones by row groups, so that one part is read while another is used, and groups of
# many files by the smallest keys of the files, so that few rows need few files.


def divided(
    groups: Iterable[Sequence[Scan]], objects: ObjectStore, moment: Moment
) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups in parts by their first row key: all rows of a part sort before those of the next.

    The columns of the moment may change between two groups, to those by which the next files were written.
    """
    for scans in groups:
        yield from _parts(scans, objects, moment.schema)


def first_divided(groups: Iterable[Sequence[Scan]], moment: Moment, rows: int) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups in parts by their first row key; the first part mostly has the first `rows` rows.

    A file has a row of its smallest key. So the rows up to the smallest key of the n-th file, in the order of
    these keys, are at least n, and only files that begin at or before it are read. Where rows are filtered
    out or were deleted there may be fewer, which the next part, of more files, makes good.
    """
    for scans in groups:
        yield from (
            _first_parts(scans, moment.schema, rows) if len(scans) >= FIRST_FILES_MIN else (tuple(scans),)
        )


def is_large(scans: Sequence[Scan]) -> bool:
    """Whether a group has files of so many bytes that more than a moment is spent on them."""
    return bytes_of(scans) >= PART_BYTES_MIN


def are_narrow(scans: Sequence[Scan], objects: ObjectStore, schema: Schema, batch_rows: int) -> bool:
    """Whether a batch may have so many rows, which are of a large group, as they were written.

    Those of one file are of one row group. What is merged of several is of as many as have its rows: of each
    file rows in succession, if all are wanted.
    """
    batches = groups = merged = 0.0
    for scan in scans if is_large(scans) else ():
        found = row_groups_in_memory(objects, scan.filename, scan.byte_count or 0)
        # a column that came later may have a long value for all rows
        if not found or not is_as_stored(written_schema(schema, scan.filename), schema):
            return False
        batches += max(size * min(1.0, batch_rows / rows) for rows, size in found)
        groups += max(size for _, size in found)
        merged = max(merged, *(size * batch_rows / rows for rows, size in found))
    return 0 < batches + merged <= BATCHES_BYTES_MAX and groups <= ROW_GROUPS_BYTES_MAX


def _first_parts(scans: Sequence[Scan], schema: Schema, rows: int) -> Iterator[tuple[Scan, ...]]:
    low: Any = None
    starts, count = _first_keys(scans, schema), max(1, rows)
    while count < len(starts):
        point = starts[count - 1]
        if low is None or compare(point, low) > 0:
            yield _reaching(scans, schema, Range(low, point, min_inclusive=False, max_inclusive=True))
            low = point
        count *= FIRST_FILES_GROWTH
    rest = _reaching(scans, schema, Range(low, min_inclusive=False)) if low is not None else tuple(scans)
    if rest:
        yield rest


def _first_keys(scans: Sequence[Scan], schema: Schema) -> list[Any]:
    """Returns the first row key at which each file's wanted rows can begin, in order, where that is known.

    A file that begins before all that is wanted may have its first wanted row anywhere, and is left out.
    """
    name = schema.row_keys[0].name
    found: list[Any] = []
    for scan in scans:
        first = None if scan.min_key is None else decode_key(schema.row_keys[:1], scan.min_key)[0]
        wanted = [part.enclosing(name).min for part in scan.slices]
        if first is not None and any(low is None or compare(low, first) <= 0 for low in wanted):
            found.append(first)
    return sorted(found)


def _reaching(scans: Sequence[Scan], schema: Schema, limits: Range) -> tuple[Scan, ...]:
    """Returns what files have within some limits of the first row key, without files that end before them."""
    name = schema.row_keys[0].name
    return tuple(
        scan
        for scan in _clipped(scans, name, limits)
        if any(may_hold(schema, scan.min_key, scan.max_key, part) for part in scan.slices)
    )


def _parts(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[tuple[Scan, ...]]:
    name = schema.row_keys[0].name
    low: Any = None
    for point in _points(scans, objects, schema):
        if part := _clipped(scans, name, Range(low, point)):
            yield part
        low = point
    yield tuple(scans) if low is None else _clipped(scans, name, Range(low))


def _points(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[Any]:
    """Values of the first row key with about so many wanted rows between them."""
    name = schema.row_keys[0].name
    wanted = [part.enclosing(name) for scan in scans for part in scan.slices]
    if not is_large(scans) or len(scans) > FILES_MAX or all(one.is_exact for one in wanted):
        return
    low: Any = None if any(one.min is None for one in wanted) else min(one.min for one in wanted)  # type: ignore[type-var]
    high: Any = None if any(one.max is None for one in wanted) else max(one.max for one in wanted)  # type: ignore[type-var]
    starts = [
        (value, rows)
        for scan in scans
        # by the name that the key had: today's may be what another column was called
        for key in written_schema(schema, scan.filename).row_keys[:1]
        for value, rows in row_group_starts(objects, scan.filename, scan.byte_count or 0, key)
        if high is None or value < high
    ]
    # as large as each other, since one is read as long as another is
    left = sum(rows for value, rows in starts if low is None or value > low)
    size, rows = left / max(1, left // PART_ROWS), 0
    for value, row_count in sorted(starts):
        if low is not None and value <= low:
            continue
        if rows >= size and left >= size / 2:
            yield value
            low, rows = value, 0
        rows, left = rows + row_count, left - row_count


def _clipped(scans: Sequence[Scan], name: str, limits: Range) -> tuple[Scan, ...]:
    """What files have within some limits."""
    found = []
    for scan in scans:
        slices = (part.clipped(name, limits) for part in scan.slices)
        if left := tuple(part for part in slices if not part.is_empty):
            found.append(replace(scan, slices=left))
    return tuple(found)
