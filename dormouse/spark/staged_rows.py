"""Rows that tasks write into objects of a write attempt, to be read again by later tasks and by the driver.

Spark may evaluate a DataFrame again, and then get other rows. Staged rows stay as they are.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import LongType, StructField, StructType

from dormouse.model.schema import Schema
from dormouse.objects.store import ObjectStore
from dormouse.spark.frames import numbers_of
from dormouse.spark.shuffle import ROWS_OF_TASK_BITS, stage
from dormouse.spark.worker import check_seen, make_folder
from dormouse.state.context import TableContext

ROW = "__row"
"""The column with the number of a staged row, if rows are numbered."""
_OPTIONS = pa.ipc.IpcWriteOptions(compression="lz4", use_threads=False)
_WRITTEN = "name string, rows long, bytes long"
_COLUMNS = pa.schema([("name", pa.string()), ("rows", pa.int64()), ("bytes", pa.int64())])


@dataclass(frozen=True, slots=True)
class StagedRows:
    """The rows that one task wrote, and their number and size in memory. Can be pickled."""

    area: StagingArea
    name: str
    row_count: int
    byte_count: int

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yields the rows as they were written."""
        with self.area.objects.reader(self.name) as file, pa.ipc.open_file(pa.PythonFile(file, "r")) as found:
            for number in range(found.num_record_batches):
                yield found.get_batch(number)

    def rows(self, schema: Schema) -> Iterator[pa.RecordBatch]:
        """Yields the rows with the columns of a schema, which they must have in its types."""
        for batch in self.batches():
            yield batch.select(list(schema.names))


@dataclass(frozen=True, slots=True)
class StagingArea:
    """The place of staged rows: an object store, and a folder-like prefix in it. Can be pickled."""

    objects: ObjectStore = field(repr=False)
    prefix: str

    def staged(self, frame: DataFrame) -> list[StagedRows]:
        """Evaluates a DataFrame in one Spark job, and stages its rows."""
        written = frame.mapInArrow(stage(_Keep(self)), _WRITTEN).collect()
        return [self.part(*row) for row in written]

    def part(self, name: str, row_count: int, byte_count: int) -> StagedRows:
        return StagedRows(self, name, row_count, byte_count)

    def writer(self) -> StagedFile:
        """Returns a writer for a task. Its name is random, because Spark may run a task twice."""
        return StagedFile(self, f"{self.prefix}{uuid.uuid4().hex}.arrow")


class StagedFile:
    """A writer of one object, which exists only if it has rows. Use it as a context manager."""

    def __init__(self, area: StagingArea, name: str) -> None:
        self.name = name
        self.row_count = self.byte_count = 0
        self._area = area
        self._open = ExitStack()
        self._stream: pa.ipc.RecordBatchFileWriter | None = None

    def __enter__(self) -> StagedFile:
        return self

    def __exit__(self, *raised: object) -> None:
        self._open.__exit__(*raised)  # type: ignore[arg-type]

    def add(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return
        if self._stream is None:
            path = self._open.enter_context(self._area.objects.staged(self.name))
            file = self._open.enter_context(path.open("wb"))
            made = pa.ipc.new_file(file, batch.schema, options=_OPTIONS)
            self._stream = self._open.enter_context(made)
        self._stream.write_batch(batch)
        self.row_count += batch.num_rows
        self.byte_count += batch.nbytes

    @property
    def written(self) -> tuple[str, int, int] | None:
        """The arguments of `StagingArea.part`; None if there is no object."""
        return (self.name, self.row_count, self.byte_count) if self.row_count else None


@contextmanager
def staging(context: TableContext) -> Iterator[StagingArea]:
    """Yields a place for staged rows, whose objects are deleted at the end of the block.

    They are those of a write attempt that commits nothing. So collection deletes them if this process dies,
    and those that late tasks write.
    """
    make_folder(context.objects)
    attempt = context.attempts.begin(context.table)
    try:
        yield StagingArea(context.objects, attempt.object_prefix)
    finally:
        context.attempts.discard(attempt, leftovers=True)


@dataclass(frozen=True)
class _Keep:
    """A step that stages a task's rows as they are, and yields the arguments of `StagingArea.part`."""

    area: StagingArea

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        check_seen(self.area.objects)
        with self.area.writer() as file:
            for batch in batches:
                file.add(batch)
        if (written := file.written) is not None:
            yield pa.RecordBatch.from_pylist([dict(zip(_COLUMNS.names, written, strict=True))], _COLUMNS)


def frame_of(
    spark: SparkSession, parts: Sequence[StagedRows], columns: StructType, *, numbered: bool = False
) -> DataFrame:
    """Returns staged rows as a DataFrame, if `numbered` with the column `ROW`."""
    if numbered:
        columns = StructType([*columns, StructField(ROW, LongType(), False)])
    return numbers_of(spark, parts).mapInArrow(stage(_Read(tuple(parts), numbered)), columns)


@dataclass(frozen=True)
class _Read:
    """A step that receives numbers of parts, and yields their rows."""

    parts: tuple[StagedRows, ...]
    numbered: bool

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for numbers in batches:
            for number in numbers.column(0).to_pylist():
                first = number << ROWS_OF_TASK_BITS
                for batch in self.parts[number].batches():
                    rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                    yield batch.append_column(ROW, pa.array(rows)) if self.numbered else batch
                    first += batch.num_rows
