"""The catalog: the tables of an instance, by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import psycopg
from psycopg import errors as pg
from psycopg.types.json import Jsonb

from dormouse.errors import TableAlreadyExists, TableBusy, TableNotFound
from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.table import (
    TableProperties,
    TableRecord,
    check_table_name,
    is_edited,
    named_versions,
    table_of,
)
from dormouse.model.text import did_you_mean
from dormouse.model.types import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_alone, run_lookup, run_transaction
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.layout import composed, layout
from dormouse.state.files.layout import layout as known_layout
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.partitions import PartitionStore

# Conversion of a table to another layout: the references stay, only the tracking of their files changes.


def convert(conn: psycopg.Connection[Any], table: TableRecord, target_name: str) -> None:
    """Converts a table to another layout, in the transaction of the caller, which has locked the table's row.

    Waits for the transactions that use the table. Files keep the times at which they were added and at which
    they lost their last reference. Raises UndefinedTable if the table no longer has the layout in `table`.
    """
    source, target, table_id = layout(table.layout), layout(target_name), table.table_id
    values = {"table_id": table_id, "salt_buckets": table.properties.salt_buckets}
    conn.execute(source.on("lock", table_id))
    # stamp unreferenced files first: the new layout takes over their times
    conn.execute(source.on("stamp_unreferenced", table_id), values)
    old = source.names(table_id)
    names = {**old, **target.tables(table_id), "old_reference": old["file_reference"]}
    conn.execute(composed(_QUERIES["rename_references"], names))
    made = {**names, "unreferenced": target.names(table_id)["unreferenced"]}
    conn.execute(composed(target.own["create_files"], made))
    adopt = _QUERIES["adopt_files"].including(file_facts=source.own["file_facts"], adopt=target.own["adopt"])
    conn.execute(composed(adopt, names), values)
    conn.execute(composed(target.own["attach_files"].literally(table_id=table_id), names))
    conn.execute(composed(source.own["drop_files"], names))


_QUERIES = load(__file__, "catalog")


class Catalog:
    """A catalog that creates, finds, renames and drops tables, each in one transaction."""

    def __init__(self, supplier: Supplier, attempts: WriteAttempts) -> None:
        self._supplier = supplier
        self._attempts = attempts

    def create(
        self,
        name: str,
        schema: Schema,
        properties: TableProperties,
        layout: str = "file_table",
        split_points: Sequence[KeyValue] = (),
        *,
        on_created: Callable[[psycopg.Connection[Any], TableRecord], object] = lambda conn, made: None,
    ) -> TableRecord:
        """Creates a table and its partitions, and returns its record.

        Calls `on_created` inside the same transaction. Raises `TableAlreadyExists`, `InvalidName` or
        `InvalidRange`.
        """
        table = TableRecord(0, check_table_name(name), schema, properties, known_layout(layout).name)

        def work(conn: psycopg.Connection[Any]) -> TableRecord:
            row = conn.execute(_QUERIES["add"].on(), _columns(table)).fetchone()
            if row is None:
                raise TableAlreadyExists(f"table {name!r} exists already", table=name)
            _check_alone(conn, name)
            made = replace(table, table_id=row[0], created_at=row[1], uuid=row[2].hex)
            FileReferenceStore(self._supplier, made).create(conn)
            PartitionStore(self._supplier, made).create(conn, split_points)
            on_created(conn, made)
            return made

        return run_transaction(self._supplier, work, operation="create table")

    def get(self, name: str) -> TableRecord:
        """Returns the table of this name, or raises `TableNotFound`."""
        rows = self._rows("table", name=name) if is_text(name) else []
        if not rows:
            hint = did_you_mean(name, self.names())
            raise TableNotFound(f"table {name!r} does not exist{hint}", table=name)
        return table_of(rows[0])

    def shown(self, name: str) -> tuple[TableRecord, bool]:
        """Returns the table that a name shows, and True if the name shows all versions of a row table's rows.

        Such a name is the name of the row table with a suffix. Raises `TableNotFound`.
        """
        row_table = named_versions(name)
        if row_table is None:
            return self.get(name), False
        rows = self._rows("table", name=row_table) if is_text(row_table) else []
        if not rows or not is_edited(table_of(rows[0]).properties):
            raise TableNotFound(
                f"table {name!r} does not exist: there is no row table {row_table!r}", table=name
            )
        return table_of(rows[0]), True

    def tables(self) -> list[TableRecord]:
        """Returns all tables, sorted by name."""
        return [table_of(row) for row in self._rows("tables")]

    def tables_like(self, names: Iterable[str]) -> list[TableRecord]:
        """Returns the tables with one of the names, ignoring case, sorted by name."""
        lower = [name.lower() for name in names if is_text(name)]
        return [table_of(row) for row in self._rows("tables_like", names=lower)] if lower else []

    def names(self) -> list[str]:
        """Returns the names of all tables."""
        return [name for (name,) in self._rows("names")]

    def rename(self, name: str, new_name: str) -> None:
        """Renames a table.

        Raises `TableNotFound`, or `TableAlreadyExists` when the new name is taken.
        """
        values = {"name": name, "new_name": check_table_name(new_name)}

        def work(conn: psycopg.Connection[Any]) -> bool:
            renamed = conn.execute(_QUERIES["rename"].on(), values).fetchone()
            _check_alone(conn, new_name)
            return renamed is not None

        try:
            renamed = is_text(name) and run_transaction(self._supplier, work, operation="rename")
        except pg.UniqueViolation:
            raise TableAlreadyExists(f"table {new_name!r} exists already", table=new_name) from None
        if not renamed:
            raise TableNotFound(f"table {name!r} does not exist", table=name)

    def change_properties(
        self,
        table: TableRecord,
        change: Callable[[TableProperties], TableProperties],
        check: Callable[[TableRecord], object] = lambda changed: None,
    ) -> TableRecord:
        """Applies `change` to a table's current properties, and returns the table with the new ones.

        Running work continues with the old properties. `check` may raise to refuse the changed table; the
        table's columns cannot change while it runs. The table is found by its id, so a renamed table is
        found, too. Raises `TableNotFound` when it was dropped.
        """

        def work(conn: psycopg.Connection[Any]) -> TableRecord:
            now = self._held(conn, table)
            changed = replace(now, properties=change(now.properties))
            check(changed)
            values = {**_columns(changed), "table_id": now.table_id}
            conn.execute(_QUERIES["set_properties"].on(), values)
            return changed

        return run_transaction(self._supplier, work, operation="set_properties")

    def convert_layout(self, table: TableRecord, layout: str) -> TableRecord:
        """Converts a table to another layout; does nothing when it already has that layout.

        Waits until no other transaction uses the table. Other transactions can use it during the wait. Other
        processes notice the conversion and use the new layout. Raises `InvalidInput` for an unknown layout,
        `TableNotFound` when the table was dropped, and `TableBusy` when the wait takes too long.
        """
        target = known_layout(layout).name

        def work(conn: psycopg.Connection[Any]) -> TableRecord:
            now = self._held(conn, table)
            if now.layout != target:
                convert(conn, now, target)
                conn.execute(_QUERIES["set_layout"].on(), {"table_id": now.table_id, "layout": target})
            return replace(now, layout=target)

        return run_alone(self._supplier, work, operation="convert layout")

    def drop(self, name: str) -> TableRecord:
        """Drops a table, and leaves its objects to `WriteAttempts.collect_abandoned`.

        Waits until no other transaction uses the table. Other transactions can use it during the wait. Raises
        `TableNotFound`, and `TableBusy` when the wait takes too long.
        """
        return self._drop(self.get(name))

    def drop_unused(self, record: TableRecord) -> TableRecord:
        """Drops a table that never had rows, even if it was renamed; raises `TableBusy` if it had rows.

        Like `drop`, it waits until no other transaction uses the table.
        """
        return self._drop(record, only_unused=True)

    def _drop(self, record: TableRecord, *, only_unused: bool = False) -> TableRecord:
        def work(conn: psycopg.Connection[Any]) -> TableRecord:
            table = self._held(conn, record)
            conn.execute(known_layout(table.layout).on("lock", table.table_id))
            if only_unused and not FileReferenceStore(self._supplier, table).is_unused(conn):
                raise TableBusy(f"table {table.name!r} has been used since it was made", table=table.name)
            conn.execute(_QUERIES["remove"].on(), {"table_id": table.table_id})
            self._attempts.abandon_table(conn, table)
            FileReferenceStore(self._supplier, table).drop(conn)
            return table

        return run_alone(self._supplier, work, operation="drop table")

    def instance_id(self) -> str:
        """Returns the id that the database and its object store share."""
        return str(self._rows("instance_id")[0][0])

    @staticmethod
    def _held(conn: psycopg.Connection[Any], table: TableRecord) -> TableRecord:
        """Locks the table's row until the transaction ends, and returns the table as it is now.

        Raises `TableNotFound` when it was dropped.
        """
        row = conn.execute(_QUERIES["table_to_change"].on(), {"table_id": table.table_id}).fetchone()
        if row is None:
            raise TableNotFound.gone(table.name)
        return table_of(row)

    def _rows(self, query: str, **values: Any) -> list[Any]:
        return run_lookup(self._supplier, rows_of(_QUERIES[query], values), operation=f"look up {query}")


def _check_alone(conn: psycopg.Connection[Any], name: str) -> None:
    """Raises `TableAlreadyExists` when another table's name differs only in case, which SQL ignores."""
    row = conn.execute(_QUERIES["alike"].on(), {"name": name}).fetchone()
    if row is not None:
        raise TableAlreadyExists(
            f"table {row[0]!r} exists already, and {name!r} differs from it only in upper and lower case",
            table=name,
        )


def _columns(table: TableRecord) -> dict[str, Any]:
    return {
        "name": table.name,
        "schema": Jsonb(table.schema.to_record()),
        # defaults are left out, so that a later release can change them
        "properties": Jsonb(table.properties.model_dump(exclude_defaults=True)),
        "layout": table.layout,
    }
