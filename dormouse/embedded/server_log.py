"""The log of an embedded PostgreSQL, which is kept short while the server writes it."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from shutil import disk_usage

from dormouse.embedded.locks import close_lock, open_lock, try_lock
from dormouse.errors import DormouseError

LOG_BYTES_MAX = 16 * 1024 * 1024
WATCH_SECONDS = 10
QUIET_SECONDS = 0.05
QUIET_LOOKS_MAX = 20
TAIL_BYTES = 16 * 1024
TAIL_LINES = 5
FREE_BYTES_MIN = 1024 * 1024
"""With less, a disk is full: a server that starts writes its lock files, its log and some of its tables."""
_NO_SPACE = "No space left on device"

logger = logging.getLogger(__name__)


class ServerLog:
    """`postgres.log`, and what came before it in `postgres.log.old`: each at most `LOG_BYTES_MAX`.

    Each process that has the folder open looks at its size every `WATCH_SECONDS`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._old = path.with_suffix(".log.old")
        self._ended: threading.Event | None = None

    def open(self) -> int:
        """A descriptor for a server: what it writes is appended, wherever the log ends by then."""
        self.rotate()
        return os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def rotate(self) -> None:
        """Puts a log that is too long aside: its end is copied, for the server keeps its file open."""
        if not self.path.exists() or self.path.stat().st_size <= LOG_BYTES_MAX:
            return
        log = open_lock(self.path)  # two processes would cut twice
        try:
            # the size is read under the lock: another process may have cut the log just before
            if not try_lock(log) or os.fstat(log).st_size <= LOG_BYTES_MAX:
                return
            os.lseek(log, _settled_size(log) - LOG_BYTES_MAX, os.SEEK_SET)
            with os.fdopen(os.open(self._old, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as old:
                while part := os.read(log, 1024 * 1024):
                    old.write(part)
            os.ftruncate(log, 0)
        finally:
            close_lock(log)

    def watch(self) -> None:
        self._ended = threading.Event()
        threading.Thread(
            target=self._watch, args=(self._ended,), name="dormouse-server-log", daemon=True
        ).start()

    def unwatch(self) -> None:
        if self._ended is not None:
            self._ended.set()

    def tail(self) -> str:
        """The last lines, in one."""
        try:
            with self.path.open("rb") as log:
                log.seek(max(0, self.path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        except FileNotFoundError:
            return "it has no log"
        return " | ".join(line.strip() for line in lines)

    def reason(self) -> str:
        """Returns why the server does not start or get ready: its disk is full, or else the last lines."""
        said = self.tail()
        # what the log says of a full disk may be cut off, as the log is on the same disk
        if _NO_SPACE in said or disk_usage(self.path.parent).free < FREE_BYTES_MIN:
            return "its disk is full: make room, and open it again"
        return said

    def _watch(self, ended: threading.Event) -> None:
        while not ended.wait(WATCH_SECONDS):
            try:
                self.rotate()
            except (OSError, DormouseError) as error:
                logger.warning("%s is not cut: %s", self.path, error)


def _settled_size(log: int) -> int:
    """Returns the size of a file once nothing is written to it for a moment, or after a second.

    What is written between the last read and the cut would be lost.
    """
    size = os.fstat(log).st_size
    for _ in range(QUIET_LOOKS_MAX):
        time.sleep(QUIET_SECONDS)
        before, size = size, os.fstat(log).st_size
        if size == before:
            break
    return size
