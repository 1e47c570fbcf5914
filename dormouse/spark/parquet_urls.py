"""Parquet files as Spark's own reader has them, whatever the session says of its reads."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence

from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.types import (
    ByteType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StructType,
)

from dormouse.spark.shuffle import FILE, ROW_OF_FILE, plain_name

AS_WRITTEN = {
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
}
"""No day is moved to another calendar, and no file is left out unsaid."""

_CANNOT_MERGE = "[CANNOT_MERGE_SCHEMAS]"
_WIDENED = (
    (ByteType(), ShortType(), IntegerType(), LongType()),
    (ByteType(), ShortType(), IntegerType(), DoubleType()),
    (FloatType(), DoubleType()),
)
"""Spark reads a column of files as a later type of such a row, but finds no such type by itself."""
_PATTERN = re.compile(r"[*?\[\]{}\\]")


def rows_at(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """The rows of files and folders, with the columns of every file, and not those of one for all.

    Of numbers that are wider in some files all are so wide.
    """
    reader = spark.read.options(**AS_WRITTEN)
    merging = spark.read.options(**AS_WRITTEN, mergeSchema="true")
    try:
        return merging.parquet(*urls)
    except Exception as failure:
        if _CANNOT_MERGE not in str(failure):
            raise
    files = sorted(map(plain_name, reader.parquet(*urls).inputFiles()))
    return reader.schema(_merged(merging, [_PATTERN.sub(r"\\\g<0>", file) for file in files])).parquet(*urls)


def _merged(merging: DataFrameReader, files: Sequence[str]) -> StructType:
    """The columns of all files: of those that Spark does not merge, those of each half."""
    try:
        return merging.parquet(*files).schema
    except Exception as failure:
        if len(files) == 1 or _CANNOT_MERGE not in str(failure):
            raise
        half = len(files) // 2
        merged = {field.name: field for field in _merged(merging, files[:half])}
        for field in _merged(merging, files[half:]):
            two = merged.setdefault(field.name, field).dataType, field.dataType
            kinds = next((row for row in _WIDENED if {*two} <= {*row}), None)
            if kinds is not None:
                merged[field.name].dataType = max(two, key=kinds.index)
            elif two[0] != two[1]:
                raise
        return StructType([*merged.values()])


def in_order(spark: SparkSession, frame: DataFrame, urls: Sequence[str]) -> tuple[DataFrame, dict[str, int]]:
    """What `rows_at` gave, and last of which file each row is, and its place there; with the files' numbers.

    These are in the order of the URLs, and of a folder in that of the names. Spark by itself begins with the
    largest file.
    """
    reader = spark.read.options(**AS_WRITTEN).schema(frame.schema)
    names = _plain_names(reader.parquet(*urls))
    files = [file for url in urls for file in _under(url, names) or _plain_names(reader.parquet(url))]
    place = frame.metadataColumn("_metadata")
    told = [place.getField("file_path").alias(FILE), place.getField("row_index").alias(ROW_OF_FILE)]
    # of a file that is given twice the rows are the same
    return frame.select("*", *told), {"/".join(name): number for number, name in enumerate(files)}


def _plain_names(frame: DataFrame) -> list[list[str]]:
    """Of its files, in order."""
    return sorted(plain_name(name).split("/") for name in frame.inputFiles())


def _under(url: str, names: Sequence[list[str]]) -> Sequence[list[str]]:
    """Those of the names that are a URL's; none where only a listing of its own tells them."""
    if _PATTERN.search(url):
        return []
    *folder, last = re.sub("^file:/+", "file:/", url.rstrip("/")).split("/")
    return names[bisect_left(names, [*folder, last]) : bisect_left(names, [*folder, f"{last}\0"])]
