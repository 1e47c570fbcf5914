"""Where a table is best divided, told by a sample of the rows that it will get; and how an empty one is."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from dormouse.data.arrow_schema import arrow_type, conform
from dormouse.data.sketches import KeyQuantiles
from dormouse.errors import ConcurrentScale, InvalidInput, PartitionNotActive
from dormouse.model.region import KeyValue, Range, encode_value
from dormouse.model.schema import Field, Schema
from dormouse.sources.source_files import FilePart
from dormouse.spark.frames import backquoted, rows_at
from dormouse.spark.shuffle import stage
from dormouse.spark.splits import read_splits
from dormouse.spark.tasks import dormouse_error, run_action
from dormouse.state.context import TableContext

TASK_ROWS_DRAWN = 1_024
SPLITS_MAX = 64
"""Of so many parts of files, evenly among all, a sample is drawn."""

_DRAWN = "value binary, weight double"
_DRAWN_COLUMNS = pa.schema([pa.field("value", pa.binary()), pa.field("weight", pa.float64())])
RowSource = DataFrame | Sequence[FilePart] | Sequence[str]


@dataclass(frozen=True)
class Draw:
    """Some values of the first row key of a task's rows, encoded, and for how many rows each stands."""

    field: Field
    splits: tuple[FilePart, ...] | None = None
    """Of which the batches have numbers; None: they have the values."""
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
    """Values of the first row key that divide the rows into so many parts of about equal size, ascending.

    Fewer where many rows have the same value. The column is read once; of DataFrames and URLs all of it.
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
    """Makes at least `bulk_ingest_leaves_min` leaves of a table without files, where its rows will be."""
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
            # another that does the same may be ahead
            with suppress(PartitionNotActive, ConcurrentScale):
                partitions.scale([leaf.partition_id], [(field, point) for point in _middles(inside)])


def _drawn(source: RowSource, spark: SparkSession, schema: Schema) -> DataFrame:
    draw = Draw(schema.row_keys[0])
    if not isinstance(source, DataFrame) and all(isinstance(part, FilePart) for part in source):
        some = tuple(cast(Sequence[FilePart], source)[:: -(-len(source) // SPLITS_MAX)]) if source else ()
        numbers = spark.range(0, len(some), 1, max(1, len(some)))
        return numbers.mapInArrow(stage(replace(draw, splits=some, schema=schema)), _DRAWN)
    frame = source if isinstance(source, DataFrame) else rows_at(spark, cast(Sequence[str], source))
    return frame.select(backquoted(draw.field.name)).mapInArrow(stage(draw), _DRAWN)


def _halving(quantiles: KeyQuantiles, leaves: int) -> list[KeyValue]:
    """The largest part is divided at its median, again and again."""
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
    """The middle one first, then those of the halves: a balanced tree."""
    todo = [(0, len(points))]
    for start, end in todo:
        if start < end:
            middle = (start + end) // 2
            yield points[middle]
            todo += [(start, middle), (middle + 1, end)]
