"""The rows of keyed tables: the newest of each key first, then what is asked of values.

Files that may have the same keys are told by their bounds and by what their footers say.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import and_
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame, ExecutionPlan, Expr, SessionContext, functions, literal

from dormouse.data.arrow_schema import written_schema
from dormouse.data.datafusion_session import column, key_order, union
from dormouse.data.newest import chunks_of, ends_of, first_of_keys
from dormouse.data.transform import Transform
from dormouse.errors import InvalidData, ObjectStoreError
from dormouse.model.schema import Schema, then_called
from dormouse.model.table import DELETED_AT, TableProperties, newest_first, stored_schema
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP
from dormouse.objects.store import ObjectStore
from dormouse.reading.page_reads import KEPT
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.row_filter import meets, parted, remains, rendered
from dormouse.reading.scan_session import DATAFUSION, stored_rows
from dormouse.reading.where import Condition, Deletion

GONE = "__gone"
"""Whether the newest row of its key is none that is wanted."""
FOOTERS_MAX = 1_000
"""Files of one query whose footers are read to learn how new their rows are."""
_THREADS_MAX = 16
WHOLE_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
"""Types whose smallest and largest values are exact in a footer, as integers."""


# What the footer of a keyed table's file says of its rows' places.


class NewestBounds(NamedTuple):
    """How new the rows of a file are: no row comes before `first` or after `last`.

    Both have a number for each column that tells which row of a key is the newest.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


def newest_bounds(store: ObjectStore, name: str, columns: Sequence[str | None]) -> NewestBounds | None:
    """Returns how new the rows of a file are by columns of `WHOLE_NUMBERS`, as the file calls them.

    Reads a footer once a process. Returns None where a column or its statistics are missing, or the file is.
    """
    key = (store.url, name, "newest", *columns)
    found: NewestBounds | None = KEPT.get(key)
    if found is None:
        try:
            ends = [known for chunks in chunks_of(store, name, columns) if (known := ends_of(chunks))]
        except (InvalidData, ObjectStoreError):
            return None
        if len(ends) < len(columns):
            return None
        found = NewestBounds(*(tuple(side) for side in zip(*ends, strict=True)))
        KEPT.put(key, found, len(name))
    return found


# Files by what must be done to find the newest row of each key.


@dataclass(slots=True)
class Layers:
    """Files of a keyed table, by what must be done to find the newest row of each key.

    - `alone`: no other file can have a key of the file. Each of its rows is the newest of its key.
    - `large`: the large files of places that have small files, too. No two of them can have the same key. A
      row lives if its key is in none of `small`.
    - `small`: the small files of these places.
    - `undecided`: those of `large` that may have a newer row than `small` has of the same key.
    - `together`: files of other places, whose rows must all be compared.
    """

    alone: list[Scan] = field(default_factory=list)
    large: list[Scan] = field(default_factory=list)
    small: list[Scan] = field(default_factory=list)
    undecided: list[Scan] = field(default_factory=list)
    together: list[Scan] = field(default_factory=list)


def layers(store: ObjectStore, schema: Schema, properties: TableProperties, scans: Iterable[Scan]) -> Layers:
    """Sorts the files of a keyed table into layers. Reads the footers of those that overlap, once a process.

    A footer that cannot be read, or does not tell, makes a large file `undecided`.
    """
    found = Layers()
    places: list[tuple[list[Scan], list[Scan]]] = []
    for cluster in clusters(scans):
        if len(cluster) == 1:
            found.alone += cluster
            continue
        large, small = _by_size(cluster)
        if any(scan.max_key is None for scan in cluster) or bytes_of(small) > bytes_of(large):
            found.together += cluster
        else:
            places.append((large, small))
    files = [scan for place in places for part in place for scan in part]
    bounds = _bounds_of(store, schema, properties, files) if len(files) <= FOOTERS_MAX else {}
    for large, small in places:
        found.large += large
        found.small += small
        if not _are_older(large, small, bounds):
            found.undecided += large
    return found


def clusters(scans: Iterable[Scan]) -> Iterator[list[Scan]]:
    """Scans that may have keys of each other come together; each has its keys once.

    In the order of their keys; those of which the keys are not known are with all others.
    """
    listed = list(scans)
    if any(scan.min_key is None or scan.max_key is None for scan in listed):
        yield listed
        return
    found: list[Scan] = []
    reached = b""
    for scan in sorted(listed, key=lambda one: one.min_key or b""):
        if found and (scan.min_key or b"") > reached:
            yield found
            found, reached = [], b""
        found.append(scan)
        reached = max(reached, scan.max_key or b"")
    if found:
        yield found


