"""The rows of large files of keyed tables that newer small files replace, found once and cached.

Files never change, so neither do these rows. Readers leave them out by their numbers, and read no keys.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from datafusion import DataFrame

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.datafusion_session import column, key_order
from dormouse.data.newest import first_of_keys
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError
from dormouse.model.region import KeyRanges
from dormouse.model.table import REPLACED_ROWS_MAX, newest_first
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP
from dormouse.reading.checked_files import named_failures
from dormouse.reading.file_cache import KEPT
from dormouse.reading.gone_rows import GoneRows, found_in
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.row_numbers import FILES_MAX, Finder
from dormouse.reading.scan_session import executed, key_session, planned, stored_rows

SMALL_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes of the small files beside a large one for which its replaced rows are found."""
KEYS = (INT, LONG, TIMESTAMP, DATE, STRING, BYTES)
"""Types of row keys whose values are equal for each reader if they are equal in Arrow."""
_THREADS_MAX = 4


class Replaced(NamedTuple):
    """The rows of a large file whose keys are in small files.

    `are_older` is true if their ages were compared, and each is older than all rows of its key in the small
    files.
    """

    rows: GoneRows
    are_older: bool


class _Known(NamedTuple):
    """The replaced rows of a file; None if they are too many."""

    found: Replaced | None


@dataclass(frozen=True, slots=True)
class _Place:
    """A large file of a keyed table, and the small files whose rows replace rows of it.

    With `compares`, the ages of the rows are compared.
    """

    large: Scan
    small: tuple[Scan, ...]
    compares: bool

    @property
    def sources(self) -> frozenset[Any]:
        """The rows of the small files that count, as a cache key."""
        return frozenset((scan.filename, scan.slices) for scan in self.small)


def replaced_rows(
    finder: Finder, large: Sequence[Scan], small: Sequence[Scan], undecided: Collection[str]
) -> dict[str, Replaced]:
    """Returns for large files the rows whose keys are in the small files, by filename.

    Compares the ages of the rows of the files that `undecided` names.
    Leaves out a file if the rows are too many, if not all keys of the small files count, or if the query
    wants few rows of the file and the rows are not cached.
    """
    context = finder.context
    by_value = context.properties.newest_by is not None
    deletions = (one for scan in small for one in scan.deletions)
    # a deletion by keys also applies to the rows of these keys in the large file
    if any(one.is_erasure or (one.conditions and not by_value) for one in deletions) or not all(
        key.type in KEYS for key in context.schema.row_keys
    ):
        return {}
    places = [
        _Place(scan, tuple(one for one in small if _meet(scan, one)), scan.filename in undecided)
        for scan in large
    ]
    unknown = [one for one in places if _known(finder, one) is None and _is_useful(finder, one)]
    if unknown:
        finder.interruption.check()
        with ThreadPoolExecutor(min(len(unknown), _THREADS_MAX), "dormouse-replaced") as threads:
            list(threads.map(partial(_find, finder), unknown[:FILES_MAX]))
        finder.interruption.check()
    known = ((one.large.filename, _known(finder, one)) for one in places)
    return {name: one.found for name, one in known if one is not None and one.found is not None}


def _meet(scan: Scan, other: Scan) -> bool:
    """Returns whether two files may have a key in common."""
    if None in (scan.min_key, scan.max_key, other.min_key, other.max_key):
        return True
    return (scan.min_key or b"") <= (other.max_key or b"") and (other.min_key or b"") <= (scan.max_key or b"")


def _is_useful(finder: Finder, place: _Place) -> bool:
    return bytes_of(place.small) <= SMALL_BYTES_MAX and finder.reads_much(place.large)


def _known(finder: Finder, place: _Place, sources: frozenset[Any] | None = None) -> _Known | None:
    found: _Known | None = KEPT.get(_key(finder, place, place.sources if sources is None else sources))
    return found


def _key(finder: Finder, place: _Place, sources: frozenset[Any]) -> tuple[Any, ...]:
    return "replaced", finder.key_of(place.large), sources, place.compares


def _find(finder: Finder, place: _Place) -> None:
    """Finds the replaced rows of a large file and caches them.

    Files that cannot be read are left to the reader, which raises the error.
    """
    # usually the rows are known but for those of the newest file
    sources = place.sources
    before = ((one, _known(finder, place, sources - {one})) for one in sources)
    newest, base = next(
        ((one, known.found) for one, known in before if known and known.found is not None), (None, None)
    )
    left = [scan for scan in place.small if base is None or (scan.filename, scan.slices) == newest]
    with suppress(DormouseError):
        found = _rows_of(finder, replace(place, small=tuple(left)))
        if found is not None and base is not None:
            found = Replaced(base.rows.together(found.rows), base.are_older and found.are_older)
        known = _Known(None if found is None or len(found.rows) > REPLACED_ROWS_MAX else found)
        size = 0 if known.found is None else known.found.rows.byte_count
        KEPT.put(_key(finder, place, sources), known, size)


def _rows_of(finder: Finder, place: _Place) -> Replaced | None:
    """Reads the keys of the files; returns None if the small files have too many rows."""
    context = finder.context
    names = context.schema.row_key_names
    order = newest_first(context.properties) if place.compares else ()
    whole = arrow_schema(context.stored_schema)
    kinds = pa.schema([whole.field(name) for name in (*names, *order)])
    rows: list[pa.RecordBatch] = []
    for batch in _keys(finder, place.small, order):
        rows.append(exact(batch, kinds))
        if sum(one.num_rows for one in rows) > REPLACED_ROWS_MAX:
            return None
    # of each key, the oldest row
    oldest = pa.Table.from_batches(first_of_keys(rows, names), kinds)
    [wanted] = oldest.combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], kinds)]
    found = found_in(_keys(finder, [replace(place.large, slices=(KeyRanges(),))], order), wanted, names)
    are_older = place.compares and _are_less(found.keys, found_in([wanted], found.keys, names).keys, order)
    return Replaced(replace(found, keys=found.keys.select(names)), are_older)


def _are_less(rows: pa.RecordBatch, others: pa.RecordBatch, names: Sequence[str]) -> bool:
    """Returns whether the values of some columns together are less in each row than in the other one."""
    less, equal = pa.repeat(pa.scalar(False), len(rows)), pa.repeat(pa.scalar(True), len(rows))
    for name in names:
        left, right = rows.column(name), others.column(name)
        less = pc.or_(less, pc.and_(equal, pc.less(left, right)))
        equal = pc.and_(equal, pc.equal(left, right))
    return bool(pc.all(less.fill_null(False), min_count=0).as_py())


def _keys(finder: Finder, scans: Sequence[Scan], order: Sequence[str]) -> Iterable[pa.RecordBatch]:
    """Returns the row keys and the columns `order` of the rows in the slices of some files.

    The rows ascend by all these columns; those of one file are in its order.
    """
    context = finder.context
    scans = [replace(scan, deletions=()) for scan in scans]
    names = [*context.schema.row_key_names, *order]

    def frame() -> DataFrame:
        rows = stored_rows(key_session(context.objects), context.objects, context.stored_schema, scans)
        rows = rows.select(*map(column, names))
        return rows.sort(*key_order(names)) if len(scans) > 1 else rows

    with named_failures(context, scans, Transform.parse(context.schema, context.properties)):
        physical = planned(context, scans, lambda: frame().execution_plan(), finder.interruption)
        yield from executed(context, physical, finder.interruption, of_large_batches=True)
