"""The reader of payloads from objects. It reads payloads that lie close together with one request."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import zstandard

from dormouse.errors import (
    DormouseError,
    ObjectNotFound,
    ObjectStoreError,
    PayloadCorrupt,
    PayloadUnavailable,
)
from dormouse.model.locks import process_lock
from dormouse.objects.store import ObjectStore
from dormouse.payloads.keys import PayloadKey, Places
from dormouse.payloads.pack import TAIL_BYTES, Damaged, Entry, Index, decompressor, index_start, unpacked

JOIN_GAP_BYTES = 64 * 2**10
"""The largest gap between two payloads, in bytes, that one request reads with them.

Reading such a gap costs less than another request.
"""

JOIN_BYTES_MAX = 8 * 2**20
CACHE_BYTES_MAX = 64 * 2**20
READS_AT_ONCE = 4
READS_REMEMBERED = 1_000
_INDEX_FACTOR = 5
"""The ratio of an index's size in memory to its compressed size in the object."""

T = TypeVar("T")


class Pointer(NamedTuple):
    """The place of a cold payload: its object, its entry, and the places of the object's dictionaries."""

    object_key: str
    entry: Entry
    dictionaries: Places


@dataclass
class ColdReads:
    """The durations of the last reads from objects, and the number of corrupt payloads."""

    took_ms: deque[float] = field(default_factory=lambda: deque(maxlen=READS_REMEMBERED))
    corrupt: int = 0


@dataclass
class _Cache(Generic[T]):
    """A cache of the most recently used values, bounded by bytes. Threads may share it."""

    bytes_max: int

    def __post_init__(self) -> None:
        self._lock = process_lock()
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, name: str, read: Callable[[], tuple[T, int]]) -> T:
        with self._lock:
            if name in self._values:
                self._values.move_to_end(name)
                return self._values[name][0]
        value, size = read()
        with self._lock:
            if name not in self._values:
                self._values[name] = value, size
                self._bytes += size
            while self._bytes > self.bytes_max:
                self._bytes -= self._values.popitem(last=False)[1][1]
        return value


class Reader:
    """A reader of payloads in one object store, with bounded caches of indexes and dictionaries."""

    def __init__(self, objects: ObjectStore, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._objects = objects
        self._indexes: _Cache[Index] = _Cache(cache_bytes_max)
        self._dictionaries: _Cache[bytes] = _Cache(cache_bytes_max // 8)

    def index(self, object_key: str, index_start: int | None = None, byte_count: int | None = None) -> Index:
        """Returns the index of an object.

        One request is enough if `index_start` and `byte_count`, the size of the object, are given. Raises
        `Damaged` and `ObjectStoreError`.
        """

        def read() -> tuple[Index, int]:
            size = self._objects.size(object_key) if byte_count is None else byte_count
            start = index_start
            if start is None:
                start = self._index_start(object_key, size)
            return Index(self._range(object_key, start, size - start)), _INDEX_FACTOR * (size - start)

        return self._indexes.get(object_key, read)

    def read(self, pointers: Mapping[PayloadKey, Pointer]) -> dict[PayloadKey, bytes | DormouseError]:
        """Returns the content of each payload, or else a `PayloadCorrupt` or `PayloadUnavailable` error."""
        return {
            pointer.entry.key: self.content(pointer, frame)
            for pointer, frame in self.frames(pointers.values())
        }

    def frames(self, pointers: Iterable[Pointer]) -> Iterator[tuple[Pointer, bytes | DormouseError]]:
        """Yields each pointer with the compressed frame of its payload, or with the error of the read."""
        by_place = sorted(pointers, key=lambda pointer: (pointer.object_key, pointer.entry.start))
        runs = [
            run
            for _, in_object in groupby(by_place, key=lambda pointer: pointer.object_key)
            for run in _joined(list(in_object))
        ]
        if len(runs) == 1:
            yield from self._run(runs[0])
            return
        with ThreadPoolExecutor(READS_AT_ONCE, "payloads") as pool:
            for frames in pool.map(lambda run: list(self._run(run)), runs):
                yield from frames

    def content(self, pointer: Pointer, frame: bytes | DormouseError) -> bytes | DormouseError:
        """Returns the content of a payload from its compressed frame.

        If `frame` is an error, returns this error.

        Returns `PayloadCorrupt` or `PayloadUnavailable` if the frame or its dictionary cannot be used.
        """
        if isinstance(frame, DormouseError):
            return frame
        try:
            return unpacked(frame, pointer.entry, self._decompressor(pointer))
        except (ObjectStoreError, Damaged) as error:
            return problem(pointer.entry.key, pointer.object_key, error)

    def _run(self, run: Sequence[Pointer]) -> Iterator[tuple[Pointer, bytes | DormouseError]]:
        start = run[0].entry.start
        length = max(pointer.entry.start + pointer.entry.length for pointer in run) - start
        try:
            data = memoryview(self._range(run[0].object_key, start, length))
        except (ObjectStoreError, Damaged) as error:
            if len(run) > 1:  # reads each payload alone, because some of them may be readable
                for pointer in run:
                    yield from self._run([pointer])
                return
            yield run[0], problem(run[0].entry.key, run[0].object_key, error)
            return
        for pointer in run:
            at = pointer.entry.start - start
            yield pointer, bytes(data[at : at + pointer.entry.length])

    def _decompressor(self, pointer: Pointer) -> zstandard.ZstdDecompressor:
        place = pointer.dictionaries.get(pointer.entry.key.kind)
        if place is None:
            return decompressor(None)
        start, length, digest = place

        def read() -> tuple[bytes, int]:
            dictionary = self._range(pointer.object_key, start, length)
            if sha256(dictionary).hexdigest()[:32] != digest:
                raise Damaged("its dictionary is not what was written")
            return dictionary, length

        return decompressor(self._dictionaries.get(digest, read))

    def _range(self, object_key: str, start: int, length: int) -> bytes:
        try:
            return self._objects.get_range(object_key, start, length)
        except ObjectNotFound:
            raise
        except ObjectStoreError:
            size = self._objects.size(object_key)  # was the range beyond the end of the object?
            if size >= start + length:
                raise
            raise Damaged(f"its object has {size:,} bytes, and was written with more") from None

    def _index_start(self, object_key: str, size: int) -> int:
        tail = self._range(object_key, max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))
        start = size - len(tail) + index_start(tail)
        if start < 0:
            raise Damaged("it does not end as an object of payloads does")
        return start


def problem(key: PayloadKey, object_key: str, error: Any) -> PayloadCorrupt | PayloadUnavailable:
    """Returns the error that a reader gives in place of a payload, after `error` prevented the read."""
    if isinstance(error, ObjectNotFound):
        return PayloadCorrupt(f"payload {key} is lost: its object {object_key!r} does not exist")
    if isinstance(error, Damaged):
        return PayloadCorrupt(f"payload {key} in object {object_key!r} is damaged: {error}")
    return PayloadUnavailable(f"payload {key} cannot be read now, try again: {error}")


def _joined(pointers: Sequence[Pointer]) -> Iterable[list[Pointer]]:
    """Yields groups of pointers to one object, which are given sorted by place.

    One request can read a group.
    """
    run: list[Pointer] = []
    end = start = 0
    for pointer in pointers:
        last = pointer.entry.start + pointer.entry.length
        if run and (pointer.entry.start - end > JOIN_GAP_BYTES or last - start > JOIN_BYTES_MAX):
            yield run
            run = []
        if not run:
            start = pointer.entry.start
        run.append(pointer)
        end = max(end, last)
    if run:
        yield run