def overlap(scans: Iterable[Scan]) -> bool:
    """Whether any two may have a key of each other."""
    return any(len(found) > 1 for found in clusters(scans))


def _by_size(cluster: Sequence[Scan]) -> tuple[list[Scan], list[Scan]]:
    """The largest files that have no key of each other, and all others."""
    large: list[Scan] = []
    small: list[Scan] = []
    starts: list[bytes] = []
    for scan in sorted(cluster, key=lambda one: (-(one.byte_count or 0), one.filename)):
        low, high = scan.min_key or b"", scan.max_key or b""
        at = bisect_left(starts, low)
        meets_next = at < len(large) and starts[at] <= high
        meets_last = at > 0 and (large[at - 1].max_key or b"") >= low
        if meets_next or meets_last:
            small.append(scan)
        else:
            large.insert(at, scan)
            starts.insert(at, low)
    return large, small


def _bounds_of(
    store: ObjectStore, schema: Schema, properties: TableProperties, scans: Sequence[Scan]
) -> dict[str, NewestBounds]:
    """Returns how new the rows of files are, for the files that tell it in their footers."""
    stored, newest_by = stored_schema(schema, properties), newest_first(properties)

    def bounds_of(scan: Scan) -> tuple[str, NewestBounds | None]:
        written = written_schema(stored, scan.filename)
        names = [then_called(stored, written, name) for name in newest_by]
        return scan.filename, newest_bounds(store, scan.filename, names)

    if any(stored.field(name).type not in WHOLE_NUMBERS for name in newest_by):
        return {}
    if all(store.local_path(scan.filename) is not None for scan in scans):
        found = list(map(bounds_of, scans))
    else:
        with ThreadPoolExecutor(_THREADS_MAX, "dormouse-footers") as threads:
            found = list(threads.map(bounds_of, scans))
    return {name: bounds for name, bounds in found if bounds is not None}


def _are_older(large: Iterable[Scan], small: Iterable[Scan], bounds: Mapping[str, NewestBounds]) -> bool:
    """Returns whether each row of the large files is known to be older than all rows of the small ones."""
    lasts = [bounds.get(scan.filename) for scan in large]
    firsts = [bounds.get(scan.filename) for scan in small]
    known = [one for one in (*lasts, *firsts) if one is not None]
    return len(known) == len(lasts) + len(firsts) and max(one.last for one in known[: len(lasts)]) < min(
        one.first for one in known[len(lasts) :]
    )


# The rows of files that are read together.


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
        # by the deletions of rows that hide others; the other deletions leave out rows as they are read
        ways: dict[tuple[Deletion, ...], list[Scan]] = defaultdict(list)
        for scan in self.scans:
            hiding, others = parted(scan.deletions, hides=self.properties.newest_by is not None)
            ways[hiding].append(replace(scan, deletions=others))
        narrowed = self._marked if self.merges else self._filtered
        frames = ((stored_rows(ctx, store, stored, scans, order), hiding) for hiding, scans in ways.items())
        return union([narrowed(frame, hiding) for frame, hiding in frames])

    def plan(self, ctx: SessionContext, store: ObjectStore, start: Expr | None = None) -> ExecutionPlan:
        """Of what `newest` takes; with `start` of the keys that meet it."""
        rows = self.rows(ctx, store)
        rows = rows if start is None else rows.filter(start)
        newest_by, names = (newest_first(self.properties), [GONE]) if self.merges else ((), [])
        rows = rows.sort(*key_order(self.schema.row_key_names, newest_by))
        # the columns that are needed from there on
        return rows.select(*map(column, [*self.names, *names])).execution_plan()

    def newest(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields of sorted rows the newest of each key, if it meets the conditions, or `hides` others."""
        if not self.merges:
            yield from batches
            return
        for found in first_of_keys(batches, self.schema.row_key_names):
            if self.hides:
                yield found
                continue
            gone = found.column(GONE)
            # to filter copies all that stays
            left = found if gone.false_count == len(gone) else found.filter(pc.invert(gone))
            yield left.select(self.names)

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
