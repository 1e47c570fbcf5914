"""The table that is queried: ingested into Dormouse, whose files are an Iceberg table, too."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dormouse as dm
from benchmarks.harness.command import Tell
from benchmarks.harness.place import Place
from dormouse.instance import Instance

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG)],
    [],
    [
        dm.Field("customer", dm.STRING),
        dm.Field("quantity", dm.LONG),
        dm.Field("price", dm.DOUBLE),
        dm.Field("comment", dm.STRING),
    ],
)
KEY_STEP = 8
"""Keys are its multiples: most numbers are no keys, and a range of keys has a known count of rows."""

_TABLE = "orders"
_CUSTOMERS = 50_000
CATALOG = "iceberg"


@dataclass(frozen=True)
class Lake:
    """Where the table is, and its size: each ingest wrote one file in each leaf."""

    place: Place
    leaves: int
    ingests: int
    rows: int

    @property
    def files(self) -> int:
        return self.leaves * self.ingests

    @property
    def pattern(self) -> str:
        """The Parquet files of the table."""
        return f"{self.place.folder}/objects/data/**/*.parquet"

    def opened(self) -> AbstractContextManager[Instance]:
        return dm.connect(self.place.dsn, self.place.objects)


def make(lake: Lake, tell: Tell) -> None:
    """Ingests the rows, and gives the files to Iceberg."""
    from dormouse.data.arrow_schema import arrow_schema

    per_leaf = lake.rows // lake.leaves * KEY_STEP
    with lake.opened() as instance:
        table = instance.create_table(
            _TABLE, SCHEMA, split_points=[per_leaf * number for number in range(1, lake.leaves)]
        )
        for number in range(lake.ingests):
            tell(f"ingest {number + 1} of {lake.ingests}")
            table.ingest(_rows(lake, number))
    tell("giving the files to Iceberg")
    lake.place.create_database(CATALOG)
    files = sorted(str(path) for path in (lake.place.folder / "objects" / "data").rglob("*.parquet"))
    if len(files) != lake.files:
        raise RuntimeError(f"there are {len(files)} files, not {lake.files}")
    catalog = lake.place.iceberg(CATALOG)
    catalog.create_namespace("query")
    made = catalog.create_table(f"query.{_TABLE}", schema=arrow_schema(SCHEMA))
    made.add_files([f"file://{path}" for path in files])


def _rows(lake: Lake, number: int) -> pa.Table:
    """The rows of one ingest: every so many-th key, all over the table; the same every time."""
    import numpy as np
    import pyarrow as pa

    from dormouse.data.arrow_schema import arrow_schema

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
    return pa.table(columns, schema=arrow_schema(SCHEMA))
