"""Marks of deletion in the files of keyed tables, which compaction drops once no older row needs them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import groupby
from operator import attrgetter

from dormouse.data.newest import chunks_of, places_of
from dormouse.errors import ObjectNotFound
from dormouse.model.table import DELETED_AT, is_keyed
from dormouse.model.text import narrow_bytes
from dormouse.postgres.queries import Uuids
from dormouse.state.context import TableContext
from dormouse.state.files.compaction_jobs import CompactionInput, CompactionJob
from dormouse.state.files.layout import OwnTables

# Files and open loads that may have older rows than a compaction job of a keyed table.


@dataclass(frozen=True, slots=True)
class OlderRows:
    """The data outside a job that may have older rows of the job's keys.

    `open_sequence` is the smallest place of an open load. `files` is None if the files are unknown.
    """

    open_sequence: int | None
    files: tuple[str, ...] | None


def older_rows(own: OwnTables, job: CompactionJob) -> OlderRows:
    """Returns the first open load, and the other files whose keys overlap with those of a job.

    A file that is added later belongs to a load that is open now, or to a newer load.
    """
    file_ids = Uuids([narrow_bytes(item.filename) for item in job.inputs])
    values = {"partition_id": job.partition_id, "file_ids": file_ids}
    [row] = own.rows("beside_job", values, operation="find older rows")
    is_leaf, open_sequence, names, mins, maxs, lows, highs = row
    if not is_leaf or None in names:  # None: the row of a file is missing
        return OlderRows(open_sequence, None)
    is_known = all(key is not None for key in (*lows, *highs))
    low, high = (min(lows), max(highs)) if is_known else (None, None)
    met = (
        name
        for name, smallest, largest in zip(names, mins, maxs, strict=True)
        if low is None or smallest is None or largest is None or (smallest <= high and largest >= low)
    )
    return OlderRows(open_sequence, tuple(met))


# The marks that a job may drop, and the files that a job would rewrite only to drop marks.


def forgets_marks(context: TableContext, job: CompactionJob) -> bool:
    """Returns whether a job may drop marks of deletion.

    The job may do so if no file outside the job, and no open load, can have older rows of its keys. Loads
    that begin later have newer rows. With `newest_by`, they may also have older rows; for this reason
    `KeyedMerge` keeps young marks.
    """
    by_value, properties = context.properties.newest_by is not None, context.properties
    if by_value and properties.deletion_marks_seconds is None:
        return False
    # before any footer is read: later files are of loads that this query sees, or of newer loads
    found = older_rows(context.store.own, job)
    if found.files is None or (by_value and found.files):
        return False
    inputs = [places_of(context.objects, item.filename) for item in job.inputs]
    if properties.filter is None and not any(one.has_marks for one in inputs):
        return False  # nothing to forget
    if by_value:
        return True
    known = [one.last for one in inputs if one.last is not None]
    last = max(known, default=0)
    is_open = found.open_sequence is not None and found.open_sequence < last
    if is_open or len(known) < len(inputs):
        return False
    return all(_is_newer(context, name, last) for name in found.files)


def _is_newer(context: TableContext, filename: str, last: int) -> bool:
    """Returns whether all rows of a file are of loads that began after the load at place `last`."""
    try:
        first = places_of(context.objects, filename).first
    except ObjectNotFound:
        return False  # just collected: its rows are now in another file, which was not listed
    return first is not None and first > last


def with_marks_to_drop(context: TableContext) -> Iterator[str]:
    """Yields the ids of leaves of a keyed table whose only file has marks of deletion that can be dropped."""
    if not is_keyed(context.properties):
        return
    leaves = {leaf.partition_id for leaf in context.partitions.leaves()}
    references = context.store.unassigned_file_references()
    for partition_id, group in groupby(references, key=attrgetter("partition_id")):
        [first, *others] = group
        if others or partition_id not in leaves or not first.count_approximate:
            continue
        file = CompactionInput(first.filename, first.row_count, True, False)
        with suppress(ObjectNotFound):  # just compacted
            if forgets_marks(context, CompactionJob("", partition_id, 1, (file,))) and _are_old(
                context, first.filename
            ):
                yield partition_id


def _are_old(context: TableContext, filename: str) -> bool:
    """Returns whether a file has marks of deletion that are no longer kept for rows that are loaded late."""
    seconds = context.properties.deletion_marks_seconds
    if context.properties.newest_by is None or seconds is None:
        return True
    [chunks] = chunks_of(context.objects, filename, (DELETED_AT,))
    times = [one.statistics.min for one in chunks if one.statistics and one.statistics.has_min_max]
    return bool(times) and min(times) < datetime.now(UTC) - timedelta(seconds=seconds)
