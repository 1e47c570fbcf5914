"""A day is cooled down: what it leaves, what it refuses, and what happens when it cannot go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dormouse.errors import (
    InvalidInput,
    ObjectNotFound,
    ObjectStoreError,
    PayloadCorrupt,
    PayloadDayBusy,
    PayloadExpired,
    PayloadsDiffer,
    PayloadUnavailable,
)
from dormouse.instance import Instance
from dormouse.objects import ObjectStore
from dormouse.payloads import cooling, exchange
from dormouse.payloads.lease import LeaseLost
from tests.cooling import (
    AT,
    DAY,
    Model,
    collect,
    days_of,
    key,
    known_objects,
    leftovers,
    locations,
    names,
    stored,
    tools,
)
from tests.state import query


@pytest.fixture
def model(instance: Instance) -> Model:
    made = Model(instance.payloads)
    made.put(*map(key, names(40)))
    return made


class Faulty:
    """A store that does something else for some objects."""

    def __init__(self, store: ObjectStore, **methods: Callable[..., Any]) -> None:
        self._store = store
        self._methods = methods

    def __getattr__(self, name: str) -> Any:
        if name in self._methods:
            return lambda *args: self._methods[name](self._store, *args)
        return getattr(self._store, name)


@pytest.mark.parametrize("rows", [1, 2, 3, 39, 40, 41, 1_000])
def test_every_row_is_moved_once_whatever_the_page(instance: Instance, model: Model, rows: int) -> None:
    [done] = cooling.offload(tools(instance, page_rows_max=rows), None, False).days
    assert (done.payloads, done.finished) == (40, True)
    model.check()
    assert locations(instance) == {"external": 40}
    assert known_objects(instance) == {"live": len(stored(instance))}
    assert leftovers(instance) == []


def test_the_partition_is_never_updated_nor_deleted_from(instance: Instance, model: Model) -> None:
    """What vacuum would have to do, in it and in its TOAST table."""
    seen: list[tuple[int, int]] = []

    def look(step: str) -> None:
        if step == "swapping":
            with instance._supplier.connection() as conn:
                conn.execute("select pg_stat_force_next_flush()")
                seen.extend(
                    conn.execute(
                        "select n_tup_upd + n_tup_del, n_dead_tup from pg_stat_all_tables "
                        "where relname = 'payload_20260305' or relid = "
                        "(select reltoastrelid from pg_class where relname = 'payload_20260305')"
                    ).fetchall()
                )

    cooling.offload(tools(instance, look), None, False)
    assert seen
    assert set(seen) == {(0, 0)}


def test_a_day_that_is_done_stays_so(instance: Instance, model: Model) -> None:
    instance.payloads.offload()
    before = (
        stored(instance),
        query(instance._supplier, "select oid from pg_class where relname = 'payload_20260305'"),
    )
    assert instance.payloads.offload().days == ()
    assert instance.payloads.offload(DAY).days == ()
    assert before == (
        stored(instance),
        query(instance._supplier, "select oid from pg_class where relname = 'payload_20260305'"),
    )


def test_the_copy_has_what_the_day_had(instance: Instance, model: Model) -> None:
    """Options, storage, indexes, constraints, grants; another schema's table of the name is left."""
    query(
        instance._supplier,
        """
        alter table payload_20260305 set (fillfactor = 70, toast.autovacuum_enabled = false);
        alter table payload_20260305 alter column content set storage external;
        grant select, insert on payload_20260305 to public;
        create schema elsewhere;
        create table elsewhere.payload_20260305_copy (only_here integer);
        create table elsewhere.payload_20260305 (only_here integer)
        """,
    )
    described = """
        select c.reloptions, t.reloptions, c.relacl::text, c.relowner,
            (select array_agg((attname, attstorage, attcompression, attnotnull)::text order by attnum)
                from pg_attribute where attrelid = c.oid and attnum > 0),
            (select array_agg((conname, contype, pg_get_constraintdef(oid))::text order by conname)
                from pg_constraint where conrelid = c.oid),
            (select array_agg(indexrelid::regclass::text) from pg_index where indrelid = c.oid),
            pg_get_expr(c.relpartbound, c.oid)
        from pg_class c left join pg_class t on t.oid = c.reltoastrelid
        where c.oid = 'dormouse.payload_20260305'::regclass
    """
    before = query(instance._supplier, described)
    assert cooling.offload(tools(instance), None, False).errors == ()
    assert query(instance._supplier, described) == before
    assert query(instance._supplier, "select count(*) from elsewhere.payload_20260305_copy") == [(0,)]


