"""What came and went between two moments, by tasks in its order: a deletion's follows those before it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dormouse.datasource.options import ReadOptions
from dormouse.spark.worker import on_worker

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.model.cut import Position
    from dormouse.reading.changes import ChangesPart
    from dormouse.state.context import TableAddress, TableContext


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
    from dormouse.reading.changes import changes_parts
    from dormouse.reading.executor import PART_BYTES

    bytes_max = options.split_bytes or PART_BYTES
    parts = changes_parts(context, start, end, options.columns, bytes_max, as_known=as_known)
    return [ChangesTask(context.address, part) for part in parts]


class ChangesReader(DataSourceReader):
    """What changed between two moments that options name."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from dormouse.datasource.columns import changed_columns, check_given
        from dormouse.state.history.changes import span

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
