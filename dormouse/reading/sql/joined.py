"""The scans of a plan that are joined, and how the values in one scan restrict the keys of another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from dormouse.model.region import KeyRanges, Range, united
from dormouse.model.schema import Schema
from dormouse.model.types import INT
from dormouse.reading.planner import Scan, bytes_of
from dormouse.reading.where import may_hold

ROUNDS_MAX = 10
"""The most rounds in which ranges pass from column to column. After each round all ranges are valid."""
FILES_MAX, BYTES_MAX, ROWS_MAX = 50, 4 * 1024 * 1024, 100_000
"""The most files, bytes and rows of a table that are read for the values of one of its columns."""
VALUES_MAX = 1_000
"""The most values of a column that restrict other scans."""
TIMES_LEAST = 4
"""How many times the bytes of such a table another must have for its files to be restricted."""
FILES_LEAST, LARGE_BYTES_LEAST = 16, 32 * 1024 * 1024
"""The least files, or bytes in several files, of a table for which reading values first can pay.

To read values takes 3 to 8 ms, as much as DuckDB needs to open 16 files, or to read some megabytes.
"""
_INTS = Range(-(1 << 31), (1 << 31) - 1, max_inclusive=True)


@dataclass(frozen=True, slots=True)
class Joined:
    """The scans of a plan, by number, and the ranges of their columns. A column's name begins with its scan.

    Rows outside a scan's ranges do not change the result. So the ranges of one column may restrict another
    that must be equal to it.
    """

    tables: tuple[str, ...]
    """The scanned tables, one item for each scan."""
    ranges: KeyRanges
    passed: tuple[tuple[str, str], ...]
    """Pairs of columns: rows count only if their value in the first column is a value of the second."""

    @staticmethod
    def name(number: int, column: str) -> str:
        return f"{number} {column}"

    def scan_of(self, name: str) -> int | None:
        """Returns the number of a column's scan; None for a list of constants."""
        number = name.partition(" ")[0]
        return int(number) if number.isdecimal() else None

    def spread(self, schemas: Mapping[str, Schema]) -> Joined:
        """Returns the scans with the ranges that follow from those of equal columns."""
        ranges = self.ranges
        for _ in range(ROUNDS_MAX):
            before = ranges
            for target, source in self.passed:
                if source not in ranges:
                    continue
                more = KeyRanges({target: ranges[source]})
                number = self.scan_of(target)
                table = None if number is None else self.tables[number]
                if table is not None and schemas[table].field(target.partition(" ")[2]).type == INT:
                    more = more.clipped(target, _INTS)
                ranges = ranges.intersect(more)
            if ranges == before:
                break
        return replace(self, ranges=ranges)

    def given(self, name: str, values: Iterable[Range]) -> Joined:
        """Returns the scans if a column has only some values."""
        return replace(self, ranges=self.ranges.intersect(KeyRanges({name: values})))

    def of_scan(self, number: int, columns: Iterable[str]) -> KeyRanges:
        """Returns the ranges of some columns of a scan."""
        names = {column: self.name(number, column) for column in columns}
        return KeyRanges({one: self.ranges[name] for one, name in names.items() if name in self.ranges})

    def by_table(self, schemas: Mapping[str, Schema]) -> dict[str, KeyRanges]:
        """Returns the needed ranges of each table: the union of those of its scans."""
        scans: dict[str, list[KeyRanges]] = {table: [] for table in self.tables}
        for number, table in enumerate(self.tables):
            scans[table].append(self.of_scan(number, schemas[table].row_key_names))
        return {table: united(found) for table, found in scans.items()}

    def sources(
        self, schemas: Mapping[str, Schema], is_small: Callable[[int], bool] = lambda _: True
    ) -> Iterator[tuple[str, set[str]]]:
        """Yields the columns whose values may restrict first row keys of other scans, with those tables.

        Values pass from one column of a scan to another if the scan is small, so that it can be read too, or
        if its first row key is restricted, which may leave few files of it.
        """
        for source in dict.fromkeys(name for _, name in self.passed):
            number, reached = self.scan_of(source), {source}
            if number is None or self._is_listed(source):
                continue
            scans: set[int | None] = {None}
            for _ in self.passed:
                # fewer values of one column are fewer rows, and so fewer values of the scan's other columns
                more = {
                    target
                    for target, name in self.passed
                    if name in reached or self.scan_of(name) in scans - {None, number}
                }
                if more <= reached:
                    break
                reached |= more
                scans |= {
                    one
                    for name in more
                    if (one := self.scan_of(name)) is not None
                    and (self._is_first(schemas, name) or is_small(one))
                }
            targets = {
                self.tables[one]
                for name in reached
                if (one := self.scan_of(name)) not in (None, number) and not self._is_listed(name)
                if self._is_first(schemas, name)
            }
            if targets:
                yield source, targets

    def _is_first(self, schemas: Mapping[str, Schema], name: str) -> bool:
        number = self.scan_of(name)
        return number is not None and (
            name.partition(" ")[2] == schemas[self.tables[number]].row_key_names[0]
        )

    def _is_listed(self, name: str) -> bool:
        return all(one.is_exact for one in self.ranges[name]) if name in self.ranges else False


