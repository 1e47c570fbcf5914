"""Helpers for tests of ingest: a table of flights, rows for it, and checks of its files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.leaf_sorter import LeafLookup
from dormouse.data.object_access import open_parquet
from dormouse.data.sketches import FileSketches
from dormouse.model.file_reference import is_inlined
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import DOUBLE, LIST, LONG, STRING
from dormouse.objects import open_store
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres import ConnectionSupplier
from dormouse.state.catalog import Catalog
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempts

SCHEMA = Schema(
    row_keys=[Field("carrier", STRING), Field("flight", LONG)],
    sort_keys=[Field("time", LONG)],
    values=[Field("delay", DOUBLE, nullable=True), Field("tags", LIST(STRING))],
)
PLAIN = Schema(SCHEMA.row_keys, SCHEMA.sort_keys, SCHEMA.values[:1])


def flights_table(
    dsn: str,
    supplier: ConnectionSupplier,
    folder: Path,
    *,
    schema: Schema = SCHEMA,
    split_points: Any = ("DL", "UA"),
    **properties: Any,
) -> TableContext:
    objects = open_store(folder / "objects")
    catalog = Catalog(supplier, WriteAttempts(supplier, objects))
    record = catalog.create("flights", schema, TableProperties(**properties), split_points=list(split_points))
    return TableContext(dsn, supplier, objects, record)


def flights(rows: int, seed: int = 0, schema: Schema = SCHEMA) -> pa.Table:
    """Returns unsorted rows, some with equal keys, and some with null values."""
    random = np.random.default_rng(seed)
    carriers = pa.array(["AA", "B6", "DL", "DL\x00", "UA", "WN", "é", ""])
    delay = random.normal(size=rows)
    columns = {
        "carrier": carriers.take(pa.array(random.integers(0, len(carriers), rows))),
        "flight": pa.array(random.integers(-50, 50, rows)),
        "time": pa.array(random.integers(0, 1_000, rows)),
        "delay": pa.array(delay, mask=delay > 1),
        "tags": pa.array([["a", str(i % 3)] if i % 7 else [] for i in range(rows)], pa.list_(pa.string())),
    }
    return pa.table({name: columns[name] for name in schema.names})


def check_holds(context: TableContext, *expected: pa.Table) -> None:
    """Asserts that the table has exactly these rows.

    Its files must be sorted, and have row counts for each leaf. Objects must have sketches.
    """
    references = list(context.store.file_references())
    names = {reference.filename for reference in references}
    stored = {name: _read(context, name) for name in names}
    assert _bag(list(stored.values())) == _bag([t.select(context.schema.names) for t in expected])
    for name, table in stored.items():
        keys = _keys(table, context)
        assert keys == sorted(keys)
        if not is_inlined(name):
            sketches = FileSketches.from_bytes(context.objects.get(name + SKETCHES_SUFFIX))
            assert sketches.row_count == table.num_rows
    lookup = LeafLookup(context.partitions.tree())
    for reference in references:
        counts = Counter(lookup.indexes(stored[reference.filename]).to_pylist())
        by_leaf = {str(lookup.leaf_ids[leaf]): count for leaf, count in counts.items()}
        assert by_leaf[reference.partition_id] == reference.row_count
        assert reference.only_contains_data_for_this_partition == (len(by_leaf) == 1)
        assert not reference.count_approximate
    written = {name for name in names if not is_inlined(name)}
    objects = {name for name, _ in context.objects.list()}
    assert objects == written | {name + SKETCHES_SUFFIX for name in written}


def check_untouched(context: TableContext) -> None:
    """Asserts that there are no references, no objects in the store and no open write attempts."""
    assert context.store.has_no_files()
    assert list(context.objects.list()) == []
    assert attempts(context) == 0


def attempts(context: TableContext) -> int:
    with context.supplier.connection() as conn:
        row = conn.execute(
            "select count(*) from write_attempt where table_id = %s and finished_at is null",
            [context.table.table_id],
        ).fetchone()
    assert row is not None
    return int(row[0])


def _read(context: TableContext, name: str) -> pa.Table:
    with open_parquet(context.objects, name) as file:
        return file.read()


def _keys(table: pa.Table, context: TableContext) -> list[tuple[Any, ...]]:
    columns = [
        [value.encode() if isinstance(value, str) else value for value in table[name].to_pylist()]
        for name in context.schema.key_names
    ]
    return list(zip(*columns, strict=True))


def _bag(tables: list[pa.Table]) -> Counter[str]:
    return Counter(str(row) for table in tables for row in table.to_pylist())


def repeated(table: pa.Table, times: int) -> pa.Table:
    return pa.concat_tables([table] * times)


def column_set(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.names.index(name), name, column)


def nulled(table: pa.Table, name: str, row: int) -> pa.Table:
    mask = pa.array([i == row for i in range(table.num_rows)])
    return column_set(table, name, pc.if_else(mask, None, table[name]))
