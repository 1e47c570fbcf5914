"""Forward migrations: a numbered sequence of `NNNN_name.sql`, each applied once and in a transaction."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.rows import TupleRow

from dormouse.errors import InstanceError, InstanceReadOnly, InstanceTooNew, NotAnInstance, one_line
from dormouse.postgres.connection import ConnectionSupplier, Supplier
from dormouse.postgres.queries import Queries, load
from dormouse.postgres.session import ALONE, MIGRATING_IDLE_MS_MAX, Connection
from dormouse.postgres.transaction import ALONE_SECONDS_MAX, CONFLICTS, bounded, impatiently, run_lookup

MIGRATIONS = Path(__file__).with_name("migrations")
"""Dormouse's own migrations."""

_FILE_NAME = re.compile(r"(?P<version>\d{4})_(?P<name>[a-z0-9_]+)\.sql")
_QUERIES = load(__file__, "migrate")
_SETTLING = (
    ("is_ahead", ("renumber_references", "renumber_removals", "renumber_collections", "forget_looks")),
    # its query needs the record of restores, so it comes before the history is deleted
    ("knows_deletions", ("renumber_deletions",)),
    ("knows_history", ("forget_history", "begin_history")),
    ("knows_dropped", ("forget_dropped",)),
    ("knows_payloads", ("begin_days_anew",)),
    ("knows_schemas", ("renumber_schemas",)),
    ("knows_incarnations", ("note_copy",)),
)
"""The steps that correct a copied database, in order.

Each step is the name of a query, and the names of the statements to run if the query returns true.
"""


@dataclass(frozen=True)
class Migration:
    """A migration of the schema. `text` may hold several statements; it runs in one transaction."""

    version: int
    name: str
    text: str

    @property
    def checksum(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


@dataclass(frozen=True)
class _Applied:
    version: int
    name: str
    checksum: str
    in_place: bool

    def __str__(self) -> str:
        return f"{self.version:04d}_{self.name}"


def migrate(dsn_or_supplier: str | Supplier, folder: Path = MIGRATIONS) -> list[Migration]:
    """Applies the missing migrations and returns them. It takes one query if nothing is missing.

    In a database that was copied into another cluster, it also corrects the transaction ids (`settle`). Many
    processes may call it at once. Raises

    - InstanceTooNew if the database is newer than the folder,
    - InstanceReadOnly if it needs to write and may not,
    - NotAnInstance if the schema `dormouse` is not Dormouse's,
    - InstanceError if a right is missing, a migration fails, or an applied one was edited.
    """
    if isinstance(dsn_or_supplier, str):
        with closing(ConnectionSupplier(dsn_or_supplier)) as supplier:
            return migrate(supplier, folder)
    migrations = read_migrations(folder)
    # run_lookup retries: a server that recovers from a crash may end the connection once more
    applied = run_lookup(dsn_or_supplier, _applied, operation="read the schema")
    if applied is not None and not _pending(applied, migrations) and _in_place(applied):
        return []
    with dsn_or_supplier.connection() as conn:
        try:
            with locked(conn, _QUERIES):
                return _apply_all(conn, migrations)
        except psycopg.errors.ReadOnlySqlTransaction as error:
            if applied is None:
                raise InstanceReadOnly(
                    "the database has no Dormouse instance, and a read-only process makes none: connect to "
                    "another database, or run a command that writes, such as 'dormouse table create'"
                ) from error
            if not _pending(applied, migrations):
                raise InstanceReadOnly(
                    "the database was copied by a dump, so its transaction ids are those of another "
                    "server: run 'dormouse adopt', which corrects them, before you read it"
                ) from error
            raise InstanceReadOnly(
                "the database is of an older Dormouse, and a read-only process does not migrate it: run a "
                "command that writes, such as 'dormouse compact'"
            ) from error


def lacking(supplier: Supplier, folder: Path = MIGRATIONS) -> list[Migration]:
    """Returns the migrations that `migrate` would apply. Changes nothing; raises the same errors."""
    applied = run_lookup(supplier, _applied, operation="read the schema")
    return _pending(applied or [], read_migrations(folder))


def read_migrations(folder: Path) -> list[Migration]:
    """Returns the migrations of a folder, in order.

    Raises InstanceError unless they are numbered 1, 2, 3, ...
    """
    migrations = []
    for version, path in enumerate(sorted(folder.glob("*.sql")), start=1):
        match = _FILE_NAME.fullmatch(path.name)
        if match is None or int(match["version"]) != version:
            raise InstanceError(f"migration {path.name} should be named {version:04d}_<name>.sql")
        migrations.append(Migration(version, match["name"], path.read_text("utf-8")))
    return migrations


def _apply_all(conn: psycopg.Connection[TupleRow], migrations: Sequence[Migration]) -> list[Migration]:
    applied = _applied(conn)
    if applied is None:
        _prepare(conn)
    pending = _pending(applied or [], migrations)
    for migration in pending:
        _apply(conn, migration)
    if not _in_place(_applied(conn) or []):
        try:
            settle(conn)
        except psycopg.errors.InsufficientPrivilege as error:
            raise InstanceError(
                "the database was copied from another server; first open it as its owner, or deploy, so that "
                "its transaction ids are corrected"
            ) from error
    return pending


def _in_place(applied: Sequence[_Applied]) -> bool:
    return all(one.in_place for one in applied)


def _applied(conn: psycopg.Connection[TupleRow]) -> list[_Applied] | None:
    """Returns the migrations that the database has; None if it was never migrated."""
    try:
        return [_Applied(*row) for row in conn.execute(_QUERIES["applied"].on())]
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName):
        return None
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_granted(conn, "read", error) from error
    except psycopg.errors.UndefinedColumn:
        raise NotAnInstance(
            "the table dormouse.migration of this database was not made by Dormouse"
        ) from None


