"""What requests and answers look like, and the answers of each kind of path: for the API's description."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from dormouse.api.table import Table
from dormouse.model.json_values import json_value
from dormouse.model.partition_tree import Partition
from dormouse.model.region import decode_key
from dormouse.model.schema import Schema as TableSchema
from dormouse.reading.where import LIMIT_MAX
from dormouse.rows.pages import INDEX_WAIT_SECONDS
from dormouse.service.formats import ARROW, CSV, JSON, JSON_LINES
from dormouse.service.problems import MEDIA_TYPE, REFUSALS
from dormouse.state.files.store import FileFacts
from dormouse.state.history.history import TableStatus

# Tables, partitions and files as JSON: values of keys as rows have them.


def table(found: Table, schema: TableSchema, status: TableStatus | None) -> dict[str, Any]:
    described = {
        "name": found.name,
        "layout": found.layout,
        "schema": schema.to_json(),
        "schema_id": schema_id(found, schema),
        "properties": found.properties.model_dump(),
    }
    return described if status is None else {**described, "counts": json_value(status)}


def schema_id(found: Table, schema: TableSchema) -> str:
    """Which columns of which table these are: another once either is another."""
    return f"{found.context.table.uuid}.{schema.version}"


def partition(found: Partition) -> dict[str, Any]:
    return {**json_value(found), "is_leaf": found.is_leaf}


def file(schema: TableSchema, found: FileFacts) -> dict[str, Any]:
    keys = {"min_key": _key(schema, found.min_key), "max_key": _key(schema, found.max_key)}
    return {**json_value(found), **keys}


def _key(schema: TableSchema, encoded: bytes | None) -> Any:
    if encoded is None:
        return None
    decoded = decode_key(schema.row_keys, encoded)
    return json_value(dict(zip(schema.row_key_names, decoded, strict=False)))


_WHERE = {
    "carrier": ["AA", "UA"],
    "flight": {"min": 1, "max": 100, "min_inclusive": True, "max_inclusive": False},
}


class Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AnswerDocument(BaseModel):
    """Answers may get more fields."""

    model_config = ConfigDict(extra="allow")


class _OfMoment(Request):
    as_of: str | int | None = Field(
        default=None,
        description="the moment whose rows are wanted: a time in ISO 8601 with its offset (all that was "
        "committed at or before it), the name of a cut that each of the tables has, or a cut's number; now "
        "when left out",
        examples=["2026-11-20T14:00:00+01:00"],
    )


class _Verified(Request):
    verify: bool = Field(
        default=False,
        description="compare the digest of each file before its rows are given, as the tables' property "
        "`verify_reads` does",
    )


class PlanRequest(_OfMoment):
    """Which rows are wanted."""

    where: dict[str, Any] | None = Field(
        default=None,
        description="for each column a value, a list of values, a range (an object with min, max, or both), "
        "or null; rows must meet all. Row keys choose the files that are read. BYTES are base64, TIMESTAMP "
        "ISO 8601 (in UTC when it names no zone), DATE and DECIMAL text, DOUBLE and FLOAT also "
        '"NaN", "Infinity" and "-Infinity".',
        examples=[_WHERE],
    )

    schema_id: str | None = Field(
        default=None,
        description="which columns `where` is written for, as the table's description has it: where they are "
        "others now, it is refused",
    )


class _OfColumns(Request):
    columns: list[str] | None = Field(
        default=None,
        description="what is read of them, in this order; all when left out",
        examples=[["flight"]],
    )


class QueryRequest(PlanRequest, _OfColumns, _Verified):
    """Which rows are wanted, and what of them."""

    limit: int | None = Field(
        default=None, ge=0, le=LIMIT_MAX, description="at most so many rows, the first in key order"
    )
    offset: int = Field(default=0, ge=0, le=LIMIT_MAX, description="so many rows are left out first")
    descending: bool = Field(default=False, description="the largest keys first")


class ChangesRequest(_OfColumns):
    """Which rows are wanted: those that were ingested after a moment and up to another, and what of them."""

    after: str | int | None = Field(
        default=None,
        description="a time in ISO 8601 with its offset (all that was committed at or before it), a cut's "
        "name, or its number; from the table's beginning when left out",
        examples=["2026-11-20T14:00:00+01:00"],
    )
    till: str | int | None = Field(default=None, description="as `after`; now when left out")


class StatementPlanRequest(_OfMoment):
    """A statement, and the values of its parameters."""

    statement: str = Field(
        description="one SELECT, WITH, VALUES or EXPLAIN over the tables, by name",
        examples=["select carrier, count(*) from flights where dest = $1 group by carrier"],
    )
    parameters: list[Any] | dict[str, Any] | None = Field(
        default=None,
        description="a list for $1, $2, … or ?, an object for $name. For what JSON has no word, an object: "
        '{"bytes": base64}, {"timestamp": ISO 8601}, {"date": "2026-01-31"}, {"time": "12:00:00"}, '
        '{"interval": "P1DT12H"}, {"uuid": "0198c0de-0000-7000-8000-000000000000"}, {"decimal": "0.10"}, '
        '{"double": "NaN"}',
        examples=[["BOS"]],
    )


class StatementRequest(StatementPlanRequest, _Verified):
    """A statement, the values of its parameters, and how it is read."""


class Health(AnswerDocument):
    """That the process answers, or that it can answer queries."""

    status: str = Field(examples=["ok"])


class TableName(AnswerDocument):
    """One table."""

    name: str
    layout: str
    row_table: bool = Field(description="its rows are edited: /v1/rows/{table} has their ids and versions")


class TableList(AnswerDocument):
    """Tables by name; `next` goes on from here as `after`, null at the end."""

    tables: list[TableName]
    next: str | None


class Schema(AnswerDocument):
    """What a table is sorted and partitioned by, sorted by, and holds; as `Schema.from_json` reads it."""

    row_keys: list[dict[str, Any]]
    sort_keys: list[dict[str, Any]]
    values: list[dict[str, Any]]


class TableDescription(AnswerDocument):
    """A table; `counts` when they were asked for."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    name: str
    layout: str
    table_schema: Schema = Field(alias="schema")
    schema_id: str = Field(description="another once the columns are others")
    properties: dict[str, Any]
    counts: dict[str, Any] | None = None


