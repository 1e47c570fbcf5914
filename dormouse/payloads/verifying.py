"""Whether a day's objects have what its pointers and blocks say; and these again, from the objects alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date
from hashlib import sha256
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.errors import InvalidInput, ObjectNotFound
from dormouse.payloads.copying import Unit, add_pointers
from dormouse.payloads.keys import PayloadKey
from dormouse.payloads.lease import Lease, leased, read
from dormouse.payloads.objects import FOLDER, PAGE_OBJECTS, DayObject, PayloadObjects
from dormouse.payloads.offload import Tools
from dormouse.payloads.pack import Damaged, Entry, Index, Packed, decompressor, index_start, unpacked
from dormouse.payloads.rows import DAYS
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

PROBLEMS_MAX = 100
_QUERIES = load(__package__ or "", "verifying")


@dataclass(frozen=True, slots=True)
class PayloadProblem:
    """What is wrong with an object, or with one of its payloads."""

    object_key: str
    key: PayloadKey | None
    detail: str


@dataclass(frozen=True, slots=True)
class PayloadVerification:
    """What was looked at of a day. `problems` are the first hundred; `rebuilt` are objects that were lost.

    `without_pointer` are payloads of its objects that no pointer leads to: deleted or replaced since, of a
    copy that is not done, or of pointers that are lost.
    """

    day: date
    objects: int
    payloads: int
    bytes: int
    problems: tuple[PayloadProblem, ...]
    without_pointer: int = 0
    rebuilt: int = 0


@dataclass
class _Done:
    objects: int = 0
    payloads: int = 0
    bytes: int = 0
    without_pointer: int = 0

    def __post_init__(self) -> None:
        self.problems: list[PayloadProblem] = []

    def note(self, object_key: str, key: PayloadKey | None, detail: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(PayloadProblem(object_key, key, detail))

    def of(self, day: date, rebuilt: int) -> PayloadVerification:
        return PayloadVerification(
            day, self.objects, self.payloads, self.bytes, tuple(self.problems), self.without_pointer, rebuilt
        )


def verify(tools: Tools, day: date, *, rebuild: bool = False) -> PayloadVerification:
    """Reads every object of a day. With `rebuild`, first the pointers or blocks of those that are lost.

    A payload that was deleted of an object that is lost, and is found again, is there again, too.
    """
    rebuilt = _rebuild(tools, day) if rebuild else 0
    done = _Done()
    for one in tools.known.of_day(day, "live", "block"):
        _object(tools, one, done)
        tools.progress(day, done.payloads)
    query = _QUERIES["lost_objects"].on(day=DAYS.name(day))
    try:
        lost = run_lookup(tools.supplier, rows_of(query), operation="verify a day")
    except pg.UndefinedTable:
        lost = []
        if not done.objects and read(tools.supplier, day) is None:
            raise InvalidInput(f"there are no payloads of {day}") from None
    for object_key, count in lost:
        done.note(object_key, None, f"{count:,} pointers lead to it, and it is not known")
    return done.of(day, rebuilt)


def _object(tools: Tools, one: DayObject, done: _Done) -> None:
    done.objects += 1
    try:
        data = tools.objects.get(one.object_key)
    except ObjectNotFound:
        return done.note(one.object_key, None, "it is not there")
    done.bytes += len(data)
    if len(data) != one.byte_count:
        done.note(
            one.object_key, None, f"it has {len(data):,} bytes, and was written with {one.byte_count:,}"
        )
    elif sha256(data).digest() != one.digest:
        done.note(one.object_key, None, "it has other bytes than were written")
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


def _rebuild(tools: Tools, day: date) -> int:
    """Registers objects that are in the store and not known, and makes pointers anew where all are gone."""
    states = ("open", "offloaded", "folded")
    with leased(tools.supplier, day, "rebuild", states, tools.options.lease_seconds) as lease:
        before = ends_as = lease.row().state
        DAYS.attempt(tools.supplier, lambda conn: DAYS.add(conn, day), attempts=PROBLEMS_MAX)
        state = "folded" if before == "folded" else "offloaded"
        rebuilt = 0
        try:
            # of two that have a payload, the later one: it was written from the other
            pointed_to = _pointed_to(tools, day)
            for object_key in sorted(_stored(tools, day, pointed_to), reverse=True):
                with_pointers = state != "folded" and object_key not in pointed_to
                rebuilt += _readopt(tools, lease, object_key, state, with_pointers)
            ends_as = state if rebuilt else before
        finally:  # an object that cannot be read keeps the day from no other work
            tools.exchange(lease).end(ends_as)
    return rebuilt


def _pointed_to(tools: Tools, day: date) -> set[str]:
    """Of an object that some pointers lead to, the others were deleted or replaced."""
    work = rows_of(_QUERIES["pointed_to"].on(day=DAYS.name(day)))
    rows = run_transaction(tools.supplier, work, read_only=True, scans=True, operation="verify a day")
    return {object_key for (object_key,) in rows}


def _stored(tools: Tools, day: date, pointed_to: set[str]) -> list[str]:
    """The objects of a day in the store that are not known, or have lost their pointers."""
    names = [name for name, _ in tools.objects.list(f"{FOLDER}/{day.isoformat()}")]
    states: dict[str, str] = {}
    for at in range(0, len(names), PAGE_OBJECTS):
        work = rows_of(_QUERIES["any_state"], {"object_keys": names[at : at + PAGE_OBJECTS]})
        states.update(run_lookup(tools.supplier, work, operation="look for objects"))
    without = [name for name, state in states.items() if state == "live" and name not in pointed_to]
    return [*(name for name in names if name not in states), *without]


def _readopt(tools: Tools, lease: Lease, object_key: str, state: str, with_pointers: bool) -> int:
    data = tools.objects.get(object_key)
    try:
        start = index_start(data)
        index = Index(data[start:])
    except Damaged:
        return 0  # which verification tells, if it is known
    entries = list(index)
    blocks = tools.known.of_day(lease.day, "block") if state == "folded" else []
    first, last = entries[0].key.place, entries[-1].key.place
    if any(one.first.place <= last and first <= one.last.place for one in blocks):
        return 0
    packed = Packed(data, entries, start, index.dictionaries, sum(entry.length for entry in entries))
    unit = Unit(entries[-1].key, packed, object_key=object_key)

    def work(conn: psycopg.Connection[Any]) -> int:
        lease.advance(conn, "copy", payloads=len(entries), objects=1)
        known = PayloadObjects.register(conn, object_key, lease.day, packed, state)
        added = add_pointers(conn, DAYS.name(lease.day), unit) if with_pointers else 0
        return int(not known or added > 0)

    return run_transaction(tools.supplier, work, operation="rebuild a day")
