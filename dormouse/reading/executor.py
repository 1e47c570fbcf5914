"""Queries by key: rows in key order across partitions and files, streamed with bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from itertools import chain, islice, takewhile
from operator import and_
from threading import Event
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import ExecutionPlan, Expr
from datafusion.record_batch import RecordBatch

from dormouse.data.arrow_schema import arrow_schema, exact, written_schema
from dormouse.data.datafusion_session import column, key_order
from dormouse.data.newest import first_of_keys, laid_over
from dormouse.data.transform import Transform
from dormouse.errors import ObjectNotFound
from dormouse.model.ahead import portions
from dormouse.model.cut import Position, When, milliseconds_at
from dormouse.model.region import KeyValue, Range
from dormouse.model.schema import Schema, SchemaMoved, is_as_stored
from dormouse.model.table import DELETED_AT, is_keyed, newest_first, stored_schema
from dormouse.model.types import Field
from dormouse.reading.checked_files import FileGone, verify
from dormouse.reading.dividing import are_narrow, divided, first_divided, is_large
from dormouse.reading.edited import read_from, wanted_of
from dormouse.reading.interruptible import interruptible
from dormouse.reading.interruption import Interruption
from dormouse.reading.keyed import GONE, KeyedScans
from dormouse.reading.page_reads import can_look_up, rows_of
from dormouse.reading.planner import Scan
from dormouse.reading.scan_session import (
    LARGE_BATCH_ROWS,
    from_key,
    key_session,
    meets,
    named_failures,
    planned,
    rows,
)
from dormouse.reading.schemas import on_current
from dormouse.reading.streams import Ahead, batches_ahead
from dormouse.reading.table_view import Moment, gone_of_moment, plan_query
from dormouse.reading.where import Question, Where, question
from dormouse.state.context import TableContext
from dormouse.state.history.moments import kept, moment_of, position_of

# Rows in key order on their way out, of which those of the newest key wait until a larger key is seen.

HELD_BYTES_MAX = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Reached:
    """A key in key order, row keys then sort keys: rows before it were given; those of it too, if `given`."""

    key: tuple[KeyValue, ...]
    given: bool


class HeldBack:
    """Batches of a sorted stream go in, and come out as they were but for the places where it stops.

    `names` are the columns of the key. Beyond `bytes_max` rows of one key are given at once; until a larger
    key comes, `interrupt` is then refused.
    """

    def __init__(self, names: Sequence[str], bytes_max: int = HELD_BYTES_MAX) -> None:
        self._names = tuple(names)
        self._bytes_max = bytes_max
        self._held: list[pa.RecordBatch] = []
        self._newest: tuple[KeyValue, ...] | None = None
        self._given_in_part: tuple[KeyValue, ...] | None = None
        self._is_first = True
        self.reached: Reached | None = None

    @property
    def row_count(self) -> int:
        """The rows that wait."""
        return sum(int(batch.num_rows) for batch in self._held)

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes a batch; gives what need not wait any more."""
        if not batch.num_rows:
            return
        yield from self._older() if self._key(batch, 0) == self._newest else self._all()
        self._held.append(batch)
        self._newest = self._key(batch, batch.num_rows - 1)
        if self._is_first or self._is_too_much:
            # the reader waits for the first row, and need not wait for the second batch
            self._is_first = False
            yield from self._older()
        if self._is_too_much:
            self._given_in_part = self._newest
            yield from self._all()

    def end(self) -> Iterator[pa.RecordBatch]:
        """Gives all: only rows of larger keys come after this, if any."""
        yield from self._all()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=True)
        self._newest = None

    def interrupt(self) -> Iterator[pa.RecordBatch]:
        """Gives the rows before the newest key, and forgets the rows of that: they are to come again.

        `reached` then tells from where on. See `is_in_part`.
        """
        yield from self._older()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=False)
        self._held, self._newest = [], None

    @property
    def is_in_part(self) -> bool:
        """Whether some rows of the newest key were given already, so that it cannot be read again."""
        return self._newest is not None and self._newest == self._given_in_part

    @property
    def _is_too_much(self) -> bool:
        return sum(int(batch.nbytes) for batch in self._held) > self._bytes_max

    def _all(self) -> Iterator[pa.RecordBatch]:
        held, self._held = self._held, []
        yield from held

    def _older(self) -> Iterator[pa.RecordBatch]:
        """Gives the rows before the newest key."""
        if not self._held:
            return
        *before, last = self._held
        older = self._start_of_newest(last)
        if older:
            # whatever is held before a batch has the key of its first row
            self._held = [last.slice(older)]
            yield from before
            yield last.slice(0, older)

    def _start_of_newest(self, batch: pa.RecordBatch) -> int:
        """The first row of the newest key, which the last row has, by bisection."""
        low, high = 0, int(batch.num_rows) - 1
        if high and self._key(batch, high - 1) != self._newest:
            return high
        while low < high:
            middle = (low + high) // 2
            if self._key(batch, middle) == self._newest:
                high = middle
            else:
                low = middle + 1
        return low

    def _key(self, batch: pa.RecordBatch, row: int) -> tuple[KeyValue, ...]:
        return tuple(batch.column(name)[row].as_py() for name in self._names)


