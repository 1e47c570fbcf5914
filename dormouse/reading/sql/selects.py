"""The SELECT statements with which DuckDB reads a table from its files."""

from __future__ import annotations

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, starmap
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from dormouse.data.transform import Function, Transform, quoted
from dormouse.model.region import KeyRanges, Range, start_of, united
from dormouse.model.schema import Column, Field, Schema, is_as_stored, pairs
from dormouse.model.table import (
    DELETED_AT,
    ROW_DELETED,
    ROW_VERSION,
    SEQUENCE,
    TableProperties,
    is_keyed,
    newest_first,
)
from dormouse.model.types import LONG, TIMESTAMP
from dormouse.objects.names import PARQUET_SUFFIX
from dormouse.reading.gone_rows import GoneRows
from dormouse.reading.overlaps import Layers, layers, parted_by_marks
from dormouse.reading.planner import Scan, keys_near, ways_of
from dormouse.reading.row_filter import (
    EVERY_ROW,
    TESTS_MAX,
    Filter,
    Given,
    InRanges,
    every,
    in_slices,
    meets,
    parted,
    remains,
    rendered_unless_all,
)
from dormouse.reading.sql.conditions import DUCKDB, DuckDb, all_of, literal, text, type_name
from dormouse.reading.sql.engine import path_of
from dormouse.reading.streams import Interruption
from dormouse.reading.where import Deletion, Question
from dormouse.state.context import TableContext

if TYPE_CHECKING:
    from dormouse.reading.replaced_rows import Replaced

# The files that DuckDB reads in one scan, and which of their rows count.

SCANS_MAX = 64
"""The approximate maximum of scans that read the files of one table.

DuckDB plans each scan separately, which for a thousand scans takes seconds.
"""
INDEX = "file_index"
"""The name of DuckDB's virtual column with the position of a row's file in the scan's list of files."""
NUMBER = "file_row_number"
"""The name of DuckDB's virtual column with the position of a row in its file."""
NUMBERS_LISTED_MAX = 20_000
"""The most rows that are left out by a join with their numbers. More rows of a file become bits of a text."""
_FILE_ROWS = 1 << 32
_GAPS_MAX = 16
"""The most gaps between ranges of keys in which row groups are skipped."""
_ROWS_LEFT_OUT_MAX = 1_000_000
"""The most rows that a statement leaves out of one table by their numbers, since its text has them all."""


def written_alike(scan: Scan) -> tuple[bool, int]:
    """Returns a file's kind. DuckDB can read files of the same kind in one statement.

    The kind is True if DuckDB may use all statistics of the file, and the version of the file's schema.
    """
    return scan.filename.endswith(PARQUET_SUFFIX), scan.schema_version


