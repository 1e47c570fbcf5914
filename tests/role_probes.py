"""Statements that prove what docs/security.md says about roles, by role, verb and first words."""

from __future__ import annotations

from typing import NamedTuple

import psycopg

from tests.database_roles import ADMINISTRATOR
from tests.support.aws import READ_ROLE, RUN_ROLE, SCHEMA_ROLE

STRANGER = "test_stranger"
CAN, CANNOT = "can", "cannot"


class Probe(NamedTuple):
    """A group of statements that all succeed, or are all refused. Each runs in a transaction that is rolled
    back.
    """

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
    "create or replace function dormouse.add_day(parent text, day date) returns boolean language sql"
    " as 'select true'",
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
TEMPORARY = (
    "create temp table x ()",
    "create temp view x as select 1",
    "create temp sequence x",
    "declare c cursor for select 1; create temporary table y as select 1",
)
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
PAYLOAD_KEYS_CALLS = tuple(
    f"select dormouse.{name}(array['t'], array['i'], array['2999-01-03'::timestamptz], array['k'])"
    for name in ("find_payloads", "delete_payloads")
)
SPENDING = (
    "select pg_current_xact_id()",
    "select pg_logical_emit_message(false, 'x', repeat('x', 1000))",
    "select pg_sleep(0.01)",
)
LARGE = ("select lo_creat(-1)", "select lo_create(0)", r"select lo_from_bytea(0, '\x00')")


def others_of(*roles: str) -> tuple[str, ...]:
    return tuple(
        statement
        for role in roles
        for statement in (
            f"set role {role}",
            f"set session authorization {role}",
            f"grant {role} to current_user",
        )
    )


