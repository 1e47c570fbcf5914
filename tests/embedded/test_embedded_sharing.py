"""Threads and processes that open the same folder, and leave it in any order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import psycopg
import pytest
from embedded import ask, leave, other_process, postmaster, runs, said

import dormouse as dm
from dormouse.embedded import FORMAT, MARKER
from dormouse.embedded import server as embedded_server
from dormouse.embedded.server import Server
from dormouse.errors import InstanceError
from tests.stored import wait_until
from tests.support.api import Instance
from tests.support.embedded import EmbeddedPostgres


def lake(folder: Path) -> Instance:
    (folder / MARKER).write_text(json.dumps({"format": FORMAT}))
    return dm.local(folder)


def kill(server: psutil.Process) -> None:
    """Kills the server and its backends, because these would still answer for a moment."""
    processes = [server, *server.children()]
    server.kill()
    psutil.wait_procs(processes, timeout=60)


def test_several_opens_in_a_process_are_counted(server_folder: Path) -> None:
    first, second = EmbeddedPostgres(server_folder), EmbeddedPostgres(server_folder)
    assert first.start() == second.start()
    assert (first.joined, second.joined) == (False, True)
    first.stop()
    first.stop()
    assert ask(second.dsn, "select 1") == 1
    second.stop()
    assert not runs(server_folder)
    with pytest.raises(InstanceError, match="was not started"):
        _ = second.dsn


def test_threads_that_open_at_once_share_one_server(server_folder: Path) -> None:
    servers = [EmbeddedPostgres(server_folder) for _ in range(8)]
    with ThreadPoolExecutor(8) as threads:
        dsns = set(threads.map(EmbeddedPostgres.start, servers))
    assert len(dsns) == 1
    assert sum(not server.joined for server in servers) == 1
    for server in servers:
        server.stop()
    assert not runs(server_folder)


def test_the_last_process_that_leaves_stops_the_server(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        with EmbeddedPostgres(server_folder) as server:
            assert server.joined
            leave(other)
            assert ask(server.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_process_that_leaves_first_leaves_the_server_to_the_other(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder), other_process(server_folder) as other:
        assert said(other) == "joined"
        pid = postmaster(server_folder).pid
        with EmbeddedPostgres(server_folder):
            pass
        assert postmaster(server_folder).pid == pid
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_killed_process_does_not_keep_the_server(server_folder: Path) -> None:
    with EmbeddedPostgres(server_folder), other_process(server_folder) as other:
        assert said(other) == "joined"
        other.kill()
        other.wait()
    assert not runs(server_folder)


@pytest.mark.slow
def test_the_server_outlives_the_kill_of_the_process_that_started_it(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        with EmbeddedPostgres(server_folder) as server:
            other.kill()
            other.wait()
            assert ask(server.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_server_whose_killed_process_is_a_zombie_is_started_by_another(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        dead = postmaster(server_folder)
        dead.kill()
        wait_until(lambda: dead.status() == psutil.STATUS_ZOMBIE)
        with EmbeddedPostgres(server_folder) as server:
            assert server.joined
            assert ask(server.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_start_waits_for_a_server_that_is_shutting_down(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        said(other)
        other.kill()
        other.wait()
    leaving, server = postmaster(server_folder), EmbeddedPostgres(server_folder)
    with ThreadPoolExecutor(1) as threads:
        with psycopg.connect(Server(server_folder).dsn()):
            leaving.send_signal(signal.SIGTERM)  # the server waits for its clients
            wait_until(lambda: "stopping" in (server_folder / "postgres" / "postmaster.pid").read_text())
            starting = threads.submit(server.start)
            time.sleep(0.3)
            assert not starting.done()
        starting.result(60)
    assert postmaster(server_folder).pid != leaving.pid
    assert ask(server.dsn, "select 1") == 1
    server.stop()
    assert not runs(server_folder)


@pytest.mark.slow
def test_backends_that_end_while_a_start_waits_for_them_cause_no_failure(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        dead = postmaster(server_folder)
        dead.kill()
        wait_until(lambda: dead.status() == psutil.STATUS_ZOMBIE)
        seen = iter([[dead]])
        monkeypatch.setattr(embedded_server, "_processes_in", lambda folder: next(seen, []))
        with EmbeddedPostgres(server_folder) as server:
            assert ask(server.dsn, "select 1") == 1
    assert next(seen, None) is None


@pytest.mark.slow
def test_an_orphaned_server_is_used_alone_and_then_stopped(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        said(other)
        other.kill()
        other.wait()
    assert runs(server_folder)
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined
    assert not runs(server_folder)


@pytest.mark.slow
def test_two_processes_that_meet_on_a_new_folder_share_one_server(tmp_path: Path) -> None:
    with other_process(tmp_path / "lake") as one, other_process(tmp_path / "lake") as two:
        assert sorted([said(one), said(two)]) == ["joined", "started"]
        assert len(list((tmp_path / "lake").glob("postgres*/PG_VERSION"))) == 1
    assert not runs(tmp_path / "lake")


@pytest.mark.slow
def test_processes_that_open_and_close_a_folder_never_find_a_stopped_server(server_folder: Path) -> None:
    script = """
