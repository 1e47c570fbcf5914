"""Parquet files as Spark's own reader has them, whatever the session says of its reads."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col

from dormouse.data.expressions import joined

AS_WRITTEN = {
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
}
"""No day is moved to another calendar, and no file is left out unsaid."""


def rows_at(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """The rows of files and folders, with the columns of every file, and not those of one for all."""
    return spark.read.options(**AS_WRITTEN, mergeSchema="true").parquet(*urls)


def rows_in_order(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """As `rows_at`, with partitions in the order of the URLs, and of a folder's files in that of their names.

    Spark by itself begins with the largest file.
    """
    reader = spark.read.options(**AS_WRITTEN).schema(rows_at(spark, urls).schema)
    files = [file for url in urls for file in _files(reader.parquet(url))]
    # where folders tell columns, their order differs
    return joined(files, DataFrame.unionByName)


def _files(frame: DataFrame) -> list[DataFrame]:
    """What is read of each file that has rows."""
    if len(frame.inputFiles()) == 1:
        return [frame]
    path = col("_metadata.file_path")
    found = [row[0] for row in frame.select(path).distinct().collect()]
    return [frame.where(path == one) for one in sorted(found, key=lambda one: one.split("/"))] or [frame]
