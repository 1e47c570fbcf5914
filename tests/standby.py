"""A real primary server and its hot standby, with streaming replication. pg_basebackup makes the standby."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psycopg
from psycopg.conninfo import conninfo_to_dict

from dormouse.embedded.owner import system_user
from dormouse.embedded.server import _binaries
from tests.stored import wait_until
from tests.support.embedded import EmbeddedPostgres

OPTIONS = {"fsync": "off", "shared_buffers": "32MB", "autovacuum": "off"}


class Pair(NamedTuple):
    """The DSNs of both servers."""

    primary: str
    standby: str

    def catch_up(self) -> None:
        """Waits until the standby has all changes that the primary has committed."""
        with psycopg.connect(self.primary, autocommit=True) as one, psycopg.connect(self.standby) as other:
            other.autocommit = True
            ((reached,),) = one.execute("select pg_current_wal_flush_lsn()").fetchall()
            text = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            wait_until(lambda: other.execute(text, [reached]).fetchall() == [(True,)])

    @contextmanager
    def behind(self) -> Iterator[None]:
        """Pauses the replay of the standby during the block."""
        with psycopg.connect(self.standby, autocommit=True) as conn:
            conn.execute("select pg_wal_replay_pause()")
            text = "select pg_get_wal_replay_pause_state()"
            wait_until(lambda: conn.execute(text).fetchall() == [("paused",)])
            try:
                yield
            finally:
                conn.execute("select pg_wal_replay_resume()")


@contextmanager
def streaming() -> Iterator[Pair]:
    folder = Path(tempfile.mkdtemp(prefix="dormouse-standby-"))
    folder.chmod(0o755)  # the servers' user must reach the socket of the other
    try:
        with EmbeddedPostgres(folder / "a", options=_options(folder, "a")) as primary:
            _copy(primary.dsn, folder / "b")
            with EmbeddedPostgres(folder / "b", options=_options(folder, "b")) as standby:
                yield Pair(primary.dsn, standby.dsn)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _options(folder: Path, name: str) -> dict[str, str]:
    sockets = folder / f"s{name}"
    sockets.mkdir()
    sockets.chmod(0o777)
    return {**OPTIONS, "unix_socket_directories": str(sockets)}


def _copy(dsn: str, folder: Path) -> None:
    given = conninfo_to_dict(dsn)
    data = folder / "postgres"
    folder.mkdir()
    command = [str(_binaries() / "pg_basebackup"), f"--pgdata={data}", "--write-recovery-conf"]
    command += ["--checkpoint=fast", "--wal-method=stream", "--no-sync", "--no-password"]
    command += [f"--host={given['host']}", f"--port={given['port']}", f"--username={given['user']}"]
    subprocess.run(command, check=True, capture_output=True)
    if os.geteuid() == 0:
        user = system_user()
        for path in (data, *data.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid)
