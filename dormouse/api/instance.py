"""An instance: a database, an object store, any number of tables."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dormouse.api.durable import Durable
from dormouse.api.row_tables import RowTables
from dormouse.api.shown import ShownInstance
from dormouse.api.table import Table
from dormouse.api.tables import Tables, properties_asked, schema_asked, there_already
from dormouse.durability.ownership import Ownership, check_mark
from dormouse.errors import (
    InstanceError,
    InstanceReadOnly,
    ObjectStoreError,
    TableAlreadyExists,
    names_what_is_missing,
)
from dormouse.model.cut import When
from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, TableRecord
from dormouse.objects import ObjectStore, open_store
from dormouse.objects.store import GuardedStore
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.settings import Settings, load_settings
from dormouse.state.catalog import Catalog
from dormouse.state.commits.commit_queues import CommitQueues
from dormouse.state.commits.outcomes import CommitStatus
from dormouse.state.files import removal_log
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.round_reports import RoundReports
from dormouse.state.partitions.trees import TreeCache

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from dormouse.api.table import Table
    from dormouse.api.tables import Tables
    from dormouse.model.table import TableRecord
    from dormouse.model.types import Parameters
    from dormouse.objects import ObjectStore
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.workers import WorkerLimits, Workers
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import Where
    from dormouse.settings import Settings
    from dormouse.state.catalog import Catalog
    from dormouse.state.commits.committer import Committer
    from dormouse.state.commits.requests import CommitRequest

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
