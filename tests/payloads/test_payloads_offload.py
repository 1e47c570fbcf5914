"""Offloads of payload days: their results, refusals, and interruptions."""

from __future__ import annotations

import os
import random
import threading
import tracemalloc
from datetime import UTC, date, datetime, timedelta
from typing import Any

import psycopg
import pytest

from dormouse.errors import (
    InstanceError,
    InvalidInput,
    PayloadDayBusy,
    PayloadsDiffer,
)
from dormouse.payloads import cooling, exchange
from dormouse.payloads.days import LeaseLost
from tests.cooling import (
    AT,
    DAY,
    Model,
    days_of,
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


@pytest.fixture
def model(instance: Instance) -> Model:
    return Model.filled(instance, 40)


@pytest.mark.few(1)
@pytest.mark.parametrize("rows", [1, 2, 3, 39, 40, 41, 1_000])
def test_every_row_is_moved_once_with_pages_of_any_size(instance: Instance, model: Model, rows: int) -> None:
    [done] = cooling.offload(tools(instance, page_rows_max=rows), None, False).days
    assert (done.payloads, done.finished) == (40, True)
    model.check()
    assert locations(instance) == {"external": 40}
    assert known_objects(instance) == {"live": len(stored(instance))}
    assert leftovers(instance) == []


def test_the_partition_is_never_updated(instance: Instance, model: Model) -> None:
    """Vacuum must find nothing to do in the partition and its TOAST table."""
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


def test_a_finished_day_stays_offloaded(instance: Instance, model: Model) -> None:
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


def test_the_copy_has_all_properties_of_the_day(instance: Instance, model: Model) -> None:
    """The properties are options, storage, indexes, constraints and grants. Tables of other schemas stay as
    they are.
    """
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


@pytest.mark.slow
def test_a_backlog_drains_oldest_first_and_a_failing_day_does_not_hold_up_others(instance: Instance) -> None:
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


def test_a_run_ends_in_time_and_the_next_one_continues(instance: Instance, model: Model) -> None:
    slices = 0
    while (report := cooling.offload(tools(instance, is_over=lambda: True), None, False)).days_left:
        assert report.errors == ()
        slices += 1
        model.put(key(f"a{slices}"), content=slices)
        model.check()
        assert slices < 60
        # the waiting phases need a run that does not end at once
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
def test_invalid_and_current_days_are_not_offloaded(instance: Instance, day: Any, why: str) -> None:
    today = datetime.now(UTC)
    instance.payloads.put("t", "i", today, "k", 1)
    with pytest.raises(InvalidInput, match=why):
        instance.payloads.offload(today.date() if day is None else day)
    assert instance.payloads.offload().days == ()


def test_a_day_has_one_worker(instance: Instance, model: Model) -> None:
    answers: list[Any] = []

    def other(step: str) -> None:
        if step == "prepared":
            with pytest.raises(PayloadDayBusy, match=f"worker .*:{os.getpid()} has the day, until"):
                instance.payloads.offload(DAY)
            answers.append(instance.payloads.offload())

    assert cooling.offload(tools(instance, other), None, False).days_left == 0
    assert [(one.finished, one.error) for one in answers[0].days] == [(False, None)]
    model.check()


@pytest.mark.few(2)
@pytest.mark.parametrize("step", ["uploaded", "committed", "copied", "verified"])
def test_a_worker_that_lost_its_lease_commits_nothing(instance: Instance, model: Model, step: str) -> None:
    """The worker was frozen for longer than its lease, and another worker has finished the day."""
    done: list[Any] = []
    taken = threading.Event()

    def lose(reached: str) -> None:
        if reached == step and not taken.is_set():
            taken.set()
            query(instance._supplier, "update payload_day set leased_until = now() - interval '1 second'")
            done.append(instance.payloads.offload())

    work = tools(instance, lose, lease_seconds=10_000, uploads=1)
    # the session with which the worker reads is ended, too
    with pytest.raises((LeaseLost, InstanceError), match=r"has taken the day over|terminating connection"):
        cooling.OFFLOAD.run(work, DAY)
    assert done[0].days_left == 0
    model.check()
    assert leftovers(instance) == []


@pytest.mark.few(2)
@pytest.mark.parametrize("spoil", ["content", "pointer", "missing", "extra", "late"])
def test_a_copy_that_differs_does_not_replace_the_day(instance: Instance, model: Model, spoil: str) -> None:
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


@pytest.mark.slow
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
        for number in range(5):  # a waiting exchange does not hold up other transactions
            model.put(key(f"b{number}"), content=number)
            model.check()
            assert not waited.wait(0.05)
        assert thread.is_alive()
        assert locations(instance)["inline"] == 45
    thread.join(60)
    assert not thread.is_alive()
    assert locations(instance) == {"external": 40, "inline": 5}
    model.check()


@pytest.mark.slow
def test_a_snapshot_older_than_the_copy_still_sees_the_day(
    instance: Instance, model: Model, dsn: str
) -> None:
    """The exchange waits for the snapshot's transaction, because that would see no row of the copy."""
    ready, seen = threading.Event(), []
    expected = len(model.expected)

    def step(name: str) -> None:
        if name == "verified":
            ready.set()

    thread = threading.Thread(target=cooling.offload, args=(tools(instance, step), None, False))
    with psycopg.connect(dsn) as conn:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("set search_path = dormouse")
        conn.execute("select count(*) from payload_day")  # takes the snapshot, without a lock on the day
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
    with psycopg.connect(dsn) as conn, psycopg.connect(dsn) as holder:
        conn.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        conn.execute("select 1")
        holder.execute(
            "select pg_advisory_xact_lock(1)"
        )  # a transaction without a snapshot, like those of processes that maintain the instance
        with pytest.raises(PayloadDayBusy, match=f"processes {conn.info.backend_pid}; the day is unchanged"):
            instance.payloads.offload(DAY)
        model.check()
        conn.rollback()
        assert instance.payloads.offload(DAY).days_left == 0


@pytest.mark.parametrize("kind", ["delete", "update"])
def test_writers_with_stricter_isolation_lose_nothing(
    instance: Instance, model: Model, dsn: str, kind: str
) -> None:
    """A snapshot from before the pointer does not see it. So the writer gets an error and must retry."""
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


@pytest.mark.slow
def test_memory_is_bounded_by_decompressed_bytes(instance: Instance) -> None:
    """The payloads compress by a factor of 1,000, so a page is many times larger than the memory limit."""
    count, megabyte = 48, 2**20
    for number in range(count):
        instance.payloads.put("t", f"{number:03d}", AT, "k", "x" * megabyte)
    made = tools(
        instance,
        portion_bytes_max=4 * megabyte,
        object_bytes_min=megabyte,
        object_bytes_max=64 * megabyte,
        page_rows_max=10_000,
    )
    tracemalloc.start()
    try:
        assert cooling.offload(made, None, False).days_left == 0
        offloaded = tracemalloc.get_traced_memory()[1]
        instance.payloads.put("t", "late", AT, "k", 1)
        instance.payloads.delete("t", "001", AT, "k")
        tracemalloc.reset_peak()
        assert cooling.fold(made, DAY).days_left == 0
        folded = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert offloaded < 20 * megabyte < count * megabyte
    assert folded < 20 * megabyte
    assert instance.payloads.get("t", "047", AT, "k") == "x" * megabyte
    assert locations(instance) == {}


@pytest.mark.slow
def test_objects_have_sizes_within_the_limits(instance: Instance) -> None:
    """All objects of a day except the last have the minimal size. Only a single payload may exceed the
    maximum.
    """
    chance = random.Random(3)
    sizes = [chance.choice((10, 100, 1_000, 5_000)) for _ in range(300)]
    instance.payloads.put_many(
        ("t", f"{number:04d}", AT, "k", chance.randbytes(size).hex()) for number, size in enumerate(sizes)
    )
    made = tools(
        instance, object_bytes_min=8_000, object_bytes_max=40_000, portion_bytes_max=4_000, page_rows_max=50
    )
    [done] = cooling.offload(made, None, False).days
    found = [one.byte_count for one in made.known.of_day(DAY, "live")]
    assert len(found) == done.objects > 10
    # an object ends with the portion that fills it, at twice the minimum
    assert min(found[:-1]) >= 16_000
    assert (
        max(found) <= 16_000 + 4_000 + 5_000 + 2_000
    )  # allowance for a portion, the payload that ends it, and the index
    instance.payloads.rehydrate(DAY)
    tight = tools(instance, object_bytes_min=8_000, object_bytes_max=12_000, portion_bytes_max=12_000)
    assert cooling.offload(tight, DAY, False).days_left == 0
    assert max(one.byte_count for one in made.known.of_day(DAY, "live")) <= 12_000 + 2_000
    instance.payloads.put("t", "large", AT, "k", chance.randbytes(100_000).hex())
    assert cooling.fold(made, DAY).days_left == 0
    assert instance.payloads.get("t", "0299", AT, "k")
