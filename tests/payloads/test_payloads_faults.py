"""Failing stores, damaged objects and killed workers: nothing is lost, and each fault is reported."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from dormouse.errors import (
    ObjectNotFound,
    ObjectStoreError,
    PayloadCorrupt,
    PayloadNotFound,
    PayloadsDiffer,
    PayloadUnavailable,
)
from dormouse.payloads import cooling
from dormouse.payloads.verifying import verify
from tests.cooling import (
    AT,
    DAY,
    Model,
    collect,
    key,
    known_objects,
    leftovers,
    locations,
    names,
    stored,
    tools,
)
from tests.stored import query
from tests.support.api import Instance
from tests.support.jobs import PayloadStore
from tests.support.objects import ObjectStore


@pytest.fixture
def model(instance: Instance) -> Model:
    return Model.filled(instance, 40)


class Faulty:
    """An object store that fails for some objects."""

    def __init__(self, store: ObjectStore, **methods: Callable[..., Any]) -> None:
        self._store = store
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args: self._methods[name](self._store, *args)
        return getattr(self._store, name)


@pytest.mark.few(1)
@pytest.mark.parametrize("fault", ["throttled", "forbidden", "lost", "truncated", "other bytes"])
def test_a_failing_store_loses_nothing(instance: Instance, model: Model, fault: str) -> None:
    calls: list[str] = []

    def put(store: ObjectStore, name: str, data: bytes) -> None:
        calls.append(name)
        if len(calls) == 2 and fault in {"throttled", "forbidden"}:
            raise ObjectStoreError(f"Cannot write object {name!r}: {fault}")
        if len(calls) == 2 and fault == "lost":
            return
        if len(calls) == 2 and fault == "truncated":
            data = data[:-1]
        if len(calls) == 2 and fault == "other bytes":
            data = data[:50] + bytes([data[50] ^ 1]) + data[51:]
        store.put(name, data)

    expected = ObjectStoreError if fault in {"throttled", "forbidden"} else PayloadsDiffer
    with pytest.raises(expected) as raised:
        cooling.offload(tools(instance, objects=Faulty(instance._objects, put=put)), DAY, False)  # type: ignore[arg-type]
    assert "\n" not in str(raised.value)
    model.check()
    assert locations(instance) == {"inline": 40}
    assert instance.payloads.days()[0].error
    assert instance.payloads.offload().errors == ()
    model.check()
    assert instance.payloads.days()[0].error is None
    collect(instance)
    assert len(stored(instance)) == known_objects(instance)["live"]
    model.check()


def test_each_kind_of_damage_has_its_error(instance: Instance, model: Model) -> None:
    """One payload is damaged. The other payloads of its object can still be read."""
    cooling.offload(tools(instance, object_bytes_min=10**6, object_bytes_max=10**6), None, False)
    [name] = stored(instance)
    path = instance._objects.local_path(name)
    assert path is not None
    data = path.read_bytes()
    start, length = query(
        instance._supplier, "select byte_start, byte_length from payload where id = 'b0001'"
    )[0]

    def answers() -> dict[str, Any]:
        found = instance.payloads.get_many(model.expected)
        return {one.id: found[one] for one in found if found[one] != model.expected[one]}

    flipped = bytearray(data)
    flipped[start + length // 2] ^= 1
    path.write_bytes(flipped)
    assert {one: type(error) for one, error in answers().items()} == {"b0001": PayloadCorrupt}
    path.write_bytes(data[: start + 1])
    assert type(answers()["b0001"]) is PayloadCorrupt
    assert "a0000" not in answers()
    assert "and was written with more" in str(answers()["b0001"])
    path.unlink()
    assert {type(error) for error in answers().values()} == {PayloadCorrupt}
    assert "its object 'payloads/2026-03-05/" in str(answers()["a0000"])
    path.write_bytes(data)
    # another payload of the same length at its place
    query(
        instance._supplier,
        "update payload p set byte_start = o.byte_start, byte_length = o.byte_length, checksum = o.checksum "
        "from payload o where p.id = 'b0001' and o.id = 'b0003'",
    )
    assert 'has another payload there: ["t", "b0003"' in str(answers()["b0001"])


@pytest.mark.parametrize("folded", [False, True])
def test_swapped_objects_are_detected(instance: Instance, folded: bool) -> None:
    """The indexes of the swapped objects begin at the same offset. No payload may seem to be absent."""
    model = Model(instance.payloads)
    model.put(key("a1"), key("b1"))
    cooling.offload(tools(instance, object_bytes_min=1, object_bytes_max=1), None, False)
    if folded:
        assert cooling.fold(tools(instance), DAY).errors == ()
    swap = (
        "update payload_object o set index_start = p.index_start, byte_count = p.byte_count "
        "from payload_object p where p.object_key <> o.object_key"
    )
    paths = [Path(str(instance._objects.local_path(name))) for name in sorted(stored(instance))]
    contents = [path.read_bytes() for path in paths]
    for path, data in zip(paths, reversed(contents), strict=True):
        path.write_bytes(data)
    query(instance._supplier, swap)
    store = PayloadStore(instance._supplier, instance._objects)
    assert [type(one) for one in store.get_many(model.expected).values()] == [PayloadCorrupt] * 2
    assert store.verify(DAY).problems
    if folded:
        model.put(key("a1"), content="late")
        with pytest.raises(PayloadCorrupt, match="the payloads of another object"):
            cooling.fold(tools(instance), DAY)
    for path, data in zip(paths, contents, strict=True):
        path.write_bytes(data)
    query(instance._supplier, swap)
    model.check()
    assert store.status().mismatches == 2
    status = instance.payloads.status()
    assert 0 < (status.cold_read_ms_p50 or 0) <= (status.cold_read_ms_p99 or 0)
    assert folded or (status.bytes_in_per_second and status.bytes_out_per_second)


@pytest.mark.parametrize("state", ["open", "offloaded", "folded"])
def test_a_key_of_another_tenant_is_not_found_and_deletes_nothing(
    instance: Instance, model: Model, state: str
) -> None:
    if state != "open":
        instance.payloads.offload()
    if state == "folded":
        instance.payloads.fold(DAY)
    others = [one._replace(tenant=tenant) for one in model.expected for tenant in ("s", "t2", "T")]
    assert {type(one) for one in instance.payloads.get_many(others).values()} == {PayloadNotFound}
    instance.payloads.delete_many(others)
    model.check(*others)


@pytest.mark.parametrize("folded", [False, True])
def test_a_read_of_a_failing_store_can_be_retried(instance: Instance, model: Model, folded: bool) -> None:
    instance.payloads.offload()
    if folded:
        instance.payloads.fold(DAY)

    def fails(store: ObjectStore, name: str, *_: Any) -> bytes:
        raise ObjectStoreError(f"Cannot read object {name!r}: Please reduce your request rate")

    def gone(store: ObjectStore, name: str, *_: Any) -> bytes:
        raise ObjectNotFound(f"Object {name!r} does not exist")

    def forbidden(store: ObjectStore, name: str, *_: Any) -> bytes:
        raise ObjectStoreError(f"Cannot read object {name!r}: Access Denied")

    for method, expected in (
        (fails, PayloadUnavailable),
        (forbidden, PayloadUnavailable),
        (gone, PayloadCorrupt),
    ):
        faulty: Any = Faulty(instance._objects, get_range=method)
        found = type(instance.payloads)(instance._supplier, faulty).get_many(model.expected)
        assert {type(one) for one in found.values()} == {expected}
    model.check()


DIES = """
import os, signal, sys
import dormouse as dm
from datetime import date
from dormouse.payloads import cooling
from tests.cooling import tools
dsn, objects, work, step, count = sys.argv[1:]
with dm.connect(dsn, objects) as instance:
    left = int(count)
    def die(name):
        global left
        left -= name == step
        if name == step and not left:
            print("dies", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    given = (None, False) if work == "offload" else (date(2026, 3, 5),)
    getattr(cooling, work)(tools(instance, die, lease_seconds=1), *given)
"""


def dies(instance: Instance, dsn: str, work: str, step: str, count: int) -> None:
    arguments = [dsn, instance._objects.url, work, step, str(count)]
    done = subprocess.run(
        [sys.executable, "-c", DIES, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "dies\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "count"),
    [
            ("uploaded", 2), ("pointers", 2), ("committed", 2), ("swapping", 1), ("leased", 1),
            ("prepared", 1), ("page", 2), ("upload", 1), ("copied", 1), ("verified", 1), ("swapped", 1),
        ],
)  # fmt: skip
def test_a_killed_offload_continues(
    instance: Instance, model: Model, dsn: str, step: str, count: int
) -> None:
    dies(instance, dsn, "offload", step, count)
    model.check()
    model.put(key("a0002"), key("b"), content="between")
    model.delete(key("b0001"))
    query(instance._supplier, "update payload_day set leased_until = now()")
    report = cooling.offload(tools(instance), None, False)
    assert (report.errors, report.days_left) == ((), 0)
    model.check(key("b0001"))
    assert leftovers(instance) == []
    orphans = stored(instance) - {
        name for (name,) in query(instance._supplier, "select distinct object_key from payload")
    }
    collect(instance)
    assert orphans.isdisjoint(stored(instance)) or step not in {"uploaded", "pointers"}
    assert known_objects(instance) == {"live": len(stored(instance))}
    model.check(key("b0001"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "count"),
    [
            ("committed", 1), ("activated", 1), ("swapping", 1), ("prepared", 1), ("kept", 1),
            ("uploaded", 1), ("copied", 1), ("swapped", 1),
        ],
)  # fmt: skip
def test_a_killed_fold_continues(instance: Instance, model: Model, dsn: str, step: str, count: int) -> None:
    cooling.offload(tools(instance), None, False)
    model.put(key("a0003"), key("a00"), content="late")
    model.delete(key("a0001"))
    dies(instance, dsn, "fold", step, count)
    model.check(key("a0001"))
    model.put(key("a0002"), key("b"), content="between")
    model.delete(key("b0001"))
    query(instance._supplier, "update payload_day set leased_until = now()")
    report = cooling.fold(tools(instance), DAY)
    assert (report.errors, report.days_left) == ((), 0)
    model.check(key("b0001"), key("a0001"))
    assert leftovers(instance) == []
    cooling.fold(tools(instance), DAY)
    assert locations(instance) == {}
    model.check(key("b0001"), key("a0001"))
    assert known_objects(instance).keys() <= {"block", "dead", "pending"}


def test_a_failing_day_does_not_hold_up_others_in_short_runs(instance: Instance) -> None:
    """The copy of the failing day takes several runs, then fails, and begins again."""
    model = Model(instance.payloads)
    model.put(*(key(name, AT + timedelta(days=day)) for day in range(2) for name in names(6)))

    def put(store: ObjectStore, name: str, data: bytes) -> None:
        store.put(name, data[:-1] if f"/{DAY}/" in name else data)

    faulty: Any = Faulty(instance._objects, put=put)
    for _ in range(20):
        cooling.offload(tools(instance, objects=faulty, is_over=lambda: True), None, False)
        if instance.payloads.days()[1].work is not None:
            break
    else:
        pytest.fail("the second day is not begun")
    model.check()


@pytest.mark.slow
def test_a_fold_advances_in_each_run(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), None, False)
    model.put(key("a0003"), key("b0030"), content="late")
    slices = 0
    while cooling.fold(tools(instance, is_over=lambda: True), DAY).days_left:
        slices += 1
        assert slices < 60
    assert slices > 2
    assert locations(instance) == {}
    model.check()


@pytest.mark.slow
def test_a_lost_object_does_not_block_other_work_on_its_day(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), None, False)
    name = min(stored(instance))
    data = instance._objects.get(name)
    instance._objects.delete([name])
    for work in (instance.payloads.rehydrate, instance.payloads.fold):
        with pytest.raises(PayloadCorrupt):
            work(DAY)  # type: ignore[operator]
        assert instance.payloads.days()[0].work is None
    assert [one.object_key for one in instance.payloads.verify(DAY, rebuild=True).problems] == [name]
    instance._objects.put(name, data)

    def get(store: ObjectStore, name: str) -> bytes:
        raise ObjectStoreError(f"Cannot read object {name!r}: Access Denied")

    query(instance._supplier, "delete from payload_object where object_key = %s", name)
    with pytest.raises(ObjectStoreError):
        verify(tools(instance, objects=Faulty(instance._objects, get=get)), DAY, rebuild=True)  # type: ignore[arg-type]
    assert instance.payloads.days()[0].work is None
    assert instance.payloads.verify(DAY, rebuild=True).rebuilt == 1
    assert instance.payloads.rehydrate(DAY) == 40
    model.check()


STOPPED = DIES.replace("signal.SIGKILL", "signal.SIGSTOP")


@pytest.mark.slow
@pytest.mark.parametrize("step", ["uploaded", "pointers", "swapping"])
def test_a_stopped_worker_that_lost_its_lease_commits_nothing(
    instance: Instance, model: Model, dsn: str, step: str
) -> None:
    """SIGSTOP stops a worker in the middle of a page until its lease has expired. Another finishes
    the day.
    """
    model.put(*(key(f"a{number:04d}") for number in range(100, 400)))
    frozen = subprocess.Popen(
        [sys.executable, "-c", STOPPED, dsn, instance._objects.url, "offload", step, "1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert frozen.stdout is not None
        assert frozen.stdout.readline() == "dies\n"
        query(instance._supplier, "update payload_day set leased_until = now() - interval '1 second'")
        model.put(key("a0001"), content="meanwhile")
        assert instance.payloads.offload(DAY).days_left == 0
        model.check()
        before = query(instance._supplier, "select count(*), sum(hashtext(p::text)) from payload p")
        frozen.send_signal(signal.SIGCONT)
        _, said = frozen.communicate(timeout=120)
    finally:
        frozen.kill()
    assert frozen.returncode == 0, said  # a lost day is no failure: with more days, the run would continue
    assert query(instance._supplier, "select count(*), sum(hashtext(p::text)) from payload p") == before
    model.check()
    assert leftovers(instance) == []
    collect(instance)
    assert len(stored(instance)) == known_objects(instance)["live"]
