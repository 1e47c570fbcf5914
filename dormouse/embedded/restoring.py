"""Makes an instance of a backup: its database, and of the objects those that the database knows."""

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
"""For the server of a restore that was killed."""

DELETION_SECONDS_MAX = 10.0


@dataclass(frozen=True, slots=True)
class LostFile:
    """A file that could not be restored: its table, None for an object of none; its rows, None if unknown."""

    table: str | None
    filename: str
    row_count: int | None
    fault: str


@dataclass(frozen=True, slots=True)
class Restored:
    """What was restored, and where to; None: it was only tried. `lost` was left out, despite damage."""

    backup: Backup
    into: str | None
    tables: int
    objects: int
    bytes: int
    incarnation: int
    lost: tuple[LostFile, ...] = ()


@dataclass(frozen=True, slots=True)
class RestoredMetadata:
    """Which backup of the metadata was brought back, and where."""

    backup: str
    folder: str
    tables: int
    incarnation: int


def backups(target: str | os.PathLike[str]) -> list[Backup]:
    """The whole backups of a folder, or of s3://bucket/prefix; the earliest first. Raises `BackupDamaged`."""
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
    """Makes a new instance, in the folder `into`, of a backup: of the latest when there is no name.

    Every byte is verified. The instance is as it was when the backup was taken; its writers of then, their
    leases and what they had hidden are forgotten. With `check` it is made beside `into`, and thrown away.
    With `despite_damage` objects that are missing or damaged are left out, and told as `lost`: what reads
    these files fails, and names them.

    Raises `InvalidInput` for a folder that is not empty, and a backup that is not there; `BackupDamaged`,
    `InstanceTooNew` and `InstanceError`. Then nothing is left.
    """
    store = open_store(target)
    found = backup_of(store, backup)
    if found.damaged and not despite_damage:
        first = found.damaged[0]
        raise BackupDamaged(
            f"{store.url}/{found.name} was taken despite damage, and lacks {len(found.damaged):,} of the "
            f"objects; the first: {first.name} {first.fault}. Restore another one ('dormouse backups' lists "
            "them), or what is there by --despite-damage"
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
    """A folder beside it, which is removed, as those are whose restores were killed.

    A restore holds a lock on its own.
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
    """With its lock; `BlockingIOError` when another has it."""
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
        # no other knows these objects
        incarnation = Ownership(supplier, objects).adopt(instance_id, keep_days=0)
        tables = len(ledgers.catalog.tables())
    mark(work)
    byte_count = sum(one.size for one in brought)
    return Restored(backup, None, tables, len(brought), byte_count, incarnation, tuple(bringer.lost))


class _Bringer:
    """Brings the objects of a backup. What is damaged or missing ends it, or despite damage is lost."""

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
        """Those that are wanted, and listed; gives them."""
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
            self._lose(one, error, "is damaged, or gone, in the backup")
            return None
        return has

    def _lose(self, one: LedgerObject, error: BackupDamaged | str, fault: str) -> None:
        if not self._despite_damage:
            raise BackupDamaged(f"{error}: {INSTEAD}") if isinstance(error, str) else error
        said = {damaged.name: damaged.fault for damaged in self._backup.damaged}
        self.lost.append(LostFile(one.table, one.name, one.row_count, said.get(one.name, fault)))

    @property
    def _place(self) -> str:
        return f"{self._store.url}/{self._backup.name}"


def restore_metadata(folder: str | os.PathLike[str], backup: str | None = None) -> RestoredMetadata:
    """Makes the database of a folder that has lost it, of a backup of the metadata in its object store.

    The tables are as they were at that time. Files that came later are orphans; those that were collected
    since are missing. Raises `InvalidInput` when the database is there, or no backup is; `BackupDamaged`,
    `InstanceLocked` and `InstanceError`. Then nothing is changed.
    """
    place = Path(folder).expanduser().absolute()
    if not is_instance(place):
        raise NotAnInstance(f"{place} is not a Dormouse instance")
    if (place / "postgres").exists():
        raise InvalidInput(f"{place / 'postgres'} is there: its database is not lost; move it away first")
    objects = open_store(place / "objects")
    found = find_metadata(objects, backup)
    try:
        with _locked(place), _workplace(place / "postgres") as work:
            return _restored_metadata(objects, found.name, work, place)
    except BlockingIOError:
        raise InstanceLocked(f"another process brings back the database of {place}: wait for it") from None
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
        # before it is in its place: who opens it there must not take it for the database that was lost
        # and no process of the database that was lost is waited for longer than a deletion takes
        incarnation = Ownership(supplier, objects).adopt(
            catalog.instance_id(), wait_seconds=DELETION_SECONDS_MAX, force=True
        )
        tables = len(catalog.tables())
    (work / "postgres").rename(place / "postgres")
    sync(place)
    return RestoredMetadata(name, str(place), tables, incarnation)


def _body(store: ObjectStore, backup: Backup, name: str) -> bytes:
    return store.get(f"{backup.name}/{OBJECTS_FOLDER}/{name}")
