"""What came and went between two moments, read by one task, as the order of changes counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from dormouse.datasource.options import ReadOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.context import TableAddress
    from dormouse.model.cut import Position


@dataclass(frozen=True)
class ChangesPart(InputPartition):
    """The changes of after one position and up to another."""

    address: TableAddress
    start: Position
    end: Position
    columns: tuple[str, ...] | None

    def rows(self) -> Iterator[pa.RecordBatch]:
        from dormouse.query.changes import changes

        with self.address.open() as context:
            yield from changes(context, self.start, self.end, self.columns)


class ChangesReader(DataSourceReader):
    """What changed between two moments that options name."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from dormouse.datasource.columns import changed_columns, check_given
        from dormouse.history.changes import span

        of, columns = self._options.of, self._options.columns
        after, till = self._options.changes or (None, None)
        with of.open() as table:
            start, end = span(table.context, after, till)
            check_given(self._schema, changed_columns(table.context.as_of(end), columns), of.table)
            return [ChangesPart(table.context.address, start, end, columns)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, ChangesPart)  # noqa: S101 as `partitions` made it
        return partition.rows()
