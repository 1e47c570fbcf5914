"""Filters of streams sorted by key, which keep only the newest row of each key.

In some streams this is the first row of the key, in others the last. The filters work on whole arrays.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.object_access import parquet_object
from dormouse.model.table import DELETED_AT, SEQUENCE
from dormouse.objects.store import ObjectStore

_LISTED_SHARE = 1 / 128
"""The share of a batch's rows that may be looked up and inserted one by one.

Above this share, it is faster to convert all keys of the batch to Python objects first, and to gather rows.
"""


def first_of_keys(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the first row of each key, from batches in key order."""
    last = None
    for batch in batches:
        if not batch.num_rows:
            yield batch
            continue
        keys = [batch.column(name) for name in names]
        is_new, differs = tuple(key[0].as_py() for key in keys) != last, _differs(keys)
        last = tuple(key[-1].as_py() for key in keys)
        # most batches have no repeated key and stay as they are
        is_whole = is_new and differs.true_count == len(differs)
        yield batch if is_whole else batch.filter(pa.concat_arrays([pa.array([is_new]), differs]))


def last_of_keys(batches: Iterable[pa.RecordBatch], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yields the last row of each key, from batches in key order."""
    held, last = None, None
    for batch in batches:
        if not batch.num_rows:
            continue
        keys = [batch.column(name) for name in names]
        if held is not None and tuple(key[0].as_py() for key in keys) != last:
            yield held
        differs = _differs(keys)
        if differs.true_count:
            yield batch.filter(pa.concat_arrays([differs, pa.array([False])]))
        held, last = batch.slice(batch.num_rows - 1), tuple(key[-1].as_py() for key in keys)
    if held is not None:
        yield held


def _differs(keys: Sequence[pa.Array]) -> pa.BooleanArray:
    """Returns, for each row but the first, whether its key differs from that of the row before."""
    return reduce(pc.or_, (pc.not_equal(key.slice(1), key.slice(0, len(key) - 1)) for key in keys))


def laid_over(
    large: Iterable[pa.RecordBatch], small: Iterator[pa.RecordBatch], names: Sequence[str], gone: str
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of two streams in key order; if both have a key, only the row of `small`.

    Both streams are in key order and have each key once. `gone` names the last column of `small`, a boolean.
    A row of `small` in which `gone` is true hides the row of `large` with the same key, and is itself left
    out.
    """
    above = _Above(small, names)
    for batch in large:
        if batch.num_rows:
            last = _Keys(batch.slice(batch.num_rows - 1), names)[0]
            yield _replaced(batch, above.until(last), names, gone)
    for rows in above.rest():
        yield rows.filter(pc.invert(rows.column(gone))).drop_columns([gone])


class _Keys(Sequence[Any]):
    """The keys of a batch's rows, as a sequence of tuples that sort in key order."""

    def __init__(self, batch: pa.RecordBatch, names: Sequence[str]) -> None:
        self._columns = [_comparable(batch.column(name)) for name in names]

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, row: Any) -> Any:
        return tuple(column[row].as_py() for column in self._columns)

    def places_of(self, wanted: _Keys) -> np.ndarray[Any, Any]:
        """Returns, for each key in `wanted`, the number of keys here that are smaller; `wanted` ascends."""
        if len(self._columns) == 1 and pa.types.is_integer(self._columns[0].type):
            places: np.ndarray[Any, Any] = np.searchsorted(
                self._columns[0].to_numpy(), wanted._columns[0].to_numpy()
            )
            return places
        among = self.listed() if len(wanted) > len(self) * _LISTED_SHARE else self
        found, start = [], 0
        for key in wanted.listed():
            start = bisect_left(among, key, start)
            found.append(start)
        return np.array(found, np.int64)

    def listed(self) -> list[Any]:
        return list(zip(*(column.to_pylist() for column in self._columns), strict=True))


def _comparable(column: pa.Array) -> pa.Array:
    """Returns times and dates as integers, since Python's types have a smaller range."""
    if pa.types.is_timestamp(column.type):
        return column.view(pa.int64())
    return column.view(pa.int32()) if pa.types.is_date32(column.type) else column


class _Above:
    """A stream of batches in key order, read piece by piece: each piece ends at a given key."""

    def __init__(self, batches: Iterator[pa.RecordBatch], names: Sequence[str]) -> None:
        self._batches, self._names = batches, names
        self._left: pa.RecordBatch | None = None

    def until(self, key: tuple[Any, ...]) -> list[pa.RecordBatch]:
        """Returns the rows up to and including `key`, except those that were returned before."""
        taken = []
        for batch in self.rest():
            end = bisect_right(_Keys(batch, self._names), key)
            taken.append(batch.slice(0, end))
            if end < batch.num_rows:
                self._left = batch.slice(end)
                break
        return [batch for batch in taken if batch.num_rows]

    def rest(self) -> Iterator[pa.RecordBatch]:
        """Yields all rows that were not taken yet; a caller that stops may continue later."""
        left, self._left = self._left, None
        if left is not None:
            yield left
        # `yield from` would close the batches together with this generator when a caller stops
        for batch in self._batches:  # noqa: UP028
            yield batch


