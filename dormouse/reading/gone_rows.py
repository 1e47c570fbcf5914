"""The rows of a file that readers leave out, by their numbers in the file and by their keys."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import exact
from dormouse.model.region import Range, number_of_value
from dormouse.model.types import DATE, INT, LONG, TIMESTAMP, Field

if TYPE_CHECKING:
    from dormouse.reading.where import Deletion

NUMBERS = (INT, LONG, TIMESTAMP, DATE)
"""Types of keys whose values are compared as integers."""
SLICES_MAX = 64
"""The most slices of a batch between the rows that are left out. A filter copies more slices faster."""
SLICE_ROWS_MIN = 4_096
"""The fewest rows, on average, of slices of a batch that are returned without a copy."""
KEY_BYTES_MAX = 64 * 1024 * 1024
"""The most bytes of keys that are collected to find the rows of one file."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class GoneRows:
    """Rows of one sorted file that readers leave out.

    `numbers` are their positions in the file, ascending from 0, and `keys` their row keys and sort keys in
    the same order. `has_whole_keys` is true if the file has no other row with one of these keys. `deletions`
    are the deletions that match the rows, and no others of the file.
    """

    numbers: Numbers
    keys: pa.RecordBatch
    has_whole_keys: bool
    deletions: tuple[Deletion, ...] = ()

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def byte_count(self) -> int:
        return int(self.numbers.nbytes + self.keys.nbytes)

    def within(self, first: Field, wanted: Range) -> GoneRows:
        """Returns the rows whose first key lies in a range; or more, if the key is no number."""
        if wanted == Range() or not len(self) or first.type not in NUMBERS:
            return self
        column = _integers(self.keys.column(first.name))
        low, high = (None if end is None else number_of_value(end) for end in (wanted.min, wanted.max))  # type: ignore[arg-type]
        start = 0 if low is None else bisect_left(column, low)
        end = len(self) if high is None else bisect_right(column, high)
        return replace(self, numbers=self.numbers[start:end], keys=self.keys.slice(start, end - start))

    def together(self, other: GoneRows) -> GoneRows:
        """Returns the rows of both. It may not notice that they leave no row of a key."""
        numbers, places = np.unique(np.concatenate([self.numbers, other.numbers]), return_index=True)
        both = pa.concat_batches([self.keys, other.keys])
        return GoneRows(
            numbers,
            both.take(pa.array(places)),
            self.has_whole_keys and other.has_whole_keys,
            tuple(dict.fromkeys((*self.deletions, *other.deletions))),
        )


def _integers(column: pa.Array) -> Any:
    """Returns the values of a column whose type is one of `NUMBERS`, as integers."""
    if pa.types.is_timestamp(column.type):
        column = column.view(pa.int64())
    return (column.view(pa.int32()) if pa.types.is_date32(column.type) else column).to_numpy()


def without(
    batches: Iterable[pa.RecordBatch], names: Sequence[str], gone: Sequence[GoneRows]
) -> Iterator[pa.RecordBatch]:
    """Yields batches without the rows that have one of the keys of `gone`; `names` are the key's columns.

    The batches are sorted by key. So are the rows of `gone`, one item after another.
    """
    keys = pa.concat_batches([one.keys for one in gone if len(one)]) if any(map(len, gone)) else None
    if keys is None:
        yield from batches
        return
    search = _Search(keys, names)
    for batch in batches:
        yield from _dropped(batch, search.positions(batch)) if batch.num_rows else [batch]


def found_in(batches: Iterable[pa.RecordBatch], keys: pa.RecordBatch, names: Sequence[str]) -> GoneRows:
    """Returns the rows that have one of the keys; `names` are the key's columns.

    The batches have all rows of a file with one of the keys, in key order. `keys` are sorted.
    """
    search, row = _Search(keys, names), 0
    numbers, some = [np.array([], np.int64)], [keys.slice(0, 0)]
    for batch in batches:
        at = search.positions(batch)
        numbers.append(at + row)
        some.append(exact(batch.take(pa.array(at)), keys.schema))
        row += batch.num_rows
    return GoneRows(np.concatenate(numbers), pa.concat_batches(some), has_whole_keys=True)


class _Search:
    """A search for rows that have one of some sorted keys."""

    def __init__(self, keys: pa.RecordBatch, names: Sequence[str]) -> None:
        self._keys, self._names = keys, names
        first = keys.column(names[0])
        is_number = pa.types.is_integer(first.type) or pa.types.is_temporal(first.type)
        self._wanted = _integers(first) if is_number else None

    def positions(self, batch: pa.RecordBatch) -> Numbers:
        """Returns the positions of the rows in a batch; its first key column ascends."""
        column = batch.column(self._names[0])
        if not len(column):
            return np.array([], np.int64)
        if self._wanted is None:
            near = self._keys
            is_known = pc.is_in(column, value_set=near.column(self._names[0]))
            there = np.flatnonzero(is_known.to_numpy(zero_copy_only=False))
        else:
            values = _integers(column)
            start = int(np.searchsorted(self._wanted, values[0], "left"))
            end = int(np.searchsorted(self._wanted, values[-1], "right"))
            near = self._keys.slice(start, end - start)
            there = places_of(values, np.unique(self._wanted[start:end]))
        return _alike(batch, there, near, self._names)


