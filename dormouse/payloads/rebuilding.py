"""The rebuild of lost pointers and blocks from the objects alone.

A database that was restored to an earlier time has pointers to objects that were deleted since, for example
after a fold. The fold wrote the same payloads into other objects, and their indexes list them. A rebuild
changes a pointer to such an object if key and checksum are equal.
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
    """The results of a rebuild.

    - `objects`: the number of objects that the rebuild has brought into use, as blocks or by pointers.
    - `payloads`: the number of payloads of lost objects that were found in other objects.
    - `incomplete`: the names of lost blocks of which some payloads were not found, each with a description.
    """

    objects: int = 0
    payloads: int = 0
    incomplete: list[tuple[str, str]] = field(default_factory=list)


def rebuild_day(tools: Tools, day: date) -> Rebuilt:
    """Restores a day's lost pointers and blocks, as far as objects in the store have the payloads.

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
        finally:  # releases the day for other work, even if an object cannot be read
            Exchange(tools, lease).end(ends_as)
    return done


def recover_pointers(tools: Tools) -> list[str]:
    """Changes the pointers to lost objects, in all days, so that they lead to objects with the same payloads.

    Returns a line of text for each day that had lost objects. The line describes the result.
    """
    lost: dict[date, list[str]] = defaultdict(list)
    for known, fault in faults(tools.objects, tools.known):
        if fault is MISSING:
            lost[date.fromisoformat(known.name.split("/")[1])].append(known.name)
    return [_recovered(tools, day, names) for day, names in sorted(lost.items())]


def was_adopted_lately(supplier: Supplier) -> bool:
    """Returns whether the hold of an adoption is active. It lasts for a week by default."""
    work = rows_of(_QUERIES["was_adopted_lately"])
    return bool(run_lookup(supplier, work, operation="find holds")[0][0])


def _recovered(tools: Tools, day: date, lost: Sequence[str]) -> str:
    subject = f"payloads of {day}: {len(lost):,} objects are lost"
    done = Rebuilt()
    try:
        with leased(tools.supplier, day, "rebuild", _STATES, tools.options.lease_seconds) as lease:
            state = lease.row().state
            try:
                work = _Rebuilding(tools, lease, state)
                work.pointers(done)
                left = [each for each in tools.known.of_day(day, "live", "block") if each.object_key in lost]
            finally:
                Exchange(tools, lease).end(state)
    except DormouseError as error:
        logger.warning("%s, and were not looked for", subject, exc_info=True)
        return f"{subject}, and were not looked for: {error}; see 'dormouse payloads verify {day} --rebuild'"
    result = f"{subject}; {done.payloads:,} of their payloads were found in other objects"
    return result if not left else f"{result}, not all: see 'dormouse payloads verify {day} --rebuild'"


def pointers_to(supplier: Supplier, day: date, object_keys: Sequence[str] | None = None) -> dict[str, int]:
    """Returns how many pointers of a day lead to each object.

    With `object_keys`, counts only these objects.
    """
    work = rows_of(_QUERIES["pointers_to"].on(day=DAYS.name(day)), {"object_keys": object_keys})
    try:
        rows = run_transaction(supplier, work, read_only=True, scans=True, operation="verify a day")
    except pg.UndefinedTable:
        return {}
    return dict(rows)


