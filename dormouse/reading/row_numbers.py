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
from functools import cached_property, reduce
from operator import attrgetter
from typing import Any, NamedTuple

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, written_schema
from dormouse.data.datafusion_session import column
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError
from dormouse.model.locks import process_lock
from dormouse.model.region import KeyRanges, Range, compare, decode_key
from dormouse.model.schema import Schema
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP
from dormouse.reading.checked_files import named_failures
from dormouse.reading.file_cache import KEPT_BYTES_MAX
from dormouse.reading.gone_rows import GoneRows, found_in, matched
from dormouse.reading.group_parts import are_narrow
from dormouse.reading.look_ups import DELETIONS_MAX
from dormouse.reading.overlaps import clusters
from dormouse.reading.page_reads import row_group_bounds
from dormouse.reading.planner import Scan, keys_near
from dormouse.reading.row_filter import TESTS_MAX, Fails, remains, rendered
from dormouse.reading.row_sets import RowSet
from dormouse.reading.scan_session import (
    DATAFUSION,
    LARGE_BATCH_ROWS,
    executed,
    key_session,
    planned,
    stored_rows,
)
from dormouse.reading.streams import Interruption
from dormouse.reading.where import Deletion
from dormouse.state.context import TableContext

ROWS_MAX = 1_000_000
"""The most matched rows of a file that are cached. Deletions that match more rows stay conditions."""
FILES_MAX = 64
"""The most files that are read for one query to find matched rows."""
BY_VALUE_MIN = DELETIONS_MAX + 1
"""The fewest deletions by values for which a file is read by a query that wants few of its rows."""
SETS_MAX = 4
"""The most sets of deletions whose rows are cached for one file: one of each reader, and former ones."""
KEYS = (INT, LONG, TIMESTAMP, DATE, STRING, BYTES)
"""Types of keys whose values are equal for each reader if they are equal in Arrow."""
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
        self._lock = process_lock()

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
        files = [_File(self.context, scan, self.wanted) for scan in scans]
        unknown = [file for file in files if any(file.rows(some) is None for some in file.worth_finding())]
        if self.reads and unknown:
            self.interruption.check()
            with ThreadPoolExecutor(min(len(unknown), _THREADS_MAX), "dormouse-gone") as threads:
                list(threads.map(self._find, unknown[:FILES_MAX]))
            self.interruption.check()
        return [file.settled() for file in files]

    def key_of(self, scan: Scan) -> object:
        """Returns a key of caches, which differs if the file was replaced or the table's columns changed."""
        return _File(self.context, scan, self.wanted).key

    def reads_much(self, scan: Scan) -> bool:
        """Returns whether the query wants all rows of a file, or rows of several of its row groups."""
        file = _File(self.context, scan, self.wanted)
        return file.near is not None and (file.reads_whole(file.near) or file.reads_groups(file.near))

    def _find(self, file: _File) -> None:
        """Finds the rows of a file that the useful sets of deletions match, and caches them.

        Files that cannot be read are left to the reader, which raises the error.
        """
        with suppress(DormouseError):
            for some in file.worth_finding():
                known = KNOWN.of(file.key)
                if any(one.deletions == some for one in known):
                    continue
                parts, left = list[GoneRows](), some
                for one in sorted(known, key=lambda one: -len(one.deletions)):
                    if one.rows is not None and one.deletions <= some and one.deletions & left:
                        parts.append(one.rows)
                        left -= one.deletions
                found = self._read(file.scan, tuple(sorted(left, key=attrgetter("deletion_id"))))
                if found is not None:
                    found = reduce(GoneRows.together, parts, found)
                too_many = found is None or len(found) > ROWS_MAX
                KNOWN.put(file.key, _Known(some, None if too_many else found))

    def _read(self, scan: Scan, deletions: tuple[Deletion, ...]) -> GoneRows | None:
        """Reads the row groups whose rows may match; returns the rows, or None if they are too many."""
        context, schema = self.context, self.context.stored_schema
        kinds = pa.schema([arrow_schema(schema).field(name) for name in schema.key_names])
        if not deletions:
            return matched([], kinds, 0, 0, ())
        first_row, wanted = self._near(scan, deletions)
        file = Scan(scan.filename, (wanted,), scan.partition_id, scan.byte_count)
        names, listed = schema.key_names, _listed_keys(schema, deletions, kinds)

        def plan() -> Any:
            frame = stored_rows(key_session(context.objects), context.objects, schema, [file])
            if listed is not None:
                return frame.select(*map(column, names)).execution_plan()
            gone = rendered(Fails(remains(schema, deletions)), DATAFUSION)
            return frame.select(*map(column, names), gone.alias("gone")).execution_plan()

        with named_failures(context, [file], Transform.parse(schema, context.properties)):
            physical = planned(context, [file], plan, self.interruption)
            is_narrow = are_narrow([file], context.objects, schema, LARGE_BATCH_ROWS)
            batches = executed(context, physical, self.interruption, of_large_batches=is_narrow)
            if listed is not None:
                found = found_in(batches, listed, names)
                return replace(found, numbers=found.numbers + first_row, deletions=deletions)
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


