"""Which database may write into an object store, and delete there: the one that made its last incarnation.

An _incarnation_ is a number and a UUID. The database has it, and so has the store, as `owner/<number>.json`,
which is created exclusively: of those who want a number, one gets it. Databases are copied, by dumps,
snapshots and clones, and the store is not: what a copy deletes, the original misses. So a database whose last
incarnation is not the store's, or was made in another database than this, may only read until it is adopted.

A crash between the halves is no copy: the database intends an incarnation, the store gets it, then it is
confirmed. As etcd and PostgreSQL have it: what is restored begins a life of its own.

Under an incarnation the database passes _milestones_, which the store gets when they are on the database's
disk: one that is behind the store's last is the same database as it was before, and a copy, too.

A process may be frozen between its question whether it owns the store and the deletion that follows, for as
long as it likes. So it announces the deletion first, then asks, deletes, and takes the announcement back. An
adoption marks the store first, then looks for announcements: one of the two always sees the other.
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
TOLD_SECONDS = 5.0
MARKER = "instance.json"
CHECK_SECONDS = 10.0
"""How late a writer may notice that another database was adopted, and how far milestones are apart.

Before a deletion it is asked each time.
"""
KEEP_DAYS = 7.0
"""How long what was known at an adoption is not collected."""
WAIT_SECONDS = 60.0
"""How long an adoption waits for deletions of the owner of before."""
logger = logging.getLogger(__name__)
_QUERIES = load(__file__, "ownership")
_A_COPY = (
    "the database is a copy of the one that owns the object store (restored, cloned, or moved to another "
    "server): reading works. 'dormouse adopt' makes this one the owner"
)
_BEGUN = (
    "the adoption of this database has begun, and waits for deletions of the owner of before: run "
    "'dormouse adopt' again"
)


# Announced deletions.


@dataclass(frozen=True, slots=True)
class Announced:
    """A deletion that was announced, and by which process."""

    name: str
    process: Process
    since: str


@contextmanager
def announced(objects: ObjectStore, number: int) -> Iterator[None]:
    """Announces a deletion under an incarnation. Raises `ObjectStoreError`, before anything is deleted."""
    name = new_deletion_name(number)
    since = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
    objects.put(name, json.dumps({**asdict(this_process()), "since": since}).encode())
    try:
        yield
    finally:
        take_back(objects, [name])


def take_back(objects: ObjectStore, names: Sequence[str]) -> None:
    """The deletions are over."""
    if names:
        sweep(objects, [[(name, None) for name in names]]).warn()


def take_back_dead(objects: ObjectStore, names: Sequence[str]) -> list[Announced]:
    """Takes back those whose process has surely ended; gives the others."""
    found = [one for name in names if (one := _read(objects, name)) is not None]
    gone = [one for one in found if one.process.is_gone()]
    take_back(objects, [one.name for one in gone])
    return [one for one in found if one not in gone]


def wait_for_deletions(
    objects: ObjectStore,
    before: int,
    *,
    seconds_max: float = 0.0,
    force: bool = False,
    tell: Callable[[str], object] = lambda line: None,
) -> None:
    """Waits until none is under way that was announced under an incarnation `before` this one.

    With `force`, what is left after `seconds_max` is taken for ended, and logged. `tell` is told what is
    waited for. Raises `InstanceLocked` when some are left, which may still delete.
    """
    told_at = float("-inf")
    for this in tries(seconds_max, pause=POLL_SECONDS):
        names = [name for number, name in records(objects).deletions if number < before]
        left = take_back_dead(objects, names)
        if not left:
            return
        if this.seconds_left and time.monotonic() - told_at >= TOLD_SECONDS:
            told_at = time.monotonic()
            tell(f"{_of(left)} to delete objects: waiting up to {this.seconds_left:.0f} s for its end")
    if not force:
        raise InstanceLocked(
            f"{_of(left)} to delete objects for the owner of before, and may go on at any time: end it, then "
            "run 'dormouse adopt' again. (With --force it is taken for ended; should it go on, the objects "
            "that it deletes are lost to this database)"
        )
    logger.warning("%s to delete objects, and is taken for ended: what it deletes later is lost", _of(left))
    take_back(objects, [one.name for one in left])


def _of(left: Sequence[Announced]) -> str:
    more = f" (and {len(left) - 1} more)" if len(left) > 1 else ""
    return f"{left[0].process}{more} began at {left[0].since}"


def _read(objects: ObjectStore, name: str) -> Announced | None:
    """None: it is over."""
    try:
        said = json.loads(objects.get(name))
        since = str(said.pop("since"))
        return Announced(name, Process(**said), since)
    except ObjectNotFound:
        return None
    except (ValueError, KeyError, TypeError, AttributeError):  # of a newer Dormouse, perhaps
        return Announced(name, Process(), "a time that it does not tell")


# Milestones: how far a database has come under its incarnation, as the object store has it, too.


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


class Ownership:
    """Whether this database owns this store, and this process may write. Threads may share one."""

    def __init__(self, supplier: Supplier, objects: ObjectStore, *, read_only: bool = False) -> None:
        self._supplier = supplier
        self._objects = objects
        self.read_only = read_only
        self.refusal: InstanceReadOnly | None = None
        """Why nothing may be written, however the instance was opened."""
        self._milestones = Milestones(supplier, objects)
        self._checked_at = self._advanced_at = float("-inf")
        self._was_ours = False
        self._last = 0
        self.completed: int | None = None
        """The adoption that had begun before, and was completed by `open`."""

    def open(self, instance_id: str, *, starts: bool = False) -> InstanceReadOnly | None:
        """Makes the two each other's, if both are new, and a new incarnation when the database `starts`.

        Gives why nothing may be written, if so. Raises `NotAnInstance` for another instance's store, and
        `ObjectStoreIsNotOurs` for one in which the database's files are not.
        """
        ours = known(self._supplier)
        is_new = not any(one.confirmed for one in ours) and self._mark(instance_id, ours)
        for one in ours:
            if not one.confirmed and one.reason != "copy":
                with suppress(InstanceLocked):  # an adoption: `look` tells
                    self._give(one, partial(wait_for_deletions, self._objects, one.number))
                    self.completed = one.number if one.waits else None
        if not is_new and (refusal := self.look(instance_id)) is not None:
            return refusal
        if is_new or starts or not any(one.confirmed for one in known(self._supplier)):
            self._claim("made" if is_new else "start", records(self._objects).last + 1)
            if (refusal := self.look(instance_id)) is not None:
                return refusal
        names = [name for _, name in records(self._objects).deletions]
        if starts:  # all that wrote before are dead
            take_back(self._objects, names)
        else:
            take_back_dead(self._objects, names)
        self.advance()
        return None

    def look(self, instance_id: str) -> InstanceReadOnly | None:
        """Why nothing may be written; None: the database owns the store. Raises as `open` does."""
        owned = any(one.confirmed for one in known(self._supplier))
        check_mark(instance_id, self._objects, owned=owned)
        return self._ask()[0]

    def check_writable(self) -> None:
        """Raises `InstanceReadOnly` when nothing may be written."""
        if self.refusal is not None:
            raise self.refusal
        if self.read_only:
            raise InstanceReadOnly(
                "the instance was opened read-only; open it without read_only to change it"
            )
        self.check()

    def check(self) -> None:
        """Raises `InstanceIsACopy` or `InstanceTakenOver`; asks at most every `CHECK_SECONDS`."""
        if not self._was_ours or time.monotonic() - self._checked_at >= CHECK_SECONDS:
            self.check_now()

    def check_now(self) -> None:
        """As `check`, from what database and store say now: one statement and two requests."""
        refusal, mine, seen = self._ask()
        if refusal is None and mine is not None and not self._pass(mine, seen, CHECK_SECONDS):
            refusal = self._ask()[0]  # another copy has passed it
        if refusal is not None:
            raise refusal

    @contextmanager
    def deleting(self) -> Iterator[None]:
        """Announces a deletion, then asks whether it may be. Raises as `check`, and `ObjectStoreError`."""
        if self.refusal is not None:
            raise self.refusal
        with announced(self._objects, self._last):
            self.check_now()
            yield

    def advance(self, *, last: bool = False) -> None:
        """Has the store know how far the database has come, at most every `CHECK_SECONDS`.

        As the `last` of this process, at once. Another database's right to the store is for `check` to tell.
        """
        if not self._was_ours or not (last or time.monotonic() - self._advanced_at >= CHECK_SECONDS):
            return
        with suppress(DormouseError, psycopg.Error):  # it is told by what needs the two
            refusal, mine, seen = self._ask()
            if refusal is None and mine is not None:
                self._pass(mine, seen, 0.0 if last else CHECK_SECONDS)

    @property
    def number(self) -> int:
        """The number of the database's incarnation."""
        return max((one.number for one in known(self._supplier) if one.confirmed), default=0)

    @property
    def adopted(self) -> int:
        """The number of the incarnation that the last adoption began; 0: there was none."""
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
        """Makes this database the owner, whoever was; gives the incarnation's number.

        Writers, leases and hidden messages of before are forgotten. What was written by other timelines stays
        in the store, as orphans; what this one knows is not collected for `keep_days`. Deletions that the
        owner of before has begun are waited for, up to `wait_seconds`, and then taken for ended with `force`;
        `tell` is told. Transactions before `began_xid`, or now, are those of the databases before. Raises
        `NotAnInstance` for a store of another instance, and `InstanceLocked` when such a deletion may go on:
        the owner of before is refused by then, and another call goes on from there.
        """
        check_mark(instance_id, self._objects, owned=True)
        ours, last = known(self._supplier), records(self._objects).last
        begun = next((one for one in ours if one.waits and one.number == last), None)
        if begun is not None and self._owner(last)[0] != begun.uuid:
            begun = None
        number = max([last, *(one.number for one in ours)]) + 1 if begun is None else last
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

    # ------------------------------------------------------------------ what the two say

    def _ask(self) -> tuple[InstanceReadOnly | None, Incarnation | None, Records]:
        """Why nothing may be written, if so; the store's last incarnation, if known, and its records."""
        for again in (True, False):
            seen = records(self._objects)
            ours = {one.number: one for one in known(self._supplier)}
            try:
                refusal = self._refusal(ours, seen)
            except ObjectNotFound:  # a milestone, after which another was passed meanwhile
                if not again:
                    raise
                continue
            if refusal is None:  # else another process may just have made what was seen
                break
        self._checked_at = time.monotonic()
        self._was_ours = self._was_ours or refusal is None
        self._last = seen.last
        return refusal, ours.get(seen.last), seen

    def _pass(self, mine: Incarnation, seen: Records, seconds_min: float) -> bool:
        self._advanced_at = time.monotonic()
        return self._milestones.pass_next(mine, seen, seconds_min)

    def _owner(self, number: int) -> tuple[str, str]:
        """What the store says of an incarnation: its UUID, and when it was made, and where."""
        return read_record(self._objects, incarnation_name(number), "incarnation_id")

    def _refusal(self, ours: Mapping[int, Incarnation], seen: Records) -> InstanceReadOnly | None:
        """Of what the database knows, and the store's records."""
        confirmed = max((one.number for one in ours.values() if one.confirmed), default=0)
        if seen.last < confirmed:
            return self._store_is_older(f"incarnation {seen.last}, the database {confirmed}")
        if seen.last == 0:
            copied = any(one.reason == "copy" for one in ours.values())
            return InstanceIsACopy(_A_COPY) if copied else None
        mine = ours.get(seen.last)
        if mine is not None and self._agree(mine, seen):
            return self._refusal_of(mine, seen)
        uuid, made = self._owner(seen.last)
        if mine is not None and mine.uuid == uuid:
            return self._was_put_back(seen)
        if self._was_ours or (ours and ours[max(ours)].here):
            return InstanceTakenOver(
                f"another database owns {self._objects.url} since {made}, or this one was put back as it was "
                "before that: nothing was changed. Use the latest one, or only read this one; 'dormouse "
                "adopt' makes this one the owner again"
            )
        return InstanceIsACopy(_A_COPY)

    def _agree(self, mine: Incarnation, seen: Records) -> bool:
        """Whether the store's incarnation is this, and the database not behind its last milestone."""
        if mine.milestone == seen.milestone > 0:
            return self._milestones.id_of(seen.last, seen.milestone) == mine.milestone_id
        return mine.milestone >= seen.milestone and self._owner(seen.last)[0] == mine.uuid

    def _refusal_of(self, mine: Incarnation, seen: Records) -> InstanceReadOnly | None:
        if not mine.here:
            return InstanceIsACopy(_A_COPY)
        if mine.waits:
            return InstanceIsACopy(_BEGUN)
        if mine.milestone > seen.milestone + 1:  # one may be the database's, and not yet the store's
            has = f"milestone {seen.milestone} of incarnation {seen.last}, the database {mine.milestone}"
            return self._store_is_older(has)
        return None

    def _was_put_back(self, seen: Records) -> InstanceReadOnly:
        kind = InstanceTakenOver if self._was_ours else InstanceIsACopy
        _, made = read_record(self._objects, milestone_name(seen.last, seen.milestone), "milestone_id")
        return kind(
            f"the database is not as {self._objects.url} knows it since {made}: it was put back as it was "
            "before, or another copy of it goes on. What was committed there is not in this one, which only "
            "reads. Use the latest one; 'dormouse adopt' makes this one the owner"
        )

    def _store_is_older(self, has: str) -> InstanceReadOnly:
        return InstanceReadOnly(
            f"{self._objects.url} is older than the database, or lost its folder {FOLDER}/: it has {has}, "
            "which only reads. Give the store of the database; or, if its objects were brought back, take "
            "this one: 'dormouse adopt'"
        )

    # ------------------------------------------------------------------ to become the owner

    def _mark(self, instance_id: str, ours: list[Incarnation]) -> bool:
        """Writes the store's mark, if it is as new as the database; whether it had none."""
        with suppress(ObjectNotFound):
            self._objects.get(MARKER)
            return False
        intends = any(not one.confirmed and one.reason == "made" for one in ours)
        has_files = rows_of(_QUERIES["has_files"])
        if not intends and run_lookup(self._supplier, has_files, operation="look for files")[0][0]:
            raise _not_ours(instance_id, self._objects)
        for record in sorted({"data", *RECORDS} - {STAGING, MARKER, INCOMING}):
            if next(iter(self._objects.list(record)), None) is not None:
                raise ObjectStoreIsNotOurs(
                    f"{self._objects.url} has objects in {record!r}, and no {MARKER}: it is another "
                    "instance's, or what is left of one; give an empty place"
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
            self._give(run_transaction(self._supplier, work, operation="intend an incarnation"), over)

    def _give(self, one: Incarnation, over: Callable[[], object]) -> None:
        """Gives the store an incarnation that the database intends; an adoption waits until `over` ends."""
        said = {"incarnation_id": one.uuid, "made": written_now()}
        with suppress(ObjectAlreadyExists):
            self._objects.put(incarnation_name(one.number), json.dumps(said).encode())
        ours = self._owner(one.number)[0] == one.uuid
        if ours and one.reason == "adoption":
            over()
        run_transaction(
            self._supplier,
            partial(settle, number=one.number, ours=ours),
            operation="confirm an incarnation",
        )
        if ours and one.number > KEPT:
            self._objects.delete([incarnation_name(one.number - KEPT)])


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
