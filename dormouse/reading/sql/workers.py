"""A pool of processes that run SQL, so that a statement can exhaust or crash only its own process.

The pool keeps one process more than the number of statements that may run at once. So a process that ends is
replaced without delay.
"""

from __future__ import annotations

import logging
import os
import pickle
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

from dormouse.errors import DormouseError, EngineFailed, InstanceError
from dormouse.model.types import Field, Parameters
from dormouse.objects.staging import OTHERS, Slot, StagingArea, private_folder, private_folders
from dormouse.objects.store import ObjectStore
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.results import INTERRUPTED, Rows
from dormouse.reading.sql.scalars import Relations, Scalar
from dormouse.reading.sql.wanted import Planning, Wanted
from dormouse.reading.sql.worker import (
    BATCH,
    CALL,
    END,
    FAILURE,
    SCHEMA,
    STOP,
    Channel,
    Setup,
    failure_in,
    pieces,
    plain_value,
)
from dormouse.reading.sql.writes import Written
from dormouse.reading.streams import Interruption
from dormouse.settings.process import PREFIX, environment, machine_bytes
from dormouse.settings.service import SQL_MEMORY_BYTES_MIN

logger = logging.getLogger(__name__)
PROCESS_BYTES = 256 * 1024 * 1024
"""The memory of a worker that DuckDB does not use: programs, threads, the planner."""
ACCOUNTED_SHARE = 0.7
"""The share of the remaining memory that DuckDB may use by its own count.

DuckDB also uses memory that it does not count.
"""
KEPT_SHARE = 0.5
"""The share of the remaining memory that a worker may keep after a statement. Above it, it is replaced.

Allocators return unused pages to the system, but not the address space, which counts against the limit.
"""
_FOLDER = "dormouse-sql"
"""The name of the folder for temporary files, which has a folder for each worker."""
AGAIN_SECONDS = 1.0
POLL_SECONDS = 0.1
STOP_SECONDS_MAX = 1.0
"""The longest time in seconds that an interrupted worker may continue before it is killed."""
START_SECONDS_MAX = 60.0
_NOT_FOR_IT = (PREFIX, "PG")
"""Prefixes of environment variables that workers do not get.

These variables give access to the database, or contain the service's token.
"""
_PROGRAM = """
from dormouse.settings.process import leave_out_pandas
leave_out_pandas()
from dormouse.reading.sql.worker import main
main()
"""
_VARIABLES = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Environment variables of workers. Another memory pool than the system's would reserve a gigabyte."""


