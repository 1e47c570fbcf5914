"""The work on indexes of row tables: builds, updates, moves and drops, in any process."""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import psycopg

from dormouse.errors import (
    CommitOutcomeUnknown,
    ConnectionsExhausted,
    DormouseError,
    InstanceError,
    TableBusy,
    TableNotFound,
    TooManyRetries,
    one_line,
)
from dormouse.postgres.connection import DAMAGES
from dormouse.postgres.lease import wait_for
from dormouse.rows.builds import Build, BuildBusy, Builds, ColumnIndexes
from dormouse.rows.cluster import IndexCluster, IndexForbidden, Looked, Placed, Placements, Source

if TYPE_CHECKING:
    from dormouse.jobs.worker import Worker

PAGE_SECONDS = 3_600.0
"""The seconds for which a query can read its next page."""
IDLE_SECONDS = 7 * 86_400.0
"""The seconds after which an index without queries is dropped."""
UPKEEP_SECONDS = 3_600.0
BALANCE_SECONDS = 60.0
"""The difference in load between two databases from which an index moves from one to the other.

The load is in seconds of queries per hour.
"""
INDEXED_ROWS_MIN = 10_000
INDEXED_COLUMNS_MAX = 16
UNUSED_SECONDS = 86_400.0
"""The seconds after which the index of a column is dropped if no query used it."""

REBUILT_ROWS_MIN = 25_000
REBUILT_SHARE = 0.5
"""The ratio of changed rows to all rows from which a new build costs less than an update.

A row of an update costs 2.5 times as much as a row that is copied into a new build. Each index of a column
increases this factor.
"""

UNREACHABLE = (
    InstanceError,
    ConnectionsExhausted,
    TooManyRetries,
    CommitOutcomeUnknown,
    psycopg.OperationalError,
)
"""The errors of a database that cannot be used. Another index database may be without them."""
GONE = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedFunction)
"""The errors of PostgreSQL for an index whose tables another process dropped."""

logger = logging.getLogger(__name__)


