"""Backups of an instance: a base backup of its database, and a copy of every object that it refers to.

A backup is a folder `<name>/` of a store, with

- `manifest.json`, which is written last, so that a backup is whole or absent
- `database.tar.gz`, as pg_basebackup writes it
- `objects.txt`, with the size and the XXH3-128 of each object
- the objects below `objects/`

An object never changes, so a later backup may link to the objects of an earlier one instead of copying them.

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
"""The name of the object that marks a backup as abandoned.

Another process writes it before it removes the backup. The backup can then no longer be finished.
"""
ABANDONED_AFTER = timedelta(seconds=KEPT_SECONDS)
"""The time without a new object after which an unfinished backup counts as abandoned."""
NAME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{6}Z(-\d+)?")
FORMAT = 1
FORMAT_DAMAGED = 2
"""The format of a backup with damaged objects.

Older versions of Dormouse refuse it, as they ignore damage.
"""
DATABASE, OBJECTS = "database.tar.gz", "objects.txt"
FOLDER = "objects"
COPIED_AT_ONCE = 4
_BATCH = 1_000
INSTEAD = "restore another one ('dormouse backups' lists them), or take one without --since"
logger = logging.getLogger(__name__)


def has_object(store: ObjectStore, name: str) -> bool:
    """Returns whether a store has an object."""
    with suppress(ObjectNotFound):
        return store.size(name) >= 0
    return False


def sweep(store: ObjectStore, now: datetime) -> set[str]:
    """Removes abandoned backups, and leaves folders that are not backups.

    Returns the first path segment of each object name that the store had before.
    """
    names: set[str] = set()
    written_at: dict[str, datetime] = {}
    for object_name, _, written in store.list_dated(""):
        name, *rest = object_name.split("/")
        if len(rest) == 1:  # the marks, and not the content of the backups
            names.add(object_name)
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
    """Removes all objects of a backup.

    Removes the object `mark` last, so that `sweep` can find and finish a removal whose process was killed.
    """
    last = f"{name}/{mark}"
    pending: Iterator[str] = (each for each, _ in list(store.list(name)) if each != last)
    while batch := list(islice(pending, _BATCH)):
        store.delete(batch)
    store.delete([last])
    if (folder := store.local_path(name)) is not None:
        shutil.rmtree(folder, ignore_errors=True)  # folders without objects


@dataclass(frozen=True, slots=True)
class Damaged:
    """An object that was damaged or missing when it was backed up; `fault` describes it."""

    name: str
    fault: str


@dataclass(frozen=True, slots=True)
class Backup:
    """The description of a complete backup.

    - `objects`, `bytes`: the number of objects, and the sum of their sizes.
    - `copied`: the number of copied objects. The other objects are links to an earlier backup.
    - `damaged`: the objects that are missing or damaged in a backup that was taken with `despite_damage`.
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
    """An object of a backup, with its size in bytes and its digest."""

    name: str
    size: int
    digest: bytes


def backups(store: ObjectStore) -> list[Backup]:
    """Returns the complete backups, the earliest first.

    Logs a warning for each backup that cannot be read.
    """
    readable = []
    for name in _names(store):
        try:
            readable.append(backup_of(store, name))
        except (BackupDamaged, InstanceTooNew) as error:
            logger.warning("%s", error)
    return readable


def backup_of(store: ObjectStore, name: str | None) -> Backup:
    """Returns the backup with the given name, or the latest backup if the name is None.

    Raises `InvalidInput` if there is no such backup, or if the name is None and the store has backups of
    several instances. Raises `BackupDamaged` and `InstanceTooNew`.
    """
    if name is None:
        known = _names(store)
        if not known:
            raise InvalidInput(f"there is no backup in {store.url}")
        name = known[-1]
        if len({each.instance_id for each in backups(store)}) > 1:
            raise InvalidInput(
                f"{store.url} has backups of several instances: name one, see dormouse backups"
            )
    try:
        if not NAME.fullmatch(name):
            raise ObjectNotFound(name)
        fields = json.loads(store.get(f"{name}/{MANIFEST}"))
        version = int(fields.pop("format"))
        if version > FORMAT_DAMAGED:
            raise InstanceTooNew(
                f"backup {name} in {store.url} has format {version}, this Dormouse knows {FORMAT_DAMAGED}; "
                "upgrade Dormouse"
            )
        damaged = tuple(Damaged(**each) for each in fields.pop("damaged", ()))
        # the folder's name counts, as a user may have renamed it
        return Backup(**{**fields, "name": name, "damaged": damaged})
    except ObjectNotFound:
        there = ", ".join(_names(store)) or "none"
        raise InvalidInput(f"there is no backup {name!r} in {store.url}; there are: {there}") from None
    except (ValueError, TypeError, KeyError, AttributeError):
        raise BackupDamaged(f"{store.url}/{name}/{MANIFEST} cannot be read: {INSTEAD}") from None


