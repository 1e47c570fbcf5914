"""Ingest: in this process, rows to their leaves, sorted, written, committed once; large data on Spark."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dormouse.data.leaf_sorter import MEMORY_BYTES, MEMORY_BYTES_MAX, LeafLookup
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.table import given_schema, is_keyed
from dormouse.model.text import plural
from dormouse.settings.process import load_settings, machine_bytes
from dormouse.sources.data_files import Files
from dormouse.sources.source import GivenData, Source, open_source
from dormouse.sources.source_files import InOrder, leaf_counts
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.compaction import check_engine, choose_engine
from dormouse.writing.ingest_commit import IngestReport, check_ingested, ingest_once
from dormouse.writing.keyed_merge import KeyedRows
from dormouse.writing.leaf_files import LeafFiles

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa

Progress = Callable[[int, int | None], object]


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

    held_bytes = memory_bytes or load_settings().ingest_memory_bytes or _share_of_memory()
    given = GivenData(data, deletes)

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        rows = keyed_rows(current, attempt, deletes)
        source = open_source(given.data, current.schema) if rows is None else rows.opened(given.data)
        return write_leaves(current, attempt, source, progress or (lambda *_: None), held_bytes)

    return ingest_once(context, ingest_id, write, digest=given.digest)


def _share_of_memory() -> int:
    return min(max(machine_bytes() // 8, MEMORY_BYTES), MEMORY_BYTES_MAX)


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
