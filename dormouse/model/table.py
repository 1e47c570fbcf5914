"""The properties of tables, the rules of keyed tables and row tables, and a table's record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from json import dumps, loads
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Option

from dormouse.errors import InvalidInput, InvalidName, InvalidProperties, NotARowTable
from dormouse.model.schema import FIELDS_MAX, Column, Field, Schema, Stage
from dormouse.model.text import did_you_mean
from dormouse.model.types import BOOLEAN, LONG, TIMESTAMP, DataType

if TYPE_CHECKING:
    import pyarrow as pa

SECONDS_MAX = 100 * 365.25 * 86_400
READERS_SECONDS = 900
"""The least time that an object still exists after a reader has looked up its name."""
KEPT_SECONDS = 86_400
"""The time that an object stays after its last reference was removed, or after its writer stopped.

It is also the default of the other delays before a deletion.
"""
INT_MAX = (1 << 31) - 1
REPLACED_ROWS_MAX = 100_000
"""The most rows of small files beside a large one of a keyed table that readers leave out of it by number.

More rows are left out by a join of the keys, which costs as much as reading the large file again.
"""
ROWS_MAX = (1 << 63) - 1

ROW_ID, ROW_VERSION, ROW_DELETED = "ROW_ID", "ROW_VERSION", "ROW_DELETED"
DROPPED = "_dropped_"
"""The prefix of the names of dropped columns, which older versions of rows still have."""
VERSIONS = "$versions"
"""A suffix of a row table's name: the name then means the table of all versions of its rows."""

SEQUENCE = "__sequence"
"""A hidden column of keyed tables: the number of the load that added the row."""
DELETED_AT = "__deleted_at"
"""A hidden column of keyed tables: the time when a row was marked as deleted, or null if it exists."""
HIDDEN_COLUMNS = (SEQUENCE, DELETED_AT)
_HIDDEN_IDS = ((1 << 31) - 3, (1 << 31) - 2)
"""The column ids of the two hidden columns. No added column gets so high a number."""
NEWEST_ROW = "newest_row"

TABLE_NAME_LENGTH_MAX = 128
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Engine = Literal["auto", "local", "spark"]
"""The program that sorts, writes and merges files."""

ProblemKind = Literal[
    "object_missing",
    "object_size",
    "object_unknown",
    "reference_without_file",
    "file_without_reference",
    "partitions",
    "totals",
    "object_digest",
    "object_unreadable",
    "row_count",
    "key_range",
    "not_sorted",
    "statistics",
]
"""The kinds of problems that a check finds."""


