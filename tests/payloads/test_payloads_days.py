"""Days that expire, are made hot again, and are verified against their objects."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, date, datetime, timedelta, timezone
from typing import Any

import pytest

from dormouse.errors import (
    InvalidInput,
    PayloadExpired,
    PayloadsDiffer,
)
from dormouse.payloads import cooling, rows
from dormouse.payloads.exchange import Exchange
from tests.cooling import (
    DAY,
    FOLD_STEPS,
    Model,
    key,
    known_objects,
    leftovers,
    locations,
    stored,
    tools,
)
from tests.stored import query
from tests.support.api import Instance


@pytest.fixture
def model(instance: Instance) -> Model:
    return Model.filled(instance, 40)


@pytest.mark.slow
def test_an_expired_day_raises_its_own_error(instance: Instance, model: Model) -> None:
    instance.payloads.offload()
    assert instance.payloads.expire(DAY, dry_run=True) == ([], [])
    assert instance.payloads.expire(DAY + timedelta(1), dry_run=True) == ([DAY], [])
    assert instance.payloads.expire(DAY + timedelta(1)) == ([DAY], [])
    assert instance.payloads.expire(DAY + timedelta(1)) == ([], [])
    found = instance.payloads.get_many(model.expected)
    assert {type(one) for one in found.values()} == {PayloadExpired}
    with pytest.raises(PayloadExpired):
        model.put(key("a1"))
    instance.payloads.delete_many(model.expected)
    for work in (instance.payloads.offload, instance.payloads.fold, instance.payloads.rehydrate):
        with pytest.raises(PayloadExpired, match="payloads of 2026-03-05 are past their retention"):
            work(DAY)
    assert instance.payloads.days() == []
    assert [one.state for one in instance.payloads.days(expired=True)] == ["expired"]
    assert stored(instance)  # a reader that has just looked up a payload still finds its object
    query(instance._supplier, "update payload_object set changed_at = now() - interval '25 hours'")
    assert instance.payloads.collect().deleted
    assert stored(instance) == set()


def test_a_day_that_is_made_again_expires_again(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert instance.payloads.expire(DAY + timedelta(1)) == ([DAY], [])
    # as a put that checked the day before it expired
    with monkeypatch.context() as patched, pytest.raises(PayloadExpired):
        patched.setattr(rows, "is_expired", lambda *_: False)
        model.put(key("a1"))
    assert instance.payloads.days() == []
    query(instance._supplier, "select add_day('payload', %s)", DAY)
    assert instance.payloads.expire(DAY + timedelta(1)) == ([DAY], [])
    assert instance.payloads.days() == []


def test_days_that_are_not_over_do_not_expire(instance: Instance, model: Model) -> None:
    today = rows.DAYS.today(instance._supplier)
    with pytest.raises(InvalidInput, match="or an earlier day"):
        instance.payloads.expire(today + timedelta(days=1))
    assert instance.payloads.expire(today)[0] == [DAY]


@pytest.mark.slow
def test_a_day_with_a_worker_expires_later(instance: Instance, model: Model) -> None:
    seen: list[Any] = []

    def step(name: str) -> None:
        if name == "copied":
            seen.append(instance.payloads.expire(DAY + timedelta(1)))

    assert cooling.offload(tools(instance, step), None, False).days_left == 0
    assert seen == [([], [DAY])]
    # expiry also drops the unfinished copy
    instance.payloads.rehydrate(DAY)
    with pytest.raises(KeyboardInterrupt):
        cooling.offload(tools(instance, stop_at("committed")), DAY, False)
    assert leftovers(instance) != []
    assert instance.payloads.expire(DAY + timedelta(1)) == ([DAY], [])
    assert leftovers(instance) == []
    assert known_objects(instance).keys() == {"dead"}


def stop_at(wanted: str) -> Callable[[str], None]:
    def stop(step: str) -> None:
        if step == wanted:
            raise KeyboardInterrupt

    return stop


def test_a_worker_that_is_killed_after_the_copy_leaves_no_deleted_rows(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    forget = Exchange._forget_deleted

    def killed(*_: object) -> None:
        monkeypatch.setattr(Exchange, "_forget_deleted", forget)
        raise KeyboardInterrupt

    monkeypatch.setattr(Exchange, "_forget_deleted", killed)

    def step(name: str) -> None:
        if name == "prepared":
            model.delete(key("a0002"))

    with pytest.raises(KeyboardInterrupt):
        cooling.offload(tools(instance, step), DAY, False)
    assert cooling.offload(tools(instance), DAY, False).days_left == 0
    assert locations(instance) == {"external": len(model.expected)}
    model.check(key("a0002"))


def test_an_abandoned_copy_keeps_objects_with_pointers(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An open day can have such objects if a process was killed while it rebuilt the day."""
    cooling.offload(tools(instance), DAY, False)
    query(instance._supplier, "update payload_day set state = 'open'")
    before, every = known_objects(instance), set(model.expected)

    def differs(exchange: Exchange) -> None:
        raise PayloadsDiffer("the copy differs")

    with monkeypatch.context() as patched:
        patched.setattr(Exchange, "verify", differs)
        with pytest.raises(PayloadsDiffer):
            cooling.offload(tools(instance), DAY, False)
    assert known_objects(instance)["live"] == before["live"]
    instance.payloads.collect()
    model.check(*every)


