"""The tables of TPC-H: one sorted file for each in DuckDB, and a table for each in Dormouse."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import dormouse as dm
from benchmarks.harness.command import Tell
from benchmarks.harness.place import Place
from dormouse.api.instance import Instance
from dormouse.demo.datasets import generator

if TYPE_CHECKING:
    import duckdb

TABLES: Mapping[str, tuple[str, ...]] = {
    "region": ("r_regionkey",),
    "nation": ("n_nationkey",),
    "supplier": ("s_suppkey",),
    "customer": ("c_custkey",),
    "part": ("p_partkey",),
    "partsupp": ("ps_partkey", "ps_suppkey"),
    "orders": ("o_orderkey",),
    "lineitem": ("l_orderkey", "l_linenumber"),
}
"""The row keys of each table."""
MAIN, DIVIDED, AGGREGATED = "lineitem", "lineitem_divided", "lineitem_aggregated"
_TYPES = {
    "BIGINT": dm.LONG,
    "INTEGER": dm.INT,
    "VARCHAR": dm.STRING,
    "DOUBLE": dm.DOUBLE,
    "TIMESTAMP WITH TIME ZONE": dm.TIMESTAMP,
}
_INSTEAD = {"DATE": "TIMESTAMPTZ", "DECIMAL(15,2)": "DOUBLE"}
_ROWS_MIN = 100_000
"""The number of rows below which a table has one leaf and one file, as one that is loaded without options."""


@dataclass(frozen=True)
class Lake:
    """The place and size of the tables. A large table has `leaves` leaves, with a file of each ingest."""

    place: Place
    scale: float
    leaves: int
    ingests: int

    def opened(self) -> AbstractContextManager[Instance]:
        return dm.connect(self.place.dsn, self.place.objects)

    def path(self, table: str) -> Path:
        """Returns the path of the one file that DuckDB reads."""
        return self.place.folder / f"{table}.parquet"


def duckdb_connection() -> duckdb.DuckDBPyConnection:
    import duckdb

    made = duckdb.connect(config={"autoinstall_known_extensions": False})
    made.execute("set TimeZone = 'UTC'; set enable_progress_bar = false")
    return made


def make(lake: Lake, tell: Tell) -> None:
    """Generates the rows and loads them into the files and tables."""
    tell("generating rows")
    generated = generate(lake)
    with lake.opened() as instance, duckdb_connection() as rows:
        for name in TABLES:
            tell(f"loading {name}")
            TpchRows(rows, lake, name).convert(generated / f"{name}.parquet").load(instance, name)
        main = TpchRows(rows, lake, MAIN)
        tell("dividing files")
        main.load_divided(instance)
        tell("loading a table with an aggregate")
        main.load(instance, AGGREGATED, aggregate=main.aggregate)


def generate(lake: Lake, tables: Iterable[str] = TABLES) -> Path:
    """Generates the rows of tables as Parquet files; returns their folder."""
    generated = lake.place.folder / "generated"
    command = [str(generator()), "parquet", "--scale-factor", str(lake.scale), "--output-dir", str(generated)]
    subprocess.run([*command, "--tables", ",".join(tables), "--quiet"], check=True)
    return generated


@dataclass(frozen=True)
class TpchRows:
    """The rows of one table. DuckDB writes them to a file, from which they are loaded into Dormouse."""

    rows: duckdb.DuckDBPyConnection
    lake: Lake
    name: str

    @property
    def _file(self) -> str:
        return f"'{self.lake.path(self.name)}'"

    @property
    def _key(self) -> str:
        return TABLES[self.name][0]

    @cached_property
    def _types(self) -> dict[str, str]:
        query = f"select column_name, column_type from (describe from {self._file})"
        return dict(self.rows.execute(query).fetchall())

    def convert(self, generated: Path) -> TpchRows:
        """Writes the file with Dormouse's types, sorted by the row keys, which are the first columns."""
        keys = ", ".join(TABLES[self.name])
        found = self.rows.execute(f"describe from '{generated}'").fetchall()
        types = {name: _INSTEAD.get(kind, kind) for name, kind, *_ in found}
        ordered = sorted(types, key=lambda name: name not in TABLES[self.name])
        columns = ", ".join(f"{name}::{types[name]} as {name}" for name in ordered)
        self.rows.execute(
            f"copy (select {columns} from '{generated}' order by {keys}) to {self._file} (compression zstd)"
        )
        return self

    def load(self, instance: Instance, table: str, **properties: Any) -> None:
        points = self._points() if self._count() >= _ROWS_MIN else []
        made = self._created(instance, table, points, **properties)
        for part in self._parts(self.lake.ingests if points else 1):
            made.ingest(part, engine="local")

    def load_divided(self, instance: Instance) -> None:
        """Loads one leaf, then splits it until there are enough leaves. The splits write no files.

        Raises RuntimeError if not every file has a reference from every leaf.
        """
        half = max(2, self._count() // 2)
        properties = {"split_threshold_rows": half, "split_min_rows": 2}
        made = self._created(instance, DIVIDED, [], **properties)
        for part in self._parts(self.lake.ingests):
            made.ingest(part, engine="local")
        while made.status().leaves < self.lake.leaves:
            made.split()
            half = max(2, half // 2)
            made.set_properties(split_threshold_rows=half)
        status = made.status()
        if status.references < self.lake.leaves * status.files:
            raise RuntimeError(f"{status.files} files have {status.references} references: not divided")

    @property
    def aggregate(self) -> str:
        """The aggregate of the table: `sum` for amounts, `max` for other values."""
        values = [name for name in self._types if name not in TABLES[self.name]]
        functions = {name: "sum" if self._types[name] == "DOUBLE" else "max" for name in values}
        return ", ".join(f"{function}({name})" for name, function in functions.items())

    def _created(self, instance: Instance, table: str, points: list[int], **properties: Any) -> dm.Table:
        fields = [dm.Field(name, _TYPES[kind]) for name, kind in self._types.items()]
        keys = len(TABLES[self.name])
        schema = dm.Schema(fields[:keys], [], fields[keys:])
        return instance.create_table(
            table, schema, split_points=points, properties=dm.TableProperties(**properties)
        )

    def _count(self) -> int:
        return int(self.rows.execute(f"select count(*) from {self._file}").fetchall()[0][0])

    def _points(self) -> list[int]:
        shares = [number / self.lake.leaves for number in range(1, self.lake.leaves)]
        query = f"select quantile_disc({self._key}, {shares}) from {self._file}"
        return list(self.rows.execute(query).fetchall()[0][0])

    def _parts(self, count: int) -> Iterator[Any]:
        """Yields the rows in `count` parts, each with keys from the whole table."""
        for number in range(count):
            where = f"where hash({self._key}) % {count} = {number}"
            yield self.rows.execute(f"from {self._file} {where}").to_arrow_reader()
