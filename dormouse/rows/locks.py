"""The locks of a row table: many readers or one writer, each with a token that fences.

Source: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
"""

from __future__ import annotations

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from typing import Any, Literal
from uuid import UUID
from weakref import WeakValueDictionary

import psycopg
from psycopg import errors

from dormouse.errors import DormouseError, RowLockHeld, TableNotFound
from dormouse.model.ahead import backoff_seconds
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.leases import MARGIN_SECONDS, ROW_LOCK_SECONDS, restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement

LEASE_SECONDS = ROW_LOCK_SECONDS
QUEUE_SECONDS_MAX = 1.0
ASKED_SECONDS_MIN = 1.0
"""How long even a caller that does not wait is held up by a transaction that is just changing the lock."""

POLL_SECONDS_MIN, POLL_SECONDS_MAX = 0.002, 0.25
Kind = Literal["read", "write"]
_QUERIES = load(__package__ or "", "locks")

_queues: WeakValueDictionary[tuple[int, str | None], threading.Lock] = WeakValueDictionary()
"""Where the writers of one process wait for each other: only one asks the database again and again."""

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class HeldLock:
    """A lock that was granted: what its token fences, and the table as it was then.

    A commit that has given it back says so.
    """

    token: UUID
    version: int
    next_id: int
    given_back: bool = False


@dataclass(frozen=True, slots=True)
class LockHolder:
    """Who holds a lock, and until when unless it is renewed."""

    kind: str
    holder: str
    leased_until: datetime


class RowLocks:
    """The locks of one table. Each is a row of the database, taken in a transaction of its own."""

    def __init__(self, supplier: Supplier, table: TableRecord, lease_seconds: float = LEASE_SECONDS) -> None:
        self._supplier = supplier
        self._table = table
        self._lease_seconds = lease_seconds

    @contextmanager
    def read(self) -> Iterator[HeldLock]:
        """Until the end no row is changed; `RowLockHeld` at once when a writer has it, or waits for it."""
        with self._held("read", 0.0) as lock:
            yield lock

    @contextmanager
    def write(self, wait_seconds: float = 0.0) -> Iterator[HeldLock]:
        """Until the end, or the commit that gives it back, nobody else changes the table or stops it.

        Readers, while no others are let in, and another writer are waited for, for `wait_seconds`: then
        `RowLockHeld`.
        """
        deadline = time.monotonic() + wait_seconds
        queue = _queues.setdefault((os.getpid(), self._table.uuid), threading.Lock())
        # not for long: one of this process may be frozen, and have lost its lock to another
        is_first = queue.acquire(timeout=min(max(wait_seconds, 0.0), QUEUE_SECONDS_MAX))
        try:
            with self._held("write", max(deadline - time.monotonic(), 0.0)) as lock:
                yield lock
        finally:
            if is_first:
                queue.release()

    def holders(self) -> list[LockHolder]:
        """Who holds locks now."""
        return [LockHolder(*row) for row in run_lookup(self._supplier, rows_of(_QUERIES["locks"], self._key))]

    @contextmanager
    def _held(self, kind: Kind, wait_seconds: float) -> Iterator[HeldLock]:
        token, lock = uuid.uuid4(), None
        ended = threading.Event()
        try:
            lock = self._waited_for(kind, token, time.monotonic() + wait_seconds)
            renewing = threading.Thread(target=self._renew, args=(token, ended), name="row lock", daemon=True)
            renewing.start()
            yield lock
        finally:
            ended.set()
            if lock is None or not lock.given_back:
                self._release(token)  # also a precursor, or what the answer was lost of

    def _waited_for(self, kind: Kind, token: UUID, deadline: float) -> HeldLock:
        for number in count():
            found = self._take(kind, token, max(deadline - time.monotonic(), ASKED_SECONDS_MIN))
            if isinstance(found, HeldLock):
                return found
            left = deadline - time.monotonic()
            if left <= 0:
                raise found
            time.sleep(min(left, backoff_seconds(number, POLL_SECONDS_MIN, POLL_SECONDS_MAX)))
        raise AssertionError

    def _take(self, kind: Kind, token: UUID, seconds_max: float) -> HeldLock | RowLockHeld:
        """Returns the lock, or why it is not given now; a writer that readers hold up leaves a precursor."""
        values = {**self._of(token), "kind": kind, "holder": f"{socket.gethostname()}:{os.getpid()}"}
        try:
            rows = self._run("take", values, lock_ms=math.ceil(1_000 * seconds_max))
        except errors.LockNotAvailable:
            return RowLockHeld(
                f"table {self._table.name!r}: a transaction that changes it has not ended; try again later",
                table=self._table.name,
            )
        state, held_kind, holder, until, version, next_id, is_too_long = rows[0]
        if state == "gone":
            raise TableNotFound.gone(self._table.name)
        if state == "granted":
            return HeldLock(token, version, next_id)
        if is_too_long:  # a wrong clock gave it; for the next try it is over a while from now
            restart_leases(self._supplier)
        does = {"write": "is changing it", "precursor": "waits to change it"}.get(held_kind, "reads it")
        return RowLockHeld(
            f"table {self._table.name!r}: worker {holder} {does}, until {until:%H:%M:%S} UTC or longer; "
            "try again later",
            table=self._table.name,
            holder=str(holder),
        )

    def _renew(self, token: UUID, ended: threading.Event) -> None:
        while not ended.wait(self._lease_seconds / 4):
            try:
                if not self._run("renew", self._of(token)):
                    return
            except Exception:
                logger.warning("the lock of table %r was not renewed yet", self._table.name, exc_info=True)

    def _release(self, token: UUID) -> None:
        # it ends by itself, if the database does not answer
        with suppress(DormouseError, psycopg.Error):
            self._run("release", self._of(token))

    def _run(self, query: str, values: dict[str, Any], *, lock_ms: int | None = None) -> list[Any]:
        work = rows_of(_QUERIES[query], values)
        return run_statement(self._supplier, work, lock_ms=lock_ms, operation=f"row lock {query}")

    @property
    def _key(self) -> dict[str, Any]:
        return {"table_id": self._table.table_id}

    def _of(self, token: UUID) -> dict[str, Any]:
        return {
            **self._key,
            "token": token,
            "lease_seconds": self._lease_seconds,
            "margin_seconds": MARGIN_SECONDS,
        }
