"""`spark.read.format("dormouse")`: rows of a moment, changes between two, and what is known of a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import StructType

from dormouse.datasource.options import ReadOptions, StreamOptions, WriteOptions
from dormouse.errors import InvalidInput, ObjectNotFound
from dormouse.spark.worker import on_worker, settle

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.reading.executor import Part
    from dormouse.state.context import TableAddress


class DormouseSource(DataSource):
    """What Spark makes of `format("dormouse")`; it finds the class by the package `pyspark_dormouse`."""

    @classmethod
    def name(cls) -> str:
        return "dormouse"

    def schema(self) -> StructType:
        """The columns that are read: those of the table, some of them, or what metadata have."""
        options = ReadOptions.parse(self.options)
        if options.metadata is not None:
            from dormouse.datasource.metadata import columns_of_metadata

            return columns_of_metadata(options.metadata)
        from dormouse.datasource.columns import columns_now

        with options.of.open() as table:
            found = columns_now(table.reading, options)
        settle()
        return found

    def reader(self, schema: StructType) -> DataSourceReader:
        options = ReadOptions.parse(self.options)
        if options.max_rows_per_batch is not None:
            raise InvalidInput("the option max_rows_per_batch is for streams: read by spark.readStream")
        if options.metadata is not None:
            from dormouse.datasource.columns import check_given
            from dormouse.datasource.metadata import MetadataReader

            check_given(schema, self.schema(), options.of.table)
            return MetadataReader(options.of, options.metadata)
        if options.changes is not None:
            from dormouse.datasource.changes import ChangesReader

            return ChangesReader(options, schema)
        return RowsReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from dormouse.datasource.sink import TableWriter

        if overwrite:
            raise InvalidInput(
                'rows are only added: write .mode("append"), after table.delete where others are to go'
            )
        return TableWriter.begun(WriteOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        from dormouse.datasource.streams import ChangesStream

        return ChangesStream(ReadOptions.of_stream(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from dormouse.datasource.streams import StreamWriter

        if overwrite:
            raise InvalidInput('a stream only adds rows: write .outputMode("append")')
        return StreamWriter(StreamOptions.parse(self.options), schema)


@dataclass(frozen=True)
class _Rows(InputPartition):
    """What one task reads of the plan."""

    address: TableAddress
    part: Part


class RowsReader(DataSourceReader):
    """Plans on the driver, all of one moment; tasks need the object store alone."""

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from dormouse.datasource.columns import asked_of, check_given, columns_of_rows
        from dormouse.reading.executor import PART_BYTES, parts
        from dormouse.state.history.moments import now, position_of

        options = self._options
        with options.of.open(goes_on=True) as table:
            at = now(table.context) if options.as_of is None else position_of(table.context, options.as_of)
            context = table.reading.as_of(at)
            asked = asked_of(context, options)
            check_given(self._schema, columns_of_rows(context, asked), options.of.table)
            found = parts(context, asked, at, options.split_bytes or PART_BYTES)
            tasks: list[InputPartition] = [_Rows(context.address, part) for part in found]
        settle()
        # without a task Spark calls `read` with None
        return tasks or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Rows):
            return
        from dormouse.reading.checked_files import FileGone

        with on_worker(partition.address) as context:
            try:
                yield from partition.part.rows(context)
            except FileGone as error:
                raise ObjectNotFound(
                    f"file {error.filename!r} of table {error.table!r} is gone: it was collected while Spark "
                    "read it; raise the table's property gc_delay_seconds or history_retention_seconds"
                ) from error
