"""The upkeep of an instance: backups, checks, maintenance and ownership. Its methods only delegate."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from dormouse.api import shown
from dormouse.api.table import Table
from dormouse.durability.durability import Durability
from dormouse.durability.maintaining import InstanceRound, InstanceRounds
from dormouse.durability.ownership import KEEP_DAYS, WAIT_SECONDS, check_mark
from dormouse.model.loops import Progress, no_progress
from dormouse.objects.store import ObjectStore
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.lease import ClockJump, clock_jumps
from dormouse.state.catalog import Catalog
from dormouse.state.files.holds import Hold

if TYPE_CHECKING:
    from dormouse.durability.backups import Backup
    from dormouse.durability.checking import CheckReport
    from dormouse.durability.ledgers import Orphan
    from dormouse.durability.maintaining import Maintenance
    from dormouse.objects.ledger import Swept

OLDER_THAN = timedelta(days=7)


class Upkeep(ABC):
    """The upkeep of an instance; see `Instance`."""

    _durability: Durability
    _supplier: ConnectionSupplier
    _catalog: Catalog
    _objects: ObjectStore

    @abstractmethod
    def tables(self) -> list[Table]:
        """Returns all tables, ordered by name."""

    @abstractmethod
    def _daily(self) -> Mapping[str, Callable[[], object]]:
        """Returns the daily work of maintenance by name."""

    def check_reachable(self) -> None:
        """Checks that database and object store answer. Raises `InstanceError` and `ObjectStoreError`."""
        check_mark(self._catalog.instance_id(), self._objects)

    def backup(
        self,
        target: str | os.PathLike[str],
        *,
        since: str | None = None,
        despite_damage: bool = False,
        progress: Progress = no_progress,
    ) -> Backup:
        """Writes a backup into a folder, or `s3://bucket/prefix`, while everything runs.

        If it is interrupted, there is no backup. `since` names an earlier backup in the same place, whose
        objects are not copied again; `last` is the latest one, if any. `progress` is called with the number
        of objects done. `dm.restore` makes an instance from a backup.

        Raises `InvalidInput`, `ObjectStoreError`, and `BackupDamaged` for an object that is missing or has
        changed. With `despite_damage`, the backup lists such objects as `damaged` instead.
        """
        return self._durability.backup(target, since, despite_damage, progress)

    def maintain(
        self,
        once: bool = False,
        *,
        stop: Event | None = None,
        cycle_seconds: float = 30.0,
        tell: Callable[[str], object] = lambda line: None,
        metrics: Path | None = None,
        compacts: bool = True,
    ) -> Maintenance:
        """Splits, compacts and collects all tables until `stop` is set, or `once`; returns a report.

        Once a day it also backs up an embedded database's metadata into the object store, and keeps the last
        `DORMOUSE_METADATA_BACKUPS` (0: makes none). Each day it checks all tables, or a seventh of more than
        seven, and deletes records of jobs that ended `DORMOUSE_JOBS_RETENTION_DAYS` ago. Failures are
        recorded and passed to `tell`; other work continues. After each cycle, the file `metrics` gets the
        backlogs and failures in Prometheus' format. Without `compacts`, it only collects garbage
        and does the daily work.

        Raises `InstanceLocked` while another process maintains the instance, and `MaintenanceTakenOver`, with
        a `report`, if this process lost its database session and another process took over.
        """
        what = self.tables, self._daily, partial(shown.numbers, self)
        return self._durability.maintain(*what, once, stop, cycle_seconds, tell, metrics, compacts)

    def check(
        self,
        deep: bool = False,
        table: str | None = None,
        progress: Progress | None = None,
        *,
        after: str | None = None,
        finished: Callable[[str], object] = lambda table: None,
    ) -> CheckReport:
        """Compares the database's records with a listing of the object store, while other work continues.

        It changes nothing, but `deep`, which also reads every byte, records digests for files without one.
        It checks one `table`, all, or those with names greater than `after`, to resume a check. `progress` is
        called with the number of files done, `finished` with the name of each table when it is checked.
        Raises `TableNotFound`.
        """
        return self._durability.check(deep, table, progress, after, finished)

    def accept_differences(self, table: str) -> int:
        """Accepts lost references of a table, after counting all again; returns the number of differences.

        Then `check` no longer reports them, and files are collected again. Raises `TableNotFound`.
        """
        return self._durability.accept_differences(table)

    def orphans(self, older_than: timedelta = OLDER_THAN) -> Iterator[Orphan]:
        """Yields the objects older than `older_than` that the database does not know.

        They belong to no table, no running writer and no dropped table that waits for collection, and are no
        records of the instance.
        """
        return iter(self._durability.orphans(older_than))

    def delete_orphans(
        self,
        older_than: timedelta = OLDER_THAN,
        progress: Progress = no_progress,
    ) -> Swept:
        """Deletes the objects that `orphans` yields permanently, also those that a former owner needs.

        `progress` is called with the number of objects done. Raises `InstanceIsACopy`, `InstanceTakenOver`,
        and `CheckFailed` if tables miss files, because an orphan may be the last copy of their rows.
        """
        return self._durability.delete_orphans(older_than, progress)

    def rounds(self) -> list[InstanceRound]:
        """Returns the results of the last metadata backups and the last checks of this instance."""
        return InstanceRounds(self._supplier).read()

    def clock_jumps(self) -> list[ClockJump]:
        """Returns the jumps of the database's clock that were found in the last week, the latest first."""
        return clock_jumps(self._supplier)

    def adopt(
        self,
        *,
        keep_days: float = KEEP_DAYS,
        wait_seconds: float = WAIT_SECONDS,
        force: bool = False,
        tell: Callable[[str], object] = lambda line: None,
    ) -> int:
        """Makes this database, a copy or a former owner, the owner of the store; returns its incarnation.

        The former owner gets an error at its next write. So that it can adopt the store again, its objects
        stay, and for `keep_days` so do all files that this database refers to (`holds` lists this). Waits at
        most `wait_seconds` for deletions that the former owner has begun, and reports them to `tell`. With
        `force`, then continues: objects that these deletions still delete are lost. Changes payload pointers
        to missing objects to objects with the same contents; `tell` gets the pointers without such an object.

        Raises `InvalidInput` if this database is the owner, `InstanceTakenOver` if another one was faster,
        `InstanceLocked` if a deletion may still run: then neither may write until `adopt` is called again.
        """
        return self._durability.adopt(keep_days, wait_seconds, force, tell)

    def holds(self) -> list[Hold]:
        """Returns the holds of readers, backups and recent adoptions. A hold keeps files from collection.

        Named cuts and consumers also keep files. They belong to tables, and `Table.status` lists them.
        """
        return self._durability.holds()

    def release(self, holder: str) -> None:
        """Ends a hold, even if it is in use. Raises `InvalidInput` if no hold has this name.

        Without the hold of an adoption, the former owner may miss files when it adopts the store again.
        """
        self._durability.release(holder)
