"""Deletions and Spark: compactions apply them, ingests come after them, and erasures work."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import dormouse as dm
from dormouse.spark import tasks
from dormouse.spark.ingest import ingest_with_spark
from tests.support.writing import compact
from tests.texts import data, keys, made


@pytest.mark.slow
def test_spark_applies_deletions_and_ingests_beside_them(instance: dm.Instance, spark: Any) -> None:
    table = made(instance, ["a", "b"] * 10, deletions_max=1)
    table.ingest(data(["a", "c"] * 10, 20), engine="local")
    context = table.context
    table.delete({"k": dm.Range(0, 3)})
    table.delete({"s": "c", "v": 1})
    left = [k for k in range(40) if k >= 3 and not (k >= 20 and k % 2 and k % 5 == 1)]
    assert keys(table) == left
    run = partial(tasks.compact_on_spark, spark=spark)
    report = compact(context, engine="spark", on_spark=run)
    assert not report.errors
    assert report.jobs_run == 1
    assert keys(table) == left
    assert table.status().row_count == len(left), "physically"
    table.delete({"s": "a"})
    frame = spark.createDataFrame(data(["a", "b"] * 5, 100))
    ingest_with_spark(context, frame, spark=spark)
    assert keys(table) == [k for k in left if k % 2] + list(range(100, 110))
    looked = compact(context, engine="spark", on_spark=run)
    assert looked.jobs_looked + looked.jobs_run > 0, "files are read for a deletion by values as Spark tasks"
    assert keys(table) == [k for k in left if k % 2] + list(range(100, 110))
    erased = table.erase({"s": "b"}, engine="spark", wait_seconds=0.0)
    assert erased.is_finished
    assert keys(table) == [k for k in left if k % 2 and k > 20] + list(range(100, 110, 2))
