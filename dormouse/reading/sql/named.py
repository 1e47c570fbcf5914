"""The tables that a statement names, and the moment at which they are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from dormouse.errors import CutExpired, DormouseError, InvalidCut, InvalidQuery
from dormouse.model.cut import Cut, Position, When
from dormouse.reading.checked_files import FileGone
from dormouse.reading.sql.parsed import Parsed
from dormouse.reading.table_view import gone_of_moment, milliseconds_at
from dormouse.reading.where import unknown
from dormouse.state.context import TableContext
from dormouse.state.history.moments import kept, position_of

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


class Moments:
    """Where tables are read: each at the position of one moment, or all as they are now.

    `contexts` have the columns of then; of a table that cannot be read then, those of now, until it is
    `read`. `refused` says of these why.
    """

    def __init__(self, contexts: Mapping[str, TableContext], as_of: When | None) -> None:
        self._as_of = as_of
        self._read: Collection[str] = ()
        self._positions: dict[str, Position] = {}
        self._errors: dict[str, DormouseError] = {}
        self.contexts = dict(contexts)
        self._now_ms = milliseconds_at(None)
        if as_of is None:
            return
        for name, context in contexts.items():
            try:
                self._positions[name] = position = position_of(context, as_of)
                self.contexts[name] = context.as_of(position)
            except (InvalidCut, CutExpired) as error:
                self._errors[name] = error

    def __bool__(self) -> bool:
        return self._as_of is not None

    @property
    def refused(self) -> dict[str, str]:
        return {name: str(error) for name, error in self._errors.items()}

    def read(self, names: Collection[str], named: Collection[str]) -> None:
        """Records which tables are read.

        All that are `named` must be there at the moment: raises `CutExpired` and `InvalidCut`, also for the
        cut of one table where several are named.
        """
        if isinstance(self._as_of, Cut) and len(named) > 1:
            listed = ", ".join(map(repr, sorted(named)))
            raise InvalidCut(
                f"a cut is of one table, and the statement reads {listed}: give a time, or the name of a cut "
                "that each of them has"
            )
        for name in named:
            if name in self._errors:
                raise self._errors[name]
        self._read = names

    def of(self, name: str) -> Position | None:
        """Returns where a table is read; None: as it is now, or not at all."""
        return self._positions.get(name)

    def milliseconds(self, name: str) -> int:
        """When a table is read, as ages are told from, since 1970: of all as they are now, one time."""
        return self._now_ms if (at := self.of(name)) is None else milliseconds_at(at)

    def all(self, names: Sequence[str]) -> list[Position] | None:
        return [self._positions[name] for name in names] if self else None

    @contextmanager
    def kept(self) -> Iterator[None]:
        """What the tables had then stays until the end."""
        with ExitStack() as stack:
            for name in self._read if self else ():
                stack.enter_context(kept(self.contexts[name], self._positions[name]))
            yield

    def why_gone(self, error: FileGone) -> DormouseError:
        """Of a file of the moment: `CutExpired`, or it is lost."""
        for name, position in self._positions.items():
            if self.contexts[name].table.name == error.table:
                return gone_of_moment(self.contexts[name], position, error)
        return error
