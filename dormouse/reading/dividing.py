"""Groups of a plan in parts: large ones by row groups, so that one part is read while another is used, and
groups of many files by the smallest keys of the files, so that few rows need few files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from dormouse.data.arrow_schema import written_schema
from dormouse.model.region import KeyValue, Range, compare, decode_key
from dormouse.model.schema import Schema, is_as_stored
from dormouse.objects import ObjectStore
from dormouse.reading.page_reads import row_group_starts, row_groups_in_memory
from dormouse.reading.planner import Scan
from dormouse.reading.reach import may_hold

FIRST_FILES_MIN = 16
"""Of a group: fewer files are opened sooner than they are told apart."""
FIRST_FILES_GROWTH = 8
"""How many times as many files each further part begins with, if the parts before had too few rows."""
PART_ROWS = 131_072
PART_BYTES_MIN = 4 * 1024 * 1024
"""Of a group, as stored: a plan for each part costs milliseconds."""
BATCHES_BYTES_MAX = 64 * 1024 * 1024
"""In memory, of a batch of each file of a group, and of one made of them: many queries share 2 GiB."""
ROW_GROUPS_BYTES_MAX = 256 * 1024 * 1024
"""Of a row group of each file: a few rows may have all its bytes, and then a batch has, too."""
FILES_MAX = 64
"""Of a group: of more files each is read too little for parts to pay."""


def divided(
    groups: Iterable[Sequence[Scan]], objects: ObjectStore, schema: Callable[[], Schema]
) -> Iterator[tuple[Scan, ...]]:
    """The groups, in parts by their first row key: all rows of a part sort before those of the next.

    `schema` gives the columns, which know of a group that is come to by what its files were written.
    """
    for scans in groups:
        yield from _parts(scans, objects, schema())


def first_divided(
    groups: Iterable[Sequence[Scan]], schema: Callable[[], Schema], rows: int
) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups in parts by their first row key; the first part mostly has the first `rows` rows.

    A file has a row of its smallest key. So the rows up to the smallest key of the n-th file, in the order of
    these keys, are at least n, and only files that begin at or before it are read. Where rows are filtered
    out or were deleted there may be fewer, which the next part, of more files, makes good.
    """
    for scans in groups:
        yield from _first_parts(scans, schema(), rows) if len(scans) >= FIRST_FILES_MIN else (tuple(scans),)


def is_large(scans: Sequence[Scan]) -> bool:
    """Whether a group has files of so many bytes that more than a moment is spent on them."""
    return sum(scan.byte_count or 0 for scan in scans) >= PART_BYTES_MIN


def are_narrow(scans: Sequence[Scan], objects: ObjectStore, schema: Schema, batch_rows: int) -> bool:
    """Whether a batch may have so many rows, which are of a large group, as they were written.

    Those of one file are of one row group. What is merged of several is of as many as have its rows: of each
    file rows in succession, if all are wanted.
    """
    batches = groups = merged = 0.0
    for scan in scans if is_large(scans) else ():
        found = row_groups_in_memory(objects, scan.filename, scan.byte_count or 0)
        # a column that came later may have a long value for all rows
        if not found or not is_as_stored(written_schema(schema, scan.filename), schema):
            return False
        batches += max(size * min(1.0, batch_rows / rows) for rows, size in found)
        groups += max(size for _, size in found)
        merged = max(merged, *(size * batch_rows / rows for rows, size in found))
    return 0 < batches + merged <= BATCHES_BYTES_MAX and groups <= ROW_GROUPS_BYTES_MAX


def _first_parts(scans: Sequence[Scan], schema: Schema, rows: int) -> Iterator[tuple[Scan, ...]]:
    low: Any = None
    starts, count = _first_keys(scans, schema), max(1, rows)
    while count < len(starts):
        point = starts[count - 1]
        if low is None or compare(point, low) > 0:
            yield _reaching(scans, schema, Range(low, point, min_inclusive=False, max_inclusive=True))
            low = point
        count *= FIRST_FILES_GROWTH
    rest = _reaching(scans, schema, Range(low, min_inclusive=False)) if low is not None else tuple(scans)
    if rest:
        yield rest


def _first_keys(scans: Sequence[Scan], schema: Schema) -> list[Any]:
    """Returns the first row key at which each file's wanted rows can begin, in order, where that is known.

    A file that begins before all that is wanted may have its first wanted row anywhere, and is left out.
    """
    name = schema.row_keys[0].name
    found: list[Any] = []
    for scan in scans:
        first = None if scan.min_key is None else decode_key(schema.row_keys[:1], scan.min_key)[0]
        wanted = [part.enclosing(name).min for part in scan.slices]
        if first is not None and any(low is None or compare(low, first) <= 0 for low in wanted):
            found.append(first)
    return sorted(found)


def _reaching(scans: Sequence[Scan], schema: Schema, limits: Range) -> tuple[Scan, ...]:
    """Returns what files have within some limits of the first row key, without files that end before them."""
    name = schema.row_keys[0].name
    return tuple(
        scan
        for scan in _clipped(scans, name, limits)
        if any(may_hold(schema, scan.min_key, scan.max_key, part) for part in scan.slices)
    )


def _parts(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[tuple[Scan, ...]]:
    name = schema.row_keys[0].name
    low: Any = None
    for point in _points(scans, objects, schema):
        if part := _clipped(scans, name, Range(low, point)):
            yield part
        low = point
    yield tuple(scans) if low is None else _clipped(scans, name, Range(low))


def _points(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[Any]:
    """Values of the first row key with about so many wanted rows between them."""
    name = schema.row_keys[0].name
    wanted = [part.enclosing(name) for scan in scans for part in scan.slices]
    if not is_large(scans) or len(scans) > FILES_MAX or all(one.is_exact for one in wanted):
        return
    low: Any = None if any(one.min is None for one in wanted) else min(one.min for one in wanted)  # type: ignore[type-var]
    high: Any = None if any(one.max is None for one in wanted) else max(one.max for one in wanted)  # type: ignore[type-var]
    starts = [
        (value, rows)
        for scan in scans
        for value, rows in _starts(scan, objects, schema)
        if high is None or value < high
    ]
    # as large as each other, since one is read as long as another is
    left = sum(rows for value, rows in starts if low is None or value > low)
    size, rows = left / max(1, left // PART_ROWS), 0
    for value, row_count in sorted(starts):
        if low is not None and value <= low:
            continue
        if rows >= size and left >= size / 2:
            yield value
            low, rows = value, 0
        rows, left = rows + row_count, left - row_count


def _starts(scan: Scan, objects: ObjectStore, schema: Schema) -> list[tuple[KeyValue, int]]:
    # by the name that the key had: today's may be what another column was called
    key = written_schema(schema, scan.filename).row_keys[0]
    return row_group_starts(objects, scan.filename, scan.byte_count or 0, key)


def _clipped(scans: Sequence[Scan], name: str, limits: Range) -> tuple[Scan, ...]:
    """What files have within some limits."""
    found = []
    for scan in scans:
        slices = (part.clipped(name, limits) for part in scan.slices)
        if left := tuple(part for part in slices if not part.is_empty):
            found.append(replace(scan, slices=left))
    return tuple(found)