def read_together(
    schema: Schema, scans: Iterable[Scan], scans_max: int = SCANS_MAX
) -> Iterator[Sequence[Scan]]:
    """Yields about `scans_max` lists of files; DuckDB reads the files of each in one scan, in this order."""
    # files with rows to leave out are read alone, so that other files are read as if there were none
    ways = ways_of(scans, lambda scan: (*written_alike(scan), scan.filename if scan.gone else ""))
    if len(ways) <= scans_max or may_hide_index(schema, (way.kind[1] for way in ways)):
        yield from ways.values()
        return
    alike: dict[Any, list[list[Scan]]] = defaultdict(list)
    for way, found in ways.items():
        alike[way.kind[:2]].append(found)
    for some in alike.values():
        listed = sorted((scan for found in some for scan in found), key=lambda scan: _place(schema, scan))
        size = -(-len(listed) // max(1, scans_max * len(some) // len(ways)))
        yield from (listed[at : at + size] for at in range(0, len(listed), size))


def rows_of(schema: Schema, scans: Sequence[Scan]) -> str | None:
    """Returns the SQL condition for wanted rows: those that lie in the slices of their own file.

    Returns None when all rows of the files are wanted.
    """
    runs = [(slices, len(list(run))) for slices, run in groupby(scans, attrgetter("slices"))]
    conditions = [rendered_unless_all(in_slices(schema, slices), DUCKDB) for slices, _ in runs]
    first, near = schema.row_keys[0], united([one for slices, _ in runs for one in slices])
    gaps = list(_gaps(first, near.get(first.name, ())))
    if len(runs) == 1 and not gaps:
        return conditions[0]
    hull = in_slices(schema, [KeyRanges({first.name: [near.enclosing(first.name)]})])
    near_first = rendered_unless_all(every([hull, *gaps]), DUCKDB)
    ends = list(accumulate(length for _, length in runs))
    return all_of([near_first, _by_index(conditions, ends)])


def _gaps(field: Field, ranges: Sequence[Range]) -> Iterator[Filter]:
    """Yields filters that leave out values between ranges, by which DuckDB skips row groups.

    It skips them by a bound, by two that are joined by OR, and by a list, but not by ranges joined by OR.
    """
    if all(one.is_exact for one in ranges):
        return
    size = -(-len(ranges) // (_GAPS_MAX + 1))
    for at in range(size, len(ranges), size):
        below, above = ranges[at - 1 : at + 1]
        yield InRanges(field, (replace(below, min=None), replace(above, max=None)))


def left_of(
    schema: Schema,
    scans: Sequence[Scan],
    deletions: Sequence[Sequence[Deletion]],
    value: Callable[[Field], str],
    wanted: Range = Range(),  # noqa: B008 immutable
) -> str | None:
    """Returns the SQL condition for rows that no deletion of their own file matches; None without deletions.

    `deletions` has the deletions of each scan. `value` returns the SQL expression of a column. Rows whose
    first key is not in `wanted` may be left out or not.
    """
    numbers = [{one.deletion_id for one in some} for some in deletions]
    known = {one.deletion_id: one for some in deletions for one in some}
    if not known:
        return None

    def where(deletion: Deletion) -> Filter:
        runs = list(_runs(scans, numbers, deletion.deletion_id))
        if runs == [(0, len(scans))]:
            return EVERY_ROW
        return Given(" OR ".join(f"{INDEX} BETWEEN {start} AND {end - 1}" for start, end in runs))

    near = keys_near(schema.row_keys[0], scans).intersect(wanted)
    left = EVERY_ROW if near is None else remains(schema, [known[n] for n in sorted(known)], where, near)
    return rendered_unless_all(left, DuckDb(value))


def without_rows(read: str, gone: Sequence[GoneRows | None]) -> str:
    """Returns the FROM clause that reads files without the rows in `gone`, which has an item for each file.

    DuckDB applies conditions on the rows before the join. `read` is a call of `read_parquet`.
    """
    numbers = [one.numbers for one in gone if one is not None]
    if not any(map(len, numbers)):
        return read
    if len(gone) == 1 and len(numbers[0]) > NUMBERS_LISTED_MAX:
        last = int(numbers[0][-1])
        bits = np.zeros(last + 1, np.uint8)
        bits[numbers[0]] = 1
        packed = b64encode(np.packbits(bits).tobytes()).decode()
        # `get_bit` fails beyond the last bit, and CASE is evaluated only as far as needed
        is_left = f"get_bit(from_base64('{packed}')::BIT, {NUMBER}::INTEGER) = 0"
        return f"{read} WHERE CASE WHEN {NUMBER} <= {last} THEN {is_left} ELSE true END"
    places = [() if one is None else one.numbers + at * _FILE_ROWS for at, one in enumerate(gone)]
    listed = ",".join(str(number) for some in places for number in some)
    number = NUMBER if len(gone) == 1 else f"{INDEX} * {_FILE_ROWS}::BIGINT + {NUMBER}"
    # one text is parsed faster than many literals
    return f"{read} ANTI JOIN (SELECT unnest('[{listed}]'::BIGINT[])) AS __gone(__row) ON {number} = __row"


def asks_index(scans: Sequence[Scan]) -> bool:
    """Returns whether conditions differ between files, so that they must use the column `INDEX`."""
    return any((scan.slices, scan.deletions) != (scans[0].slices, scans[0].deletions) for scan in scans)


def may_hide_index(schema: Schema, versions: Iterable[int] = ()) -> bool:
    """Returns whether a file may have a column with the name of a virtual one, which it would replace."""
    shape = schema.shape
    names = (stage.name for column in shape.columns for stage in column.stages)
    return (
        not {INDEX, NUMBER}.isdisjoint(map(str.lower, names))
        or len(shape.columns) < shape.last_id
        or any(version > shape.version for version in versions)
    )


def _place(schema: Schema, scan: Scan) -> tuple[Any, ...]:
    """Returns a sort key by which scans with equal deletions are adjacent, and among them near keys."""
    first = schema.row_keys[0].name
    return (
        not scan.deletions,
        scan.deletions_till if scan.deletions else 0,
        min((start_of(one.enclosing(first)) for one in scan.slices), default=()),
    )


def _by_index(conditions: Sequence[str | None], ends: Sequence[int]) -> str:
    """Returns one condition that applies to each row the condition of its file, found by binary search.

    Each condition applies to the files before the position in `ends`.
    """
    if len(conditions) == 1:
        return conditions[0] or "true"
    half = len(conditions) // 2
    below, above = _by_index(conditions[:half], ends[:half]), _by_index(conditions[half:], ends[half:])
    return f"CASE WHEN {INDEX} < {ends[half - 1]} THEN {below} ELSE {above} END"


def _runs(scans: Sequence[Scan], numbers: Sequence[set[int]], number: int) -> Iterator[tuple[int, int]]:
    """Yields the runs of files to which a deletion applies: the first file, and the one after the last.

    A run may include files to which the deletion does not apply, if it matches no row of them. So deletions
    that came one after another have the same runs, and are tested together.
    """
    positions = (
        at
        for at, scan in enumerate(scans)
        if number in numbers[at] or (numbers[at] and scan.deletions_till < number)
    )
    for _, run in groupby(enumerate(positions), lambda one: one[1] - one[0]):
        found = [position for _, position in run]
        yield found[0], found[-1] + 1


# The rows of keyed tables as DuckDB's SQL: first the newest row of each key, then the conditions on values.

GONE = "__gone"
THERE = f"{quoted(DELETED_AT)} IS NULL"
"""The condition for rows that are no marks of deletion."""


def deletion_columns(properties: TableProperties, remains: str | None) -> Sequence[str]:
    """Returns the SQL expressions that `newest` needs in addition to the table's columns.

    `remains` is the condition for rows that no deletion matches.
    """
    gone = f"NOT ({THERE})" if remains is None else f"NOT ({THERE} AND {remains})"
    return [*map(quoted, _hidden(properties)), f"{gone} AS {GONE}"]


def by_keys(
    kind: Literal["ANTI", "SEMI"], schema: Schema, columns: Iterable[str], rows: str, others: str
) -> str:
    """Returns a SELECT of the rows whose key is not in `others` (ANTI), or is in `others` (SEMI).

    DuckDB applies conditions on the rows before the join.
    """
    keys = ", ".join(map(quoted, schema.row_key_names))
    among = f"{kind} JOIN (SELECT {keys} FROM ({others})) USING ({keys})"
    return f"SELECT {', '.join(map(quoted, columns))} FROM ({rows}) {among}"


def unreplaced(schema: Schema, rows: str, others: str, newer: Literal[">", ">="]) -> str:
    """Returns a SELECT of the rows without those whose key has a newer row in `others`, by their places.

    DuckDB applies conditions on the rows before the join.
    """
    keys, place = [*map(quoted, schema.row_key_names)], quoted(SEQUENCE)
    tests = [*(f"__other.{key} = __row.{key}" for key in keys), f"__other.{place} {newer} __row.{place}"]
    among = f"(SELECT {', '.join([*keys, place])} FROM ({others})) AS __other"
    return f"SELECT * FROM ({rows}) AS __row ANTI JOIN {among} ON {all_of(tests)}"


def _without(scan: Scan, rows: GoneRows | None) -> Scan:
    if rows is None:
        return scan
    return replace(scan, gone=rows if scan.gone is None else scan.gone.together(rows))


def _hidden(properties: TableProperties) -> list[str]:
    return [name for name in newest_first(properties) if name.startswith("__")]


def newest(schema: Schema, rows: str, newest_by: Sequence[str], gone: str) -> str:
    """Returns a SELECT of the newest row of each key, unless the column `gone` is true in it.

    The newest row has the largest values of the columns `newest_by`.
    """
    keys = ", ".join(quoted(field.name) for field in schema.row_keys)
    order = ", ".join(f"{quoted(name)} DESC" for name in newest_by)
    columns = ", ".join(map(quoted, schema.names))
    # DuckDB pushes only conditions on the keys below the window
    place = f"row_number() OVER (PARTITION BY {keys} ORDER BY {order})"
    numbered = f"SELECT *, {place} AS __place FROM ({rows})"
    return f"SELECT {columns} FROM ({numbered}) WHERE __place = 1 AND NOT {quoted(gone)}"


class Select:
    """A maker of SELECT statements for the wanted rows of one table."""

    def __init__(
        self,
        context: TableContext,
        question: Question,
        now_ms: int,
        *,
        ranges: KeyRanges = KeyRanges(),  # noqa: B008 immutable
        interruption: Interruption | None = None,
        compares_null: bool = True,
        joins_outer: bool = False,
        searches: bool = False,
    ) -> None:
        """Prepares the SELECT; the statement needs no rows outside `ranges`.

        `compares_null` and `joins_outer` describe the statement (see `Parsed`). With `searches`, it needs the
        keys and probably few of the rows. So only these are compared with deletions and newer rows. No file
        is read before to find the rows that do not count.
        """
        self._context = context
        self._ranges = ranges
        self._interruption = interruption or Interruption()
        self._compares_null = compares_null
        self._joins_outer = joins_outer
        self._searches = searches
        self._schema = context.schema
        self._properties = context.properties
        self._transform = Transform.parse(context.schema, context.properties)
        self._question = question
        self._now_ms = now_ms

    def of(self, scans: Collection[Scan]) -> str:
        """Returns a SELECT of the wanted rows of some files. Without files, it returns no row."""
        if not scans:
            fields = self._schema.fields
            columns = (f"NULL::{type_name(field.type)} AS {quoted(field.name)}" for field in fields)
            return f"SELECT {', '.join(columns)} WHERE false"
        if self._context.current_rows:
            every = Select(
                self._context.every_version,
                self._question,
                self._now_ms,
                ranges=self._ranges,
                interruption=self._interruption,
            )
            rows = newest(self._schema, every.unmerged(scans), [ROW_VERSION], ROW_DELETED)
        else:
            rows = self._newest(scans) if is_keyed(self._properties) else self.unmerged(scans)
        conditions = [rendered_unless_all(meets(one), DUCKDB) for one in self._question.conditions]
        if not self._transform.aggregates:
            return _where(f"SELECT * FROM ({rows})", [*conditions, self._young()])
        # the rows of each key are aggregated into one
        keys = ", ".join(map(quoted, self._schema.key_names))
        values = ", ".join(_aggregate(field, function) for field, function in self._transform.aggregates)
        merged = _where(f"SELECT {keys}, {values} FROM ({rows})", [self._young()])
        return _where(f"SELECT * FROM ({merged} GROUP BY {keys})", conditions)

    def _newest(self, scans: Collection[Scan]) -> str:
        """Returns a SELECT of the newest row of each key.

        Rows of a large file are not compared with each other. Only rows whose key is in one of its small
        files are left out.
        """
        schema, properties = self._schema, self._properties
        found = layers(self._context.objects, schema, properties, scans)
        rows = [self.unmerged(found.alone)] if found.alone else []
        if found.large and self._searches and properties.newest_by is None:
            rows += self._searched(found)
            found = Layers(together=found.together)
        keys = self.unmerged(found.small, marked=True) if found.small else ""
        if found.large:
            replaced = self._replaced(found)
            older = {name for name, one in replaced.items() if one.are_older}
            found.undecided = [scan for scan in found.undecided if scan.filename not in older]
            if direct := [scan for scan in found.large if scan.filename in replaced]:
                gone = {name: one.rows for name, one in replaced.items()}
                rows.append(self.unmerged(direct, replaced=gone))
            if joined := [scan for scan in found.large if scan.filename not in replaced]:
                rows.append(by_keys("ANTI", schema, schema.names, self.unmerged(joined), keys))
        compared = [*found.small, *found.together]
        compare = [self.unmerged(compared, marked=True)] if compared else []
        if found.undecided:
            undecided = self.unmerged(found.undecided, marked=True)
            columns = [*schema.names, *_hidden(properties), GONE]
            compare.append(by_keys("SEMI", schema, columns, undecided, keys))
        if compare:
            rows.append(newest(schema, " UNION ALL ".join(compare), newest_first(properties), GONE))
        return " UNION ALL ".join(rows)

    def _searched(self, files: Layers) -> Iterator[str]:
        """Yields SELECTs of the newest row of each key in large files and in small ones."""
        large, small = (self.unmerged(some, marked=True) for some in (files.large, files.small))
        found = [unreplaced(self._schema, rows, small, ">") for rows in (large, small)]
        if files.undecided:
            undecided = self.unmerged(files.undecided, marked=True)
            found[1] = unreplaced(self._schema, found[1], undecided, ">=")
        columns = ", ".join(map(quoted, self._schema.names))
        for rows in found:
            yield f"SELECT {columns} FROM ({rows}) WHERE NOT {quoted(GONE)}"

    def _replaced(self, files: Layers) -> dict[str, Replaced]:
        """Returns the rows of large files that small files replace, by filename, where they are known."""
        large, small = files.large, files.small
        undecided = {scan.filename for scan in files.undecided}
        if self._properties.newest_by is None and any(scan.deletions for scan in small):
            # a deletion of a row in a small file may not apply to a newer row of its key in these files
            large = [scan for scan in large if scan.filename not in undecided]
        if may_hide_index(self._schema, (scan.schema_version for scan in large)):
            return {}
        from dormouse.reading.replaced_rows import replaced_rows
        from dormouse.reading.row_numbers import Finder

        found, rows = {}, 0
        finder = Finder(self._context, self._ranges, self._interruption)
        for name, some in replaced_rows(finder, large, small, undecided).items():
            rows += len(some.rows)
            if rows <= _ROWS_LEFT_OUT_MAX:
                found[name] = some
        return found

    def unmerged(
        self,
        scans: Iterable[Scan],
        *,
        marked: bool = False,
        replaced: Mapping[str, GoneRows] = MappingProxyType({}),
    ) -> str:
        """Returns a SELECT of the rows in the slices of some files, as they are stored; `scans` is not empty.

        For a keyed table it leaves marks of deletion out, and the rows in `replaced`, by filename. With
        `marked` it has all rows, and the columns that `newest` needs.
        """
        settled = [_without(one, replaced.get(one.filename)) for one in self._settled(list(scans), marked)]
        if marked or not is_keyed(self._properties):
            plain, with_marks = settled, list[Scan]()
        else:
            plain, with_marks = parted_by_marks(self._context.objects, settled)
        # DuckDB reads several scans with less parallelism than one; numbers of rows are tested file by file
        together = self._searches and not any(scan.gone for scan in settled)
        parts = [
            self._part(files, marked=marked, leaves_marks_out=leaves_out)
            for some, leaves_out in ((plain, False), (with_marks, True))
            for files in read_together(self._schema, some, 1 if together else SCANS_MAX)
        ]
        return " UNION ALL ".join(parts)

    def _settled(self, scans: list[Scan], marked: bool) -> list[Scan]:
        """Returns scans with rows to leave out by their numbers instead of deletions, where this is possible.

        Rows that are deleted but hide others stay in the answer.
        """
        versions = (scan.schema_version for scan in scans)
        hides = marked and self._properties.newest_by is not None
        if hides or may_hide_index(self._schema, versions) or not any(scan.deletions for scan in scans):
            return scans
        deletions = {one.deletion_id: one for scan in scans for one in scan.deletions}
        if self._searches and len(deletions) <= TESTS_MAX and not any(one.rows for one in deletions.values()):
            return scans
        # most statements need no DataFusion, which takes long to import
        from dormouse.reading.row_numbers import Finder

        found, rows = [], 0
        for scan in Finder(self._context, self._ranges, self._interruption).settled(scans):
            rows += len(scan.gone or ())
            found.append(scan.unsettled() if rows > _ROWS_LEFT_OUT_MAX else scan)
        return found

    def _part(self, scans: Sequence[Scan], *, marked: bool, leaves_marks_out: bool) -> str:
        """Returns a SELECT of the rows of files that are read in one scan."""
        unbounded, version = written_alike(scans[0])
        columns = [self._column(field, unbounded) for field in self._schema.fields]
        files = ", ".join(text(path_of(self._context.objects, scan.filename)) for scan in scans)
        # a folder named a=b would otherwise add a column to its files
        read = f"read_parquet([{files}], hive_partitioning = false)"
        read = without_rows(read, [scan.gone for scan in scans])
        now = self._context.stored_schema
        written = now.as_written(version)
        if not is_as_stored(written, now):
            index = [INDEX] if asks_index(scans) else []
            read = f"(SELECT {', '.join([*starmap(_as_now, pairs(written, now)), *index])} FROM {read})"

        def value(field: Field) -> str:
            return _computed(field, unbounded) or quoted(field.name)

        by_value = marked and self._properties.newest_by is not None
        both = [parted(scan.deletions, hides=by_value) for scan in scans]
        near = self._ranges.enclosing(self._schema.row_keys[0].name)
        hiding, others = (left_of(self._schema, scans, some, value, near) for some in zip(*both, strict=True))
        if marked:
            columns += deletion_columns(self._properties, hiding)
        conditions = [rows_of(self._schema, scans), others]
        if leaves_marks_out:
            # only if it must, since DuckDB expects few rows of a scan with a condition
            conditions.append(THERE)
        if " WHERE " in read and is_as_stored(written, now):
            read = f"(SELECT *, {INDEX} FROM {read})"
        return _where(f"SELECT {', '.join(columns)} FROM {read}", conditions)

    def _column(self, field: Field, unbounded: bool) -> str:
        """Returns the SQL expression of a column.

        It is computed if DuckDB would skip wanted rows of a plain column.
        """
        name = quoted(field.name)
        is_plain = field.nullable and not self._compares_null and (unbounded or not field.type.is_floating)
        computed = None if is_plain else _computed(field, unbounded)
        if self._joins_outer and not field.type.is_nested:
            # With ORDER BY … NULLS FIRST LIMIT over an outer join, DuckDB skips rows of one side by the
            # values that it has read. Rows of the other side then find no match, and come first, with NULL. A
            # computed column prevents this.
            computed = f"CASE WHEN {name} IS NULL THEN NULL ELSE {computed or name} END"
        return name if computed is None else f"{computed} AS {name}"

    def _young(self) -> str | None:
        """Returns the SQL condition for rows that the table's filter keeps; None without a filter."""
        age_off = self._transform.age_off
        if age_off is None:
            return None
        name, oldest_ms = quoted(age_off.field), self._now_ms - age_off.age_ms
        oldest = f"({oldest_ms})::BIGINT"
        if self._schema.field(age_off.field).type == TIMESTAMP:
            oldest = f"make_timestamptz({max(oldest_ms * 1_000, -(1 << 63) + 2)})"
        return f"{name} > {oldest} OR {name} IS NULL"


def _as_now(field: Field, column: Column, before: Field | None) -> str:
    """Returns the SQL of a column's current form, for files that have an earlier form of it or lack it."""
    if before is None:
        default = column.default
        found = f"NULL::{type_name(field.type)}" if default is None else literal(field, default)
    else:
        found = quoted(before.name)
        found = found if before.type == field.type else f"CAST({found} AS {type_name(field.type)})"
    return f"{found} AS {quoted(field.name)}"


def _computed(field: Field, unbounded: bool) -> str | None:
    """Returns an expression for a column whose statistics DuckDB must not use; None if it may use them.

    Parquet's statistics leave NaN out, but DuckDB treats NaN as the largest number, and would skip row groups
    that have one. New files have no statistics for DOUBLE. Older files may have them, but DuckDB does not
    apply them to a computed column: x * 1.0 equals x for each number, including -0.0.

    If a column of a file is all NULL, DuckDB wrongly skips all rows for `x IS DISTINCT FROM 1 OR x < 0`.
    """
    name = quoted(field.name)
    if field.type.is_floating and not unbounded:
        return f"{name} * 1.0::{type_name(field.type)}"
    if field.nullable and not field.type.is_nested:
        return f"CASE WHEN {name} IS NULL THEN NULL ELSE {name} END"
    return None


def _aggregate(field: Field, function: Function) -> str:
    name = quoted(field.name)
    # a sum of BIGINT is exact, and its overflow raises an error
    exact = "::BIGINT" if function == "sum" and field.type == LONG else ""
    return f"{function}({name}){exact} AS {name}"


def _where(select: str, conditions: Iterable[str | None]) -> str:
    found = all_of(conditions)
    return select if found is None else f"{select} WHERE {found}"
