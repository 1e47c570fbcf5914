"""The pages of a sorted Parquet file: where they are, their smallest and largest keys, and their values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, Field
from dormouse.reading.file_cache import KEPT, KnownFile, OpenFile
from dormouse.reading.page_index import (
    Chunk,
    NotUnderstood,
    Pages,
    Part,
    as_data_page,
    bounds_of_pages,
    pages,
    small_file,
)
from dormouse.reading.page_values import is_plain, values_of_dictionary

NUMBERS = (INT, LONG, TIMESTAMP, DATE)
TEXTS = (STRING, BYTES)


class Rows(NamedTuple):
    """A span of rows in a row group: its first row, and the first row after it."""

    start: int
    end: int


@dataclass(slots=True)
class Fetched:
    """Consecutive pages of a column; `first` is the number of the first page."""

    chunk: Chunk
    pages: Pages
    first: int
    end: int
    data: bytes

    @property
    def is_one_page(self) -> bool:
        return self.end - self.first == 1

    @property
    def is_plain(self) -> bool:
        """True if this is one page of numbers that are not encoded."""
        rows = self.pages.first_rows
        return self.is_one_page and is_plain(self.data, self.chunk, rows[self.end] - rows[self.first])

    def of(self, rows: Rows) -> tuple[bytes, Rows]:
        """Returns the bytes of the pages that contain `rows`, and the span of all rows in these pages."""
        if self.is_one_page:
            return self.data, Rows(*self.pages.first_rows[self.first : self.end + 1])
        first, end = pages_of(self.pages, rows)
        offsets, start = self.pages.offsets, self.pages.offsets[self.first]
        till = offsets[end - 1] + self.pages.sizes[end - 1]
        has = Rows(self.pages.first_rows[first], self.pages.first_rows[end])
        return self.data[offsets[first] - start : till - start], has


def pages_of(column: Pages, rows: Rows) -> tuple[int, int]:
    """Returns the numbers of the first page with some of `rows`, and of the first page after them."""
    return bisect_right(column.first_rows, rows.start) - 1, bisect_left(column.first_rows, rows.end)


class FilePages:
    """A file of which pages are read. `first` is its first row key, by which it is sorted.

    Dictionaries of the columns `encoded` are returned as bytes, those of others as values.
    """

    def __init__(self, file: KnownFile, source: OpenFile, first: Field, encoded: Container[str]) -> None:
        self._file, self._source, self._first, self._encoded = file, source, first, encoded

    def group_bounds(self) -> list[tuple[Any, Any]]:
        """Returns the smallest and the largest value of the first row key in each row group."""
        found = self._file.group_bounds
        if found is None:
            bounds = [group.chunks[self._first.name].bounds for group in self._file.groups]
            if None in bounds:
                raise NotUnderstood("a key without bounds")
            known = cast("list[tuple[bytes, bytes]]", bounds)
            found = [(self._decoded(low), self._decoded(high)) for low, high in known]
            self._file.group_bounds = found
        return found

    def page_bounds(self, number: int) -> tuple[list[Any], list[Any]]:
        """Returns the smallest and the largest values of the first row key in the pages of a row group."""
        found = self._file.bounds.get(number)
        if found is None:
            chunk = self._file.groups[number].chunks[self._first.name]
            if chunk.column_index is None:
                raise NotUnderstood("a key whose pages have no bounds")
            low, high = bounds_of_pages(self._file.part(self._source, chunk.column_index))
            found = self._file.bounds[number] = [*map(self._decoded, low)], [*map(self._decoded, high)]
        return found

    def pages(self, number: int, chunk: Chunk) -> Pages:
        found = self._file.pages.get((number, chunk.name))
        if found is None:
            index = self._file.part(self._source, chunk.offset_index)
            found = pages(index, self._file.groups[number].row_count)
            self._file.pages[number, chunk.name] = found
        return found

    def dictionary(self, number: int, chunk: Chunk) -> Any:
        """Returns a column's dictionary; None without one."""
        found = self.known(number, chunk)
        if found is None and chunk.dictionary:
            found = self.note(number, chunk, self._source.read([chunk.dictionary])[0])
        return found

    def known(self, number: int, chunk: Chunk) -> Any:
        return KEPT.get((self._source.mark, number, chunk.name, chunk.name in self._encoded))

    def note(self, number: int, chunk: Chunk, data: bytes) -> Any:
        made: Any = data
        byte_count = len(data)
        if chunk.name not in self._encoded:
            made = values_of_dictionary(data, chunk)
            if made is None:
                page, count = as_data_page(data, chunk.is_optional)
                made = decoded_pages([Part(chunk, b"", page)], count)[chunk.name]
            byte_count = made.get_total_buffer_size()
        KEPT.put((self._source.mark, number, chunk.name, chunk.name in self._encoded), made, byte_count)
        return made

    def _decoded(self, bound: bytes) -> Any:
        """Returns a bound of the page index as a value that can be compared with the wanted key."""
        return integer(bound) if self._first.type in NUMBERS else bound


def integer(bound: bytes) -> int:
    """Returns a bound of an integer column as a number."""
    return int.from_bytes(bound, "little", signed=True)


def as_in_index(key: Field, value: pa.Scalar) -> Any:
    """Returns the wanted key's value as a value that can be compared with a decoded bound."""
    if key.type in (INT, LONG):
        return value.as_py()
    if key.type in NUMBERS:
        return value.cast(pa.int32() if key.type in (INT, DATE) else pa.int64()).as_py()
    return value.as_buffer().to_pybytes()


def decoded_rows(parts: Mapping[str, tuple[Part, Rows]], rows: Rows) -> dict[str, pa.Array]:
    """Returns the values of `rows` in each column. Pages that have the same rows are decoded together."""
    alike: dict[Rows, list[Part]] = defaultdict(list)
    for part, has in parts.values():
        alike[has].append(part)
    found = {}
    for has, some in alike.items():
        for name, column in decoded_pages(some, has.end - has.start).items():
            found[name] = column.slice(rows.start - has.start, rows.end - rows.start)
    return found


def decoded_pages(parts: list[Part], row_count: int) -> dict[str, pa.Array]:
    """Returns the values of each column, decoded from its pages, which have `row_count` rows."""
    with pq.ParquetFile(pa.BufferReader(small_file(parts, row_count)), pre_buffer=False) as reading:
        table = reading.read(use_threads=False)
    if table.num_rows != row_count:
        raise NotUnderstood("pages of other rows")
    columns = ((name, table[name]) for name in table.column_names)
    return {name: one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for name, one in columns}
