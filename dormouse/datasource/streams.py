"""Streams: `readStream` goes on from a position of the history, `writeStream` commits each batch once."""

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

# `df.write.format("dormouse")`: each task writes a file, the driver commits all of them once.

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


QUERY_ID = "sql.streaming.queryId"
RESTS_AT_MOST = 0.25
"""For how much of the time that a position is kept a stream stands still."""

REST_SECONDS_MIN = 1.0


class ChangesStream(DataSourceStreamReader):
    """The changes since a moment, batch after batch; Spark's checkpoint has the position between them."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        self._open = ExitStack()
        self._found: TableContext | None = None
        self._reached: Position | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        self._reached = self._start()
        return self._offset(self._reached)

    def latestOffset(self) -> dict[str, Any]:  # noqa: N802
        """The present, or as far as a batch may go from the position that was reached.

        That itself while nothing has changed: Spark makes no batch then. It asks a new query for this first.
        """
        context, reached = self._context, self._reached or self._start()
        rows_max = self._options.max_rows_per_batch
        if size_since(context, reached).row_count or has_events_since(context, reached):
            present = now(context, reached) if rows_max is None else portion_since(context, reached, rows_max)
            return self._offset(present)
        present = now(context, reached)
        # one that rests would expire, and has an empty batch before it does
        rest_seconds_max = max(context.properties.files_kept_seconds * RESTS_AT_MOST, REST_SECONDS_MIN)
        rested = (present.at - reached.at).total_seconds() > rest_seconds_max
        return self._offset(present if rested else reached)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Spark also tells so where a query that goes on stands."""
        known = lives(self._context)
        first, last = self._position(start, known), self._position(end, known)
        self._reached = last
        if first == last:
            return []
        check_since(self._context, first.at, "the position of the checkpoint")
        # what is not there any more is told here
        return tasks_of(self._context_at(last), first, last, self._options, as_known=True)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangesTask)  # noqa: S101 as `partitions` made it
        return partition.rows()

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing is to be done: the position is the checkpoint's."""

    def stop(self) -> None:
        self._open.close()

    def _start(self) -> Position:
        after, _ = self._options.changes or (None, None)
        return span(self._context, after, None)[0]

    @property
    def _context(self) -> TableContext:
        if self._found is None:
            found, options = self._open.enter_context(self._options.of.open()).context, self._options
            # Spark takes what tasks give by its place
            check_given(self._schema, changed_columns(found, options.columns), options.of.table)
            self._found = found
        return self._found

    def _context_at(self, till: Position) -> TableContext:
        """With the columns that the query began with, of files that were written since, too."""
        context = self._context
        try:
            return seen_by(context, context.as_of(till).table.schema)
        except InvalidSchema as error:
            raise InvalidInput(
                f"{error} from table {context.table.name!r} while the query ran: start the query anew"
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
                f"the checkpoint is of another table than {table.name!r}, perhaps one of before that had the "
                "name: give the query a checkpoint of its own"
            )
        at = datetime.fromisoformat(offset["at"])
        position = Position(offset["epoch"], offset["snapshot"], at, offset["made_at"])
        if "life" in offset and not is_of_life(known, offset["life"], position):
            raise InvalidInput(
                f"the checkpoint has read what the database of table {table.name!r} does not have any more: "
                "it was restored to before; give the query a checkpoint of its own and changes_after a moment"
            )
        return position


@dataclass(frozen=True)
class _BatchPart(WriterCommitMessage):
    """What a task wrote, for which attempt of its own, and for which query of Spark."""

    written: Written
    attempt: WriteAttempt
    query_id: str


class StreamWriter(DataSourceStreamWriter, DataSourceArrowWriter):
    """Each task announces itself, as Spark makes one writer for all batches; the driver commits each once."""

    def __init__(self, options: StreamOptions, schema: StructType) -> None:
        self._options, self._schema = options, schema
        with options.of.open(writes=True) as table:
            check_takes(evolved(table.context, schema, options.evolve), schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = TaskContext.get()
        query_id = None if task is None else task.getLocalProperty(QUERY_ID)
        if query_id is None:
            raise JobFailed("Spark does not tell which query a batch is of")
        with self._options.of.open(writes=True) as table:
            context = table.context
            load = Load.begun(context, self._schema)
            try:
                return _BatchPart(load.write(iterator), load.attempt, query_id)
            except BaseException:
                context.attempts.discard(load.attempt)
                raise

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # type: ignore[override]  # noqa: N803
        parts = told(_BatchPart, messages)
        if not parts:
            return
        with self._options.of.open(writes=True) as table:
            context, attempts = table.context, [part.attempt for part in parts]
            placed = [replace(p.written, files=with_place(p.attempt, p.written.files)) for p in parts]
            files = files_of(placed, context.objects, context.properties)
            batch_of = StreamBatch(self._options.stream, parts[0].query_id, batchId)
            try:
                is_new = commit_batch(
                    context.supplier, context.store, batch_of, files, [one.attempt_id for one in attempts]
                )
            except InvalidInput:
                _discard(context, attempts)
                raise
            except AttemptAbandoned:
                for one in attempts:
                    context.attempts.withdraw(one)
                raise
            if is_new:
                note_if_shared(context.objects)
            else:
                _discard(context, attempts)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # type: ignore[override]  # noqa: N803
        """Removes what tasks wrote; those that failed have removed theirs."""
        parts = [part for part in messages if isinstance(part, _BatchPart)]
        with suppress(TableNotFound), self._options.of.open(writes=True) as table:
            _discard(table.context, [part.attempt for part in parts])


def _discard(context: TableContext, attempts: Sequence[WriteAttempt]) -> None:
    for attempt in attempts:
        context.attempts.discard(attempt)
