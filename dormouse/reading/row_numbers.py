"""The rows of files that deletions match, found once and cached.

Files and deletions never change, so neither do these rows. Readers leave out rows by their numbers or keys
instead of testing each row for each deletion.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, written_schema
from dormouse.data.datafusion_session import column
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError
from dormouse.model.region import KeyRanges, Range, compare, decode_key
from dormouse.model.types import INT, LONG
from dormouse.reading.checked_files import named_failures
from dormouse.reading.gone_rows import GoneRows, matched
from dormouse.reading.overlaps import clusters
from dormouse.reading.page_reads import KEPT_BYTES_MAX, row_group_bounds
from dormouse.reading.planner import Scan, keys_near
from dormouse.reading.row_filter import Fails, remains, rendered
from dormouse.reading.scan_session import DATAFUSION, executed, key_session, planned, stored_rows
from dormouse.reading.streams import Interruption
from dormouse.reading.where import Deletion
from dormouse.state.context import TableContext

ROWS_MAX = 250_000
"""The most matched rows of a file that are cached. Deletions that match more rows stay conditions."""
FILES_MAX = 64
"""The most files that are read for one query to find matched rows."""
BY_VALUE_MIN = 8
"""The fewest deletions by values for which a file is read by a query that wants few of its rows."""
SETS_MAX = 4
"""The most sets of deletions whose rows are cached for one file: one of each reader, and former ones."""
_THREADS_MAX = 4
_ANYWHERE = b"", b""
"""The corners of a deletion that bounds the first row key on no side."""


class _Known(NamedTuple):
    """The rows that a set of deletions matches; None if they are too many."""

    deletions: frozenset[Deletion]
    rows: GoneRows | None


class _Cache:
    """A cache of the matched rows of files, which drops the least recently used files."""

    def __init__(self) -> None:
        self._files: OrderedDict[object, list[_Known]] = OrderedDict()
        self._byte_count = 0
        self._lock = Lock()

    def of(self, file: object) -> list[_Known]:
        """Returns the known sets of a file, the newest first."""
        with self._lock:
            if file not in self._files:
                return []
            self._files.move_to_end(file)
            return list(self._files[file])

    def put(self, file: object, known: _Known) -> None:
        with self._lock:
            others = [one for one in self._files.pop(file, []) if one.deletions != known.deletions]
            self._byte_count -= sum(map(_byte_count, others))
            self._files[file] = [known, *others[: SETS_MAX - 1]]
            self._byte_count += sum(map(_byte_count, self._files[file]))
            while self._byte_count > KEPT_BYTES_MAX and len(self._files) > 1:
                self._byte_count -= sum(map(_byte_count, self._files.popitem(last=False)[1]))

    def clear(self) -> None:
        with self._lock:
            self._files.clear()
            self._byte_count = 0


def _byte_count(known: _Known) -> int:
    return 200 * len(known.deletions) + (0 if known.rows is None else known.rows.byte_count)


KNOWN = _Cache()


@dataclass(frozen=True, slots=True)
class Finder:
    """A finder of the rows that deletions match in a table's files, for one query.

    The query wants rows in the ranges `wanted`. With `reads` it reads files to find rows that are not cached.
    """

    context: TableContext
    wanted: KeyRanges
    interruption: Interruption
    reads: bool = True

    def settled(self, scans: Iterable[Scan]) -> list[Scan]:
        """Returns scans that have matched rows in `gone` instead of deletions, where this is faster.

        A scan keeps the deletions whose rows are not found. Its reader must leave out the rows in `gone`.
        """
        listed = list(scans)
        sets = {number: self._sets(scan) for number, scan in enumerate(listed) if scan.deletions}
        unknown = [number for number, some in sets.items() if self._missing(listed[number], some)]
        if self.reads and unknown:
            self.interruption.check()
            with ThreadPoolExecutor(min(len(unknown), _THREADS_MAX), "dormouse-gone") as threads:
                some = unknown[:FILES_MAX]
                list(threads.map(lambda number: self._find(listed[number], sets[number]), some))
            self.interruption.check()
        for number, useful in sets.items():
            listed[number] = self._with_known(listed[number], useful)
        return listed

    def _sets(self, scan: Scan) -> list[frozenset[Deletion]]:
        """Returns the sets of deletions whose rows are useful, the most useful set first."""
        by_value = frozenset(one for one in scan.deletions if one.corners == _ANYWHERE)
        if self.reads_much(scan):
            return [frozenset(scan.deletions), *([by_value] if by_value else [])]
        is_cached = by_value and any(one.deletions == by_value for one in KNOWN.of(self.key_of(scan)))
        return [by_value] if is_cached or len(by_value) >= BY_VALUE_MIN else []

    def _missing(self, scan: Scan, sets: Sequence[frozenset[Deletion]]) -> bool:
        """Returns whether the rows of the most useful set are not cached."""
        known = [one.deletions for one in KNOWN.of(self.key_of(scan))] if sets else []
        return any(some not in known for some in sets[:1])

    def _with_known(self, scan: Scan, sets: Sequence[frozenset[Deletion]]) -> Scan:
        first = self.context.stored_schema.row_keys[0]
        known = KNOWN.of(self.key_of(scan)) if sets else []
        for some in sets:
            rows = next((one.rows for one in known if one.deletions == some), None)
            if rows is not None:
                near = keys_near(first, [scan]).intersect(self.wanted.enclosing(first.name))
                gone = rows.within(first, near) if near is not None else rows
                left = tuple(one for one in scan.deletions if one not in some)
                return replace(scan, deletions=left, gone=gone)
        return scan

    def reads_much(self, scan: Scan) -> bool:
        """Returns whether the query wants all rows of a file, or rows of several of its row groups."""
        if scan.min_key is None or scan.max_key is None:
            return False
        schema = self.context.stored_schema
        first = schema.row_keys[0]
        low, high = (decode_key([first], key)[0] for key in (scan.min_key, scan.max_key))
        near = keys_near(first, [scan]).intersect(self.wanted.enclosing(first.name))
        if near is None:
            return False
        if (near.min is None or (compare(near.min, low) <= 0 and near.min_inclusive)) and (
            near.max is None or compare(near.max, high) > 0 or (near.max == high and near.max_inclusive)
        ):
            return True
        key = written_schema(schema, scan.filename).row_keys[0]
        groups = row_group_bounds(self.context.objects, scan.filename, scan.byte_count or 0, key)
        held = (Range(one.low, one.high, max_inclusive=True) for one in groups)
        return sum(near.intersect(one) is not None for one in held) > 1

    def key_of(self, scan: Scan) -> object:
        schema, objects = self.context.stored_schema, self.context.objects
        path = objects.local_path(scan.filename)
        mark: tuple[int, ...] = ()
        if path is not None:
            with suppress(OSError):
                status = path.stat()
                mark = status.st_ino, status.st_mtime_ns, status.st_size
        # a deletion's values are compared with a column's values of its present type
        return objects.url, scan.filename, mark, schema, schema.shape

    def _find(self, scan: Scan, sets: Sequence[frozenset[Deletion]]) -> None:
        """Finds the rows of a file that each set of deletions matches, and caches them.

        Files that cannot be read are left to the reader, which raises the error.
        """
        file = self.key_of(scan)
        with suppress(DormouseError):
            for wanted in reversed(sets):
                known = KNOWN.of(file)
                if any(one.deletions == wanted for one in known):
                    continue
                subsets = (one for one in known if one.rows is not None and one.deletions < wanted)
                base = max(subsets, key=lambda one: len(one.deletions), default=None)
                left = wanted if base is None else wanted - base.deletions
                found = self._read(scan, tuple(sorted(left, key=attrgetter("deletion_id"))))
                if found is not None and base is not None and base.rows is not None:
                    found = base.rows.together(found)
                too_many = found is None or len(found) > ROWS_MAX
                KNOWN.put(file, _Known(wanted, None if too_many else found))

    def _read(self, scan: Scan, deletions: tuple[Deletion, ...]) -> GoneRows | None:
        """Reads the row groups whose rows may match; returns the rows, or None if they are too many."""
        context, schema = self.context, self.context.stored_schema
        first_row, wanted = self._near(scan, deletions)
        file = Scan(scan.filename, (wanted,), scan.partition_id, scan.byte_count)
        names = schema.key_names
        kinds = pa.schema([arrow_schema(schema).field(name) for name in names])

        def plan() -> Any:
            gone = rendered(Fails(remains(schema, deletions)), DATAFUSION)
            frame = stored_rows(key_session(context.objects), context.objects, schema, [file])
            return frame.select(*map(column, names), gone.alias("gone")).execution_plan()

        with named_failures(context, [file], Transform.parse(schema, context.properties)):
            physical = planned(context, [file], plan, self.interruption)
            batches = executed(context, physical, self.interruption)
            return matched(batches, kinds, first_row, ROWS_MAX, deletions)

    def _near(self, scan: Scan, deletions: Sequence[Deletion]) -> tuple[int, KeyRanges]:
        """Returns the keys of consecutive row groups with all rows that may match, and their first row.

        The first rows of the groups have other keys than the last rows of the groups before them.
        """
        schema = self.context.stored_schema
        first, key = schema.row_keys[0].name, written_schema(schema, scan.filename).row_keys[0]
        bounds = [one.ranges.enclosing(first) for one in deletions]
        near = KeyRanges({first: bounds}).enclosing(first)
        groups = row_group_bounds(self.context.objects, scan.filename, scan.byte_count or 0, key)
        if near == Range() or key.type not in (INT, LONG) or not groups:
            return 0, KeyRanges()
        start, end = 0, len(groups)
        while start < end - 1 and near.min is not None and compare(groups[start].high, near.min) < 0:
            start += 1
        while end - 1 > start and near.max is not None and compare(groups[end - 1].low, near.max) > 0:
            end -= 1
        while start and groups[start - 1].high >= groups[start].low:
            start -= 1
        while end < len(groups) and groups[end].low <= groups[end - 1].high:
            end += 1
        low = groups[start].low if start else None
        high = groups[end].low if end < len(groups) else None
        wanted = KeyRanges({first: [Range(low, high)]}) if start or end < len(groups) else KeyRanges()
        return sum(one.row_count for one in groups[:start]), wanted


def left_by_key(scans: Sequence[Scan]) -> tuple[Scan, ...]:
    """Returns scans in key order whose `gone` rows can be found by their keys in the rows of all scans.

    No other row has one of these keys. Other scans get their deletions back.
    """
    found: list[Scan] = []
    for cluster in clusters(scans):
        is_alone = len(cluster) == 1 and (cluster[0].gone is None or cluster[0].gone.has_whole_keys)
        found += cluster if is_alone else [scan.unsettled() for scan in cluster]
    return tuple(found)
