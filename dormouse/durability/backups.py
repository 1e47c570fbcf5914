"""Backups of an instance: a base backup of its database, and a copy of every object that it refers to.

A backup is a folder of a store: `<name>/manifest.json`, which is written last, so that a backup is whole or
absent; `database.tar.gz`, as pg_basebackup writes it; `objects.txt`, with the size and the XXH3-128 of each
object; and the objects below `objects/`. An object never changes, so a later backup may give those of an
earlier one another name in place of a copy.

Source: PostgreSQL's pg_basebackup and pg_verifybackup; rsync's --link-dest.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from dormouse.durability.ledgers import is_answer
from dormouse.errors import (
    BackupDamaged,
    InstanceError,
    InstanceTooNew,
    InvalidInput,
    ObjectAlreadyExists,
    ObjectNotFound,
    ObjectStoreError,
)
from dormouse.model.loops import Progress
from dormouse.model.table import KEPT_SECONDS
from dormouse.objects.fault import (
    MISSING,
    Fault,
    compared,
    copied,
    digest_of,
    new_digest,
    unreadable,
)
from dormouse.objects.ledger import LedgerObject
from dormouse.objects.staging import shut_out_others
from dormouse.objects.store import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import METADATA_BACKUP_SECONDS
from dormouse.state.files.holds import held_until_next

MANIFEST, BEGUN = "manifest.json", "begun.json"
SWEPT = "swept.json"
"""Another took it for abandoned: it can be finished no more."""
ABANDONED_AFTER = timedelta(seconds=KEPT_SECONDS)
"""A backup that has no manifest, and to which nothing was written for so long, is nobody's any more."""
NAME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{6}Z(-\d+)?")
FORMAT = 1
FORMAT_DAMAGED = 2
"""Of a backup that was taken despite damage: a Dormouse that does not know of these would miss no object."""
DATABASE, OBJECTS = "database.tar.gz", "objects.txt"
FOLDER = "objects"
COPIED_AT_ONCE = 4
_BATCH = 1_000
INSTEAD = "restore another one ('dormouse backups' lists them), or take one without --since"
logger = logging.getLogger(__name__)


def has_object(store: ObjectStore, name: str) -> bool:
    """Whether a store has an object."""
    with suppress(ObjectNotFound):
        return store.size(name) >= 0
    return False


def sweep(store: ObjectStore, now: datetime) -> set[str]:
    """Removes what is left of backups that were killed, and nothing that no backup has begun.

    Gives what there was: the first part of each name.
    """
    names: set[str] = set()
    written_at: dict[str, datetime] = {}
    for one, _, written in store.list_dated(""):
        name, *rest = one.split("/")
        if len(rest) == 1:  # the marks, and not what is in the backups
            names.add(one)
        written_at[name] = max(written_at.get(name, written), written)
    for name in sorted(written_at):
        if not NAME.fullmatch(name) or f"{name}/{MANIFEST}" in names:
            continue
        if names.isdisjoint((f"{name}/{BEGUN}", f"{name}/{SWEPT}")):
            continue
        if now - written_at[name] <= ABANDONED_AFTER:
            continue
        with suppress(ObjectAlreadyExists):
            store.put(f"{name}/{SWEPT}", b"{}")
        if not has_object(store, f"{name}/{MANIFEST}"):
            logger.info("backup %s was never finished, and is removed", name)
            remove(store, name, SWEPT)
    return set(written_at)


def remove(store: ObjectStore, name: str, mark: str) -> None:
    """Without its `mark`, which goes last, nobody would go on when this is killed."""
    last = f"{name}/{mark}"
    pending: Iterator[str] = (one for one, _ in list(store.list(name)) if one != last)
    while batch := list(islice(pending, _BATCH)):
        store.delete(batch)
    store.delete([last])
    if (folder := store.local_path(name)) is not None:
        shutil.rmtree(folder, ignore_errors=True)  # folders without objects


@dataclass(frozen=True, slots=True)
class Damaged:
    """An object that was not what was written, or not there, when it was backed up; `fault` says what."""

    name: str
    fault: str


@dataclass(frozen=True, slots=True)
class Backup:
    """A whole backup. `objects` and `bytes` are those of the object store; `copied` were not there before.

    `damaged` are objects that it lacks, or has as they were, damaged, as it was taken despite damage.
    """

    name: str
    instance_id: str
    made_at: str
    seconds: float
    objects: int
    bytes: int
    copied: int
    database_bytes: int
    since: str | None
    database_digest: str
    objects_digest: str
    damaged: tuple[Damaged, ...] = ()


class BackedUp(NamedTuple):
    """An object of a backup."""

    name: str
    size: int
    digest: bytes


