"""What is known of a table beside its data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from dormouse.errors import InvalidName
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema

# What a check finds.

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


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of a table, or with None of none, that is not as it was written; `detail` says what."""

    kind: ProblemKind
    table: str | None
    partition_id: str | None
    filename: str | None
    detail: str


TABLE_NAME_LENGTH_MAX = 128
_TABLE_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")


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
