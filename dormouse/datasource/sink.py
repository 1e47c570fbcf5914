"""`df.write.format("dormouse")`: each task writes a file, the driver commits all of them once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import check_columns, conform
from dormouse.data.leaf_files import LeafFiles
from dormouse.data.leaf_lookup import LeafLookup
from dormouse.data.leaf_sorter import MEMORY_BYTES
from dormouse.datasource.options import TableOptions, WriteOptions
from dormouse.errors import InvalidData, JobFailed
from dormouse.files.attempts import WriteAttempt
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema
from dormouse.objects import ObjectStore
from dormouse.objects.activity import note_if_shared
from dormouse.rounds.ingest_commit import commit_files, commit_id
from dormouse.rounds.row_counts import check_ingested

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.context import TableContext


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task read and wrote."""

    rows: int
    files: tuple[FileWithReferences, ...]


@dataclass(frozen=True)
class _Table:
    """What tasks need of the table; they ask no database."""

    objects: ObjectStore
    schema: Schema
    properties: TableProperties
    lookup: LeafLookup

    @staticmethod
    def of(context: TableContext) -> _Table:
        # Spark's writers cannot ask that rows be moved: a file a leaf would be tasks times leaves
        properties = context.properties.model_copy(update={"ingest_file_writing": "one_reference_per_leaf"})
        return _Table(context.objects, context.schema, properties, LeafLookup(context.partitions.tree()))


@dataclass(frozen=True)
class TableWriter(DataSourceArrowWriter):
    """One write: what its tasks need, and their attempt; None when it was applied before."""

    of: TableOptions
    ingest_id: str
    table: _Table
    attempt: WriteAttempt | None

    @staticmethod
    def begun(options: WriteOptions, schema: StructType) -> TableWriter:
        """Announced, on the driver. `InvalidData` when the DataFrame has not the table's columns."""
        ingest_id = options.ingest_id or uuid.uuid4().hex
        with options.of.open(writes=True) as table:
            context = table.context
            try:
                found = to_arrow_schema(schema)
            except Exception as error:
                raise InvalidData(f"the DataFrame has a column that Arrow cannot hold: {error}") from None
            check_columns(found, context.schema)
            is_applied = context.store.is_applied(commit_id(ingest_id))
            attempt = None if is_applied else context.attempts.begin(context.table)
            return TableWriter(options.of, ingest_id, _Table.of(context), attempt)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """A task's rows as one sorted file, with a reference in each leaf that it has rows of."""
        rows, table = 0, self.table
        if self.attempt is None:
            for _ in iterator:
                pass
            return Written(0, ())
        # a task that Spark runs again writes a file of its own
        name = self.attempt.object_name(f"leaves-{uuid.uuid4().hex}")
        files = LeafFiles(
            table.objects, table.schema, table.properties, table.lookup.leaf_ids, lambda _: name
        )
        with files.sorter(MEMORY_BYTES) as sorter:
            for batch in iterator:
                conformed = conform(batch, table.schema)
                sorter.add(conformed, table.lookup.indexes(conformed))
                rows += batch.num_rows
            return Written(rows, tuple(files.write(sorter)))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Adds what the tasks wrote, in one commit."""
        if self.attempt is None:
            return
        done = [one for one in messages if isinstance(one, Written)]
        if len(done) < len(messages):
            raise JobFailed(
                f"{len(messages) - len(done)} of {len(messages)} tasks told nothing of their files"
            )
        files = [file for one in done for file in one.files]
        check_ingested(sum(one.rows for one in done), None, files)
        with self.of.open(writes=True, goes_on=True) as table:
            context = table.context
            # a task that Spark repeated, or ran twice, may still write
            if commit_files(context, self.attempt, files, self.ingest_id, leftovers=True):
                context.attempts.delete_leftovers(self.attempt, context.store.own)
                note_if_shared(context.objects)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Removes what was written, at once; what tasks still write goes when the attempt is collected."""
        if self.attempt is not None:
            with self.of.open(writes=True, goes_on=True) as table:
                table.context.attempts.discard(self.attempt)
