"""Which database may write into an object store, and delete there: the one that made its last incarnation.

An _incarnation_ is a number and a UUID. The database has it, and so has the store, as `owner/<number>.json`,
which is created exclusively: of those who want a number, one gets it. Databases are copied, by dumps,
snapshots and clones, and the store is not: what a copy deletes, the original misses. So a database whose last
incarnation is not the store's, or was made in another database than this, may only read until it is adopted.

A crash between the halves is no copy: the database intends an incarnation, the store gets it, then it is
confirmed. As etcd and PostgreSQL have it: what is restored begins a life of its own.
"""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import psycopg

from dormouse.errors import (
    InstanceIsACopy,
    InstanceReadOnly,
    InstanceTakenOver,
    NotAnInstance,
    ObjectAlreadyExists,
    ObjectNotFound,
    ObjectStoreIsNotOurs,
)
from dormouse.objects import ObjectStore
from dormouse.objects.names import RECORDS, STAGING
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

MARKER = "instance.json"
FOLDER = "owner"
CHECK_SECONDS = 10.0
"""How late a writer may notice that another database was adopted. Before a deletion it is asked each time."""

KEPT = 100
"""Incarnations of before that both halves remember."""

Reason = Literal["made", "start", "adoption"]
_NAME = re.compile(rf"{FOLDER}/(\d{{1,18}})\.json")
_ENDPOINT = re.compile(r"([^.]+)\.cluster-(?:ro-)?[^.-]+\.[^.]+\.rds\.amazonaws\.com(?:\.cn)?")
_QUERIES = load(__file__, "ownership")


@dataclass(frozen=True, slots=True)
class _Incarnation:
    """As the database has it; `here`: made in this very database."""

    number: int
    uuid: str
    confirmed: bool
    reason: str
    here: bool


