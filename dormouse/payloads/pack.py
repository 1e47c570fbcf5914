"""The format of payload objects, and the ledger of these objects in the database.

    DORMPAY1 | dictionary … | frame … | index | length and hash of the index | DORMPAY1

There is one zstd frame for each payload. A frame has the payload's key in a line of JSON, then the payload,
so that a reader can check that it got the right one. The index has columns of JSON, compressed, sorted by
key. An object can be read, checked and indexed without the database.
"""

from __future__ import annotations

import base64
import json
import struct
import uuid
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, timedelta
from functools import cached_property
from hashlib import sha256
from itertools import accumulate, starmap
from json.encoder import encode_basestring
from sys import intern
from typing import Any, NamedTuple

import psycopg
import zstandard
from psycopg.types.json import Jsonb

from dormouse.errors import CommitFailed
from dormouse.model.table import KEPT_SECONDS, READERS_SECONDS
from dormouse.objects.fault import WrittenObject
from dormouse.objects.ledger import LedgerObject, Swept, put_new, sweep
from dormouse.objects.names import PAYLOADS
from dormouse.objects.store import ObjectStore
from dormouse.payloads.keys import CONTENT_BYTES_MAX, PayloadKey, Places, place_values
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction

MAGIC = b"DORMPAY1"
LEVEL = 3
CHECKSUM_BYTES = 16
FRAME_BYTES_MAX = CONTENT_BYTES_MAX + 2**16
INDEX_BYTES_MAX = 2**28
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_TAIL = struct.Struct("<Q8s8s")
TAIL_BYTES = _TAIL.size


class Damaged(Exception):
    """An error: the bytes that were read are not what was written. The message says how they differ."""


class Entry(NamedTuple):
    """The place of a payload in an object: a range of bytes, and the checksum of the content."""

    key: PayloadKey
    start: int
    length: int
    checksum: bytes


class Row(NamedTuple):
    """A payload to put into an object: `content` is its JSON as PostgreSQL writes it."""

    key: PayloadKey
    content: bytes


def checksum(content: bytes) -> bytes:
    return sha256(content).digest()[:CHECKSUM_BYTES]


@dataclass(frozen=True)
class Packed:
    """An object to write, with its entries."""

    data: bytes
    entries: list[Entry]
    index_start: int
    dictionaries: Places
    bytes_in: int

    @cached_property
    def digest(self) -> bytes:
        return sha256(self.data).digest()


@dataclass
class Packer:
    """A builder of one object from rows in the order of keys. It keeps only compressed data in memory.

    `dictionaries` has zstd dictionaries by kind. The caller may add dictionaries of other kinds.
    """

    day: date
    dictionaries: Mapping[str, bytes]
    threads: int = 2
    size: int = 0
    bytes_in: int = 0
    keys: list[PayloadKey] = field(default_factory=list)
    _frames: list[bytes] = field(default_factory=list)
    _lengths: list[int] = field(default_factory=list)
    _checksums: list[bytes] = field(default_factory=list)
    _used: dict[str, bytes] = field(default_factory=dict)

    def add(self, rows: Sequence[Row]) -> None:
        """Adds rows whose payloads have the same kind."""
        kind = rows[0].key.kind
        given = self.dictionaries.get(kind, b"")
        if given:
            self._used[kind] = given
        frames = compressed([_framed(*row) for row in rows], given, self.threads)
        self.keys += [row.key for row in rows]
        self._checksums += [checksum(row.content) for row in rows]
        self._lengths += map(len, frames)
        self._frames.append(b"".join(frames))
        self.size += len(self._frames[-1])
        self.bytes_in += sum(len(row.content) for row in rows)

    def finish(self) -> Packed:
        """Returns the object with all added rows."""
        places: dict[str, tuple[int, int, str]] = {}
        start = len(MAGIC)
        for kind, data in self._used.items():
            places[kind] = (start, len(data), sha256(data).hexdigest()[:32])
            start += len(data)
        starts = list(accumulate(self._lengths, initial=start))
        index = self._index(start, places)
        tail = _TAIL.pack(len(index), sha256(index).digest()[:8], MAGIC)
        data = b"".join((MAGIC, *self._used.values(), *self._frames, index, tail))
        entries = list(map(Entry, self.keys, starts, self._lengths, self._checksums))
        return Packed(data, entries, starts[-1], places, self.bytes_in)

    def _index(self, start: int, places: Places) -> bytes:
        columns = {
            "version": 1,
            "day": self.day.isoformat(),
            "start": start,
            "dictionaries": places,
            "kinds": [key.kind for key in self.keys],
            "tenants": [key.tenant for key in self.keys],
            "ids": [key.id for key in self.keys],
            "times": [_micros(key.inserted_at) for key in self.keys],
            "lengths": self._lengths,
            "checksums": base64.b64encode(b"".join(self._checksums)).decode(),
        }
        text = json.dumps(columns, ensure_ascii=False, separators=(",", ":")).encode()
        return zstandard.ZstdCompressor(level=LEVEL).compress(text)


