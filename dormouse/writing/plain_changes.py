"""Changes for `writing.edits` that need no query engine: loads, deletions, and both together."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.cut import Position
from dormouse.model.edits import Sql
from dormouse.model.loops import Progress, no_progress
from dormouse.model.schema import Schema
from dormouse.model.table import check_upsert, given_schema, is_keyed
from dormouse.reading.checked_files import on_current
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.staged import Staged
from dormouse.reading.sql.table_rows import TableRows
from dormouse.reading.where import DeleteWhere
from dormouse.sources.given_rows import are_paths, as_arrow
from dormouse.sources.source import Source, open_source
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.deleting import DELETE, asked_to_delete, names_values
from dormouse.writing.edited_rows import KEYS, Comparison, ranges_of
from dormouse.writing.edits import Change, Computed, Concern, Edit
from dormouse.writing.ingest import IngestReport, keyed_rows, written
from dormouse.writing.updating import Update


def is_read(context: TableContext, where: DeleteWhere | Sql, verb: str = DELETE) -> bool:
    """Returns whether a deletion reads rows, since no recorded condition of a mapping can describe them."""
    if isinstance(where, Sql):
        return True
    return is_keyed(context.properties) and on_current(context, lambda now: names_values(now, where, verb))


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

    sessions: Sessions
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
        rows, concern = keyed_rows(context, attempt, self.deletes), None
        if rows is None:
            files = written(context, attempt, self.given.source(context, context.schema), self.progress)
        else:
            names = context.schema.row_key_names
            keys = Staged(context.objects, pa.schema(map(arrow_schema(context.schema).field, names)))
            found = self.given.source(context, rows.given)
            source = replace(found, batches=rows.stored(_staging(keys, found.batches)))
            files = written(context, attempt, source, self.progress)
            looking = TableRows(self.sessions, context.placed)
            ranges = ranges_of(looking, keys, dict(zip(names, names, strict=True)))
            comparison = Comparison(looking, (Comparison.by_keys(context),), {KEYS: keys})
            concern = Concern(ranges, comparison.finds, of_order=True) if keys.row_count else None
        return Computed(files, (), concern, {"inserted": sum(file.row_count or 0 for file in files)})


def _staging(keys: Staged, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields batches, and stages some of their columns."""
    for batch in batches:
        keys.add(pa.RecordBatch.from_arrays(batch.select(keys.schema.names).columns, schema=keys.schema))
        yield batch


@dataclass(frozen=True, slots=True)
class Replace:
    """A deletion of the rows that meet a condition and a load of others; without data, only the deletion.

    A condition on values of a keyed table is one on the newest rows as they are when the change is computed.
    """

    sessions: Sessions
    where: DeleteWhere | Sql
    given: Given | None = None
    progress: Progress = no_progress

    @property
    def reads_its_keys(self) -> bool:
        return self.given is None

    @property
    def _verb(self) -> str:
        return DELETE if self.given is None else "replace rows of"

    @property
    def _removal(self) -> Update:
        return Update(self.sessions, self.where, None, verb=self._verb)

    def compute(self, context: TableContext, attempt: WriteAttempt, at: Position) -> Computed:
        gone = Computed()
        if is_read(context, self.where, self._verb):
            gone = self._removal.compute(context, attempt, at)
        elif not isinstance(self.where, Sql):
            question, deletion = asked_to_delete(context, self.where, self._verb)
            gone = Computed(deletions=() if question.is_empty else [deletion])
        if self.given is None:
            return gone
        # with a later place than the marks of deletion, and other names than their files
        named = replace(attempt, number=1)
        load = Load(self.sessions, self.given, progress=self.progress).compute(context, named, at)
        concerns = [one.concern for one in (gone, load) if one.concern is not None]
        concern = reduce(or_, concerns) if concerns else None
        return Computed([*gone.files, *load.files], gone.deletions, concern, {**gone.counts, **load.counts})

    def dry_run(self, context: TableContext) -> Mapping[str, int]:
        """Returns the numbers of rows that would be "deleted" and "inserted"; changes nothing."""
        counts = dict(self._removal.dry_run(context))
        if self.given is not None:
            rows = self.given.source(context, context.schema).batches
            counts["inserted"] = sum(batch.num_rows for batch in rows)
        return counts


def loaded(context: TableContext, change: Change, ingest_id: str | None, kind: str) -> IngestReport:
    """Applies a change that loads rows, once for each id. `kind` tells ids of operations apart."""
    started = time.monotonic()
    with Edit(context.supplier, ingest_id, kind) as edit:
        applied = edit.run(context, change)
        files = edit.files if applied else ()
        return IngestReport.of(edit.edit_id, files, applied=applied, started=started)
