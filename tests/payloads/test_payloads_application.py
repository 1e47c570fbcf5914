"""Payloads in the transaction of an application. They are stored together with its own rows, or not
at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.rows import dict_row

from dormouse.errors import (
    InstanceForbidden,
    InvalidInput,
    PayloadExpired,
    PayloadNotFound,
)
from dormouse.payloads import PayloadKey, cooling
from dormouse.payloads.keys import NESTING_MAX
from tests.applications import PUT, ROLE, application_of, requests
from tests.cooling import AT, DAY, FOLD_STEPS, STEPS, WITHIN, Model, key, leftovers, tools
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import PayloadStore


@pytest.fixture
def application(instance: Instance, dsn: str) -> Iterator[str]:
    """Yields the DSN of an application's role, which owns a table and has the documented grants."""
    with application_of(dsn) as own:
        yield own


@pytest.mark.slow
def test_a_payload_and_the_applications_row_are_stored_together_or_not_at_all(
    instance: Instance, application: str
) -> None:
    payloads = instance.payloads
    with psycopg.connect(application) as conn:
        conn.execute("insert into app.request values ('1')")
        payloads.put("t", "1", AT, "k", {"n": 1}, conn=conn)
        with pytest.raises(PayloadNotFound):  # not visible to other connections before the commit
            payloads.get("t", "1", AT, "k")
        conn.rollback()
        with pytest.raises(PayloadNotFound):
            payloads.get("t", "1", AT, "k")
        conn.execute("insert into app.request values ('2')")
        given = [("t", f"{n}", AT + timedelta(days=n % 3), "k", n) for n in range(2, 9)]
        payloads.put_many([*given, ("t", "2", given[0][2], "k", "the last")], conn=conn)
        conn.commit()
    assert requests(application) == ["2"]
    assert payloads.get("t", "2", given[0][2], "k") == "the last"
    assert all(payloads.get(*one[:4]) == one[4] for one in given[1:])


def test_payloads_stored_by_sql_are_read_by_python(instance: Instance, application: str) -> None:
    at = AT + timedelta(days=40)  # a day without a partition
    with psycopg.connect(application) as conn:
        conn.execute("set timezone = 'Asia/Tokyo'; set datestyle = 'German'; set search_path = app")
        conn.execute("set transaction isolation level serializable")
        with conn.transaction():
            conn.execute(PUT, ["t", "1", at, "k", '{"a": [1, 2.50, null, "é"]}'])
            conn.execute(PUT, ["t", "1", at, "k", "null"])
            conn.execute(PUT, ["t", "2", at.replace(hour=23, minute=59), "k", '"x"'])
        with pytest.raises(PayloadNotFound):
            instance.payloads.get("t", "1", at, "k")
    assert instance.payloads.get("t", "1", at, "k") is None
    assert instance.payloads.get("t", "2", at.replace(hour=23, minute=59), "k") == "x"
    assert [one.day for one in instance.payloads.days()] == [at.date()]


DEEP = "[" * NESTING_MAX + "]" * NESTING_MAX


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("given", "why"),
    [
        ((None, "i", AT, "k", "1"), "a part of its key is null"),
        (("t", "", AT, "k", "1"), "a part of its key is empty"),
        (("t", "é" * 257, AT, "k", "1"), "512 bytes each"),
        (("t", "i", "infinity", "k", "1"), "years 1 to 9999"),
        (("t", "i", "0044-03-15 BC", "k", "1"), "years 1 to 9999"),
        (("t", "i", AT, "k", None), "content is null"),
        (("t", "i", AT, "dormouse.job.request", "1"), "for jobs of Dormouse"),
        (("t", "i", AT, "k", f"[{DEEP}, 1, {'2' * 1000}]"), "nests more than 500"),
        (("t", "i", AT, "k", '{"a": ' * NESTING_MAX + "[]" + "}" * NESTING_MAX), "nests more than 500"),
        (("t", "i", AT, "k", "[-1e5000]"), "too large for its readers"),
        (("t", "i", AT, "k", f"[{'7' * 400}.5]"), "too large for its readers"),
    ],
)
def test_sql_refuses_payloads_that_cannot_be_read(application: str, given: tuple[Any, ...], why: str) -> None:
    with psycopg.connect(application) as conn, pytest.raises(pg.InvalidParameterValue, match=why):
        conn.execute(PUT, given)


