"""More workers than the server has connections. Each waits for a connection, for a limited time."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path

import psutil
import psycopg
import pytest
from embedded import postmaster
from psycopg.conninfo import make_conninfo

from dormouse.errors import ConnectionsExhausted, InstanceError
from dormouse.postgres import (
    ConnectionSupplier,
    Supplier,
    run_statement,
)
from tests.stored import query, wait_until
from tests.support.embedded import EmbeddedPostgres

Restartable = tuple[str, Callable[[], None], Callable[[], str]]
WAIT_SECONDS_MAX = 120.0
"""A limit that is far longer than needed, because the machine may be busy."""

WORKER_PROCESSES = """
import os, sys, threading
from dormouse.postgres import ConnectionSupplier, run_statement
supplier = ConnectionSupplier(sys.argv[1], wait_seconds_max=120)
start, starter = os.pipe()
ends, ender = os.pipe()
done, tell = os.pipe()

def work(worker):
    run_statement(supplier, lambda conn: conn.execute("insert into public.done values (%s)", [worker]))
    os.write(tell, b".")

def process(number):
    os.close(starter), os.close(ender)
    threads = [threading.Thread(target=work, args=(number * 25 + n,)) for n in range(25)]
    os.read(start, 1)
    for thread in threads: thread.start()
    os.read(ends, 1)  # alive until all are done, as a service is, with what its pool keeps
    os._exit(0)

for number in range(20):
    if os.fork() == 0:
        process(number)
