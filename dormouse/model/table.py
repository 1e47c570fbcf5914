"""A table beside its data: its properties, what keyed tables and row tables add to them, and its record."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from json import dumps, loads
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic import Field as Option

from dormouse.errors import InvalidInput, InvalidName, InvalidProperties, InvalidQuery, NotARowTable
from dormouse.model.schema import FIELDS_MAX, Column, Field, Schema, Stage
from dormouse.model.text import did_you_mean
from dormouse.model.types import BOOLEAN, LONG, TIMESTAMP, DataType

if TYPE_CHECKING:
    import pyarrow as pa

SECONDS_MAX = 100 * 365.25 * 86_400
READERS_SECONDS = 900
"""How long an object stays for readers that have just looked up where it is."""
KEPT_SECONDS = 86_400
"""How long an object stays that nothing relies on any more, and one that its writer has left: other delays
before a deletion are this one, unless they are set."""
INT_MAX = (1 << 31) - 1
ROWS_MAX = (1 << 63) - 1

VERSION = "__schema"
"""Beside a condition's columns, whose names begin otherwise: their version of the schema, if it is not 1."""

ROW_ID, ROW_VERSION, ROW_DELETED = "ROW_ID", "ROW_VERSION", "ROW_DELETED"
DROPPED = "_dropped_"
"""The names of columns that were dropped begin with it: older versions of rows still have them."""
VERSIONS = "$versions"
"""A row table's name with it at the end means every version of its rows."""

SEQUENCE = "__sequence"
"""The place of a row's load among the loads."""
DELETED_AT = "__deleted_at"
"""When a row was marked as deleted; null: it is there."""
HIDDEN_COLUMNS = (SEQUENCE, DELETED_AT)
_HIDDEN_IDS = ((1 << 31) - 3, (1 << 31) - 2)
"""Of the two: no column that is added gets so far."""
NEWEST_ROW = "newest_row"

TABLE_NAME_LENGTH_MAX = 128
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")

Engine = Literal["auto", "local", "spark"]
"""What sorts, writes and merges files."""

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
"""What a check finds."""


# Conditions of deletions as they are kept: by the names that columns had then.


def kept(schema: Schema, condition: dict[str, Any]) -> str:
    """A condition on the columns of a schema, in JSON, as it is kept."""
    version = {} if schema.version == 1 else {VERSION: schema.version}
    return dumps({**condition, **version})


def shown(condition: str) -> str:
    """A kept condition as it was given."""
    found = loads(condition)
    return dumps({name: wanted for name, wanted in found.items() if name != VERSION})


def as_now(schema: Schema, condition: str) -> dict[str, Any]:
    """A condition that is kept, by what its columns are called in a schema; in JSON.

    `InvalidQuery` when a column of it is not there, `SchemaMoved` when it is of a later version.
    """
    found = loads(condition)
    version = found.pop(VERSION, 1)
    schema.shape.check_known(version)
    names = {}
    for name, one in zip(schema.names, schema.shape.columns, strict=True):
        if (then := one.at(version)) is not None:
            names[then.name] = name
    if gone := [name for name in found if name not in names]:
        raise InvalidQuery(f"a deletion names column {gone[0]!r}, which is there no more")
    return {names[name]: wanted for name, wanted in found.items()}