class Index(Sequence[Entry]):
    """The index of an object: the entries of its payloads, sorted by key."""

    def __init__(self, data: bytes) -> None:
        """Reads the index of an object. Raises `Damaged`.

        `data` are the bytes of the object from the start of the index to the end.
        """
        self.data = data
        try:
            length, digest, magic = _TAIL.unpack_from(data, len(data) - TAIL_BYTES)
            index = data[-TAIL_BYTES - length : -TAIL_BYTES]
            if magic != MAGIC or len(index) != length or sha256(index).digest()[:8] != digest:
                raise Damaged("its index is not what was written")
            columns = json.loads(_decompressed(index, zstandard.ZstdDecompressor(), INDEX_BYTES_MAX))
            self.day = date.fromisoformat(columns["day"])
            self.dictionaries: Places = {k: tuple(v) for k, v in columns["dictionaries"].items()}
            # compact columns, because many indexes are cached; keys are made at their use
            self._kinds, self._tenants = (list(map(intern, columns[name])) for name in ("kinds", "tenants"))
            self._ids: list[str] = columns["ids"]
            self._times, self._lengths = array("q", columns["times"]), array("q", columns["lengths"])
            self._starts = array("q", accumulate(self._lengths, initial=columns["start"]))
            self._checksums = base64.b64decode(columns["checksums"])
            for extreme in (min, max):  # raises for values that are no times; all others lie between
                _time(extreme(self._times))
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise Damaged("its index is not what was written") from error
        parts = (self._kinds, self._tenants, self._times, self._lengths)
        if {len(self._checksums) / CHECKSUM_BYTES, *map(len, parts)} != {len(self._ids)}:
            raise Damaged("its index is not what was written")

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, number: Any) -> Any:
        kind, tenant, id_, micros = self._place(number)
        at_checksum = CHECKSUM_BYTES * number
        return Entry(
            PayloadKey(tenant, id_, _time(micros), kind),
            self._starts[number],
            self._lengths[number],
            self._checksums[at_checksum : at_checksum + CHECKSUM_BYTES],
        )

    def __iter__(self) -> Iterator[Entry]:
        return (self[number] for number in range(len(self)))

    def find(self, key: PayloadKey) -> Entry | None:
        """Returns the entry of a payload, or None if the object does not have it."""
        place = (key.kind, key.tenant, key.id, _micros(key.inserted_at))
        number = bisect_left(range(len(self)), place, key=self._place)
        return self[number] if number < len(self) and self._place(number) == place else None

    def covers(self, key: PayloadKey) -> bool:
        """Returns whether a key lies in the day and key range of the object."""
        return self.day == key.day and self[0].key.place <= key.place <= self[-1].key.place

    def _place(self, number: int) -> tuple[str, str, str, int]:
        return self._kinds[number], self._tenants[number], self._ids[number], self._times[number]


def index_start(data: bytes) -> int:
    """Returns the position at which the index of an object begins within `data`. Raises `Damaged`.

    `data` are all bytes of the object or only its last bytes. The result is negative if the index begins
    before `data`.
    """
    if len(data) < TAIL_BYTES or data[-len(MAGIC) :] != MAGIC:
        raise Damaged("it does not end as an object of payloads does")
    length, _, _ = _TAIL.unpack_from(data, len(data) - TAIL_BYTES)
    return len(data) - TAIL_BYTES - int(length)


def decompressor(dictionary: bytes | None) -> zstandard.ZstdDecompressor:
    if dictionary is None:
        return zstandard.ZstdDecompressor()
    return zstandard.ZstdDecompressor(dict_data=zstandard.ZstdCompressionDict(dictionary))


