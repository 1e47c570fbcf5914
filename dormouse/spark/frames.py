"""Tables as DataFrames.

Spark's own Parquet reader reads files where it can. Tasks of Dormouse read the rest, such as rows to merge.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql.functions import coalesce, col, date_from_unix_date, lit, timestamp_micros, unhex, when
from pyspark.sql.pandas.types import from_arrow_schema, from_arrow_type, to_arrow_type
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
from dormouse.data.transform import Transform
from dormouse.model.cut import Position, When
from dormouse.model.file_reference import is_inlined
from dormouse.model.region import number_of_value
from dormouse.model.reshaping import Evolve
from dormouse.model.schema import Field, Schema
from dormouse.model.table import is_keyed
from dormouse.model.types import BYTES, DATE, TIMESTAMP
from dormouse.model.types import DataType as ColumnType
from dormouse.objects.names import PARQUET_SUFFIX
from dormouse.reading.checked_files import checked_sizes
from dormouse.reading.executor import Part, columns_of, parts
from dormouse.reading.planner import Scan, Way, ways_of
from dormouse.reading.row_filter import EVERY_ROW, SIGNS, Engine, in_slices, meets, remains, rendered
from dormouse.reading.row_sets import RowSet
from dormouse.reading.where import Question, Where, question
from dormouse.spark.shuffle import FILE, ROW_OF_FILE, plain_name, stage
from dormouse.spark.worker import on_worker
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.history.moments import now, now_together, position_of

if TYPE_CHECKING:
    from dormouse.writing.ingest import IngestReport

# Parquet files read by Spark's own reader, independent of the session's settings.

AS_WRITTEN = {
    "datetimeRebaseMode": "CORRECTED",
    "int96RebaseMode": "CORRECTED",
    "ignoreMissingFiles": "false",
    "ignoreCorruptFiles": "false",
}
"""The options of Spark's reads: dates are not converted to another calendar, and missing files are errors."""

_CANNOT_MERGE = "[CANNOT_MERGE_SCHEMAS]"
_WIDENED = (
    (ByteType(), ShortType(), IntegerType(), LongType()),
    (ByteType(), ShortType(), IntegerType(), DoubleType()),
    (FloatType(), DoubleType()),
)
"""Lists of types, each from narrow to wide. Spark can read a column as a wider type, but does not
choose it.
"""
_PATTERN = re.compile(r"[*?\[\]{}\\]")
_VECTORIZED = (
    "spark.sql.parquet.enableVectorizedReader",
    "spark.sql.parquet.enableNestedColumnVectorizedReader",
)
"""Settings that the reads of defaults need: Spark's other reader may return null in place of a default."""
_DEFAULT = "EXISTS_DEFAULT"
"""The key in a column's metadata for its default as SQL. Spark uses the default for files without the
column.
"""


