"""The copy of a day's payloads into objects: payloads are read in pages by key, compressed and uploaded.

Only one portion of payloads is in memory uncompressed, so that the memory is bounded.
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

# Dictionaries of zstd, trained on payloads of a kind, if they save enough space.

DICTIONARY_BYTES = 64 * 2**10
SAMPLES_MIN = 200
SAMPLES_BYTES_MIN = 2**20
"""The fewest bytes of samples for a dictionary: with fewer, it would be the larger part of the object."""

SAMPLES_BYTES_MAX = 4 * 2**20
GAIN_MIN = 0.10
"""The least share of space that a dictionary must save, after its own size in an object is counted."""


def trained(texts: Iterable[bytes], object_bytes: int) -> bytes:
    """Returns a zstd dictionary for texts like the given ones, or empty bytes if it would not save enough.

    Trains the dictionary with one half of the texts, and measures the saved space with the other half.
    `object_bytes` is the size of the objects that will contain the dictionary.
    """
    samples = _bounded(texts)
    if len(samples) < SAMPLES_MIN or sum(map(len, samples)) < SAMPLES_BYTES_MIN:
        return b""
    training, others = samples[::2], samples[1::2]
    try:
        # fixed parameters: by default zstd tries many, which takes long
        made = zstandard.train_dictionary(
            DICTIONARY_BYTES, list(training), k=512, d=8, f=20, accel=4
        ).as_bytes()
    except zstandard.ZstdError:  # the texts have too little in common
        return b""
    without = sum(map(len, compressed(others, b"", 1)))
    share = len(made) / max(object_bytes, len(made))
    with_it = sum(map(len, compressed(others, made, 1))) * (1 + share)
    return made if with_it < (1 - GAIN_MIN) * without else b""


def _bounded(texts: Iterable[bytes]) -> Sequence[bytes]:
    samples, size = list[bytes](), 0
    for text in texts:
        size += len(text)
        if size > SAMPLES_BYTES_MAX:
            break
        samples.append(text)
    return samples


_QUERIES = load(__package__ or "", "copying")
_TYPES = ["text", "text", "timestamptz", "text", "bytea", "text", "int8", "int4", "bytea"]
HOT_SECONDS = 25_200.0
"""The seconds that payloads stay in rows after the end of their day, because new payloads are read soon."""

Step = Callable[[str], object]


@dataclass(frozen=True)
class PayloadOptions:
    """The options of offloads and folds.

    - `object_bytes_min`, `object_bytes_max`: the sizes of objects. The last object of a run may be smaller,
      and an object with a single payload may be larger.
    - `portion_bytes_max`: the most uncompressed bytes in memory at once.
    - `page_rows_max`: the most rows of a day that are read or compared as one page.
    - `threads`: the number of threads that compress. `uploads`: the number of objects that are uploaded at
      once.
    - `hot_seconds`: the time from the end of a day until the day is offloaded.
    - `pointer_days`: the age, in days, at which a day is folded. Until then it keeps a pointer per payload.
    - `kept_seconds`: the time that objects are kept after payloads last needed them.
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
        """The size from which an object is full."""
        return min(2 * self.object_bytes_min, self.object_bytes_max)


class Payload(NamedTuple):
    """A payload of a day, with its content or its place in an object. A deleted payload has neither."""

    key: PayloadKey
    content: bytes | None
    object_key: str | None
    entry: Entry | None
    in_block: bool = False


@dataclass
class Unit:
    """The payloads that one transaction of a copy covers, up to and including the key `till`.

    `packed` is a new object with the payloads that were in rows, or None if there are none. `passed` has the
    payloads that were already in objects, as (object key, entry) pairs.
    """

    till: PayloadKey
    packed: Packed | None
    passed: list[tuple[str, Entry]] = field(default_factory=list)
    object_key: str | None = None

    @property
    def done(self) -> dict[str, int]:
        """The numbers of payloads, bytes and objects that the unit adds to the progress of the work."""
        if self.packed is None:
            return {}
        return {
            "payloads": len(self.packed.entries),
            "bytes_in": self.packed.bytes_in,
            "bytes_out": len(self.packed.data),
            "objects": 1,
        }


