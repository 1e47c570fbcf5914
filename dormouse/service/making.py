"""The pieces of one answer, made in a thread, two ahead of those that are taken."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, suppress

from dormouse.service.work import Piece

_Made = Piece | BaseException | None
"""A piece, why there is none, or that there are no more."""

MADE_AHEAD = 2
"""Of a short answer the end is known with its first piece; of Arrow, it is a piece of its own."""

WHOLE_BYTES_MAX = 64 * 1024


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
