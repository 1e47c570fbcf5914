"""The limits of leases, each tested once on the common code.

The clock jumps, a holder is frozen or killed, its session ends, or its database is restored or does not
answer. Each user of leases has tests for its own SQL.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest

import dormouse as dm
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import CommitOutcomeUnknown, RowLockLost, TableBusy
from dormouse.payloads import days
from dormouse.postgres import ConnectionSupplier, run_transaction
from dormouse.postgres.lease import (
    ROW_LOCK_SECONDS,
    Lease,
    Pulse,
    SessionLock,
    clock_jumps,
    restart_leases,
    wait_for,
)
from dormouse.postgres.queries import parse
from dormouse.state.files import attempts, holds
from tests.cutting import CuttingProxy
from tests.leasing import QUERIES, held, lease_of
from tests.stored import query
from tests.support.api import Instance, Table
from tests.working import Working, until

SECONDS = 0.4
"""The length of the lease for holders in this process."""

HOLDER = """
import sys
from contextlib import closing
from dormouse.errors import RowLockLost
from dormouse.postgres import ConnectionSupplier, run_transaction
from tests.leasing import held

with closing(ConnectionSupplier(sys.argv[1])) as supplier, held(supplier) as (lease, pulse):
    print("held", flush=True)
    pulse.join(60)
    try:
        run_transaction(supplier, lease.fence)
        print("mine", flush=True)
    except RowLockLost:
        print("lost", pulse.is_lost, flush=True)
"""
LOCK = parse(
    """
-- name: alone
-- Takes a lock of the test, unless another session has it.
select pg_try_advisory_xact_lock(4711);

-- name: is_alone
-- Whether a session has the lock.
select exists (
    select from pg_locks join pg_stat_activity using (pid)
    where locktype = 'advisory' and objid = 4711 and pid = %(pid)s and backend_start = %(began)s
);
""",
    "test",
)


@pytest.fixture
def leasable(supplier: ConnectionSupplier) -> ConnectionSupplier:
    """Returns the supplier of a database that has a row to lease."""
    query(supplier, QUERIES["create"].text)
    return supplier


@contextmanager
def another_holder(dsn: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that holds a lease of one second, and checks if it has lost the lease."""
    command = [sys.executable, "-c", HOLDER, dsn]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert said(process) == "held"
            yield process
        finally:
            process.kill()


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def fence(lease: Lease) -> None:
    run_transaction(lease.supplier, lease.fence)


def token(supplier: ConnectionSupplier) -> Any:
    [(found,)] = query(supplier, "select token from leased")
    return found


# the renewing thread, and waits


def test_a_lease_lasts_for_as_long_as_its_holder_lives(leasable: ConnectionSupplier) -> None:
    with held(leasable, SECONDS) as (lease, _):
        renewed = query(leasable, "select leased_until from leased")
        until(
            lambda: query(
                leasable, f"select leased_until > clock_timestamp() + '{SECONDS / 2} s' from leased"
            )
        )
        until(lambda: query(leasable, "select leased_until from leased") > renewed)
        refusal = (
            rf"^worker .+:{os.getpid()} has the work, until \d\d:\d\d:\d\d UTC or longer; try again later$"
        )
        with pytest.raises(TableBusy, match=refusal), held(leasable, SECONDS, wait_seconds=1.5 * SECONDS):
            pass
        fence(lease)
    assert query(leasable, "select count(*) from leased") == [(0,)]


def test_a_released_lease_goes_to_the_waiting_process(leasable: ConnectionSupplier) -> None:
    with ExitStack() as first:
        first.enter_context(held(leasable))
        giving = threading.Timer(0.1, first.close)
        giving.start()
        with held(leasable, wait_seconds=60) as (lease, _):
            giving.join()
            fence(lease)


def test_a_wait_ends_with_the_last_refusal() -> None:
    numbers = count()
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"^[1-9]"):
        wait_for(lambda left: ValueError(f"{next(numbers)}, {left}"), 0.05)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(ValueError, match="at once"):
        wait_for(lambda left: ValueError("at once"), 0.0)
    assert wait_for(lambda left: left, 0.0) <= 0


def test_failing_work_of_a_pulse_is_retried(caplog: pytest.LogCaptureFixture) -> None:
    failures, worked = [dm.InstanceError("away"), dm.InstanceError("away")], threading.Event()

    def work() -> None:
        if failures:
            raise failures.pop()
        worked.set()

    with Pulse(work, 0.01, "pulse") as pulse:
        assert worked.wait(60)
        assert not pulse.is_lost
    assert caplog.text.count("pulse failed and is retried: away") == 2


