"""The kinds of work that a request's thread does: it plans, reads, and makes the answer in pieces."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import pyarrow as pa
from starlette.responses import Response

from dormouse.model.json_values import json_value
from dormouse.service.formats import Format, pieces
from dormouse.service.problems import Refused

MADE_AHEAD = 2
"""The number of pieces that a thread may make before the client takes one.

It is 2, so that the end of a short answer is known when its first piece is sent. In Arrow, the end is a piece
of its own.
"""

WHOLE_BYTES_MAX = 64 * 1024
WHOLE_SECONDS_MAX = 0.001
"""The time that a first piece waits for the end of its answer, so that both are sent at once."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    data: bytes | pa.Buffer
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one answer, in rows and in bytes. None means no limit."""

    rows_max: int | None = None
    bytes_max: int | None = None

    def check(self, rows: int, byte_count: int) -> None:
        """Raises `Refused` if the answer exceeds a limit."""
        if self.rows_max is not None and rows > self.rows_max:
            raise Refused(
                "answer-too-large",
                f"the answer has more than the {self.rows_max:,} rows that are allowed; ask for less, "
                "or give a limit",
            )
        if self.bytes_max is not None and byte_count > self.bytes_max:
            raise Refused(
                "answer-too-large",
                f"the answer has more than the {self.bytes_max:,} bytes that are allowed; ask for less",
            )


class _Begun:
    """The default status and headers of an answer, which each kind of work may override."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({})
    """The HTTP headers, in ASCII."""
    planned_at: float | None = None
    """The monotonic time at which the plan was ready, in seconds."""

    def broken_off(self, problem: str) -> bytes:
        """Returns the last bytes of an answer that an error ends early. `pieces` may still be running."""
        return b""


@dataclass
class QueryWork(_Begun):
    """One query: `open` plans it and returns a reader of its rows."""

    open: Callable[[], pa.RecordBatchReader]
    format: Format
    limits: Limits
    interrupt: Callable[[], object]
    """A function that interrupts `pieces`, which runs in another thread."""

    @property
    def content_type(self) -> str:
        return self.format.content_type

    def broken_off(self, problem: str) -> bytes:
        return self.format.broken_off(problem)

    def pieces(self) -> Generator[Piece]:
        """Yields the pieces of the answer. The first piece has rows if the answer has any."""
        rows = byte_count = 0
        for piece in self._unlimited():
            rows, byte_count = rows + piece.rows, byte_count + len(piece.data)
            self.limits.check(rows, byte_count)
            yield piece

    def _unlimited(self) -> Iterator[Piece]:
        reader = self.open()
        self.planned_at = time.monotonic()
        before = self.format.begin(reader.schema)
        for batch in reader:
            for part in pieces(batch):
                data = self.format.rows(part)
                yield Piece(before + data if before else data, part.num_rows)
                before = b""
        yield Piece(before + self.format.end())


@dataclass
class DocumentWork(_Begun):
    """One JSON document, such as a plan, which `make` returns."""

    make: Callable[[], Any]
    interrupt: Callable[[], object] = lambda: None
    limits: Limits = Limits()
    content_type = "application/json"

    def pieces(self) -> Generator[Piece]:
        document = self.make()
        self.planned_at = time.monotonic()
        data = json.dumps(json_value(document)).encode()
        self.limits.check(0, len(data))
        yield Piece(data)


@dataclass
class ReplyWork(_Begun):
    """A short answer: `make` returns all of it, with its status and headers."""

    make: Callable[[], Response]
    interrupt: Callable[[], object] = lambda: None
    content_type: str = "application/json"

    def pieces(self) -> Generator[Piece]:
        response = self.make()
        self.status = response.status_code
        headers = dict(response.headers)
        self.content_type = headers.pop("content-type", self.content_type)
        self.headers = headers
        yield Piece(bytes(response.body))


class Opened(NamedTuple):
    """The bytes of a file or of a part of it, with the status and headers of the answer."""

    chunks: Generator[bytes]
    headers: Mapping[str, str]
    status: int = 200


