"""A large compaction job as several tasks: each merges a range of keys, and the last joins their files.

The ranges are of the first row key, in their order, so that what the tasks write needs no further merge. The
joined file alone is committed: to readers, writers and other jobs it is a job of one output, as any is.
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

# Parquet files made one, whose row groups follow each other: bytes are copied, and no value is decoded.

# of a file
_ROWS, _GROUPS = 3, 4
# of a row group
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7
# of a column in it
_CHUNK_OFFSET, _METADATA, _OFFSET_INDEX, _OFFSET_INDEX_BYTES, _COLUMN_INDEX = 2, 3, 4, 5, 6
_OFFSETS = (9, 10, 11, 14)
"""In its metadata: of data pages, of index pages, of the dictionary, of the bloom filter."""
_PAGE_PLACES, _PAGE_OFFSET = 1, 1
_ORDINAL_MAX = (1 << 15) - 1


class ColumnsDiffer(JobFailed):
    """Files whose columns are not written alike cannot be joined: of one a column may be null, say."""


def join_files(sources: Sequence[BinaryIO], output: Path) -> list[bytes]:
    """Writes the rows of Parquet files, at least one, as one file in their order; gives each one's digest.

    The sources can seek, and are read once, but for their ends. Raises `JobFailed` when they do not say the
    same of their columns, or cannot be read; then nothing is left at `output`.
    """
    try:
        with output.open("wb") as out:
            return _join([_Source.of(file) for file in sources], out)
    except (NotUnderstood, LookupError, TypeError, ValueError) as error:
        output.unlink(missing_ok=True)
        raise JobFailed(f"a file to be joined with others is not as it was written: {error}") from error
    except BaseException:
        output.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that is read: `places` are its bytes from the first offset index to its footer.

    `end` is where its pages end, and what else is copied as it is.
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
        # where something follows the offset indexes, they are copied with it, and not used
        end = first if last < first else start
        return _Source(file, footer, end, first, _read(file, first, start - first))

    @property
    def of_columns(self) -> dict[int, Any]:
        """What it says of all its rows."""
        return {number: field for number, field in self.footer.items() if number not in (_ROWS, _GROUPS)}

    def offset_index(self, chunk: Kept) -> Kept | None:
        """Where the pages of a column in a row group are."""
        if _OFFSET_INDEX not in chunk:
            return None
        start = chunk[_OFFSET_INDEX][1] - self.places_from
        return Reading(self.places[start : start + chunk[_OFFSET_INDEX_BYTES][1]]).kept()

    def copied(self, out: BinaryIO) -> bytes:
        """Appends all from behind its beginning to `end`; gives the digest of the whole file."""
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
            raise ColumnsDiffer("a file to be joined with others has columns that are not written alike")
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
    """The structs of a list that a struct has."""
    found: list[Kept] = struct[number][1][1] if number in struct else []
    return found


def _offsets(chunk: Kept) -> list[int]:
    """Where all is that a column has in a row group, but for its offset index."""
    metadata: Kept = chunk[_METADATA][1]
    places = [metadata.get(number) for number in _OFFSETS] + [chunk.get(_COLUMN_INDEX)]
    return [place[1] for place in places if place is not None]


def _move(struct: Kept, numbers: Iterable[int], by: int) -> None:
    """Of some fields that are offsets; some writers have 0 for one that is not known."""
    for number in numbers:
        if number in struct and struct[number][1]:
            kind, offset = struct[number]
            struct[number] = kind, offset + by


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)


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
        places = [context.objects.uri(item.filename) for item in self.job.inputs]

        def merged(path: Path) -> FileFacts:
            return merge_inputs(context, self.job, places, path, self.region, self.now_ms, self.deletions)

        facts = staged_file(context, name, merged)
        return WrittenRange(name, facts.row_count, facts.digest, facts.marks) if facts.row_count else None


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
    return CompactionResult.committed(job, name, facts)


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
