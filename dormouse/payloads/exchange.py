"""The exchange of a day's partition by a copy, while reads and writes go on.

A trigger mirrors every write to the copy until the copy replaces the partition. The partition itself is never
updated, so that vacuum has nothing to do there. Readers and writers wait only during the exchange, and up to
`lock_timeout` before it. Source: the write-and-swap of Hatchet's offload; pg_repack and gh-ost copy likewise.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import date, timedelta
from functools import partial
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg import sql

from dormouse.errors import PayloadDayBusy, PayloadsDiffer
from dormouse.model.loops import Progress, mapped_ahead, no_progress, tries
from dormouse.objects.fault import Fault, read_back
from dormouse.objects.store import ObjectStore
from dormouse.payloads.copying import PayloadOptions, Step
from dormouse.payloads.days import DayLease, PayloadDay, days, reading
from dormouse.payloads.keys import PayloadKey, place_values
from dormouse.payloads.pack import DayObject, PayloadObjects
from dormouse.payloads.rows import DAYS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

DIFFERENCES_MAX = 10
PAUSE_SECONDS_MAX = 2.0
READERS_SECONDS_MAX = 600.0
SETTLED_LEFT_MAX, SETTLED_TIMES_MAX = 1_000, 10
"""Limits of the comparisons of new writes before the exchange.

