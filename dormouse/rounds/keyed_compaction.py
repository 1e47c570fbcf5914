"""Compaction of keyed tables: the newest row of each key stays, and marks of deletion that are needed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dormouse.context import TableContext
from dormouse.data.keyed_facts import Places, places_of
from dormouse.data.keyed_merge import KeyedMerge, merge_newest
from dormouse.data.parquet_file import FileFacts
from dormouse.errors import ObjectNotFound
from dormouse.files.compaction_jobs import CompactionJob
from dormouse.files.older_rows import older_rows
from dormouse.model.region import Region
from dormouse.query.deletions import Deletion
from dormouse.rounds.job_deletions import remaining


def merge_keyed(
    context: TableContext,
    job: CompactionJob,
    places: Sequence[str],
    path: Path,
    *,
    region: Region | None,
    now_ms: int,
    deletions: Sequence[Sequence[Deletion]],
) -> FileFacts:
    """Merges a job's files, which are read at `places`; `deletions` are those of each."""
    # an erasure leaves no marks: these would keep the keys
    erasures = [[one for one in some if one.is_erasure] for some in deletions]
    merge = KeyedMerge(context.schema, context.properties, now_ms, forgets_marks(context, job))
    return merge_newest(
        places,
        merge,
        path,
        region=region,
        store=context.objects,
        remains=remaining(context.schema, deletions),
        unerased=remaining(context.schema, erasures),
        row_bytes=job.row_bytes,
    )


def forgets_marks(context: TableContext, job: CompactionJob) -> bool:
    """Whether no older row of the job's keys is outside of the job, or can come of a load that is open.

    Whatever begins later is newer: with `newest_by` it need not be, which `KeyedMerge` knows.
    """
    by_value, properties = context.properties.newest_by is not None, context.properties
    if by_value and properties.deletion_marks_seconds is None:
        return False
    # before any footer is read: what comes later is of loads that this sees, or of newer ones
    found = older_rows(context.store.own, job)
    if found.files is None or (by_value and found.files):
        return False
    inputs = [places_of(context.objects, item.filename) for item in job.inputs]
    if properties.filter is None and not any(one.has_marks for one in inputs):
        return False  # nothing to forget
    if by_value:
        return True
    last = _last(inputs)
    if last is None or (found.open_sequence is not None and found.open_sequence < last):
        return False
    return all(_is_newer(context, name, last) for name in found.files)


def _last(files: Sequence[Places]) -> int | None:
    known = [one.last for one in files if one.last is not None]
    return max(known) if len(known) == len(files) else None


def _is_newer(context: TableContext, filename: str, last: int) -> bool:
    """Whether all rows of a file are of loads that began after those of the job."""
    try:
        first = places_of(context.objects, filename).first
    except ObjectNotFound:
        return False  # collected meanwhile: its rows are in another file, which was not seen
    return first is not None and first > last
