"""The worker of a process that works on indexes of row tables, in a thread of its own."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import psycopg

from dormouse.errors import DormouseError, one_line

if TYPE_CHECKING:
    from dormouse.jobs import Worker

FINISH_SECONDS, END_SECONDS = 2.0, 5.0
"""How long a program that ends waits for the index that is worked on, and then for the worker."""

logger = logging.getLogger(__name__)


class IndexWorker:
    """Starts the worker when there is work, so that it is done also where no other process works.

    A program that ends without closing its instance stops it, before an embedded server is stopped.
    """

    def __init__(self, make: Callable[[], Worker]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._running: tuple[int, Worker, threading.Thread] | None = None
        self._is_registered = False

    def start(self) -> None:
        with self._lock:
            if self._running is not None and self._running[0] == os.getpid():
                return
            worker = self._make()
            # daemon: a build that hangs must not keep the program from ending
            thread = threading.Thread(target=self._run, args=(worker,), name="dormouse-rows", daemon=True)
            self._running = os.getpid(), worker, thread
            if not self._is_registered:
                # last registered runs first: the embedded server, which came before, still runs then
                atexit.register(_end, weakref.ref(self))
                self._is_registered = True
            thread.start()

    def close(self, *, waits: bool = False) -> None:
        """Stops the worker; others run its jobs. With `waits` it may finish, and its thread has ended."""
        with self._lock:
            running, self._running = self._running, None
        if running is None or running[0] != os.getpid():
            return
        _, worker, thread = running
        worker.stop()
        if waits:
            thread.join(FINISH_SECONDS)
        worker.stop()
        if waits:
            thread.join(END_SECONDS)

    def _run(self, worker: Worker) -> None:
        try:
            worker.run()
        except (DormouseError, psycopg.Error) as error:
            logger.warning("the worker of indexes ended: %s", one_line(error))
        finally:
            with self._lock:
                if self._running is not None and self._running[1] is worker:
                    self._running = None


def _end(worker: weakref.ref[IndexWorker]) -> None:
    if (found := worker()) is not None:
        found.close(waits=True)
