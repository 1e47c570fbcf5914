"""The rows that a restore changed: those by which the moments just before and just after it differ.

Files come and go that hold the same rows, as what a compaction merged is put back. So the rows of both
moments are counted against each other, merged in key order, a group of leaves at a time, where files differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, Expr, SessionContext, functions, literal

from dormouse.data.expressions import column, key_order
from dormouse.data.stored import reshaped
from dormouse.data.transform import Transform
from dormouse.model.cut import milliseconds_at
from dormouse.reading.deletions import deletions_of
from dormouse.reading.key_ranges import KeyRanges, united
from dormouse.reading.planner import Scan
from dormouse.reading.scan_session import rows
from dormouse.reading.table_view import differing_groups
from dormouse.state.context import TableContext
from dormouse.state.history.events import PastRestore, touched

COUNT = "_change"
"""No column of a table whose changes are read: how many rows of these values came; below 0: went."""
BATCH_ROWS = 8_192


class Restored:
    """What one restore changed, as `Transform` has rows: rows that the filter hides are told of neither side.

    Where rows of equal key are merged, it is the merged rows that differ. They are read with the columns of
    then, and told with those of the context.
    """

    def __init__(self, context: TableContext, past: PastRestore) -> None:
        self._schema = context.schema
        self._then = context.as_of(past.before)
        self._transform = Transform.parse(self._then.schema, self._then.properties)
        self._past = past
        self._now_ms = milliseconds_at(past.before)

    def groups(self) -> Iterator[tuple[list[Scan], list[Scan]]]:
        """The scans of just before and of just after it, side by side, as far as they are to be read."""
        ranges = self._ranges()
        if ranges is None:
            return
        past = self._past
        for before, after in differing_groups(self._then, ranges, past.before, past.after):
            if self._transform.aggregates:
                # a row of one may be merged of rows that both have
                yield before, after
            else:
                same = set(before).intersection(after)
                yield [one for one in before if one not in same], [one for one in after if one not in same]

    def frame(self, ctx: SessionContext, before: Sequence[Scan], after: Sequence[Scan]) -> DataFrame:
        """The rows of which one side has more, each once, with `COUNT`; in key order, as all is read."""
        schema = self._schema
        sides = [self._rows(ctx, scans, sign) for scans, sign in ((before, -1), (after, 1)) if scans]
        keys = key_order(schema.key_names)
        if len(sides) == 1:
            return sides[0].sort(*keys)
        count: list[Expr] = [functions.sum(column(COUNT)).alias(COUNT)]
        # over what is sorted by the keys, only the rows of one key are in memory
        found = sides[0].union(sides[1]).sort(*keys).aggregate([column(name) for name in schema.names], count)
        return found.filter(column(COUNT) != literal(0))

    def _rows(self, ctx: SessionContext, scans: Sequence[Scan], sign: int) -> DataFrame:
        found = rows(ctx, self._then.objects, self._transform, scans, self._now_ms)
        # before they are counted: rows that differ by a column that was dropped are the same
        found = reshaped(found, self._then.schema, self._schema)
        return found.with_column(COUNT, literal(pa.scalar(sign, pa.int64())))

    def _ranges(self) -> KeyRanges | None:
        """Around all rows that it may have changed; None: there are none."""
        partition_ids, conditions = touched(self._then, self._past)
        parts = [deletion.ranges for deletion in deletions_of(self._then.schema, conditions)]
        if partition_ids:
            tree = self._then.partitions.at(self._past.before.epoch)
            regions = (tree[partition_id].region for partition_id in partition_ids)
            parts += [KeyRanges({name: (item,) for name, item in region.items()}) for region in regions]
        return united(parts) if parts else None


def one_each(batch: pa.RecordBatch, counts: pa.Array) -> Iterator[pa.RecordBatch]:
    """Each row as often as its count says."""
    ends = np.cumsum(pc.abs(counts).to_numpy(zero_copy_only=False))
    total = int(ends[-1]) if len(ends) else 0
    if total == len(ends):
        yield batch
        return
    for start in range(0, total, BATCH_ROWS):
        places = np.arange(start, min(start + BATCH_ROWS, total))
        yield batch.take(pa.array(np.searchsorted(ends, places, side="right")))
