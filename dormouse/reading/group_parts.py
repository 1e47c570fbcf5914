"""The parts into which the groups of a query's plan are divided, so that few files are open at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from dormouse.data.arrow_schema import written_schema
from dormouse.model.region import KeyRanges, KeyValue, Range, decode_key, encode_key
from dormouse.model.schema import Field, Schema, is_as_stored
from dormouse.objects.store import ObjectStore
from dormouse.reading.page_reads import row_group_bounds, row_groups_in_memory
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.table_view import Moment
from dormouse.reading.where import may_hold

FIRST_FILES_MIN = 16
"""The fewest files of a group that a limited query divides. A smaller group is simply opened as a whole."""
FIRST_FILES_GROWTH = 8
"""The factor by which the number of files grows in each further part, while the limit is not filled."""
FIRST_KEYS_MAX = 3
"""The most row keys by which a limited query divides a group. The parts have up to nine ranges."""
PART_ROWS = 131_072
PART_BYTES_MIN = 4 * 1024 * 1024
"""The fewest stored bytes of a group that is divided: planning each part takes milliseconds."""
BATCHES_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes in memory of one batch of each file of a group and one merged batch together.

Many queries share 2 GiB.
"""
ROW_GROUPS_BYTES_MAX = 256 * 1024 * 1024
"""The most bytes of the largest row groups of a group's files together, one row group of each file.

A few rows of a row group may have nearly all of its bytes, and a batch may consist of these rows.
"""
FILES_MAX = 64
"""The most files of a group that is divided: of more files each part would read too little."""

# Groups in parts. Large groups are divided by row groups, so that one part is read while another is used.
# Groups of many files are divided by the files' smallest keys, so that a few rows need a few files.


