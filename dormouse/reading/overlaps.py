"""The files of a keyed table that may have the same keys, so that their rows must be compared."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeVar

from dormouse.data.arrow_schema import written_schema
from dormouse.data.newest import chunks_of, ends_of, places_of
from dormouse.errors import InvalidData, ObjectStoreError
from dormouse.model.schema import Schema, earlier_name
from dormouse.model.table import TableProperties, newest_first, stored_schema
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP
from dormouse.objects.store import ObjectStore
from dormouse.reading.file_cache import KEPT
from dormouse.reading.planner import Scan, bytes_of

FOOTERS_MAX = 1_000
"""The most files of one query whose footers are read to learn the age of their rows."""
MARKS_FILES_MAX = 64
"""The most files of one query whose footers are read to learn which files have marks of deletion."""
_THREADS_MAX = 16
WHOLE_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
"""Types whose smallest and largest values are exact in a footer, as integers."""


# What the footer of a keyed table's file records of its rows' places.


class NewestBounds(NamedTuple):
    """The limits of the age of a file's rows: no row is older than `first` or newer than `last`.

    Both have one number for each column that decides which row of a key is the newest.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]


def newest_bounds(store: ObjectStore, name: str, columns: Sequence[str | None]) -> NewestBounds | None:
    """Returns the smallest and largest values of the columns that decide which row is the newest.

    `columns` have types of `WHOLE_NUMBERS`, and the names that they have in the file. A process reads each
    footer once. Returns None if the file, a column or its statistics are missing.
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


def parted_by_marks(store: ObjectStore, scans: Sequence[Scan]) -> tuple[list[Scan], list[Scan]]:
    """Returns the files that have no marks of deletion, and those that may have some.

    A process reads each footer once, and none if there are many files.
    """
    if len(scans) > MARKS_FILES_MAX:
        return [], list(scans)
    flags = _of_each(store, scans, partial(_may_have_marks, store))
    parts: tuple[list[Scan], list[Scan]] = [], []
    for scan, has_marks in zip(scans, flags, strict=True):
        parts[has_marks].append(scan)
    return parts


def _may_have_marks(store: ObjectStore, scan: Scan) -> bool:
    key = (store.url, scan.filename, "marks")
    found: bool | None = KEPT.get(key)
    if found is None:
        try:
            found = places_of(store, scan.filename).has_marks
        except (InvalidData, ObjectStoreError):
            return True
        KEPT.put(key, found, len(scan.filename))
    return found


T = TypeVar("T")


def _of_each(store: ObjectStore, scans: Sequence[Scan], work: Callable[[Scan], T]) -> list[T]:
    """Returns the results of work that reads a footer; of files on other machines in threads."""
    if all(store.local_path(scan.filename) is not None for scan in scans):
        return list(map(work, scans))
    with ThreadPoolExecutor(_THREADS_MAX, "dormouse-footers") as threads:
        return list(threads.map(work, scans))


# Files grouped by how the newest row of each key is found.


@dataclass(slots=True)
class Layers:
    """Files of a keyed table, grouped by how the newest row of each key is found.

    - `alone`: no other file can have a key of the file, so each of its rows is the newest of its key.
    - `large`: the large files of key ranges that also have small files. No two large files can have the same
      key. A row counts if its key is in none of `small`.
    - `small`: the small files of these key ranges.
    - `undecided`: the files of `large` that may have a newer row than `small` has for the same key.
    - `together`: files of other key ranges, whose rows must all be compared.
    """

    alone: list[Scan] = field(default_factory=list)
    large: list[Scan] = field(default_factory=list)
    small: list[Scan] = field(default_factory=list)
    undecided: list[Scan] = field(default_factory=list)
    together: list[Scan] = field(default_factory=list)


def layers(store: ObjectStore, schema: Schema, properties: TableProperties, scans: Iterable[Scan]) -> Layers:
    """Groups the files of a keyed table. A process reads the footer of each overlapping file once.

    A large file is `undecided` if its footer cannot be read or lacks statistics.
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
    """Yields scans in groups, in key order. Files of different groups have no key in common.

    Within one file each key occurs once. If the keys of a file are not known, all files are one group.
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
    """Returns whether any two scans may have a key in common."""
    return any(len(found) > 1 for found in clusters(scans))


def _by_size(cluster: Sequence[Scan]) -> tuple[list[Scan], list[Scan]]:
    """Returns the largest files that have no keys in common, and all other files."""
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
    """Returns the `NewestBounds` of files, by filename, for the files whose footers record them."""
    stored, newest_by = stored_schema(schema, properties), newest_first(properties)

    def bounds_of(scan: Scan) -> tuple[str, NewestBounds | None]:
        written = written_schema(stored, scan.filename)
        names = [earlier_name(stored, written, name) for name in newest_by]
        return scan.filename, newest_bounds(store, scan.filename, names)

    if any(stored.field(name).type not in WHOLE_NUMBERS for name in newest_by):
        return {}
    found = _of_each(store, scans, bounds_of)
    return {name: bounds for name, bounds in found if bounds is not None}


def _are_older(large: Iterable[Scan], small: Iterable[Scan], bounds: Mapping[str, NewestBounds]) -> bool:
    """Returns whether each row of the large files is known to be older than all rows of the small ones."""
    lasts = [bounds.get(scan.filename) for scan in large]
    firsts = [bounds.get(scan.filename) for scan in small]
    known = [one for one in (*lasts, *firsts) if one is not None]
    return len(known) == len(lasts) + len(firsts) and max(one.last for one in known[: len(lasts)]) < min(
        one.first for one in known[len(lasts) :]
    )
