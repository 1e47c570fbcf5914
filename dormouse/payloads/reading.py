"""Reads payloads from their objects: the bytes of each, those that lie together at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from itertools import groupby
from typing import Any, Generic, NamedTuple, TypeVar

import zstandard

from dormouse.errors import DormouseError, ObjectNotFound, ObjectStoreError, PayloadCorrupt, PayloadUnavailable
from dormouse.objects import ObjectStore
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.pack import TAIL_BYTES, Damaged, Entry, Index, Places, decompressor, unpacked

JOIN_GAP_BYTES = 64 * 2**10
"""Less is read in vain rather than asked for by another request."""

JOIN_BYTES_MAX = 8 * 2**20
CACHE_BYTES_MAX = 64 * 2**20
READS_AT_ONCE = 4
_INDEX_FACTOR = 12
"""An index takes so much more memory than it does in its object."""

T = TypeVar("T")


class Pointer(NamedTuple):
    """Where a payload is, in which object, and where the object's dictionaries are."""

    object_key: str
    entry: Entry
    dictionaries: Places


@dataclass
class _Cache(Generic[T]):
    """The last that were used, within a bound of bytes. Threads share it."""

    bytes_max: int

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._bytes = 0

    def get(self, name: str, read: Callable[[], tuple[T, int]]) -> T:
        with self._lock:
            if name in self._found:
                self._found.move_to_end(name)
                return self._found[name][0]
        made, size = read()
        with self._lock:
            if name not in self._found:
                self._found[name] = made, size
                self._bytes += size
            while self._bytes > self.bytes_max:
                self._bytes -= self._found.popitem(last=False)[1][1]
        return made


class Reader:
    """Reads payloads of one object store; remembers indexes and dictionaries, within a bound."""

    def __init__(self, objects: ObjectStore, cache_bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._objects = objects
        self._indexes: _Cache[Index] = _Cache(cache_bytes_max)
        self._dictionaries: _Cache[bytes] = _Cache(cache_bytes_max // 8)

    def index(self, object_key: str, index_start: int | None = None, byte_count: int | None = None) -> Index:
        """What an object has; one request where it is known where its index begins.

        Raises `Damaged` and `ObjectStoreError`.
        """

        def read() -> tuple[Index, int]:
            size = self._objects.size(object_key) if byte_count is None else byte_count
            start = index_start
            if start is None:
                start = self._index_start(object_key, size)
            found = Index(self._range(object_key, start, size - start))
            return found, _INDEX_FACTOR * (size - start)

        return self._indexes.get(object_key, read)

    def read(self, pointers: Mapping[PayloadKey, Pointer]) -> dict[PayloadKey, bytes | DormouseError]:
        """The content of each, or `PayloadCorrupt` or `PayloadUnavailable`."""
        groups = [
            (object_key, run)
            for object_key, found in groupby(
                sorted(pointers.values(), key=lambda one: (one.object_key, one.entry.start)),
                key=lambda one: one.object_key,
            )
            for run in _joined(list(found))
        ]
        if len(groups) == 1:
            return dict(self._run(*groups[0]))
        with ThreadPoolExecutor(READS_AT_ONCE, "payloads") as pool:
            found_in = pool.map(lambda group: list(self._run(*group)), groups)
            return {key: content for found in found_in for key, content in found}

    def unpack(self, pointer: Pointer, frame: bytes) -> bytes:
        """The content of a payload from its frame. Raises `Damaged` and `ObjectStoreError`."""
        return unpacked(frame, pointer.entry, self._decompressor(pointer))

    def _run(
        self, object_key: str, run: Sequence[Pointer]
    ) -> Iterator[tuple[PayloadKey, bytes | DormouseError]]:
        start = run[0].entry.start
        length = max(one.entry.start + one.entry.length for one in run) - start
        try:
            data = memoryview(self._range(object_key, start, length))
        except (ObjectStoreError, Damaged) as error:
            if len(run) > 1:  # what can be read of it is
                for one in run:
                    yield from self._run(object_key, [one])
                return
            yield run[0].entry.key, problem(run[0].entry.key, object_key, error)
            return
        for one in run:
            at = one.entry.start - start
            try:
                yield one.entry.key, self.unpack(one, bytes(data[at : at + one.entry.length]))
            except (ObjectStoreError, Damaged) as error:
                yield one.entry.key, problem(one.entry.key, object_key, error)

    def _decompressor(self, pointer: Pointer) -> zstandard.ZstdDecompressor:
        place = pointer.dictionaries.get(pointer.entry.key.kind)
        if place is None:
            return decompressor(None)
        start, length, digest = place

        def read() -> tuple[bytes, int]:
            found = self._range(pointer.object_key, start, length)
            if sha256(found).hexdigest()[:32] != digest:
                raise Damaged("its dictionary is not what was written")
            return found, length

        return decompressor(self._dictionaries.get(digest, read))

    def _range(self, object_key: str, start: int, length: int) -> bytes:
        try:
            return self._objects.get_range(object_key, start, length)
        except ObjectNotFound:
            raise
        except ObjectStoreError:
            size = self._objects.size(object_key)  # raises as before, if that is not why
            if size >= start + length:
                raise
            raise Damaged(f"its object has {size:,} bytes, and was written with more") from None

    def _index_start(self, object_key: str, size: int) -> int:
        tail = self._range(object_key, max(0, size - TAIL_BYTES), min(size, TAIL_BYTES))
        length = int.from_bytes(tail[:8], "little")
        if len(tail) < TAIL_BYTES or length > size - TAIL_BYTES:
            raise Damaged("it does not end as an object of payloads does")
        return size - TAIL_BYTES - length


def problem(key: PayloadKey, object_key: str, error: Any) -> PayloadCorrupt | PayloadUnavailable:
    """What is answered in place of a payload."""
    if isinstance(error, ObjectNotFound):
        return PayloadCorrupt(f"payload {key} is lost: its object {object_key!r} is not there")
    if isinstance(error, Damaged):
        return PayloadCorrupt(f"payload {key} in object {object_key!r} is damaged: {error}")
    return PayloadUnavailable(f"payload {key} cannot be read now, try again: {error}")


def _joined(pointers: Sequence[Pointer]) -> Iterable[list[Pointer]]:
    """Those of one object, in the order of their bytes, as they are read at once."""
    run: list[Pointer] = []
    end = start = 0
    for one in pointers:
        last = one.entry.start + one.entry.length
        if run and (one.entry.start - end > JOIN_GAP_BYTES or last - start > JOIN_BYTES_MAX):
            yield run
            run = []
        if not run:
            start = one.entry.start
        run.append(one)
        end = max(end, last)
    if run:
        yield run
