"""The server of one folder: its setup, use, death and refusals."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from contextlib import closing
from pathlib import Path

import psutil
import psycopg
import pytest
from embedded import NOBODY, as_ordinary_user, ask, on_tcp, postmaster, runs, tell
from psycopg.conninfo import conninfo_to_dict

from dormouse.embedded import server as embedded_server
from dormouse.embedded import server as server_log
from dormouse.errors import InstanceError, InstanceLocked, InstanceTooNew, NotAnInstance
from dormouse.postgres import ConnectionSupplier
from tests.stored import wait_until
from tests.support.embedded import EmbeddedPostgres


def test_a_new_folder_gets_a_durable_server_of_version_18(tmp_path: Path) -> None:
    with EmbeddedPostgres(tmp_path / "new" / "lake") as server:
        assert not server.joined
        assert str(ask(server.dsn, "show server_version")).startswith("18.")
        settings = {
            "fsync": "on",
            "jit": "off",
            "timezone": "UTC",
            "max_connections": "100",
            "listen_addresses": "",
        }
        assert {name: ask(server.dsn, f"show {name}") for name in settings} == settings
        assert (
            ask(server.dsn, "select datlocale from pg_database where datname = current_database()")
            == "C.UTF-8"
        )
    assert not runs(tmp_path / "new" / "lake")


def test_data_is_there_when_the_folder_is_opened_again(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder) as server:
        tell(server.dsn, "create table t as select 7 as x")
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select x from t") == 7


@pytest.mark.slow
def test_only_the_owner_can_reach_the_server(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder) as server:
        assert f"host={server_folder}/postgres" in server.dsn
        assert (server_folder / "postgres").stat().st_mode & 0o777 == 0o700


@pytest.mark.slow
def test_committed_data_survives_the_kill_of_the_server(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder) as server:
        tell(server.dsn, "create table t as select generate_series(1, 10000) as x")
        postmaster(server_folder).kill()
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined
        assert ask(server.dsn, "select count(*) from t") == 10000
    assert not runs(server_folder)


def test_a_server_that_died_is_started_again_for_the_next_user(server_folder: Path) -> None:
    """No other user was recorded for the dead server, but its first user may still be active."""
    with EmbeddedPostgres(server_folder) as first:
        dead = postmaster(server_folder)
        dead.kill()
        psutil.wait_procs([dead], timeout=60)
        with EmbeddedPostgres(server_folder) as second:
            assert second.joined
            assert ask(first.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_pid_file_with_the_id_of_another_process_does_not_prevent_a_start(server_folder: Path) -> None:
    """PostgreSQL itself would refuse to start, because a process of the same user has that id."""
    data = server_folder / "postgres"
    pid_file = data / "postmaster.pid"
    user = data.stat().st_uid if os.geteuid() == 0 else None
    with subprocess.Popen(["sleep", "60"], user=user) as other:
        pid_file.write_text(f"{other.pid}\n{data}\n1\n5432\n{data}\n\n1 1\nready\n")
        shutil.chown(pid_file, data.stat().st_uid)
        with EmbeddedPostgres(server_folder) as server:
            assert not server.joined
            assert ask(server.dsn, "select 1") == 1
        assert other.poll() is None
        other.kill()


@pytest.mark.slow
def test_a_killed_setup_is_started_again(tmp_path: Path) -> None:
    half = tmp_path / "postgres.new-0badcafe"
    half.mkdir()
    (half / "PG_VERSION").write_text("18\n")
    with EmbeddedPostgres(tmp_path) as server:
        assert ask(server.dsn, "select 1") == 1
    assert not half.exists()


@pytest.mark.slow
def test_ctrl_c_in_the_terminal_does_not_reach_the_server(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder):
        assert os.getsid(postmaster(server_folder).pid) != os.getsid(0)


@pytest.mark.slow
def test_a_server_on_tcp_requires_a_password(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder, options=on_tcp()) as server:
        assert ask(server.dsn, "select inet_server_addr()") is None
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(server.dsn, host="127.0.0.1", password="guess")  # noqa: S106


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["x" * 120, "with space", "a,b 'c' \"d\" ü"])
def test_the_folder_may_have_any_name(server_folder: Path, name: str) -> None:
    """A socket's path may have at most 107 bytes, and a comma separates hosts in a DSN."""
    odd = server_folder.rename(server_folder.with_name(name))
    with EmbeddedPostgres(odd) as server:
        assert ask(server.dsn, "select 1") == 1
        socket_folder = Path(str(conninfo_to_dict(server.dsn)["host"]))
    assert not runs(odd)
    assert socket_folder == odd / "postgres" or not socket_folder.exists()


