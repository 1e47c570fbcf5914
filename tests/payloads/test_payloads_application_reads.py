"""Payloads that an application reads and deletes in its own transaction, even during an exchange."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg
from psycopg.conninfo import make_conninfo
from psycopg.rows import dict_row
from psycopg.types.json import set_json_loads

from dormouse.errors import InstanceForbidden, InvalidInput, InvalidPayload, PayloadExpired, PayloadNotFound
from dormouse.payloads import cooling
from dormouse.payloads.exchange import Exchange
from tests.cooling import AT, DAY, FOLD_STEPS, STEPS, WITHIN, Model, key, leftovers, tools
from tests.stored import query
from tests.support.api import Instance

ROLE = "application_that_reads_payloads"
FUNCTIONS = "dormouse.put_payload, dormouse.put_payloads, dormouse.find_payloads, dormouse.delete_payloads"


@pytest.fixture
def application(instance: Instance, dsn: str) -> Iterator[str]:
    """Yields the DSN of a role with the documented grants."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(f"create role {ROLE} login; grant usage on schema dormouse to {ROLE}")
        conn.execute(f"grant execute on function {FUNCTIONS} to {ROLE}")
        yield make_conninfo(dsn, user=ROLE)
        conn.execute(f"drop owned by {ROLE} cascade; drop role {ROLE}")


def cooled(instance: Instance, state: str) -> Model:
    """Fills a day with ten payloads and brings it to `state`: open, offloaded or folded."""
    model = Model.filled(instance, 10)
    if state != "open":
        assert cooling.offload(tools(instance), None, False).errors == ()
    if state == "folded":
        assert cooling.fold(tools(instance), DAY).errors == ()
    return model


STATES = pytest.mark.parametrize("state", ["open", "offloaded", "folded"])


@pytest.mark.few(1)
@STATES
def test_a_transaction_sees_its_own_puts_and_deletes(
    instance: Instance, application: str, state: str
) -> None:
    payloads, model = instance.payloads, cooled(instance, state)
    first, second, new = key("a0000"), key("b0001"), key("a9999")
    absent = key("a5555", AT + timedelta(days=30))
    with psycopg.connect(application) as conn:
        assert payloads.get(*first, conn=conn) == model.expected[first]
        payloads.put(*new, "new", conn=conn)
        payloads.put(*second, None, conn=conn)
        payloads.delete(*first, conn=conn)
        found = payloads.get_many([new, first, second, key("b0003"), absent], conn=conn)
        assert list(found) == [new, first, second, key("b0003"), absent]
        assert [found[new], found[second], found[key("b0003")]] == ["new", None, model.expected[key("b0003")]]
        assert isinstance(found[first], PayloadNotFound)
        assert isinstance(found[absent], PayloadNotFound)
        model.check(new)  # other connections do not see it
        conn.rollback()
        assert payloads.get(*first, conn=conn) == model.expected[first]
    model.check(new)


@pytest.mark.few(1)
@STATES
def test_a_delete_is_committed_or_rolled_back_with_the_transaction(
    instance: Instance, application: str, state: str
) -> None:
    payloads, model = instance.payloads, cooled(instance, state)
    gone = [key("a0000"), key("b0001"), key("a7777"), key("a0002", AT + timedelta(days=30))]
    with psycopg.connect(application) as conn:
        payloads.delete_many(gone, conn=conn)
        conn.rollback()
        model.check()
        payloads.delete_many(gone, conn=conn)
        payloads.delete_many([], conn=conn)
    for one in gone:
        model.expected.pop(one, None)
    model.check(*gone)


@pytest.mark.slow
@pytest.mark.parametrize("commits", [True, False])
@pytest.mark.parametrize(
    ("work", "at"), [*(("offload", step) for step in STEPS), *(("fold", step) for step in FOLD_STEPS)]
)
def test_a_delete_at_any_step_of_a_day_is_kept(
    instance: Instance, application: str, work: str, at: str, commits: bool
) -> None:
    model = cooled(instance, "open" if work == "offload" else "offloaded")
    if work == "fold":  # so that the fold writes a block
        model.put(key("a0006"), content="late")
    reached: list[str] = []
    threads: list[threading.Thread] = []

    def delete() -> None:
        with psycopg.connect(application) as conn:
            model.payloads.delete(*key("a0002"), conn=conn)
            if not commits:
                conn.rollback()
        if commits:
            model.expected.pop(key("a0002"))

    def step(name: str) -> None:
        first, reached[len(reached) :] = name not in reached, [name]
        if name == at and first:
            # within the exchange's transaction, the delete waits for its end
            thread = threading.Thread(target=delete)
            thread.start()
            threads.append(thread)
            thread.join(0.05 if name in WITHIN else 60)

    if work == "offload":
        report = cooling.offload(tools(instance, step), None, False)
    else:
        report = cooling.fold(tools(instance, step), DAY)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert report.errors == ()
    assert at in reached
    model.check(key("a0002"))
    assert leftovers(instance) == []


