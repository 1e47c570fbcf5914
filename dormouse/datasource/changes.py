"""The columns of a Spark read, and the reader of changes between two moments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dormouse.datasource.options import ReadOptions
from dormouse.errors import InvalidInput
from dormouse.reading.changes import changes_parts, columns_of_changes
from dormouse.reading.executor import PART_BYTES, columns_of
from dormouse.reading.table_moments import at_moment
from dormouse.reading.where import Question, parse_where, question
from dormouse.spark.frames import struct_of
from dormouse.spark.worker import on_worker
from dormouse.state.history.changes import span

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.model.cut import Position
    from dormouse.reading.changes import ChangesPart
    from dormouse.state.context import TableAddress, TableContext


def question_of(context: TableContext, options: ReadOptions) -> Question:
    """Returns the condition and columns that the options name, checked against the context's schema."""
    return question(context.schema, parse_where(context.schema, options.where), options.columns, None)


def columns_of_rows(context: TableContext, read: Question) -> StructType:
    return struct_of(columns_of(context.schema, read.columns))


def changed_columns(context: TableContext, columns: Sequence[str] | None) -> StructType:
    """Returns the Spark columns of a read of changes; `context` is the table at the later moment."""
    return struct_of(columns_of_changes(context, columns))


def columns_now(context: TableContext, options: ReadOptions) -> StructType:
    """Returns the columns of a read at the moment that the options name, or now."""
    _, till = options.changes or (None, None)
    when = options.as_of if options.changes is None else till
    then, _ = at_moment(context, when)
    if options.changes is not None:
        return changed_columns(then, options.columns)
    return columns_of_rows(then, question_of(then, options))


def check_given(given: StructType, actual: StructType, table: str) -> None:
    """Raises `InvalidInput` if the columns that Spark expects differ from the columns of the table.

    Spark expects the columns that the user gave as `schema`, or that an earlier `load` found.
    """
    if given.jsonValue() != actual.jsonValue():
        raise InvalidInput(
            f"the columns of the read are not those of table {table!r}, which are {actual.simpleString()}: "
            "if they were changed since load(), load it again; leave .schema(…) out, and name columns by the "
            "option columns"
        )


@dataclass(frozen=True)
class ChangesTask(InputPartition):
    """The part of the changes that one task reads."""

    address: TableAddress
    part: ChangesPart

    def rows(self) -> Iterator[pa.RecordBatch]:
        with on_worker(self.address) as context:
            yield from self.part.rows(context)


def tasks_of(
    context: TableContext, start: Position, end: Position, options: ReadOptions, *, as_known: bool = False
) -> list[InputPartition]:
    """Returns the tasks that read the changes after `start` and up to `end`, in order.

    With `as_known`, rows have the context's columns instead of those that the table has at `end`.
    """
    bytes_max = options.split_bytes or PART_BYTES
    parts = changes_parts(context, start, end, options.columns, bytes_max, as_known=as_known)
    return [ChangesTask(context.address, part) for part in parts]


class ChangesReader(DataSourceReader):
    """The reader of the changes between two moments that options name."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        of = self._options.of
        after, till = self._options.changes or (None, None)
        with of.open(goes_on=True) as table:
            start, end = span(table.context, after, till)
            check_given(
                self._schema, changed_columns(table.context.as_of(end), self._options.columns), of.table
            )
            # Spark calls `read` with None if there is no task
            return tasks_of(table.context, start, end, self._options) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return partition.rows() if isinstance(partition, ChangesTask) else iter(())
