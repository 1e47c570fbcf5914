"""A process that runs SQL, one statement at a time, for the pool that starts it as a program.

What a statement exhausts or crashes is this process. It has no database, no secret but those of the object
store, limits of the operating system, and ends with its parent, whatever it is doing.
"""

from __future__ import annotations

import fcntl
import os
import pickle
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from dormouse.errors import DormouseError, EngineFailed, InvalidQuery, QueryTooLarge, one_line
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.reading.interruption import Interruption
from dormouse.reading.sql.channel import (
    BATCH,
    CALL,
    END,
    FAILURE,
    ROW_BYTES_MAX,
    SCHEMA,
    VALUE,
    Channel,
    failed,
)
from dormouse.reading.sql.engine import Engine

PIECE_BYTES_MAX = 4 * 1024 * 1024
"""What the pool holds of an answer that is read slowly."""
OOM_SCORE = 500
"""When memory ends, the kernel takes it, and not the server."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told when it starts."""

    objects_url: str
    objects_options: dict[str, str]
    memory_bytes_max: int
    """Of the process."""
    engine_bytes_max: int
    """Of what DuckDB accounts for."""
    spill_folder: Path
    spill_bytes_max: int
    threads: int | None


def main() -> None:
    socket_number, lifeline = map(int, sys.argv[1:])
    _end_with(lifeline)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=socket_number))
    try:
        engine = _engine(pickle.loads(channel.receive()[1]))  # noqa: S301 our parent's bytes
        _warm_up(engine)
    except Exception as error:
        channel.send(FAILURE, failed(_ours(error)))
        return
    channel.send(END)
    _Worker(channel, engine).run()


def _end_with(lifeline: int) -> None:
    """The kernel ends this process when its parent has ended: no other holds the pipe's other end."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    with suppress(BlockingIOError):
        os.read(lifeline, 1)
        os._exit(0)


def _limit(memory_bytes_max: int) -> None:
    # not the address space, of which allocators reserve much that they never use
    resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes_max, memory_bytes_max))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(OOM_SCORE))


def _engine(setup: Setup) -> Engine:
    _limit(setup.memory_bytes_max)
    return Engine(
        open_store(setup.objects_url, **setup.objects_options),
        memory_limit=f"{setup.engine_bytes_max}B",
        spill_limit=f"{setup.spill_bytes_max}B",
        spill_folder=setup.spill_folder,
        threads=setup.threads,
    )


def _warm_up(engine: Engine) -> None:
    schemas = {"t": Schema(row_keys=[Field("k", LONG)])}
    with closing(engine.session(Interruption())) as session:
        # with a parameter: for the first DuckDB loads pandas, where that is installed
        statement = "SELECT * FROM t WHERE k = $1"
        session.wanted(schemas, session.parsed(statement), [1])
        for _ in session.rows({"t": "SELECT 1::BIGINT AS k"}, statement, [1]).batches:
            pass


class _Worker:
    """Runs the calls that come, one after the other, and hears meanwhile that one is given up."""

    def __init__(self, channel: Channel, engine: Engine) -> None:
        self._channel = channel
        self._engine = engine
        self._calls: SimpleQueue[tuple[pa.Buffer, Interruption]] = SimpleQueue()

    def run(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()
        while True:
            call, interruption = self._calls.get()
            try:
                name, arguments = pickle.loads(call)  # noqa: S301 our parent's bytes
                with closing(self._engine.session(interruption)) as session:
                    self._answer(name, getattr(session, name)(*arguments))
            except (BrokenPipeError, ConnectionResetError):
                os._exit(0)
            except BaseException as error:
                self._channel.send(FAILURE, failed(_ours(error)))

    def _listen(self) -> None:
        interruption = Interruption()
        try:
            while True:
                kind, data = self._channel.receive()
                if kind == CALL:
                    interruption = Interruption()
                    self._calls.put((data, interruption))
                else:
                    interruption.set()
                    # it is told again and again, and each set has a thread
                    interruption = Interruption()
        finally:
            # its pool is gone, or memory is exhausted so much that no thread can be started
            os._exit(1)

    def _answer(self, name: str, found: Any) -> None:
        if name != "rows":
            self._channel.send(VALUE, pickle.dumps(found))
            return
        self._channel.send(SCHEMA, found.schema.serialize())
        for batch in found.batches:
            for piece in _pieces(batch):
                self._channel.send(BATCH, piece.serialize())
        self._channel.send(END)


def _pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices of some megabytes."""
    if batch.nbytes <= PIECE_BYTES_MAX:
        yield batch
    elif batch.num_rows > 1:
        yield from _pieces(batch.slice(0, batch.num_rows // 2))
        yield from _pieces(batch.slice(batch.num_rows // 2))
    elif batch.nbytes > ROW_BYTES_MAX:
        raise QueryTooLarge(
            f"a row of the answer has {batch.nbytes:,} bytes, and may have {ROW_BYTES_MAX:,}; ask for "
            "a part of it"
        )
    else:
        yield batch


def _ours(error: BaseException) -> DormouseError:
    if isinstance(error, DormouseError):
        return error
    if isinstance(error, RecursionError):
        return InvalidQuery("the statement is nested too deeply")
    if isinstance(error, MemoryError):
        return QueryTooLarge("the statement needs more memory than it may use")
    return EngineFailed(f"the statement failed, write it in another way: {one_line(error)}")


if __name__ == "__main__":
    main()
