"""The compaction task, which merges the files of one job into one file and commits it.

It compares the inputs with their recorded sizes, digests and row counts, so that damage does not spread into
new files.
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

from dormouse.data.object_access import parquet_object
from dormouse.errors import (
    CommitOutcomeUnknown,
    InvalidCommitRequest,
    InvalidData,
    JobFailed,
    ObjectDamaged,
    one_line,
)
from dormouse.model.file_reference import FileReference, ReplaceFileReferencesRequest
from dormouse.model.region import Region
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, is_keyed
from dormouse.objects.fault import WrittenObject, compared, copied, digest_of_object
from dormouse.objects.inlined import place_of
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.objects.store import ObjectStore, open_store
from dormouse.postgres.session import Isolation
from dormouse.postgres.transaction import run_transaction
from dormouse.reading.checked_files import on_current
from dormouse.reading.row_filter import parted, remains, rendered_unless_all
from dormouse.reading.scan_session import DATAFUSION, look_at
from dormouse.reading.where import Deletion, Reach, deletions_of
from dormouse.state.commits.requests import ReplaceFileReferences
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts
from dormouse.state.files.compaction_jobs import CompactionInput, CompactionJob
from dormouse.writing.deletion_marks import forgets_marks
from dormouse.writing.inlining import with_joined
from dormouse.writing.merge import KeyedMerge, merge_newest, merge_sorted
from dormouse.writing.parquet_file import FileFacts

if TYPE_CHECKING:
    import psycopg
    from datafusion import Expr

    from dormouse.model.region import Region
    from dormouse.reading.where import Deletion

COPIED_BYTES_MAX = 4 * 2**30
COPIED_SHARE = 8
"""The divisor of the free disk that gives the limit of copies. Larger inputs are fetched twice instead."""
COPIED_AT_ONCE = 8
logger = logging.getLogger(__name__)
Outcome = Literal["committed", "looked", "superseded", "retry", "given_up"]
COMMIT_TRIES_MAX = 5
ROWS_GONE_MANY = 0.1
"""The share of a job's rows above which deleted rows alone make a merge worthwhile."""


# The deletions that a job applies: all that exist when it begins, each to the files that are older than it.


@dataclass(frozen=True, slots=True)
class JobDeletions:
    """The deletions that a job applies to each of its inputs.

    `till` is the number of the table's last deletion. `of_inputs` has the deletions of each input. `context`
    has the job's schema, which is at least as new as the schemas of the deletions and inputs.
    """

    till: int
    of_inputs: tuple[tuple[Deletion, ...], ...]
    context: TableContext = field(repr=False, compare=False)

    @staticmethod
    def of(context: TableContext, job: CompactionJob) -> JobDeletions:
        """Returns the deletions that exist now. Deletions recorded later apply to the job's output."""
        found = context.store.deletions_of([item.filename for item in job.inputs])
        context, pending = on_current(
            context, lambda now: (now, deletions_of(now.schema, found.deletions, objects=now.objects))
        )
        reach = Reach(context.schema, pending)
        files = tuple(reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files)
        return JobDeletions(found.till, files, context)


def remaining(schema: Schema, of_files: Sequence[Sequence[Deletion]]) -> list[Expr | None]:
    """Returns, for each file, a condition that selects the rows that deletions leave; None if all stay."""
    return [rendered_unless_all(remains(schema, deletions), DATAFUSION) for deletions in of_files]


