"""The rows of keyed tables: the newest of each key first, then what is asked of values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, ExecutionPlan, Expr, SessionContext, functions, literal

from dormouse.data.datafusion_session import column, key_order, union
from dormouse.data.newest import FirstOfKeys
from dormouse.data.transform import Transform
from dormouse.model.schema import Schema
from dormouse.model.table import DELETED_AT, TableProperties, newest_first, stored_schema
from dormouse.objects.store import ObjectStore
from dormouse.reading.overlaps import layers, overlap
from dormouse.reading.planner import Scan
from dormouse.reading.row_filter import meets, parted, remains, rendered
from dormouse.reading.scan_session import DATAFUSION, stored_rows
from dormouse.reading.where import Condition, Deletion

GONE = "__gone"
"""Whether the newest row of its key is none that is wanted."""


@dataclass(frozen=True, slots=True)
class KeyedScans:
    """Files of a keyed table that are read together: all that may have a row of the keys that are wanted.

    `conditions` are those on values. Where no two files can have the same key, rows are filtered as they are
    read.
    """

    schema: Schema
    properties: TableProperties
    scans: Sequence[Scan]
    conditions: Sequence[Condition] = ()
    now_ms: int = 0
    names: tuple[str, ...] = ()
    """Of columns, row keys among them."""
    hides: bool = False
    """Whether the rows that are gone are wanted, too, as they hide rows of other files."""

    @property
    def merges(self) -> bool:
        return self.hides or overlap(self.scans)

    def layers(self, store: ObjectStore) -> tuple[KeyedScans, KeyedScans] | None:
        """Returns the large files, and the small ones whose rows replace theirs.

        Returns None where the rows of all files must be compared with each other.
        """
        found = layers(store, self.schema, self.properties, self.scans)
        if not found.large or found.undecided or found.together:
            return None
        large = replace(self, scans=(*found.alone, *found.large))
        return large, replace(self, scans=found.small, hides=True)

    def rows(self, ctx: SessionContext, store: ObjectStore) -> DataFrame:
        """In no order: the rows that are wanted, where each key is once; else all, with what is gone."""
        stored, order = stored_schema(self.schema, self.properties), newest_first(self.properties)
        narrowed = self._marked if self.merges else self._filtered
        return union(
            [
                narrowed(stored_rows(ctx, store, stored, scans, order), deletions)
                for deletions, scans in self._ways().items()
            ]
        )

    def plan(self, ctx: SessionContext, store: ObjectStore, start: Expr | None = None) -> ExecutionPlan:
        """Of what `newest` takes; with `start` of the keys that meet it."""
        rows = self.rows(ctx, store)
        return self._sorted(rows if start is None else rows.filter(start)).execution_plan()

    def _sorted(self, rows: DataFrame) -> DataFrame:
        """By key, and the newest first, with the columns that are needed from there on."""
        if not self.merges:
            return rows.sort(*key_order(self.schema.row_key_names)).select(*map(column, self.names))
        rows = rows.sort(*key_order(self.schema.row_key_names, newest_first(self.properties)))
        return rows.select(*map(column, [*self.names, GONE]))

    def newest(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields of sorted rows the newest of each key, if it meets the conditions, or `hides` others."""
        if not self.merges:
            yield from batches
            return
        first = FirstOfKeys(self.schema.row_key_names)
        for batch in batches:
            found = first.of(batch)
            if self.hides:
                yield found
                continue
            gone = found.column(GONE)
            # to filter copies all that stays
            left = found if gone.false_count == len(gone) else found.filter(pc.invert(gone))
            yield left.select(self.names)

    def _ways(self) -> dict[tuple[Deletion, ...], list[Scan]]:
        """Scans by the deletions of them; without those that leave out rows as they are read."""
        ways: dict[tuple[Deletion, ...], list[Scan]] = defaultdict(list)
        for scan in self.scans:
            hiding, others = parted(scan.deletions, hides=self.properties.newest_by is not None)
            ways[hiding].append(replace(scan, deletions=others))
        return ways

    def _filtered(self, rows: DataFrame, deletions: Sequence[Deletion]) -> DataFrame:
        left = [rendered(remains(self.schema, deletions), DATAFUSION)] if deletions else []
        return rows.filter(column(DELETED_AT).is_null(), *left, *self._wanted(rows))

    def _marked(self, rows: DataFrame, deletions: Sequence[Deletion]) -> DataFrame:
        gone = column(DELETED_AT).is_not_null()
        if deletions:
            gone = gone | ~rendered(remains(self.schema, deletions), DATAFUSION)
        if wanted := self._wanted(rows):
            gone = gone | ~functions.coalesce(reduce(and_, wanted), literal(False))
        needed = dict.fromkeys([*self.names, *newest_first(self.properties)])
        return rows.select(*map(column, needed), gone.alias(GONE))

    def _wanted(self, rows: DataFrame) -> list[Expr]:
        """What a newest row must meet."""
        young = Transform.parse(self.schema, self.properties).young_sql(self.now_ms)
        return [
            *(rendered(meets(one), DATAFUSION) for one in self.conditions),
            *([] if young is None else [rows.parse_sql_expr(young)]),
        ]
