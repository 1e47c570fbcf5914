"""Look-ups of a key without an engine, which read the pages that can have it; what does not fit needs one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Any, cast

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.context import TableContext
from dormouse.data.newest import first_of_keys
from dormouse.data.page_reads import can_look_up, rows_of
from dormouse.data.transform import Transform
from dormouse.data.written import written_schema
from dormouse.model.keyed import DELETED_AT, is_keyed, newest_first, stored_schema
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

    Ask one where more than a key is wanted, and for a table that merges rows or hides some by their age. Of a
    keyed table it is the newest row of each key, unless that is a mark of deletion.
    """
    keys = [_key_of(schema, scan) for scan in scans] if len(scans) <= FILES_MAX else [{}]
    if not all(keys) or asked.conditions or transform.aggregates or transform.age_off:
        return None
    properties = context.properties
    newest_by = newest_first(properties) if is_keyed(properties) else ()
    stored = stored_schema(schema, properties)
    if not all(_is_plain(stored, scan) for scan in scans):
        return None
    wanted = list(dict.fromkeys((*schema.key_names, *asked.columns)))
    hidden = [*newest_by, DELETED_AT] if newest_by else []
    columns = [stored.field(name) for name in dict.fromkeys((*wanted, *hidden))]
    if not can_look_up(schema.key_fields, columns):
        return None
    names = [field.name for field in columns]
    batches: list[pa.RecordBatch] = []
    for scan, key in zip(scans, keys, strict=True):
        found = rows_of(context.objects, scan.filename, scan.byte_count or 0, key, names)
        if found is None:
            return None
        batches += found
    if len(batches) > 1:
        order = [(name, "ascending") for name in schema.key_names]
        order += [(name, "descending") for name in newest_by]
        rows = pa.Table.from_batches(batches).sort_by(order)
        batches = cast("list[pa.RecordBatch]", rows.combine_chunks().to_batches())
    return _newest(batches, schema, wanted) if newest_by else batches


def _newest(batches: Iterable[pa.RecordBatch], schema: Schema, names: Sequence[str]) -> list[pa.RecordBatch]:
    """Returns the first row of each key, without marks of deletion."""
    first = first_of_keys(batches, schema.row_key_names)
    return [batch.filter(pc.is_null(batch.column(DELETED_AT))).select(names) for batch in first]


def _is_plain(schema: Schema, scan: Scan) -> bool:
    """Whether all rows of a file count, as they were written."""
    written = written_schema(schema, scan.filename)
    is_whole = not scan.deletions and bool(scan.byte_count)
    return is_whole and is_as_stored(written, schema)


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
