"""The databases that indexes of row tables are in: beside the instance's own, or others that are named."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dormouse.errors import InstanceError, InvalidInput, one_line
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.postgres.migrate import migrate
from dormouse.postgres.opening import parameters

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
