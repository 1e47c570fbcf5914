"""The roles of a deployed database, and an administrator that is no superuser, as on Aurora."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.postgres.roles import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE
from tests.databases import Databases

ADMINISTRATOR = "test_administrator"


@contextmanager
def roles_of_aurora(server_dsn: str) -> Iterator[None]:
    """Makes the roles of a new Aurora cluster, and drops Dormouse's roles with them at the end."""
    ours = (OWNER_ROLE, RUN_ROLE, READ_ROLE, SCHEMA_ROLE)
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute("create role rds_iam nologin")
        conn.execute(f"create role {ADMINISTRATOR} login createrole createdb")
        conn.execute(f"grant rds_iam to {ADMINISTRATOR} with admin option")
        conn.execute(f"revoke rds_iam from {ADMINISTRATOR}")
        conn.execute(f"grant rds_iam to {ADMINISTRATOR} with admin true, inherit false, set false")
        for role in ours:
            conn.execute(f"drop role if exists {role}")
        yield
        for role in (*ours, ADMINISTRATOR, "rds_iam"):
            conn.execute(f"drop role if exists {role}")


@contextmanager
def database_of_administrator(server_dsn: str, databases: Databases) -> Iterator[str]:
    """Makes an empty database that the administrator owns; gives the administrator's DSN."""
    dsn = databases.create("template0")
    name = str(conninfo_to_dict(dsn)["dbname"])
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(
            sql.SQL("alter database {} owner to {}").format(*map(sql.Identifier, (name, ADMINISTRATOR)))
        )
    yield as_role(dsn, ADMINISTRATOR)
    databases.drop(dsn)


def as_role(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role)
