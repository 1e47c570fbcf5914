"""Tables as DataFrames of Spark's own reader, as far as it can give their rows; the rest by tasks of ours."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa
from pyspark.sql import Column, DataFrame, DataFrameReader, SparkSession
from pyspark.sql.functions import coalesce, col, date_from_unix_date, lit, timestamp_micros, unhex
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
from dormouse.reading.where import Question, Where, question
from dormouse.spark.shuffle import FILE, ROW_OF_FILE, plain_name, stage
from dormouse.spark.worker import on_worker
from dormouse.state.context import TableAddress, TableContext
from dormouse.state.history.moments import now, now_together, position_of

if TYPE_CHECKING:
    from dormouse.writing.ingest import IngestReport

# Parquet files as Spark's own reader has them, whatever the session says of its reads.

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


class _Spark(Engine[Column]):
    """Filters as Spark's expressions."""

    def always(self, value: bool) -> Column:
        return lit(value)

    def among(self, field: Field, values: Sequence[Any]) -> Column:
        return _column(field).isin(*(_literal(field, value) for value in values))

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
    """Days and instants as numbers: what Python's become in Java depends on a calendar."""
    if field.type == BYTES:
        return unhex(lit(value.hex()))
    if field.type == TIMESTAMP:
        return timestamp_micros(lit(number_of_value(value)))
    if field.type == DATE:
        return date_from_unix_date(lit(number_of_value(value)))
    return lit(value)


def backquoted(name: str) -> str:
    """A column's name in Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def _column(field: Field) -> Column:
    return col(backquoted(field.name))


WAYS_MAX = 32
"""In how many ways files are read by Spark itself, each a DataFrame; tasks of ours read the others."""
_PATTERNS = frozenset("{}[]*?\\")
"""What Spark would take for a pattern in the name of a file."""


class Tabular(Protocol):
    """What is needed of a `Table`."""

    @property
    def context(self) -> TableContext: ...

    def ingest(
        self, data: DataFrame, *, ingest_id: str | None = None, evolve: Evolve | None = None
    ) -> IngestReport: ...


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


def write(
    frame: DataFrame, table: Tabular, *, ingest_id: str | None = None, evolve: Evolve | None = None
) -> IngestReport:
    """Adds a DataFrame's rows, moved to their leaves first: a file a leaf; see `Table.ingest`."""
    return table.ingest(frame, ingest_id=ingest_id, evolve=evolve)


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
        frames = [_of_files(spark, context, asked, way, scans) for way, scans in plain]
    if found or not frames:
        frames.append(_of_parts(spark, context, asked, found))
    return reduce(DataFrame.unionAll, frames)


def _divided(found: Sequence[Part], version: int) -> tuple[list[tuple[Way, list[Scan]]], list[Part]]:
    """The files that Spark reads, by what is wanted of them; and the parts with what is left.

    Those of other versions of the schema are left: their columns may have other names.
    """
    scans = [scan for part in found for group in part.groups for scan in group]
    ways = ways_of((one for one in scans if one.schema_version == version), attrgetter("schema_version"))
    # the slices of a file's scans in several groups are disjoint, but may be equal only by name
    firsts = [
        (way, list({scan.filename: scan for scan in reversed(some)}.values())[::-1])
        for way, some in islice(ways.items(), WAYS_MAX)
    ]
    taken = {id(scan) for _, some in firsts for scan in some}
    left = [
        replace(part, groups=groups)
        for part in found
        if (groups := tuple(filter(None, (tuple(s for s in g if id(s) not in taken) for g in part.groups))))
    ]
    return firsts, left


def _of_files(
    spark: SparkSession, context: TableContext, asked: Question, way: Way, scans: Sequence[Scan]
) -> DataFrame:
    """What Spark reads of files of which the same is wanted."""
    schema = context.schema
    with checked_sizes(context, scans):
        read = reader(spark, schema, [scan.filename for scan in scans])
        frame = read.parquet(*(context.objects.uri(scan.filename) for scan in scans))
    counts = (in_slices(schema, way.slices), remains(schema, way.deletions))
    for wanted in (*counts, *map(meets, asked.conditions)):
        frame = frame if wanted == EVERY_ROW else frame.where(rendered(wanted, SPARK))
    return frame.select(*map(backquoted, asked.columns))


def reader(spark: SparkSession, schema: Schema, filenames: Iterable[str]) -> DataFrameReader:
    """Returns a reader of files of a table, which skips by nothing that leaves a value out."""
    whole = struct_of(columns_of(schema, schema.names))
    # no folder's name is a column
    found = spark.read.schema(whole).options(**AS_WRITTEN, recursiveFileLookup="true")
    if not any(_is_floating(field.type) for field in schema.fields):
        return found
    # in a dictionary that has one zero alone, Spark does not find the other
    found = found.option("parquet.filter.dictionary.enabled", "false")
    if all(name.endswith(PARQUET_SUFFIX) for name in filenames):
        return found
    # minima and maxima leave NaN out, which is the largest number; our files have none
    statistics = ("parquet.filter.stats.enabled", "parquet.filter.columnindex.enabled")
    return found.options(**dict.fromkeys(statistics, "false"))


def _is_floating(kind: ColumnType) -> bool:
    """Whether values, or parts of them, may be NaN, or 0.0 and -0.0, which are equal."""
    return kind.is_floating or any(_is_floating(part.type) for part in kind.parts)


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
