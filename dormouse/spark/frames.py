"""Tables as DataFrames of Spark's own reader, as far as it can give their rows; the rest by tasks of ours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from dormouse.data.transform import Transform
from dormouse.model.cut import Position, When
from dormouse.model.keyed import is_keyed
from dormouse.model.types import DataType
from dormouse.objects.names import schema_version_of
from dormouse.reading.checked_files import checked_sizes
from dormouse.reading.deletions import Deletion
from dormouse.reading.executor import Part, columns_of, parts
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.planner import Scan
from dormouse.reading.where import Question, Where, question
from dormouse.spark.conditions import backquoted, in_slices, meets, remains
from dormouse.spark.parquet_urls import AS_WRITTEN
from dormouse.spark.shuffle import stage
from dormouse.spark.worker import on_worker
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.history.moments import now, now_together, position_of

if TYPE_CHECKING:
    from dormouse.writing.ingest_commit import IngestReport

WAYS_MAX = 32
"""In how many ways files are read by Spark itself, each a DataFrame; tasks of ours read the others."""
_PATTERNS = frozenset("{}[]*?\\")
"""What Spark would take for a pattern in the name of a file."""
_Way = tuple[tuple[KeyRanges, ...], tuple[Deletion, ...]]


class Tabular(Protocol):
    """What is needed of a `Table`."""

    @property
    def context(self) -> TableContext: ...

    def ingest(self, data: DataFrame, *, ingest_id: str | None = None) -> IngestReport: ...


class WithTables(Protocol):
    """What is needed of an `Instance`."""

    def tables(self) -> Sequence[Tabular]: ...


def read(
    spark: SparkSession,
    table: Tabular,
    where: Where = None,
    columns: Sequence[str] | None = None,
    *,
    as_of: When | None = None,
) -> DataFrame:
    """The rows of a table, of now or of another moment, as a DataFrame; in no order.

    `where`, `columns` and `as_of` are those of `Table.query`. It has the rows of one moment whenever it is
    used, as long as the table's properties keep their files. Whole files are left to Spark's own reader,
    which prunes columns and rows; where rows must be merged first, tasks of ours read them.
    """
    context = table.context
    at = now(context) if as_of is None else position_of(context, as_of)
    return _frame(spark, context, where, columns, at)


def view(spark: SparkSession, instance: WithTables, *, as_of: When | None = None) -> list[str]:
    """Makes a temporary view of each table, as `read` gives it, all of one moment; gives their names."""
    contexts = [table.context for table in instance.tables()]
    moments = now_together(contexts) if as_of is None else [position_of(one, as_of) for one in contexts]
    for context, at in zip(contexts, moments, strict=True):
        _frame(spark, context, None, None, at).createOrReplaceTempView(f"`{context.table.name}`")
    return [context.table.name for context in contexts]


def write(frame: DataFrame, table: Tabular, *, ingest_id: str | None = None) -> IngestReport:
    """Adds a DataFrame's rows, moved to their leaves first: a file a leaf; see `Table.ingest`."""
    return table.ingest(frame, ingest_id=ingest_id)


def _frame(
    spark: SparkSession,
    context: TableContext,
    where: Where,
    columns: Sequence[str] | None,
    at: Position,
) -> DataFrame:
    context = context.as_of(at)
    asked = question(context.schema, where, columns, None)
    found = list(parts(context, asked, at))
    transform = Transform.parse(context.schema, context.properties)
    frames = []
    merges = transform.aggregates or transform.age_off or is_keyed(context.properties)
    # Spark's own reader compares no digests
    if not (merges or context.verifies or _PATTERNS & set(context.objects.url)):
        plain, found = _divided(found, context.schema.version)
        frames = [_of_files(spark, context, asked, way, scans) for way, scans in plain.items()]
    if found or not frames:
        frames.append(_of_parts(spark, context, asked, found))
    return reduce(DataFrame.unionAll, frames)


def _divided(found: Iterable[Part], version: int) -> tuple[Mapping[_Way, list[Scan]], list[Part]]:
    """The files that Spark reads, by what is wanted of them; and the parts with what is left.

    Those of other versions of the schema are left: their columns may have other names.
    """
    by_way: dict[_Way, dict[str, Scan]] = defaultdict(dict)
    left = []
    for part in found:
        rest = [
            tuple(
                one for one in group if schema_version_of(one.filename) != version or not _taken(by_way, one)
            )
            for group in part.groups
        ]
        if any(rest):
            left.append(replace(part, groups=tuple(group for group in rest if group)))
    return {way: list(scans.values()) for way, scans in by_way.items()}, left


def _taken(by_way: dict[_Way, dict[str, Scan]], scan: Scan) -> bool:
    way = scan.slices, scan.deletions
    # the slices of a file's scans in several groups are disjoint, but may be equal only by name
    if (way not in by_way and len(by_way) == WAYS_MAX) or scan.filename in by_way.get(way, ()):
        return False
    by_way[way][scan.filename] = scan
    return True


def _of_files(
    spark: SparkSession, context: TableContext, asked: Question, way: _Way, scans: Sequence[Scan]
) -> DataFrame:
    """What Spark reads of files of which the same is wanted."""
    schema, (slices, deletions) = context.schema, way
    whole = struct_of(columns_of(schema, schema.names))
    # no folder's name is a column
    reader = spark.read.schema(whole).options(**AS_WRITTEN, recursiveFileLookup="true")
    if any(_has_zeros(field.type) for field in schema.fields):
        # in a dictionary that has one zero alone, it does not find the other
        reader = reader.option("parquet.filter.dictionary.enabled", "false")
    with checked_sizes(context, scans):
        frame = reader.parquet(*(context.objects.uri(scan.filename) for scan in scans))
    conditions: list[Column | None] = [
        in_slices(schema, slices),
        remains(schema, deletions),
        *map(meets, asked.conditions),
    ]
    for condition in conditions:
        frame = frame if condition is None else frame.where(condition)
    return frame.select(*map(backquoted, asked.columns))


def _has_zeros(kind: DataType) -> bool:
    """Whether values, or parts of them, may be 0.0 and -0.0, which are equal."""
    return kind.is_floating or any(_has_zeros(part.type) for part in kind.parts)


@dataclass(frozen=True)
class _ReadParts:
    """What a task does: it takes numbers of parts, and gives their rows."""

    address: TableAddress
    parts: Sequence[Part]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with on_worker(self.address) as context:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from self.parts[number].rows(context)


def _of_parts(
    spark: SparkSession, context: TableContext, asked: Question, found: Sequence[Part]
) -> DataFrame:
    count = len(found)
    numbers = spark.range(0, count, 1, max(1, count))
    schema = struct_of(columns_of(context.schema, asked.columns))
    return numbers.mapInArrow(stage(_ReadParts(context.address, found)), schema)


def struct_of(columns: pa.Schema) -> StructType:
    """Columns as Spark has them."""
    found: StructType = from_arrow_schema(columns)
    return found
