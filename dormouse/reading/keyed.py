"""The newest row of each key, found among many rows, for queries of keyed tables and of row tables.

Rows of the last key of a sorted stream are held back, so that an interrupted query can continue from it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, ExecutionPlan, Expr, SessionContext, functions, literal

from dormouse.data.datafusion_session import column, key_order, sorted_session, union
from dormouse.data.newest import first_of_keys, last_of_keys
from dormouse.data.transform import Transform
from dormouse.model.region import KeyValue, united
from dormouse.model.schema import Schema
from dormouse.model.table import (
    DELETED_AT,
    ROW_DELETED,
    ROW_ID,
    ROW_VERSION,
    TableProperties,
    newest_first,
    stored_schema,
)
from dormouse.model.types import INT, LONG
from dormouse.objects.store import ObjectStore
from dormouse.reading.overlaps import layers, overlap, parted_by_marks
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.row_filter import every, meets, parted, remains, rendered
from dormouse.reading.scan_session import DATAFUSION, stored_rows
from dormouse.reading.streams import up_to
from dormouse.reading.where import Condition, Deletion, Question
from dormouse.state.context import TableContext

GONE = "__gone"
"""The boolean column that is true if the newest row of a key is not returned.

Such a row is a mark of deletion, is matched by a deletion, or does not meet the conditions.
"""
FILTERED_BATCHES_MAX = 32
FILTERED_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes of the batches that are filtered in one DataFusion plan."""
_BATCHES = "batches"
SMALL_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of small files beside large ones whose rows are held in memory while the group is read."""
HELD_BYTES_MAX = 64 * 1024 * 1024


# The rows of keyed tables: first the newest row of each key, then the conditions on values.


@dataclass(frozen=True, slots=True)
class KeyedScans:
    """Files of a keyed table that are read together: all that may have rows of the wanted keys.

    `conditions` are those on values. If no two files can have the same key, rows are filtered while they are
    read.
    """

    schema: Schema
    properties: TableProperties
    scans: Sequence[Scan]
    conditions: Sequence[Condition] = ()
    now_ms: int = 0
    names: tuple[str, ...] = ()
    """The wanted columns, including the row keys."""
    hides: bool = False
    """True if deleted rows are returned too, since they hide rows of other files."""

    @property
    def merges(self) -> bool:
        return self.hides or overlap(self.scans)

    def layers(self, store: ObjectStore) -> tuple[KeyedScans, KeyedScans] | None:
        """Returns the large files, and the small files whose rows replace rows of the large ones.

        Returns None if the rows of all files must be compared with each other.
        """
        found = layers(store, self.schema, self.properties, self.scans)
        if not found.large or found.undecided or found.together:
            return None
        large = replace(self, scans=(*found.alone, *found.large))
        return large, replace(self, scans=found.small, hides=True)

    @property
    def in_parts(self) -> bool:
        """Returns whether these small files belong to a group in parts and are read once for all parts."""
        is_number = self.schema.row_keys[0].type in (INT, LONG)
        return is_number and self.scans[0].whole is not None and bytes_of(self.scans) <= SMALL_BYTES_MAX

    def of_group(self) -> KeyedScans:
        """Returns the scans as they were before their group was divided into parts."""
        scans = tuple(replace(one, slices=one.whole or one.slices, whole=None) for one in self.scans)
        return replace(self, scans=scans)

    def in_part(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields those rows of the group, in key order, that lie in the part of these scans."""
        name = self.schema.row_keys[0].name
        wanted = united([part for scan in self.scans for part in scan.slices]).enclosing(name)
        for batch in batches:
            keys, start, end = batch.column(name).to_numpy(), 0, batch.num_rows
            if wanted.min is not None:
                start = int(keys.searchsorted(wanted.min, "left" if wanted.min_inclusive else "right"))
            if wanted.max is not None:
                end = int(keys.searchsorted(wanted.max, "right" if wanted.max_inclusive else "left"))
            if start < end:
                yield batch.slice(start, end - start)

    def rows(self, ctx: SessionContext, store: ObjectStore) -> DataFrame:
        """Returns the rows in no order.

        If no key can occur in two files, these are the wanted rows. Otherwise they are all rows, and the
        column `GONE` marks unwanted ones.
        """
        stored, order = stored_schema(self.schema, self.properties), newest_first(self.properties)
        # a row that a hiding deletion matches still hides older rows, so it is only marked; rows that other
        # deletions match are left out when the files are read
        ways: dict[tuple[tuple[Deletion, ...], bool], list[Scan]] = defaultdict(list)
        plain, others = ([], self.scans) if self.merges else parted_by_marks(store, self.scans)
        for scans, has_marks in ((plain, False), (others, True)):
            for scan in scans:
                hiding, left_out = parted(scan.deletions, hides=self.properties.newest_by is not None)
                ways[hiding, has_marks].append(replace(scan, deletions=left_out))
        frames = []
        for (hiding, has_marks), scans in ways.items():
            frame = stored_rows(ctx, store, stored, scans, order)
            if self.merges:
                frames.append(self._marked(frame, hiding))
            else:
                frames.append(self._filtered(frame, hiding, has_marks=has_marks))
        return union(frames)

    def plan(self, ctx: SessionContext, store: ObjectStore, start: Expr | None = None) -> ExecutionPlan:
        """Returns the plan of the rows in the order that `newest` needs; `start` is a condition on keys."""
        rows = self.rows(ctx, store)
        rows = rows if start is None else rows.filter(start)
        newest_by, names = (newest_first(self.properties), [GONE]) if self.merges else ((), [])
        rows = rows.sort(*key_order(self.schema.row_key_names, newest_by))
        # only the columns that are needed later
        return rows.select(*map(column, [*self.names, *names])).execution_plan()

    def newest(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the newest row of each key, from sorted rows.

        A row in which `GONE` is true is left out, unless `hides` is set: then it hides rows of other files.
        """
        if not self.merges:
            yield from batches
            return
        for found in first_of_keys(batches, self.schema.row_key_names):
            if self.hides:
                yield found
                continue
            gone = found.column(GONE)
            # a filter copies all remaining rows, so it is skipped if it would change nothing
            left = found if gone.false_count == len(gone) else found.filter(pc.invert(gone))
            yield left.select(self.names)

    def _filtered(self, rows: DataFrame, deletions: Sequence[Deletion], *, has_marks: bool) -> DataFrame:
        conditions = [column(DELETED_AT).is_null()] if has_marks else []
        conditions += [rendered(remains(self.schema, deletions), DATAFUSION)] if deletions else []
        conditions += self._wanted(rows)
        return rows.filter(*conditions) if conditions else rows

    def _marked(self, rows: DataFrame, deletions: Sequence[Deletion]) -> DataFrame:
        gone = column(DELETED_AT).is_not_null()
        if deletions:
            gone = gone | ~rendered(remains(self.schema, deletions), DATAFUSION)
        if wanted := self._wanted(rows):
            gone = gone | ~functions.coalesce(reduce(and_, wanted), literal(False))
        needed = dict.fromkeys([*self.names, *newest_first(self.properties)])
        return rows.select(*map(column, needed), gone.alias(GONE))

    def _wanted(self, rows: DataFrame) -> list[Expr]:
        """Returns the conditions that the newest row of a key must meet to be returned."""
        young = Transform.parse(self.schema, self.properties).young_sql(self.now_ms)
        return [
            *(rendered(meets(one), DATAFUSION) for one in self.conditions),
            *([] if young is None else [rows.parse_sql_expr(young)]),
        ]


# The current rows of row tables: the newest version of each row, unless it is a deletion.


@dataclass(frozen=True, slots=True)
class CurrentRows:
    """A query of a row table's current rows, which reads every version of the rows that may be wanted."""

    context: TableContext
    question: Question

    @property
    def every_version(self) -> tuple[TableContext, Question]:
        """The context and the question that read all versions of the rows with wanted ids.

        Other conditions are left out of it, because only the newest version of a row must meet them.
        """
        conditions = (condition.field.name for condition in self.question.conditions)
        columns = dict.fromkeys((ROW_ID, ROW_VERSION, ROW_DELETED, *self.question.columns, *conditions))
        return self.context.every_version, Question(self.question.ranges, (), tuple(columns))

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the wanted rows; `batches` have all versions, ordered by row id, then by version."""
        rows = (
            batch.filter(pc.invert(batch.column(ROW_DELETED))) for batch in last_of_keys(batches, [ROW_ID])
        )
        found = self._found(batch for batch in rows if batch.num_rows)
        return up_to((batch for batch in found if batch.num_rows), self.question.limit)

    def _found(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows that meet the conditions. DataFusion tests them, as it does when it reads files."""
        if not self.question.conditions:
            yield from batches
            return
        session = sorted_session(options={"datafusion.execution.target_partitions": "1"})
        wanted = rendered(every(map(meets, self.question.conditions)), DATAFUSION)
        for several in _growing(batches):
            frame = session.create_dataframe([several], _BATCHES).filter(wanted)
            for batch in frame.collect():
                columns = [batch.column(name) for name in several[0].schema.names]
                yield pa.RecordBatch.from_arrays(columns, schema=several[0].schema)
            session.deregister_table(_BATCHES)


def _growing(batches: Iterable[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yields lists of batches, longer and longer: making a plan costs more than filtering one batch.

    The first batch comes alone, so that a question with a limit gets its first rows at once.
    """
    several: list[pa.RecordBatch] = []
    size, most = 0, 1
    for batch in batches:
        several.append(batch)
        size += batch.nbytes
        if len(several) >= most or size >= FILTERED_BYTES_MAX:
            yield several
            several, size, most = [], 0, min(2 * most, FILTERED_BATCHES_MAX)
    if several:
        yield several


def read_from(context: TableContext, question: Question) -> tuple[TableContext, Question]:
    """Returns the context and the question that are planned.

    For current rows of a row table they select all versions. Otherwise they are the ones given.
    """
    return CurrentRows(context, question).every_version if context.current_rows else (context, question)


def wanted_of(
    context: TableContext, question: Question, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Yields the rows that a question wants; `batches` are the answer to the question of `read_from`."""
    return CurrentRows(context, question).of(batches) if context.current_rows else batches


# Rows of the last key wait until a larger key is seen.


@dataclass(frozen=True, slots=True)
class Reached:
    """A position in key order (row keys, then sort keys). All rows with smaller keys were returned.

    Rows of the key itself were returned if `given` is true.
    """

    key: tuple[KeyValue, ...]
    given: bool


class HeldBack:
    """A buffer for a sorted stream, which holds the rows of the last key until a larger key comes.

    `names` are the columns of the key. If the rows of one key exceed `bytes_max`, they are returned at once.
    Until a larger key comes, the stream can then not be continued (see `is_in_part`).
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
        """The number of held rows."""
        return sum(int(batch.num_rows) for batch in self._held)

    def take(self, batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Takes a batch; yields the rows that need not wait for a larger key."""
        if not batch.num_rows:
            return
        yield from self._older() if self._key(batch, 0) == self._newest else self._all()
        self._held.append(batch)
        self._newest = self._key(batch, batch.num_rows - 1)
        if self._is_first or self._is_too_much:
            # the reader waits for its first row, so the second batch is not waited for
            self._is_first = False
            yield from self._older()
        if self._is_too_much:
            self._given_in_part = self._newest
            yield from self._all()

    def whole(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields all rows of some keys, which are in memory: none has to wait."""
        for batch in batches:
            if batch.num_rows:
                self._newest = self._key(batch, batch.num_rows - 1)
                yield batch
        yield from self.end()

    def end(self) -> Iterator[pa.RecordBatch]:
        """Yields all held rows, because later rows have larger keys."""
        yield from self._all()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=True)
        self._newest = None

    def interrupt(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows before the last key, and drops the rows of that key.

        The dropped rows have to be read again. `reached` is then the position from which to continue.
        """
        yield from self._older()
        if self._newest is not None:
            self.reached = Reached(self._newest, given=False)
        self._held, self._newest = [], None

    @property
    def is_in_part(self) -> bool:
        """Returns whether some rows of the last key were returned already: they must not be read again."""
        return self._newest is not None and self._newest == self._given_in_part

    @property
    def _is_too_much(self) -> bool:
        return sum(int(batch.nbytes) for batch in self._held) > self._bytes_max

    def _all(self) -> Iterator[pa.RecordBatch]:
        held, self._held = self._held, []
        yield from held

    def _older(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows before the last key."""
        if not self._held:
            return
        *before, last = self._held
        older = self._start_of_newest(last)
        if older:
            # all rows held before this batch have the key of its first row
            self._held = [last.slice(older)]
            yield from before
            yield last.slice(0, older)

    def _start_of_newest(self, batch: pa.RecordBatch) -> int:
        """Returns the position of the first row in the batch that has the last key, found by bisection."""
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
