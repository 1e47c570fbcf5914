"""An instance: a database, an object store, any number of tables."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from threading import Event, Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dormouse.api.table import ShownInstance, Table
from dormouse.api.tables import Tables, properties_asked, schema_asked, there_already
from dormouse.durability.incarnations import FOLDER as OWNER_FOLDER
from dormouse.durability.maintaining import InstanceRound, InstanceRounds
from dormouse.durability.ownership import KEEP_DAYS, WAIT_SECONDS, Ownership, check_mark
from dormouse.errors import (
    CheckFailed,
    DormouseError,
    InstanceError,
    InstanceForbidden,
    InstanceReadOnly,
    InvalidInput,
    MaintenanceTakenOver,
    NotARowTable,
    ObjectStoreError,
    TableAlreadyExists,
    TableNotFound,
    names_what_is_missing,
)
from dormouse.model.cut import When
from dormouse.model.keyed import check_keyed
from dormouse.model.properties import ROW_DELETED, ROW_ID, ROW_VERSION, TableProperties, is_edited
from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.table import TableRecord
from dormouse.model.types import BOOLEAN, LONG, Field
from dormouse.objects import ObjectStore, open_store
from dormouse.objects.guarded import GuardedStore
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.leases import ClockJump, clock_jumps
from dormouse.rows.columns import Column, check_columns, check_new
from dormouse.settings import Settings, load_settings
from dormouse.state.catalog import Catalog
from dormouse.state.commits.commit_queues import CommitQueues
from dormouse.state.commits.outcomes import CommitStatus
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.holds import Hold, holds, release
from dormouse.state.files.round_reports import RoundReports
from dormouse.state.partitions.trees import TreeCache

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from dormouse.api.row_table import RowTable
    from dormouse.api.table import Table
    from dormouse.api.tables import Tables
    from dormouse.durability.backups import Backup
    from dormouse.durability.checking import CheckReport
    from dormouse.durability.maintaining import Maintained, Maintenance, Number
    from dormouse.durability.orphans import DeletedOrphans, Known, Orphan, Orphans
    from dormouse.jobs import JobStore
    from dormouse.model.table import TableRecord
    from dormouse.model.values import Parameters
    from dormouse.objects import ObjectStore
    from dormouse.payloads import PayloadStore
    from dormouse.reading import Answer, PlanSummary
    from dormouse.reading.interruption import Interruption
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.workers import WorkerLimits, Workers
    from dormouse.reading.where import Where
    from dormouse.rows.indexes import RowIndexes
    from dormouse.settings import Settings
    from dormouse.state.catalog import Catalog
    from dormouse.state.commits.committer import Committer
    from dormouse.state.commits.requests import CommitRequest

# The payloads and the jobs of an instance, loaded where they are asked for: most programs have neither.


class OwnWork:
    """What an instance has of them, made once."""

    _supplier: ConnectionSupplier
    _objects: ObjectStore
    _settings: Settings

    def __init__(self) -> None:
        self._making = Lock()
        self._payloads: PayloadStore | None = None
        self._jobs: JobStore | None = None

    def _check_writable(self) -> None:
        raise NotImplementedError

    @property
    def payloads(self) -> PayloadStore:
        """JSON documents, hot in PostgreSQL for a day, and cold in the object store after it."""
        with self._making:
            if self._payloads is None:
                from dormouse.payloads import PayloadStore
                from dormouse.payloads.copying import PayloadOptions

                self._payloads = PayloadStore(
                    self._supplier,
                    self._objects,
                    self._check_writable,
                    PayloadOptions(hot_seconds=self._settings.payloads_hot_seconds),
                )
            return self._payloads

    @property
    def jobs(self) -> JobStore:
        """Jobs, which workers run sooner or later, and what rounds did."""
        payloads = self.payloads
        with self._making:
            if self._jobs is None:
                from dormouse.jobs import JobStore

                self._jobs = JobStore(self._supplier, self._objects, payloads, self._check_writable)
            return self._jobs

    def _roll_jobs(self) -> None:
        """Makes the days that jobs will end on."""
        from dormouse.jobs.claims import roll

        roll(self._supplier)

    def _close_jobs(self) -> None:
        if self._jobs is not None:
            self._jobs.close()


# The row tables of an instance, as a part of it.

_KEYS = (Field(ROW_ID, LONG), Field(ROW_VERSION, LONG), Field(ROW_DELETED, BOOLEAN))


class RowTables(OwnWork):
    """The methods, of an instance."""

    _catalog: Catalog
    _tables: Tables
    _settings: Settings

    @cached_property
    def row_indexes(self) -> RowIndexes:
        """The indexes of all row tables, which answer their queries."""
        from dormouse.rows.cluster import IndexCluster, Placements
        from dormouse.rows.indexes import RowIndexes
        from dormouse.rows.indexing import Indexing

        given = self._settings
        cluster = IndexCluster(self._tables.dsn, given.row_indexes)
        seconds = given.row_page_seconds, given.row_index_idle_seconds
        indexing = Indexing(Placements(self._supplier), cluster, *seconds)
        return RowIndexes(indexing, self.jobs, self.row_table)

    @property
    def row_page_seconds(self) -> float:
        """For so long a page's `next_page` can be asked for."""
        return self._settings.row_page_seconds

    def _make_row_page_key(self) -> None:
        """Has what signs the tokens of pages be there for those who only read."""
        from dormouse.rows.cluster import Placements

        with suppress(InstanceForbidden):  # of a role that writes other tables
            Placements(self._supplier).make_key()

    def _keep_row_indexes(self) -> None:
        """Drops indexes that are idle, and what is left of others, if there are any."""
        from dormouse.rows.cluster import Placements

        if Placements(self._supplier).all() or "row_indexes" in self.__dict__:
            self.row_indexes.upkeep()

    def _numbers(self) -> Iterator[Number]:
        """Yields the numbers of jobs and indexes, for Prometheus."""
        from dormouse.durability.maintaining import Number
        from dormouse.rows.cluster import Placements

        for one in self.jobs.kinds():
            of = {"kind": one.kind}
            yield Number("jobs_waiting", "Jobs that wait; at most 10,000 are counted.", one.waiting, of)
            yield Number("jobs_running", "Jobs that run.", one.running, of)
            yield Number("job_workers", "Workers that take jobs of a kind.", one.workers, of)
            what = "For how long the oldest job that waits has waited; 0: none waits."
            yield Number("job_oldest_waiting_seconds", what, one.oldest_waiting_seconds or 0, of)
            what = "Jobs that ended within a day, by state; at most 10,000 are counted."
            for state, count in one.ended.items():
                yield Number("jobs_ended", what, count, {**of, "state": state})
        if Placements(self._supplier).all():  # else no database of indexes is looked for
            what = "Versions of a row table that its index lacks; +Inf: the index cannot be asked."
            for table, behind in self.row_indexes.indexing.lags():
                yield Number("row_index_versions_behind", what, behind, {"table": table})

    def _close_rows(self) -> None:
        if "row_indexes" in self.__dict__:
            self.row_indexes.close()

    def _table(self, record: TableRecord, every_version: bool = False) -> Table:
        raise NotImplementedError

    def _check_writable(self) -> None:
        raise NotImplementedError

    def create_row_table(
        self, name: str, columns: Sequence[Column], *, properties: TableProperties | None = None
    ) -> RowTable:
        """Makes a table whose rows have ids and versions, and are edited by many; `drop_table` drops it.

        Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`.
        """
        from dormouse.rows import store

        self._check_writable()
        listed = [
            replace(check_new(column), column_id=n)
            for n, column in enumerate(check_columns(columns), len(_KEYS) + 1)
        ]
        schema = Schema(
            _KEYS[:1], _KEYS[1:2], [_KEYS[2], *(Field(c.name, c.stored, nullable=True) for c in listed)]
        )
        given = (properties or TableProperties()).model_dump(exclude_defaults=True)
        edited = TableProperties(**{**given, "rows": "edited"})
        check_keyed(schema, edited)
        made = self._catalog.create(name, schema, edited, with_it=partial(store.create, columns=listed))
        self._tables.note_activity()
        return self._row_table(made)

    def row_table(self, name: str) -> RowTable:
        """The row table of this name. `TableNotFound`, `NotARowTable`."""
        found = self._catalog.get(name)
        if not is_edited(found.properties):
            raise NotARowTable(
                f"table {name!r} is no row table: its rows have no ids and versions", table=name
            )
        return self._row_table(found)

    def row_tables(self) -> list[RowTable]:
        """All row tables, by name."""
        return [self._row_table(one) for one in self._catalog.tables() if is_edited(one.properties)]

    def _row_table(self, record: TableRecord) -> RowTable:
        # lambdas open instances, too, and have no numpy
        from dormouse.api.row_table import RowTable

        return RowTable(self._table(record, every_version=True), lambda: self.row_indexes)


