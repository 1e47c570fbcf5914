"""Attempts of a deployed database's roles to get the rights of another role."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

import dormouse as dm
from dormouse.aws.schedules.migration import make_row_databases
from dormouse.jobs import claims
from dormouse.payloads import rows
from dormouse.payloads.days import _reader_of
from dormouse.postgres import migrate
from dormouse.postgres.migrate import MIGRATIONS
from dormouse.state.files import removal_log
from tests.database_roles import (
    ADMINISTRATOR,
    Deployment,
    as_role,
    database_of_administrator,
    deployment,
    roles_of_aurora,
)
from tests.databases import Databases, name_of
from tests.support.api import Instance
from tests.support.aws import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE, bring_up_to_date

FUNCTIONS = """
select p.oid::regprocedure::text,
    array['search_path=pg_catalog, dormouse, pg_temp'] <@ coalesce(p.proconfig, '{}')
        and not has_function_privilege('public', p.oid, 'execute')
        and not exists (
            select from aclexplode(p.proacl) g
            where p.prorettype = 'trigger'::regtype and g.grantee <> p.proowner
        )
from pg_proc p
where p.pronamespace = to_regnamespace('dormouse')
"""
UNSAFE = {
    "one that has no path": "create function dormouse.f() returns integer language sql as 'select 1';"
    "revoke execute on function dormouse.f from public",
    "one that finds temporary tables first": "create function dormouse.f() returns integer language sql"
    " set search_path = dormouse as 'select 1'; revoke execute on function dormouse.f from public",
    "one for all": "create function dormouse.f() returns integer language sql"
    " set search_path = pg_catalog, dormouse, pg_temp as 'select 1';"
    "grant execute on function dormouse.f to public",
    "a trigger's for a role": "create function dormouse.f() returns trigger language plpgsql"
    " set search_path = pg_catalog, dormouse, pg_temp as 'begin return null; end';"
    f"revoke execute on function dormouse.f from public; grant execute on function dormouse.f to {RUN_ROLE}",
}
EVIL = """
create function pg_temp.evil() returns trigger language plpgsql as $$
begin
    raise notice 'evil runs as %', current_user;
    return coalesce(new, old);
end
$$;
"""
EVIL_TRIGGER = "create trigger evil before insert on pg_temp.{} for each row execute function pg_temp.evil()"


@pytest.fixture(scope="module")
def rds(server_dsn: str) -> Iterator[None]:
    with roles_of_aurora(server_dsn):
        yield


@pytest.fixture
def database(rds: None, server_dsn: str, databases: Databases) -> Iterator[str]:
    with database_of_administrator(server_dsn, databases) as dsn:
        yield dsn


@pytest.fixture(scope="module")
def deployed(
    rds: None, server_dsn: str, databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Yields a deployment whose owner allows all roles to create temporary tables, for other applications."""
    with (
        database_of_administrator(server_dsn, databases) as dsn,
        deployment(dsn, tmp_path_factory.mktemp("lake")) as made,
    ):
        execute(dsn, f"grant temporary on database {name_of(dsn)} to public")
        yield made


def execute(dsn: str, *statements: str) -> list[str]:
    """Runs statements in one session; returns the notices of functions that ran."""
    heard: list[str] = []
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.add_notice_handler(lambda notice: heard.append(str(notice.message_primary)))
        for statement in statements:
            conn.execute(statement)
    return [line for line in heard if line.startswith("evil")]


def functions(dsn: str) -> dict[str, bool]:
    """Returns the functions of the schema `dormouse`, each with True if it is safe.

    A safe function has a fixed search path, and not everyone may call it.
    """
    with psycopg.connect(dsn) as conn:
        return dict(conn.execute(FUNCTIONS).fetchall())


def unsafe(dsn: str) -> list[str]:
    return [name for name, is_safe in functions(dsn).items() if not is_safe]