@pytest.mark.slow
def test_sql_stores_payloads_at_its_limits(instance: Instance, application: str) -> None:
    numbers = "4" * 1200
    texts = [DEEP, f'[{numbers}, 1.5, 5e-324, "{numbers}.5"]']
    with psycopg.connect(application) as conn:
        for n, text in enumerate(texts):
            conn.execute(PUT, ["é" * 256, f"{n}", AT, "k", text])
    found = instance.payloads.get_many([("é" * 256, f"{n}", AT, "k") for n in range(len(texts))])
    deep, wide = found.values()
    assert repr(deep) == DEEP
    assert wide == [int(numbers), 1.5, 5e-324, f"{numbers}.5"]


@pytest.mark.slow
def test_an_application_has_no_other_right(instance: Instance, application: str) -> None:
    instance.payloads.put("t", "1", AT, "k", 1)
    with psycopg.connect(application, autocommit=True) as conn:
        for statement in (
            "select * from dormouse.payload",
            "delete from dormouse.payload",
            "select dormouse.add_day('payload', '2999-01-01')",
            "select instance_id from dormouse.instance",
        ):
            with pytest.raises(pg.InsufficientPrivilege):
                conn.execute(statement)


@pytest.mark.slow
def test_the_error_of_a_role_names_the_missing_grant(instance: Instance, application: str) -> None:
    query(instance._supplier, f"revoke execute on function put_payload, put_payloads from {ROLE}")
    refused = rf"put_payloads; as the owner of the schema: grant .* dormouse.put_payloads to {ROLE}"
    with psycopg.connect(application) as conn, pytest.raises(InstanceForbidden, match=refused):
        instance.payloads.put("t", "1", AT, "k", 1, conn=conn)


@pytest.mark.slow
def test_connections_without_a_transaction_are_refused_for_puts(
    instance: Instance, application: str, empty_dsn: str, databases: Any
) -> None:
    put = instance.payloads.put
    with pytest.raises(InvalidInput, match=r"must be a psycopg\.Connection, not object: with another driver"):
        put("t", "1", AT, "k", 1, conn=object())  # type: ignore[arg-type]
    with psycopg.connect(application, autocommit=True) as conn:
        with pytest.raises(InvalidInput, match="autocommit mode, and has begun no transaction"):
            put("t", "1", AT, "k", 1, conn=conn)
        with conn.transaction():
            put("t", "1", AT, "k", 1, conn=conn)
    with psycopg.connect(empty_dsn) as conn, pytest.raises(InvalidInput, match="is not the one of the inst"):
        put("t", "2", AT, "k", 1, conn=conn)
    with databases.lent() as other:
        query(instance._supplier, "update instance set instance_id = gen_random_uuid()")
        store = PayloadStore(instance._supplier, instance._objects)
        with (
            psycopg.connect(other) as conn,
            pytest.raises(InvalidInput, match="this database is not the one"),
        ):
            store.put("t", "2", AT, "k", 1, conn=conn)
    with pytest.raises(PayloadNotFound):
        instance.payloads.get("t", "2", AT, "k")


def test_the_kind_of_cursors_and_rows_of_the_connection_does_not_matter(
    instance: Instance, application: str
) -> None:
    for factory in (psycopg.RawCursor, psycopg.ClientCursor):
        with psycopg.connect(application, cursor_factory=factory, row_factory=dict_row) as conn:
            instance.payloads.put("t", factory.__name__, AT, "k", 'a"\\é', conn=conn)
    keys = [("t", name, AT, "k") for name in ("RawCursor", "ClientCursor")]
    assert list(instance.payloads.get_many(keys).values()) == ['a"\\é'] * 2


@pytest.mark.slow
def test_a_put_into_a_dropped_day_is_refused(instance: Instance, application: str) -> None:
    old = datetime(2020, 1, 1, tzinfo=UTC)
    instance.payloads.put("t", "1", old, "k", 1)
    with psycopg.connect(application) as conn:  # the connection has put into the day before
        instance.payloads.put("t", "2", old, "k", 1, conn=conn)
    instance.payloads.expire(old.date() + timedelta(days=1))
    with psycopg.connect(application) as conn:
        with pytest.raises(PayloadExpired):
            instance.payloads.put("t", "2", old, "k", 1, conn=conn)
        conn.rollback()
        with pytest.raises(psycopg.DatabaseError, match="2020-01-01 are past their retention") as reported:
            conn.execute(PUT, ["t", "2", old, "k", "1"])
    assert reported.value.sqlstate == "DM002"