def _replaced(
    batch: pa.RecordBatch, others: Sequence[pa.RecordBatch], names: Sequence[str], gone: str
) -> pa.RecordBatch:
    """Returns `batch` with the rows of `others` inserted in key order.

    Rows of `batch` that have one of their keys are dropped. A row of `others` in which the column `gone` is
    true is not inserted.
    """
    if not others:
        return batch
    rows = pa.concat_batches(others)
    places = _Keys(batch, names).places_of(_Keys(rows, names))
    ends = np.minimum(places, batch.num_rows - 1)
    is_there = np.asarray(
        reduce(
            pc.and_,
            (pc.equal(batch.column(name).take(pa.array(ends)), rows.column(name)) for name in names),
        ).to_numpy(zero_copy_only=False)
    )
    columns = [rows.column(name) for name in batch.schema.names]
    new = pa.RecordBatch.from_arrays(columns, schema=batch.schema)
    is_gone = rows.column(gone).to_numpy(zero_copy_only=False)
    if rows.num_rows <= batch.num_rows * _LISTED_SHARE:
        return _joined(batch, new, places, is_there, is_gone)
    stays = np.ones(batch.num_rows, bool)
    stays[ends[is_there]] = False
    left = np.flatnonzero(~is_gone)
    numbers = np.insert(np.arange(batch.num_rows), places[left], left + batch.num_rows)
    chosen = numbers[np.insert(stays, places[left], True)]
    return pa.concat_batches([batch, new]).take(pa.array(chosen))


def _joined(
    batch: pa.RecordBatch, new: pa.RecordBatch, places: Any, is_there: Any, is_gone: Any
) -> pa.RecordBatch:
    """Returns `batch` with a few rows inserted at `places`, made of slices, which are copied fast.

    A row of `batch` is left out if `is_there` is true for the row at its place.
    """
    pieces, at = [], 0
    for number, place in enumerate(places):
        if place > at:
            pieces.append(batch.slice(at, place - at))
        if not is_gone[number]:
            pieces.append(new.slice(number, 1))
        at = place + bool(is_there[number])
    return pa.concat_batches([*pieces, batch.slice(at)])


def without_values(column: pa.Array, there: pa.Array) -> pa.Array:
    """Returns the column with null in the rows where `there` is false: the marks of deletion.

    A null is copied from an array of one null, because Arrow's own null structs may have null parts where the
    schema allows none.
    """
    nothing = pa.array([None], column.type)
    numbers = pa.array(np.arange(len(column)))
    kept = pc.and_(there, pc.is_valid(column))
    return pa.concat_arrays([column, nothing]).take(
        pc.if_else(kept, numbers, pa.scalar(len(column), pa.int64()))
    )


@dataclass(slots=True)
class Marks:
    """A counter of the rows that pass through it, and of the marks of deletion among them."""

    rows: int = 0
    marks: int = 0

    def counted(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the batches unchanged and counts their rows; each has the column that marks deletions."""
        for batch in batches:
            self.rows += batch.num_rows
            self.marks += batch.num_rows - batch.column(DELETED_AT).null_count
            yield batch


# What the footer of a keyed table's file records of its rows.


class Places(NamedTuple):
    """The first and last place of the loads that wrote a file's rows, and the presence of marks.

    A place is None if it is not known. `has_marks` is true if the file may have marks of deletion.
    """

    first: int | None
    last: int | None
    has_marks: bool


def places_of(store: ObjectStore, name: str) -> Places:
    """Returns the places and marks that a file's footer records; raises `ObjectNotFound` or `InvalidData`."""
    sequence, deleted_at = chunks_of(store, name, (SEQUENCE, DELETED_AT))
    first, last = ends_of(sequence) or (None, None)
    statistics = ((one.statistics, one.num_values) for one in deleted_at)
    has_marks = any(s is None or not s.has_null_count or s.null_count < values for s, values in statistics)
    return Places(first, last, has_marks)


def chunks_of(
    store: ObjectStore, name: str, columns: Sequence[str | None]
) -> list[list[pq.ColumnChunkMetaData]]:
    """Returns for each column a list of its metadata in each row group of a file.

    The list of a column that the file lacks is empty.
    """
    with parquet_object(store, name) as file:
        metadata = file.metadata
    names = [metadata.schema.column(number).path for number in range(metadata.num_columns)]
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return [[one.column(names.index(name)) for one in groups] if name in names else [] for name in columns]


def ends_of(chunks: Sequence[pq.ColumnChunkMetaData]) -> tuple[int, int] | None:
    """Returns the smallest and the largest value of an integer column, or None if not known."""
    statistics = [one.statistics for one in chunks]
    if not statistics or any(one is None or not one.has_min_max for one in statistics):
        return None
    return min(one.min_raw for one in statistics), max(one.max_raw for one in statistics)