def test_functions_have_a_safe_search_path_and_are_not_public(deployed: Deployment) -> None:
    """The functions are those of migrations, and those made at run time."""
    found = functions(deployed.dsn)
    assert {f"dormouse.{deployed.mirror}()", "dormouse.add_day(text,date)"} <= found.keys()
    assert unsafe(deployed.dsn) == unsafe(deployed.index_dsn) == []


def test_functions_of_an_instance_without_roles_obey_the_same_rule(instance: Instance, dsn: str) -> None:
    assert len(functions(dsn)) > 10
    assert unsafe(dsn) == []


@pytest.mark.parametrize("made", UNSAFE)
def test_a_function_that_breaks_the_rule_is_found(deployed: Deployment, made: str) -> None:
    try:
        execute(deployed.of(OWNER_ROLE), UNSAFE[made])
        assert unsafe(deployed.dsn) == ["dormouse.f()"]
    finally:
        execute(deployed.of(OWNER_ROLE), "drop function dormouse.f")


def test_a_role_can_add_days_to_tables_that_have_days(deployed: Deployment) -> None:
    with psycopg.connect(deployed.of(RUN_ROLE)) as conn:
        for days in (removal_log.DAYS, claims.ENDED_DAYS, rows.DAYS):
            made = "select dormouse.add_day(%s, '2999-02-01')"
            assert conn.execute(made, [days.table]).fetchall() == [(True,)]
            assert conn.execute(made, [days.table]).fetchall() == [(False,)]


@pytest.mark.parametrize(
    "parent", ["p", "tables", "file_reference", "payload_20260305", "pg_class", 'a"b', ""]
)
def test_adding_a_day_to_another_table_is_refused(deployed: Deployment, parent: str) -> None:
    """The table `p` is a temporary table of the caller."""
    with psycopg.connect(deployed.of(RUN_ROLE), autocommit=True) as conn:
        conn.execute("create temp table p (ts timestamptz) partition by range (ts)")
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="no table of Dormouse"):
            conn.execute("select dormouse.add_day(%s, '2999-01-01')", [parent])


@pytest.mark.parametrize("table", ["removal", "payload"])
def test_adding_a_day_ignores_temporary_tables_of_the_same_name(deployed: Deployment, table: str) -> None:
    """The work has the owner's rights. So neither the caller's table nor its trigger may take part in it."""
    day = "29990301" if table == "removal" else "29990302"
    heard = execute(
        deployed.of(RUN_ROLE),
        f"create temp table {table} (ts timestamptz) partition by range (ts)",
        f"create temp table {table}_default partition of {table} default",
        f"insert into pg_temp.{table} values ('{day}')",
        f"grant all on pg_temp.{table}, pg_temp.{table}_default to public",
        EVIL,
        f"create trigger evil before delete on pg_temp.{table}_default"
        " for each row execute function pg_temp.evil()",
        "set search_path = pg_temp, dormouse, pg_catalog",
        f"select dormouse.add_day('{table}', '{day}')",
    )
    assert heard == []
    with psycopg.connect(deployed.dsn) as conn:
        found = conn.execute(f"select to_regclass('dormouse.{table}_{day}')::text").fetchall()
    assert found == [(f"dormouse.{table}_{day}",)]


