"""A table whose files a test writes directly, and the rows that its queries should return."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.model.region import KeyValue, encode_key
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, STRING, TIMESTAMP
from dormouse.objects import ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.reading.planner import PlanSummary
from dormouse.reading.sql import statements
from dormouse.reading.sql.engine import Engine, Sessions
from dormouse.reading.sql.named import Named
from dormouse.state.catalog import Catalog
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempts

SCHEMA = Schema(
    [Field("Name", STRING), Field("number", LONG)],
    [Field("time", INT)],
    [
        Field("code", BYTES),
        Field("score", DOUBLE, nullable=True),
        Field("good", BOOLEAN),
        Field("at", TIMESTAMP, nullable=True),
        Field("tags", LIST(STRING), nullable=True),
    ],
)
NOON = datetime(2024, 1, 1, 12, tzinfo=UTC)
COUNTS = Schema(
    [Field("word", STRING)],
    [Field("seen", LONG)],
    [Field("n", LONG), Field("low", DOUBLE, nullable=True), Field("last", STRING)],
)
_names = count()


class Lake:
    """One table in a folder, or in another object store."""

    row_group_rows = 100

    def __init__(
        self,
        dsn: str,
        supplier: ConnectionSupplier,
        folder: Path,
        schema: Schema,
        *,
        split_points: Sequence[KeyValue] = (),
        name: str = "t",
        objects: ObjectStore | None = None,
        **properties: object,
    ) -> None:
        objects = objects or open_store(folder / "objects")
        catalog = Catalog(supplier, WriteAttempts(supplier, objects))
        record = catalog.create(name, schema, TableProperties(**properties), split_points=split_points)
        self.context = TableContext(dsn, supplier, objects, record)
        self.schema = schema
        self.all = arrow_schema(schema).empty_table()

    def table(self, rows: Sequence[dict[str, object]]) -> pa.Table:
        """Returns rows as an Arrow table, sorted like a file of the table."""
        found = pa.Table.from_pylist(list(rows), schema=arrow_schema(self.schema))
        return found.sort_by([(name, "ascending") for name in self.schema.key_names])

    def add(self, rows: Sequence[dict[str, object]] | pa.Table, *, one_file: bool = False) -> list[str]:
        """Adds rows as one file for each leaf that has some, or as one file with a reference from
        each leaf.
        """
        table = rows if isinstance(rows, pa.Table) else self.table(rows)
        self.all = pa.concat_tables([self.all, table])
        lookup = LeafLookup(self.context.partitions.tree())
        positions = lookup.indexes(table)
        parts = [
            (str(lookup.leaf_ids[n]), table.filter(pa.compute.equal(positions, n)))
            for n in sorted(set(positions.to_pylist()))
        ]
        if one_file:
            return [self.add_file(table, {p: part.num_rows for p, part in parts}, only=False)]
        return [self.add_file(part, {p: part.num_rows}) for p, part in parts]

    def add_file(self, table: pa.Table, partitions: dict[str, int], *, only: bool = True) -> str:
        """Writes a sorted file and adds it with its references."""
        file = self.written(table, partitions, only=only)
        self.context.store.add_files_with_references([file])
        return file.filename

    def written(
        self, table: pa.Table, partitions: dict[str, int], *, only: bool = True
    ) -> FileWithReferences:
        """Writes a sorted file and returns it, without adding it to the table."""
        filename = f"{self.context.table.object_prefix}{next(_names)}.parquet"
        with self.context.objects.staged(filename) as path:
            pq.write_table(
                table,
                path,
                row_group_size=self.row_group_rows,
                write_page_index=True,
                write_batch_size=100,
                data_page_size=500,
                use_dictionary=False,
            )
        references = [
            FileReference(
                filename=filename, partition_id=p, row_count=n, only_contains_data_for_this_partition=only
            )
            for p, n in partitions.items()
        ]
        keys = [self._key(row) for row in table.select(self.schema.row_key_names).to_pylist()]
        return FileWithReferences(
            filename=filename,
            references=tuple(references),
            byte_count=self.context.objects.size(filename),
            row_count=table.num_rows,
            min_key=min(keys, default=None),
            max_key=max(keys, default=None),
        )

    def expect(self, statement: str, values: Sequence[Any] = ()) -> list[tuple[object, ...]]:
        """Returns DuckDB's answer over all added rows, as the table `t`."""
        with duckdb.connect() as conn:
            # a table of DuckDB: on Arrow data, pyarrow would evaluate conditions, with NaN as in IEEE 754
            conn.register("every row", self.all)
            conn.execute('create table t as from "every row"')
            return conn.execute(statement, list(values)).fetchall()

    def _key(self, row: dict[str, KeyValue]) -> bytes:
        return encode_key(self.schema.row_keys, [row[name] for name in self.schema.row_key_names])


