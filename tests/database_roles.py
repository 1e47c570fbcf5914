"""The roles of a deployed database, and an administrator that is not a superuser, as on Aurora."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.aws.schedules.migration import make_row_databases
from dormouse.payloads import cooling
from tests.cooling import AT, tools
from tests.databases import Databases
from tests.support.aws import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE, bring_up_to_date

ADMINISTRATOR = "test_administrator"


@contextmanager
def roles_of_aurora(server_dsn: str) -> Iterator[None]:
    """Makes the roles of a new Aurora cluster; at the end, drops them and Dormouse's roles."""
    ours = (OWNER_ROLE, RUN_ROLE, READ_ROLE, SCHEMA_ROLE)
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute("create role rds_iam nologin")
        conn.execute(f"create role {ADMINISTRATOR} login createrole createdb")
        conn.execute(f"grant rds_iam to {ADMINISTRATOR} with admin option")
        conn.execute(f"revoke rds_iam from {ADMINISTRATOR}")
        conn.execute(f"grant rds_iam to {ADMINISTRATOR} with admin true, inherit false, set false")
        for role in ours:
            _take_from_index_databases(conn, server_dsn, role)
            conn.execute(f"drop role if exists {role}")
        try:
            yield
        finally:
            for role in (*ours, ADMINISTRATOR, "rds_iam"):
                conn.execute(f"drop role if exists {role}")


def _take_from_index_databases(conn: psycopg.Connection[Any], server_dsn: str, role: str) -> None:
    """Revokes a role's rights in the index databases that earlier tests left on the server."""
    granted = """select distinct d.datname from pg_shdepend s
        join pg_database d on d.oid = s.dbid join pg_roles r on r.oid = s.refobjid
        where s.refclassid = 'pg_authid'::regclass and r.rolname = %s and d.datname like '%%\\_rows\\_%%'"""
    for (name,) in conn.execute(granted, [role]).fetchall():
        with psycopg.connect(make_conninfo(server_dsn, dbname=name), autocommit=True) as other:
            other.execute(f"drop owned by {role}")


@contextmanager
def database_of_administrator(server_dsn: str, databases: Databases) -> Iterator[str]:
    """Makes an empty database that the administrator owns; yields the administrator's DSN."""
    dsn = databases.create("template0")
    name = str(conninfo_to_dict(dsn)["dbname"])
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(
            sql.SQL("alter database {} owner to {}").format(*map(sql.Identifier, (name, ADMINISTRATOR)))
        )
    try:
        yield as_role(dsn, ADMINISTRATOR)
    finally:
        databases.drop(dsn)


def as_role(dsn: str, role: str) -> str:
    return make_conninfo(dsn, user=role)


@dataclass(frozen=True)
class Deployment:
    """A deployed database in which a payload day is being copied, and an index database.

    The DSNs are the administrator's. `mirror` is the function that copies each write to the day.
    """

    dsn: str
    index_dsn: str
    mirror: str
    folder: str

    def of(self, role: str, *, index: bool = False) -> str:
        return as_role(self.index_dsn if index else self.dsn, role)


class _Stopped(BaseException):
    """An error that stops the work half-way, like the death of its process."""


@contextmanager
def deployment(dsn: str, folder: Path) -> Iterator[Deployment]:
    """Deploys into a database as its administrator, and then uses each part with its own role."""
    index = f"{conninfo_to_dict(dsn)['dbname']}_indexes"
    bring_up_to_date(dsn)
    make_row_databases(dsn, [index])
    made = Deployment(dsn, make_conninfo(dsn, dbname=index), "payload_20260305_mirror", str(folder))

    def stop(step: str) -> None:
        if step == "prepared":
            raise _Stopped

    with pytest.MonkeyPatch.context() as patch:
        given = conninfo_to_dict(made.of(RUN_ROLE, index=True))
        host = f"host={given['host']}&port={given.get('port', 5432)}"
        patch.setenv("DORMOUSE_ROW_INDEXES", f"postgresql://{RUN_ROLE}@/{index}?{host}")
        with dm.connect(made.of(OWNER_ROLE), str(folder)) as instance:
            instance.create_table("t", dm.Schema(row_keys=[dm.Field("key", dm.LONG)]))
            instance.create_row_table("r", [dm.Column("n", "INTEGER")])
            instance.payloads.put("t", "i", AT, "k", 1)
            with suppress(_Stopped):
                cooling.offload(tools(instance, stop), None, False)
        with dm.connect(made.of(RUN_ROLE), str(folder)) as instance:
            rows = instance.row_table("r")
            rows.change([dm.Insert([{"n": n} for n in range(5)])])
            assert len(rows.query("select n from r", wait_seconds=60).rows) == 5
    try:
        yield made
    finally:
        _drop_when_left(dsn, index)


def _drop_when_left(dsn: str, database: str) -> None:
    """Drops a database as its owner, once all sessions have ended.

    An owner may not end the sessions of other roles.
    """
    deadline = time.monotonic() + 60
    with psycopg.connect(dsn, autocommit=True) as conn:
        while True:
            try:
                conn.execute(sql.SQL("drop database {}").format(sql.Identifier(database)))
            except psycopg.errors.ObjectInUse:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)
            else:
                return