def objects_of(store: ObjectStore, backup: Backup) -> dict[str, BackedUp]:
    """Returns the objects of a backup by their names.

    Raises `BackupDamaged` if the list of objects was changed.
    """
    data = _get(store, f"{backup.name}/{OBJECTS}")
    if new_digest(data=data).hexdigest() != backup.objects_digest:
        raise BackupDamaged(f"{store.url}/{backup.name}/{OBJECTS} is damaged: {INSTEAD}")
    objects = {}
    for line in data.decode().splitlines():
        digest, size, name = line.split(" ", 2)
        objects[name] = BackedUp(name, int(size), bytes.fromhex(digest))
    return objects


def fetch(store: ObjectStore, backup: Backup, item: BackedUp, path: Path) -> None:
    """Copies an object of a backup to a path, and verifies its digest. Raises `BackupDamaged`."""
    _fetch(store, f"{backup.name}/{FOLDER}/{item.name}", path, item.size, item.digest.hex())


def fetch_database(store: ObjectStore, backup: Backup, path: Path) -> None:
    """Copies the base backup of the database to a path, and verifies its digest. Raises `BackupDamaged`."""
    name = f"{backup.name}/{DATABASE}"
    _fetch(store, name, path, backup.database_bytes, backup.database_digest)


class BackupWriter:
    """A writer of one backup. The backup is complete only after `finish`.

    With `despite_damage`, the backup lists damaged and missing objects. Otherwise such an object raises an
    error.
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
        """Adds the base backup of the database, which `write` writes to a path."""
        with self._store.staged(f"{self.name}/{DATABASE}") as path:
            write(path)
            shut_out_others(path)
            with path.open("rb") as file:
                digest = digest_of(file).hex()
                self._database = file.tell(), digest

    def objects(self, source: ObjectStore, wanted: Iterable[LedgerObject], progress: Progress) -> None:
        """Copies the wanted objects.

        Raises `BackupDamaged` for a damaged or missing one, unless `despite_damage`.
        """
        pending = iter(wanted)
        with ThreadPoolExecutor(COPIED_AT_ONCE, "backup") as pool:
            while batch := list(islice(pending, _BATCH)):
                copies = list(pool.map(lambda item: self._object(source, item), batch))
                self._done += [each for each in copies if each is not None]
                progress(len(self._done), None)

    def finish(self) -> Backup:
        """Writes the list of objects and then the manifest. Returns the description of the backup.

        Raises `InstanceError` if another process has removed the backup as abandoned.
        """
        lines = "".join(f"{each.digest.hex()} {each.size} {each.name}\n" for each in self._done).encode()
        self._store.put(f"{self.name}/{OBJECTS}", lines)
        made = Backup(
            name=self.name,
            instance_id=self._instance_id,
            made_at=self._began.isoformat(timespec="seconds"),
            seconds=round((datetime.now(UTC) - self._began).total_seconds(), 3),
            objects=len(self._done),
            bytes=sum(each.size for each in self._done),
            copied=self._copied,
            database_bytes=self._database[0],
            since=None if self._since is None else self._since.name,
            database_digest=self._database[1],
            objects_digest=new_digest(data=lines).hexdigest(),
            damaged=tuple(sorted(self._damaged, key=lambda each: each.name)),
        )
        fields = asdict(made)
        if not made.damaged:
            del fields["damaged"]  # so that an older Dormouse reads it
        version = FORMAT_DAMAGED if made.damaged else FORMAT
        text = json.dumps({"format": version, **fields}, indent=1)
        self._store.put(f"{self.name}/{MANIFEST}", text.encode())
        # `sweep` also writes its mark first and then looks for this one, so one of the two sees the other
        swept = has_object(self._store, f"{self.name}/{SWEPT}")
        if swept or not has_object(self._store, f"{self.name}/{BEGUN}"):
            self._store.delete([f"{self.name}/{MANIFEST}"])
            raise InstanceError(
                f"backup {self.name} made no progress for so long that another one in {self._store.url} "
                "removed it as abandoned: take it again"
            )
        return made

    def abandon(self) -> None:
        """Removes all objects of a backup that failed."""
        remove(self._store, self.name, BEGUN)

    def _last(self) -> Backup | None:
        """Returns the instance's last backup in the store, or None if there is none."""
        own = [each for each in backups(self._store) if each.instance_id == self._instance_id]
        return own[-1] if own else None

    def _begin(self) -> str:
        self._store.sweep_staging()
        taken = sweep(self._store, self._began)
        stem = f"{self._began:%Y-%m-%dT%H%M%SZ}"
        for name in (stem, *(f"{stem}-{number}" for number in range(2, 1_000))):
            with suppress(ObjectAlreadyExists):  # another backup began at the same time
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
            and not is_answer(name)  # another job may have the id of an expired one, and so the same name
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
        except ObjectAlreadyExists:  # listed twice: of a table dropped meanwhile, or the body of a request
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
        """Records a damaged or missing object in the backup.

        Raises `BackupDamaged` unless `despite_damage`.
        """
        if not self._despite_damage:
            raise BackupDamaged(
                f"{source.url}/{name} {fault}; nothing was backed up. 'dormouse check --deep' lists all "
                f"damaged objects: restore them from an earlier backup, or back up the others with "
                f"--despite-damage"
            )
        with self._counting:
            self._damaged.append(Damaged(name, fault.text))