# Look-ups of a key without an engine, which read the pages that can have it; what does not fit needs one.

FILES_MAX = 16
"""Of a group of leaves: more are better merged by an engine."""


def looked_up(
    context: TableContext, schema: Schema, asked: Question, transform: Transform, scans: Sequence[Scan]
) -> Iterable[pa.RecordBatch] | None:
    """The rows of some files, in key order, with the keys and the columns asked for; None: ask an engine.

    Ask one where more than a key is wanted, and for a table that merges rows or hides some by their age. Of a
    keyed table it is the newest row of each key, unless that is a mark of deletion.
    """
    keys = [_key_of(schema, scan) for scan in scans] if len(scans) <= FILES_MAX else [{}]
    if not all(keys) or asked.conditions or transform.aggregates or transform.age_off:
        return None
    properties = context.properties
    newest_by = newest_first(properties) if is_keyed(properties) else ()
    stored = stored_schema(schema, properties)
    if not all(_is_plain(stored, scan) for scan in scans):
        return None
    wanted = list(dict.fromkeys((*schema.key_names, *asked.columns)))
    hidden = [*newest_by, DELETED_AT] if newest_by else []
    columns = [stored.field(name) for name in dict.fromkeys((*wanted, *hidden))]
    if not can_look_up(schema.key_fields, columns):
        return None
    names = [field.name for field in columns]
    batches: list[pa.RecordBatch] = []
    for scan, key in zip(scans, keys, strict=True):
        found = rows_of(context.objects, scan.filename, scan.byte_count or 0, key, names)
        if found is None:
            return None
        batches += found
    if len(batches) > 1:
        order = [(name, "ascending") for name in schema.key_names]
        order += [(name, "descending") for name in newest_by]
        rows = pa.Table.from_batches(batches).sort_by(order)
        batches = cast("list[pa.RecordBatch]", rows.combine_chunks().to_batches())
    return _newest(batches, schema, wanted) if newest_by else batches


def _newest(batches: Iterable[pa.RecordBatch], schema: Schema, names: Sequence[str]) -> list[pa.RecordBatch]:
    """Returns the first row of each key, without marks of deletion."""
    first = first_of_keys(batches, schema.row_key_names)
    return [batch.filter(pc.is_null(batch.column(DELETED_AT))).select(names) for batch in first]


def _is_plain(schema: Schema, scan: Scan) -> bool:
    """Whether all rows of a file count, as they were written."""
    written = written_schema(schema, scan.filename)
    is_whole = not scan.deletions and bool(scan.byte_count)
    return is_whole and is_as_stored(written, schema)


