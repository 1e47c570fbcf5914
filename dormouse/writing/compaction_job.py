"""The compaction task: one job's files merged into one, and committed by itself.

A job's inputs are held against what was recorded of them, so that no damage is merged into new files.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from shutil import disk_usage
from typing import TYPE_CHECKING, Any, Literal

from dormouse.data.newest import places_of
from dormouse.data.object_access import parquet_object
from dormouse.errors import (
    CommitOutcomeUnknown,
    InvalidCommitRequest,
    InvalidData,
    JobFailed,
    ObjectDamaged,
    ObjectNotFound,
    one_line,
)
from dormouse.model.file_reference import FileReference, ReplaceFileReferencesRequest
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed
from dormouse.model.text import narrow_bytes
from dormouse.objects.fault import WrittenObject, compared, copied, digest_of_object
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore, open_store
from dormouse.postgres.queries import Uuids
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_transaction
from dormouse.reading.checked_files import on_current
from dormouse.reading.planner import Reach
from dormouse.reading.row_filter import parted, remains, rendered_unless_all
from dormouse.reading.scan_session import DATAFUSION, look_at
from dormouse.reading.where import Deletion, deletions_of
from dormouse.state.commits.requests import ReplaceFileReferences
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionInput, CompactionJob
from dormouse.state.files.layout import OwnTables
from dormouse.writing.merge import KeyedMerge, merge_newest, merge_sorted
from dormouse.writing.parquet_file import FileFacts

if TYPE_CHECKING:
    import psycopg
    from datafusion import Expr

    from dormouse.model.region import Region
    from dormouse.reading.where import Deletion

COPIED_BYTES_MAX = 4 * 2**30
COPIED_SHARE = 8
"""Inputs of a job that are larger than so much of the free disk are fetched twice: others run beside it."""
COPIED_AT_ONCE = 8
logger = logging.getLogger(__name__)
Outcome = Literal["committed", "looked", "superseded", "retry", "given_up"]
COMMIT_TRIES_MAX = 5
ROWS_GONE_MANY = 0.1
"""A share of a file's rows: when so many are deleted, it is worth merging for that alone."""


# Which deletions a job applies: those that are there when it begins, each to the files that came before.


@dataclass(frozen=True, slots=True)
class JobDeletions:
    """The deletions that a job applies to each of its inputs; `till` is the number of the last of all.

    `context` has the columns by which the job is run: they are no older than those of deletions and inputs.
    """

    till: int
    of_inputs: tuple[tuple[Deletion, ...], ...]
    context: TableContext = field(repr=False, compare=False)

    @staticmethod
    def of(context: TableContext, job: CompactionJob) -> JobDeletions:
        """As they are now: each that comes later is of all rows of the output, as the inputs were there."""
        found = context.store.deletions_of([item.filename for item in job.inputs])
        context, pending = on_current(context, lambda now: (now, deletions_of(now.schema, found.deletions)))
        reach = Reach(context.schema, pending)
        files = tuple(reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files)
        return JobDeletions(found.till, files, context)


def remaining(schema: Schema, of_files: Sequence[Sequence[Deletion]]) -> list[Expr | None]:
    """For each file what its rows must meet that are of no deletion of it; None: they all remain."""
    return [rendered_unless_all(remains(schema, deletions), DATAFUSION) for deletions in of_files]