A comparison repeats until fewer than 1,000 newer writes are left, at most 10 times. The remaining writes are
compared under the exclusive lock, so there must be few of them.
"""

COMPARED_AT_ONCE = 2
"""The number of pages of a day and its copy that are compared at the same time."""

_READERS_LOOK_SECONDS = 0.05
_EVER = "1:1:"
"""A PostgreSQL snapshot that sees no transaction, so that all writes are later than this snapshot."""

_QUERIES = load(__package__ or "", "exchange")


@dataclass(frozen=True)
class Tools:
    """The connections, object store and options that all work on days shares.

    `is_over` returns True when the time limit of this run is reached. `step` is called at each step, so that
    tests can interrupt the work there.
    """

    supplier: Supplier
    objects: ObjectStore
    options: PayloadOptions
    progress: Progress = no_progress
    is_over: Callable[[], bool] = lambda: False
    step: Step = lambda name: None

    @property
    def known(self) -> PayloadObjects:
        return PayloadObjects(self.supplier, self.objects)

    def days(self) -> list[PayloadDay]:
        """Returns the days of payloads, the oldest first."""
        return days(self.supplier, self.options.hot_seconds)


def within(seconds_max: float | None) -> Callable[[], bool]:
    """Returns a function that returns True once `seconds_max` have passed from now.

    Without a limit, the function always returns False.
    """
    ends = None if seconds_max is None else time.monotonic() + seconds_max
    return lambda: ends is not None and time.monotonic() >= ends


@dataclass(frozen=True)
class Names:
    """The names of the tables and functions in the database that an exchange uses."""

    day_: date

    @property
    def day(self) -> str:
        return DAYS.name(self.day_)

    @property
    def copy(self) -> str:
        return f"{self.day}_copy"

    @property
    def written(self) -> str:
        return f"{self.day}_written"

    @property
    def mirror(self) -> str:
        return f"{self.day}_mirror"

    @property
    def old(self) -> str:
        return f"{self.day}_old"

    @property
    def bounds(self) -> str:
        return f"{self.day}_bounds"

    @property
    def limits(self) -> dict[str, str]:
        return {"from_day": _midnight(self.day_), "to_day": _midnight(self.day_ + timedelta(days=1))}


class Exchange:
    """The exchange of one day's partition by the worker that holds the lease of the day.

    When `is_over` of the tools returns True, waits end early.
    """

    def __init__(self, tools: Tools, lease: DayLease) -> None:
        self._tools = tools
        self._lease = lease
        self.names = Names(lease.day)

    def prepare(self, extra: Callable[[psycopg.Connection[Any]], object]) -> None:
        """Creates an empty copy of the day, and a trigger that repeats all later writes in the copy.

        Calls `extra` in the same transaction.
        """

        def work(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "copy")
            conn.execute(self._on("make_copy", "copy", "written", "day", "bounds", limits=True))
            about = {"copy": self.names.copy, "day": self.names.day}
            for (statement,) in conn.execute(_QUERIES["likeness"].on(), about).fetchall():
                conn.execute(sql.SQL(statement))
            conn.execute(self._on("mirror", "mirror", "written", "copy", "day"))
            extra(conn)

        self._patiently(work, "copy a day")
        self._tools.step("prepared")

    def note_copied(self, forget: bool = True) -> None:
        """Records that the whole day is copied.

        With `forget`, removes the copy's rows that are marked as deleted.
        """
        after = self._lease.row().after

        def work(conn: psycopg.Connection[Any]) -> None:
            # two transactions: a worker that is killed in between repeats both
            self._lease.advance(conn, "copy", after)
            conn.execute(_QUERIES["note_seen"].on(), {"day": self._lease.day, "till": None})

        def settle(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "verify")
            if forget:
                self._forget_deleted(conn, _EVER)

        run_transaction(self._lease.supplier, work, operation="verify a day")
        run_transaction(self._lease.supplier, settle, operation="verify a day", scans=True)
        self._tools.step("copied")

    def verify(self) -> None:
        """Compares the day with its copy, page by page. Raises `PayloadsDiffer`, which names the keys."""
        pages = self._pages(self._lease.row().after)
        with closing(mapped_ahead(self._compared, pages, COMPARED_AT_ONCE)) as compared:
            for till, differing in compared:
                self._differ(differing)
                if till is None:
                    self.go_on_from("swap", None)
                    self._tools.step("verified")
                    return
                self.go_on_from("verify", till)

    def go_on_from(self, phase: str, after: PayloadKey | None) -> None:
        """Records the phase of the work, and the last key that is done in this phase."""
        run_transaction(
            self._lease.supplier,
            lambda conn: self._lease.advance(conn, phase, after),
            operation="verify a day",
        )

    def wait_for_readers(self) -> bool:
        """Waits for the end of transactions whose snapshots are too old to see the whole copy.

        Returns False if the time limit of the run ends the wait. Raises `PayloadDayBusy` after 10 minutes.
        """
        work = rows_of(_QUERIES["transactions"])
        before = set[tuple[Any, ...]]()
        for this in tries(READERS_SECONDS_MAX, pause=_READERS_LOOK_SECONDS):
            now = set(run_lookup(self._lease.supplier, work, operation="wait for readers"))
            before = now if this.number == 1 else before & now
            if not before:
                return True
            if self._tools.is_over():
                return False
        processes = ", ".join(str(pid) for _, pid in sorted(before))
        raise PayloadDayBusy(
            f"payloads of {self._lease.day}: older transactions did not end within "
            f"{READERS_SECONDS_MAX:g} s, of the server's processes {processes}; the day is unchanged"
        )

    def swap(self, forget: bool = True) -> None:
        """Compares the writes since the verification, then replaces the day's partition by the copy.

        With `forget`, removes the copy's rows that are marked as deleted. Raises `PayloadsDiffer`, which
        leaves the day unchanged, and `PayloadDayBusy` if other transactions use the day for too long.
        """
        since = self._lease.row().verified_till or _EVER

        def settle() -> None:
            nonlocal since
            for _ in range(SETTLED_TIMES_MAX):
                since = self._settled(since, forget)
                if self._count_written(since) < SETTLED_LEFT_MAX:
                    return

        def work(conn: psycopg.Connection[Any]) -> float:
            self._lease.advance(conn, "finish")
            conn.execute(self._on("lock_to_exchange", "day", "copy"))
            began = time.monotonic()
            self._differ(self._compared_written(conn, since))
            if forget:
                self._forget_deleted(conn, since)
            parts = ("day", "copy", "old", "mirror", "bounds")
            keys = {f"{part}_key": f"{getattr(self.names, part)}_pkey" for part in ("day", "copy", "old")}
            conn.execute(self._on("exchange", *parts, limits=True, **keys))
            self._tools.step("swapping")
            return began

        self._note_lock(self._patiently(work, "exchange a day", settle))
        self._tools.step("swapped")

    def finish(self, state: str) -> None:
        """Drops the day's old partition, and ends the work with the day's new state."""

        def work(conn: psycopg.Connection[Any]) -> None:
            conn.execute(_QUERIES["drop_old"].on(old=self.names.old, written=self.names.written))
            self._lease.end(conn, state)

        self._patiently(work, "drop a day")
        self._tools.step("finished")

    def end(self, state: str) -> None:
        """Ends the work without an exchange, and records the day's new state."""
        run_transaction(
            self._lease.supplier,
            lambda conn: self._lease.end(conn, state),
            operation="end the lease of a day",
        )

    def give_up(self, state: str, extra: Callable[[psycopg.Connection[Any]], object]) -> None:
        """Drops the copy and ends the work, so that the day is as before.

        Calls `extra` in the same transaction.
        """

        def work(conn: psycopg.Connection[Any]) -> None:
            conn.execute(self._on("drop_copy", "day", "mirror", "copy", "written"))
            extra(conn)
            self._lease.end(conn, state)

        self._patiently(work, "abandon the copy of a day")

    def _settled(self, since: str, forget: bool) -> str:
        """Compares the writes since a snapshot with the copy, while other transactions continue to write.

        Returns a newer snapshot, up to which writes are now compared.
        """
        supplier, operation = self._lease.supplier, "verify a day"
        [(till,)] = run_lookup(supplier, rows_of(_QUERIES["snapshot"]), operation=operation)
        compared = reading(self._lease.day, partial(self._compared_written, since=since))
        self._differ(run_transaction(supplier, compared, read_only=True, scans=True, operation=operation))

        def work(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "swap")
            if forget:
                self._forget_deleted(conn, since)
            conn.execute(_QUERIES["note_seen"].on(), {"day": self._lease.day, "till": till})

        run_transaction(supplier, work, scans=True, operation=operation)
        return str(till)

    def _count_written(self, since: str) -> int:
        work = rows_of(self._on("count_written", "written"), {"since": since, "limit": SETTLED_LEFT_MAX})
        [(count,)] = run_lookup(self._lease.supplier, work, operation="verify a day")
        return int(count)

    def _note_lock(self, began: float) -> None:
        values = {"day": self._lease.day, "milliseconds": 1_000 * (time.monotonic() - began)}
        run_transaction(
            self._lease.supplier, rows_of(_QUERIES["note_exchange"], values), operation="exchange a day"
        )

    def _forget_deleted(self, conn: psycopg.Connection[Any], since: str) -> None:
        conn.execute(self._on("forget_deleted", "copy", "written"), {"since": since})

    def _pages(self, after: PayloadKey | None) -> Iterator[tuple[PayloadKey | None, PayloadKey | None]]:
        """Yields the remaining pages to compare, as (after, till) pairs of keys.

        `after` is None for the first page, and `till` is None for the last page.
        """
        while not self._tools.is_over():
            till = self._last_of_page(after)
            yield after, till
            if till is None:
                return
            after = till

    def _last_of_page(self, after: PayloadKey | None) -> PayloadKey | None:
        """Returns the last key of the page after a key, or None if it is the last page."""
        limit = self._tools.options.page_rows_max
        work = rows_of(self._on("last_of_page", "day"), {**place_values("after", after), "limit": limit})
        rows = run_lookup(self._lease.supplier, work, operation="verify a day")
        if not rows or rows[0][4] < limit:
            return None
        kind, tenant, id_, at, _ = rows[0]
        return PayloadKey(tenant, id_, at, kind)

    def _compared(
        self, page: tuple[PayloadKey | None, PayloadKey | None]
    ) -> tuple[PayloadKey | None, list[PayloadKey]]:
        """Returns the last key of a page, and the keys of the page at which the day and its copy differ."""
        after, till = page
        query = _QUERIES["compare"].including(differences=_QUERIES["differences"])
        bounds = place_values("after", after) | place_values("till", till)
        values = {**bounds, "limit": DIFFERENCES_MAX}
        compare = rows_of(query.on(day=self.names.day, copy=self.names.copy), values)
        rows = run_transaction(
            self._lease.supplier,
            reading(self._lease.day, compare),
            read_only=True,
            scans=True,
            operation="verify a day",
        )
        return till, [PayloadKey(*row) for row in rows]

    def verify_written(self) -> None:
        """Compares all writes so far with the copy. Raises `PayloadsDiffer`, which names the keys."""
        work = reading(self._lease.day, partial(self._compared_written, since=_EVER))
        self._differ(run_transaction(self._lease.supplier, work, scans=True, operation="verify a day"))

    def _compared_written(self, conn: psycopg.Connection[Any], since: str) -> list[PayloadKey]:
        query = _QUERIES["compare_written"].including(differences=_QUERIES["differences"])
        named = query.on(written=self.names.written, day=self.names.day, copy=self.names.copy)
        rows = conn.execute(named, {"since": since, "limit": DIFFERENCES_MAX})
        return [PayloadKey(*row) for row in rows]

    def _differ(self, keys: Iterable[PayloadKey]) -> None:
        if differing := tuple(keys):
            raise differs(self._lease.day, differing)

    def _on(self, query: str, *parts: str, limits: bool = False, **more: str) -> sql.Composed:
        literal = _QUERIES[query].literally(**self.names.limits) if limits else _QUERIES[query]
        return literal.on(**{part: getattr(self.names, part) for part in parts}, **more)

    def _patiently(
        self,
        work: Callable[[psycopg.Connection[Any]], Any],
        operation: str,
        before: Callable[[], object] = lambda: None,
    ) -> Any:
        """Returns the result of work that needs an exclusive lock on the day.

        If the lock is not granted within a short timeout, lets other transactions go first and retries. Calls
        `before` before each try, without the lock. Raises `PayloadDayBusy` if no try succeeds.
        """
        for _ in tries(READERS_SECONDS_MAX, pause=lambda _: random.uniform(0.1, 1) * PAUSE_SECONDS_MAX):  # noqa: S311
            before()
            try:
                return run_transaction(
                    self._lease.supplier,
                    work,
                    lock_ms=self._tools.options.lock_timeout_ms,
                    operation=operation,
                )
            except pg.LockNotAvailable:
                if self._tools.is_over():
                    break
        raise PayloadDayBusy(
            f"payloads of {self._lease.day}: {operation}: other transactions use the day all the time; "
            "it is unchanged, and the next run tries again"
        )


