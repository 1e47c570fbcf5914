"""Tests that tables made by COPY equal the tables that the catalog and the store make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.state_tables import KEYS_PER_LEAF, SCHEMA, StateTable, Tables, open_tables, spread
from dormouse.postgres import ConnectionSupplier
from tests.support.model import LONG, TableProperties, decode_value
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, TableContext, WriteAttempts

LEAVES = 11


@pytest.fixture
def tables(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> Iterator[Tables]:
    with open_tables(shared_supplier[0], str(tmp_path / "objects")) as made:
        yield made


def context(shared: tuple[str, ConnectionSupplier], tmp_path: Path, table: StateTable) -> TableContext:
    return TableContext(*shared, open_store(tmp_path / "objects"), table.record)


@pytest.mark.parametrize("leaves", [1, 2, LEAVES])
def test_the_tree_equals_the_tree_of_the_catalog(
    shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path, tables: Tables, leaves: int
) -> None:
    supplier = shared_supplier[1]
    made = tables.make(f"copied_{leaves}", leaves, files_per_leaf=1)
    points = [KEYS_PER_LEAF * number for number in range(1, leaves)]
    catalog = Catalog(supplier, WriteAttempts(supplier, open_store(tmp_path / "objects")))
    created = catalog.create(f"created_{leaves}", SCHEMA, TableProperties(), split_points=points)
    assert _rows(supplier, "partition", made.record.table_id) == _rows(
        supplier, "partition", created.table_id
    )
    assert _rows(supplier, "epoch", made.record.table_id) == _rows(supplier, "epoch", created.table_id)
    tree = context(shared_supplier, tmp_path, made).partitions.tree()
    assert [leaf.partition_id for leaf in tree.leaves] == [made.partition_id(n) for n in range(leaves)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_store_reads_the_files_and_applies_the_jobs(
    shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path, tables: Tables, layout: str
) -> None:
    table = tables.make(
        f"big_{layout}", LEAVES, layout, files_per_leaf=3, claimed_leaves=2, full_leaves=1, above_leaves=4
    )
    opened = context(shared_supplier, tmp_path, table)
    full = opened.store.file_references_in([table.partition_id(0)])
    assert sum(reference.row_count for reference in full) > table.record.properties.split_threshold_rows
    divided = [node.partition_id for node in table.nodes() if node.children]
    assert len(opened.store.file_references_in(divided)) == 4
    first, last = 5, 10
    assert not any(
        reference.job_id for reference in opened.store.file_references_in([table.partition_id(last)])
    )
    files = opened.store.files_in([table.partition_id(first)])
    assert sorted(file.filename for file in files) == sorted(table.inputs(first))
    assert {_keys(file) for file in files} == {(5_000, 5_999)}
    request = table.request(first)
    opened.store.replace_file_references([request])
    assert [file.filename for file in opened.store.files_in([table.partition_id(first)])] == [
        request.new_reference.filename if request.new_reference else ""
    ]
    totals = opened.store.totals.read()
    assert (totals.references, totals.unreferenced_files) == (LEAVES * 3 + 4 - 2, 3)


def test_spread_returns_evenly_spaced_numbers() -> None:
    assert list(spread(10, 3)) == [0, 3, 6]
    assert list(spread(10, 0)) == []
    assert list(spread(3, 10)) == [0, 1, 2]


def _keys(file: Any) -> tuple[Any, ...]:
    return tuple(decode_value(LONG, key) for key in (file.min_key, file.max_key))


def _rows(supplier: ConnectionSupplier, table: str, table_id: int) -> list[Any]:
    """Returns the rows of a table, without the columns whose values always differ."""
    with supplier.connection() as conn:
        alike = "to_jsonb(r) - '{table_id,created_at,added_xid}'::text[]"
        query = f"select {alike} from {table} r where table_id = %s order by 1"
        return conn.execute(query, (table_id,)).fetchall()