class _Unreadable(Exception):
    """An error for an object of the source that cannot be read."""


def listed_backups(store: ObjectStore) -> tuple[list[str], list[str]]:
    """Returns two sorted lists: the names of the complete backups, and the names of the incomplete backups.

    Raises `ObjectStoreError` for a folder that does not exist, for example on a disk that is not mounted.
    """
    path = store.local_path(MANIFEST)
    if path is not None and not path.parent.is_dir():
        raise ObjectStoreError(
            f"{store.url} does not exist; if its backups were deleted permanently, create an empty folder "
            f"there"
        )
    marks = (each.split("/") for each, _ in store.list("") if each.count("/") == 1)
    marked = {(name, mark) for name, mark in marks if NAME.fullmatch(name)}
    whole = {name for name, mark in marked if mark == MANIFEST}
    begun = {name for name, mark in marked if mark in (BEGUN, SWEPT)}
    return sorted(whole), sorted(begun - whole)


def objects_in(store: ObjectStore, name: str) -> Iterator[str]:
    """Yields the names of the objects in a backup, which may be incomplete."""
    folder = f"{name}/{FOLDER}/"
    return (each.removeprefix(folder) for each, _ in store.list(folder))


def _names(store: ObjectStore) -> list[str]:
    """Returns the names of the backups with a manifest, the earliest first."""
    names = {name.split("/")[0] for name, _ in store.list("") if name.endswith(f"/{MANIFEST}")}
    return sorted(name for name in names if NAME.fullmatch(name))


def _fetch(store: ObjectStore, name: str, path: Path, size: int, digest: str) -> None:
    try:
        copy = copied(store, name, path)
    except ObjectNotFound:
        raise BackupDamaged(f"{store.url}/{name} is missing: {INSTEAD}") from None
    if (copy[0], copy[1].hex()) != (size, digest):
        raise BackupDamaged(f"{store.url}/{name} is damaged: {INSTEAD}")


def _get(store: ObjectStore, name: str) -> bytes:
    try:
        return store.get(name)
    except ObjectNotFound:
        raise BackupDamaged(f"{store.url}/{name} is missing: {INSTEAD}") from None


# Backups of an instance's metadata in its own store, for the case that the database is lost.
#
# `backups/<incarnation>/<time>.tar.gz` is a base backup of the database. After a restore from it, files that
# were written later are orphans, and files that were collected since are missing.

METADATA = "backups"
KIND = "metadata backup"
HELD_SECONDS_MAX = METADATA_BACKUP_SECONDS
"""The longest time for which a metadata backup keeps its files from garbage collection: two days.

Usually the next metadata backup ends this time earlier.
"""

_TIME = "%Y-%m-%dT%H%M%SZ"
_METADATA_NAME = re.compile(rf"{METADATA}/(\d+)/(\d{{4}}-\d{{2}}-\d{{2}}T\d{{6}}Z)\.tar\.gz")


@dataclass(frozen=True, slots=True)
class MetadataBackup:
    """A metadata backup. `name` is the name of its object, and `made` is its time in UTC as text."""

    name: str
    incarnation: int
    made: str
    byte_count: int


def metadata_backups(objects: ObjectStore) -> list[MetadataBackup]:
    """Returns the metadata backups in the store, the earliest first."""
    names = ((_METADATA_NAME.fullmatch(name), name, size) for name, size in objects.list(METADATA))
    listed = [MetadataBackup(name, int(m[1]), m[2], size) for m, name, size in names if m is not None]
    return sorted(listed, key=lambda each: (each.incarnation, each.made))


def take_metadata(
    supplier: Supplier,
    objects: ObjectStore,
    incarnation: int,
    base_backup: Callable[[Path], None],
    *,
    keep: int,
) -> MetadataBackup:
    """Takes a metadata backup and returns it. Deletes all but the last `keep` metadata backups.

    Keeps the files of the backup from garbage collection until the next metadata backup, for at most two
    days. So a restore from it finds these files.
    """
    made = f"{datetime.now(UTC):{_TIME}}"
    last = max((each.made for each in metadata_backups(objects)), default="")
    if made <= last:  # the clock was set back; names must ascend, as they decide what is deleted and restored
        made = f"{datetime.strptime(last, _TIME) + timedelta(seconds=1):{_TIME}}"
    name = f"{METADATA}/{incarnation}/{made}.tar.gz"
    with held_until_next(supplier, KIND, HELD_SECONDS_MAX), objects.staged(name) as path:
        base_backup(path)
    listed = metadata_backups(objects)
    objects.delete([each.name for each in listed[:-keep]])
    return listed[-1]


def find_metadata(objects: ObjectStore, name: str | None) -> MetadataBackup:
    """Returns the metadata backup with a name or time, or the last one for None.

    Raises `InvalidInput` if there is no such backup.
    """
    listed = metadata_backups(objects)
    for each in reversed(listed):
        if name in (None, each.name, each.made):
            return each
    known = ", ".join(each.made for each in listed) or "none"
    raise InvalidInput(f"{objects.url} has no such backup of the metadata; there are: {known}")
