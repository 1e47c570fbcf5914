"""Bloom filters on the columns that a table property names: each writer adds them, and queries use them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pruning import pruned

from dormouse.data.transform import Transform
from dormouse.errors import InvalidProperties
from dormouse.postgres import ConnectionSupplier
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DOUBLE,
    INT,
    LIST,
    LONG,
    STRING,
    TIMESTAMP,
    Field,
    Schema,
    TableProperties,
)
from tests.support.objects import open_store
from tests.support.reading import query
from tests.support.state import Catalog, TableContext, WriteAttempts
from tests.support.writing import compact, ingest

ORDERS = Schema(
    [Field("day", INT), Field("Order", LONG)],
    [Field("line", INT)],
    [Field("customer", STRING, nullable=True), Field("token", BYTES), Field("note", STRING)],
)
ROWS = 5_000
_names = count()


def orders(seed: int) -> pa.Table:
    """Returns rows whose numbers are even, so that a look-up of an odd number finds none."""
    numbers = [(i * 7_919 + seed * 13) % ROWS * 2 for i in range(ROWS)]
    return pa.table(
        {
            "day": pa.array([i % 10 for i in range(ROWS)], pa.int32()),
            "Order": pa.array(numbers, pa.int64()),
            "line": pa.array([0] * ROWS, pa.int32()),
            "customer": pa.array([None if n % 100 == 0 else f"c{n:06}" for n in numbers]),
            "token": pa.array([n.to_bytes(4, "big") for n in numbers], pa.binary()),
            "note": pa.array([f"n{n:06}" for n in numbers]),
        }
    )


@pytest.fixture
def filled(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> Callable[..., TableContext]:
    """Returns a function that makes a table of three files, which one compaction can merge."""
    dsn, supplier = shared_supplier

    def fill(folder: Path = tmp_path, **properties: Any) -> TableContext:
        objects = open_store(folder / "objects")
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            f"orders_{next(_names)}",
            ORDERS,
            TableProperties(compaction_strategy="basic", compaction_batch_files=3, **properties),
        )
        context = TableContext(dsn, supplier, objects, record)
        for seed in range(3):
            ingest(context, orders(seed), ingest_id=None, engine="local", progress=None)
        return context

    return fill


def byte_count(context: TableContext) -> int:
    return sum(context.objects.size(r.filename) for r in context.store.file_references())


def test_every_writer_adds_bloom_filters_and_queries_skip_by_them(
    filled: Callable[..., TableContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = filled(bloom_filter_columns="customer, Order, token")
    before = query(context).read_all()
    for files in (3, 1):
        assert len(list(context.store.file_references())) == files
        for where in ({"Order": 4_001}, {"customer": ["c004001", "c004003"]}, {"token": b"\x00\x00\x0f\xa1"}):
            found = pruned(context, where, monkeypatch)
            assert found.rows == 0
            assert found.metrics["row_groups_pruned_bloom_filter"] == (files, 0), where
        assert pruned(context, {"note": "n004001"}, monkeypatch).metrics["row_groups_pruned_bloom_filter"][1]
        for where in ({"Order": 4_002}, {"customer": "c004002"}, {"token": b"\x00\x00\x0f\xa2"}):
            assert query(context, where).read_all().num_rows == 3
        assert query(context, {"customer": [None, "c004002"]}).read_all().num_rows == 3 * 101
        compact(context, engine="local")
    assert query(context).read_all().num_rows == before.num_rows


@pytest.mark.slow
def test_bloom_filters_are_no_larger_than_needed(filled: Callable[..., TableContext], tmp_path: Path) -> None:
    """A filter has ten bits for each different value, rounded up to a power of two.

    Each of the three files has 5,000 values, and the compacted file has the same 5,000 values.
    """
    sizes = []
    for name, columns in (("without", None), ("with", "note")):
        context = filled(tmp_path / name, bloom_filter_columns=columns)
        before = byte_count(context)
        compact(context, engine="local")
        sizes.append((before, byte_count(context)))
    written, compacted = (more - less for less, more in zip(*sizes, strict=True))
    assert 3 * 5_000 <= written <= 3 * (8_192 + 500)
    assert 5_000 <= compacted <= 8_192 + 500


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("nmae", "bloom_filter_columns: 'nmae' is not a field; the fields are a, b, c, d, e, f"),
        ("a,,b", "bloom_filter_columns: '' is not a field"),
        ("A", "bloom_filter_columns: 'A' is not a field"),
        ("a, b, a", "bloom_filter_columns: 'a' is named twice"),
        ("c", "bloom_filter_columns: 'c' is double; columns of INT, LONG, STRING and BYTES can be named"),
        ("d", "'d' is boolean"),
        ("e", "'e' is timestamp"),
        ("f", r"'f' is list<string>"),
    ],
)
def test_a_column_that_cannot_have_a_bloom_filter_is_refused(columns: str, message: str) -> None:
    schema = Schema(
        [Field("a", LONG)],
        [Field("b", STRING)],
        [Field("c", DOUBLE), Field("d", BOOLEAN), Field("e", TIMESTAMP), Field("f", LIST(STRING))],
    )
    with pytest.raises(InvalidProperties) as error:
        Transform.parse(schema, TableProperties(bloom_filter_columns=columns))
    assert message in str(error.value)
    assert len(str(error.value).splitlines()) == 1