class WorkerProcess:
    """The pool's side of a worker: a process that it can interrupt, and kill if it does not stop.

    It answers one call at a time. Another thread may interrupt the call.
    """

    def __init__(self, setup: Setup, slot: Slot) -> None:
        """Starts the process and waits until it is ready; raises `InstanceError`."""
        self._slot = slot
        self._is_answering = False
        self._interrupted_at: float | None = None
        self._killed_for: str | None = None
        self.is_spent = False
        """True if DuckDB failed internally, so that the worker must not be used again."""
        ours, theirs = socket.socketpair()
        watched, self._lifeline = os.pipe()
        self._channel = Channel(ours)
        try:
            self._process = _started(theirs.fileno(), watched)
        except OSError as error:
            self._release()
            raise InstanceError(f"no process for SQL can be started: {error.strerror}") from error
        finally:
            theirs.close()
            os.close(watched)
        try:
            with _after(START_SECONDS_MAX, self.kill, "start"):
                self._call(replace(setup, spill_folder=slot.path("spill")))
                self._next()
        except DormouseError as error:
            self.end("start")
            raise InstanceError(f"a process for SQL does not start: {error}") from error
        self._data_bytes_ready = self._data_bytes()

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def grown_bytes(self) -> int:
        """The growth in bytes of the worker's data segment, which has a limit, since the worker was ready."""
        return self._data_bytes() - self._data_bytes_ready

    def _data_bytes(self) -> int:
        """Returns the size of the worker's data segment in bytes; 0 if the system does not report it."""
        with suppress(OSError):
            found = Path(f"/proc/{self._process.pid}/statm").read_text("ascii").split()
            return int(found[5]) * resource.getpagesize()
        return 0

    def value(self, interruption: Interruption, name: str, *arguments: Any) -> Any:
        """Runs a function of the worker and returns its value."""
        with interruption.ending(self._interrupt):
            self._call((name, arguments))
            with self._doubted():
                return plain_value(self._next()[1])

    def rows(self, interruption: Interruption, name: str, *arguments: Any) -> Rows:
        """Runs a function of the worker that returns rows, whose batches are received on request."""
        with interruption.ending(self._interrupt):
            self._call((name, arguments))
            with self._doubted():
                schema = pa.ipc.read_schema(self._next()[1])

        def batches() -> Iterator[pa.RecordBatch]:
            while True:
                with interruption.ending(self._interrupt), self._doubted():
                    kind, data = self._next()
                    if kind == END:
                        return
                    batch = pa.ipc.read_record_batch(data, schema)
                    batch.validate(full=True)
                yield batch

        return Rows(schema, batches())

    def settle(self) -> bool:
        """Stops the current call, if any; returns whether the worker can be used again."""
        with _after(STOP_SECONDS_MAX, self.kill, "unheeding"), suppress(DormouseError, OSError):
            if self._is_answering:
                self._channel.send(STOP)
            while self._is_answering:
                self._next()
        return self.is_alive and not self.is_spent

    def kill(self, why: str) -> None:
        """Kills the process. Any thread may call this; the thread that waits for an answer gets an error."""
        if self.is_alive:
            self._killed_for = why
            self._process.kill()
            self._process.wait()

    def end(self, why: str) -> str:
        """Ends the process and removes its temporary files; returns the reason for its end.

        The reason is `why`, unless the process had crashed or was killed before.
        """
        if not self.is_alive and self._killed_for is None:
            why = "crash"
        self.kill(why)
        self._release()
        return self._killed_for or why

    def _call(self, call: object) -> None:
        if self._is_answering:
            self.settle()
        self._interrupted_at, self._is_answering = None, True
        try:
            self._channel.send(CALL, pickle.dumps(call))
        except OSError:
            raise self._death() from None

    def _next(self) -> tuple[bytes, pa.Buffer]:
        """Returns the next frame. Raises the call's error, or an error if the process has ended."""
        try:
            kind, data = self._channel.receive()
        except EOFError:
            raise self._death() from None
        self._is_answering = kind in (SCHEMA, BATCH)
        if kind == FAILURE:
            error = failure_in(data)
            self.is_spent = isinstance(error, EngineFailed)
            raise error
        return kind, data

    @contextmanager
    def _doubted(self) -> Iterator[None]:
        """Raises `EngineFailed` for an invalid frame: a statement may have corrupted the worker's memory."""
        try:
            yield
        except DormouseError:
            raise
        except Exception as error:
            self.kill("crash")
            raise EngineFailed(
                "DuckDB failed to run this statement; write it differently: its answer cannot be read"
            ) from error

    def _interrupt(self) -> None:
        """Asks the worker to stop, and kills it if it takes too long. It is called until the call ends."""
        now = time.monotonic()
        self._interrupted_at = self._interrupted_at or now
        with suppress(OSError):
            self._channel.send(STOP)
        if now - self._interrupted_at > STOP_SECONDS_MAX:
            self.kill("unheeding")

    def _death(self) -> DormouseError:
        self._is_answering = False
        with _after(STOP_SECONDS_MAX, self.kill, "crash"):
            code = self._process.wait()
        if self._interrupted_at is not None:
            return DormouseError(INTERRUPTED)
        if code == -signal.SIGKILL:
            return EngineFailed(
                "the process that ran the statement was killed, as the system does when memory is short; "
                "make the statement read less"
            )
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return EngineFailed(
            f"the process that ran the statement ended ({name}), perhaps because it needed too much memory: "
            "make the statement read less, or write it differently"
        )

    def _release(self) -> None:
        self._channel.close()
        os.close(self._lifeline)
        self._slot.close()


