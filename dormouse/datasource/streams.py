"""Writers and streams of `format("dormouse")`.

`readStream` continues from a position in the table's history. `writeStream` commits each batch once.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import conform
from dormouse.data.leaf_sorter import MEMORY_BYTES, LeafLookup
from dormouse.datasource.changes import ChangesTask, changed_columns, check_given, tasks_of
from dormouse.datasource.options import ReadOptions, StreamOptions, TableOptions, WriteOptions
from dormouse.errors import AttemptAbandoned, InvalidInput, InvalidSchema, JobFailed, TableNotFound
from dormouse.model.cut import Position
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, check_not_edited
from dormouse.model.text import check_text
from dormouse.objects.store import ObjectStore, note_if_shared
from dormouse.reading.checked_files import seen_by
from dormouse.reading.schemas import add_missing
from dormouse.spark.ingest import check_fits, columns_of
from dormouse.spark.worker import check_arrived, check_seen, partition_number
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.write_streams import StreamBatch, commit_batch
from dormouse.state.history.changes import portion_since, size_since, span
from dormouse.state.history.ends import check_since
from dormouse.state.history.moments import now
from dormouse.state.history.retention import Life, has_events_since, is_of_life, lives
from dormouse.writing.ingest import (
    INGEST_ID_BYTES_MAX,
    KeyedRows,
    check_ingested,
    commit_files,
    commit_id,
    keyed_rows,
    with_place,
)
from dormouse.writing.parquet_file import LeafFiles

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.state.context import TableContext

# `df.write.format("dormouse")`: each task writes a file, and the driver commits all of them once.

T = TypeVar("T")


@dataclass(frozen=True)
class Written(WriterCommitMessage):
    """The result of a task: the number of rows that it read, and the files that it wrote."""

    rows: int
    files: tuple[FileWithReferences, ...]


@dataclass(frozen=True)
class Load:
    """An announced load, with all facts about the table that tasks need, so that they use no database."""

    attempt: WriteAttempt
    objects: ObjectStore
    schema: Schema
    properties: TableProperties
    lookup: LeafLookup
    keyed: KeyedRows | None
    """The converter of rows for a keyed table, where a load is an upsert; None for other tables."""

    @staticmethod
    def begun(context: TableContext, given: StructType) -> Load:
        """Announces a load on the driver. Raises `InvalidData` if the columns do not fit the table."""
        attempts, attempt = context.attempts, context.attempts.begin(context.table, loads=True)
        try:
            context, attempt = context.writing_for(attempt)
            check_takes(context, given)
            # Spark's writers cannot repartition rows: with a file for each leaf, each task would write one
            properties = context.properties.model_copy(
                update={"ingest_file_writing": "one_reference_per_leaf"}
            )
            lookup, keyed = LeafLookup(context.partitions.tree()), keyed_rows(context, attempt)
            return Load(attempt, context.objects, context.stored_schema, properties, lookup, keyed)
        except BaseException:
            attempts.discard(attempt)
            raise

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Writes a task's rows as one sorted file, with a reference from each leaf that has rows in it."""
        check_seen(self.objects)
        # a random name, because Spark may run a task twice
        name = self.attempt.object_name(f"leaves-{uuid.uuid4().hex}")
        files = LeafFiles(self.objects, self.schema, self.properties, self.lookup.leaf_ids, lambda _: name)
        rows = 0
        with files.sorter(MEMORY_BYTES) as sorter:
            given = self.schema if self.keyed is None else self.keyed.given
            conformed: Iterator[pa.RecordBatch] = (conform(batch, given) for batch in batches)
            if self.keyed is not None:
                conformed = self.keyed.of_task(partition_number()).stored(conformed)
            for batch in conformed:
                sorter.add(batch, self.lookup.indexes(batch))
                rows += batch.num_rows
            return Written(rows, tuple(files.write(sorter)))


def evolved(context: TableContext, given: StructType, evolve: Evolve | None) -> TableContext:
    """Adds the columns that the table lacks, if `evolve` is set; returns the context with the new schema."""
    return context if evolve is None else add_missing(context, columns_of(given))


def check_takes(context: TableContext, given: StructType) -> None:
    """Raises `InvalidData` for columns that do not fit the table, and another error for a row table."""
    check_not_edited(context.table.name, context.properties, "use row_table(…).change or 'dormouse rows'")
    check_fits(given, context.schema)


