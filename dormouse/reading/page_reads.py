"""Look-ups of one key in a sorted Parquet file, which read only the pages that can have the key.

The pages are copied into a small Parquet file in memory, which pyarrow decodes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.model.types import INT, LONG, Field
from dormouse.objects.store import ObjectStore
from dormouse.reading.file_cache import KEPT, KnownFile, OpenFile, opened
from dormouse.reading.file_pages import (
    NUMBERS,
    TEXTS,
    Fetched,
    FilePages,
    Rows,
    as_in_index,
    decoded_rows,
    integer,
    pages_of,
)
from dormouse.reading.page_index import (
    NotUnderstood,
    Part,
    RowGroup,
)
from dormouse.reading.page_values import coded_page, plain_page

PAGES_MAX = 4
"""The most pages of a column that a look-up reads for one key. A query engine reads more pages faster."""
ROWS_MAX = 32_768
"""The most rows of a column that are decoded for one key.

Pages have many more rows in files of earlier releases and of other writers.
"""
FOUND_MAX = 256
"""The most rows of one key that a look-up reads.

It reads each row by itself if the column has a dictionary, so a query engine reads more rows faster.
"""

# The rows of one file.


def can_look_up(keys: Sequence[Field], columns: Sequence[Field]) -> bool:
    """Returns whether `rows_of` supports these keys and columns, by their types."""
    return all(one.type in (*NUMBERS, *TEXTS) for one in keys) and not any(
        one.type.is_nested for one in columns
    )


def rows_of(
    store: ObjectStore,
    name: str,
    byte_count: int,
    key: Mapping[Field, Any],
    columns: Sequence[str],
    *,
    is_likely: bool = False,
    content: bytes | None = None,
) -> list[pa.RecordBatch] | None:
    """Returns the rows of a table's file that have a key, in the file's order.

    `key` has the values, as Arrow takes them, of the first row key or of the first few row keys. The file is
    sorted by its row keys and has these columns, which `can_look_up` accepts. If `is_likely`, the file
    probably has the key, and more is read at once. `content` has the file's bytes, if they are in memory.

    Returns None when a query engine has to read the file. This includes an object that does not exist, is
    damaged, or has a size other than `byte_count`: the engine's reader then raises the error.
    """
    try:
        with opened(store, name, byte_count, content) as source:
            if (whole := KEPT.whole(source)) is None:
                return _Lookup(KEPT.file(source), source, key, columns, is_likely).rows()
            start, end = _span(whole.schema.names, whole.columns, key)
            if start == end:
                return []
            found = [whole.column(name) for name in columns]
            if end - start < len(whole):  # copied, since a slice would keep the whole file in memory
                found = [pa.concat_arrays([column.slice(start, end - start)]) for column in found]
            return [pa.RecordBatch.from_arrays(found, names=columns)]
    except Exception:  # the numbers in a damaged file can be anything, and cause any error
        return None


def _span(names: Sequence[str], columns: Sequence[pa.Array], key: Mapping[Field, Any]) -> Rows:
    """Returns the rows of columns that have the wanted value of each key. They are sorted by the keys."""
    (first, number), *others = key.items()
    if not others and first.type in (INT, LONG):
        values = columns[names.index(first.name)].to_numpy()
        return Rows(int(values.searchsorted(number)), int(values.searchsorted(number, "right")))
    alike = (
        pc.equal(columns[names.index(one.name)], pa.scalar(value, arrow_type(one.type)))
        for one, value in key.items()
    )
    places = np.flatnonzero(reduce(pc.and_, alike).to_numpy(zero_copy_only=False))
    return Rows(int(places[0]), int(places[-1]) + 1) if len(places) else Rows(0, 0)


class KeyBounds(NamedTuple):
    """The smallest and largest value of the first key in a row group, and its number of rows."""

    low: int
    high: int
    row_count: int


def row_group_bounds(store: ObjectStore, name: str, byte_count: int, key: Field) -> list[KeyBounds]:
    """Returns the bounds of the first key in each row group of a table's file on this machine.

    `key` has the name that it has in the file. Returns an empty list for a file that is not on this machine,
    cannot be read or lacks bounds, and for keys that are not INT or LONG.
    """
    if key.type not in (INT, LONG):
        return []
    try:
        groups = [(one.chunks[key.name].bounds, one.row_count) for one in _groups(store, name, byte_count)]
    except Exception:
        return []
    known = [KeyBounds(integer(ends[0]), integer(ends[1]), rows) for ends, rows in groups if ends is not None]
    return known if len(known) == len(groups) else []


def row_groups_in_memory(store: ObjectStore, name: str, byte_count: int) -> list[tuple[int, int]] | None:
    """Returns each row group's row count and size in memory, of a table's file on this machine.

    Returns None when a size is not known, and an empty list for a file that is not on this machine.
    """
    try:
        found = [(one.row_count, one.byte_count) for one in _groups(store, name, byte_count)]
    except Exception:
        return None
    known = [(rows, size) for rows, size in found if size is not None and rows > 0]
    return known if len(known) == len(found) else None


def _groups(store: ObjectStore, name: str, byte_count: int) -> list[RowGroup]:
    """Returns a file's row groups, none if it is not on this machine; raises any error if it is damaged."""
    if store.local_path(name) is None:
        return []
    with opened(store, name, byte_count) as source:
        return KEPT.file(source).groups


