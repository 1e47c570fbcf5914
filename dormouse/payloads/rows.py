"""The rows of payloads. Each statement names its day's partition, so that it locks no other day."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import psycopg
from psycopg import errors as pg

from dormouse.errors import PayloadExpired
from dormouse.payloads.keys import PayloadKey, Places, columns
from dormouse.postgres.connection import Supplier
from dormouse.postgres.days import DayPartitions
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

DAYS = DayPartitions("payload")
STATEMENT_ROWS_MAX = 10_000
STATEMENT_CHARACTERS_MAX = 16 * 2**20
_TRIES = 20
T = TypeVar("T")
_QUERIES = load(__package__ or "", "rows")
PUT = _QUERIES["put"]
"""A query that stores payloads of one day, as a part of larger statements.

The query `such`, which is inserted into it, selects the payloads to store from the given ones.
"""
_PUT = PUT.including(such=_QUERIES["all_given"])


class Place(NamedTuple):
    """The place at which a payload is stored.

    - `location`: None if no row has the payload. Then the block `object_key`, if there is one, may have it.
    - `content`: the payload of a hot row.
    - `object_key`, `byte_start`, `byte_length`, `checksum`: the pointer of a cold row.
    - `dictionaries`: the places of the object's dictionaries, by kind.
    - `index_start`, `byte_count`: for a block, the start of its index, and its size.
    """

    location: str | None
    content: str | None
    object_key: str | None
    byte_start: int | None
    byte_length: int | None
    checksum: bytes | None
    dictionaries: Places | None
    index_start: int | None
    byte_count: int | None


def put(supplier: Supplier, contents: Mapping[PayloadKey, str]) -> None:
    """Stores all payloads or none. Creates missing partitions of days. Raises `PayloadExpired`."""
    days = {key.day for key in contents}
    with_days(supplier, lambda conn: write(conn, contents), lambda: days, operation="put payloads")


def write(conn: psycopg.Connection[Any], contents: Mapping[PayloadKey, str]) -> None:
    """Stores payloads in a transaction.

    Raises psycopg's `UndefinedTable` if the partition of a day is missing.
    """
    for day, keys in _by_day(contents):
        for batch in batches(keys, contents):
            values = {**columns(batch), "contents": [contents[key] for key in batch]}
            conn.execute(_PUT.on(day=DAYS.name(day)), values)


def with_days(
    supplier: Supplier,
    work: Callable[[psycopg.Connection[Any]], T],
    days: Callable[[], Iterable[date]],
    *,
    operation: str,
) -> T:
    """Runs a transaction that writes payloads, and returns its result.

    If the partition of a day is missing, creates the partitions of the days that `days` returns, and retries.
    Raises `PayloadExpired` and the errors of the work.
    """
    for _ in range(_TRIES):
        try:
            return run_transaction(supplier, work, operation=operation)
        except pg.UndefinedTable:
            make_days(supplier, days())
    raise RuntimeError("payloads: the table of the day was dropped each time that it was created")


def delete(supplier: Supplier, keys: Iterable[PayloadKey]) -> None:
    """Deletes payloads. Skips keys that have no payload.

    If a day has blocks, puts rows marked as deleted into its partition. The first of two statements waits for
    a running exchange of the partition, so that the second statement sees whether the day has blocks now.
    """
    days = list(_by_day(keys))

    def work(conn: psycopg.Connection[Any]) -> None:
        for day, in_day in days:
            name, values = DAYS.name(day), {**columns(in_day), "day": day}
            try:
                with conn.transaction():
                    conn.execute(_QUERIES["delete"].on(day=name), values)
                    conn.execute(_QUERIES["bury"].on(day=name), values)
            except pg.UndefinedTable:
                continue  # the day has no partition

    run_transaction(supplier, work, operation="delete payloads")


def places(supplier: Supplier, keys: Iterable[PayloadKey]) -> Iterator[tuple[PayloadKey, Place | None]]:
    """Yields each key with the place of its payload, or with None if the day was dropped.

    Reads all payloads of a day in one snapshot.
    """
    for day, in_day in _by_day(keys):
        query = _QUERIES["get"].on(day=DAYS.name(day))
        try:
            values = {**columns(in_day), "day": day}
            rows = run_lookup(supplier, rows_of(query, values), operation="get payloads")
        except pg.UndefinedTable:
            missing = None if is_expired(supplier, day) else Place(*[None] * len(Place._fields))
            yield from ((key, missing) for key in in_day)
            continue
        yield from ((key, Place(*row)) for key, row in zip(in_day, rows, strict=True))


def is_expired(supplier: Supplier, day: date) -> bool:
    """Returns whether a day was dropped."""
    work = rows_of(_QUERIES["state"], {"day": day})
    return run_lookup(supplier, work, operation="read a day") == [("expired",)]


def expired(key: PayloadKey) -> PayloadExpired:
    return PayloadExpired(f"payload {key}: its day is past its retention, and was dropped")


def make_days(supplier: Supplier, days: Iterable[date]) -> None:
    """Creates the partitions of days.

    Skips days whose locks are busy. Raises `PayloadExpired` for dropped days.
    """
    for day in sorted(days):
        if is_expired(supplier, day):
            raise _expired_day(day)
        DAYS.attempt(supplier, partial(_add, day=day), attempts=_TRIES)


def _add(conn: psycopg.Connection[Any], day: date) -> None:
    DAYS.add(conn, day)
    if conn.execute(_QUERIES["state"].on(), {"day": day}).fetchall() == [
        ("expired",)
    ]:  # dropped since the check before
        raise _expired_day(day)


def _expired_day(day: date) -> PayloadExpired:
    return PayloadExpired(f"payloads of {day} are past their retention, and were dropped")


def _by_day(keys: Iterable[PayloadKey]) -> Iterator[tuple[date, list[PayloadKey]]]:
    """Yields each day with its keys. The order is the same in all transactions, which prevents deadlocks."""
    for day, in_day in groupby(in_order(keys), key=lambda key: key.day):
        yield day, list(in_day)


def in_order(keys: Iterable[PayloadKey]) -> list[PayloadKey]:
    """Returns keys in the order in which all transactions write them."""
    return sorted(keys, key=lambda key: (key.day, key.place))


def batches(keys: Sequence[PayloadKey], contents: Mapping[PayloadKey, str]) -> Iterator[list[PayloadKey]]:
    """Yields the keys in portions that are small enough, with their contents, for one statement each."""
    batch: list[PayloadKey] = []
    characters = 0
    for key in keys:
        if batch and (len(batch) >= STATEMENT_ROWS_MAX or characters >= STATEMENT_CHARACTERS_MAX):
            yield batch
            batch, characters = [], 0
        batch.append(key)
        characters += len(contents[key])
    if batch:
        yield batch
