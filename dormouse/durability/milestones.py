"""Milestones: how far a database has come under its incarnation, as the object store has it, too.

A database that is put back as it was before (its files, a disk's snapshot) has the same incarnation, and is
behind the store's last milestone. Of two copies that go on at once, the store gives a milestone to one.

A milestone is a counter, and no position in the log or id of a transaction: those of a managed PostgreSQL may
not be told, and after a crash a server may give ids again that it had given to what was not on its disk.
"""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from typing import Any

import psycopg

from dormouse.durability.incarnations import Incarnation, on_disk
from dormouse.durability.owner_records import Records, milestone_name, read_record, written_now
from dormouse.errors import DormouseError, ObjectAlreadyExists
from dormouse.objects import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

logger = logging.getLogger(__name__)
_QUERIES = load(__file__, "milestones")


class Milestones:
    """Those of a database, and the store's."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects
        self._last: tuple[str, str] | None = None

    def id_of(self, number: int, milestone: int) -> str:
        """Of one that the store has; `ObjectNotFound` when it has a later one."""
        name = milestone_name(number, milestone)
        if self._last is None or self._last[0] != name:
            self._last = (name, read_record(self._objects, name, "milestone_id")[0])
        return self._last[1]

    def pass_next(self, mine: Incarnation, seen: Records, seconds_min: float) -> bool:
        """Passes one, if the database has moved on, and the last one is so old.

        False: the store has it of another database. What goes wrong is logged.
        """
        try:
            if mine.milestone > seen.milestone:  # its process died, or could not write
                return self._give(mine.number, mine.milestone, str(mine.milestone_id), seen)
            if not (mine.confirmed and mine.moved and mine.seconds >= seconds_min):
                return True
            uuid = self._passed(mine)
            return uuid is None or self._give(mine.number, mine.milestone + 1, uuid, seen)
        except DormouseError as error:
            logger.warning(
                "no milestone was passed, so a database that is put back is not noticed: %s", error
            )
            return True

    def _passed(self, mine: Incarnation) -> str | None:
        """The next one's id, which is on the database's disk; None: another process was faster."""

        def work(conn: psycopg.Connection[Any]) -> str | None:
            on_disk(conn)
            values = {"number": mine.number, "milestone": mine.milestone}
            row = conn.execute(_QUERIES["pass"].on(), values).fetchone()
            return None if row is None else str(row[0])

        return run_transaction(self._supplier, work, operation="pass a milestone")

    def _give(self, number: int, milestone: int, uuid: str, seen: Records) -> bool:
        """Gives it to the store, and takes earlier ones away; False: the store has it of another database."""
        said = {"milestone_id": uuid, "made": written_now()}
        with suppress(ObjectAlreadyExists):
            self._objects.put(milestone_name(number, milestone), json.dumps(said).encode())
        if self.id_of(number, milestone) != uuid:
            return False
        self._objects.delete([milestone_name(*one) for one in seen.milestones if one < (number, milestone)])
        return True
