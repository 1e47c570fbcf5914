"""Ownership of an object store: only the database that made its last incarnation may write and delete there.

An _incarnation_ is a number and a UUID, which both the database and the store have. In the store, it is the
object `owner/<number>.json`. This object is created exclusively, so only one database gets a number. Dumps,
snapshots and clones copy a database, but not its store. If a copy deleted objects, the original would lose
them. So a copy may only read until it is adopted. A database is a copy if its last incarnation is not the
last one of the store, or was made in another database.

An incarnation is made in three steps, so that a database is no copy after a crash between them. The database
records an intended incarnation, then the store gets it, then the database confirms it. etcd and PostgreSQL
are similar: a restored database begins a new timeline.

Under an incarnation the database records numbered _milestones_. The store gets each milestone after it is on
the database's disk. If the store has a later milestone than the database, the database was restored to an
earlier state, and so it is also a copy.

A process may be frozen, for any time, between the check that its database owns the store and the deletion of
objects. So it announces the deletion first, then checks, deletes, and removes the announcement. An adoption
marks the store first, then looks for announcements. So one of the two always sees the other.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import psycopg

from dormouse.durability.incarnations import (
    FOLDER,
    KEPT,
    Incarnation,
    Process,
    Reason,
    Records,
    incarnation_name,
    intend,
    known,
    last_adopted,
    milestone_name,
    new_deletion_name,
    on_disk,
    read_record,
    records,
    settle,
    this_process,
    written_now,
)
from dormouse.errors import (
    DormouseError,
    InstanceIsACopy,
    InstanceLocked,
    InstanceReadOnly,
    InstanceTakenOver,
    NotAnInstance,
    ObjectAlreadyExists,
    ObjectNotFound,
    ObjectStoreIsNotOurs,
)
from dormouse.model.loops import tries
from dormouse.objects.ledger import sweep
from dormouse.objects.names import INCOMING, RECORDS, STAGING
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

POLL_SECONDS = 0.25
REPORT_SECONDS = 5.0
MARKER = "instance.json"
CHECK_SECONDS = 10.0
"""The most seconds until a writer notices that another database was adopted.

Also the time between milestones.

Before each deletion of objects, a process checks the ownership again.
"""
KEEP_DAYS = 7.0
"""The days for which an adoption keeps files that the database knows from garbage collection."""
WAIT_SECONDS = 60.0
"""The most seconds for which an adoption waits for deletions of the previous owner."""
logger = logging.getLogger(__name__)
_QUERIES = load(__file__, "ownership")
_A_COPY = (
    "the database is a copy of the one that owns the object store (restored, cloned, or moved to another "
    "server): it can only be read. To make it the owner, run 'dormouse adopt'"
)
_BEGUN = (
    "the adoption of this database has begun, and waits until the previous owner's deletions end: run "
    "'dormouse adopt' again"
)


@dataclass(frozen=True, slots=True)
class Announced:
    """The announcement of a deletion of objects, with the deleting process and the time of its beginning."""

    name: str
    process: Process
    since: str


@contextmanager
def announced(objects: ObjectStore, number: int) -> Iterator[None]:
    """Announces a deletion of objects while the block runs, under the incarnation `number`.

    Raises `ObjectStoreError` before the block begins if the announcement cannot be written.
    """
    name = new_deletion_name(number)
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    objects.put(name, json.dumps({**asdict(this_process()), "since": since}).encode())
    try:
        yield
    finally:
        take_back(objects, [name])


def take_back(objects: ObjectStore, names: Sequence[str]) -> None:
    """Removes announcements of deletions."""
    if names:
        sweep(objects, [[(name, None) for name in names]]).warn()


def take_back_dead(objects: ObjectStore, names: Sequence[str]) -> list[Announced]:
    """Removes the announcements of processes that have certainly ended. Returns the other announcements."""
    pending = [each for name in names if (each := _read(objects, name)) is not None]
    ended = [each for each in pending if each.process.is_gone()]
    take_back(objects, [each.name for each in ended])
    return [each for each in pending if each not in ended]


def wait_for_deletions(
    objects: ObjectStore,
    before: int,
    *,
    seconds_max: float = 0.0,
    force: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Waits for the end of all deletions that were announced under an incarnation before `before`.

    Calls `tell` with a line that names the deleting process. If deletions are left after `seconds_max`,
    raises `InstanceLocked`. With `force`, logs a warning instead, and assumes that these deletions have
    ended.
    """
    reported_at = float("-inf")
    for this in tries(seconds_max, pause=POLL_SECONDS):
        names = [name for number, name in records(objects).deletions if number < before]
        left = take_back_dead(objects, names)
        if not left:
            return
        if this.seconds_left and time.monotonic() - reported_at >= REPORT_SECONDS:
            reported_at = time.monotonic()
            tell(f"{_of(left)} to delete objects: waiting up to {this.seconds_left:.0f} s for its end")
    if not force:
        raise InstanceLocked(
            f"{_of(left)} to delete objects for the previous owner, and may continue at any time: end it, "
            f"then run 'dormouse adopt' again. (--force assumes that it has ended; if it continues, this "
            f"database loses the objects that it deletes)"
        )
    logger.warning(
        "%s to delete objects, and is assumed to have ended: objects that it deletes later are lost",
        _of(left),
    )
    take_back(objects, [each.name for each in left])


