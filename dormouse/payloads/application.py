"""Payloads in the transaction of an application, which commits them with its own rows, or neither.

The application's role may have no right to our tables: a function that runs as its owner writes the rows
(migration 0040). Their day must exist, and is made before, in a transaction of its own: one that is made
within the application's keeps other makers of days, and the exchange of each day, waiting until that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import date
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row

from dormouse.errors import InstanceForbidden, InvalidInput, InvalidPayload, PayloadExpired, one_line
from dormouse.payloads.keys import PayloadKey, columns
from dormouse.payloads.rows import DAYS, batches, in_order, make_days
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

_QUERIES = load(__package__ or "", "application")
_GRANTS = (
    "as the owner of the schema: grant usage on schema dormouse to ROLE; as the owner of the functions, the "
    "role that made or migrated the instance: grant execute on function dormouse.put_payload, "
    "dormouse.put_payloads to ROLE"
)


class ApplicationWrites:
    """Puts of one instance into transactions that are not its own."""

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
        # the connection may be set to cursors and rows of another kind
        cursor = psycopg.Cursor(conn, row_factory=tuple_row)
        try:
            if conn.info.transaction_status == TransactionStatus.IDLE:
                # else the block would be the whole transaction, and commit it
                cursor.execute(_QUERIES["begin"].on())
            with conn.transaction():  # a savepoint
                for batch in batches(in_order(contents), contents):
                    values = {**columns(batch), "contents": [contents[key] for key in batch]}
                    cursor.execute(_QUERIES["put"].on(), {**values, "instance": instance})
        except psycopg.Error as error:
            raise _told(conn, error) from error

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
            "conn is in autocommit mode, and has begun no transaction: put within "
            "'with conn.transaction():', or leave conn out"
        )


def _told(conn: psycopg.Connection[Any], error: psycopg.Error) -> Exception:
    said = error.diag.message_primary or one_line(error)
    match error:
        case pg.InvalidParameterValue():
            return InvalidPayload(said)
        case pg.InsufficientPrivilege():
            grants = _GRANTS.replace("ROLE", conn.info.user)
            return InstanceForbidden(f"put payloads: {said}; {grants}")
        case pg.UndefinedFunction() | pg.InvalidSchemaName():
            return InvalidInput(
                f"the database {conn.info.dbname!r} of conn is not the one of the instance: {said}"
            )
    if error.sqlstate == "DM002":
        return PayloadExpired(said)
    return InvalidInput(said) if error.sqlstate == "DM003" else error
