"""The compaction task: one job's files merged into one, and committed by itself."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dormouse.errors import CommitOutcomeUnknown, InvalidCommitRequest, JobFailed, ObjectNotFound
from dormouse.model.file_reference import FileReference, ReplaceFileReferencesRequest
from dormouse.model.keyed import is_keyed
from dormouse.model.region import Region
from dormouse.model.text import narrow_bytes
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres.connection import Isolation
from dormouse.postgres.queries import Uuids
from dormouse.postgres.transaction import run_transaction
from dormouse.reading.overlaps import Places, places_of
from dormouse.reading.where import Deletion
from dormouse.state.commits.requests import ReplaceFileReferences
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.state.files.own_tables import OwnTables
from dormouse.writing.ingest_commit import check_output
from dormouse.writing.job_inputs import JobDeletions, JobInputs, remaining
from dormouse.writing.keyed_merge import KeyedMerge, merge_newest
from dormouse.writing.looking import look_at
from dormouse.writing.merge import merge_sorted
from dormouse.writing.parquet_file import FileFacts

if TYPE_CHECKING:
    import psycopg

    from dormouse.model.region import Region
    from dormouse.reading.where import Deletion

# What may hold, or still bring, older rows than those of a compaction job of a keyed table.


@dataclass(frozen=True, slots=True)
class OlderRows:
    """At one moment: the smallest place of a load that is still open, and files that may have the job's keys.

    `files` is None where they cannot be told.
    """

    open_sequence: int | None
    files: tuple[str, ...] | None


def older_rows(own: OwnTables, job: CompactionJob) -> OlderRows:
    """What is beside a job; files that come later are of loads that are open now, or begin later."""
    file_ids = Uuids([narrow_bytes(item.filename) for item in job.inputs])
    values = {"partition_id": job.partition_id, "file_ids": file_ids}
    [row] = own.rows("beside_job", values, operation="look for older rows")
    is_leaf, open_sequence, names, mins, maxs, lows, highs = row
    if not is_leaf or None in names:  # or the row of a file is lost
        return OlderRows(open_sequence, None)
    is_known = all(key is not None for key in (*lows, *highs))
    low, high = (min(lows), max(highs)) if is_known else (None, None)
    met = (
        name
        for name, smallest, largest in zip(names, mins, maxs, strict=True)
        if low is None or smallest is None or largest is None or (smallest <= high and largest >= low)
    )
    return OlderRows(open_sequence, tuple(met))


# Compaction of keyed tables: the newest row of each key stays, and marks of deletion that are needed.


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


logger = logging.getLogger(__name__)

Outcome = Literal["committed", "looked", "superseded", "retry", "given_up"]
COMMIT_TRIES_MAX = 5
ROWS_GONE_MANY = 0.1
"""A share of a file's rows: when so many are deleted, it is worth merging for that alone."""


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """What became of one run of a job. Rows read are those that the references tell.

    `looked`: deletions take few rows of its files, which stay. `superseded`: another run committed it, or
    released its files. `retry`: it failed and is due again.
    """

    job_id: str
    partition_id: str
    outcome: Outcome
    files_read: int = 0
    rows_read: int = 0
    rows_written: int = 0
    filename: str | None = None
    error: str | None = None