@pytest.mark.slow
@pytest.mark.parametrize("commits", [True, False])
def test_a_put_may_end_while_the_exchange_waits_for_its_lock(
    instance: Instance, application: str, dsn: str, monkeypatch: pytest.MonkeyPatch, commits: bool
) -> None:
    payloads, model = instance.payloads, Model.filled(instance, 10)
    replaced, new = key("a0002"), key("a9999")
    wait_for_readers = Exchange.wait_for_readers

    with psycopg.connect(application) as conn:

        def wait_and_put(exchange: Exchange) -> bool:
            # after the offload has waited for all older transactions
            waited = wait_for_readers(exchange)
            payloads.put(*replaced, "other", conn=conn)
            payloads.put(*new, "new", conn=conn)
            payloads.delete(*key("b0001"), conn=conn)
            return waited

        monkeypatch.setattr(Exchange, "wait_for_readers", wait_and_put)
        reports: list[Any] = []
        offload = threading.Thread(
            target=lambda: reports.append(cooling.offload(tools(instance), None, False))
        )
        offload.start()
        wait_for_exchange(dsn)
        if commits:
            conn.commit()
        else:
            conn.rollback()
        offload.join(60)
    assert [report.errors for report in reports] == [()]
    if commits:
        model.expected |= {replaced: "other", new: "new"}
        model.expected.pop(key("b0001"))
    model.check(new, key("b0001"))
    assert leftovers(instance) == []
    assert [one.state for one in instance.payloads.days()] == ["offloaded"]


def wait_for_exchange(dsn: str) -> None:
    """Waits until a session waits for the lock with which a day is exchanged.

    It may be the parent's lock, because a write to a partition reads the bounds of its parent and may lock
    it.
    """
    waits = (
        "select from pg_locks where not granted and mode = 'AccessExclusiveLock'"
        " and relation in ('dormouse.payload'::regclass, 'dormouse.payload_20260305'::regclass)"
    )
    ends = time.monotonic() + 60
    with psycopg.connect(dsn, autocommit=True) as conn:
        while not conn.execute(waits).fetchall():
            assert time.monotonic() < ends, "no session waits for the day's lock"
            time.sleep(0.01)


@pytest.mark.slow
def test_the_error_of_a_role_names_the_missing_grants(instance: Instance, application: str) -> None:
    query(instance._supplier, f"revoke execute on function find_payloads, delete_payloads from {ROLE}")
    for call, function in ((instance.payloads.get, "find"), (instance.payloads.delete, "delete")):
        refused = rf"^{function} payloads: .*grant execute on function dormouse.{function}_payloads to {ROLE}"
        with psycopg.connect(application) as conn, pytest.raises(InstanceForbidden, match=refused):
            call("t", "1", AT, "k", conn=conn)


@pytest.mark.slow
def test_reserved_kinds_and_invalid_keys_are_refused(instance: Instance, application: str) -> None:
    for call in (instance.payloads.get, instance.payloads.delete):
        with (
            psycopg.connect(application) as conn,
            pytest.raises(InvalidPayload, match="for jobs of Dormouse"),
        ):
            call("t", "1", AT, "dormouse.job.request", conn=conn)
    for wrong in ((None, "i", AT, "k"), ("t", "i" * 513, AT, "k"), ("t", "i", "infinity", "k")):
        for function in ("find_payloads", "delete_payloads"):
            call_sql = (
                f"select from dormouse.{function}(array[%s], array[%s], array[%s]::timestamptz[], array[%s])"
            )
            with psycopg.connect(application) as conn, pytest.raises(pg.InvalidParameterValue):
                conn.execute(call_sql, wrong)


@pytest.mark.slow
def test_connections_that_have_no_transaction_are_refused(
    instance: Instance, application: str, empty_dsn: str
) -> None:
    for call in (instance.payloads.get, instance.payloads.delete):
        with (
            psycopg.connect(application, autocommit=True) as conn,
            pytest.raises(InvalidInput, match="autocommit mode"),
        ):
            call(*key("a1"), conn=conn)
        with (
            psycopg.connect(empty_dsn) as conn,
            pytest.raises(InvalidInput, match="is not the one of the inst"),
        ):
            call(*key("a1"), conn=conn)


@pytest.mark.slow
def test_a_dropped_day_differs_from_one_without_payloads(instance: Instance, application: str) -> None:
    old = datetime(2020, 1, 1, tzinfo=UTC)
    instance.payloads.put("t", "1", old, "k", 1)
    instance.payloads.expire(old.date() + timedelta(days=1))
    with psycopg.connect(application) as conn:
        with pytest.raises(PayloadExpired):
            instance.payloads.get("t", "1", old, "k", conn=conn)
        instance.payloads.delete("t", "1", old, "k", conn=conn)  # the same as without conn


@pytest.mark.slow
def test_row_factories_and_json_loaders_of_the_connection_do_not_matter(
    instance: Instance, application: str
) -> None:
    model = cooled(instance, "folded")
    with psycopg.connect(application, cursor_factory=psycopg.ClientCursor, row_factory=dict_row) as conn:
        set_json_loads(lambda data: "not what it was", conn)
        assert instance.payloads.get_many(model.expected, conn=conn) == model.expected
