"""PgBouncer, as Debian packages it, between a client and PostgreSQL; tests use it if it is installed."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
SECONDS_MAX = 60.0
_READS = "+dac_override,+dac_read_search"
_AS_NOBODY = [
    "setpriv",
    "--reuid=65534",
    "--clear-groups",
    f"--inh-caps={_READS}",
    f"--ambient-caps={_READS}",
]
"""The beginning of a command that runs PgBouncer.

PgBouncer refuses to run as root, but the server's socket is in a folder of root.
"""


@contextmanager
def pgbouncer(dsn: str, folder: Path, **settings: object) -> Iterator[str]:
    """Starts a pool that shares few connections to a database among transactions; yields the pool's DSN."""
    assert PGBOUNCER is not None
    given = conninfo_to_dict(dsn)
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = " ".join(f"{name}={given[name]}" for name in ("host", "port", "user", "dbname") if name in given)
    lines = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "auth_type": "any",
        "pool_mode": "transaction",
        "default_pool_size": 2,
        "ignore_startup_parameters": "options,extra_float_digits",
        "unix_socket_dir": "",
        **settings,
    }
    (folder / "pgbouncer.ini").write_text(
        f"[databases]\n{given['dbname']} = {server}\n[pgbouncer]\n"
        + "".join(f"{name} = {value}\n" for name, value in lines.items())
    )
    with (folder / "pgbouncer.log").open("wb") as log:
        command = [*(_AS_NOBODY if os.getuid() == 0 else []), PGBOUNCER, folder / "pgbouncer.ini"]
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        pooled = make_conninfo("", host="127.0.0.1", port=port, user=given["user"], dbname=given["dbname"])
        _wait_for(pooled)
        yield pooled
    finally:
        process.kill()
        process.wait()


def _wait_for(dsn: str) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while True:
        with suppress(psycopg.OperationalError), closing(psycopg.connect(dsn)):
            return
        assert time.monotonic() < deadline, "PgBouncer did not start"
        time.sleep(0.05)
