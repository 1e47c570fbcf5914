"""Payloads in the transaction of an application, which commits them with its own rows, or neither.

The application's role may have no right to our tables: functions that run as their owner read and write
the rows (migrations 0040 and 0042). A day that is written to must exist, and is made before, in a
transaction of its own: one that is made within the application's keeps other makers of days, and the
exchange of each day, waiting until that ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import date
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from dormouse.errors import InstanceForbidden, InvalidInput, InvalidPayload, PayloadExpired, one_line
from dormouse.payloads.keys import PayloadKey, columns
from dormouse.payloads.rows import DAYS, Place, batches, in_order, make_days
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

_QUERIES = load(__package__ or "", "application")
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