class Pages:
    """A reader of a day's payloads in pages, in the order of keys.

    Each page is read in its own transaction.
    """

    def __init__(self, supplier: Supplier, day: date, rows_max: int, step: Step = lambda name: None) -> None:
        self._supplier = supplier
        self._day = day
        self._query = _QUERIES["page"].on(day=DAYS.name(day))
        self._rows_max = rows_max
        self._step = step

    def payloads(
        self, after: PayloadKey | None, till: PayloadKey | None = None
    ) -> Generator[Payload, None, None]:
        """Yields the payloads after one key, and up to and including another.

        Closing the generator ends the transaction that reads the present page.
        """
        while True:
            count = 0
            with self._supplier.connection() as conn, bounded(conn, PAGED), conn.cursor() as cursor:
                conn.execute(f"set local {PEER_OF_PAGES} = {PAGED[IDLE]}")
                mark_reader(conn, self._day)
                for payload in self._page(cursor, after, till):
                    count, after = count + 1, payload.key
                    yield payload
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
    """A builder of units from payloads.

    It compresses one portion at a time, and begins a new object at a size limit.
    """

    def __init__(self, day: date, options: PayloadOptions) -> None:
        self._day = day
        self._options = options
        self._dictionaries: dict[str, bytes] = {}

    def of(self, payloads: Iterable[Payload]) -> Iterator[Unit]:
        options = self._options
        packer, passed, portion, size = self._packer(), list[tuple[str, Entry]](), list[Row](), 0
        last: PayloadKey | None = None
        for payload in payloads:
            if portion and (size >= options.portion_bytes_max or portion[0].key.kind != payload.key.kind):
                self._add(packer, portion)
                portion, size = [], 0
            coming = size + len(payload.content or b"")
            if last and (
                packer.size >= options.object_bytes
                or (packer.size + coming > options.object_bytes_max and (packer.size or portion))
                or len(passed) >= options.page_rows_max
            ):
                self._add(packer, portion)
                yield self._unit(packer, passed, last)
                packer, passed, portion, size = self._packer(), [], [], 0
            last = payload.key
            if payload.content is not None:
                portion.append(Row(payload.key, payload.content))
                size += len(payload.content)
            elif payload.entry is not None and payload.object_key is not None:
                passed.append((payload.object_key, payload.entry))
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
    """A time limit for a stream of units.

    The stream ends when the time is over, but always has a first unit.
    """

    is_over: Callable[[], bool]
    was_ended: bool = False

    def of(self, units: Iterator[Unit]) -> Iterator[Unit]:
        for unit in units:
            yield unit
            if self.is_over():
                self.was_ended = True
                return


class Uploads:
    """A writer of the objects of units.

    It uploads several objects in parallel, and yields the units in order.
    """

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
        """Yields the units in order, each after its object was written."""
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
                for future in pending:
                    future.cancel()

    def _write(self, unit: Unit) -> Unit:
        if unit.packed is not None:
            self._step("upload")
            unit.object_key = self._objects.write(self._lease.day, self._lease.token, unit.packed)
            self._step("uploaded")
        return unit


def commit_pointers(lease: DayLease, copy: str, unit: Unit, step: Step = lambda name: None) -> None:
    """Adds the pointers of a unit to the copy of a partition and records the progress. Raises `LeaseLost`."""

    def work(conn: psycopg.Connection[Any]) -> None:
        lease.advance(conn, "copy", unit.till, **unit.done)
        if unit.packed is not None and unit.object_key is not None:
            PayloadObjects.settle(conn, unit.object_key, unit.packed, "live")
        add_pointers(conn, copy, unit)
        step("pointers")

    run_transaction(lease.supplier, work, operation="add pointers")


