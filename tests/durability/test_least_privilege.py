"""An instance in a database of another team, with only the rights that the documentation grants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import quote

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import dormouse as dm
from dormouse.errors import IndexNotReady, InstanceError, InstanceReadOnly, NotAnInstance
from dormouse.postgres.migrate import MIGRATIONS, migrate
from tests.database_roles import as_role
from tests.databases import Databases
from tests.standard import OF_K

ROLE = "app"
PAGE = Path(__file__).parents[2] / "docs" / "quickstart.md"
TABLE = OF_K


def statements(database: str) -> list[str]:
    """Returns the SQL statements of the documentation, for the given database."""
    [block] = re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL)
    return [one.strip().replace("shop", database) for one in block.split(";") if one.strip()]


@contextmanager
def closed_database(databases: Databases) -> Iterator[psycopg.Connection]:
    """Yields a connection to an empty database in which other roles have no rights."""
    dsn = databases.create("template0")
    name = sql.Identifier(str(conninfo_to_dict(dsn)["dbname"]))
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("revoke all on database {} from public").format(name))
        conn.execute("revoke all on schema public from public")
        try:
            yield conn
        finally:
            conn.close()
            databases.drop(dsn)


@pytest.fixture
def admin(server_dsn: str, databases: Databases) -> Iterator[psycopg.Connection]:
    """Yields an administrator's connection to a closed database; the server also has a role that may only log
    in.
    """
    with psycopg.connect(server_dsn, autocommit=True) as server:
        server.execute(f"create role {ROLE} login")
        try:
            with closed_database(databases) as conn:
                yield conn
        finally:
            server.execute(f"drop role {ROLE}")


def granted(admin: psycopg.Connection, count: int | None = None) -> str:
    """Runs the first `count` statements of the documentation (all by default); returns the role's DSN."""
    for statement in statements(admin.info.dbname)[:count]:
        admin.execute(statement.encode())
    return as_role(admin.info.dsn, ROLE)


def test_three_grants_are_enough(
    admin: psycopg.Connection, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [one.split()[0] for one in statements("shop")] == ["create", "grant", "grant", "grant"]
    objects = (tmp_path / "objects").as_uri()
    with closed_database(databases) as index:
        granted(index)
        place = f"host={quote(index.info.host)}&port={index.info.port}"
        monkeypatch.setenv("DORMOUSE_ROW_INDEXES", f"postgresql://{ROLE}@/{index.info.dbname}?{place}")
        dsn = granted(admin)
        with dm.connect(dsn, objects) as instance:
            table = instance.create_table("t", TABLE)
            table.ingest(pa.table({"k": [1, 2, 3]}), engine="local")
            table.delete({"k": 2})
            table.compact(engine="local")
            instance.payloads.put("acme", "1", datetime.now(UTC), "request", {"a": 1})
            staff = instance.create_row_table("staff", [dm.Column("name", "STRING")])
            staff.change([dm.Insert([{"name": "Ann"}])])
            page = staff.query("select name from staff", page_rows=9, wait_seconds=60)
            assert [[*row] for row in page.rows] == [["Ann"]]
        with dm.connect(dsn, objects, read_only=True) as instance:
            assert instance.table("t").count() == 2
            assert not instance.check().problems


@pytest.mark.slow
def test_a_query_of_a_row_table_names_the_missing_right_to_create_databases(
    admin: psycopg.Connection, tmp_path: Path
) -> None:
    with dm.connect(granted(admin), (tmp_path / "objects").as_uri()) as instance:
        staff = instance.create_row_table("staff", [dm.Column("name", "STRING")])
        staff.change([dm.Insert([{"name": "Ann"}])])
        with pytest.raises(
            IndexNotReady,
            match="permission denied to create database; create it as a user with that right, or name "
            "other databases in DORMOUSE_ROW_INDEXES",
        ):
            staff.query("select name from staff", wait_seconds=3)
        with pytest.raises(IndexNotReady, match="permission denied to create database"):
            staff.upsert([{"name": "Ann"}], on=["name"])


@pytest.mark.slow
def test_a_schema_of_the_role_is_enough(admin: psycopg.Connection, tmp_path: Path) -> None:
    admin.execute(f"create schema dormouse authorization {ROLE}")
    admin.execute(f"grant connect on database {admin.info.dbname} to {ROLE}")
    with dm.connect(as_role(admin.info.dsn, ROLE), (tmp_path / "objects").as_uri()) as instance:
        assert instance.create_table("t", TABLE).count() == 0


@pytest.mark.parametrize("count", [2, 3])
def test_a_missing_right_is_named(admin: psycopg.Connection, tmp_path: Path, count: int) -> None:
    with pytest.raises(
        InstanceError,
        match=r"permission denied for schema dormouse; have an administrator run: create schema "
        r'if not exists dormouse; grant usage, create on schema dormouse to "app"$',
    ):
        dm.connect(granted(admin, count), (tmp_path / "objects").as_uri())


def test_the_error_of_a_role_without_the_right_to_create_a_schema_has_the_fix(
    admin: psycopg.Connection, tmp_path: Path
) -> None:
    admin.execute(f"grant connect on database {admin.info.dbname} to {ROLE}")
    with pytest.raises(InstanceError, match=r"permission denied for database \S+; have an administrator run"):
        dm.connect(as_role(admin.info.dsn, ROLE), (tmp_path / "objects").as_uri())


@pytest.mark.parametrize(
    "command",
    [("table", "list"), ("status",), ("check",), ("payloads", "status"), ("query", "t"), ("sql", "select 1")],
)
def test_read_only_commands_report_an_empty_database(
    empty_dsn: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], command: tuple[str, ...]
) -> None:
    code, out, error = cli(*command, "--dsn", empty_dsn, "--objects", (tmp_path / "objects").as_uri())
    assert (code, out) == (1, "")
    assert "the database has no Dormouse instance, and a read-only process makes none" in error
    assert "older" not in error and error.count("\n") == 1


@pytest.mark.slow
def test_read_only_errors_distinguish_an_older_database_from_a_foreign_one(
    empty_dsn: str, tmp_path: Path
) -> None:
    older = tmp_path / "older"
    older.mkdir()
    for path in sorted(MIGRATIONS.glob("*.sql"))[:-1]:
        (older / path.name).write_text(path.read_text())
    migrate(empty_dsn, older)
    with pytest.raises(InstanceReadOnly, match="the database is of an older Dormouse"):
        dm.connect(empty_dsn, (tmp_path / "objects").as_uri(), read_only=True)
    with pytest.raises(NotAnInstance, match="is not Dormouse's: it holds 'things'"):
        with psycopg.connect(empty_dsn) as conn:
            conn.execute("drop schema dormouse cascade")
            conn.execute("create schema dormouse")
            conn.execute("create table dormouse.things ()")
        dm.connect(empty_dsn, (tmp_path / "objects").as_uri(), read_only=True)