@pytest.mark.parametrize("role", [RUN_ROLE, READ_ROLE])
def test_a_mirror_cannot_be_used_by_a_trigger_of_another_role(deployed: Deployment, role: str) -> None:
    mirror, written = deployed.mirror, deployed.mirror.replace("mirror", "written")
    copy = deployed.mirror.replace("mirror", "copy")
    prepare = (
        "create temp table t (like dormouse.payload)",
        "create temp table w (kind text, tenant text, id text, inserted_at timestamptz)",
        f"alter table w rename to {written}",
        f"create temp table {copy} (like dormouse.payload, primary key (kind, tenant, id, inserted_at))",
        f"grant all on pg_temp.{written}, pg_temp.{copy} to public",
        EVIL,
        EVIL_TRIGGER.format(written),
    )
    attach = f"create trigger t after insert on t for each row execute function dormouse.{mirror}()"
    write = "insert into t values ('a', 'b', 'c', now(), 'inline', '1')"
    with pytest.raises(psycopg.errors.InsufficientPrivilege, match=f"function dormouse.{mirror}"):
        execute(deployed.of(role), *prepare, attach)
    # the same after the owner has allowed the role to execute the function
    execute(deployed.of(OWNER_ROLE), f"grant execute on function dormouse.{mirror} to {role}")
    try:
        with pytest.raises(psycopg.errors.InsufficientPrivilege, match="only a day of payloads"):
            execute(deployed.of(role), *prepare, attach, write)
    finally:
        execute(deployed.of(OWNER_ROLE), f"revoke execute on function dormouse.{mirror} from {role}")


def test_a_write_to_a_day_is_mirrored_into_its_copy_and_no_temporary_table(deployed: Deployment) -> None:
    written = deployed.mirror.replace("mirror", "written")
    copy = deployed.mirror.replace("mirror", "copy")
    count = f"select count(*) from dormouse.{written}"
    with psycopg.connect(deployed.dsn) as conn:
        before = conn.execute(f"set role {SCHEMA_ROLE}").connection.execute(count).fetchall()
    heard = execute(
        deployed.of(RUN_ROLE),
        f"create temp table {written} (kind text, tenant text, id text, inserted_at timestamptz)",
        f"create temp table {copy} (like dormouse.payload, primary key (kind, tenant, id, inserted_at))",
        f"grant all on pg_temp.{written}, pg_temp.{copy} to public",
        EVIL,
        EVIL_TRIGGER.format(written),
        EVIL_TRIGGER.format(copy),
        "set search_path = pg_temp, dormouse, pg_catalog",
        "insert into dormouse.payload values ('a', 'b', 'evil', '2026-03-05 12:00+00', 'inline', '1')",
        "delete from dormouse.payload where id = 'evil'",
    )
    assert heard == []
    with psycopg.connect(deployed.dsn) as conn:
        after = conn.execute(f"set role {SCHEMA_ROLE}").connection.execute(count).fetchall()
    assert after[0][0] == before[0][0] + 2


def test_a_lock_of_any_role_does_not_prevent_an_offload(deployed: Deployment) -> None:
    """Any role can take the lock with which a worker shows that it reads the day."""
    day = date(2026, 3, 6)
    with (
        psycopg.connect(deployed.of(READ_ROLE), autocommit=True) as reader,
        dm.connect(deployed.of(OWNER_ROLE), deployed.folder) as instance,
    ):
        reader.execute("select pg_advisory_lock_shared(%(class)s, %(number)s)", _reader_of(day))
        instance.payloads.put("t", "i", datetime(2026, 3, 6, 12, tzinfo=UTC), "k", 1)
        assert instance.payloads.offload(day).errors == ()
        assert reader.execute("select 1").fetchall() == [(1,)]


def test_the_administrator_runs_no_code_of_the_owner_of_indexes(deployed: Deployment) -> None:
    """PostgreSQL prefers functions and operators whose types fit better to its own ones."""
    code = "insert into public.ran values (current_user)"
    evil = [
        f"create function dormouse.{name} language plpgsql as $$ begin {code}; return {value}; end $$"
        for name, value in (
            ("times(numeric, integer) returns numeric", "$1"),
            ("same(name, text) returns boolean", "true"),
            ("differs(text, text) returns boolean", "true"),
            ("format(text, text) returns text", "pg_catalog.format($1, $2)"),
            ("to_regrole(varchar) returns regrole", "null"),
            ("pg_has_role(text, text) returns boolean", "true"),
        )
    ]
    operators = [
        "create operator dormouse.* (leftarg = numeric, rightarg = integer, function = dormouse.times)",
        "create operator dormouse.= (leftarg = name, rightarg = text, function = dormouse.same)",
        "create operator dormouse.<> (leftarg = text, rightarg = text, function = dormouse.differs)",
    ]
    administrator = deployed.index_dsn
    execute(administrator, "create table public.ran (name text)", "grant insert on public.ran to public")
    let_in = "grant usage on schema dormouse to public"
    execute(as_role(administrator, RUN_ROLE), *evil, *operators, let_in)
    try:
        make_row_databases(deployed.dsn, [name_of(administrator)])
        with psycopg.connect(administrator) as conn:
            assert conn.execute("select distinct name from public.ran").fetchall() == []
    finally:
        execute(administrator, "drop table public.ran")


