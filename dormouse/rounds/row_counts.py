"""Rows are counted on their way: DataFusion takes a file that is missing or empty for one without rows."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.errors import InvalidData, JobFailed
from dormouse.files.compaction_jobs import CompactionJob
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.keyed import is_keyed
from dormouse.model.properties import TableProperties


def check_output(
    job: CompactionJob, properties: TableProperties, rows_written: int, *, deletes: bool = False
) -> None:
    """Refuses an output whose rows are not those of the inputs, as far as the references tell exactly.

    `deletes`: whether some may be left out.
    """
    changed = deletes or properties.filter or properties.aggregate or is_keyed(properties)
    exact = all(item.exact for item in job.inputs)
    if exact and (rows_written > job.row_count or (rows_written < job.row_count and not changed)):
        names = ", ".join(repr(item.filename) for item in job.inputs)
        raise InvalidData(
            f"the merge of {names} wrote {rows_written:,} rows; the references tell {job.row_count:,}"
        )


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