os.close(starter), os.close(tell)
print(sum(len(os.read(done, 1)) for _ in range(500)))
"""


OTHERS = """select count(*) from pg_stat_activity
            where backend_type = 'client backend' and usename = current_user and pid <> pg_backend_pid()"""


@pytest.fixture(scope="module")
def small_server() -> Iterator[str]:
    """Yields a worker's DSN of a server with a hundred connections, three of which are reserved for
    superusers.
    """
    folder = Path(tempfile.mkdtemp(prefix="dormouse-many-"))
    options = {"fsync": "off", "max_connections": "100"}
    try:
        with EmbeddedPostgres(folder, options=options) as server:
            with psycopg.connect(server.dsn, autocommit=True) as conn:
                conn.execute("create role worker login; create table done (worker integer primary key)")
                conn.execute("grant all on done to worker")
            yield make_conninfo(server.dsn, user="worker")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def crowded_dsn(small_server: str) -> str:
    """Returns the DSN of a server without any job, after all earlier connections were closed."""
    with closing(ConnectionSupplier(small_server, wait_seconds_max=WAIT_SECONDS_MAX)) as supplier:
        run_statement(supplier, lambda conn: conn.execute("delete from public.done"))
        wait_until(lambda: query(supplier, OTHERS) == [(0,)])
    return small_server


def do(supplier: Supplier, worker: int) -> None:
    run_statement(supplier, lambda conn: conn.execute("insert into public.done values (%s)", [worker]))


def do_at_once(suppliers: Sequence[Supplier]) -> None:
    with ThreadPoolExecutor(len(suppliers)) as threads:
        for future in [threads.submit(do, supplier, n) for n, supplier in enumerate(suppliers)]:
            future.result()


def done(dsn: str) -> int:
    with closing(ConnectionSupplier(dsn)) as supplier, supplier.connection() as conn:
        (count,) = conn.execute("select count(*) from public.done").fetchone() or (0,)
        return int(count)


def take_all(dsn: str, stack: ExitStack) -> None:
    """Opens connections until the server has no more."""
    with suppress(psycopg.OperationalError):
        while True:
            stack.enter_context(psycopg.connect(dsn, autocommit=True))


def test_500_threads_share_a_pool_of_8_connections(crowded_dsn: str) -> None:
    with closing(ConnectionSupplier(crowded_dsn, wait_seconds_max=WAIT_SECONDS_MAX)) as supplier:
        do_at_once([supplier] * 500)
    assert done(crowded_dsn) == 500


@pytest.mark.slow
def test_300_threads_with_open_pools_of_their_own_are_all_served(crowded_dsn: str) -> None:
    """A pool keeps a connection for later only while the server has others to spare."""
    suppliers = [
        ConnectionSupplier(crowded_dsn, connections_max=1, wait_seconds_max=WAIT_SECONDS_MAX)
        for _ in range(300)
    ]
    with ExitStack() as stack:
        for supplier in suppliers:
            stack.callback(supplier.close)
        do_at_once(suppliers)
    assert done(crowded_dsn) == 300


@pytest.mark.slow
def test_20_processes_of_25_threads_share_the_connections_of_the_server(crowded_dsn: str) -> None:
    command = [sys.executable, "-c", WORKER_PROCESSES, crowded_dsn]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=2 * WAIT_SECONDS_MAX, check=False)
    assert (ended.stdout, ended.stderr) == ("500\n", "")
    assert done(crowded_dsn) == 500


@pytest.mark.slow
def test_a_borrower_waits_for_a_full_server(crowded_dsn: str) -> None:
    with (
        closing(ConnectionSupplier(crowded_dsn, wait_seconds_max=WAIT_SECONDS_MAX)) as supplier,
        ExitStack() as stack,
    ):
        take_all(crowded_dsn, stack)
        worker = threading.Thread(target=do, args=(supplier, 1))
        worker.start()
        worker.join(0.2)
        assert worker.is_alive()
        stack.close()
        worker.join(WAIT_SECONDS_MAX)
    assert done(crowded_dsn) == 1


@pytest.mark.slow
def test_an_expired_wait_raises_one_clear_error_and_does_nothing(crowded_dsn: str) -> None:
    with closing(ConnectionSupplier(crowded_dsn, wait_seconds_max=0.3)) as supplier:
        with ExitStack() as stack:
            take_all(crowded_dsn, stack)
            with pytest.raises(
                ConnectionsExhausted, match=r"^PostgreSQL at .* had no connection to spare for 0\.3 s;[^\n]*$"
            ):
                do(supplier, 1)
        assert done(crowded_dsn) == 0
        do(supplier, 1)
    assert done(crowded_dsn) == 1


@pytest.mark.slow
def test_a_borrower_takes_a_returned_connection_if_it_cannot_open_one(crowded_dsn: str) -> None:
    with (
        closing(ConnectionSupplier(crowded_dsn, wait_seconds_max=WAIT_SECONDS_MAX)) as supplier,
        ExitStack() as stack,
    ):
        with supplier.connection():
            take_all(crowded_dsn, stack)
            worker = threading.Thread(target=do, args=(supplier, 1))
            worker.start()
            wait_until(partial(is_waiting, supplier, 1))
        worker.join(WAIT_SECONDS_MAX)
        assert not worker.is_alive()
        do(supplier, 2)


def is_waiting(supplier: ConnectionSupplier, threads: int) -> bool:
    return supplier._pool is not None and len(supplier._pool._waiters) == threads


def test_borrowers_are_served_in_the_order_in_which_they_came(crowded_dsn: str) -> None:
    served: list[int] = []

    def borrow(number: int) -> None:
        with supplier.connection():
            served.append(number)

    with closing(ConnectionSupplier(crowded_dsn, connections_max=1)) as supplier:
        threads = [threading.Thread(target=borrow, args=(n,)) for n in range(10)]
        with supplier.connection():
            for number, thread in enumerate(threads):
                thread.start()
                wait_until(partial(is_waiting, supplier, number + 1))
        for thread in threads:
            thread.join(60)
    assert served == list(range(10))


def test_an_interrupted_wait_loses_no_connection(crowded_dsn: str) -> None:
    with closing(ConnectionSupplier(crowded_dsn, connections_max=1)) as supplier:
        with supplier.connection():
            pool = supplier._pool
            assert pool is not None
            waiter = pool._queue(has_slot=False)
            waiter.called = Interrupting()
            with pytest.raises(KeyboardInterrupt):
                pool._wait(waiter, time.monotonic() + 10)
        waiter = pool._queue(has_slot=False)
        waiter.called = Interrupting()
        with pool._lock:
            pool._waiters.remove(waiter)
        waiter.conn = pool._idle.pop()  # a connection that was handed over at the instant of the interrupt
        with pytest.raises(KeyboardInterrupt):
            pool._wait(waiter, time.monotonic() + 10)
        do(supplier, 1)


class Interrupting(threading.Event):
    def wait(self, timeout: float | None = None) -> bool:
        raise KeyboardInterrupt


@pytest.mark.slow
def test_no_idle_connection_is_kept_when_the_server_is_nearly_full(crowded_dsn: str) -> None:
    with closing(ConnectionSupplier(crowded_dsn)) as supplier, ExitStack() as stack:
        for _ in range(80):
            stack.enter_context(psycopg.connect(crowded_dsn, autocommit=True))
        with supplier.connection() as first:
            pass
        assert first.closed
        stack.close()
        with supplier.connection() as second:
            pass
        assert not second.closed


def test_an_old_connection_is_not_kept(crowded_dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dormouse.postgres.connection.OPEN_SECONDS_MAX", -1.0)
    with closing(ConnectionSupplier(crowded_dsn)) as supplier:
        with supplier.connection() as conn:
            pass
        assert conn.closed


@pytest.fixture
def restartable(server_folder: Path) -> Iterator[Restartable]:
    """Yields a server that workers have used: its DSN, how to stop it, and how to start it again."""
    with ExitStack() as stack:

        def start() -> str:
            return stack.enter_context(EmbeddedPostgres(server_folder)).dsn

        def stop() -> None:
            process = postmaster(server_folder)
            process.send_signal(signal.SIGQUIT)
            psutil.wait_procs([process], timeout=WAIT_SECONDS_MAX)

        dsn = start()
        with psycopg.connect(dsn, autocommit=True) as conn:
            conn.execute("create table done (worker integer primary key)")
        yield dsn, stop, start


@pytest.mark.slow
def test_a_supplier_waits_for_a_restarted_server_that_it_has_reached_before(restartable: Restartable) -> None:
    dsn, stop, start = restartable
    patient, hasty, stranger = (
        ConnectionSupplier(dsn, wait_seconds_max=seconds)
        for seconds in (WAIT_SECONDS_MAX, 0.2, WAIT_SECONDS_MAX)
    )
    with closing(patient), closing(hasty), closing(stranger):
        do(patient, 1)
        do(hasty, 2)
        stop()
        with pytest.raises(InstanceError, match=r"^cannot connect to .* \(for 0\.2 s\)$"):
            do(hasty, 3)
        with pytest.raises(InstanceError, match=r"^cannot connect to .*(?<! s\))$"):
            do(stranger, 3)
        workers = [threading.Thread(target=do, args=(patient, n)) for n in range(10, 30)]
        for worker in workers:
            worker.start()
        workers[0].join(0.2)
        assert all(worker.is_alive() for worker in workers)
        start()
        for worker in workers:
            worker.join(WAIT_SECONDS_MAX)
    assert done(dsn) == 22
