"""What a demo's data says of itself: tables to make, ingests, and questions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dormouse.model.region import KeyValue
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import DOUBLE, INT, LONG, STRING, TIMESTAMP

Say = Callable[[str], None]
_DUCKDB_TYPES = {INT: "integer", LONG: "bigint", DOUBLE: "double", STRING: "varchar", TIMESTAMP: "timestamp"}


@dataclass(frozen=True, slots=True)
class DemoTable:
    """A table to make."""

    name: str
    schema: Schema
    properties: TableProperties
    split_points: tuple[KeyValue, ...] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """One ingest. `shown` says whether it has a line of its own."""

    label: str
    table: str
    data: Any
    engine: str = "local"
    shown: bool = True


@dataclass(frozen=True, slots=True)
class Question:
    """The same question to Dormouse, by key or in SQL, and to DuckDB, about the raw data."""

    title: str
    text: str
    duckdb_sql: str
    where: dict[str, Any] | None = None
    columns: tuple[str, ...] | None = None
    sql: str | None = None


def select_list(schema: Schema, **computed: str) -> str:
    """A table's columns, of its types, for a SELECT of DuckDB; what is not computed has the column's name."""
    return ", ".join(
        f"({computed.get(field.name, field.name)})::{_DUCKDB_TYPES[field.type]} as {field.name}"
        for field in schema.fields
    )