class JobInputs:
    """The inputs of one job; `go_on` raises when it is to stop."""

    def __init__(
        self, objects: ObjectStore, table: str, job: CompactionJob, go_on: Callable[[], object]
    ) -> None:
        self._objects = objects
        self._table = table
        self._job = job
        self._go_on = go_on
        self._copies: dict[str, Path] = {}

    def verify(self) -> None:
        """As `verified`, for inputs that others merge from where they are."""
        self.check_sizes()
        self._check_digests()
        self._check_footers()

    @contextmanager
    def verified(self, folder: Path) -> Iterator[list[str]]:
        """Holds inputs against what is recorded of them: sizes, every byte of those with a digest, footers.

        Gives where the merge reads them. Files of this machine are read first, which brings them into its
        memory. Those elsewhere are copied below `folder` while they are read, so that each is fetched once,
        where the disk has room; else they are read while the merge runs. Raises `ObjectNotFound`,
        `ObjectDamaged`, or `InvalidData` with the file and both counts of rows.
        """
        self.check_sizes()
        places = [self._objects.uri(item.filename) for item in self._job.inputs]
        if self._objects.url.startswith("file:"):
            self._check_digests()
            self._check_footers()
            yield places
        elif self._fits(folder):
            self._copies = {item.filename: folder / "inputs" / item.filename for item in self._job.inputs}
            self._copy()
            self._check_footers()
            yield [str(path) for path in self._copies.values()]
            return
        else:
            with ThreadPoolExecutor(1, thread_name_prefix="dormouse-digests") as thread:
                found = thread.submit(self._check_digests)
                try:
                    yield places
                except Exception:
                    found.result()  # what the merge failed at may be the damage, which is named better
                    raise
                found.result()
        # one that vanished meanwhile would have been merged as if it had no rows
        self.check_sizes()
        self._check_footers()

    def _fits(self, folder: Path) -> bool:
        """Whether all can be verified by their copies, and these leave most of the disk to others."""
        if not all(item.digest and item.byte_count for item in self._job.inputs):
            return False
        byte_count = sum(item.byte_count or 0 for item in self._job.inputs)
        return byte_count <= min(COPIED_BYTES_MAX, disk_usage(folder).free // COPIED_SHARE)

    def _copy(self) -> None:
        def copy(item: CompactionInput) -> None:
            path = self._copies[item.filename]
            path.parent.mkdir(parents=True, exist_ok=True)
            self._compare(item, *copied(self._objects, item.filename, path, self._go_on))

        with ThreadPoolExecutor(COPIED_AT_ONCE, thread_name_prefix="dormouse-inputs") as threads:
            for _ in threads.map(copy, self._job.inputs):
                pass

    def check_sizes(self) -> None:
        """Whether all are there, with the sizes that are recorded; `ObjectNotFound`, `ObjectDamaged`."""
        for item in self._job.inputs:
            self._compare(item, self._objects.size(item.filename))

    def _check_footers(self) -> None:
        """Last, as a damaged footer, which pyarrow trusts, can end the process."""
        for item in self._job.inputs:
            try:
                found = self._row_count(item)
            except InvalidData as error:
                cause = one_line(error.__cause__ or error)
                raise self._damaged(item, f"cannot be read as Parquet: {cause}") from error
            if item.whole and item.exact and found != item.row_count:
                raise InvalidData(
                    f"file {item.filename!r} has {found:,} rows; its reference tells {item.row_count:,}"
                )

    def _row_count(self, item: CompactionInput) -> int:
        name, objects = item.filename, self._objects
        if item.filename in self._copies:
            path = self._copies[item.filename]
            name, objects = path.name, open_store(path.parent)
        with parquet_object(objects, name) as file:
            return int(file.metadata.num_rows)

    def _check_digests(self) -> None:
        for item in self._job.inputs:
            self._go_on()
            if item.digest is not None:
                self._compare(item, *digest_of_object(self._objects, item.filename, self._go_on))

    def _compare(self, item: CompactionInput, size: int, digest: bytes | None = None) -> None:
        written = WrittenObject(item.filename, item.byte_count or None, item.digest)
        if fault := compared(written, size, digest):
            raise self._damaged(item, fault.text)

    def _damaged(self, item: CompactionInput, fault: str) -> ObjectDamaged:
        return ObjectDamaged(self._table, self._job.partition_id, item.filename, fault)


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
    known = [one.last for one in inputs if one.last is not None]
    last = max(known, default=0)
    is_open = found.open_sequence is not None and found.open_sequence < last
    if is_open or len(known) < len(inputs):
        return False
    return all(_is_newer(context, name, last) for name in found.files)


def _is_newer(context: TableContext, filename: str, last: int) -> bool:
    """Whether all rows of a file are of loads that began after those of the job."""
    try:
        first = places_of(context.objects, filename).first
    except ObjectNotFound:
        return False  # collected meanwhile: its rows are in another file, which was not seen
    return first is not None and first > last


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

    @staticmethod
    def committed(job: CompactionJob, name: str, facts: FileFacts) -> CompactionResult:
        return CompactionResult(
            job.job_id,
            job.partition_id,
            "committed",
            files_read=len(job.inputs),
            rows_read=job.row_count,
            rows_written=facts.row_count,
            filename=name if facts.row_count else None,
        )


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


class _NoRowsLeft(Exception):
    """The merge left no rows: there is no output to publish."""


def staged_file(context: TableContext, name: str, write: Callable[[Path], FileFacts]) -> FileFacts:
    """Publishes what is written as an object, unless it has no rows."""
    try:
        with context.objects.staged(name) as path:
            facts = write(path)
            if not facts.row_count:
                raise _NoRowsLeft
    except _NoRowsLeft:
        pass
    return facts


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
    return CompactionResult.committed(job, name, facts)


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

    def merged(path: Path) -> FileFacts:
        of_inputs = deletions.of_inputs
        inputs = JobInputs(context.objects, context.table.name, job, cancellation.check)
        with inputs.verified(path.parent) as places:
            facts = merge_inputs(context, job, places, path, region_of(context, job), now_ms, of_inputs)
        check_output(job, context.properties, facts.row_count, deletes=any(of_inputs))
        cancellation.check()
        return facts

    facts = staged_file(context, name, merged)
    if facts.row_count:
        context.objects.put(name + SKETCHES_SUFFIX, facts.sketches)
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
    region: Region | None,
    now_ms: int,
    deletions: Sequence[Sequence[Deletion]],
) -> FileFacts:
    """Merges the rows that a job's inputs, read at `places`, have in a region; `deletions` are of each."""
    schema, properties = context.schema, context.properties
    if not is_keyed(properties):
        return merge_sorted(
            places,
            schema,
            path,
            region=region,
            properties=properties,
            now_ms=now_ms,
            store=context.objects,
            remains=remaining(schema, deletions),
            row_bytes=job.row_bytes,
        )
    # of rows that hide no older ones no marks are left: these would keep the keys
    both = [parted(some, hides=properties.newest_by is not None) for some in deletions]
    return merge_newest(
        places,
        KeyedMerge(schema, properties, now_ms, forgets_marks(context, job)),
        path,
        region=region,
        store=context.objects,
        remains=remaining(schema, [others for _, others in both]),
        unmarked=remaining(schema, [hiding for hiding, _ in both]),
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
