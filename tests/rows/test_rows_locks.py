"""The locks of a row table: how they are granted, waited for and lost, with threads and processes."""

from __future__ import annotations

import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InvalidInput, RowLockHeld, RowLockLost, TableNotFound
from dormouse.postgres.lease import Lease
from dormouse.rows.change import RowFiles
from dormouse.rows.store import RowLocks
from tests.support.api import Instance
from tests.support.rows import RowTable

LEASE_SECONDS = 0.4


@pytest.fixture
def rows(instance: Instance) -> RowTable:
    made = instance.create_row_table("people", [dm.Column("n", "INTEGER")])
    made.change([dm.Insert([{"n": 1}, {"n": 2}])])
    return made


def locks(rows: RowTable, lease_seconds: float = LEASE_SECONDS) -> RowLocks:
    return RowLocks(rows.store.supplier, rows.store.table, lease_seconds)


def until(happens: Callable[[], object], seconds_max: float = 20.0) -> None:
    deadline = time.monotonic() + seconds_max
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def kinds(rows: RowTable) -> list[str]:
    return [one.kind for one in rows.locks.holders()]


def test_many_readers_share_the_lock_and_a_writer_waits(rows: RowTable) -> None:
    with rows.locks.read(), rows.locks.read(), pytest.raises(RowLockHeld, match="reads it"):
        rows.locks.write().__enter__()
    assert kinds(rows) == []


def test_a_writer_excludes_readers_and_writers(rows: RowTable) -> None:
    with rows.locks.write():
        for take in (rows.locks.read, rows.locks.write):
            with pytest.raises(
                RowLockHeld, match=f"table .people.: worker .+:{os.getpid()} is changing it, until"
            ):
                take().__enter__()
    with rows.locks.read():
        pass


def test_a_waiting_writer_keeps_out_new_readers_but_not_current_ones(rows: RowTable) -> None:
    granted = threading.Event()

    def write() -> None:
        with rows.locks.write(20):
            granted.set()

    with ExitStack() as readers, ThreadPoolExecutor() as pool:
        readers.enter_context(rows.locks.read())
        readers.enter_context(rows.locks.read())
        writing = pool.submit(write)
        until(lambda: "precursor" in kinds(rows))
        for take in (rows.locks.read, rows.locks.write):
            with pytest.raises(RowLockHeld, match="waits to change it"):
                take().__enter__()
        assert sorted(kinds(rows)) == ["precursor", "read", "read"]
        assert not granted.is_set()
        readers.close()
        writing.result(20)
    assert granted.is_set()
    assert kinds(rows) == []


def test_a_writer_that_gives_up_leaves_no_precursor(rows: RowTable) -> None:
    with rows.locks.read():
        with pytest.raises(RowLockHeld):
            rows.change([dm.Insert([{"n": 3}])], wait_seconds=0.1)
        with rows.locks.read():
            assert kinds(rows) == ["read", "read"]


@pytest.mark.slow
def test_a_dead_reader_delays_a_writer_until_its_lease_ends(rows: RowTable) -> None:
    child = os.fork()
    if child == 0:
        try:
            from dormouse.postgres import ConnectionSupplier

            own = RowLocks(ConnectionSupplier(rows.table.context.dsn), rows.store.table, 1.0)
            with own.read():
                os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert status == signal.SIGKILL
    began = time.monotonic()
    with rows.locks.write(20):
        assert time.monotonic() - began > 0.3
    with rows.locks.read():
        pass


def test_the_lock_of_a_dropped_table_is_not_granted(instance: Instance, rows: RowTable) -> None:
    instance.drop_table("people")
    with pytest.raises(TableNotFound), rows.locks.write():
        pass


@pytest.mark.slow
def test_readers_and_writers_never_meet(rows: RowTable) -> None:
    """Threads lock again and again. Counters that only the locks protect show if a reader meets a writer."""
    inside = {"read": 0, "write": 0}
    guard, wrong, times = threading.Lock(), list[dict[str, int]](), {"read": 0, "write": 0}
    deadline = time.monotonic() + 2.5

    def work(kind: str) -> None:
        own = locks(rows, 5.0)
        while time.monotonic() < deadline:
            try:
                with own.read() if kind == "read" else own.write(0.05):
                    with guard:
                        inside[kind] += 1
                        times[kind] += 1
                        if inside["write"] > 1 or (inside["write"] and inside["read"]):
                            wrong.append(dict(inside))
                    time.sleep(random.uniform(0, 0.004))
                    with guard:
                        inside[kind] -= 1
            except RowLockHeld:
                time.sleep(random.uniform(0, 0.01))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, ["read", "read", "write", "read", "write", "read"]))
    assert wrong == []
    assert min(times.values()) > 5, times


