"""Ingests, which assign rows to leaves, sort and write them, and commit once; large data runs on Spark."""

from __future__ import annotations

import logging
import os
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema, arrow_type
from dormouse.data.leaf_sorter import MEMORY_BYTES, MEMORY_BYTES_MAX, LeafLookup
from dormouse.data.newest import without_values
from dormouse.errors import (
    CommitFailed,
    CommitIdReused,
    CommitOutcomeUnknown,
    DormouseError,
    InvalidCommitRequest,
    InvalidData,
    JobFailed,
)
from dormouse.model.file_reference import FileWithReferences, is_inlined
from dormouse.model.loops import Progress, backoff_seconds, no_progress, tries
from dormouse.model.schema import Field, Schema
from dormouse.model.table import (
    HIDDEN_COLUMNS,
    SEQUENCE,
    TableProperties,
    check_not_edited,
    given_schema,
    is_keyed,
    stored_schema,
)
from dormouse.model.text import check_text, plural
from dormouse.model.types import TIMESTAMP
from dormouse.postgres.transaction import run_transaction
from dormouse.settings.process import load_settings, machine_bytes
from dormouse.sources.data_files import Files
from dormouse.sources.source import STREAM, GivenData, Source, is_same, open_source
from dormouse.sources.source_files import InOrder, leaf_counts
from dormouse.state.commits.requests import AddFiles
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.writing.engines import check_engine, choose_engine
from dormouse.writing.inlining import (
    ASK_ATTEMPTS_MAX,
    ASK_WAIT_SECONDS_MAX,
    begun,
    commit_inlined,
    inlined_files,
    is_small,
    may_inline,
)
from dormouse.writing.parquet_file import ROW, LeafFiles

if TYPE_CHECKING:
    import numpy.typing as npt
    import psycopg

logger = logging.getLogger(__name__)
INGEST_ID_BYTES_MAX = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IngestReport:
    """The rows, files and bytes that an ingest added.

    All are 0, and `applied` is False, when an earlier ingest with the same id was applied.
    """

    ingest_id: str
    rows: int
    files: int
    references: int
    bytes: int
    applied: bool
    seconds: float

    @staticmethod
    def of(
        ingest_id: str, files: Sequence[FileWithReferences], *, applied: bool, started: float
    ) -> IngestReport:
        """Returns the report of an ingest that added files; `started` is by the monotonic clock."""
        return IngestReport(
            ingest_id=ingest_id,
            rows=sum(file.row_count or 0 for file in files),
            files=len(files),
            references=sum(len(file.references) for file in files),
            bytes=sum(file.byte_count or 0 for file in files),
            applied=applied,
            seconds=time.monotonic() - started,
        )


def ingest(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None,
    engine: str,
    progress: Progress | None,
    on_spark: Callable[..., IngestReport] | None = None,
    deletes: str | None = None,
) -> IngestReport:
    """Adds rows to a table, in this process or on Spark; see `Table.ingest`.

    `on_spark` is the function that ingests on Spark. `deletes` is that of `Table.upsert`.
    """
    check_engine(engine)
    if is_keyed(context.properties):
        given_schema(context.schema, context.properties, deletes)
    if is_dataframe(data):
        engine = "spark"
    add = choose_engine(engine, lambda: _bytes_on_disk(data), ingest_in_process, on_spark)
    if context.reports is None:
        return add(context, data, ingest_id=ingest_id, progress=progress, deletes=deletes)
    with context.reports.ingest(context.table.name) as report:
        done = add(context, data, ingest_id=ingest_id, progress=progress, deletes=deletes)
        added = f"{plural(done.rows, 'row')} in {plural(done.files, 'file')}"
        report.message = added if done.applied else None
    return done


