"""Threads that are kept for the next work; one that never comes back is replaced by another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Threads:
    """Runs each work at once, in a thread that is free or a new one; how many there are is the caller's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._free = 0
        self._all = 0

    def run(self, work: Callable[[], object]) -> None:
        """`work` must not raise."""
        with self._lock:
            if needs_another := self._free == 0:
                self._all += 1
            else:
                self._free -= 1
            number = self._all
        if needs_another:
            # a function that hangs must not keep the program from ending
            name = f"{self._name}-{number}"
            threading.Thread(target=self._serve, args=(work,), name=name, daemon=True).start()
        else:
            self._work.put(work)

    def close(self) -> None:
        """Those that are free end, and others when they become free."""
        for _ in range(self._all):
            self._work.put(None)

    def _serve(self, work: Callable[[], object] | None) -> None:
        while work is not None:
            work()
            del work
            with self._lock:
                self._free += 1
            work = self._work.get()
