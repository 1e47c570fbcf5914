"""A day's payloads, in the order of keys, as objects: read by pages, compressed at once, uploaded beside.

What is in memory is compressed, but for one portion: so it is bounded, whatever payloads decompress to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from heapq import merge
from itertools import groupby
from typing import Any, NamedTuple

import psycopg
import zstandard

from dormouse.errors import DormouseError, ObjectNotFound, PayloadCorrupt
from dormouse.model.table import KEPT_SECONDS
from dormouse.objects.store import ObjectStore
from dormouse.payloads.days import DayLease, mark_reader
from dormouse.payloads.keys import PayloadKey, Places, columns, place_values
from dormouse.payloads.pack import Damaged, DayObject, Entry, Packed, Packer, PayloadObjects, Row, compressed
from dormouse.payloads.reading import Pointer, Reader
from dormouse.payloads.rows import DAYS
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.session import IDLE, PAGED, PEER_OF_PAGES
from dormouse.postgres.transaction import bounded, run_transaction

# Dictionaries of zstd, trained on payloads of a kind, where they gain enough.

DICTIONARY_BYTES = 64 * 2**10
SAMPLES_MIN = 200
SAMPLES_BYTES_MIN = 2**20
"""Of fewer, the dictionary would be the most of what is written."""

SAMPLES_BYTES_MAX = 4 * 2**20
GAIN_MIN = 0.10
"""Of what the payloads take without it, the dictionary's own share in an object included."""


def trained(texts: Iterable[bytes], object_bytes: int) -> bytes:
    """A dictionary that gains enough on such texts; else nothing.

    One half of them trains it, the other judges it. `object_bytes` is how large objects are that have it.
    """
    samples = _bounded(texts)
    if len(samples) < SAMPLES_MIN or sum(map(len, samples)) < SAMPLES_BYTES_MIN:
        return b""
    training, others = samples[::2], samples[1::2]
    try:
        # with these, it is made at once; zstd would try many
        made = zstandard.train_dictionary(
            DICTIONARY_BYTES, list(training), k=512, d=8, f=20, accel=4
        ).as_bytes()
    except zstandard.ZstdError:  # too little is common to them
        return b""
    without = sum(map(len, compressed(others, b"", 1)))
    share = len(made) / max(object_bytes, len(made))
    with_it = sum(map(len, compressed(others, made, 1))) * (1 + share)
    return made if with_it < (1 - GAIN_MIN) * without else b""


def _bounded(texts: Iterable[bytes]) -> Sequence[bytes]:
    found, size = list[bytes](), 0
    for text in texts:
        size += len(text)
        if size > SAMPLES_BYTES_MAX:
            break
        found.append(text)
    return found


_QUERIES = load(__package__ or "", "copying")
_TYPES = ["text", "text", "timestamptz", "text", "bytea", "text", "int8", "int4", "bytea"]
HOT_SECONDS = 25_200.0
"""For so long after their day ended payloads stay inline: those of its last minutes are read again soon."""

Step = Callable[[str], object]


@dataclass(frozen=True)
class PayloadOptions:
    """How payloads are cooled down.

    Objects have `object_bytes_min` or more, but for the last of a day or slice, and no more than
    `object_bytes_max`, unless one payload has. `portion_bytes_max` are decompressed bytes that are in memory
    at once; `threads` compress, and `uploads` objects are sent at once. A day is offloaded when it has been
    over for `hot_seconds`. Objects that payloads do not need any more stay for `kept_seconds`.
    """

    object_bytes_min: int = 8 * 2**20
    object_bytes_max: int = 64 * 2**20
    portion_bytes_max: int = 4 * 2**20
    page_rows_max: int = 10_000
    threads: int = 2
    uploads: int = 3
    lease_seconds: float = 60.0
    lock_timeout_ms: int = 500
    pointer_days: int = 7
    hot_seconds: float = HOT_SECONDS
    dictionaries: bool = True
    kept_seconds: float = KEPT_SECONDS

    @property
    def object_bytes(self) -> int:
        """With which an object is full."""
        return min(2 * self.object_bytes_min, self.object_bytes_max)


class Payload(NamedTuple):
    """A payload of a day: its content, or else where it is; neither: it is deleted."""

    key: PayloadKey
    content: bytes | None
    object_key: str | None
    entry: Entry | None
    in_block: bool = False


@dataclass
class Unit:
    """What one transaction notes: an object, if there is one, and what was in others before; until a key."""

    till: PayloadKey
    packed: Packed | None
    passed: list[tuple[str, Entry]] = field(default_factory=list)
    object_key: str | None = None

    @property
    def done(self) -> dict[str, int]:
        """What it adds to the counts of the work."""
        if self.packed is None:
            return {}
        return {
            "payloads": len(self.packed.entries),
            "bytes_in": self.packed.bytes_in,
            "bytes_out": len(self.packed.data),
            "objects": 1,
        }


