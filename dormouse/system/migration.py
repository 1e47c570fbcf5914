"""Brings a database up to date: its schema, the roles that work on it, and what they may do.

`dormouse_schema` owns the schema and all in it, and nobody logs in as it. `dormouse_owner` acts as it from
login on, to make, convert and drop tables; `dormouse_run` reads and writes rows. Both log in with IAM where
there is `rds_iam`. Whoever migrates acts as `dormouse_schema` too, and must be no member of the two: a member
of a member of `rds_iam` cannot log in with a password any more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dormouse.errors import InstanceError
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.connection import SESSION_SETTINGS, Isolation, Supplier
from dormouse.postgres.migrate import MIGRATIONS, Migration, lacking
from dormouse.postgres.opening import parameters
from dormouse.postgres.queries import load

SCHEMA_ROLE = "dormouse_schema"
OWNER_ROLE = "dormouse_owner"
RUN_ROLE = "dormouse_run"
_LOGINS = (OWNER_ROLE, RUN_ROLE)
_SETTINGS = {**SESSION_SETTINGS, "default_transaction_isolation": Isolation.READ_COMMITTED.value}
_QUERIES = load(__file__, "migration")


@dataclass(frozen=True, slots=True)
class MigrationReport:
    """The migrations that were applied, and how many things the schema's role owns from now on."""

    applied: tuple[Migration, ...]
    adopted: int

    def __str__(self) -> str:
        names = ", ".join(map(str, self.applied)) or "none"
        return f"applied migrations: {names}; things given to {SCHEMA_ROLE}: {self.adopted}"


Connecting = Callable[[str], ConnectionSupplier]


def bring_up_to_date(
    dsn: str, connecting: Connecting = ConnectionSupplier, folder: Path = MIGRATIONS
) -> MigrationReport:
    """Migrates the database, and makes its roles; safe to run again, and twice at once.

    `dsn` is of a role that may make roles, and owns the database. Raises InstanceTooNew, and has changed
    nothing then, when the database is newer than this Dormouse; NotAnInstance and InstanceError as `migrate`
    does, also when the role may not do what must be done.
    """
    with closing(connecting(dsn)) as supplier, _alone(supplier) as conn, _privileged():
        lacking(supplier, folder)
        _make_roles(conn)
        adopted = _adopt(conn)
        with closing(connecting(_acting_as_schema(dsn))) as owner:
            applied = migrate(owner, folder)
            with owner.connection() as acting:
                acting.execute(_QUERIES["grant"].on())
    return MigrationReport(tuple(applied), adopted)


def _make_roles(conn: psycopg.Connection[Any]) -> None:
    conn.execute(_QUERIES["make_roles"].on())
    for role in _LOGINS:
        # an RDS Proxy takes no settings from those who connect
        for name, value in _SETTINGS.items():
            _set(conn, role, name, value)
    _set(conn, OWNER_ROLE, "role", SCHEMA_ROLE)


def _set(conn: psycopg.Connection[Any], role: str, name: str, value: str) -> None:
    database = str(conn.info.dbname)
    query = _QUERIES["set"].literally(value=value)
    conn.execute(query.on(role=role, database=database, name=name))


def _adopt(conn: psycopg.Connection[Any]) -> int:
    """Gives what others own of the schema to its role, each by itself: thousands of locks are too many."""
    statements = [text for (text,) in conn.execute(_QUERIES["owned_by_others"].on()).fetchall()]
    for text in statements:
        conn.execute(sql.SQL(text))
    return len(statements)


def _acting_as_schema(dsn: str) -> str:
    given = parameters(dsn)
    return make_conninfo("", **{**given, "options": f"{given.get('options') or ''} -c role={SCHEMA_ROLE}"})


@contextmanager
def _alone(supplier: Supplier) -> Iterator[psycopg.Connection[Any]]:
    """A connection, while no other brings this database up to date."""
    with supplier.connection() as conn:
        conn.execute(_QUERIES["lock"].on())
        try:
            yield conn
        finally:
            if not conn.closed:
                conn.execute(_QUERIES["unlock"].on())


@contextmanager
def _privileged() -> Iterator[None]:
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        reason = " ".join(str(error).split())
        raise InstanceError(
            f"the user may not do what a migration needs: {reason}; use the database's administrator"
        ) from None
