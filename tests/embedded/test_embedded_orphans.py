"""Backends that outlive their postmaster. They do not block the folder, and no live server is ended."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from embedded import OTHER_PROCESS, ask, other_process, postmaster, runs, said

from dormouse.embedded import running
from dormouse.embedded.server import Server
from dormouse.errors import InstanceLocked
from tests.support.embedded import EmbeddedPostgres

SOON_SECONDS = 20
"""A limit that is longer than a recovery on a busy machine, and far shorter than that of a test."""


@pytest.fixture
def orphan(server_folder: Path) -> Iterator[psutil.Process]:
    """Yields a suspended backend. The postmaster and user of its server were killed, as after a hung disk."""
    with other_process(server_folder) as other:
        assert said(other) == "started"
        with psycopg.connect(Server(server_folder).dsn()) as session:
            session.execute("create table t as select 7 as x")
            session.commit()
            backend = psutil.Process(session.info.backend_pid)
            backend.suspend()
            killed = [postmaster(server_folder), psutil.Process(other.pid)]
            for process in killed:
                process.kill()
            other.wait()
    psutil.wait_procs(killed[:1], SOON_SECONDS)
    yield backend
    if backend.is_running():
        backend.kill()


@pytest.mark.slow
def test_an_orphan_that_never_notices_is_ended_by_the_next_start(
    server_folder: Path, orphan: psutil.Process, caplog: pytest.LogCaptureFixture
) -> None:
    with EmbeddedPostgres(server_folder, seconds_max=SOON_SECONDS) as server:
        assert ask(server.dsn, "select x from t") == 7
        assert not running.is_alive(orphan)
    assert f"killed process {orphan.pid} (postgres: dormouse postgres [local] idle" in caplog.text


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="root gives up a right")
def test_root_without_access_to_other_users_processes_ends_an_orphan(
    server_folder: Path, orphan: psutil.Process
) -> None:
    """A container may lack CAP_SYS_PTRACE."""
    command = ["setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace"]
    look = [*command, sys.executable, "-c", f"import os; os.readlink('/proc/{orphan.pid}/cwd')"]
    assert b"PermissionError" in subprocess.run(look, check=False, capture_output=True).stderr
    other = [*command, sys.executable, "-c", OTHER_PROCESS, str(server_folder)]
    done = subprocess.run(other, check=False, capture_output=True, text=True, input="\n")
    assert (done.stdout, done.returncode) == ("started\n", 0), done.stderr
    assert not running.is_alive(orphan)
    assert not runs(server_folder)


@pytest.mark.slow
def test_simultaneous_starts_end_an_orphan_and_share_one_server(
    server_folder: Path, orphan: psutil.Process
) -> None:
    with other_process(server_folder) as one, other_process(server_folder) as two:
        assert sorted([said(one), said(two)]) == ["joined", "started"]
        assert not running.is_alive(orphan)
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_process_with_the_dead_server_s_id_does_not_prevent_a_start(
    server_folder: Path, orphan: psutil.Process
) -> None:
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        pid_file = server_folder / "postgres" / "postmaster.pid"
        rest = pid_file.read_text().partition("\n")[2]
        pid_file.write_text(f"{sleeper.pid}\n{rest}")
        lease = server_folder / running.NAME
        lease.write_text(json.dumps({**json.loads(lease.read_text()), "pid": sleeper.pid}))
        assert not running.is_held_by(server_folder, sleeper.pid)
        with EmbeddedPostgres(server_folder, seconds_max=SOON_SECONDS) as server:
            assert ask(server.dsn, "select x from t") == 7
        assert sleeper.poll() is None
    finally:
        sleeper.kill()
        sleeper.wait()
    assert not running.is_alive(orphan)


@pytest.mark.slow
@pytest.mark.parametrize(("damage", "signed"), [("", True), ("1\n", False)])
def test_a_live_server_s_backends_are_never_ended(server_folder: Path, damage: str, *, signed: bool) -> None:
    """The files postmaster.pid and lease may have any content.

    The process that started the server may be dead, and the server may be suspended.
    """
    with other_process(server_folder) as other:
        assert said(other) == "started"
        other.kill()
        other.wait()
    main = postmaster(server_folder)
    with psycopg.connect(Server(server_folder).dsn(), autocommit=True) as session:
        pid_file, lease = server_folder / "postgres" / "postmaster.pid", server_folder / running.NAME
        written = pid_file.read_text()
        pid_file.write_text(damage)
        if not signed:
            lease.write_text("")
        main.suspend()
        try:
            with pytest.raises(InstanceLocked, match=rf"process {main.pid} \(/.*/postgres -D"):
                EmbeddedPostgres(server_folder, seconds_max=2 * running.ORPHAN_SECONDS).start()
        finally:
            main.resume()
        assert session.execute("select 1").fetchone() == (1,)
        pid_file.write_text(written)
    with EmbeddedPostgres(server_folder) as server:
        assert postmaster(server_folder) == main
        assert ask(server.dsn, "select 1") == 1


@pytest.mark.slow
def test_a_process_that_is_not_a_backend_of_the_folder_is_named_and_not_killed(
    server_folder: Path, orphan: psutil.Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An orphan that cannot be proved to be one, because its directory cannot be read, is not killed
    either.
    """
    monkeypatch.setattr(running, "_works_in", lambda process, folder: False)
    with pytest.raises(InstanceLocked, match=rf"is locked by process {orphan.pid} \(postgres: .* end what"):
        EmbeddedPostgres(server_folder, seconds_max=2 * running.ORPHAN_SECONDS).start()
    assert orphan.status() == psutil.STATUS_STOPPED


@pytest.mark.slow
def test_an_invisible_holder_is_reported(server_folder: Path) -> None:
    """The server that signed the lease is dead here. A process in another namespace holds the lock."""
    with other_process(server_folder) as other:
        assert said(other) == "started"
    with (server_folder / running.NAME).open() as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        with pytest.raises(InstanceLocked, match="is locked by a process that cannot be seen from here"):
            EmbeddedPostgres(server_folder, seconds_max=0.1).start()