class Pages:
    """The payloads of a day after a key, in the order of keys; only an empty page ends them."""

    def __init__(self, supplier: Supplier, day: date, rows_max: int, step: Step = lambda name: None) -> None:
        self._supplier = supplier
        self._day = day
        self._query = _QUERIES["page"].on(day=DAYS.name(day))
        self._rows_max = rows_max
        self._step = step

    def payloads(
        self, after: PayloadKey | None, till: PayloadKey | None = None
    ) -> Generator[Payload, None, None]:
        """Those after a key, and up to another; who takes no more ends the page that is being read."""
        while True:
            count = 0
            with self._supplier.connection() as conn, bounded(conn, PAGED), conn.cursor() as cursor:
                conn.execute(f"set local {PEER_OF_PAGES} = {PAGED[IDLE]}")
                mark_reader(conn, self._day)
                for found in self._page(cursor, after, till):
                    count, after = count + 1, found.key
                    yield found
            self._step("page")
            if not count:
                return

    def _page(
        self, cursor: psycopg.Cursor[Any], after: PayloadKey | None, till: PayloadKey | None
    ) -> Iterator[Payload]:
        bounds = place_values("after", after) | place_values("till", till)
        values = {**bounds, "limit": self._rows_max}
        with cursor.copy(self._query, values) as rows:
            rows.set_types(_TYPES)
            for tenant, id_, at, kind, content, object_key, start, length, checksum in rows.rows():
                key = PayloadKey(tenant, id_, at, kind)
                entry = None if object_key is None else Entry(key, start, length, checksum)
                yield Payload(key, content, object_key, entry)


class Units:
    """Payloads as units: portions are compressed as they come, and an object is full at a size."""

    def __init__(self, day: date, options: PayloadOptions) -> None:
        self._day = day
        self._options = options
        self._dictionaries: dict[str, bytes] = {}

    def of(self, payloads: Iterable[Payload]) -> Iterator[Unit]:
        options = self._options
        packer, passed, portion, size = self._packer(), list[tuple[str, Entry]](), list[Row](), 0
        last: PayloadKey | None = None
        for one in payloads:
            if portion and (size >= options.portion_bytes_max or portion[0].key.kind != one.key.kind):
                self._add(packer, portion)
                portion, size = [], 0
            coming = size + len(one.content or b"")
            if last and (
                packer.size >= options.object_bytes
                or (packer.size + coming > options.object_bytes_max and (packer.size or portion))
                or len(passed) >= options.page_rows_max
            ):
                self._add(packer, portion)
                yield self._unit(packer, passed, last)
                packer, passed, portion, size = self._packer(), [], [], 0
            last = one.key
            if one.content is not None:
                portion.append(Row(one.key, one.content))
                size += len(one.content)
            elif one.entry is not None and one.object_key is not None:
                passed.append((one.object_key, one.entry))
        self._add(packer, portion)
        if last is not None:
            yield self._unit(packer, passed, last)

    def _packer(self) -> Packer:
        return Packer(self._day, self._dictionaries, self._options.threads)

    @staticmethod
    def _unit(packer: Packer, passed: list[tuple[str, Entry]], last: PayloadKey) -> Unit:
        return Unit(last, packer.finish() if packer.keys else None, passed)

    def _add(self, packer: Packer, portion: list[Row]) -> None:
        if not portion:
            return
        kind = portion[0].key.kind
        if self._options.dictionaries and kind not in self._dictionaries:
            texts = (row.content for row in portion)
            self._dictionaries[kind] = trained(texts, self._options.object_bytes)
        packer.add(portion)


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


class Uploads:
    """Writes units beside each other, and gives them back in their order."""

    def __init__(
        self,
        objects: PayloadObjects,
        lease: DayLease,
        options: PayloadOptions,
        step: Step = lambda name: None,
    ) -> None:
        self._objects = objects
        self._lease = lease
        self._options = options
        self._step = step

    def done(self, units: Iterable[Unit]) -> Generator[Unit, None, None]:
        """Each unit when its object is written, and those before it are."""
        pending: deque[Future[Unit]] = deque()
        with ThreadPoolExecutor(self._options.uploads, "payload uploads") as pool:
            try:
                for unit in units:
                    pending.append(pool.submit(self._write, unit))
                    while len(pending) >= self._options.uploads or (pending and pending[0].done()):
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                for one in pending:
                    one.cancel()

    def _write(self, unit: Unit) -> Unit:
        if unit.packed is not None:
            self._step("upload")
            unit.object_key = self._objects.write(self._lease.day, self._lease.token, unit.packed)
            self._step("uploaded")
        return unit