@dataclass
class FileWork(_Begun):
    """The bytes of a file, which `open` returns in chunks."""

    open: Callable[[], Opened]
    content_type: str
    interrupt: Callable[[], object] = lambda: None

    def pieces(self) -> Generator[Piece]:
        chunks, self.headers, self.status = self.open()
        is_empty = True
        with closing(chunks):
            for chunk in chunks:
                is_empty = False
                yield Piece(chunk)
        if is_empty:
            yield Piece(b"")


Work: TypeAlias = QueryWork | DocumentWork | ReplyWork | FileWork


_Made = Piece | BaseException | None
"""A piece, the error that ended the answer, or None after the last piece."""


class Making:
    """A queue of pieces, from the thread that makes them to the event loop, which calls all public methods.

    One job of the thread makes all pieces, because submitting a job often takes longer than making a piece.
    """

    ended: asyncio.Future[None]
    """A future that is done when the thread has ended its job."""

    def __init__(self, pieces: Generator[Piece]) -> None:
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._made: deque[_Made] = deque()
        self._waiting: asyncio.Future[Piece | None] | None = None
        self._may_make = threading.Semaphore(MADE_AHEAD)
        self._is_over = False
        self._is_called = False
        """True from a call of the event loop until it looks at the pieces: others need no call then."""
        self._patience: asyncio.TimerHandle | None = None
        """The end of the time in which the first piece waits for the end of the answer."""
        self._is_patient = True

    def begin(self, in_thread: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        self.ended = in_thread(self._make)

    def next(self) -> asyncio.Future[Piece | None]:
        """Returns a future of the next piece, or of None after the last. Wait for it before the next call."""
        self._waiting = self._loop.create_future()
        self._give()
        return self._waiting

    def whole(self, first: Piece) -> Piece | None:
        """Returns the first piece joined with all others.

        Returns None if the answer is not complete yet, or has more than WHOLE_BYTES_MAX bytes.
        """
        if not self._made or self._made[-1] is not None:
            return None
        pieces = [first, *(piece for piece in self._made if isinstance(piece, Piece))]
        if sum(len(piece.data) for piece in pieces) > WHOLE_BYTES_MAX:
            return None
        return Piece(b"".join(bytes(piece.data) for piece in pieces), sum(piece.rows for piece in pieces))

    def may_go_on(self) -> None:
        """Permits the thread to make one more piece, because the client has taken one."""
        self._may_make.release()

    def stop(self) -> None:
        """Ends the thread's job after the piece that the thread is making."""
        self._is_over = True
        if self._patience is not None:
            self._patience.cancel()
        if self._waiting is not None:
            self._waiting.cancel()  # asyncio would log a late error in a future that is never read
        self._may_make.release()

    def _give(self) -> None:
        if self._waiting is None or self._waiting.done() or not self._made or self._waits_for_end():
            return
        self._is_patient = False
        made = self._made.popleft()
        if isinstance(made, BaseException):
            self._waiting.set_exception(made)
        else:
            self._waiting.set_result(made)

    def _waits_for_end(self) -> bool:
        """Returns whether the first piece of a short answer waits; begins to wait if necessary."""
        last = self._made[-1]
        if not self._is_patient or not isinstance(last, Piece) or len(last.data) > WHOLE_BYTES_MAX:
            return False
        if self._patience is None:
            self._patience = self._loop.call_later(WHOLE_SECONDS_MAX, self._hurry)
        return True

    def _hurry(self) -> None:
        self._is_patient = False
        self._give()

    def _arrived(self) -> None:
        self._is_called = False
        self._give()

    def _make(self) -> None:
        with closing(self._pieces):
            try:
                if self._is_over:  # before its turn came
                    return
                for piece in self._pieces:
                    self._hand_over(piece)
                    self._may_make.acquire()
                    if self._is_over:
                        return
            except BaseException as error:
                self._hand_over(error)
            else:
                self._hand_over(None)

    def _hand_over(self, made: _Made) -> None:
        self._made.append(made)
        if not self._is_called:
            self._is_called = True
            with suppress(RuntimeError):  # the loop is closed when the process ends
                self._loop.call_soon_threadsafe(self._arrived)