class Indexing:
    """The builds, updates and upkeep of one instance's indexes. Threads may share it."""

    def __init__(
        self,
        placements: Placements,
        cluster: IndexCluster,
        page_seconds: float = PAGE_SECONDS,
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        self.placements = placements
        self.cluster = cluster
        self.page_seconds = page_seconds
        self.idle_seconds = idle_seconds
        self.unused_seconds = UNUSED_SECONDS
        self._upkept = time.monotonic()
        self._lock = threading.Lock()

    def bring(self, table: Source, *, columns: Collection[int] = (), waits: bool = True) -> Looked:
        """Builds the index of a table or updates it to the newest version. Returns the table with its index.

        Indexes each column whose id is in `columns`. If the index's database cannot be used, builds the index
        in another database. If another process is working on the index, waits for that process, or with
        `waits=False` raises `BuildBusy`. Raises `InstanceError` if no database can be used.
        """
        failed: set[str] = set()
        seconds = math.inf if waits else 0.0
        return wait_for(lambda _: self._brought(table, columns, failed), seconds)

    def _brought(self, table: Source, columns: Collection[int], failed: set[str]) -> Looked | BuildBusy:
        while True:
            looked = self.placements.look(table.table_id)
            database = looked.database
            if database is None or database in failed or database not in self.cluster.names:
                self._place(looked, failed)
                continue
            try:
                if self._worked(table, looked, database, columns):
                    if looked.failure is not None:
                        self.placements.failed(looked.table_id, None)
                    return looked
            except BuildBusy as busy:
                return busy
            except TableNotFound:
                raise
            except UNREACHABLE as error:
                logger.warning(
                    "the index of table %r in database %r: %s", table.name, database, one_line(error)
                )
                self.placements.failed(looked.table_id, cause(error))
                self.cluster.lost(database)
                failed.add(database)
                if failed >= set(self.cluster.names):
                    raise

    def builds(self, database: str) -> Builds:
        """Returns the builds of a database. Raises `InstanceError` if the database cannot be reached."""
        return Builds(self.cluster.supplier(database))

    def column_indexes(self, database: str) -> ColumnIndexes:
        """Returns the column indexes of a database.

        Raises `InstanceError` if the database cannot be reached.
        """
        return ColumnIndexes(self.cluster.supplier(database))

    def heal(self, looked: Looked) -> None:
        """Drops a damaged index, so that no query reads it."""
        if looked.database is None or looked.build_id is None:
            return
        self.placements.place(looked, looked.database)
        with suppress(DormouseError, psycopg.Error):
            self.builds(looked.database).drop(looked.build_id, looked.table_uuid)

    def move(self, table: Source, database: str) -> bool:
        """Builds the index in another database, which replaces the old index.

        Returns False if the index is in that database already, or if another process changed the index
        meanwhile.
        """
        looked = self.placements.look(table.table_id)
        return looked.database != database and self._build(table, looked, database)

    def upkeep(self, open_table: Callable[[str], Source]) -> None:
        """Drops idle indexes, builds that are no longer used, and unknown builds.

        Balances the load of the databases.
        """
        placed = self.placements.all()
        used = {index.database for index in placed}
        for index in placed:
            if index.idle_seconds > self.idle_seconds and self.placements.forget(index, self.idle_seconds):
                logger.info("the index of table %d was idle and is dropped", index.table_id)
        placed = self.placements.all()
        # skips databases without indexes: connecting to one would create it
        for database in [name for name in self.cluster.names if name in used or self.cluster.is_open(name)]:
            with suppress(*UNREACHABLE, TableBusy):
                self._clean(database, {(index.database, index.build_id) for index in placed})
        if (best_move := balanced(placed, self.cluster.names)) is not None:
            index, database = best_move
            with suppress(*UNREACHABLE, BuildBusy, TableNotFound):
                self.move(open_table(index.name), database)

    def lags(self) -> list[tuple[str, float]]:
        """Returns each table that has an index, with the number of versions that the index lacks.

        The number is infinity for an index that cannot be used.
        """
        lags = []
        for index in self.placements.all():
            with suppress(TableNotFound):
                lags.append((index.name, self._lag(self.placements.look(index.table_id))))
        return lags

    def _lag(self, looked: Looked) -> float:
        if looked.database is None or looked.build_id is None or looked.database not in self.cluster.names:
            return math.inf
        try:
            build = self._found(self.builds(looked.database), looked)
        except UNREACHABLE:
            return math.inf
        return math.inf if build is None or build.is_retired else max(0, looked.version - build.version)

    def upkeep_is_due(self) -> bool:
        """Returns True once in `UPKEEP_SECONDS`. The worker that gets True must do the upkeep."""
        with self._lock:
            if time.monotonic() - self._upkept < UPKEEP_SECONDS:
                return False
            self._upkept = time.monotonic()
            return True

    def _place(self, looked: Looked, failed: Collection[str]) -> None:
        loads = dict.fromkeys(self.cluster.names, 0.0)
        counts = Counter(self.cluster.names)
        for index in self.placements.all():
            if index.database is not None and index.database in loads:
                loads[index.database] += index.load
                counts[index.database] += 1
        free = [name for name in self.cluster.names if name not in failed]
        database = min(free, key=lambda name: (round(loads[name]), counts[name], name))
        self.placements.place(looked, database)

    def _worked(self, table: Source, looked: Looked, database: str, columns: Collection[int]) -> bool:
        """Does one step of the work on an index. Returns True if nothing is left to do."""
        builds = self.builds(database)
        build = self._found(builds, looked)
        if build is None and looked.build_id is not None:
            self.heal(looked)
            return False
        if build is None or build.is_retired or self._costs_less_anew(looked, build):
            self._build(table, looked, database, () if build is None else build.indexed_ids)
            return False
        indexes = self.column_indexes(database)
        if build.version < looked.version:
            added = self.placements.as_added(looked, build.column_ids)
            if added:
                indexes.cancel(build.build_id)
            try:
                with table.changed(build.version, looked.version) as changed:
                    builds.bring(looked, build, looked.columns, added, changed)
            except GONE:
                builds.drop(build.build_id, looked.table_uuid)
            except psycopg.errors.ProgramLimitExceeded:
                # a text is too long for a column's index: another database would refuse it, too
                indexes.drop_texts(build.build_id)
            return False
        builds.purge(build.build_id, self.page_seconds)
        wanted = [
            number for number in columns if number in build.column_ids and number not in build.indexed_ids
        ]
        wanted = wanted[: max(0, INDEXED_COLUMNS_MAX - len(build.indexed_ids))]
        for column_id in wanted:
            indexes.add(build.build_id, column_id)
        return True

    def _costs_less_anew(self, looked: Looked, build: Build) -> bool:
        """Returns whether a new build costs less than an update of the present build."""
        if build.version >= looked.version:
            return False
        count = self.placements.changed_count(looked.table_id, build.version)
        return count >= REBUILT_ROWS_MIN and count > REBUILT_SHARE * build.row_count

    def _found(self, builds: Builds, looked: Looked) -> Build | None:
        """Returns the build of an index, or None if it does not exist or is damaged."""
        if looked.build_id is None:
            return None
        try:
            return builds.read(looked, looked.build_id, probed)
        except GONE:
            return None
        except InstanceError as error:
            if not isinstance(error.__cause__, DAMAGES):
                raise
            return None

    def _build(self, table: Source, looked: Looked, database: str, indexed_ids: Collection[int] = ()) -> bool:
        builds = self.builds(database)
        with table.current(looked.version) as rows:
            build_id = builds.build(looked, looked.columns, rows, indexed_ids)
        if not self.placements.built(looked, database, build_id):
            builds.drop(build_id, looked.table_uuid)
            return False
        if looked.database is not None and looked.build_id is not None:
            with suppress(*UNREACHABLE):
                self.builds(looked.database).retire([looked.build_id])
        return True

    def _clean(self, database: str, known: Collection[tuple[str | None, int | None]]) -> None:
        builds = self.builds(database)
        listed = builds.all(self.placements.instance_id())
        unknown = [build.build_id for build in listed if (database, build.build_id) not in known]
        builds.retire(unknown)
        for build in listed:
            if build.retired_seconds is not None and build.retired_seconds > self.page_seconds:
                self.column_indexes(database).cancel(build.build_id)
                builds.drop(build.build_id, build.table_uuid)
            elif build.retired_seconds is None:
                builds.purge(build.build_id, self.page_seconds)
                self.column_indexes(database).drop_unused(build.build_id, self.unused_seconds)


def cause(error: BaseException) -> str:
    """Returns the reason why an index cannot be used, as a text for users without the database's address."""
    if isinstance(error.__cause__, psycopg.errors.DiskFull):
        return "the disk of the database is full"
    if isinstance(error, IndexForbidden):
        return str(error)
    if isinstance(error, ConnectionsExhausted):
        return "its database has no connection to spare"
    return "cannot connect to its database, or lost the connection (the log names it)"


def probed(conn: psycopg.Connection[Any], build: Build) -> Build:
    """Returns a build after reading from its tables. Raises an error of `GONE` if a table does not exist."""
    for kind in ("current", "superseded", "incoming"):
        conn.execute(f"select 1 from {kind}_{build.build_id} limit 1")
    return build


def balanced(placed: Sequence[Placed], databases: Sequence[str]) -> tuple[Placed, str] | None:
    """Returns the index to move and its new database, or None if the loads of the databases are balanced."""
    loads = dict.fromkeys(databases, 0.0)
    for index in placed:
        if index.database is not None and index.database in loads:
            loads[index.database] += index.load
    busiest, idlest = (choose(loads, key=lambda name: loads[name]) for choose in (max, min))
    difference = loads[busiest] - loads[idlest]
    movable = [index for index in placed if index.database == busiest and 0 < index.load < difference]
    if difference <= BALANCE_SECONDS or not movable:
        return None
    best = min(movable, key=lambda index: abs(difference - 2 * index.load))
    return best, idlest


FINISH_SECONDS, END_SECONDS = 2.0, 5.0
"""The longest waits of a program that ends, in seconds.

The first wait is for the work on an index, the second for the end of the worker's thread.
"""


class IndexWorker:
    """The worker of this process for jobs on indexes. It starts with the first job that the process starts.

    So such jobs run even if no other worker runs. If a program ends without closing its instance, the worker
    stops before an embedded server does.
    """

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._running: tuple[int, Worker, threading.Thread] | None = None
        self._is_registered = False

    def start(self) -> None:
        with self._lock:
            if self._running is not None and self._running[0] == os.getpid():
                return
            worker = self._make()
            # daemon: a build that hangs must not keep the program from ending
            thread = threading.Thread(target=self._run, args=(worker,), name="dormouse-rows", daemon=True)
            self._running = os.getpid(), worker, thread
            if not self._is_registered:
                # the last registered function runs first, while the embedded server still runs
                atexit.register(_end, weakref.ref(self))
                self._is_registered = True
            thread.start()

    def close(self, *, waits: bool = False) -> None:
        """Stops the worker. Workers of other processes then run its jobs.

        With `waits`, waits a moment for the end of the present job, and then for the end of the thread.
        """
        with self._lock:
            running, self._running = self._running, None
        if running is None or running[0] != os.getpid():
            return
        _, worker, thread = running
        worker.stop()
        if waits:
            thread.join(FINISH_SECONDS)
        worker.stop()
        if waits:
            thread.join(END_SECONDS)

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except (DormouseError, psycopg.Error) as error:
            logger.warning("the worker of indexes ended: %s", one_line(error))
        finally:
            with self._lock:
                if self._running is not None and self._running[1] is worker:
                    self._running = None


def _end(worker: weakref.ref[IndexWorker]) -> None:
    if (found := worker()) is not None:
        found.close(waits=True)
