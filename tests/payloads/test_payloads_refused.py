"""Payloads that are refused in the transaction of an application, which can continue afterwards."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from dormouse.errors import InstanceForbidden, InvalidPayload, PayloadExpired, PayloadNotFound
from tests.applications import PUT, ROLE, application_of, requests
from tests.cooling import AT
from tests.stored import query
from tests.support.api import Instance


@pytest.fixture
def application(instance: Instance, dsn: str) -> Iterator[str]:
    """Yields the DSN of an application's role, which owns a table and has the documented grants."""
    with application_of(dsn) as own:
        yield own


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("t", "bad", AT, "dormouse.x", 1), InvalidPayload),
        (("t", "bad", AT, "k", float("nan")), InvalidPayload),
        (("t", "bad", AT, "k", "\0"), InvalidPayload),
        (("", "bad", AT, "k", 1), InvalidPayload),
        (
            ("t", "bad", AT, "k", sys.float_info.max),
            InvalidPayload,
        ),  # Python accepts it, and only the SQL function refuses it
        (("t", "bad", datetime(2020, 1, 1, tzinfo=UTC), "k", 1), PayloadExpired),
    ],
    ids=["kind", "nan", "nul", "tenant", "number", "expired"],
)
def test_a_refused_payload_leaves_the_applications_transaction_as_it_was(
    instance: Instance, application: str, given: Any, error: type[Exception]
) -> None:
    payloads = instance.payloads
    payloads.put("t", "old", datetime(2020, 1, 1, tzinfo=UTC), "k", 1)
    payloads.expire(datetime(2020, 1, 2, tzinfo=UTC).date())
    with psycopg.connect(application) as conn:
        with pytest.raises(error):  # the first statement of a transaction
            payloads.put(*given, conn=conn)
        conn.execute("insert into app.request values ('own')")
        payloads.put("t", "1", AT, "k", "kept", conn=conn)
        for put in (
            lambda: payloads.put(*given, conn=conn),
            lambda: payloads.put_many([("t", "2", AT, "k", 1), given], conn=conn),
        ):
            with pytest.raises(error):
                put()
    assert requests(application) == ["own"]
    assert payloads.get("t", "1", AT, "k") == "kept"
    with pytest.raises(PayloadNotFound):
        payloads.get("t", "2", AT, "k")


def test_a_refused_role_leaves_the_applications_transaction_as_it_was(
    instance: Instance, application: str
) -> None:
    query(instance._supplier, f"revoke execute on function put_payload, put_payloads from {ROLE}")
    with psycopg.connect(application) as conn:
        conn.execute("insert into app.request values ('own')")
        with pytest.raises(InstanceForbidden):
            instance.payloads.put("t", "1", AT, "k", 1, conn=conn)
    assert requests(application) == ["own"]


def test_kinds_of_dormouse_are_refused_without_a_connection_too(instance: Instance) -> None:
    with pytest.raises(InvalidPayload, match=r"kinds that begin with 'dormouse\.' are for jobs"):
        instance.payloads.put("t", "1", AT, "dormouse.x", 1)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("text", "sqlstate"), [("{", "22P02"), ('"\\u0000"', "22P05"), ('"\\ud800"', "22P02"), ("", "22P02")]
)
def test_text_that_is_not_jsonb_raises_the_error_of_postgresql(
    application: str, text: str, sqlstate: str
) -> None:
    with psycopg.connect(application) as conn, pytest.raises(psycopg.DatabaseError) as reported:
        conn.execute(PUT, ["t", "1", AT, "k", text])
    assert reported.value.sqlstate == sqlstate


def test_the_error_names_the_grants_of_each_owner(instance: Instance, application: str, dsn: str) -> None:
    """An administrator owns the schema. The role with which Dormouse connects owns the functions."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(
            f"create role {ROLE}_admin; create role {ROLE}_owner; grant {ROLE}_owner to current_user"
        )
        try:
            conn.execute(
                f"revoke all on schema dormouse from {ROLE}; alter schema dormouse owner to {ROLE}_admin"
            )
            conn.execute(f"grant usage, create on schema dormouse to {ROLE}_owner")
            conn.execute(
                f"revoke execute on function dormouse.put_payload, dormouse.put_payloads from {ROLE}"
            )
            for function in (
                "put_payload(text, text, timestamptz, text, jsonb)",
                "put_payloads(text[], text[], timestamptz[], text[], jsonb[], uuid)",
            ):
                conn.execute(f"alter function dormouse.{function} owner to {ROLE}_owner")
            usage = f"grant usage on schema dormouse to {ROLE}"
            execute = f"grant execute on function dormouse.put_payload, dormouse.put_payloads to {ROLE}"
            reported = f"as the owner of the schema: {usage}; as the owner of the functions, .*: {execute}"
            with psycopg.connect(application) as own, pytest.raises(InstanceForbidden, match=reported):
                instance.payloads.put("t", "1", AT, "k", 1, conn=own)
            conn.execute(f"set role {ROLE}_owner")
            conn.execute(usage)  # PostgreSQL only warns that this grant has no effect
            conn.execute(execute)
            with (
                psycopg.connect(application) as own,
                pytest.raises(InstanceForbidden, match="schema dormouse"),
            ):
                instance.payloads.put("t", "1", AT, "k", 1, conn=own)
            conn.execute(f"reset role; set role {ROLE}_admin")
            conn.execute(usage)
            conn.execute("reset role")
            has = f"select has_function_privilege('{ROLE}', oid, 'execute') from pg_proc"
            assert conn.execute(f"{has} where proname ~ '^put_payload'").fetchall() == [(True,), (True,)]
            with psycopg.connect(application) as own, own.transaction():
                assert own.execute("select 'dormouse.put_payload'::regproc::text").fetchone()
        finally:
            conn.execute("reset role")
            conn.execute(f"reassign owned by {ROLE}_admin, {ROLE}_owner to current_user")
            conn.execute(f"drop owned by {ROLE}_admin, {ROLE}_owner; drop role {ROLE}_admin, {ROLE}_owner")
