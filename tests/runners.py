"""Runners of jobs in their own processes, which stop at a given point so that tests can kill them there."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from dormouse.state.context import TableContext
from tests.stored import query

# At the given point a runner prints `here` and waits until it is killed, or continued by SIGUSR1.
STOPPING = """
import pickle, signal, sys, threading

address = pickle.loads(bytes.fromhex(sys.stdin.readline()))
go_on = threading.Event()
signal.signal(signal.SIGUSR1, lambda *_: go_on.set())

def stop_here():
    print("here", flush=True)
    go_on.wait()

def before(work):
    def wait_first(*args, **more):
        stop_here()
        return work(*args, **more)
    return wait_first

def after(work):
    def wait_last(*args, **more):
        result = work(*args, **more)
        stop_here()
        return result
    return wait_last
"""
EXIT_SECONDS_MAX = 60.0
EXPIRE_LEASE = "update compaction_job set leased_until = '-infinity' where table_id = %s"


@contextmanager
def runner(table: TableContext, script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a process that runs the script on a table; kills the process at the end.

    The script finds the table's address in `address`.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPING + script, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONFAULTHANDLER": "1"},
    )
    assert process.stdin
    process.stdin.write(pickle.dumps(table.address).hex() + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str]) -> None:
    """Waits until the process has reached its stopping point."""
    assert process.stdout
    assert process.stdout.readline() == "here\n", process.communicate()[1]


def ended(process: subprocess.Popen[str], seconds_max: float = EXIT_SECONDS_MAX) -> tuple[int, str]:
    """Waits for the end of a process; returns its exit code and output.

    Raises AssertionError with the stacks of its threads if it does not end in time.
    """
    try:
        said, _ = process.communicate(timeout=seconds_max)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)
        raise AssertionError(f"it goes on for {seconds_max:g} s:\n{process.communicate()[1]}") from None
    return process.returncode, said


def the_dead_are_known(table: TableContext) -> None:
    """Expires the leases and write attempts of a table. A new start of an embedded server does this for all
    tables.
    """
    for text in (EXPIRE_LEASE, "update write_attempt set abandoned_at = now() where table_id = %s"):
        query(table.supplier, text, table.table.table_id)
