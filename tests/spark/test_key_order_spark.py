"""The order of keys in Spark, which is that of Python."""

from __future__ import annotations

from typing import Any

import pytest

from tests.writing.test_key_order import SCHEMAS, as_arrow, keys


@pytest.mark.slow
def test_spark_sorts_as_python_does(spark: Any) -> None:
    for schema in SCHEMAS.values():
        rows = keys(schema, 5)
        frame = spark.createDataFrame(as_arrow(schema, rows)).coalesce(1).sortWithinPartitions(*schema.names)
        assert [as_python(row) for row in frame.collect()] == sorted(rows)


def as_python(row: Any) -> tuple[Any, ...]:
    return tuple(bytes(value) if isinstance(value, bytearray) else value for value in row)
