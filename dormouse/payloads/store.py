"""The payloads of an instance, as users hold them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date, datetime
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from dormouse.errors import (
    DormouseError,
    InstanceForbidden,
    InvalidInput,
    InvalidPayload,
    ObjectStoreError,
    PayloadCorrupt,
    PayloadExpired,
    PayloadNotFound,
    one_line,
)
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import SECONDS_MAX
from dormouse.objects.ledger import Swept
from dormouse.objects.store import ObjectStore
from dormouse.payloads import cooling, rows
from dormouse.payloads.cooling import OffloadReport, PayloadRound, expire, warm
from dormouse.payloads.copying import Payload, PayloadOptions
from dormouse.payloads.days import PayloadDay, PayloadStatus, days, status
from dormouse.payloads.exchange import Tools, within
from dormouse.payloads.keys import PayloadKey, checked, columns, decode, encode_given
from dormouse.payloads.pack import Damaged, Entry, PayloadObjects
from dormouse.payloads.reading import ColdReads, Pointer, Reader, problem
from dormouse.payloads.rebuilding import recover_pointers
from dormouse.payloads.rows import DAYS, Place, batches, in_order, make_days
from dormouse.payloads.verifying import PayloadVerification, verify
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

if TYPE_CHECKING:
    import psycopg

# Finds payloads: inline, then by pointers, then in blocks.

TRIES = 3
"""A day that is folded or made hot again meanwhile has other objects."""
Find = Callable[[Iterable[PayloadKey]], Iterator[tuple[PayloadKey, Place | None]]]


class Lookup:
    """Looks payloads up in one instance."""

    def __init__(self, supplier: Supplier, reader: Reader) -> None:
        self._supplier = supplier
        self._reader = reader
        self.cold_reads = ColdReads()

    def contents(self, wanted: Mapping[PayloadKey, None], find: Find | None = None) -> dict[PayloadKey, Any]:
        """Returns the content of each key, or the error, in their order.

        `find` looks the keys up in a transaction that is not ours; objects are read outside of it.
        """
        found: dict[PayloadKey, Any] = dict(wanted)
        again: Iterable[PayloadKey] = wanted
        before: dict[PayloadKey, Place] = {}
        for _ in range(TRIES):
            places = dict(rows.places(self._supplier, again) if find is None else find(again))
            # one that is where it was is read no better
            todo = {
                key: place for key, place in places.items() if before.get(key) != place or key not in before
            }
            found |= self._at(todo)
            again = [key for key in todo if isinstance(found[key], PayloadCorrupt)]
            if not again:
                break
            before = {key: place for key in again if (place := places[key]) is not None}
        self.cold_reads.corrupt += sum(isinstance(one, PayloadCorrupt) for one in found.values())
        return found

    def warm(self, wanted: Mapping[PayloadKey, None]) -> int:
        """Has those be inline that are not; gives how many. Raises what is in place of a payload."""
        cold: dict[PayloadKey, tuple[Pointer, bool]] = {}
        for key, place in rows.places(self._supplier, wanted):
            if place is None:
                raise rows.expired(key)
            if place.content is not None:
                continue
            pointer = self._pointer(key, place)
            if isinstance(pointer, DormouseError):
                raise pointer
            cold[key] = pointer, place.byte_start is None
        contents = self._reader.read({key: pointer for key, (pointer, _) in cold.items()}) if cold else {}
        for day, keys in groupby(sorted(cold, key=lambda key: (key.day, key.place)), key=lambda key: key.day):
            portion = []
            for key in keys:
                if isinstance(content := contents[key], DormouseError):
                    raise content
                pointer, in_block = cold[key]
                portion.append((Payload(key, None, pointer.object_key, pointer.entry, in_block), content))
            warm(self._supplier, day, portion)
        return len(cold)

    def _at(self, places: Mapping[PayloadKey, Place | None]) -> dict[PayloadKey, Any]:
        began = time.monotonic()
        found: dict[PayloadKey, Any] = {}
        pointers: dict[PayloadKey, Pointer] = {}
        for key, place in places.items():
            if place is None:
                found[key] = rows.expired(key)
            elif place.content is not None:
                found[key] = decode(place.content)
            elif isinstance(pointer := self._pointer(key, place), DormouseError):
                found[key] = pointer
            else:
                pointers[key] = pointer
        for key, content in self._reader.read(pointers).items() if pointers else ():
            found[key] = content if isinstance(content, DormouseError) else decode(content)
        if pointers:
            self.cold_reads.took_ms.append(1_000 * (time.monotonic() - began))
        return found

    def _pointer(self, key: PayloadKey, place: Place) -> Pointer | DormouseError:
        """Where it is in an object; or that there is none, or that it cannot be told."""
        object_key, dictionaries = place.object_key, place.dictionaries or {}
        if object_key is None:
            return PayloadNotFound(f"there is no payload {key}")
        if place.byte_start is not None and place.byte_length is not None and place.checksum is not None:
            entry: Entry | None = Entry(key, place.byte_start, place.byte_length, place.checksum)
        else:
            try:
                index = self._reader.index(object_key, place.index_start, place.byte_count)
                if not index.covers(key):  # which is another answer than that it has none
                    raise Damaged("it has another object's payloads")
            except (Damaged, ObjectStoreError) as error:
                return problem(key, object_key, error)
            entry, dictionaries = index.find(key), index.dictionaries
        if entry is None:
            return PayloadNotFound(f"there is no payload {key}")
        return Pointer(object_key, entry, dictionaries)


# Payloads in the transaction of an application, which commits them with its own rows, or neither.

_QUERIES = load(__package__ or "", "store")
_FUNCTIONS = {
    "put": "dormouse.put_payload, dormouse.put_payloads",
    "find": "dormouse.find_payloads",
    "delete": "dormouse.delete_payloads",
}
"""The functions that an application needs, by the name of the query that calls one of them."""


class ApplicationPayloads:
    """Payloads of one instance, read and written in transactions that are not its own."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._instance: str | None = None
        self._days_made: set[date] = set()

    def put(self, conn: psycopg.Connection[Any], contents: Mapping[PayloadKey, str]) -> None:
        """Keeps payloads when the transaction of `conn` commits; an error leaves it as it was before.

        Raises `InvalidInput` for a connection that has no transaction or is to another database,
        `InstanceForbidden`, `PayloadExpired`, and the errors of psycopg that end a transaction, such as
        `SerializationFailure`, as the application has to run it again.
        """
        check_connection(conn)
        self._make_days({key.day for key in contents})
        instance = self._instance_id()
        with _savepoint(conn, "put") as cursor:
            for batch in batches(in_order(contents), contents):
                values = {**columns(batch), "contents": [contents[key] for key in batch]}
                cursor.execute(_QUERIES["put"].on(), {**values, "instance": instance})

    def places(
        self, conn: psycopg.Connection[Any], keys: Iterable[PayloadKey]
    ) -> Iterator[tuple[PayloadKey, Place | None]]:
        """Yields where each payload is, as the transaction of `conn` sees it; None for a day that is gone.

        Raises as `put`.
        """
        check_connection(conn)
        wanted = list(keys)
        for key, (expired, *found) in zip(wanted, self._rows(conn, "find", columns(wanted)), strict=True):
            place = Place(*found)
            # as text: the application may have psycopg read JSON in its own way
            dictionaries: Any = None if place.dictionaries is None else json.loads(str(place.dictionaries))
            yield key, None if expired else place._replace(dictionaries=dictionaries)

    def delete(self, conn: psycopg.Connection[Any], keys: Iterable[PayloadKey]) -> None:
        """Deletes payloads when the transaction of `conn` commits. Raises as `put`."""
        check_connection(conn)
        self._rows(conn, "delete", columns(in_order(keys)))

    def _rows(
        self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]
    ) -> list[Sequence[Any]]:
        """Executes a query, whose name is that of what is done."""
        values = {**values, "instance": self._instance_id()}
        with _savepoint(conn, name) as cursor:
            return list(cursor.execute(_QUERIES[name].on(), values).fetchall())

    def _make_days(self, days: set[date]) -> None:
        if missing := days - self._days_made:
            make_days(self._supplier, missing - set(DAYS.days(self._supplier)))
            self._days_made |= missing

    def _instance_id(self) -> str:
        if self._instance is None:
            [(self._instance,)] = run_lookup(
                self._supplier, rows_of(_QUERIES["instance"]), operation="look at the instance"
            )
        return self._instance


