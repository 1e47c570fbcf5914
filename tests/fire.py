"""Workers in their own processes, which commit one after another and can be killed at any moment."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from dormouse.errors import CommitOutcomeUnknown, TooManyRetries
from dormouse.model.table import TableRecord
from dormouse.postgres import ConnectionSupplier
from dormouse.state.files.edits import Part, commit
from dormouse.state.files.store import FileReferenceStore
from tests.stored import assign, file, ref, replace

STEPS = 15
ROWS = 10
OWN_FILES = 3
WAIT_SECONDS_MAX = 120.0
"""A time that is far longer than any wait, because the machine may be busy."""

References = dict[str, tuple[int, str | None]]
"""The files to which one partition refers, each with its row count and its job."""


def partition_of(worker: int) -> str:
    return f"p{worker}"


def shared_files() -> list[str]:
    """Returns the files that every worker's partition refers to."""
    return [f"shared-{step}" for step in range(STEPS)]


def commits(store: FileReferenceStore, worker: int) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yields the commit id and the update of each commit of a worker, in order.

    Each step adds files, adds another one as an edit does, and compacts the first ones.
    """
    partition = partition_of(worker)
    for step in range(STEPS):
        job = f"{worker}-{step}"
        own = [f"own-{job}-{n}" for n in range(OWN_FILES)]
        inputs = [f"shared-{step}", *own]
        output = replace(job, inputs, f"out-{job}", partition, ROWS * len(inputs))
        references = [ref(name, partition, ROWS) for name in own]
        claim = assign(job, partition, *inputs)
        edited = file(f"edited-{job}", ref(f"edited-{job}", partition, ROWS))
        updates: list[tuple[str, Callable[..., bool], list[Any]]] = [
            (f"add-{job}", store.add_files, references),
            (f"edit-{job}", partial(commit, store.supplier), [Part(store, [edited])]),
            (f"claim-{job}", store.assign_job_ids, [claim]),
            (f"out-{job}", store.replace_file_references, [output]),
        ]
        for commit_id, update, items in updates:
            yield commit_id, partial(update, items, commit_id=commit_id)


def expected(worker: int, applied: set[str]) -> References:
    """Returns the references of the worker's partition if exactly the `applied` commits are applied."""
    references: References = dict.fromkeys(shared_files(), (ROWS, None))
    for step in range(STEPS):
        job = f"{worker}-{step}"
        own = [f"own-{job}-{n}" for n in range(OWN_FILES)]
        if f"add-{job}" in applied:
            references |= dict.fromkeys(own, (ROWS, None))
        if f"edit-{job}" in applied:
            references[f"edited-{job}"] = (ROWS, None)
        if f"claim-{job}" in applied:
            references |= dict.fromkeys([f"shared-{step}", *own], (ROWS, job))
        if f"out-{job}" in applied:
            for name in [f"shared-{step}", *own]:
                del references[name]
            references[f"out-{job}"] = (ROWS * (1 + OWN_FILES), None)
    return references


class Workers:
    """The controller of the workers. It starts and kills workers, and receives the ids of their commits."""

    def __init__(self, dsn: str, tables: list[TableRecord]) -> None:
        self._parent = subprocess.Popen(
            [sys.executable, "-c", "import fire; fire.serve()"],
            cwd=Path(__file__).parent,
            env={**os.environ, "PYTHONPATH": f"{Path(__file__).parents[1]}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._said: queue.Queue[str] = queue.Queue()
        self._pids: dict[int, int] = {}
        threading.Thread(target=self._listen, daemon=True).start()
        self._tell(pickle.dumps((dsn, tables)).hex())

    def start(self, worker: int) -> None:
        self._tell(str(worker))

    def next_commit(self) -> tuple[int, str]:
        """Returns a worker's number and the id of its next acknowledged commit, or "done" for its end."""
        while True:
            worker, pid, what = self._said.get(timeout=WAIT_SECONDS_MAX).split(maxsplit=2)
            if what == "started":
                self._pids[int(worker)] = int(pid)
            elif self._pids[int(worker)] == int(pid):
                assert not what.startswith("failed"), what
                return int(worker), what

    def kill(self, worker: int) -> None:
        # the pid is not reused, because the parent never collects the exit status
        os.kill(self._pids[worker], signal.SIGKILL)

    def close(self) -> None:
        os.killpg(self._parent.pid, signal.SIGKILL)
        self._parent.communicate()

    def _tell(self, line: str) -> None:
        assert self._parent.stdin is not None
        self._parent.stdin.write(f"{line}\n")
        self._parent.stdin.flush()

    def _listen(self) -> None:
        assert self._parent.stdout is not None
        for line in self._parent.stdout:
            self._said.put(line.rstrip())


def serve() -> None:
    """Runs as the parent process of the workers. Starts a worker for each number that it reads."""
    dsn, tables = pickle.loads(bytes.fromhex(sys.stdin.readline()))  # noqa: S301
    while line := sys.stdin.readline():
        worker = int(line)
        if os.fork() == 0:
            say(worker, "started")
            try:
                _work(dsn, tables[worker % len(tables)], worker)
            except BaseException as error:
                say(worker, f"failed: {error!r}")
            os._exit(0)


def say(worker: int, what: str) -> None:
    os.write(1, f"{worker} {os.getpid()} {what}\n".encode())


def _work(dsn: str, table: TableRecord, worker: int) -> None:
    supplier = ConnectionSupplier(dsn, connections_max=1, wait_seconds_max=WAIT_SECONDS_MAX)
    for commit_id, update in commits(FileReferenceStore(supplier, table), worker):
        _replay(update)
        say(worker, commit_id)
    say(worker, "done")


def _replay(update: Callable[[], bool], times: int = 100) -> None:
    for _ in range(times):
        try:
            update()  # returns False if it was applied before
        except (CommitOutcomeUnknown, TooManyRetries):
            continue
        return
    raise AssertionError(f"not applied in {times} attempts")