class TableProperties(BaseModel):
    """The properties of a table. Invalid values raise `InvalidProperties`, with all mistakes in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gc_delay_seconds: float = Option(
        READERS_SECONDS,
        ge=0,
        le=SECONDS_MAX,
        description="how long a file stays after its last reference was removed",
    )
    gc_batch_files: int = Option(10_000, ge=1, le=INT_MAX, description="files deleted in one transaction")
    history_retention_seconds: float = Option(
        KEPT_SECONDS,
        ge=0,
        le=SECONDS_MAX,
        description="how far back the table can be read as it was; with gc_delay_seconds 0, only as far "
        "back as consumers and cuts hold files (cuts that maintenance records hold none then)",
    )
    consumer_expiry_seconds: float = Option(
        604_800,
        ge=0,
        le=SECONDS_MAX,
        description="how long a consumer that acknowledges nothing holds files",
    )
    attempt_expiry_seconds: float = Option(
        KEPT_SECONDS,
        ge=0,
        le=SECONDS_MAX,
        description="how long the files of a job that never committed are kept",
    )
    compaction_strategy: Literal["size_ratio", "basic"] = Option(
        "size_ratio",
        description="size_ratio: a job merges files of similar size; basic: it merges the smallest files",
    )
    compaction_batch_files: int = Option(12, ge=2, le=INT_MAX, description="files merged by one job, at most")
    size_ratio: float = Option(
        3,
        gt=0,
        description="files are merged if all but the largest add up to at least this many times the largest; "
        "half the number of a job's other files, if it has too few for that; at most 0.25 in a keyed table",
    )
    deletions_max: int = Option(
        100, ge=1, le=INT_MAX, description="pending deletions of a file's keys; a file with more is compacted"
    )
    compaction_jobs_max: int = Option(100_000, ge=1, le=INT_MAX, description="jobs created in one run")
    compaction_task_bytes: int = Option(
        1024 * 1024 * 1024,
        ge=1,
        le=ROWS_MAX,
        description="in Spark, a job of at least twice this many bytes is divided into tasks by key ranges",
    )
    compaction_attempts_max: int = Option(
        3, ge=1, le=INT_MAX, description="attempts of a job before it is given up"
    )
    split_threshold_rows: int = Option(
        1_000_000_000, ge=2, le=ROWS_MAX, description="rows from which a leaf is split"
    )
    split_min_rows: int = Option(
        1_000,
        ge=2,
        le=ROWS_MAX,
        description="rows that a leaf must certainly have to be split",
    )
    merge_threshold_rows: int | None = Option(
        None,
        ge=1,
        le=ROWS_MAX,
        description="leaves with fewer rows together are merged; none: leaves are not merged",
    )
    ingest_file_writing: Literal["one_file_per_leaf", "one_reference_per_leaf"] = Option(
        "one_file_per_leaf",
        description="one_file_per_leaf: an ingest writes a file for each leaf; one_reference_per_leaf: it "
        "writes one file, to which each leaf has a reference",
    )
    inline_bytes_max: int = Option(
        65_536,
        ge=0,
        le=1024 * 1024,
        description="an ingest whose files have at most this many bytes each keeps them in the database "
        "until they are compacted; 0: every ingest writes objects",
    )
    inline_total_bytes_max: int = Option(
        64 * 1024 * 1024,
        ge=0,
        le=ROWS_MAX,
        description="bytes of such files in the database; near this number, ingests write objects, and "
        "compaction is due at once",
    )
    inline_seconds_max: float = Option(
        3_600,
        ge=0,
        le=SECONDS_MAX,
        description="how long such files stay in the database before maintenance writes them as objects",
    )
    bulk_ingest_leaves_min: int = Option(
        1,
        ge=1,
        le=100_000,
        description="least number of leaves into which a Spark ingest first divides an empty "
        "table, by a sample of the rows",
    )
    row_group_bytes: int = Option(
        16 * 1024 * 1024, ge=64 * 1024, le=INT_MAX, description="size of a row group before encoding"
    )
    bloom_filter_columns: str | None = Option(
        None,
        description="e.g. 'order_id, customer': columns (INT, LONG, STRING, BYTES; not the first row key) "
        "with many distinct values that queries look up singly; new files grow by 1 to 2 bytes a value",
    )
    compression: Literal["zstd", "snappy", "lz4", "none"] = Option(
        "zstd", description="the compression of Parquet files"
    )
    keep: Literal["every_row", "newest_row"] = Option(
        "every_row",
        description="newest_row: keep only the newest row for each row key; chosen when the table is made",
    )
    rows: Literal["loaded", "edited"] = Option(
        "loaded",
        description="edited: the table of a row table, which alone changes it; chosen when the table is made",
    )
    newest_by: str | None = Option(
        None,
        description="with keep='newest_row': the value column whose largest value marks the newest row; if "
        "values are equal, or without it, the row whose load began last is the newest",
    )
    deletion_marks_seconds: float | None = Option(
        None,
        ge=0,
        le=SECONDS_MAX,
        description="with newest_by: how long a deleted key is remembered after its rows were removed; an "
        "older row that is loaded after that comes back; none: without limit",
    )
    aggregate: str | None = Option(
        None, description="e.g. 'sum(count), max(last_seen)'; a total that LONG cannot hold is an error"
    )
    filter: str | None = Option(None, description="e.g. 'age_off(time, 86400000)'")
    salt_buckets: int = Option(
        128,
        ge=1,
        le=32_767,
        description="rows over which a file's count of references is split (layout salted_counts)",
    )
    commit: Literal["async", "sync"] = Option(
        "async",
        description="async: where a committer runs, jobs commit through its queue, many in a transaction, "
        "and wait until the commit is visible; sync, in Spark or without a committer: one transaction each",
    )
    isolation: Literal["read committed", "serializable"] = Option(
        "read committed", description="the isolation level of transactions that change references"
    )
    verify_reads: bool = Option(
        False,
        description="true: each process checks a file's digest before it first reads from the file; a "
        "damaged file is an error and never gives wrong rows",
    )

    @property
    def files_kept_seconds(self) -> float:
        """The time in seconds that a file stays after its last reference was removed, without any hold."""
        return 0 if self.gc_delay_seconds == 0 else self.history_retention_seconds

    @model_validator(mode="after")
    def _history_outlives_collection(self) -> TableProperties:
        if self.history_retention_seconds < self.gc_delay_seconds:
            raise ValueError("history_retention_seconds must be at least gc_delay_seconds")
        return self

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise InvalidProperties(_describe(error)) from None


def _describe(error: ValidationError) -> str:
    """Returns a validation error as one line: each property, and its allowed values."""
    parts = []
    for item in error.errors():
        name = str(item["loc"][0]) if item["loc"] else ""
        if name in TableProperties.model_fields:
            parts.append(f"{name} must be {allowed_values(name)}, not {item['input']!r}")
        elif name:
            parts.append(unknown_property(name))
        else:
            parts.append(item["msg"].removeprefix("Value error, "))
    return "; ".join(parts)


def unknown_property(name: str) -> str:
    """Returns the error text for a name that is no property, with the nearest property or a list of all."""
    known = TableProperties.model_fields
    hint = did_you_mean(name, known) or f"; they are {', '.join(known)}"
    return f"{name!r} is not a table property{hint}"


def allowed_values(name: str) -> str:
    """Returns the allowed values of a property, in words."""
    field = TableProperties.model_fields[name]
    if get_origin(field.annotation) is Literal:
        *others, last = get_args(field.annotation)
        return f"{', '.join(others)} or {last}"
    if field.annotation is bool:
        return "true or false"
    if int not in (kinds := get_args(field.annotation) or (field.annotation,)) and float not in kinds:
        return "text"
    limits = {
        key: getattr(item, key) for item in field.metadata for key in ("gt", "ge", "le") if hasattr(item, key)
    }
    number = "a whole number" if int in kinds else "a number"
    return number + (
        f" above {limits['gt']}" if "gt" in limits else f" from {limits['ge']} to {int(limits['le'])}"
    )


# Row tables, whose rows are edited: the columns that readers see, and refused calls.


def is_edited(properties: TableProperties) -> bool:
    """Returns whether the table belongs to a row table."""
    return properties.rows == "edited"


def named_versions(name: object) -> str | None:
    """Returns the row table's name if `name` is that name followed by `$versions`; otherwise None."""
    if not isinstance(name, str) or not name.lower().endswith(VERSIONS):
        return None
    return name[: -len(VERSIONS)]


