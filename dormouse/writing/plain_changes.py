"""Changes for `writing.edits` that need no query engine: loads, deletions, and both together."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import chain

import pyarrow as pa

from dormouse.model.cut import Position
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import check_upsert, given_schema, is_keyed
from dormouse.reading.where import ALL, DeleteWhere
from dormouse.sources.source import GivenData, Source, open_source
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.deleting import DELETES, asked_to_delete, marks
from dormouse.writing.edits import Change, Computed, Edit
from dormouse.writing.ingest import IngestReport, KeyedRows, keyed_rows, written


@dataclass(frozen=True, slots=True)
class Load:
    """A load of rows: an ingest, or an upsert. `deletes` is that of `Table.upsert`."""

    given: GivenData
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
        data = self.given.data
        source = open_source(data, context.schema) if rows is None else rows.opened(data)
        files = written(context, attempt, source, self.progress)
        return Computed(files, counts={"inserted": sum(file.row_count or 0 for file in files)})


@dataclass(frozen=True, slots=True)
class Replace:
    """A deletion of the rows that meet a condition and a load of others; without data, only the deletion.

    In a keyed table, a condition on values is one on the newest rows as they are when the change is computed.
    """

    where: DeleteWhere
    given: GivenData | None = None
    progress: Progress = no_progress

    @property
    def reads_its_keys(self) -> bool:
        return False

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        question, deletion = asked_to_delete(context, self.where)
        marked = is_keyed(context.properties) and deletion.by_values
        deletions = [] if marked or question.is_empty else [deletion]
        rows = keyed_rows(context, attempt, DELETES if marked else None)
        data = None if self.given is None else self.given.data
        if rows is None or not marked:
            if data is None:
                return Computed(deletions=deletions)
            source = open_source(data, context.schema) if rows is None else rows.opened(data)
        else:
            source = self._marked(context, rows)
        files = written(context, attempt, source, self.progress)
        return Computed(files, deletions, counts={"inserted": sum(file.row_count or 0 for file in files)})

    def _marked(self, context: TableContext, rows: KeyedRows) -> Source:
        """Returns marks of deletion for the rows that meet the condition, followed by the data."""
        plain = replace(rows, deletes=None)
        given = Source(iter(()), None) if self.given is None else open_source(self.given.data, plain.given)
        found = marks(context, None if self.where is ALL else self.where)
        return Source(rows.stored(chain(found, map(_unmarked, given.batches))), None)


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
