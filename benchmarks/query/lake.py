"""The queried table: Dormouse ingests it, and its files are also added to an Iceberg table."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dormouse as dm
from benchmarks.harness.command import Tell
from benchmarks.harness.place import Place
from dormouse.api.instance import Instance

if TYPE_CHECKING:
    import pyarrow as pa

_TEXTS = {"customer": 50_000, "clerk": 1_000, "status": 3, "priority": 5, "mode": 7, "comment": 20_000}
"""The text columns, with the number of distinct values of each."""
_NUMBERS = {"quantity": 51, "part": 200_000, "supplier": 10_000, "line": 8, "tax": 9}
_AMOUNTS = ("price", "discount", "charge")
SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG)],
    [],
    [
        *(dm.Field(name, dm.STRING) for name in _TEXTS),
        *(dm.Field(name, dm.LONG) for name in _NUMBERS),
        *(dm.Field(name, dm.DOUBLE) for name in _AMOUNTS),
        dm.Field("shipped", dm.TIMESTAMP),
    ],
)
KEY_STEP = 8
"""The distance between keys, so that most numbers are not keys, and the rows of a range of keys are known."""

_TABLE = "orders"
CATALOG = "iceberg"


@dataclass(frozen=True)
class Lake:
    """The place and the size of the table. Each ingest writes one file for each leaf."""

    place: Place
    leaves: int
    ingests: int
    rows: int

    @property
    def files(self) -> int:
        return self.leaves * self.ingests

    @property
    def pattern(self) -> str:
        """The glob pattern of the table's Parquet files."""
        return f"{self.place.folder}/objects/data/**/*.parquet"

    def opened(self) -> AbstractContextManager[Instance]:
        return dm.connect(self.place.dsn, self.place.objects)


def make(lake: Lake, tell: Tell) -> None:
    """Ingests the rows, and adds the files to an Iceberg table."""
    from dormouse.data.arrow_schema import arrow_schema

    per_leaf = lake.rows // lake.leaves * KEY_STEP
    with lake.opened() as instance:
        table = instance.create_table(
            _TABLE, SCHEMA, split_points=[per_leaf * number for number in range(1, lake.leaves)]
        )
        for number in range(lake.ingests):
            tell(f"ingest {number + 1} of {lake.ingests}")
            table.ingest(rows_of(lake.rows, lake.ingests, number), engine="local")
    tell("adding the files to Iceberg")
    lake.place.create_database(CATALOG)
    files = sorted(str(path) for path in (lake.place.folder / "objects" / "data").rglob("*.parquet"))
    if len(files) != lake.files:
        raise RuntimeError(f"there are {len(files)} files, not {lake.files}")
    catalog = lake.place.iceberg(CATALOG)
    catalog.create_namespace("query")
    made = catalog.create_table(f"query.{_TABLE}", schema=arrow_schema(SCHEMA))
    made.add_files([f"file://{path}" for path in files])


def rows_of(count: int, ingests: int, number: int) -> pa.Table:
    """Returns the rows of one ingest, with keys spread over the whole table. Every call returns the same."""
    import numpy as np
    import pyarrow as pa

    from dormouse.data.arrow_schema import arrow_schema

    random = np.random.default_rng(number)
    rows = count // ingests
    keys = (np.arange(rows) * ingests + number) * KEY_STEP
    random.shuffle(keys)
    words = np.array(["the", "quick", "furious", "deposits", "sleep", "blithely", "above", "ironic"])

    def texts(name: str, kinds: int) -> pa.Array:
        length = 6 if name == "comment" else 1
        pool = pa.array(
            [f"{' '.join(words[random.integers(0, len(words), length)])}#{n}" for n in range(kinds)]
        )
        return pool.take(pa.array(random.integers(0, kinds, rows)))

    columns = [
        pa.array(keys),
        *(texts(name, kinds) for name, kinds in _TEXTS.items()),
        *(pa.array(random.integers(0, kinds, rows)) for kinds in _NUMBERS.values()),
        *(pa.array(random.integers(90_000, 10_500_000, rows) / 100) for _ in _AMOUNTS),
        pa.array(random.integers(694_224_000, 912_384_000, rows) * 1_000_000).cast(pa.timestamp("us", "UTC")),
    ]
    return pa.table(columns, schema=arrow_schema(SCHEMA))
