"""Work in a process that is killed between two exchanges with its server."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, Literal

import psycopg

from dormouse.postgres import ConnectionSupplier
from dormouse.state.context import TableContext


def dies_at(
    table: TableContext,
    work: Callable[[TableContext], object],
    number: int,
    method: Literal["wait", "execute"] = "wait",
) -> bool:
    """Runs the work in another process, which is killed just before its call `number`.

    Returns whether the process was killed; otherwise it ended first. `method` is the call that is counted:
    `wait` is an exchange with the server, `execute` is a statement.
    """
    child = os.fork()
    if child == 0:
        done = 1
        try:
            call, seen = getattr(psycopg.Connection, method), [0]

            def counted(conn: Any, *args: Any, **kwargs: Any) -> Any:
                seen[0] += 1
                if seen[0] == number:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(conn, *args, **kwargs)

            own = TableContext(table.dsn, ConnectionSupplier(table.dsn), table.objects, table.table)
            setattr(psycopg.Connection, method, counted)
            work(own)
            done = 0
        finally:
            os._exit(done)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL)
    return status != 0