def current_schema(schema: Schema) -> Schema:
    """Returns the columns of a row table's current rows: without the deletion mark and dropped columns."""
    kept = [
        number
        for number, name in enumerate(schema.names)
        if name != ROW_DELETED and not name.startswith(DROPPED)
    ]
    keys = len(schema.key_fields)
    columns = tuple(schema.shape.columns[number] for number in kept)
    values = [schema.fields[number] for number in kept if number >= keys]
    return Schema(schema.row_keys, schema.sort_keys, values, shape=replace(schema.shape, columns=columns))


def check_not_edited(name: str, properties: TableProperties, instead: str) -> None:
    """Raises `NotARowTable` if the table belongs to a row table. `instead` is the advice in the message.

    Calls that would make the versions of rows wrong begin with this check.
    """
    if is_edited(properties):
        raise NotARowTable(
            f"table {name!r} belongs to a row table, and only it may change rows and columns: {instead}",
            table=name,
        )


def is_keyed(properties: TableProperties) -> bool:
    return properties.keep == NEWEST_ROW


def stored_schema(schema: Schema, properties: TableProperties) -> Schema:
    """Returns the schema of the table's files.

    A keyed table's files have two more columns, which are hidden. A deletion mark has only the value of
    `newest_by`, so all other values may be null in files.
    """
    if not is_keyed(properties):
        return schema
    # kept with the schema, as its own cached properties are, since each load and edit needs it
    known: dict[str | None, Schema] = schema.__dict__.setdefault("_stored", {})
    if properties.newest_by not in known:
        without = _placeless(schema)
        known[properties.newest_by] = _with_hidden(without, _of_marks(without, properties), len(_HIDDEN_IDS))
    return known[properties.newest_by]


def placed_schema(schema: Schema) -> Schema:
    """Returns the columns of a keyed table for an edit, which also reads the place of each row."""
    return _with_hidden(schema, schema.values, 1)


