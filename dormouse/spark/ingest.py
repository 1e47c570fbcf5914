"""Bulk ingest: Spark moves rows to their leaves as compressed Arrow blobs; tasks sort and write them.

Rows stay columnar from end to end. The first stage finds the leaf of each row. It cuts each chunk of rows
into one blob for each target. So Spark's shuffle moves a few large blobs instead of many rows. The second
stage sorts the rows of its leaves in bounded memory, spills if needed, and writes their files. The driver
commits.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import StructType

from dormouse.data.arrow_schema import arrow_type, check_columns, conform
from dormouse.data.leaf_sorter import LeafLookup
from dormouse.data.sketches import KeyQuantiles
from dormouse.errors import (
    ConcurrentScale,
    DormouseError,
    InvalidData,
    InvalidInput,
    JobFailed,
    PartitionNotActive,
)
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.loops import Progress
from dormouse.model.region import KeyValue, Range, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.model.types import DataType
from dormouse.sources.data_files import STDIN, Files, find_files, kind_of, listed_paths
from dormouse.sources.given_rows import are_paths
from dormouse.sources.infer import columns_of_arrow
from dormouse.sources.source import GivenData
from dormouse.sources.source_files import FilePart
from dormouse.spark.frames import backquoted, in_order, numbers_of, rows_at, with_defaults
from dormouse.spark.session import spark_session
from dormouse.spark.shuffle import (
    BLOBS,
    TARGET,
    Gather,
    Scatter,
    Split,
    SplitScatter,
    Targets,
    file_splits,
    read_splits,
    stage,
)
from dormouse.spark.tasks import dormouse_error, run_action
from dormouse.spark.worker import check_arrived, make_folder
from dormouse.state.context import TableContext
from dormouse.state.files.attempts import WriteAttempt
from dormouse.writing.ingest import IngestReport, KeyedRows, check_ingested, ingest_once, keyed_rows

TASK_ROWS_DRAWN = 1_024
SPLITS_MAX = 64
"""The most parts of files from which a sample is drawn; they are spread evenly over all parts."""

_DRAWN = "value binary, weight double"
_DRAWN_COLUMNS = pa.schema([pa.field("value", pa.binary()), pa.field("weight", pa.float64())])
RowSource = DataFrame | Sequence[Split] | Sequence[str]


def ingest_with_spark(
    context: TableContext,
    data: Any,
    *,
    ingest_id: str | None = None,
    spark: SparkSession | None = None,
    progress: Progress | None = None,
    deletes: str | None = None,
) -> IngestReport:
    """Adds the rows of a DataFrame, or of Parquet or CSV files, to a table: all rows or none.

    A repetition with the same `ingest_id` adds nothing. Tasks read the files, so that paths must mean the
    same on every executor. Spark's own reader reads URLs of Parquet files (s3://…). `progress` is called
    once, when all rows are written. Raises the errors of `dormouse.writing.ingest.ingest_in_process`.
    """

    def write(current: TableContext, attempt: WriteAttempt) -> list[FileWithReferences]:
        rows = keyed_rows(current, attempt, deletes)
        source = _source(data, current.schema if rows is None else rows.given)
        session = source.sparkSession if isinstance(source, DataFrame) else spark or spark_session()
        divide(current, source, session)
        files = write_files(current, attempt, source, session, rows)
        if progress is not None:
            written = sum(file.row_count or 0 for file in files)
            progress(written, written)
        return files

    def digest() -> bytes | None:
        # no digest of data that Spark reads, because it would need another read
        is_here = are_paths(data) and not any("://" in path or path == STDIN for path in listed_paths(data))
        return GivenData(data, deletes).digest() if is_here else None

    # a task that Spark repeated or ran twice may still be writing
    return ingest_once(context, ingest_id, write, digest=digest, leftovers=True)


def split_points(
    data: Any, schema: Schema, leaves: int, *, spark: SparkSession | None = None
) -> list[KeyValue]:
    """Returns good split points for `create_table`, which divide such rows into `leaves` leaves.

    Estimates them from a sample. `data` and the errors are those of `ingest_with_spark`.
    """
    source = _source(data, schema)
    session = source.sparkSession if isinstance(source, DataFrame) else spark or spark_session()
    return points_of(source, session, schema, leaves)


def _source(data: Any, schema: Schema) -> DataFrame | list[FilePart] | list[str]:
    """Returns the source that tasks read: a DataFrame, parts of files, or URLs for Spark's reader."""
    if isinstance(data, DataFrame):
        check_fits(data.schema, schema)
        return data
    return _urls(data) or file_splits(find_files(data), schema)