# What an instance does so that nothing is lost: backups, maintenance, adoption; a part of `Instance`.

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
        from dormouse.payloads import upkeep as payload_upkeep

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
            return {payload_upkeep.KIND: self._cool_payloads}

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


logger = logging.getLogger(__name__)
NO_TABLE = 0
"""What `WriteAttempts.collect_abandoned` finds for it is of tables that are gone."""


@names_what_is_missing
class Instance(ShownInstance, RowTables, Durable):
    """One deployed Dormouse; a context manager. Made by `connect` and `local`."""

    def __init__(
        self,
        dsn: str,
        objects: ObjectStore,
        settings: Settings,
        *,
        read_only: bool = False,
        committer: bool = False,
        on_close: Callable[[], None] = lambda: None,
        revive: Callable[[], bool] = lambda: False,
        base_backup: Callable[[Path], None] | None = None,
    ) -> None:
        super().__init__()
        self._base_backup = base_backup
        self._metadata_backups = settings.metadata_backups
        self._jobs_retention_days = settings.jobs_retention_days
        self._settings = settings
        self._payload_retention_days = settings.payload_retention_days
        self._read_only = read_only
        self._refusal: InstanceReadOnly | None = None
        self._on_close = on_close
        self._closed = False
        self._supplier = ConnectionSupplier(
            dsn,
            connections_max=settings.connections_max,
            idle_seconds_max=settings.connection_idle_seconds_max,
            wait_seconds_max=settings.connection_wait_seconds_max,
            read_only=read_only,
            revive=revive,
        )
        self._ownership = Ownership(self._supplier, objects)
        self._objects = objects = GuardedStore(objects, self._deleting)
        self._attempts = WriteAttempts(self._supplier, objects)
        self._catalog = Catalog(self._supplier, self._attempts)
        self._trees = TreeCache(settings.tree_cache_bytes)
        self._commits = CommitQueues(
            self._supplier, objects, settings, committer=committer, check=self._ownership.check
        )
        self._tables = Tables(
            dsn,
            self._supplier,
            objects,
            self._catalog,
            self._trees,
            self._commits,
            self._commits.of_jobs(self._attempts),
            self._ownership.advance,
            RoundReports(self._supplier),
        )

    def open(self, *, writers_are_dead: bool = False) -> Self:
        """Migrates the database, and checks that it and the object store belong together.

        A copy of the database that owns the store is opened read-only, and so is a standby.
        """
        migrate(self._supplier)
        is_standby = self._supplier.is_standby()
        if is_standby or self._read_only:
            self._read_only = True
            self._refusal = self._ownership.look(self._catalog.instance_id())
            if is_standby:
                self._supplier.forbid_writes()  # else each that is tried looks for the primary
                why = "the database is a standby, which only takes reads: open the primary to change anything"
                self._refusal = self._refusal or InstanceReadOnly(why)
            return self
        self._refusal = self._ownership.open(self._catalog.instance_id(), starts=writers_are_dead)
        if self._refusal is not None:
            logger.warning("%s", self._refusal)
            self._read_only = True
            self._supplier.forbid_writes()
        else:
            if writers_are_dead:
                self._attempts.abandon_all()
            with suppress(ObjectStoreError):  # a user that may not delete objects may still read and add
                self._attempts.collect_abandoned(NO_TABLE)
            self._objects.sweep_staging()
            removal_log.roll(self._supplier)
            self._roll_jobs()
            self._make_row_page_key()
        return self

    def close(self) -> None:
        """Ends committers in bounded time, and connections; an embedded database stops with its last user."""
        first, self._closed = not self._closed, True
        self._close_rows()
        self._close_jobs()
        self._commits.close()
        with self._supplier.ending():
            self._tables.close()
            if first and not self._read_only:
                self._ownership.advance(last=True)
        self._supplier.close()
        on_close, self._on_close = self._on_close, lambda: None
        on_close()

    def __enter__(self) -> Self:
        if self._closed:
            raise InstanceError("the instance is closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Instance cannot be pickled: open it again in the other process")

    @property
    def refusal(self) -> InstanceReadOnly | None:
        """Why nothing may be written, however it was opened: a copy, or taken over."""
        return self._refusal

    @property
    def read_only(self) -> bool:
        return self._read_only

    def create_table(
        self,
        name: str,
        schema: Schema | None = None,
        *,
        like: Any = None,
        row_keys: Sequence[str] = (),
        sort_keys: Sequence[str] = (),
        layout: str = "file_table",
        split_points: Sequence[KeyValue] | None = (),
        properties: TableProperties | None = None,
        exist_ok: bool = False,
    ) -> Table:
        """Makes a table; `split_points` divide it from the start, on the first row key, ascending.

        In place of a schema, `like` is files or data with such columns, and the keys are named. `exist_ok`
        takes a table that is there with the same columns. Raises `TableAlreadyExists`, `InvalidName`,
        `InvalidSchema`, `InvalidData`, `InvalidRange` and `InvalidProperties`.
        """
        self._check_writable()
        schema = schema_asked(schema, like, row_keys, sort_keys)
        properties = properties_asked(name, schema, properties)
        try:
            record = self._catalog.create(name, schema, properties, layout, split_points or ())
        except TableAlreadyExists:
            if not exist_ok:
                raise
            return self._table(there_already(self._catalog, name, schema))
        self._tables.note_activity()
        return self._table(record)

    def table(self, name: str) -> Table:
        """The table of this name; `name$versions` shows every version of a row table. `TableNotFound`."""
        return self._table(*self._catalog.shown(name))

    __getitem__ = table

    def tables(self) -> list[Table]:
        """All tables, by name."""
        return [self._table(record) for record in self._catalog.tables()]

    def drop_table(self, name: str) -> None:
        """Drops a table and deletes its files; `TableNotFound`."""
        self._check_writable()
        self._clear_up(self._catalog.drop(name))

    def drop_unused(self, table: Table) -> None:
        # for commands that made it for rows which then did not come: others may have added theirs
        self._clear_up(self._catalog.drop_unused(table.context.table))

    def _clear_up(self, record: TableRecord) -> None:
        self._trees.drop(record.table_id)
        self._attempts.collect_abandoned(record.table_id)
        self._tables.note_activity()

    def rename_table(self, name: str, new_name: str) -> Table:
        """Gives a table another name, in one transaction; handles that are open follow, by its id.

        Raises `TableNotFound`, `InvalidName`, and `TableAlreadyExists` when the new name is taken.
        """
        self._check_writable()
        self._catalog.rename(name, new_name)
        return self.table(new_name)

    def sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
        verify: bool = False,
    ) -> Answer:
        """The answer of one statement of DuckDB's dialect over the instance's tables, by name, streamed.

        SELECT, WITH, VALUES, SHOW TABLES, DESCRIBE, SUMMARIZE, EXPLAIN and EXPLAIN ANALYZE; `parameters` are
        a list for `$1`, `$2`, … or `?`, or a dict for `$name`. Columns of one name are numbered. `as_of`
        reads every table as it was then: an aware time, or the name of a cut that each has. Another thread
        ends it by `interruption.set()`; `sessions` say where it runs, if not in this process. `verify` is
        that of `Table.query`. Raises `InvalidQuery`, `InvalidCut` and `CutExpired`, and what that does.
        """
        return self._tables.sql(statement, parameters, interruption, sessions, as_of, verify)

    def duckdb(
        self, as_of: When | None = None, where: Mapping[str, Where] | None = None, *, verify: bool = False
    ) -> DuckDBPyConnection:
        """A DuckDB connection with a view of each table, by name, as all of them are at one moment.

        `as_of` is another moment than now: an aware time, or the name of a cut. `where` bounds what is seen
        of a table: `{table: …}`, each as in `table.query`. The moment stands until files that were replaced
        since are collected, `history_retention_seconds` later; then the views miss files, and say so. On S3,
        it reads with the credentials of now. Close it when it is done with. `verify` compares the digests of
        all files now. The view of a table that has more than 10,000 files, or that cannot be read, as a file
        is damaged, says so when it is used. Raises `InvalidQuery`.
        """
        return self._tables.duckdb({} if where is None else where, as_of, verify)

    def explain_sql(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        as_of: When | None = None,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
    ) -> dict[str, PlanSummary]:
        """What a statement would read of each table that it reads. Raises `InvalidQuery`."""
        return self._tables.explain_sql(statement, parameters, interruption, sessions, as_of)

    def sql_workers(self, limits: WorkerLimits, ended: Callable[[str], object] = lambda why: None) -> Workers:
        """Processes that run SQL, for `sessions`; what a statement exhausts or crashes is one of them.

        Start them, and close them before the instance. `ended` is told why one ended.
        """
        from dormouse.reading.sql.workers import Workers

        return Workers(self._objects, limits, ended)

    def submit(
        self, requests: Iterable[CommitRequest], *, waiting: Callable[[str], object] | None = None
    ) -> None:
        """Sends commit requests (`dormouse.state.commits.requests`) to the queue; a committer applies them.

        A table is known by its id from here on, whatever its name will be. Waits while the queue is above its
        high mark, and tells `waiting` why. When it raises, some may have been sent: sending all of them again
        applies each once.

        Raises `TableNotFound`, `InvalidCommitRequest`, `CommitQueueFull` and `CommitQueueError`.
        """
        self._check_writable()
        self._commits.submit(requests, waiting)

    def commit(
        self,
        requests: Sequence[CommitRequest],
        *,
        seconds_max: float = 60,
        waiting: Callable[[str], object] | None = None,
    ) -> list[CommitStatus]:
        """Applies commit requests now, and gives what became of each, in their order.

        What threads commit at once is one statement for each table. Those whose inputs are not there yet go
        to the queue, and are waited for: `pending` is what may still be applied when the time is over. When
        it raises, commit the same again, or ask `commit_status`: each is applied once.

        Raises what `submit` does.
        """
        self._check_writable()
        return self._commits.commit(requests, seconds_max, waiting)

    def committer(self, *, concurrency: int = 2, batch_max: int = 500, receives_max: int = 10) -> Committer:
        """What applies requests: `run()` until it is stopped, or `drain()` until the queue is empty.

        It takes at most `batch_max` requests at once (more where many wait for many tables), works on
        `concurrency` batches at a time, and rejects a request whose inputs were not there at `receives_max`
        tries.
        """
        self._check_writable()
        return self._commits.committer(concurrency, batch_max, receives_max)

    def commit_status(self, commit_id: str) -> CommitStatus:
        """What became of a commit."""
        return self._commits.statuses([commit_id])[0]

    def wait_for_commits(self, commit_ids: Sequence[str], *, seconds_max: float = 60) -> list[CommitStatus]:
        """What became of commits, when each is applied or rejected, or the time is over."""
        return self._commits.wait_for(commit_ids, seconds_max)

    @property
    def objects(self) -> ObjectStore:
        """Where its objects are."""
        return self._objects

    @property
    def commits(self) -> CommitQueues:
        """The commit queues: how deep they are, and what could not be handled."""
        return self._commits

    def check_reachable(self) -> None:
        """Asks the database and the object store for a little. `InstanceError`, `ObjectStoreError`."""
        check_mark(self._catalog.instance_id(), self._objects)

    def _table(self, record: TableRecord, every_version: bool = False) -> Table:
        how = {"read_only": self._read_only, "every_version": every_version}
        return Table(self._tables.context(record), self._tables, self._check_writable, **how)

    def _daily(self) -> Mapping[str, Callable[[], object]]:
        jobs = partial(self.jobs.expire, self._jobs_retention_days)
        return {"jobs": jobs, "rows": self._keep_row_indexes, "commit bodies": self._commits.sweep_bodies}

    def _check_writable(self) -> None:
        if self._refusal is not None:
            raise self._refusal
        if self._read_only:
            raise InstanceReadOnly(
                "the instance was opened read-only; open it without read_only to change it"
            )
        self._ownership.check()

    @contextmanager
    def _deleting(self) -> Iterator[None]:
        if self._refusal is not None:
            raise self._refusal
        with self._ownership.deleting():
            yield


def connect(dsn: str, objects_url: str, *, read_only: bool = False, **objects_options: Any) -> Instance:
    """The instance of a PostgreSQL database and an object store (`s3://bucket/prefix`, `file:///path`).

    Made when both are new. `InstanceError`: unreachable, of a newer Dormouse, or halves of two instances.
    """
    instance = Instance(dsn, open_store(objects_url, **objects_options), load_settings(), read_only=read_only)
    try:
        return instance.open()
    except BaseException:
        instance.close()
        raise