def _pending(applied: Sequence[_Applied], migrations: Sequence[Migration]) -> list[Migration]:
    known = {migration.version: migration for migration in migrations}
    if applied and applied[-1].version > len(migrations):
        raise InstanceTooNew(
            f"the database has migration {applied[-1]}, this Dormouse knows {len(migrations)} of them; "
            "upgrade Dormouse"
        )
    for one in applied:
        if known[one.version].checksum != one.checksum:
            raise InstanceError(
                f"the database was made by a Dormouse between releases: its migration {one} is not the one "
                "of this version; open it with the version that made it"
            )
    done = {one.version for one in applied}
    return [migration for migration in migrations if migration.version not in done]


def _prepare(conn: psycopg.Connection[TupleRow]) -> None:
    if foreign := conn.execute(_QUERIES["foreign_relation"].on()).fetchone():
        raise NotAnInstance(
            f"the schema 'dormouse' of this database is not Dormouse's: it holds {foreign[0]!r}; "
            "use another database"
        )
    try:
        conn.execute(_QUERIES["prepare"].on())
    except psycopg.errors.InsufficientPrivilege as error:
        raise _not_granted(conn, "make", error) from error


def _not_granted(conn: psycopg.Connection[TupleRow], verb: str, error: psycopg.Error) -> InstanceError:
    role = sql.Identifier(conn.info.user).as_string()
    return InstanceError(
        f"cannot {verb} the schema 'dormouse': {error.diag.message_primary}; have an administrator run: "
        f"create schema if not exists dormouse; grant usage, create on schema dormouse to {role}"
    )


def _apply(conn: psycopg.Connection[TupleRow], migration: Migration) -> None:
    """Applies a migration, with brief waits for locks and retries, like `run_alone`.

    Processes of the previous version may still use the tables.
    """
    record = {"version": migration.version, "name": migration.name, "checksum": migration.checksum}
    busy: psycopg.Error | None = None
    for lock_ms in impatiently(ALONE_SECONDS_MAX):
        try:
            with bounded(conn, ALONE, lock_ms=lock_ms):
                conn.execute(migration.text.encode())
                conn.execute(_QUERIES["record"].on(), record)
        except psycopg.errors.ReadOnlySqlTransaction:
            raise
        except (psycopg.errors.LockNotAvailable, *CONFLICTS) as error:
            busy = error
        except psycopg.Error as error:
            raise InstanceError(f"migration {migration} failed: {one_line(error)}") from error
        else:
            return
    raise InstanceError(
        f"migration {migration}: it could not lock its tables within {ALONE_SECONDS_MAX:g} s, because "
        f"other transactions use them (a long query, a backup, a process that hangs); nothing was changed, "
        f"try again later"
    ) from busy


@contextmanager
def locked(conn: psycopg.Connection[TupleRow], queries: Queries) -> Iterator[None]:
    """Holds the lock of the queries `lock` and `unlock` while the block runs.

    Raises InstanceError for a session of a pooler, and if another process has the lock for too long.
    """
    if isinstance(conn, Connection) and conn.is_pooled:
        raise InstanceError(
            "the database must be brought up to date, which needs a lock that a pooler does not keep: open "
            "the instance once by PostgreSQL's own address"
        )
    try:
        try:
            conn.execute(queries["lock"].on(), {"idle_ms": MIGRATING_IDLE_MS_MAX})
        except psycopg.errors.LockNotAvailable as error:
            raise InstanceError(
                "another process has been bringing the database up to date for too long; nothing was "
                f"changed, try again later ({one_line(error)})"
            ) from error
        try:
            yield
        finally:
            with suppress(psycopg.OperationalError):  # the lock ended with the session
                conn.execute(queries["unlock"].on())
                conn.execute("reset idle_session_timeout")
    except psycopg.OperationalError as error:
        if not conn.closed:
            raise
        raise InstanceError(
            f"the connection was lost while the database was brought up to date ({one_line(error)}); each "
            "step is applied as a whole or not at all: try again"
        ) from error


def settle(conn: psycopg.Connection[Any]) -> None:
    """Corrects the transaction ids of a database that was copied from another cluster.

    The caller may write all of the database and holds the lock of `locked`. A copy by rows (pg_dump, logical
    replication) keeps the transaction ids in references, in the removal log and in the records of rounds.
    The new cluster counts transactions from the beginning. Ids that it has not reached are replaced, in the
    same order. Sequences continue after the existing numbers. Copies of disks or files and pg_upgrade need no
    change: they keep ids and counter together.
    """
    with bounded(conn, ALONE):
        for condition, statements in _SETTLING:
            if conn.execute(_QUERIES[condition].on()).fetchall()[0][0]:
                for name in statements:
                    conn.execute(_QUERIES[name].on())
        conn.execute(_QUERIES["advance_sequences"].on())
        conn.execute(_QUERIES["settle"].on())