@pytest.mark.slow
def test_an_older_database_is_repaired(database: str, server_dsn: str, tmp_path: Path) -> None:
    """The repair includes functions, the mirror of a day that is being copied, and the rights of all
    roles.
    """
    older = tmp_path / "migrations"
    older.mkdir()
    for path in sorted(MIGRATIONS.glob("*.sql"))[:35]:
        shutil.copy(path, older)
    migrate(database, older)
    execute(
        database,
        "create function dormouse.payload_20260305_mirror() returns trigger language plpgsql security definer"
        " set search_path = dormouse as 'begin return null; end'",
        "create role reads_by_itself",
        "grant usage on schema dormouse to reads_by_itself",
    )
    assert len(unsafe(database)) == len(functions(database))
    migrate(database)
    assert unsafe(database) == []
    reads = {"replayed_snapshot": True, "add_day": False, "put_payload": False}
    assert may_execute(database, "reads_by_itself") == reads
    for _ in range(2):
        bring_up_to_date(database)
        assert unsafe(database) == []
        # grants that earlier deployments made
        execute(
            database,
            f"grant create, temporary on database {name_of(database)} to {SCHEMA_ROLE}",
            f"grant temporary on database {name_of(database)} to public, {RUN_ROLE}",
        )
    bring_up_to_date(database)
    assert may_execute(database, RUN_ROLE) == dict.fromkeys(reads, True)
    assert may_execute(database, READ_ROLE) == reads
    for role in ("public", RUN_ROLE, READ_ROLE, OWNER_ROLE, SCHEMA_ROLE):
        with psycopg.connect(database) as conn:
            rights = "select has_database_privilege(%s, current_database(), %s)"
            assert [conn.execute(rights, (role, right)).fetchone() for right in ("temporary", "create")] == [
                (False,),
                (False,),
            ]
    superuser = make_conninfo(server_dsn, dbname=name_of(database))
    execute(superuser, "drop owned by reads_by_itself", "drop role reads_by_itself")


def may_execute(dsn: str, role: str) -> dict[str, Any]:
    with psycopg.connect(dsn) as conn:
        return dict(
            conn.execute(
                "select proname, has_function_privilege(%s, oid, 'execute') from pg_proc"
                " where pronamespace = 'dormouse'::regnamespace"
                " and proname in ('add_day', 'put_payload', 'replayed_snapshot')",
                [role],
            ).fetchall()
        )


@pytest.mark.slow
def test_no_role_can_make_large_objects_on_a_self_managed_server(rds: None, empty_dsn: str) -> None:
    """A superuser runs the migrations there, and may revoke the functions from all roles."""
    makers = ("lo_creat(-1)", "lo_create(0)", r"lo_from_bytea(0, '\x00')")
    bring_up_to_date(empty_dsn)
    for role in (RUN_ROLE, READ_ROLE, OWNER_ROLE):
        for maker in makers:
            with pytest.raises(psycopg.errors.InsufficientPrivilege, match="lo_"):
                execute(as_role(empty_dsn, role), f"select {maker}")
    assert ADMINISTRATOR not in empty_dsn