def backups(store: ObjectStore) -> list[Backup]:
    """The backups that are whole, the earliest first; of those that cannot be read it warns."""
    found = []
    for name in _names(store):
        try:
            found.append(backup_of(store, name))
        except (BackupDamaged, InstanceTooNew) as error:
            logger.warning("%s", error)
    return found


def backup_of(store: ObjectStore, name: str | None) -> Backup:
    """A backup by its name; the latest when there is none. `InvalidInput` when it is not there."""
    if name is None:
        known = _names(store)
        if not known:
            raise InvalidInput(f"there is no backup in {store.url}")
        name = known[-1]
        if len({one.instance_id for one in backups(store)}) > 1:
            raise InvalidInput(
                f"{store.url} has backups of several instances: name one, see dormouse backups"
            )
    try:
        if not NAME.fullmatch(name):
            raise ObjectNotFound(name)
        said = json.loads(store.get(f"{name}/{MANIFEST}"))
        version = int(said.pop("format"))
        if version > FORMAT_DAMAGED:
            raise InstanceTooNew(
                f"backup {name} in {store.url} has format {version}, this Dormouse knows {FORMAT_DAMAGED}; "
                "upgrade Dormouse"
            )
        damaged = tuple(Damaged(**one) for one in said.pop("damaged", ()))
        return Backup(**{**said, "name": name, "damaged": damaged})  # a folder may be renamed, by anybody
    except ObjectNotFound:
        there = ", ".join(_names(store)) or "none"
        raise InvalidInput(f"there is no backup {name!r} in {store.url}; there are: {there}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BackupDamaged(f"{store.url}/{name}/{MANIFEST} cannot be read: {INSTEAD}") from None


def objects_of(store: ObjectStore, backup: Backup) -> dict[str, BackedUp]:
    """The objects of a backup, by name; `BackupDamaged` when the list is not the one that was written."""
    data = _get(store, f"{backup.name}/{OBJECTS}")
    if new_digest(data=data).hexdigest() != backup.objects_digest:
        raise BackupDamaged(f"{store.url}/{backup.name}/{OBJECTS} is damaged: {INSTEAD}")
    found = {}
    for line in data.decode().splitlines():
        digest, size, name = line.split(" ", 2)
        found[name] = BackedUp(name, int(size), bytes.fromhex(digest))
    return found


def fetch(store: ObjectStore, backup: Backup, found: BackedUp, path: Path) -> None:
    """Copies an object of a backup to a path, and verifies it; `BackupDamaged`."""
    _fetch(store, f"{backup.name}/{FOLDER}/{found.name}", path, found.size, found.digest.hex())


def fetch_database(store: ObjectStore, backup: Backup, path: Path) -> None:
    """Copies the base backup to a path, and verifies it; `BackupDamaged`."""
    name = f"{backup.name}/{DATABASE}"
    _fetch(store, name, path, backup.database_bytes, backup.database_digest)


class BackupWriter:
    """Writes a backup into a store; nothing is a backup before `finish`.

    `despite_damage`: objects that are damaged, or missing, are noted in it, and end no backup.
    """

    def __init__(
        self, store: ObjectStore, instance_id: str, since: str | None, *, despite_damage: bool = False
    ) -> None:
        self._despite_damage = despite_damage
        self._damaged: list[Damaged] = []
        self._store = store
        self._instance_id = instance_id
        self._began = datetime.now(UTC)
        self._since = self._last() if since == "last" else None if since is None else backup_of(store, since)
        if self._since is not None and self._since.instance_id != instance_id:
            raise InvalidInput(f"backup {self._since.name} is of another instance, {self._since.instance_id}")
        self._before = {} if self._since is None else objects_of(store, self._since)
        self._done: list[BackedUp] = []
        self._copied, self._counting = 0, threading.Lock()
        self._database = (0, "")
        self.name = self._begin()

    def database(self, write: Callable[[Path], None]) -> None:
        """The base backup, which `write` writes to a path."""
        with self._store.staged(f"{self.name}/{DATABASE}") as path:
            write(path)
            shut_out_others(path)
            with path.open("rb") as file:
                digest = digest_of(file).hex()
                self._database = file.tell(), digest

    def objects(self, source: ObjectStore, wanted: Iterable[LedgerObject], progress: Progress) -> None:
        """Copies objects; raises `ObjectNotFound` and `BackupDamaged` for those that must be there."""
        pending = iter(wanted)
        with ThreadPoolExecutor(COPIED_AT_ONCE, "backup") as pool:
            while batch := list(islice(pending, _BATCH)):
                found = list(pool.map(lambda one: self._object(source, one), batch))
                self._done += [one for one in found if one is not None]
                progress(len(self._done), None)

    def finish(self) -> Backup:
        """Makes it a backup."""
        lines = "".join(f"{one.digest.hex()} {one.size} {one.name}\n" for one in self._done).encode()
        self._store.put(f"{self.name}/{OBJECTS}", lines)
        made = Backup(
            name=self.name,
            instance_id=self._instance_id,
            made_at=self._began.isoformat(timespec="seconds"),
            seconds=round((datetime.now(UTC) - self._began).total_seconds(), 3),
            objects=len(self._done),
            bytes=sum(one.size for one in self._done),
            copied=self._copied,
            database_bytes=self._database[0],
            since=None if self._since is None else self._since.name,
            database_digest=self._database[1],
            objects_digest=new_digest(data=lines).hexdigest(),
            damaged=tuple(sorted(self._damaged, key=lambda one: one.name)),
        )
        said = asdict(made)
        if not made.damaged:
            del said["damaged"]  # so that an older Dormouse reads it
        version = FORMAT_DAMAGED if made.damaged else FORMAT
        text = json.dumps({"format": version, **said}, indent=1)
        self._store.put(f"{self.name}/{MANIFEST}", text.encode())
        # each writes first, and then asks for the other's: one of them sees it
        swept = has_object(self._store, f"{self.name}/{SWEPT}")
        if swept or not has_object(self._store, f"{self.name}/{BEGUN}"):
            self._store.delete([f"{self.name}/{MANIFEST}"])
            raise InstanceError(
                f"backup {self.name} stood still for so long that another one in {self._store.url} removed "
                "it as abandoned: take it again"
            )
        return made

    def abandon(self) -> None:
        """Removes what was written of a backup that failed."""
        remove(self._store, self.name, BEGUN)

    def _last(self) -> Backup | None:
        """The instance's last backup there; None: the first is a whole one, as from cron."""
        own = [one for one in backups(self._store) if one.instance_id == self._instance_id]
        return own[-1] if own else None

    def _begin(self) -> str:
        self._store.sweep_staging()
        taken = sweep(self._store, self._began)
        stem = f"{self._began:%Y-%m-%dT%H%M%SZ}"
        for name in (stem, *(f"{stem}-{number}" for number in range(2, 1_000))):
            with suppress(ObjectAlreadyExists):  # another began at the same time
                if name not in taken:
                    self._mark(name)
                    return name
        raise InvalidInput(f"{self._store.url} has too many backups of one second, {stem}")

    def _mark(self, name: str) -> None:
        folder = self._store.local_path(name)
        if folder is not None and not folder.parent.exists():
            folder.parent.mkdir(parents=True)
            shut_out_others(folder.parent)
        self._store.put(f"{name}/{BEGUN}", json.dumps({"began": self._began.isoformat()}).encode())
        if folder is not None:
            shut_out_others(folder)

    def _object(self, source: ObjectStore, wanted: LedgerObject) -> BackedUp | None:
        name = wanted.name
        target, before = f"{self.name}/{FOLDER}/{name}", self._before.get(name)
        if (
            before is not None
            and self._since is not None
            and not is_answer(name)  # when a job has expired, another may have its id
            and not compared(wanted, before.size, before.digest)
        ):
            try:
                earlier = f"{self._since.name}/{FOLDER}/{name}"
                if self._store.size(earlier) == before.size:
                    self._store.copy(earlier, target)
                    return before
            except ObjectNotFound:
                pass
            except ObjectAlreadyExists:
                return None
        try:
            with self._store.staged(target) as path:
                size, digest = self._read(source, name, path)
        except ObjectNotFound:
            if wanted.needed:
                self._note(source, name, MISSING)
            return None
        except _Unreadable as error:
            self._note(source, name, unreadable(error.__cause__ or error))
            return None
        except ObjectAlreadyExists:  # of a table that was dropped while it was listed, or a body
            return None
        if fault := compared(wanted, size, digest):
            self._note(source, name, fault)
        with self._counting:
            self._copied += 1
        return BackedUp(name, size, digest)

    def _read(self, source: ObjectStore, name: str, path: Path) -> tuple[int, bytes]:
        try:
            return copied(source, name, path)
        except ObjectStoreError as error:
            if self._despite_damage and not isinstance(error, ObjectNotFound):
                raise _Unreadable(name) from error
            raise

    def _note(self, source: ObjectStore, name: str, fault: Fault) -> None:
        """Of an object that is damaged or missing: in the backup, or there is none."""
        if not self._despite_damage:
            raise BackupDamaged(
                f"{source.url}/{name} {fault}; nothing is backed up. 'dormouse check --deep' lists what is "
                "damaged: bring it back from an earlier backup, or back up the rest by --despite-damage"
            )
        with self._counting:
            self._damaged.append(Damaged(name, fault.text))


class _Unreadable(Exception):
    """An object of the source cannot be read."""


def listed_backups(store: ObjectStore) -> tuple[list[str], list[str]]:
    """Returns the names of the backups that are whole, and of those that were only begun, each sorted.

    Raises `ObjectStoreError` for a folder that is not there, as that of a disk that is not mounted.
    """
    path = store.local_path(MANIFEST)
    if path is not None and not path.parent.is_dir():
        raise ObjectStoreError(
            f"{store.url} is not there; if its backups are deleted for good, put an empty folder there"
        )
    marks = (one.split("/") for one, _ in store.list("") if one.count("/") == 1)
    marked = {(name, mark) for name, mark in marks if NAME.fullmatch(name)}
    whole = {name for name, mark in marked if mark == MANIFEST}
    begun = {name for name, mark in marked if mark in (BEGUN, SWEPT)}
    return sorted(whole), sorted(begun - whole)


def objects_in(store: ObjectStore, name: str) -> Iterator[str]:
    """Yields the names of the objects that lie in a backup, whole or not."""
    folder = f"{name}/{FOLDER}/"
    return (one.removeprefix(folder) for one, _ in store.list(folder))


def _names(store: ObjectStore) -> list[str]:
    """Of what has a manifest, in the order of time."""
    names = {name.split("/")[0] for name, _ in store.list("") if name.endswith(f"/{MANIFEST}")}
    return sorted(name for name in names if NAME.fullmatch(name))


def _fetch(store: ObjectStore, name: str, path: Path, size: int, digest: str) -> None:
    try:
        found = copied(store, name, path)
    except ObjectNotFound:
        raise BackupDamaged(f"{store.url}/{name} is gone: {INSTEAD}") from None
    if (found[0], found[1].hex()) != (size, digest):
        raise BackupDamaged(f"{store.url}/{name} is damaged: {INSTEAD}")


def _get(store: ObjectStore, name: str) -> bytes:
    try:
        return store.get(name)
    except ObjectNotFound:
        raise BackupDamaged(f"{store.url}/{name} is gone: {INSTEAD}") from None


# Backups of an instance's metadata in its own store, for the day on which the database is gone.
#
# `backups/<incarnation>/<time>.tar.gz` is a base backup of the database. What a table's files were then
# is known again from it; files that came later are orphans, and those that were collected are missing.

METADATA = "backups"
KIND = "metadata backup"
HELD_SECONDS_MAX = METADATA_BACKUP_SECONDS
"""Two days: should the next one not come, collection goes on."""

_TIME = "%Y-%m-%dT%H%M%SZ"
_METADATA_NAME = re.compile(rf"{METADATA}/(\d+)/(\d{{4}}-\d{{2}}-\d{{2}}T\d{{6}}Z)\.tar\.gz")


@dataclass(frozen=True, slots=True)
class MetadataBackup:
    """One backup; `name` is its object's, `made` its time in UTC."""

    name: str
    incarnation: int
    made: str
    byte_count: int


def metadata_backups(objects: ObjectStore) -> list[MetadataBackup]:
    """Those that the store has, the earliest first."""
    found = ((_METADATA_NAME.fullmatch(name), name, size) for name, size in objects.list(METADATA))
    listed = [MetadataBackup(name, int(m[1]), m[2], size) for m, name, size in found if m is not None]
    return sorted(listed, key=lambda one: (one.incarnation, one.made))


def take_metadata(
    supplier: Supplier,
    objects: ObjectStore,
    incarnation: int,
    base_backup: Callable[[Path], None],
    *,
    keep: int,
) -> MetadataBackup:
    """Takes one, and deletes all but the last `keep`.

    Files that it refers to are held until the next one: else it would be of little use when it is needed.
    """
    made = f"{datetime.now(UTC):{_TIME}}"
    last = max((one.made for one in metadata_backups(objects)), default="")
    if made <= last:  # the clock was ahead: the order says what is deleted, and what is restored
        made = f"{datetime.strptime(last, _TIME) + timedelta(seconds=1):{_TIME}}"
    name = f"{METADATA}/{incarnation}/{made}.tar.gz"
    with held_until_next(supplier, KIND, HELD_SECONDS_MAX), objects.staged(name) as path:
        base_backup(path)
    found = metadata_backups(objects)
    objects.delete([one.name for one in found[:-keep]])
    return found[-1]


def find_metadata(objects: ObjectStore, name: str | None) -> MetadataBackup:
    """The one of this name or time, the last one when there is none. `InvalidInput`."""
    found = metadata_backups(objects)
    for one in reversed(found):
        if name in (None, one.name, one.made):
            return one
    known = ", ".join(one.made for one in found) or "none"
    raise InvalidInput(f"{objects.url} has no such backup of the metadata; there are: {known}")