class Cancellation:
    """Tells running tasks to stop, and ends their attempts: whatever they still do is not committed."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._running: dict[str, WriteAttempt] = {}

    @property
    def is_cancelled(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()

    def discard(self, attempts: WriteAttempts) -> None:
        """Ends what runs after `stop`, without waiting for it."""
        for attempt in list(self._running.values()):
            attempts.discard(attempt)

    def begin(self, attempt: WriteAttempt) -> None:
        self._running[attempt.attempt_id] = attempt
        self.check()

    def end(self, attempt: WriteAttempt) -> None:
        self._running.pop(attempt.attempt_id, None)

    def check(self) -> None:
        """Raises `JobFailed` once the task is to stop."""
        if self.is_cancelled:
            raise JobFailed("the compaction was interrupted")


class NoRowsLeft(Exception):
    """The merge left no rows: there is no output to publish."""


def run_compaction(
    context: TableContext, job: CompactionJob, now_ms: int, *, cancellation: Cancellation | None = None
) -> CompactionResult:
    """Merges a job's files and commits the output in their place; ages are measured from `now_ms`.

    A failure is in the result and not raised: the job is put back, or given up after its last attempt. May
    run twice at once, here or elsewhere: one run commits, and the others leave nothing behind.
    """
    cancellation = cancellation or Cancellation()
    try:
        return _run(context, job, now_ms, cancellation)
    except Exception as error:
        # also when another run has committed the job: then it is no failure, and is told apart there
        if cancellation.is_cancelled:
            raise
        return job_failed(context, job, error)


def _run(
    context: TableContext, job: CompactionJob, now_ms: int, cancellation: Cancellation
) -> CompactionResult:
    if job.looks and not _is_worth_merging(context, job):
        context.store.unassign_job(job.job_id, partition_id=job.partition_id)
        return CompactionResult(
            job.job_id, job.partition_id, "looked", files_read=len(job.inputs), rows_read=job.row_count
        )
    with context.writing() as (current, attempt):
        try:
            cancellation.begin(attempt)
            # before anything is read: what is deleted from here on is deleted from the output, too
            deletions = JobDeletions.of(current, job)
            shaped = deletions.context
            name = replace(attempt, schema_version=shaped.schema.version).object_name(job.partition_id)
            facts = _write(shaped, job, name, now_ms, cancellation, deletions)
            commit_output(shaped, job, attempt, name, facts, deletions.till)
        finally:
            cancellation.end(attempt)
    return CompactionResult(
        job.job_id,
        job.partition_id,
        "committed",
        files_read=len(job.inputs),
        rows_read=job.row_count,
        rows_written=facts.row_count,
        filename=name if facts.row_count else None,
    )


def _is_worth_merging(context: TableContext, job: CompactionJob) -> bool:
    """Looks at a job's files for rows of deletions: whether these are many, or the deletions are."""
    looks = look_at(context, [(item.filename, item.byte_count) for item in job.inputs])
    pending = {one.deletion_id for one in context.deletions.list()}
    found = [[rows for number, rows in one.rows.items() if number in pending] for one in looks]
    deletions_max = context.properties.deletions_max
    return any(len(rows) > deletions_max for rows in found) or (
        sum(map(sum, found)) >= ROWS_GONE_MANY * job.row_count and any(found)
    )


def _write(
    context: TableContext,
    job: CompactionJob,
    name: str,
    now_ms: int,
    cancellation: Cancellation,
    deletions: JobDeletions,
) -> FileFacts:
    """The output and its sketches as objects; none when no rows are left."""
    try:
        with context.objects.staged(name) as path:
            facts = _merge(context, job, path, now_ms, cancellation, deletions)
            cancellation.check()
            if not facts.row_count:
                raise NoRowsLeft
    except NoRowsLeft:
        return facts
    context.objects.put(name + SKETCHES_SUFFIX, facts.sketches)
    return facts


def _merge(
    context: TableContext,
    job: CompactionJob,
    path: Path,
    now_ms: int,
    cancellation: Cancellation,
    deletions: JobDeletions,
) -> FileFacts:
    region = region_of(context, job)
    inputs = JobInputs(context.objects, context.table.name, job, cancellation.check)
    with inputs.verified(path.parent) as places:
        facts = merge_inputs(
            context, job, places, path, region=region, now_ms=now_ms, deletions=deletions.of_inputs
        )
    check_output(job, context.properties, facts.row_count, deletes=any(deletions.of_inputs))
    return facts