class KeyRange(AnswerDocument):
    """The values of one row key from `min` to `max`; null is unbounded."""

    min: Any
    max: Any
    min_inclusive: bool
    max_inclusive: bool


class PartitionSplit(AnswerDocument):
    """How a partition was divided: rows whose `field` is below `point` went left."""

    field: str
    point: Any


class PartitionDocument(AnswerDocument):
    """A node of the partition tree."""

    partition_id: str
    parent_id: str | None
    child_ids: list[str]
    is_leaf: bool
    region: dict[str, KeyRange]
    split: PartitionSplit | None


class PartitionPage(AnswerDocument):
    """Partitions by id; `next` goes on from here as `after`, null at the end."""

    partitions: list[PartitionDocument]
    next: str | None


class FileDocument(AnswerDocument):
    """What is known of a file; `digest` is the XXH3-128 of its bytes, in base64."""

    filename: str
    byte_count: int | None
    row_count: int | None
    min_key: dict[str, Any] | None
    max_key: dict[str, Any] | None
    added_at: datetime | None
    unreferenced_at: datetime | None
    digest: str | None


class FilePage(AnswerDocument):
    """Files in an order that stays; `next` goes on from here as `after`, null at the end."""

    files: list[FileDocument]
    next: str | None


class Plan(AnswerDocument):
    """What a query reads: `files_pruned` hold no wanted row, as their smallest and largest keys tell."""

    partitions: int
    partitions_total: int
    files: int
    files_pruned: int
    byte_count: int


class StatementPlan(AnswerDocument):
    """What a statement reads of each table that it reads."""

    tables: dict[str, Plan]


class JobRequest(Request):
    """What is to be done, sooner or later."""

    kind: str = Field(
        description="query, ingest, compact, split, or of row tables row_create, row_change, row_upsert, "
        "row_query or row_snapshot; CSV is sent to /v1/rows/{table}/csv",
        examples=["query", "ingest", "compact", "split", "row_change"],
    )
    request: dict[str, Any] = Field(
        description="of a query a statement with parameters, or a table with where, columns, limit, offset "
        "and descending, and as_of; of an ingest a table, the names of objects below incoming/ in the "
        "instance's store, an ingest_id, and evolve: add; of a compaction or split a table; of row_change a "
        "table and changes, of row_upsert a table, rows and on, of row_query a table and sql or page, of "
        "row_snapshot a table and a name, of row_create a name and columns",
        examples=[{"statement": "select carrier, count(*) from flights group by carrier"}],
    )
    job_id: str | None = Field(
        default=None,
        description="the same request started again with the same id is the same job, another is refused; "
        "a new one if left out. The header Idempotency-Key says the same",
    )


class JobDocument(AnswerDocument):
    """A job; what has not happened yet is null."""

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


class JobList(AnswerDocument):
    """Jobs that have not ended, newest first, then those that ended last; `next` goes on as `after`."""

    jobs: list[JobDocument]
    next: str | None


class JobResult(AnswerDocument):
    """What a job gave; of a query the answer's object, its URL, and how many rows and bytes it has."""

    result: Any


class ProblemDocument(AnswerDocument):
    """An error (RFC 9457)."""

    type: str = Field(examples=["urn:dormouse:invalid-query"])
    title: str = Field(examples=["The query does not fit the table's schema."])
    status: int = Field(examples=[400])
    detail: str = Field(examples=["unknown column 'carier'; did you mean 'carrier'?"])


