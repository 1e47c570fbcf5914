"""The tables that a statement names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from dormouse.errors import InvalidQuery
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.where import unknown
from dormouse.state.context import TableContext

_DUCKDBS = re.compile(r"[./\\:]|^(duckdb|pg|pragma|sqlite)_", re.IGNORECASE)
"""Names of files, and of DuckDB's own views."""


@dataclass(frozen=True)
class Named:
    """How a statement finds tables by their names."""

    like: Callable[[Iterable[str]], Mapping[str, TableContext]]
    """Tables that have one of the names, in upper or lower case."""
    all: Callable[[], Mapping[str, TableContext]]
    names: Callable[[], Iterable[str]]


def alone(context: TableContext) -> Named:
    """One table that is known, for a statement that gives it the name by which it is known."""
    found = {context.table.name: context}
    return Named(like=lambda _: found, all=lambda: found, names=lambda: list(found))


def meant(parsed: Parsed, tables: Named) -> dict[str, TableContext]:
    """The tables that a statement may read, by name; `InvalidQuery` for a name that means nothing."""
    found = dict(tables.all() if parsed.lists_tables else tables.like(parsed.names))
    by_name: dict[str, str] = {}
    for name in sorted(parsed.names):
        meant = _one(name, found)
        # where the statement's own name does not reach, DuckDB would read a file, or its catalog
        if meant is None and (name.lower() not in parsed.ctes or _DUCKDBS.search(name)):
            raise unknown("table", name, tables.names())
        if meant is not None and by_name.setdefault(meant.lower(), meant) != meant:
            raise _alike(meant, by_name[meant.lower()])
    if parsed.lists_tables:
        return {name: found[name] for name in sorted(found) if by_name.get(name.lower(), name) == name}
    return {name: _checked(found[name]) for name in by_name.values()}


def _one(name: str, found: Mapping[str, TableContext]) -> str | None:
    """The table that a name means: exactly, or else in upper or lower case."""
    alike = [name] if name in found else [one for one in found if one.lower() == name.lower()]
    if len(alike) > 1:
        raise _alike(*sorted(alike)[:2])
    return alike[0] if alike else None


def _alike(one: str, other: str) -> InvalidQuery:
    return InvalidQuery(
        f"SQL cannot tell table {one!r} from {other!r}, whose name differs in upper and lower case only: "
        "rename one"
    )


def _checked(context: TableContext) -> TableContext:
    names: dict[str, str] = {}
    for name in context.schema.names:
        if names.setdefault(name.lower(), name) != name:
            raise InvalidQuery(
                f"SQL cannot read table {context.table.name!r}: its columns {names[name.lower()]!r} and "
                f"{name!r} differ in upper and lower case only"
            )
    return context
