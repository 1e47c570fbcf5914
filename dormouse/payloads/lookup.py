"""Finds payloads: inline, then by pointers, then in blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from dormouse.errors import DormouseError, ObjectStoreError, PayloadCorrupt, PayloadNotFound
from dormouse.payloads import rows
from dormouse.payloads.content import decode
from dormouse.payloads.copying import Payload
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.pack import Damaged, Entry
from dormouse.payloads.reading import ColdReads, Pointer, Reader, problem
from dormouse.payloads.rows import Place
from dormouse.payloads.warming import warm
from dormouse.postgres.connection import Supplier

TRIES = 3
"""A day that is folded or made hot again meanwhile has other objects."""
Find = Callable[[Iterable[PayloadKey]], Iterator[tuple[PayloadKey, Place | None]]]


class Lookup:
    """Looks payloads up in one instance."""

    def __init__(self, supplier: Supplier, reader: Reader) -> None:
        self._supplier = supplier
        self._reader = reader
        self.cold_reads = ColdReads()

    def contents(self, wanted: Mapping[PayloadKey, None], find: Find | None = None) -> dict[PayloadKey, Any]:
        """Returns the content of each key, or the error, in their order.

        `find` looks the keys up in a transaction that is not ours; objects are read outside of it.
        """
        found: dict[PayloadKey, Any] = dict(wanted)
        again: Iterable[PayloadKey] = wanted
        before: dict[PayloadKey, Place] = {}
        for _ in range(TRIES):
            places = dict(rows.places(self._supplier, again) if find is None else find(again))
            # one that is where it was is read no better
            todo = {
                key: place for key, place in places.items() if before.get(key) != place or key not in before
            }
            found |= self._at(todo)
            again = [key for key in todo if isinstance(found[key], PayloadCorrupt)]
            if not again:
                break
            before = {key: place for key in again if (place := places[key]) is not None}
        self.cold_reads.corrupt += sum(isinstance(one, PayloadCorrupt) for one in found.values())
        return found

    def warm(self, wanted: Mapping[PayloadKey, None]) -> int:
        """Has those be inline that are not; gives how many. Raises what is in place of a payload."""
        cold: dict[PayloadKey, tuple[Pointer, bool]] = {}
        for key, place in rows.places(self._supplier, wanted):
            if place is None:
                raise rows.expired(key)
            if place.content is not None:
                continue
            pointer = self._pointer(key, place)
            if isinstance(pointer, DormouseError):
                raise pointer
            cold[key] = pointer, place.byte_start is None
        contents = self._reader.read({key: pointer for key, (pointer, _) in cold.items()}) if cold else {}
        for day, keys in groupby(sorted(cold, key=lambda key: (key.day, key.place)), key=lambda key: key.day):
            portion = []
            for key in keys:
                if isinstance(content := contents[key], DormouseError):
                    raise content
                pointer, in_block = cold[key]
                portion.append((Payload(key, None, pointer.object_key, pointer.entry, in_block), content))
            warm(self._supplier, day, portion)
        return len(cold)

    def _at(self, places: Mapping[PayloadKey, Place | None]) -> dict[PayloadKey, Any]:
        began = time.monotonic()
        found: dict[PayloadKey, Any] = {}
        pointers: dict[PayloadKey, Pointer] = {}
        for key, place in places.items():
            if place is None:
                found[key] = rows.expired(key)
            elif place.content is not None:
                found[key] = decode(place.content)
            elif isinstance(pointer := self._pointer(key, place), DormouseError):
                found[key] = pointer
            else:
                pointers[key] = pointer
        for key, content in self._reader.read(pointers).items() if pointers else ():
            found[key] = content if isinstance(content, DormouseError) else decode(content)
        if pointers:
            self.cold_reads.took_ms.append(1_000 * (time.monotonic() - began))
        return found

    def _pointer(self, key: PayloadKey, place: Place) -> Pointer | DormouseError:
        """Where it is in an object; or that there is none, or that it cannot be told."""
        object_key, dictionaries = place.object_key, place.dictionaries or {}
        if object_key is None:
            return PayloadNotFound(f"there is no payload {key}")
        if place.byte_start is not None and place.byte_length is not None and place.checksum is not None:
            entry: Entry | None = Entry(key, place.byte_start, place.byte_length, place.checksum)
        else:
            try:
                index = self._reader.index(object_key, place.index_start, place.byte_count)
                if not index.covers(key):  # which is another answer than that it has none
                    raise Damaged("it has another object's payloads")
            except (Damaged, ObjectStoreError) as error:
                return problem(key, object_key, error)
            entry, dictionaries = index.find(key), index.dictionaries
        if entry is None:
            return PayloadNotFound(f"there is no payload {key}")
        return Pointer(object_key, entry, dictionaries)
