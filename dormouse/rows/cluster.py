"""The databases that indexes of row tables are in: beside the instance's own, or others that are named."""

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
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.migrate import migrate
from dormouse.postgres.queries import load
from dormouse.postgres.session import parameters
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement
from dormouse.rows.columns import Column, from_jsonb

if TYPE_CHECKING:
    import pyarrow as pa

# What the instance's database knows of the indexes of row tables: where each is, how much it is asked.

_REMEMBERED_MAX = 1_000
_QUERIES = load(__package__ or "", "cluster")


class Source(Protocol):
    """The row table that is indexed."""

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
    """A row table at one moment, and where its index is, if it has one.

    `columns` and `changed_at` are as of a version that was asked for, or of now; `incarnation_id` is the life
    of the database: after a restore it is another.
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
    """An index, and its load: seconds of queries, of which half are forgotten each hour."""

    table_id: int
    name: str
    database: str | None
    build_id: int | None
    load: float
    idle_seconds: float


class Placements:
    """Statements about the indexes of an instance. Threads may share it."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._lock = threading.Lock()
        self._columns: OrderedDict[tuple[int, int], tuple[Column, ...]] = OrderedDict()
        self._newest: dict[int, int] = {}
        self._key: bytes | None = None

    def look(self, table_id: int, as_of: int | None = None) -> Looked:
        """How a table is now, in one look-up; `TableNotFound`."""
        known = self._newest.get(table_id)
        values = {"table_id": table_id, "as_of": as_of, "known_since": known}
        rows = self._rows("look", values)
        if not rows:
            raise TableNotFound(f"the row table of id {table_id} is not there any more")
        name, table_uuid, version, changed_at, since, columns, *more = rows[0]
        found = self._remembered(table_id, since, columns)
        return Looked(table_id, name, table_uuid, version, changed_at, found, *more)

    def as_added(self, looked: Looked, known: Collection[int]) -> list[Column]:
        """Columns that are none of those known, as they were added: rows of before have that default."""
        ids = [column.column_id for column in looked.columns if column.column_id not in known]
        rows = self._rows("as_added", {"table_id": looked.table_id, "column_ids": ids}) if ids else []
        return [from_jsonb(column) for (column,) in rows]

    def changed_count(self, table_id: int, after: int) -> int:
        """Returns how many rows were changed after a version."""
        return int(self._rows("changed_count", {"table_id": table_id, "after": after})[0][0])

    def place(self, looked: Looked, database: str) -> None:
        """Says in which database an index is to be built, if it still is as it was looked at."""
        values = {
            "table_id": looked.table_id, "database": database,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        self._rows("place", values, writes=True)

    def built(self, looked: Looked, database: str, build_id: int) -> bool:
        """Has a build take the place of the one that was looked at; False: another has taken it."""
        values = {
            "table_id": looked.table_id, "database": database, "build_id": build_id,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        return bool(self._rows("built", values, writes=True))

    def failed(self, table_id: int, failure: str | None) -> None:
        """Records why the work failed, for users; None: it is done."""
        self._rows("failed", {"table_id": table_id, "failure": failure}, writes=True)

    def used(self, table_id: int, seconds: float) -> None:
        self._rows("used", {"table_id": table_id, "seconds": seconds}, writes=True)

    def all(self) -> list[Placed]:
        return [Placed(*row) for row in self._rows("loads", {})]

    def forget(self, placed: Placed, idle_seconds: float) -> bool:
        """Drops an index that was not asked for so long; whether it was still so."""
        values = {"table_id": placed.table_id, "build_id": placed.build_id, "idle_seconds": idle_seconds}
        return bool(self._rows("forget", values, writes=True))

    def instance_id(self) -> UUID:
        found: UUID = self._rows("whose", {})[0][0]
        return found

    def key(self) -> bytes:
        """What signs the tokens of pages."""
        if self._key is None:
            rows = self._rows("key", {})
            if not rows:
                self.make_key()
                rows = self._rows("key", {})
            self._key = bytes(rows[0][0])
        return self._key

    def make_key(self) -> None:
        """Has this key be there, unless it is: those who only read cannot make it."""
        self._rows("make_key", {}, writes=True)

    def _remembered(self, table_id: int, since: int, columns: Sequence[Any] | None) -> tuple[Column, ...]:
        with self._lock:
            if columns is not None:
                self._columns[table_id, since] = tuple(map(from_jsonb, columns))
                self._newest[table_id] = max(since, self._newest.get(table_id, since))
                while len(self._columns) > _REMEMBERED_MAX:
                    (gone, _), _ = self._columns.popitem(last=False)
                    self._newest.pop(gone, None)
            return self._columns[table_id, since]

    def _rows(self, name: str, values: dict[str, Any], *, writes: bool = False) -> list[Any]:
        run = run_statement if writes else run_lookup
        return run(self._supplier, rows_of(_QUERIES[name], values), operation=f"row indexes: {name}")


MIGRATIONS = Path(__file__).with_name("index_migrations")
DATABASES = 2
"""So many are beside the instance's own, if the settings do not say."""

CONNECTIONS_MAX = 8
QUERY_SECONDS_MAX = 300
_NAME_BYTES_MAX = 63


class IndexForbidden(InstanceError):
    """The instance's user may not make a database of indexes; the message names no address."""


class IndexCluster:
    """The databases by their names: "1", "2", … beside the instance's own, host:port/database of others.

    Those beside the instance's are made when they are first needed. Threads may share it.
    """

    def __init__(self, dsn: str, setting: str | None = None) -> None:
        self._addresses = addresses(dsn, setting)
        self._own = None if setting and not setting.strip().isdigit() else dsn
        self._lock = threading.Lock()
        self._suppliers: dict[str, ConnectionSupplier] = {}

    @property
    def names(self) -> Sequence[str]:
        return list(self._addresses)

    def supplier(self, name: str) -> ConnectionSupplier:
        """Connections to a database, which is there and up to date.

        Raises `InstanceError`: it cannot be reached, or made; or is none of the settings' any more.
        """
        with self._lock:
            if (found := self._suppliers.get(name)) is not None:
                return found
        if name not in self._addresses:
            raise InstanceError(f"the index database {name!r} is none of those in the settings")
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
        except BaseException:
            made.close()
            raise
        with self._lock:
            kept = self._suppliers.setdefault(name, made)
        if kept is not made:
            made.close()
        return kept

    def is_open(self, name: str) -> bool:
        """Whether this process has asked it."""
        return name in self._suppliers

    def lost(self, name: str) -> None:
        """Something is wrong with a database: it is looked at anew, and made again if it is gone."""
        with self._lock:
            gone = self._suppliers.pop(name, None)
        if gone is not None:
            gone.close()

    def close(self) -> None:
        with self._lock:
            suppliers, self._suppliers = list(self._suppliers.values()), {}
        for supplier in suppliers:
            supplier.close()

    def _create(self, name: str) -> bool:
        """Makes a database that is not there; whether there was none. `InstanceError`."""
        assert self._own is not None  # noqa: S101 others are not made
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
                    f"cannot make the database {database!r} for indexes of row tables: {one_line(error)}; "
                    "have its owner make it, or name others by DORMOUSE_ROW_INDEXES"
                ) from None
        return True


def addresses(dsn: str, setting: str | None) -> dict[str, str]:
    """Where each database is, by its name; `setting` is how many, or DSNs with blanks between.

    Raises `InvalidInput`.
    """
    text = (setting or str(DATABASES)).strip()
    if text.isdigit():
        own = parameters(dsn)
        database = str(own.get("dbname") or own.get("user") or "")
        return {
            str(number): make_conninfo("", **{**own, "dbname": _beside(database, number)})
            for number in range(1, int(text) + 1)
        }
    found = {}
    for address in text.split():
        given = parameters(address)
        if not given.get("dbname"):
            raise InvalidInput("DORMOUSE_ROW_INDEXES: each address names a database")
        host, port = given.get("host") or given.get("hostaddr") or "", given.get("port") or 5432
        found[f"{host}:{port}/{given['dbname']}"] = address
    return found


def _beside(database: str, number: int) -> str:
    name = f"{database}_rows_{number}"
    if len(name.encode()) > _NAME_BYTES_MAX:
        digest = hashlib.blake2b(database.encode(), digest_size=8).hexdigest()
        name = f"dormouse_{digest}_rows_{number}"
    return name
