"""What ingests did, told to people among the jobs: many in one statement, a moment later; none waits for it.

Other rounds are told of by the statement that remembers their end (`last_rounds.py`).
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from dormouse.errors import InstanceError, JobCancelled, JobLost, TableNotFound, one_line
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_statement

WAIT_SECONDS = 1.0
PENDING_MAX = 10_000
"""While the database does not take them, no more than so many are kept."""

CHARACTERS_MAX = 1_000

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "round_reports")


@dataclass(frozen=True, slots=True)
class _Report:
    table: str
    began: float
    ended: float
    message: str | None
    error: str | None


@dataclass(slots=True)
class Reported:
    """An ingest while it runs; `message` is what came of it."""

    message: str | None = None


@dataclass
class RoundReports:
    """The reports of one process; threads share it."""

    supplier: Supplier
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _pending: list[_Report] = field(default_factory=list)
    _is_writing: bool = False
    _closed: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def ingest(self, table: str) -> Iterator[Reported]:
        """One of a table: told of with its message, or with what it raises."""
        current, began = Reported(), time.monotonic()
        try:
            yield current
        except (InstanceError, TableNotFound, JobCancelled, JobLost):
            raise
        except Exception as error:
            self._add(_Report(table, began, time.monotonic(), None, _storable(one_line(error))))
            raise
        if current.message is not None:
            self._add(_Report(table, began, time.monotonic(), _storable(current.message), None))

    def close(self) -> None:
        """Writes what is left; an ingest that ends later is not told of."""
        self._closed.set()
        self._write()

    def _add(self, report: _Report) -> None:
        with self._lock:
            if len(self._pending) < PENDING_MAX:
                self._pending.append(report)
            if self._is_writing or self._closed.is_set():
                return
            self._is_writing = True
        with suppress(RuntimeError):  # no thread starts while the program ends
            threading.Thread(target=self._write_soon, name="round reports", daemon=True).start()

    def _write_soon(self) -> None:
        while not self._closed.wait(WAIT_SECONDS):
            self._write()
            with self._lock:
                if not self._pending:
                    self._is_writing = False
                    return

    def _write(self) -> None:
        with self._lock:
            reports, self._pending = self._pending, []
        if not reports:
            return
        now = time.monotonic()
        values = {
            "kind": "round:ingest",
            "worker": who(),
            "tables": [one.table for one in reports],
            "seconds": [one.ended - one.began for one in reports],
            "ages": [now - one.ended for one in reports],
            "messages": [one.message for one in reports],
            "errors": [one.error for one in reports],
        }
        try:
            run_statement(self.supplier, rows_of(_QUERIES["report"], values), operation="report ingests")
        except Exception as error:
            logger.warning("%d ingests are not told of: %s", len(reports), one_line(error))


def who() -> str:
    """The process that works, for people."""
    return f"process {os.getpid()} on host {socket.gethostname()}"


def _storable(text: str) -> str:
    return text.replace("\0", "�").encode(errors="replace").decode()[:CHARACTERS_MAX]