def _urls(data: Any) -> list[str]:
    """Returns the URLs for Spark's own reader; an empty list if tasks of Dormouse read all files."""
    if not are_paths(data):
        raise InvalidData(f"Spark cannot ingest {type(data).__name__}; give a DataFrame, or paths of files")
    listed = listed_paths(data)
    urls = [path for path in listed if "://" in path]
    if urls and (
        len(urls) < len(listed)
        or isinstance(data, Files)
        or any(kind_of(Path(url)) in {"csv", "json"} for url in urls)
    ):
        raise InvalidData(
            f"{urls[0]!r}: read URLs of CSV or JSON, or of several kinds, into a DataFrame first"
        )
    return urls


def check_fits(columns: StructType, schema: Schema) -> None:
    """Raises `InvalidData` if a DataFrame's columns do not fit the schema."""
    check_columns(_arrow_columns(columns), schema)


def columns_read(data: Any) -> dict[str, DataType] | None:
    """Returns the types of the columns, for data that Spark reads; None for files that Dormouse reads."""
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


def write_files(
    context: TableContext,
    attempt: WriteAttempt,
    source: RowSource,
    spark: SparkSession,
    keyed: KeyedRows | None,
) -> list[FileWithReferences]:
    """Runs the Spark job; returns the files that the successful task attempts wrote."""
    make_folder(context.objects)
    lookup = LeafLookup(context.partitions.tree())
    partitions = int(spark.conf.get("spark.sql.shuffle.partitions") or 1)
    targets = Targets.of(len(lookup.leaf_ids), max(partitions, spark.sparkContext.defaultParallelism))
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


def _splits(source: RowSource) -> tuple[Split, ...] | None:
    """Returns the parts that tasks of Dormouse read; None for a DataFrame, and for URLs."""
    if isinstance(source, DataFrame) or any(isinstance(part, str) for part in source):
        return None
    return tuple(cast(Sequence[Split], source))


def _blobs(spark: SparkSession, source: RowSource, scatter: Scatter) -> DataFrame:
    if (splits := _splits(source)) is not None:
        return numbers_of(spark, splits).mapInArrow(stage(SplitScatter(splits, scatter)), BLOBS)
    if not isinstance(source, DataFrame):
        urls = cast(Sequence[str], source)
        source = rows_at(spark, urls)
        check_fits(source.schema, scatter.schema)
        source = with_defaults(spark, source, urls, scatter.schema)
        if scatter.keyed is not None:
            source, files = in_order(spark, source, urls)
            scatter = replace(scatter, files=files)
    return source.mapInArrow(stage(scatter), BLOBS)


@dataclass(frozen=True)
class Draw:
    """A step that draws a random sample of a task's rows, of the first row key.

    Each drawn value is encoded and has a weight: the number of rows for which it stands.
    """

    field: Field
    splits: tuple[Split, ...] | None = None
    """The splits to read, if the batches have numbers of splits; None if the batches have the values."""
    schema: Schema | None = None

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if self.splits is not None and self.schema is not None:
            batches = read_splits(batches, self.splits, self.schema)
        keys, chance = Schema([self.field]), np.random.default_rng()
        rows, kept, lots = 0, pa.array([], arrow_type(self.field.type)), np.empty(0)
        for batch in batches:
            rows += batch.num_rows
            column = conform(batch.select([self.field.name]), keys).column(0)
            lots = np.concatenate([lots, chance.random(batch.num_rows)])
            drawn = np.argsort(lots)[:TASK_ROWS_DRAWN]
            kept, lots = pa.concat_arrays([kept, column]).take(pa.array(drawn)), lots[drawn]
        if rows:
            values = [encode_value(self.field.type, value) for value in kept.to_pylist()]
            weights = np.full(len(values), rows / len(values))
            yield pa.RecordBatch.from_arrays(
                [pa.array(values, pa.binary()), pa.array(weights)], schema=_DRAWN_COLUMNS
            )


