"""A storm of commits while workers are killed and PostgreSQL restarts. Each is applied once or not at all."""

from __future__ import annotations

import random
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
from embedded import postmaster
from fire import ROWS, WAIT_SECONDS_MAX, Workers, commits, expected, partition_of, shared_files

from dormouse.postgres import ConnectionSupplier, Isolation, migrate, run_transaction
from tests.standard import OF_KEYS
from tests.stored import clock, ref
from tests.storming import is_gone, kill_postmaster
from tests.support.embedded import EmbeddedPostgres
from tests.support.model import TableProperties, TableRecord
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, FileReferenceStore, WriteAttempts

OPTIONS = {"fsync": "off", "full_page_writes": "off"}
"""The server settings with which data survives the death of every process, but not a power cut."""
WORKERS_PER_TABLE = 2
KILLS = 100


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="dormouse-fire-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Battlefield:
    """A server, a table for each layout and isolation level, and workers on these tables."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self._dsn = self._start_server()
        migrate(self._dsn)
        self._supplier = ConnectionSupplier(self._dsn, wait_seconds_max=WAIT_SECONDS_MAX)
        stack.callback(self._supplier.close)
        self.tables = self._make_tables()
        self.remaining = set(range(WORKERS_PER_TABLE * len(self.tables)))
        self._said: dict[int, set[str]] = {worker: set() for worker in self.remaining}
        for table in self.tables:
            of_table = [w for w in self.remaining if self.tables[w % len(self.tables)] is table]
            FileReferenceStore(self._supplier, table).add_files(
                ref(name, partition_of(worker), ROWS) for name in shared_files() for worker in of_table
            )
        self.workers = stack.enter_context(closing(Workers(self._dsn, self.tables)))
        for worker in self.remaining:
            self.workers.start(worker)

    def next_commit(self) -> int:
        """Waits for the next answer about a commit; returns the number of the worker that sent it."""
        worker, what = self.workers.next_commit()
        if what == "done":
            self.remaining.discard(worker)
        else:
            self._said[worker].add(what)
        return worker

    def all_have_begun(self) -> bool:
        return all(self._said.values())

    def restart_server(self, how: signal.Signals, dice: random.Random) -> None:
        """Restarts the server. After SIGKILL, a frozen backend is left, which the next start must end."""
        process = postmaster(self._folder)
        if how == signal.SIGKILL:
            orphan = kill_postmaster(process, dice)
            self._start_server()
            assert is_gone(orphan)
        else:
            process.send_signal(how)
            assert not psutil.wait_procs([process], timeout=WAIT_SECONDS_MAX)[1]
            self._start_server()

    def check(self, worker: int) -> set[str]:
        """Checks that a worker's commits were applied completely and in order; returns the applied ones."""
        store = self.store_of(worker)

        def look(conn: psycopg.Connection[Any]) -> tuple[set[str], dict[str, tuple[int, str | None]]]:
            query = "select commit_id from applied_commit where table_id = %s and commit_id ~ %s"
            applied = conn.execute(query, [store.table.table_id, f"^[a-z]+-{worker}-"]).fetchall()
            files = store.files_in([partition_of(worker)], conn=conn)
            references = [r for f in files for r in f.references]
            return {i for (i,) in applied}, {r.filename: (r.row_count, r.job_id) for r in references}

        applied, references = run_transaction(self._supplier, look, isolation=Isolation.REPEATABLE_READ)
        assert references == expected(worker, applied)
        assert applied == {i for i, _ in list(commits(store, worker))[: len(applied)]}
        assert self._said[worker] <= applied
        return applied

    def check_end(self) -> None:
        """Checks at the end that every commit was applied once, and that replaced files can be collected."""
        for worker in range(WORKERS_PER_TABLE * len(self.tables)):
            assert self.check(worker) == {i for i, _ in commits(self.store_of(worker), worker)}
        for number, table in enumerate(self.tables):
            store = FileReferenceStore(self._supplier, table)
            store.stamp_unreferenced()
            workers = range(number, WORKERS_PER_TABLE * len(self.tables), len(self.tables))
            own = {r for w in workers for r in own_files(w)}
            assert set(store.files_ready_for_gc(clock(store))) == own | set(shared_files())

    def store_of(self, worker: int) -> FileReferenceStore:
        return FileReferenceStore(self._supplier, self.tables[worker % len(self.tables)])

    def _start_server(self) -> str:
        return self._stack.enter_context(EmbeddedPostgres(self._folder, options=OPTIONS)).dsn

    def _make_tables(self) -> list[TableRecord]:
        catalog = Catalog(self._supplier, WriteAttempts(self._supplier, open_store(self._folder / "objects")))
        schema = OF_KEYS
        return [
            catalog.create(
                f"{layout}_{isolation.replace(' ', '_')}",
                schema,
                TableProperties(isolation=isolation),
                layout,
            )
            for layout in LAYOUTS
            for isolation in ("read committed", "serializable")
        ]


def own_files(worker: int) -> set[str]:
    """Returns all files that a worker adds and then replaces."""
    everything = {f"add-{worker}-{step}" for step in range(len(shared_files()))}
    return set(expected(worker, everything)) - set(shared_files())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_killed_workers_leave_no_commit_half_applied(folder: Path, seed: int) -> None:
    """Kills workers at random. Their successors repeat all work, with the same commit ids."""
    dice, kills = random.Random(seed), KILLS
    with ExitStack() as stack:
        field = Battlefield(folder, stack)
        while field.remaining:
            worker = field.next_commit()
            if kills and worker in field.remaining and dice.random() < 0.1:
                threading.Event().wait(dice.random() * 0.003)  # in the middle of the next commit
                field.workers.kill(worker)
                field.check(worker)
                field.workers.start(worker)
                kills -= 1
        field.check_end()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_restarts_of_the_server_lose_and_repeat_no_commit(folder: Path, seed: int) -> None:
    """Restarts the server twice with each signal.

    An orderly shutdown sends a message to each session; an immediate one is a crash.
    """
    dice = random.Random(seed)
    how = dice.sample([signal.SIGINT, signal.SIGQUIT, signal.SIGKILL] * 2, 6)
    with ExitStack() as stack:
        field = Battlefield(folder, stack)
        # the first connection of a worker does not wait for a server that is not running
        while not field.all_have_begun():
            field.next_commit()
        for one in how:
            for _ in range(dice.randint(10, 60)):
                if field.remaining:
                    field.next_commit()
            field.restart_server(one, dice)
        while field.remaining:
            field.next_commit()
        field.check_end()