def rows_at(spark: SparkSession, urls: Sequence[str]) -> DataFrame:
    """Returns the rows of files and folders, with the columns of all files merged.

    A column of numbers gets the widest type that it has in any file.
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
    """Returns the merged columns of all files. If Spark cannot merge them, divides the files and recurses."""
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
    """Returns the rows that `rows_at` gave, with the table's default wherever a row's file lacks a column."""
    fields = [_with_default(field, schema) for field in frame.schema]
    if not any(_DEFAULT in field.metadata for field in fields):
        return frame
    if any(spark.conf.get(name) != "true" for name in _VECTORIZED):
        spark = spark.newSession()
        for name in _VECTORIZED:
            spark.conf.set(name, "true")
    rows = spark.read.options(**AS_WRITTEN).schema(StructType(fields)).parquet(*urls)
    pairs = zip(frame.schema, fields, strict=True)
    as_text = [field.name for field, read in pairs if field.dataType == BinaryType() != read.dataType]
    quoted = {name: f"`{name.replace('`', '``')}`" for name in as_text}
    return rows.withColumns({name: rows[column].cast(BinaryType()) for name, column in quoted.items()})


def _with_default(field: StructField, schema: Schema) -> StructField:
    default = schema.default(field.name)
    if default is None:
        return field
    kind = arrow_type(schema.field(field.name).type)
    # the type in the files may be too narrow for the default
    chosen = field.dataType if _holds(field.dataType, pa.scalar(default, kind)) else from_arrow_type(kind)
    if chosen == BinaryType():
        chosen = StringType()  # Spark's vectorized reader lacks defaults of bytes; a string can be any bytes
    metadata = {**field.metadata, _DEFAULT: _sql(default, chosen)}
    return StructField(field.name, chosen, field.nullable, metadata)


def _holds(kind: DataType, value: pa.Scalar) -> bool:
    """Returns whether a type can hold a value exactly."""
    try:
        return bool(value.cast(to_arrow_type(kind)).cast(value.type).equals(value))
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False


def _sql(value: Any, kind: DataType) -> str:
    # hexadecimal, because the escapes of string literals depend on a setting of the session
    encoded = value.encode() if isinstance(value, str) else value
    text = f"X'{encoded.hex()}'" if isinstance(encoded, bytes) else f"'{value}'"
    return f"CAST({text} AS {kind.simpleString()})"


def in_order(spark: SparkSession, frame: DataFrame, urls: Sequence[str]) -> tuple[DataFrame, dict[str, int]]:
    """Returns the rows of `rows_at` with two more columns, and a number for each file.

    The columns are a row's file and the row's position in that file. The numbers follow the order of the
    URLs, and within a folder the order of names. (Spark itself begins with the largest file.)
    """
    reader = spark.read.options(**AS_WRITTEN).schema(frame.schema)
    names = _plain_names(reader.parquet(*urls))
    files = [file for url in urls for file in _under(url, names) or _plain_names(reader.parquet(url))]
    place = frame.metadataColumn("_metadata")
    places = [place.getField("file_path").alias(FILE), place.getField("row_index").alias(ROW_OF_FILE)]
    # a file that is given twice gets its last number; its rows are the same
    return frame.select("*", *places), {"/".join(name): number for number, name in enumerate(files)}


def _plain_names(frame: DataFrame) -> list[list[str]]:
    """Returns the sorted names of a frame's files, each divided at its slashes."""
    return sorted(plain_name(name).split("/") for name in frame.inputFiles())


def _under(url: str, names: Sequence[list[str]]) -> Sequence[list[str]]:
    """Returns the names that are below a URL; none if the URL is a pattern, whose files must be listed."""
    if _PATTERN.search(url):
        return []
    *folder, last = re.sub("^file:/+", "file:/", url.rstrip("/")).split("/")
    return names[bisect_left(names, [*folder, last]) : bisect_left(names, [*folder, f"{last}\0"])]


class _Spark(Engine[Column]):
    """The engine that writes filters as Spark's expressions."""

    def always(self, value: bool) -> Column:
        return lit(value)

    def among(self, field: Field, values: Sequence[Any]) -> Column:
        return _column(field).isin(*(_literal(field, value) for value in values))

    def searched(self, field: Field, point: Any, below: Column, rest: Column) -> Column:
        return when(self.compared(field, "<", point), below).otherwise(rest)

    def compared(self, field: Field, sign: str, value: Any) -> Column:
        found: Column = SIGNS[sign](_column(field), _literal(field, value))
        return found

    def is_null(self, field: Field) -> Column:
        return _column(field).isNull()

    def is_not_null(self, field: Field) -> Column:
        return _column(field).isNotNull()

    def fails(self, part: Column) -> Column:
        return ~coalesce(part, lit(False))


SPARK: Engine[Column] = _Spark()


