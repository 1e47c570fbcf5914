"""A sum of LONGs is exact, or an error: it never wraps around."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from query_lake import sql

from dormouse.errors import InvalidData
from tests.support.model import LONG, Field, Schema, TableProperties
from tests.support.reading import query
from tests.support.state import Catalog, TableContext, WriteAttempts
from tests.support.writing import compact
from tests.support.writing import ingest_in_process as ingest

LARGEST = 2**63 - 1
MESSAGE = r"^sum\(count\) of rows of equal key is 9223372036854775808, which LONG cannot hold"


@pytest.fixture
def counts(new_table: Callable[..., TableContext]) -> TableContext:
    made = new_table()
    properties = TableProperties(
        aggregate="sum(count)", compaction_strategy="basic", compaction_batch_files=2
    )
    schema = Schema([Field("key", LONG)], [], [Field("count", LONG)])
    record = Catalog(made.supplier, WriteAttempts(made.supplier, made.objects)).create(
        f"counts_{made.table.table_id}", schema, properties
    )
    return TableContext(made.dsn, made.supplier, made.objects, record)


def add(table: TableContext, *counts: int) -> None:
    for count in counts:
        ingest(table, pa.table({"key": [1, 2], "count": [count, 0]}))


def test_a_total_that_is_too_large_fails_queries_and_compactions_and_loses_nothing(
    counts: TableContext,
) -> None:
    add(counts, LARGEST, 1)
    with pytest.raises(InvalidData, match=MESSAGE):
        query(counts).read_all()
    with pytest.raises(InvalidData, match=MESSAGE):
        sql({"counts": counts}, "select * from counts").read_all()
    report = compact(counts)
    assert (report.jobs_run, report.given_up) == (0, 1)
    assert report.errors[0].startswith("sum(count) of rows of equal key is 9223372036854775808")
    assert [r.job_id for r in counts.store.file_references()] == [None, None]
    assert query(counts, {"key": 2}).read_all()["count"].to_pylist() == [0]


def test_a_sum_that_exceeds_the_limit_only_in_between_is_exact(counts: TableContext) -> None:
    add(counts, LARGEST, 1, -1, -LARGEST - 1, LARGEST)
    assert query(counts).read_all()["count"].to_pylist() == [LARGEST - 1, 0]


def test_sums_at_both_limits_are_kept(counts: TableContext) -> None:
    add(counts, -LARGEST, -1)
    assert compact(counts).jobs_run == 1
    assert query(counts).read_all()["count"].to_pylist() == [-LARGEST - 1, 0]
