"""Folds a day: the objects of its payloads become its blocks, and its partition is empty.

An object whose pointers are all there is a block as it is. Where payloads were written since, or deleted, the
range is written anew. What is written while this goes on is mirrored, and wins over the blocks.
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
    """What is written anew: what comes after a key, and before another."""

    objects: list[DayObject]
    after: PayloadKey | None
    before: PayloadKey | None


def fold_day(tools: Tools, lease: DayLease) -> bool:
    """Goes on with a day wherever it is; False when the slice is over before it is done."""
    fold = _Fold(tools, lease)
    try:
        return fold.go_on()
    except (PayloadsDiffer, PayloadCorrupt):  # of a lost object, a rebuild may be the mend
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
        blocks = any(one.state == "block" for one in self._tools.known.of_day(day, "block"))
        self._exchange.give_up(
            "folded" if blocks else "offloaded",
            lambda conn: PayloadObjects.unstage(conn, day, DAYS.name(day)),
        )

    def _begin(self, conn: psycopg.Connection[Any]) -> None:
        conn.execute(_QUERIES["begin"].on(), {"day": self._lease.day})

    def _activate(self, conn: psycopg.Connection[Any]) -> None:
        """Rows of the day still win; what no row has is in the blocks of now as in those of before."""
        self._lease.advance(conn, "swap")
        PayloadObjects.activate(conn, self._lease.day)

    def _copy(self) -> bool:
        slice_, has_gone_on = Slice(self._tools.is_over), False
        for one in self._plan(self._lease.row().after):
            if has_gone_on and self._tools.is_over():
                return False
            if isinstance(one, DayObject):
                self._keep(one)
                has_gone_on = True
            else:
                with closing(self._rewritten(one)) as payloads:
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
        """Objects that are kept, and the ranges between, in the order of keys."""
        dirty: list[DayObject] = []
        for one in self._left(after):
            if not self._is_clean(one) or (dirty and dirty[-1].last.place >= one.first.place):
                dirty.append(one)
                continue
            yield Range(dirty, after, one.first)
            yield one
            dirty, after = [], one.last
        yield Range(dirty, after, None)

    def _left(self, after: PayloadKey | None) -> list[DayObject]:
        found = self._tools.known.of_day(self._lease.day, "live", "block")
        return [one for one in found if after is None or one.last.place > after.place]

    def _is_clean(self, one: DayObject) -> bool:
        bounds = place_values("first", one.first) | place_values("last", one.last)
        values = {**bounds, "object_key": one.object_key}
        query = _QUERIES["in_range"].on(day=self._exchange.names.day)
        pointers, others = run_lookup(
            self._lease.supplier, rows_of(query, values), operation="look at a day"
        )[0]
        return not others and pointers in ({one.payloads} if one.state == "live" else {0, one.payloads})

    def _rewritten(self, range_: Range) -> Generator[Payload, None, None]:
        """What a range has now, with its content."""
        pages = Pages(
            self._tools.supplier, self._lease.day, self._tools.options.page_rows_max, self._tools.step
        )
        blocks = [one for one in range_.objects if one.state == "block"]
        with closing(pages.payloads(range_.after, range_.before)) as rows:
            current = self._contents.current(rows, blocks, range_.after)
            for one, content in self._contents.each(_until(current, range_.before)):
                yield Payload(one.key, content, None, None)

    def _keep(self, one: DayObject) -> None:
        def work(conn: psycopg.Connection[Any]) -> None:
            self._lease.advance(conn, "copy", one.last)
            PayloadObjects.keep(conn, one.object_key)

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
        """What the day has, and its blocks are to have, key by key; but for what was written since.

        False when the slice is over before all is.
        """
        after = self._lease.row().after
        found = self._tools.known.of_day(self._lease.day, *_OF_A_DAY)
        left = [one for one in found if after is None or one.last.place > after.place]
        pages = Pages(self._tools.supplier, self._lease.day, self._tools.options.page_rows_max)
        with closing(pages.payloads(after)) as rows:
            blocks = [one for one in left if one.state == "block"]
            had = ((*_said(one), "had") for one in self._contents.current(rows, blocks, after))
            kept = (entry for one in left if one.kept for entry in self._contents.entries(one))
            new = (
                (one.key.place, one.checksum, "new")
                for one in kept
                if not after or one.key.place > after.place
            )
            every = groupby(merge(had, new, key=lambda one: one[0]), key=lambda one: one[0])
            while some := [(place, list(pair)) for place, pair in islice(every, _VERIFIED_AT_ONCE)]:
                self._check([_key(place) for place, pair in some if not _is_pair(pair)])
                if self._tools.is_over():
                    self._exchange.go_on_from("verify", _key(some[-1][0]))
                    return False
        return True

    def _check(self, suspects: list[PayloadKey]) -> None:
        # what was read of a key that was written since is of before or after; all that was is known by now
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
            operation="look at a day",
        )


def _key(place: Key) -> PayloadKey:
    kind, tenant, id_, at = place
    return PayloadKey(tenant, id_, at, kind)


def _said(one: Payload) -> tuple[Key, bytes]:
    if one.content is not None:
        return one.key.place, checksum(one.content)
    assert one.entry is not None  # noqa: S101 what is in neither is left out before
    return one.key.place, one.entry.checksum


def _is_pair(found: list[tuple[Key, bytes, str]]) -> bool:
    return len(found) == 2 and found[0][1] == found[1][1] and found[0][2] != found[1][2]


def _until(payloads: Iterator[Payload], before: PayloadKey | None) -> Iterator[Payload]:
    for one in payloads:
        if before is not None and one.key.place >= before.place:
            return
        yield one
