"""The lease of a folder: the folder has one server, even if it is invisible or on another host."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import subprocess
import sys
from dataclasses import asdict
from functools import cache
from pathlib import Path

import psutil
import psycopg
import pytest
from embedded import OTHER_PROCESS, ask, leave, other_process, postmaster, runs, said, tell

from dormouse.embedded import postgres, running
from dormouse.embedded import running as locks
from dormouse.errors import InstanceError, InstanceLocked
from tests.support.embedded import EmbeddedPostgres

ELSEWHERE = ["unshare", "--pid", "--ipc", "--mount", "--uts", "--fork", "--mount-proc"]


@cache
def can_unshare() -> bool:
    """Returns whether this process may make namespaces. Root may, outside of most containers."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*ELSEWHERE, "true"], check=False, capture_output=True).returncode == 0


@pytest.fixture
def elsewhere() -> list[str]:
    """Returns the beginning of a command that runs in new namespaces."""
    if not can_unshare():
        pytest.skip("namespaces cannot be made here")
    return ELSEWHERE


def opened_by(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, sys.executable, "-c", OTHER_PROCESS, str(folder)],
        check=False,
        capture_output=True,
        text=True,
        input="\n",
    )


@pytest.mark.slow
def test_an_invisible_server_is_left_alone(server_folder: Path, elsewhere: list[str]) -> None:
    with EmbeddedPostgres(server_folder) as server:
        tell(server.dsn, "create table t as select 7 as x")
        pid = postmaster(server_folder).pid
        done = opened_by(elsewhere, server_folder)
        assert (
            f"InstanceLocked: {server_folder} is open elsewhere: its PostgreSQL runs on host" in done.stderr
        )
        assert f"{socket.gethostname()}, as process {pid} of namespace pid:[" in done.stderr
        assert postmaster(server_folder).pid == pid
        assert ask(server.dsn, "select x from t") == 7
    assert opened_by(elsewhere, server_folder).stdout == "started\n"


