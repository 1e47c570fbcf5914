"""The two stages of a bulk ingest, as functions that run in Spark's Python workers."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from operator import attrgetter
from typing import Protocol, TypeAlias
from urllib.parse import unquote

import numpy as np
import pyarrow as pa

from dormouse.data.arrow_schema import conform
from dormouse.data.leaf_sorter import LEAF, MEMORY_BYTES, LeafLookup
from dormouse.errors import InvalidData
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.loops import portions
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.objects.store import ObjectStore
from dormouse.sources.data_files import DataFile
from dormouse.sources.source_files import FilePart, parts_of, prepared
from dormouse.spark.worker import check_seen, partition_number, settle
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.ingest import KeyedRows
from dormouse.writing.parquet_file import LeafFiles

SPLIT_BYTES = 64 * 1024 * 1024

# Spark's hash partitioning of integers, to choose a key for each partition.

_SEED = 42
_MASK = 0xFFFFFFFF


def file_splits(files: Sequence[DataFile], schema: Schema) -> list[FilePart]:
    """Returns parts of files of about `SPLIT_BYTES`.

    Raises an error for files that cannot be read or have the wrong columns.
    """
    return list(parts_of([prepared(file, schema) for file in files], SPLIT_BYTES))


class Split(Protocol):
    """Rows that one task reads."""

    def rows(self, schema: Schema, /) -> Iterator[pa.RecordBatch]:
        """Yields the rows, with the columns of the schema."""
        ...


def read_splits(
    numbers: Iterable[pa.RecordBatch], splits: Sequence[Split], schema: Schema
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of some splits, whose numbers are in the first column of the batches."""
    for batch in numbers:
        for number in batch.column(0).to_pylist():
            yield from splits[number].rows(schema)


def keys_of_partitions(partitions: int) -> tuple[int, ...]:
    """Returns one INT for each partition of `repartition(partitions, column)`: a value that Spark sends
    there.
    """
    keys: dict[int, int] = {}
    for number in count():
        keys.setdefault(spark_hash(number) % partitions, number)
        if len(keys) == partitions:
            return tuple(keys[partition] for partition in range(partitions))
    raise AssertionError


def spark_hash(number: int) -> int:
    """Returns `hash(CAST(number AS INT))` of Spark SQL: Murmur3 of 32 bits, with the seed 42.

    https://github.com/apache/spark/blob/v4.0.2/common/unsafe/src/main/java/org/apache/spark/unsafe/hash/Murmur3_x86_32.java
    """
    mixed = _rotated(number * 0xCC9E2D51, 15) * 0x1B873593 & _MASK
    value = (_rotated(_SEED ^ mixed, 13) * 5 + 0xE6546B64) & _MASK
    value ^= 4  # the length in bytes
    value = (value ^ value >> 16) * 0x85EBCA6B & _MASK
    value = (value ^ value >> 13) * 0xC2B2AE35 & _MASK
    value ^= value >> 16
    return value - (1 << 32) if value >> 31 else value


def _rotated(value: int, bits: int) -> int:
    value &= _MASK
    return (value << bits | value >> 32 - bits) & _MASK


TARGET = "target"


# the last blob of a task has no rows, but the number of rows that the task has sent
BLOBS = "target int, rows binary, sent long"


_BLOBS = pa.schema(
    [pa.field(TARGET, pa.int32()), pa.field("rows", pa.binary()), pa.field("sent", pa.int64())]
)


CHUNK_BYTES = 64 * 1024 * 1024


BLOB_BYTES = 16 * 1024 * 1024


FILE, ROW_OF_FILE = "__file__", "__row_of_file__"
"""The columns with a row's file and the row's position in that file, if files have numbers."""


ROWS_OF_TASK_BITS = 40


Blob: TypeAlias = tuple[int, bytearray | None, int | None]
"""One blob as a tuple, with the columns of `BLOBS`: target, rows, and the number of rows sent."""


class Step(Protocol):
    """The work of one task of a stage, on the batches of the task's partition."""

    def run(self, batches: Iterable[pa.RecordBatch], /) -> Iterator[pa.RecordBatch]: ...


@dataclass(frozen=True)
class Targets:
    """The tasks that write files, each for some leaves. Spark's hash sends each of `keys` to a different
    task.
    """

    count: int
    keys: tuple[int, ...]

    @staticmethod
    def of(leaf_count: int, tasks_max: int) -> Targets:
        count = min(leaf_count, tasks_max)
        return Targets(count, keys_of_partitions(count))