def unpacked(frame: bytes, entry: Entry, by: zstandard.ZstdDecompressor) -> bytes:
    """Returns the content of a payload from its compressed frame.

    Raises `Damaged` if it is not what was written.
    """
    if len(frame) != entry.length:
        raise Damaged(f"it has {len(frame):,} bytes, and was written with {entry.length:,}")
    header, _, content = _decompressed(frame, by, FRAME_BYTES_MAX).partition(b"\n")
    if header != _header(entry.key):
        raise Damaged(f"its object has another payload there: {header[:200].decode(errors='replace')}")
    if checksum(content) != entry.checksum:
        raise Damaged("its checksum differs")
    return content


def compressed(texts: Sequence[bytes], dictionary: bytes, threads: int) -> list[bytes]:
    """Returns a compressed frame for each text."""
    by = zstandard.ZstdCompressor(
        level=LEVEL, dict_data=zstandard.ZstdCompressionDict(dictionary) if dictionary else None
    )
    if len(texts) == 1 or not hasattr(by, "multi_compress_to_buffer"):
        return [by.compress(text) for text in texts]
    made = by.multi_compress_to_buffer(list(texts), threads=threads)
    return [made[number].tobytes() for number in range(len(texts))]


def _decompressed(frame: bytes, by: zstandard.ZstdDecompressor, bytes_max: int) -> bytes:
    try:
        # Dormouse writes frames with their content size; a foreign frame could fill all memory
        if not 0 <= zstandard.frame_content_size(frame) <= bytes_max:
            raise Damaged("it is not a frame that Dormouse wrote")
        return by.decompress(frame)
    except zstandard.ZstdError as error:
        raise Damaged("it cannot be decompressed") from error


def _framed(key: PayloadKey, content: bytes) -> bytes:
    return _header(key) + b"\n" + content


def _header(key: PayloadKey) -> bytes:
    """Returns a key as a JSON list. The result equals that of `json.dumps`, which is slower."""
    tenant, id_, kind = map(encode_basestring, (key.tenant, key.id, key.kind))
    return f"[{tenant}, {id_}, {_micros(key.inserted_at)}, {kind}]".encode()


def _micros(at: datetime) -> int:
    return (at - _EPOCH) // _MICROSECOND


def _time(micros: int) -> datetime:
    return _EPOCH + timedelta(microseconds=micros)


# The ledger of payload objects: each is announced, written, used by a transaction, and deleted much later.

FOLDER = PAYLOADS
PAGE_OBJECTS = 1_000
_QUERIES = load(__package__ or "", "pack")


@dataclass(frozen=True, slots=True)
class DayObject:
    """The record in PostgreSQL of one object of a day."""

    object_key: str
    state: str
    byte_count: int
    digest: bytes
    payloads: int
    index_start: int
    dictionaries: Places
    kept: bool
    verified: bool
    first: PayloadKey
    last: PayloadKey

    @property
    def written(self) -> WrittenObject:
        return WrittenObject(self.object_key, self.byte_count, self.digest)


