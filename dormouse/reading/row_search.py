"""The search for rows that deletions list: sorted values of columns, found in the columns of a file."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type, is_ascending
from dormouse.model.locks import process_lock
from dormouse.model.schema import Field

KEPT_BYTES_MAX = 256 * 1024 * 1024
"""The bytes of the cached sets of a process. Above it, the least recently used ones are dropped."""
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class _Prefixes:
    """The values that sorted rows have in their first columns together, numbered from 0 in their order.

    `numbers` has the number of each row. If the last of these columns has integers, `values` has the distinct
    ones, and `pairs` a number for each row, made of that of the columns before it and its value's place.
    """

    numbers: Numbers
    values: Numbers | None
    pairs: Numbers | None

    @staticmethod
    def of(before: _Prefixes | None, column: pa.Array, integers: Numbers | None) -> _Prefixes:
        """Returns the prefixes that end with a column; `before` are those that end before it."""
        is_new = np.ones(len(column), bool)
        is_new[1:] = pc.not_equal(column.slice(1), column.slice(0, len(column) - 1)).to_numpy(False)
        earlier = np.zeros(len(column), np.int64) if before is None else before.numbers
        is_new[1:] |= earlier[1:] != earlier[:-1]
        if integers is None:
            return _Prefixes(np.cumsum(is_new) - 1, None, None)
        values, places = np.unique(integers, return_inverse=True)
        return _Prefixes(np.cumsum(is_new) - 1, values, earlier * len(values) + places)

    def places(self, earlier: Numbers, integers: Numbers, start: int, end: int) -> Numbers:
        """Returns the first of the rows from `start` to `end` with a prefix, for several; -1 without one.

        A prefix is the number of an `earlier` one, and an integer.
        """
        if self.values is None or self.pairs is None:
            raise AssertionError("the last column of the prefixes has no integers")
        at = np.minimum(np.searchsorted(self.values, integers), len(self.values) - 1)
        near, wanted = self.pairs[start:end], earlier * len(self.values) + at
        places = np.minimum(np.searchsorted(near, wanted), len(near) - 1)
        return np.where((self.values[at] == integers) & (near[places] == wanted), places + start, -1)


class RowSearch:
    """A search for the rows that are equal to one of some rows."""

    def __init__(self, columns: Sequence[pa.Array], kinds: Sequence[pa.DataType], ordered: int = 0) -> None:
        """Prepares the search; the rows ascend by the first `ordered` columns, which have no nulls."""
        self._kinds = list(kinds)
        self._columns = [comparable(one, kind) for one, kind in zip(columns, kinds, strict=True)]
        self._numbers = [_numbers(one) for one in self._columns]
        self._prefixes: list[_Prefixes] = []
        for column, numbers in zip(self._columns[:ordered], self._numbers, strict=False):
            before = self._prefixes[-1] if self._prefixes else None
            self._prefixes.append(_Prefixes.of(before, column, numbers))
        self._ordered = ordered

    @property
    def byte_count(self) -> int:
        return sum(2 * int(one.nbytes) for one in self._columns) + 24 * self._ordered * len(self._columns[0])

    def flags(self, columns: Sequence[pa.Array]) -> Flags:
        """Returns a flag for each row: true if it is equal to one of the searched rows."""
        rows = max(map(len, columns))
        found = np.zeros(rows, bool)
        # an engine gives one value of a column in which all values are equal
        whole = [pa.repeat(one[0], rows) if len(one) < rows else one for one in columns]
        found[self._positions(whole, rows)] = True
        return found

    def _positions(self, columns: Sequence[pa.Array], rows: int) -> Numbers:
        """Returns the positions of the rows that are equal to a searched row."""
        start, end, first = self._near(columns, rows)
        at = np.arange(rows)
        if start == end:
            return at[:0]
        places, compared = self._places(columns, first, start, end)
        at, places = at[places >= 0], places[places >= 0]
        if compared > first:
            near = self._prefixes[compared - 1].numbers[start:end]
            if np.all(near[1:] > near[:-1]):
                return self._paired(columns, compared, at, places)
        return self._grouped(columns, first, at, np.arange(start, end))

    def _paired(self, columns: Sequence[pa.Array], first: int, at: Numbers, wanted: Numbers) -> Numbers:
        """Returns the positions of `at` whose rows are equal to the searched rows `wanted`, one each."""
        for number in range(first, len(columns)):
            if len(at):
                left, right = np.split(self._codes(number, columns[number].take(pa.array(at)), wanted), 2)
                at, wanted = at[left == right], wanted[left == right]
        return at

    def _grouped(self, columns: Sequence[pa.Array], first: int, at: Numbers, wanted: Numbers) -> Numbers:
        """Returns the positions of `at` whose rows are equal to any of the searched rows `wanted`."""
        groups = np.zeros(len(wanted) + len(at), np.int64)
        for number in range(first, len(columns)):
            if not len(at):
                break
            codes = np.unique(
                self._codes(number, columns[number].take(pa.array(at)), wanted), return_inverse=True
            )[1]
            _, groups = np.unique(groups * (int(codes.max()) + 1) + codes, return_inverse=True)
            left, right = groups[: len(wanted)], groups[len(wanted) :]
            stays, is_found = np.isin(left, right), np.isin(right, left)
            at, wanted = at[is_found], wanted[stays]
            groups = np.concatenate([left[stays], right[is_found]])
        return at

    def _near(self, columns: Sequence[pa.Array], rows: int) -> tuple[int, int, int]:
        """Returns the consecutive searched rows near some rows, and the first column to compare.

        The rows on both sides are equal in the columns before it.
        """
        start, end = 0, len(self._columns[0]) if rows else 0
        for number in range(self._ordered):
            if start == end or columns[number].null_count:
                return start, end, number
            low, high = self._ends(number, columns[number])
            values: Any = self._numbers[number]
            if values is None:
                values = _Values(self._columns[number])
            start, end = bisect_left(values, low, start, end), bisect_right(values, high, start, end)
            if low != high:
                return start, end, number
        return start, end, self._ordered

    def _ends(self, number: int, column: pa.Array) -> tuple[Any, Any]:
        known = comparable(column, self._kinds[number])
        values = _numbers(known)
        if values is not None:
            return int(values.min()), int(values.max())
        ends = pc.min_max(known)
        return ends["min"].as_py(), ends["max"].as_py()

    def _places(self, columns: Sequence[pa.Array], first: int, start: int, end: int) -> tuple[Numbers, int]:
        """Returns the first row from `start` to `end` that is equal to each row in some columns; or -1.

        These are columns from `first` on, by which the searched rows ascend. Also returns the column after
        them.
        """
        places = np.full(len(columns[0]), start)
        for number in range(first, self._ordered):
            known = comparable(columns[number], self._kinds[number])
            integers = _numbers(known)
            if integers is not None and self._numbers[number] is not None:
                earlier = self._prefixes[number - 1].numbers[places] if number else np.zeros_like(places)
                found = self._prefixes[number].places(earlier, integers, start, end)
            elif number == first and not known.null_count:
                near = self._columns[number].slice(start, end - start)
                found = pc.index_in(known, near).fill_null(-1 - start).to_numpy().astype(np.int64) + start
            else:
                return places, number
            places = np.where((places < 0) | (found < 0), -1, found)
        return places, self._ordered

    def _codes(self, number: int, column: pa.Array, wanted: Numbers) -> Numbers:
        """Returns numbers that are equal for equal values: of the searched rows, then of the others."""
        known = comparable(column, self._kinds[number])
        values, numbers = self._numbers[number], _numbers(known)
        if values is not None and numbers is not None:
            return np.concatenate([values[wanted], numbers])
        both = pa.concat_arrays([self._columns[number].take(pa.array(wanted)), known])
        codes: Numbers = both.dictionary_encode("encode").indices.to_numpy().astype(np.int64)
        return codes


@dataclass(frozen=True, slots=True)
class _Values(Sequence[Any]):
    """The values of an Arrow array as a sequence of Python."""

    column: pa.Array

    def __len__(self) -> int:
        return len(self.column)

    def __getitem__(self, place: Any) -> Any:
        return self.column[place].as_py()


def comparable(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns a column of a type in a form in which Arrow takes equal values for equal."""
    column = column if column.type == kind else column.cast(kind)
    if pa.types.is_floating(kind):
        # NaN has many forms, and zero two
        return pc.if_else(pc.is_nan(column), pa.scalar(np.nan, kind), pc.add(column, pa.scalar(0.0, kind)))
    if pa.types.is_nested(kind):
        values = column.cast(_without_times(kind)).to_pylist()
        return pa.array([None if one is None else repr(_plain(one)) for one in values], pa.string())
    return column


