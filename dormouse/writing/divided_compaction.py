"""Large compaction jobs that are divided into tasks.

Each task merges one range of the first row key, and the last task joins the files. The ranges are in order,
so that their files need no further merge. Only the joined file is committed, as the one output of the job.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from io import SEEK_END
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

from dormouse.data.sketches import FileSketches, KeyQuantiles, load_sketches, merge
from dormouse.errors import InvalidData, InvalidRange, JobFailed, ObjectNotFound
from dormouse.model.region import Region
from dormouse.model.schema import Field
from dormouse.objects.fault import digest_of
from dormouse.objects.inlined import place_of
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.reading.page_index import (
    I16,
    I32,
    I64,
    LIST,
    MAGIC,
    STRUCT,
    TAIL_BYTES,
    Kept,
    NotUnderstood,
    Reading,
    footer_bytes,
    written,
)
from dormouse.reading.where import Deletion
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.state.files.compaction_jobs import CompactionJob
from dormouse.writing.compaction_job import (
    CompactionResult,
    JobDeletions,
    JobInputs,
    check_output,
    commit_output,
    job_failed,
    merge_inputs,
    region_of,
    run_compaction,
    staged_file,
)
from dormouse.writing.parquet_file import FileFacts, file_facts

# Joins Parquet files by appending their row groups: copies bytes and decodes no values.

# field numbers of the Parquet footer, from parquet.thrift: FileMetaData
_ROWS, _GROUPS = 3, 4
# RowGroup
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7
# ColumnChunk
_CHUNK_OFFSET, _METADATA, _OFFSET_INDEX, _OFFSET_INDEX_BYTES, _COLUMN_INDEX = 2, 3, 4, 5, 6
_OFFSETS = (9, 10, 11, 14)
"""The fields of ColumnMetaData with offsets: of data and index pages, dictionary and bloom filter."""
_PAGE_PLACES, _PAGE_OFFSET = 1, 1
_ORDINAL_MAX = (1 << 15) - 1


class ColumnsDiffer(JobFailed):
    """An error for files that cannot be joined, as their columns differ, for example in being nullable."""


def join_files(sources: Sequence[BinaryIO], output: Path) -> list[bytes]:
    """Joins one or more Parquet files, in order, into one file; returns the digest of each source.

    The sources must support seeking. Each is read once, and its end twice. Raises `JobFailed` when a source
    cannot be read, and `ColumnsDiffer` when their columns differ; then nothing is left at `output`.
    """
    try:
        with output.open("wb") as out:
            return _join([_Source.of(file) for file in sources], out)
    except (NotUnderstood, AttributeError, LookupError, TypeError, ValueError) as error:
        output.unlink(missing_ok=True)
        raise JobFailed(f"a file to be joined is damaged: {error}") from error
    except BaseException:
        output.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Source:
    """A Parquet file to join with others. Its bytes before `end`, with all pages, are copied unchanged.

    `places` has the bytes from the first offset index to the footer; `places_from` is their offset.
    """

    file: BinaryIO
    footer: Kept
    end: int
    places_from: int
    places: bytes

    @staticmethod
    def of(file: BinaryIO) -> _Source:
        size = file.seek(0, SEEK_END)
        start = size - TAIL_BYTES - footer_bytes(_read(file, size - TAIL_BYTES, TAIL_BYTES))
        footer = Reading(_read(file, start, size - TAIL_BYTES - start)).kept()
        chunks = [chunk for group in _structs(footer, _GROUPS) for chunk in _structs(group, _COLUMNS)]
        first = min((chunk[_OFFSET_INDEX][1] for chunk in chunks if _OFFSET_INDEX in chunk), default=start)
        last = max((offset for chunk in chunks for offset in _offsets(chunk)), default=0)
        # when data follows the offset indexes, they are copied with it, and stay unused
        end = first if last < first else start
        return _Source(file, footer, end, first, _read(file, first, start - first))

    @property
    def of_columns(self) -> dict[int, Any]:
        """The fields of the footer that describe the whole file, without its rows and row groups."""
        return {number: field for number, field in self.footer.items() if number not in (_ROWS, _GROUPS)}

    def offset_index(self, chunk: Kept) -> Kept | None:
        """Returns the offset index of a column chunk, or None when it has none."""
        if _OFFSET_INDEX not in chunk:
            return None
        start = chunk[_OFFSET_INDEX][1] - self.places_from
        return Reading(self.places[start : start + chunk[_OFFSET_INDEX_BYTES][1]]).kept()

    def copied(self, out: BinaryIO) -> bytes:
        """Copies the bytes between the magic number and `end` to `out`. Returns the whole file's digest."""
        at = 0

        def write(data: bytes) -> None:
            nonlocal at
            out.write(memoryview(data)[max(0, len(MAGIC) - at) : max(0, self.end - at)])
            at += len(data)

        self.file.seek(0)
        return digest_of(self.file, write)


