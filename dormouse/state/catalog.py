"""The tables of an instance."""

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

# Conversion of a table to another layout: the references stay, their files are tracked in another way.


def convert(conn: psycopg.Connection[Any], table: TableRecord, target_name: str) -> None:
    """Part of a transaction, which holds the table's row: waits for those that use the table; converts it.

    What nothing refers to keeps its time; what was added keeps its own. Raises UndefinedTable when the table
    has not the layout of the record.
    """
    source, target, table_id = layout(table.layout), layout(target_name), table.table_id
    values = {"table_id": table_id, "salt_buckets": table.properties.salt_buckets}
    conn.execute(source.on("lock", table_id))
    # what is unreferenced is known by its time from here on
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
    """Creates, finds, renames and drops tables; each in one transaction."""

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
        with_it: Callable[[psycopg.Connection[Any], TableRecord], object] = lambda conn, made: None,
    ) -> TableRecord:
        """Makes a table with its partitions; `TableAlreadyExists`, `InvalidName` or `InvalidRange`.

        What is done `with_it` is part of the transaction.
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
            with_it(conn, made)
            return made

        return run_transaction(self._supplier, work, operation="create table")

    def get(self, name: str) -> TableRecord:
        """The table of this name; `TableNotFound`."""
        rows = self._rows("table", name=name) if is_text(name) else []
        if not rows:
            hint = did_you_mean(name, self.names())
            raise TableNotFound(f"table {name!r} does not exist{hint}", table=name)
        return table_of(rows[0])

    def shown(self, name: str) -> tuple[TableRecord, bool]:
        """Returns the table that a name means, and whether it means every version of its rows.

        Raises `TableNotFound`.
        """
        of = named_versions(name)
        if of is None:
            return self.get(name), False
        found = self._rows("table", name=of) if is_text(of) else []
        if not found or not is_edited(table_of(found[0]).properties):
            raise TableNotFound(f"table {name!r} does not exist: there is no row table {of!r}", table=name)
        return table_of(found[0]), True

    def tables(self) -> list[TableRecord]:
        """All tables, by name."""
        return [table_of(row) for row in self._rows("tables")]

    def tables_like(self, names: Iterable[str]) -> list[TableRecord]:
        """The tables that have one of the names, in upper or lower case, by name."""
        lower = [name.lower() for name in names if is_text(name)]
        return [table_of(row) for row in self._rows("tables_like", names=lower)] if lower else []

    def names(self) -> list[str]:
        """The names of all tables."""
        return [name for (name,) in self._rows("names")]

    def rename(self, name: str, new_name: str) -> None:
        """`TableNotFound`, or `TableAlreadyExists` when the new name is taken."""
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
        """Changes a table's properties from what they are now; what runs already goes on with the old ones.

        `check` raises for what does not fit the table, whose columns nobody changes meanwhile.

        The table is the one of the record, whatever its name is now; `TableNotFound` when it was dropped.
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
        """Changes how a table's files are tracked; changes nothing when they are tracked so already.

        Waits until no other transaction uses the table, and holds up none meanwhile; others follow. Raises
        `InvalidInput` for an unknown layout, `TableNotFound` when the table was dropped, `TableBusy`.
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
        """Drops a table; its objects are left to `WriteAttempts.collect_abandoned`.

        Waits until no other transaction uses it, and holds up none meanwhile. Raises `TableNotFound` and
        `TableBusy`.
        """
        return self._drop(self.get(name))

    def drop_unused(self, made: TableRecord) -> TableRecord:
        """As `drop`, whatever the table's name is now, of one that never had rows; `TableBusy` for others."""
        return self._drop(made, only_unused=True)

    def _drop(self, found: TableRecord, *, only_unused: bool = False) -> TableRecord:
        def work(conn: psycopg.Connection[Any]) -> TableRecord:
            table = self._held(conn, found)
            conn.execute(known_layout(table.layout).on("lock", table.table_id))
            if only_unused and not FileReferenceStore(self._supplier, table).is_unused(conn):
                raise TableBusy(f"table {table.name!r} has been used since it was made", table=table.name)
            conn.execute(_QUERIES["remove"].on(), {"table_id": table.table_id})
            self._attempts.abandon_table(conn, table)
            FileReferenceStore(self._supplier, table).drop(conn)
            return table

        return run_alone(self._supplier, work, operation="drop table")

    def instance_id(self) -> str:
        """The id that database and object store share."""
        return str(self._rows("instance_id")[0][0])

    @staticmethod
    def _held(conn: psycopg.Connection[Any], table: TableRecord) -> TableRecord:
        """The table as it is now, until the transaction's end; `TableNotFound` when it was dropped."""
        row = conn.execute(_QUERIES["table_to_change"].on(), {"table_id": table.table_id}).fetchone()
        if row is None:
            raise TableNotFound.gone(table.name)
        return table_of(row)

    def _rows(self, query: str, **values: Any) -> list[Any]:
        return run_lookup(self._supplier, rows_of(_QUERIES[query], values), operation=f"look up {query}")


def _check_alone(conn: psycopg.Connection[Any], name: str) -> None:
    """`TableAlreadyExists` for a name that SQL could not tell from another table's."""
    row = conn.execute(_QUERIES["alike"].on(), {"name": name}).fetchone()
    if row is not None:
        raise TableAlreadyExists(
            f"table {name!r} could not be told from {row[0]!r}, which differs in upper and lower case only",
            table=name,
        )


def _columns(table: TableRecord) -> dict[str, Any]:
    return {
        "name": table.name,
        "schema": Jsonb(table.schema.to_record()),
        # defaults are left out, so that a later release may better them
        "properties": Jsonb(table.properties.model_dump(exclude_defaults=True)),
        "layout": table.layout,
    }