def _literal(field: Field, value: Any) -> Column:
    """Returns a value as a literal of Spark. A date or time becomes a number, which needs no calendar."""
    if field.type == BYTES:
        return unhex(lit(value.hex()))
    if field.type == TIMESTAMP:
        return timestamp_micros(lit(number_of_value(value)))
    if field.type == DATE:
        return date_from_unix_date(lit(number_of_value(value)))
    return lit(value)


def backquoted(name: str) -> str:
    """Returns a column's name quoted for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def _column(field: Field) -> Column:
    return col(backquoted(field.name))


WAYS_MAX = 32
"""The most groups of files that Spark's reader reads. Each group has its own filters and is one DataFrame."""
_PATTERNS = frozenset("{}[]*?\\")
"""Characters of a file name that Spark would take for a pattern."""


class Tabular(Protocol):
    """The methods of a `Table` that this module needs."""

    @property
    def context(self) -> TableContext: ...

    def changing(self) -> AbstractContextManager[None]: ...

    def ingest(
        self, data: DataFrame, *, ingest_id: str | None = None, evolve: Evolve | None = None
    ) -> IngestReport: ...


class WithTables(Protocol):
    """The methods of an `Instance` that this module needs."""

    def tables(self) -> Sequence[Tabular]: ...


def read(
    spark: SparkSession,
    table: Tabular,
    where: Where = None,
    columns: Sequence[str] | None = None,
    *,
    as_of: When | None = None,
) -> DataFrame:
    """Returns the rows of a table as a DataFrame, in no order, at present or at another moment.

    `where`, `columns` and `as_of` are those of `Table.query`. The DataFrame always shows the rows of one
    moment. It can be used as long as the table's properties keep the files of that moment. Where files need
    no merging, Spark's own reader reads them and skips columns and rows. Tasks of Dormouse read the rows that
    must be merged first.
    """
    context = table.context
    at = now(context) if as_of is None else position_of(context, as_of)
    return rows_of(spark, context, where, columns, at)


def view(spark: SparkSession, instance: WithTables, *, as_of: When | None = None) -> list[str]:
    """Makes a temporary view of each table, all at one moment, with the rows of `read`. Returns their
    names.
    """
    contexts = [table.context for table in instance.tables()]
    if as_of is None:
        moments = now_together(contexts)
    else:
        moments = [position_of(context, as_of) for context in contexts]
    for context, at in zip(contexts, moments, strict=True):
        rows_of(spark, context, None, None, at).createOrReplaceTempView(f"`{context.table.name}`")
    return [context.table.name for context in contexts]


def write(
    frame: DataFrame, table: Tabular, *, ingest_id: str | None = None, evolve: Evolve | None = None
) -> IngestReport:
    """Adds a DataFrame's rows to a table, as one file for each leaf. See `Table.ingest`."""
    return table.ingest(frame, ingest_id=ingest_id, evolve=evolve)


def rows_of(
    spark: SparkSession,
    context: TableContext,
    where: Where,
    columns: Sequence[str] | None,
    at: Position,
) -> DataFrame:
    """Returns the rows of a table as of a moment; see `read`."""
    context = context.as_of(at)
    query = question(context.schema, where, columns, None)
    left = list(parts(context, query, at))
    transform = Transform.parse(context.schema, context.properties)
    frames = []
    merges = transform.aggregates or transform.age_off or is_keyed(context.properties)
    # Spark's own reader compares no digests
    if not (merges or context.verifies or _PATTERNS & set(context.objects.url)):
        plain, left = _divided(left, context.schema.version)
        frames = [_of_files(spark, context, query, way, scans) for way, scans in plain]
    if left or not frames:
        frames.append(_of_parts(spark, context, query, left))
    return reduce(DataFrame.unionAll, frames)


