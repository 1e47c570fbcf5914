"""The sources of streams, and the end of those whose reader is gone.

Python's garbage collector may drop a reader anywhere: in any thread, also in one that holds a lock that the
end of the reader's source needs, and would then wait for itself. So a thread of its own ends such sources.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")
ENDING_AT_ONCE = 4
IDLE_MAX = 16
EXIT_SECONDS_MAX = 1.0


class Source(Generic[T]):
    """Items that are read, until the reader is done with them or is gone."""

    __slots__ = ("_interrupt", "items", "worker")

    def __init__(self, items: Iterator[T], interrupt: Callable[[], object] = lambda: None) -> None:
        self.items = items
        self.worker: ThreadPoolExecutor | None = None
        """The only thread that takes items, if there is one."""
        self._interrupt = interrupt
        _Ending.begin()
        _read.add(self)

    def drop(self) -> None:
        """Nothing more is wanted. Takes no lock, and does not wait."""
        if self.worker is None and getattr(self.items, "gi_frame", None) is None:
            _read.discard(self)  # it has ended by itself
        else:
            _Ending.dropped.put(self)

    def end(self, threads: ThreadPoolExecutor) -> None:
        """Ends what makes the items, when they are not being made any more."""
        _read.discard(self)
        worker, self.worker = self.worker, None
        if worker is not None:
            self._interrupt()
        try:
            if isinstance(self.items, Generator):
                (worker or threads).submit(self.items.close)
            if worker is not None:
                worker.submit(_note_idle, worker)
        except RuntimeError:  # at the end of the process there are no more threads
            with suppress(Exception):
                self.items.close()  # type: ignore[attr-defined]


def worker() -> ThreadPoolExecutor:
    """A thread for a source, one that another is done with if there is: a new one has no memory yet."""
    try:
        return _idle.pop()
    except IndexError:
        return ThreadPoolExecutor(1, thread_name_prefix="dormouse-query")


def end_idle() -> None:
    """Ends the threads that no source needs."""
    while _idle:
        worker().shutdown()


def _note_idle(worker: ThreadPoolExecutor) -> None:
    if len(_idle) < IDLE_MAX:
        _idle.append(worker)
    else:
        worker.shutdown(wait=False)


_idle: deque[ThreadPoolExecutor] = deque()
# what is read is not the collector's: it would end the source of a dropped reader beside the reader
_read: set[Source[Any]] = set()


class _Ending:
    """The process's thread that ends sources."""

    dropped: SimpleQueue[Source[Any] | None] = SimpleQueue()
    _lock = threading.Lock()
    _thread: threading.Thread | None = None

    @classmethod
    def anew(cls) -> None:
        """In a forked child, which has no such threads, and a queue that was waited for."""
        _idle.clear()
        cls.dropped, cls._lock, cls._thread = SimpleQueue(), threading.Lock(), None

    @classmethod
    def begin(cls) -> None:
        if cls._thread is not None and cls._thread.is_alive():
            return
        with cls._lock, suppress(RuntimeError):  # no thread starts while the program ends
            if cls._thread is None or not cls._thread.is_alive():
                cls._thread = threading.Thread(target=cls._run, name="dormouse-sources", daemon=True)
                cls._thread.start()

    @classmethod
    def _run(cls) -> None:
        threads = ThreadPoolExecutor(ENDING_AT_ONCE, thread_name_prefix="dormouse-sources")
        while (source := cls.dropped.get()) is not None:
            source.end(threads)
            del source
        threads.shutdown(wait=False)

    @classmethod
    def end(cls) -> None:
        """What was dropped last still gives back what it holds."""
        if cls._thread is not None and cls._thread.is_alive():
            cls.dropped.put(None)
            cls._thread.join(EXIT_SECONDS_MAX)


os.register_at_fork(after_in_child=_Ending.anew)
atexit.register(_Ending.end)
