"""What may hold, or still bring, older rows than those of a compaction job of a keyed table."""

from __future__ import annotations

from dataclasses import dataclass

from dormouse.files.compaction_jobs import CompactionJob
from dormouse.files.own_tables import OwnTables
from dormouse.model.text import narrow_bytes
from dormouse.postgres.arrays import Uuids


@dataclass(frozen=True, slots=True)
class OlderRows:
    """At one moment: the smallest place of a load that is still open, and files that may have the job's keys.

    `files` is None where they cannot be told, as the job's partition is no leaf any more.
    """

    open_sequence: int | None
    files: tuple[str, ...] | None


def older_rows(own: OwnTables, job: CompactionJob) -> OlderRows:
    """What is beside a job; files that come later are of loads that are open now, or begin later."""
    file_ids = Uuids([narrow_bytes(item.filename) for item in job.inputs])
    values = {"partition_id": job.partition_id, "file_ids": file_ids}
    [row] = own.rows("beside_job", values, operation="look for older rows")
    is_leaf, open_sequence, names, mins, maxs, lows, highs = row
    if not is_leaf:
        return OlderRows(open_sequence, None)
    is_known = all(key is not None for key in (*lows, *highs))
    low, high = (min(lows), max(highs)) if is_known else (None, None)
    met = (
        name
        for name, smallest, largest in zip(names, mins, maxs, strict=True)
        if low is None or smallest is None or largest is None or (smallest <= high and largest >= low)
    )
    return OlderRows(open_sequence, tuple(met))
