"""Parquet files that are read in parts, and a cache of what is known of them.

Files never change, so their footers, the positions of their pages, their dictionaries and small files as a
whole are cached in memory for all queries of the process.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.model.locks import process_lock
from dormouse.objects.store import ObjectStore
from dormouse.reading.page_index import (
    TAIL_BYTES,
    NotUnderstood,
    Pages,
    RowGroup,
    footer_bytes,
    row_groups,
)
from dormouse.settings.process import machine_bytes

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
WHOLE_BYTES_MAX = 64 * 1024
"""The largest file that is cached as a whole, decoded."""
WHOLE_MEMORY_BYTES_MAX = 4 * WHOLE_BYTES_MAX
"""The most bytes in memory of the rows of a file that is cached as a whole."""


class OpenFile:
    """An object that is read in parts. `mark` identifies the object and its content, as a cache key.

    `content` has all of its bytes if they are in memory. Otherwise `descriptor` is that of its file, or None
    for an object that is not on this machine.
    """

    def __init__(
        self,
        store: ObjectStore,
        name: str,
        byte_count: int,
        descriptor: int | None,
        content: bytes | None = None,
    ) -> None:
        self._store, self._name, self._descriptor = store, name, descriptor
        self.byte_count = byte_count
        self.content = content
        self.is_far = descriptor is None and content is None
        self.tail_bytes = min(byte_count, _FAR_TAIL if self.is_far else _LOCAL_TAIL)
        if content is not None:
            if len(content) != byte_count:
                raise NotUnderstood("another size than was written")
            self.mark: tuple[Any, ...] = (store.url, name, byte_count, "memory")
            return
        status = None if descriptor is None else os.fstat(descriptor)
        if status is not None and status.st_size != byte_count:
            raise NotUnderstood("another size than was written")
        inode = None if status is None else (status.st_ino, status.st_mtime_ns)
        self.mark = (store.url, name, byte_count, inode)

    def read(self, spans: Sequence[Span]) -> list[bytes]:
        """Returns the bytes of each span, in order; raises `NotUnderstood` if one is incomplete."""
        for at, size in spans:
            if at < 0 or size < 0 or at + size > self.byte_count:
                raise NotUnderstood("a part beyond the file")
        if self.content is not None:
            return [self.content[at : at + size] for at, size in spans]
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

    def bytes_read(self, spans: Sequence[Span]) -> int:
        """Returns the number of bytes that `read` reads for some spans, with small gaps between them."""
        return sum(size for _, size in (_joined(spans) if self.is_far else spans))

    def _fetched(self, span: Span) -> bytes:
        return self._store.get_range(self._name, *span)

    @staticmethod
    def _whole(data: bytes, size: int) -> bytes:
        if len(data) != size:
            raise NotUnderstood("an object that ends early")
        return data


@contextmanager
def opened(
    store: ObjectStore, name: str, byte_count: int, content: bytes | None = None
) -> Iterator[OpenFile]:
    """Yields an object to read. No file is opened if its content is given."""
    path = store.local_path(name) if content is None else None
    if path is None:
        yield OpenFile(store, name, byte_count, None, content)
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
    """The smallest and the largest key of each page of a row group, by the first row key."""
    group_bounds: list[tuple[Any, Any]] | None = None
    """The smallest and the largest key of each row group, by the first row key."""

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
        self._lock = process_lock()

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

    def whole(self, source: OpenFile) -> pa.RecordBatch | None:
        """Returns all rows of a small file; None if the file or its rows are too large."""
        if source.byte_count > WHOLE_BYTES_MAX:
            return None
        key = (source.mark, None)
        found: pa.RecordBatch | None = self.get(key)
        if found is None:
            # of a remote object, the footer comes with all else in one request
            file = self.file(source) if source.is_far else self.get(source.mark)
            if file is not None and not _is_small(file):
                return None
            span = 0, source.byte_count
            data = source.read([span])[0] if file is None else file.part(source, span)
            with pq.ParquetFile(pa.BufferReader(data), pre_buffer=False) as reading:
                if not (_is_surely_small(reading.metadata) or _is_small(file or self.file(source))):
                    return None
                rows = reading.read(use_threads=False)
            batches = rows.combine_chunks().to_batches()
            if len(batches) != 1:
                return None
            [found] = batches
            self.put(key, found, found.get_total_buffer_size())
        return found


def _is_small(file: KnownFile) -> bool:
    """Returns whether the rows of a file take little memory."""
    sizes = (WHOLE_MEMORY_BYTES_MAX if one.byte_count is None else one.byte_count for one in file.groups)
    return sum(sizes) < WHOLE_MEMORY_BYTES_MAX


def _is_surely_small(metadata: pq.FileMetaData) -> bool:
    """Returns whether rows take little memory even if each were all of the file, which is quick to say."""
    sizes = (metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
    return bool(metadata.num_rows * sum(sizes) < WHOLE_MEMORY_BYTES_MAX)


KEPT = Kept()