def _of(left: Sequence[Announced]) -> str:
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"{left[0].process}{more} began at {left[0].since}"


def _read(objects: ObjectStore, name: str) -> Announced | None:
    """Returns the announcement with a name, or None if it was removed because the deletion is over."""
    try:
        fields = json.loads(objects.get(name))
        since = str(fields.pop("since"))
        return Announced(name, Process(**fields), since)
    except ObjectNotFound:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # of a newer Dormouse, perhaps
        return Announced(name, Process(), "an unknown time")


class Milestones:
    """The milestones of a database and of its store.

    They show whether the database was restored to an earlier state.
    """

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects
        self._last: tuple[str, str] | None = None

    def id_of(self, number: int, milestone: int) -> str:
        """Returns the id of a milestone in the store.

        Raises `ObjectNotFound` if the store has only a later milestone.
        """
        name = milestone_name(number, milestone)
        if self._last is None or self._last[0] != name:
            self._last = (name, read_record(self._objects, name, "milestone_id")[0])
        return self._last[1]

    def pass_next(self, mine: Incarnation, seen: Records, seconds_min: float) -> bool:
        """Records a new milestone if the last is `seconds_min` old and something was committed since then.

        Returns False if the store has a milestone of this number from another database. Only logs errors.
        """
        try:
            if mine.milestone > seen.milestone:  # a process passed it, and could not write to the store
                return self._give(mine.number, mine.milestone, str(mine.milestone_id), seen)
            if not (mine.confirmed and mine.moved and mine.seconds >= seconds_min):
                return True
            uuid = self._passed(mine)
            return uuid is None or self._give(mine.number, mine.milestone + 1, uuid, seen)
        except DormouseError as error:
            logger.warning(
                "the milestone could not be written, so a restore of the database may not be noticed: %s",
                error,
            )
            return True

    def _passed(self, mine: Incarnation) -> str | None:
        """Records the next milestone in the database, on its disk. Returns the id of the milestone.

        Returns None if another process was faster.
        """

        def work(conn: psycopg.Connection[Any]) -> str | None:
            on_disk(conn)
            values = {"number": mine.number, "milestone": mine.milestone}
            row = conn.execute(_QUERIES["pass"].on(), values).fetchone()
            return None if row is None else str(row[0])

        return run_transaction(self._supplier, work, operation="record a milestone")

    def _give(self, number: int, milestone: int, uuid: str, seen: Records) -> bool:
        """Writes a milestone to the store, and deletes earlier milestones there.

        Returns False if the store has a milestone of this number from another database.
        """
        fields = {"milestone_id": uuid, "made": written_now()}
        try:
            self._objects.put(milestone_name(number, milestone), json.dumps(fields).encode())
        except ObjectAlreadyExists:
            with suppress(ObjectNotFound):  # a process that gave a later milestone deleted it meanwhile
                if self.id_of(number, milestone) != uuid:
                    return False
        earlier = [each for each in seen.milestones if each < (number, milestone)]
        self._objects.delete([milestone_name(*each) for each in earlier])
        return True


