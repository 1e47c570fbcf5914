"""Aggregation of each type of value gives equal results in queries, SQL and compaction, for rows in any
files.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import merge_plan
from ingested import flights_table
from query_lake import sql

from dormouse.data.arrow_schema import arrow_type
from dormouse.postgres import ConnectionSupplier
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DOUBLE,
    INT,
    LONG,
    STRING,
    TIMESTAMP,
    DataType,
    Field,
    Schema,
    TableProperties,
)
from tests.support.reading import query
from tests.support.state import TableContext
from tests.support.writing import compact
from tests.support.writing import ingest_in_process as ingest

NAN = math.nan
VALUES: dict[DataType, tuple[Any, Any]] = {
    INT: (-2, 3),
    LONG: (-2, 3),
    DOUBLE: (-2.5, 3.5),
    STRING: ("a", "é"),
    BYTES: (b"\x00", b"\xff"),
    BOOLEAN: (False, True),
    TIMESTAMP: (datetime(1960, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC)),
}
FIELDS = [Field(f"{t.name}{n}", t, nullable=n == "_n") for t in VALUES for n in ("", "_n")]


def table_of(
    dsn: str, supplier: ConnectionSupplier, folder: Path, fields: Sequence[Field], aggregate: str
) -> TableContext:
    schema = Schema([Field("k", LONG)], [], fields)
    properties = {"aggregate": aggregate, "compaction_strategy": "basic", "compaction_batch_files": 2}
    return flights_table(dsn, supplier, folder, schema=schema, split_points=(), **properties)


def add(context: TableContext, columns: dict[str, Sequence[Any]]) -> None:
    arrays = {f.name: pa.array(columns[f.name], arrow_type(f.type)) for f in context.schema.fields}
    ingest(context, pa.table(arrays))


def answers(context: TableContext) -> list[pa.Table]:
    """Returns four answers: of a query and of SQL, first before and then after compactions."""

    def ask() -> list[pa.Table]:
        return [query(context).read_all(), sql({"t": context}, "select * from t order by k").read_all()]

    before = ask()
    while compact(context).rows_written:
        pass
    assert len(list(context.store.file_references())) == 1
    return before + ask()


@pytest.mark.few(1)
@pytest.mark.parametrize("function", ["min", "max", "sum"])
def test_every_type_of_value_is_aggregated(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, function: str
) -> None:
    fields = [f for f in FIELDS if function != "sum" or f.type in (LONG, DOUBLE)]
    aggregate = ", ".join(f"{function}({field.name})" for field in fields)
    context = table_of(dsn, supplier, tmp_path, fields, aggregate)
    for at in (0, 1):
        rows = {f.name: [VALUES[f.type][at], None if f.nullable else VALUES[f.type][at]] for f in fields}
        add(context, {"k": [1, 2], **rows})
    wanted = {
        "min": lambda low, high: low,
        "max": lambda low, high: high,
        "sum": lambda low, high: low + high,
    }
    for answer in answers(context):
        both, alone = answer.to_pylist()
        for field in fields:
            low, high = VALUES[field.type]
            assert both[field.name] == wanted[function](low, high)
            assert alone[field.name] == (None if field.nullable else wanted[function](low, high))


@pytest.mark.slow
def test_nan_is_the_largest_double_and_infinities_are_kept_in_any_order(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path
) -> None:
    fields = [Field(f"{f}{n}", DOUBLE, nullable=bool(n)) for f in ("min", "max") for n in ("", "_n")]
    context = table_of(dsn, supplier, tmp_path, fields, ", ".join(f"{f.name[:3]}({f.name})" for f in fields))
    numbers = (1.0, -sys.float_info.max, sys.float_info.max, math.inf, -math.inf, NAN)
    rows = list(enumerate(product(numbers, repeat=3)))
    for first, last in ((0, 2), (2, 3)):
        cells = [(k, v) for k, order in rows for v in order[first:last]]
        add(context, {"k": [k for k, _ in cells], **{f.name: [v for _, v in cells] for f in fields}})
    add(context, {"k": [0], "min": [NAN], "max": [1.0], "min_n": [None], "max_n": [None]})
    lows, highs = ([str(one(order, key=_place)) for _, order in rows] for one in (min, max))
    for answer in answers(context):
        found = {name: list(map(str, answer[name].to_pylist())) for name in answer.schema.names}
        assert (found["min"], found["min_n"]) == (lows, lows)
        assert (found["max"], found["max_n"]) == (highs, highs)


def _place(number: float) -> tuple[bool, float]:
    return math.isnan(number), 0.0 if math.isnan(number) else number


def test_doubles_are_aggregated_without_sorting(tmp_path: Path) -> None:
    schema = Schema([Field("k", LONG)], [], [Field("low", DOUBLE), Field("high", DOUBLE)])
    pq.write_table(pa.table({"k": [1], "low": [1.0], "high": [1.0]}), tmp_path / "f.parquet")
    properties = TableProperties(aggregate="min(low), max(high)")
    plan = merge_plan([str(tmp_path / "f.parquet")] * 2, schema, properties=properties)
    assert "ordering_mode=Sorted" in plan
    assert "SortExec" not in plan