@pytest.mark.few(1)
@pytest.mark.parametrize("folded", [False, True])
def test_a_day_is_made_hot_again(instance: Instance, model: Model, folded: bool) -> None:
    cooling.offload(tools(instance), None, False)
    if folded:
        cooling.fold(tools(instance), DAY)
    model.put(key("a0002"), key("b"), content="late")
    model.delete(key("a0004"))
    every = set(model.expected) | {key("a0004")}
    assert instance.payloads.rehydrate([key("a0006"), key("a0008"), key("a0002")]) == 2
    assert locations(instance)["inline"] == 4
    model.check(*every)
    model.delete(key("a0006"))
    assert instance.payloads.rehydrate(DAY) == 36
    assert instance.payloads.rehydrate(DAY) == 0
    model.check(*every)
    assert locations(instance) == {"inline": len(model.expected)}
    assert known_objects(instance).keys() == {"dead"}
    # it stays hot for a day, except if a caller names the day
    assert instance.payloads.offload().days == ()
    assert instance.payloads.offload(DAY).days_left == 0
    model.check(*every)


@pytest.mark.parametrize("folded", [False, True])
def test_lost_pointers_are_rebuilt_from_the_objects(instance: Instance, model: Model, folded: bool) -> None:
    cooling.offload(tools(instance), None, False)
    if folded:
        cooling.fold(tools(instance), DAY)
    well = instance.payloads.verify(DAY)
    assert (well.payloads, well.problems, well.objects) == (40, (), len(stored(instance)))
    query(instance._supplier, "delete from payload_object")
    if not folded:
        query(instance._supplier, "truncate payload")
    rebuilt = instance.payloads.verify(DAY, rebuild=True)
    assert (rebuilt.rebuilt, rebuilt.problems, rebuilt.payloads) == (well.objects, (), 40)
    model.check()
    query(
        instance._supplier, "drop table payload_20260305; delete from payload_day; delete from payload_object"
    )
    assert instance.payloads.verify(DAY, rebuild=True).rebuilt == well.objects
    model.check()
    with pytest.raises(InvalidInput, match="there are no payloads of 2020-01-01"):
        instance.payloads.verify(date(2020, 1, 1))


@pytest.mark.parametrize("lost", ["nothing", "objects"])
def test_deleted_payloads_stay_deleted_if_no_pointer_is_lost(
    instance: Instance, model: Model, lost: str
) -> None:
    """An offloaded day has no record of deletions: a deleted payload just has no pointer."""
    cooling.offload(tools(instance), None, False)
    model.delete(key("a0002"))
    model.put(key("a0004"), content="newer")
    if lost == "objects":
        query(instance._supplier, "delete from payload_object")
    found = instance.payloads.verify(DAY, rebuild=True)
    assert (found.problems, found.rebuilt) == ((), found.objects if lost == "objects" else 0)
    model.check(key("a0002"))


def test_verification_names_the_faults(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), None, False)
    first, second, third, *_ = sorted(
        stored(instance),
        key=lambda name: query(
            instance._supplier, "select first_kind, first_id from payload_object where object_key = %s", name
        ),
    )
    paths = [instance._objects.local_path(name) for name in (first, second, third)]
    assert all(paths)
    data = paths[0].read_bytes()  # type: ignore[union-attr]
    paths[0].write_bytes(data[:20] + bytes([data[20] ^ 1]) + data[21:])  # type: ignore[union-attr]
    paths[1].unlink()  # type: ignore[union-attr]
    paths[2].write_bytes(paths[2].read_bytes()[:-3])  # type: ignore[union-attr]
    query(instance._supplier, "update payload set byte_start = 1 where id = 'b0039'")
    found = instance.payloads.verify(DAY)
    reported = {(one.object_key, one.key and one.key.id, one.detail) for one in found.problems}
    assert any(
        name == first and "it does not have the bytes that were written: " in detail
        for name, _, detail in reported
    )
    assert any(name == first and id_ == "a0000" for name, id_, _ in reported)
    assert any(name == second and "it is not there, and" in detail for name, _, detail in reported)
    assert (third, None, "it does not end as an object of payloads does") in reported
    assert any(id_ == "b0039" and "names another place" in why for _, id_, why in reported)


@pytest.mark.few(2)
@pytest.mark.parametrize("step", FOLD_STEPS[::-1])
def test_a_day_that_is_being_folded_is_verified(instance: Instance, model: Model, step: str) -> None:
    """At that time, the day already has its blocks and still has its pointers."""
    cooling.offload(tools(instance), None, False)
    model.put(key("a0000"), content=1)
    seen = []

    def verified(name: str) -> None:
        # no other session can read a partition during the transaction that detaches it
        if name == step and name != "swapping":
            seen.append(instance.payloads.verify(DAY).problems)
            if name == "activated":
                raise KeyboardInterrupt

    with suppress(KeyboardInterrupt):
        cooling.fold(tools(instance, verified), DAY)
    assert set(seen) <= {()}
    assert seen or step == "swapping"
    assert instance.payloads.verify(DAY).problems == ()
    model.check()


def test_days_are_utc_at_their_edges(instance: Instance) -> None:
    """The test uses the last microsecond of a day and the first of the next, in any time zone of the
    session.
    """
    edges = [
        datetime(2026, 3, 5, 0, 0, tzinfo=UTC),
        datetime(2026, 3, 5, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2026, 3, 6, 0, 0, tzinfo=UTC),
    ]
    model = Model(instance.payloads)
    model.put(*(key("a", at.astimezone(timezone(timedelta(hours=-11)))) for at in edges))
    assert [one.payloads for one in cooling.offload(tools(instance), None, False).days] == [2, 1]
    model.check()
    for day in (DAY, DAY + timedelta(days=1)):
        cooling.fold(tools(instance), day)
    model.check()