def check_connection(conn: object) -> None:
    """Raises `InvalidInput` unless what is put by a connection belongs to a transaction of its user."""
    if not isinstance(conn, psycopg.Connection):
        raise InvalidInput(
            f"conn must be a psycopg.Connection, not {type(conn).__qualname__}: by another driver, call the "
            "SQL function dormouse.put_payload in its transaction"
        )
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidInput(
            "conn is in autocommit mode, and has begun no transaction: call this within "
            "'with conn.transaction():', or leave conn out"
        )


@contextmanager
def _savepoint(conn: psycopg.Connection[Any], name: str) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
    """Gives a cursor; after an error the transaction of `conn` goes on as it was before.

    `name` is that of the query that is executed.
    """
    # the connection may be set to cursors and rows of another kind
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    try:
        if conn.info.transaction_status == TransactionStatus.IDLE:
            # else the block would be the whole transaction, and commit it
            cursor.execute(_QUERIES["begin"].on())
        with conn.transaction():
            yield cursor
    except psycopg.Error as error:
        raise _told(conn, name, error) from error


def _told(conn: psycopg.Connection[Any], name: str, error: psycopg.Error) -> Exception:
    said = error.diag.message_primary or one_line(error)
    match error:
        case pg.InvalidParameterValue():
            return InvalidPayload(said)
        case pg.InsufficientPrivilege():
            role = conn.info.user
            return InstanceForbidden(
                f"{name} payloads: {said}; as the owner of the schema: grant usage on schema dormouse to "
                f"{role}; as the owner of the functions, the role that made or migrated the instance: grant "
                f"execute on function {_FUNCTIONS[name]} to {role}"
            )
        case pg.UndefinedFunction() | pg.InvalidSchemaName():
            return InvalidInput(
                f"the database {conn.info.dbname!r} of conn is not the one of the instance: {said}"
            )
    if error.sqlstate == "DM002":
        return PayloadExpired(said)
    return InvalidInput(said) if error.sqlstate == "DM003" else error


