"""What a query's thread does: plans, reads, and writes the answer in pieces, within limits."""

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
"""Of a short answer the end is known with its first piece; of Arrow, it is a piece of its own."""

WHOLE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer."""

    data: bytes | pa.Buffer
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one answer; None: none."""

    rows_max: int | None = None
    bytes_max: int | None = None

    def check(self, rows: int, byte_count: int) -> None:
        """Raises `Refused`."""
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
    """How an answer begins, unless its work says it."""

    status = 200
    headers: Mapping[str, str] = MappingProxyType({})
    """In ASCII."""
    planned_at: float | None = None
    """By the monotonic clock."""

    def broken_off(self, problem: str) -> bytes:
        """What is sent last when the answer breaks off; made while `pieces` may still run."""
        return b""


@dataclass
class QueryWork(_Begun):
    """One query: `open` plans it and gives its rows."""

    open: Callable[[], pa.RecordBatchReader]
    format: Format
    limits: Limits
    interrupt: Callable[[], object]
    """Ends what `pieces` does in another thread."""

    @property
    def content_type(self) -> str:
        return self.format.content_type

    def broken_off(self, problem: str) -> bytes:
        return self.format.broken_off(problem)

    def pieces(self) -> Generator[Piece]:
        """The answer; the first piece has rows, if there are any."""
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
    """One plan: `make` gives it as JSON."""

    make: Callable[[], Any]
    interrupt: Callable[[], object] = lambda: None
    limits: Limits = Limits()
    content_type = "application/json"

    def pieces(self) -> Generator[Piece]:
        found = self.make()
        self.planned_at = time.monotonic()
        data = json.dumps(json_value(found)).encode()
        self.limits.check(0, len(data))
        yield Piece(data)


@dataclass
class ReplyWork(_Begun):
    """A short answer: `make` gives it whole, with its status and its headers."""

    make: Callable[[], Response]
    interrupt: Callable[[], object] = lambda: None
    content_type: str = "application/json"

    def pieces(self) -> Generator[Piece]:
        found = self.make()
        self.status = found.status_code
        headers = dict(found.headers)
        self.content_type = headers.pop("content-type", self.content_type)
        self.headers = headers
        yield Piece(bytes(found.body))


class Opened(NamedTuple):
    """The bytes of a file, or of a part of it, and how the answer begins."""

    chunks: Generator[bytes]
    headers: Mapping[str, str]
    status: int = 200


@dataclass
class FileWork(_Begun):
    """The bytes of a file, which `open` finds."""

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
"""A piece, why there is none, or that there are no more."""


class Making:
    """Hands pieces from a thread to the event loop. All but what is private is called there.

    The thread has one job for all pieces, as handing over a job takes longer than many a piece.
    """

    ended: asyncio.Future[None]
    """Is done when the thread is."""

    def __init__(self, pieces: Generator[Piece]) -> None:
        self._pieces = pieces
        self._loop = asyncio.get_running_loop()
        self._made: deque[_Made] = deque()
        self._waiting: asyncio.Future[Piece | None] | None = None
        self._may_make = threading.Semaphore(MADE_AHEAD)
        self._is_over = False

    def begin(self, in_thread: Callable[[Callable[[], None]], asyncio.Future[None]]) -> None:
        self.ended = in_thread(self._make)

    def next(self) -> asyncio.Future[Piece | None]:
        """The next piece, when it is made; None after the last. Asked for one at a time."""
        self._waiting = self._loop.create_future()
        self._give()
        return self._waiting

    def whole(self, first: Piece) -> Piece | None:
        """All pieces as one, of which this is the first, when all are made by now and small; or None."""
        if not self._made or self._made[-1] is not None:
            return None
        pieces = [first, *(piece for piece in self._made if isinstance(piece, Piece))]
        if sum(len(piece.data) for piece in pieces) > WHOLE_BYTES_MAX:
            return None
        return Piece(b"".join(bytes(piece.data) for piece in pieces), sum(piece.rows for piece in pieces))

    def may_go_on(self) -> None:
        """A piece was taken: one more may be made."""
        self._may_make.release()

    def stop(self) -> None:
        """No more pieces are wanted; the thread ends after the one that it makes."""
        self._is_over = True
        if self._waiting is not None:
            self._waiting.cancel()  # an error that comes late would be one that nobody has asked for
        self._may_make.release()

    def _give(self) -> None:
        if self._waiting is None or self._waiting.done() or not self._made:
            return
        made = self._made.popleft()
        if isinstance(made, BaseException):
            self._waiting.set_exception(made)
        else:
            self._waiting.set_result(made)

    def _arrived(self, made: _Made) -> None:
        self._made.append(made)
        self._give()

    def _make(self) -> None:
        with closing(self._pieces):
            try:
                for piece in self._pieces:
                    self._tell(piece)
                    self._may_make.acquire()
                    if self._is_over:
                        return
            except BaseException as error:
                self._tell(error)
            else:
                self._tell(None)

    def _tell(self, made: _Made) -> None:
        with suppress(RuntimeError):  # at the end of the process there is no loop any more
            self._loop.call_soon_threadsafe(self._arrived, made)