@dataclass(frozen=True)
class Scatter:
    """The first stage: turns rows into compressed blobs, each for one target, with the leaf of each row.

    `schema` is the schema of the data; `keyed` adds the columns of a keyed table's files. If several rows
    have equal keys, the last row is kept: the last in the order of tasks, or with `files` in the order of the
    files' numbers.
    """

    schema: Schema
    lookup: LeafLookup
    targets: Targets
    keyed: KeyedRows | None = None
    files: Mapping[str, int] | None = None

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        filled = (batch for batch in batches if batch.num_rows)
        if self.keyed is not None and self.files is not None:
            return self._sent(self._in_order(filled, self.keyed, self.files))
        return self.conformed(conform(batch, self.schema) for batch in filled)

    def conformed(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.keyed is not None:
            batches = self.keyed.stored(batches, partition_number() << ROWS_OF_TASK_BITS)
        return self._sent(batches)

    def _in_order(
        self, batches: Iterable[pa.RecordBatch], keyed: KeyedRows, files: Mapping[str, int]
    ) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for part, file, first_row in _parts_of_files(batch, files):
                first = (file << ROWS_OF_TASK_BITS) + first_row
                yield from keyed.stored([conform(part, self.schema)], first)

    def _sent(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        sent = 0
        for chunk in map(pa.concat_batches, portions(batches, attrgetter("nbytes"), CHUNK_BYTES)):
            sent += chunk.num_rows
            yield from self._cut(chunk)
        if sent:
            yield _blob(self.targets.keys[0], None, sent)

    def _cut(self, chunk: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
        """Yields a chunk's rows as one blob for each target. Rows keep their order within a target."""
        leaves = self.lookup.indexes(chunk)
        chunk = chunk.append_column(LEAF, leaves)
        targets = leaves.to_numpy() % self.targets.count
        counts = np.bincount(targets, minlength=self.targets.count)
        if np.count_nonzero(counts) > 1:
            # numpy sorts integers of two bytes by radix, which is fast
            small = targets.astype(np.uint16) if self.targets.count <= 1 << 16 else targets
            chunk = chunk.take(pa.array(np.argsort(small, kind="stable")))
        starts = np.cumsum(counts) - counts
        for target in np.flatnonzero(counts):
            rows = chunk.slice(int(starts[target]), int(counts[target]))
            yield from _blobs(self.targets.keys[target], rows)


@dataclass(frozen=True)
class SplitScatter:
    """The first stage for files: receives numbers of splits, reads their rows, and scatters the rows."""

    splits: Sequence[Split]
    scatter: Scatter

    def run(self, numbers: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return self.scatter.conformed(read_splits(numbers, self.splits, self.scatter.schema))


@dataclass(frozen=True)
class Gather:
    """The second stage: sorts the rows of a task's leaves, writes them, and returns the files.

    The stage reads a few blobs at a time from an RDD. It does not use `mapInArrow`: Spark bounds its batches
    by rows and not by bytes, so one batch would have all blobs of a task.
    """

    objects: ObjectStore
    schema: Schema
    properties: TableProperties
    partition_ids: pa.StringArray
    attempt: WriteAttempt

    def run(self, blobs: Iterable[Blob]) -> Iterator[Gathered]:
        settle()
        check_seen(self.objects)
        token = uuid.uuid4().hex  # random names, because Spark may run a task twice
        files = LeafFiles(
            self.objects,
            self.schema,
            self.properties,
            self.partition_ids,
            lambda leaf: self.attempt.object_name(f"{leaf}-{token}"),
        )
        sent = 0
        with files.sorter(MEMORY_BYTES) as sorter:
            for _, blob, sent_by_task in blobs:
                sent += sent_by_task or 0
                if blob is not None:
                    for rows in pa.ipc.open_stream(pa.py_buffer(blob)):
                        sorter.add(rows.drop_columns([LEAF]), rows.column(LEAF))
            received = int(sorter.counts.sum())
            written = Gathered(sent, received, tuple(files.write(sorter)))
        yield written


@dataclass(frozen=True, slots=True)
class Gathered:
    """The files that a task of the second stage wrote, with the numbers of rows received and sent.

    Each task of the first stage puts its number of rows into its last blob. `sent` is the sum of these
    numbers that arrived at this task.
    """

    sent: int
    received: int
    files: tuple[FileWithReferences, ...]


def stage(step: Step) -> Callable[[Iterable[pa.RecordBatch]], Iterable[pa.RecordBatch]]:
    """Returns a step as a function of one argument, because Spark does not accept other callables."""

    def run(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        settle()
        return step.run(batches)

    return run


def _blobs(key: int, rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields rows as blobs of bounded size, because Spark copies each blob as a whole."""
    step = max(1, BLOB_BYTES * rows.num_rows // max(1, rows.nbytes))
    options = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
    for start in range(0, rows.num_rows, step):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, rows.schema, options=options) as stream:
            stream.write_batch(rows.slice(start, step))
        blob = pa.Array.from_buffers(
            pa.binary(), 1, [None, pa.py_buffer(np.array([0, sink.tell()], np.int32)), sink.getvalue()]
        )
        yield _blob(key, blob)


def _blob(key: int, rows: pa.Array | None, sent: int | None = None) -> pa.RecordBatch:
    columns = [pa.array([key], pa.int32()), pa.nulls(1, pa.binary()) if rows is None else rows]
    return pa.RecordBatch.from_arrays([*columns, pa.array([sent], pa.int64())], schema=_BLOBS)


def plain_name(uri: str) -> str:
    """Returns the URI of a file in one standard form, because Spark writes it in several ways."""
    return re.sub("^file:/+", "file:/", unquote(uri))


def _parts_of_files(
    batch: pa.RecordBatch, numbers: Mapping[str, int]
) -> Iterator[tuple[pa.RecordBatch, int, int]]:
    """Yields the parts of a batch that have consecutive rows of one file.

    Each tuple has the part, the file's number, and the position of the part's first row in the file.
    """
    names, rows = batch.column(FILE).dictionary_encode(), batch.column(ROW_OF_FILE).to_numpy()
    plain = batch.drop_columns([FILE, ROW_OF_FILE])
    goes_on = (np.diff(names.indices.to_numpy()) == 0) & (np.diff(rows) == 1)
    for start, end in pairwise([0, *(np.flatnonzero(~goes_on) + 1).tolist(), batch.num_rows]):
        name = plain_name(names[start].as_py())
        if name not in numbers:
            raise InvalidData(f"file {name!r} was added while the files were listed: try again")
        yield plain.slice(start, end - start), numbers[name], int(rows[start])
