"""The rows of one key in a sorted Parquet file, of which only the pages that can have them are read.

pyarrow decodes the pages, as a small file that is made of them. A file is never written again, so where its
pages are is kept in memory, once for all queries of the process.
"""

from __future__ import annotations

import os
from bisect import bisect_left, bisect_right
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_type
from dormouse.data.page_index import (
    TAIL_BYTES,
    Chunk,
    NotUnderstood,
    Pages,
    Part,
    RowGroup,
    bounds_of_pages,
    footer_bytes,
    pages,
    row_groups,
    small_file,
)
from dormouse.errors import DormouseError
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, Field
from dormouse.objects import ObjectStore

PAGES_MAX = 4
"""Of a column, for one key: more rows are better read by an engine."""
ROWS_MAX = 32_768
"""Decoded of a column, for one key: in files of before, and of other writers, pages have many more."""
KEPT_BYTES_MAX = 64 * 1024 * 1024
_GAP_BYTES_MAX = 1024 * 1024
"""Read rather than skipped, in an object that is not on this machine."""
_FETCHES_MAX = 8
_LOCAL_TAIL, _FAR_TAIL = 16 * 1024, 256 * 1024
_NUMBERS = (INT, LONG, TIMESTAMP, DATE)
_TEXTS = (STRING, BYTES)
_FAILURES = (NotUnderstood, pa.ArrowException, DormouseError, LookupError, ValueError, TypeError, OSError)
"""Of damaged files, too, whose numbers can say anything."""

Span = tuple[int, int]
"""Bytes of a file: from where, how many."""


def can_look_up(keys: Sequence[Field], columns: Sequence[Field]) -> bool:
    """Whether `rows_of` can tell rows by such keys, and has such columns."""
    return all(one.type in (*_NUMBERS, *_TEXTS) for one in keys) and not any(
        one.type.is_nested for one in columns
    )


def rows_of(
    store: ObjectStore, name: str, byte_count: int, key: Mapping[Field, Any], columns: Sequence[str]
) -> list[pa.Table] | None:
    """The rows of a table's file that have a key, in its order; None when an engine is to read the file.

    `key` has a value, as Arrow takes it, of the first row key, or of the first few. The file has these
    columns, as `can_look_up` knows, and is sorted by its row keys. None also for an object that is gone, is
    damaged, or has other than `byte_count` bytes: who reads it then says what is wrong.
    """
    try:
        with _opened(store, name, byte_count) as source:
            return _Lookup(_kept.get(source), source, key, columns).rows()
    except _FAILURES:
        return None


class _Source:
    """An object that is read in parts. `mark` is another when it is another."""

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
        """These parts, each whole."""
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
def _opened(store: ObjectStore, name: str, byte_count: int) -> Iterator[_Source]:
    path: Path | None = store.local_path(name)
    if path is None:
        yield _Source(store, name, byte_count, None)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield _Source(store, name, byte_count, descriptor)
    finally:
        os.close(descriptor)


def _joined(spans: Sequence[Span]) -> Iterator[Span]:
    """Fewer and larger parts that have all of these."""
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
class _File:
    """What is known of a file; parts of it are found out as they are needed."""

    groups: list[RowGroup]
    tail: bytes
    tail_from: int
    pages: dict[tuple[int, str], Pages] = field(default_factory=dict)
    bounds: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)
    dictionaries: dict[tuple[int, str], bytes] = field(default_factory=dict)
    byte_count: int = 0

    def part(self, source: _Source, span: Span) -> bytes:
        """Some bytes, mostly of those that were read with the footer."""
        at = span[0] - self.tail_from
        return self.tail[at : at + span[1]] if at >= 0 else source.read([span])[0]


class _Kept:
    """Files of which something is known; those that were not read for longest are forgotten."""

    def __init__(self) -> None:
        self._files: OrderedDict[tuple[Any, ...], _File] = OrderedDict()
        self._byte_count = 0
        self._lock = Lock()

    def get(self, source: _Source) -> _File:
        with self._lock:
            found = self._files.get(source.mark)
            if found is not None:
                self._files.move_to_end(source.mark)
        return found or self._read(source)

    def note(self, source: _Source, file: _File, more_bytes: int) -> None:
        """Counts what is kept of a file."""
        with self._lock:
            if self._files.setdefault(source.mark, file) is not file:
                return
            file.byte_count += more_bytes
            self._byte_count += more_bytes
            while self._byte_count > KEPT_BYTES_MAX and len(self._files) > 1:
                self._byte_count -= self._files.popitem(last=False)[1].byte_count

    def _read(self, source: _Source) -> _File:
        at = source.byte_count - source.tail_bytes
        tail = source.read([(at, source.tail_bytes)])[0]
        footer = footer_bytes(tail[-TAIL_BYTES:]) + TAIL_BYTES
        if footer > len(tail):
            before = source.byte_count - footer
            tail, at = source.read([(before, at - before)])[0] + tail, before
        found = _File(row_groups(tail[-footer:-TAIL_BYTES]), tail, at)
        # what it says takes several times as much as objects of Python
        self.note(source, found, 4 * len(tail))
        return found


