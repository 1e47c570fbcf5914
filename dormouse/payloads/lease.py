"""A day is worked on by one: a lease with a token, which every transaction of the work checks.

Who was frozen for longer than the lease finds another token, and commits nothing.
Source: https://martin.kleppmann.com/2016/02/08/how-to-do-distributed-locking.html
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from typing import Any, Literal, TypeVar

import psycopg

from dormouse.errors import DormouseError, PayloadDayBusy, one_line
from dormouse.payloads.keys import PayloadKey, place_values
from dormouse.postgres.connection import Supplier
from dormouse.postgres.leases import PAYLOAD_DAY_SECONDS, restart_leases
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction

T = TypeVar("T")
LEASE_SECONDS = PAYLOAD_DAY_SECONDS
Work = Literal["offload", "fold", "rehydrate", "rebuild"]
_READERS = 723_615_409
"""Of the advisory locks of those that read a day."""

_QUERIES = load(__package__ or "", "lease")

logger = logging.getLogger(__name__)


class LeaseLost(PayloadDayBusy):
    """Another worker has taken the day over."""


@dataclass(frozen=True, slots=True)
class DayRow:
    """What is known of a day that was worked on."""

    day: date
    state: str
    work: str | None
    phase: str | None
    token: int
    worker: str | None
    leased_until: datetime | None
    after_kind: str | None
    after_tenant: str | None
    after_id: str | None
    after_at: datetime | None
    verified_till: str | None
    payloads: int
    bytes_in: int
    bytes_out: int
    objects: int
    seconds: float
    swap_lock_ms: float | None
    error: str | None
    failed_at: datetime | None
    changed_at: datetime

    @property
    def after(self) -> PayloadKey | None:
        """The last key that the phase is done with."""
        if self.after_kind is None or self.after_tenant is None or self.after_id is None or not self.after_at:
            return None
        return PayloadKey(self.after_tenant, self.after_id, self.after_at, self.after_kind)


@dataclass(frozen=True)
class Lease:
    """The right to work on a day."""

    supplier: Supplier
    day: date
    token: int
    seconds: float

    def advance(
        self, conn: psycopg.Connection[Any], phase: str, after: PayloadKey | None = None, **done: int
    ) -> None:
        """First in a transaction: notes the phase and how far it is. Raises `LeaseLost`."""
        counts = {"payloads": 0, "bytes_in": 0, "bytes_out": 0, "objects": 0, **done}
        values = {**self._key, **place_values("after", after), **counts, "phase": phase}
        self._must(conn.execute(_QUERIES["advance"].on(), values).fetchall())

    def end(self, conn: psycopg.Connection[Any], state: str) -> None:
        """The work is done, and the day is in another state. Raises `LeaseLost`."""
        self._must(conn.execute(_QUERIES["end"].on(), {**self._key, "state": state}).fetchall())

    def row(self) -> DayRow:
        found = read(self.supplier, self.day)
        if found is None or found.token != self.token:
            self._must([])
        assert found is not None  # noqa: S101 it would have been raised
        return found

    @property
    def _key(self) -> dict[str, Any]:
        return {"day": self.day, "token": self.token, "lease_seconds": self.seconds}

    def _must(self, rows: list[Any]) -> None:
        if not rows:
            raise LeaseLost(f"payloads of {self.day}: another worker has taken the day over")


@contextmanager
def leased(
    supplier: Supplier, day: date, work: Work, states: Sequence[str], seconds: float = LEASE_SECONDS
) -> Iterator[Lease]:
    """A day to work on, if it is in one of the states, or the work was begun.

    Raises `PayloadDayBusy` when another has it. What the work raises is noted with the day.
    """
    values = {
        "day": day,
        "work": work,
        "worker": f"{socket.gethostname()}:{os.getpid()}",
        "states": list(states),
        "lease_seconds": seconds,
    }
    taken = run_transaction(supplier, rows_of(_QUERIES["take"], values), operation="lease a day")
    if not taken:
        # for the next try: a lease that a wrong clock made too long is over a while from now
        restart_leases(supplier)
        raise PayloadDayBusy(_why_not(supplier, day, work))
    lease = Lease(supplier, day, taken[0][0], seconds)
    run_transaction(supplier, lambda conn: _end_readers(conn, day), operation="lease a day")
    began, error = time.monotonic(), None
    try:
        with _renewed(lease):
            yield lease
    except BaseException as raised:
        error = one_line(raised)
        raise
    finally:
        over = {**lease._key, "seconds": time.monotonic() - began, "error": error}
        try:
            run_transaction(supplier, rows_of(_QUERIES["release"], over), operation="release a day")
        except DormouseError:
            logger.warning("payloads of %s: the lease ends by itself", day, exc_info=True)


def read(supplier: Supplier, day: date) -> DayRow | None:
    """A day as it is; None when nothing was ever done with it."""
    rows = run_lookup(supplier, rows_of(_QUERIES["read"], {"day": day}), operation="look at a day")
    return DayRow(*rows[0]) if rows else None


def mark_reader(conn: psycopg.Connection[Any], day: date) -> None:
    """In a transaction that reads much of a day: whoever takes the day over ends it."""
    conn.execute(_QUERIES["mark_reader"].on(), _reader_of(day))


def reading(
    day: date, work: Callable[[psycopg.Connection[Any]], T]
) -> Callable[[psycopg.Connection[Any]], T]:
    """The same work, in a transaction that is marked first."""

    def marked(conn: psycopg.Connection[Any]) -> T:
        mark_reader(conn, day)
        return work(conn)

    return marked


def _end_readers(conn: psycopg.Connection[Any], day: date) -> None:
    # a session may end those of whom it logged in as, and not those of a role that it acts as
    conn.execute("set local role none")
    conn.execute(_QUERIES["end_readers"].on(), _reader_of(day))


def _reader_of(day: date) -> dict[str, int]:
    return {"class": _READERS, "number": day.toordinal()}


@contextmanager
def _renewed(lease: Lease) -> Iterator[None]:
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(lease.seconds / 4):
            try:
                if not run_statement(
                    lease.supplier, rows_of(_QUERIES["renew"], lease._key), operation="renew a lease"
                ):
                    return
            except Exception:
                logger.warning("the lease of payloads of %s was not renewed yet", lease.day, exc_info=True)

    renewing = threading.Thread(target=renew, name="payload lease", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()


def _why_not(supplier: Supplier, day: date, work: str) -> str:
    found = read(supplier, day)
    if found is not None and found.worker is not None:
        until = f"{found.leased_until:%H:%M:%S}" if found.leased_until else "now"
        return f"payloads of {day}: worker {found.worker} has the day until {until} UTC; try again later"
    doing = f"a {found.work} of it is not done" if found and found.work else "it was done meanwhile"
    return f"payloads of {day}: no {work} of it can begin now: {doing}"
