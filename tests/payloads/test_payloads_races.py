"""Writes at every step of an offload or fold. Afterwards, each key has the content that was committed
last.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from typing import Any

import pytest

from dormouse.errors import InstanceError, PayloadDayBusy, PayloadsDiffer
from dormouse.payloads import cooling, exchange, fold
from dormouse.payloads.exchange import Exchange
from tests.cooling import DAY, FOLD_STEPS, STEPS, WITHIN, Model, key, leftovers, locations, names, tools
from tests.stored import query
from tests.support.api import Instance

WRITES = ("insert", "replace", "delete", "delete and insert", "insert and delete", "replace twice")


def write(model: Model, kind: str, number: int) -> None:
    """Writes payloads under keys of its own. They sort before, among and after all other keys."""
    there = [key(f"a{n:04d}") for n in (number, 2 * number + 1) if key(f"a{n:04d}") in model.expected]
    there += [key(f"b{n:04d}") for n in (number, 3 * number) if key(f"b{n:04d}") in model.expected]
    new = [key(f"{first}{middle}{number:03d}") for first in "ab" for middle in ("", "0", "00", "z")]
    if kind == "insert":
        model.put(*new, content=number)
    elif kind == "replace":
        model.put(*there, content=f"replaced {number}")
    elif kind == "delete":
        model.delete(*there)
    elif kind == "delete and insert":
        model.delete(*there)
        model.put(*there, content=f"again {number}")
    elif kind == "insert and delete":
        model.put(*new, content=number)
        model.delete(*new)
    else:
        model.put(*there, content="once")
        model.put(*there, content="twice")


class Stopped:
    """A hook that writes each of the first six times that the work reaches a step.

    The write happens on another thread where the step would wait for it.
    """

    def __init__(self, model: Model, step: str, kind: str) -> None:
        self.model, self.step, self.kind = model, step, kind
        self.reached = Counter[str]()
        self.alone = threading.Lock()
        self.threads: list[threading.Thread] = []

    def __call__(self, step: str) -> None:
        self.reached[step] += 1
        if step != self.step or self.reached[step] > 6:
            return
        number = self.reached[step]
        if step in WITHIN:
            thread = threading.Thread(target=write, args=(self.model, self.kind, number))
            thread.start()
            self.threads.append(thread)
            thread.join(0.05)
            return
        with self.alone:  # uploads run in parallel
            write(self.model, self.kind, number)
            self.model.check(key("a0001"), key("b0002"))

    def join(self) -> None:
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


@pytest.fixture
def model(instance: Instance) -> Model:
    made = Model(instance.payloads)
    made.put(*map(key, names(48)))
    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("step", STEPS)
def test_a_write_at_any_step_of_an_offload_stays(
    instance: Instance, model: Model, step: str, kind: str
) -> None:
    every = set(model.expected)
    stopped = Stopped(model, step, kind)
    report = cooling.offload(tools(instance, stopped), None, False)
    stopped.join()
    assert report.errors == ()
    assert [(one.day, one.finished) for one in report.days] == [(DAY, True)]
    assert stopped.reached[step]
    model.check(*every)
    assert leftovers(instance) == []
    assert locations(instance).keys() <= {"external", "inline"}
    assert set(query(instance._supplier, "select tenant, id, inserted_at, kind from payload")) == set(
        model.expected
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", WRITES)
@pytest.mark.parametrize("step", FOLD_STEPS)
def test_a_write_at_any_step_of_a_fold_stays(instance: Instance, model: Model, step: str, kind: str) -> None:
    every = set(model.expected)
    assert cooling.offload(tools(instance), None, False).errors == ()
    model.put(key("a0002"), key("b9999"), key("a"), content="late")
    model.delete(key("a0004"), key("b0047"))
    for again in range(2):
        stopped = Stopped(model, step, kind)
        report = cooling.fold(tools(instance, stopped), DAY)
        stopped.join()
        assert (report.errors, report.days_left) == ((), 0)
        assert stopped.reached[step] or again
        model.check(*every, key("a0004"), key("b0047"))
        assert leftovers(instance) == []
        assert locations(instance).keys() <= {"inline", "deleted"}
    cooling.fold(tools(instance), DAY)
    model.check(*every)
    assert locations(instance) == {}


@pytest.mark.slow
def test_a_fold_verifies_in_several_runs(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The day is too large for one run. Each run continues after the key that was compared last."""
    monkeypatch.setattr(fold, "_VERIFIED_AT_ONCE", 5)
    cooling.offload(tools(instance), None, False)
    reached: list[Any] = []

    def verifies() -> bool:
        return query(instance._supplier, "select phase from payload_day") == [("verify",)]

    while cooling.fold(tools(instance, is_over=verifies), DAY).days_left:
        reached += query(instance._supplier, "select after_kind, after_id from payload_day")
        model.put(key(f"a00{len(reached)}"), content="late")
        model.check()
        assert len(reached) < 100
    assert len(reached) == len(set(reached)) > 5
    assert reached == sorted(reached)
    model.check()
    assert leftovers(instance) == []


