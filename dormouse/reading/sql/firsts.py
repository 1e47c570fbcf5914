"""Statements that need only the first or last rows of a table, or only facts about its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.transform import Transform, quoted
from dormouse.model.region import KeyRanges, decode_key
from dormouse.model.schema import Schema
from dormouse.model.table import is_keyed
from dormouse.reading.planner import PlanSummary, Scan
from dormouse.reading.sql.conditions import literal, type_name
from dormouse.reading.sql.constants import UNKNOWN, Node, constant
from dormouse.reading.sql.restrictions import Columns, Key
from dormouse.reading.sql.results import Rows
from dormouse.reading.sql.scans import Scans, plain
from dormouse.state.context import TableContext

_ONE_ROW = ("LOGICAL_PROJECTION", "LOGICAL_LIMIT", "LOGICAL_ORDER_BY")
"""The nodes that may stand above an aggregation into one row."""
_DIRECTIONS = {"ASCENDING": False, "DESCENDING": True}
FEW_FILES = 8
"""The most files that are read together where the first of them may be enough."""
_RANGES_MAX = 16
"""The most key ranges for which the files that lie within one are counted from their facts."""


@dataclass(frozen=True, slots=True)
class Enough:
    """The number of result rows, not including those skipped by OFFSET, after which a result is complete."""

    rows: int
    in_key_order: bool
    """True if these must be the first rows in the order of the row keys."""
    descending: bool = False
    """True if they must be the last rows in that order."""
    is_value: bool = False
    """True if the one row of the result is complete once it has no null."""
    rows_read: int | None = None
    """The number of the table's rows in the needed ranges that suffice; None if this is not known."""


@dataclass(frozen=True, slots=True)
class Ends:
    """A statement that asks only for the smallest or largest first row key, and for numbers of rows."""

    smallest: bool
    largest: bool
    counts: tuple[int, ...]
    """The positions of the answer's columns that are numbers of rows."""


def enough(plan: Node, schemas: Mapping[str, Schema]) -> Enough | None:
    """Returns the limit of a plan of one scan; None if a row may come from several rows of the table."""
    above = _below(plan, "LOGICAL_PROJECTION")
    limit = above.get("limit_val", {})
    if above["type"] != "LOGICAL_LIMIT" or limit.get("type") != "CONSTANT_VALUE":
        return _of_value(plan, schemas)
    rows, skipped = int(limit["constant_integer"]), above.get("offset_val", {})
    below = _below(above["children"][0], "LOGICAL_PROJECTION")
    descending = None
    if below["type"] == "LOGICAL_ORDER_BY":
        descending = _in_key_order(below, schemas)
        if descending is None:
            return _of_value(plan, schemas)
        [below] = below["children"]
        below = _below(below, "LOGICAL_PROJECTION")
    rows_read = None
    if _is_scan(below) and _scanned(below, schemas).is_exact and skipped.get("type") in _SKIPPED:
        rows_read = rows + int(skipped.get("constant_integer", 0))
    more = ("LOGICAL_LIMIT",) if descending is None else ()
    if not _is_scan(_below(below, "LOGICAL_PROJECTION", "LOGICAL_FILTER", *more)):
        return _of_value(plan, schemas)
    return Enough(rows, descending is not None, bool(descending), rows_read=rows_read)


_SKIPPED = {"UNSET", "CONSTANT_VALUE"}


def ends(plan: Node, schemas: Mapping[str, Schema]) -> Ends | None:
    """Returns what a plan asks for; None if it needs rows of its only table, or filters them by values."""
    found = _aggregation(plan, schemas)
    if found is None or not found.scans.is_exact or found.has_filter:
        return None
    positions = [n for n, name in enumerate(found.names) if name == "count"]
    counts = []
    for place, output in enumerate(found.outputs):
        if set(_positions(output)).isdisjoint(positions):
            continue
        if output.get("expression_class") != "BOUND_REF":
            return None
        counts.append(place)
    return Ends("min" in found.names, "max" in found.names, tuple(counts))


def _of_value(plan: Node, schemas: Mapping[str, Schema]) -> Enough | None:
    """Returns the need of a statement for the smallest or the largest first row key, but not for both."""
    found = _aggregation(plan, schemas)
    if found is None or set(found.names) not in ({"min"}, {"max"}):
        return None
    if any(output.get("expression_class") != "BOUND_REF" for output in found.outputs):
        return None
    return Enough(1, True, found.names[0] == "max", is_value=True)