def _frozen(rows: RowTable, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Makes the next change freeze after its files are written; its lease is then not renewed."""
    written, goes_on = threading.Event(), threading.Event()
    write = RowFiles.written

    def slow(self: RowFiles) -> Any:
        files = write(self)
        if threading.current_thread().name == "frozen":
            written.set()
            assert goes_on.wait(30)
        return files

    monkeypatch.setattr(RowFiles, "written", slow)
    rows.locks._lease_seconds = LEASE_SECONDS
    monkeypatch.setattr(Lease, "pulse", lambda self: nullcontext())
    return written, goes_on


@pytest.mark.slow
def test_a_writer_whose_lock_was_given_to_another_commits_nothing(
    instance: Instance, rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, goes_on = _frozen(rows, monkeypatch)
    raised: list[BaseException] = []

    def change() -> None:
        try:
            rows.change([dm.Insert([{"n": 3}]), dm.Remove([(1, 1)]), dm.AddColumn(dm.Column("x", "STRING"))])
        except BaseException as error:
            raised.append(error)

    frozen = threading.Thread(target=change, name="frozen")
    frozen.start()
    assert written.wait(20)
    other = instance.row_table("people")
    assert other.change([dm.Insert([{"n": 4}])], wait_seconds=20).row_ids == [3]
    goes_on.set()
    frozen.join(20)
    assert [type(error) for error in raised] == [RowLockLost]
    assert re.search("given to another worker .* nothing was changed", str(raised[0]))
    assert [row["n"] for row in other.current().read_all().to_pylist()] == [1, 2, 4]
    assert [column.name for column in other.columns()] == ["n"]
    assert other.version() == 2
    assert len(other.history()) == 2
    assert _untracked(rows) == []


@pytest.mark.slow
def test_a_writer_whose_lock_was_not_taken_by_another_commits_late(
    rows: RowTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    written, goes_on = _frozen(rows, monkeypatch)
    with ThreadPoolExecutor(1) as pool:

        def change() -> dm.errors.DormouseError | Any:
            threading.current_thread().name = "frozen"
            return rows.change([dm.Insert([{"n": 3}])])

        late = pool.submit(change)
        assert written.wait(20)
        time.sleep(1.5 * LEASE_SECONDS)
        goes_on.set()
        assert late.result(20).row_ids == [3]


@pytest.mark.slow
def test_changes_of_many_threads_are_applied_one_after_another(instance: Instance, rows: RowTable) -> None:
    def work(number: int) -> list[int]:
        own = instance.row_table("people")
        return [own.change([dm.Insert([{"n": number}])]).row_ids[0] for _ in range(6)]

    with ThreadPoolExecutor(4) as pool:
        ids = [row_id for some in pool.map(work, range(4)) for row_id in some]
    assert sorted(ids) == list(range(3, 27))
    assert rows.version() == 25
    assert [row["ROW_ID"] for row in rows.current().read_all().to_pylist()] == list(range(1, 27))


def _untracked(rows: RowTable) -> list[str]:
    """Returns the objects below the table's prefix that are neither its files nor their sketches."""
    context = rows.table.context
    context.attempts.collect_abandoned(context.table.table_id)
    names = {name for name, _ in context.objects.list(context.table.object_prefix)}
    tracked = {facts.filename for facts in context.store.page(None, 1_000)}
    return sorted(name for name in names if name.removesuffix(".sketches") not in tracked)


@pytest.mark.parametrize("seconds", [-1, float("inf"), float("nan"), 1e18, "x", None])
def test_an_invalid_wait_is_refused(instance: Instance, seconds: Any) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    with pytest.raises(InvalidInput, match="wait_seconds must be from 0 to 21,600"):
        rows.change([dm.Insert([{"n": 1}])], wait_seconds=seconds)
    assert len(rows) == 0
