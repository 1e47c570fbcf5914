"""Parquet files that are read in parts, and what is kept in memory of them: they are never written again."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from dormouse.objects import ObjectStore
from dormouse.reading.page_index import TAIL_BYTES, NotUnderstood, Pages, RowGroup, footer_bytes, row_groups
from dormouse.settings.process import machine_bytes

KEPT_BYTES_MAX = min(256 * 1024 * 1024, machine_bytes() // 32)
_ITEM_BYTES = 1_000
"""About what it takes besides to know an item."""
_GAP_BYTES_MAX = 1024 * 1024
"""Read rather than skipped, in an object that is not on this machine."""
_FETCHES_MAX = 8
_LOCAL_TAIL, _FAR_TAIL = 16 * 1024, 256 * 1024

Span = tuple[int, int]
"""Bytes of a file: from where, how many."""


class Source:
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
def opened(store: ObjectStore, name: str, byte_count: int) -> Iterator[Source]:
    path: Path | None = store.local_path(name)
    if path is None:
        yield Source(store, name, byte_count, None)
        return
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield Source(store, name, byte_count, descriptor)
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
class KnownFile:
    """What is known of a file; parts of it are found out as they are needed."""

    groups: list[RowGroup]
    tail: bytes
    tail_from: int
    pages: dict[tuple[int, str], Pages] = field(default_factory=dict)
    bounds: dict[int, tuple[list[Any], list[Any]]] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Source) -> KnownFile:
        at = source.byte_count - source.tail_bytes
        tail = source.read([(at, source.tail_bytes)])[0]
        footer = footer_bytes(tail[-TAIL_BYTES:]) + TAIL_BYTES
        if footer > len(tail):
            before = source.byte_count - footer
            tail, at = source.read([(before, at - before)])[0] + tail, before
        return cls(row_groups(tail[-footer:-TAIL_BYTES]), tail, at)

    def part(self, source: Source, span: Span) -> bytes:
        """Some bytes, mostly of those that were read with the footer."""
        at = span[0] - self.tail_from
        return self.tail[at : at + span[1]] if at >= 0 else source.read([span])[0]


class Kept:
    """What is known of files, and their dictionaries; what was not asked for longest is forgotten."""

    def __init__(self) -> None:
        self._items: OrderedDict[tuple[Any, ...], tuple[Any, int]] = OrderedDict()
        self._byte_count = 0
        self._lock = Lock()

    def get(self, key: tuple[Any, ...]) -> Any:
        """None for what is not known."""
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

    def file(self, source: Source) -> KnownFile:
        found: KnownFile | None = self.get(source.mark)
        if found is None:
            found = KnownFile.of(source)
            # what it says takes several times as much as objects of Python
            self.put(source.mark, found, 4 * len(found.tail))
        return found


KEPT = Kept()
