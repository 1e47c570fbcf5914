"""Helpers for tests of jobs: a job store without an instance, and workers in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from dormouse.jobs import JobStore, Worker
from dormouse.objects import open_store
from dormouse.payloads import PayloadStore
from dormouse.postgres import ConnectionSupplier
from tests.pauses import pauses

PATIENCE_SECONDS = 600.0


def job_store(supplier: ConnectionSupplier, folder: Path) -> JobStore:
    objects = open_store(folder)
    return JobStore(supplier, objects, PayloadStore(supplier, objects), lambda: None)


class Working:
    """A worker in its own thread. Leaving the context stops the worker and raises the thread's error."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Worker:
        self._thread.start()
        return self.worker

    def __exit__(self, *_: object) -> None:
        self.worker.stop()
        self._thread.join(PATIENCE_SECONDS)
        assert not self._thread.is_alive(), "the worker does not stop"
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.worker.run()
        except BaseException as error:
            self._error = error


def until(holds: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until a condition holds; fails after `seconds`."""
    for _ in pauses(seconds):
        if holds():
            return
    raise AssertionError("it did not happen")
