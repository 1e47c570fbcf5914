"""The database roles in docs/security.md. Each line of its table is tried out as the role of the line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from tests.database_roles import (
    ADMINISTRATOR,
    Deployment,
    as_role,
    database_of_administrator,
    deployment,
    roles_of_aurora,
)
from tests.databases import Databases
from tests.role_probes import CAN, LARGE, OTHERWISE, PROBES, STRANGER, others_of
from tests.support.aws import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE, bring_up_to_date

PAGE = Path(__file__).parents[2] / "docs" / "security.md"


class Line(NamedTuple):
    role: str
    verb: str
    what: str


def lines() -> list[Line]:
    section = PAGE.read_text("utf-8").split("### Roles of the database\n")[1].split("\n### ")[0]
    found = re.findall(r"^\| (.+?) \| (can|cannot) \| (.+) \|$", section, re.MULTILINE)
    return [Line(*row) for row in found]


def probes_of(line: Line, keys: set[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    return [key for key in keys if key[:2] == line[:2] and line.what.startswith(key[2])]


def test_each_line_of_the_page_has_one_probe_and_each_probe_a_line() -> None:
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
def test_a_line_of_the_page_is_true(deployed: Deployment, line: Line) -> None:
    [key] = probes_of(line, set(PROBES))
    probe, role = PROBES[key], role_of(line)
    if line == ("`dormouse_schema`", CAN, line.what):
        role = OWNER_ROLE  # dormouse_schema sets the role of the owner
    wrong = [
        (statement, result)
        for statements, is_index in ((probe.statements, False), (probe.in_index, True))
        for statement in statements
        if (result := outcome(deployed.of(role, index=is_index), statement, probe.refusal))
        != ("done" if line.verb == CAN else "refused")
    ]
    assert wrong == []


def outcome(dsn: str, statement: str, refusal: type[psycopg.Error]) -> str:
    """Runs a statement and rolls it back; returns "done", "refused", or the text of an unexpected error."""
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
def test_a_role_ends_only_its_own_sessions_and_cannot_become_another_role(
    deployed: Deployment, role: str
) -> None:
    refused = psycopg.errors.InsufficientPrivilege
    with ExitStack() as opened:
        pids = {
            other: opened.enter_context(psycopg.connect(deployed.of(other))).info.backend_pid
            for other in (ADMINISTRATOR, OWNER_ROLE, RUN_ROLE, READ_ROLE)
        }
        for other, pid in pids.items():
            for verb in ("cancel", "terminate"):
                result = outcome(
                    deployed.of(role),
                    f"select pg_{verb}_backend({pid})",
                    psycopg.errors.InsufficientPrivilege,
                )
                assert result == ("done" if other == role else "refused"), (verb, other)
    others = {ADMINISTRATOR, SCHEMA_ROLE, OWNER_ROLE, RUN_ROLE, READ_ROLE, STRANGER} - {role}
    assert {
        statement: outcome(deployed.of(role), statement, refused) for statement in others_of(*sorted(others))
    } == dict.fromkeys(others_of(*sorted(others)), "refused")


def test_a_reader_can_delay_exclusive_locks(deployed: Deployment) -> None:
    with psycopg.connect(deployed.of(READ_ROLE)) as reader, psycopg.connect(deployed.of(OWNER_ROLE)) as owner:
        reader.execute("select from dormouse.made_later; select pg_advisory_lock(7236154098213001)")
        owner.execute("set lock_timeout = '50ms'")
        for held_up in ("lock table dormouse.made_later", "select pg_advisory_lock(7236154098213001)"):
            with pytest.raises(psycopg.errors.LockNotAvailable), owner.transaction():
                owner.execute(held_up)


@pytest.mark.slow
def test_code_that_the_owner_leaves_runs_in_a_session_of_the_administrator(
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
