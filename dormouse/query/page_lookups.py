"""Look-ups of a key without an engine, which read the pages that can have it; what does not fit needs one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any

import pyarrow as pa

from dormouse.context import TableContext
from dormouse.data.page_reads import can_look_up, rows_of
from dormouse.data.transform import Transform
from dormouse.data.written import written_schema
from dormouse.model.keyed import is_keyed
from dormouse.model.reshaping import is_as_stored
from dormouse.model.schema import Schema
from dormouse.model.types import Field
from dormouse.query.planner import Scan
from dormouse.query.where import Question

FILES_MAX = 16
"""Of a group of leaves: more are better merged by an engine."""


def looked_up(
    context: TableContext, schema: Schema, asked: Question, transform: Transform, scans: Sequence[Scan]
) -> Iterable[pa.RecordBatch] | None:
    """The rows of some files, in key order, with the keys and the columns asked for; None: ask an engine.

    It does where more than a key is asked for, and of a table whose rows are not what its files have.
    """
    if len(scans) > FILES_MAX or asked.conditions or transform.aggregates or transform.age_off:
        return None
    if is_keyed(context.properties):
        return None
    columns = [schema.field(name) for name in dict.fromkeys((*schema.key_names, *asked.columns))]
    if not can_look_up(schema.key_fields, columns):
        return None
    tables: list[pa.Table] = []
    for scan in scans:
        found = _rows_of(context, schema, scan, [field.name for field in columns])
        if found is None:
            return None
        tables += found
    if not tables:
        return []
    rows = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
    if len(tables) > 1:
        rows = rows.sort_by([(name, "ascending") for name in schema.key_names])
    batches: list[pa.RecordBatch] = rows.combine_chunks().to_batches()
    return batches


def _rows_of(
    context: TableContext, schema: Schema, scan: Scan, columns: Sequence[str]
) -> list[pa.Table] | None:
    key = _key_of(schema, scan)
    if not key or scan.deletions or not scan.byte_count:
        return None
    written = written_schema(schema, scan.filename)
    if written is not schema and not is_as_stored(written, schema):
        return None
    return rows_of(context.objects, scan.filename, scan.byte_count, key, columns)


def _key_of(schema: Schema, scan: Scan) -> dict[Field, Any]:
    """The values of the first row keys that a file's wanted rows have; empty when more is wanted of them."""
    if len(scan.slices) != 1:
        return {}
    wanted = scan.slices[0]
    leading = list(takewhile(lambda field: field.name in wanted, schema.row_keys))
    ranges = [wanted[field.name] for field in leading]
    if len(leading) != len(wanted) or not all(len(one) == 1 and one[0].is_exact for one in ranges):
        return {}
    return {field: one[0].min for field, one in zip(leading, ranges, strict=True)}
