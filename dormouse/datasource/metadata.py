"""What is known of a table, as rows: its files, partitions, cuts, jobs and consumers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceReader, InputPartition
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

from dormouse.datasource.options import Metadata, TableOptions
from dormouse.model.values import json_value

if TYPE_CHECKING:
    from dormouse.api.table import Table

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
    """Regions and split points are JSON; keys are encoded, so that their bytes have the keys' order."""
    return StructType([StructField(name, of) for name, of in _COLUMNS[kind].items()])


@dataclass(frozen=True)
class MetadataReader(DataSourceReader):
    """One task asks the database, page by page."""

    of: TableOptions
    kind: Metadata

    def partitions(self) -> Sequence[InputPartition]:
        return [InputPartition(self.kind)]

    def read(self, partition: InputPartition) -> Iterator[_Row]:
        with self.of.open() as table:
            yield from _READ[self.kind](table)


def _files(table: Table) -> Iterator[_Row]:
    pages = _pages(table.file_page, lambda last: last.filename)
    return (_row(file, "files") for file in pages)


def _partitions(table: Table) -> Iterator[_Row]:
    for one in _pages(table.partition_page, lambda last: last.partition_id, ""):
        split = (None, None) if one.split is None else (one.split.field, _json(one.split.point))
        yield one.partition_id, one.parent_id, one.is_leaf, _json(one.region), *split


def _cuts(table: Table) -> Iterator[_Row]:
    return (_row(cut, "cuts") for cut in table.history.cuts())


def _jobs(table: Table) -> Iterator[_Row]:
    pages = _pages(table.context.jobs.page, lambda last: (last.job_id, last.partition_id), ("", ""))
    return (_row(job, "jobs") for job in pages)


def _consumers(table: Table) -> Iterator[_Row]:
    return (_row(one, "consumers") for one in table.consumers())


def _row(value: object, kind: Metadata) -> _Row:
    return tuple(getattr(value, name) for name in _COLUMNS[kind])


_READ: Mapping[Metadata, Callable[[Table], Iterator[_Row]]] = {
    "files": _files,
    "partitions": _partitions,
    "cuts": _cuts,
    "jobs": _jobs,
    "consumers": _consumers,
}


def _pages(
    page: Callable[[Any, int], list[Any]], key: Callable[[Any], Any], after: Any = None
) -> Iterator[Any]:
    def all_pages() -> Iterator[list[Any]]:
        last = after
        while found := page(last, PAGE_ROWS):
            yield found
            last = key(found[-1])

    return chain.from_iterable(all_pages())


def _json(value: Any) -> str:
    return json.dumps(json_value(value))