class PayloadObjects:
    """The ledger of the objects of an instance's payloads."""

    prefix = FOLDER

    def __init__(self, supplier: Supplier, objects: ObjectStore) -> None:
        self._supplier = supplier
        self._objects = objects

    def write(self, day: date, token: int, packed: Packed) -> str:
        """Records the name of a new object, then writes the object to the store. Returns the name."""
        object_key = f"{FOLDER}/{day.isoformat()}/{token:06d}-{uuid.uuid4().hex[:20]}"
        values = {"object_key": object_key, "day": day, "token": token}
        # in a transaction of its own: a worker frozen in a longer one would hold up its successor
        run_statement(self._supplier, rows_of(_QUERIES["announce"], values), operation="announce an object")
        put_new(self._objects, object_key, packed.data)
        return object_key

    @staticmethod
    def settle(conn: psycopg.Connection[Any], object_key: str, packed: Packed, state: str) -> None:
        """Records an object's state and contents, within the transaction that begins to use the object.

        Raises `CommitFailed` if the object was deleted meanwhile.
        """
        values = {
            "object_key": object_key,
            "state": state,
            "byte_count": len(packed.data),
            "digest": packed.digest,
            "payloads": len(packed.entries),
            "index_start": packed.index_start,
            "dictionaries": Jsonb(packed.dictionaries),
            **place_values("first", packed.entries[0].key),
            **place_values("last", packed.entries[-1].key),
        }
        if not conn.execute(_QUERIES["settle"].on(), values).fetchall():
            raise CommitFailed(f"object {object_key!r} was deleted before a transaction used it")

    @classmethod
    def register(
        cls, conn: psycopg.Connection[Any], object_key: str, day: date, packed: Packed, day_state: str
    ) -> bool:
        """Records an object of the store as an object of a day. Returns True if it was recorded already."""
        values = {"object_key": object_key, "day": day}
        known = not conn.execute(_QUERIES["register"].on(), values).fetchall()
        if not known:
            cls.settle(conn, object_key, packed, "block" if day_state == "folded" else "live")
        return known

    def of_day(self, day: date, *states: str) -> list[DayObject]:
        """Returns the objects of a day that are in one of the states, in the order of their payloads."""
        values = {"day": day, "states": list(states)}
        rows = run_lookup(self._supplier, rows_of(_QUERIES["of_day"], values), operation="find objects")
        return [DayObject(*(*row[:9], PayloadKey(*row[9:13]), PayloadKey(*row[13:]))) for row in rows]

    @staticmethod
    def change(conn: psycopg.Connection[Any], day: date, before: Sequence[str], state: str) -> None:
        """Changes the state of a day's objects that are in one of the states `before`."""
        values = {"day": day, "states": list(before), "state": state}
        conn.execute(_QUERIES["change_state"].on(), values)

    @staticmethod
    def keep(conn: psycopg.Connection[Any], object_key: str) -> None:
        """Marks an object that becomes a block in the fold without being rewritten."""
        conn.execute(_QUERIES["keep"].on(), {"object_key": object_key})

    def note_verified(self, object_keys: Sequence[str]) -> None:
        """Records that objects were read back and are what was written."""
        work = rows_of(_QUERIES["note_verified"], {"object_keys": list(object_keys)})
        run_transaction(self._supplier, work, operation="note objects")

    @staticmethod
    def activate(conn: psycopg.Connection[Any], day: date) -> None:
        """Turns the objects that a fold keeps into the day's blocks. Marks all other objects as dead."""
        conn.execute(_QUERIES["activate"].on(), {"day": day})

    @staticmethod
    def unstage(conn: psycopg.Connection[Any], day: date, partition: str) -> None:
        """Resets a day's objects to the states that they had before an unfinished fold or offload."""
        conn.execute(_QUERIES["unstage"].on(day=partition), {"day": day})

    def orphaned(self) -> tuple[int, int]:
        """Returns the number of objects that no payload uses, and their recorded bytes."""
        [(count, byte_count)] = run_lookup(
            self._supplier, rows_of(_QUERIES["orphaned"]), operation="count objects"
        )
        return count, byte_count

    def written(self) -> Iterator[LedgerObject]:
        """Yields the objects that payloads need or a hold keeps, sorted by name.

        Each has a flag that is True if payloads need the object. A hold exists, for example, during a backup.
        """
        for page in self._pages("written"):
            yield from starmap(LedgerObject, page)

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns the names that this ledger does not have.

        The ledger has all payload objects, also those being written.
        """
        own = [name for name in names if name.startswith(f"{FOLDER}/")]
        work = rows_of(_QUERIES["known"], {"object_keys": own})
        rows = run_lookup(self._supplier, work, operation="find objects") if own else []
        known = {name for (name,) in rows}
        return [name for name in names if name not in known]

    def collect(self, kept_seconds: float) -> Swept:
        """Deletes objects that payloads have not needed for `kept_seconds`, and objects of writers that died.

        Keeps each object for at least `READERS_SECONDS`, because readers may still use it.
        """
        run_transaction(self._supplier, rows_of(_QUERIES["give_up"]), operation="find dead writers")
        delays = {"delay_seconds": READERS_SECONDS, "kept_seconds": max(READERS_SECONDS, kept_seconds)}
        return sweep(self._objects, self._pages("deletable", **delays), self._forget).warn()

    def _forget(self, object_keys: Sequence[str]) -> None:
        values = {"object_keys": object_keys, "writer_seconds": KEPT_SECONDS}
        run_transaction(self._supplier, rows_of(_QUERIES["forget"], values), operation="forget objects")

    def _pages(self, query: str, **values: float) -> Iterator[list[Any]]:
        after = ""
        while True:
            work = rows_of(_QUERIES[query], {**values, "after": after, "limit": PAGE_OBJECTS})
            page = run_lookup(self._supplier, work, operation="find objects")
            if not page:
                return
            yield page
            after = page[-1][0]
