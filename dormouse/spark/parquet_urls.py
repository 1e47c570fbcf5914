"""Parquet files as Spark's own reader has them, whatever the session says of its reads."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, DataFrameReader, SparkSession
from pyspark.sql.pandas.types import from_arrow_type, to_arrow_type
from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    ShortType,
    StringType,
    StructField,
    StructType,
)

from dormouse.data.arrow_schema import arrow_type
from dormouse.model.schema import Schema
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
_VECTORIZED = (
    "spark.sql.parquet.enableVectorizedReader",
    "spark.sql.parquet.enableNestedColumnVectorizedReader",
)
"""Settings of a session. Spark's other reader gives null for a default when tasks read at once."""
_DEFAULT = "EXISTS_DEFAULT"
"""The metadata of a column by which Spark knows, as SQL, the value of rows of files that lack it."""


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


def with_defaults(spark: SparkSession, frame: DataFrame, urls: Sequence[str], schema: Schema) -> DataFrame:
    """Returns the rows that `rows_at` gave, with the table's defaults where a file lacks a column."""
    fields = [_with_default(field, schema) for field in frame.schema]
    if not any(_DEFAULT in field.metadata for field in fields):
        return frame
    if any(spark.conf.get(name) != "true" for name in _VECTORIZED):
        spark = spark.newSession()
        for name in _VECTORIZED:
            spark.conf.set(name, "true")
    found = spark.read.options(**AS_WRITTEN).schema(StructType(fields)).parquet(*urls)
    pairs = zip(frame.schema, fields, strict=True)
    as_text = [one.name for one, read in pairs if one.dataType == BinaryType() != read.dataType]
    quoted = {name: f"`{name.replace('`', '``')}`" for name in as_text}
    return found.withColumns({name: found[column].cast(BinaryType()) for name, column in quoted.items()})


def _with_default(field: StructField, schema: Schema) -> StructField:
    default = schema.default(field.name)
    if default is None:
        return field
    kind = arrow_type(schema.field(field.name).type)
    # what all files that have it have may be narrower than the default
    found = field.dataType if _holds(field.dataType, pa.scalar(default, kind)) else from_arrow_type(kind)
    if found == BinaryType():
        found = StringType()  # Spark's vectorized reader has no default of bytes, and a string is any bytes
    return StructField(field.name, found, field.nullable, {**field.metadata, _DEFAULT: _sql(default, found)})


def _holds(found: DataType, value: pa.Scalar) -> bool:
    """Returns whether a type has a value exactly."""
    try:
        return bool(value.cast(to_arrow_type(found)).cast(value.type).equals(value))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False


def _sql(value: Any, kind: DataType) -> str:
    # what a string literal escapes is a setting of the session
    encoded = value.encode() if isinstance(value, str) else value
    text = f"X'{encoded.hex()}'" if isinstance(encoded, bytes) else f"'{value}'"
    return f"CAST({text} AS {kind.simpleString()})"


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
