"""An instance: a database, an object store and any number of tables. Its methods only delegate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dormouse.api import shown
from dormouse.api.table import Table
from dormouse.api.tables import Tables, checked_properties, checked_schema, there_already
from dormouse.api.upkeep import Upkeep
from dormouse.durability.durability import Durability
from dormouse.errors import (
    InstanceError,
    InstanceForbidden,
    InstanceReadOnly,
    NotARowTable,
    TableAlreadyExists,
    names_what_is_missing,
)
from dormouse.model import edits
from dormouse.model.cut import When
from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, TableRecord, is_edited
from dormouse.objects.store import ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.settings.process import Settings, load_settings
from dormouse.state.commits.commit_queues import CommitQueues
from dormouse.state.commits.outcomes import CommitStatus
from dormouse.state.files.round_reports import RoundReports
from dormouse.state.trees import TreeCache

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

    from dormouse.api.row_table import RowTable
    from dormouse.api.transaction import Transaction
    from dormouse.jobs.store import JobStore
    from dormouse.model.types import Parameters
    from dormouse.payloads.store import PayloadStore
    from dormouse.reading.planner import PlanSummary
    from dormouse.reading.sql.engine import Sessions
    from dormouse.reading.sql.workers import WorkerLimits, Workers
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.reading.where import Where
    from dormouse.rows.columns import Column
    from dormouse.rows.indexes import RowIndexes
    from dormouse.state.commits.committer import Committer
    from dormouse.state.commits.requests import CommitRequest


@names_what_is_missing
class Instance(Upkeep):
    """One installation of Dormouse: a database, an object store and their tables. A context manager."""

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
        self._settings = settings
        self._on_close = on_close
        self._closed = False
        self._making = Lock()
        self._payloads: PayloadStore | None = None
        self._jobs: JobStore | None = None
        self._supplier = ConnectionSupplier(
            dsn,
            connections_max=settings.connections_max,
            idle_seconds_max=settings.connection_idle_seconds_max,
            wait_seconds_max=settings.connection_wait_seconds_max,
            read_only=read_only,
            revive=revive,
        )
        self._durability = Durability(
            self._supplier, objects, settings, read_only, base_backup, payloads=lambda: self.payloads
        )
        self._ownership, self._attempts = self._durability.ownership, self._durability.attempts
        self._objects, self._catalog = self._durability.objects, self._durability.catalog
        self._check_writable = self._ownership.check_writable
        self._trees = TreeCache(settings.tree_cache_bytes)
        self._commits = CommitQueues(
            self._supplier, self._objects, settings, committer=committer, check=self._ownership.check
        )
        services = self._supplier, self._objects, self._catalog, self._trees, self._commits
        job_commits, reports = self._commits.of_jobs(self._attempts), RoundReports(self._supplier)
        self._tables = Tables(
            dsn, *services, job_commits, self._ownership.advance, reports, self._check_writable
        )

    def open(self, *, writers_are_dead: bool = False) -> Self:
        """Migrates the database, and checks that it and the object store belong together.

        If the database is a PostgreSQL standby, or a copy of the database that owns the store, the instance
        is read-only. With `writers_are_dead`, ends the attempts of all earlier writers.
        """
        migrate(self._supplier)
        if self._durability.open(writers_are_dead=writers_are_dead):
            from dormouse.jobs.claims import roll
            from dormouse.rows.cluster import Placements

            roll(self._supplier)
            with suppress(InstanceForbidden):  # this role may have no right to the table of keys
                Placements(self._supplier).make_key()
        return self

    def close(self) -> None:
        """Stops committers and closes connections; the last process also stops an embedded database."""
        first, self._closed = not self._closed, True
        if "row_indexes" in self.__dict__:
            self.row_indexes.close()
        if self._jobs is not None:
            self._jobs.close()
        self._commits.close()
        with self._supplier.ending():
            self._tables.close()
            if first and not self.read_only:
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

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the tables."""
        return iter([shown.shown_name(table) for table in self.tables()])

    def __repr__(self) -> str:
        return shown.instance_text(self)

    def _repr_html_(self) -> str:
        return shown.instance_html(self)

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Instance cannot be pickled: open it again in the other process")

    @property
    def refusal(self) -> InstanceReadOnly | None:
        """The error that every write raises if the database is a copy or no longer the owner, else None."""
        return self._ownership.refusal

    @property
    def read_only(self) -> bool:
        return self._ownership.read_only

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
        """Creates a table; with `exist_ok`, returns an existing table of this name with the same columns.

        In place of a schema, `like` takes files or data with the wanted columns, and `row_keys` and
        `sort_keys` name the keys. The table is divided at `split_points`, ascending values of the first row
        key. Raises `TableAlreadyExists`, `InvalidName`, `InvalidSchema`, `InvalidData`, `InvalidRange` and
        `InvalidProperties`.
        """
        self._check_writable()
        schema = checked_schema(schema, like, row_keys, sort_keys)
        properties = checked_properties(name, schema, properties)
        try:
            record = self._catalog.create(name, schema, properties, layout, split_points or ())
        except TableAlreadyExists:
            if not exist_ok:
                raise
            return self._table(there_already(self._catalog, name, schema))
        self._tables.note_activity()
        return self._table(record)

    def table(self, name: str) -> Table:
        """Returns a table, or for `name$versions` every version of a row table. Raises `TableNotFound`."""
        return self._table(*self._catalog.shown(name))

    __getitem__ = table

    def tables(self) -> list[Table]:
        """Returns all tables, ordered by name."""
        return [self._table(record) for record in self._catalog.tables()]

    def drop_table(self, name: str) -> None:
        """Drops a table and deletes its files. Raises `TableNotFound`."""
        self._check_writable()
        self._clear_up(self._catalog.drop(name))

    def drop_unused(self, table: Table) -> None:
        # for a command that created the table and then loaded nothing; another process may have used it
        self._clear_up(self._catalog.drop_unused(table.context.table))

    def _clear_up(self, record: TableRecord) -> None:
        self._trees.drop(record.table_id)
        self._attempts.collect_abandoned(record.table_id)
        self._tables.note_activity()

    def rename_table(self, name: str, new_name: str) -> Table:
        """Gives a table another name, in one transaction. Existing `Table` objects follow the new name.

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
        """Runs one SQL statement over the instance's tables, and returns the answer as a stream.

        DuckDB's dialect: SELECT, WITH, VALUES, SHOW TABLES, DESCRIBE, SUMMARIZE, EXPLAIN, EXPLAIN ANALYZE.
        `parameters` are a list for `$1`, `$2`, … or `?`, or a dict for `$name`. `as_of` reads every table as
        of one moment: an aware datetime, or the name of a cut that each table has. `sessions` are the
        processes that run it, by default this one. Another thread ends it with `interruption.set()`. Columns
        with equal names get numbers. `verify`: see `Table.query`. Raises `InvalidQuery`, `InvalidCut`,
        `CutExpired` and `ObjectDamaged`.
        """
        return self._tables.sql(statement, parameters, interruption, sessions, as_of, verify)

    def execute(
        self,
        statement: str,
        parameters: Parameters | None = None,
        *,
        edit_id: str | None = None,
        dry_run: bool = False,
        attempts_max: int = edits.COMPUTED_MAX,
        interruption: Interruption | None = None,
        sessions: Sessions | None = None,
    ) -> edits.ExecuteReport:
        """Runs one INSERT, UPDATE, DELETE, TRUNCATE or MERGE INTO, in DuckDB's dialect, all or nothing.

        It does what `Table.ingest`, `upsert`, `update`, `delete` and `merge_into` do. A SELECT over the
        instance's tables may feed INSERT and MERGE INTO. INSERT of a key that a keyed table has is refused;
        INSERT OR REPLACE and ON CONFLICT are for keyed tables. `parameters` are a list for `$1`, `$2`, … or
        `?`, or a dict for `$name`. A second call with the same `edit_id` changes nothing. `dry_run` only
        counts. `sessions` are the processes that run it, by default this one. Another thread ends it with
        `interruption.set()`, unless it is committing.

        Raises `InvalidQuery` for any other statement, and the errors of these calls: `EditConflict` after
        `attempts_max` computations, `AmbiguousRows`, `InvalidData`, `NotARowTable`.
        """
        from dormouse.api.executing import How, execute

        if not dry_run:
            self._check_writable()
        how = How(edit_id, dry_run, attempts_max)
        return execute(self.table, self._tables, statement, parameters, how, sessions, interruption)

    def merge_clauses(self, table: str, texts: Iterable[str]) -> list[edits.When]:
        """Returns the clauses of `Table.merge_into` from texts like "matched and s.gone then delete".

        They are what follows WHEN in MERGE INTO, over `t` and `s`. UPDATE and INSERT without columns set all
        columns that the source has. Raises `InvalidQuery` and `TableNotFound`.
        """
        from dormouse.api.executing import parsed_clauses

        return parsed_clauses(self._tables, self.table(table).schema, texts)

    def transaction(
        self, transaction_id: str | None = None, *, attempts_max: int = edits.COMPUTED_MAX
    ) -> Transaction:
        """Returns a transaction, in which one commit changes several tables: all, or none, and once.

        `with instance.transaction() as tx: tx.upsert("stock", rows); tx.delete("carts", {"cart": 7})`. With
        the id of a transaction that was applied before, it changes nothing. If other commits change the rows
        that its changes read, these are computed again, `attempts_max` times in all; then the end of the
        block raises `EditConflict`.
        """
        from dormouse.api.transaction import Transaction

        self._check_writable()
        return Transaction(
            self._supplier, self.table, lambda: self.payloads, self._tables, transaction_id, attempts_max
        )

    def duckdb(
        self, as_of: When | None = None, where: Mapping[str, Where] | None = None, *, verify: bool = False
    ) -> DuckDBPyConnection:
        """Returns a DuckDB connection with a view of each table. The caller must close the connection.

        `as_of` is the moment of all views, an aware datetime or a cut's name; by default now. `where` limits
        the rows of tables: `{table: …}`, each as in `Table.query`. `verify` compares the digests of all files
        at once. After `history_retention_seconds`, garbage collection may delete the files of a view, which
        then raises errors about missing files. On S3, views use the credentials of the time of the call. The
        view of a table with more than 10,000 files, or with a damaged file, raises an error when it is used.
        Raises `InvalidQuery`.
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
        """Returns, by table name, which parts of each table a statement would read. Raises `InvalidQuery`."""
        return self._tables.explain_sql(statement, parameters, interruption, sessions, as_of)

    def sql_workers(self, limits: WorkerLimits, ended: Callable[[str], object] = lambda why: None) -> Workers:
        """Returns processes that run SQL, so that a crash of a statement does not end this process.

        Start them, and close them before the instance. `ended` is called with the reason when one ends.
        """
        from dormouse.reading.sql.workers import Workers

        return Workers(self._objects, limits, ended)

    def create_row_table(
        self, name: str, columns: Sequence[Column], *, properties: TableProperties | None = None
    ) -> RowTable:
        """Creates a row table: users edit its rows, which have ids and versions. `drop_table` drops it.

        Raises `InvalidColumn`, `TableAlreadyExists` and `InvalidName`.
        """
        from dormouse.rows import store

        self._check_writable()
        made = store.create_table(self._catalog, name, columns, properties)
        self._tables.note_activity()
        return self._row_table(made)

    def row_table(self, name: str) -> RowTable:
        """Returns the row table of this name. Raises `TableNotFound` and `NotARowTable`."""
        found = self._catalog.get(name)
        if not is_edited(found.properties):
            why = f"table {name!r} is not a row table: its rows have no ids and versions"
            raise NotARowTable(why, table=name)
        return self._row_table(found)

    def row_tables(self) -> list[RowTable]:
        """Returns all row tables, ordered by name."""
        return [self._row_table(each) for each in self._catalog.tables() if is_edited(each.properties)]

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
        """The time, in seconds, for which the token `next_page` of a page is valid."""
        return self._settings.row_page_seconds

    @property
    def payloads(self) -> PayloadStore:
        """The store of payloads: JSON documents that move from PostgreSQL to the object store after a day."""
        with self._making:
            if self._payloads is None:
                from dormouse.payloads.copying import PayloadOptions
                from dormouse.payloads.store import PayloadStore

                options = PayloadOptions(
                    hot_seconds=self._settings.payloads_hot_seconds,
                    kept_seconds=self._settings.objects_kept_seconds,
                )
                self._payloads = PayloadStore(self._supplier, self._objects, self._check_writable, options)
            return self._payloads

    @property
    def jobs(self) -> JobStore:
        """The store of jobs, which workers run in the background, and of reports on rounds."""
        payloads = self.payloads
        with self._making:
            if self._jobs is None:
                from dormouse.jobs.store import JobStore

                self._jobs = JobStore(self._supplier, self._objects, payloads, self._check_writable)
            return self._jobs

    def submit(
        self, requests: Iterable[CommitRequest], *, waiting: Callable[[str], object] | None = None
    ) -> None:
        """Sends commit requests (`dormouse.commits.requests`) to the queue. A committer applies them later.

        Requests name a table by its id, so they are valid after the table is renamed. While the queue is
        above its high mark, waits, and calls `waiting` with the reason. After an error, some requests may
        have been sent. Send all of them again: each request is applied only once. Raises `TableNotFound`,
        `InvalidCommitRequest`, `CommitQueueFull` and `CommitQueueError`.
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
        """Applies commit requests now, and returns the outcome of each, in the same order.

        Commits of several threads share one statement for each table. If the inputs of a request are missing,
        the request goes to the queue, and the call waits until it is applied. After `seconds_max` its outcome
        is `pending`; then it may still be applied later. After an error, commit the same requests again, or
        call `commit_status`: each request is applied only once.

        Raises the errors of `submit`.
        """
        self._check_writable()
        return self._commits.commit(requests, seconds_max, waiting)

    def committer(self, *, concurrency: int = 2, batch_max: int = 500, receives_max: int = 10) -> Committer:
        """Returns a committer: `run()` applies requests until stopped, `drain()` until the queue is empty.

        It takes at most `batch_max` requests at once, or more if requests for many tables wait. It works on
        `concurrency` batches at a time. It rejects a request after `receives_max` tries without its inputs.
        """
        self._check_writable()
        return self._commits.committer(concurrency, batch_max, receives_max)

    def commit_status(self, commit_id: str) -> CommitStatus:
        """Returns the outcome of a commit."""
        return self._commits.statuses([commit_id])[0]

    def wait_for_commits(self, commit_ids: Sequence[str], *, seconds_max: float = 60) -> list[CommitStatus]:
        """Waits until each commit is applied or rejected, at most `seconds_max`, and returns the outcomes."""
        return self._commits.wait_for(commit_ids, seconds_max)

    @property
    def objects(self) -> ObjectStore:
        """The object store of the instance."""
        return self._objects

    @property
    def commits(self) -> CommitQueues:
        """The commit queues, with their lengths and dead letters."""
        return self._commits

    def _table(self, record: TableRecord, every_version: bool = False) -> Table:
        return Table(
            self._tables.context(record), self._tables, read_only=self.read_only, every_version=every_version
        )

    def _row_table(self, record: TableRecord) -> RowTable:
        # imported here: lambdas open instances without numpy
        from dormouse.api.row_table import RowTable

        return RowTable(self._table(record, every_version=True), lambda: self.row_indexes)

    def _daily(self) -> Mapping[str, Callable[[], object]]:
        kept = self._settings.jobs_retention_days, self._settings.objects_kept_seconds
        jobs = partial(self.jobs.expire, *kept)
        return {"jobs": jobs, "rows": self._keep_row_indexes, "commit bodies": self._commits.sweep_bodies}

    def _keep_row_indexes(self) -> None:
        """Drops idle row indexes and the remains of unfinished ones. Does nothing without indexes."""
        from dormouse.rows.cluster import Placements

        if Placements(self._supplier).all() or "row_indexes" in self.__dict__:
            self.row_indexes.upkeep()


def connect(dsn: str, objects_url: str, *, read_only: bool = False, **objects_options: Any) -> Instance:
    """Opens the instance of a PostgreSQL database and an object store. Creates it if both are new.

    The store is `s3://bucket/prefix` or `file:///path`. Raises `InstanceError` if the database or the store
    cannot be reached or belongs to a newer Dormouse, or if the two belong to different instances.
    """
    instance = Instance(dsn, open_store(objects_url, **objects_options), load_settings(), read_only=read_only)
    try:
        return instance.open()
    except BaseException:
        instance.close()
        raise
