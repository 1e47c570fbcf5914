"""Deletes: a condition that is recorded; of a keyed table by its values a load of marks, one for each key."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, arrow_type
from dormouse.data.leaf_sorter import MEMORY_BYTES
from dormouse.errors import QueryOvertaken
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.table import is_keyed
from dormouse.reading.checked_files import on_current
from dormouse.reading.deleting import ALL, DeleteReport, DeleteWhere, names_values
from dormouse.reading.deleting import delete as record
from dormouse.reading.executor import query
from dormouse.reading.where import Where
from dormouse.sources.source import Source
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.ingest import ingest_once, keyed_rows, write_leaves

OVERTAKEN_MAX = 10
_DELETES = "__deletes"


def delete(context: TableContext, where: DeleteWhere, *, dry_run: bool = False) -> DeleteReport:
    """Deletes the rows that match, see `Table.delete`."""
    return on_current(context, lambda now: _delete(now, where, dry_run=dry_run))


def _delete(context: TableContext, where: DeleteWhere, *, dry_run: bool) -> DeleteReport:
    if dry_run or not is_keyed(context.properties) or not names_values(context, where):
        return record(context, where, dry_run=dry_run)
    at = datetime.now(UTC)

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        nonlocal at
        rows = keyed_rows(current, attempt, _DELETES)
        if rows is None:
            raise AssertionError("a load of a keyed table has a place")
        at = rows.taken_at
        # after the place was taken: what was acknowledged before is seen
        marks = Source(rows.stored(_marks(current, None if where is ALL else where)), None)
        return write_leaves(current, attempt, marks, lambda *_: None, MEMORY_BYTES)

    for left in reversed(range(OVERTAKEN_MAX)):
        try:
            report = ingest_once(context, None, write)
            break
        except QueryOvertaken:
            # its files were collected, and nothing is done: it looks anew, from another place
            if not left:
                raise
    return DeleteReport(None, at, report.rows)


def _marks(context: TableContext, where: Where) -> Iterator[pa.RecordBatch]:
    """The keys whose newest row matches, with what their place is told by, as data that marks them."""
    schema, by = context.schema, context.properties.newest_by
    unfiltered = context.table.properties.model_copy(update={"filter": None})
    whole = replace(context, table=replace(context.table, properties=unfiltered))
    known = [*schema.row_key_names, *([] if by is None else [by])]
    for batch in query(whole, where, known):
        columns = [
            batch.column(field.name)
            if field.name in known
            else pa.nulls(batch.num_rows, arrow_type(field.type))
            for field in schema.fields
        ]
        names = [*arrow_schema(schema).names, _DELETES]
        marked = pa.repeat(pa.scalar(True), batch.num_rows)
        yield pa.RecordBatch.from_arrays([*columns, marked], names=names)
