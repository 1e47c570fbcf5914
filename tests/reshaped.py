"""A table whose columns change, and a naive model of it: rows as dicts by column id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import dormouse as dm
from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.cut import When
from dormouse.model.schema import Schema

Row = dict[str, Any]


@dataclass(frozen=True)
class Naive:
    """Rows by column id; `names` maps the current column names to ids, in order."""

    names: Mapping[str, int]
    rows: tuple[Mapping[int, Any], ...] = ()
    last_id: int = 0

    @staticmethod
    def of(schema: Schema) -> Naive:
        return Naive({name: number for number, name in enumerate(schema.names, 1)}, (), len(schema.names))

    def shown(self) -> list[Row]:
        """Returns the rows by column name, in the order of the first column."""
        found = [{name: row[number] for name, number in self.names.items()} for row in self.rows]
        return sorted(found, key=lambda row: next(iter(row.values())))

    def with_rows(self, rows: list[Row]) -> Naive:
        added = tuple({self.names[name]: value for name, value in row.items()} for row in rows)
        return replace(self, rows=self.rows + added)

    def without(self, name: str, value: Any) -> Naive:
        """Returns a copy without the rows that have a value in a column."""
        number = self.names[name]
        return replace(self, rows=tuple(row for row in self.rows if row[number] != value))

    def adding(self, name: str, default: Any) -> Naive:
        number = self.last_id + 1
        rows = tuple({**row, number: default} for row in self.rows)
        return Naive({**self.names, name: number}, rows, number)

    def renaming(self, name: str, new_name: str) -> Naive:
        return replace(self, names={new_name if one == name else one: n for one, n in self.names.items()})

    def dropping(self, name: str) -> Naive:
        return replace(self, names={one: n for one, n in self.names.items() if one != name})


def ingest(table: Table, rows: list[Row]) -> None:
    table.ingest(pa.Table.from_pylist(rows, schema=arrow_schema(table.schema)))


def readers(table: Table, instance: Instance, as_of: When | None = None) -> Iterator[tuple[str, list[Row]]]:
    """Yields the name of each reader and its rows, sorted by the first column."""
    name = table.name
    yield "query", table.query(as_of=as_of).read_all().to_pylist()
    statement = f"select * from {name} order by 1"
    yield "sql", instance.sql(statement, as_of=as_of).read_all().to_pylist()
    with instance.duckdb(as_of=as_of) as opened:
        yield "view", opened.execute(statement).to_arrow_table().to_pylist()


def check(table: Table, instance: Instance, model: Naive, as_of: When | None = None) -> None:
    """Asserts that all readers return the model's rows, with its columns in order."""
    schema = table.schema if as_of is None else table.schema_at(as_of)
    assert list(schema.names) == list(model.names)
    for reader, rows in readers(table, instance, as_of):
        assert rows == model.shown(), reader
        assert all(list(row) == list(model.names) for row in rows)


@dataclass
class Shaped:
    """A table and its model, to which the same changes are made."""

    instance: Instance
    table: Table
    model: Naive
    moments: dict[str, Naive] = field(default_factory=dict)
    deleted: dict[int, list[int]] = field(default_factory=dict)
    """The ids of the columns in the condition of each deletion."""

    @staticmethod
    def made(instance: Instance, schema: Schema, **options: Any) -> Shaped:
        table = instance.create_table("t", schema, **options)
        return Shaped(instance, table, Naive.of(schema))

    @staticmethod
    def begun(instance: Instance) -> Shaped:
        """Returns a table with files and a cut of the first schema version."""
        made = Shaped.made(instance, SCHEMA, split_points=[3], properties=dm.TableProperties(**TWO))
        made.ingest(*ROWS)
        made.cut("first")
        return made

    def ingest(self, *rows: Row) -> None:
        ingest(self.table, list(rows))
        self.model = self.model.with_rows(list(rows))

    def add(self, column: dm.Field, default: Any = None) -> None:
        self.table.add_column(column, default)
        self.model = self.model.adding(column.name, default)

    def rename(self, name: str, new_name: str) -> None:
        self.table.rename_column(name, new_name)
        self.model = self.model.renaming(name, new_name)

    def drop(self, name: str) -> None:
        self.table.drop_column(name)
        self.model = self.model.dropping(name)

    def delete(self, name: str, value: Any) -> None:
        report = self.table.delete({name: value})
        self.deleted[report.deletion_id or 0] = [self.model.names[name]]
        self.model = self.model.without(name, value)

    def cut(self, name: str) -> None:
        self.table.history.record_cut(name)
        self.moments[name] = self.model

    def check(self) -> None:
        """Checks the current rows, and the rows as of each cut."""
        check(self.table, self.instance, self.model)
        for name, model in self.moments.items():
            check(self.table, self.instance, model, name)


SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("s", dm.STRING)],
    [dm.Field("t", dm.LONG)],
    [
        dm.Field("i", dm.INT, nullable=True),
        dm.Field("note", dm.STRING, nullable=True),
        dm.Field("f", dm.FLOAT, nullable=True),
        dm.Field("d", dm.DECIMAL(5, 2), nullable=True),
    ],
)
TWO = {"compaction_strategy": "basic", "compaction_batch_files": 2, "gc_delay_seconds": 0}
ROWS = [
    {"k": 1, "s": "a", "t": 0, "i": 1, "note": "x", "f": 0.5, "d": Decimal("1.50")},
    {"k": 2, "s": "b", "t": 0, "i": None, "note": None, "f": None, "d": None},
    {"k": 3, "s": "c", "t": 0, "i": -7, "note": "", "f": float("inf"), "d": Decimal("-999.99")},
]


def add_nullable(to: Shaped) -> None:
    to.add(dm.Field("new", dm.LONG, nullable=True))


def add_default(to: Shaped) -> None:
    to.add(dm.Field("new", dm.STRING, nullable=True), "old\0row")


def add_whole(to: Shaped) -> None:
    to.add(dm.Field("new", dm.DOUBLE), -0.0)


def rename_value(to: Shaped) -> None:
    to.rename("note", "remark")


def rename_keys(to: Shaped) -> None:
    for name in ("k", "s", "t"):
        to.rename(name, f"{name}_{name}")


def swap_names(to: Shaped) -> None:
    """Swaps the names of two columns. A reader that reads older files by name then gives wrong values."""
    to.rename("i", "x")
    to.rename("f", "i")
    to.rename("x", "f")


def widen(to: Shaped) -> None:
    to.table.widen_column("i", dm.LONG)
    to.table.widen_column("f", dm.DOUBLE)
    to.table.widen_column("d", dm.DECIMAL(12, 4))


def drop(to: Shaped) -> None:
    to.drop("note")


def drop_and_add(to: Shaped) -> None:
    """Drops a column and adds another with the same name. The old values must not come back."""
    to.drop("note")
    to.add(dm.Field("note", dm.STRING, nullable=True))


CHANGES = [
    add_nullable, add_default, add_whole, rename_value, rename_keys, swap_names, widen, drop, drop_and_add,
]  # fmt: skip


def newer_rows(to: Shaped) -> None:
    """Adds rows that have a value in each current column."""
    values: dict[str, Any] = {
        "int": 5, "long": 1 << 40, "string": "é", "float": 0.25, "double": 0.1, "decimal": Decimal("9.25"),
    }  # fmt: skip
    fields = to.table.schema.fields
    for key in (-len(to.model.rows), 10 * len(to.model.rows), 10 * len(to.model.rows) + 1):
        to.ingest({field.name: values[field.type.name] for field in fields} | {fields[0].name: key})


def stored(shaped: Shaped) -> list[tuple[str, pa.Schema]]:
    """Returns the referenced files, and their own schemas."""
    files = [one.filename for one in shaped.table.files.all_files(0).files if one.references]
    store = shaped.table.context.objects
    return [(name, pq.read_schema(store.local_path(name))) for name in files]