def test_a_backlog_drains_oldest_first_and_a_bad_day_holds_up_none(instance: Instance) -> None:
    model = Model(instance.payloads)
    for day in days_of(DAY, 4):
        model.put(*(key(name, datetime(day.year, day.month, day.day, tzinfo=UTC)) for name in names(6)))
    query(
        instance._supplier,
        "create function payload_20260306_mirror() returns integer language sql as 'select 1'",
    )
    report = cooling.offload(tools(instance), None, False)
    assert [one.day for one in report.days] == list(days_of(DAY, 4))
    assert [one.finished for one in report.days] == [True, False, True, True]
    assert len(report.errors) == report.days_left == 1
    assert instance.payloads.status().failing_days == instance.payloads.status().backlog_days == 1
    model.check()
    query(instance._supplier, "drop function payload_20260306_mirror()")
    assert [(one.day, one.finished) for one in instance.payloads.offload().days] == [
        (DAY + timedelta(1), True)
    ]
    assert instance.payloads.status().failing_days == 0
    model.check()


def test_a_slice_ends_in_time_and_another_goes_on(instance: Instance, model: Model) -> None:
    slices = 0
    while (report := cooling.offload(tools(instance, is_over=lambda: True), None, False)).days_left:
        assert report.errors == ()
        slices += 1
        model.put(key(f"a{slices}"), content=slices)
        model.check()
        assert slices < 60
        # the phases that wait for others go on as soon as a slice is not over at once
        if query(instance._supplier, "select phase from payload_day") == [("verify",)]:
            break
    assert slices > 2
    assert instance.payloads.offload().days_left == 0
    model.check()
    assert leftovers(instance) == []


@pytest.mark.parametrize(
    ("day", "why"),
    [
        (date(2020, 1, 1), "there are no payloads of 2020-01-01"),
        (None, "is not over"),
        (AT, "a day must be a datetime.date"),
        ("2026-03-05", "a day must be a datetime.date"),
    ],
)
def test_days_that_cannot_be_offloaded(instance: Instance, day: Any, why: str) -> None:
    today = datetime.now(UTC)
    instance.payloads.put("t", "i", today, "k", 1)
    with pytest.raises(InvalidInput, match=why):
        instance.payloads.offload(today.date() if day is None else day)
    assert instance.payloads.offload().days == ()


def test_a_day_is_worked_on_by_one(instance: Instance, model: Model) -> None:
    answers: list[Any] = []

    def other(step: str) -> None:
        if step == "prepared":
            with pytest.raises(PayloadDayBusy, match=f"worker .*:{os.getpid()} has the day until"):
                instance.payloads.offload(DAY)
            answers.append(instance.payloads.offload())

    assert cooling.offload(tools(instance, other), None, False).days_left == 0
    assert [(one.finished, one.error) for one in answers[0].days] == [(False, None)]
    model.check()


@pytest.mark.parametrize("step", ["uploaded", "committed", "copied", "verified"])
def test_who_lost_the_lease_commits_nothing(instance: Instance, model: Model, step: str) -> None:
    """As one that was frozen for longer than its lease; the other has finished the day meanwhile."""
    done: list[Any] = []
    taken = threading.Event()

    def lose(reached: str) -> None:
        if reached == step and not taken.is_set():
            taken.set()
            query(instance._supplier, "update payload_day set leased_until = now() - interval '1 second'")
            done.append(instance.payloads.offload())

    work = tools(instance, lose, lease_seconds=10_000, uploads=1)
    with pytest.raises(LeaseLost, match="another worker has taken the day over"):
        cooling.OFFLOAD.run(work, DAY)
    assert done[0].days_left == 0
    model.check()
    assert leftovers(instance) == []


