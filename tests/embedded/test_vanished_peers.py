"""Peers that vanish without a message. Both ends of every connection notice this, and a worker stops."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.postgres import ConnectionSupplier, listening
from dormouse.postgres.session import PEER_SECONDS_MAX
from tests.cutting import CAN_VANISH, IMPATIENT, CuttingProxy
from tests.standard import OF_K
from tests.support.embedded import EmbeddedPostgres
from tests.working import PATIENCE_SECONDS, until

SEEN_BY_SERVER = {
    "tcp_user_timeout": "60000",
    "tcp_keepalives_idle": "30",
    "tcp_keepalives_interval": "10",
    "tcp_keepalives_count": "3",
    "client_connection_check_interval": "10s",
}


@contextmanager
def over_tcp(tmp_path: Path) -> Iterator[str]:
    """Yields the DSN of a server that is reached by TCP."""
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {"listen_addresses": "127.0.0.1", "port": str(port), "fsync": "off"}
    with EmbeddedPostgres(tmp_path / "lake", options=options) as server:
        with psycopg.connect(server.dsn, autocommit=True) as conn:
            conn.execute("alter role dormouse password 'secret'")
        yield make_conninfo(server.dsn, host="127.0.0.1", password="secret")  # noqa: S106


@pytest.mark.slow
def test_both_ends_of_every_connection_notice_a_peer_that_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    connect = psycopg.Connection.connect.__func__

    def noted(*values: object, **more: object) -> object:
        conn = connect(*values, **more)
        with closing(socket.socket(fileno=os.dup(conn.fileno()))) as same:
            made.append(same.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT))
        found = {name: conn.execute(f"show {name}").fetchone()[0] for name in SEEN_BY_SERVER}
        assert found == SEEN_BY_SERVER
        return conn

    with over_tcp(tmp_path) as dsn:
        monkeypatch.setattr(psycopg.Connection, "connect", classmethod(noted))
        with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
            table = instance.create_table("t", OF_K)
            table.ingest({"k": [1]})
            assert table.query().read_all().num_rows == 1
            rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
            rows.change([dm.Insert([{"n": 1}])])
            rows.query("select n from r", wait_seconds=60)
            instance.jobs.start("work", None)
            instance.jobs.worker({"work": lambda *_: None}).run(drain=True)
        assert len(made) > 3 and set(made) == {1_000 * PEER_SECONDS_MAX}


def test_limits_of_peers_in_the_dsn_are_kept(dsn: str) -> None:
    given = make_conninfo(dsn, options="-c client_connection_check_interval=3s", keepalives_idle=7)
    with closing(ConnectionSupplier(given)) as supplier, supplier.connection() as conn:
        assert conn.execute("show client_connection_check_interval").fetchone() == ("3s",)
        assert conninfo_to_dict(supplier._conninfo)["keepalives_idle"] == "7"


@pytest.mark.slow
def test_a_worker_stops_in_time_though_the_database_fell_silent(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "END_SECONDS_MAX", 0.5)
    with (
        closing(CuttingProxy(dsn)) as proxy,
        dm.connect(proxy.dsn, (tmp_path / "objects").as_uri()) as instance,
    ):
        worker = instance.jobs.worker({"work": lambda *_: None})
        thread = threading.Thread(target=worker.run, daemon=True)
        thread.start()
        until(lambda: worker._is_announced)
        proxy.fall_silent()
        worker.stop()
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive() and worker._line.is_cut
        proxy.close()  # otherwise closing the instance would wait for the silent server


@pytest.mark.slow
@pytest.mark.skipif(not CAN_VANISH, reason="a proxy cannot vanish without the filters of Linux")
def test_a_call_ends_though_its_server_vanished(dsn: str) -> None:
    with (
        closing(CuttingProxy(dsn)) as proxy,
        psycopg.connect(make_conninfo(proxy.dsn, **IMPATIENT), autocommit=True) as conn,
    ):
        assert conn.execute("select 1").fetchone() == (1,)
        proxy.fall_silent()
        with pytest.raises(psycopg.OperationalError, match="timed out"):
            conn.execute("select pg_sleep(600)")