def _numbers(column: pa.Array) -> Numbers | None:
    """Returns a column as 64-bit integers in the order of its values; None for nulls and other types."""
    kind = column.type
    if column.null_count:
        return None
    if pa.types.is_timestamp(kind):
        column = column.view(pa.int64())
    elif pa.types.is_date32(kind):
        column = column.view(pa.int32())
    elif not pa.types.is_integer(kind):
        return None
    numbers: Numbers = column.to_numpy().astype(np.int64, copy=False)
    return numbers


def _without_times(kind: pa.DataType) -> pa.DataType:
    """Returns a nested type with integers instead of times, since Python's types have a smaller range."""
    if pa.types.is_timestamp(kind) or pa.types.is_date32(kind):
        return pa.int64() if pa.types.is_timestamp(kind) else pa.int32()
    if pa.types.is_struct(kind):
        return pa.struct([part.with_type(_without_times(part.type)) for part in kind])
    if pa.types.is_map(kind):
        return pa.map_(_without_times(kind.key_type), _without_times(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_times(kind.value_type)))
    return kind


def _plain(value: Any) -> Any:
    """Returns a nested value without -0.0; NaN has one text in Python."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    return value + 0.0 if isinstance(value, float) else value


class _Searches:
    """A cache of searches, which drops the least recently used ones above a number of bytes."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, RowSearch] = OrderedDict()
        self._byte_count = 0
        self._lock = process_lock()

    def of(
        self, key: object, fields: Sequence[Field], read: Callable[[], pa.Table], *, joined: bool
    ) -> RowSearch:
        """Returns the search for listed rows. `joined` means that they are those of several files."""
        with self._lock:
            if (known := self._known.get(key)) is not None:
                self._known.move_to_end(key)
                return known
        made = _search(fields, read(), joined=joined)
        with self._lock:
            if key not in self._known:
                self._known[key] = made
                self._byte_count += made.byte_count
            while self._byte_count > KEPT_BYTES_MAX and len(self._known) > 1:
                self._byte_count -= self._known.popitem(last=False)[1].byte_count
        return made


KNOWN = _Searches()


def _search(fields: Sequence[Field], rows: pa.Table, *, joined: bool) -> RowSearch:
    kinds = [arrow_type(one.type) for one in fields]
    table = rows.cast(pa.schema(zip((one.name for one in fields), kinds, strict=True)))
    keys = list(takewhile(lambda one: one.type.is_key_type and not one.nullable, fields))
    if joined and keys:
        table = table.sort_by([(one.name, "ascending") for one in keys])
    columns = [one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for one in table.itercolumns()]
    rows_in_order = pa.RecordBatch.from_arrays(columns, names=table.column_names)
    ordered = len(keys)
    while ordered and not is_ascending(rows_in_order.select(range(ordered))):
        ordered -= 1
    return RowSearch(columns, kinds, ordered)