PROBES = {
    ("the administrator", CAN, "act as `dormouse_schema`"): Probe(
        (f"set role {SCHEMA_ROLE}; create table dormouse.x ()", "create role x", "create schema x"),
    ),
    ("`dormouse_schema`", CAN, "own the schema"): Probe(
        (
            "do $$ begin assert not exists (select from pg_class"
            " where relnamespace = 'dormouse'::regnamespace"
            f" and relowner <> '{SCHEMA_ROLE}'::regrole); end $$",
            "do $$ begin assert not exists (select from pg_proc where pronamespace = 'dormouse'::regnamespace"
            f" and proowner <> '{SCHEMA_ROLE}'::regrole); end $$",
        ),
    ),
    ("`dormouse_schema`", CANNOT, "log in"): Probe(("select 1",), refusal=psycopg.OperationalError),
    ("`dormouse_owner`", CAN, "act as `dormouse_schema`"): Probe(
        (
            "do $$ begin assert current_user = 'dormouse_schema'; end $$",
            "create table dormouse.x (); alter table dormouse.x add column a integer; drop table dormouse.x",
            "update dormouse.tables set name = name",
            "delete from dormouse.payload",
            "drop table dormouse.payload",
        ),
    ),
    ("`dormouse_owner`", CANNOT, "make roles"): Probe(
        (
            *POWERS,
            *TEMPORARY,
            "create schema x",
            "create database x",
            "set role none; create role x",
            "set role none; create temp table x ()",
        ),
    ),
    ("`dormouse_owner`", CANNOT, "act as another"): Probe(
        (*others_of(ADMINISTRATOR, RUN_ROLE, READ_ROLE, STRANGER), *FILES),
    ),
    ("`dormouse_owner`", CANNOT, "read what index"): Probe((), ("select from dormouse.build",)),
    ("`dormouse_run`", CAN, "read and change rows"): Probe(
        (
            "select from dormouse.payload",
            "update dormouse.tables set name = name",
            "delete from dormouse.payload",
            "insert into dormouse.payload values ('a', 'b', 'c', '2026-03-05', 'inline', '1')",
            "update dormouse.made_later set a = 1",
            "lock table dormouse.tables",
        ),
    ),
    ("`dormouse_run`", CAN, "make the partition"): Probe(
        tuple(
            f"select dormouse.add_day('{one}', '2999-01-01')" for one in ("removal", "payload", "ended_job")
        ),
    ),
    ("`dormouse_run`", CAN, "keep, find and delete payloads"): Probe(
        (
            "select dormouse.put_payload('t', 'i', '2999-01-03', 'k', '1')",
            *PAYLOAD_KEYS_CALLS,
        ),
    ),
    ("`dormouse_run`", CAN, "make and drop"): Probe(
        (),
        ("create table dormouse.x (); drop table dormouse.build cascade", "create schema x"),
    ),
    ("`dormouse_run`", CAN, "change the password"): Probe(
        ("alter role dormouse_run password 'x'", "alter role dormouse_run set work_mem = '1MB'", *SPENDING),
    ),
    ("`dormouse_read`", CAN, "spend"): Probe(SPENDING),
    ("`dormouse_run`", CANNOT, "change rows of"): Probe(
        (
            "update dormouse.migration set name = name",
            "delete from dormouse.instance",
            "insert into dormouse.migration select * from dormouse.migration",
        ),
    ),
    ("`dormouse_run`", CANNOT, "make, alter"): Probe(DEFINITIONS),
    ("`dormouse_run`", CANNOT, "make temporary"): Probe(TEMPORARY, TEMPORARY),
    ("`dormouse_run`", CANNOT, "make roles"): Probe((*POWERS, "drop database postgres", "create database x")),
    ("`dormouse_run`", CANNOT, "execute a function of a trigger"): Probe(TRIGGERS),
    ("`dormouse_run`", CANNOT, "read files"): Probe(FILES),
    ("`dormouse_read`", CAN, "read rows"): Probe(
        (
            "select from dormouse.payload",
            "select from dormouse.tables",
            "select from dormouse.made_later",
            "select dormouse.replayed_snapshot(1)",
        ),
    ),
    ("`dormouse_read`", CAN, "send notifications"): Probe(
        ("notify anything", "select pg_notify('anything', '')"),
    ),
    ("`dormouse_read`", CAN, "change the password"): Probe(
        ("alter role dormouse_read password 'x'", "alter role dormouse_read set work_mem = '1MB'"),
    ),
    ("`dormouse_read`", CAN, "read what index"): Probe((), ("select from dormouse.build",)),
    ("`dormouse_read`", CANNOT, "change or lock"): Probe(
        (
            "update dormouse.tables set name = name",
            "delete from dormouse.payload",
            "insert into dormouse.payload values ('a', 'b', 'c', '2026-03-05', 'inline', '1')",
            "select from dormouse.tables for key share",
            "lock table dormouse.tables in row exclusive mode",
            "select nextval('dormouse.load_sequence')",
            "select setval('dormouse.load_sequence', 1)",
            "merge into dormouse.tables t using dormouse.tables u"
            " on t.table_id = u.table_id when matched then delete",
            "copy dormouse.tables from stdin",
            "comment on table dormouse.tables is 'x'",
        ),
    ),
    ("`dormouse_read`", CANNOT, "make, alter"): Probe(DEFINITIONS),
    ("`dormouse_read`", CANNOT, "make temporary"): Probe(TEMPORARY, TEMPORARY),
    ("`dormouse_read`", CANNOT, "make roles"): Probe(
        (*POWERS, "drop database postgres", "create database x")
    ),
    ("`dormouse_read`", CANNOT, "execute functions"): Probe(
        (
            *TRIGGERS,
            "select dormouse.add_day('removal', '2999-01-01')",
            "select dormouse.put_payload('t', 'i', '2999-01-03', 'k', '1')",
            *PAYLOAD_KEYS_CALLS,
            "select dormouse.lock_rows(1, 'read', gen_random_uuid(), '', 1)",
        ),
    ),
    ("`dormouse_read`", CANNOT, "read files"): Probe(FILES),
    ("`dormouse_read`", CANNOT, "change what index"): Probe(
        (),
        (
            "delete from dormouse.build",
            "create table dormouse.x ()",
            "create table public.x ()",
            "create schema x",
            "select nextval('dormouse.build_number')",
        ),
    ),
    ("every other role of the server", CAN, "connect"): Probe(("select 1",), ("select 1",)),
    ("every other role of the server", CANNOT, "see the schema"): Probe(
        (
            "select from dormouse.tables",
            "select dormouse.replayed_snapshot(1)",
            "create table public.x ()",
            *TEMPORARY,
        ),
        ("select from dormouse.build", "create table public.x ()", *TEMPORARY),
    ),
}
OTHERWISE = {
    ("`dormouse_owner`", CAN, "leave code"),
    ("`dormouse_run`", CAN, "end sessions"),
    ("`dormouse_run`", CANNOT, "act as another"),
    ("`dormouse_read`", CANNOT, "act as another"),
    ("`dormouse_read`", CAN, "hold up"),
    ("each of these, where a superuser migrates", CANNOT, "make large objects"),
    ("each of these, on Aurora and RDS", CAN, "make large objects"),
}
"""The lines of the page that have their own tests."""