@pytest.mark.parametrize("spoil", ["content", "pointer", "missing", "extra", "late"])
def test_a_copy_that_differs_takes_no_place(instance: Instance, model: Model, spoil: str) -> None:
    spoils = {
        "content": "update payload_20260305_copy set checksum = '\\x00' where id = 'a0004'",
        "pointer": "update payload_20260305_copy set location = 'inline', content = '1', object_key = null, "
        "byte_start = null, byte_length = null, checksum = null where id = 'a0004'",
        "missing": "delete from payload_20260305_copy where id = 'a0004'",
        "extra": "insert into payload_20260305_copy (kind, tenant, id, inserted_at, content) "
        "values ('a', 't', 'a0004', '2026-03-05 00:00+00', '1')",
        "late": "update payload_20260305 set content = '7' where id = 'a0004'; "
        "update payload_20260305_copy set content = '8' where id = 'a0004'",
    }
    when = "verified" if spoil == "late" else "copied"

    def do(step: str) -> None:
        if step == when:
            query(instance._supplier, spoils[spoil])

    with pytest.raises(PayloadsDiffer, match="a 'a0004' of tenant 't'") as refused:
        cooling.offload(tools(instance, do), DAY, False)
    assert [one.id for one in refused.value.keys] == ["a0004"]
    if spoil == "late":
        model.expected[key("a0004")] = 7
    model.check()
    assert leftovers(instance) == []
    assert locations(instance) == {"inline": 40}
    assert known_objects(instance).keys() == {"dead"}
    assert instance.payloads.offload().errors == ()
    model.check()


def test_a_long_reader_delays_the_exchange_and_not_the_other_way_round(
    instance: Instance, model: Model, dsn: str
) -> None:
    reading, waited = threading.Event(), threading.Event()

    def step(name: str) -> None:
        if name == "verified":
            reading.set()

    thread = threading.Thread(
        target=cooling.offload, args=(tools(instance, step, lock_timeout_ms=20), None, False)
    )
    with psycopg.connect(dsn) as conn:
        conn.execute("set search_path = dormouse")
        assert conn.execute("select count(*) from payload_20260305").fetchall() == [(40,)]
        thread.start()
        assert reading.wait(60)
        for number in range(5):  # others are not held up by the exchange that waits
            model.put(key(f"b{number}"), content=number)
            model.check()
            assert not waited.wait(0.05)
        assert thread.is_alive()
        assert locations(instance)["inline"] == 45
    thread.join(60)
    assert not thread.is_alive()
    assert locations(instance) == {"external": 40, "inline": 5}
    model.check()


def test_a_snapshot_older_than_the_copy_sees_the_day_all_the_same(
    instance: Instance, model: Model, dsn: str
) -> None:
    """It is waited for: in the copy's rows it would see none."""
    ready, seen = threading.Event(), []
    expected = len(model.expected)

    def step(name: str) -> None:
        if name == "verified":
            ready.set()

    thread = threading.Thread(target=cooling.offload, args=(tools(instance, step), None, False))
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("set search_path = dormouse")
        conn.execute("select count(*) from payload_day")  # the snapshot, and no lock on the day
        thread.start()
        assert ready.wait(60)
        thread.join(0.3)
        seen += conn.execute("select count(*) from payload_20260305").fetchall()
    thread.join(60)
    assert not thread.is_alive()
    assert seen == [(expected,)]


def test_a_reader_that_never_ends_is_named(
    instance: Instance, model: Model, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "READERS_SECONDS_MAX", 0.2)
    with psycopg.connect(dsn) as conn:
        conn.execute("select 1")
        with pytest.raises(PayloadDayBusy, match=f"processes {conn.info.backend_pid}; the day is as it was"):
            instance.payloads.offload(DAY)
        model.check()
    assert instance.payloads.offload(DAY).days_left == 0


@pytest.mark.parametrize("kind", ["delete", "update"])
def test_writers_of_a_stricter_isolation_lose_nothing(
    instance: Instance, model: Model, dsn: str, kind: str
) -> None:
    """A snapshot of before the pointer was added does not see it: the writer is told to try again."""
    gone = key("b0001")
    work = {
        "delete": "delete from payload_20260305 where (kind, tenant, id, inserted_at) = (%s, %s, %s, %s)",
        "update": "update payload_20260305 set content = '1' "
        "where (kind, tenant, id, inserted_at) = (%s, %s, %s, %s)",
    }[kind]
    with psycopg.connect(dsn) as old:
        old.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        old.execute("set search_path = dormouse")
        failures: list[type[BaseException]] = []

        def at(name: str) -> None:
            if name == "prepared":
                old.execute("select 1 from payload_day")
            if name == "copied" and not failures:
                try:
                    old.execute(work, gone.place)
                except psycopg.errors.SerializationFailure as error:
                    failures.append(type(error))
                old.rollback()

        assert cooling.offload(tools(instance, at), None, False).errors == ()
    assert failures == [psycopg.errors.SerializationFailure]
    model.check()


