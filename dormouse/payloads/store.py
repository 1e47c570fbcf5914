"""The public store of an instance's payloads. Applications can also use it in their own transactions."""

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

# Look-ups: of payloads in rows, by pointers and in blocks.

TRIES = 3
"""The most tries of a look-up. A fold or rehydration may replace a day's objects between look-up and read."""
Find = Callable[[Iterable[PayloadKey]], Iterator[tuple[PayloadKey, Place | None]]]


class Lookup:
    """The look-up of payloads in one instance."""

    def __init__(self, supplier: Supplier, reader: Reader) -> None:
        self._supplier = supplier
        self._reader = reader
        self.cold_reads = ColdReads()

    def contents(self, wanted: Mapping[PayloadKey, None], find: Find | None = None) -> dict[PayloadKey, Any]:
        """Returns the content of each payload, or an error in its place, in the given order of keys.

        `find` looks up the places of payloads, by default in a transaction of its own. Objects are read
        outside of any transaction.
        """
        contents: dict[PayloadKey, Any] = dict(wanted)
        again: Iterable[PayloadKey] = wanted
        before: dict[PayloadKey, Place] = {}
        for _ in range(TRIES):
            places = dict(rows.places(self._supplier, again) if find is None else find(again))
            # reads a corrupt payload again only if it has moved
            todo = {
                key: place for key, place in places.items() if before.get(key) != place or key not in before
            }
            contents |= self._at(todo)
            again = [key for key in todo if isinstance(contents[key], PayloadCorrupt)]
            if not again:
                break
            before = {key: place for key in again if (place := places[key]) is not None}
        self.cold_reads.corrupt += sum(isinstance(each, PayloadCorrupt) for each in contents.values())
        return contents

    def warm(self, wanted: Mapping[PayloadKey, None]) -> int:
        """Makes some payloads hot, and returns the number of them that were cold.

        Raises the error of the first payload that is missing or cannot be read.
        """
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
        contents: dict[PayloadKey, Any] = {}
        pointers: dict[PayloadKey, Pointer] = {}
        for key, place in places.items():
            if place is None:
                contents[key] = rows.expired(key)
            elif place.content is not None:
                contents[key] = decode(place.content)
            elif isinstance(pointer := self._pointer(key, place), DormouseError):
                contents[key] = pointer
            else:
                pointers[key] = pointer
        for key, content in self._reader.read(pointers).items() if pointers else ():
            contents[key] = content if isinstance(content, DormouseError) else decode(content)
        if pointers:
            self.cold_reads.took_ms.append(1_000 * (time.monotonic() - began))
        return contents

    def _pointer(self, key: PayloadKey, place: Place) -> Pointer | DormouseError:
        """Returns the pointer to a cold payload, or an error.

        The error is `PayloadNotFound` if there is no such payload. Otherwise the object's index cannot be
        read.
        """
        object_key, dictionaries = place.object_key, place.dictionaries or {}
        if object_key is None:
            return PayloadNotFound(f"there is no payload {key}")
        if place.byte_start is not None and place.byte_length is not None and place.checksum is not None:
            entry: Entry | None = Entry(key, place.byte_start, place.byte_length, place.checksum)
        else:
            try:
                index = self._reader.index(object_key, place.index_start, place.byte_count)
                if not index.covers(
                    key
                ):  # the wrong object: this does not mean that the payload does not exist
                    raise Damaged("it contains the payloads of another object")
            except (Damaged, ObjectStoreError) as error:
                return problem(key, object_key, error)
            entry, dictionaries = index.find(key), index.dictionaries
        if entry is None:
            return PayloadNotFound(f"there is no payload {key}")
        return Pointer(object_key, entry, dictionaries)


# Payloads in the transaction of an application, which commits them together with its own rows.

_QUERIES = load(__package__ or "", "store")
_FUNCTIONS = {
    "put": "dormouse.put_payload, dormouse.put_payloads",
    "find": "dormouse.find_payloads",
    "delete": "dormouse.delete_payloads",
}
"""The SQL functions that each query calls, by the name of the query.

The database role of an application must have the right to execute them.
"""


