"""Changes for `writing.edits` that need no query engine: loads, deletions, and both together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.cut import Position
from dormouse.model.loops import Progress, no_progress
from dormouse.model.schema import Schema
from dormouse.model.table import check_upsert, given_schema, is_keyed
from dormouse.reading.executor import query
from dormouse.reading.sql.staged import Staged
from dormouse.reading.where import ALL, DeleteWhere
from dormouse.sources.given_rows import are_paths, as_arrow
from dormouse.sources.source import Source, open_source
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.deleting import DELETES, asked_to_delete, marks
from dormouse.writing.edits import Change, Computed, Edit
from dormouse.writing.ingest import IngestReport, KeyedRows, keyed_rows, written


class Given:
    """The data of a load, which can be read several times: a stream is staged when it is first read."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._staged: Staged | None = None

    def source(self, context: TableContext, schema: Schema) -> Source:
        """Returns the rows, which fit the schema. Raises the errors of `open_source`."""
        if self._staged is None and not are_paths(self._data):
            rows = as_arrow(self._data)
            self._data = self._data if rows is None else rows
            if not isinstance(rows, pa.Table | pa.RecordBatch):
                staged = Staged(context.objects, arrow_schema(schema))
                self._staged = staged.add_all(open_source(self._data, schema).batches)
        if self._staged is not None:
            kept = pa.RecordBatchReader.from_batches(self._staged.schema, self._staged.batches())
            return open_source(kept, schema)
        return open_source(self._data, schema)


@dataclass(frozen=True, slots=True)
class Load:
    """A load of rows: an ingest, or an upsert. `deletes` is that of `Table.upsert`."""

    given: Given
    upserts: bool = False
    deletes: str | None = None
    progress: Progress = no_progress

    @property
    def reads_its_keys(self) -> bool:
        return False

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        if self.upserts:
            check_upsert(context.table.name, context.properties)
        if is_keyed(context.properties):
            given_schema(context.schema, context.properties, self.deletes)
        rows = keyed_rows(context, attempt, self.deletes)
        if rows is None:
            source = self.given.source(context, context.schema)
        else:
            found = self.given.source(context, rows.given)
            source = replace(found, batches=rows.stored(found.batches))
        files = written(context, attempt, source, self.progress)
        return Computed(files, counts={"inserted": sum(file.row_count or 0 for file in files)})


@dataclass(frozen=True, slots=True)
class Replace:
    """A deletion of the rows that meet a condition and a load of others; without data, only the deletion.

    In a keyed table, a condition on values is one on the newest rows as they are when the change is computed.
    """

    where: DeleteWhere
    given: Given | None = None
    progress: Progress = no_progress

    @property
    def reads_its_keys(self) -> bool:
        return False

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        question, deletion = asked_to_delete(context, self.where)
        marked = is_keyed(context.properties) and deletion.by_values
        deletions = [] if marked or question.is_empty else [deletion]
        rows = keyed_rows(context, attempt, DELETES if marked else None)
        if self.given is None and not marked:
            return Computed(deletions=deletions)
        counted = _Counted(self._source(context, rows))
        if rows is None:
            source = counted.source
        else:
            batches = counted.source.batches
            if marked:
                found = marks(context, None if self.where is ALL else self.where)
                batches = chain(found, map(_unmarked, batches))
            source = replace(counted.source, batches=rows.stored(batches), rows_total=None)
        files = written(context, attempt, source, self.progress)
        return Computed(files, deletions, counts={"inserted": counted.rows})

    def dry_run(self, context: TableContext) -> Mapping[str, int]:
        """Returns the numbers of rows that would be "deleted" and "inserted"; changes nothing."""
        asked_to_delete(context, self.where)
        where = None if self.where is ALL else self.where
        found = query(context, where, [context.schema.row_keys[0].name])
        given = _Counted(Source(iter(()), None) if self.given is None else self._source(context, None))
        for _ in given.source.batches:
            pass
        return {"deleted": sum(batch.num_rows for batch in found), "inserted": given.rows}

    def _source(self, context: TableContext, rows: KeyedRows | None) -> Source:
        if self.given is None:
            return Source(iter(()), None)
        schema = context.schema if rows is None else replace(rows, deletes=None).given
        return self.given.source(context, schema)


class _Counted:
    """A source that counts the rows which are read of it."""

    def __init__(self, source: Source) -> None:
        self.rows = 0
        self.source = replace(source, batches=self._batches(source))

    def _batches(self, source: Source) -> Iterator[pa.RecordBatch]:
        for batch in source.batches:
            self.rows += batch.num_rows
            yield batch


def loaded(context: TableContext, change: Change, ingest_id: str | None, kind: str) -> IngestReport:
    """Applies a change that loads rows, once for each id. `kind` tells ids of operations apart."""
    started = time.monotonic()
    with Edit(context.supplier, ingest_id, kind) as edit:
        applied = edit.is_new or not edit.is_applied(context)
        if applied:
            edit.add(context, change)
            applied = edit.commit()
        files = edit.files if applied else ()
        return IngestReport.of(edit.edit_id, files, applied=applied, started=started)


def _unmarked(batch: pa.RecordBatch) -> pa.RecordBatch:
    return batch.append_column(DELETES, pa.repeat(pa.scalar(False), batch.num_rows))
