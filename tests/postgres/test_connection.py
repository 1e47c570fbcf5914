from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, date, datetime

import psycopg
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from dormouse.errors import ConnectionsExhausted, InstanceError, InvalidInput
from dormouse.postgres import ConnectionSupplier, Isolation, Supplier, session
from dormouse.postgres import connection as connection_module
from tests.databases import OWN_NAME


def backend_pid(supplier: Supplier) -> int:
    with supplier.connection() as conn:
        return conn.info.backend_pid


def open_connections(dsn: str) -> int:
    """Returns the number of other connections to the database."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        query = """select count(*) from pg_stat_activity
                   where datname = current_database() and pid <> pg_backend_pid()
                       and application_name <> %s"""
        (count,) = conn.execute(query, [OWN_NAME]).fetchone() or (0,)
        return int(count)


def eventually(condition: Callable[[], bool], seconds_max: float = 60) -> bool:
    deadline = time.monotonic() + seconds_max
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def ends_well(child: int) -> bool:
    """Returns whether a forked child exits with 0 in time; kills a child that hangs."""
    ended: list[int] = []

    def has_ended() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([status] if pid else [])
        return bool(ended)

    if not eventually(has_ended):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return ended == [0]


def terminate(dsn: str, pid: int) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("select pg_terminate_backend(%s, 5000)", [pid])


def test_a_session_is_in_autocommit_and_utc_and_sees_our_schema(dsn: str) -> None:
    with (
        closing(ConnectionSupplier(dsn, application_name="sleepy")) as supplier,
        supplier.connection() as conn,
    ):
        names = ("search_path", "timezone", "application_name", "default_transaction_isolation")
        values = [conn.execute(f"show {name}").fetchone() for name in names]
        assert values == [("dormouse",), ("UTC",), ("sleepy",), ("read committed",)]
        assert conn.autocommit


def test_a_session_can_be_read_only_and_of_another_isolation(dsn: str) -> None:
    with (
        closing(ConnectionSupplier(dsn, read_only=True, isolation=Isolation.REPEATABLE_READ)) as supplier,
        supplier.connection() as conn,
    ):
        assert conn.execute("show default_transaction_isolation").fetchone() == ("repeatable read",)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            conn.execute("create table public.t ()")


def test_dates_are_read_whatever_style_the_server_has(dsn: str) -> None:
    database = str(conninfo_to_dict(dsn)["dbname"])
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(sql.SQL("alter database {} set datestyle = 'SQL, DMY'").format(sql.Identifier(database)))
    with closing(ConnectionSupplier(dsn)) as supplier, supplier.connection() as conn:
        text = "select '2024-03-05 12:00Z'::timestamptz, '2024-03-05'::date"
        assert conn.execute(text).fetchone() == (datetime(2024, 3, 5, 12, tzinfo=UTC), date(2024, 3, 5))


def test_the_dsn_s_own_options_are_kept(dsn: str) -> None:
    own = make_conninfo(dsn, options="-c work_mem=7MB", application_name="mine")
    with closing(ConnectionSupplier(own)) as supplier, supplier.connection() as conn:
        assert conn.execute("show work_mem").fetchone() == ("7MB",)
        assert conn.execute("show application_name").fetchone() == ("mine",)


def test_no_connection_is_opened_before_the_first_use(dsn: str) -> None:
    with closing(ConnectionSupplier(dsn)):
        assert open_connections(dsn) == 0


def test_a_connection_is_kept_for_the_next_call(supplier: ConnectionSupplier) -> None:
    assert backend_pid(supplier) == backend_pid(supplier)


def test_connections_are_closed_when_idle(dsn: str) -> None:
    with closing(ConnectionSupplier(dsn, connections_max=2, idle_seconds_max=0.2)) as supplier:
        with supplier.connection(), supplier.connection():
            assert open_connections(dsn) == 2
        assert eventually(lambda: open_connections(dsn) == 0)
        assert backend_pid(supplier) > 0


def test_fifty_threads_share_four_connections(dsn: str) -> None:
    in_use, most, lock = 0, 0, threading.Lock()

    def use() -> int:
        nonlocal in_use, most
        with supplier.connection() as conn:
            with lock:
                in_use += 1
                most = max(most, in_use)
            conn.execute("select pg_sleep(0.005)")
            with lock:
                in_use -= 1
            return conn.info.backend_pid

    with closing(ConnectionSupplier(dsn, connections_max=4)) as supplier, ThreadPoolExecutor(50) as threads:
        pids = {future.result() for future in [threads.submit(use) for _ in range(200)]}
    assert most == 4
    assert len(pids) == 4


@pytest.mark.slow
def test_a_server_that_accepts_and_never_answers_is_reported_as_such() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        dsn = f"postgresql://user@127.0.0.1:{port}/db?connect_timeout=2"
        with (
            closing(ConnectionSupplier(dsn, wait_seconds_max=0.1)) as supplier,
            pytest.raises(
                InstanceError, match=rf"^PostgreSQL at 127\.0\.0\.1:{port}, .* does not answer: [^\n]*$"
            ),
            supplier.connection(),
        ):
            pass


def test_waiting_past_the_bound_raises_one_clear_error(dsn: str) -> None:
    with closing(ConnectionSupplier(dsn, connections_max=1, wait_seconds_max=0.1)) as supplier:
        with (
            supplier.connection(),
            pytest.raises(ConnectionsExhausted, match=r"^none of the 1 connections .* within 0\.1 s;[^\n]*$"),
            supplier.connection(),
        ):
            pass
        assert backend_pid(supplier) > 0


def test_a_connection_that_died_in_the_pool_is_replaced_unnoticed(
    dsn: str, supplier: ConnectionSupplier
) -> None:
    pid = backend_pid(supplier)
    terminate(dsn, pid)
    with supplier.connection() as conn:
        assert conn.execute("select 1").fetchone() == (1,)
        assert conn.info.backend_pid != pid


def test_all_pooled_connections_may_die_at_once(dsn: str, supplier: ConnectionSupplier) -> None:
    with supplier.connection() as one, supplier.connection() as two, supplier.connection() as three:
        pids = [conn.info.backend_pid for conn in (one, two, three)]
    for pid in pids:
        terminate(dsn, pid)
    assert backend_pid(supplier) not in pids


def test_only_an_idle_connection_is_checked_before_it_is_lent(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a round trip shows that a peer has vanished. Only idle connections get this check."""
    asked = []
    is_alive = connection_module.is_alive

    def recording(conn: psycopg.Connection, *, ask: bool = False) -> bool:
        asked.append(ask)
        return is_alive(conn, ask=ask)

    monkeypatch.setattr(connection_module, "is_alive", recording)
    with closing(ConnectionSupplier(dsn)) as supplier:
        for _ in range(3):
            backend_pid(supplier)
        monkeypatch.setattr(connection_module, "CHECK_AFTER_IDLE_SECONDS", -1.0)
        backend_pid(supplier)
    assert asked == [False, False, False, True]