def _started(end: int, lifeline: int) -> subprocess.Popen[bytes]:
    variables = {k: v for k, v in environment().items() if not k.startswith(_NOT_FOR_IT)}
    return subprocess.Popen(
        # not from the current folder
        [sys.executable, "-P", "-c", _PROGRAM, str(end), str(lifeline)],
        env=variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_VARIABLES},
        pass_fds=(end, lifeline),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        umask=OTHERS,  # files that it spills have rows
        # Ctrl-C in the terminal is meant for the parent
        start_new_session=True,
    )


@contextmanager
def _after(seconds: float, do: Any, *arguments: Any) -> Iterator[None]:
    """Calls `do` in another thread if the block takes longer than `seconds`."""
    timer = threading.Timer(seconds, do, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The number of statements that run at once, and the limits of each statement.

    A limit that is None becomes a share of the machine's resources.
    """

    count: int
    memory_bytes_max: int | None = None
    spill_bytes_max: int | None = None
    threads: int | None = None
    wait_seconds_max: float = 60.0
    share: int = 1
    """The number of pools on the machine, each with the same number of workers."""


class Workers:
    """A pool that lends processes that run SQL over one object store, in the order of requests."""

    def __init__(
        self, objects: ObjectStore, limits: WorkerLimits, ended: Callable[[str], object] = lambda why: None
    ) -> None:
        """Prepares the pool; `ended` is called with the reason whenever a worker ends."""
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
        """Starts a thread that starts the workers and replaces those that end."""
        self._starter.start()
        return self

    @property
    def process_ids(self) -> list[int]:
        with self._changed:
            return [worker.process_id for worker in (*self._idle, *self._lent)]

    def session(self, interruption: Interruption) -> WorkerSession:
        """Returns a session for one statement; raises `InstanceError` if no worker is free in time."""
        return WorkerSession(self, self._take(interruption), interruption)

    def give_back(self, worker: WorkerProcess, usable: bool) -> None:
        """Returns a worker to the pool if it is usable; otherwise ends it, and another is started."""
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
        """Ends all workers, even those that are running a statement."""
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
        """Waits until a worker is missing; returns False once the pool is closed."""
        with self._changed:
            while len(self._idle) + len(self._lent) > self._limits.count and not self._closed.is_set():
                self._changed.wait()
        return not self._closed.is_set()


class WorkerSession:
    """The session of one statement, in a process of its own."""

    def __init__(self, workers: Workers, worker: WorkerProcess, interruption: Interruption) -> None:
        self._workers = workers
        self._worker = worker
        self._interruption = interruption
        # what the worker of an abandoned session is doing is not known, so it is not used again
        self._dropped = weakref.finalize(self, workers.give_back, worker, False)
        self._dropped.atexit = False

    def parsed(self, statement: str) -> Parsed:
        found: Parsed = self._worker.value(self._interruption, "parsed", statement)
        return found

    def written(self, statement: str, parameters: Parameters) -> Written:
        found: Written = self._worker.value(self._interruption, "written", statement, parameters)
        return found

    def wanted(self, planning: Planning) -> Wanted:
        found: Wanted = self._worker.value(self._interruption, "wanted", planning)
        return found

    def scalar(self, text: str, relations: Relations, repeats: bool) -> Scalar:
        found: Scalar = self._worker.value(self._interruption, "scalar", text, relations, repeats)
        return found

    def evaluated(
        self,
        rows: pa.RecordBatch,
        expressions: Mapping[Field, str],
        used: Sequence[Field],
        moment: int | None = None,
    ) -> Rows:
        def batches() -> Iterator[pa.RecordBatch]:
            for piece in pieces(rows):
                # a slice would be sent with the rest of its batch
                whole = pa.ipc.read_record_batch(piece.serialize(), rows.schema)
                yield from self._worker.rows(
                    self._interruption, "evaluated", whole, expressions, used, moment
                ).batches

        found = batches()
        first = next(found)
        return Rows(first.schema, chain([first], found))

    def rows(
        self,
        views: Mapping[str, str],
        statement: str,
        parameters: Parameters,
        moment: int | None = None,
        reads_most: bool = False,
    ) -> Rows:
        return self._worker.rows(self._interruption, "rows", views, statement, parameters, moment, reads_most)

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
