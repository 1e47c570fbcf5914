"""Parquet files as Spark's own reader has them, whatever the session says of its reads."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, SparkSession

from dormouse.spark.shuffle import FILE, ROW_OF_FILE, plain_name

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


def in_order(spark: SparkSession, frame: DataFrame, urls: Sequence[str]) -> tuple[DataFrame, dict[str, int]]:
    """What `rows_at` gave, and last of which file each row is, and its place there; with the files' numbers.

    These are in the order of the URLs, and of a folder in that of the names. Spark by itself begins with the
    largest file.
    """
    reader = spark.read.options(**AS_WRITTEN).schema(frame.schema)
    files = [file for url in urls for file in sorted(_plain_names(reader.parquet(url)))]
    place = frame.metadataColumn("_metadata")
    told = [place.getField("file_path").alias(FILE), place.getField("row_index").alias(ROW_OF_FILE)]
    # of a file that is given twice the rows are the same
    return frame.select("*", *told), {"/".join(name): number for number, name in enumerate(files)}


def _plain_names(frame: DataFrame) -> list[list[str]]:
    return [plain_name(name).split("/") for name in frame.inputFiles()]