_WHEN = dict(REFUSALS.values()) | {
    400: "The request is not valid; `detail` says what to change.",
    403: "The token's holder may not start this kind of job; or, without tokens, another site's page asks.",
    404: "There is no such table, or job.",
    409: "The job has no result: it runs, has failed or was cancelled; or its id is that of another job "
    "or request.",
    410: "The job's result, or the page of a query, is past its retention.",
    413: "The body, or the answer, is larger than is allowed.",
    429: "Too many queries run at once; try again later.",
    503: "The database or the object store cannot be reached, or a file was collected meanwhile; try again.",
    504: "The query took longer than is allowed, before its first row.",
}
_EXAMPLES = {
    JSON_LINES: '{"carrier":"AA","flight":7,"delay":null}\n{"carrier":"AA","flight":8,"delay":2.5}\n',
    CSV: '"carrier","flight","delay"\n"AA",7,\n"AA",8,2.5\n',
}
_HEADERS: dict[int, dict[str, Any]] = {
    401: {"WWW-Authenticate": {"schema": {"type": "string"}}},
    429: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
    503: {"Retry-After": {"schema": {"type": "integer"}, "description": "in seconds"}},
}


def problems(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Problem documents of these statuses."""
    return {status: _problem(status) for status in (*statuses, 403, 421)}


def _problem(status: int) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{ProblemDocument.__name__}"}
    found: dict[str, Any] = {"description": _WHEN[status], "content": {MEDIA_TYPE: {"schema": schema}}}
    return {**found, "headers": _HEADERS[status]} if status in _HEADERS else found


READS = problems(401, 503)
ANSWERS = problems(400, 401, 404, 503)
STARTS = problems(400, 401, 403, 404, 408, 409, 413, 415, 503)
JOBS = problems(400, 401, 404, 503)
RESULTS = problems(400, 401, 404, 409, 410, 503)
PLANS = problems(400, 401, 404, 408, 413, 415, 429, 503, 504)
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
    **problems(400, 401, 404, 406, 408, 413, 415, 429, 503, 504),
}
PARTS: dict[int | str, dict[str, Any]] = {
    206: {"description": "The range of bytes that the header Range asks for."},
    304: {"description": "If-None-Match has its ETag."},
}
ROWS = problems(400, 401, 404, 503)
PAGES = problems(400, 401, 404, 408, 410, 413, 415, 429, 503, 504)
SENDS = problems(400, 401, 403, 404, 408, 409, 413, 415, 503)
LOOKS = problems(400, 401, 408, 413, 415, 503)
CSV_ROWS: dict[int | str, dict[str, Any]] = {
    200: {"description": "The rows.", "content": {CSV: {"schema": {"type": "string"}}}},
    **problems(400, 401, 404, 410, 429, 503, 504),
}
CSV_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {CSV: {"schema": {"type": "string", "format": "binary"}}}}
}


# What requests and answers about row tables look like.


class RowQueryRequest(Request):
    """A query of one row table, or where one goes on."""

    sql: str | None = Field(
        default=None,
        description="SELECT from the table, with WHERE, GROUP BY, ORDER BY, LIMIT",
        examples=["select name, n from samples where n > $1 order by n"],
    )
    parameters: list[Any] | dict[str, Any] | None = Field(
        default=None, description="a list for $1, $2, …, an object for $name", examples=[[3]]
    )
    page: str | None = Field(default=None, description="the `next_page` of the page before")
    page_rows: int | None = Field(default=None, description="how many rows a page has at most")
    version: int | None = Field(default=None, description="the rows as of a version")
    snapshot: str | None = Field(default=None, description="the rows of a snapshot")
    count: bool = Field(default=False, description="also count the rows of all pages")
    wait_seconds: float = Field(
        default=INDEX_WAIT_SECONDS, ge=0, le=60, description="how long the query waits for the index"
    )


class RowTableList(AnswerDocument):
    """Row tables by name; `next` goes on from here as `after`, null at the end."""

    tables: list[dict[str, Any]]
    next: str | None


class RowTableDescription(AnswerDocument):
    """A row table: its columns and its newest version, 0 when it was never changed; its snapshots."""

    name: str
    version: int
    changed_at: datetime
    columns: list[dict[str, Any]]
    snapshots: list[dict[str, Any]]


class RowPage(AnswerDocument):
    """Rows of a query; `next_page` goes on as `page`, at the version of this one. Null at the end."""

    columns: list[dict[str, Any]]
    rows: list[list[Any]]
    row_ids: list[int] | None
    row_versions: list[int] | None
    next_page: str | None
    max_rows: int
    version: int
    changed_at: datetime
    count: int | None = None


class RowHistory(AnswerDocument):
    """Changes of a row table, the newest first."""

    changes: list[dict[str, Any]]
    next: int | None


class PutFile(AnswerDocument):
    """What a FILE cell is to hold."""

    file: str


class CsvLook(AnswerDocument):
    """What a CSV file seems to hold: columns for a table, the names of its cells, its first rows."""

    columns: list[dict[str, Any]]
    names: list[str]
    rows: list[list[str | None]]
    row_count: int
    is_whole: bool
    has_row_ids: bool
