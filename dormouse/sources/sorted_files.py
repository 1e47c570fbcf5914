"""Whether the rows of Parquet files come in key order: statistics hint at it, the keys alone prove it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.key_sort import is_ascending
from dormouse.data.leaf_lookup import LeafLookup
from dormouse.errors import InvalidData
from dormouse.model.keys import encode_key
from dormouse.model.schema import Schema
from dormouse.sources.data_files import DataFile
from dormouse.sources.source_files import parquet_file

_READ_ROWS = 131_072
_UNREADABLE = (pa.ArrowException, OSError, ValueError, OverflowError, TypeError, KeyError)
"""Reading the rows tells what is wrong, and where."""


def sorted_keys(files: Sequence[DataFile], schema: Schema) -> Iterator[pa.RecordBatch] | None:
    """The keys of files whose statistics say that row groups follow each other; None for others."""
    if any(file.kind != "parquet" for file in files):
        return None
    try:
        return _keys(files, schema) if _seem_sorted(files, schema.key_names[0]) else None
    except _UNREADABLE:
        return None


def _seem_sorted(files: Sequence[DataFile], name: str) -> bool:
    last: Any = None
    for file in files:
        for bounds in _bounds(pq.read_metadata(file.path), name):
            if bounds is None or (last is not None and bounds[0] < last):
                return False
            last = bounds[1]
    return True


def _bounds(metadata: pq.FileMetaData, name: str) -> Iterator[tuple[Any, Any] | None]:
    """The smallest and largest value of a column in each row group that has rows; None where not known."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    for group in (group for group in groups if group.num_rows):
        columns = map(group.column, range(group.num_columns))
        found = next((one.statistics for one in columns if one.path_in_schema == name), None)
        yield None if found is None or not found.has_min_max else (found.min, found.max)


def _keys(files: Sequence[DataFile], schema: Schema) -> Iterator[pa.RecordBatch]:
    kinds = [arrow_type(field.type) for field in schema.key_fields]
    for file in files:
        with parquet_file(file) as parquet:
            for batch in parquet.iter_batches(_READ_ROWS, columns=list(schema.key_names), use_threads=False):
                columns = map(batch.column, schema.key_names)
                fitted = [column.cast(kind) for column, kind in zip(columns, kinds, strict=True)]
                yield pa.RecordBatch.from_arrays(fitted, names=list(schema.key_names))


def leaf_counts(
    keys: Iterator[pa.RecordBatch], schema: Schema, lookup: LeafLookup, *, by_leaf: bool
) -> npt.NDArray[np.int64] | None:
    """How many rows each leaf has; None if rows are not in order: of leaves, `by_leaf`, and of keys."""
    counts = np.zeros(len(lookup.leaf_ids), np.int64)
    order, leaf = InOrder(schema), 0
    try:
        for batch in filter(attrgetter("num_rows"), keys):
            if any(column.null_count for column in batch.columns) or not order.goes_on(batch):
                return None
            leaves = lookup.indexes(batch).to_numpy()
            if by_leaf and (leaves[0] < leaf or bool(np.any(leaves[1:] < leaves[:-1]))):
                return None
            leaf = int(leaves[-1])
            counts += np.bincount(leaves, minlength=len(counts))
    except _UNREADABLE:
        return None
    return counts


class InOrder:
    """Whether batches that have rows come in the order of their keys."""

    def __init__(self, schema: Schema) -> None:
        self._fields = schema.key_fields
        self._names = list(schema.key_names)
        self._last = b""

    def goes_on(self, batch: pa.RecordBatch) -> bool:
        keys = batch.select(self._names)
        first, last = (
            encode_key(self._fields, [column[row].as_py() for column in keys.columns])
            for row in (0, keys.num_rows - 1)
        )
        follows, self._last = self._last <= first, last
        return follows and is_ascending(keys)

    def checked(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The same batches; `InvalidData` when they are not in order."""
        for batch in batches:
            if batch.num_rows and not self.goes_on(batch):
                raise InvalidData("the rows are not in the order in which they were a moment ago")
            yield batch
