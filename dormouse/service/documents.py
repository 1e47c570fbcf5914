"""What requests and answers look like, for the API's description and its checks."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

LIMIT_MAX = (1 << 63) - 1
_WHERE = {
    "carrier": ["AA", "UA"],
    "flight": {"min": 1, "max": 100, "min_inclusive": True, "max_inclusive": False},
}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Answer(BaseModel):
    """Answers may get more fields."""

    model_config = ConfigDict(extra="allow")


class PlanRequest(_Request):
    """Which rows are wanted."""

    where: dict[str, Any] | None = Field(
        default=None,
        description="for each column a value, a list of values, a range (an object with min, max, or both), "
        "or null; rows must meet all. Row keys choose the files that are read. BYTES are base64, TIMESTAMP "
        'ISO 8601 (in UTC when it names no zone), DOUBLE also "NaN", "Infinity" and "-Infinity".',
        examples=[_WHERE],
    )


class QueryRequest(PlanRequest):
    """Which rows are wanted, and what of them."""

    columns: list[str] | None = Field(
        default=None,
        description="what is read of them, in this order; all when left out",
        examples=[["flight"]],
    )
    limit: int | None = Field(
        default=None, ge=0, le=LIMIT_MAX, description="at most so many rows, the first in key order"
    )


class StatementRequest(_Request):
    """A statement."""

    statement: str = Field(
        description="one SELECT, WITH, VALUES or EXPLAIN over the tables, by name",
        examples=["select carrier, count(*) from flights group by carrier"],
    )


class Health(_Answer):
    """That the process answers, or that it can answer queries."""

    status: str = Field(examples=["ok"])


class TableName(_Answer):
    """One table."""

    name: str
    layout: str


class TableList(_Answer):
    """All tables, by name."""

    tables: list[TableName]


class Schema(_Answer):
    """What a table is sorted and partitioned by, sorted by, and holds; as `Schema.from_json` reads it."""

    row_keys: list[dict[str, Any]]
    sort_keys: list[dict[str, Any]]
    values: list[dict[str, Any]]


class TableDescription(_Answer):
    """A table; `counts` when they were asked for."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    layout: str
    table_schema: Schema = Field(alias="schema")
    properties: dict[str, Any]
    counts: dict[str, Any] | None = None


class KeyRange(_Answer):
    """The values of one row key from `min` to `max`; null is unbounded."""

    min: Any
    max: Any
    min_inclusive: bool
    max_inclusive: bool


class PartitionSplit(_Answer):
    """How a partition was divided: rows whose `field` is below `point` went left."""

    field: str
    point: Any


class PartitionDocument(_Answer):
    """A node of the partition tree."""

    partition_id: str
    parent_id: str | None
    child_ids: list[str]
    is_leaf: bool
    region: dict[str, KeyRange]
    split: PartitionSplit | None


class PartitionPage(_Answer):
    """Partitions by id; `next` goes on from here as `after`, null at the end."""

    partitions: list[PartitionDocument]
    next: str | None


class FileDocument(_Answer):
    """What is known of a file."""

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: dict[str, Any] | None
    max_key: dict[str, Any] | None
    added_at: datetime | None
    unreferenced_at: datetime | None


class FilePage(_Answer):
    """Files in an order that stays; `next` goes on from here as `after`, null at the end."""

    files: list[FileDocument]
    next: str | None


class Plan(_Answer):
    """What a query reads: `files_pruned` hold no wanted row, as their smallest and largest keys tell."""

    partitions: int
    partitions_total: int
    files: int
    files_pruned: int
    byte_count: int


class StatementPlan(_Answer):
    """What a statement reads of each table that it reads."""

    tables: dict[str, Plan]


class ProblemDocument(_Answer):
    """An error (RFC 9457)."""

    type: str = Field(examples=["urn:dormouse:invalid-query"])
    title: str = Field(examples=["The query does not fit the table's schema."])
    status: int = Field(examples=[400])
    detail: str = Field(examples=["unknown column 'carier'; did you mean 'carrier'?"])