@pytest.mark.slow
def test_a_day_is_made_outside_of_the_applications_transaction(instance: Instance, application: str) -> None:
    with psycopg.connect(application) as conn:
        instance.payloads.put("t", "1", AT, "k", 1, conn=conn)
        instance.payloads.put("t", "2", AT + timedelta(days=1), "k", 1)  # makes a day without waiting
        conn.rollback()


@contextmanager
def open_put(application: str, model: Model, name: str) -> Iterator[None]:
    """Holds a transaction open that has put payloads by Python and by SQL; commits it at the end."""
    with psycopg.connect(application) as conn:
        put = put_both(conn, model, name)
        yield
    model.expected |= put


def put_both(conn: psycopg.Connection[Any], model: Model, name: str) -> dict[PayloadKey, Any]:
    """Puts one payload from Python and another from SQL; returns both."""
    one, other = key(name), key(f"{name}-sql")
    model.payloads.put(*one, {"by": "python"}, conn=conn)
    conn.execute(PUT, [*other, '{"by": "sql"}'])
    return {one: {"by": "python"}, other: {"by": "sql"}}


Work = Callable[[Instance, Callable[[str], object]], Any]
WORKS: dict[str, tuple[Work, tuple[str, ...]]] = {
    "offload": (lambda of, step: cooling.offload(tools(of, step), None, False), STEPS),
    "fold": (lambda of, step: cooling.fold(tools(of, step), DAY), FOLD_STEPS),
}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("work", "begins", "commits"),
    [
        (work, begins, commits)
        for work, (_, steps) in WORKS.items()
        for begins, commits in [
            *((step, step) for step in steps),
            (
                "prepared",
                "page",
            ),  # the copying worker waits for it, to add the pointer of the same key
        ]
        if begins in steps and commits in steps
    ],
)
def test_a_put_of_an_application_at_any_step_of_a_day_is_kept(
    instance: Instance, application: str, work: str, begins: str, commits: str
) -> None:
    model = Model.filled(instance, 20)
    run, _ = WORKS[work]
    if work == "fold":
        assert cooling.offload(tools(instance), None, False).errors == ()
        model.put(key("a0006"), content="late")
        model.delete(key("b0001"))
    reached: list[str] = []
    opened = ExitStack()
    threads: list[threading.Thread] = []

    def begin_and_end() -> None:
        for name in ("a0002", "b0003x"):
            with open_put(application, model, name):
                pass

    def step(name: str) -> None:
        first, reached[len(reached) :] = name not in reached, [name]
        if begins == commits == name and first:
            # within the exchange's transaction, the put waits for the end of the exchange
            thread = threading.Thread(target=begin_and_end)
            thread.start()
            threads.append(thread)
            thread.join(0.05 if name in WITHIN else 60)
        elif begins == name and first:
            opened.enter_context(open_put(application, model, "a0004"))
        elif commits == name and first:
            opened.close()

    with opened:
        report = run(instance, step)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert report.errors == ()
    assert {begins, commits} <= set(reached)
    model.check()
    assert leftovers(instance) == []


@pytest.mark.slow
def test_an_exchange_waits_for_the_open_put_of_an_application(instance: Instance, application: str) -> None:
    model = Model.filled(instance, 4)
    tried = threading.Event()
    reached: list[str] = []

    def step(name: str) -> None:
        reached.append(name)
        if name == "copied":
            tried.set()

    with open_put(application, model, "a0009"):
        offload = threading.Thread(target=lambda: cooling.offload(tools(instance, step), None, False))
        offload.start()
        assert not tried.wait(0.7)  # the mirror's trigger cannot be made while a writer is active
        model.put(key("b0009"))  # other writers are not delayed
    offload.join(60)
    assert "finished" in reached
    model.check()


@pytest.mark.slow
def test_a_rolled_back_put_leaves_nothing_in_the_copy(instance: Instance, application: str) -> None:
    model = Model.filled(instance, 10)

    def step(name: str) -> None:
        if name in ("prepared", "copied", "verified"):
            with psycopg.connect(application) as conn:
                put_both(conn, model, "a0002")
                put_both(conn, model, "never")
                conn.rollback()

    assert cooling.offload(tools(instance, step), None, False).errors == ()
    model.check()
