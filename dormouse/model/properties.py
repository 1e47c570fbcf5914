"""What can be set of a table; frozen, and validated when it is built."""

from __future__ import annotations

from dataclasses import replace
from json import dumps, loads
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dormouse.errors import InvalidProperties, InvalidQuery, NotARowTable
from dormouse.model.schema import Schema
from dormouse.model.text import did_you_mean

# Conditions of deletions as they are kept: by the names that columns had then.

VERSION = "__schema"
"""Beside a condition's columns, whose names begin otherwise: their version of the schema, if it is not 1."""


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


SECONDS_MAX = 100 * 365.25 * 86_400
INT_MAX = (1 << 31) - 1
ROWS_MAX = (1 << 63) - 1


class TableProperties(BaseModel):
    """Properties of a table; raises `InvalidProperties` with every mistake in one line."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    gc_delay_seconds: float = Field(
        900, ge=0, le=SECONDS_MAX, description="how long a file stays after its last reference went"
    )
    gc_batch_files: int = Field(10_000, ge=1, le=INT_MAX, description="files deleted in one transaction")
    history_retention_seconds: float = Field(
        86_400,
        ge=0,
        le=SECONDS_MAX,
        description="how far back the table can be read as it was; with gc_delay_seconds 0 only as far as "
        "consumers and cuts hold files: those that maintenance records hold none then",
    )
    consumer_expiry_seconds: float = Field(
        604_800,
        ge=0,
        le=SECONDS_MAX,
        description="how long a consumer that acknowledges nothing holds files",
    )
    attempt_expiry_seconds: float = Field(
        86_400, ge=0, le=SECONDS_MAX, description="when the files of a job that never committed are collected"
    )
    compaction_strategy: Literal["size_ratio", "basic"] = "size_ratio"
    compaction_batch_files: int = Field(12, ge=2, le=INT_MAX, description="files merged by one job, at most")
    size_ratio: float = Field(
        3,
        gt=0,
        description="what the other files must add up to, in the largest; half of their number, where a job "
        "cannot have so many; at most 0.25 in a keyed table",
    )
    deletions_max: int = Field(
        100, ge=1, le=INT_MAX, description="pending deletions of a file's keys; with more it is compacted"
    )
    compaction_jobs_max: int = Field(100_000, ge=1, le=INT_MAX, description="jobs created in one run")
    compaction_task_bytes: int = Field(
        1024 * 1024 * 1024,
        ge=1,
        le=ROWS_MAX,
        description="of a job, from twice of which on Spark merges it by several tasks, each a range of keys",
    )
    compaction_attempts_max: int = Field(
        3, ge=1, le=INT_MAX, description="tries of a job before it is given up"
    )
    split_threshold_rows: int = Field(
        1_000_000_000, ge=2, le=ROWS_MAX, description="rows from which a leaf is split"
    )
    split_min_rows: int = Field(
        1_000, ge=2, le=ROWS_MAX, description="rows that a leaf must surely have to be split"
    )
    merge_threshold_rows: int | None = Field(
        None,
        ge=1,
        le=ROWS_MAX,
        description="leaves with fewer rows together are merged; none: no merges",
    )
    ingest_file_writing: Literal["one_file_per_leaf", "one_reference_per_leaf"] = "one_file_per_leaf"
    bulk_ingest_leaves_min: int = Field(
        1,
        ge=1,
        le=100_000,
        description="an ingest by Spark into a table without files first divides it into so many leaves, "
        "by a sample of its rows",
    )
    row_group_bytes: int = Field(
        16 * 1024 * 1024, ge=64 * 1024, le=INT_MAX, description="of a row group, before encoding"
    )
    bloom_filter_columns: str | None = Field(
        None,
        description="e.g. 'order_id, customer': columns of many values (INT, LONG, STRING, BYTES) of which "
        "queries ask for single ones, but for the first row key; files written from then on grow by 1 to 2 "
        "bytes a value",
    )
    compression: Literal["zstd", "snappy", "lz4", "none"] = "zstd"
    keep: Literal["every_row", "newest_row"] = Field(
        "every_row",
        description="newest_row: one row for each row key, the newest; chosen when the table is made",
    )
    rows: Literal["loaded", "edited"] = Field(
        "loaded",
        description="edited: a row table's, which are changed as such alone; chosen when the table is made",
    )
    newest_by: str | None = Field(
        None,
        description="with keep='newest_row': the value column of which the largest is the newest; among "
        "equals, and without it, the row whose load began last",
    )
    deletion_marks_seconds: float | None = Field(
        None,
        ge=0,
        le=SECONDS_MAX,
        description="with newest_by: how long a deleted key is remembered once its rows are gone; an older "
        "row that is loaded later comes back; none: for ever",
    )
    aggregate: str | None = Field(
        None, description="e.g. 'sum(count), max(last_seen)'; a total that LONG cannot hold is an error"
    )
    filter: str | None = Field(None, description="e.g. 'age_off(time, 86400000)'")
    salt_buckets: int = Field(
        128, ge=1, le=32_767, description="rows that a file's count is split over (layout salted_counts)"
    )
    commit: Literal["async", "sync"] = Field(
        "async",
        description="async: where a committer runs, jobs commit together, through its queue, and wait until "
        "that is visible; elsewhere, in Spark, and when sync, each in a transaction of its own",
    )
    isolation: Literal["read committed", "serializable"] = "read committed"
    verify_reads: bool = Field(
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

ROW_ID, ROW_VERSION, ROW_DELETED = "ROW_ID", "ROW_VERSION", "ROW_DELETED"
HIDDEN = "_dropped_"
"""The names of columns that were dropped begin with it: older versions of rows still have them."""
VERSIONS = "$versions"
"""A row table's name with it at the end means every version of its rows."""


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
        if name != ROW_DELETED and not name.startswith(HIDDEN)
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