class Ownership:
    """The ownership of a store by a database, and this process's right to write. Threads may share it."""

    def __init__(self, supplier: Supplier, objects: ObjectStore, *, read_only: bool = False) -> None:
        self._supplier = supplier
        self._objects = objects
        self.read_only = read_only
        self.refusal: InstanceReadOnly | None = None
        """The error that writes raise, or None if the database owns the store."""
        self._milestones = Milestones(supplier, objects)
        self._checked_at = self._advanced_at = float("-inf")
        self._was_ours = False
        self._last = 0
        self.completed: int | None = None
        """The number of the incarnation of an earlier, unfinished adoption that `open` completed, or None."""

    def open(self, instance_id: str, *, starts: bool = False) -> InstanceReadOnly | None:
        """Checks the ownership. Makes a new database the owner of a new store.

        With `starts`, the database was just started, and begins a new incarnation. Returns the reason as an
        error if this database may not write, or else None. Raises `NotAnInstance` for another instance's
        store, and `ObjectStoreIsNotOurs` for a store that lacks the database's files.
        """
        ours = known(self._supplier)
        is_new = not any(each.confirmed for each in ours) and self._mark(instance_id, ours)
        for each in ours:
            if not each.confirmed and each.reason != "copy":
                with suppress(InstanceLocked):  # an adoption that still waits: `look` returns the reason
                    self._give(each, partial(wait_for_deletions, self._objects, each.number))
                    self.completed = each.number if each.waits else None
        if not is_new and (refusal := self.look(instance_id)) is not None:
            return refusal
        if is_new or starts or not any(each.confirmed for each in known(self._supplier)):
            self._claim("made" if is_new else "start", records(self._objects).last + 1)
            if (refusal := self.look(instance_id)) is not None:
                return refusal
        names = [name for _, name in records(self._objects).deletions]
        if starts:  # the database was not running, so all earlier writers have ended
            take_back(self._objects, names)
        else:
            take_back_dead(self._objects, names)
        self.advance()
        return None

    def look(self, instance_id: str) -> InstanceReadOnly | None:
        """Returns the reason as an error if this database may not write, or None if it owns the store.

        Raises the errors of `open`.
        """
        owned = any(each.confirmed for each in known(self._supplier))
        check_mark(instance_id, self._objects, owned=owned)
        return self._ask()[0]

    def check_writable(self) -> None:
        """Raises `InstanceReadOnly` if this process may not write."""
        if self.refusal is not None:
            raise self.refusal
        if self.read_only:
            raise InstanceReadOnly(
                "the instance was opened read-only; open it without read_only to change it"
            )
        self.check()

    def check(self) -> None:
        """Raises `InstanceIsACopy` or `InstanceTakenOver` if the database no longer owns the store.

        Compares the records of database and store only if the last comparison is `CHECK_SECONDS` ago.
        """
        if not self._was_ours or time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self.check_now()

    def check_now(self) -> None:
        """Compares the records of database and store now, and raises the errors of `check`.

        Costs one SQL statement and two requests to the store.
        """
        refusal, mine, seen = self._ask()
        if refusal is None and mine is not None and not self._pass(mine, seen, CHECK_SECONDS):
            refusal = self._ask()[0]  # another copy of the database has passed this milestone
        if refusal is not None:
            raise refusal

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Announces a deletion, then checks that this database owns the store, and then runs the block.

        Raises the errors of `check`, and `ObjectStoreError`.
        """
        if self.refusal is not None:
            raise self.refusal
        with announced(self._objects, self._last):
            self.check_now()
            yield

    def advance(self, *, last: bool = False) -> None:
        """Records the next milestone in the database and the store, at most every `CHECK_SECONDS`.

        With `last`, which a process gives when it closes the instance, records it immediately. Raises no
        error if another database owns the store, because `check` does.
        """
        if not self._was_ours or not (last or time.monotonic() - self._advanced_at >= CHECK_SECONDS):
            return
        with suppress(DormouseError, psycopg.Error):  # the next operation that needs them raises
            refusal, mine, seen = self._ask()
            if refusal is None and mine is not None:
                self._pass(mine, seen, 0.0 if last else CHECK_SECONDS)

    @property
    def number(self) -> int:
        """The number of the database's last confirmed incarnation, or 0 if there is none."""
        return max((each.number for each in known(self._supplier) if each.confirmed), default=0)

    @property
    def adopted(self) -> int:
        """The number of the incarnation that the last adoption began, or 0 if there was no adoption."""
        return last_adopted(self._supplier)

    def adopt(
        self,
        instance_id: str,
        *,
        keep_days: float = KEEP_DAYS,
        wait_seconds: float = WAIT_SECONDS,
        force: bool = False,
        tell: Callable[[str], object] = lambda line: None,
        began_xid: int | None = None,
    ) -> int:
        """Makes this database the owner of the store. Returns the number of the new incarnation.

        - Deletes the records of earlier write attempts, ends leases, and makes hidden messages visible.
        - Objects of other timelines stay in the store as orphans. Files that this database knows are kept
          from garbage collection for `keep_days`.
        - Waits up to `wait_seconds` for deletions that the previous owner has begun, and reports them by
          `tell`. With `force`, assumes after this time that these deletions have ended.
        - Transactions before `began_xid` (default: the current one) belong to the time before the adoption.

        Raises `NotAnInstance` for a store of another instance, and `InstanceLocked` if such a deletion may
        still run. The previous owner can then no longer write, and another call continues the adoption.
        """
        check_mark(instance_id, self._objects, owned=True)
        ours, last = known(self._supplier), records(self._objects).last
        begun = next((each for each in ours if each.waits and each.number == last), None)
        if begun is not None and self._owner(last)[0] != begun.uuid:
            begun = None
        number = max([last, *(each.number for each in ours)]) + 1 if begun is None else last
        over = partial(
            wait_for_deletions, self._objects, number, seconds_max=wait_seconds, force=force, tell=tell
        )
        if begun is None:
            self._claim("adoption", number, over, keep_days, began_xid)
        else:
            keep = rows_of(_QUERIES["keep"], {"number": number, "days": keep_days})
            run_transaction(self._supplier, keep, operation="hold files")
            self._give(begun, over)
        return number

    # ------------------------------------------------------------------ the records of both

    def _ask(self) -> tuple[InstanceReadOnly | None, Incarnation | None, Records]:
        """Compares the records of the database and of the store.

        Returns three values: the error that writes must raise (or None), the database's record of the store's
        last incarnation (or None), and the records of the store.
        """
        for again in (True, False):
            seen = records(self._objects)
            ours = {each.number: each for each in known(self._supplier)}
            try:
                refusal = self._refusal(ours, seen)
            except ObjectNotFound:  # the milestone was replaced by a later one meanwhile
                if not again:
                    raise
                continue
            if refusal is None:  # otherwise the records may have changed between the two reads: ask again
                break
        self._checked_at = time.monotonic()
        self._was_ours = self._was_ours or refusal is None
        self._last = seen.last
        return refusal, ours.get(seen.last), seen

    def _pass(self, mine: Incarnation, seen: Records, seconds_min: float) -> bool:
        self._advanced_at = time.monotonic()
        return self._milestones.pass_next(mine, seen, seconds_min)

    def _owner(self, number: int) -> tuple[str, str]:
        """Returns the UUID of an incarnation in the store, and a text with its time and host."""
        return read_record(self._objects, incarnation_name(number), "incarnation_id")

    def _refusal(self, ours: Mapping[int, Incarnation], seen: Records) -> InstanceReadOnly | None:
        """Returns the error that writes must raise by the records of database and store, or None."""
        confirmed = max((each.number for each in ours.values() if each.confirmed), default=0)
        if seen.last < confirmed:
            return self._store_is_older(f"incarnation {seen.last}, the database {confirmed}")
        if seen.last == 0:
            copied = any(each.reason == "copy" for each in ours.values())
            return InstanceIsACopy(_A_COPY) if copied else None
        mine = ours.get(seen.last)
        if mine is not None and self._agree(mine, seen):
            return self._refusal_of(mine, seen)
        uuid, made = self._owner(seen.last)
        if mine is not None and mine.uuid == uuid:
            return self._was_put_back(seen)
        if self._was_ours or (ours and ours[max(ours)].here):
            return InstanceTakenOver(
                f"another database owns {self._objects.url} since {made}, or this one was restored to an "
                f"earlier state: nothing was changed. Use the latest one, or only read this one; 'dormouse "
                "adopt' makes this one the owner again"
            )
        return InstanceIsACopy(_A_COPY)

    def _agree(self, mine: Incarnation, seen: Records) -> bool:
        """Returns whether the store has this incarnation, and the database has the store's last milestone."""
        if mine.milestone == seen.milestone > 0:
            return self._milestones.id_of(seen.last, seen.milestone) == mine.milestone_id
        return mine.milestone >= seen.milestone and self._owner(seen.last)[0] == mine.uuid

    def _refusal_of(self, mine: Incarnation, seen: Records) -> InstanceReadOnly | None:
        if not mine.here:
            return InstanceIsACopy(_A_COPY)
        if mine.waits:
            return InstanceIsACopy(_BEGUN)
        if mine.milestone > seen.milestone + 1:  # the store may lack the last milestone for a moment
            has = f"milestone {seen.milestone} of incarnation {seen.last}, the database {mine.milestone}"
            return self._store_is_older(has)
        return None

    def _was_put_back(self, seen: Records) -> InstanceReadOnly:
        kind = InstanceTakenOver if self._was_ours else InstanceIsACopy
        _, made = read_record(self._objects, milestone_name(seen.last, seen.milestone), "milestone_id")
        return kind(
            f"the database is older than the state that {self._objects.url} recorded at {made}: it was "
            f"restored to an earlier state, or another copy of it is in use. Later commits are missing in "
            f"this one, so it can only be read. Use the latest one; 'dormouse adopt' makes this one the owner"
        )

    def _store_is_older(self, has: str) -> InstanceReadOnly:
        return InstanceReadOnly(
            f"{self._objects.url} is older than the database, or lost its folder {FOLDER}/: it has {has}, "
            f"so this database can only be read. Give the store of the database; or, if its objects were "
            f"restored, use this store: 'dormouse adopt'"
        )

    # ------------------------------------------------------------------ becoming the owner

    def _mark(self, instance_id: str, ours: list[Incarnation]) -> bool:
        """Marks a new store as the store of this instance. Returns False if the store has a mark already.

        Raises `ObjectStoreIsNotOurs` if the database has files and the store has no mark, or if the store has
        objects of another instance.
        """
        with suppress(ObjectNotFound):
            self._objects.get(MARKER)
            return False
        intends = any(not each.confirmed and each.reason == "made" for each in ours)
        has_files = rows_of(_QUERIES["has_files"])
        if not intends and run_lookup(self._supplier, has_files, operation="find files")[0][0]:
            raise _not_ours(instance_id, self._objects)
        for record in sorted({"data", *RECORDS} - {STAGING, MARKER, INCOMING}):
            if next(iter(self._objects.list(record)), None) is not None:
                raise ObjectStoreIsNotOurs(
                    f"{self._objects.url} has objects in {record!r}, and no {MARKER}: it belongs to "
                    f"another instance, or was left by one; give an empty place"
                )
        with suppress(ObjectAlreadyExists):
            self._objects.put(MARKER, json.dumps({"instance_id": instance_id}).encode())
        return True

    def _claim(
        self,
        reason: Reason,
        number: int,
        over: Callable[[], object] = lambda: None,
        keep_days: float = 0.0,
        began_xid: int | None = None,
    ) -> None:
        def work(conn: psycopg.Connection[Any]) -> Incarnation:
            if reason == "adoption":
                conn.execute(_QUERIES["forget_writers"].on())
                conn.execute(_QUERIES["keep"].on(), {"number": number, "days": keep_days})
            return intend(conn, number, reason, began_xid)

        with suppress(psycopg.errors.UniqueViolation):  # another process makes the same one
            self._give(run_transaction(self._supplier, work, operation="announce an incarnation"), over)

    def _give(self, intended: Incarnation, over: Callable[[], object]) -> None:
        """Writes an intended incarnation to the store, and then confirms it in the database.

        An adoption calls `over` in between, which waits for the end of deletions.
        """
        number = intended.number
        fields = {"incarnation_id": intended.uuid, "made": written_now()}
        with suppress(ObjectAlreadyExists):
            self._objects.put(incarnation_name(number), json.dumps(fields).encode())
        ours = self._owner(number)[0] == intended.uuid
        if ours and intended.reason == "adoption":
            over()
        run_transaction(
            self._supplier,
            partial(settle, number=number, ours=ours),
            operation="confirm an incarnation",
        )
        if ours and number > KEPT:
            self._objects.delete([incarnation_name(number - KEPT)])


def check_mark(instance_id: str, objects: ObjectStore, *, owned: bool = False) -> None:
    """Raises `NotAnInstance` unless a store has the mark of this instance.

    If the mark is missing and the database `owned` the store before, raises `ObjectStoreIsNotOurs`.
    """
    try:
        owner = str(json.loads(objects.get(MARKER))["instance_id"])
    except ObjectNotFound:
        if owned:
            raise _not_ours(instance_id, objects) from None
        raise NotAnInstance(f"{objects.url} is not the object store of a Dormouse instance") from None
    except (ValueError, KeyError, TypeError):
        raise NotAnInstance(f"{objects.url}/{MARKER} was not written by Dormouse") from None
    if owner != instance_id:
        raise NotAnInstance(
            f"{objects.url} belongs to instance {owner}, the database to {instance_id}; use the two that "
            "belong together"
        )


def _not_ours(instance_id: str, objects: ObjectStore) -> ObjectStoreIsNotOurs:
    return ObjectStoreIsNotOurs(
        f"{objects.url} is not the object store of instance {instance_id}, whose database has files: it has "
        f"no {MARKER}. Give the store that the files are in; if it was emptied, restore its objects"
    )
