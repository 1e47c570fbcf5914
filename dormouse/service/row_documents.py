"""What requests and answers about row tables look like."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from dormouse.rows.waiting import INDEX_WAIT_SECONDS
from dormouse.service.documents import AnswerDocument, Request


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