@pytest.mark.slow
def test_the_folder_for_temporary_files_may_have_a_long_path(
    server_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("y" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    odd = server_folder.rename(server_folder.with_name("x" * 120))
    with EmbeddedPostgres(odd) as server:
        assert ask(server.dsn, "select 1") == 1
        socket_folder = Path(str(conninfo_to_dict(server.dsn)["host"]))
    assert not socket_folder.exists()
    assert list(deep.iterdir()) == []


def test_a_relative_path_and_a_link_mean_the_same_folder(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(server_folder.parent)
    link = server_folder.with_name("link")
    link.symlink_to(server_folder)
    with EmbeddedPostgres("lake") as one, EmbeddedPostgres(link) as two:
        assert one.dsn == two.dsn
        assert two.joined


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("version", "error"), [("19", InstanceTooNew), ("17", InstanceError), ("soup", NotAnInstance)]
)
def test_a_folder_of_another_postgresql_is_refused(
    server_folder: Path, version: str, error: type[Exception]
) -> None:
    (server_folder / "postgres" / "PG_VERSION").write_text(version)
    with pytest.raises(error, match="postgres"):
        EmbeddedPostgres(server_folder).start()


def test_a_folder_that_holds_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "postgres").mkdir()
    (tmp_path / "postgres" / "notes.txt").write_text("mine")
    with pytest.raises(NotAnInstance, match="not the data directory"):
        EmbeddedPostgres(tmp_path).start()
    (tmp_path / "file").write_text("")
    with pytest.raises(NotAnInstance, match="is not a folder"):
        EmbeddedPostgres(tmp_path / "file").start()


@pytest.mark.slow
def test_a_server_that_does_not_start_is_reported_with_the_end_of_its_log(server_folder: Path) -> None:
    with pytest.raises(InstanceError, match=r"does not start: .*nonsense"):
        EmbeddedPostgres(server_folder, options={"nonsense": "1"}).start()
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined


@pytest.mark.slow
def test_a_recovery_that_takes_too_long_is_reported_and_continues(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder) as server:
        tell(server.dsn, "create table t as select generate_series(1, 300000) as x")
        killed = postmaster(server_folder)
        ending = [killed, *killed.children()]  # these processes hold the lease for a moment
        killed.kill()
        psutil.wait_procs(ending, timeout=60)
    with pytest.raises(InstanceError, match="try again when it has recovered"):
        EmbeddedPostgres(server_folder, seconds_max=0).start()
    # the process counts as PostgreSQL once exec has replaced the fork of this process
    wait_until(lambda: bool(embedded_server._processes_in(server_folder / "postgres")), 60)
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select count(*) from t") == 300000


def test_the_log_is_rotated_while_the_server_writes_it(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_log, "LOG_BYTES_MAX", 100_000)
    monkeypatch.setattr(server_log, "WATCH_SECONDS", 0.02)
    log, old = server_folder / "postgres.log", server_folder / "postgres.log.old"
    with EmbeddedPostgres(server_folder) as server, EmbeddedPostgres(server_folder):
        for number in range(3):
            tell(server.dsn, f"do $$ begin raise warning 'n{number} % end', repeat('x', 150000); end $$")
            wait_until(lambda: log.stat().st_size < 100_000)
            assert old.stat().st_size >= 100_000
            assert f"n{number}" not in old.read_text()  # the end of the log is kept
            # rotation may cut a line that the server is writing; the new log has the rest
            wait_until(lambda: (old.read_text() + log.read_text()).count(" end") == 1)
        tell(server.dsn, "do $$ begin raise warning 'it goes on'; end $$")
        wait_until(lambda: "it goes on" in log.read_text())
        assert "\0" not in log.read_text()
    assert (log.stat().st_mode | old.stat().st_mode) & 0o777 == 0o600


def test_a_log_that_two_processes_rotate_is_rotated_once(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server_folder.mkdir(exist_ok=True)
    path = server_folder / "postgres.log"
    path.write_bytes(b"begin" + bytes(100) + b"end")
    monkeypatch.setattr(server_log, "LOG_BYTES_MAX", 10)
    lock = server_log.try_lock

    def late(log: int) -> bool:
        monkeypatch.setattr(server_log, "try_lock", lock)
        server_log.ServerLog(path).rotate()
        return lock(log)

    monkeypatch.setattr(server_log, "try_lock", late)
    server_log.ServerLog(path).rotate()
    assert path.read_bytes() == b"" and path.with_suffix(".log.old").read_bytes().endswith(b"end")


@pytest.mark.slow
def test_waiting_for_another_process_s_setup_is_bounded(server_folder: Path) -> None:
    with (server_folder / "postgres.lock").open("w") as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        with pytest.raises(InstanceLocked, match=r"for 0\.1 s; try again"):
            EmbeddedPostgres(server_folder, seconds_max=0.1).start()
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined


@pytest.mark.slow
def test_a_supplier_reconnects_after_the_server_was_restarted(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder) as server, closing(ConnectionSupplier(server.dsn)) as supplier:
        with supplier.connection() as conn:
            conn.execute("select 1")
        process = postmaster(server_folder)
        process.kill()
        psutil.wait_procs([process], timeout=60)
        with EmbeddedPostgres(server_folder), supplier.connection() as conn:
            assert conn.execute("select 1").fetchone() == (1,)


@pytest.mark.slow
def test_an_ordinary_user_can_have_a_server(server_folder: Path) -> None:
    home = server_folder.with_name("home")
    home.mkdir()
    server_folder.parent.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)

    def work() -> None:
        with EmbeddedPostgres(home / "lake") as server:
            assert ask(server.dsn, "select 1") == 1

    assert as_ordinary_user(work) == ""
    assert (home / "lake" / "postgres").stat().st_uid == home.stat().st_uid
    assert not runs(home / "lake")


def test_a_folder_that_cannot_be_written_is_reported(server_folder: Path) -> None:
    def start(server_folder: Path) -> None:
        EmbeddedPostgres(server_folder).start()

    (server_folder / "postgres.lock").unlink()
    for one in (server_folder.parent, server_folder):
        one.chmod(0o555)
    try:
        for one in (server_folder, server_folder.with_name("new")):
            error = as_ordinary_user(lambda one=one: start(one))  # type: ignore[misc]
            assert error == f"InstanceReadOnly: cannot write to {one}: Permission denied"
    finally:
        for one in (server_folder.parent, server_folder):
            one.chmod(0o755)


def test_a_folder_that_belongs_to_another_user_is_reported(server_folder: Path) -> None:
    """Root made the folder, and then an ordinary user opens it."""
    server_folder.parent.chmod(0o755)
    server_folder.chmod(0o777)
    for name in ("postgres.lock", "postgres.lease"):
        (server_folder / name).unlink()
    (server_folder / "postgres").chmod(0o000)
    try:
        error = as_ordinary_user(lambda: str(EmbeddedPostgres(server_folder).start()) and None)
    finally:
        (server_folder / "postgres").chmod(0o700)
    assert error.startswith("InstanceError:")
    assert "belongs to another user" in error


def test_the_server_of_a_folder_that_was_deleted_is_stopped(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder):
        process = postmaster(server_folder)
        shutil.rmtree(server_folder)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