def region_of(context: TableContext, job: CompactionJob) -> Region | None:
    """Where a job's rows lie; None when its inputs have no others."""
    if all(item.whole for item in job.inputs):
        return None
    return context.partitions.partition(job.partition_id).region


def merge_inputs(
    context: TableContext,
    job: CompactionJob,
    places: Sequence[str],
    path: Path,
    *,
    region: Region | None,
    now_ms: int,
    deletions: Sequence[Sequence[Deletion]],
) -> FileFacts:
    """Merges the rows that a job's inputs, read at `places`, have in a region; `deletions` are of each."""
    if is_keyed(context.properties):
        return merge_keyed(context, job, places, path, region=region, now_ms=now_ms, deletions=deletions)
    return merge_sorted(
        places,
        context.schema,
        path,
        region=region,
        properties=context.properties,
        now_ms=now_ms,
        store=context.objects,
        remains=remaining(context.schema, deletions),
        row_bytes=job.row_bytes,
    )


def commit_output(
    context: TableContext,
    job: CompactionJob,
    attempt: WriteAttempt,
    name: str,
    facts: FileFacts,
    deletions_till: int,
    *,
    leftovers: bool = False,
) -> None:
    """Commits a job's output in the place of its inputs; `leftovers` as `WriteAttempts.finish` has it."""
    request, commit_id = _request(job, name, facts, deletions_till), f"compaction-{attempt.attempt_id}"
    if not leftovers and (commits := context.async_commits) is not None:
        with suppress(InvalidCommitRequest):
            queued = ReplaceFileReferences(
                commit_id=commit_id,
                table=context.table.name,
                requests=(request,),
                attempt_id=attempt.attempt_id,
            )
            commits.commit(queued, attempt)
            return

    def work(conn: psycopg.Connection[Any]) -> None:
        # no other attempt has this id: it is asked for only while its outcome is unknown
        if context.store.replace_file_references(
            [request], commit_id=commit_id, commit_expires=True, conn=conn
        ):
            WriteAttempts.finish(conn, attempt.table_id, [attempt.attempt_id], leftovers=leftovers)

    isolation = Isolation(context.properties.isolation)
    for tried in range(1, COMMIT_TRIES_MAX + 1):
        try:
            run_transaction(context.supplier, work, isolation=isolation, operation="commit compaction")
            break
        except CommitOutcomeUnknown:
            # the same commit id waits for the lost transaction's end, and applies nothing twice
            if tried == COMMIT_TRIES_MAX:
                raise


def _request(
    job: CompactionJob, name: str, facts: FileFacts, deletions_till: int
) -> ReplaceFileReferencesRequest:
    reference = file = None
    if facts.row_count:
        reference = FileReference(
            filename=name,
            partition_id=job.partition_id,
            row_count=facts.row_count,
            count_approximate=bool(facts.marks),
        )
        file = facts.file(name, [reference])
    return ReplaceFileReferencesRequest(
        job_id=job.job_id,
        partition_id=job.partition_id,
        input_filenames=tuple(item.filename for item in job.inputs),
        new_reference=reference,
        new_file=file,
        deletions_till=deletions_till,
    )


def runners_died(job: CompactionJob) -> CompactionResult:
    """What became of a job that was given up when it was taken, because each process that ran it died."""
    return CompactionResult(job.job_id, job.partition_id, "given_up", error=job.runners_died)


def job_failed(context: TableContext, job: CompactionJob, error: Exception) -> CompactionResult:
    """Puts a failed job back or gives it up; also when a caller learns that the job's process died."""
    text = str(error) or type(error).__name__
    fate = context.jobs.fail(job, text)
    if fate != "superseded":
        logger.warning(
            "compaction of partition %s of table %s failed (attempt %d%s): %s",
            job.partition_id,
            context.table.name,
            job.attempt,
            ", given up" if fate == "given_up" else "",
            text,
        )
    return CompactionResult(job.job_id, job.partition_id, fate, error=text)
