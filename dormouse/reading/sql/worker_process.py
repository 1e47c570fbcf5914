"""A worker as its pool sees it: a process that is asked, interrupted and, if it heeds none of it, killed."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from dormouse.errors import DormouseError, EngineFailed, InstanceError
from dormouse.objects.staging import OTHERS, Slot
from dormouse.reading.interruption import Interruption
from dormouse.reading.sql.channel import (
    BATCH,
    CALL,
    END,
    FAILURE,
    SCHEMA,
    STOP,
    Channel,
    failure_in,
    plain_value,
)
from dormouse.reading.sql.failures import INTERRUPTED
from dormouse.reading.sql.results import Rows
from dormouse.reading.sql.worker import Setup
from dormouse.settings import environment
from dormouse.settings.process import PREFIX

HEED_SECONDS_MAX = 1.0
"""How long a worker that is interrupted may go on before it is killed."""
START_SECONDS_MAX = 60.0
_NOT_FOR_IT = (PREFIX, "PG")
"""Variables that begin so tell how the database is reached, and the service's token."""

_VARIABLES = {"ARROW_DEFAULT_MEMORY_POOL": "system"}
"""Another would reserve a gigabyte at once."""


class WorkerProcess:
    """Answers one call at a time; another thread may interrupt it."""

    def __init__(self, setup: Setup, slot: Slot) -> None:
        """Starts it, and waits until it is ready; `InstanceError`."""
        self._slot = slot
        self._is_answering = False
        self._interrupted_at: float | None = None
        self._killed_for: str | None = None
        self.is_spent = False
        """Whether something failed inside, so that it must not be asked again."""
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
        """By how much it has grown since it was ready, of what counts against its limit."""
        return self._data_bytes() - self._data_bytes_ready

    def _data_bytes(self) -> int:
        """What is mapped, given back by its allocators or not; 0 where the system does not tell."""
        with suppress(OSError):
            found = Path(f"/proc/{self._process.pid}/statm").read_text("ascii").split()
            return int(found[5]) * resource.getpagesize()
        return 0

    def value(self, interruption: Interruption, name: str, *arguments: Any) -> Any:
        """What a call gives."""
        with interruption.ending(self._interrupt):
            self._call((name, arguments))
            with self._doubted():
                return plain_value(self._next()[1])

    def rows(self, interruption: Interruption, *arguments: Any) -> Rows:
        """The answer of a call, whose batches come as they are asked for."""
        with interruption.ending(self._interrupt):
            self._call(("rows", arguments))
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
        """Ends what it is doing; whether it can be asked again."""
        with _after(HEED_SECONDS_MAX, self.kill, "unheeding"), suppress(DormouseError, OSError):
            if self._is_answering:
                self._channel.send(STOP)
            while self._is_answering:
                self._next()
        return self.is_alive and not self.is_spent

    def kill(self, why: str) -> None:
        """Ends the process, from any thread; the one that asks it finds out."""
        if self.is_alive:
            self._killed_for = why
            self._process.kill()
            self._process.wait()

    def end(self, why: str) -> str:
        """Ends the process, and removes what it leaves; says why it ended."""
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
        """What comes next; raises what the call failed with, or what became of the process."""
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
        """What comes from there may be anything, once a statement has corrupted its memory."""
        try:
            yield
        except DormouseError:
            raise
        except Exception as error:
            self.kill("crash")
            raise EngineFailed(
                "DuckDB failed at this statement, write it in another way: its answer cannot be read"
            ) from error

    def _interrupt(self) -> None:
        """Called again and again, until the call ends."""
        now = time.monotonic()
        self._interrupted_at = self._interrupted_at or now
        with suppress(OSError):
            self._channel.send(STOP)
        if now - self._interrupted_at > HEED_SECONDS_MAX:
            self.kill("unheeding")

    def _death(self) -> DormouseError:
        self._is_answering = False
        with _after(HEED_SECONDS_MAX, self.kill, "crash"):
            code = self._process.wait()
        if self._interrupted_at is not None:
            return DormouseError(INTERRUPTED)
        if code == -signal.SIGKILL:
            return EngineFailed(
                "the process that ran the statement was killed, as the system does when memory is short; "
                "ask for less at once"
            )
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return EngineFailed(
            f"the statement ended the process that ran it ({name}), as one may that needs too much memory: "
            "ask for less at once, or write it in another way"
        )

    def _release(self) -> None:
        self._channel.close()
        os.close(self._lifeline)
        self._slot.release()


def _started(end: int, lifeline: int) -> subprocess.Popen[bytes]:
    variables = {k: v for k, v in environment().items() if not k.startswith(_NOT_FOR_IT)}
    return subprocess.Popen(
        # not from the current folder
        [sys.executable, "-P", "-m", "dormouse.reading.sql.worker", str(end), str(lifeline)],
        env=variables | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **_VARIABLES},
        pass_fds=(end, lifeline),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        umask=OTHERS,  # what it spills has rows in it
        # Ctrl-C in the terminal is for the parent
        start_new_session=True,
    )


@contextmanager
def _after(seconds: float, do: Any, *arguments: Any) -> Iterator[None]:
    """Does something when what stands within takes longer."""
    timer = threading.Timer(seconds, do, arguments)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
