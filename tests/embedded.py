"""Helpers for tests of the embedded server: processes that have it open, and statements on it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg

from dormouse.embedded.server import Server

NOBODY = 65534

OTHER_PROCESS = """
import sys
from dormouse.embedded.postgres import EmbeddedPostgres
with EmbeddedPostgres(sys.argv[1]) as server:
    print("joined" if server.joined else "started", flush=True)
    sys.stdin.readline()
"""


def on_tcp() -> dict[str, str]:
    """Returns settings of a server that also listens on a port of the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return {"listen_addresses": "127.0.0.1", "port": str(listener.getsockname()[1])}


@contextmanager
def other_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Yields another process that has the folder open. It has printed `joined` or `started`."""
    command = [sys.executable, "-c", OTHER_PROCESS, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        if process.poll() is None:
            leave(process)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def leave(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=60)
    assert process.returncode == 0


def runs(folder: Path) -> bool:
    return Server(folder).is_running()


def postmaster(folder: Path) -> psutil.Process:
    return psutil.Process(int((folder / "postgres" / "postmaster.pid").read_text().splitlines()[0]))


def ask(dsn: str, query: str) -> object:
    with psycopg.connect(dsn, autocommit=True) as conn:
        (value,) = conn.execute(query).fetchone() or (None,)
        return value


def tell(dsn: str, statement: str) -> None:
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(statement)


def as_ordinary_user(work: Callable[[], None]) -> str:
    """Runs `work` in a child process, as a user other than root; returns the error as a line, or an empty
    text.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setresgid(NOBODY, NOBODY, NOBODY)
                os.setresuid(NOBODY, NOBODY, NOBODY)
            work()
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    return os.read(reader, 10_000).decode()
