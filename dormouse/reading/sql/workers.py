"""A pool of processes that run SQL: what a statement exhausts or crashes is one of them.

One more than may be asked at once is kept ready, so that the place of one that ends is taken at once.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dormouse.errors import InstanceError
from dormouse.model.schema import Schema
from dormouse.model.types import Parameters
from dormouse.objects import ObjectStore
from dormouse.objects.staging import StagingArea, private_folder, private_folders
from dormouse.reading.interruption import Interruption
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.results import Rows
from dormouse.reading.sql.wanted import Wanted
from dormouse.reading.sql.worker import Setup
from dormouse.reading.sql.worker_process import WorkerProcess
from dormouse.settings.process import machine_bytes
from dormouse.settings.service import SQL_MEMORY_BYTES_MIN

logger = logging.getLogger(__name__)

PROCESS_BYTES = 256 * 1024 * 1024
"""Of a worker's memory, what is not DuckDB's: programs, threads, the planner."""
ACCOUNTED_SHARE = 0.7
"""Of the rest, what DuckDB may use that it accounts for; some that it uses it does not."""
KEPT_SHARE = 0.5
"""Of the rest: a worker that keeps more of it after a statement is replaced, for allocators give back what
they do not use, but not what counts against the limit."""
_FOLDER = "dormouse-sql"
"""Of temporary files, with a folder for each worker."""
AGAIN_SECONDS = 1.0
POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """How many statements run at once, and what each may use; None: a share of the machine's."""

    count: int
    memory_bytes_max: int | None = None
    spill_bytes_max: int | None = None
    threads: int | None = None
    wait_seconds_max: float = 60.0
    share: int = 1
    """How many pools there are on the machine, each with as many."""


class Workers:
    """Lends processes that run SQL over one object store, in the order in which they are asked for."""

    def __init__(
        self, objects: ObjectStore, limits: WorkerLimits, ended: Callable[[str], object] = lambda why: None
    ) -> None:
        """`ended` is told why one ended."""
        self._limits = limits
        self._ended = ended
        self._setup = _setup(objects, limits)
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._idle: list[WorkerProcess] = []
        self._lent: set[WorkerProcess] = set()
        self._failure = ""
        self._closed = threading.Event()
        self._starter = threading.Thread(target=self._keep_ready, name="dormouse-sql-workers", daemon=True)

    def start(self) -> Self:
        """They become ready in a thread."""
        self._starter.start()
        return self

    @property
    def process_ids(self) -> list[int]:
        with self._changed:
            return [worker.process_id for worker in (*self._idle, *self._lent)]

    def session(self, interruption: Interruption) -> WorkerSession:
        """A worker for one statement; `InstanceError` when none becomes free in time."""
        return WorkerSession(self, self._take(interruption), interruption)

    def give_back(self, worker: WorkerProcess, usable: bool) -> None:
        """Keeps a worker that can be asked again, and replaces others."""
        kept_bytes_max = KEPT_SHARE * (self._setup.memory_bytes_max - PROCESS_BYTES)
        usable = usable and worker.grown_bytes <= kept_bytes_max
        if not usable:
            self._end(worker, "failed" if worker.is_spent else "replaced")
        with self._changed:
            self._lent.discard(worker)
            if usable:
                self._idle.append(worker)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends all of them, whatever they do."""
        self._closed.set()
        with self._changed:
            lent = list(self._lent)
            self._changed.notify_all()
        for worker in lent:
            worker.kill("closed")
        if self._starter.ident is not None:
            self._starter.join()

    def _take(self, interruption: Interruption) -> WorkerProcess:
        deadline, ticket = time.monotonic() + self._limits.wait_seconds_max, object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._check_open()
                while not (self._waiting[0] is ticket and self._has_one()):
                    interruption.check()
                    self._check_time(deadline)
                    self._changed.wait(POLL_SECONDS)
                    self._check_open()
                self._lent.add(worker := self._idle.pop())
                return worker
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _has_one(self) -> bool:
        while self._idle and not self._idle[-1].is_alive:
            self._end(self._idle.pop(), "crash")
            self._changed.notify_all()
        return bool(self._idle) and len(self._lent) < self._limits.count

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise InstanceError("the processes that run SQL are closed")

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise InstanceError(
                self._failure or f"all {self._limits.count} processes that run SQL are busy; try again later"
            )

    def _end(self, worker: WorkerProcess, why: str) -> None:
        self._ended(worker.end(why))

    def _keep_ready(self) -> None:
        for folder in private_folders(_FOLDER):
            StagingArea(folder).sweep()
        while self._lacks_one():
            try:
                worker = WorkerProcess(self._setup, StagingArea(private_folder(_FOLDER)).claim())
            except (InstanceError, OSError) as error:
                self._failure = str(error)
                logger.warning("%s", error)
                self._closed.wait(AGAIN_SECONDS)
                continue
            with self._changed:
                self._failure = ""
                self._idle.append(worker)
                self._changed.notify_all()
        with self._changed:
            while self._idle:
                self._end(self._idle.pop(), "closed")

    def _lacks_one(self) -> bool:
        """Waits until there is one less than there should be; False when there should be none any more."""
        with self._changed:
            while len(self._idle) + len(self._lent) > self._limits.count and not self._closed.is_set():
                self._changed.wait()
        return not self._closed.is_set()


class WorkerSession:
    """What one statement is asked of, in a process of its own."""

    def __init__(self, workers: Workers, worker: WorkerProcess, interruption: Interruption) -> None:
        self._workers = workers
        self._worker = worker
        self._interruption = interruption
        # of one that is dropped it is not known what its worker does
        self._dropped = weakref.finalize(self, workers.give_back, worker, False)
        self._dropped.atexit = False

    def parsed(self, statement: str) -> Parsed:
        found: Parsed = self._worker.value(self._interruption, "parsed", statement)
        return found

    def wanted(self, schemas: Mapping[str, Schema], statement: Parsed, parameters: Parameters) -> Wanted:
        found: Wanted = self._worker.value(self._interruption, "wanted", schemas, statement, parameters)
        return found

    def rows(self, views: Mapping[str, str], statement: str, parameters: Parameters) -> Rows:
        return self._worker.rows(self._interruption, views, statement, parameters)

    def close(self) -> None:
        if self._dropped.detach() is not None:
            self._workers.give_back(self._worker, self._worker.settle())


def _setup(objects: ObjectStore, limits: WorkerLimits) -> Setup:
    among = limits.count * limits.share
    memory = limits.memory_bytes_max or max(SQL_MEMORY_BYTES_MIN, machine_bytes() // 2 // among)
    spill = limits.spill_bytes_max
    if spill is None:
        spill = shutil.disk_usage(tempfile.gettempdir()).free // 2 // among
    accounted = int((memory - PROCESS_BYTES) * ACCOUNTED_SHARE)
    return Setup(objects.url, objects.options, memory, accounted, Path(), spill, limits.threads)