class PayloadStore:
    """JSON documents by tenant, id, time and kind. Made by `instance.payloads`; threads may share it.

    A key is (tenant, id, inserted_at, kind): tenant, id and kind are text of at most 512 bytes each, and
    `inserted_at` an aware datetime, whose day in UTC is what the payload is kept and expires with.
    """

    def __init__(
        self,
        supplier: Supplier,
        objects: ObjectStore,
        check_writable: Callable[[], object] = lambda: None,
        options: PayloadOptions | None = None,
    ) -> None:
        self._supplier = supplier
        self._objects = objects
        self._options = options or PayloadOptions()
        self._lookup = Lookup(supplier, Reader(objects))
        self._check_writable = check_writable
        self._in_applications = ApplicationPayloads(supplier)

    def put(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        content: Any,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Keeps a payload, in place of the one of the same key. `content` is any JSON value, None too.

        With `conn`, a connection of the application to the database of the instance, the payload is kept when
        the transaction of that commits; until then `get` finds it with the same `conn` alone. An error leaves
        that transaction as it was before the call. Kinds that begin with "dormouse." are refused.

        Raises `InvalidPayload`, and `PayloadExpired` for a day that was dropped; with `conn` also
        `InvalidInput`, `InstanceForbidden`, and what psycopg raises of a transaction that must be run again.
        """
        self.put_many([(tenant, id, inserted_at, kind, content)], conn=conn)

    def put_many(
        self,
        payloads: Iterable[tuple[str, str, datetime, str, Any]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Keeps (tenant, id, inserted_at, kind, content), all or none; of one key, the last.

        `conn` is as for `put`. Raises as `put`.
        """
        contents: dict[PayloadKey, str] = {}
        for given in payloads:
            key, text = encode_given(given)
            contents[key] = text
        self._check_writable()
        if conn is not None:
            self._in_applications.put(conn, contents)
        elif contents:
            rows.put(self._supplier, contents)

    def get(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> Any:
        """Returns the content of a payload; with `conn`, as the transaction of the application sees it.

        That includes what it has put and deleted itself. Objects are read outside of the transaction.

        Raises `InvalidPayload` for a key that cannot be, `PayloadNotFound`, `PayloadExpired` when its day was
        dropped, `PayloadCorrupt` when what is kept of it is not what was written, and `PayloadUnavailable`
        when the object store does not give it now; with `conn` also what `put` raises of it.
        """
        [found] = self.get_many([(tenant, id, inserted_at, kind)], conn=conn).values()
        if isinstance(found, DormouseError):
            raise found
        return found

    def get_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> dict[PayloadKey, Any]:
        """Returns the content of each key, or the error that `get` would raise. `conn` is as for `get`.

        Raises `InvalidPayload`, and with `conn` what `put` raises of it.
        """
        wanted = dict.fromkeys(map(checked, keys))
        find = None if conn is None else partial(self._in_applications.places, conn)
        return self._lookup.contents(wanted, find)

    def delete(
        self,
        tenant: str,
        id: str,
        inserted_at: datetime,
        kind: str,
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Deletes a payload, if it is there; with `conn`, when the transaction of the application commits.

        Raises `InvalidPayload`, and with `conn` what `put` raises of it.
        """
        self.delete_many([(tenant, id, inserted_at, kind)], conn=conn)

    def delete_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Deletes the payloads that are there, all or none. `conn` is as for `delete`, and so are errors."""
        wanted = set(map(checked, keys))
        self._check_writable()
        if conn is not None:
            self._in_applications.delete(conn, wanted)
        elif wanted:
            rows.delete(self._supplier, wanted)

    def offload(
        self,
        day: date | None = None,
        dry_run: bool = False,
        *,
        seconds_max: float | None = None,
        progress: Progress = no_progress,
    ) -> OffloadReport:
        """Moves the payloads of a day that is over into objects, or of each that is over for
        `DORMOUSE_PAYLOADS_HOT_SECONDS`, while all goes on.

        Others may do the same with other days, or go on where this one ends: after `seconds_max`, or killed.
        A day that is done stays so. With `dry_run`, only what would be done is told. `progress` is called
        with the payloads done of the day at hand, and None.

        Of one day raises `InvalidInput` when it is not over or is not there, `PayloadExpired`,
        `PayloadDayBusy`, `PayloadsDiffer` and `ObjectStoreError`; of many, the report has them.
        """
        if not dry_run:
            self._check_writable()
        return cooling.offload(self._tools(seconds_max, progress), day, dry_run)

    def fold(
        self,
        day: date | None = None,
        *,
        seconds_max: float | None = None,
        progress: Progress = no_progress,
    ) -> OffloadReport:
        """Makes blocks of a day's objects, or of each day that is cold for a week: some hundred rows.

        What is written to such a day later stays inline until it is folded again. Raises as `offload`.
        """
        self._check_writable()
        return cooling.fold(self._tools(seconds_max, progress), day)

    def rehydrate(
        self,
        what: date | Iterable[tuple[str, str, datetime, str]],
        *,
        progress: Progress = no_progress,
    ) -> int:
        """Has the payloads of a day, or of some keys, be in PostgreSQL again; gives how many were not.

        A day stays so for a day at least. Raises `InvalidInput`, `PayloadExpired`, `PayloadDayBusy`; of keys
        what `get` does, when some are warm already.
        """
        self._check_writable()
        if isinstance(what, date):
            return cooling.rehydrate(self._tools(progress=progress), what)
        return self._lookup.warm(dict.fromkeys(map(checked, what)))

    def verify(
        self, day: date, *, rebuild: bool = False, progress: Progress = no_progress
    ) -> PayloadVerification:
        """Reads all objects of a day, and compares the day's pointers or blocks with what they have.

        With `rebuild`, what the database has lost of these is made anew from the objects. Pointers and blocks
        of objects that are gone lead to others then, as far as these have the payloads: `recovered` says how
        many, and `problems` what is lost. What was deleted of payloads whose pointers are all lost is there
        again.
        """
        if rebuild:
            self._check_writable()
        cooling.check_day(day)
        return verify(self._tools(progress=progress), day, rebuild=rebuild)

    def expire(self, before: date, dry_run: bool = False) -> tuple[list[date], list[date]]:
        """Drops the days before one, and then has their objects deleted; with `dry_run` only tells which.

        Gives the days, and those that are worked on or used all the time, and stay for another time. Raises
        `InvalidInput` for days that are not over.
        """
        cooling.check_day(before)
        if before > (today := rows.DAYS.today(self._supplier)):
            raise InvalidInput(f"the days before {before} are not all over: {today} is the last to be given")
        if not dry_run:
            self._check_writable()
        return expire(self._supplier, before, dry_run=dry_run)

    def days(self, *, expired: bool = False) -> list[PayloadDay]:
        """The days that there are payloads of, the oldest first; also those that were dropped."""
        return days(self._supplier, self._options.hot_seconds, expired=expired)

    def status(self) -> PayloadStatus:
        """How much waits to be cooled down, and how the last days went."""
        return status(self.days(), self._known, self._lookup.cold_reads)

    def collect(self, kept_seconds: float | None = None) -> Swept:
        """Deletes the objects that no payload has needed for a time, and that are not held.

        The time is by default `DORMOUSE_OBJECTS_KEPT_SECONDS`, a day; readers have a quarter of an hour at
        least. The objects are those of expired days, of workers that died, and those that a fold replaced.
        Raises `InvalidInput`.
        """
        if kept_seconds is None:
            kept_seconds = self._options.kept_seconds
        if not 0 <= kept_seconds <= SECONDS_MAX:
            raise InvalidInput(f"kept_seconds must be from 0 to {SECONDS_MAX:,.0f}, not {kept_seconds!r}")
        self._check_writable()
        return self._known.collect(kept_seconds)

    def recover(self) -> list[str]:
        """Leads pointers to objects that are gone to others that have the same payloads, as adoptions do.

        Returns a line for each day that had such pointers: what was found, and what was not.
        """
        self._check_writable()
        return recover_pointers(self._tools())

    def maintain(
        self, *, seconds_max: float | None = None, retention_days: int | None = None
    ) -> PayloadRound:
        """A round of all that is due: days made ahead, days dropped, offloaded and folded, objects deleted.

        What fails is in its `errors`, and holds up nothing else.
        """
        self._check_writable()
        return cooling.run_round(self._tools(seconds_max), retention_days)

    @property
    def _known(self) -> PayloadObjects:
        return PayloadObjects(self._supplier, self._objects)

    def _tools(self, seconds_max: float | None = None, progress: Progress = no_progress) -> Tools:
        return Tools(self._supplier, self._objects, self._options, progress, within(seconds_max))
