"""Files without a minimum and maximum of DOUBLE columns, because these would ignore NaN.

The names of such files show this.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.objects.names import PARQUET_SUFFIX

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    [],
    [dm.Field("x", dm.DOUBLE), dm.Field("s", dm.STRING), dm.Field("l", dm.LIST(dm.DOUBLE))],
)


@pytest.fixture
def table(dsn: str, tmp_path: Path) -> Iterator[dm.Table]:
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table(
            "t", SCHEMA, properties=dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
        )
        for start in (0, 100):
            table.ingest(rows(start))
        yield table


def rows(start: int) -> pa.Table:
    values = [math.nan, math.inf, -math.inf, -0.0, *map(float, range(96))]
    keys = range(start, start + len(values))
    return pa.table({"k": keys, "x": values, "s": map(str, keys), "l": [[value] for value in values]})


def bounded(path: Path) -> set[str]:
    group = pq.read_metadata(path).row_group(0)
    columns = (group.column(number) for number in range(group.num_columns))
    return {
        one.path_in_schema for one in columns if one.statistics is not None and one.statistics.has_min_max
    }


@pytest.mark.objects
def test_ingested_and_compacted_files_have_no_bounds_of_doubles(table: dm.Table, tmp_path: Path) -> None:
    table.compact()
    files = list((tmp_path / "objects" / "data").rglob("*.parquet"))
    assert len(files) == 3
    for path in files:
        assert path.name.endswith(PARQUET_SUFFIX)
        assert {"k", "s"} <= bounded(path)
        assert "x" not in bounded(path)


@pytest.mark.parametrize("compacted", [False, True])
def test_conditions_on_doubles_find_all_rows(table: dm.Table, compacted: bool) -> None:
    if compacted:
        table.compact()
    for condition, count in {
        "x > 90": 2 * (5 + 1 + 1),
        "x = 'nan'": 2,
        "x >= 'inf'": 4,
        "x < 0": 2,
        "x = 0": 4,
        "not x <= 1": 2 * (94 + 2),
        "x in (0.0, 1, 2, 3)": 10,
    }.items():
        [[found]] = (
            table.sql(f"select count(*) as n from t where {condition}").read_all().to_pydict().values()
        )
        assert (condition, found) == (condition, count)
    [found] = table.sql("select max(x), min(x) from t").read_all().to_pylist()
    assert repr(list(found.values())) == "[nan, -inf]"
