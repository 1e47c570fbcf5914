"""Look-ups of many keys in a sorted Parquet file, which decode only the pages that can have the keys.

The pages of a column of a row group are decoded together, as those of a small Parquet file in memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as _is

from dormouse.data.arrow_schema import arrow_type
from dormouse.model.loops import portions
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import INT, LONG
from dormouse.objects.store import ObjectStore
from dormouse.reading.file_cache import KEPT, KnownFile, OpenFile, Span, opened
from dormouse.reading.file_pages import FilePages, as_in_index, decoded_pages
from dormouse.reading.gone_rows import Numbers, places_of
from dormouse.reading.page_index import Chunk, NotUnderstood, Pages, Part
from dormouse.reading.streams import Interruption

KEYS_MAX = 10_000
"""The most values of the first row key that are looked up together, also those of a range."""
FOUND_MAX = 65_536
"""The most rows of a file that a look-up returns. A query engine returns more rows in bounded memory."""
FOUND_BYTES_MAX = 16 * 1024 * 1024
"""The most bytes of the rows of a file that a look-up returns."""
KEY_ROWS_MAX = 1_024
"""The most rows of a page that has one key alone."""
_PIECE_BYTES = 1024 * 1024
"""The bytes of pages of a column from which no further ones are decoded together."""
_VALUES_BYTES = 16 * 1024 * 1024
"""The bytes in memory of the values of pages from which no further ones are decoded together."""
_FAR_BYTES = 16 * 1024 * 1024
"""The bytes of pages, and of gaps between them, from which no further ones are read at once from an object
not on this machine.
"""


@dataclass(frozen=True)
class KeyList:
    """Wanted keys: those that have, for each row key of one of `slices`, one of its values.

    `firsts` are all values of the first row key, in order.
    """

    first: Field
    firsts: pa.Array
    slices: tuple[Mapping[str, pa.Array], ...]

    @staticmethod
    def of(schema: Schema, slices: Sequence[KeyRanges]) -> KeyList | None:
        """Returns the keys that some ranges want; None without a list of at most `KEYS_MAX` first values."""
        first = schema.row_keys[0]
        found = []
        for ranges in slices:
            values = values_of(first, ranges.get(first.name, ()))
            others = [(schema.field(name), ranges[name]) for name in ranges if name != first.name]
            if not values or not all(one.is_exact for _, some in others for one in some):
                return None
            found.append({first.name: values} | {field.name: _exact(field, some) for field, some in others})
        if not found:
            return None
        firsts: Any = found[0][first.name]
        if len(found) > 1:
            firsts = pc.unique(pa.concat_arrays([one[first.name] for one in found]))
            firsts = firsts.take(pc.sort_indices(firsts))
        return KeyList(first, firsts, tuple(found)) if len(firsts) <= KEYS_MAX else None

    @cached_property
    def in_index(self) -> list[Any]:
        """The values of the first row key, in order, as they can be compared with bounds of pages."""
        if self.first.type in (INT, LONG):
            return self.firsts.to_pylist()  # type: ignore[no-any-return]
        return [as_in_index(self.first, value) for value in self.firsts]

    @property
    def names(self) -> list[str]:
        """The row keys that are tested in addition to the first."""
        names = dict.fromkeys(chain.from_iterable(self.slices))
        return [name for name in names if name != self.first.name]

    def candidates(self, column: pa.Array) -> Numbers:
        """Returns the positions of the rows whose first row key is wanted. The column ascends."""
        if _is.is_integer(column.type):
            return places_of(column.to_numpy(), self.firsts.to_numpy())
        return np.flatnonzero(_is_in(column, self.firsts))

    def wanted(self, keys: Mapping[str, pa.Array] | pa.RecordBatch) -> Any:
        """Returns a flag for each candidate row: true if its keys are wanted."""
        return reduce(
            np.logical_or,
            (
                reduce(np.logical_and, (_is_in(keys[name], values) for name, values in one.items()))
                for one in self.slices
            ),
        )


def count_of(field: Field, items: Sequence[Range]) -> int:
    """Returns the number of values of a column in some ranges, more than `KEYS_MAX` if it is not known.

    A range of whole numbers has few values if its ends are near. Other ranges must have one value each.
    """
    if all(one.is_exact for one in items):
        return len(items)
    spans = _spans(field, items)
    return KEYS_MAX + 1 if len(spans) < len(items) else sum(end - start for start, end in spans)


def values_of(field: Field, items: Sequence[Range]) -> pa.Array | None:
    """Returns the values of a column in some ranges, in order; None if they may be more than `KEYS_MAX`."""
    if count_of(field, items) > KEYS_MAX:
        return None
    if all(one.is_exact for one in items):
        return _exact(field, items)
    values = [start + np.arange(end - start) for start, end in _spans(field, items)]
    return pa.array(np.concatenate(values), arrow_type(field.type))


def _spans(field: Field, items: Sequence[Range]) -> list[tuple[int, int]]:
    """Returns the first whole number of each range and the one after its last, if it has both."""
    return [
        (one.min + (not one.min_inclusive), one.max + one.max_inclusive)
        for one in items
        if isinstance(one.min, int) and isinstance(one.max, int) and field.type in (INT, LONG)
    ]


def _exact(field: Field, items: Sequence[Range]) -> pa.Array:
    return pa.array([one.min for one in items], arrow_type(field.type))


def _is_in(column: pa.Array, values: pa.Array) -> Any:
    found = pc.is_in(column, value_set=values.cast(column.type))
    return found.to_numpy(zero_copy_only=False)


def rows_of_keys(
    store: ObjectStore,
    name: str,
    byte_count: int,
    keys: KeyList,
    columns: Sequence[str],
    *,
    content: bytes | None = None,
    interruption: Interruption,
) -> list[pa.RecordBatch] | None:
    """Returns the rows of a table's file that have one of some keys, in the file's order.

    See `page_reads.rows_of`, also for the cases in which it returns None. Raises `DormouseError` if it is
    interrupted.
    """
    try:
        with opened(store, name, byte_count, content) as source:
            if (whole := KEPT.whole(source)) is not None:
                at = keys.candidates(whole[keys.first.name])
                found = whole.take(pa.array(at))
                if keys.names:
                    found = found.filter(
                        pa.array(keys.wanted(dict(zip(whole.schema.names, found.columns, strict=True))))
                    )
                return [found.select(columns)]
            return _ListLookup(KEPT.file(source), source, keys, columns, interruption).rows()
    except Exception:  # the numbers in a damaged file can be anything, and cause any error
        interruption.check()
        return None


class _Want(NamedTuple):
    """Some pages of a column in the row group `number`, by their numbers in `some`, which ascend."""

    number: int
    chunk: Chunk
    pages: Pages
    some: list[int]

    @property
    def spans(self) -> list[Span]:
        """The bytes of the pages; those of consecutive pages are one span."""
        found: list[Span] = []
        for one in self.some:
            at, size = self.pages.offsets[one], self.pages.sizes[one]
            if found and sum(found[-1]) == at:
                at, size = found[-1][0], found.pop()[1] + size
            found.append((at, size))
        return found

    def values_bytes(self, page: int) -> float:
        """Returns the approximate bytes in memory of the values of a page, 0 if they are not known."""
        rows = self.pages.first_rows
        return (self.chunk.byte_count or 0) * (rows[page + 1] - rows[page]) / rows[-1]

    def pieces(self) -> Iterator[_Want]:
        """Yields the pages in pieces: new memory for many at once would cost more than their decoding."""

        def share(page: int) -> float:
            return max(self.pages.sizes[page] / _PIECE_BYTES, self.values_bytes(page) / _VALUES_BYTES)

        for some in portions(self.some, share, 1):
            yield self._replace(some=some)


class _Values(NamedTuple):
    """The decoded values of some pages of a column in the row group `number`.

    `firsts` are the pages' first rows, and `starts` their positions among the values. `end` is the first row
    after the last page.
    """

    number: int
    name: str
    column: pa.Array
    firsts: Numbers
    starts: Numbers
    end: int

    def rows(self, at: Numbers) -> Numbers:
        """Returns the numbers of rows in the row group, by their positions among the values."""
        page = np.searchsorted(self.starts, at, "right") - 1
        found: Numbers = self.firsts[page] + at - self.starts[page]
        return found

    def of(self, rows: Numbers) -> pa.Array:
        """Returns the values of those of some rows that are here, by their numbers in the row group."""
        here = rows[slice(*np.searchsorted(rows, [self.firsts[0], self.end]))]
        page = np.searchsorted(self.firsts, here, "right") - 1
        return self.column.take(pa.array(self.starts[page] + here - self.firsts[page]))


class _ListLookup(FilePages):
    """A look-up of many keys in one file: first in the pages of the first row key, then of the others."""

    def __init__(
        self,
        file: KnownFile,
        source: OpenFile,
        keys: KeyList,
        columns: Sequence[str],
        interruption: Interruption,
    ) -> None:
        super().__init__(file, source, keys.first, {*columns, keys.first.name, *keys.names})
        self._keys, self._columns, self._interruption = keys, columns, interruption
        self._rows: dict[int, Numbers] = {}
        """The numbers of the found rows in each row group."""
        self._found: dict[int, dict[str, pa.Array]] = {}
        """The columns of the found rows of each row group."""

    def rows(self) -> list[pa.RecordBatch]:
        self._find()
        if names := self._keys.names:
            self._add(names)
            for number, keys in list(self._found.items()):
                flags = self._keys.wanted(keys)
                self._rows[number] = self._rows[number][flags]
                self._found[number] = {name: one.filter(pa.array(flags)) for name, one in keys.items()}
                if not flags.any():
                    del self._rows[number], self._found[number]
        self._add([name for name in self._columns if name not in (self._first.name, *names)])
        return [
            pa.RecordBatch.from_arrays([columns[name] for name in self._columns], names=list(self._columns))
            for columns in self._found.values()
        ]

    def _find(self) -> None:
        """Finds the rows whose first row key is wanted."""
        rows: dict[int, list[Numbers]] = defaultdict(list)
        keys: dict[int, list[pa.Array]] = defaultdict(list)
        count = 0
        for one in self._read([self._candidates(number) for number in self._groups()]):
            at = self._keys.candidates(one.column)
            count += len(at)
            if count > FOUND_MAX:
                raise NotUnderstood("keys of many rows")
            if len(at):
                rows[one.number].append(one.rows(at))
                keys[one.number].append(one.column.take(pa.array(at)))
        self._rows = {number: np.concatenate(some) for number, some in rows.items()}
        self._found = {number: {self._first.name: pa.concat_arrays(some)} for number, some in keys.items()}

    def _groups(self) -> Iterator[int]:
        """Yields the row groups that may have keys."""
        wanted = self._keys.in_index
        for number, (low, high) in enumerate(self.group_bounds()):
            if bisect_left(wanted, low) < bisect_right(wanted, high):
                yield number

    def _candidates(self, number: int) -> _Want:
        """Returns the pages of the first row key that may have keys, in a row group."""
        wanted, some = self._keys.in_index, []
        chunk = self._file.groups[number].chunks[self._first.name]
        pages = self.pages(number, chunk)
        for page, (low, high) in enumerate(zip(*self.page_bounds(number), strict=True)):
            if bisect_left(wanted, low) < bisect_right(wanted, high):
                if low == high and pages.first_rows[page + 1] - pages.first_rows[page] > KEY_ROWS_MAX:
                    raise NotUnderstood("a key of many rows")
                some.append(page)
        return _Want(number, chunk, pages, some)

    def _add(self, names: Sequence[str]) -> None:
        """Adds the values of more columns to the found rows."""
        wants, expected = [], 0.0
        for number, rows in self._rows.items() if names else ():
            group = self._file.groups[number]
            known: dict[int, list[int]] = {}  # most columns have their pages' first rows in one array
            for name in names:
                chunk = group.chunks[name]
                expected += (chunk.byte_count or 0) * len(rows) / group.row_count
                if expected > FOUND_BYTES_MAX:
                    raise NotUnderstood("rows of many bytes")
                pages = self.pages(number, chunk)
                if id(pages.first_rows) not in known:
                    at = np.searchsorted(np.array(pages.first_rows), rows, "right") - 1
                    known[id(pages.first_rows)] = np.unique(at).tolist()
                wants.append(_Want(number, chunk, pages, known[id(pages.first_rows)]))
        parts: dict[tuple[int, str], dict[int, pa.Array]] = defaultdict(dict)
        byte_count = 0
        for one in self._read(wants):
            column = parts[one.number, one.name][int(one.firsts[0])] = one.of(self._rows[one.number])
            byte_count += int(column.nbytes)
            if byte_count > FOUND_BYTES_MAX:
                raise NotUnderstood("rows of many bytes")
        for (number, name), some in parts.items():
            self._found[number][name] = pa.concat_arrays([some[first] for first in sorted(some)])

    def _read(self, wants: Sequence[_Want]) -> Iterator[_Values]:
        """Yields the values of pages; those of one column, read without others, in the order of the rows."""
        pieces = (piece for want in wants for piece in want.pieces())
        bytes_max = _FAR_BYTES if self._source.is_far else _PIECE_BYTES

        def share(want: _Want) -> float:
            values = sum(map(want.values_bytes, want.some))
            return max(self._source.bytes_read(want.spans) / bytes_max, values / _VALUES_BYTES)

        for some in portions(pieces, share, 1):
            self._interruption.check()
            spans = [want.spans for want in some]
            coded = [
                (want, want.chunk.dictionary)
                for want in some
                if want.chunk.dictionary and self.known(want.number, want.chunk) is None
            ]
            data = iter(self._source.read([*chain.from_iterable(spans), *(span for _, span in coded)]))
            pages = [b"".join(next(data) for _ in each) for each in spans]
            for (want, _), dictionary in zip(coded, data, strict=True):
                self.note(want.number, want.chunk, dictionary)
            yield from self._values(some, pages)

    def _values(self, wants: Sequence[_Want], data: Sequence[bytes]) -> Iterator[_Values]:
        """Yields the values of pages. Those of several columns with the same rows are decoded together."""
        alike: dict[tuple[int, int, tuple[int, ...]], list[tuple[_Want, bytes]]] = defaultdict(list)
        for want, pages in zip(wants, data, strict=True):
            alike[want.number, id(want.pages.first_rows), tuple(want.some)].append((want, pages))
        for some in alike.values():
            want = some[0][0]
            rows = np.array(want.pages.first_rows)
            firsts, ends = rows[want.some], rows[np.array(want.some) + 1]
            starts = np.cumsum(ends - firsts) - (ends - firsts)
            parts = [
                Part(one.chunk, self.dictionary(one.number, one.chunk) or b"", pages) for one, pages in some
            ]
            for name, column in decoded_pages(parts, int((ends - firsts).sum())).items():
                yield _Values(want.number, name, column, firsts, starts, int(ends[-1]))
