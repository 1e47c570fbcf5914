"""Whether a day's objects have what its pointers and blocks say."""

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
    """An object that is not as it was written, or one payload of it; `detail` says what is wrong."""

    object_key: str
    key: PayloadKey | None
    detail: str


@dataclass(frozen=True, slots=True)
class PayloadVerification:
    """What was looked at of a day; `problems` are the first hundred.

    `rebuilt` are objects that pointers or blocks lead to only since the rebuild. `recovered` are payloads of
    objects that are gone, which were found in these. `without_pointer` are payloads of the day's objects that
    no pointer leads to: deleted or replaced since, of a copy that is not done, or of pointers that are lost.
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
    """Reads every object of a day. With `rebuild`, it first makes lost pointers and blocks anew.

    What was deleted of payloads whose pointers are all lost is there again.
    """
    made = rebuild_day(tools, day) if rebuild else Rebuilt()
    done = _Done()
    for object_key, detail in made.incomplete:
        done.note(object_key, None, detail)
    for one in tools.known.of_day(day, "live", "block"):
        _object(tools, one, done)
        tools.progress(done.payloads, None)
    query = _QUERIES["lost_objects"].on(day=DAYS.name(day))
    try:
        lost = run_lookup(tools.supplier, rows_of(query), operation="verify a day")
    except pg.UndefinedTable:
        lost = []
        if not done.objects and read(tools.supplier, day) is None:
            raise InvalidInput(f"there are no payloads of {day}") from None
    for object_key, count in lost:
        done.note(object_key, None, f"{count:,} pointers lead to it, and it is not known")
    return done.of(day, made)


def _object(tools: Tools, one: DayObject, done: _Done) -> None:
    done.objects += 1
    data, wrong = read_back(tools.objects, one.written)
    if wrong is MISSING:
        return done.note(one.object_key, None, _gone(tools, one))
    done.bytes += len(data)
    if wrong is not None:
        done.note(one.object_key, None, f"it {wrong}")
    try:
        index = Index(data[index_start(data) :])
    except Damaged as error:
        return done.note(one.object_key, None, str(error))
    entries = {}
    for entry, fault in _entries(data, index):
        done.payloads += 1
        entries[entry.key] = entry
        if fault is not None:
            done.note(one.object_key, entry.key, fault)
    if one.state == "live":
        _pointers(tools, one, entries, done)
    elif len(index) != one.payloads:
        done.note(one.object_key, None, f"it has {len(index):,} payloads, and had {one.payloads:,}")
    return None


def _gone(tools: Tools, one: DayObject) -> str:
    if one.state == "block":
        return f"it {MISSING}, and had {one.payloads:,} payloads"
    count = pointers_to(tools.supplier, one.first.day, [one.object_key]).get(one.object_key, 0)
    return f"it {MISSING}, and {count:,} pointers lead to it"


def _entries(data: bytes, index: Index) -> Iterator[tuple[Entry, str | None]]:
    """Each payload of an object, and what is wrong with it."""
    by: dict[str, Any] = {}
    for entry in index:
        kind = entry.key.kind
        if kind not in by:
            start, length, _ = index.dictionaries.get(kind, (0, 0, ""))
            by[kind] = decompressor(data[start : start + length] if length else None)
        try:
            unpacked(data[entry.start : entry.start + entry.length], entry, by[kind])
        except Damaged as error:
            yield entry, str(error)
        else:
            yield entry, None


def _pointers(tools: Tools, one: DayObject, entries: Mapping[PayloadKey, Entry], done: _Done) -> None:
    query = _QUERIES["pointers"].on(day=DAYS.name(one.first.day))
    try:
        rows = run_transaction(
            tools.supplier,
            rows_of(query, {"object_key": one.object_key}),
            read_only=True,
            scans=True,
            operation="verify a day",
        )
    except pg.UndefinedTable:
        return done.note(one.object_key, None, "the partition of its day is not there")
    for *key, start, length, checksum in rows:
        found = PayloadKey(*key)
        if entries.get(found) != Entry(found, start, length, checksum):
            done.note(one.object_key, found, "its pointer does not lead to it")
    done.without_pointer += len(entries) - len(rows)
    return None