def _key_of(schema: Schema, scan: Scan) -> dict[Field, Any]:
    """The values of the first row keys that a file's wanted rows have; empty when more is wanted of them."""
    if len(scan.slices) != 1:
        return {}
    wanted = scan.slices[0]
    leading = list(takewhile(lambda field: field.name in wanted, schema.row_keys))
    ranges = [wanted[field.name] for field in leading]
    if len(leading) != len(wanted) or not all(len(one) == 1 and one[0].is_exact for one in ranges):
        return {}
    return {field: one[0].min for field, one in zip(leading, ranges, strict=True)}


Groups = Iterator[tuple[Scan, ...]]
_Prepared = Iterator[tuple[Sequence[Scan], Iterable[pa.RecordBatch]]]
BEGUN_BYTES_MAX = 64 * 1024 * 1024
"""Of rows of the next group, made while others are used."""
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
    for groups in portions(planned_groups, _bytes_of, bytes_max):
        names = {scan.filename for group in groups for scan in group} if context.verifies else None
        digests = None if names is None else context.store.digests(sorted(names))
        yield Part(asked, tuple(groups), now_ms, digests)


def columns_of(schema: Schema, names: Sequence[str]) -> pa.Schema:
    """Some columns of a table as Arrow has them."""
    whole = arrow_schema(schema)
    return whole if tuple(names) == schema.names else pa.schema([whole.field(name) for name in names])


def _bytes_of(group: Sequence[Scan]) -> int:
    return sum(scan.byte_count or 0 for scan in group)


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
        with kept(self._context, self._at):
            try:
                yield from self._limited(self.planned(groups, None))
            except FileGone as error:
                raise gone_of_moment(self._context, self._at, error) from error

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
            parts = first_divided(groups, lambda: self._moment.schema, self._asked.limit)
            yield from self._used(self._prepared(parts, start))
            return
        parts = divided(groups, self._context.objects, lambda: self._moment.schema)
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
        yield from (batch.to_pyarrow() for batch in self._stream(physical, scans))

    def _keyed(self, scans: Sequence[Scan]) -> KeyedScans:
        context, asked = self._context, self._asked
        names = tuple(dict.fromkeys((*context.schema.key_names, *asked.columns)))
        return KeyedScans(context.schema, context.properties, scans, asked.conditions, self.now_ms, names)

    def _stream(self, physical: ExecutionPlan, scans: Sequence[Scan]) -> Iterator[RecordBatch]:
        self._interruption.check()
        are_many = self._may_be_many(scans)
        stream = key_session(self._context.objects, of_large_batches=are_many).execute(physical, 0)
        if self._may_search or any(scan.deletions for scan in scans):
            return interruptible(stream, self._interruption)
        return self._checked(stream)

    def _may_be_many(self, scans: Sequence[Scan]) -> bool:
        """Whether batches may have many rows; of several files where they are merged as they lie in them."""
        if self._asked.limit is not None or self._transform.aggregates:
            return False  # who asks for few rows waits for the first
        if len(scans) > 1:
            leaves_marks_out = self._is_keyed and not self._keyed(scans).merges
            if self._may_search or leaves_marks_out or any(scan.deletions for scan in scans):
                return False
        return are_narrow(scans, self._context.objects, self._moment.schema, LARGE_BATCH_ROWS)

    def _checked(self, stream: Iterable[RecordBatch]) -> Iterator[RecordBatch]:
        for batch in stream:
            self._interruption.check()
            yield batch

    @cached_property
    def _conditions(self) -> Expr:
        """What rows must meet beside their keys, made once for all groups: it may have many values."""
        return reduce(and_, map(meets, self._asked.conditions))

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
                found = self._looked_up(scans, start)
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

    def _looked_up(self, scans: Sequence[Scan], start: Reached | None) -> Iterable[pa.RecordBatch] | None:
        if start is not None:
            return None
        self._interruption.check()
        return looked_up(self._context, self._moment.schema, self._asked, self._transform, scans)

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
        return from_key(self._moment.schema.key_fields, start.key, inclusive=not start.given)

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