@pytest.mark.slow
def test_a_fold_looks_up_the_writes_of_each_batch_alone(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold, "_VERIFIED_AT_ONCE", 100)
    ask, asked = fold._Fold._written, []

    def count(self: Any, *suspects: Any) -> Any:
        found = ask(self, *suspects)
        asked.append((len(found), *map(len, suspects)))
        return found

    cooling.offload(tools(instance), None, False)
    written = [key(name) for name in names(300)]
    monkeypatch.setattr(fold._Fold, "_written", count)

    def write(step: str) -> None:
        if step == "prepared":
            model.put(*written, content="late")
        if step == "copied":
            model.delete(*written)

    cooling.fold(tools(instance, write), DAY)
    assert asked == [(100, 100), (100, 100), (100, 100)]
    model.check(*written)


@pytest.mark.slow
def test_a_write_that_was_not_mirrored_fails_the_fold(instance: Instance, model: Model) -> None:
    """The write comes before the verification in one case. The comparison of blocks then skips its key."""
    cooling.offload(tools(instance), None, False)

    def lose(step: str) -> None:
        if step == "prepared":
            model.put(key("a0002"), content="late")
        if step == "copied":
            query(instance._supplier, "delete from payload_20260305_copy where id = 'a0002'")

    with pytest.raises(PayloadsDiffer, match="a 'a0002' of tenant 't'"):
        cooling.fold(tools(instance, lose), DAY)
    model.check()
    assert leftovers(instance) == []
    assert cooling.fold(tools(instance), DAY).days_left == 0
    model.check()


@pytest.mark.parametrize("again", [False, True])
def test_a_fold_that_lacks_a_payload_does_not_replace_the_day(
    instance: Instance, model: Model, again: bool
) -> None:
    cooling.offload(tools(instance), None, False)
    if again:
        assert cooling.fold(tools(instance), DAY).errors == ()
        model.put(key("a0002"), content="late")
    before = locations(instance)

    def lose(step: str) -> None:
        if step == "copied":
            query(
                instance._supplier,
                "update payload_object set kept = false where object_key = "
                "(select object_key from payload_object where kept order by first_kind, first_id limit 1)",
            )

    with pytest.raises(PayloadsDiffer, match=r"the copy differs at .* of tenant 't'"):
        cooling.fold(tools(instance, lose), DAY)
    model.check()
    assert (locations(instance), leftovers(instance)) == (before, [])
    assert [one.state for one in instance.payloads.days()] == ["folded" if again else "offloaded"]
    assert cooling.fold(tools(instance), DAY).errors == ()
    model.check()
    assert locations(instance) == {}


