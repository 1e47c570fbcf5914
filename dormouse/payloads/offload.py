"""Cools a day down: its payloads go into objects, and a copy of its partition has pointers to them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from hashlib import sha256

from dormouse.errors import ObjectNotFound, PayloadsDiffer
from dormouse.model.ahead import ahead
from dormouse.objects import ObjectStore
from dormouse.payloads.copying import Pages, PayloadOptions, Step, Unit, Units, Uploads, commit_pointers
from dormouse.payloads.exchange import Exchange
from dormouse.payloads.lease import Lease
from dormouse.payloads.pack import DayObject, PayloadObjects
from dormouse.payloads.status import PayloadDay, days, has_rows
from dormouse.postgres.connection import Supplier

Progress = Callable[[date, int], object]
"""Called with the day and its payloads that are done."""


@dataclass(frozen=True)
class Tools:
    """What works on days have in common. `is_over` ends a slice; `step` is told each, for tests."""

    supplier: Supplier
    objects: ObjectStore
    options: PayloadOptions
    progress: Progress = lambda day, payloads: None
    is_over: Callable[[], bool] = lambda: False
    step: Step = lambda name: None

    @property
    def known(self) -> PayloadObjects:
        return PayloadObjects(self.supplier, self.objects)

    def days(self) -> list[PayloadDay]:
        """Returns the days that there are payloads of, the oldest first."""
        return days(self.supplier, self.options.hot_seconds)

    def exchange(self, lease: Lease) -> Exchange:
        return Exchange(lease, self.options, self.step, self.is_over)


def within(seconds_max: float | None) -> Callable[[], bool]:
    """Whether a slice is over."""
    ends = None if seconds_max is None else time.monotonic() + seconds_max
    return lambda: ends is not None and time.monotonic() >= ends


@dataclass
class Slice:
    """Ends units when the time is over, after one at least."""

    is_over: Callable[[], bool]
    was_ended: bool = False

    def of(self, units: Iterator[Unit]) -> Iterator[Unit]:
        for unit in units:
            yield unit
            if self.is_over():
                self.was_ended = True
                return


def offload_day(tools: Tools, lease: Lease) -> bool:
    """Goes on with a day wherever it is; False when the slice is over before it is done.

    Raises `PayloadsDiffer` when the copy is not what the day has: then nothing has changed, and the next try
    begins anew.
    """
    exchange = tools.exchange(lease)
    try:
        return _phases(tools, lease, exchange)
    except PayloadsDiffer:
        exchange.give_up("open", lambda conn: PayloadObjects.unstage(conn, lease.day, exchange.names.day))
        raise


def _phases(tools: Tools, lease: Lease, exchange: Exchange) -> bool:
    phase = lease.row().phase
    if phase == "prepare":
        # what a copy that was given up has left
        exchange.prepare(lambda conn: PayloadObjects.unstage(conn, lease.day, exchange.names.day))
        phase = "copy"
    if phase == "copy":
        if not _copy(tools, lease, exchange):
            return False
        exchange.note_copied()
    if phase in {"copy", "verify"}:
        if not check_objects(tools, lease.day):
            return False
        exchange.verify()
        phase = lease.row().phase
    if phase == "swap":
        if not exchange.wait_for_readers():
            return False
        exchange.swap(lambda conn: None)
        phase = "finish"
    if phase == "finish":
        exchange.finish("offloaded")
        return True
    return False


def _copy(tools: Tools, lease: Lease, exchange: Exchange) -> bool:
    """Everything after the last key that is done; False when the slice is over before all is."""
    row = lease.row()
    done, options = row.payloads, tools.options
    pages = Pages(tools.supplier, lease.day, options.page_rows_max, tools.step)
    uploads = Uploads(tools.known, lease, options, tools.step)
    with closing(pages.payloads(row.after)) as payloads:
        slice_ = Slice(tools.is_over)
        written = uploads.done(slice_.of(Units(lease.day, options).of(payloads)))
        # the next unit is packed while the pointers of one are added
        with closing(written), closing(ahead(written, 1)) as units:
            for unit in units:
                commit_pointers(lease, exchange.names.copy, unit, tools.step)
                tools.step("committed")
                done += 0 if unit.packed is None else len(unit.packed.entries)
                tools.progress(lease.day, done)
    return not slice_.was_ended


def check_objects(tools: Tools, day: date, state: str = "live") -> bool:
    """Reads back what was written and not read yet; False when the slice is over before all is.

    Raises `PayloadsDiffer` when an object is not what was written.
    """
    left = [one for one in tools.known.of_day(day, state) if not one.verified]
    step = tools.options.uploads
    with ThreadPoolExecutor(step, "payload checks") as pool:
        for at in range(0, len(left), step):
            some = left[at : at + step]
            for one, fault in zip(some, pool.map(lambda one: _fault(tools.objects, one), some), strict=True):
                if fault is not None:
                    raise PayloadsDiffer(
                        f"payloads of {day}: object {one.object_key!r} {fault}; the day is as it was, and is "
                        "copied again"
                    )
            tools.known.note_verified([one.object_key for one in some])
            if tools.is_over():
                return at + step >= len(left)
    return True


def _fault(objects: ObjectStore, one: DayObject) -> str | None:
    try:
        data = objects.get(one.object_key)
    except ObjectNotFound:
        return "is not there"
    if len(data) != one.byte_count:
        return f"has {len(data):,} bytes, and was written with {one.byte_count:,}"
    return None if sha256(data).digest() == one.digest else "has other bytes"


def is_empty(tools: Tools, day: date) -> bool:
    """Whether there is nothing to cool down."""
    return not has_rows(tools.supplier, day)