def points_of(source: RowSource, spark: SparkSession, schema: Schema, leaves: int) -> list[KeyValue]:
    """Returns ascending values of the first row key that divide the rows into about equal parts.

    Returns fewer than `leaves - 1` values if many rows have the same value. A DataFrame's column is read
    completely, and so is a column of URLs. Of other files, only some parts are read.
    """
    if leaves < 1:
        raise InvalidInput(f"a table has at least 1 leaf, not {leaves}")
    field = schema.row_keys[0]
    try:
        rows = run_action(spark, lambda: _drawn(source, spark, schema).collect())
    except Exception as failure:
        raise dormouse_error(failure) from failure
    items = [(bytes(row.value), row.weight) for row in rows]
    ends = [(value, value) for value, _ in items]
    quantiles = KeyQuantiles(field.type, items, ends)
    return sorted(_halving(quantiles, leaves), key=lambda point: encode_value(field.type, point))


def divide(context: TableContext, source: RowSource, spark: SparkSession) -> None:
    """Divides a table without files into at least `bulk_ingest_leaves_min` leaves, at values from a sample of
    the rows.
    """
    leaves_min, partitions = context.properties.bulk_ingest_leaves_min, context.partitions
    if (
        leaves_min == 1
        or len(leaves := partitions.leaves()) >= leaves_min
        or not context.store.has_no_files()
    ):
        return
    field = context.schema.row_keys[0].name
    points = points_of(source, spark, context.schema, leaves_min)
    for leaf in leaves:
        within = leaf.region.range(field)
        inside = [point for point in points if within.contains(point) and point != within.min]
        if inside:
            # another ingest may have divided the leaf first
            with suppress(PartitionNotActive, ConcurrentScale):
                partitions.scale([leaf.partition_id], [(field, point) for point in _middles(inside)])


def _drawn(source: RowSource, spark: SparkSession, schema: Schema) -> DataFrame:
    draw = Draw(schema.row_keys[0])
    if (splits := _splits(source)) is not None:
        chosen = splits[:: -(-len(splits) // SPLITS_MAX)] if splits else ()
        step = replace(draw, splits=chosen, schema=schema)
        return numbers_of(spark, chosen).mapInArrow(stage(step), _DRAWN)
    frame = source if isinstance(source, DataFrame) else rows_at(spark, cast(Sequence[str], source))
    return frame.select(backquoted(draw.field.name)).mapInArrow(stage(draw), _DRAWN)


def _halving(quantiles: KeyQuantiles, leaves: int) -> list[KeyValue]:
    """Returns split points: repeatedly divides the largest part at its median, until there are enough
    parts.
    """
    points: list[KeyValue] = []
    numbers = count()
    parts = [(0.0, next(numbers), Range())]
    while parts and len(points) < leaves - 1:
        _, _, within = heapq.heappop(parts)
        if (point := quantiles.split_point(within)) is None:
            continue
        points.append(point)
        for part in (replace(within, max=point, max_inclusive=False), replace(within, min=point)):
            heapq.heappush(parts, (-quantiles.row_count(part), next(numbers), part))
    return points


def _middles(points: Sequence[KeyValue]) -> Iterator[KeyValue]:
    """Yields the middle point, then the middle points of the halves, and so on, for a balanced tree."""
    todo = [(0, len(points))]
    for start, end in todo:
        if start < end:
            middle = (start + end) // 2
            yield points[middle]
            todo += [(start, middle), (middle + 1, end)]
