"""Ingest: in this process, rows to their leaves, sorted, written, committed once; large data on Spark."""

from __future__ import annotations

import logging
import os
import stat
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, partial
from importlib.util import find_spec
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
    InvalidInput,
    JobFailed,
)
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.loops import Progress, backoff_seconds, no_progress, tries
from dormouse.model.schema import Field, Schema
from dormouse.model.table import (
    HIDDEN_COLUMNS,
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
from dormouse.writing.parquet_file import ROW, LeafFiles

if TYPE_CHECKING:
    import numpy.typing as npt
    import psycopg

logger = logging.getLogger(__name__)
INGEST_ID_BYTES_MAX = 200
ASK_ATTEMPTS_MAX = 8
ASK_WAIT_SECONDS_MAX = 5.0
T = TypeVar("T")
ENGINES = ("auto", "local", "spark")
CLUSTER_BYTES_MIN = 256 * 1024 * 1024
"""Less is done here before a cluster has begun."""


@dataclass(frozen=True, slots=True)
class IngestReport:
    """What an ingest added; nothing when its id was `applied` before, by another."""

    ingest_id: str
    rows: int
    files: int
    references: int
    bytes: int
    applied: bool
    seconds: float


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
    """Adds rows to a table, see `Table.ingest`; `on_spark` is an ingest that distributes the work.

    `deletes`: see `Table.upsert`.
    """
    check_engine(engine)
    if is_keyed(context.properties):
        given_schema(context.schema, context.properties, deletes)
    if is_dataframe(data):
        engine = "spark"
    add = choose_engine(engine, lambda: _bytes_on_disk(data), ingest_in_process, on_spark)
    if context.reports is None:
        return add(context, data, ingest_id=ingest_id, progress=progress, deletes=deletes)
    with context.reports.ingest(context.table.name) as told:
        done = add(context, data, ingest_id=ingest_id, progress=progress, deletes=deletes)
        told.message = f"{plural(done.rows, 'row')} in {plural(done.files, 'file')}" if done.applied else None
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
    """Adds the rows of `data` to a table, all or none: once for each `ingest_id`.

    `data` is a pyarrow Table, RecordBatch, RecordBatchReader or iterable of batches, or the path or paths of
    Parquet or CSV files (a file, a folder, a pattern). It is streamed: about twice `memory_bytes` of it are
    held, by default what the setting `ingest_memory_bytes` says, the rest waits sorted in the temporary
    folder. Files whose rows are in order already are written as they are read. `progress` is called with the
    rows read so far, and all rows if known. Raises `InvalidData`, `ObjectStoreError`, `JobFailed` and
    `CommitFailed`, after which nothing is added and what was written is removed; after
    `CommitOutcomeUnknown`, run the same id again.
    """

    share = min(max(machine_bytes() // 8, MEMORY_BYTES), MEMORY_BYTES_MAX)
    held_bytes = memory_bytes or load_settings().ingest_memory_bytes or share
    given = GivenData(data, deletes)

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        rows = keyed_rows(current, attempt, deletes)
        source = open_source(given.data, current.schema) if rows is None else rows.opened(given.data)
        return write_leaves(current, attempt, source, progress or no_progress, held_bytes)

    return ingest_once(context, ingest_id, write, digest=given.digest)


def keyed_rows(context: TableContext, attempt: WriteAttempt, deletes: str | None = None) -> KeyedRows | None:
    """What a load brings to a keyed table; None for another table, which takes rows as they are."""
    if attempt.place is None:
        return None
    place = attempt.place
    return KeyedRows(context.schema, context.properties, deletes, place.sequence, place.taken_at)


def write_leaves(
    context: TableContext, attempt: WriteAttempt, source: Source, progress: Progress, memory_bytes: int
) -> list[FileWithReferences]:
    """The rows as files of the attempt, one or more a leaf; not committed."""
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
    """The rows of each leaf, where all come in the order in which they are written; else None."""
    if is_keyed(context.properties) or (keys := source.sorted_keys()) is None:
        return None
    by_leaf = context.properties.ingest_file_writing == "one_file_per_leaf"
    return leaf_counts(keys, context.schema, lookup, by_leaf=by_leaf)


def _bytes_on_disk(data: Any) -> int:
    """The size of files given by path; 0 for data in memory, and for paths that are not there."""
    if isinstance(data, Files):
        return _bytes_on_disk(data.paths)
    if isinstance(data, str | os.PathLike):
        path = Path(data)
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(map(_file_bytes, files))
    return sum(map(_bytes_on_disk, data)) if isinstance(data, list | tuple) else 0


def _file_bytes(path: Path) -> int:
    """0 for what is no file, or gone since it was listed."""
    try:
        found = path.stat()
    except OSError:
        return 0
    return found.st_size if stat.S_ISREG(found.st_mode) else 0


def is_dataframe(data: Any) -> bool:
    """Without importing pyspark, which the maker of a DataFrame has done."""
    return any(kind.__module__.startswith("pyspark.sql") for kind in type(data).__mro__)


def check_ingested(
    rows_read: int, rows_total: int | None, files: Sequence[FileWithReferences], properties: TableProperties
) -> None:
    """Refuses an ingest that read fewer or more rows than its source has, or wrote others than it read.

    Of a keyed table it wrote one for each key.
    """
    if rows_total not in (None, rows_read):
        raise InvalidData(
            f"the data has {rows_total:,} rows, but {rows_read:,} were read: it changed meanwhile"
        )
    written = sum(reference.row_count for file in files for reference in file.references)
    fewest = min(1, rows_read) if is_keyed(properties) else rows_read
    if not fewest <= written <= rows_read:
        raise JobFailed(f"the ingest read {rows_read:,} rows and wrote {written:,}; nothing was added")


# What a load brings to a keyed table, as its files have it: with its place, and marks of deletion.

TASKS_MAX = 1 << 20
"""How many places each load has: by so much the database's sequence of loads goes on."""


@dataclass(frozen=True)
class KeyedRows:
    """The rows of one load; `deletes` is the column of the data that marks rows to be deleted.

    All have one `sequence`; what is marked is so since `taken_at`.
    """

    schema: Schema
    properties: TableProperties
    deletes: str | None
    sequence: int
    taken_at: datetime

    def of_task(self, number: int) -> KeyedRows:
        """Those of one of the load's tasks, whose rows come after those of the ones before it."""
        return replace(self, sequence=self.sequence + min(number, TASKS_MAX - 1))

    @property
    def given(self) -> Schema:
        """The columns that the data has."""
        return given_schema(self.schema, self.properties, self.deletes)

    def opened(self, data: Any) -> Source:
        """Data as `open_source` takes it."""
        found = open_source(data, self.given)
        return replace(found, batches=self.stored(found.batches))

    def stored(self, batches: Iterable[pa.RecordBatch], first_row: int = 0) -> Iterator[pa.RecordBatch]:
        """Batches that have the given columns, as they are stored, with the numbers of their rows last."""
        whole = arrow_schema(stored_schema(self.schema, self.properties))
        names = [*(name for name in whole.names if name not in HIDDEN_COLUMNS), *HIDDEN_COLUMNS, ROW]
        for batch in batches:
            yield pa.RecordBatch.from_arrays(self._columns(batch, first_row), names=names)
            first_row += batch.num_rows

    def _columns(self, batch: pa.RecordBatch, first_row: int) -> list[pa.Array]:
        marked = None if self.deletes is None else batch.column(self.deletes)
        there = None if marked is None else pc.invert(marked)
        sequence = pa.repeat(pa.scalar(self.sequence, pa.int64()), batch.num_rows)
        kind = arrow_type(TIMESTAMP)
        deleted_at = pa.nulls(batch.num_rows, kind)
        if marked is not None:
            at = pa.repeat(pa.scalar(self.taken_at, kind), batch.num_rows)
            deleted_at = pc.if_else(marked, at, pa.scalar(None, kind))
        return [
            *(batch.column(field.name) for field in self.schema.row_keys),
            *(self._value(batch.column(f.name), f, there, first_row) for f in self.schema.values),
            sequence,
            deleted_at,
            pa.array(np.arange(first_row, first_row + batch.num_rows, dtype=np.int64)),
        ]

    def _value(self, column: pa.Array, field: Field, there: pa.Array | None, first_row: int) -> pa.Array:
        if field.name == self.properties.newest_by:
            return _comparable(column, field, first_row) if field.type.is_floating else column
        if there is None:
            return column
        if column.null_count and not field.nullable:
            missing = pc.index(pc.and_(pc.is_null(column), there), True).as_py()
            if missing >= 0:
                raise InvalidData(
                    f"column {field.name!r} must not be null but where a row is to be deleted, and is in row "
                    f"{missing + first_row:,} (counted from 0)"
                )
        return column if there.false_count == 0 else without_values(column, there)


def _comparable(column: pa.Array, field: Field, first_row: int) -> pa.Array:
    """Without -0.0, so that both zeros are equal; `InvalidData` for NaN, which is neither newer nor older."""
    odd = pc.index(pc.is_nan(column), True).as_py()
    if odd >= 0:
        raise InvalidData(
            f"column {field.name!r} tells which row is newer, and is NaN in row {odd + first_row:,} "
            "(counted from 0)"
        )
    return pc.add(column, pa.scalar(0, column.type))


# The end of an ingest: its files become the table's, all or none, once for each ingest id.


def ingest_once(
    context: TableContext,
    ingest_id: str | None,
    write: Callable[[TableContext, WriteAttempt], Sequence[FileWithReferences]],
    *,
    digest: Callable[[], bytes | None] = lambda: None,
    leftovers: bool = False,
) -> IngestReport:
    """Commits the files that `write` makes, once for each id; for an id that is applied it is not called.

    `digest` gives 16 bytes for the data, as `GivenData.digest` does, or None. They are recorded with the id
    that a caller gave. Raises `CommitIdReused` for an id that is applied with data of another digest.

    Without an id it gets a new one. `write` is given the services for the columns of now, by which it writes;
    those that are changed meanwhile do not matter: readers find the older ones in the files. `leftovers`:
    others may still write objects of the attempt, see `WriteAttempts.finish`, also when it fails; they are
    looked for after the commit.
    """
    started = time.monotonic()
    source: Callable[[], bytes | None] = cache(digest) if ingest_id is not None else lambda: None
    if ingest_id is None:
        ingest_id = uuid.uuid4().hex
    check_text("ingest_id", ingest_id, INGEST_ID_BYTES_MAX)
    check_not_edited(context.table.name, context.properties, "use row_table(…).change or 'dormouse rows'")
    files: Sequence[FileWithReferences] = ()
    applied = False
    if not _is_applied(context, ingest_id, source):
        with context.writing(loads=True, leftovers=leftovers) as (current, attempt):
            of_data = None if source() == STREAM else source()
            files = write(current, attempt)
            applied = commit_files(current, attempt, files, ingest_id, leftovers=leftovers, source=of_data)
        if not applied:
            _is_applied(context, ingest_id, source)
        if applied and leftovers:
            context.attempts.delete_leftovers(attempt, context.store.own)
    added = files if applied else ()
    return IngestReport(
        ingest_id=ingest_id,
        rows=sum(file.row_count or 0 for file in added),
        files=len(added),
        references=sum(len(file.references) for file in added),
        bytes=sum(file.byte_count or 0 for file in added),
        applied=applied,
        seconds=time.monotonic() - started,
    )


def _is_applied(context: TableContext, ingest_id: str, source: Callable[[], bytes | None]) -> bool:
    """Returns whether an ingest of this id is applied; `CommitIdReused` when it was one of other data."""
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
    """Adds the attempt's files and ends it; False, and the files removed, when the id is applied already.

    `source` is a digest of the data, which is recorded with the id.

    Those of a keyed table have the attempt's place among the deletions. What is done `with_them`, in the same
    transaction, comes first. Raises `CommitFailed` when nothing is applied, and `CommitOutcomeUnknown` only
    when the database does not answer any more.
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
    """Files of an attempt, which have its place among the deletions, if it has one."""
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
    # a request cannot say that there may be leftovers, or what else there is to do or to check
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
    """Whether a commit that never answered is applied; it cannot be applied later than this answer.

    Abandoning the attempt waits for a transaction that is still ending it, and no later one can.
    """
    pause = partial(backoff_seconds, seconds_min=0.05, seconds_max=ASK_WAIT_SECONDS_MAX)
    for _ in tries(tries_max=ASK_ATTEMPTS_MAX, pause=pause):
        try:
            withdrawn = context.attempts.abandon(attempt)
            applied = context.store.is_applied(commit_id(ingest_id))
        except (DormouseError, OSError) as error:
            logger.info("ingest %s: asking what became of its commit: %s", ingest_id, error)
            continue
        if not applied:
            raise CommitFailed(
                f"ingest {ingest_id!r}: the database lost the commit; run it again"
            ) from unknown
        return not withdrawn
    raise unknown


# Where work runs: in this process, or on Spark.


def check_engine(engine: str) -> None:
    """Refuses an engine that does not exist."""
    if engine not in ENGINES:
        raise InvalidInput(f"engine {engine!r} is not known; use auto, local or spark")


def choose_engine(engine: str, byte_count: Callable[[], int], local: T, spark: T | None) -> T:
    """One of the two.

    `auto` takes Spark where it is installed and at hand, and there is a cluster for 256 MiB or more; without
    one, for files that are larger than this machine's memory. On one machine it is the slower of the two.
    """
    if engine == "auto":
        is_for_spark = spark is not None and find_spec("pyspark") is not None
        bytes_min = CLUSTER_BYTES_MIN if has_cluster() else machine_bytes()
        engine = "spark" if is_for_spark and byte_count() >= bytes_min else "local"
    if engine == "local":
        return local
    if spark is None:
        raise InvalidInput("engine 'spark' is not at hand here; use auto or local")
    return spark


def has_cluster() -> bool:
    """Whether Spark runs on other machines: by the session that there is, else by the settings."""
    # without importing pyspark, which the maker of a session has done
    context = getattr(sys.modules.get("pyspark"), "SparkContext", None)
    running = getattr(context, "_active_spark_context", None)
    master = str(running.master) if running is not None else load_settings().spark_master or "local"
    return not master.startswith("local")
