"""Ingest in this process: rows to their leaves, sorted, written, and committed once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dormouse.context import TableContext
from dormouse.data.leaf_files import LeafFiles
from dormouse.data.leaf_lookup import LeafLookup
from dormouse.data.leaf_sorter import MEMORY_BYTES
from dormouse.data.source import Source, open_source
from dormouse.files.attempts import WriteAttempt
from dormouse.model.file_reference import FileWithReferences
from dormouse.rounds.ingest_commit import IngestReport, commit_files, commit_id, ingest_id_or_new
from dormouse.rounds.row_counts import check_ingested

Progress = Callable[[int, int | None], None]


def ingest(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None = None,
    progress: Progress | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> IngestReport:
    """Adds the rows of `data` to a table, all or none: once for each `ingest_id`.

    `data` is a pyarrow Table, RecordBatch, RecordBatchReader or iterable of batches, or the path or paths of
    Parquet or CSV files (a file, a folder, a pattern). It is streamed: about twice `memory_bytes` of it are
    held, the rest waits sorted in the temporary folder. `progress` is called with the rows read so far, and
    all rows if known. Raises `InvalidData`, `ObjectStoreError`, `JobFailed` and `CommitFailed`, after which
    nothing is added and what was written is removed; after `CommitOutcomeUnknown`, run the same id again.
    """
    started = time.monotonic()
    ingest_id = ingest_id_or_new(ingest_id)
    if context.store.is_applied(commit_id(ingest_id)):
        return IngestReport.of(ingest_id, (), applied=False, started=started)
    source = open_source(data, context.schema)
    with context.attempts.attempt(context.table) as attempt:
        files = _write(context, attempt, source, progress or _silent, memory_bytes)
        applied = commit_files(context, attempt, files, ingest_id)
    return IngestReport.of(ingest_id, files, applied=applied, started=started)


def _write(
    context: TableContext, attempt: WriteAttempt, source: Source, progress: Progress, memory_bytes: int
) -> list[FileWithReferences]:
    lookup = LeafLookup(context.partitions.tree())
    writer = LeafFiles(
        context.objects, context.schema, context.properties, lookup.leaf_ids, attempt.object_name
    )
    rows = 0
    with writer.sorter(memory_bytes) as sorter:
        for batch in source.batches:
            sorter.add(batch, lookup.indexes(batch))
            rows += batch.num_rows
            progress(rows, source.rows_total)
        files = list(writer.write(sorter))
    check_ingested(rows, source.rows_total, files)
    return files


def _silent(rows: int, rows_total: int | None) -> None:
    """Nobody wants to know."""