def checked_messages(kind: type[T], messages: Sequence[object]) -> list[T]:
    """Returns the messages of all tasks. Raises `JobFailed` if a task sent no message of this kind."""
    received = [message for message in messages if isinstance(message, kind)]
    if len(received) < len(messages):
        missing = len(messages) - len(received)
        raise JobFailed(f"{missing} of {len(messages)} tasks did not report their files")
    return received


def files_of(
    written: Sequence[Written], objects: ObjectStore, properties: TableProperties
) -> list[FileWithReferences]:
    """Returns the files of all tasks, after checking that they are complete.

    Raises `JobFailed` if the files do not have as many rows as the tasks read. Raises `ObjectStoreError` if
    tasks wrote into a folder of another machine.
    """
    files = [file for task in written for file in task.files]
    check_ingested(sum(task.rows for task in written), None, files, properties)
    check_arrived(objects, files)
    return files


@dataclass(frozen=True)
class TableWriter(DataSourceArrowWriter):
    """A batch write. Its load is None if an earlier write with the same ingest id was committed."""

    of: TableOptions
    ingest_id: str
    load: Load | None

    @staticmethod
    def begun(options: WriteOptions, schema: StructType) -> TableWriter:
        """Announces a write on the driver, after checking its options and columns."""
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
        """Adds the files of all tasks in one commit."""
        if self.load is None:
            return
        attempt, objects = self.load.attempt, self.load.objects
        files = files_of(checked_messages(Written, messages), objects, self.load.properties)
        with self.of.open(writes=True) as table:
            context = table.context
            # a task that Spark repeated or ran twice may still be writing
            applied = commit_files(context, attempt, files, self.ingest_id, leftovers=True)
            if applied:
                context.attempts.delete_leftovers(attempt, context.store.own)
                note_if_shared(context.objects)

    def abort(self, messages: Sequence[WriterCommitMessage | None]) -> None:
        """Deletes the written files at once. Files that tasks still write are deleted later.

        If the table was dropped meanwhile, its files are deleted with it.
        """
        if self.load is not None:
            with suppress(TableNotFound), self.of.open(writes=True) as table:
                table.context.attempts.discard(self.load.attempt, leftovers=True)


QUERY_ID = "sql.streaming.queryId"
RESTS_AT_MOST = 0.25
"""The longest pause of an idle stream, as a share of the time that the table keeps a position readable."""

REST_SECONDS_MIN = 1.0


