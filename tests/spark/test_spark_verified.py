"""Damaged files of a table with verified reads. Spark refuses them, because tasks compare the digests."""

from __future__ import annotations

from functools import partial

import pytest
from pyspark.sql import SparkSession

import dormouse as dm
import dormouse.spark
from tests.flipped_bits import damage
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance

SCHEMA = OF_K_AND_TEXTS
ROWS = 300


@pytest.mark.objects
@pytest.mark.slow
def test_spark_gives_no_rows_of_a_damaged_file(spark: SparkSession, instance: Instance, dsn: str) -> None:
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(verify_reads=True))
    table.ingest([{"k": k, "v": f"value {k % 17}"} for k in range(ROWS)])
    path = damage(table)
    reader = spark.read.format("dormouse").options(dsn=dsn, objects=instance.objects.url, table="t")
    reads = (
        reader.load,
        partial(dormouse.spark.read, spark, table),
        lambda: reader.option("changes_after", "beginning").load(),
    )
    for read in reads[:2]:
        with pytest.raises(Exception, match=path.name):
            read().collect()
    with pytest.raises(Exception, match=path.name):
        reads[2]().collect()
    damage(table)  # repairs the file by flipping the bit back
    assert dormouse.spark.read(spark, table).count() == ROWS
