"""Named, described queries from the `.sql` file beside a module.

    -- name: add_files
    -- Adds files that are not tracked yet.
    insert into {file} (filename) select unnest(%(filenames)s::text[]);

`{file}` is an identifier, given to `Query.on`; `%(filenames)s` a value, given to psycopg. Every other brace
and percent sign is SQL's own and stays as it is written, so that a query can be read and run as SQL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from importlib import resources
from pathlib import Path

from psycopg import sql

IdentifierPath = str | tuple[str, ...]
"""A name, or a name qualified by its schema: `("dormouse", "file_17")`."""

_NAME = re.compile(r"^--\s*name:\s*(?P<name>\S*)\s*$")
_IDENTIFIER = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
_VALUE = re.compile(r"%\([^)]+\)[sbt]")
_PERCENT = re.compile(rf"(?P<value>{_VALUE.pattern})|%%?")


@dataclass(frozen=True)
class Query:
    """A statement, or several, with a name and what it is for."""

    name: str
    description: str
    text: str

    def on(self, **identifiers: IdentifierPath) -> sql.Composed:
        """The query with its `{name}` placeholders replaced by quoted identifiers.

        Raises ValueError unless exactly the query's own identifiers are given.
        """
        return _compose(self, tuple(sorted(identifiers.items())))

    def including(self, **parts: Query) -> Query:
        """The query with `{name}` placeholders replaced by other queries' text."""
        text = self.text
        for name, part in parts.items():
            text = text.replace(f"{{{name}}}", part.text)
        return replace(self, text=text)

    def literally(self, **values: int | str) -> Query:
        """The query with `{name}` placeholders replaced by literals, for DDL, which takes no parameters."""
        text = self.text
        for name, value in values.items():
            text = text.replace(f"{{{name}}}", sql.Literal(value).as_string(None))
        return replace(self, text=text)

    @cached_property
    def identifiers(self) -> frozenset[str]:
        return frozenset(_IDENTIFIER.findall(self.text))


class Queries(Mapping[str, Query]):
    """The queries of one file, by name."""

    def __init__(self, source: str, queries: Mapping[str, Query]) -> None:
        self._source = source
        self._queries = dict(queries)

    def __getitem__(self, name: str) -> Query:
        try:
            return self._queries[name]
        except KeyError:
            known = ", ".join(sorted(self._queries))
            raise KeyError(f"{self._source} has no query named {name!r}; it has {known}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._queries)

    def __len__(self) -> int:
        return len(self._queries)


def load(package_or_file: str, name: str) -> Queries:
    """The queries of `<name>.sql` in a package (`__package__`), or beside a module (`__file__`).

    Raises ValueError for a doubled name, a missing name or description, or an empty query.
    """
    if package_or_file.endswith(".py"):
        text = Path(package_or_file).with_name(f"{name}.sql").read_text("utf-8")
    else:
        text = resources.files(package_or_file).joinpath(f"{name}.sql").read_text("utf-8")
    return parse(text, source=f"{name}.sql")


def parse(text: str, source: str) -> Queries:
    """The queries of a text; `source` names it in errors."""
    queries: dict[str, Query] = {}
    for name, lines in _sections(text, source):
        if name in queries:
            raise ValueError(f"{source}: the query {name!r} is there twice")
        queries[name] = _query(name, lines, source)
    return Queries(source, queries)


def _sections(text: str, source: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, list[str]()
    for line in text.splitlines():
        if (heading := _NAME.match(line)) is None:
            lines.append(line)
            continue
        if name is not None:
            yield name, lines
        name, lines = heading["name"], []
        if not name.isidentifier():
            raise ValueError(f"{source}: {name!r} is not a name for a query")
    if name is None:
        raise ValueError(f"{source}: no query; each begins with '-- name: ...'")
    yield name, lines


def _query(name: str, lines: list[str], source: str) -> Query:
    described = 0
    while described < len(lines) and lines[described].startswith("--"):
        described += 1
    description = " ".join(line.lstrip("- ").strip() for line in lines[:described]).strip()
    text = "\n".join(lines[described:]).strip()
    if not description:
        raise ValueError(f"{source}: the query {name!r} has no description below its name")
    if not text:
        raise ValueError(f"{source}: the query {name!r} has no SQL")
    return Query(name, description, text)


@lru_cache(maxsize=10_000)
def _compose(query: Query, identifiers: tuple[tuple[str, IdentifierPath], ...]) -> sql.Composed:
    given = dict(identifiers)
    if given.keys() != query.identifiers:
        expected = ", ".join(sorted(query.identifiers)) or "none"
        raise ValueError(
            f"the query {query.name!r} takes the identifiers {expected}, not {', '.join(given) or 'none'}"
        )
    rendered = _IDENTIFIER.sub(lambda match: _quoted(given[match[1]]), query.text)
    # Rendered once here, so that executing it does not quote every identifier again.
    return sql.Composed([sql.SQL(_with_percent_signs(rendered))])


def _quoted(path: IdentifierPath) -> str:
    return sql.Identifier(*((path,) if isinstance(path, str) else path)).as_string(None)


def _with_percent_signs(text: str) -> str:
    """psycopg reads `%%` as a percent sign when there are values, and `%` when there are none."""
    percent = "%%" if _VALUE.search(text) else "%"
    return _PERCENT.sub(lambda match: match["value"] or percent, text)