def test_a_server_in_a_container_is_left_alone(server_folder: Path, elsewhere: list[str]) -> None:
    """The server records the process ids of its container. Outside, its processes have other ids."""
    command = [*elsewhere, sys.executable, "-c", OTHER_PROCESS, str(server_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert said(other) == "started"
        with pytest.raises(InstanceLocked, match="is open elsewhere"):
            EmbeddedPostgres(server_folder).start()
        leave(other)
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined


ALONE = """
import os, sys, time
from dormouse.embedded.postgres import EmbeddedPostgres
from dormouse.errors import InstanceLocked
opened = 0
for _ in range(40):
    try:
        with EmbeddedPostgres(sys.argv[1]):
            os.mkdir(sys.argv[1] + "/alone")
            opened += 1
            os.rmdir(sys.argv[1] + "/alone")
    except InstanceLocked:
        pass
    if opened == 2:
        break
print(opened)
"""


@pytest.mark.slow
def test_racing_namespaces_use_a_folder_one_after_the_other(tmp_path: Path, elsewhere: list[str]) -> None:
    command = [*elsewhere, sys.executable, "-c", ALONE, str(tmp_path / "lake")]
    racers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [one.communicate(timeout=60)[0] for one in racers] == ["2\n"] * 3


@pytest.mark.slow
def test_a_killed_container_leaves_the_folder_to_others(server_folder: Path, elsewhere: list[str]) -> None:
    command = [*elsewhere, "--kill-child", sys.executable, "-c", OTHER_PROCESS, str(server_folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert said(other) == "started"
        other.kill()
        other.wait()
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select 1") == 1


@pytest.mark.slow
def test_a_server_from_before_leases_is_joined(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        (server_folder / running.NAME).unlink()
        with EmbeddedPostgres(server_folder) as server:
            assert server.joined
            assert ask(server.dsn, "select 1") == 1


@pytest.mark.slow
def test_an_invisible_server_from_before_leases_is_left_alone(
    server_folder: Path, elsewhere: list[str]
) -> None:
    with EmbeddedPostgres(server_folder) as server:
        (server_folder / running.NAME).unlink()
        assert "runs where it cannot be seen from here" in opened_by(elsewhere, server_folder).stderr
        assert ask(server.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_another_host_s_lease_is_reported_with_its_holder(server_folder: Path) -> None:
    """The lock looks like one of a network file system. The files of the other server are not touched."""
    pid_file = server_folder / "postgres" / "postmaster.pid"
    pid_file.write_text(f"1\n{server_folder}\n1\n5432\n/run\n\n1 1\nready\n")
    holder = running.Holder("north", "b00t", "pid:[7]", 42, since="2026-11-20T14:00:00+00:00")
    with (server_folder / running.NAME).open("w") as lease:
        json.dump(asdict(holder), lease)
        lease.flush()
        fcntl.flock(lease, fcntl.LOCK_EX)
        with pytest.raises(
            InstanceLocked, match=r"north, as process 42 of namespace pid:\[7\] \(boot b00t\)"
        ):
            EmbeddedPostgres(server_folder).start()
    assert pid_file.exists()


@pytest.mark.slow
def test_a_process_with_the_id_of_another_host_s_server_is_not_mistaken_for_it(server_folder: Path) -> None:
    """There are two containers with a server each. Root may not read a process's working directory."""
    holder = running.Holder("north", "b00t", "pid:[7]", 42, since="2026-11-20T14:00:00+00:00")
    with other_process(server_folder) as other:
        assert said(other) == "started"
        (server_folder / running.NAME).write_text(json.dumps(asdict(holder)))
        with pytest.raises(InstanceLocked, match="runs on host north"):
            EmbeddedPostgres(server_folder).start()


def denied(process: psutil.Process) -> str:
    """Denies access, like a container without CAP_SYS_PTRACE to root if servers run as another user."""
    raise psutil.AccessDenied(process.pid)


@pytest.mark.slow
def test_a_stale_process_id_of_another_folder_s_server_is_ignored(
    server_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a crash, a container's processes get the same ids each time that the container starts."""
    monkeypatch.setattr(psutil.Process, "cwd", denied)
    other = tmp_path / "other"
    with EmbeddedPostgres(other) as server:
        tell(server.dsn, "create table t as select 7 as x")
    with EmbeddedPostgres(server_folder) as server, psycopg.connect(server.dsn) as session:
        written = (server_folder / "postgres" / "postmaster.pid").read_text()
        (other / "postgres" / "postmaster.pid").write_text(written)
        with EmbeddedPostgres(other, seconds_max=20) as its:
            assert (its.joined, ask(its.dsn, "select x from t")) == (False, 7)
        assert not runs(other)
        assert session.execute("select 1").fetchone() == (1,)
        assert (server_folder / "postgres" / "postmaster.pid").read_text() == written


@pytest.mark.slow
def test_a_server_with_inaccessible_processes_is_joined_and_stopped(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil.Process, "cwd", denied)
    with other_process(server_folder) as other:
        assert said(other) == "started"
        pid = postmaster(server_folder).pid
        with EmbeddedPostgres(server_folder) as server:
            assert server.joined
            leave(other)
            assert postmaster(server_folder).pid == pid
            assert ask(server.dsn, "select 1") == 1
    assert not runs(server_folder)


@pytest.mark.slow
def test_opening_waits_for_an_unsigned_lease(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(postgres, "LEAVING_SECONDS_MAX", 0.1)
    with (server_folder / running.NAME).open("w") as lease:
        fcntl.flock(lease, fcntl.LOCK_EX)
        with pytest.raises(InstanceLocked, match="where it cannot be seen"):
            EmbeddedPostgres(server_folder, seconds_max=0.1).start()
    with EmbeddedPostgres(server_folder) as server:
        assert not server.joined


@pytest.mark.slow
def test_the_lease_lasts_as_long_as_the_server_and_names_its_holder(server_folder: Path) -> None:
    with other_process(server_folder) as other:
        assert said(other) == "started"
        other.kill()
        other.wait()
    lease = locks.open_lock(server_folder / running.NAME)
    assert not locks.try_lock(lease)
    assert json.loads((server_folder / running.NAME).read_text())["pid"] == postmaster(server_folder).pid
    with EmbeddedPostgres(server_folder):
        pass
    assert locks.try_lock(lease)
    locks.close_lock(lease)


def test_a_file_system_without_locks_is_refused(server_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    with pytest.raises(InstanceError, match="does not honour locks, so two servers could write"):
        EmbeddedPostgres(server_folder).start()
    assert not runs(server_folder)


def test_a_network_file_system_whose_locks_stay_on_the_host_is_refused(
    server_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = server_folder.stat().st_dev
    line = f"36 35 {os.major(device)}:{os.minor(device)} / {server_folder} rw - nfs4 host:/ rw,vers=4.2"
    monkeypatch.setattr(locks, "MOUNTS", tmp_path / "mounts")
    locks.MOUNTS.write_text(f"{line},local_lock=flock,addr=1\n")
    with pytest.raises(InstanceError, match="does not honour locks"):
        EmbeddedPostgres(server_folder).start()
    locks.MOUNTS.write_text(f"{line},local_lock=none,addr=1\n")
    with EmbeddedPostgres(server_folder) as server:
        assert ask(server.dsn, "select 1") == 1


def test_a_file_system_that_does_not_support_locks_is_refused(
    server_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(descriptor: int, operation: int) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.raises(InstanceError, match="does not honour locks"):
        EmbeddedPostgres(server_folder).start()
