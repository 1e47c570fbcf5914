"""What is asked of an index, and its answer: by one statement as a rule, else after a look at the build."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import PageExpired
from dormouse.rows import pages
from dormouse.rows.builds import Build, Builds, Unsure, has_version
from dormouse.rows.columns import Column
from dormouse.rows.emit import POSTGRES, column_name
from dormouse.rows.expressions import Statement
from dormouse.rows.indexing import Source
from dormouse.rows.pages import Rows
from dormouse.rows.placements import Looked
from dormouse.rows.statements import Given, statement_of


@dataclass(frozen=True, slots=True)
class Asked:
    """A query as it is asked; `place` and `given` say where a page begins that is not the first."""

    table: Source
    text: str
    statement: Statement
    columns: tuple[Column, ...]
    version: int
    page_rows: int | None = None
    values: Given = ()
    place: Sequence[Any] | None = None
    given: int = 0


def bound(
    table: Source, text: str, looked: Looked, version: int, page_rows: int | None, values: Given
) -> Asked:
    """A query of a table as it was looked at; `InvalidQuery`."""
    statement = statement_of(text, looked.name, looked.columns, values)
    return Asked(table, text, statement, looked.columns, version, page_rows, values)


def page_at_once(asked: Asked, builds: Builds, looked: Looked, build_id: int) -> tuple[Rows, None]:
    """The rows of a page by one statement, which is all that it takes as a rule; `Unsure`."""
    if asked.statement.limit is not None and asked.given >= asked.statement.limit:
        raise Unsure  # nothing would be asked
    found = pages.read(
        asked.statement,
        partial(builds.rows_at, looked, build_id),
        f"current_{build_id:d}",
        POSTGRES,
        rows=pages.rows_max(asked.columns, asked.page_rows),
        place=asked.place,
        given=asked.given,
    )
    return found, None


def build_of(conn: psycopg.Connection[Any], build: Build) -> Build:
    """The build itself."""
    return build


def page_of(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> tuple[Rows, Build] | int:
    """The rows of a page, or the version of an index that does not have the one asked for. `PageExpired`."""
    is_first = asked.place is None and not asked.given
    if build.version < asked.version:
        return build.version
    if is_first and (build.is_retired or not has_version(conn, build, asked.version)):
        return build.version
    rows = pages.rows_max(asked.columns, asked.page_rows)
    source = _source(asked, conn, build)
    found = pages.read(
        asked.statement,
        partial(_ask, conn),
        source,
        POSTGRES,
        rows=rows,
        place=asked.place,
        given=asked.given,
    )
    return found, build


def count_of(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> int:
    """How many rows the answer has. `PageExpired`."""
    return pages.count(asked.statement, partial(_ask, conn), _source(asked, conn, build), POSTGRES)


def _source(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> str:
    """The rows of a version: of the index's own its table, of one before also what was superseded since."""
    if not has_version(conn, build, asked.version):
        why = f"the rows of version {asked.version} are kept no longer: begin the query again"
        raise PageExpired.of(asked.table.name, why)
    current, version = f"current_{build.build_id:d}", asked.version
    if version == build.version:
        return current
    names = ", ".join(["row_id", "row_version", *(column_name(c.column_id or 0) for c in asked.columns)])
    return (
        f"(select {names} from {current} where row_version <= {version:d} union all "
        f"select {names} from superseded_{build.build_id:d} "
        f"where row_version <= {version:d} and until_version > {version:d}) as rows_then"
    )


def _ask(conn: psycopg.Connection[Any], text: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    return conn.execute(text.encode(), values, binary=True).fetchall()