def test_a_pulse_works_at_once_on_request_and_ends_when_the_lease_is_lost() -> None:
    holds_it, done, lost = [True, True, False], threading.Event(), threading.Event()

    def work() -> bool:
        done.set()
        return holds_it.pop(0)

    with Pulse(work, float("inf"), "pulse", lost.set) as pulse:
        while holds_it:
            assert not pulse.is_lost
            done.clear()
            pulse.now()
            assert done.wait(60)
        assert lost.wait(60)
        assert pulse.is_lost
        pulse.join(60)


def test_the_end_of_a_pulse_waits_for_its_work() -> None:
    began, ended = threading.Event(), threading.Event()

    def work() -> None:
        began.set()
        time.sleep(0.1)
        ended.set()

    with Pulse(work, 0.001, "pulse"):
        assert began.wait(60)
    assert ended.is_set()


def test_a_lease_whose_release_was_not_answered_is_released_again(
    leasable: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute, failures = Lease.execute, [CommitOutcomeUnknown("lost")]

    def lossy(self: Lease, name: str, **values: Any) -> Any:
        if name == "release" and failures:
            raise failures.pop()
        return execute(self, name, **values)

    with held(leasable):
        monkeypatch.setattr(Lease, "execute", lossy)
    assert query(leasable, "select count(*) from leased") == [(0,)]


# the bounds of leases


def test_a_clock_that_jumps_ahead_takes_no_lease_from_a_holder_that_lives(
    leasable: ConnectionSupplier,
) -> None:
    """All leases expire at once. The holder renews its lease before another process can take it."""
    with held(leasable, SECONDS) as (lease, pulse):
        query(leasable, "update leased set leased_until = clock_timestamp() - interval '5 days'")
        until(lambda: query(leasable, "select leased_until > clock_timestamp() from leased") == [(True,)])
        assert not pulse.is_lost
        fence(lease)


def test_a_clock_that_jumps_back_makes_no_lease_longer(
    leasable: ConnectionSupplier, instance: Instance
) -> None:
    """The lease was granted while the clock was five days ahead."""
    instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    query(
        leasable,
        "insert into row_lock select table_id, gen_random_uuid(), 'write', 'dead:1', "
        "clock_timestamp() + interval '5 days' from row_table",
    )
    jump = restart_leases(leasable)
    assert jump is not None and (jump.leases, jump.times) == (1, 0)
    assert jump.seconds == pytest.approx(5 * 86_400, abs=600)
    [(left,)] = query(
        leasable, "select extract(epoch from leased_until - clock_timestamp())::float8 from row_lock"
    )
    assert 0 < left <= ROW_LOCK_SECONDS
    assert restart_leases(leasable) is None
    assert clock_jumps(leasable) == [jump]


@pytest.mark.slow
def test_a_holder_that_was_frozen_has_lost_its_lease_and_commits_nothing(
    leasable: ConnectionSupplier, dsn: str
) -> None:
    with another_holder(dsn) as frozen:
        frozen.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with held(leasable, wait_seconds=60) as (lease, _):
            assert time.monotonic() - began > 0.3
            frozen.send_signal(signal.SIGCONT)
            assert said(frozen) == "lost True"
            fence(lease)


@pytest.mark.slow
def test_the_lease_of_a_holder_that_was_killed_ends_by_itself(leasable: ConnectionSupplier, dsn: str) -> None:
    with another_holder(dsn) as killed:
        killed.kill()
        with pytest.raises(TableBusy, match=rf":{killed.pid} has the work"), held(leasable):
            pass
        with held(leasable, wait_seconds=60) as (lease, _):
            fence(lease)


def test_a_holder_whose_session_was_ended_has_lost_its_lock(supplier: ConnectionSupplier) -> None:
    lost = partial(RowLockLost, "another worker has the lock", table="t")
    with (
        SessionLock(supplier, LOCK["alone"], lost=lost) as first,
        SessionLock(supplier, LOCK["alone"], lost=lost) as second,
    ):
        assert first.take() and first.is_held()
        assert not second.take() and not second.is_held()
        run_transaction(supplier, lambda conn: first.fence(conn, LOCK["is_alone"]))
        query(supplier, "select pg_terminate_backend(pid, 5000) from pg_locks where locktype = 'advisory'")
        assert not first.is_held()
        with pytest.raises(RowLockLost):
            run_transaction(supplier, lambda conn: first.fence(conn, LOCK["is_alone"]))
        assert second.take()
        with pytest.raises(RowLockLost):
            first.check()
        second.release()
        first.check()  # no other session has the lock, so the check takes it again
        assert first.is_held()


def test_a_holder_whose_database_was_restored_has_lost_its_lease(leasable: ConnectionSupplier) -> None:
    """The database is restored to a time at which another process held the lease."""
    with held(leasable, 60.0):
        before = token(leasable)
    with held(leasable, SECONDS) as (lease, pulse):
        query(leasable, f"update leased set token = '{before}'")
        pulse.join(60)
        assert pulse.is_lost
        with pytest.raises(RowLockLost, match="another worker has the work"):
            fence(lease)
    assert token(leasable) == before


def test_an_outage_loses_no_lease(
    leasable: ConnectionSupplier, dsn: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The database does not answer for longer than the lease, as at a restart. Then the holder renews the
    lease.
    """
    is_away = threading.Event()
    proxy = CuttingProxy(dsn, lambda: lambda data: 0 if is_away.is_set() else len(data))
    with (
        closing(proxy),
        closing(ConnectionSupplier(proxy.dsn)) as away,
        held(away, SECONDS) as (lease, pulse),
    ):
        is_away.set()
        until(lambda: query(leasable, "select leased_until < clock_timestamp() from leased") == [(True,)])
        until(lambda: "test of the work failed and is retried" in caplog.text)
        assert not pulse.is_lost
        is_away.clear()
        until(lambda: query(leasable, "select leased_until > clock_timestamp() from leased") == [(True,)])
        assert not pulse.is_lost
        fence(lease)


def test_a_fence_fails_if_no_holder_has_the_lease(leasable: ConnectionSupplier) -> None:
    with pytest.raises(RowLockLost):
        fence(lease_of(leasable, 1.0))


# the users of leases

YESTERDAY = (datetime.now(UTC) - timedelta(days=1)).date()


@contextmanager
def a_job_that_runs(instance: Instance) -> Iterator[None]:
    ends = threading.Event()
    job = instance.jobs.start("wait", {})
    with Working(instance.jobs.worker({"wait": lambda request, progress: ends.wait(600)})):
        until(lambda: not instance.jobs.status(job).is_waiting)
        yield
        ends.set()


@contextmanager
def a_committer_that_runs(instance: Instance) -> Iterator[None]:
    committer = instance.committer()
    thread = threading.Thread(target=committer.run)
    thread.start()
    try:
        until(lambda: any(one.name == "committer-in-flight" for one in threading.enumerate()))
        yield
    finally:
        committer.close()
        thread.join()


def a_moment(instance: Instance, table: Table) -> Any:
    [(snapshot,)] = query(instance._supplier, "select pg_current_snapshot()::text")
    return holds.moment_held(
        instance._supplier, table.context.table.table_id, datetime.now(UTC) + timedelta(seconds=1), snapshot
    )


USERS: dict[str, Callable[[Instance, Table], Any]] = {
    "row lock 'r'": lambda i, t: i.create_row_table("r", [dm.Column("n", "INTEGER")]).locks.write(),
    f"payload day {YESTERDAY}": lambda i, t: days.leased(i._supplier, YESTERDAY, "offload", ["open"]),
    "hold 'backup 1'": lambda i, t: holds.held(i._supplier, "backup 1"),
    "hold 'reader'": a_moment,
    "session lock": lambda i, t: InstanceRounds(i._supplier).alone(),
    "session lock of numbers": lambda i, t: attempts.numbering(i._supplier, t.context.table),
    "dormouse-job-pulse": lambda i, t: a_job_that_runs(i),
    "committer-in-flight": lambda i, t: a_committer_that_runs(i),
}


@pytest.mark.parametrize("name", USERS)
def test_each_user_of_leases_renews_with_the_common_thread_class(
    instance: Instance, table_t: Table, name: str
) -> None:
    begin = re.sub(" of numbers$", "", name)
    others = {*threading.enumerate()}
    with USERS[name](instance, table_t):
        pulses = [one for one in threading.enumerate() if isinstance(one, Pulse) and one not in others]
        assert begin in {one.name for one in pulses}
    until(lambda: not any(one.is_alive() for one in pulses))
