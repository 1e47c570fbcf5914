"""Makes pointers and blocks anew, from the objects alone: where the database lost them, or lost objects.

A database that was put back as it was before has pointers to objects that were deleted since, for example by
a fold. The fold wrote the same payloads into other objects, whose indexes say so: a pointer is led there when
key and checksum agree.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any

import psycopg
from psycopg import errors as pg

from dormouse.errors import DormouseError, ObjectNotFound
from dormouse.objects.fault import MISSING
from dormouse.objects.ledger import faults
from dormouse.objects.store import ObjectStore
from dormouse.payloads.copying import Unit, add_pointers
from dormouse.payloads.days import DayLease, leased
from dormouse.payloads.exchange import Exchange, Tools
from dormouse.payloads.keys import columns
from dormouse.payloads.pack import (
    FOLDER,
    PAGE_OBJECTS,
    Damaged,
    DayObject,
    Entry,
    Index,
    Packed,
    PayloadObjects,
    index_start,
)
from dormouse.payloads.reading import Reader
from dormouse.payloads.rows import DAYS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

TRIES_MAX = 100
_STATES = ("open", "offloaded", "folded")
_QUERIES = load(__package__ or "", "rebuilding")
_PARTS = {"given": _QUERIES["given"], "lost": _QUERIES["lost"]}

logger = logging.getLogger(__name__)


@dataclass
class Rebuilt:
    """The objects and payloads that a rebuild made anew.

    `objects` are those that pointers or blocks lead to only now. `payloads` are of objects that are lost, and
    were found in these. `incomplete` are lost blocks that may have had others, each with what is known.
    """

    objects: int = 0
    payloads: int = 0
    incomplete: list[tuple[str, str]] = field(default_factory=list)


def rebuild_day(tools: Tools, day: date) -> Rebuilt:
    """Makes a day's pointers and blocks anew, as far as its objects in the store have them.

    Raises `PayloadDayBusy` and `ObjectStoreError`.
    """
    done = Rebuilt()
    with leased(tools.supplier, day, "rebuild", _STATES, tools.options.lease_seconds) as lease:
        before = ends_as = lease.row().state
        DAYS.attempt(tools.supplier, lambda conn: DAYS.add(conn, day), attempts=TRIES_MAX)
        state = "folded" if before == "folded" else "offloaded"
        try:
            work = _Rebuilding(tools, lease, state)
            work.objects(done)
            work.pointers(done)
            if state == "folded":
                work.blocks(done)
            ends_as = state if done.objects else before
        finally:  # an object that cannot be read keeps the day from no other work
            Exchange(tools, lease).end(ends_as)
    return done


def recover_pointers(tools: Tools) -> list[str]:
    """Leads the pointers of all days that lead to lost objects to others with the same contents.

    Returns a line for each day that had some: what was found, and what was not.
    """
    lost: dict[date, list[str]] = defaultdict(list)
    for one, fault in faults(tools.objects, tools.known):
        if fault is MISSING:
            lost[date.fromisoformat(one.name.split("/")[1])].append(one.name)
    return [_recovered(tools, day, names) for day, names in sorted(lost.items())]


def was_adopted_lately(supplier: Supplier) -> bool:
    """Returns whether files are held for a way back from an adoption, which is for a week by default."""
    work = rows_of(_QUERIES["was_adopted_lately"])
    return bool(run_lookup(supplier, work, operation="look for holds")[0][0])


def _recovered(tools: Tools, day: date, lost: Sequence[str]) -> str:
    what = f"payloads of {day}: {len(lost):,} objects are gone"
    done = Rebuilt()
    try:
        with leased(tools.supplier, day, "rebuild", _STATES, tools.options.lease_seconds) as lease:
            state = lease.row().state
            try:
                work = _Rebuilding(tools, lease, state)
                work.pointers(done)
                left = [one for one in tools.known.of_day(day, "live", "block") if one.object_key in lost]
            finally:
                Exchange(tools, lease).end(state)
    except DormouseError as error:
        logger.warning("%s, and were not looked for", what, exc_info=True)
        return f"{what}, and were not looked for: {error}; see 'dormouse payloads verify {day} --rebuild'"
    found = f"{what}; of their payloads {done.payloads:,} were found in others"
    return found if not left else f"{found}, not all: see 'dormouse payloads verify {day} --rebuild'"


def pointers_to(supplier: Supplier, day: date, object_keys: Sequence[str] | None = None) -> dict[str, int]:
    """Returns how many pointers of a day lead to each object, or to each of some."""
    work = rows_of(_QUERIES["pointers_to"].on(day=DAYS.name(day)), {"object_keys": object_keys})
    try:
        rows = run_transaction(supplier, work, read_only=True, scans=True, operation="verify a day")
    except pg.UndefinedTable:
        return {}
    return dict(rows)


class _Rebuilding:
    """The work on one day, whose state is to be `state`."""

    def __init__(self, tools: Tools, lease: DayLease, state: str) -> None:
        self._tools = tools
        self._lease = lease
        self._state = state
        self._reader = Reader(tools.objects)
        self._there = {name for name, _ in tools.objects.list(f"{FOLDER}/{lease.day.isoformat()}")}
        self._states = self._known(sorted(self._there))

    def objects(self, done: Rebuilt) -> None:
        """Registers objects that are not known, and adds pointers to those that have lost all of them.

        After an adoption, what is not known may be another timeline's: it adds nothing to a day that has
        objects of its own.
        """
        # of an object that some pointers lead to, the others were deleted or replaced
        pointed_to = pointers_to(self._tools.supplier, self._lease.day)
        unknown = {name for name in self._there if name not in self._states}
        if self._is_adopted() and (pointed_to or self._of_day()):
            unknown &= pointed_to.keys()
        without = {name for name, state in self._states.items() if state == "live" and name not in pointed_to}
        # of two that have a payload, the later one: it was written from the other
        for name in sorted(unknown | without, reverse=True):
            packed = _packed(self._tools.objects, name)
            if packed is None or (self._state == "folded" and self._overlaps(packed, self._of_day("block"))):
                continue  # verification tells of the former, if it is known
            done.objects += self._register(name, packed, with_pointers=name not in pointed_to)

    def pointers(self, done: Rebuilt) -> None:
        """Leads pointers to lost objects to others that have the same contents."""
        if self._state == "folded":
            return  # it has none
        known = {one.object_key for one in self._of_day("live")}
        lost = sorted({*pointers_to(self._tools.supplier, self._lease.day), *known} - self._there)
        for name in sorted(self._there, reverse=True) if lost else ():
            try:
                entries = list(self._reader.index(name))
            except (Damaged, ObjectNotFound):
                continue
            if count := self._recover(name, entries, lost):
                done.objects += 1
                done.payloads += count
        left = pointers_to(self._tools.supplier, self._lease.day, lost) if lost else {}
        self._let_go([name for name in lost if name not in left])

    def blocks(self, done: Rebuilt) -> None:
        """Puts objects in the place of lost blocks, whose keys they have, and says what they may lack."""
        for lost in [one for one in self._of_day("block") if one.object_key not in self._there]:
            found = objects = 0
            for name, packed in self._in_place_of(lost):
                self._register(name, packed, with_pointers=False, instead_of=lost.object_key)
                inside = (lost.first.place <= one.key.place <= lost.last.place for one in packed.entries)
                found, objects = found + sum(inside), objects + 1
            done.objects += objects
            done.payloads += found
            if objects:
                detail = (
                    f"it is not there; of its {lost.payloads:,} payloads {found:,} were found, as they are "
                    "in objects that were written later"
                )
                done.incomplete += [(lost.object_key, detail)] if found != lost.payloads else []

    def _in_place_of(self, lost: DayObject) -> Iterator[tuple[str, Packed]]:
        """Yields objects that nothing needs and that have keys of a lost block's range, the latest first."""
        for name in sorted(self._there, reverse=True):
            if self._states.get(name, "dead") != "dead":
                continue
            packed = _packed(self._tools.objects, name)
            if packed is None or not self._overlaps(packed, [lost]):
                continue
            others = [one for one in self._of_day("block") if one.object_key in self._there]
            if not self._overlaps(packed, others):
                yield name, packed

    def _register(
        self, name: str, packed: Packed, *, with_pointers: bool, instead_of: str | None = None
    ) -> bool:
        """Has an object be one of the day's; False when nothing leads to it then, and nothing is changed."""
        unit = Unit(packed.entries[-1].key, packed, object_key=name)
        needs_pointers = self._state != "folded" and with_pointers

        def work(conn: psycopg.Connection[Any]) -> bool:
            self._lease.advance(conn, "copy", objects=1)
            if needs_pointers and not add_pointers(conn, DAYS.name(self._lease.day), unit):
                return False
            self._need(conn, name, packed)
            if instead_of is not None:
                conn.execute(_QUERIES["let_go"].on(), {"object_keys": [instead_of]})
            return True

        return run_transaction(self._tools.supplier, work, operation="rebuild a day")

    def _need(self, conn: psycopg.Connection[Any], name: str, packed: Packed | None) -> None:
        """In a transaction: the database needs an object, which it did not know, or was to delete."""
        if packed is not None:
            PayloadObjects.register(conn, name, self._lease.day, packed, self._state)
        state = "block" if self._state == "folded" else "live"
        conn.execute(_QUERIES["revive"].on(), {"object_key": name, "state": state})

    def _recover(self, name: str, entries: Sequence[Entry], lost: Sequence[str]) -> int:
        values = {
            **columns(entry.key for entry in entries),
            "starts": [entry.start for entry in entries],
            "lengths": [entry.length for entry in entries],
            "checksums": [entry.checksum for entry in entries],
            "lost": list(lost),
            "object_key": name,
        }
        day = DAYS.name(self._lease.day)
        count = rows_of(_QUERIES["recoverable"].including(**_PARTS).on(day=day), values)
        rows = run_transaction(
            self._tools.supplier, count, read_only=True, scans=True, operation="rebuild a day"
        )
        if not rows[0][0]:
            return 0
        packed = None
        if name not in self._states and (packed := _packed(self._tools.objects, name)) is None:
            return 0

        def work(conn: psycopg.Connection[Any]) -> int:
            self._lease.advance(conn, "copy", objects=1)
            recovered = conn.execute(_QUERIES["recover"].including(**_PARTS).on(day=day), values).rowcount
            if recovered:
                self._need(conn, name, packed)
            return recovered

        return run_transaction(self._tools.supplier, work, scans=True, operation="rebuild a day")

    def _let_go(self, names: Sequence[str]) -> None:
        if names:
            work = rows_of(_QUERIES["let_go"], {"object_keys": list(names)})
            run_transaction(self._tools.supplier, work, operation="rebuild a day")

    def _of_day(self, *states: str) -> list[DayObject]:
        return self._tools.known.of_day(self._lease.day, *(states or ("live", "block")))

    def _known(self, names: Sequence[str]) -> dict[str, str]:
        states: dict[str, str] = {}
        for at in range(0, len(names), PAGE_OBJECTS):
            work = rows_of(_QUERIES["any_state"], {"object_keys": names[at : at + PAGE_OBJECTS]})
            states.update(run_lookup(self._tools.supplier, work, operation="look for objects"))
        return states

    def _is_adopted(self) -> bool:
        work = rows_of(_QUERIES["was_adopted"])
        return bool(run_lookup(self._tools.supplier, work, operation="look at incarnations")[0][0])

    @staticmethod
    def _overlaps(packed: Packed, others: Sequence[DayObject]) -> bool:
        first, last = packed.entries[0].key.place, packed.entries[-1].key.place
        return any(one.first.place <= last and first <= one.last.place for one in others)


def _packed(objects: ObjectStore, name: str) -> Packed | None:
    """Returns an object as it was packed; None when it is damaged."""
    data = objects.get(name)
    try:
        start = index_start(data)
        index = Index(data[start:])
    except Damaged:
        return None
    entries = list(index)
    return Packed(data, entries, start, index.dictionaries, sum(entry.length for entry in entries))