def test_an_unread_notice_does_not_mark_a_connection_as_dead(dsn: str, supplier: ConnectionSupplier) -> None:
    with supplier.connection() as conn:
        conn.execute("listen news")
        pid = conn.info.backend_pid
    with psycopg.connect(dsn, autocommit=True) as other:
        other.execute("notify news")
    assert backend_pid(supplier) == pid


def test_an_open_transaction_is_rolled_back_when_the_connection_returns(supplier: ConnectionSupplier) -> None:
    with supplier.connection() as conn:
        conn.execute("create table public.t ()")
        conn.execute("begin; drop table public.t")
    with supplier.connection() as conn:
        assert conn.execute("select count(*) from public.t").fetchone() == (0,)


def test_a_forked_child_leaves_its_parent_s_connections_alone(supplier: ConnectionSupplier) -> None:
    pid = backend_pid(supplier)
    reader, writer = os.pipe()
    with supplier.connection() as borrowed:
        child = os.fork()
        if child == 0:
            try:
                os.write(writer, str(backend_pid(supplier)).encode())
                supplier.close()
            finally:
                os._exit(0)
        assert ends_well(child)
        assert borrowed.execute("select 1").fetchone() == (1,)
    child_pid = int(os.read(reader, 100))
    assert child_pid not in (0, pid)
    assert backend_pid(supplier) == pid


def test_a_child_forked_while_a_thread_opens_the_pool_is_not_stuck(dsn: str) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        supplier._lock.acquire()  # as if another thread held the lock at the moment of the fork
        child = os.fork()
        if child == 0:
            os._exit(0 if backend_pid(supplier) else 1)
        supplier._lock.release()
        assert ends_well(child)


def test_a_closed_supplier_lends_no_connections(dsn: str) -> None:
    supplier = ConnectionSupplier(dsn)
    backend_pid(supplier)
    supplier.close()
    supplier.close()
    assert eventually(lambda: open_connections(dsn) == 0)
    with pytest.raises(InstanceError, match="closed"), supplier.connection():
        pass


def test_an_unreachable_server_is_reported_at_once_without_the_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        dsn = f"postgresql://me:s3cret@127.0.0.1:{unused.getsockname()[1]}/lake"
        supplier = ConnectionSupplier(dsn, wait_seconds_max=30)
        with (
            closing(supplier),
            pytest.raises(
                InstanceError, match=r"^cannot connect to PostgreSQL at 127\.0\.0\.1:\d+.*'lake'"
            ) as caught,
            supplier.connection(),
        ):
            pass
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_database_that_does_not_exist_is_reported(server_dsn: str) -> None:
    with (
        closing(ConnectionSupplier(make_conninfo(server_dsn, dbname="nowhere"))) as supplier,
        pytest.raises(InstanceError, match='database "nowhere" does not exist'),
        supplier.connection(),
    ):
        pass


def test_a_stopped_server_is_distinguished_from_a_busy_one(dsn: str) -> None:
    name = psycopg.conninfo.conninfo_to_dict(dsn)["dbname"]
    with (
        closing(ConnectionSupplier(dsn, connections_max=1, wait_seconds_max=0.3)) as supplier,
        supplier.connection(),
        psycopg.connect(make_conninfo(dsn, dbname="postgres"), autocommit=True) as conn,
    ):
        conn.execute(f'alter database "{name}" allow_connections false')
        with pytest.raises(InstanceError, match="cannot connect"), supplier.connection():
            pass


@pytest.mark.parametrize("dsn", ["postgresql://[", "what is s3cret", "host=a nonsense=s3cret"])
def test_a_malformed_dsn_is_refused_without_quoting_it(dsn: str) -> None:
    with pytest.raises(InvalidInput, match="not a PostgreSQL connection string") as caught:
        ConnectionSupplier(dsn)
    assert "s3cret" not in str(caught.value)


@pytest.fixture
def _newer_minimum(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(session, "POSTGRES_VERSION_MIN", 990000)
    return


@pytest.mark.usefixtures("_newer_minimum")
def test_a_server_that_is_too_old_is_refused(dsn: str) -> None:
    with (
        closing(ConnectionSupplier(dsn)) as supplier,
        pytest.raises(InstanceError, match="is version 18; Dormouse needs 15 or later"),
        supplier.connection(),
    ):
        pass