def differs(day: date, keys: Sequence[PayloadKey]) -> PayloadsDiffer:
    listed = "; ".join(map(str, keys))
    more = " at least" if len(keys) >= DIFFERENCES_MAX else ""
    return PayloadsDiffer(
        f"payloads of {day}: the copy differs at{more} {len(keys)}: {listed}; the day is unchanged",
        tuple(keys),
    )


def _midnight(day: date) -> str:
    return f"{day} 00:00:00+00"


def check_objects(tools: Tools, day: date, state: str = "live") -> bool:
    """Reads back the day's objects that were not verified yet, and compares their digests.

    Returns False if the time limit ends the work early. Raises `PayloadsDiffer` if an object is not what was
    written.
    """
    left = [each for each in tools.known.of_day(day, state) if not each.verified]
    step = tools.options.uploads

    def read(day_object: DayObject) -> Fault | None:
        return read_back(tools.objects, day_object.written)[1]

    with ThreadPoolExecutor(step, "payload checks") as pool:
        for at in range(0, len(left), step):
            checked = left[at : at + step]
            for day_object, fault in zip(checked, pool.map(read, checked), strict=True):
                if fault is not None:
                    raise PayloadsDiffer(
                        f"payloads of {day}: object {day_object.object_key!r} {fault}; the day is unchanged, "
                        "and the next run copies it again"
                    )
            tools.known.note_verified([day_object.object_key for day_object in checked])
            if tools.is_over():
                return at + step >= len(left)
    return True
