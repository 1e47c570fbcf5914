"""Bulk ingest: Spark moves rows to their leaves as compressed Arrow blobs; tasks sort and write them.

Rows stay columnar from end to end. A first stage finds each row's leaf and cuts every chunk of rows into one
blob a target; Spark's shuffle moves a few large blobs instead of many rows. A second stage sorts the rows of
its leaves in bounded memory, spilling and merging if need be, and writes their files. The driver commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import check_columns
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.errors import DormouseError, InvalidData, JobFailed
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.types import DataType
from dormouse.sources.data_files import STDIN, Files, are_paths, find_files, kind_of, listed_paths
from dormouse.sources.infer import columns_of_arrow
from dormouse.sources.source import GivenData
from dormouse.sources.source_files import FilePart
from dormouse.spark.frames import in_order, rows_at, with_defaults
from dormouse.spark.session import spark_session
from dormouse.spark.shuffle import (
    BLOBS,
    TARGET,
    Gather,
    Scatter,
    SplitScatter,
    Targets,
    stage,
)
from dormouse.spark.split_points import divide, points_of
from dormouse.spark.splits import file_splits
from dormouse.spark.tasks import dormouse_error, run_action
from dormouse.spark.worker import check_arrived, make_folder
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.ingest import IngestReport, check_ingested, ingest_once, keyed_rows
from dormouse.writing.keyed_merge import KeyedRows

Progress = Callable[[int, int | None], None]


def ingest_with_spark(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None = None,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    deletes: str | None = None,
) -> IngestReport:
    """Adds the rows of a DataFrame, or of Parquet or CSV files, to a table: all or none, once for each id.

    Files are read by the tasks themselves, so their paths must mean the same on every executor; for a URL of
    Parquet files (s3://…) Spark's own reader is used. `progress` is called when all rows are written. Errors
    are those of `dormouse.writing.ingest.ingest_in_process`.
    """

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        rows = keyed_rows(current, attempt, deletes)
        source = _source(data, current.schema if rows is None else rows.given)
        session = source.sparkSession if isinstance(source, DataFrame) else spark or spark_session()
        divide(current, source, session)
        files = _write(current, attempt, source, session, rows)
        if progress is not None:
            written = sum(file.row_count or 0 for file in files)
            progress(written, written)
        return files

    def digest() -> bytes | None:
        # what Spark itself reads is read once, and by its tasks
        is_here = are_paths(data) and not any("://" in path or path == STDIN for path in listed_paths(data))
        return GivenData(data, deletes).digest() if is_here else None

    # a task that Spark repeated, or ran twice, may still write
    return ingest_once(context, ingest_id, write, digest=digest, leftovers=True)


def split_points(
    data: Any, schema: Schema, leaves: int, *, spark: SparkSession | None = None
) -> list[KeyValue]:
    """Where a table for such rows is best divided into so many leaves, for `create_table`; from a sample.

    `data` is what `ingest_with_spark` takes; raises as it does.
    """
    source = _source(data, schema)
    session = source.sparkSession if isinstance(source, DataFrame) else spark or spark_session()
    return points_of(source, session, schema, leaves)


def _source(data: Any, schema: Schema) -> DataFrame | list[FilePart] | list[str]:
    """What the tasks read: a DataFrame, parts of files, or URLs that are left to Spark."""
    if isinstance(data, DataFrame):
        check_fits(data.schema, schema)
        return data
    return _urls(data) or file_splits(find_files(data), schema)


def _urls(data: Any) -> list[str]:
    """Returns the URLs that are left to Spark; none where all data are files that tasks of ours read."""
    if not are_paths(data):
        raise InvalidData(f"Spark cannot ingest {type(data).__name__}; give a DataFrame, or paths of files")
    listed = listed_paths(data)
    urls = [path for path in listed if "://" in path]
    if urls and (
        len(urls) < len(listed)
        or isinstance(data, Files)
        or any(kind_of(Path(url)) in {"csv", "json"} for url in urls)
    ):
        raise InvalidData(f"{urls[0]!r}: read URLs of CSV, or of several kinds, into a DataFrame first")
    return urls


def check_fits(columns: StructType, schema: Schema) -> None:
    """`InvalidData` when a DataFrame's columns are not those of a table, or of what a load brings to it."""
    check_columns(_arrow_columns(columns), schema)


def columns_read(data: Any) -> dict[str, DataType] | None:
    """Returns the types of all columns of what Spark itself reads; None for files that tasks of ours read."""
    if isinstance(data, DataFrame):
        return columns_of(data.schema)
    urls = _urls(data)
    if not urls:
        return None
    try:
        return columns_of(rows_at(spark_session(), urls).schema)
    except DormouseError:
        raise
    except Exception as failure:
        raise dormouse_error(failure) from failure


def columns_of(columns: StructType) -> dict[str, DataType]:
    """Returns the types of a DataFrame's columns."""
    return columns_of_arrow(_arrow_columns(columns))


def _arrow_columns(columns: StructType) -> pa.Schema:
    try:
        return to_arrow_schema(columns)
    except Exception as error:
        raise InvalidData(f"the DataFrame has a column that Arrow cannot hold: {error}") from None


def _write(
    context: TableContext,
    attempt: WriteAttempt,
    source: DataFrame | Sequence[FilePart] | Sequence[str],
    spark: SparkSession,
    keyed: KeyedRows | None,
) -> list[FileWithReferences]:
    """Runs the Spark job; the files of the task attempts that succeeded."""
    make_folder(context.objects)
    lookup = LeafLookup(context.partitions.tree())
    targets = Targets.of(len(lookup.leaf_ids), _tasks_max(spark))
    scatter = Scatter(context.schema if keyed is None else keyed.given, lookup, targets, keyed)
    gather = Gather(context.objects, context.stored_schema, context.properties, lookup.leaf_ids, attempt)

    def job() -> list[FileWithReferences]:
        blobs = _blobs(spark, source, scatter)
        tasks = blobs.repartition(targets.count, TARGET).rdd.mapPartitions(gather.run).collect()
        files = [file for task in tasks for file in task.files]
        sent, received = sum(task.sent for task in tasks), sum(task.received for task in tasks)
        check_ingested(sent, None, files, context.properties)
        check_arrived(context.objects, files)
        if received != sent:
            raise JobFailed(f"the ingest sent {sent:,} rows and received {received:,}; nothing was added")
        return files

    try:
        return run_action(spark, job)
    except Exception as failure:
        raise dormouse_error(failure) from failure


def _blobs(spark: SparkSession, source: DataFrame | Sequence[Any], scatter: Scatter) -> DataFrame:
    if not isinstance(source, DataFrame) and all(isinstance(part, FilePart) for part in source):
        # the numbers of the splits, one a task
        numbers = spark.range(0, len(source), 1, max(1, len(source)))
        return numbers.mapInArrow(stage(SplitScatter(tuple(source), scatter)), BLOBS)
    if not isinstance(source, DataFrame):
        urls, source = source, rows_at(spark, source)
        check_fits(source.schema, scatter.schema)
        source = with_defaults(spark, source, urls, scatter.schema)
        if scatter.keyed is not None:
            source, files = in_order(spark, source, urls)
            scatter = replace(scatter, files=files)
    return source.mapInArrow(stage(scatter), BLOBS)


def _tasks_max(spark: SparkSession) -> int:
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    return max(partitions, spark.sparkContext.defaultParallelism)
