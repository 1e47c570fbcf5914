"""The changes of a keyed table between two moments: each key whose newest row has other values, once.

Only the keys of loaded rows, and keys that a deletion matches, can have another newest row. They are sorted
and looked up at both moments, a portion at a time. A load of a row that is older than the key's newest row,
or equal to it, changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from dataclasses import field as new
from functools import cached_property, partial
from itertools import chain
from operator import attrgetter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.datafusion_session import column
from dormouse.data.file_checks import Flags, differ
from dormouse.data.leaf_sorter import LeafSorter
from dormouse.data.newest import first_of_keys
from dormouse.data.transform import Transform
from dormouse.model.cut import Position
from dormouse.model.loops import portions
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Schema
from dormouse.model.table import SEQUENCE, stored_schema
from dormouse.reading.checked_files import named_failures
from dormouse.reading.keyed import KeyedScans
from dormouse.reading.planner import Scan
from dormouse.reading.scan_session import (
    executed,
    key_session,
    planned,
    stored_rows,
)
from dormouse.reading.streams import Interruption
from dormouse.reading.table_view import plan_query
from dormouse.reading.where import deletions_of
from dormouse.state.context import TableContext
from dormouse.state.history.changes import BEFORE_ALL
from dormouse.state.history.retention import PastEvent, PastRestore

UPSERT, DELETE = "upsert", "delete"
KEYS_AT_ONCE = 32_768
LISTED_MAX = 1_000
"""The most values of a key that are looked up one by one; more values are looked up as a range."""
SORTED_BYTES = 64 * 1024 * 1024
_AFTER, _TILL, _ROW = "__after", "__till", "__row"


@dataclass(frozen=True)
class KeyedChanges:
    """The changes of one table, after one moment and up to another."""

    context: TableContext
    after: Position
    till: Position
    interruption: Interruption
    schema: pa.Schema
    """The wanted columns and the kind of change. A deleted key has values only in the key columns."""
    near: KeyRanges = new(default_factory=KeyRanges)
    """The ranges of the keys that are wanted of deletions and restores."""
    touched: bool = False
    """True if each key that loads, deletions or restores touched counts as changed."""

    def batches(
        self, files: Iterable[Sequence[Scan]], events: Sequence[PastEvent]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the changes, computed from the added files and from events: deletions and restores.

        Each item of `files` has scans that are read at the same time.
        """
        keys = Schema(self.context.schema.row_keys)
        with LeafSorter(keys, 1, by_leaf=False, memory_bytes=SORTED_BYTES) as sorter:
            for batch in chain(chain.from_iterable(map(self._keys_of, files)), *map(self._of_event, events)):
                sorter.add(batch, pa.array(np.zeros(batch.num_rows, np.int32)))
            single = first_of_keys(sorter.sorted_batches(), keys.row_key_names)
            for some in portions(single, attrgetter("num_rows"), KEYS_AT_ONCE):
                yield from self._compared(pa.Table.from_batches(some)).to_batches()

    def _keys_of(self, scans: Sequence[Scan]) -> Iterator[pa.RecordBatch]:
        """Yields the keys of all rows in added files. A key can occur more than once."""
        ctx, names = key_session(self.context.objects), self.context.schema.row_key_names
        with named_failures(self.context, scans, self._transform):
            plan = planned(
                self.context,
                scans,
                lambda: (
                    stored_rows(ctx, self.context.objects, self._stored, scans)
                    .select(*map(column, names))
                    .execution_plan()
                ),
                self.interruption,
            )
            yield from executed(self.context, plan, self.interruption)

    def _of_event(self, event: PastEvent) -> Iterator[pa.RecordBatch]:
        """Yields the keys that an event may have changed.

        A deletion may have changed the keys that it matched at the earlier moment, a restore all keys.
        """
        names = self.context.schema.row_key_names
        if isinstance(event, PastRestore):
            for at in (self.after, self.till):
                yield from self._newest(self.near, at, names)
            return
        for one in deletions_of(self.context.schema, [(event.deletion_id, event.condition)]):
            if not (ranges := one.ranges.intersect(self.near)).is_empty:
                yield from self._newest(ranges, self.after, names)

    def _compared(self, keys: pa.Table) -> pa.Table:
        """Returns the changes of some keys, which are in order."""
        names, ranges = list(self.context.schema.row_key_names), self._ranges(keys)
        wanted = (*self.context.schema.names, SEQUENCE)
        before, now = (self._found(keys, ranges, at, wanted) for at in (self.after, self.till))
        joined = keys
        for found, name in ((before, _AFTER), (now, _TILL)):
            numbered = found.select([*names, SEQUENCE]).rename_columns([*names, name])
            numbered = numbered.append_column(f"{name}_row", pa.array(np.arange(found.num_rows)))
            joined = joined.join(numbered, names, join_type="left outer")
        joined = joined.sort_by([(name, "ascending") for name in names])
        if self.touched:
            return self._changes(joined, now)
        differs = pc.fill_null(pc.not_equal(joined[_AFTER], joined[_TILL]), True)
        is_known = pc.or_(pc.is_valid(joined[_AFTER]), pc.is_valid(joined[_TILL]))
        joined = joined.filter(pc.and_(differs, is_known))
        return self._changes(joined.filter(pa.array(self._other_values(joined, before, now))), now)

    def _other_values(self, joined: pa.Table, before: pa.Table, now: pa.Table) -> Flags:
        """Returns a flag for each key: true if its values differ at the two moments, or one lacks the key."""
        places = [joined[f"{name}_row"].combine_chunks() for name in (_AFTER, _TILL)]
        both = pc.and_(*(pc.is_valid(one) for one in places)).to_numpy(zero_copy_only=False)
        at = [one.filter(pa.array(both)) for one in places]
        differs = np.zeros(int(both.sum()), np.bool_)
        for field in self.context.schema.values:
            sides = (
                rows[field.name].combine_chunks().take(one)
                for rows, one in zip((before, now), at, strict=True)
            )
            differs |= differ(*sides)
        changed: Flags = ~both
        changed[both] = differs
        return changed

    def _changes(self, joined: pa.Table, now: pa.Table) -> pa.Table:
        rows, keys = joined[f"{_TILL}_row"].combine_chunks(), self.context.schema.row_key_names
        columns = [joined[name] if name in keys else now[name].take(rows) for name in self.schema.names[:-1]]
        kinds = pc.if_else(pc.is_valid(rows), UPSERT, DELETE)
        return pa.Table.from_arrays([*columns, kinds], schema=self.schema)

    def _found(self, keys: pa.Table, ranges: KeyRanges, at: Position, names: Sequence[str]) -> pa.Table:
        """Returns the newest rows of some keys at a moment."""
        first = self.context.schema.row_keys[0].name
        among = keys[first].combine_chunks()
        alike = (
            batch.filter(pc.is_in(batch.column(first), value_set=among))
            for batch in self._newest(ranges, at, names)
        )
        # many more rows may have the first key than are wanted; joined in portions, as each join builds a
        # table of all keys
        together = portions(alike, attrgetter("num_rows"), KEYS_AT_ONCE)
        found = [_among(pa.Table.from_batches(some), keys) for some in together]
        return pa.concat_tables([self._of_stored(names).empty_table(), *found])

    def _ranges(self, keys: pa.Table) -> KeyRanges:
        """Returns ranges that contain the sorted keys, up to the first key column with several values."""
        ranges: dict[str, list[Range]] = {}
        for name in self.context.schema.row_key_names:
            values = keys[name].unique()
            if len(values) <= LISTED_MAX:
                ranges[name] = list(map(Range.exactly, values.to_pylist()))
            else:
                ranges[name] = [Range(values[0].as_py(), values[-1].as_py(), max_inclusive=True)]
            if len(values) > 1:
                break
        return KeyRanges(ranges)

    def _newest(self, ranges: KeyRanges, at: Position, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """Yields the newest row of each key in the ranges at a moment, even if the filter hides it."""
        if at.snapshot == BEFORE_ALL:
            return
        context, ctx = self.context, key_session(self.context.objects)
        unfiltered = context.properties.model_copy(update={"filter": None})
        for scans in plan_query(context, ranges, at=at):
            keyed = KeyedScans(context.schema, unfiltered, scans, names=tuple(names))
            with named_failures(context, scans, self._transform):
                plan = planned(context, scans, partial(keyed.plan, ctx, context.objects), self.interruption)
                for batch in keyed.newest(executed(context, plan, self.interruption)):
                    yield pa.RecordBatch.from_arrays(batch.columns, schema=self._of_stored(names))

    def _of_stored(self, names: Sequence[str]) -> pa.Schema:
        whole = arrow_schema(self._stored)
        return pa.schema([whole.field(name) for name in names])

    @cached_property
    def _stored(self) -> Schema:
        return stored_schema(self.context.schema, self.context.properties)

    @cached_property
    def _transform(self) -> Transform:
        return Transform.parse(self.context.schema, self.context.properties)


def _among(rows: pa.Table, keys: pa.Table) -> pa.Table:
    """Returns the rows that have one of the given keys.

    Joins do not accept lists, maps or structs, so only the keys and the row numbers are joined.
    """
    numbers = pa.array(np.arange(rows.num_rows))
    there = rows.select(keys.column_names).append_column(_ROW, numbers)
    there = there.join(keys, keys.column_names, join_type="left semi")
    return rows.filter(pc.is_in(numbers, value_set=there[_ROW].combine_chunks()))
