"""A vanished host: a server in a network namespace whose packets are all lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psycopg
import pytest

import dormouse as dm
from dormouse.embedded.owner import system_user
from dormouse.embedded.server import _binaries
from dormouse.postgres import session
from tests.standard import OF_KEYS
from tests.working import until

NAME = f"dmtest{os.getpid() % 100_000}"
HERE, THERE = "10.213.77.1", "10.213.77.2"
PORT = 5499
PATIENCE_SECONDS = 300
"""A limit below the 15 minutes after which TCP gives up if the socket has no limit of its own."""


def run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True)


def why_unavailable() -> str | None:
    """Returns why this process can make no network namespace; None if it can."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return "needs root and the command ip (iproute2)"
    probe = subprocess.run(["ip", "netns", "add", f"{NAME}p"], capture_output=True, check=False, text=True)
    if probe.returncode != 0:
        return f"no network namespace can be made here: {probe.stderr.strip()}"
    run(f"ip netns delete {NAME}p")
    return None


@contextmanager
def far_server(folder: Path) -> Iterator[str]:
    """Yields the DSN of a server in a network namespace of its own, reached over a pair of network cards."""
    run(f"ip netns add {NAME}")
    server = None
    try:
        run(f"ip link add {NAME}a type veth peer name {NAME}b netns {NAME}")
        run(f"ip addr add {HERE}/24 dev {NAME}a")
        run(f"ip link set {NAME}a up")
        run(f"ip netns exec {NAME} ip addr add {THERE}/24 dev {NAME}b")
        run(f"ip netns exec {NAME} ip link set {NAME}b up")
        user, data = system_user(), folder / "data"
        data.mkdir()
        os.chown(data, user.pw_uid, user.pw_gid)
        for parent in (folder, *folder.parents):
            with suppress(OSError):
                parent.chmod(parent.stat().st_mode | 0o111)
        as_user = {"user": user.pw_uid, "group": user.pw_gid, "cwd": data}
        command = [_binaries() / "initdb", "-D", data, "-U", "dormouse", "--auth=trust", "--no-sync"]
        subprocess.run(
            [*command, "--encoding=UTF8", "--locale=C"], check=True, capture_output=True, **as_user
        )
        with (data / "pg_hba.conf").open("a") as hba:
            hba.write(f"host all all {HERE}/24 trust\n")
        options = f"-c listen_addresses={THERE} -c port={PORT} -c unix_socket_directories="
        options += " -c track_commit_timestamp=on -c fsync=off"
        inside = f"setpriv --reuid {user.pw_uid} --regid {user.pw_gid} --clear-groups"
        command = f"ip netns exec {NAME} {inside} {_binaries()}/postgres -D {data} {options}".split()
        with (folder / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=data, stdout=log, stderr=log)
        dsn = f"host={THERE} port={PORT} user=dormouse dbname=postgres"
        until(lambda: answers(dsn) or server.poll() is not None)
        assert server.poll() is None, (folder / "log").read_text()
        yield dsn
    finally:
        if server is not None:
            server.kill()
            server.wait()
        run(f"ip netns delete {NAME}")


def answers(dsn: str) -> bool:
    with suppress(psycopg.OperationalError):
        psycopg.connect(dsn, connect_timeout=2).close()
        return True
    return False


def lose_packets() -> None:
    """Makes each side send to a card that does not exist. So neither side notices that the other vanished."""
    wrong = "lladdr 02:00:00:00:00:99"
    run(f"ip neigh replace {THERE} {wrong} dev {NAME}a nud permanent")
    run(f"ip netns exec {NAME} ip neigh replace {HERE} {wrong} dev {NAME}b nud permanent")


@pytest.mark.slow
def test_calls_end_when_the_host_of_the_database_vanished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test `test_vanished_peers` checks the sockets' limits where no network namespace can be made."""
    if (reason := why_unavailable()) is not None:
        pytest.skip(reason)
    monkeypatch.setitem(session.PEER_PARAMETERS, "tcp_user_timeout", 2_000)
    monkeypatch.setattr(session, "_CONNECT_SECONDS_MAX", 2)
    monkeypatch.setenv("DORMOUSE_CONNECTION_WAIT_SECONDS_MAX", "2")
    objects = tmp_path / "objects"
    objects.mkdir()
    with far_server(tmp_path) as dsn:
        instance = dm.connect(dsn, objects.as_uri())
        table = instance.create_table("t", OF_KEYS)
        table.ingest({"key": [1]})
        calls = {
            "ingest": lambda: table.ingest({"key": [2]}, ingest_id="two"),
            "query": lambda: table.query().read_all().num_rows,
            "status": table.status,
        }
        ended: dict[str, object] = {}

        def call(name: str) -> None:
            try:
                ended[name] = calls[name]()
            except dm.errors.DormouseError as error:
                ended[name] = error

        lose_packets()
        threads = [threading.Thread(target=call, args=(name,), daemon=True) for name in calls]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE_SECONDS
        for thread in threads:
            thread.join(deadline - time.monotonic())
        assert set(ended) == set(calls)
        assert all(isinstance(one, dm.errors.DormouseError) for one in ended.values()), ended
