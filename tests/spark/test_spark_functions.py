"""`dormouse.spark.read`, where Spark's own reader must give the same answers as Dormouse."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dormouse as dm
import dormouse.spark
from tests.support.api import Instance, Table

POINT = dm.STRUCT([dm.Field("x", dm.DOUBLE)])


@pytest.fixture
def zeros(instance: Instance) -> Table:
    """Makes a table with a file in whose dictionaries only one of 0.0 and -0.0 occurs."""
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("x", dm.DOUBLE), dm.Field("point", POINT)])
    table = instance.create_table("t", schema)
    table.ingest(pa.table({"k": [1, 2], "x": [-0.0, -1.0], "point": [{"x": -0.0}, {"x": -1.0}]}))
    return table


def test_spark_treats_both_zeros_as_equal(spark: SparkSession, zeros: Table) -> None:
    zero: Any = 0.0
    asked: list[Any] = [zero, [zero, 7.0], dm.Range(min=zero)]
    for wanted in asked:
        assert dormouse.spark.read(spark, zeros, {"x": wanted}).count() == 1
    whole = dormouse.spark.read(spark, zeros)
    assert [whole.where(own).count() for own in ("x >= 0", "point.x = 0")] == [1, 1]
