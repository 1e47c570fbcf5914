"""How another thread ends a query."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

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
