"""The columns of a read; what came and went between two moments, by tasks in its order."""

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
from dormouse.reading.table_view import at_moment
from dormouse.reading.where import Question, parse_where, question
from dormouse.spark.frames import struct_of
from dormouse.spark.worker import on_worker
from dormouse.state.history.changes import span

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.model.cut import Position
    from dormouse.reading.changes import ChangesPart
    from dormouse.state.context import TableAddress, TableContext


def asked_of(context: TableContext, options: ReadOptions) -> Question:
    """What is asked of the rows of a moment, whose services these are."""
    return question(context.schema, parse_where(context.schema, options.where), options.columns, None)


def columns_of_rows(context: TableContext, asked: Question) -> StructType:
    return struct_of(columns_of(context.schema, asked.columns))


def changed_columns(context: TableContext, columns: Sequence[str] | None) -> StructType:
    """`context` is of the later moment."""
    return struct_of(columns_of_changes(context, columns))


def columns_now(context: TableContext, options: ReadOptions) -> StructType:
    """Those of the moment that the options name, or of now."""
    _, till = options.changes or (None, None)
    when = options.as_of if options.changes is None else till
    then, _ = at_moment(context, when)
    if options.changes is not None:
        return changed_columns(then, options.columns)
    return columns_of_rows(then, asked_of(then, options))


def check_given(given: StructType, found: StructType, table: str) -> None:
    """`InvalidInput` when a read was given other columns than it has, by `schema` or by an earlier `load`."""
    if given.jsonValue() != found.jsonValue():
        raise InvalidInput(
            f"the columns of the read are not those of table {table!r}, which are {found.simpleString()}: if "
            "they were changed since load(), load it again; leave .schema(…) out, and name columns by the "
            "option columns"
        )


@dataclass(frozen=True)
class ChangesTask(InputPartition):
    """What one task reads of the changes."""

    address: TableAddress
    part: ChangesPart

    def rows(self) -> Iterator[pa.RecordBatch]:
        with on_worker(self.address) as context:
            yield from self.part.rows(context)


def tasks_of(
    context: TableContext, start: Position, end: Position, options: ReadOptions, *, as_known: bool = False
) -> list[InputPartition]:
    """The changes of after one position and up to another, in their order; `as_known` as `changes` has it."""
    bytes_max = options.split_bytes or PART_BYTES
    parts = changes_parts(context, start, end, options.columns, bytes_max, as_known=as_known)
    return [ChangesTask(context.address, part) for part in parts]


class ChangesReader(DataSourceReader):
    """What changed between two moments that options name."""

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
            # without a task Spark calls `read` with None
            return tasks_of(table.context, start, end, self._options) or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return partition.rows() if isinstance(partition, ChangesTask) else iter(())