def _placeless(schema: Schema) -> Schema:
    """Returns the schema of which `placed_schema` made this one; or this one."""
    if SEQUENCE not in schema:
        return schema
    shape = replace(schema.shape, columns=schema.shape.columns[:-1])
    return Schema(schema.row_keys, (), schema.values[:-1], shape=shape)


def _with_hidden(schema: Schema, values: Sequence[Field], count: int) -> Schema:
    """Returns a schema with these values, and the first `count` hidden columns."""
    hidden = (unchecked(SEQUENCE, LONG), unchecked(DELETED_AT, TIMESTAMP, nullable=True))[:count]
    columns = [
        Column(number, (Stage(1, field.name, field.type),))
        for number, field in zip(_HIDDEN_IDS, hidden, strict=False)
    ]
    shape = replace(schema.shape, columns=(*schema.shape.columns, *columns))
    return Schema(schema.row_keys, (), [*values, *hidden], shape=shape)


def given_schema(schema: Schema, properties: TableProperties, deletes: str | None) -> Schema:
    """Returns the schema that the data of an upsert must have.

    `deletes` names a boolean column that marks rows for deletion. Marked rows may have null in all values
    except that of `newest_by`.
    """
    if deletes is None:
        return schema
    if not isinstance(deletes, str) or not deletes:
        raise InvalidInput(f"deletes is the name of a boolean column of the data, not {deletes!r}")
    if deletes in schema:
        raise InvalidInput(
            f"deletes: {deletes!r} is a column of the table; name a boolean column that only the data has"
        )
    known: dict[tuple[str, str | None], Schema] = schema.__dict__.setdefault("_given", {})
    if (found := known.get((deletes, properties.newest_by))) is not None:
        return found
    marks = unchecked(deletes, BOOLEAN)
    column = Column(_HIDDEN_IDS[0], (Stage(1, deletes, BOOLEAN),))
    shape = replace(schema.shape, columns=(*schema.shape.columns, column))
    made = Schema(schema.row_keys, (), [*_of_marks(schema, properties), marks], shape=shape)
    return known.setdefault((deletes, properties.newest_by), made)


def _of_marks(schema: Schema, properties: TableProperties) -> list[Field]:
    """Returns the value columns, all nullable except `newest_by`, so that they fit deletion marks."""
    return [
        field if field.name == properties.newest_by else Field(field.name, field.type, nullable=True)
        for field in schema.values
    ]


def newest_first(properties: TableProperties) -> tuple[str, ...]:
    """Returns the columns that order rows of equal key; the row with the largest values is the newest."""
    return (SEQUENCE,) if properties.newest_by is None else (properties.newest_by, SEQUENCE)


def check_keyed(schema: Schema, properties: TableProperties) -> None:
    """Raises `InvalidProperties` if the properties of a keyed table or row table do not fit the schema.

    It also raises if properties contradict each other.
    """
    if properties.rows == "edited" and (is_keyed(properties) or properties.filter or properties.aggregate):
        raise InvalidProperties("rows: a row table keeps every version: it has no keep, filter or aggregate")
    if not is_keyed(properties):
        for name in ("newest_by", "deletion_marks_seconds"):
            if getattr(properties, name) is not None:
                raise InvalidProperties(f"{name}: only a table with keep='newest_row' has it")
        return
    if schema.sort_keys:
        raise InvalidProperties(
            "keep: a table with keep='newest_row' has one row for its row keys, and so no sort keys; "
            f"make {schema.sort_keys[0].name!r} a row key or a value"
        )
    if properties.aggregate is not None:
        raise InvalidProperties("aggregate: with keep='newest_row' a row replaces another and is not merged")
    if len(schema.fields) + len(HIDDEN_COLUMNS) > FIELDS_MAX:
        raise InvalidProperties(
            f"keep: a table with keep='newest_row' has at most {FIELDS_MAX - len(HIDDEN_COLUMNS)} columns"
        )
    _check_newest_by(schema, properties)


def check_upsert(name: str, properties: TableProperties) -> None:
    """Raises `InvalidInput` for a table that is not keyed, in which no row replaces another."""
    if not is_keyed(properties):
        raise InvalidInput(
            f"table {name!r} keeps every row, so no row replaces another: ingest the rows, or make the "
            "table with keep='newest_row'"
        )