def add_pointers(conn: psycopg.Connection[Any], partition: str, unit: Unit) -> int:
    """Adds the pointers of a unit to a partition, except for keys that have a row already.

    Returns the number of added pointers.
    """
    pointers = list(unit.passed)
    if unit.packed is not None and unit.object_key is not None:
        pointers += [(unit.object_key, entry) for entry in unit.packed.entries]
    values = {
        **columns(entry.key for _, entry in pointers),
        "object_keys": [object_key for object_key, _ in pointers],
        "starts": [entry.start for _, entry in pointers],
        "lengths": [entry.length for _, entry in pointers],
        "checksums": [entry.checksum for _, entry in pointers],
    }
    return conn.execute(_QUERIES["add_pointers"].on(copy=partition), values).rowcount


READ_BYTES_MAX = 4 * 2**20
READ_PAYLOADS_MAX = 1_000


class Contents:
    """A reader of all payloads of a day, from its rows and objects."""

    def __init__(self, objects: ObjectStore, known: PayloadObjects) -> None:
        self._known = known
        self._reader = Reader(objects)
        self._dictionaries: Mapping[str, Places] = {}

    def current(
        self, rows: Iterator[Payload], blocks: Sequence[DayObject], after: PayloadKey | None
    ) -> Iterator[Payload]:
        """Yields the day's payloads after a key, in the order of keys, without deleted payloads.

        If a row and a block have the same key, yields the payload of the row.
        """
        in_blocks = (
            Payload(entry.key, None, block.object_key, entry, in_block=True)
            for block in blocks
            for entry in self.entries(block)
            if after is None or entry.key.place > after.place
        )
        # for equal keys, `merge` yields the row first
        merged = merge(rows, in_blocks, key=lambda payload: payload.key.place)
        for _, same_key in groupby(merged, key=lambda payload: payload.key):
            first = next(same_key)
            if first.content is not None or first.entry is not None:
                yield first

    def each(self, payloads: Iterable[Payload]) -> Iterator[tuple[Payload, bytes]]:
        """Yields each payload with its content.

        Reads many payloads at once, but decompresses one at a time. Raises `PayloadCorrupt` and
        `PayloadUnavailable`.
        """
        portion: list[Payload] = []
        size = 0
        for payload in payloads:
            portion.append(payload)
            size += len(payload.content or b"") + (payload.entry.length if payload.entry else 0)
            if size >= READ_BYTES_MAX or len(portion) >= READ_PAYLOADS_MAX:
                yield from self._with_content(portion)
                portion, size = [], 0
        yield from self._with_content(portion)

    def entries(self, day_object: DayObject) -> Iterator[Entry]:
        """Yields the entries of an object, one for each payload.

        Raises `PayloadCorrupt` and `ObjectStoreError`.
        """
        name = day_object.object_key
        try:
            index = self._reader.index(name, day_object.index_start, day_object.byte_count)
            recorded = (day_object.payloads, day_object.first, day_object.last)
            if (len(index), index[0].key, index[-1].key) != recorded:
                raise Damaged("it contains the payloads of another object")
            yield from index
        except ObjectNotFound:
            raise PayloadCorrupt(f"object {name!r} does not exist") from None
        except Damaged as error:
            raise PayloadCorrupt(f"object {name!r} is damaged: {error}") from None

    def _with_content(self, portion: Sequence[Payload]) -> Iterator[tuple[Payload, bytes]]:
        pointers = [
            Pointer(payload.object_key, payload.entry, self._places(payload))
            for payload in portion
            if payload.content is None and payload.entry is not None and payload.object_key is not None
        ]
        frames = {pointer.entry.key: (pointer, frame) for pointer, frame in self._reader.frames(pointers)}
        for payload in portion:
            content = payload.content
            if content is None:
                content_or_error = self._reader.content(*frames[payload.key])
                if isinstance(content_or_error, DormouseError):
                    raise content_or_error
                content = content_or_error
            yield payload, content

    def _places(self, payload: Payload) -> Places:
        if payload.object_key not in self._dictionaries:
            known = self._known.of_day(payload.key.day, "live", "staged", "block")
            self._dictionaries = {each.object_key: each.dictionaries for each in known}
        return self._dictionaries.get(payload.object_key or "", {})
