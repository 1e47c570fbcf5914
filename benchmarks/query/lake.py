"""The table that is queried: ingested into Dormouse, whose files are an Iceberg table, too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.instance import Instance

KEY_STEP = 8
"""Keys are its multiples: most numbers are no keys, and a range of keys has a known count of rows."""

_TABLE = "orders"
_CUSTOMERS = 50_000
_CATALOG_DATABASE = "iceberg"


@dataclass(frozen=True)
class Lake:
    """Where the table is, and its size: each ingest wrote one file in each leaf."""

    dsn: str = field(repr=False)
    folder: Path
    leaves: int
    ingests: int
    rows: int

    @property
    def files(self) -> int:
        return self.leaves * self.ingests

    @property
    def pattern(self) -> str:
        """The Parquet files of the table."""
        return f"{self.folder}/objects/data/**/*.parquet"

    @contextmanager
    def opened(self) -> Iterator[Instance]:
        import dormouse as dm

        with dm.connect(self.dsn, f"file://{self.folder}/objects") as instance:
            yield instance

    def iceberg(self) -> Any:
        """The catalog of the Iceberg table, in the same PostgreSQL."""
        from psycopg.conninfo import conninfo_to_dict
        from pyiceberg.catalog.sql import SqlCatalog

        server = conninfo_to_dict(self.dsn)
        uri = f"postgresql+psycopg2://{server['user']}@/{_CATALOG_DATABASE}?host={server['host']}&port={server['port']}"
        return SqlCatalog("query", uri=uri, warehouse=f"file://{self.folder}/iceberg")


def make(lake: Lake, tell: Callable[[str], None]) -> None:
    """Ingests the rows, and gives the files to Iceberg."""
    import psycopg

    import dormouse as dm

    schema = dm.Schema(
        [dm.Field("key", dm.LONG)],
        [],
        [
            dm.Field("customer", dm.STRING),
            dm.Field("quantity", dm.LONG),
            dm.Field("price", dm.DOUBLE),
            dm.Field("comment", dm.STRING),
        ],
    )
    per_leaf = lake.rows // lake.leaves * KEY_STEP
    with lake.opened() as instance:
        table = instance.create_table(
            _TABLE, schema, split_points=[per_leaf * number for number in range(1, lake.leaves)]
        )
        for number in range(lake.ingests):
            tell(f"ingest {number + 1} of {lake.ingests}")
            table.ingest(_rows(lake, number))
    tell("giving the files to Iceberg")
    with psycopg.connect(lake.dsn, autocommit=True) as conn:
        conn.execute(f"create database {_CATALOG_DATABASE}")
    files = sorted(str(path) for path in (lake.folder / "objects" / "data").rglob("*.parquet"))
    if len(files) != lake.files:
        raise RuntimeError(f"there are {len(files)} files, not {lake.files}")
    catalog = lake.iceberg()
    catalog.create_namespace("query")
    made = catalog.create_table(f"query.{_TABLE}", schema=_arrow_schema())
    made.add_files([f"file://{path}" for path in files])


def _arrow_schema() -> pa.Schema:
    import pyarrow as pa

    types = {
        "key": pa.int64(),
        "customer": pa.string(),
        "quantity": pa.int64(),
        "price": pa.float64(),
        "comment": pa.string(),
    }
    return pa.schema([pa.field(name, kind, nullable=False) for name, kind in types.items()])


def _rows(lake: Lake, number: int) -> pa.Table:
    """The rows of one ingest: every so many-th key, all over the table; the same every time."""
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(number)
    rows = lake.rows // lake.ingests
    keys = (np.arange(rows) * lake.ingests + number) * KEY_STEP
    random.shuffle(keys)
    words = np.array(["the", "quick", "furious", "deposits", "sleep", "blithely", "above", "ironic"])
    pool = pa.array([" ".join(words[random.integers(0, len(words), 6)]) for _ in range(20_000)])
    customers = pa.array([f"Customer#{i:09d}" for i in range(_CUSTOMERS)])
    columns = [
        pa.array(keys),
        customers.take(pa.array(random.integers(0, len(customers), rows))),
        pa.array(random.integers(1, 51, rows)),
        pa.array(random.integers(90_000, 10_500_000, rows) / 100),
        pool.take(pa.array(random.integers(0, len(pool), rows))),
    ]
    return pa.table(columns, schema=_arrow_schema())
