"""What an instance does so that nothing is lost: backups, maintenance, adoption; a part of `Instance`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from dormouse.durability.incarnations import FOLDER as OWNER_FOLDER
from dormouse.durability.maintaining import InstanceRound, InstanceRounds
from dormouse.durability.ownership import KEEP_DAYS, WAIT_SECONDS, Ownership
from dormouse.errors import (
    CheckFailed,
    DormouseError,
    InstanceReadOnly,
    InvalidInput,
    MaintenanceTakenOver,
    TableNotFound,
)
from dormouse.objects import ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.leases import ClockJump, clock_jumps
from dormouse.state.catalog import Catalog
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.holds import Hold, holds, release

if TYPE_CHECKING:
    from dormouse.durability.backups import Backup
    from dormouse.durability.checking import CheckReport
    from dormouse.durability.maintaining import Maintained, Maintenance, Number
    from dormouse.durability.orphans import DeletedOrphans, Known, Orphan, Orphans
    from dormouse.objects import ObjectStore
    from dormouse.payloads import PayloadStore
    from dormouse.state.catalog import Catalog

OLDER_THAN = timedelta(days=7)
KEEP_DAYS_MAX = 36_500
PAYLOAD_SECONDS_MAX = 600.0
"""For so long an hour `maintain` cools payloads down, and keeps tables waiting."""


class Durable:
    """The methods, over what an instance has."""

    _supplier: ConnectionSupplier
    _catalog: Catalog
    _attempts: WriteAttempts
    _objects: ObjectStore
    _ownership: Ownership
    _base_backup: Callable[[Path], None] | None
    _metadata_backups: int
    _payload_retention_days: int | None
    _refusal: InstanceReadOnly | None
    _read_only: bool

    @property
    def payloads(self) -> PayloadStore:
        raise NotImplementedError

    def tables(self) -> Sequence[Maintained]:
        raise NotImplementedError

    def _check_writable(self) -> None:
        raise NotImplementedError

    def backup(
        self,
        target: str | os.PathLike[str],
        *,
        since: str | None = None,
        despite_damage: bool = False,
        progress: Callable[[int, int | None], object] = lambda done, total: None,
    ) -> Backup:
        """Takes a backup into a folder, or s3://bucket/prefix, while everything runs.

        It is whole or absent, whatever happens. Objects of the backup `since`, in the same place, are not
        copied again: `last` is the instance's latest there, if any. `progress` is called with the objects
        done. `dm.restore` makes an instance of it.

        Raises `InvalidInput`, `BackupDamaged` for an object that is missing, or is not what was written: with
        `despite_damage` the backup's `damaged` names it instead. Raises `ObjectStoreError`.
        """
        from dormouse.durability.backing_up import back_up

        self._check_writable()
        if self._base_backup is None:
            raise InvalidInput(
                "backup is for an instance in a folder: of your own PostgreSQL take its own backups, of a "
                "deployed instance Aurora's"
            )
        store = open_store(target)
        mine, place = self._objects.local_path(OWNER_FOLDER), store.local_path(OWNER_FOLDER)
        if mine is not None and place is not None and _is_below(place, mine.parent.parent):
            raise InvalidInput(
                f"{store.url} is in the instance's own folder, and is lost with it: give another"
            )
        return back_up(
            self._supplier,
            self._catalog,
            self._objects,
            store,
            self._base_backup,
            since=since,
            despite_damage=despite_damage,
            progress=progress,
        )

    def maintain(
        self,
        once: bool = False,
        *,
        stop: Event | None = None,
        cycle_seconds: float = 30.0,
        tell: Callable[[str], object] = lambda line: None,
        metrics: Path | None = None,
    ) -> Maintenance:
        """Splits, compacts and collects all tables until `stop` is set, or `once`; gives what was done.

        Once a day it writes a backup of the metadata into the object store of an instance in a folder, of
        which the last `DORMOUSE_METADATA_BACKUPS` are kept (0: none is taken), whose files are not collected
        before the next one, checks tables, of more than seven a seventh, and drops what is told of jobs that
        ended `DORMOUSE_JOBS_RETENTION_DAYS` ago. What fails is
        remembered and told, and holds up nothing else. After each cycle the file `metrics` has what is left
        to do and what fails, also of payloads, jobs and indexes of rows, as Prometheus reads it.

        Raises `InstanceLocked` when another process does it, and `MaintenanceTakenOver`, whose `report` is
        what was done, when another does it since this one lost its session of the database.
        """
        from dormouse.durability import metadata_backups, shares
        from dormouse.durability.maintaining import Maintainer
        from dormouse.payloads import cooling

        self._check_writable()
        kept: dict[str, Callable[[], object]] = {}
        if (base_backup := self._base_backup) is not None and self._metadata_backups:
            kept[metadata_backups.KIND] = lambda: metadata_backups.take(
                self._supplier,
                self._objects,
                self._ownership.number,
                base_backup,
                keep=self._metadata_backups,
            )

        def daily() -> Mapping[str, Callable[[], object]]:
            checks = shares.checks(self._supplier, self._catalog, self._objects, self._known)
            return {**kept, **checks, **self._daily()}

        def after_cycle(done: Maintenance) -> None:
            from dormouse.durability.maintaining import payload_numbers, write_metrics

            if metrics is not None:
                numbers = chain(payload_numbers(self.payloads), self._numbers())
                write_metrics(metrics, (one.status() for one in self.tables()), self.rounds(), done, numbers)

        def hourly() -> Mapping[str, Callable[[], object]]:
            return {cooling.KIND: self._cool_payloads}

        maintainer = Maintainer(self._supplier, self.tables, daily, hourly, tell, after_cycle)
        try:
            maintainer.run(Event() if stop is None else stop, once=once, cycle_seconds=cycle_seconds)
        except MaintenanceTakenOver as error:
            error.report = maintainer.done
            raise
        return maintainer.done

    def _daily(self) -> Mapping[str, Callable[[], object]]:
        """What else is done once a day, by its kind."""
        raise NotImplementedError

    def _numbers(self) -> Iterable[Number]:
        """Returns the numbers of what else an instance has, for Prometheus."""
        raise NotImplementedError

    def _cool_payloads(self) -> None:
        self.payloads.maintain(
            seconds_max=PAYLOAD_SECONDS_MAX, retention_days=self._payload_retention_days
        ).check()

    def check(
        self,
        deep: bool = False,
        table: str | None = None,
        progress: Callable[[int, int | None], object] | None = None,
        *,
        after: str | None = None,
        finished: Callable[[str], object] = lambda table: None,
    ) -> CheckReport:
        """Whether database and object store have what was written; only reads, while everything runs.

        Looks at what the database says of the tables, and lists the store beside it; with `deep` it reads
        every byte, and files that have no digest get one. Of one `table`, or of all, or of those that come
        `after` one by name: so a check that was ended goes on. `progress` is called with the files done,
        `finished` with each table that is done.

        Raises `TableNotFound`.
        """
        from dormouse.durability.checking import Checker

        tables = self._catalog.tables() if table is None else [self._catalog.get(table)]
        if after is not None:
            tables = [one for one in tables if one.name > after]
        checker = Checker(
            self._supplier,
            self._objects,
            self._known,
            adopted=self._adopted,
            deep=deep,
            notes=deep and not self._read_only,
            progress=progress,
        )
        report = checker.run(tables, rest=table is None, finished=finished)
        if table is not None and tables and not report.tables:
            raise TableNotFound.gone(table)
        return replace(report, clock_jumps=tuple(self.clock_jumps()))

    def accept_differences(self, table: str) -> int:
        """Takes what a table has for right from now on, though references of it are lost; gives how much was.

        What is lost is looked for first. `check` tells of it no more, and collection deletes files again.
        Raises `TableNotFound`.
        """
        from dormouse.state.files.store import FileReferenceStore

        self._check_writable()
        store = FileReferenceStore(self._supplier, self._catalog.get(table))
        store.totals.count_again()
        return store.differences.accept()

    def orphans(self, older_than: timedelta = OLDER_THAN) -> Iterator[Orphan]:
        """The objects that the database does not know, and that were written so long ago; streamed.

        They are of no table, no writer at work, no table that was dropped and waits for collection, and no
        record of the instance.
        """
        return iter(self._orphans(older_than))

    def delete_orphans(
        self,
        older_than: timedelta = OLDER_THAN,
        progress: Callable[[int, int | None], object] = lambda done, total: None,
    ) -> DeletedOrphans:
        """Deletes what `orphans` gives, for ever; then there is no way back to another timeline.

        `progress` is called with the objects done. Raises `InstanceIsACopy` and `InstanceTakenOver`; and
        `CheckFailed` when tables miss files, as an orphan may be the last copy of their rows.
        """
        self._check_writable()
        missing = [one for one in self.check().problems if one.kind == "object_missing"]
        if missing:
            raise CheckFailed(missing, "nothing is deleted, as orphans may be the last copy of these rows")
        return self._orphans(older_than).delete(progress)

    def _orphans(self, older_than: timedelta) -> Orphans:
        from dormouse.durability.orphans import Orphans

        return Orphans(self._objects, self._known, self._adopted, older_than)

    @property
    def _adopted(self) -> int:
        """The incarnation before which another timeline may have written."""
        # to a copy, whatever it does not know may be the owner's
        is_copy = self._ownership.look(self._catalog.instance_id()) is not None
        return sys.maxsize if is_copy else self._ownership.adopted

    @property
    def _known(self) -> Known:
        from dormouse.durability.orphans import Known

        return Known(self._supplier, self._catalog, self._attempts)

    def rounds(self) -> list[InstanceRound]:
        """How the last rounds ended that are of the instance: backups of the metadata, checks."""
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
        """Makes this database, a copy or a former owner, the owner of the object store.

        The owner of before is told at its next write. What other timelines have written stays in the store,
        and for `keep_days` so does all that this database knows: going back misses nothing (`holds` has it).
        Deletions that the owner of before has begun are waited for, for `wait_seconds` at most, of which
        `tell` is told; `force` then takes them for ended, and what they delete later is lost. Pointers of
        payloads whose objects are gone are led to others that have the same contents; `tell` is told of the
        rest.

        Raises `InvalidInput` when this one owns it, `InstanceTakenOver` when another was faster, and
        `InstanceLocked` when a deletion may go on: then neither may write, until `adopt` is called again.
        """
        if self._refusal is None and self._ownership.completed is not None:
            self._recover_payloads(tell)
            return self._ownership.completed
        if self._refusal is None:
            raise InvalidInput(f"this database owns {self._objects.url} already: there is nothing to adopt")
        if not 0 <= keep_days <= KEEP_DAYS_MAX:
            raise InvalidInput(f"keep_days must be from 0 to {KEEP_DAYS_MAX:,}, not {keep_days!r}")
        if wait_seconds < 0:
            raise InvalidInput(f"wait_seconds must be 0 or more, not {wait_seconds!r}")
        instance_id = self._catalog.instance_id()
        self._supplier.forbid_writes(forbidden=False)
        try:
            number = self._ownership.adopt(
                instance_id, keep_days=keep_days, wait_seconds=wait_seconds, force=force, tell=tell
            )
            self._refusal = self._ownership.look(instance_id)
            if self._refusal is not None:
                raise self._refusal
        except BaseException:
            self._supplier.forbid_writes()
            raise
        self._read_only = False
        self._recover_payloads(tell)
        return number

    def _recover_payloads(self, tell: Callable[[str], object]) -> None:
        """Leads pointers of payloads to objects that the owner of before has left; the adoption has ended."""
        try:
            lines = self.payloads.recover()
        except DormouseError as error:
            lines = [f"objects of payloads were not looked for, maintenance does it later: {error}"]
        for line in lines:
            tell(line)

    def holds(self) -> list[Hold]:
        """Who needs files that collection would delete: readers and backups at work, adoptions for some days.

        Named cuts and consumers, which belong to their tables, are in `Table.status`.
        """
        return [one for one in holds(self._supplier) if not one.is_of_history]

    def release(self, holder: str) -> None:
        """Ends a hold, whoever needs it; of an adoption, going back may miss files from then on.

        Raises `InvalidInput` when there is none of this name.
        """
        self._check_writable()
        names = [one.holder for one in self.holds()]
        if holder not in names or not release(self._supplier, holder):
            known = ", ".join(map(repr, names)) or "none"
            raise InvalidInput(f"nothing is held by {holder!r}; there are: {known}")


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