@dataclass(frozen=True, slots=True)
class Source:
    """A column whose values may restrict the row keys of a larger table, and the files that have them."""

    name: str
    """The column's name among those of all scans."""
    table: str
    column: str
    ranges: KeyRanges
    """The ranges of the columns of its scan."""
    scans: Sequence[Scan]


def smallest_source(
    joined: Joined,
    schemas: Mapping[str, Schema],
    reads: Mapping[str, Sequence[Scan]],
    tried: Collection[str],
) -> Source | None:
    """Returns the column whose values take the fewest bytes to read; None if no other is worth reading.

    A scan with conditions comes before one without, of whose rows the first may leave few.
    """

    @cache
    def first_scans(number: int) -> list[Scan] | None:
        return _first_scans(joined, schemas, reads, number)

    found = []
    for name, targets in joined.sources(schemas, lambda number: first_scans(number) is not None):
        number = joined.scan_of(name)
        assert number is not None  # noqa: S101 it is a source
        scans = first_scans(number)
        if name in tried or scans is None:
            continue
        if any(_is_larger(reads.get(target, ()), scans) for target in targets):
            table, column = joined.tables[number], name.partition(" ")[2]
            found.append(Source(name, table, column, joined.of_scan(number, schemas[table].names), scans))
    return min(found, key=lambda source: (not source.ranges, bytes_of(source.scans)), default=None)


def _first_scans(
    joined: Joined, schemas: Mapping[str, Schema], reads: Mapping[str, Sequence[Scan]], number: int
) -> list[Scan] | None:
    """Returns the files of a scan, if they are so small that values in them may be read first."""
    table = joined.tables[number]
    schema = schemas[table]
    has_conditions = bool(joined.of_scan(number, schema.names))
    keys = joined.of_scan(number, schema.row_key_names)
    scans = [scan for scan in reads.get(table, ()) if may_hold(schema, scan.min_key, scan.max_key, keys)]
    rows = sum(scan.row_count or 0 for scan in scans)
    if (
        len(scans) > FILES_MAX
        or bytes_of(scans) > BYTES_MAX
        or rows > (ROWS_MAX if has_conditions else 10 * VALUES_MAX)
    ):
        return None
    return scans


def _is_larger(scans: Sequence[Scan], others: Sequence[Scan]) -> bool:
    return is_large(scans) and bytes_of(scans) >= TIMES_LEAST * bytes_of(others)


def is_large(scans: Sequence[Scan]) -> bool:
    """Returns whether it can pay to read values first, which may leave fewer of a table's files."""
    return len(scans) >= FILES_LEAST or (len(scans) > 1 and bytes_of(scans) >= LARGE_BYTES_LEAST)
