"""What a demo works on: raw data in DuckDB, tables to fill from it, and questions to ask of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dormouse.model.keys import KeyValue
from dormouse.model.properties import TableProperties
from dormouse.model.schema import Schema

if TYPE_CHECKING:
    import duckdb

Say = Callable[[str], None]


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


class Dataset(Protocol):
    """One kind of demo."""

    @property
    def title(self) -> str:
        """A line about the data."""

    @property
    def main_table(self) -> str:
        """The table whose state is shown."""

    @property
    def table_names(self) -> Sequence[str]:
        """All tables that the demo makes."""

    def prepare(self, db: duckdb.DuckDBPyConnection, work: Path, say: Say) -> int:
        """Gets the raw data ready in DuckDB, with scratch files in `work`; gives its rows."""

    def tables(self) -> Sequence[DemoTable]:
        """The tables, once the data is there."""

    def loads(self) -> Iterator[Load]:
        """The ingests, in order."""

    def questions(self) -> Sequence[Question]:
        """What is asked at the end."""

    def next_statement(self) -> str:
        """A SQL statement for a person to try."""