class ApplicationPayloads:
    """The payloads of one instance, read and written in transactions of applications."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._instance: str | None = None
        self._days_made: set[date] = set()

    def put(self, conn: psycopg.Connection[Any], contents: Mapping[PayloadKey, str]) -> None:
        """Stores payloads in the transaction of `conn`. An error leaves the transaction as it was before.

        Raises `InvalidInput` for a connection without a transaction or to another database,
        `InstanceForbidden`, `PayloadExpired`, and errors of psycopg after which the application must retry
        its transaction, such as `SerializationFailure`.
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
        """Yields each key with the place of its payload, as the transaction of `conn` sees it.

        The place is None if the day was dropped.

        Raises the errors of `put`.
        """
        check_connection(conn)
        wanted = list(keys)
        for key, (expired, *values) in zip(wanted, self._rows(conn, "find", columns(wanted)), strict=True):
            place = Place(*values)
            # the query returns JSON as text, because the application may have its own JSON loader
            dictionaries: Any = None if place.dictionaries is None else json.loads(str(place.dictionaries))
            yield key, None if expired else place._replace(dictionaries=dictionaries)

    def delete(self, conn: psycopg.Connection[Any], keys: Iterable[PayloadKey]) -> None:
        """Deletes payloads in the transaction of `conn`. Raises the errors of `put`."""
        check_connection(conn)
        self._rows(conn, "delete", columns(in_order(keys)))

    def _rows(
        self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]
    ) -> list[Sequence[Any]]:
        """Executes a query within a savepoint of the transaction of `conn`, and returns its rows."""
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
                self._supplier, rows_of(_QUERIES["instance"]), operation="read the instance"
            )
        return self._instance


def check_connection(conn: object) -> None:
    """Raises `InvalidInput` unless `conn` is a psycopg connection in a transaction or without autocommit."""
    if not isinstance(conn, psycopg.Connection):
        raise InvalidInput(
            f"conn must be a psycopg.Connection, not {type(conn).__qualname__}: with another driver, call "
            "the SQL function dormouse.put_payload in its transaction"
        )
    if conn.autocommit and conn.info.transaction_status == TransactionStatus.IDLE:
        raise InvalidInput(
            "conn is in autocommit mode, and has begun no transaction: call this within "
            "'with conn.transaction():', or leave conn out"
        )


@contextmanager
def _savepoint(conn: psycopg.Connection[Any], name: str) -> Iterator[psycopg.Cursor[tuple[Any, ...]]]:
    """Yields a cursor within a savepoint, so that an error leaves the transaction of `conn` as before.

    `name` is the name of the query, for error messages.
    """
    # the connection may have other classes of cursors and rows
    cursor = psycopg.Cursor(conn, row_factory=tuple_row)
    try:
        if conn.info.transaction_status == TransactionStatus.IDLE:
            # begins a transaction, because otherwise the block below would begin and commit one
            cursor.execute(_QUERIES["begin"].on())
        with conn.transaction():
            yield cursor
    except psycopg.Error as error:
        raise _translated(conn, name, error) from error


def _translated(conn: psycopg.Connection[Any], name: str, error: psycopg.Error) -> Exception:
    message = error.diag.message_primary or one_line(error)
    match error:
        case pg.InvalidParameterValue():
            return InvalidPayload(message)
        case pg.InsufficientPrivilege():
            role = conn.info.user
            return InstanceForbidden(
                f"{name} payloads: {message}; as the owner of the schema: grant usage on schema dormouse to "
                f"{role}; as the owner of the functions, the role that made or migrated the instance: grant "
                f"execute on function {_FUNCTIONS[name]} to {role}"
            )
        case pg.UndefinedFunction() | pg.InvalidSchemaName():
            return InvalidInput(
                f"the database {conn.info.dbname!r} of conn is not the one of the instance: {message}"
            )
    if error.sqlstate == "DM002":
        return PayloadExpired(message)
    return InvalidInput(message) if error.sqlstate == "DM003" else error


