"""Restoring an instance from a backup: its database, and the objects that the database refers to."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from glob import escape
from pathlib import Path

from dormouse.durability.backing_up import wanted
from dormouse.durability.backups import (
    FOLDER,
    INSTEAD,
    BackedUp,
    Backup,
    backup_of,
    fetch,
    fetch_database,
    find_metadata,
    objects_of,
)
from dormouse.durability.backups import FOLDER as OBJECTS_FOLDER
from dormouse.durability.backups import backups as backups_of
from dormouse.durability.ledgers import Ledgers
from dormouse.durability.ownership import Ownership
from dormouse.embedded import is_instance, mark
from dormouse.embedded.postgres import EmbeddedPostgres, extract
from dormouse.embedded.server import Server
from dormouse.errors import BackupDamaged, InstanceError, InstanceLocked, InvalidInput, NotAnInstance
from dormouse.model.loops import Progress, no_progress
from dormouse.objects.fault import compared
from dormouse.objects.ledger import LedgerObject
from dormouse.objects.staging import sync
from dormouse.objects.store import ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier, migrate

COPIED_AT_ONCE = 4
STOP_SECONDS_MAX = 10.0
"""The time to stop the server of a killed restore, in seconds."""

DELETION_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class LostFile:
    """A file that could not be restored. `table` is None if it has none, `row_count` None if unknown."""

    table: str | None
    filename: str
    row_count: int | None
    fault: str


@dataclass(frozen=True, slots=True)
class Restored:
    """The result of a restore. `into` is None if the backup was only checked.

    `lost` has the objects that were left out because they are missing or damaged.
    """

    backup: Backup
    into: str | None
    tables: int
    objects: int
    bytes: int
    incarnation: int
    lost: tuple[LostFile, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredMetadata:
    """The metadata backup that was restored, and the folder."""

    backup: str
    folder: str
    tables: int
    incarnation: int


def backups(target: str | os.PathLike[str]) -> list[Backup]:
    """Returns the complete backups of a folder, or of s3://bucket/prefix, the earliest first.

    Raises `BackupDamaged`.
    """
    return backups_of(open_store(target))


def restore(
    target: str | os.PathLike[str],
    into: str | os.PathLike[str],
    backup: str | None = None,
    *,
    check: bool = False,
    despite_damage: bool = False,
    progress: Progress = no_progress,
) -> Restored:
    """Makes a new instance in the folder `into` from a backup, by default the latest.

    Every byte is verified. The instance is as it was when the backup was taken, without its writers, their
    leases and the messages that were hidden at that time. With `check`, the instance is made in a folder next
    to `into` and then deleted. With `despite_damage`, missing or damaged objects are left out and returned as
    `lost`. Reads of these files fail with an error that names them.

    Raises `InvalidInput` for a folder that is not empty or a missing backup; `BackupDamaged`,
    `InstanceTooNew` and `InstanceError`. After an error, nothing is left.
    """
    store = open_store(target)
    found = backup_of(store, backup)
    if found.damaged and not despite_damage:
        first = found.damaged[0]
        raise BackupDamaged(
            f"{store.url}/{found.name} was taken despite damage, and lacks {len(found.damaged):,} of the "
            f"objects; the first: {first.name} {first.fault}. Restore another one ('dormouse backups' lists "
            "them), or restore the other objects with --despite-damage"
        )
    folder = Path(into).expanduser().absolute()
    if not check and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InvalidInput(f"{folder} is not empty: restore into a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _workplace(folder) as work:
            made = _restored(store, found, work, progress, despite_damage=despite_damage)
            if check:
                return made
            if folder.exists():
                folder.rmdir()
            work.rename(folder)
            sync(folder.parent)
    except OSError as error:
        raise InstanceError(f"cannot restore into {folder}: {error.strerror or error}") from error
    return replace(made, into=str(folder))


@contextmanager
def _workplace(folder: Path) -> Iterator[Path]:
    """Yields a folder next to `folder` for a restore, which is deleted at the end.

    Folders of killed restores are deleted, too. A restore holds a lock on its own folder.
    """
    stem = f".{folder.name}.restoring-"
    for left in folder.parent.glob(f"{escape(stem)}*"):
        with suppress(OSError, InstanceError), _locked(left):
            Server(left).stop(STOP_SECONDS_MAX)
            shutil.rmtree(left, ignore_errors=True)
    work = folder.with_name(f"{stem}{secrets.token_hex(4)}")
    try:
        work.mkdir(mode=0o700)
        with _locked(work):
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds a folder's lock. Raises `BlockingIOError` if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _restored(
    store: ObjectStore, backup: Backup, work: Path, progress: Progress, *, despite_damage: bool
) -> Restored:
    listed = objects_of(store, backup)
    tar = work / "database.tar.gz"
    fetch_database(store, backup, tar)
    extract(tar, work / "postgres")
    tar.unlink()
    objects = open_store(work / "objects")
    with EmbeddedPostgres(work) as server, closing(ConnectionSupplier(server.dsn)) as supplier:
        migrate(supplier)
        ledgers = Ledgers(supplier, objects)
        instance_id = ledgers.catalog.instance_id()
        bringer = _Bringer(store, backup, objects, despite_damage=despite_damage)
        needed = wanted(ledgers, listed, partial(_body, store, backup))
        brought = bringer.bring(needed, listed, progress)
        # no other instance refers to these objects
        incarnation = Ownership(supplier, objects).adopt(instance_id, keep_days=0)
        tables = len(ledgers.catalog.tables())
    mark(work)
    byte_count = sum(one.size for one in brought)
    return Restored(backup, None, tables, len(brought), byte_count, incarnation, tuple(bringer.lost))


class _Bringer:
    """A copier of a backup's objects. For a damaged or missing object it raises an error, or records it as
    lost.
    """

    def __init__(
        self, store: ObjectStore, backup: Backup, objects: ObjectStore, *, despite_damage: bool
    ) -> None:
        self._store = store
        self._backup = backup
        self._objects = objects
        self._despite_damage = despite_damage
        self.lost: list[LostFile] = []

    def bring(
        self, wanted: Iterable[LedgerObject], listed: Mapping[str, BackedUp], progress: Progress
    ) -> list[BackedUp]:
        """Copies the wanted objects that the backup lists; returns these objects."""
        needed = list[tuple[LedgerObject, BackedUp]]()
        for one in wanted:
            if (has := listed.get(one.name)) is None:
                if one.needed:
                    self._lose(one, f"{self._place} lacks {one.name}", "is not in the backup")
            elif compared(one, has.size, has.digest):
                fault = "was damaged before it was backed up"
                self._lose(one, f"{self._place}/{FOLDER}/{has.name} {fault}", fault)
            else:
                needed.append((one, has))
        with ThreadPoolExecutor(COPIED_AT_ONCE, "restore") as pool:
            brought = []
            for done, found in enumerate(pool.map(self._bring, needed), start=1):
                progress(done, len(needed))
                brought += [] if found is None else [found]
        self.lost.sort(key=lambda one: (one.table or "", one.filename))
        return brought

    def _bring(self, pair: tuple[LedgerObject, BackedUp]) -> BackedUp | None:
        one, has = pair
        try:
            with self._objects.staged(has.name) as path:
                fetch(self._store, self._backup, has, path)
        except BackupDamaged as error:
            self._lose(one, error, "is damaged or missing in the backup")
            return None
        return has

    def _lose(self, written: LedgerObject, error: BackupDamaged | str, fault: str) -> None:
        if not self._despite_damage:
            raise BackupDamaged(f"{error}: {INSTEAD}") if isinstance(error, str) else error
        said = {damaged.name: damaged.fault for damaged in self._backup.damaged}
        self.lost.append(
            LostFile(written.table, written.name, written.row_count, said.get(written.name, fault))
        )

    @property
    def _place(self) -> str:
        return f"{self._store.url}/{self._backup.name}"


def restore_metadata(folder: str | os.PathLike[str], backup: str | None = None) -> RestoredMetadata:
    """Restores the lost database of a folder from a metadata backup in its object store.

    The tables are as they were at the time of the backup. Files that were added later are orphans; files that
    were collected later are missing. Raises `InvalidInput` if the database exists or there is no backup;
    `BackupDamaged`, `InstanceLocked` and `InstanceError`. After an error, nothing is changed.
    """
    place = Path(folder).expanduser().absolute()
    if not is_instance(place):
        raise NotAnInstance(f"{place} is not a Dormouse instance")
    if (place / "postgres").exists():
        raise InvalidInput(f"{place / 'postgres'} exists: the database is not lost; move it away first")
    objects = open_store(place / "objects")
    found = find_metadata(objects, backup)
    try:
        with _locked(place), _workplace(place / "postgres") as work:
            return _restored_metadata(objects, found.name, work, place)
    except BlockingIOError:
        raise InstanceLocked(f"another process is restoring the database of {place}: wait for it") from None
    except OSError as error:
        raise InstanceError(f"cannot restore into {place}: {error.strerror or error}") from error


def _restored_metadata(objects: ObjectStore, name: str, work: Path, place: Path) -> RestoredMetadata:
    tar = work / "database.tar.gz"
    with objects.reader(name) as source, tar.open("wb") as file:
        shutil.copyfileobj(source, file)
    try:
        extract(tar, work / "postgres")
    except BackupDamaged as error:
        raise BackupDamaged(f"{name} is damaged ({error}): take an earlier one") from error
    tar.unlink()
    with EmbeddedPostgres(work) as server, closing(ConnectionSupplier(server.dsn)) as supplier:
        migrate(supplier)
        catalog = Ledgers(supplier, objects).catalog
        # adopted before it is moved into place: a process that opens it there must not take it for the lost
        # database
        # processes of the lost database are waited for no longer than a deletion takes
        incarnation = Ownership(supplier, objects).adopt(
            catalog.instance_id(), wait_seconds=DELETION_SECONDS_MAX, force=True
        )
        tables = len(catalog.tables())
    (work / "postgres").rename(place / "postgres")
    sync(place)
    return RestoredMetadata(name, str(place), tables, incarnation)


def _body(store: ObjectStore, backup: Backup, name: str) -> bytes:
    return store.get(f"{backup.name}/{OBJECTS_FOLDER}/{name}")