def _divided(planned: Sequence[Part], version: int) -> tuple[list[tuple[Way, list[Scan]]], list[Part]]:
    """Returns the files for Spark's reader, grouped by their filters, and the parts with all other files.

    Files of other schema versions are among those others, because their columns may have other names. So are
    inlined files, of which the store has no objects, and files with deletions of many rows.
    """
    scans = [scan for part in planned for group in part.groups for scan in group]
    readable = (
        scan
        for scan in scans
        if scan.schema_version == version
        and not is_inlined(scan.filename)
        and not any(isinstance(one.rows, RowSet) for one in scan.deletions)
    )
    ways = ways_of(readable, attrgetter("schema_version"))
    # the slices of a file's scans in several groups are disjoint, but may be equal only by name
    firsts = [
        (way, list({scan.filename: scan for scan in reversed(alike)}.values())[::-1])
        for way, alike in islice(ways.items(), WAYS_MAX)
    ]
    taken = {id(scan) for _, alike in firsts for scan in alike}
    left = [
        replace(part, groups=groups)
        for part in planned
        if (groups := tuple(filter(None, (tuple(s for s in g if id(s) not in taken) for g in part.groups))))
    ]
    return firsts, left


def _of_files(
    spark: SparkSession, context: TableContext, query: Question, way: Way, scans: Sequence[Scan]
) -> DataFrame:
    """Returns a DataFrame of the rows of files that have the same filters; Spark reads these files."""
    schema = context.schema
    with checked_sizes(context, scans):
        read = reader(spark, schema, [scan.filename for scan in scans])
        frame = read.parquet(*(context.objects.uri(scan.filename) for scan in scans))
    counts = (in_slices(schema, way.slices), remains(schema, way.deletions))
    for wanted in (*counts, *map(meets, query.conditions)):
        frame = frame if wanted == EVERY_ROW else frame.where(rendered(wanted, SPARK))
    return frame.select(*map(backquoted, query.columns))


def reader(spark: SparkSession, schema: Schema, filenames: Iterable[str]) -> DataFrameReader:
    """Returns a Spark reader of a table's files, without the filters that would miss some floats."""
    whole = struct_of(columns_of(schema, schema.names))
    # keeps Spark from taking folder names such as `x=1` for columns
    chosen = spark.read.schema(whole).options(**AS_WRITTEN, recursiveFileLookup="true")
    if not any(_is_floating(field.type) for field in schema.fields):
        return chosen
    # if a dictionary has only one of 0.0 and -0.0, Spark does not find it by the other
    chosen = chosen.option("parquet.filter.dictionary.enabled", "false")
    if all(name.endswith(PARQUET_SUFFIX) for name in filenames):
        return chosen
    # minima and maxima of other writers leave out NaN; in Dormouse's files, floats have no statistics
    statistics = ("parquet.filter.stats.enabled", "parquet.filter.columnindex.enabled")
    return chosen.options(**dict.fromkeys(statistics, "false"))


def _is_floating(kind: ColumnType) -> bool:
    """Returns whether a type's values, or parts of them, are floats, which may be NaN, or 0.0 and -0.0."""
    return kind.is_floating or any(_is_floating(part.type) for part in kind.parts)


@dataclass(frozen=True)
class _ReadParts:
    """A task's function: receives numbers of parts, and yields the rows of these parts."""

    address: TableAddress
    parts: Sequence[Part]

    def run(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        with on_worker(self.address) as context:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    yield from self.parts[number].rows(context)


def _of_parts(
    spark: SparkSession, context: TableContext, query: Question, listed: Sequence[Part]
) -> DataFrame:
    schema = struct_of(columns_of(context.schema, query.columns))
    return numbers_of(spark, listed).mapInArrow(stage(_ReadParts(context.address, listed)), schema)


def numbers_of(spark: SparkSession, parts: Sequence[Any]) -> DataFrame:
    """Returns the numbers of some parts, one for each task."""
    return spark.range(0, len(parts), 1, max(1, len(parts)))


def struct_of(columns: pa.Schema) -> StructType:
    """Returns an Arrow schema as a schema of Spark."""
    struct: StructType = from_arrow_schema(columns)
    return struct