def test_writes_before_an_exchange_are_compared_before_its_lock(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, seen = Exchange._compared_written, []

    def count(self: Exchange, conn: Any, since: str) -> Any:
        locked = (
            "select count(*) from pg_locks where pid = pg_backend_pid() and mode = 'AccessExclusiveLock' "
            "and relation = 'payload'::regclass"
        )
        since_then = "not pg_visible_in_snapshot(xid, %s::pg_snapshot)"
        written = f"select count(*) from {self.names.written} where {since_then}"
        if conn.execute(locked).fetchone()[0]:
            seen.append(conn.execute(written, [since]).fetchone()[0])
        return compared(self, conn, since)

    def write_at(wanted: str) -> Callable[[str], None]:
        def at(step: str) -> None:
            if step == wanted:
                model.put(*map(key, names(40)), content=wanted)
                model.delete(key("a0002"))

        return at

    monkeypatch.setattr(Exchange, "_compared_written", count)
    cooling.offload(tools(instance, write_at("verified")), DAY, False)
    cooling.fold(tools(instance, write_at("copied")), DAY)
    assert seen == [0, 0]
    model.check(key("a0002"))
    assert (leftovers(instance), locations(instance)) == ([], {"inline": 39, "deleted": 1})


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_payload_that_changed_and_was_folded_since_the_read_is_not_made_hot(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch, is_deleted: bool
) -> None:
    """The day's partition no longer shows the change, but the payload's block is a different one."""
    cooling.offload(tools(instance), DAY, False)
    cooling.fold(tools(instance), DAY)
    reader, given = instance.payloads._lookup._reader, key("a0002")
    read = reader.read

    def read_before(pointers: Any) -> Any:
        found = read(pointers)
        monkeypatch.undo()
        if is_deleted:
            model.delete(given)
        else:
            model.put(given, content="newer")
        cooling.fold(tools(instance), DAY)
        return found

    monkeypatch.setattr(reader, "read", read_before)
    instance.payloads.rehydrate([given])
    model.check(given)


def test_a_day_is_not_made_hot_by_a_worker_that_lost_it(instance: Instance, model: Model) -> None:
    cooling.offload(tools(instance), DAY, False)
    cooling.fold(tools(instance), DAY)

    def lose(step: str) -> None:
        if step == "page":
            query(instance._supplier, "update payload_day set token = token + 1")

    with pytest.raises(PayloadDayBusy, match="another worker has taken the day over"):
        cooling.rehydrate(tools(instance, lose), DAY)
    assert locations(instance) == {}


@pytest.mark.parametrize("nth", [0, 1])
def test_a_worker_that_is_frozen_in_a_comparison_does_not_block_the_day(
    instance: Instance, model: Model, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The worker freezes in each of the two comparisons. The worker that takes the day over ends its
    session.
    """
    frozen, gate, comparisons = threading.Event(), threading.Event(), count()
    run = exchange.run_transaction

    def freeze(supplier: Any, work: Any, **options: Any) -> Any:
        def freezing(conn: Any) -> Any:
            found = work(conn)
            if options.get("read_only") and next(comparisons) == nth:
                frozen.set()
                gate.wait(60)
            return found

        return run(supplier, freezing, **options)

    def offload() -> None:
        with suppress(PayloadDayBusy, InstanceError):  # its copy may be dropped by now
            cooling.offload(tools(instance, page_rows_max=1_000), DAY, False)

    monkeypatch.setattr(exchange, "run_transaction", freeze)
    monkeypatch.setattr(exchange, "READERS_SECONDS_MAX", 3.0)
    worker = threading.Thread(target=offload)
    worker.start()
    try:
        assert frozen.wait(60)
        query(instance._supplier, "update payload_day set leased_until = now() - interval '1 second'")
        assert cooling.offload(tools(instance), DAY, False).days_left == 0
        model.check()
    finally:
        gate.set()
        worker.join()
    model.check()
    assert leftovers(instance) == []