def _listed_keys(schema: Schema, deletions: Sequence[Deletion], kinds: pa.Schema) -> pa.RecordBatch | None:
    """Returns the keys that deletions list, sorted; None if a deletion also tests other values.

    Values of the keys' types are equal for each engine if they are equal in Arrow.
    """
    if not all(one.type in KEYS and not one.nullable for one in schema.key_fields):
        return None
    sets = [one.rows for one in deletions if isinstance(one.rows, RowSet)]
    if len(sets) < len(deletions) or any({*one.fields} != {*schema.key_fields} for one in sets):
        return None
    rows = pa.concat_tables(one.read().select(kinds.names).cast(kinds) for one in sets)
    [keys] = rows.sort_by([(name, "ascending") for name in kinds.names]).combine_chunks().to_batches()
    return keys


class _File:
    """A file that a query reads, and the sets of its deletions whose rows the query can use."""

    def __init__(self, context: TableContext, scan: Scan, wanted: KeyRanges) -> None:
        self.scan = scan
        self._context = context
        self._schema = context.stored_schema
        self._first = self._schema.row_keys[0]
        self._all = frozenset(scan.deletions)
        self._by_value = frozenset(one for one in scan.deletions if one.corners == _ANYWHERE)
        self._wanted = wanted

    @cached_property
    def near(self) -> Range | None:
        """The wanted values of the first key; None if the file has no wanted row."""
        return keys_near(self._first, [self.scan]).intersect(self._wanted.enclosing(self._first.name))

    @cached_property
    def key(self) -> object:
        """The key of the cache. It differs if the file was replaced, or if the table's columns changed."""
        schema, objects = self._schema, self._context.objects
        path = objects.local_path(self.scan.filename)
        mark: tuple[int, ...] = ()
        if path is not None:
            with suppress(OSError):
                status = path.stat()
                mark = status.st_ino, status.st_mtime_ns, status.st_size
        return objects.url, self.scan.filename, mark, schema, schema.shape

    def worth_finding(self) -> list[frozenset[Deletion]]:
        """Returns the sets of deletions for which the file should be read, the smallest first.

        A query that wants few rows tests them for few deletions faster than it reads the file.
        """
        if not self._all or self.near is None:
            return []
        is_whole = self.reads_whole(self.near)
        found = [self._by_value] if is_whole or len(self._by_value) >= BY_VALUE_MIN else []
        if is_whole or (len(self._all) > TESTS_MAX and self.reads_groups(self.near)):
            found.append(self._all)
        return [some for some in dict.fromkeys(found) if some]

    def settled(self) -> Scan:
        """Returns the scan with known rows instead of deletions."""
        for some in (self._all, self._by_value):
            rows = self.rows(some) if some and self.near is not None else None
            if rows is not None and self.near is not None:
                left = tuple(one for one in self.scan.deletions if one not in some)
                gone = replace(rows.within(self._first, self.near), deletions=tuple(some))
                return replace(self.scan, deletions=left, gone=gone)
        return self.scan

    def rows(self, some: frozenset[Deletion]) -> GoneRows | None:
        """Returns the rows that a set of deletions matches, and maybe rows that are not wanted.

        Returns None if they are not known, or too many.
        """
        # few deletions are tested faster than all others are compared with the wanted keys
        may_have_others = len(some) > TESTS_MAX
        for known in KNOWN.of(self.key):
            if known.rows is not None and (
                known.deletions == some
                or (
                    may_have_others
                    and known.deletions > some
                    and all(map(self._is_elsewhere, known.deletions - some))
                )
            ):
                return known.rows
        return None

    def _is_elsewhere(self, deletion: Deletion) -> bool:
        """Returns whether a deletion matches no wanted row, by its bounds on the first key."""
        bounds = deletion.ranges.enclosing(self._first.name)
        return self.near is not None and bounds.intersect(self.near) is None

    def reads_whole(self, near: Range) -> bool:
        """Returns whether the query wants all rows of the file."""
        scan = self.scan
        if scan.min_key is None or scan.max_key is None:
            return False
        low, high = (decode_key([self._first], key)[0] for key in (scan.min_key, scan.max_key))
        return near.intersect(Range(low, high, max_inclusive=True)) == Range(low, high, max_inclusive=True)

    def reads_groups(self, near: Range) -> bool:
        """Returns whether the query wants rows of several row groups."""
        scan, key = self.scan, written_schema(self._schema, self.scan.filename).row_keys[0]
        groups = row_group_bounds(self._context.objects, scan.filename, scan.byte_count or 0, key)
        held = (Range(one.low, one.high, max_inclusive=True) for one in groups)
        return sum(near.intersect(one) is not None for one in held) > 1


def left_by_key(scans: Sequence[Scan]) -> tuple[Scan, ...]:
    """Returns scans in key order whose `gone` rows can be found by their keys in the rows of all scans.

    No other row has one of these keys. Other scans get their deletions back.
    """
    found: list[Scan] = []
    for cluster in clusters(scans):
        is_alone = len(cluster) == 1 and (cluster[0].gone is None or cluster[0].gone.has_whole_keys)
        found += cluster if is_alone else [scan.unsettled() for scan in cluster]
    return tuple(found)
