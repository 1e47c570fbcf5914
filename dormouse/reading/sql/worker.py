"""A program that runs SQL, one statement at a time. A pool starts it as a separate process.

A statement can exhaust or crash only this process. The process cannot reach the database, has no secrets
except those of the object store, and has limits set by the operating system. It ends when its parent ends,
even in the middle of a statement.
"""

from __future__ import annotations

import fcntl
import io
import json
import os
import pickle
import resource
import signal
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pyarrow as pa

from dormouse import errors
from dormouse.errors import DormouseError, EngineFailed, InvalidQuery, QueryTooLarge, one_line
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG
from dormouse.objects.store import open_store
from dormouse.reading.sql.engine import Engine
from dormouse.reading.sql.firsts import Ends, Enough
from dormouse.reading.sql.joined import Joined
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.sql.results import ReadFailed, Rows
from dormouse.reading.sql.scalars import Scalar
from dormouse.reading.sql.wanted import Planning, Wanted
from dormouse.reading.sql.writes import VALUES
from dormouse.reading.streams import Interruption

PIECE_BYTES_MAX = 4 * 1024 * 1024
"""The most bytes of an answer that the pool holds in memory at once."""
OOM_SCORE = 500
"""The score with which the kernel chooses to kill the worker, not the server, when memory runs out."""
CALL, STOP = b"C", b"I"
"""The kinds of frames to the worker: a pickled call, and a request to stop the call."""
VALUE, SCHEMA, BATCH, END, FAILURE = b"V", b"S", b"B", b"E", b"F"
"""The kinds of frames from the worker: a value, a schema, a batch, the end of an answer, an error.

A value is pickled. Each kind but SCHEMA and BATCH ends the call.
"""
ROW_BYTES_MAX = 64 * 1024 * 1024
FRAME_BYTES_MAX = 2 * ROW_BYTES_MAX
TOGETHER_BYTES_MAX = 16 * 1024
_HEADER = struct.Struct("!cQ")
_OF_KEYS = (datetime, timezone, timedelta, date)
"""The classes of key values to which pickled data refers by name."""
_CLASSES = (Parsed, Wanted, Scalar, Enough, Ends, Joined, KeyRanges, Range, frozenset, *_OF_KEYS, *VALUES)
_PLAIN = {f"{one.__module__}.{one.__qualname__}": one for one in _CLASSES}
_ERRORS = {
    name: found
    for name, found in {**vars(errors), "ReadFailed": ReadFailed}.items()
    if isinstance(found, type) and issubclass(found, DormouseError)
}


# Frames on the socket between a worker and its pool. The pool does not trust them, since a statement may have
# corrupted the worker's memory: their size is limited, they have only a few plain classes, and their Arrow
# data is validated.


class Channel:
    """One end of the socket between a worker and its pool. Several threads may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    def send(self, kind: bytes, data: bytes | pa.Buffer = b"") -> None:
        header, view = _HEADER.pack(kind, len(data)), memoryview(data)
        with self._sending:
            if len(view) <= TOGETHER_BYTES_MAX:
                self._socket.sendall(header + view)
                return
            self._socket.sendall(header)
            self._socket.sendall(view)

    def receive(self) -> tuple[bytes, pa.Buffer]:
        """Returns the kind and the data of the next frame; raises `EOFError` if the other end is closed.

        Raises `ValueError` for a frame of more than `FRAME_BYTES_MAX` bytes.
        """
        kind, length = _HEADER.unpack(self._exactly(_HEADER.size))
        if length > FRAME_BYTES_MAX:
            raise ValueError(f"a frame of {length:,} bytes")
        return kind, self._exactly(length)

    def _exactly(self, length: int) -> pa.Buffer:
        found = pa.allocate_buffer(length)
        view, end = memoryview(found), 0
        while end < length:
            try:
                count = self._socket.recv_into(view[end:], 0, socket.MSG_WAITALL)
            except ConnectionError:
                count = 0
            if not count:
                raise EOFError
            end += count
        return found

    def close(self) -> None:
        self._socket.close()


def failed(error: BaseException) -> bytes:
    """Encodes an error for a FAILURE frame."""
    known = next((one.__name__ for one in type(error).__mro__ if one.__name__ in _ERRORS), "")
    return json.dumps([known, str(error)]).encode()


def failure_in(data: pa.Buffer) -> DormouseError:
    """Decodes an error that `failed` encoded."""
    name, message = json.loads(data.to_pybytes())
    return _ERRORS[str(name)](str(message))


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return _PLAIN[f"{module}.{name}"]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not expected") from None


def plain_value(data: pa.Buffer) -> Any:
    """Decodes a pickled value; raises an error for classes that a worker may not send."""
    return _Plain(io.BytesIO(data)).load()


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that a worker gets when it starts."""

    objects_url: str
    objects_options: dict[str, str]
    memory_bytes_max: int
    """The most bytes of memory of the whole process."""
    engine_bytes_max: int
    """The most bytes of memory that DuckDB may use by its own count."""
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
    """Makes the kernel end this process when its parent ends.

    Only the parent holds the other end of the pipe `lifeline`.
    """
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
        # with a parameter: for the first one DuckDB loads numpy
        statement = "SELECT * FROM t WHERE k = $1"
        session.wanted(Planning(schemas, session.parsed(statement), [1]))
        for _ in session.rows({"t": "SELECT 1::BIGINT AS k"}, statement, [1]).batches:
            pass


class _Worker:
    """A loop that runs calls one after another. Meanwhile a thread receives requests to stop a call."""

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
                    # the request is repeated, and each `set` would start a thread
                    interruption = Interruption()
        finally:
            # the pool closed the socket, or so little memory is left that no thread can be started
            os._exit(1)

    def _answer(self, name: str, result: Any) -> None:
        if not isinstance(result, Rows):
            self._channel.send(VALUE, pickle.dumps(result))
            return
        self._channel.send(SCHEMA, result.schema.serialize())
        for batch in result.batches:
            for piece in pieces(batch):
                self._channel.send(BATCH, piece.serialize())
        self._channel.send(END)


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Yields a batch in slices of a few megabytes."""
    if batch.nbytes <= PIECE_BYTES_MAX:
        yield batch
    elif batch.num_rows > 1:
        yield from pieces(batch.slice(0, batch.num_rows // 2))
        yield from pieces(batch.slice(batch.num_rows // 2))
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
    return EngineFailed(f"the statement failed; write it differently: {one_line(error)}")
