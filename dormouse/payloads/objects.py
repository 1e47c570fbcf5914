"""The objects of payloads: announced before they are written, then relied on, deleted long after."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

from dormouse.errors import CommitFailed, ObjectAlreadyExists
from dormouse.objects import ObjectStore
from dormouse.payloads.keys import PayloadKey, place_values
from dormouse.payloads.pack import Packed, Places
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction

FOLDER = "payloads"
DELAY_SECONDS = 900.0
"""A reader that has just looked where a payload is finds its object for so long."""

KEPT_SECONDS = 86_400.0
"""How long an object stays that payloads needed: as long as a table's file does by default.

A database that is put back as it was in that time, and adopted, finds the objects that its pointers lead to.
"""

WRITER_SECONDS = 86_400.0
"""A writer that was frozen may write for so long after."""

PAGE_OBJECTS = 1_000
_QUERIES = load(__package__ or "", "objects")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DayObject:
    """An object of a day, and what it has, as PostgreSQL knows it."""

    object_key: str
    state: str
    byte_count: int
    digest: bytes
    payloads: int
    index_start: int
    dictionaries: Places
    kept: bool
    verified: bool
    first: PayloadKey
    last: PayloadKey


@dataclass
class CollectedObjects:
    """What a round deleted; `failed` are the first of what it could not."""

    deleted: int = 0
    failures: int = 0
    failed: tuple[tuple[str, str], ...] = ()


class PayloadObjects:
    """The objects of an instance's payloads, as its database knows them."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects

    def write(self, day: date, token: int, packed: Packed) -> str:
        """Announces an object, and then writes it; gives its name."""
        object_key = f"{FOLDER}/{day.isoformat()}/{token:06d}-{uuid.uuid4().hex[:20]}"
        values = {"object_key": object_key, "day": day, "token": token}
        # a transaction of its own: one that is frozen within would keep others waiting who take the day over
        run_statement(self._supplier, rows_of(_QUERIES["announce"], values), operation="announce an object")
        try:
            self._objects.put(object_key, packed.data)
        except ObjectAlreadyExists:
            # the store's client tried again a write that had succeeded
            if self._objects.get(object_key) != packed.data:
                raise
        return object_key

    @staticmethod
    def settle(conn: psycopg.Connection[Any], object_key: str, packed: Packed, state: str) -> None:
        """Within the transaction that relies on the object. `CommitFailed` when it was collected."""
        values = {
            "object_key": object_key,
            "state": state,
            "byte_count": len(packed.data),
            "digest": packed.digest,
            "payloads": len(packed.entries),
            "index_start": packed.index_start,
            "dictionaries": Jsonb(packed.dictionaries),
            **place_values("first", packed.entries[0].key),
            **place_values("last", packed.entries[-1].key),
        }
        if not conn.execute(_QUERIES["settle"].on(), values).fetchall():
            raise CommitFailed(f"object {object_key!r} was collected before anything relied on it")

    @classmethod
    def register(
        cls, conn: psycopg.Connection[Any], object_key: str, day: date, packed: Packed, day_state: str
    ) -> bool:
        """Takes an object that is found for one of a day's; whether it was known."""
        values = {"object_key": object_key, "day": day}
        known = not conn.execute(_QUERIES["register"].on(), values).fetchall()
        if not known:
            cls.settle(conn, object_key, packed, "block" if day_state == "folded" else "live")
        return known

    def of_day(self, day: date, *states: str) -> list[DayObject]:
        """Those of a day in the order of their payloads."""
        values = {"day": day, "states": list(states)}
        rows = run_lookup(self._supplier, rows_of(_QUERIES["of_day"], values), operation="look for objects")
        return [DayObject(*(*row[:9], PayloadKey(*row[9:13]), PayloadKey(*row[13:]))) for row in rows]

    @staticmethod
    def change(conn: psycopg.Connection[Any], day: date, before: Sequence[str], state: str) -> None:
        """Has a day's objects of the states `before` be in another."""
        values = {"day": day, "states": list(before), "state": state}
        conn.execute(_QUERIES["change_state"].on(), values)

    @staticmethod
    def keep(conn: psycopg.Connection[Any], object_key: str) -> None:
        """Has a fold go on with an object as it is."""
        conn.execute(_QUERIES["keep"].on(), {"object_key": object_key})

    def note_verified(self, object_keys: Sequence[str]) -> None:
        """Objects were read back, and are what was written."""
        work = rows_of(_QUERIES["note_verified"], {"object_keys": list(object_keys)})
        run_transaction(self._supplier, work, operation="note objects")

    @staticmethod
    def activate(conn: psycopg.Connection[Any], day: date) -> None:
        """Has what a fold goes on with be the day's blocks, and nothing else."""
        conn.execute(_QUERIES["activate"].on(), {"day": day})

    @staticmethod
    def unstage(conn: psycopg.Connection[Any], day: date, partition: str) -> None:
        """Has the objects of a day be as if a fold had not begun."""
        conn.execute(_QUERIES["unstage"].on(day=partition), {"day": day})

    def orphaned(self) -> tuple[int, int]:
        """How many objects nothing relies on, and their bytes as far as they are known."""
        found = run_lookup(self._supplier, rows_of(_QUERIES["orphaned"]), operation="count objects")[0]
        return found[0], found[1]

    def collect(self, kept_seconds: float = KEPT_SECONDS) -> CollectedObjects:
        """Deletes objects that payloads have not needed for so long, and what writers that died have left.

        Readers have `DELAY_SECONDS` at least.
        """
        run_transaction(self._supplier, rows_of(_QUERIES["give_up"]), operation="look for dead writers")
        done, after = CollectedObjects(), ""
        while True:
            values = {
                "delay_seconds": DELAY_SECONDS,
                "kept_seconds": max(DELAY_SECONDS, kept_seconds),
                "after": after,
                "limit": PAGE_OBJECTS,
            }
            rows = run_lookup(
                self._supplier, rows_of(_QUERIES["deletable"], values), operation="look for objects"
            )
            if not rows:
                return done
            names = [name for (name,) in rows]
            after = names[-1]
            failed = self._objects.delete(names)
            for name, why in failed:
                logger.warning("%s is not needed and could not be deleted: %s", name, why)
            kept = {name for name, _ in failed}
            gone = {"object_keys": [name for name in names if name not in kept]}
            work = rows_of(_QUERIES["forget"], {**gone, "writer_seconds": WRITER_SECONDS})
            run_transaction(self._supplier, work, operation="forget objects")
            done.deleted += len(gone["object_keys"])
            done.failures += len(failed)
            done.failed = (*done.failed, *((name, str(why)) for name, why in failed))[:100]


def written(supplier: Supplier) -> Iterator[tuple[str, int, bytes, bool]]:
    """Yields the name, bytes and SHA-256 of every object, and whether payloads need it; by name.

    Of those that they do not need any more, only what a hold keeps, as a backup that is being taken does.
    """
    after = ""
    while True:
        values = {"after": after, "limit": PAGE_OBJECTS}
        rows = run_lookup(supplier, rows_of(_QUERIES["written"], values), operation="look for objects")
        yield from rows
        if len(rows) < PAGE_OBJECTS:
            return
        after = rows[-1][0]


def known(supplier: Supplier, object_keys: Sequence[str]) -> set[str]:
    """Of some names those of objects that are payloads', or are being written."""
    work = rows_of(_QUERIES["known"], {"object_keys": list(object_keys)})
    return {name for (name,) in run_lookup(supplier, work, operation="look for objects")}
