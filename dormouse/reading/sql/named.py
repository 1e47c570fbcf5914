"""The tables that a statement names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dormouse.errors import InvalidQuery
from dormouse.model.text import check_cases
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.where import unknown
from dormouse.state.context import TableContext

_DUCKDBS = re.compile(r"[./\\:]|^(duckdb|pg|pragma|sqlite)_", re.IGNORECASE)
"""A pattern of names of files, and of DuckDB's own views, such as `duckdb_tables` and `pg_class`."""


@dataclass(frozen=True)
class Named:
    """Three functions that look up the tables that a statement names."""

    like: Callable[[Iterable[str]], Mapping[str, TableContext]]
    """Returns the tables that have one of the names; upper and lower case are equal."""
    all: Callable[[], Mapping[str, TableContext]]
    names: Callable[[], Iterable[str]]


def alone(context: TableContext) -> Named:
    """Returns look-up functions that know only the table of the context."""
    found = {context.table.name: context}
    return Named(like=lambda _: found, all=lambda: found, names=lambda: list(found))


def meant(parsed: Parsed, tables: Named) -> dict[str, TableContext]:
    """Returns the tables that a statement may read, by name.

    Raises `InvalidQuery` for a name that is no table, and for tables or columns whose names differ only in
    case.
    """
    found = dict(tables.all() if parsed.lists_tables else tables.like(parsed.names))
    by_name: dict[str, str] = {}
    for name in sorted(parsed.names):
        meant = _table_named(name, found)
        # outside the scope of a CTE's name, DuckDB would read a file or its own catalog
        if meant is None and (name.lower() not in parsed.ctes or _DUCKDBS.search(name)):
            raise unknown("table", name, tables.names())
        if meant is not None and by_name.setdefault(meant.lower(), meant) != meant:
            raise _alike(meant, by_name[meant.lower()])
    if parsed.lists_tables:
        return {name: found[name] for name in sorted(found) if by_name.get(name.lower(), name) == name}
    return {name: _checked(found[name]) for name in by_name.values()}


def table_named(name: str, tables: Named) -> str:
    """Returns the name of the table that a statement calls `name`. Raises `InvalidQuery` without one."""
    found = _table_named(name, tables.like([name]))
    if found is None:
        raise unknown("table", name, tables.names())
    return found


def _table_named(name: str, tables: Mapping[str, TableContext]) -> str | None:
    """Returns the table's name for a name in a statement: the same name, else one in another case.

    Returns None without such a table. Raises `InvalidQuery` if several names differ only in case.
    """
    alike = [name] if name in tables else [table for table in tables if table.lower() == name.lower()]
    if len(alike) > 1:
        raise _alike(*sorted(alike)[:2])
    return alike[0] if alike else None


def _alike(name: str, other: str) -> InvalidQuery:
    return InvalidQuery(
        f"SQL cannot tell table {name!r} from {other!r}, whose name differs in upper and lower case only: "
        "rename one"
    )


def _checked(context: TableContext) -> TableContext:
    check_cases(f"SQL cannot read table {context.table.name!r}: its columns", context.schema.names)
    return context
