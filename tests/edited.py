"""Tables whose edits are compared with DuckDB's own UPDATE and MERGE INTO on the same rows."""

from __future__ import annotations

import struct
from collections import Counter
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from math import inf, nan
from typing import Any

import duckdb
import pyarrow as pa

import dormouse as dm
from tests.support.api import Instance, Table
from tests.support.writing import Edit

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG), dm.Field("c", dm.STRING)],
    values=[
        dm.Field("i", dm.INT, nullable=True),
        dm.Field("d", dm.DOUBLE, nullable=True),
        dm.Field("m", dm.DECIMAL(10, 2), nullable=True),
        dm.Field("s", dm.STRING, nullable=True),
        dm.Field("ts", dm.TIMESTAMP, nullable=True),
        dm.Field("day", dm.DATE, nullable=True),
        dm.Field("b", dm.BYTES, nullable=True),
        dm.Field("l", dm.LIST(dm.INT), nullable=True),
        dm.Field("st", dm.STRUCT([dm.Field("a", dm.LONG, nullable=True)]), nullable=True),
        dm.Field("f", dm.BOOLEAN, nullable=True),
    ],
)
"""A schema with a column of most types. `k` and `c` are the row keys."""
COLUMNS = ", ".join(SCHEMA.names)
NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def row(k: int, c: str = "a", **values: Any) -> dict[str, Any]:
    """Returns a row with values that depend on its key, except for those given."""
    made = {
        "i": k % 7 if k % 5 else None,
        "d": (nan, -0.0, 0.0, inf, None, 1.5)[k % 6],
        "m": Decimal(k).scaleb(-2),
        "s": f"row {k}" if k % 3 else None,
        "ts": NOON + timedelta(hours=k),
        "day": date(2026, 1, 1) + timedelta(days=k),
        "b": bytes([k % 256, 0]),
        "l": [k, None] if k % 2 else None,
        "st": {"a": k} if k % 4 else {"a": None},
        "f": (True, False, None)[k % 3],
    }
    return {"k": k, "c": c, **made, **values}


def table_of(rows: list[dict[str, Any]], schema: dm.Schema = SCHEMA) -> pa.Table:
    from tests.support.reading import arrow_schema

    return pa.Table.from_pylist(rows, arrow_schema(schema))


def _exact(value: Any) -> Any:
    """Returns a value that equals another only if both have the same bits, except that each NaN is one."""
    if isinstance(value, float):
        return "nan" if value != value else struct.pack(">d", value)
    if isinstance(value, list):
        return tuple(map(_exact, value))
    if isinstance(value, dict):
        return tuple((name, _exact(part)) for name, part in value.items())
    return value


def counted(rows: pa.Table) -> Counter[Any]:
    """Returns how often each row occurs."""
    return Counter(tuple(map(_exact, one.values())) for one in rows.to_pylist())


class Judged:
    """A table, and the same rows in DuckDB, which gets the same edits."""

    def __init__(
        self,
        instance: Instance,
        rows: list[dict[str, Any]],
        layout: str = "file_table",
        keep: str = "every_row",
        name: str = "t",
        **properties: Any,
    ) -> None:
        given = dm.TableProperties(keep=keep, **properties)  # type: ignore[arg-type]
        self.instance = instance
        self.table: Table = instance.create_table(
            name, SCHEMA, layout=layout, properties=given, split_points=[50]
        )
        self.table.ingest(table_of(rows[::2]), engine="local")
        self.table.ingest(table_of(rows[1::2]), engine="local")
        self.judge = duckdb.connect()
        self.judge.execute("SET TimeZone = 'UTC'")
        self.judge.register("given", table_of(rows))
        self.judge.execute("CREATE TABLE t AS FROM given")

    @property
    def sessions(self) -> Any:
        return self.instance._tables.sessions()

    def edit(self, change: Any, statement: str, **sources: pa.Table) -> dict[str, int]:
        """Makes a change, and runs the statement in DuckDB; returns the counts, also those of a dry run."""
        context = self.table.context
        dry = dict(change.dry_run(context))
        with Edit(context.supplier, None) as edit:
            edit.add(context, change)
            assert edit.commit()
        assert edit.counts == dry
        for name, rows in sources.items():
            self.judge.register(name, rows)
        self.judge.execute(statement)
        self.check(statement)
        return edit.counts

    def check(self, why: str = "") -> None:
        columns = ", ".join(self.table.schema.names)
        expected = counted(self.judge.execute(f"SELECT {columns} FROM t").to_arrow_table())
        assert counted(self.table.query().read_all()) == expected, why
        assert (
            counted(self.instance.sql(f"SELECT {columns} FROM {self.table.name}").read_all()) == expected
        ), why