class Ownership:
    """Whether this database owns this store. Threads may share one."""

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects
        self._checked_at = float("-inf")
        self._was_ours = False

    def open(self, instance_id: str, *, starts: bool = False) -> InstanceReadOnly | None:
        """Makes the two each other's, if both are new, and a new incarnation when the database `starts`.

        Gives why nothing may be written, if so. Raises `NotAnInstance` for another instance's store, and
        `ObjectStoreIsNotOurs` for one in which the database's files are not.
        """
        known = self._known()
        is_new = not any(one.confirmed for one in known) and self._mark(instance_id, known)
        for one in known:
            if not one.confirmed and one.reason != "copy":
                self._give(one.number, one.uuid)
        if not is_new and (refusal := self.look(instance_id)) is not None:
            return refusal
        if is_new or starts or not any(one.confirmed for one in self._known()):
            self._claim("made" if is_new else "start", self._last() + 1)
            return self.look(instance_id)
        return None

    def look(self, instance_id: str) -> InstanceReadOnly | None:
        """Why nothing may be written; None: the database owns the store. Raises as `open` does."""
        known = self._known()
        check_mark(instance_id, self._objects, owned=any(one.confirmed for one in known))
        refusal = self._refusal(known, self._last())
        self._was_ours = self._was_ours or refusal is None
        self._checked_at = time.monotonic()
        return refusal

    def check(self) -> None:
        """Raises `InstanceIsACopy` or `InstanceTakenOver`; asks at most every `CHECK_SECONDS`."""
        if not self._was_ours or time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self.check_now()

    def check_now(self) -> None:
        """As `check`, from what database and store say now: one statement and two requests."""
        refusal = self._refusal(self._known(), self._last())
        if refusal is not None:  # another process may just have made an incarnation
            refusal = self._refusal(self._known(), self._last())
        if refusal is not None:
            raise refusal
        self._was_ours = True
        self._checked_at = time.monotonic()

    @property
    def number(self) -> int:
        """The number of the database's incarnation."""
        return max((one.number for one in self._known() if one.confirmed), default=0)

    @property
    def adopted(self) -> int:
        """The number of the incarnation that the last adoption began; 0: there was none."""
        rows = run_lookup(self._supplier, rows_of(_QUERIES["adopted"]), operation="look at incarnations")
        return int(rows[0][0])

    def adopt(self, instance_id: str) -> int:
        """Makes this database the owner, whoever was; gives the incarnation's number.

        Writers, leases and hidden messages of before are forgotten. What was written by other timelines stays
        in the store, as orphans. Raises `NotAnInstance` for a store of another instance.
        """
        check_mark(instance_id, self._objects, owned=True)
        last = max([self._last(), *(one.number for one in self._known())])
        self._claim("adoption", last + 1)
        return last + 1

    # ------------------------------------------------------------------ what the two say

    def _known(self) -> list[_Incarnation]:
        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            values = {"limit": KEPT, "cluster": cluster_of(conn.info.host)}
            return conn.execute(_QUERIES["incarnations"].on(), values).fetchall()

        rows = run_lookup(self._supplier, work, operation="look at incarnations")
        return [_Incarnation(*row) for row in rows]

    def _last(self) -> int:
        """The number of the store's last incarnation; 0: none."""
        found = (_NAME.fullmatch(name) for name, _ in self._objects.list(FOLDER))
        return max((int(match[1]) for match in found if match is not None), default=0)

    def _owner(self, number: int) -> dict[str, Any]:
        """What the store says of an incarnation."""
        name = _name_of(number)
        try:
            said = json.loads(self._objects.get(name))
            return {"incarnation_id": str(said["incarnation_id"]), "made": str(said["made"])}
        except (ValueError, KeyError, TypeError):
            raise NotAnInstance(f"{self._objects.url}/{name} is not Dormouse's") from None

    def _refusal(self, known: Sequence[_Incarnation], last: int) -> InstanceReadOnly | None:
        """Of what the database knows, and the store's last."""
        confirmed = max((one.number for one in known if one.confirmed), default=0)
        if last < confirmed:
            return InstanceReadOnly(
                f"{self._objects.url} is older than the database, or lost its folder {FOLDER}/: it has "
                f"incarnation {last}, the database {confirmed}, which only reads. Give the store of the "
                "database; or, if its objects were brought back, take this one: 'dormouse adopt'"
            )
        ours = {one.number: one for one in known}
        if last == 0:
            copied = bool(known) and known[0].reason == "copy"
            return InstanceIsACopy(_A_COPY) if copied else None
        owner = self._owner(last)
        mine = ours.get(last)
        if mine is not None and mine.uuid == owner["incarnation_id"]:
            return None if mine.here else InstanceIsACopy(_A_COPY)
        if self._was_ours or (known and known[0].here):
            return InstanceTakenOver(
                f"another database owns {self._objects.url} since {owner['made']}: nothing was changed. Use "
                "that one, or only read this one; 'dormouse adopt' makes this one the owner again"
            )
        return InstanceIsACopy(_A_COPY)

    # ------------------------------------------------------------------ to become the owner

    def _mark(self, instance_id: str, known: Sequence[_Incarnation]) -> bool:
        """Writes the store's mark, if it is as new as the database; whether it had none."""
        with suppress(ObjectNotFound):
            self._objects.get(MARKER)
            return False
        intends = any(not one.confirmed and one.reason == "made" for one in known)
        has_files = rows_of(_QUERIES["has_files"])
        if not intends and run_lookup(self._supplier, has_files, operation="look for files")[0][0]:
            raise _not_ours(instance_id, self._objects)
        for record in sorted({"data", *RECORDS} - {STAGING, MARKER}):
            if next(iter(self._objects.list(record)), None) is not None:
                raise ObjectStoreIsNotOurs(
                    f"{self._objects.url} has objects in {record!r}, and no {MARKER}: it is another "
                    "instance's, or what is left of one; give an empty place"
                )
        with suppress(ObjectAlreadyExists):
            self._objects.put(MARKER, json.dumps({"instance_id": instance_id}).encode())
        return True

    def _claim(self, reason: Reason, number: int) -> None:
        def work(conn: psycopg.Connection[Any]) -> str:
            if reason == "adoption":
                conn.execute(_QUERIES["forget_writers"].on())
            values = {"number": number, "reason": reason, "cluster": cluster_of(conn.info.host)}
            row = conn.execute(_QUERIES["intend"].on(), values).fetchone()
            assert row is not None  # noqa: S101 it is what was inserted
            return str(row[0])

        with suppress(psycopg.errors.UniqueViolation):  # another process makes the same one
            uuid = run_transaction(self._supplier, work, operation="intend an incarnation")
            self._give(number, uuid)

    def _give(self, number: int, uuid: str) -> None:
        """Gives the store an incarnation that the database intends."""
        made = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC by {socket.gethostname()}"
        with suppress(ObjectAlreadyExists):
            self._objects.put(_name_of(number), json.dumps({"incarnation_id": uuid, "made": made}).encode())
        ours = self._owner(number)["incarnation_id"] == uuid
        query = _QUERIES["confirm" if ours else "withdraw"]
        values = {"number": number, "kept": KEPT}
        run_transaction(self._supplier, rows_of(query, values), operation="confirm an incarnation")
        if ours and number > KEPT:
            self._objects.delete([_name_of(number - KEPT)])


def cluster_of(host: str) -> str | None:
    """The name of the Aurora cluster whose endpoint for writers or readers this is; None for other hosts."""
    match = _ENDPOINT.fullmatch(host)
    return None if match is None else match[1]


def check_mark(instance_id: str, objects: ObjectStore, *, owned: bool = False) -> None:
    """Raises `NotAnInstance` for a store without the mark; `ObjectStoreIsNotOurs` if it was `owned`."""
    try:
        found = str(json.loads(objects.get(MARKER))["instance_id"])
    except ObjectNotFound:
        if owned:
            raise _not_ours(instance_id, objects) from None
        raise NotAnInstance(f"{objects.url} is not the object store of a Dormouse instance") from None
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{objects.url}/{MARKER} is not Dormouse's") from None
    if found != instance_id:
        raise NotAnInstance(
            f"{objects.url} belongs to instance {found}, the database to {instance_id}; use the two that "
            "belong together"
        )


def _not_ours(instance_id: str, objects: ObjectStore) -> ObjectStoreIsNotOurs:
    return ObjectStoreIsNotOurs(
        f"{objects.url} is not the object store of instance {instance_id}, whose database has files: it has "
        f"no {MARKER}. Give the store that the files are in; if it was emptied, bring its objects back"
    )


def _name_of(number: int) -> str:
    return f"{FOLDER}/{number}.json"


_A_COPY = (
    "the database is a copy of the one that owns the object store (restored, cloned, or moved to another "
    "server): reading works. 'dormouse adopt' makes this one the owner"
)
