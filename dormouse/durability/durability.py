"""The durability of an instance: ownership of its store, checks, backups, adoption and maintenance."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING

from dormouse.durability.incarnations import FOLDER as OWNER_FOLDER
from dormouse.durability.maintaining import InstanceRounds
from dormouse.durability.ownership import Ownership
from dormouse.errors import (
    CheckFailed,
    DormouseError,
    InstanceReadOnly,
    InvalidInput,
    MaintenanceTakenOver,
    ObjectStoreError,
    TableNotFound,
)
from dormouse.model.loops import Progress
from dormouse.objects.store import GuardedStore, ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.lease import clock_jumps
from dormouse.settings.process import Settings
from dormouse.state.catalog import Catalog
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.holds import Hold, holds, release

if TYPE_CHECKING:
    from dormouse.durability.backups import Backup
    from dormouse.durability.checking import CheckReport
    from dormouse.durability.ledgers import Ledgers, Orphan
    from dormouse.durability.maintaining import Maintained, Maintenance, Number
    from dormouse.objects.ledger import Swept
    from dormouse.payloads.store import PayloadStore

logger = logging.getLogger(__name__)
Rounds = Callable[[], Mapping[str, Callable[[], object]]]
"""A function that returns the work of rounds: for each kind of round, a function that does its work."""

KEEP_DAYS_MAX = 36_500
PAYLOAD_SECONDS_MAX = 600.0
"""The most seconds per hour for which `maintain` works on payloads. Tables wait during this time."""


class Durability:
    """The implementation of the methods of `api.Instance` for ownership, checks, backups and maintenance.

    `api.Instance` documents the methods of the same names.
    """

    def __init__(
        self,
        supplier: ConnectionSupplier,
        objects: ObjectStore,
        settings: Settings,
        read_only: bool,
        base_backup: Callable[[Path], None] | None,
        payloads: Callable[[], PayloadStore],
    ) -> None:
        self._supplier = supplier
        self._payloads = payloads
        self._payload_retention_days = settings.payload_retention_days
        self.base_backup = base_backup
        self.metadata_backups = settings.metadata_backups
        self.ownership = Ownership(supplier, objects, read_only=read_only)
        self.objects = GuardedStore(objects, self.ownership.deleting)
        self.attempts = WriteAttempts(supplier, self.objects)
        self.catalog = Catalog(supplier, self.attempts)

    def open(self, *, writers_are_dead: bool) -> bool:
        """Checks that the database owns the object store. Returns whether this process may write.

        With `writers_are_dead`, all earlier writers have ended, and their write attempts are abandoned.
        """
        is_standby, own = self._supplier.is_standby(), self.ownership
        if is_standby or own.read_only:
            own.read_only = True
            own.refusal = own.look(self.catalog.instance_id())
            if is_standby:
                self._supplier.forbid_writes()  # otherwise every failed write would look for the primary
                why = "the database is a standby, which only takes reads: open the primary to change anything"
                own.refusal = own.refusal or InstanceReadOnly(why)
            return False
        own.refusal = own.open(self.catalog.instance_id(), starts=writers_are_dead)
        if own.refusal is not None:
            logger.warning("%s", own.refusal)
            own.read_only = True
            self._supplier.forbid_writes()
            return False
        if writers_are_dead:
            self.attempts.abandon_all()
        with suppress(ObjectStoreError):  # a user without the right to delete objects can still read and add
            self.attempts.collect_abandoned()
        self.objects.sweep_staging()
        removal_log.roll(self._supplier)
        return True

    def backup(
        self,
        target: str | os.PathLike[str],
        since: str | None,
        despite_damage: bool,
        progress: Progress,
    ) -> Backup:
        from dormouse.durability.backing_up import back_up

        self.ownership.check_writable()
        if self.base_backup is None:
            raise InvalidInput(
                "backup is for an instance in a folder: for your own PostgreSQL use its own backups, for a "
                "deployed instance those of Aurora"
            )
        store = open_store(target)
        mine, place = self.objects.local_path(OWNER_FOLDER), store.local_path(OWNER_FOLDER)
        if mine is not None and place is not None and _is_below(place, mine.parent.parent):
            raise InvalidInput(
                f"{store.url} is in the instance's own folder, and is lost with it: give another"
            )
        return back_up(
            self.ledgers,
            store,
            self.base_backup,
            since=since,
            despite_damage=despite_damage,
            progress=progress,
        )

    def maintain(
        self,
        tables: Callable[[], Sequence[Maintained]],
        daily: Rounds,
        numbers: Callable[[], Iterable[Number]],
        once: bool,
        stop: Event | None,
        cycle_seconds: float,
        tell: Callable[[str], object],
        metrics: Path | None,
        compacts: bool,
    ) -> Maintenance:
        """Maintains the tables until `stop` is set, or with `once` for one cycle.

        `daily` returns additional work for once a day. `numbers` returns additional metrics for the file
        `metrics`. `tell` is called with lines about the progress. Without `compacts`, splits, merges and
        compactions are left to another program.
        """
        from dormouse.durability import checking
        from dormouse.durability.backups import KIND, take_metadata
        from dormouse.durability.maintaining import Maintainer
        from dormouse.payloads import cooling

        self.ownership.check_writable()
        kept: dict[str, Callable[[], object]] = {}
        if (base_backup := self.base_backup) is not None and self.metadata_backups:
            kept[KIND] = lambda: take_metadata(
                self._supplier,
                self.objects,
                self.ownership.number,
                base_backup,
                keep=self.metadata_backups,
            )

        def each_day() -> Mapping[str, Callable[[], object]]:
            checks = checking.checks(self.ledgers)
            return {**kept, **checks, **daily()}

        def after_cycle(done: Maintenance) -> None:
            from dormouse.durability.maintaining import payload_numbers, write_metrics

            if metrics is not None:
                every = chain(payload_numbers(self._payloads()), numbers())
                rounds = InstanceRounds(self._supplier).read()
                write_metrics(metrics, (table.status() for table in tables()), rounds, done, every)

        def hourly() -> Mapping[str, Callable[[], object]]:
            return {cooling.KIND: self.cool_payloads}

        # each collection does this too, but a round leaves out tables without garbage
        tidying: dict[str, Callable[[], object]] = {
            "log of removals": lambda: removal_log.roll(self._supplier),
            "dropped tables": self.attempts.collect_abandoned,
        }
        maintainer = Maintainer(
            self._supplier, tables, tidying, each_day, hourly, tell, after_cycle, compacts=compacts
        )
        try:
            maintainer.run(Event() if stop is None else stop, once=once, cycle_seconds=cycle_seconds)
        except MaintenanceTakenOver as error:
            error.report = maintainer.done
            raise
        return maintainer.done

    def cool_payloads(self) -> None:
        self._payloads().maintain(
            seconds_max=PAYLOAD_SECONDS_MAX, retention_days=self._payload_retention_days
        ).check()

    def check(
        self,
        deep: bool = False,
        table: str | None = None,
        progress: Progress | None = None,
        after: str | None = None,
        finished: Callable[[str], object] = lambda table: None,
    ) -> CheckReport:
        from dormouse.durability.checking import Checker

        tables = self.catalog.tables() if table is None else [self.catalog.get(table)]
        if after is not None:
            tables = [each for each in tables if each.name > after]
        checker = Checker(
            self.ledgers,
            adopted=self._adopted,
            deep=deep,
            notes=deep and not self.ownership.read_only,
            progress=progress,
        )
        report = checker.run(tables, rest=table is None, finished=finished)
        if table is not None and tables and not report.tables:
            raise TableNotFound.gone(table)
        return replace(report, clock_jumps=tuple(clock_jumps(self._supplier)))

    def accept_differences(self, table: str) -> int:
        from dormouse.state.files.store import FileReferenceStore

        self.ownership.check_writable()
        store = FileReferenceStore(self._supplier, self.catalog.get(table))
        store.totals.count_again()
        return store.differences.accept()

    def orphans(self, older_than: timedelta) -> Iterator[Orphan]:
        from dormouse.durability.ledgers import orphan_pages

        return chain.from_iterable(orphan_pages(self.ledgers, self._adopted, older_than))

    def delete_orphans(self, older_than: timedelta, progress: Progress) -> Swept:
        self.ownership.check_writable()
        missing = [each for each in self.check().problems if each.kind == "object_missing"]
        if missing:
            raise CheckFailed(missing, "nothing is deleted, as orphans may be the last copy of these rows")
        from dormouse.durability.ledgers import delete_orphans

        return delete_orphans(self.ledgers, self._adopted, older_than, progress)

    @property
    def _adopted(self) -> int:
        """The number of the incarnation before which another timeline may have written objects."""
        # for a copy, every object that it does not know may be the owner's
        is_copy = self.ownership.look(self.catalog.instance_id()) is not None
        return sys.maxsize if is_copy else self.ownership.adopted

    @property
    def ledgers(self) -> Ledgers:
        from dormouse.durability.ledgers import Ledgers

        return Ledgers(self._supplier, self.objects)

    def adopt(self, keep_days: float, wait_seconds: float, force: bool, tell: Callable[[str], object]) -> int:
        own = self.ownership
        if own.refusal is None and own.completed is not None:
            self._recover_payloads(tell)
            return own.completed
        if own.refusal is None:
            raise InvalidInput(f"this database owns {self.objects.url} already: there is nothing to adopt")
        if not 0 <= keep_days <= KEEP_DAYS_MAX:
            raise InvalidInput(f"keep_days must be from 0 to {KEEP_DAYS_MAX:,}, not {keep_days!r}")
        if wait_seconds < 0:
            raise InvalidInput(f"wait_seconds must be 0 or more, not {wait_seconds!r}")
        instance_id = self.catalog.instance_id()
        self._supplier.forbid_writes(forbidden=False)
        try:
            number = own.adopt(
                instance_id, keep_days=keep_days, wait_seconds=wait_seconds, force=force, tell=tell
            )
            own.refusal = own.look(instance_id)
            if own.refusal is not None:
                raise own.refusal
        except BaseException:
            self._supplier.forbid_writes()
            raise
        own.read_only = False
        self._recover_payloads(tell)
        return number

    def _recover_payloads(self, tell: Callable[[str], object]) -> None:
        """Changes pointers to lost payload objects, so that they lead to objects of the previous owner.

        Must be called after the adoption has ended.
        """
        try:
            lines = self._payloads().recover()
        except DormouseError as error:
            lines = [f"objects of payloads were not recovered; maintenance does it later: {error}"]
        for line in lines:
            tell(line)

    def holds(self) -> list[Hold]:
        return [each for each in holds(self._supplier) if not each.is_of_history]

    def release(self, holder: str) -> None:
        self.ownership.check_writable()
        names = [each.holder for each in self.holds()]
        if holder not in names or not release(self._supplier, holder):
            known = ", ".join(map(repr, names)) or "none"
            raise InvalidInput(f"there is no hold {holder!r}; the holds are: {known}")


def _is_below(path: Path, folder: Path) -> bool:
    return path.resolve().is_relative_to(folder.resolve())
