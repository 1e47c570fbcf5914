"""Closing and stopping end, even if the server accepts connections and never answers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.errors import InstanceError
from dormouse.postgres import ConnectionSupplier, connection, listening, run_statement, session
from dormouse.postgres.session import PAGED
from dormouse.postgres.transaction import bounded
from dormouse.state.commits import committer as committer_module
from tests.cutting import CuttingProxy
from tests.frozen_server import OTHERS, frozen_sessions
from tests.standard import OF_K
from tests.stored import query
from tests.working import PATIENCE_SECONDS, until


@pytest.fixture
def apart(dsn: str) -> Iterator[ConnectionSupplier]:
    """Yields a separate connection supplier, whose sessions the test does not freeze."""
    with closing(ConnectionSupplier(dsn)) as supplier:
        yield supplier


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session, connection, listening):
        monkeypatch.setattr(module, "END_SECONDS_MAX", 0.5)
    for module in (connection, committer_module):
        monkeypatch.setattr(module, "CLOSE_SECONDS", 0.5)


class Ended:
    """A thread that runs a function, and a check that it ends in time."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.error: BaseException | None = None
        self._work = work
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error

    def check(self) -> None:
        self.thread.join(PATIENCE_SECONDS)
        assert not self.thread.is_alive()


def asks(pid: int, supplier: ConnectionSupplier) -> bool:
    found = query(supplier, f"select wait_event from pg_stat_activity where pid = {pid}")
    return found == [("PgSleep",)]


@pytest.mark.slow
def test_committers_and_the_instance_close_though_all_sessions_are_frozen(
    dsn: str, tmp_path: Path, apart: ConnectionSupplier
) -> None:
    instance = dm.connect(dsn, (tmp_path / "objects").as_uri())
    instance.create_table("t", OF_K)
    committers = [instance.committer(concurrency=2) for _ in range(3)]
    running = [Ended(one.run) for one in committers]
    until(lambda: len(query(apart, OTHERS)) >= 3)
    with frozen_sessions(apart):
        Ended(instance.close).check()
        for one in running:
            one.check()  # no thread is left for which the program would wait
    assert not [one for one in threading.enumerate() if one.name.startswith("committer")]
    assert all(
        one.error is None or "did not answer for 0.5 s: its messages are delivered again" in str(one.error)
        for one in running
    )
    assert any(one.error for one in running)


@pytest.mark.slow
def test_statements_of_other_threads_end_after_the_close(dsn: str, apart: ConnectionSupplier) -> None:
    supplier, pids = ConnectionSupplier(dsn), []

    def work(conn: object) -> None:
        pids.append(conn.info.backend_pid)
        conn.execute("select pg_sleep(1000)")

    hanging = Ended(lambda: run_statement(supplier, work))
    until(lambda: pids and asks(pids[0], apart))
    with frozen_sessions(apart):
        supplier.close()
        hanging.check()
    assert isinstance(hanging.error, dm.DormouseError)
    with pytest.raises(InstanceError, match="the instance is closed"), supplier.connection():
        pass


def test_closing_a_healthy_supplier_cuts_no_connections(dsn: str) -> None:
    supplier = ConnectionSupplier(dsn)
    with supplier.connection() as conn:
        assert supplier._lines._lent() == [conn]
        with closing(supplier.limited(lock_timeout=1)) as part, part.connection() as other:
            assert part._lines._lent() == [other]
            assert set(supplier._lines._lent()) == {conn, other}
    assert supplier._lines._lent() == []
    supplier.close()
    assert not [one for one in threading.enumerate() if one.name == "dormouse-cut"]


@pytest.mark.slow
def test_a_reader_closes_though_its_session_is_frozen(dsn: str, apart: ConnectionSupplier) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:

        def pages() -> Iterator[int]:
            with supplier.connection() as conn, bounded(conn, PAGED):
                yield conn.execute("select 1").fetchone()[0]
                raise AssertionError

        def left() -> Iterator[int]:
            with supplier.connection() as conn:
                conn.execute("begin")
                yield conn.execute("select 1").fetchone()[0]

        for reader in (pages(), left()):
            assert next(reader) == 1
            with frozen_sessions(apart):
                Ended(reader.close).check()


@pytest.mark.slow
def test_a_worker_stops_while_it_opens_a_connection_that_is_never_answered(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: ConnectionSupplier
) -> None:
    monkeypatch.setattr(session, "_CONNECT_SECONDS_MAX", 2)  # the time limit of psycopg for each attempt
    looks, look = threading.Event(), ConnectionSupplier._look
    with closing(CuttingProxy(dsn)) as proxy:
        instance = dm.connect(proxy.dsn, (tmp_path / "objects").as_uri())
        instance._supplier._wait_seconds_max = 1.0  # the time limit for all attempts
        worker = instance.jobs.worker({"work": lambda *_: None})

        def silent_look(self: ConnectionSupplier, conn: object) -> None:
            proxy.fall_silent()
            looks.set()
            look(self, conn)

        monkeypatch.setattr(ConnectionSupplier, "_look", silent_look)
        with instance._supplier._lock:
            instance._supplier._pool.close()
            instance._supplier._pool = None  # so that the worker opens a connection
        running = Ended(worker.run)
        assert looks.wait(PATIENCE_SECONDS)
        worker.stop()
        running.check()
        Ended(instance.close).check()


PROGRAM = """
import sys
from dormouse.state.commits import committer
from dormouse.postgres import connection, session
for module in (session, connection):
    module.END_SECONDS_MAX = 0.5
for module in (connection, committer):
    module.CLOSE_SECONDS = 0.5
from dormouse.cli.program import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.slow
def test_the_committer_program_ends_though_all_sessions_are_frozen(
    dsn: str, tmp_path: Path, apart: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects):
        pass
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", objects)
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "committer"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert program.stderr is not None
        while "the committer runs" not in program.stderr.readline():
            assert program.poll() is None
        # the signal must interrupt its threads, which wait for messages
        until(lambda: len(query(apart, "select 1 from commit_waiter")) >= 2)
        with frozen_sessions(apart):
            program.send_signal(signal.SIGTERM)
            said = program.communicate(timeout=PATIENCE_SECONDS)[1]
    finally:
        program.kill()
        program.wait()
    assert program.returncode == 1
    (line,) = [line for line in said.splitlines() if "did not answer" in line]
    assert line.startswith("dormouse") and "Traceback" not in said