def commit_pointers(lease: DayLease, copy: str, unit: Unit, step: Step = lambda name: None) -> None:
    """Adds the pointers of a unit to a copy, and notes how far it is. Raises `LeaseLost`."""

    def work(conn: psycopg.Connection[Any]) -> None:
        lease.advance(conn, "copy", unit.till, **unit.done)
        if unit.packed is not None and unit.object_key is not None:
            PayloadObjects.settle(conn, unit.object_key, unit.packed, "live")
        add_pointers(conn, copy, unit)
        step("pointers")

    run_transaction(lease.supplier, work, operation="add pointers")


def add_pointers(conn: psycopg.Connection[Any], partition: str, unit: Unit) -> int:
    """Adds the pointers of a unit, but for keys that have a row already; gives how many."""
    found = list(unit.passed)
    if unit.packed is not None and unit.object_key is not None:
        found += [(unit.object_key, entry) for entry in unit.packed.entries]
    values = {
        **columns(entry.key for _, entry in found),
        "object_keys": [object_key for object_key, _ in found],
        "starts": [entry.start for _, entry in found],
        "lengths": [entry.length for _, entry in found],
        "checksums": [entry.checksum for _, entry in found],
    }
    return conn.execute(_QUERIES["add_pointers"].on(copy=partition), values).rowcount


READ_BYTES_MAX = 4 * 2**20
READ_PAYLOADS_MAX = 1_000


class Contents:
    """Reads what a day has, for who moves much of it."""

    def __init__(self, objects: ObjectStore, known: PayloadObjects) -> None:
        self._known = known
        self._reader = Reader(objects)
        self._dictionaries: Mapping[str, Places] = {}

    def current(
        self, rows: Iterator[Payload], blocks: Sequence[DayObject], after: PayloadKey | None
    ) -> Iterator[Payload]:
        """Rows, and what blocks have that no row has; in the order of keys, without what is deleted."""
        in_blocks = (
            Payload(entry.key, None, one.object_key, entry, in_block=True)
            for one in blocks
            for entry in self.entries(one)
            if after is None or entry.key.place > after.place
        )
        # of equal keys, that of the first comes first
        every = merge(rows, in_blocks, key=lambda one: one.key.place)
        for _, found in groupby(every, key=lambda one: one.key):
            first = next(found)
            if first.content is not None or first.entry is not None:
                yield first

    def each(self, payloads: Iterable[Payload]) -> Iterator[tuple[Payload, bytes]]:
        """Each with its content. Some are read at once, and decompressed one by one, as they are taken.

        Raises `PayloadCorrupt` and `PayloadUnavailable`.
        """
        portion: list[Payload] = []
        size = 0
        for one in payloads:
            portion.append(one)
            size += len(one.content or b"") + (one.entry.length if one.entry else 0)
            if size >= READ_BYTES_MAX or len(portion) >= READ_PAYLOADS_MAX:
                yield from self._with_content(portion)
                portion, size = [], 0
        yield from self._with_content(portion)

    def entries(self, one: DayObject) -> Iterator[Entry]:
        """What an object has. Raises `PayloadCorrupt` and `ObjectStoreError`."""
        try:
            index = self._reader.index(one.object_key, one.index_start, one.byte_count)
            if (len(index), index[0].key, index[-1].key) != (one.payloads, one.first, one.last):
                raise Damaged("it has another object's payloads")
            yield from index
        except ObjectNotFound:
            raise PayloadCorrupt(f"object {one.object_key!r} is not there") from None
        except Damaged as error:
            raise PayloadCorrupt(f"object {one.object_key!r} is damaged: {error}") from None

    def _with_content(self, portion: Sequence[Payload]) -> Iterator[tuple[Payload, bytes]]:
        wanted = [
            Pointer(one.object_key, one.entry, self._places(one))
            for one in portion
            if one.content is None and one.entry is not None and one.object_key is not None
        ]
        found = {pointer.entry.key: (pointer, frame) for pointer, frame in self._reader.frames(wanted)}
        for one in portion:
            content = one.content if one.content is not None else self._reader.content(*found[one.key])
            if isinstance(content, DormouseError):
                raise content
            yield one, content

    def _places(self, one: Payload) -> Places:
        if one.object_key not in self._dictionaries:
            known = self._known.of_day(one.key.day, "live", "staged", "block")
            self._dictionaries = {found.object_key: found.dictionaries for found in known}
        return self._dictionaries.get(one.object_key or "", {})
