"""Processes that are forked from one that has imported Dormouse, so that each begins at once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = (
    "api.instance", "api.row_table", "api.table", "api.transaction", "data.datafusion_session",
    "durability.backups", "durability.erasing", "embedded.restoring", "jobs.claims", "objects.folder",
    "objects.s3", "reading.executor", "reading.scan_session", "reading.sql.statements", "rows.cluster",
    "writing.compaction_job", "writing.edits", "writing.ingest", "writing.merging", "writing.plain_changes",
    "writing.splitting", "writing.updating",
)  # fmt: skip
FORKS = multiprocessing.get_context("forkserver")
"""The context of processes that have imported these modules, but have not opened a store."""
FORKS.set_forkserver_preload(["pytest", *(f"dormouse.{name}" for name in IMPORTED)])


def start(program: str, *arguments: object, errors: Path | None = None) -> ForkServerProcess:
    """Starts a process that runs a program with this process's environment, as `python -c` would.

    The process adds its error output to the file `errors`. It gives way to the test, which checks it.
    """
    given = (program, [*map(str, arguments)], dict(os.environ), errors)
    process = FORKS.Process(target=_run, args=given, daemon=True)
    process.start()
    return process


def run(program: str, *arguments: object) -> int:
    """Runs a program to its end. Returns its exit code, which is negative for a signal."""
    process = start(program, *arguments)
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def send(process: BaseProcess, number: signal.Signals) -> None:
    """Sends a signal to a process, unless it has ended."""
    assert process.pid is not None
    if process.exitcode is None:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(process.pid, number)


def _run(program: str, arguments: list[str], environment: dict[str, str], errors: Path | None) -> None:
    if errors is not None:
        os.dup2(os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT), 2)
    os.nice(2)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    exec(program, {"__name__": "__main__"})  # noqa: S102