def ingest_in_process(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None = None,
    progress: Progress | None = None,
    memory_bytes: int | None = None,
    deletes: str | None = None,
) -> IngestReport:
    """Adds the rows of `data` to a table, all or none, once for each `ingest_id`.

    `data` is a pyarrow Table, RecordBatch, RecordBatchReader or iterable of batches, or the path or paths of
    Parquet or CSV files (a file, a folder, a pattern). It is streamed: about twice `memory_bytes` of it are
    in memory, and the remaining rows wait, sorted, in the temporary folder. The default of `memory_bytes` is
    the setting `ingest_memory_bytes`, or else a share of this machine's memory. Files whose rows are already
    in order are written as they are read. `progress` is called with the number of rows read, and of all rows
    if known.

    Raises `InvalidData`, `ObjectStoreError`, `JobFailed` and `CommitFailed`; then nothing was added, and the
    written objects are deleted. After `CommitOutcomeUnknown`, run the same id again.
    """
    given = GivenData(data, deletes)
    progress = progress or no_progress
    small = may_inline(context) and is_small(given.data)
    tentative = small and is_keyed(context.properties)

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        rows = keyed_rows(current, attempt, deletes)
        source = open_source(given.data, current.schema) if rows is None else rows.opened(given.data)
        return written(current, attempt, source, progress, memory_bytes, tentative=tentative)

    def inlined(current: TableContext) -> list[FileWithReferences]:
        if tentative or not small:
            return []
        try:
            return inlined_of(current, open_source(given.data, current.schema), progress)[0]
        except InvalidData:
            return []  # the columns may have changed, which `write` notices

    return ingest_once(context, ingest_id, write, digest=given.digest, inlined=inlined, durable=not tentative)


def written(
    context: TableContext,
    attempt: WriteAttempt,
    source: Source,
    progress: Progress,
    memory_bytes: int | None = None,
    *,
    tentative: bool = True,
) -> list[FileWithReferences]:
    """Writes stored rows as inlined files if they are few, else as objects; returns the files.

    Does not commit them. A `tentative` attempt is not durable, and is confirmed before it writes objects.
    """
    files, source = inlined_of(context, source, progress) if may_inline(context) else ([], source)
    if files:
        return files
    if tentative:
        context.attempts.confirm(attempt)
    return write_leaves(context, attempt, source, progress, memory_bytes or _held_bytes())


