"""Merges of files whose statistics tempt DataFusion's optimizer to ignore keys of the sort order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import write_object

from dormouse.errors import JobFailed
from dormouse.writing.parquet_file import check_merges_by_all_keys
from tests.support.model import (
    BYTES,
    INT,
    LONG,
    STRING,
    DataType,
    Field,
    Range,
    Region,
    Schema,
    TableProperties,
)
from tests.support.objects import open_store
from tests.support.reading import arrow_schema
from tests.support.writing import merge_sorted

ABOVE: dict[DataType, list[Any]] = {
    INT: [3, 1, 2, 9],
    LONG: [3, 1, 2, 9],
    STRING: ["c", "a", "b", "z"],
    BYTES: [b"c", b"a", b"b", b"z"],
}
TRANSFORMS = [{}, {"aggregate": "sum(v)"}, {"filter": "age_off(v, 9000000000000000)"}]


@pytest.mark.parametrize("properties", TRANSFORMS, ids=lambda p: next(iter(p), "plain"))
@pytest.mark.parametrize("first", ABOVE, ids=str)
def test_files_with_a_constant_first_key_are_merged_in_the_order_of_all_keys(
    tmp_path: Path, first: DataType, properties: dict[str, Any]
) -> None:
    """Each file has one value of the first key, and a region limits this key, as after a split."""
    schema = Schema([Field("a", first), Field("b", LONG)], values=[Field("v", LONG)])
    objects = open_store(tmp_path / "in")
    *constants, end = ABOVE[first]
    for number, constant in enumerate(constants):
        count = 500
        columns = {"a": [constant] * count, "b": range(count), "v": [1] * count}
        table = pa.table(
            {name: list(values) for name, values in columns.items()}, schema=arrow_schema(schema)
        )
        write_object(objects, schema, f"{number}.parquet", table)
    merge_sorted(
        [objects.uri(f"{number}.parquet") for number in range(len(constants))],
        schema,
        tmp_path / "out",
        region=Region(a=Range(None, end)),
        properties=TableProperties(**properties),
        now_ms=0,
    )
    rows = pq.read_table(tmp_path / "out")
    keys = list(zip(rows["a"].to_pylist(), rows["b"].to_pylist(), strict=True))
    assert keys == [(constant, b) for constant in sorted(constants) for b in range(500)]


@pytest.mark.parametrize("properties", TRANSFORMS, ids=lambda p: next(iter(p), "plain"))
@pytest.mark.parametrize("kind", [INT, LONG])
def test_a_region_of_one_key_is_merged_in_the_order_of_the_other_keys(
    tmp_path: Path, kind: DataType, properties: dict[str, Any]
) -> None:
    """The files have rows of other keys too. DataFusion knows that the region has only one."""
    schema = Schema([Field("a", kind), Field("b", LONG)], values=[Field("v", LONG)])
    objects = open_store(tmp_path / "in")
    for number in range(3):
        rows = [{"a": a, "b": b, "v": 1} for a in (4, 5, 6) for b in range(number, 500, 3)]
        table = pa.Table.from_pylist(rows, schema=arrow_schema(schema))
        write_object(objects, schema, f"{number}.parquet", table)
    merge_sorted(
        [objects.uri(f"{number}.parquet") for number in range(3)],
        schema,
        tmp_path / "out",
        region=Region(a=Range(5, 6)),
        properties=TableProperties(**properties),
        now_ms=0,
    )
    merged = pq.read_table(tmp_path / "out")
    assert (merged["a"].unique().to_pylist(), merged["b"].to_pylist()) == ([5], list(range(500)))


@pytest.mark.slow
def test_a_plan_that_merges_by_fewer_keys_is_refused() -> None:
    schema = Schema([Field("a", LONG), Field("b", LONG)], [Field("c", LONG)])
    merge = "  SortPreservingMergeExec: [{}]\n    UnionExec"
    check_merges_by_all_keys(schema, merge.format("a@0 ASC NULLS LAST, b@1 ASC NULLS LAST, c@2 ASC"))
    check_merges_by_all_keys(schema, "ProjectionExec: expr=[a@0 as a]")
    check_merges_by_all_keys(schema, merge.format("b@1 ASC, c@2 ASC"), ["a"])
    check_merges_by_all_keys(schema, merge.format("a@0 ASC, c@2 ASC"), ["b"])
    check_merges_by_all_keys(schema, merge.format("a@0 ASC, b@1 ASC, c@2 ASC"), ["a"])
    with pytest.raises(JobFailed, match="would merge by"):
        check_merges_by_all_keys(schema, merge.format("c@2 ASC"), ["a"])
    with pytest.raises(JobFailed, match=r"would merge by b@1 ASC, c@2 ASC instead of a, b, c"):
        check_merges_by_all_keys(schema, merge.format("b@1 ASC, c@2 ASC"))