_kept = _Kept()


class _Rows(NamedTuple):
    """Rows of a row group: from which on, and which is the first after them."""

    start: int
    end: int


_Fetched = tuple[Part, _Rows]
"""Pages, and the rows that they have."""


class _Lookup:
    """One look-up in one file: first the pages of the keys, then, if rows have it, those of other columns."""

    def __init__(
        self, file: _File, source: _Source, key: Mapping[Field, Any], columns: Sequence[str]
    ) -> None:
        self._file, self._source, self._columns = file, source, columns
        self._key = {one.name: pa.scalar(value, arrow_type(one.type)) for one, value in key.items()}
        self._first = next(iter(key))
        self._wanted = _as_in_index(self._first, self._key[self._first.name])

    def rows(self) -> list[pa.Table]:
        held = [number for number, group in enumerate(self._file.groups) if self._may_hold(group)]
        if len(held) > PAGES_MAX:
            raise NotUnderstood("a key of many rows")
        return [table for number in held if (table := self._in_group(number)) is not None]

    def _may_hold(self, group: RowGroup) -> bool:
        bounds = group.chunks[self._first.name].bounds
        if bounds is None:
            raise NotUnderstood("a key without bounds")
        low, high = map(self._decoded, bounds)
        return bool(low <= self._wanted <= high)

    def _in_group(self, number: int) -> pa.Table | None:
        asked = self._candidates(number)
        if asked is None:
            return None
        names = list(self._key)
        others = [name for name in self._columns if name not in self._key]
        # far away one round trip costs more than pages that may not be needed
        data = self._fetched(number, names + others if self._source.is_far else names, asked)
        keys = self._columns_of(data, names, asked)
        alike = (pc.equal(keys[name], wanted) for name, wanted in self._key.items())
        at = np.flatnonzero(reduce(pc.and_, alike).to_numpy())
        if not len(at):
            return None
        found = _Rows(asked.start + int(at[0]), asked.start + int(at[-1]) + 1)
        if not self._source.is_far:
            data = self._fetched(number, others, found)
        columns = {name: column.slice(int(at[0]), len(at)) for name, column in keys.items()}
        columns |= self._columns_of(data, others, found)
        # copied: a row would keep its pages in memory
        return pa.table({name: columns[name] for name in self._columns}).take(np.arange(len(at)))

    def _candidates(self, number: int) -> _Rows | None:
        """The rows of the pages that may have the first key."""
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
        """The pages of columns that have some rows, and their dictionaries, in one go."""
        group, spans, wanted = self._file.groups[number], [], []
        for name in names:
            chunk = group.chunks[name]
            found = self._pages(number, chunk)
            first = bisect_right(found.first_rows, rows.start) - 1
            end = bisect_left(found.first_rows, rows.end)
            has = _Rows(found.first_rows[first], found.first_rows[end])
            if has.end - has.start > ROWS_MAX:
                raise NotUnderstood("pages of many rows")
            start, last = found.offsets[first], end - 1
            spans.append((start, found.offsets[last] + found.sizes[last] - start))
            wanted.append((chunk, has))
        known = self._file.dictionaries
        missing = [one for one, _ in wanted if one.dictionary and (number, one.name) not in known]
        data = self._source.read([*spans, *(one.dictionary for one in missing if one.dictionary)])
        for chunk, dictionary in zip(missing, data[len(spans) :], strict=True):
            known[number, chunk.name] = dictionary
            _kept.note(self._source, self._file, len(dictionary))
        parts = (
            Part(chunk, known.get((number, chunk.name), b""), found)
            for (chunk, _), found in zip(wanted, data, strict=False)
        )
        return {part.chunk.name: (part, has) for part, (_, has) in zip(parts, wanted, strict=True)}

    @staticmethod
    def _columns_of(
        data: Mapping[str, _Fetched], names: Sequence[str], rows: _Rows
    ) -> dict[str, pa.ChunkedArray]:
        """Some rows of columns; those whose pages have the same rows are decoded together."""
        alike: dict[_Rows, list[Part]] = defaultdict(list)
        for name in names:
            part, has = data[name]
            alike[has].append(part)
        found = {}
        for has, parts in alike.items():
            file = pa.BufferReader(small_file(parts, has.end - has.start))
            with pq.ParquetFile(file, pre_buffer=False) as reading:
                table = reading.read(use_threads=False)
            for name in table.column_names:
                found[name] = table[name].slice(rows.start - has.start, rows.end - rows.start)
        return found

    def _decoded(self, bound: bytes) -> Any:
        """A bound as the index has it, in what compares as the key does."""
        return int.from_bytes(bound, "little", signed=True) if self._first.type in _NUMBERS else bound


def _as_in_index(key: Field, value: pa.Scalar) -> Any:
    """A key's value, in what compares as a decoded bound does."""
    if key.type in _NUMBERS:
        return value.cast(pa.int32() if key.type in (INT, DATE) else pa.int64()).as_py()
    return value.as_buffer().to_pybytes()