def _dropped(batch: pa.RecordBatch, rows: Numbers) -> Iterator[pa.RecordBatch]:
    """Yields a batch without some rows, as a few long slices or as a copy."""
    starts, ends = np.append(0, rows + 1), np.append(rows, batch.num_rows)
    is_there = ends > starts
    left = list(zip(starts[is_there].tolist(), ends[is_there].tolist(), strict=True))
    if len(left) > SLICES_MAX:
        stays = np.ones(batch.num_rows, bool)
        stays[rows] = False
        yield batch.filter(pa.array(stays))
        return
    slices = [batch.slice(start, end - start) for start, end in left]
    if len(slices) * SLICE_ROWS_MIN <= batch.num_rows:
        yield from slices
    else:
        yield pa.concat_batches(slices) if slices else batch.slice(0, 0)


def places_of(values: Any, wanted: Any) -> Numbers:
    """Returns the positions in `values` that have one of the values `wanted`; both ascend."""
    starts, ends = np.searchsorted(values, wanted, "left"), np.searchsorted(values, wanted, "right")
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths
    found: Numbers = np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))
    return found


def _alike(batch: pa.RecordBatch, there: Numbers, keys: pa.RecordBatch, names: Sequence[str]) -> Numbers:
    """Returns those of the positions `there` whose rows have one of the keys; the first column is equal."""
    if len(names) == 1 or not len(there):
        return there
    rows = batch.select(names).take(pa.array(there))
    for name in names if len(keys) > len(there) else ():
        values = keys.column(name)
        if not pa.types.is_floating(values.type):  # tuples compare NaN and zeros in another way
            keys = keys.filter(pc.is_in(values, value_set=rows.column(name).cast(values.type)))
    known = set(_listed(keys, names))
    is_known = np.fromiter((key in known for key in _listed(rows, names)), bool, len(there))
    found: Numbers = there[is_known]
    return found


def _listed(rows: pa.RecordBatch, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    columns = (rows.column(name) for name in names)
    # times and dates as integers, since Python's types have a smaller range
    values = (
        _integers(one).tolist() if pa.types.is_temporal(one.type) else one.to_pylist() for one in columns
    )
    return zip(*values, strict=True)


def matched(
    batches: Iterable[pa.RecordBatch],
    schema: pa.Schema,
    first_row: int,
    rows_max: int,
    deletions: tuple[Deletion, ...],
) -> GoneRows | None:
    """Returns the rows whose last column is true, or None if they are more than `rows_max`.

    Returns None as well if their keys have more than `KEY_BYTES_MAX` bytes.

    The other columns are the keys, which `schema` has. The batches have consecutive rows of a sorted file,
    from the row `first_row` on. No row before or after them has one of their keys.
    """
    row, count, byte_count = first_row, 0, 0
    numbers: list[Numbers] = [np.array([], np.int64)]
    is_gone: list[Any] = [np.array([], bool)]
    keys = [pa.RecordBatch.from_pylist([], schema)]
    for batch in batches:
        flags = batch.column(batch.num_columns - 1).to_numpy(zero_copy_only=False)
        at = np.flatnonzero(flags)
        count += len(at)
        if count > rows_max or byte_count > KEY_BYTES_MAX:
            return None
        # the rows beside a matched one show whether its key has other rows
        near = np.unique(np.concatenate([at - 1, at, at + 1, [0, batch.num_rows - 1]]))
        near = near[(near >= 0) & (near < batch.num_rows)]
        numbers.append(near + row)
        is_gone.append(flags[near])
        keys.append(exact(batch.select(range(batch.num_columns - 1)).take(pa.array(near)), schema))
        byte_count += keys[-1].nbytes
        row += batch.num_rows
    rows, gone, known = np.concatenate(numbers), np.concatenate(is_gone), pa.concat_batches(keys)
    equal = (pc.equal(one.slice(1), one.slice(0, max(0, len(one) - 1))) for one in known.columns)
    is_same_key = reduce(pc.and_, equal).to_numpy(zero_copy_only=False)
    divided = is_same_key & (gone[1:] != gone[:-1]) & (rows[1:] == rows[:-1] + 1)
    return GoneRows(rows[gone], known.filter(pa.array(gone)), not divided.any(), deletions)