def named(contexts: Mapping[str, TableContext]) -> Named:
    """Returns a function that finds tables by the names in statements."""

    def like(names: Iterable[str]) -> dict[str, TableContext]:
        lower = {name.lower() for name in names}
        return {name: context for name, context in contexts.items() if name.lower() in lower}

    return Named(like, lambda: contexts, lambda: list(contexts))


_engines: dict[str, Engine] = {}


def engine(objects: ObjectStore) -> Engine:
    """Returns the query engine of a store; each store has one."""
    return _engines.setdefault(objects.url, Engine(objects, cursors_kept=2))


def sql(
    contexts: Mapping[str, TableContext], statement: str, *given: Any, **options: Any
) -> pa.RecordBatchReader:
    """Returns the answer to a statement over tables of one instance."""
    return statements.sql(_sessions(contexts), named(contexts), statement, *given, **options)


def explain_sql(contexts: Mapping[str, TableContext], statement: str, *given: Any) -> dict[str, PlanSummary]:
    return statements.explain_sql(_sessions(contexts), named(contexts), statement, *given)


def _sessions(contexts: Mapping[str, TableContext]) -> Sessions:
    objects = next((context.objects for context in contexts.values()), None)
    return engine(open_store(Path("nowhere")) if objects is None else objects).session


def tuples(reader: pa.RecordBatchReader) -> list[tuple[object, ...]]:
    """Returns all rows of a reader."""
    return [tuple(row.values()) for row in reader.read_all().to_pylist()]


NewLake = Callable[..., Lake]


def four_leaves(new_lake: NewLake) -> Lake:
    """Returns 1,500 rows in four leaves; every third file has references from all leaves.

    Two leaves are split by `number`, so their keys interleave.
    """
    lake = new_lake(split_points=["g", "p"])
    lake.context.partitions.split(lake.context.partitions.leaves()[1].partition_id, 0, "number")
    rng = random.Random(1)
    for n in range(3):
        lake.add([row(rng) for _ in range(500)], one_file=n == 1)
    return lake


def row(rng: random.Random) -> dict[str, Any]:
    return {
        "Name": rng.choice(["", "\x00", "a", "a\x00", "g", "h", "o'\"", "p", "é", "😀"]),
        "number": rng.choice([-(2**63), -50, -1, 0, 1, 50, 2**63 - 1]),
        "time": rng.choice([-(2**31), -1, 0, 1, 2**31 - 1]),
        "code": rng.choice([b"", b"\x00", b"\xff"]),
        "score": rng.choice([None, -0.5, 2.0]),
        "good": rng.choice([True, False]),
        "at": rng.choice([None, NOON]),
        "tags": rng.choice([None, [], ["x", None]]),
    }


def ordered(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Returns sorted rows, with a fixed order of rows with equal keys."""
    return sorted(rows, key=lambda row: (row[:3], repr(row[3:])))


def expected(lake: Lake, condition: Callable[[dict[str, Any]], bool]) -> list[tuple[Any, ...]]:
    return ordered([tuple(row.values()) for row in lake.all.to_pylist() if condition(row)])