import sys, psycopg
from dormouse.embedded.postgres import EmbeddedPostgres
for _ in range(5):
    with EmbeddedPostgres(sys.argv[1]) as server, psycopg.connect(server.dsn) as conn:
        conn.execute("select 1")
"""
    processes = [subprocess.Popen([sys.executable, "-c", script, str(server_folder)]) for _ in range(4)]
    assert [process.wait(60) for process in processes] == [0, 0, 0, 0]
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_process_that_does_not_stop_its_server_releases_it_at_exit(server_folder: Path) -> None:
    script = "import sys; from dormouse.embedded.postgres import *; EmbeddedPostgres(sys.argv[1]).start()"
    subprocess.run([sys.executable, "-c", script, str(server_folder)], check=True)
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_process_starts_its_killed_server_again_at_its_next_use(
    server_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Many threads notice the dead server at once. Each time, one of them starts it again."""
    with lake(server_folder) as instance, ThreadPoolExecutor(6) as threads:
        for _ in range(2):
            kill(postmaster(server_folder))
            assert list(threads.map(lambda _: instance.tables(), range(6))) == [[]] * 6
        assert caplog.text.count("died and is started again") == 2
    assert not runs(server_folder)


@pytest.mark.slow
def test_processes_that_share_a_killed_server_start_it_once(server_folder: Path) -> None:
    with lake(server_folder) as instance, other_process(server_folder) as other:
        assert said(other) == "joined"
        kill(postmaster(server_folder))
        with lake(server_folder) as joined:
            revived = postmaster(server_folder)
            assert instance.tables() == joined.tables() == []
            assert postmaster(server_folder) == revived
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_deleted_server_is_not_replaced_by_a_new_one(server_folder: Path) -> None:
    with lake(server_folder) as instance:
        kill(postmaster(server_folder))
        shutil.rmtree(server_folder / "postgres")
        instance._supplier._wait_seconds_max = 0.5
        with pytest.raises(InstanceError, match="cannot connect"):
            instance.tables()
        assert not (server_folder / "postgres").exists()


@pytest.mark.slow
def test_a_forked_child_never_stops_its_parent_s_server(server_folder: Path) -> None:
    script = """
import os, sys
from dormouse.embedded.postgres import EmbeddedPostgres
server = EmbeddedPostgres(sys.argv[1])
server.start()
if os.fork() == 0:
    server.stop()
    sys.exit(0)  # and atexit
_, status = os.wait()
print(status, os.path.exists(sys.argv[1] + "/postgres/postmaster.pid"))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(server_folder)], check=True, capture_output=True, text=True
    )
    assert done.stdout == "0 True\n"
    assert not runs(server_folder)


@pytest.mark.slow
def test_a_forked_child_does_not_hold_its_dead_parent_s_lease(server_folder: Path) -> None:
    script = """
import os, sys, time
from dormouse.embedded.postgres import EmbeddedPostgres
EmbeddedPostgres(sys.argv[1]).start()
if os.fork() == 0:
    print(os.getpid(), flush=True)
    time.sleep(20)
    os._exit(0)
time.sleep(20)
"""
    command = [sys.executable, "-c", script, str(server_folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        child = int(said(parent))
        parent.kill()
        parent.wait()
        try:
            with EmbeddedPostgres(server_folder):
                pass
            assert not runs(server_folder)
        finally:
            os.kill(child, signal.SIGKILL)