class PayloadStore:
    """A store of JSON documents by tenant, id, time and kind. Use `instance.payloads`; threads may share it.

    A key is (tenant, id, inserted_at, kind). Tenant, id and kind are texts of at most 512 bytes each.
    `inserted_at` is a datetime with a time zone; the payload is stored and expires with its day in UTC.
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
        """Stores a payload, and replaces a payload with the same key. `content` is any JSON value, also None.

        `conn` is a connection of the application to the instance's database. With it, the payload is stored
        in the connection's transaction: until the commit, only `get` with the same `conn` finds it. An error
        leaves that transaction as it was before the call. Kinds that begin with "dormouse." are refused.

        Raises `InvalidPayload`, and `PayloadExpired` for a day that was dropped. With `conn` also raises
        `InvalidInput`, `InstanceForbidden`, and psycopg's errors of a transaction that must be retried.
        """
        self.put_many([(tenant, id, inserted_at, kind, content)], conn=conn)

    def put_many(
        self,
        payloads: Iterable[tuple[str, str, datetime, str, Any]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Stores all payloads or none. Each is a tuple (tenant, id, inserted_at, kind, content).

        If several payloads have the same key, stores the last one. `conn` and the errors are those of `put`.
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
        """Returns the content of a payload.

        With `conn`, returns the content as the transaction of the application sees it, with its own writes
        and deletions. Objects are read outside of the transaction.

        Raises:

        - `InvalidPayload` for an invalid key,
        - `PayloadNotFound`,
        - `PayloadExpired` if its day was dropped,
        - `PayloadCorrupt` if the stored bytes are not what was written,
        - `PayloadUnavailable` if the object store cannot return it now,
        - with `conn` also the errors of `put` about the connection.
        """
        [content] = self.get_many([(tenant, id, inserted_at, kind)], conn=conn).values()
        if isinstance(content, DormouseError):
            raise content
        return content

    def get_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> dict[PayloadKey, Any]:
        """Returns for each key the content, or the error that `get` would raise. `conn` is that of `get`.

        Raises `InvalidPayload`, and with `conn` the errors of `put` about the connection.
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
        """Deletes a payload if it exists; with `conn`, in the transaction of the application.

        Raises `InvalidPayload`, and with `conn` the errors of `put` about the connection.
        """
        self.delete_many([(tenant, id, inserted_at, kind)], conn=conn)

    def delete_many(
        self,
        keys: Iterable[tuple[str, str, datetime, str]],
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Deletes the payloads of all keys or none. Skips keys that have no payload.

        `conn` and the errors are those of `delete`.
        """
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
        """Moves the payloads of a day that is over into objects, while reads and writes go on.

        Without `day`, moves each day that has been over for `DORMOUSE_PAYLOADS_HOT_SECONDS`. Several
        processes can work on different days at the same time. A process that is killed, or stops after
        `seconds_max`, loses nothing: the next call continues its work. With `dry_run`, only reports the days.
        `progress` is called with the number of payloads moved in the present day, and None.

        With `day`, raises `InvalidInput` if the day is not over or does not exist, `PayloadExpired`,
        `PayloadDayBusy`, `PayloadsDiffer` and `ObjectStoreError`. Without it, errors are in the report.
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
        """Makes a day's objects blocks: PostgreSQL then keeps one row for each object, not for each payload.

        Without `day`, folds each offloaded day that is more than a week old, and each folded day with many
        new rows. Later writes to a folded day stay in rows until the day is folded again. Raises the errors
        of `offload`.
        """
        self._check_writable()
        return cooling.fold(self._tools(seconds_max, progress), day)

    def rehydrate(
        self,
        what: date | Iterable[tuple[str, str, datetime, str]],
        *,
        progress: Progress = no_progress,
    ) -> int:
        """Moves the payloads of a day, or of some keys, back into PostgreSQL.

        Returns the number of moved payloads.

        A rehydrated day stays hot for at least 24 hours. Raises `InvalidInput`, `PayloadExpired` and
        `PayloadDayBusy`. With keys, raises the errors of `get`. Some of the other payloads may then be hot
        already.
        """
        self._check_writable()
        if isinstance(what, date):
            return cooling.rehydrate(self._tools(progress=progress), what)
        return self._lookup.warm(dict.fromkeys(map(checked, what)))

    def verify(
        self, day: date, *, rebuild: bool = False, progress: Progress = no_progress
    ) -> PayloadVerification:
        """Reads all objects of a day, and compares them with the day's pointers or blocks.

        With `rebuild`, first restores lost pointers and blocks from the objects. Pointers to objects that no
        longer exist then lead to other objects with the same payloads. `recovered` counts these payloads, and
        `problems` lists lost objects. If all pointers to an object were lost, its deleted payloads reappear.
        """
        if rebuild:
            self._check_writable()
        cooling.check_day(day)
        return verify(self._tools(progress=progress), day, rebuild=rebuild)

    def expire(self, before: date, dry_run: bool = False) -> tuple[list[date], list[date]]:
        """Drops the days before a date and marks their objects for deletion. With `dry_run`, drops nothing.

        Returns two lists: the days that were dropped, or would be with `dry_run`, and the days that were too
        busy. Raises `InvalidInput` if a day before the date is not over.
        """
        cooling.check_day(before)
        if before > (today := rows.DAYS.today(self._supplier)):
            raise InvalidInput(f"not all days before {before} are over: give {today} or an earlier day")
        if not dry_run:
            self._check_writable()
        return expire(self._supplier, before, dry_run=dry_run)

    def days(self, *, expired: bool = False) -> list[PayloadDay]:
        """Returns the days of payloads, the oldest first.

        With `expired`, also returns the days that were dropped.
        """
        return days(self._supplier, self._options.hot_seconds, expired=expired)

    def status(self) -> PayloadStatus:
        """Returns the number of days in each state, the backlog of days to offload, and the rates of work."""
        return status(self.days(), self._known, self._lookup.cold_reads)

    def collect(self, kept_seconds: float | None = None) -> Swept:
        """Deletes objects that no payload has needed for `kept_seconds` and that no hold keeps.

        These are objects of expired days, of workers that died, and objects that a fold replaced. By default,
        `kept_seconds` is the setting `DORMOUSE_OBJECTS_KEPT_SECONDS`, which is a day by default. Each object
        is kept for at least 15 minutes, because readers may still use it. Raises `InvalidInput`.
        """
        if kept_seconds is None:
            kept_seconds = self._options.kept_seconds
        if not 0 <= kept_seconds <= SECONDS_MAX:
            raise InvalidInput(f"kept_seconds must be from 0 to {SECONDS_MAX:,.0f}, not {kept_seconds!r}")
        self._check_writable()
        return self._known.collect(kept_seconds)

    def recover(self) -> list[str]:
        """Changes pointers to lost objects so that they lead to other objects with the same payloads.

        An adoption also does this. Returns a line of text for each day that had lost objects, with the
        result.
        """
        self._check_writable()
        return recover_pointers(self._tools())

    def maintain(
        self, *, seconds_max: float | None = None, retention_days: int | None = None
    ) -> PayloadRound:
        """Does all payload work that is due, and returns the results.

        Creates the partitions of the coming days, drops days older than `retention_days`, offloads days,
        folds days, and deletes unneeded objects. A part that fails is in `errors` of the result, and does not
        stop the other parts.
        """
        self._check_writable()
        return cooling.run_round(self._tools(seconds_max), retention_days)

    @property
    def _known(self) -> PayloadObjects:
        return PayloadObjects(self._supplier, self._objects)

    def _tools(self, seconds_max: float | None = None, progress: Progress = no_progress) -> Tools:
        return Tools(self._supplier, self._objects, self._options, progress, within(seconds_max))
