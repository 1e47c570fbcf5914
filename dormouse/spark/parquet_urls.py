"""Parquet files as Spark's own reader has them, whatever the session says of its reads."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

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