class TableProperties(BaseModel):
    """Properties of a table; raises `InvalidProperties` with every mistake in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gc_delay_seconds: float = Option(
        READERS_SECONDS,
        ge=0,
        le=SECONDS_MAX,
        description="how long a file stays after its last reference went",
    )
    gc_batch_files: int = Option(10_000, ge=1, le=INT_MAX, description="files deleted in one transaction")
    history_retention_seconds: float = Option(
        KEPT_SECONDS,
        ge=0,
        le=SECONDS_MAX,
        description="how far back the table can be read as it was; with gc_delay_seconds 0 only as far as "
        "consumers and cuts hold files: those that maintenance records hold none then",
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
        description="when the files of a job that never committed are collected",
    )
    compaction_strategy: Literal["size_ratio", "basic"] = "size_ratio"
    compaction_batch_files: int = Option(12, ge=2, le=INT_MAX, description="files merged by one job, at most")
    size_ratio: float = Option(
        3,
        gt=0,
        description="what the other files must add up to, in the largest; half of their number, where a job "
        "cannot have so many; at most 0.25 in a keyed table",
    )
    deletions_max: int = Option(
        100, ge=1, le=INT_MAX, description="pending deletions of a file's keys; with more it is compacted"
    )
    compaction_jobs_max: int = Option(100_000, ge=1, le=INT_MAX, description="jobs created in one run")
    compaction_task_bytes: int = Option(
        1024 * 1024 * 1024,
        ge=1,
        le=ROWS_MAX,
        description="of a job, from twice of which on Spark merges it by several tasks, each a range of keys",
    )
    compaction_attempts_max: int = Option(
        3, ge=1, le=INT_MAX, description="tries of a job before it is given up"
    )
    split_threshold_rows: int = Option(
        1_000_000_000, ge=2, le=ROWS_MAX, description="rows from which a leaf is split"
    )
    split_min_rows: int = Option(
        1_000, ge=2, le=ROWS_MAX, description="rows that a leaf must surely have to be split"
    )
    merge_threshold_rows: int | None = Option(
        None,
        ge=1,
        le=ROWS_MAX,
        description="leaves with fewer rows together are merged; none: no merges",
    )
    ingest_file_writing: Literal["one_file_per_leaf", "one_reference_per_leaf"] = "one_file_per_leaf"
    bulk_ingest_leaves_min: int = Option(
        1,
        ge=1,
        le=100_000,
        description="an ingest by Spark into a table without files first divides it into so many leaves, "
        "by a sample of its rows",
    )
    row_group_bytes: int = Option(
        16 * 1024 * 1024, ge=64 * 1024, le=INT_MAX, description="of a row group, before encoding"
    )
    bloom_filter_columns: str | None = Option(
        None,
        description="e.g. 'order_id, customer': columns of many values (INT, LONG, STRING, BYTES) of which "
        "queries ask for single ones, but for the first row key; files written from then on grow by 1 to 2 "
        "bytes a value",
    )
    compression: Literal["zstd", "snappy", "lz4", "none"] = "zstd"
    keep: Literal["every_row", "newest_row"] = Option(
        "every_row",
        description="newest_row: one row for each row key, the newest; chosen when the table is made",
    )
    rows: Literal["loaded", "edited"] = Option(
        "loaded",
        description="edited: a row table's, which are changed as such alone; chosen when the table is made",
    )
    newest_by: str | None = Option(
        None,
        description="with keep='newest_row': the value column of which the largest is the newest; among "
        "equals, and without it, the row whose load began last",
    )
    deletion_marks_seconds: float | None = Option(
        None,
        ge=0,
        le=SECONDS_MAX,
        description="with newest_by: how long a deleted key is remembered once its rows are gone; an older "
        "row that is loaded later comes back; none: for ever",
    )
    aggregate: str | None = Option(
        None, description="e.g. 'sum(count), max(last_seen)'; a total that LONG cannot hold is an error"
    )
    filter: str | None = Option(None, description="e.g. 'age_off(time, 86400000)'")
    salt_buckets: int = Option(
        128, ge=1, le=32_767, description="rows that a file's count is split over (layout salted_counts)"
    )
    commit: Literal["async", "sync"] = Option(
        "async",
        description="async: where a committer runs, jobs commit together, through its queue, and wait until "
        "that is visible; elsewhere, in Spark, and when sync, each in a transaction of its own",
    )
    isolation: Literal["read committed", "serializable"] = "read committed"
    verify_reads: bool = Option(
        False,
        description="true: each process compares the digest of a file before it first reads rows of it; a "
        "damaged file is an error, and never other rows",
    )

    @property
    def files_kept_seconds(self) -> float:
        """How long a file stays after its last reference went, if nobody holds it."""
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
    """A validation error in one line: each property, and what it must be."""
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
    """What is said of a name that is none: the nearest that is, or all."""
    known = TableProperties.model_fields
    hint = did_you_mean(name, known) or f"; they are {', '.join(known)}"
    return f"{name!r} is not a table property{hint}"


def allowed_values(name: str) -> str:
    """What a property may be, in words."""
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


# Row tables, whose rows are edited: what their readers see, and what is refused on the table below one.


def is_edited(properties: TableProperties) -> bool:
    """Whether it is the table of a row table."""
    return properties.rows == "edited"


def named_versions(name: object) -> str | None:
    """Returns the name of the row table whose versions a name means; None for any other name."""
    if not isinstance(name, str) or not name.lower().endswith(VERSIONS):
        return None
    return name[: -len(VERSIONS)]


def current_schema(schema: Schema) -> Schema:
    """Returns the columns of a row table's current rows: without the mark of deletion and dropped columns."""
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
    """`NotARowTable` for what would leave the versions of rows wrong; `instead` is what to do."""
    if is_edited(properties):
        raise NotARowTable(
            f"table {name!r} is a row table, whose rows and columns are changed as such alone: {instead}",
            table=name,
        )


