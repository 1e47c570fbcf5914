"""The versions of one table's columns, as the database stores them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple

import psycopg
from psycopg.types.json import Jsonb

from dormouse.errors import TableNotFound
from dormouse.model.reshaping import property_changes, with_properties
from dormouse.model.schema import Schema, earlier_name
from dormouse.model.table import TableProperties, TableRecord, table_of
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_alone, run_lookup, run_transaction

_QUERIES = load(__package__ or "", "shapes")


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """A change of a table's columns.

    `version` is the version of the schema that it made. `change` describes it in words.
    """

    version: int
    change: str
    changed_at: datetime


class Then(NamedTuple):
    """A table as it was in a snapshot, with two current facts.

    `version` is the newest version of the table's schema. `properties` are its current properties, as JSON.
    """

    table: TableRecord
    version: int
    properties: str


class NextShape(NamedTuple):
    """A table as a change makes it, with a description of the change in words."""

    table: TableRecord
    change: str


Change = Callable[[TableRecord, psycopg.Connection[Any]], NextShape]


class Shapes:
    """The versions of a table's schema."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table
        self._key = {"table_id": table.table_id}

    def now(self) -> TableRecord | None:
        """Returns the table as it is now, or None when it was dropped."""
        rows = self._rows("now")
        return table_of(rows[0]) if rows else None

    def of(self, conn: psycopg.Connection[Any]) -> TableRecord:
        """Returns the table as a transaction sees it; raises `TableNotFound`."""
        return self._held("now", conn)

    def at(self, snapshot: str) -> Then:
        """Returns the table with the columns that it had in a snapshot, and with its current properties.

        The properties in `table` name the columns as the snapshot does. Raises `TableNotFound`.
        """
        rows = self._rows("then", snapshot=snapshot)
        if not rows:
            raise TableNotFound.gone(self._table.name)
        then, now = map(Schema.from_record, rows[0][:2])
        properties = TableProperties(**rows[0][2])
        called = {name: other for name in now.names if (other := earlier_name(now, then, name))}
        properties = with_properties(properties, property_changes(properties, called.get))
        table = replace(self._table, schema=then, properties=properties)
        return Then(table, now.version, json.dumps(rows[0][2]))

    def changes(self) -> list[SchemaChange]:
        """Returns the changes of the table's columns, in order."""
        return [SchemaChange(*row) for row in self._rows("changes")]

    def change(self, change: Change) -> TableRecord:
        """Applies a change to the current columns of the table, in one transaction; returns the new table.

        Raises `TableNotFound`, `TableBusy` or the errors of `change`, and then changes nothing.
        """

        operation = f"change the columns of table {self._table.name!r}"
        return run_alone(self._supplier, lambda conn: self.change_in(conn, change), operation=operation)

    def change_in(self, conn: psycopg.Connection[Any], change: Change) -> TableRecord:
        """Applies a change to the current columns, in the caller's transaction; returns the new table."""
        now = self._held("held", conn)
        made, description = change(now, conn)
        values = {
            "schema": Jsonb(made.schema.to_record()),
            "properties": Jsonb(made.properties.model_dump(exclude_defaults=True)),
            "version": made.schema.version,
            "was": Jsonb(now.schema.to_record()),
            "change": description,
        }
        conn.execute(_QUERIES["change"].on(), {**self._key, **values})
        return made

    def try_change(self, change: Change) -> None:
        """Raises the error that a change would raise now, if any; changes nothing."""

        def work(conn: psycopg.Connection[Any]) -> None:
            change(self.of(conn), conn)

        run_transaction(self._supplier, work, read_only=True, operation="validate a schema change")

    def _held(self, query: str, conn: psycopg.Connection[Any]) -> TableRecord:
        row = conn.execute(_QUERIES[query].on(), self._key).fetchone()
        if row is None:
            raise TableNotFound.gone(self._table.name)
        return table_of(row)

    def pending_conditions(self, conn: psycopg.Connection[Any]) -> list[tuple[int, str]]:
        """Returns the numbers and conditions of the pending deletions, which readers apply."""
        return conn.execute(_QUERIES["conditions"].on(), self._key).fetchall()

    def _rows(self, query: str, **values: Any) -> list[Any]:
        work = rows_of(_QUERIES[query], {**self._key, **values})
        return run_lookup(self._supplier, work, operation="look up a table's columns")
