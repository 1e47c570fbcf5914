"""The schemas of requests and answers, and the possible answers of each kind of path, for OpenAPI."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import ConfigDict, Field

from dormouse.api.table import Table
from dormouse.model.json_values import json_value
from dormouse.model.partition_tree import Partition
from dormouse.model.region import decode_key
from dormouse.model.schema import Schema as TableSchema
from dormouse.service.formats import ARROW, CSV, JSON, JSON_LINES
from dormouse.service.problems import problems
from dormouse.state.files.facts import FileFacts
from dormouse.state.history.history import TableStatus
from dormouse.verbs.verb import Document, Request

# Tables, partitions and files as JSON. Key values have the same form as in rows.


def table(described_table: Table, schema: TableSchema, status: TableStatus | None) -> dict[str, Any]:
    described = {
        "name": described_table.name,
        "layout": described_table.layout,
        "schema": schema.to_json(),
        "schema_id": described_table.context.schema_id(schema),
        "properties": described_table.properties.model_dump(),
    }
    return described if status is None else {**described, "counts": json_value(status)}


def partition(node: Partition) -> dict[str, Any]:
    return {**json_value(node), "is_leaf": node.is_leaf}


def file(schema: TableSchema, facts: FileFacts) -> dict[str, Any]:
    keys = {"min_key": _key(schema, facts.min_key), "max_key": _key(schema, facts.max_key)}
    return {**json_value(facts), **keys}


def _key(schema: TableSchema, encoded: bytes | None) -> Any:
    if encoded is None:
        return None
    decoded = decode_key(schema.row_keys, encoded)
    return json_value(dict(zip(schema.row_key_names, decoded, strict=False)))


class Health(Document):
    """The state of the service: `ok` if the process answers, `ready` if it can answer queries."""

    status: str = Field(examples=["ok"])


class TableName(Document):
    """One table."""

    name: str
    layout: str
    row_table: bool = Field(description="true for a row table, which is served under /v1/rows/{table}")


class TableList(Document):
    """Tables in the order of their names. Give `next` as `after` to get the next page; null at the end."""

    tables: list[TableName]
    next: str | None


class Schema(Document):
    """The columns of a table: row keys, sort keys and values, in the form that `Schema.from_json` reads."""

    row_keys: list[dict[str, Any]]
    sort_keys: list[dict[str, Any]]
    values: list[dict[str, Any]]


class TableDescription(Document):
    """A table, with `counts` if they were requested."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    layout: str
    table_schema: Schema = Field(alias="schema")
    schema_id: str = Field(description="an id that changes whenever the columns change")
    properties: dict[str, Any]
    counts: dict[str, Any] | None = None


class KeyRange(Document):
    """The values of one row key from `min` to `max`; null is unbounded."""

    min: Any
    max: Any
    min_inclusive: bool
    max_inclusive: bool


class PartitionSplit(Document):
    """The split of a partition: the left child has the rows whose `field` is below `point`."""

    field: str
    point: Any


class PartitionDocument(Document):
    """A node of the partition tree."""

    partition_id: str
    parent_id: str | None
    child_ids: list[str]
    is_leaf: bool
    region: dict[str, KeyRange]
    split: PartitionSplit | None


class PartitionPage(Document):
    """Partitions in the order of their ids. Give `next` as `after` to get the next page; null at the end."""

    partitions: list[PartitionDocument]
    next: str | None


class FileDocument(Document):
    """The recorded facts of a file. `digest` is the XXH3-128 hash of its bytes, in base64."""

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: dict[str, Any] | None
    max_key: dict[str, Any] | None
    added_at: datetime | None
    unreferenced_at: datetime | None
    digest: str | None


class FilePage(Document):
    """Files in a stable order. Give `next` as `after` to get the next page; null at the end."""

    files: list[FileDocument]
    next: str | None


class Body(Request):
    """The body of a request. Its model is built at once, as FastAPI requires."""

    model_config = ConfigDict(defer_build=False)


class BodyOfVerb(Body):
    """A body with fields of a verb's request, which have their descriptions already.

    To look for their docstrings, pydantic would read all frames of the stack.
    """

    model_config = ConfigDict(use_attribute_docstrings=False)


class JobDocument(Document):
    """A job. Fields of events that have not happened yet are null."""

    job_id: str
    kind: str
    state: str = Field(examples=["PROCESSING", "COMPLETE", "FAILED", "CANCELLED"])
    owner: str | None
    current: int | None
    total: int | None
    message: str | None
    error: str | None
    traceback: str | None
    worker: str | None
    is_waiting: bool
    is_cancelled: bool
    has_workers: bool
    started_at: datetime
    claimed_at: datetime | None
    ended_at: datetime | None


class JobList(Document):
    """Jobs: first the jobs that have not ended, newest first, then the others, last ended first.

    Give `next` as `after` to get the next page; null at the end.
    """

    jobs: list[JobDocument]
    next: str | None


class JobResult(Document):
    """The result of a job. A query's result has the answer's object, its URL, and its row and byte counts."""

    result: Any


_EXAMPLES = {
    JSON_LINES: '{"carrier":"AA","flight":7,"delay":null}\n{"carrier":"AA","flight":8,"delay":2.5}\n',
    CSV: '"carrier","flight","delay"\n"AA",7,\n"AA",8,2.5\n',
}
READS = problems(401, 503)
ANSWERS = problems(400, 401, 404, 503)
STARTS = problems(400, 401, 403, 404, 408, 409, 413, 415, 503)
RESULTS = problems(400, 401, 404, 409, 410, 503)
DOCUMENTS = problems(400, 401, 404, 408, 410, 413, 415, 429, 503, 504)
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The rows.",
        "content": {
            JSON_LINES: {"schema": {"type": "string"}, "example": _EXAMPLES[JSON_LINES]},
            ARROW: {"schema": {"type": "string", "format": "binary"}},
            CSV: {"schema": {"type": "string"}, "example": _EXAMPLES[CSV]},
            JSON: {"schema": {"type": "array", "items": {"type": "object"}}},
        },
    },
    **DOCUMENTS,
    **problems(406),
}
PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "The range of bytes that the Range header requests."},
    304: {"description": "If-None-Match contains the ETag: the client has the bytes already."},
}
LOOKS = problems(400, 401, 408, 413, 415, 503)
CSV_ROWS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The rows.", "content": {CSV: {"schema": {"type": "string"}}}},
    **problems(400, 401, 404, 410, 429, 503, 504),
}
CSV_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {CSV: {"schema": {"type": "string", "format": "binary"}}}}
}


# The requests and answers of row tables.


class RowTableList(Document):
    """Row tables in the order of their names. Give `next` as `after` for the next page; null at the end."""

    tables: list[dict[str, Any]]
    next: str | None


class RowTableDescription(Document):
    """A row table: its columns, its newest version (0 if it was never changed) and its snapshots."""

    name: str
    version: int
    changed_at: datetime
    columns: list[dict[str, Any]]
    snapshots: list[dict[str, Any]]


class RowHistory(Document):
    """The changes of a row table, newest first. Give `next` as `before` to get the next page."""

    changes: list[dict[str, Any]]
    next: int | None


class PutFile(Document):
    """The reference to a stored file, to be used as the value of a FILE cell."""

    file: str


class CsvLook(Document):
    """A preview of a CSV file: inferred table columns, the names in its header, and its first rows."""

    columns: list[dict[str, Any]]
    names: list[str]
    rows: list[list[str | None]]
    row_count: int
    is_whole: bool
    has_row_ids: bool
