"""The databases of indexes of row tables: on the instance's own server, or at addresses from the settings."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dormouse.errors import InstanceError, InvalidInput, TableNotFound, one_line
from dormouse.model.locks import process_lock
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.migrate import migrate
from dormouse.postgres.queries import load
from dormouse.postgres.session import parameters
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement
from dormouse.rows.columns import Column, from_jsonb

if TYPE_CHECKING:
    import pyarrow as pa

# Records of the indexes in the instance's database: the database and the load of each.

_CACHED_MAX = 1_000
_QUERIES = load(__package__ or "", "cluster")


class Source(Protocol):
    """The methods of an indexed row table that indexes call."""

    @property
    def name(self) -> str: ...

    @property
    def table_id(self) -> int: ...

    def current(
        self, version: int | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader: ...

    def changed(self, after: int, till: int | None = None) -> pa.RecordBatchReader: ...


@dataclass(frozen=True, slots=True)
class Looked:
    """A row table at one moment, with its index if it has one.

    - `version`: the newest version.
    - `columns`, `changed_at`: the columns and time of the requested version, by default the newest version.
    - `incarnation_id`: an id that changes with each restore of the instance's database.
    - `database`, `build_id`: the place of the index, or None without an index.
    - `failure`: the reason why the last work on the index failed, or None.
    """

    table_id: int
    name: str
    table_uuid: UUID
    version: int
    changed_at: datetime
    columns: tuple[Column, ...]
    incarnation_id: UUID
    instance_id: UUID
    database: str | None
    build_id: int | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Placed:
    """An index with its place and its load.

    The load is the sum of the seconds of its queries. Each hour halves the weight of earlier queries.
    """

    table_id: int
    name: str
    database: str | None
    build_id: int | None
    load: float
    idle_seconds: float


class Placements:
    """The records of an instance's indexes and their places in its database. Threads may share it."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._lock = process_lock()
        self._columns: OrderedDict[tuple[int, int], tuple[Column, ...]] = OrderedDict()
        self._newest: dict[int, int] = {}
        self._key: bytes | None = None

    def look(self, table_id: int, as_of: int | None = None) -> Looked:
        """Returns a table with its index, in one query. With `as_of`, returns the columns of that version.

        Raises `TableNotFound`.
        """
        known = self._newest.get(table_id)
        values = {"table_id": table_id, "as_of": as_of, "known_since": known}
        rows = self._rows("look", values)
        if not rows:
            raise TableNotFound(f"the row table of id {table_id} no longer exists")
        name, table_uuid, version, changed_at, since, stored, *more = rows[0]
        columns = self._cached_columns(table_id, since, stored)
        return Looked(table_id, name, table_uuid, version, changed_at, columns, *more)

    def as_added(self, looked: Looked, known: Collection[int]) -> list[Column]:
        """Returns the columns whose ids are not in `known`, as they were when they were added.

        Their defaults at that time are the values of older rows.
        """
        ids = [column.column_id for column in looked.columns if column.column_id not in known]
        rows = self._rows("as_added", {"table_id": looked.table_id, "column_ids": ids}) if ids else []
        return [from_jsonb(column) for (column,) in rows]

    def changed_count(self, table_id: int, after: int) -> int:
        """Returns the number of rows of a table that changed after a version."""
        return int(self._rows("changed_count", {"table_id": table_id, "after": after})[0][0])

    def place(self, looked: Looked, database: str) -> None:
        """Records the database for a new index, unless another process changed the record meanwhile."""
        values = {
            "table_id": looked.table_id, "database": database,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        self._rows("place", values, writes=True)

    def built(self, looked: Looked, database: str, build_id: int) -> bool:
        """Records a new build in place of the build of `looked`.

        Returns False if another process replaced that build first.
        """
        values = {
            "table_id": looked.table_id, "database": database, "build_id": build_id,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        return bool(self._rows("built", values, writes=True))

    def failed(self, table_id: int, failure: str | None) -> None:
        """Records the reason why work on an index failed, as a text for users. None removes the reason."""
        self._rows("failed", {"table_id": table_id, "failure": failure}, writes=True)

    def used(self, table_id: int, seconds: float) -> None:
        self._rows("used", {"table_id": table_id, "seconds": seconds}, writes=True)

    def all(self) -> list[Placed]:
        return [Placed(*row) for row in self._rows("loads", {})]

    def forget(self, placed: Placed, idle_seconds: float) -> bool:
        """Deletes the record of an idle index. Returns False if the index was used or replaced meanwhile."""
        values = {"table_id": placed.table_id, "build_id": placed.build_id, "idle_seconds": idle_seconds}
        return bool(self._rows("forget", values, writes=True))

    def instance_id(self) -> UUID:
        instance_id: UUID = self._rows("whose", {})[0][0]
        return instance_id

    def key(self) -> bytes:
        """Returns the key that signs the tokens of pages."""
        if self._key is None:
            rows = self._rows("key", {})
            if not rows:
                self.make_key()
                rows = self._rows("key", {})
            self._key = bytes(rows[0][0])
        return self._key

    def make_key(self) -> None:
        """Creates the key that signs page tokens, unless it exists. Fails in a read-only process."""
        self._rows("make_key", {}, writes=True)

    def _cached_columns(self, table_id: int, since: int, stored: Sequence[Any] | None) -> tuple[Column, ...]:
        """Returns the columns that a table has from version `since` on.

        Takes them from `stored`, the form in the database, and caches them. If `stored` is None, takes them
        from the cache.
        """
        with self._lock:
            if stored is not None:
                self._columns[table_id, since] = tuple(map(from_jsonb, stored))
                self._newest[table_id] = max(since, self._newest.get(table_id, since))
                while len(self._columns) > _CACHED_MAX:
                    (oldest_id, _), _ = self._columns.popitem(last=False)
                    self._newest.pop(oldest_id, None)
            return self._columns[table_id, since]

    def _rows(self, name: str, values: dict[str, Any], *, writes: bool = False) -> list[Any]:
        run = run_statement if writes else run_lookup
        return run(self._supplier, rows_of(_QUERIES[name], values), operation=f"row indexes: {name}")


MIGRATIONS = Path(__file__).with_name("index_migrations")
DATABASES = 2
"""The default number of index databases on the instance's own server."""

CONNECTIONS_MAX = 8
QUERY_SECONDS_MAX = 300
_NAME_BYTES_MAX = 63


class IndexForbidden(InstanceError):
    """An error: the instance's user may not create a database for indexes.

    The message contains no address.
    """


class IndexCluster:
    """The index databases of an instance, by name. Threads may share it.

    Databases on the instance's own server have the names "1", "2" and so on, and are created at their first
    use. Databases elsewhere have names such as host:port/database.
    """

    def __init__(self, dsn: str, setting: str | None = None) -> None:
        self._addresses = addresses(dsn, setting)
        self._own = None if setting and not setting.strip().isdigit() else dsn
        self._lock = threading.Lock()
        self._suppliers: dict[str, ConnectionSupplier] = {}
        self._is_closed = False

    @property
    def names(self) -> Sequence[str]:
        return list(self._addresses)

    def supplier(self, name: str) -> ConnectionSupplier:
        """Returns a supplier of connections to a database. Creates or migrates the database if needed.

        Raises `InstanceError` if the database cannot be reached or created, or is no longer in the settings,
        or if the cluster is closed.
        """
        with self._lock:
            self._check_open()
            if (open_already := self._suppliers.get(name)) is not None:
                return open_already
        if name not in self._addresses:
            raise InstanceError(f"the index database {name!r} is not in the settings")
        made = (
            ConnectionSupplier(
                self._addresses[name],
                connections_max=CONNECTIONS_MAX,
                wait_seconds_max=5,
                application_name="dormouse rows",
            )
            .limited(statement_timeout=QUERY_SECONDS_MAX * 1_000)
            .hurried()
            .scanning()
        )
        try:
            try:
                migrate(made, MIGRATIONS)
            except InstanceError:
                if self._own is None or not self._create(name):
                    raise
                migrate(made, MIGRATIONS)
            with self._lock:
                # the worker of a closed instance may still be here: nothing would close its supplier
                self._check_open()
                kept = self._suppliers.setdefault(name, made)
        except BaseException:
            made.close()
            raise
        if kept is not made:
            made.close()
        return kept

    def is_open(self, name: str) -> bool:
        """Returns whether this process has connections to a database."""
        return name in self._suppliers

    def lost(self, name: str) -> None:
        """Closes the connections to a failing database.

        The next use connects again, or creates the database.
        """
        with self._lock:
            supplier = self._suppliers.pop(name, None)
        if supplier is not None:
            supplier.close()

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            suppliers, self._suppliers = list(self._suppliers.values()), {}
        for supplier in suppliers:
            supplier.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise InstanceError("the instance is closed")

    def _create(self, name: str) -> bool:
        """Creates a database. Returns False if it exists already. Raises `InstanceError`."""
        assert self._own is not None  # noqa: S101 databases elsewhere are never created
        database = str(parameters(self._addresses[name])["dbname"])
        with closing(ConnectionSupplier(self._own, connections_max=1)) as own, own.connection() as conn:
            rows = conn.execute("select 1 from pg_catalog.pg_database where datname = %s", [database])
            if rows.fetchone():
                return False
            text = sql.SQL("create database {} template template0 encoding 'UTF8' locale 'C'")
            try:
                with suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
                    conn.execute(text.format(sql.Identifier(database)))
            except psycopg.Error as error:
                is_forbidden = isinstance(error, psycopg.errors.InsufficientPrivilege)
                raise (IndexForbidden if is_forbidden else InstanceError)(
                    f"cannot create the database {database!r} for indexes of row tables: {one_line(error)}; "
                    "create it as a user with that right, or name other databases in DORMOUSE_ROW_INDEXES"
                ) from None
        return True


def addresses(dsn: str, setting: str | None) -> dict[str, str]:
    """Returns the DSN of each index database, by the name of the database.

    `dsn` is that of the instance. `setting` is the number of databases on the instance's server, or DSNs of
    databases elsewhere, separated by spaces. Raises `InvalidInput`.
    """
    text = (setting or str(DATABASES)).strip()
    if text.isdigit():
        own = parameters(dsn)
        database = str(own.get("dbname") or own.get("user") or "")
        return {
            str(number): make_conninfo("", **{**own, "dbname": _beside(database, number)})
            for number in range(1, int(text) + 1)
        }
    dsns = {}
    for address in text.split():
        given = parameters(address)
        if not given.get("dbname"):
            raise InvalidInput("DORMOUSE_ROW_INDEXES: each address must name a database")
        host, port = given.get("host") or given.get("hostaddr") or "", given.get("port") or 5432
        dsns[f"{host}:{port}/{given['dbname']}"] = address
    return dsns


def _beside(database: str, number: int) -> str:
    name = f"{database}_rows_{number}"
    if len(name.encode()) > _NAME_BYTES_MAX:
        digest = hashlib.blake2b(database.encode(), digest_size=8).hexdigest()
        name = f"dormouse_{digest}_rows_{number}"
    return name
