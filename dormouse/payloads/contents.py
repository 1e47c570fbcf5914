"""What a day has now, from its rows and its blocks, and the contents of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby

from dormouse.errors import DormouseError, ObjectNotFound, PayloadCorrupt
from dormouse.objects import ObjectStore
from dormouse.payloads.copying import Payload
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.pack import Damaged, DayObject, Entry, PayloadObjects, Places
from dormouse.payloads.reading import Pointer, Reader

READ_BYTES_MAX = 4 * 2**20
READ_PAYLOADS_MAX = 1_000


class Contents:
    """Reads what a day has, for who moves much of it."""

    def __init__(self, objects: ObjectStore, known: PayloadObjects) -> None:
        self._known = known
        self._reader = Reader(objects)
        self._dictionaries: Mapping[str, Places] = {}

    def current(
        self, rows: Iterator[Payload], blocks: Sequence[DayObject], after: PayloadKey | None
    ) -> Iterator[Payload]:
        """Rows, and what blocks have that no row has; in the order of keys, without what is deleted."""
        in_blocks = (
            Payload(entry.key, None, one.object_key, entry, in_block=True)
            for one in blocks
            for entry in self.entries(one)
            if after is None or entry.key.place > after.place
        )
        # of equal keys, that of the first comes first
        every = merge(rows, in_blocks, key=lambda one: one.key.place)
        for _, found in groupby(every, key=lambda one: one.key):
            first = next(found)
            if first.content is not None or first.entry is not None:
                yield first

    def each(self, payloads: Iterable[Payload]) -> Iterator[tuple[Payload, bytes]]:
        """Each with its content. Some are read at once, and decompressed one by one, as they are taken.

        Raises `PayloadCorrupt` and `PayloadUnavailable`.
        """
        portion: list[Payload] = []
        size = 0
        for one in payloads:
            portion.append(one)
            size += len(one.content or b"") + (one.entry.length if one.entry else 0)
            if size >= READ_BYTES_MAX or len(portion) >= READ_PAYLOADS_MAX:
                yield from self._with_content(portion)
                portion, size = [], 0
        yield from self._with_content(portion)

    def entries(self, one: DayObject) -> Iterator[Entry]:
        """What an object has. Raises `PayloadCorrupt` and `ObjectStoreError`."""
        try:
            index = self._reader.index(one.object_key, one.index_start, one.byte_count)
            if (len(index), index[0].key, index[-1].key) != (one.payloads, one.first, one.last):
                raise Damaged("it has another object's payloads")
            yield from index
        except ObjectNotFound:
            raise PayloadCorrupt(f"object {one.object_key!r} is not there") from None
        except Damaged as error:
            raise PayloadCorrupt(f"object {one.object_key!r} is damaged: {error}") from None

    def _with_content(self, portion: Sequence[Payload]) -> Iterator[tuple[Payload, bytes]]:
        wanted = [
            Pointer(one.object_key, one.entry, self._places(one))
            for one in portion
            if one.content is None and one.entry is not None and one.object_key is not None
        ]
        found = {pointer.entry.key: (pointer, frame) for pointer, frame in self._reader.frames(wanted)}
        for one in portion:
            content = one.content if one.content is not None else self._reader.content(*found[one.key])
            if isinstance(content, DormouseError):
                raise content
            yield one, content

    def _places(self, one: Payload) -> Places:
        if one.object_key not in self._dictionaries:
            known = self._known.of_day(one.key.day, "live", "staged", "block")
            self._dictionaries = {found.object_key: found.dictionaries for found in known}
        return self._dictionaries.get(one.object_key or "", {})