@dataclass(frozen=True, slots=True)
class _Aggregation:
    """An aggregation of the rows of one scan into one row."""

    names: Sequence[str]
    """The aggregates: `min` and `max` of the first row key, and `count` of all rows."""
    outputs: Sequence[Node]
    """The expressions of the answer's columns; a reference is the position of an aggregate."""
    has_filter: bool
    """True if an aggregate has a condition of its own."""
    scans: Scans


def _aggregation(plan: Node, schemas: Mapping[str, Schema]) -> _Aggregation | None:
    """Returns the aggregation at the top of a plan; None if it has others than `min`, `max` and `count`."""
    outputs: list[Node] | None = None
    while plan["type"] in _ONE_ROW:
        if plan["type"] == "LOGICAL_PROJECTION":
            expressions = plan["expressions"]
            outputs = expressions if outputs is None else [_placed(one, expressions) for one in outputs]
        elif plan.get("projections") or plan.get("projection_map"):
            return None
        [plan] = plan["children"]
    if plan["type"] != "LOGICAL_AGGREGATE_AND_GROUP_BY" or plan["groups"] or outputs is None:
        return None
    [child] = plan["children"]
    if not _is_scan(_below(child, "LOGICAL_PROJECTION", "LOGICAL_FILTER")):
        return None
    scans = Scans(schemas)
    columns = scans.read(child)
    if not scans.is_one:
        return None
    [table] = scans.tables
    first = schemas[table].row_keys[0].name
    names = [_name(one, columns, first) for one in plan["expressions"]]
    if "" in names:
        return None
    return _Aggregation(names, outputs, any("filter" in one for one in plan["expressions"]), scans)


def _name(aggregate: Node, columns: Columns, first: str) -> str:
    """Returns `min` or `max` of the key `first`, or `count` of all rows; "" for another aggregate."""
    name, keys = aggregate["name"], [plain(one, columns) for one in aggregate["children"]]
    is_distinct = aggregate["aggregate_type"] != "NON_DISTINCT"
    match keys:
        case [Key(field=key)] if name in ("min", "max") and key.name == first:
            return str(name)
        case [Key(field=key)] if name == "count" and not key.nullable and not is_distinct:
            return "count"
        case [] if name == "count_star":
            return "count"
        case [None] if name == "count" and not is_distinct:
            return "count" if constant(aggregate["children"][0]) not in (None, UNKNOWN) else ""
    return ""


def _placed(expression: Node, inner: Sequence[Node]) -> Node:
    """Returns an expression over the columns below those that it refers to, if it is a plain reference."""
    if expression.get("expression_class") == "BOUND_REF":
        return inner[expression["index"]]
    return {"expression_class": "", "children": [inner[n] for n in _positions(expression)]}


def _positions(expression: Any) -> Iterator[int]:
    """Yields the columns that an expression refers to."""
    match expression:
        case {"expression_class": "BOUND_REF", "index": int(index)}:
            yield index
        case dict():
            for part in expression.values():
                yield from _positions(part)
        case list():
            for part in expression:
                yield from _positions(part)


def _below(plan: Node, *kinds: str) -> Node:
    while plan["type"] in kinds:
        [plan] = plan["children"]
    return plan


def _is_scan(plan: Node) -> bool:
    return plan["type"] == "LOGICAL_GET" and not plan.get("children")


def _scanned(plan: Node, schemas: Mapping[str, Schema]) -> Scans:
    scans = Scans(schemas)
    scans.read(plan)
    return scans


def _in_key_order(order: Node, schemas: Mapping[str, Schema]) -> bool | None:
    """Returns whether rows are sorted by the last row keys first; None if they are not sorted by keys.

    They must be sorted by the first row keys, in one direction, and by other columns only after all keys.
    """
    [child] = order["children"]
    scans = Scans(schemas)
    columns = scans.read(child)
    keys = [name for table in scans.tables for name in schemas[table].row_key_names]
    terms = [
        (key.field.name if (key := plain(one["expression"], columns)) else None, one["type"])
        for one in order["orders"]
    ][: len(keys)]
    descending = _DIRECTIONS.get(terms[0][1]) if terms else None
    in_order = [name for name, _ in terms] == keys[: len(terms)]
    return descending if in_order and len({direction for _, direction in terms}) == 1 else None


# Facts about files.


def sure_rows(schema: Schema, ranges: KeyRanges, scan: Scan) -> int | None:
    """Returns the number of a file's rows if all of them lie in the ranges; None if this is not known."""
    is_known = scan.row_count and scan.min_key is not None and scan.max_key is not None
    return scan.row_count if is_known and lies_within(schema, ranges, scan) else None