class _Rebuilding:
    """The rebuild of one day. `state` is the day's state after the rebuild."""

    def __init__(self, tools: Tools, lease: DayLease, state: str) -> None:
        self._tools = tools
        self._lease = lease
        self._state = state
        self._reader = Reader(tools.objects)
        self._in_store = {name for name, _ in tools.objects.list(f"{FOLDER}/{lease.day.isoformat()}")}
        self._states = self._known(sorted(self._in_store))

    def objects(self, done: Rebuilt) -> None:
        """Registers unknown objects, and adds pointers to objects that have lost all of their pointers.

        After an adoption, unknown objects may belong to another timeline. Then the rebuild skips unknown
        objects without pointers, if the day has pointers or known objects.
        """
        # if an object has some pointers, its other payloads were deleted or replaced: they get no pointers
        pointed_to = pointers_to(self._tools.supplier, self._lease.day)
        unknown = {name for name in self._in_store if name not in self._states}
        if self._is_adopted() and (pointed_to or self._of_day()):
            unknown &= pointed_to.keys()
        without = {name for name, state in self._states.items() if state == "live" and name not in pointed_to}
        # the latest object first: if two have the same payload, the later one was written from the earlier
        for name in sorted(unknown | without, reverse=True):
            packed = _packed(self._tools.objects, name)
            if packed is None or (self._state == "folded" and self._overlaps(packed, self._of_day("block"))):
                continue  # verification reports damaged objects
            done.objects += self._register(name, packed, with_pointers=name not in pointed_to)

    def pointers(self, done: Rebuilt) -> None:
        """Changes the day's pointers to lost objects, so that they lead to objects with the same payloads."""
        if self._state == "folded":
            return  # a folded day has no pointers
        known = {each.object_key for each in self._of_day("live")}
        lost = sorted({*pointers_to(self._tools.supplier, self._lease.day), *known} - self._in_store)
        for name in sorted(self._in_store, reverse=True) if lost else ():
            try:
                entries = list(self._reader.index(name))
            except (Damaged, ObjectNotFound):
                continue
            if count := self._recover(name, entries, lost):
                done.objects += 1
                done.payloads += count
        left = pointers_to(self._tools.supplier, self._lease.day, lost) if lost else {}
        self._mark_dead([name for name in lost if name not in left])

    def blocks(self, done: Rebuilt) -> None:
        """Registers unused objects whose key ranges overlap that of a lost block, in place of the block.

        Records missing payloads in `done`.
        """
        for lost in [each for each in self._of_day("block") if each.object_key not in self._in_store]:
            payloads = objects = 0
            for name, packed in self._in_place_of(lost):
                self._register(name, packed, with_pointers=False, instead_of=lost.object_key)
                inside = (lost.first.place <= entry.key.place <= lost.last.place for entry in packed.entries)
                payloads, objects = payloads + sum(inside), objects + 1
            done.objects += objects
            done.payloads += payloads
            if objects:
                detail = (
                    f"it is not there; {payloads:,} of its {lost.payloads:,} payloads were found, in objects "
                    "that were written later"
                )
                done.incomplete += [(lost.object_key, detail)] if payloads != lost.payloads else []

    def _in_place_of(self, lost: DayObject) -> Iterator[tuple[str, Packed]]:
        """Yields unused objects whose key ranges overlap that of a lost block, the latest object first."""
        for name in sorted(self._in_store, reverse=True):
            if self._states.get(name, "dead") != "dead":
                continue
            packed = _packed(self._tools.objects, name)
            if packed is None or not self._overlaps(packed, [lost]):
                continue
            others = [each for each in self._of_day("block") if each.object_key in self._in_store]
            if not self._overlaps(packed, others):
                yield name, packed

    def _register(
        self, name: str, packed: Packed, *, with_pointers: bool, instead_of: str | None = None
    ) -> bool:
        """Makes an object one of the day's objects, in place of the lost object `instead_of` if one is given.

        With `with_pointers`, adds pointers, unless the day is folded. If no pointer can be added, changes
        nothing and returns False.
        """
        unit = Unit(packed.entries[-1].key, packed, object_key=name)
        needs_pointers = self._state != "folded" and with_pointers

        def work(conn: psycopg.Connection[Any]) -> bool:
            self._lease.advance(conn, "copy", objects=1)
            if needs_pointers and not add_pointers(conn, DAYS.name(self._lease.day), unit):
                return False
            self._need(conn, name, packed)
            if instead_of is not None:
                conn.execute(_QUERIES["mark_dead"].on(), {"object_keys": [instead_of]})
            return True

        return run_transaction(self._tools.supplier, work, operation="rebuild a day")

    def _need(self, conn: psycopg.Connection[Any], name: str, packed: Packed | None) -> None:
        """Records, within a transaction, that an object is in use. Before, the object was unknown or dead."""
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

    def _mark_dead(self, names: Sequence[str]) -> None:
        if names:
            work = rows_of(_QUERIES["mark_dead"], {"object_keys": list(names)})
            run_transaction(self._tools.supplier, work, operation="rebuild a day")

    def _of_day(self, *states: str) -> list[DayObject]:
        return self._tools.known.of_day(self._lease.day, *(states or ("live", "block")))

    def _known(self, names: Sequence[str]) -> dict[str, str]:
        states: dict[str, str] = {}
        for at in range(0, len(names), PAGE_OBJECTS):
            work = rows_of(_QUERIES["any_state"], {"object_keys": names[at : at + PAGE_OBJECTS]})
            states.update(run_lookup(self._tools.supplier, work, operation="find objects"))
        return states

    def _is_adopted(self) -> bool:
        work = rows_of(_QUERIES["was_adopted"])
        return bool(run_lookup(self._tools.supplier, work, operation="read incarnations")[0][0])

    @staticmethod
    def _overlaps(packed: Packed, others: Sequence[DayObject]) -> bool:
        first, last = packed.entries[0].key.place, packed.entries[-1].key.place
        return any(other.first.place <= last and first <= other.last.place for other in others)


def _packed(objects: ObjectStore, name: str) -> Packed | None:
    """Returns an object of the store with its entries, or None if the object is damaged."""
    data = objects.get(name)
    try:
        start = index_start(data)
        index = Index(data[start:])
    except Damaged:
        return None
    entries = list(index)
    return Packed(data, entries, start, index.dictionaries, sum(entry.length for entry in entries))
