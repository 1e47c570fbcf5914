"""Look-ups of one key in a sorted Parquet file, which read only the pages that can have the key.

The pages are copied into a small Parquet file in memory, which pyarrow decodes. Files never change, so the
positions of their pages are cached in memory for all queries of the process.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from itertools import takewhile
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_type, written_schema
from dormouse.data.newest import first_of_keys
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError
from dormouse.model.schema import Schema, is_as_stored
from dormouse.model.table import DELETED_AT, is_keyed, newest_first, stored_schema
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, Field
from dormouse.objects.store import ObjectStore
from dormouse.reading.gone_rows import without
from dormouse.reading.page_index import (
    TAIL_BYTES,
    Chunk,
    NotUnderstood,
    Pages,
    Part,
    RowGroup,
    as_data_page,
    bounds_of_pages,
    coded_page,
    footer_bytes,
    pages,
    row_groups,
    small_file,
    values_of_dictionary,
)
from dormouse.reading.planner import Scan
from dormouse.reading.where import Question
from dormouse.settings.process import machine_bytes
from dormouse.state.context import TableContext

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
_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
_TEXTS = (STRING, BYTES)
_FAILURES = (NotUnderstood, pa.ArrowException, DormouseError, LookupError, ValueError, TypeError, OSError)
"""The errors that a damaged file can cause, since its numbers can be anything."""
KEPT_BYTES_MAX = min(256 * 1024 * 1024, machine_bytes() // 32)
_ITEM_BYTES = 1_000
"""The approximate memory that a cached item takes in addition to its bytes."""
_GAP_BYTES_MAX = 1024 * 1024
"""The largest gap between two spans that is read instead of skipped, in an object that is not on this
machine.
"""
_FETCHES_MAX = 8
_LOCAL_TAIL, _FAR_TAIL = 16 * 1024, 256 * 1024
Span = tuple[int, int]
"""The position of a span of bytes in a file, and its length."""
FILES_MAX = 16
"""The most files of a group of leaves for a look-up. A query engine merges more files faster."""


# Parquet files that are read in parts, and the cache of what is known of them; files never change.


class OpenFile:
    """An object that is read in parts. `mark` identifies the object and its content, as a cache key."""

    def __init__(self, store: ObjectStore, name: str, byte_count: int, descriptor: int | None) -> None:
        self._store, self._name, self._descriptor = store, name, descriptor
        self.byte_count = byte_count
        self.is_far = descriptor is None
        self.tail_bytes = min(byte_count, _FAR_TAIL if descriptor is None else _LOCAL_TAIL)
        status = None if descriptor is None else os.fstat(descriptor)
        if status is not None and status.st_size != byte_count:
            raise NotUnderstood("another size than was written")
        inode = None if status is None else (status.st_ino, status.st_mtime_ns)
        self.mark = (store.url, name, byte_count, inode)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Returns the bytes of each span, in order; raises `NotUnderstood` if one is incomplete."""
        if any(at < 0 or size < 0 or at + size > self.byte_count for at, size in spans):
            raise NotUnderstood("a part beyond the file")
        if self._descriptor is not None:
            return [self._whole(os.pread(self._descriptor, size, at), size) for at, size in spans]
        joined = list(_joined(spans))
        if len(joined) == 1:
            fetched = [self._fetched(joined[0])]
        else:
            with ThreadPoolExecutor(min(len(joined), _FETCHES_MAX), "dormouse-pages") as threads:
                fetched = list(threads.map(self._fetched, joined))
        starts = [at for at, _ in joined]
        found = []
        for at, size in spans:
            number = bisect_right(starts, at) - 1
            found.append(fetched[number][at - starts[number] :][:size])
        return found

    def _fetched(self, span: Span) -> bytes:
        return self._store.get_range(self._name, *span)

    @staticmethod
    def _whole(data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise NotUnderstood("an object that ends early")
        return data


@contextmanager
def opened(store: ObjectStore, name: str, byte_count: int) -> Iterator[OpenFile]:
    path: Path | None = store.local_path(name)
    if path is None:
        yield OpenFile(store, name, byte_count, None)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield OpenFile(store, name, byte_count, descriptor)
    finally:
        os.close(descriptor)


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Yields fewer and larger spans, which cover all of these."""
    start, end = -1, -1
    for at, size in sorted(spans):
        if start >= 0 and at - end <= _GAP_BYTES_MAX:
            end = max(end, at + size)
            continue
        if start >= 0:
            yield start, end - start
        start, end = at, at + size
    yield start, end - start


@dataclass
class KnownFile:
    """The metadata of a file; page positions and bounds are added when they are first needed."""

    groups: list[RowGroup]
    tail: bytes
    tail_from: int
    pages: dict[tuple[int, str], Pages] = field(default_factory=dict)
    bounds: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: OpenFile) -> KnownFile:
        at = source.byte_count - source.tail_bytes
        tail = source.read([(at, source.tail_bytes)])[0]
        footer = footer_bytes(tail[-TAIL_BYTES:]) + TAIL_BYTES
        if footer > len(tail):
            before = source.byte_count - footer
            tail, at = source.read([(before, at - before)])[0] + tail, before
        return cls(row_groups(tail[-footer:-TAIL_BYTES]), tail, at)

    def part(self, source: OpenFile, span: Span) -> bytes:
        """Returns the bytes of a span, from those that were read together with the footer if possible."""
        at = span[0] - self.tail_from
        return self.tail[at : at + span[1]] if at >= 0 else source.read([span])[0]


class Kept:
    """A cache of the metadata and dictionaries of files. It drops the least recently used items."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._byte_count = 0
        self._lock = Lock()

    def get(self, key: tuple[Any, ...]) -> Any:
        """Returns the item of a key; None if it is not cached."""
        with self._lock:
            found = self._items.get(key)
            if found is None:
                return None
            self._items.move_to_end(key)
        return found[0]

    def put(self, key: tuple[Any, ...], item: Any, byte_count: int) -> None:
        with self._lock:
            if key in self._items:
                return
            self._items[key] = item, byte_count + _ITEM_BYTES
            self._byte_count += byte_count + _ITEM_BYTES
            while self._byte_count > KEPT_BYTES_MAX and len(self._items) > 1:
                self._byte_count -= self._items.popitem(last=False)[1][1]

    def file(self, source: OpenFile) -> KnownFile:
        found: KnownFile | None = self.get(source.mark)
        if found is None:
            found = KnownFile.of(source)
            # as Python objects the metadata takes several times its size in the file
            self.put(source.mark, found, 4 * len(found.tail))
        return found


KEPT = Kept()


# The rows of one file.


def can_look_up(keys: Sequence[Field], columns: Sequence[Field]) -> bool:
    """Returns whether `rows_of` supports these keys and columns, by their types."""
    return all(one.type in (*_NUMBERS, *_TEXTS) for one in keys) and not any(
        one.type.is_nested for one in columns
    )


def rows_of(
    store: ObjectStore, name: str, byte_count: int, key: Mapping[Field, Any], columns: Sequence[str]
) -> list[pa.RecordBatch] | None:
    """Returns the rows of a table's file that have a key, in the file's order.

    `key` has the values, as Arrow takes them, of the first row key or of the first few row keys. The file is
    sorted by its row keys and has these columns, which `can_look_up` accepts.

    Returns None when a query engine has to read the file. This includes an object that does not exist, is
    damaged, or has a size other than `byte_count`: the engine's reader then raises the error.
    """
    try:
        with opened(store, name, byte_count) as source:
            return _Lookup(KEPT.file(source), source, key, columns).rows()
    except _FAILURES:
        return None


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
    except _FAILURES:
        return []
    known = [
        KeyBounds(_integer(ends[0]), _integer(ends[1]), rows) for ends, rows in groups if ends is not None
    ]
    return known if len(known) == len(groups) else []


def _integer(bound: bytes) -> int:
    return int.from_bytes(bound, "little", signed=True)


def row_groups_in_memory(store: ObjectStore, name: str, byte_count: int) -> list[tuple[int, int]] | None:
    """Returns each row group's row count and size in memory, of a table's file on this machine.

    Returns None when a size is not known, and an empty list for a file that is not on this machine.
    """
    try:
        found = [(one.row_count, one.byte_count) for one in _groups(store, name, byte_count)]
    except _FAILURES:
        return None
    known = [(rows, size) for rows, size in found if size is not None and rows > 0]
    return known if len(known) == len(found) else None


def _groups(store: ObjectStore, name: str, byte_count: int) -> list[RowGroup]:
    """Returns a file's row groups, none if it is not on this machine; raises one of `_FAILURES`."""
    if store.local_path(name) is None:
        return []
    with opened(store, name, byte_count) as source:
        return KEPT.file(source).groups


class _Rows(NamedTuple):
    """A span of rows in a row group: its first row, and the first row after it."""

    start: int
    end: int


@dataclass(slots=True)
class _Fetched:
    """Consecutive pages of a column; `first` is the number of the first page."""

    chunk: Chunk
    pages: Pages
    first: int
    data: bytes

    def of(self, rows: _Rows) -> tuple[bytes, _Rows]:
        """Returns the bytes of the pages that contain `rows`, and the span of all rows in these pages."""
        first, end = _pages_of(self.pages, rows)
        offsets, start = self.pages.offsets, self.pages.offsets[self.first]
        till = offsets[end - 1] + self.pages.sizes[end - 1]
        has = _Rows(self.pages.first_rows[first], self.pages.first_rows[end])
        return self.data[offsets[first] - start : till - start], has


def _pages_of(column: Pages, rows: _Rows) -> tuple[int, int]:
    """Returns the numbers of the first page with some of `rows`, and of the first page after them."""
    return bisect_right(column.first_rows, rows.start) - 1, bisect_left(column.first_rows, rows.end)


class _Lookup:
    """A look-up of one key in one file.

    It reads pages of the key columns first. Pages of other columns follow only if the key is found.
    """

    def __init__(
        self, file: KnownFile, source: OpenFile, key: Mapping[Field, Any], columns: Sequence[str]
    ) -> None:
        self._file, self._source, self._columns = file, source, columns
        self._key = {one.name: pa.scalar(value, arrow_type(one.type)) for one, value in key.items()}
        self._first = next(iter(key))
        self._wanted = _as_in_index(self._first, self._key[self._first.name])

    def rows(self) -> list[pa.RecordBatch]:
        held = [number for number, group in enumerate(self._file.groups) if self._may_hold(group)]
        if len(held) > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        return [some for number in held if (some := self._in_group(number)) is not None]

    def _may_hold(self, group: RowGroup) -> bool:
        bounds = group.chunks[self._first.name].bounds
        if bounds is None:
            raise NotUnderstood("a key without bounds")
        low, high = map(self._decoded, bounds)
        return bool(low <= self._wanted <= high)

    def _in_group(self, number: int) -> pa.RecordBatch | None:
        candidates = self._candidates(number)
        if candidates is None:
            return None
        names = list(self._key)
        others = [name for name in self._columns if name not in self._key]
        # for a remote object, one more round trip costs more than pages that may not be needed
        data = self._fetched(number, names + others if self._source.is_far else names, candidates)
        parts = {name: self._whole(number, data[name], candidates) for name in names}
        keys = _decoded_rows(parts, candidates)
        alike = (pc.equal(keys[name], wanted) for name, wanted in self._key.items())
        at = np.flatnonzero(reduce(pc.and_, alike).to_numpy(zero_copy_only=False))
        if not len(at):
            return None
        if at[-1] - at[0] >= FOUND_MAX:
            raise NotUnderstood("a key of many rows")
        found = _Rows(candidates.start + int(at[0]), candidates.start + int(at[-1]) + 1)
        if not self._source.is_far:
            data = self._fetched(number, others, found)
        columns = {name: column.slice(int(at[0]), len(at)) for name, column in keys.items()}
        coded = {}
        parts = {}
        for name in others:
            values = self._coded(number, data[name], found)
            if values is None:
                pages_of, has = data[name].of(found)
                parts[name] = Part(data[name].chunk, b"", pages_of), has
            else:
                coded[name] = values
        columns |= _decoded_rows(parts, found)
        # copied, since a slice would keep its whole pages in memory
        copied = {name: pa.concat_arrays([column]) for name, column in columns.items()} | coded
        return pa.RecordBatch.from_arrays([copied[name] for name in self._columns], names=self._columns)

    def _candidates(self, number: int) -> _Rows | None:
        """Returns the rows of the pages that may have the first key; None without any.

        `number` is the number of the row group.
        """
        chunk = self._file.groups[number].chunks[self._first.name]
        found = self._file.bounds.get(number)
        if found is None:
            if chunk.column_index is None:
                raise NotUnderstood("a key whose pages have no bounds")
            low, high = bounds_of_pages(self._file.part(self._source, chunk.column_index))
            found = self._file.bounds[number] = [*map(self._decoded, low)], [*map(self._decoded, high)]
        smallest, largest = found
        first = bisect_left(largest, self._wanted)
        end = bisect_right(smallest, self._wanted)
        if first >= end:
            return None
        if end - first > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        rows = self._pages(number, chunk).first_rows
        return _Rows(rows[first], rows[end])

    def _pages(self, number: int, chunk: Chunk) -> Pages:
        found = self._file.pages.get((number, chunk.name))
        if found is None:
            index = self._file.part(self._source, chunk.offset_index)
            found = pages(index, self._file.groups[number].row_count)
            self._file.pages[number, chunk.name] = found
        return found

    def _fetched(self, number: int, names: Sequence[str], rows: _Rows) -> dict[str, _Fetched]:
        """Returns the pages of each column that contain `rows`; caches a remote object's dictionaries."""
        group, spans, wanted = self._file.groups[number], [], []
        for name in names:
            chunk = group.chunks[name]
            found = self._pages(number, chunk)
            first, end = _pages_of(found, rows)
            if found.first_rows[end] - found.first_rows[first] > ROWS_MAX:
                raise NotUnderstood("pages of many rows")
            start, last = found.offsets[first], end - 1
            spans.append((start, found.offsets[last] + found.sizes[last] - start))
            wanted.append((chunk, found, first))
        missing = [
            (chunk, chunk.dictionary)
            for chunk, _, _ in wanted
            if chunk.dictionary and self._source.is_far and self._known(number, chunk) is None
        ]
        data = self._source.read([*spans, *(span for _, span in missing)])
        for (chunk, _), dictionary in zip(missing, data[len(spans) :], strict=True):
            self._note(number, chunk, dictionary)
        return {one[0].name: _Fetched(*one, found) for one, found in zip(wanted, data, strict=False)}

    def _whole(self, number: int, fetched: _Fetched, rows: _Rows) -> tuple[Part, _Rows]:
        """Returns a key column's pages that contain `rows`, with their dictionary, and the pages' rows."""
        chunk = fetched.chunk
        data, has = fetched.of(rows)
        return Part(chunk, self._dictionary(number, chunk) if chunk.dictionary else b"", data), has

    def _coded(self, number: int, fetched: _Fetched, rows: _Rows) -> pa.Array | None:
        """Returns the values of `rows` if the page's values are in a dictionary, otherwise None."""
        chunk = fetched.chunk
        if not chunk.dictionary:
            return None
        data, has = fetched.of(rows)
        page = coded_page(data, chunk, has.end - has.start)
        if page is None:
            return None
        places = [page.place(row - has.start) for row in range(*rows)]
        known = self._dictionary(number, chunk)
        if any(place is not None and place >= len(known) for place in places):
            raise NotUnderstood("a place beyond the dictionary")
        # faster than `take` for a few values, and also a copy
        return pa.concat_arrays(
            [pa.nulls(1, known.type) if place is None else known.slice(place, 1) for place in places]
        )

    def _dictionary(self, number: int, chunk: Chunk) -> Any:
        """Returns the values of a column's dictionary.

        For a key column, returns the encoded bytes instead.
        """
        found = self._known(number, chunk)
        if found is None and chunk.dictionary:
            found = self._note(number, chunk, self._source.read([chunk.dictionary])[0])
        return found

    def _known(self, number: int, chunk: Chunk) -> Any:
        return KEPT.get((self._source.mark, number, chunk.name, chunk.name in self._key))

    def _note(self, number: int, chunk: Chunk, data: bytes) -> Any:
        made: Any = data
        byte_count = len(data)
        if chunk.name not in self._key:
            made = values_of_dictionary(data, chunk)
            if made is None:
                page, count = as_data_page(data, chunk.is_optional)
                made = _decoded([Part(chunk, b"", page)], count)[chunk.name]
            byte_count = made.get_total_buffer_size()
        KEPT.put((self._source.mark, number, chunk.name, chunk.name in self._key), made, byte_count)
        return made

    def _decoded(self, bound: bytes) -> Any:
        """Returns a bound of the page index as a value that can be compared with the wanted key."""
        return _integer(bound) if self._first.type in _NUMBERS else bound


def _as_in_index(key: Field, value: pa.Scalar) -> Any:
    """Returns the wanted key's value as a value that can be compared with a decoded bound."""
    if key.type in (INT, LONG):
        return value.as_py()
    if key.type in _NUMBERS:
        return value.cast(pa.int32() if key.type in (INT, DATE) else pa.int64()).as_py()
    return value.as_buffer().to_pybytes()


def _decoded_rows(parts: Mapping[str, tuple[Part, _Rows]], rows: _Rows) -> dict[str, pa.Array]:
    """Returns the values of `rows` in each column. Pages that have the same rows are decoded together."""
    alike: dict[_Rows, list[Part]] = defaultdict(list)
    for part, has in parts.values():
        alike[has].append(part)
    found = {}
    for has, some in alike.items():
        for name, column in _decoded(some, has.end - has.start).items():
            found[name] = column.slice(rows.start - has.start, rows.end - rows.start)
    return found


def _decoded(parts: list[Part], row_count: int) -> dict[str, pa.Array]:
    """Returns the values of each column, decoded from its pages, which have `row_count` rows."""
    with pq.ParquetFile(pa.BufferReader(small_file(parts, row_count)), pre_buffer=False) as reading:
        table = reading.read(use_threads=False)
    if table.num_rows != row_count:
        raise NotUnderstood("pages of other rows")
    columns = ((name, table[name]) for name in table.column_names)
    return {name: one.chunk(0) if one.num_chunks == 1 else one.combine_chunks() for name, one in columns}


# Look-ups of a key of a table without a query engine.


def looked_up(
    context: TableContext, schema: Schema, question: Question, transform: Transform, scans: Sequence[Scan]
) -> Iterable[pa.RecordBatch] | None:
    """Returns the rows of some files that have one key, read without a query engine, in key order.

    The rows have the keys and the columns of the question. In a keyed table they are the newest rows of each
    key, without marks of deletion. Returns None when a query engine has to read the rows. It does so if more
    than one key is wanted, and if the table aggregates rows or hides some by their age.
    """
    keys = [_key_of(schema, scan) for scan in scans] if len(scans) <= FILES_MAX else [{}]
    if not all(keys) or question.conditions or transform.aggregates or transform.age_off:
        return None
    properties = context.properties
    newest_by = newest_first(properties) if is_keyed(properties) else ()
    stored = stored_schema(schema, properties)
    wanted = list(dict.fromkeys((*schema.key_names, *question.columns)))
    hidden = [*newest_by, DELETED_AT] if newest_by else []
    columns = [stored.field(name) for name in dict.fromkeys((*wanted, *hidden))]
    # a look-up needs files whose deleted rows are known by their keys, written with the current columns
    are_plain = all(
        one.byte_count
        and not one.deletions
        and (one.gone is None or one.gone.has_whole_keys)
        and is_as_stored(written_schema(stored, one.filename), stored)
        for one in scans
    )
    if not (are_plain and can_look_up(schema.key_fields, columns)):
        return None
    names = [field.name for field in columns]
    batches: list[pa.RecordBatch] = []
    for scan, key in zip(scans, keys, strict=True):
        found = rows_of(context.objects, scan.filename, scan.byte_count or 0, key, names)
        if found is None:
            return None
        batches += found if scan.gone is None else without(found, schema.key_names, [scan.gone])
    if len(batches) > 1:
        order = [(name, "ascending") for name in schema.key_names]
        order += [(name, "descending") for name in newest_by]
        rows = pa.Table.from_batches(batches).sort_by(order)
        batches = cast("list[pa.RecordBatch]", rows.combine_chunks().to_batches())
    if newest_by:
        first = first_of_keys(batches, schema.row_key_names)
        batches = [batch.filter(pc.is_null(batch.column(DELETED_AT))).select(wanted) for batch in first]
    return batches


def is_look_up(schema: Schema, scans: Sequence[Scan]) -> bool:
    """Returns whether each of the scans wants one key only."""
    return all(_key_of(schema, scan) for scan in scans)


def _key_of(schema: Schema, scan: Scan) -> dict[Field, Any]:
    """Returns the values of the leading row keys, if the scan wants one key only; otherwise an empty dict."""
    if len(scan.slices) != 1:
        return {}
    wanted = scan.slices[0]
    leading = list(takewhile(lambda field: field.name in wanted, schema.row_keys))
    ranges = [wanted[field.name] for field in leading]
    if len(leading) != len(wanted) or not all(len(one) == 1 and one[0].is_exact for one in ranges):
        return {}
    return {field: one[0].min for field, one in zip(leading, ranges, strict=True)}
