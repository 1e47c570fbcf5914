"""Helpers for tests of the commit queue: numbers for new queues, and processes that receive messages."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from dormouse.state.commits.queue import Message

WAIT_SECONDS = 60.0
queue_numbers = itertools.count(1)


def bodies(messages: Sequence[Message]) -> list[str]:
    return [message.body for message in messages]


@contextmanager
def receiver(dsn: str, script: str, *values: Any) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that opens a `queue` and runs the script."""
    start = f"""
import sys
from dormouse.state.commits.postgres_queue import PostgresQueue
from dormouse.postgres import ConnectionSupplier
dsn, number, visibility = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
queue = PostgresQueue(ConnectionSupplier(dsn), number, visibility_seconds=visibility)
{script}
"""
    command = [sys.executable, "-c", start, dsn, *map(str, values)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
