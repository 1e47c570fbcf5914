"""The data source of `format("dormouse")`: reads of rows, of changes and of a table's metadata."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    InputPartition,
)
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    DataType,
    DoubleType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from dormouse.datasource.options import Metadata, ReadOptions, StreamOptions, TableOptions, WriteOptions
from dormouse.errors import InvalidInput, ObjectNotFound
from dormouse.model.json_values import json_value
from dormouse.spark.worker import on_worker, settle

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.api.table import Table
    from dormouse.reading.executor import Part
    from dormouse.state.context import TableAddress

# Metadata of a table, as rows: its files, partitions, cuts, jobs and consumers.

PAGE_ROWS = 10_000
_Row = tuple[Any, ...]
_TEXT, _WHOLE, _BYTES, _TIME, _BOOLEAN = (
    StringType(),
    LongType(),
    BinaryType(),
    TimestampType(),
    BooleanType(),
)
_COLUMNS: Mapping[Metadata, Mapping[str, DataType]] = {
    "files": {
        "filename": _TEXT,
        "byte_count": _WHOLE,
        "row_count": _WHOLE,
        "min_key": _BYTES,
        "max_key": _BYTES,
        "added_at": _TIME,
        "unreferenced_at": _TIME,
    },
    "partitions": {
        "partition_id": _TEXT,
        "parent_id": _TEXT,
        "is_leaf": _BOOLEAN,
        "region": _TEXT,
        "split_field": _TEXT,
        "split_point": _TEXT,
    },
    "cuts": {"cut_id": _WHOLE, "name": _TEXT, "recorded_at": _TIME, "epoch": _WHOLE},
    "jobs": {
        "job_id": _TEXT,
        "partition_id": _TEXT,
        "created_at": _TIME,
        "attempts": _WHOLE,
        "is_running": _BOOLEAN,
        "run_id": _TEXT,
        "last_error": _TEXT,
    },
    "consumers": {
        "name": _TEXT,
        "position_at": _TIME,
        "acknowledged_at": _TIME,
        "expires_at": _TIME,
        "is_expired": _BOOLEAN,
        "rows_behind": _WHOLE,
        "seconds_behind": DoubleType(),
    },
}


def columns_of_metadata(kind: Metadata) -> StructType:
    """Returns the columns of a kind of metadata.

    Regions and split points are JSON. Keys are encoded, so that their bytes sort as the keys do.
    """
    return StructType([StructField(name, of) for name, of in _COLUMNS[kind].items()])


@dataclass(frozen=True)
class MetadataReader(DataSourceReader):
    """The reader of metadata. One task reads it from the database, page by page."""

    of: TableOptions
    kind: Metadata

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self.kind)]

    def read(self, partition: InputPartition) -> Iterator[_Row]:
        with self.of.open() as table:
            if self.kind == "partitions":
                yield from _partitions(table)
                return
            for item in _OBJECTS[self.kind](table):
                yield tuple(getattr(item, name) for name in _COLUMNS[self.kind])


def _partitions(table: Table) -> Iterator[_Row]:
    for node in _pages(table.partition_page, lambda last: last.partition_id, ""):
        split = (None, None) if node.split is None else (node.split.field, _json(node.split.point))
        yield node.partition_id, node.parent_id, node.is_leaf, _json(node.region), *split


_OBJECTS: Mapping[Metadata, Callable[[Table], Iterable[object]]] = {
    "files": lambda table: _pages(table.file_page, lambda last: last.filename),
    "cuts": lambda table: table.history.cuts(),
    "jobs": lambda table: _pages(
        table.context.jobs.page, lambda last: (last.job_id, last.partition_id), ("", "")
    ),
    "consumers": lambda table: table.consumers(),
}
"""The functions that return the items of each kind of metadata. The columns are attributes of the items."""


def _pages(
    page: Callable[[Any, int], list[Any]], key: Callable[[Any], Any], after: Any = None
) -> Iterator[Any]:
    def all_pages() -> Iterator[list[Any]]:
        last = after
        while items := page(last, PAGE_ROWS):
            yield items
            last = key(items[-1])

    return chain.from_iterable(all_pages())


def _json(value: Any) -> str:
    return json.dumps(json_value(value))


class DormouseSource(DataSource):
    """The data source of `format("dormouse")`. Spark finds it by the package `pyspark_dormouse`."""

    @classmethod
    def name(cls) -> str:
        return "dormouse"

    def schema(self) -> StructType:
        """Returns the columns that are read: all or some of the table's, or those of metadata."""
        options = ReadOptions.parse(self.options)
        if options.metadata is not None:
            return columns_of_metadata(options.metadata)
        from dormouse.datasource.changes import columns_now

        with options.of.open() as table:
            columns = columns_now(table.reading, options)
        settle()
        return columns

    def reader(self, schema: StructType) -> DataSourceReader:
        options = ReadOptions.parse(self.options)
        if options.max_rows_per_batch is not None:
            raise InvalidInput("the option max_rows_per_batch is for streams: use spark.readStream")
        if options.metadata is not None:
            from dormouse.datasource.changes import check_given

            check_given(schema, self.schema(), options.of.table)
            return MetadataReader(options.of, options.metadata)
        if options.changes is not None:
            from dormouse.datasource.changes import ChangesReader

            return ChangesReader(options, schema)
        return RowsReader(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from dormouse.datasource.streams import TableWriter

        if overwrite:
            raise InvalidInput(
                'a write only adds rows: use .mode("append"), after table.delete if rows are to be replaced'
            )
        return TableWriter.begun(WriteOptions.parse(self.options), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        from dormouse.datasource.streams import ChangesStream

        return ChangesStream(ReadOptions.of_stream(self.options), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from dormouse.datasource.streams import StreamWriter

        if overwrite:
            raise InvalidInput('a stream only adds rows: use .outputMode("append")')
        return StreamWriter(StreamOptions.parse(self.options), schema)


@dataclass(frozen=True)
class _Rows(InputPartition):
    """The part of the plan that one task reads."""

    address: TableAddress
    part: Part


class _RowsInOrder(InputPartition):
    """The whole read as one task, because `limit`, `offset` or `descending` depend on the order of rows."""


class RowsReader(DataSourceReader):
    """The reader of rows. The driver plans the read at one moment; tasks need only the object store.

    Rows in order are read by one task, which queries the table itself, at the moment when the task begins.
    """

    def __init__(self, options: ReadOptions, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> list[InputPartition]:
        from dormouse.datasource.changes import check_given, columns_of_rows, question_of
        from dormouse.reading.executor import PART_BYTES, parts
        from dormouse.state.history.moments import now, position_of

        options = self._options
        with options.of.open(goes_on=True) as table:
            at = now(table.context) if options.as_of is None else position_of(table.context, options.as_of)
            context = table.reading.verifying(options.query["verify"]).as_of(at)
            asked = question_of(context, options)
            check_given(self._schema, columns_of_rows(context, asked), options.of.table)
            if options.are_in_order:
                return [_RowsInOrder(None)]
            listed = parts(context, asked, at, options.split_bytes or PART_BYTES)
            tasks: list[InputPartition] = [_Rows(context.address, part) for part in listed]
        settle()
        # Spark calls `read` with None if there is no task
        return tasks or [InputPartition(None)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if isinstance(partition, _RowsInOrder):
            yield from self._in_order()
        if not isinstance(partition, _Rows):
            return
        from dormouse.reading.checked_files import FileGone

        with on_worker(partition.address) as context:
            try:
                yield from partition.part.rows(context)
            except FileGone as error:
                raise ObjectNotFound(
                    f"file {error.filename!r} of table {error.table!r} was deleted by garbage collection "
                    "while Spark read it; raise the table's property gc_delay_seconds or "
                    "history_retention_seconds"
                ) from error

    def _in_order(self) -> Iterator[pa.RecordBatch]:
        from dormouse.datasource.changes import check_given
        from dormouse.reading.where import parse_where
        from dormouse.spark.frames import struct_of

        options = self._options
        with options.of.open(goes_on=True) as table:
            then = table.known_schema if options.as_of is None else table.schema_at(options.as_of)
            with table.query(parse_where(then, options.where), **options.query) as rows:
                check_given(self._schema, struct_of(rows.schema), options.of.table)
                yield from rows