class _Lookup(FilePages):
    """A look-up of one key in one file.

    It reads pages of the key columns first. Pages of other columns follow only if the key is found, unless
    the key is likely to be in the file, or one more round trip would cost more than these pages.
    """

    def __init__(
        self,
        file: KnownFile,
        source: OpenFile,
        key: Mapping[Field, Any],
        columns: Sequence[str],
        is_likely: bool,
    ) -> None:
        first, value = next(iter(key.items()))
        self._names = [one.name for one in key]
        super().__init__(file, source, first, self._names)
        self._columns, self._key, self._is_likely = columns, key, is_likely
        self._wanted = as_in_index(first, pa.scalar(value, arrow_type(first.type)))

    def rows(self) -> list[pa.RecordBatch]:
        wanted = self._wanted
        held = [number for number, (low, high) in enumerate(self.group_bounds()) if low <= wanted <= high]
        if len(held) > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        return [some for number in held if (some := self._in_group(number)) is not None]

    def _in_group(self, number: int) -> pa.RecordBatch | None:
        candidates = self._candidates(number)
        if candidates is None:
            return None
        chunks, names = self._file.groups[number].chunks, list(self._names)
        others = [name for name in self._columns if name not in self._names]
        is_one_read = self._is_likely or self._source.is_far
        data = self._fetched(number, names + others if is_one_read else names, candidates)
        if self._is_likely:  # opening two small files would cost more than decoding these pages
            names += [name for name in others if not (chunks[name].dictionary or data[name].is_plain)]
        parts = {name: self._whole(number, data[name], candidates) for name in names}
        decoded = decoded_rows(parts, candidates)
        start, end = _span([*decoded], [*decoded.values()], self._key)
        if start == end:
            return None
        if end - start > FOUND_MAX:
            raise NotUnderstood("a key of many rows")
        found = Rows(candidates.start + start, candidates.start + end)
        if not is_one_read:
            data = self._fetched(number, others, found)
        columns = {name: column.slice(start, end - start) for name, column in decoded.items()}
        coded, parts = {}, {}
        for name in others:
            if name in columns:
                continue
            values = self._alone(number, data[name], found)
            if values is None:
                pages_of, has = data[name].of(found)
                parts[name] = Part(data[name].chunk, b"", pages_of), has
            else:
                coded[name] = values
        columns |= decoded_rows(parts, found)
        # copied, since a slice would keep its whole pages in memory
        copied = {name: pa.concat_arrays([column]) for name, column in columns.items()} | coded
        return pa.RecordBatch.from_arrays([copied[name] for name in self._columns], names=self._columns)

    def _candidates(self, number: int) -> Rows | None:
        """Returns the rows of the pages that may have the first key; None without any.

        `number` is the number of the row group.
        """
        chunk = self._file.groups[number].chunks[self._first.name]
        smallest, largest = self.page_bounds(number)
        first = bisect_left(largest, self._wanted)
        end = bisect_right(smallest, self._wanted)
        if first >= end:
            return None
        if end - first > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        rows = self.pages(number, chunk).first_rows
        return Rows(rows[first], rows[end])

    def _fetched(self, number: int, names: Sequence[str], rows: Rows) -> dict[str, Fetched]:
        """Returns the pages of each column that contain `rows`; caches a remote object's dictionaries."""
        group, spans, wanted = self._file.groups[number], [], []
        known: dict[int, tuple[int, int]] = {}  # most columns have their pages' first rows in one array
        for name in names:
            chunk = group.chunks[name]
            found = self.pages(number, chunk)
            first, end = numbers = known.get(id(found.first_rows)) or pages_of(found, rows)
            known[id(found.first_rows)] = numbers
            if found.first_rows[end] - found.first_rows[first] > ROWS_MAX:
                raise NotUnderstood("pages of many rows")
            start, last = found.offsets[first], end - 1
            spans.append((start, found.offsets[last] + found.sizes[last] - start))
            wanted.append((chunk, found, first, end))
        missing = [
            (chunk, chunk.dictionary)
            for chunk, *_ in wanted
            if chunk.dictionary and self._source.is_far and self.known(number, chunk) is None
        ]
        data = self._source.read([*spans, *(span for _, span in missing)])
        for (chunk, _), dictionary in zip(missing, data[len(spans) :], strict=True):
            self.note(number, chunk, dictionary)
        return {one[0].name: Fetched(*one, found) for one, found in zip(wanted, data, strict=False)}

    def _whole(self, number: int, fetched: Fetched, rows: Rows) -> tuple[Part, Rows]:
        """Returns a key column's pages that contain `rows`, with their dictionary, and the pages' rows."""
        chunk = fetched.chunk
        data, has = fetched.of(rows)
        return Part(chunk, self.dictionary(number, chunk) if chunk.dictionary else b"", data), has

    def _alone(self, number: int, fetched: Fetched, rows: Rows) -> pa.Array | None:
        """Returns the values of `rows` if they are in a dictionary or plain numbers, otherwise None."""
        chunk = fetched.chunk
        data, has = fetched.of(rows)
        if not chunk.dictionary:
            plain = plain_page(data, chunk, has.end - has.start) if fetched.is_one_page else None
            return plain and pa.concat_arrays([plain.value(row - has.start) for row in range(*rows)])
        page = coded_page(data, chunk, has.end - has.start)
        if page is None:
            return None
        places = [page.place(row - has.start) for row in range(*rows)]
        known = self.dictionary(number, chunk)
        for place in places:
            if place is not None and place >= len(known):
                raise NotUnderstood("a place beyond the dictionary")
        # faster than `take` for a few values, and also a copy
        return pa.concat_arrays(
            [pa.nulls(1, known.type) if place is None else known.slice(place, 1) for place in places]
        )