@pytest.mark.parametrize("fault", ["throttled", "forbidden", "lost", "truncated", "other bytes"])
def test_a_store_that_fails_costs_nothing(instance: Instance, model: Model, fault: str) -> None:
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


def test_each_damage_has_its_answer(instance: Instance, model: Model) -> None:
    """Of one payload; the others of its object are read."""
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
    # another payload of the same length in its place
    query(
        instance._supplier,
        "update payload p set byte_start = o.byte_start, byte_length = o.byte_length, checksum = o.checksum "
        "from payload o where p.id = 'b0001' and o.id = 'b0003'",
    )
    assert 'has another payload there: ["t", "b0003"' in str(answers()["b0001"])


@pytest.mark.parametrize("folded", [False, True])
def test_a_store_that_does_not_answer_is_asked_again(instance: Instance, model: Model, folded: bool) -> None:
    instance.payloads.offload()
    if folded:
        instance.payloads.fold(DAY)

    def fails(store: ObjectStore, name: str, *_: Any) -> bytes:
        raise ObjectStoreError(f"Cannot read object {name!r}: Please reduce your request rate")

    def gone(store: ObjectStore, name: str, *_: Any) -> bytes:
        raise ObjectNotFound(f"Object {name!r} does not exist")

    for method, expected in ((fails, PayloadUnavailable), (gone, PayloadCorrupt)):
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
        if not left:
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


@pytest.mark.parametrize(
    ("step", "count"),
    [
        ("leased", 1), ("prepared", 1), ("page", 2), ("upload", 1), ("uploaded", 2), ("pointers", 2),
        ("committed", 2), ("copied", 1), ("verified", 1), ("swapping", 1), ("swapped", 1),
    ],
)  # fmt: skip
def test_a_killed_offload_is_gone_on_with(
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


@pytest.mark.parametrize(
    ("step", "count"),
    [
        ("prepared", 1),
        ("kept", 1),
        ("uploaded", 1),
        ("committed", 1),
        ("copied", 1),
        ("activated", 1),
        ("swapping", 1),
        ("swapped", 1),
    ],
)
def test_a_killed_fold_is_gone_on_with(
    instance: Instance, model: Model, dsn: str, step: str, count: int
) -> None:
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


def test_a_day_that_expired_says_so(instance: Instance, model: Model) -> None:
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
    assert stored(instance)  # a reader that has just looked finds them
    query(instance._supplier, "update payload_object set changed_at = now() - interval '1 hour'")
    assert instance.payloads.collect().deleted
    assert stored(instance) == set()


def test_a_day_that_is_worked_on_expires_later(instance: Instance, model: Model) -> None:
    seen: list[Any] = []

    def step(name: str) -> None:
        if name == "copied":
            seen.append(instance.payloads.expire(DAY + timedelta(1)))

    assert cooling.offload(tools(instance, step), None, False).days_left == 0
    assert seen == [([], [DAY])]
    # and what was left half done goes with it
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
    # it stays so for a day, but for who asks
    assert instance.payloads.offload().days == ()
    assert instance.payloads.offload(DAY).days_left == 0
    model.check(*every)


@pytest.mark.parametrize("folded", [False, True])
def test_what_the_database_lost_is_made_anew_from_the_objects(
    instance: Instance, model: Model, folded: bool
) -> None:
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


def test_verification_names_what_is_wrong(instance: Instance, model: Model) -> None:
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
    told = {(one.object_key, one.key and one.key.id, one.detail) for one in found.problems}
    assert (first, None, "it has other bytes than were written") in told
    assert any(name == first and id_ == "a0000" for name, id_, _ in told)
    assert (second, None, "it is not there") in told
    assert (third, None, "it does not end as an object of payloads does") in told
    assert any(id_ == "b0039" and "does not lead" in why for _, id_, why in told)