def _held_bytes() -> int:
    share = min(max(machine_bytes() // 8, MEMORY_BYTES), MEMORY_BYTES_MAX)
    return load_settings().ingest_memory_bytes or share


def inlined_of(
    context: TableContext, source: Source, progress: Progress
) -> tuple[list[FileWithReferences], Source]:
    """Returns the inlined files of a source, none unless its rows are few; and the source with all rows."""
    batches, source = begun(source, context.properties)
    files = None if batches is None else inlined_files(context, batches)
    if batches is None or not files:
        return [], source
    rows = sum(batch.num_rows for batch in batches)
    check_ingested(rows, source.rows_total, files, context.properties)
    progress(rows, source.rows_total)
    return files, source


def keyed_rows(context: TableContext, attempt: WriteAttempt, deletes: str | None = None) -> KeyedRows | None:
    """Returns an object that converts a load's rows for a keyed table, or None for any other table."""
    if attempt.place is None:
        return None
    place = attempt.place
    return KeyedRows(context.schema, context.properties, deletes, place.sequence, place.taken_at)


def write_leaves(
    context: TableContext, attempt: WriteAttempt, source: Source, progress: Progress, memory_bytes: int
) -> list[FileWithReferences]:
    """Writes the rows as files of the attempt, and returns the files. Does not commit them."""
    lookup = LeafLookup(context.partitions.tree())
    writer = LeafFiles(
        context.objects, context.stored_schema, context.properties, lookup.leaf_ids, attempt.object_name
    )
    rows = 0

    def read() -> Iterator[pa.RecordBatch]:
        nonlocal rows
        for batch in source.batches:
            yield batch
            rows += batch.num_rows
            progress(rows, source.rows_total)

    if (counts := _counts_in_order(context, source, lookup)) is not None:
        files = list(writer.write_in_order(InOrder(context.schema).checked(read()), counts))
    else:
        with writer.sorter(memory_bytes) as sorter:
            for batch in read():
                sorter.add(batch, lookup.indexes(batch))
            files = list(writer.write(sorter))
    check_ingested(rows, source.rows_total, files, context.properties)
    return files


def _counts_in_order(
    context: TableContext, source: Source, lookup: LeafLookup
) -> npt.NDArray[np.int64] | None:
    """Returns the row count of each leaf if the rows are in order, and need no sorting; else None."""
    if is_keyed(context.properties) or (keys := source.sorted_keys()) is None:
        return None
    by_leaf = context.properties.ingest_file_writing == "one_file_per_leaf"
    return leaf_counts(keys, context.schema, lookup, by_leaf=by_leaf)


def _bytes_on_disk(data: Any) -> int:
    """Returns the total size of files given by path; 0 for data in memory and for missing paths."""
    if isinstance(data, Files):
        return _bytes_on_disk(data.paths)
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(map(_file_bytes, files))
    return sum(map(_bytes_on_disk, data)) if isinstance(data, list | tuple) else 0


def _file_bytes(path: Path) -> int:
    """Returns the size of a file; 0 when it is not a regular file, or no longer exists."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def is_dataframe(data: Any) -> bool:
    """Returns whether `data` is a Spark DataFrame, without importing pyspark."""
    return any(kind.__module__.startswith("pyspark.sql") for kind in type(data).__mro__)


def check_ingested(
    rows_read: int, rows_total: int | None, files: Sequence[FileWithReferences], properties: TableProperties
) -> None:
    """Raises `InvalidData` if an ingest read another number of rows than its source has.

    Raises `JobFailed` if it wrote another number of rows than it read. For a keyed table, fewer written rows
    are allowed, since only one row for each key is written.
    """
    if rows_total not in (None, rows_read):
        raise InvalidData(
            f"the data has {rows_total:,} rows, but {rows_read:,} were read: it changed meanwhile"
        )
    written = sum(reference.row_count for file in files for reference in file.references)
    fewest = min(1, rows_read) if is_keyed(properties) else rows_read
    if not fewest <= written <= rows_read:
        raise JobFailed(f"the ingest read {rows_read:,} rows and wrote {written:,}; nothing was added")


# The rows of a load as the files of a keyed table store them: with the load's place, and marks of deletion.

TASKS_MAX = 1 << 20
"""The number of places that each load takes from the database's sequence: the most tasks of a load."""


@dataclass(frozen=True)
class KeyedRows:
    """The conversion of a load's rows to the rows that a keyed table stores.

    `deletes` is the boolean column of the data that is true in rows which delete their key. Each stored row
    has `sequence`, the load's place, unless the batches have a column of this name: see `_places`. Marks of
    deletion have the time `taken_at`.
    """

    schema: Schema
    properties: TableProperties
    deletes: str | None
    sequence: int
    taken_at: datetime

    def of_task(self, number: int) -> KeyedRows:
        """Returns the conversion for one task of the load. Rows of higher task numbers count as newer."""
        return replace(self, sequence=self.sequence + min(number, TASKS_MAX - 1))

    @property
    def given(self) -> Schema:
        """The columns that the data has."""
        return given_schema(self.schema, self.properties, self.deletes)

    def opened(self, data: Any) -> Source:
        """Opens data that `open_source` accepts, and converts its batches to the stored columns."""
        found = open_source(data, self.given)
        return replace(found, batches=self.stored(found.batches))

    def stored(self, batches: Iterable[pa.RecordBatch], first_row: int = 0) -> Iterator[pa.RecordBatch]:
        """Converts batches of the given columns to the stored columns, followed by the row numbers."""
        whole = arrow_schema(stored_schema(self.schema, self.properties))
        names = [*(name for name in whole.names if name not in HIDDEN_COLUMNS), *HIDDEN_COLUMNS, ROW]
        for batch in batches:
            yield pa.RecordBatch.from_arrays(self._columns(batch, first_row), names=names)
            first_row += batch.num_rows

    def _columns(self, batch: pa.RecordBatch, first_row: int) -> list[pa.Array]:
        marked = None if self.deletes is None else batch.column(self.deletes)
        there = None if marked is None else pc.invert(marked)
        kind = arrow_type(TIMESTAMP)
        deleted_at = pa.nulls(batch.num_rows, kind)
        if marked is not None and marked.true_count:
            at = pa.repeat(pa.scalar(self.taken_at, kind), batch.num_rows)
            deleted_at = pc.if_else(marked, at, pa.scalar(None, kind))
        return [
            *(batch.column(field.name) for field in self.schema.row_keys),
            *(self._value(batch.column(f.name), f, there, first_row) for f in self.schema.values),
            self._places(batch),
            deleted_at,
            pa.array(np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)),
        ]

    def _places(self, batch: pa.RecordBatch) -> pa.Array:
        """Returns the places of rows; `SEQUENCE` has those of the rows that they replace, null for none.

        A row comes right after the one that it replaces, so that the rows of all loads that began later are
        newer. It takes the place of this load if the places of the older one are used up.
        """
        if SEQUENCE not in batch.schema.names:
            return pa.repeat(pa.scalar(self.sequence, pa.int64()), batch.num_rows)
        replaced = batch.column(SEQUENCE)
        replaced = replaced.fill_null(self.sequence - 1) if replaced.null_count else replaced
        following = replaced.to_numpy() + 1
        return pa.array(np.where((following - self.sequence) % TASKS_MAX == 0, self.sequence, following))

    def _value(self, column: pa.Array, field: Field, there: pa.Array | None, first_row: int) -> pa.Array:
        if field.name == self.properties.newest_by:
            return _comparable(column, field, first_row) if field.type.is_floating else column
        if there is None:
            return column
        if column.null_count and not field.nullable:
            missing = pc.index(pc.and_(pc.is_null(column), there), True).as_py()
            if missing >= 0:
                raise InvalidData(
                    f"column {field.name!r} is null in row {missing + first_row:,} (counted from 0); "
                    "only rows marked for deletion may be null"
                )
        return column if there.false_count == 0 else without_values(column, there)


def _comparable(column: pa.Array, field: Field, first_row: int) -> pa.Array:
    """Returns the column with 0.0 in place of -0.0, which is equal. Raises `InvalidData` for NaN."""
    odd = pc.index(pc.is_nan(column), True).as_py()
    if odd >= 0:
        raise InvalidData(
            f"column {field.name!r} determines which row is newer, but is NaN in row {odd + first_row:,} "
            "(counted from 0)"
        )
    return pc.add(column, pa.scalar(0, column.type))


# The commit of an ingest: it adds all files or none, once for each ingest id.


def ingest_once(
    context: TableContext,
    ingest_id: str | None,
    write: Callable[[TableContext, WriteAttempt], Sequence[FileWithReferences]],
    *,
    digest: Callable[[], bytes | None] = lambda: None,
    leftovers: bool = False,
    inlined: Callable[[TableContext], Sequence[FileWithReferences]] = lambda _: (),
    durable: bool = True,
) -> IngestReport:
    """Commits the files that `write` returns, once for each id; does not call `write` for an applied id.

    - `ingest_id`: None generates a new one.
    - `write`: gets the services for the current schema, with which it writes. Later changes of the schema do
      no harm: readers find the older columns in the files.
    - `digest`: returns 16 bytes for the data, as `GivenData.digest` does, or None. They are recorded with an
      id that the caller gave.
    - `leftovers`: other processes may still write objects of the attempt, also when it fails. These objects
      are deleted after the commit; see `WriteAttempts.finish`.
    - `inlined`: returns inlined files, which are tried first, or none. It may be called for an applied id.
    - `durable`: False if `write` confirms the attempt before it writes objects.

    Raises `CommitIdReused` for an id that was applied with data of another digest.
    """
    started = time.monotonic()
    source: Callable[[], bytes | None] = cache(digest) if ingest_id is not None else lambda: None
    is_new = ingest_id is None
    if ingest_id is None:
        ingest_id = uuid.uuid4().hex
    check_text("ingest_id", ingest_id, INGEST_ID_BYTES_MAX)
    check_not_edited(context.table.name, context.properties, "use row_table(…).change or 'dormouse rows'")
    files: Sequence[FileWithReferences] = ()
    of_data = None if source() == STREAM else source()
    applied = context.numbering is None and bool(files := inlined(context))
    applied = applied and commit_inlined(context, files, commit_id(ingest_id), of_data)
    # after a try, even a new id may be applied: an answer of the database may have been lost
    is_unknown = bool(files) or not is_new
    if not applied and not (is_unknown and _is_applied(context, ingest_id, source)):
        with context.writing(loads=True, leftovers=leftovers, durable=durable) as (current, attempt):
            files = with_place(attempt, write(current, attempt))
            at_once = attempt.place is not None and context.numbering is None and not leftovers
            at_once = at_once and bool(files) and all(is_inlined(file.filename) for file in files)
            applied = at_once and commit_inlined(current, files, commit_id(ingest_id), of_data, attempt)
            applied = applied or commit_files(
                current, attempt, files, ingest_id, leftovers=leftovers, source=of_data
            )
        if not applied:
            _is_applied(context, ingest_id, source)
        if applied and leftovers:
            context.attempts.delete_leftovers(attempt, context.store.own)
    return IngestReport.of(ingest_id, files if applied else (), applied=applied, started=started)


def _is_applied(context: TableContext, ingest_id: str, source: Callable[[], bytes | None]) -> bool:
    """Returns whether an ingest with this id was applied; raises `CommitIdReused` when its data differed."""
    is_of_source = context.store.is_of_source(
        commit_id(ingest_id), lambda recorded: is_same(source(), recorded)
    )
    if is_of_source is False:
        raise CommitIdReused(
            f"ingest id {ingest_id!r} was used before, for other data, in table {context.table.name!r}; "
            "nothing was added: give each ingest an id of its own",
            commit_id=ingest_id,
            table=context.table.name,
        )
    return is_of_source is not None


def commit_id(ingest_id: str) -> str:
    return f"ingest:{ingest_id}"


def commit_files(
    context: TableContext,
    attempt: WriteAttempt,
    files: Sequence[FileWithReferences],
    ingest_id: str,
    *,
    leftovers: bool = False,
    source: bytes | None = None,
    with_them: Callable[[psycopg.Connection[Any]], object] | None = None,
) -> bool:
    """Adds the attempt's files to the table and ends the attempt. Returns True.

    If the ingest id was applied before, deletes the files instead and returns False. `source` is a digest of
    the data, which is recorded with the id. `with_them` is called first, in the same transaction. With the
    files of a keyed table, records the last deletion that existed when the attempt began.

    Raises `CommitFailed` if nothing was applied, and `CommitOutcomeUnknown` if the database no longer
    answers.
    """
    files = with_place(attempt, files)
    try:
        applied = _commit(
            context, attempt, files, ingest_id, leftovers=leftovers, source=source, with_them=with_them
        )
    except CommitOutcomeUnknown as unknown:
        applied = _ask(context, attempt, ingest_id, unknown)
    if not applied:
        context.attempts.discard(attempt, leftovers=leftovers)
    return applied


def with_place(attempt: WriteAttempt, files: Sequence[FileWithReferences]) -> tuple[FileWithReferences, ...]:
    """Returns the files of a keyed table with the number of the last deletion before the attempt's place.

    Returns files of other tables as they are: their attempts have no place.
    """
    if attempt.place is None:
        return tuple(files)
    return tuple(replace(file, deletions_till=attempt.place.deletions_till) for file in files)


def _commit(
    context: TableContext,
    attempt: WriteAttempt,
    files: Sequence[FileWithReferences],
    ingest_id: str,
    *,
    leftovers: bool,
    source: bytes | None,
    with_them: Callable[[psycopg.Connection[Any]], object] | None,
) -> bool:
    # a commit request cannot carry leftovers, `with_them` or a check of the numbering
    is_plain = not leftovers and with_them is None and context.numbering is None
    if is_plain and (commits := context.async_commits) is not None:
        with suppress(InvalidCommitRequest):
            request = AddFiles(
                commit_id=commit_id(ingest_id),
                table=context.table.name,
                files=tuple(files),
                attempt_id=attempt.attempt_id,
                source=source,
            )
            return commits.commit(request, attempt)

    def work(conn: psycopg.Connection[Any]) -> bool:
        if context.numbering is not None:
            context.numbering.check(conn)
        if with_them is not None:
            with_them(conn)
        applied = context.store.add_files_with_references(
            files, commit_id=commit_id(ingest_id), source=source, conn=conn
        )
        if applied:
            WriteAttempts.finish(conn, attempt.table_id, [attempt.attempt_id], leftovers=leftovers)
        return applied

    return run_transaction(context.supplier, work, operation="ingest")


def _ask(context: TableContext, attempt: WriteAttempt, ingest_id: str, unknown: CommitOutcomeUnknown) -> bool:
    """Returns whether a commit of unknown outcome was applied by this attempt.

    Abandons the attempt first. This waits for a transaction that is ending the attempt, and makes later
    transactions fail, so that the commit cannot be applied afterwards. Raises `CommitFailed` if it was not
    applied.
    """
    pause = partial(backoff_seconds, seconds_min=0.05, seconds_max=ASK_WAIT_SECONDS_MAX)
    for _ in tries(tries_max=ASK_ATTEMPTS_MAX, pause=pause):
        try:
            withdrawn = context.attempts.abandon(attempt)
            applied = context.store.is_applied(commit_id(ingest_id))
        except (DormouseError, OSError) as error:
            logger.info("ingest %s: cannot determine the outcome of its commit: %s", ingest_id, error)
            continue
        if not applied:
            raise CommitFailed(
                f"ingest {ingest_id!r}: the database lost the commit; run it again"
            ) from unknown
        return not withdrawn
    raise unknown
