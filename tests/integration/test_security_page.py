"""What docs/security.md says of the roles of the database: each line is done, as the role."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.postgres.roles import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE
from dormouse.schedules.migration import bring_up_to_date
from tests.database_roles import (
    ADMINISTRATOR,
    Deployment,
    as_role,
    database_of_administrator,
    deployment,
    roles_of_aurora,
)
from tests.databases import Databases, name_of

PAGE = Path(__file__).parents[2] / "docs" / "security.md"
STRANGER = "test_stranger"


class Line(NamedTuple):
    role: str
    verb: str
    what: str


class Probe(NamedTuple):
    """Statements of which each succeeds, or each is refused, in a transaction of its own that is rolled back."""

    statements: tuple[str, ...]
    in_index: tuple[str, ...] = ()
    refusal: type[psycopg.Error] = psycopg.errors.InsufficientPrivilege


DEFINITIONS = (
    "create table dormouse.x ()",
    "create table public.x ()",
    "create table x as select 1",
    "alter table dormouse.payload add column x integer",
    "alter table dormouse.payload disable trigger all",
    "alter table dormouse.payload owner to current_user",
    "alter table dormouse.tables enable row level security",
    "truncate dormouse.row_lock",
    "drop table dormouse.payload",
    "create view dormouse.x as select 1",
    "create view public.x as select 1",
    "create function dormouse.x() returns integer language sql as 'select 1'",
    "create function public.x() returns integer language sql as 'select 1'",
    "create or replace function dormouse.add_day(parent text, day date) returns boolean language sql as 'select true'",
    "alter function dormouse.add_day reset search_path",
    "create type dormouse.x as (a integer)",
    "create domain public.x as integer",
    "create operator dormouse.+ (leftarg = text, rightarg = text, function = textcat)",
    "create cast (text as integer) with inout as implicit",
    "create trigger x before insert on dormouse.tables execute function suppress_redundant_updates_trigger()",
    "create rule x as on insert to dormouse.tables do instead nothing",
    "create policy x on dormouse.tables",
    "create index on dormouse.tables ((name || name))",
    "create statistics dormouse.x on table_id, name from dormouse.tables",
    "create schema x",
    "alter schema dormouse rename to x",
    "grant all on dormouse.payload to current_user with grant option; alter default privileges for role"
    f" {SCHEMA_ROLE} grant all on tables to public",
    f"set role {SCHEMA_ROLE}",
)
TEMPORARY = ("create temp table x ()", "create temp view x as select 1", "create temp sequence x", "declare c"
             " cursor for select 1; create temporary table y as select 1")
POWERS = (
    "create role x",
    "alter role current_user createrole",
    "alter role current_user superuser",
    f"alter role {SCHEMA_ROLE} login",
    f"grant {SCHEMA_ROLE} to current_user",
    "drop extension plpgsql",
    "create publication x for all tables",
    "create event trigger x on ddl_command_start execute function suppress_redundant_updates_trigger()",
    "create language x handler plpgsql_call_handler",
    "create foreign data wrapper x",
    "alter system set fsync = off",
)
FILES = (
    "select pg_read_file('postgresql.conf')",
    "select pg_ls_dir('.')",
    "select lo_import('/etc/hostname')",
    "copy dormouse.tables to '/tmp/x'",
    "copy (select 1) to program 'true'",
    "copy dormouse.tables from '/etc/hostname'",
    "load '/tmp/x.so'",
    "set session_replication_role = replica",
    "set zero_damaged_pages = on",
)
TRIGGERS = (
    "select dormouse.void_totals()",
    "select dormouse.forget_rows()",
    "select dormouse.payload_20260305_mirror()",
)
LARGE = ("select lo_creat(-1)", "select lo_create(0)", r"select lo_from_bytea(0, '\x00')")
DROPS = tuple(f"drop database {name}" for name in ("postgres",))


def others_of(*roles: str) -> tuple[str, ...]:
    return tuple(
        statement
        for role in roles
        for statement in (f"set role {role}", f"set session authorization {role}", f"grant {role} to current_user")
    )


CAN, CANNOT = "can", "cannot"
PROBES = {
    ("the administrator", CAN, "act as `dormouse_schema`"): Probe(
        (f"set role {SCHEMA_ROLE}; create table dormouse.x ()", "create role x", "create schema x"),
    ),
    ("`dormouse_schema`", CAN, "own the schema"): Probe(
        ("do $$ begin assert not exists (select from pg_class c where relnamespace = 'dormouse'::regnamespace"
         f" and relowner <> '{SCHEMA_ROLE}'::regrole); end $$",
         "do $$ begin assert not exists (select from pg_proc where pronamespace = 'dormouse'::regnamespace"
         f" and proowner <> '{SCHEMA_ROLE}'::regrole); end $$"),
    ),
    ("`dormouse_schema`", CANNOT, "log in"): Probe(("select 1",), refusal=psycopg.OperationalError),
    ("`dormouse_owner`", CAN, "act as `dormouse_schema`"): Probe(
        ("do $$ begin assert current_user = 'dormouse_schema'; end $$",
         "create table dormouse.x (); alter table dormouse.x add column a integer; drop table dormouse.x",
         "update dormouse.tables set name = name", "delete from dormouse.payload", "drop table dormouse.payload"),
    ),
    ("`dormouse_owner`", CANNOT, "make roles"): Probe(
        (*POWERS, *TEMPORARY, "create schema x", "create database x",
         "set role none; create role x", "set role none; create temp table x ()"),
    ),
    ("`dormouse_owner`", CANNOT, "act as another"): Probe(
        (*others_of(ADMINISTRATOR, RUN_ROLE, READ_ROLE, STRANGER), *FILES),
    ),
    ("`dormouse_owner`", CANNOT, "read what index"): Probe((), ("select from dormouse.build",)),
    ("`dormouse_run`", CAN, "read and change rows"): Probe(
        ("select from dormouse.payload", "update dormouse.tables set name = name", "delete from dormouse.payload",
         "insert into dormouse.payload values ('a', 'b', 'c', '2026-03-05', 'inline', '1')",
         "update dormouse.made_later set a = 1", "lock table dormouse.tables"),
    ),
    ("`dormouse_run`", CAN, "make the partition"): Probe(
        tuple(f"select dormouse.add_day('{table}', '2999-01-01')" for table in ("removal", "payload", "ended_job")),
    ),
    ("`dormouse_run`", CAN, "make and drop"): Probe(
        (), ("create table dormouse.x (); drop table dormouse.build cascade", "create schema x"),
    ),
    ("`dormouse_run`", CANNOT, "change rows of"): Probe(
        ("update dormouse.migration set name = name", "delete from dormouse.instance",
         "insert into dormouse.migration select * from dormouse.migration"),
    ),
    ("`dormouse_run`", CANNOT, "make, alter"): Probe(DEFINITIONS),
    ("`dormouse_run`", CANNOT, "make temporary"): Probe(TEMPORARY, TEMPORARY),
    ("`dormouse_run`", CANNOT, "make roles"): Probe((*POWERS, *DROPS, "create database x")),
    ("`dormouse_run`", CANNOT, "execute a function of a trigger"): Probe(TRIGGERS),
    ("`dormouse_run`", CANNOT, "read files"): Probe(FILES),
    ("`dormouse_read`", CAN, "read rows"): Probe(
        ("select from dormouse.payload", "select from dormouse.tables", "select from dormouse.made_later",
         "select dormouse.replayed_snapshot(1)"),
    ),
    ("`dormouse_read`", CAN, "send notifications"): Probe(("notify anything", "select pg_notify('anything', '')")),
    ("`dormouse_read`", CAN, "change the password"): Probe(
        ("alter role dormouse_read password 'x'", "alter role dormouse_read set work_mem = '1MB'"),
    ),
    ("`dormouse_read`", CAN, "read what index"): Probe((), ("select from dormouse.build",)),
    ("`dormouse_read`", CANNOT, "change or lock"): Probe(
        ("update dormouse.tables set name = name", "delete from dormouse.payload", "insert into dormouse.payload"
         " values ('a', 'b', 'c', '2026-03-05', 'inline', '1')", "select from dormouse.tables for key share",
         "lock table dormouse.tables in row exclusive mode", "select nextval('dormouse.load_sequence')",
         "select setval('dormouse.load_sequence', 1)", "merge into dormouse.tables t using dormouse.tables u"
         " on t.table_id = u.table_id when matched then delete",
         "copy dormouse.tables from stdin", "comment on table dormouse.tables is 'x'"),
    ),
    ("`dormouse_read`", CANNOT, "make, alter"): Probe(DEFINITIONS),
    ("`dormouse_read`", CANNOT, "make temporary"): Probe(TEMPORARY, TEMPORARY),
    ("`dormouse_read`", CANNOT, "make roles"): Probe((*POWERS, *DROPS, "create database x")),
    ("`dormouse_read`", CANNOT, "execute functions"): Probe(
        (*TRIGGERS, "select dormouse.add_day('removal', '2999-01-01')",
         "select dormouse.lock_rows(1, 'read', gen_random_uuid(), '', 1)"),
    ),
    ("`dormouse_read`", CANNOT, "read files"): Probe(FILES),
    ("`dormouse_read`", CANNOT, "change what index"): Probe(
        (), ("delete from dormouse.build", "create table dormouse.x ()", "create table public.x ()",
             "create schema x", "select nextval('dormouse.build_number')"),
    ),
    ("every other role of the server", CAN, "connect"): Probe(("select 1",), ("select 1",)),
    ("every other role of the server", CANNOT, "see the schema"): Probe(
        ("select from dormouse.tables", "select dormouse.replayed_snapshot(1)", "create table public.x ()",
         *TEMPORARY), ("select from dormouse.build", "create table public.x ()", *TEMPORARY),
    ),
}  # fmt: skip
OTHERWISE = {
    ("`dormouse_owner`", CAN, "leave code"),
    ("`dormouse_run`", CAN, "end sessions"),
    ("`dormouse_run`", CANNOT, "act as another"),
    ("`dormouse_read`", CANNOT, "act as another"),
    ("`dormouse_read`", CAN, "hold up"),
    ("each of these, where a superuser migrates", CANNOT, "make large objects"),
    ("each of these, on Aurora and RDS", CAN, "make large objects"),
}
"""Lines that tests of their own prove, below."""


def lines() -> list[Line]:
    section = PAGE.read_text("utf-8").split("### Roles of the database\n")[1].split("\n### ")[0]
    found = re.findall(r"^\| (.+?) \| (can|cannot) \| (.+) \|$", section, re.MULTILINE)
    return [Line(*row) for row in found]


def probes_of(line: Line, keys: set[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [key for key in keys if key[:2] == line[:2] and line.what.startswith(key[2])]


def test_each_line_has_its_probe_and_each_probe_its_line() -> None:
    keys = PROBES.keys() | OTHERWISE
    found = {line: probes_of(line, keys) for line in lines()}
    assert [line for line, probes in found.items() if len(probes) != 1] == []
    assert keys == {key for probes in found.values() for key in probes}


@pytest.fixture(scope="module")
def deployed(
    server_dsn: str, databases: Databases, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    with (
        roles_of_aurora(server_dsn),
        psycopg.connect(server_dsn, autocommit=True) as superuser,
        database_of_administrator(server_dsn, databases) as dsn,
        deployment(dsn, tmp_path_factory.mktemp("lake")) as made,
    ):
        superuser.execute(f"create role {STRANGER} login")
        with psycopg.connect(made.of(OWNER_ROLE)) as conn:
            conn.execute("create table dormouse.made_later (a integer)")
        yield made
        superuser.execute(f"drop role {STRANGER}")


def role_of(line: Line) -> str:
    others = {"the administrator": ADMINISTRATOR, "every other role of the server": STRANGER}
    return others.get(line.role, line.role.strip("`"))


@pytest.mark.parametrize("line", [line for line in lines() if probes_of(line, set(PROBES))], ids=str)
def test_the_line_is_true(deployed: Deployment, line: Line) -> None:
    [key] = probes_of(line, set(PROBES))
    probe, role = PROBES[key], role_of(line)
    if line == ("`dormouse_schema`", CAN, line.what):
        role = OWNER_ROLE  # it acts as that role
    wrong = [
        (statement, told)
        for statements, is_index in ((probe.statements, False), (probe.in_index, True))
        for statement in statements
        if (told := outcome(deployed.of(role, index=is_index), statement, probe.refusal))
        != ("done" if line.verb == CAN else "refused")
    ]
    assert wrong == []


def outcome(dsn: str, statement: str, refusal: type[psycopg.Error]) -> str:
    """Runs a statement and takes it back; gives "done", "refused", or another error."""
    is_alone = statement.startswith(("create database", "drop database", "vacuum", "alter system"))
    try:
        with psycopg.connect(dsn, autocommit=is_alone) as conn:
            conn.execute(statement)
            if not is_alone:
                conn.rollback()
    except refusal:
        return "refused"
    except psycopg.Error as error:
        return f"{type(error).__name__}: {error}"
    return "done"


@pytest.mark.parametrize("role", [RUN_ROLE, READ_ROLE])
def test_a_role_ends_its_own_sessions_and_is_no_other(deployed: Deployment, role: str) -> None:
    with ExitStack() as opened:
        pids = {
            other: opened.enter_context(psycopg.connect(deployed.of(other))).info.backend_pid
            for other in (ADMINISTRATOR, OWNER_ROLE, RUN_ROLE, READ_ROLE)
        }
        for other, pid in pids.items():
            for verb in ("cancel", "terminate"):
                told = outcome(
                    deployed.of(role), f"select pg_{verb}_backend({pid})", psycopg.errors.InsufficientPrivilege
                )
                assert told == ("done" if other == role else "refused"), (verb, other)
    others = {ADMINISTRATOR, SCHEMA_ROLE, OWNER_ROLE, RUN_ROLE, READ_ROLE, STRANGER} - {role}
    refused = psycopg.errors.InsufficientPrivilege
    assert {
        statement: outcome(deployed.of(role), statement, refused) for statement in others_of(*sorted(others))
    } == dict.fromkeys(others_of(*sorted(others)), "refused")


def test_a_reader_can_hold_up_what_needs_a_table_alone(deployed: Deployment) -> None:
    with psycopg.connect(deployed.of(READ_ROLE)) as reader, psycopg.connect(deployed.of(OWNER_ROLE)) as owner:
        reader.execute("select from dormouse.made_later; select pg_advisory_lock(7236154098213001)")
        owner.execute("set lock_timeout = '50ms'")
        for held_up in ("lock table dormouse.made_later", "select pg_advisory_lock(7236154098213001)"):
            with pytest.raises(psycopg.errors.LockNotAvailable), owner.transaction():
                owner.execute(held_up)


def test_what_an_owner_leaves_runs_in_a_session_of_the_administrator(
    deployed: Deployment, server_dsn: str, databases: Databases
) -> None:
    with database_of_administrator(server_dsn, databases) as dsn:
        bring_up_to_date(dsn)
        with psycopg.connect(as_role(dsn, OWNER_ROLE)) as owner:
            owner.execute(
                "create function dormouse.evil(numeric, integer) returns numeric language plpgsql as"
                " $$ begin set role none; create schema if not exists evil;"
                " set role dormouse_schema; return $1; end $$;"
                "create operator dormouse.* (leftarg = numeric, rightarg = integer, function = dormouse.evil)"
            )
        with suppress(psycopg.Error):
            bring_up_to_date(dsn)
        with psycopg.connect(dsn) as conn:
            made_by = "select nspowner::regrole::text from pg_namespace where nspname = 'evil'"
            assert conn.execute(made_by).fetchall() == [(ADMINISTRATOR,)]


@pytest.mark.parametrize("migrates", ["a superuser", "an administrator as on RDS"])
def test_large_objects_are_forbidden_where_that_is_possible(
    deployed: Deployment, empty_dsn: str, migrates: str
) -> None:
    dsn, expected = (empty_dsn, "refused") if migrates == "a superuser" else (deployed.dsn, "done")
    if expected == "refused":
        bring_up_to_date(dsn)
    refusal = psycopg.errors.InsufficientPrivilege
    found = {
        (role, statement): outcome(as_role(dsn, role), statement, refusal)
        for role in (OWNER_ROLE, RUN_ROLE, READ_ROLE, STRANGER)
        for statement in LARGE
    }
    assert found == dict.fromkeys(found, expected)
