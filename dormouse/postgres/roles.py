"""The roles of a deployed database, and the rights of each.

- `dormouse_schema` owns the schema and all in it. No user logs in as it.
- `dormouse_owner` acts as `dormouse_schema` from login on, to make, convert and drop tables.
- `dormouse_run` reads and writes rows.
- `dormouse_read` reads rows.

The last three log in with IAM if the role `rds_iam` exists. The user that migrates acts as `dormouse_schema`,
too, and is granted none of the three. Since PostgreSQL 16 it is their member anyway, because it made them.
RDS may refuse the password of an indirect member of `rds_iam`, so its next login may need a token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from dormouse.errors import InstanceError, one_line
from dormouse.postgres.connection import Supplier
from dormouse.postgres.migrate import locked
from dormouse.postgres.queries import load
from dormouse.postgres.session import (
    PEER_SETTINGS,
    SESSION_SETTINGS,
    SHORT,
    TRANSACTION,
    Isolation,
    parameters,
)

SCHEMA_ROLE = "dormouse_schema"
OWNER_ROLE = "dormouse_owner"
RUN_ROLE = "dormouse_run"
READ_ROLE = "dormouse_read"
_LOGINS = (OWNER_ROLE, RUN_ROLE, READ_ROLE)
_SETTINGS = {
    **SESSION_SETTINGS,
    "default_transaction_isolation": Isolation.READ_COMMITTED.value,
    **PEER_SETTINGS,
    **{name: str(limit) for name, limit in SHORT.items()},
}
_VERSIONS = {TRANSACTION: 170_000}
"""The settings that need a later version of PostgreSQL than the oldest supported one."""

_QUERIES = load(__file__, "roles")


def next_xid(conn: psycopg.Connection[Any]) -> int:
    """Returns the first transaction id that the database has not used."""
    return int(conn.execute(_QUERIES["next_xid"].on()).fetchall()[0][0])


def make_roles(conn: psycopg.Connection[Any]) -> None:
    """Makes the missing roles, and gives their sessions the standard settings."""
    conn.execute(_QUERIES["make_roles"].on())
    for role in _LOGINS:
        # an RDS Proxy takes no settings from its clients
        for name, value in _SETTINGS.items():
            if conn.info.server_version >= _VERSIONS.get(name, 0):
                _set(conn, role, name, value)
    _set(conn, OWNER_ROLE, "role", SCHEMA_ROLE)


def make_schema(conn: psycopg.Connection[Any]) -> None:
    """Makes the schema for its role, unless it exists."""
    conn.execute(_QUERIES["make_schema"].on())


def _set(conn: psycopg.Connection[Any], role: str, name: str, value: str) -> None:
    database = str(conn.info.dbname)
    query = _QUERIES["set"].literally(value=value)
    conn.execute(query.on(role=role, database=database, name=name))


def make_database(conn: psycopg.Connection[Any], name: str) -> None:
    """Makes a database unless it exists, with texts that are compared byte by byte."""
    if not conn.execute(_QUERIES["database"].on(), {"name": name}).fetchone():
        # another process may make it first
        with suppress(psycopg.errors.DuplicateDatabase, psycopg.errors.UniqueViolation):
            conn.execute(_QUERIES["make_database"].on(database=name))


def in_database(dsn: str, name: str) -> str:
    """Returns the DSN with another database of the same server."""
    return make_conninfo("", **{**parameters(dsn), "dbname": name})


def let_make_tables(conn: psycopg.Connection[Any]) -> None:
    """Allows the role that writes rows to make schemas and tables in this database."""
    conn.execute(_QUERIES["let_make_tables"].on(database=str(conn.info.dbname)))


def adopt(conn: psycopg.Connection[Any]) -> int:
    """Makes the schema's role the owner of all objects in the schema; returns how many had other owners.

    Each object is changed in a transaction of its own, because thousands of locks at once are too many.
    """
    statements = [text for (text,) in conn.execute(_QUERIES["owned_by_others"].on()).fetchall()]
    for text in statements:
        conn.execute(sql.SQL(text))
    return len(statements)


def acting_as_schema(dsn: str) -> str:
    """Returns the DSN with a setting that makes its sessions act as the owner of the schema."""
    given = parameters(dsn)
    return make_conninfo("", **{**given, "options": f"{given.get('options') or ''} -c role={SCHEMA_ROLE}"})


def grant(supplier: Supplier) -> None:
    """Grants the rights of the other roles. The supplier's sessions act as the owner of the schema."""
    with supplier.connection() as conn:
        conn.execute(_QUERIES["grant"].on())


@contextmanager
def alone(supplier: Supplier) -> Iterator[psycopg.Connection[Any]]:
    """Yields a connection under a lock, so that one process at a time makes roles and migrates."""
    with supplier.connection() as conn, locked(conn, _QUERIES):
        yield conn


@contextmanager
def privileged() -> Iterator[None]:
    """Converts the error for a missing right, in the block of `with`, to InstanceError with advice."""
    try:
        yield
    except psycopg.errors.InsufficientPrivilege as error:
        raise InstanceError(
            f"the user lacks a right that a migration needs: {one_line(error)}; use the database's "
            "administrator"
        ) from None
