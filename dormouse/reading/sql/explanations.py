"""The parts of EXPLAIN and DESCRIBE that DuckDB does not know.

These are the files that are read, and the columns that are never null.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import pyarrow as pa

from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Schema
from dormouse.reading.planner import PlanSummary
from dormouse.reading.sql.results import Rows

PLAN_TYPE = "dormouse"
COLUMNS = ["plan_type", "plan"]
RANGES_SHOWN = 5
_FILES = "Filename(s)"
_FILES_BOX = re.compile(r"│([^│]*Filename\(s\):[^│]*)│")
_FILES_JSON = re.compile(r'"Filename\(s\)":\s*"(?:[^"\\]|\\.)*"')


def explanation(wanted: Mapping[str, KeyRanges], summaries: Mapping[str, PlanSummary]) -> pa.RecordBatch:
    """Returns one row with EXPLAIN's columns, whose text has a paragraph for each table."""
    text = "\n".join(_table(name, summaries[name], ranges) for name, ranges in wanted.items())
    return pa.RecordBatch.from_arrays(
        [pa.array([PLAN_TYPE]), pa.array([text or "no table is read"])], COLUMNS
    )


def without_files(plan: pa.Array) -> pa.Array:
    """Returns DuckDB's plans as text, without the paths of the files that they read."""
    return pa.array(
        [None if text is None else _without_files(text) for text in plan.to_pylist()], pa.string()
    )


def _without_files(plan: str) -> str:
    if _FILES not in plan:
        return plan
    lines = _FILES_JSON.sub('"Files": "not shown"', plan).split("\n")
    for number in range(len(lines)):
        for found in _FILES_BOX.finditer(lines[number]):
            _clear_box(lines, number, *found.span(1))
    shown = "\n".join(lines)
    # an output format in which the paths cannot be located is not shown at all
    return "the plan names files of the server: ask for the text or json format" if _FILES in shown else shown


def _clear_box(lines: list[str], first: int, left: int, right: int) -> None:
    """Clears the text between two columns, from line `first` to the first line that is empty there."""
    for number in range(first, len(lines)):
        line = lines[number]
        if not line[left:right].strip() or line[left - 1 : left] != "│":
            return
        lines[number] = line[:left] + " " * (right - left) + line[right:]


def with_nulls(rows: Rows, schema: Schema) -> Rows:
    """Returns DuckDB's description of a table, changed to show NO for columns that are never null."""
    never = {field.name for field in schema.fields if not field.nullable}

    def batches() -> Iterator[pa.RecordBatch]:
        for batch in rows.batches:
            nullable = pa.array(
                ["NO" if name in never else "YES" for name in batch["column_name"].to_pylist()],
                rows.schema.field("null").type,
            )
            yield batch.set_column(batch.schema.get_field_index("null"), rows.schema.field("null"), nullable)

    return Rows(rows.schema, batches())


def _table(name: str, summary: PlanSummary, ranges: KeyRanges) -> str:
    files = summary.files + summary.files_pruned
    lines = [
        f"table {name}",
        f"  partitions: {summary.partitions:,} of {summary.partitions_total:,}",
        f"  files: {summary.files:,} of {files:,} ({summary.files_pruned:,} pruned by their keys)",
        f"  bytes: {summary.byte_count:,}",
    ]
    keys = []
    for key, items in ranges.items():
        shown, more = ", ".join(map(_range, items[:RANGES_SHOWN])), len(items) - RANGES_SHOWN
        keys.append(f"    {key}: {shown or 'none'}" + (f" and {more:,} more" if more > 0 else ""))
    return "\n".join([*lines, "  row keys:" if keys else "  row keys: all", *keys])


def _range(item: Range) -> str:
    if item.is_exact:
        return repr(item.min)
    low = "(" if item.min is None or not item.min_inclusive else "["
    high = "]" if item.max_inclusive else ")"
    ends = ["…" if end is None else repr(end) for end in (item.min, item.max)]
    return f"{low}{ends[0]}, {ends[1]}{high}"