class ChangesStream(DataSourceStreamReader):
    """A stream of the changes since a moment. Spark's checkpoint keeps the position between batches."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._open = ExitStack()
        self._opened: TableContext | None = None
        self._reached: Position | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        self._reached = self._start()
        return self._offset(self._reached)

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        """Returns the position at which the next batch ends: now, or earlier if `max_rows_per_batch` is set.

        While nothing has changed, returns the position that the last batch reached, so that Spark makes no
        batch. Spark calls this method first when a query is new.
        """
        context, reached = self._context, self._reached or self._start()
        rows_max = self._options.max_rows_per_batch
        if size_since(context, reached).row_count or has_events_since(context, reached):
            present = now(context, reached) if rows_max is None else portion_since(context, reached, rows_max)
            return self._offset(present)
        present = now(context, reached)
        # an empty batch from time to time keeps the position of an idle stream from expiring
        rest_seconds_max = max(context.properties.files_kept_seconds * RESTS_AT_MOST, REST_SECONDS_MIN)
        rested = (present.at - reached.at).total_seconds() > rest_seconds_max
        return self._offset(present if rested else reached)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Returns the tasks of a batch. When a query restarts, Spark passes the saved position here."""
        known = lives(self._context)
        first, last = self._position(start, known), self._position(end, known)
        self._reached = last
        if first == last:
            return []
        check_since(self._context, first.at, "the position of the checkpoint")
        # raises if columns of the query no longer exist
        return tasks_of(self._context_at(last), first, last, self._options, as_known=True)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangesTask)  # noqa: S101 as `partitions` made it
        return partition.rows()

    def commit(self, end: dict[str, Any]) -> None:
        """Does nothing, because Spark's checkpoint has the position."""

    def stop(self) -> None:
        self._open.close()

    def _start(self) -> Position:
        after, _ = self._options.changes or (None, None)
        return span(self._context, after, None)[0]

    @property
    def _context(self) -> TableContext:
        if self._opened is None:
            context, options = self._open.enter_context(self._options.of.open()).context, self._options
            # Spark matches columns of tasks by their place, not by name
            check_given(self._schema, changed_columns(context, options.columns), options.of.table)
            self._opened = context
        return self._opened

    def _context_at(self, till: Position) -> TableContext:
        """Returns the context at a position, with the columns that the query had when it began."""
        context = self._context
        try:
            return seen_by(context, context.as_of(till).table.schema)
        except InvalidSchema as error:
            raise InvalidInput(
                f"{error} from table {context.table.name!r} while the query ran: start the query again"
            ) from None

    def _offset(self, position: Position) -> dict[str, Any]:
        return {
            "table": self._context.table.uuid,
            "epoch": position.epoch,
            "snapshot": position.snapshot,
            "at": position.at.isoformat(),
            "made_at": position.made_at,
            "life": lives(self._context)[-1].life_id,
        }

    def _position(self, offset: Mapping[str, Any], known: Sequence[Life]) -> Position:
        table = self._context.table
        if offset["table"] != table.uuid:
            raise InvalidInput(
                f"the checkpoint belongs to another table than {table.name!r}, perhaps an earlier one of "
                "that name: give the query a checkpoint of its own"
            )
        at = datetime.fromisoformat(offset["at"])
        position = Position(offset["epoch"], offset["snapshot"], at, offset["made_at"])
        if "life" in offset and not is_of_life(known, offset["life"], position):
            raise InvalidInput(
                f"the checkpoint is newer than the database of table {table.name!r}, which was restored to "
                f"an "
                "earlier time: give the query a checkpoint of its own, and a moment as changes_after"
            )
        return position


@dataclass(frozen=True)
class _BatchPart(WriterCommitMessage):
    """The files of a task, with the task's write attempt and the id of Spark's query."""

    written: Written
    attempt: WriteAttempt
    query_id: str


class StreamWriter(DataSourceStreamWriter, DataSourceArrowWriter):
    """The writer of a stream. Spark makes one for all batches.

    So each task announces a write attempt of its own. The driver commits each batch once.
    """

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        with options.of.open(writes=True) as table:
            check_takes(evolved(table.context, schema, options.evolve), schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        query_id = None if task is None else task.getLocalProperty(QUERY_ID)
        if query_id is None:
            raise JobFailed("Spark did not report the query of a batch")
        with self._options.of.open(writes=True) as table:
            context = table.context
            load = Load.begun(context, self._schema)
            try:
                return _BatchPart(load.write(iterator), load.attempt, query_id)
            except BaseException:
                context.attempts.discard(load.attempt)
                raise

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # type: ignore[override]  # noqa: N803
        parts = checked_messages(_BatchPart, messages)
        if not parts:
            return
        with self._options.of.open(writes=True) as table:
            context, attempts = table.context, [part.attempt for part in parts]
            placed = [replace(p.written, files=with_place(p.attempt, p.written.files)) for p in parts]
            files = files_of(placed, context.objects, context.properties)
            batch_of = StreamBatch(self._options.stream, parts[0].query_id, batchId)
            try:
                is_new = commit_batch(
                    context.supplier, context.store, batch_of, files, [each.attempt_id for each in attempts]
                )
            except InvalidInput:
                _discard(context, attempts)
                raise
            except AttemptAbandoned:
                for attempt in attempts:
                    context.attempts.withdraw(attempt)
                raise
            if is_new:
                note_if_shared(context.objects)
            else:
                _discard(context, attempts)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # type: ignore[override]  # noqa: N803
        """Deletes the files of the tasks that succeeded. Failed tasks have deleted theirs."""
        parts = [part for part in messages if isinstance(part, _BatchPart)]
        with suppress(TableNotFound), self._options.of.open(writes=True) as table:
            _discard(table.context, [part.attempt for part in parts])


def _discard(context: TableContext, attempts: Sequence[WriteAttempt]) -> None:
    for attempt in attempts:
        context.attempts.discard(attempt)
