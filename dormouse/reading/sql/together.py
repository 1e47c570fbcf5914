"""Which files DuckDB reads in one scan, and which rows of them count.

Files of which the same rows count are one scan. Of a table whose leaves were divided they differ leaf by
leaf: beyond `SCANS_MAX`, files are read together whose keys are near each other, and each row is asked which
file it is of. So a statement has few scans, however many leaves there are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any

from dormouse.model.region import start_of
from dormouse.model.schema import Field, Schema
from dormouse.objects.names import PARQUET_SUFFIX, schema_version_of
from dormouse.reading.deletions import Deletion
from dormouse.reading.key_ranges import KeyRanges, united
from dormouse.reading.planner import Scan
from dormouse.reading.sql.conditions import all_of, in_slices, remains

SCANS_MAX = 64
"""Of files that are written alike. DuckDB plans each for itself: a thousand take it seconds."""
INDEX = "file_index"
"""DuckDB's own column: which file of its list a row is of."""


def written_alike(scan: Scan) -> tuple[bool, int]:
    """Whether DuckDB may skip by all of a file's statistics, and the version of the schema that it is of."""
    return scan.filename.endswith(PARQUET_SUFFIX), schema_version_of(scan.filename)


def read_together(schema: Schema, scans: Iterable[Scan]) -> Iterator[Sequence[Scan]]:
    """The files of each scan, in their order there."""
    ways: dict[Any, list[Scan]] = defaultdict(list)
    for scan in scans:
        ways[written_alike(scan), scan.slices, scan.deletions].append(scan)
    if len(ways) <= SCANS_MAX or may_hide_index(schema, (version for ((_, version), _, _) in ways)):
        yield from ways.values()
        return
    alike: dict[Any, list[list[Scan]]] = defaultdict(list)
    for (kind, _, _), found in ways.items():
        alike[kind].append(found)
    for some in alike.values():
        listed = sorted((scan for found in some for scan in found), key=lambda scan: _place(schema, scan))
        scans_max = max(1, SCANS_MAX * len(some) // len(ways))
        size = -(-len(listed) // scans_max)
        yield from (listed[at : at + size] for at in range(0, len(listed), size))


def rows_of(schema: Schema, scans: Sequence[Scan]) -> str | None:
    """Whether a row of files that are read together lies where its file counts; None when every row does."""
    runs = [(slices, len(list(run))) for slices, run in groupby(scans, attrgetter("slices"))]
    conditions = [in_slices(schema, slices) for slices, _ in runs]
    if len(runs) == 1:
        return conditions[0]
    # only such a bound lets DuckDB skip what it need not read
    first = schema.row_keys[0].name
    near = KeyRanges({first: [united([one for slices, _ in runs for one in slices]).enclosing(first)]})
    ends = list(accumulate(length for _, length in runs))
    return all_of([in_slices(schema, [near]), _by_index(conditions, ends)])


def left_of(schema: Schema, scans: Sequence[Scan], value: Callable[[Field], str]) -> str | None:
    """Whether a row of such files is none that a deletion of its file is of; None without deletions."""
    numbers = [{one.deletion_id for one in scan.deletions} for scan in scans]
    known = {one.deletion_id: one for scan in scans for one in scan.deletions}

    def where(deletion: Deletion) -> str | None:
        return _among(_runs(scans, numbers, deletion.deletion_id), len(scans))

    return remains(schema, [known[number] for number in sorted(known)], value, where)


def asks_index(scans: Sequence[Scan]) -> bool:
    """Whether the conditions may name the file that a row is of."""
    return any((scan.slices, scan.deletions) != (scans[0].slices, scans[0].deletions) for scan in scans)


def may_hide_index(schema: Schema, versions: Iterable[int] = ()) -> bool:
    """Whether a file may have a column of the index's name, which DuckDB then takes it for."""
    shape = schema.shape
    names = (stage.name for column in shape.columns for stage in column.stages)
    return (
        INDEX in map(str.lower, names)
        or len(shape.columns) < shape.last_id
        or any(version > shape.version for version in versions)
    )


def _place(schema: Schema, scan: Scan) -> tuple[Any, ...]:
    """Files of the same deletions are near each other, and of those the ones whose keys are near."""
    first = schema.row_keys[0].name
    return (
        not scan.deletions,
        scan.deletions_till,
        min((start_of(one.enclosing(first)) for one in scan.slices), default=()),
    )


def _by_index(conditions: Sequence[str | None], ends: Sequence[int]) -> str:
    """The condition of a row's file, of files up to each end; found by halves."""
    if len(conditions) == 1:
        return conditions[0] or "true"
    half = len(conditions) // 2
    below, above = _by_index(conditions[:half], ends[:half]), _by_index(conditions[half:], ends[half:])
    return f"CASE WHEN {INDEX} < {ends[half - 1]} THEN {below} ELSE {above} END"


def _runs(scans: Sequence[Scan], numbers: Sequence[set[int]], number: int) -> Iterator[tuple[int, int]]:
    """From where to where files are that a deletion is of.

    Those between that came before it, and cannot have its rows, are as well in a run as not.
    """
    start = end = None
    for at, scan in enumerate(scans):
        if number in numbers[at]:
            start, end = at if start is None else start, at + 1
        elif start is not None and end is not None and not (numbers[at] and scan.deletions_till < number):
            yield start, end
            start = None
    if start is not None and end is not None:
        yield start, end


def _among(runs: Iterable[tuple[int, int]], count: int) -> str | None:
    """Whether a row's file is in any of the runs; None when all files are."""
    listed = list(runs)
    if listed == [(0, count)]:
        return None
    return " OR ".join(f"{INDEX} BETWEEN {start} AND {end - 1}" for start, end in listed)