def _join(sources: Sequence[_Source], out: BinaryIO) -> list[bytes]:
    root = dict(sources[0].footer)
    groups: list[Kept] = []
    indexes: list[tuple[Kept, bytes]] = []
    digests = []
    out.write(MAGIC)
    for source in sources:
        if source.of_columns != sources[0].of_columns:
            raise ColumnsDiffer("files to be joined have different columns")
        by = out.tell() - len(MAGIC)
        digests.append(source.copied(out))
        for group in _structs(source.footer, _GROUPS):
            _move(group, (_GROUP_OFFSET,), by)
            if _ORDINAL in group and len(groups) <= _ORDINAL_MAX:
                group[_ORDINAL] = I16, len(groups)
            else:
                group.pop(_ORDINAL, None)
            groups.append(group)
            for chunk in _structs(group, _COLUMNS):
                _move(chunk, (_CHUNK_OFFSET, _COLUMN_INDEX), by)
                _move(chunk[_METADATA][1], _OFFSETS, by)
                if (index := source.offset_index(chunk)) is not None:
                    for place in _structs(index, _PAGE_PLACES):
                        _move(place, (_PAGE_OFFSET,), by)
                    indexes.append((chunk, written(index)))
    for chunk, data in indexes:
        chunk[_OFFSET_INDEX], chunk[_OFFSET_INDEX_BYTES] = (I64, out.tell()), (I32, len(data))
        out.write(data)
    root[_ROWS] = I64, sum(source.footer[_ROWS][1] for source in sources)
    root[_GROUPS] = LIST, (STRUCT, groups)
    footer = written(root)
    out.write(footer + len(footer).to_bytes(4, "little") + MAGIC)
    return digests


def _structs(struct: Kept, number: int) -> list[Kept]:
    """Returns the structs that the field `number` lists, or an empty list if there is no such field."""
    found: list[Kept] = struct[number][1][1] if number in struct else []
    return found


def _offsets(chunk: Kept) -> list[int]:
    """Returns the offsets of all parts of a column chunk, without its offset index."""
    metadata: Kept = chunk[_METADATA][1]
    places = [metadata.get(number) for number in _OFFSETS] + [chunk.get(_COLUMN_INDEX)]
    return [place[1] for place in places if place is not None]


def _move(struct: Kept, numbers: Iterable[int], by: int) -> None:
    """Adds `by` to the offsets in the fields `numbers`, except to 0, which can mean an unknown offset."""
    for number in numbers:
        if number in struct and struct[number][1]:
            kind, offset = struct[number]
            struct[number] = kind, offset + by


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


logger = logging.getLogger(__name__)


class Task(Protocol):
    """A part of a job that any process with the table's services can run."""

    def run(self, context: TableContext) -> Any: ...


RunTasks = Callable[[TableContext, Sequence[Task]], list[Any]]
"""A function that runs tasks in parallel, and returns their results or raises the error of one."""


@dataclass(frozen=True, slots=True)
class CheckInputs:
    """A task that checks a job's inputs against the recorded facts, while other tasks merge the inputs."""

    job: CompactionJob

    def run(self, context: TableContext) -> None:
        _inputs(context, self.job).verify()


@dataclass(frozen=True, slots=True)
class WrittenRange:
    """The facts about a file with the rows of one range of a job."""

    name: str
    row_count: int
    digest: bytes | None
    marks: int


@dataclass(frozen=True, slots=True)
class MergeRange:
    """A task that merges the rows of one range into a file. Its result is None if no rows are left.

    `deletions` has the deletions to apply to each input.
    """

    job: CompactionJob
    attempt: WriteAttempt
    region: Region
    now_ms: int
    deletions: tuple[tuple[Deletion, ...], ...]

    def run(self, context: TableContext) -> WrittenRange | None:
        name = _own_name(self.attempt, self.job)
        places = [place_of(context.objects, item.filename) for item in self.job.inputs]

        def merged(path: Path) -> FileFacts:
            deletions = [[one.bound(context.objects) for one in some] for some in self.deletions]
            return merge_inputs(context, self.job, places, path, self.region, self.now_ms, deletions)

        facts = staged_file(context, name, merged)
        return WrittenRange(name, facts.row_count, facts.digest, facts.marks) if facts.row_count else None


