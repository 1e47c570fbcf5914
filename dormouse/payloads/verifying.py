"""The check that the objects of a day contain the payloads to which its pointers and blocks refer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from typing import Any

from psycopg import errors as pg

from dormouse.errors import InvalidInput
from dormouse.objects.fault import MISSING, read_back
from dormouse.payloads.days import read
from dormouse.payloads.exchange import Tools
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.pack import (
    Damaged,
    DayObject,
    Entry,
    Index,
    decompressor,
    index_start,
    unpacked,
)
from dormouse.payloads.rebuilding import Rebuilt, pointers_to, rebuild_day
from dormouse.payloads.rows import DAYS
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

PROBLEMS_MAX = 100
_QUERIES = load(__package__ or "", "verifying")


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """An object, or one payload in an object, that is not what was written.

    `key` is the key of the payload, or None for a whole object. `detail` describes the fault.
    """

    object_key: str
    key: PayloadKey | None
    detail: str


@dataclass(frozen=True, slots=True)
class PayloadVerification:
    """The results of a day's check.

    - `problems`: at most the first hundred problems.
    - `rebuilt`: the number of objects that the rebuild has brought into use, as blocks or by pointers.
    - `recovered`: the number of payloads of lost objects that were found in other objects.
    - `without_pointer`: the number of payloads in the day's objects that have no pointer. Such a payload was
      deleted or replaced, its pointer was lost, or a copy has not finished.
    """

    day: date
    objects: int
    payloads: int
    bytes: int
    problems: tuple[DamagedObject, ...]
    without_pointer: int = 0
    rebuilt: int = 0
    recovered: int = 0


@dataclass
class _Done:
    objects: int = 0
    payloads: int = 0
    bytes: int = 0
    without_pointer: int = 0

    def __post_init__(self) -> None:
        self.problems: list[DamagedObject] = []

    def note(self, object_key: str, key: PayloadKey | None, detail: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(DamagedObject(object_key, key, detail))

    def of(self, day: date, made: Rebuilt) -> PayloadVerification:
        return PayloadVerification(
            day=day,
            objects=self.objects,
            payloads=self.payloads,
            bytes=self.bytes,
            problems=tuple(self.problems),
            without_pointer=self.without_pointer,
            rebuilt=made.objects,
            recovered=made.payloads,
        )


def verify(tools: Tools, day: date, *, rebuild: bool = False) -> PayloadVerification:
    """Reads and checks every object of a day. With `rebuild`, first restores lost pointers and blocks.

    If all pointers to an object were lost, its deleted payloads reappear.
    """
    made = rebuild_day(tools, day) if rebuild else Rebuilt()
    done = _Done()
    for object_key, detail in made.incomplete:
        done.note(object_key, None, detail)
    for day_object in tools.known.of_day(day, "live", "block"):
        _object(tools, day_object, done)
        tools.progress(done.payloads, None)
    query = _QUERIES["lost_objects"].on(day=DAYS.name(day))
    try:
        lost = run_lookup(tools.supplier, rows_of(query), operation="verify a day")
    except pg.UndefinedTable:
        lost = []
        if not done.objects and read(tools.supplier, day) is None:
            raise InvalidInput(f"there are no payloads of {day}") from None
    for object_key, count in lost:
        done.note(object_key, None, f"{count:,} pointers name it, but it is not recorded")
    return done.of(day, made)


def _object(tools: Tools, day_object: DayObject, done: _Done) -> None:
    name = day_object.object_key
    done.objects += 1
    data, wrong = read_back(tools.objects, day_object.written)
    if wrong is MISSING:
        return done.note(name, None, _missing(tools, day_object))
    done.bytes += len(data)
    if wrong is not None:
        done.note(name, None, f"it {wrong}")
    try:
        index = Index(data[index_start(data) :])
    except Damaged as error:
        return done.note(name, None, str(error))
    entries = {}
    for entry, fault in _entries(data, index):
        done.payloads += 1
        entries[entry.key] = entry
        if fault is not None:
            done.note(name, entry.key, fault)
    if day_object.state == "live":
        _pointers(tools, day_object, entries, done)
    elif len(index) != day_object.payloads:
        done.note(name, None, f"it has {len(index):,} payloads, and had {day_object.payloads:,}")
    return None


def _missing(tools: Tools, day_object: DayObject) -> str:
    name = day_object.object_key
    if day_object.state == "block":
        return f"it {MISSING}, and had {day_object.payloads:,} payloads"
    count = pointers_to(tools.supplier, day_object.first.day, [name]).get(name, 0)
    return f"it {MISSING}, and {count:,} pointers lead to it"


def _entries(data: bytes, index: Index) -> Iterator[tuple[Entry, str | None]]:
    """Yields each entry of an object with a description of its fault, or with None if it has no fault."""
    decompressors: dict[str, Any] = {}
    for entry in index:
        kind = entry.key.kind
        if kind not in decompressors:
            start, length, _ = index.dictionaries.get(kind, (0, 0, ""))
            decompressors[kind] = decompressor(data[start : start + length] if length else None)
        try:
            unpacked(data[entry.start : entry.start + entry.length], entry, decompressors[kind])
        except Damaged as error:
            yield entry, str(error)
        else:
            yield entry, None


def _pointers(tools: Tools, day_object: DayObject, entries: Mapping[PayloadKey, Entry], done: _Done) -> None:
    """Compares the pointers to an object with its entries, and records differences in `done`."""
    query = _QUERIES["pointers"].on(day=DAYS.name(day_object.first.day))
    try:
        rows = run_transaction(
            tools.supplier,
            rows_of(query, {"object_key": day_object.object_key}),
            read_only=True,
            scans=True,
            operation="verify a day",
        )
    except pg.UndefinedTable:
        return done.note(day_object.object_key, None, "the partition of its day does not exist")
    for *parts, start, length, checksum in rows:
        key = PayloadKey(*parts)
        if entries.get(key) != Entry(key, start, length, checksum):
            done.note(day_object.object_key, key, "its pointer names another place")
    done.without_pointer += len(entries) - len(rows)
    return None