def is_keyed(properties: TableProperties) -> bool:
    return properties.keep == NEWEST_ROW


def stored_schema(schema: Schema, properties: TableProperties) -> Schema:
    """The columns of the table's files.

    Those of a keyed table have two more; and as a mark of deletion has no values but the one that its place
    is told by, all others may be null.
    """
    if not is_keyed(properties):
        return schema
    hidden = (unchecked(SEQUENCE, LONG), unchecked(DELETED_AT, TIMESTAMP, nullable=True))
    columns = [
        Column(number, (Stage(1, field.name, field.type),))
        for number, field in zip(_HIDDEN_IDS, hidden, strict=True)
    ]
    shape = replace(schema.shape, columns=(*schema.shape.columns, *columns))
    return Schema(schema.row_keys, (), [*_of_marks(schema, properties), *hidden], shape=shape)


def given_schema(schema: Schema, properties: TableProperties, deletes: str | None) -> Schema:
    """The columns of data for a keyed table; `deletes` marks rows, of which other values may be null."""
    if deletes is None:
        return schema
    if not isinstance(deletes, str) or not deletes:
        raise InvalidInput(f"deletes is the name of a boolean column of the data, not {deletes!r}")
    if deletes in schema:
        raise InvalidInput(
            f"deletes: {deletes!r} is a column of the table; name a boolean column that the data alone has"
        )
    marks = unchecked(deletes, BOOLEAN)
    column = Column(_HIDDEN_IDS[0], (Stage(1, deletes, BOOLEAN),))
    shape = replace(schema.shape, columns=(*schema.shape.columns, column))
    return Schema(schema.row_keys, (), [*_of_marks(schema, properties), marks], shape=shape)


def _of_marks(schema: Schema, properties: TableProperties) -> list[Field]:
    """The values as a mark of deletion has them: null, but for the one that its place is told by."""
    return [
        field if field.name == properties.newest_by else Field(field.name, field.type, nullable=True)
        for field in schema.values
    ]


def newest_first(properties: TableProperties) -> tuple[str, ...]:
    """What rows of equal key are ordered by, the largest first."""
    return (SEQUENCE,) if properties.newest_by is None else (properties.newest_by, SEQUENCE)


def check_keyed(schema: Schema, properties: TableProperties) -> None:
    """`InvalidProperties` when what is asked for does not fit the schema, or each other."""
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
        raise InvalidProperties(
            "aggregate: with keep='newest_row' a row replaces another, and merges with none"
        )
    if len(schema.fields) + len(HIDDEN_COLUMNS) > FIELDS_MAX:
        raise InvalidProperties(
            f"keep: a table with keep='newest_row' has at most {FIELDS_MAX - len(HIDDEN_COLUMNS)} columns"
        )
    _check_newest_by(schema, properties)