def lies_within(schema: Schema, ranges: KeyRanges, scan: Scan) -> bool:
    """Returns whether all rows of a file lie in the ranges; False if this is not known."""
    if not ranges:
        return True
    first = schema.row_keys[0]
    wanted = ranges.get(first.name, ())
    if len(ranges) > (first.name in ranges) or len(wanted) > _RANGES_MAX:
        return False
    if scan.min_key is None or scan.max_key is None:
        return False
    low, high = (decode_key([first], key)[0] for key in (scan.min_key, scan.max_key))
    return any(one.contains(low) and one.contains(high) for one in wanted)


def first_files(
    schema: Schema, ranges: KeyRanges, rows_needed: int, groups: Iterable[Sequence[Scan]]
) -> list[Scan] | None:
    """Returns the first files that have enough rows by their facts; None if only reading them can tell."""
    scans: list[Scan] = []
    rows = 0
    for group in groups:
        if scans and rows >= rows_needed:
            break
        scans += group
        rows += sum(sure_rows(schema, ranges, scan) or 0 for scan in group)
    return scans if rows >= rows_needed else None


def has_all_rows(context: TableContext) -> bool:
    """Returns whether a table shows each row of its files, except deleted ones, as it was written."""
    transform = Transform.parse(context.schema, context.properties)
    is_merged = context.current_rows or is_keyed(context.properties) or bool(transform.aggregates)
    return not is_merged and transform.age_off is None


def known_rows(
    context: TableContext, ranges: KeyRanges, ends: Ends, enough: Enough | None, scans: Iterable[Scan]
) -> KnownRows | None:
    """Returns the rows of a table that are known without reading; None if rows should be read instead."""
    if context.verifies or not has_all_rows(context):
        return None
    known = KnownRows.of(context.schema, ranges, ends, scans)
    # of many files, the first ones may have the value that is asked for
    return None if enough is not None and len(known.scans) > FEW_FILES else known


@dataclass
class KnownRows:
    """The rows of a table that files have by their facts, and the files that must be read beside."""

    scans: list[Scan] = field(default_factory=list)
    rows: int = 0
    """The number of rows of the files that need not be read."""
    keys: tuple[bytes, ...] = ()
    """The smallest and the largest row key of these files."""

    @staticmethod
    def of(schema: Schema, ranges: KeyRanges, ends: Ends, scans: Iterable[Scan]) -> KnownRows:
        """Returns the known rows of some files, and the files that may change what is asked for."""
        found = KnownRows()
        for scan in scans:
            rows = sure_rows(schema, ranges, scan)
            if rows is None or scan.min_key is None or scan.max_key is None:
                found.scans.append(scan)
                continue
            found.rows += rows
            both = (scan.min_key, scan.max_key, *found.keys)
            found.keys = min(both), max(both)
        if found.keys and not ends.counts:
            low, high = found.keys
            found.scans = [
                scan
                for scan in found.scans
                if scan.min_key is None
                or scan.max_key is None
                or (ends.smallest and scan.min_key < low)
                or (ends.largest and scan.max_key > high)
            ]
        return found

    def summary(self, whole: PlanSummary) -> PlanSummary:
        """Returns the numbers of files and bytes that are read, from those of the whole table."""
        sizes = {scan.filename: scan.byte_count or 0 for scan in self.scans}
        partitions = len({scan.partition_id for scan in self.scans})
        return PlanSummary(
            min(partitions, whole.partitions),
            whole.partitions_total,
            len(sizes),
            whole.files + whole.files_pruned - len(sizes),
            sum(sizes.values()),
        )

    def select(self, schema: Schema) -> str | None:
        """Returns a SELECT of rows with the smallest and the largest key; None without known rows."""
        rows = []
        for key in self.keys:
            values = dict(zip(schema.row_key_names, decode_key(schema.row_keys, key), strict=True))
            columns = [
                f"{literal(one, values[one.name])} AS {quoted(one.name)}"
                if one.name in values
                else f"NULL::{type_name(one.type)} AS {quoted(one.name)}"
                for one in schema.fields
            ]
            rows.append(f"SELECT {', '.join(columns)}")
        return " UNION ALL ".join(rows) or None

    def counted(self, rows: Rows, ends: Ends) -> Rows:
        """Returns an answer over these files and `select`, with the numbers of all rows."""
        more = self.rows - len(self.keys)

        def batches() -> Iterator[pa.RecordBatch]:
            for batch in rows.batches:
                found = batch
                for place in ends.counts:
                    column = pc.add_checked(batch.column(place), pa.scalar(more, batch.column(place).type))
                    found = found.set_column(place, batch.schema.field(place), column)
                yield found

        return Rows(rows.schema, batches())