def check_kept(now: TableProperties, changed: TableProperties) -> None:
    """Raises `InvalidProperties` if `rows`, `keep` or `newest_by` would change.

    They stay for the life of a table, because compaction has already dropped rows by them.
    """
    if now.rows != changed.rows:
        raise InvalidProperties(f"rows is chosen when a table is made, and stays {now.rows!r}")
    for name in ("keep", "newest_by"):
        if getattr(now, name) != getattr(changed, name):
            raise InvalidProperties(
                f"{name} is chosen when a table is made, and stays {getattr(now, name)!r}: rows that "
                "compaction left out cannot come back; make another table and ingest the rows into it"
            )


def unchecked(name: str, kind: DataType, *, nullable: bool = False) -> Field:
    """Makes a field without checking its name, because names of hidden columns begin with two underscores."""
    field = object.__new__(Field)
    for attribute, value in (("name", name), ("type", kind), ("nullable", nullable)):
        object.__setattr__(field, attribute, value)
    return field


def _check_newest_by(schema: Schema, properties: TableProperties) -> None:
    name = properties.newest_by
    if name is None:
        if properties.deletion_marks_seconds is not None:
            raise InvalidProperties(
                "deletion_marks_seconds needs newest_by: without newest_by, a mark is removed as soon as "
                "no older row can be loaded"
            )
        return
    field = next((one for one in schema.values if one.name == name), None)
    if field is None:
        values = ", ".join(one.name for one in schema.values) or "none"
        raise InvalidProperties(f"newest_by: {name!r} is not a value column; the values are {values}")
    if field.type.is_nested:
        raise InvalidProperties(f"newest_by: {name!r} is {field.type}, which has no order")
    if field.nullable:
        raise InvalidProperties(f"newest_by: {name!r} may be null, and null is neither newer nor older")


@dataclass(frozen=True, slots=True)
class Problem:
    """A finding of a check: a table differs from its record or its objects. `detail` explains the difference.

    `table` is None for an object that belongs to no table.
    """

    kind: ProblemKind
    table: str | None
    partition_id: str | None
    filename: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table's row in the database. The name may change; the UUID (32 hexadecimal digits) never does.

    A restored database gives the same `table_id` again, so everything outside the database uses the UUID.
    """

    table_id: int
    name: str
    schema: Schema
    properties: TableProperties
    layout: str
    created_at: datetime | None = None
    uuid: str = "0" * 32
    numbered: bool = False
    """True if the table has objects from before tables had UUIDs."""

    @property
    def object_prefix(self) -> str:
        """The prefix of the names of the table's new objects."""
        return f"data/{self.uuid}/"

    @property
    def object_prefixes(self) -> tuple[str, ...]:
        """The prefixes of the names of this table's objects; no other table's object has them."""
        return (self.object_prefix, f"data/t{self.table_id}/") if self.numbered else (self.object_prefix,)


def table_of(row: Sequence[Any]) -> TableRecord:
    """Returns the table record of a row of a query, whose columns are the fields of `TableRecord`."""
    table_id, name, schema, properties, layout, created_at, uuid, numbered = row
    read = _read(dumps([schema, properties]))
    return TableRecord(table_id, name, *read, layout, created_at, uuid.hex, numbered)


@lru_cache(maxsize=1_000)
def _read(record: str) -> tuple[Schema, TableProperties]:
    schema, properties = loads(record)
    return Schema.from_record(schema), TableProperties(**properties)


def check_table_name(name: object) -> str:
    """Returns the name unchanged. Raises `InvalidName` if no table can have it."""
    if not isinstance(name, str) or not _TABLE_NAME.fullmatch(name):
        raise InvalidName(
            f"table name {name!r}: use letters A to Z, digits, '_' and '-'; begin with a letter or underscore"
        )
    if len(name) > TABLE_NAME_LENGTH_MAX:
        raise InvalidName(f"table name {name[:20]!r}… is longer than {TABLE_NAME_LENGTH_MAX} characters")
    return name


class _Read(Protocol):
    def count(self) -> int: ...

    def query(self) -> pa.RecordBatchReader: ...


class Container:
    """A mixin for tables that adds `len`, truth (always true) and the protocol of Arrow streams."""

    def __len__(self: _Read) -> int:
        """Returns the number of rows, as `count` does."""
        return self.count()

    def __bool__(self) -> bool:
        return True  # does not count rows

    def __arrow_c_stream__(self: _Read, requested_schema: Any = None) -> Any:
        """Returns the rows as an Arrow stream, for example for `pa.table(table)`."""
        return self.query().__arrow_c_stream__(requested_schema)
