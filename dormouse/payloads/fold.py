"""The fold of a day: the objects of its payloads become its blocks, and its partition becomes empty.

If no payload in an object's range of keys was written or deleted later, the object becomes a block unchanged.
Otherwise the payloads of the range are written to new objects. A trigger repeats writes during the fold in
the new partition. Where a row and a block have the same key, the row counts.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from heapq import merge
from itertools import groupby, islice
from typing import Any, NamedTuple

import psycopg

from dormouse.errors import PayloadCorrupt, PayloadsDiffer
from dormouse.payloads.copying import Contents, Pages, Payload, Slice, Unit, Units, Uploads
from dormouse.payloads.days import DayLease, reading
from dormouse.payloads.exchange import DIFFERENCES_MAX, Exchange, Tools, check_objects, differs
from dormouse.payloads.keys import PayloadKey, columns, place_values
from dormouse.payloads.pack import DayObject, PayloadObjects, checksum
from dormouse.payloads.rows import DAYS
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

_OF_A_DAY = ("live", "block", "staged")
_VERIFIED_AT_ONCE = 10_000
_QUERIES = load(__package__ or "", "fold")

Key = tuple[str, str, str, Any]


class Range(NamedTuple):
    """A range of keys whose payloads are to be written to new objects.

    The range lies between the keys `after` and `before`, without these. `objects` are the old objects in it.
    """

    objects: list[DayObject]
    after: PayloadKey | None
    before: PayloadKey | None


def fold_day(tools: Tools, lease: DayLease) -> bool:
    """Folds a day, beginning with the phase at which an earlier run stopped.

    Returns False if the time limit ends the work early. Raises `PayloadsDiffer` and `PayloadCorrupt`, which
    leave the day unchanged.
    """
    fold = _Fold(tools, lease)
    try:
        return fold.go_on()
    except (PayloadsDiffer, PayloadCorrupt):  # frees the day, so that a rebuild can repair a lost object
        fold.give_up()
        raise


class _Fold:
    def __init__(self, tools: Tools, lease: DayLease) -> None:
        self._tools = tools
        self._lease = lease
        self._exchange = Exchange(tools, lease)
        self._contents = Contents(tools.objects, tools.known)

    def go_on(self) -> bool:
        phase = self._lease.row().phase
        if phase == "prepare":
            self._exchange.prepare(self._begin)
            phase = "copy"
        if phase == "copy":
            if not self._copy():
                return False
            self._exchange.note_copied(forget=False)
            phase = "verify"
        if phase == "verify":
            if not check_objects(self._tools, self._lease.day, "staged"):
                return False
            if not self._verify():
                return False
            self._exchange.verify_written()
            run_transaction(self._lease.supplier, self._activate, operation="fold a day")
            self._tools.step("activated")
            phase = "swap"
        if phase == "swap":
            if not self._exchange.wait_for_readers():
                return False
            self._exchange.swap(forget=False)
        self._exchange.finish("folded")
        return True

    def give_up(self) -> None:
        day = self._lease.day
        self._exchange.give_up(
            "folded" if self._tools.known.of_day(day, "block") else "offloaded",
            lambda conn: PayloadObjects.unstage(conn, day, DAYS.name(day)),
        )

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(_QUERIES["begin"].on(), {"day": self._lease.day})

    def _activate(self, conn: psycopg.Connection[Any]) -> None:
        """Turns the new objects into the day's blocks.

        This is safe before the exchange, because readers prefer the day's rows to its blocks.
        """
        self._lease.advance(conn, "swap")
        PayloadObjects.activate(conn, self._lease.day)

    def _copy(self) -> bool:
        slice_, has_gone_on = Slice(self._tools.is_over), False
        for part in self._plan(self._lease.row().after):
            if has_gone_on and self._tools.is_over():
                return False
            if isinstance(part, DayObject):
                self._keep(part)
                has_gone_on = True
            else:
                with closing(self._rewritten(part)) as payloads:
                    units = Units(self._lease.day, self._tools.options).of(payloads)
                    uploads = Uploads(self._tools.known, self._lease, self._tools.options, self._tools.step)
                    for unit in uploads.done(slice_.of(units)):
                        self._commit(unit)
                        self._tools.progress(self._lease.row().payloads, None)
                        has_gone_on = True
                if slice_.was_ended:
                    return False
        return True

    def _plan(self, after: PayloadKey | None) -> Iterator[DayObject | Range]:
        """Yields the objects to keep, and the ranges to rewrite between them, in the order of keys."""
        dirty: list[DayObject] = []
        for each in self._left(after):
            if not self._is_clean(each) or (dirty and dirty[-1].last.place >= each.first.place):
                dirty.append(each)
                continue
            yield Range(dirty, after, each.first)
            yield each
            dirty, after = [], each.last
        yield Range(dirty, after, None)

    def _left(self, after: PayloadKey | None) -> list[DayObject]:
        objects = self._tools.known.of_day(self._lease.day, "live", "block")
        return [each for each in objects if after is None or each.last.place > after.place]

    def _is_clean(self, day_object: DayObject) -> bool:
        """Returns whether all payloads in an object's range of keys are still those of the object."""
        bounds = place_values("first", day_object.first) | place_values("last", day_object.last)
        values = {**bounds, "object_key": day_object.object_key}
        query = _QUERIES["in_range"].on(day=self._exchange.names.day)
        pointers, others = run_lookup(self._lease.supplier, rows_of(query, values), operation="read a day")[0]
        count = day_object.payloads
        return not others and pointers in ({count} if day_object.state == "live" else {0, count})

    def _rewritten(self, range_: Range) -> Generator[Payload, None, None]:
        """Yields the present payloads of a range, with their content."""
        pages = Pages(
            self._tools.supplier, self._lease.day, self._tools.options.page_rows_max, self._tools.step
        )
        blocks = [each for each in range_.objects if each.state == "block"]
        with closing(pages.payloads(range_.after, range_.before)) as rows:
            current = self._contents.current(rows, blocks, range_.after)
            for payload, content in self._contents.each(_until(current, range_.before)):
                yield Payload(payload.key, content, None, None)

    def _keep(self, day_object: DayObject) -> None:
        def work(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "copy", day_object.last)
            PayloadObjects.keep(conn, day_object.object_key)

        run_transaction(self._lease.supplier, work, operation="fold a day")
        self._tools.step("kept")

    def _commit(self, unit: Unit) -> None:
        packed, object_key = unit.packed, unit.object_key
        if packed is None or object_key is None:
            return

        def work(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "copy", unit.till, **unit.done)
            PayloadObjects.settle(conn, object_key, packed, "staged")
            self._tools.step("pointers")

        run_transaction(self._lease.supplier, work, operation="fold a day")
        self._tools.step("committed")

    def _verify(self) -> bool:
        """Compares the keys and checksums of the day's payloads with those in its future blocks.

        Skips keys that were written since the copy began. Returns False if the time limit ends the work
        early. Raises `PayloadsDiffer`.
        """
        after = self._lease.row().after
        objects = self._tools.known.of_day(self._lease.day, *_OF_A_DAY)
        left = [each for each in objects if after is None or each.last.place > after.place]
        pages = Pages(self._tools.supplier, self._lease.day, self._tools.options.page_rows_max)
        with closing(pages.payloads(after)) as rows:
            blocks = [each for each in left if each.state == "block"]
            present = (
                (*_checksum_of(payload), "had") for payload in self._contents.current(rows, blocks, after)
            )
            kept = (entry for each in left if each.kept for entry in self._contents.entries(each))
            new = (
                (entry.key.place, entry.checksum, "new")
                for entry in kept
                if not after or entry.key.place > after.place
            )
            by_key = groupby(merge(present, new, key=lambda item: item[0]), key=lambda item: item[0])
            while batch := [(place, list(pair)) for place, pair in islice(by_key, _VERIFIED_AT_ONCE)]:
                self._check([_key(place) for place, pair in batch if not _is_pair(pair)])
                if self._tools.is_over():
                    self._exchange.go_on_from("verify", _key(batch[-1][0]))
                    return False
        return True

    def _check(self, suspects: list[PayloadKey]) -> None:
        # a suspect that was written meanwhile is no difference: the mirror's list of writes has it by now
        written = set(self._written(suspects)) if suspects else set()
        if wrong := [key for key in suspects if key.place not in written][:DIFFERENCES_MAX]:
            raise differs(self._lease.day, wrong)

    def _written(self, suspects: list[PayloadKey]) -> list[Key]:
        query = _QUERIES["written_of"].on(written=self._exchange.names.written)
        return run_transaction(
            self._lease.supplier,
            reading(self._lease.day, rows_of(query, columns(suspects))),
            read_only=True,
            scans=True,
            operation="read a day",
        )


def _key(place: Key) -> PayloadKey:
    kind, tenant, id_, at = place
    return PayloadKey(tenant, id_, at, kind)


def _checksum_of(payload: Payload) -> tuple[Key, bytes]:
    if payload.content is not None:
        return payload.key.place, checksum(payload.content)
    assert payload.entry is not None  # noqa: S101 deleted payloads were skipped before
    return payload.key.place, payload.entry.checksum


def _is_pair(items: list[tuple[Key, bytes, str]]) -> bool:
    """Returns whether the items of one key are a present and a future payload with equal checksums."""
    return len(items) == 2 and items[0][1] == items[1][1] and items[0][2] != items[1][2]


def _until(payloads: Iterator[Payload], before: PayloadKey | None) -> Iterator[Payload]:
    for payload in payloads:
        if before is not None and payload.key.place >= before.place:
            return
        yield payload
