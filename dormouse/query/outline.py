"""What a statement wants: planned against tables without files, so that no file is looked at."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from datafusion import DataFrame, SessionContext
from datafusion.expr import TableScan
from datafusion.plan import LogicalPlan

from dormouse.context import TableContext
from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.transform import Transform, quoted
from dormouse.query.key_ranges import KeyRanges, united
from dormouse.query.pushdown import scans, wanted

# a space is in no table's name, so that these are no table's
_BASE = "dormouse base "
_SCANNED = re.compile(rf"TableScan: {_BASE}(\d+)\b")
_OWN_AGGREGATE = re.compile(rf"Aggregate: groupBy=\[\[{_BASE}\d+\.")
_ROW_BY_ROW = ("Projection:", "Filter:", "SubqueryAlias:", "Limit:")


@dataclass(frozen=True, slots=True)
class Wanted:
    """Of each table that a statement reads, the row keys; and how many rows of any of them are enough."""

    ranges: Mapping[str, KeyRanges]
    rows_enough: int | None = None
    """Rows of any files will do, as soon as they are so many: the statement takes rows as they come."""
    explains: bool = False
    runs: bool = True


def register_outlines(ctx: SessionContext, contexts: Mapping[str, TableContext]) -> None:
    """Makes the tables known to the session, as tables whose files are nowhere."""
    for number, (name, context) in enumerate(contexts.items()):
        ctx.register_view(quoted(name), _outline(ctx, context, f"{_BASE}{number}"))


def what_is_wanted(plan: LogicalPlan, contexts: Mapping[str, TableContext]) -> Wanted:
    """Of a statement's optimized plan, made after `register_outlines`."""
    tables = list(contexts.items())
    named = Counter(int(number) for number in _SCANNED.findall(plan.display_indent()))
    found: dict[int, list[KeyRanges]] = {number: [] for number in named}
    for scan in scans(plan):
        if (number := _number(scan)) is not None:
            found[number].append(wanted(tables[number][1].schema, scan.filters()))
    # a scan that only the text shows stands in a subquery of an expression: what it wants is not known
    ranges = {
        tables[number][0]: united(parts) if len(parts) == named[number] else KeyRanges()
        for number, parts in found.items()
    }
    top = plan.display()
    explains, analyzes = top.startswith("Explain"), top.startswith("Analyze")
    enough = _rows_enough(plan) if named.total() == 1 else None
    return Wanted(ranges, enough, explains or analyzes, not explains)


def _rows_enough(plan: LogicalPlan) -> int | None:
    """The limit of a statement that looks at each row alone: with so many rows it needs no other file."""
    limit: int | None = None
    node: Any = plan
    while node.inputs():
        text = node.display()
        if not text.startswith(_ROW_BY_ROW) and not _OWN_AGGREGATE.match(text):
            return None
        if limit is None and text.startswith(("Filter:", "Aggregate:")):
            # a filter above a limit can take away any number of its rows
            return None
        if limit is None and text.startswith("Limit:"):
            fetch = re.search(r"fetch=(\d+)", text)
            if fetch is None:
                return None
            limit = int(fetch[1])
        [node] = node.inputs()
    return limit


def _number(scan: TableScan) -> int | None:
    name = scan.table_name()
    return int(name.removeprefix(_BASE)) if name.startswith(_BASE) else None


def _outline(ctx: SessionContext, context: TableContext, base: str) -> DataFrame:
    schema = context.schema
    nowhere = "file:///dormouse/nowhere.parquet"
    ctx.register_parquet(quoted(base), nowhere, file_extension="", schema=arrow_schema(schema))
    transform = Transform.parse(schema, context.properties)
    return ctx.sql(transform.sql(quoted(base), time.time_ns() // 1_000_000))