class JobInputs:
    """The inputs of one job, and the checks of their bytes. `go_on` raises an error if the job must stop."""

    def __init__(
        self, objects: ObjectStore, table: str, job: CompactionJob, go_on: Callable[[], object]
    ) -> None:
        self._objects = objects
        self._table = table
        self._job = job
        self._go_on = go_on
        self._copies: dict[str, Path] = {}

    def verify(self) -> None:
        """Runs the checks of `verified` without copying files, while other processes merge the inputs."""
        self.check_sizes()
        self._check_digests()
        self._check_footers()

    @contextmanager
    def verified(self, folder: Path) -> Iterator[list[str]]:
        """Compares the inputs with what is recorded of them, and yields the paths or URIs to merge from.

        It compares sizes, digests (where recorded) and the row counts of the footers:

        - Local files are read before the merge, which also brings them into the page cache.
        - Remote files are copied below `folder` while they are checked, so that each is fetched once.
        - Remote files for which the disk has no room are checked while the merge runs.

        Raises `ObjectNotFound`, `ObjectDamaged`, or `InvalidData` with the file and both row counts.
        """
        self.check_sizes()
        places = [place_of(self._objects, item.filename) for item in self._job.inputs]
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
                    found.result()  # damage may be why the merge failed; this error names the file
                    raise
                found.result()
        # a file that was deleted during the merge would have been merged as if it had no rows
        self.check_sizes()
        self._check_footers()

    def _fits(self, folder: Path) -> bool:
        """Returns whether the inputs can be copied: their digests are known and they fit on the disk."""
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
        """Raises `ObjectNotFound` for a missing input, and `ObjectDamaged` for an unexpected size."""
        for item in self._job.inputs:
            self._compare(item, self._objects.size(item.filename))

    def _check_footers(self) -> None:
        """Compares the row counts in the footers. Runs last: a damaged footer can crash pyarrow."""
        for item in self._job.inputs:
            try:
                found = self._row_count(item)
            except InvalidData as error:
                cause = one_line(error.__cause__ or error)
                raise self._damaged(item, f"cannot be read as Parquet: {cause}") from error
            if item.whole and item.exact and found != item.row_count:
                raise InvalidData(
                    f"file {item.filename!r} has {found:,} rows; its reference records {item.row_count:,}"
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
    """Raises `InvalidData` if an output has more rows than its inputs, or fewer without a reason.

    `deletes` is such a reason. Checks nothing unless the row counts of all inputs are exact.
    """
    changed = deletes or properties.filter or properties.aggregate or is_keyed(properties)
    exact = all(item.exact for item in job.inputs)
    if exact and (rows_written > job.row_count or (rows_written < job.row_count and not changed)):
        names = ", ".join(repr(item.filename) for item in job.inputs)
        raise InvalidData(
            f"the merge of {names} wrote {rows_written:,} rows; the references record {job.row_count:,}"
        )


@dataclass(frozen=True, slots=True)
class CompactionResult:
    """The result of one run of a job. `rows_read` is the sum of the row counts of the job's references.

    Outcomes:

    - `committed`: the output replaced the inputs.
    - `looked`: deletions hide few rows, so the files stay as they are.
    - `superseded`: another run committed the job or released its files.
    - `retry`: the job failed and will run again.
    - `given_up`: the job failed in its last attempt.
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
    """A signal that stops running tasks, and ends their attempts so that they cannot commit."""

    def __init__(self) -> None:
        self._stopped = threading.Event()
        self._running: dict[str, WriteAttempt] = {}

    @property
    def is_cancelled(self) -> bool:
        return self._stopped.is_set()

    def stop(self) -> None:
        self._stopped.set()

    def discard(self, attempts: WriteAttempts) -> None:
        """Discards the attempts of tasks that still run after `stop`, without waiting for the tasks."""
        for attempt in list(self._running.values()):
            attempts.discard(attempt)

    def begin(self, attempt: WriteAttempt) -> None:
        self._running[attempt.attempt_id] = attempt
        self.check()

    def end(self, attempt: WriteAttempt) -> None:
        self._running.pop(attempt.attempt_id, None)

    def check(self) -> None:
        """Raises `JobFailed` after `stop` was called."""
        if self.is_cancelled:
            raise JobFailed("the compaction was interrupted")


class _NoRowsLeft(Exception):
    """An exception that ends the staging of an output without rows, so that it is not published."""


def staged_file(context: TableContext, name: str, write: Callable[[Path], FileFacts]) -> FileFacts:
    """Stores the file that `write` writes as the object `name`, unless the file has no rows."""
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

    A failure is returned in the result, and raised only after a cancellation: the job is put back, or given
    up after its last attempt. Several runs of a job may overlap, in any processes. Then one run commits, and
    the other runs leave nothing behind.
    """
    cancellation = cancellation or Cancellation()
    try:
        return _run(context, job, now_ms, cancellation)
    except Exception as error:
        # `job_failed` also recognizes a job that another run committed, which is not a failure
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
            # before anything is read: later deletions apply to the output, too
            deletions = JobDeletions.of(current, job)
            shaped = deletions.context
            name = replace(attempt, schema_version=shaped.schema.version).object_name(job.partition_id)
            facts = _write(shaped, job, name, now_ms, cancellation, deletions)
            commit_output(shaped, job, attempt, name, facts, deletions.till)
        finally:
            cancellation.end(attempt)
    return CompactionResult.committed(job, name, facts)


def _is_worth_merging(context: TableContext, job: CompactionJob) -> bool:
    """Returns whether many rows of a job are deleted, or a file has more than `deletions_max` deletions."""
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
    """Writes the output and its sketches as objects, or nothing when no rows are left."""

    def merged(path: Path) -> FileFacts:
        of_inputs = deletions.of_inputs
        context.inlined.fetch(item.filename for item in job.inputs)
        inputs = JobInputs(context.objects, context.table.name, job, cancellation.check)
        with inputs.verified(path.parent) as places:
            joined = with_joined(context, job, places, of_inputs, path.parent)
            facts = merge_inputs(context, job, joined[0], path, region_of(context, job), now_ms, joined[1])
        check_output(job, context.properties, facts.row_count, deletes=any(of_inputs))
        cancellation.check()
        return facts

    facts = staged_file(context, name, merged)
    if facts.row_count:
        context.objects.put(name + SKETCHES_SUFFIX, facts.sketches)
    return facts


def region_of(context: TableContext, job: CompactionJob) -> Region | None:
    """Returns the region to which a job's rows are limited, or None if its inputs need no limit."""
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
    """Merges the rows of a job's inputs that lie in a region, into the file `path`.

    `places` are the paths or URIs of the inputs. `deletions` has the deletions to apply to each input.
    """
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
    # a deleted row that hides no older row leaves no mark: marks would keep its key in the table
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
    """Replaces a job's inputs by its output, in one commit. `leftovers`: see `WriteAttempts.finish`.

    Uses the commit queue if the table commits asynchronously and the request is not too large for it.
    """
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
        # no other attempt has this commit id: it expires, and matters only while its outcome is unknown
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
    """Returns the result of a job that was given up because every process that ran it died."""
    return CompactionResult(job.job_id, job.partition_id, "given_up", error=job.runners_died)


def job_failed(context: TableContext, job: CompactionJob, error: Exception) -> CompactionResult:
    """Puts back a failed job, or gives it up after its last attempt. Returns the result of the run."""
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