def divided(
    groups: Iterable[Sequence[Scan]], objects: ObjectStore, moment: Moment
) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups in parts by their first row key: all rows of a part sort before those of the next.

    The columns of the moment may change between two groups, to those that the next files were written with.
    """
    for scans in groups:
        yield from _parts(scans, objects, moment.schema)


def first_divided(groups: Iterable[Sequence[Scan]], moment: Moment, rows: int) -> Iterator[tuple[Scan, ...]]:
    """Yields the groups in parts by their first row keys; the first part usually has the first `rows` rows.

    Each file has a row with its smallest key. Let the files be sorted by this key. Then at least n rows lie
    at or below the smallest key of the n-th file. So the first n rows are in files that begin at or before
    this key. Filters and deletions may leave fewer rows; the next part then has more files.
    """
    for scans in groups:
        yield from (
            _first_parts(scans, moment.schema, rows) if len(scans) >= FIRST_FILES_MIN else (tuple(scans),)
        )


def is_large(scans: Sequence[Scan]) -> bool:
    """Returns whether a group has enough bytes that reading it in several parts is faster."""
    return bytes_of(scans) >= PART_BYTES_MIN


def are_narrow(scans: Sequence[Scan], objects: ObjectStore, schema: Schema, batch_rows: int) -> bool:
    """Returns whether batches of `batch_rows` rows stay small in memory, judged by the files' row groups.

    A batch of one file has rows of one row group. A batch merged from several files has consecutive rows of
    each, if all rows are wanted. Small groups give False.
    """
    batches = groups = merged = 0.0
    for scan in scans if is_large(scans) else ():
        found = row_groups_in_memory(objects, scan.filename, scan.byte_count or 0)
        # a column added after the file was written may have a long default for all rows
        if not found or not is_as_stored(written_schema(schema, scan.filename), schema):
            return False
        batches += max(size * min(1.0, batch_rows / rows) for rows, size in found)
        groups += max(size for _, size in found)
        merged = max(merged, *(size * batch_rows / rows for rows, size in found))
    return 0 < batches + merged <= BATCHES_BYTES_MAX and groups <= ROW_GROUPS_BYTES_MAX


def _first_parts(scans: Sequence[Scan], schema: Schema, rows: int) -> Iterator[tuple[Scan, ...]]:
    keys = schema.row_keys[:FIRST_KEYS_MAX]
    low: Any = None
    starts, count = _first_keys(scans, schema), max(1, rows)
    while count < len(starts):
        point = decode_key(keys, starts[count - 1])
        if point != low:
            yield _reaching(scans, schema, low, point)
            low = point
        count *= FIRST_FILES_GROWTH
    rest = _reaching(scans, schema, low, None) if low is not None else tuple(scans)
    if rest:
        yield rest


def _first_keys(scans: Sequence[Scan], schema: Schema) -> list[bytes]:
    """Returns the sorted keys, encoded, at which files begin, if they are wanted and known.

    A file that begins before the wanted range of the first row key is left out: its first wanted row may be
    anywhere in it.
    """
    first = schema.row_keys[:1]
    found: list[bytes] = []
    for scan in scans:
        wanted = [part.enclosing(first[0].name).min for part in scan.slices]
        if scan.min_key is not None and any(
            low is None or encode_key(first, [low]) <= scan.min_key for low in wanted
        ):
            found.append(scan.min_key)
    return sorted(found)


def _reaching(scans: Sequence[Scan], schema: Schema, low: Any, high: Any) -> tuple[Scan, ...]:
    """Returns the scans, limited to keys above `low` and up to `high`, without files that have none of them.

    `low` and `high` are values of the first row keys, or None.
    """
    keys = schema.row_keys
    parts = product(_beside(keys, low, above=True), _beside(keys, high, above=False))
    ranges = [over.intersect(upto) for over, upto in parts]
    start, end = (None if key is None else encode_key(keys, key) for key in (low, high))
    found = []
    for scan in scans:
        # two quick checks, for most of many files
        if end is not None and scan.min_key is not None and scan.min_key[: len(end)] > end:
            continue
        if start is not None and scan.max_key is not None and scan.max_key[: len(start)] <= start:
            continue
        cut = (part.intersect(one) for part in scan.slices for one in ranges)
        slices = tuple(part for part in cut if may_hold(schema, scan.min_key, scan.max_key, part))
        if slices:
            found.append(replace(scan, slices=slices))
    return tuple(found)


def _beside(fields: Sequence[Field], key: Sequence[KeyValue] | None, *, above: bool) -> list[KeyRanges]:
    """Returns disjoint ranges that together have all keys whose first values are above `key`, or up to it."""
    found, equal = [], dict[str, Range]()
    for number, (field, value) in enumerate(zip(fields, key or (), strict=False), 1):
        upto = Range(max=value, max_inclusive=number == len(key or ()))
        limits = Range(value, min_inclusive=False) if above else upto
        found.append(KeyRanges.of({**equal, field.name: limits}))
        equal[field.name] = Range.exactly(value)
    return found or [KeyRanges()]


def _parts(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[tuple[Scan, ...]]:
    name = schema.row_keys[0].name
    low: Any = None
    for point in _points(scans, objects, schema):
        if part := _clipped(scans, name, Range(low, point)):
            yield part
        low = point
    yield tuple(scans) if low is None else _clipped(scans, name, Range(low))


def _points(scans: Sequence[Scan], objects: ObjectStore, schema: Schema) -> Iterator[Any]:
    """Yields values of the first row key between which there are about `PART_ROWS` wanted rows."""
    name = schema.row_keys[0].name
    wanted = [part.enclosing(name) for scan in scans for part in scan.slices]
    if not is_large(scans) or len(scans) > FILES_MAX or all(one.is_exact for one in wanted):
        return
    low: Any = None if any(one.min is None for one in wanted) else min(one.min for one in wanted)  # type: ignore[type-var]
    high: Any = None if any(one.max is None for one in wanted) else max(one.max for one in wanted)  # type: ignore[type-var]
    starts = [
        (group.low, group.row_count)
        for scan in scans
        # the key's name when the file was written, since its name of today may then have been another
        # column's
        for key in written_schema(schema, scan.filename).row_keys[:1]
        for group in row_group_bounds(objects, scan.filename, scan.byte_count or 0, key)
        if high is None or group.low < high
    ]
    # parts of equal size, since one part is read while another is used
    left = sum(rows for value, rows in starts if low is None or value > low)
    size, rows = left / max(1, left // PART_ROWS), 0
    for value, row_count in sorted(starts):
        if low is not None and value <= low:
            continue
        if rows >= size and left >= size / 2:
            yield value
            low, rows = value, 0
        rows, left = rows + row_count, left - row_count


def _clipped(scans: Sequence[Scan], name: str, limits: Range) -> tuple[Scan, ...]:
    """Returns the scans limited to a range of the column `name`, without scans that then want no row."""
    found = []
    for scan in scans:
        slices = (part.clipped(name, limits) for part in scan.slices)
        if left := tuple(part for part in slices if not part.is_empty):
            found.append(replace(scan, slices=left, whole=scan.whole or scan.slices))
    return tuple(found)
