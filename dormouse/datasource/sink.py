"""`df.write.format("dormouse")`: each task writes a file, the driver commits all of them once."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import conform
from dormouse.data.leaf_lookup import LeafLookup
from dormouse.data.leaf_sorter import MEMORY_BYTES
from dormouse.datasource.options import TableOptions, WriteOptions
from dormouse.errors import JobFailed, TableNotFound
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.properties import TableProperties, check_not_edited
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Schema
from dormouse.model.text import check_text
from dormouse.objects import ObjectStore
from dormouse.objects.activity import note_if_shared
from dormouse.reading.reshaping import add_missing
from dormouse.spark.ingest import check_fits, columns_of
from dormouse.spark.worker import check_arrived, check_seen, partition_number
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.ingest import keyed_rows
from dormouse.writing.ingest_commit import (
    INGEST_ID_BYTES_MAX,
    check_ingested,
    commit_files,
    commit_id,
)
from dormouse.writing.keyed_rows import KeyedRows
from dormouse.writing.leaf_files import LeafFiles

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.state.context import TableContext

T = TypeVar("T")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """What a task read and wrote."""

    rows: int
    files: tuple[FileWithReferences, ...]


@dataclass(frozen=True)
class Load:
    """A load that is announced, and what its tasks need of the table; they ask no database."""

    attempt: WriteAttempt
    objects: ObjectStore
    schema: Schema
    properties: TableProperties
    lookup: LeafLookup
    keyed: KeyedRows | None
    """Of a keyed table, to which it is an upsert."""

    @staticmethod
    def begun(context: TableContext, given: StructType) -> Load:
        """Raises InvalidInput when the columns that are given are not those that the table has by then."""
        attempts, attempt = context.attempts, context.attempts.begin(context.table, loads=True)
        try:
            context, attempt = context.writing_for(attempt)
            check_takes(context, given)
            # Spark's writers cannot ask that rows be moved: a file a leaf would be tasks times leaves
            properties = context.properties.model_copy(
                update={"ingest_file_writing": "one_reference_per_leaf"}
            )
            lookup, keyed = LeafLookup(context.partitions.tree()), keyed_rows(context, attempt)
            return Load(attempt, context.objects, context.stored_schema, properties, lookup, keyed)
        except BaseException:
            attempts.discard(attempt)
            raise

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """A task's rows as one sorted file, with a reference in each leaf that it has rows of."""
        check_seen(self.objects)
        # a task that Spark runs again writes a file of its own
        name = self.attempt.object_name(f"leaves-{uuid.uuid4().hex}")
        files = LeafFiles(self.objects, self.schema, self.properties, self.lookup.leaf_ids, lambda _: name)
        rows = 0
        with files.sorter(MEMORY_BYTES) as sorter:
            given = self.schema if self.keyed is None else self.keyed.given
            found: Iterator[pa.RecordBatch] = (conform(batch, given) for batch in batches)
            if self.keyed is not None:
                found = self.keyed.of_task(partition_number()).stored(found)
            for batch in found:
                sorter.add(batch, self.lookup.indexes(batch))
                rows += batch.num_rows
            return Written(rows, tuple(files.write(sorter)))


def evolved(context: TableContext, given: StructType, evolve: Evolve | None) -> TableContext:
    """Adds the columns that the table lacks, if that is wanted."""
    return context if evolve is None else add_missing(context, columns_of(given))


def check_takes(context: TableContext, given: StructType) -> None:
    """`InvalidData` for columns that are not the table's; `NotARowTable` where rows are edited."""
    check_not_edited(context.table.name, context.properties, "use row_table(…).change or 'dormouse rows'")
    check_fits(given, context.schema)


def told(kind: type[T], messages: Sequence[object]) -> list[T]:
    """What tasks told, each; `JobFailed` when one did not."""
    found = [one for one in messages if isinstance(one, kind)]
    if len(found) < len(messages):
        raise JobFailed(f"{len(messages) - len(found)} of {len(messages)} tasks told nothing of their files")
    return found


def files_of(
    written: Sequence[Written], objects: ObjectStore, properties: TableProperties
) -> list[FileWithReferences]:
    """All that tasks wrote; `JobFailed` when these are not the rows that they read; see `check_arrived`."""
    files = [file for one in written for file in one.files]
    check_ingested(sum(one.rows for one in written), None, files, properties)
    check_arrived(objects, files)
    return files


@dataclass(frozen=True)
class TableWriter(DataSourceArrowWriter):
    """One write, and its load; None when it was applied before."""

    of: TableOptions
    ingest_id: str
    load: Load | None

    @staticmethod
    def begun(options: WriteOptions, schema: StructType) -> TableWriter:
        """Announced, on the driver."""
        ingest_id = uuid.uuid4().hex if options.ingest_id is None else options.ingest_id
        check_text("ingest_id", ingest_id, INGEST_ID_BYTES_MAX)
        with options.of.open(writes=True) as table:
            context = evolved(table.context, schema, options.evolve)
            check_takes(context, schema)
            is_applied = context.store.is_applied(commit_id(ingest_id))
            return TableWriter(options.of, ingest_id, None if is_applied else Load.begun(context, schema))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        if self.load is not None:
            return self.load.write(iterator)
        for _ in iterator:
            pass
        return Written(0, ())

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Adds what the tasks wrote, in one commit."""
        if self.load is None:
            return
        attempt, objects = self.load.attempt, self.load.objects
        files = files_of(told(Written, messages), objects, self.load.properties)
        with self.of.open(writes=True) as table:
            context = table.context
            # a task that Spark repeated, or ran twice, may still write
            applied = commit_files(context, attempt, files, self.ingest_id, leftovers=True)
            if applied:
                context.attempts.delete_leftovers(attempt, context.store.own)
                note_if_shared(context.objects)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Removes what was written, at once; what tasks still write goes as what they leave after a commit.

        What was written to a table that was dropped meanwhile goes with that.
        """
        if self.load is not None:
            with suppress(TableNotFound), self.of.open(writes=True) as table:
                table.context.attempts.discard(self.load.attempt, leftovers=True)