@dataclass(frozen=True, slots=True)
class JoinRanges:
    """A task that joins the files of all ranges. Its result is the name and the facts of the output."""

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
                    raise JobFailed(f"{one.name!r} changed after it was written")
            found = file_facts(path, context.stored_schema)
            if found.row_count != sum(one.row_count for one in self.ranges):
                raise JobFailed(f"the output of a job has {found.row_count:,} rows, unlike its parts")
        context.objects.put(name + SKETCHES_SUFFIX, found.sketches)
        return name, replace(found, marks=sum(one.marks for one in self.ranges))


@dataclass(frozen=True, slots=True)
class WholeJob:
    """A task that runs a whole job without dividing it, for files that cannot be joined."""

    job: CompactionJob
    now_ms: int

    def run(self, context: TableContext) -> CompactionResult:
        return run_compaction(context, self.job, self.now_ms)


def key_ranges(context: TableContext, job: CompactionJob, count: int) -> list[Region]:
    """Returns regions, in order, that divide a job's rows into about `count` similar parts.

    The first row key divides them. There are fewer regions when many rows have equal keys.
    """
    context = context.followed()  # with the current schema, as the run uses: keys may have been renamed
    field, region = context.schema.row_keys[0], region_of(context, job) or Region()
    known: list[FileSketches] = []
    for item in job.inputs:
        try:
            known.append(load_sketches(context.objects, item.filename, context.schema))
        except (InvalidData, ObjectNotFound) as error:
            logger.warning("cannot use the keys of %s to divide a job: %s", item.filename, error)
    return list(_divided(field, merge(field, known), region, count)) if known else [region]


def run_divided(
    context: TableContext, job: CompactionJob, regions: Sequence[Region], now_ms: int, run_tasks: RunTasks
) -> CompactionResult:
    """Merges a job's files by ranges of keys, and replaces them by the output in one commit.

    Like `dormouse.writing.compaction_job.run_compaction`, it returns failures in the result.
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
    # leftovers: a task that Spark repeated may still be writing
    with context.writing(leftovers=True) as (current, attempt):
        # before anything is read: later deletions apply to the output, too
        deletions = JobDeletions.of(current, job)
        shaped = deletions.context
        writes = replace(attempt, schema_version=shaped.schema.version)
        merges = [MergeRange(job, writes, region, now_ms, deletions.of_inputs) for region in regions]
        _, *written = run_tasks(shaped, [CheckInputs(job), *merges])
        # a file that was deleted during the merge would have been merged as if it had no rows
        _inputs(shaped, job).check_sizes()
        ranges = tuple(one for one in written if one is not None)
        name, facts = "", FileFacts(0)
        if ranges:
            [(name, facts)] = run_tasks(shaped, [JoinRanges(job, writes, ranges)])
        check_output(job, shaped.properties, facts.row_count, deletes=any(deletions.of_inputs))
        commit_output(shaped, job, attempt, name, facts, deletions.till, leftovers=True)
    shaped.attempts.delete_leftovers(attempt, shaped.store.own)
    return CompactionResult.committed(job, name, facts)


def _inputs(context: TableContext, job: CompactionJob) -> JobInputs:
    return JobInputs(context.objects, context.table.name, job, lambda: None)


def _own_name(attempt: WriteAttempt, job: CompactionJob) -> str:
    """Returns a name unique to this run of a task, as Spark may run a task twice, even at once."""
    return attempt.object_name(f"{job.partition_id}-{uuid.uuid4().hex}")


def _divided(field: Field, keys: KeyQuantiles, region: Region, count: int) -> Iterator[Region]:
    """Yields the parts of a region. Halves it again and again, up to `count` parts or one key a part."""
    point = keys.split_point(region.range(field.name)) if count > 1 else None
    try:
        halves = () if point is None else region.split(field, point)
    except InvalidRange:
        halves = ()
    parts = (_divided(field, keys, half, (count + 1) // 2) for half in halves)
    yield from chain.from_iterable(parts) if halves else [region]