def check_upsert(name: str, properties: TableProperties) -> None:
    """`InvalidInput` for a table of which no row replaces another."""
    if not is_keyed(properties):
        raise InvalidInput(
            f"table {name!r} keeps every row, so that none replaces another: ingest the rows, or make the "
            "table with keep='newest_row'"
        )


def check_kept(now: TableProperties, changed: TableProperties) -> None:
    """`InvalidProperties` for a change of what compaction has acted upon already."""
    if now.rows != changed.rows:
        raise InvalidProperties(f"rows is chosen when a table is made, and stays {now.rows!r}")
    for name in ("keep", "newest_by"):
        if getattr(now, name) != getattr(changed, name):
            raise InvalidProperties(
                f"{name} is chosen when a table is made, and stays {getattr(now, name)!r}: what compaction "
                "left out does not come back; make another table, and ingest the rows into it"
            )


def unchecked(name: str, kind: DataType, *, nullable: bool = False) -> Field:
    """A field of any name; those of a table's columns do not begin with two underscores."""
    field = object.__new__(Field)
    for attribute, value in (("name", name), ("type", kind), ("nullable", nullable)):
        object.__setattr__(field, attribute, value)
    return field


def _check_newest_by(schema: Schema, properties: TableProperties) -> None:
    name = properties.newest_by
    if name is None:
        if properties.deletion_marks_seconds is not None:
            raise InvalidProperties(
                "deletion_marks_seconds: without newest_by marks of deletion go when no older row can come"
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
    """Something of a table, or with None of none, that is not as it was written; `detail` says what."""

    kind: ProblemKind
    table: str | None
    partition_id: str | None
    filename: str | None
    detail: str


@dataclass(frozen=True, slots=True)
class TableRecord:
    """A table's row in the database. Names may change; the UUID (32 hexadecimal digits) is the table's own.

    A database that is restored gives ids again: what leaves the database says the UUID.
    """

    table_id: int
    name: str
    schema: Schema
    properties: TableProperties
    layout: str
    created_at: datetime | None = None
    uuid: str = "0" * 32
    numbered: bool = False
    """Whether it has objects from before tables had UUIDs."""

    @property
    def object_prefix(self) -> str:
        """What the names of the table's new objects begin with."""
        return f"data/{self.uuid}/"

    @property
    def object_prefixes(self) -> tuple[str, ...]:
        """What the names of its objects, and of no other table's, begin with."""
        return (self.object_prefix, f"data/t{self.table_id}/") if self.numbered else (self.object_prefix,)


def table_of(row: Sequence[Any]) -> TableRecord:
    """Of the columns that the queries of tables give, which are the fields."""
    table_id, name, schema, properties, layout, created_at, uuid, numbered = row
    return TableRecord(
        table_id,
        name,
        Schema.from_record(schema),
        TableProperties(**properties),
        layout,
        created_at,
        uuid.hex,
        numbered,
    )


def check_table_name(name: object) -> str:
    """The name, when a table can have it; else `InvalidName`."""
    if not isinstance(name, str) or not _TABLE_NAME.fullmatch(name):
        raise InvalidName(
            f"table name {name!r}: use letters A to Z, digits, '_' and '-', first a letter or underscore"
        )
    if len(name) > TABLE_NAME_LENGTH_MAX:
        raise InvalidName(f"table name {name[:20]!r}… is longer than {TABLE_NAME_LENGTH_MAX} characters")
    return name


class _Read(Protocol):
    def count(self) -> int: ...

    def query(self) -> pa.RecordBatchReader: ...


class Container:
    """A table as a container of its rows, for `len`, truth, and what takes Arrow's streams."""

    def __len__(self: _Read) -> int:
        """Returns how many rows there are; see `count`."""
        return self.count()

    def __bool__(self) -> bool:
        return True  # without a count

    def __arrow_c_stream__(self: _Read, requested_schema: Any = None) -> Any:
        """Gives the rows to what takes Arrow's streams, like `pa.table(table)`."""
        return self.query().__arrow_c_stream__(requested_schema)
