"""How another thread ends a query."""

from __future__ import annotations

import asyncio
import atexit
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager, suppress
from typing import Any

from datafusion import RecordBatch, RecordBatchStream

from dormouse.data.datafusion_session import check_not_forked
from dormouse.errors import DormouseError

AGAIN_SECONDS = 0.01


class Interruption:
    """Ends what reads for a query, from any thread, and for good."""

    def __init__(self) -> None:
        # the collector may drop one of its readers while this thread holds it
        self._lock = threading.RLock()
        self._awaited: dict[object, Future[Any]] = {}
        self._ended: Callable[[], object] | None = None
        self.is_set = False

    def set(self) -> None:
        """What is computed now is given up."""
        with self._lock:
            self.is_set = True
            for upcoming in self._awaited.values():
                upcoming.cancel()
            ended = self._ended
        if ended is not None:
            threading.Thread(target=self._end, args=(ended,), name="dormouse-interrupt", daemon=True).start()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """While it is set in another thread, calls `end`, again and again, until what stands within ends."""
        with self._lock:
            self.check()
            self._ended = end
        try:
            yield
        finally:
            with self._lock:
                self._ended = None
        self.check()

    def _end(self, end: Callable[[], object]) -> None:
        # a call that has not begun does not hear the first
        while self._ended is end:
            with suppress(Exception):  # it may have ended, and be closed, a moment before
                end()
            time.sleep(AGAIN_SECONDS)

    def check(self) -> None:
        """`DormouseError` when it is set."""
        if self.is_set:
            raise DormouseError("the query was interrupted")

    def awaits(self, reader: object, upcoming: Future[Any] | None) -> None:
        """What one of the query's readers waits for now."""
        with self._lock:
            if upcoming is None:
                self._awaited.pop(reader, None)
                return
            self._awaited[reader] = upcoming
            if self.is_set:
                upcoming.cancel()


# DataFusion's streams, whose readers need not wait for a batch: a search that finds nothing can be ended.

END_SECONDS_MAX = 1.0
LEAVE_SECONDS = 0.01
"""Without the GIL, which they need to leave."""


def interruptible(stream: RecordBatchStream, interruption: Interruption) -> Iterator[RecordBatch]:
    """The batches; `DormouseError` when they are interrupted. Each costs some 0.1 ms more than without it.

    DataFusion waits for a batch in native code, which only its futures leave before the batch is there.
    """

    streams, reader = [stream], object()
    del stream

    async def upcoming() -> RecordBatch:
        return await anext(streams[0])

    try:
        while True:
            future = asyncio.run_coroutine_threadsafe(upcoming(), _Loop.running())
            interruption.awaits(reader, future)
            try:
                batch = future.result()
            except StopAsyncIteration:
                return
            except CancelledError:
                break
            yield batch
    finally:
        # the interruption may be kept, but not the stream with it: that computes as long as it lives
        interruption.awaits(reader, None)
        streams.clear()
    interruption.check()


class _Loop:
    """The process's event loop for such streams, in a thread of its own."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        check_not_forked()
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                cls._thread = threading.Thread(
                    target=cls._loop.run_forever, name="dormouse-streams", daemon=True
                )
                cls._thread.start()
                atexit.register(cls._end)
            return cls._loop

    @classmethod
    def _end(cls) -> None:
        """Before the interpreter ends, DataFusion's threads that told of a last batch must be out of it."""
        if cls._loop is not None and cls._thread is not None and cls._thread.is_alive():
            cls._loop.call_soon_threadsafe(cls._loop.stop)
            cls._thread.join(END_SECONDS_MAX)
            time.sleep(LEAVE_SECONDS)
