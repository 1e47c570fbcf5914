"""A large compaction job as several tasks: each merges a range of keys, and the last joins their files.

The ranges are of the first row key, in their order, so that what the tasks write needs no further merge. The
joined file alone is committed: to readers, writers and other jobs it is a job of one output, as any is.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Protocol, cast

from dormouse.data.quantiles import KeyQuantiles
from dormouse.data.region_sketches import load_sketches
from dormouse.data.sketches import FileSketches, merge
from dormouse.errors import InvalidData, InvalidRange, JobFailed, ObjectNotFound
from dormouse.model.region import Region
from dormouse.model.schema import Field
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.reading.deletions import Deletion
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    CompactionResult,
    NoRowsLeft,
    commit_output,
    job_failed,
    merge_inputs,
    region_of,
    run_compaction,
)
from dormouse.writing.ingest_commit import check_output
from dormouse.writing.job_inputs import JobDeletions, JobInputs
from dormouse.writing.joined_files import ColumnsDiffer, join_files
from dormouse.writing.parquet_file import FileFacts, file_facts

logger = logging.getLogger(__name__)


class Task(Protocol):
    """A piece of a job, which any process can run that has the table's services."""

    def run(self, context: TableContext) -> Any: ...


RunTasks = Callable[[TableContext, Sequence[Task]], list[Any]]
"""Runs tasks beside each other; when all have ended gives their results, or raises the first one's error."""


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """Holds a job's inputs against what is recorded of them, each once, while others merge them."""

    job: CompactionJob

    def run(self, context: TableContext) -> None:
        _inputs(context, self.job).verify()


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """The file of a range of a job's rows."""

    name: str
    row_count: int
    digest: bytes | None
    marks: int


@dataclass(frozen=True, slots=True)
class MergeRange:
    """Merges the rows of a range; gives None when none are left. `deletions` are those of each input."""

    job: CompactionJob
    attempt: WriteAttempt
    region: Region
    now_ms: int
    deletions: tuple[tuple[Deletion, ...], ...]

    def run(self, context: TableContext) -> WrittenRange | None:
        name = _own_name(self.attempt, self.job)
        try:
            with context.objects.staged(name) as path:
                facts = merge_inputs(
                    context,
                    self.job,
                    [context.objects.uri(item.filename) for item in self.job.inputs],
                    path,
                    region=self.region,
                    now_ms=self.now_ms,
                    deletions=self.deletions,
                )
                if not facts.row_count:
                    raise NoRowsLeft
        except NoRowsLeft:
            return None
        return WrittenRange(name, facts.row_count, facts.digest, facts.marks)


@dataclass(frozen=True, slots=True)
class JoinRanges:
    """Makes the files of a job's ranges, at least one, its output, which is given with its name."""

    job: CompactionJob
    attempt: WriteAttempt
    ranges: tuple[WrittenRange, ...]

    def run(self, context: TableContext) -> tuple[str, FileFacts]:
        name = _own_name(self.attempt, self.job)
        with context.objects.staged(name) as path:
            with ExitStack() as opened:
                files = [opened.enter_context(context.objects.reader(one.name)) for one in self.ranges]
                digests = join_files(files, path)
            for one, digest in zip(self.ranges, digests, strict=True):
                if digest != one.digest:
                    raise JobFailed(f"{one.name!r} is not as it was just written")
            found = file_facts(path, context.stored_schema)
            if found.row_count != sum(one.row_count for one in self.ranges):
                raise JobFailed(f"the output of a job has {found.row_count:,} rows, which its parts have not")
        context.objects.put(name + SKETCHES_SUFFIX, found.sketches)
        return name, replace(found, marks=sum(one.marks for one in self.ranges))


@dataclass(frozen=True, slots=True)
class WholeJob:
    """A job that cannot be divided after all."""

    job: CompactionJob
    now_ms: int

    def run(self, context: TableContext) -> CompactionResult:
        return run_compaction(context, self.job, self.now_ms)


def key_ranges(context: TableContext, job: CompactionJob, count: int) -> list[Region]:
    """Regions that divide a job's rows into about so many parts of about as many, by the first row key.

    In their order; fewer where few keys are known of, or many rows have the same.
    """
    context = context.followed()  # as the job's run does: keys may have been renamed
    field, region = context.schema.row_keys[0], region_of(context, job) or Region()
    known: list[FileSketches] = []
    for item in job.inputs:
        try:
            known.append(load_sketches(context.objects, item.filename, context.schema))
        except (InvalidData, ObjectNotFound) as error:
            logger.warning("the keys of %s are not known to divide a job by: %s", item.filename, error)
    return list(_divided(field, merge(field, known), region, count)) if known else [region]


def run_divided(
    context: TableContext, job: CompactionJob, regions: Sequence[Region], now_ms: int, run_tasks: RunTasks
) -> CompactionResult:
    """Merges a job's files by ranges of keys, and commits the output in their place.

    As `dormouse.writing.compaction_job.run_compaction`, which runs the whole of a job.
    """
    try:
        try:
            return _run(context, job, regions, now_ms, run_tasks)
        except ColumnsDiffer:
            [result] = run_tasks(context, [WholeJob(job, now_ms)])
            return cast("CompactionResult", result)
    except Exception as error:
        return job_failed(context, job, error)


def _run(
    context: TableContext, job: CompactionJob, regions: Sequence[Region], now_ms: int, run_tasks: RunTasks
) -> CompactionResult:
    # a task that Spark repeated, or ran twice, may still write
    with context.writing(leftovers=True) as (current, attempt):
        # before anything is read: what is deleted from here on is deleted from the output, too
        deletions = JobDeletions.of(current, job)
        shaped = deletions.context
        writes = replace(attempt, schema_version=shaped.schema.version)
        merges = [MergeRange(job, writes, region, now_ms, deletions.of_inputs) for region in regions]
        _, *written = run_tasks(shaped, [CheckInputs(job), *merges])
        # one that vanished while it was merged would have been merged as if it had no rows
        _inputs(shaped, job).check_sizes()
        ranges = tuple(one for one in written if one is not None)
        name, facts = "", FileFacts(0)
        if ranges:
            [(name, facts)] = run_tasks(shaped, [JoinRanges(job, writes, ranges)])
        check_output(job, shaped.properties, facts.row_count, deletes=any(deletions.of_inputs))
        commit_output(shaped, job, attempt, name, facts, deletions.till, leftovers=True)
    shaped.attempts.delete_leftovers(attempt, shaped.store.own)
    return CompactionResult(
        job.job_id,
        job.partition_id,
        "committed",
        files_read=len(job.inputs),
        rows_read=job.row_count,
        rows_written=facts.row_count,
        filename=name if facts.row_count else None,
    )


def _inputs(context: TableContext, job: CompactionJob) -> JobInputs:
    return JobInputs(context.objects, context.table.name, job, lambda: None)


def _own_name(attempt: WriteAttempt, job: CompactionJob) -> str:
    """Of no other run of the same task: Spark may run it twice, also at once."""
    return attempt.object_name(f"{job.partition_id}-{uuid.uuid4().hex}")


def _divided(field: Field, keys: KeyQuantiles, region: Region, count: int) -> Iterator[Region]:
    """In halves of halves, of which some may be of one key."""
    point = keys.split_point(region.range(field.name)) if count > 1 else None
    try:
        halves = () if point is None else region.split(field, point)
    except InvalidRange:
        halves = ()
    parts = (_divided(field, keys, half, (count + 1) // 2) for half in halves)
    yield from chain.from_iterable(parts) if halves else [region]
