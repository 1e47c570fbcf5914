"""What a statement names, by DuckDB's own parser: one that reads, of tables alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, product

import duckdb

from dormouse.errors import InvalidQuery
from dormouse.model.text import is_text
from dormouse.sql.conditions import text
from dormouse.sql.failures import failure, syntax_error

STATEMENT_CHARACTERS_MAX = 1 << 20
_READS = "SQL can only read: SELECT, WITH, VALUES, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of them"
_TABLE_FUNCTIONS = {"generate_series", "json_each", "json_tree", "range", "repeat", "repeat_row", "unnest"}
"""That make rows of their arguments; others read files, or what DuckDB knows of itself."""
_TELLING = {"current_setting", "json_serialize_plan", "write_log"}
"""Functions that tell of the process, or of the instance's own files, or write to DuckDB's log."""
_LISTS = {'"tables"', "__show_tables_expanded"}
_ANALYZES = ("analyze", "analyse")
_COMPARING_NULL = {
    ("distinct", "from"),
    *product(("is", "not"), ("true", "false", "unknown")),
}
_JOINING_FULL = {("full", "join"), ("full", "outer")}
_JOINING_ONE = set(product(("left", "right"), ("join", "outer")))
_NULLS_FIRST = ("nulls", "first")
_WORD = re.compile(rb'"((?:[^"]|"")*)"|([\w\x80-\xff][\w$\x80-\xff]*)')
_CATALOGS = {"temp", "memory"}
_PATHS = {
    "names": "$..table_name",
    "ctes": "$..cte_map.map[*].key",
    "functions": "$..function.function_name",
    "called": "$..function_name",
    "schemas": "$..schema_name",
    "catalogs": "$..catalog_name",
    "homes": "$..catalog",
    "shown": "$..show_type",
}
"""Of what a statement names, in the tree that the parser makes of it. No name can be mistaken for a node."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A statement that reads; `names` are of tables, or of what it defines itself: `ctes`, in lower case."""

    text: str
    select: str
    """The statement, or the one that it explains."""
    parameters: frozenset[str]
    """Their names in lower case; `$1`, and the first `?`, is 1."""
    names: frozenset[str]
    ctes: frozenset[str]
    lists_tables: bool
    explains: bool
    runs: bool
    """False for EXPLAIN without ANALYZE."""
    compares_null: bool
    """Whether it may compare so that NULL is a value: IS DISTINCT FROM, IS TRUE and others."""
    joins_outer: bool
    """As full, or where nulls come first."""

    """Whether it may have a FULL JOIN, of which DuckDB skips rows of one side that the other side needs."""


def parsed(connection: duckdb.DuckDBPyConnection, statement: str) -> Parsed:
    """What a statement names; `InvalidQuery` unless it is one, and reads tables alone."""
    if not isinstance(statement, str):
        raise InvalidQuery(f"a statement must be a string, not {statement!r}")
    if not is_text(statement):
        raise InvalidQuery("a statement can have neither NUL nor half a surrogate pair")
    if len(statement) > STATEMENT_CHARACTERS_MAX:
        raise InvalidQuery(
            f"the statement has {len(statement):,} characters, more than {STATEMENT_CHARACTERS_MAX:,}"
        )
    found = _one(statement)
    explains, runs, select = found.type == duckdb.StatementType.EXPLAIN, True, statement
    if explains:
        runs, select = _unexplained(statement)
        found = _one(select)
    named = _named(connection, select)
    _check_reads_tables(named)
    pairs = set(pairwise(word for _, word in words(select)))
    lists = named["names"] & _LISTS if "SHOW_UNQUALIFIED" in named["shown"] else set()
    return Parsed(
        text=statement,
        select=select,
        parameters=frozenset(name.lower() for name in found.named_parameters),
        names=frozenset(named["names"] - lists),
        ctes=frozenset(name.lower() for name in named["ctes"]),
        lists_tables=bool(lists),
        explains=explains,
        runs=runs,
        compares_null=not _COMPARING_NULL.isdisjoint(pairs),
        joins_outer=not _JOINING_FULL.isdisjoint(pairs)
        or (_NULLS_FIRST in pairs and not _JOINING_ONE.isdisjoint(pairs)),
    )


def words(text: str) -> Iterator[tuple[int, str]]:
    """Tokens, where they begin in UTF-8, and the names and keywords in lower case."""
    raw = text.encode()
    for start, kind in duckdb.tokenize(text):
        word = _WORD.match(raw, start)
        if word is None or kind == duckdb.token_type.string_const:
            yield start, chr(raw[start]) if start < len(raw) else ""
        else:
            yield start, (word[1] or word[2] or b"").decode(errors="replace").lower()


def _one(statement: str) -> duckdb.Statement:
    """The one statement that there is; `InvalidQuery` when it neither reads nor explains."""
    try:
        found = duckdb.extract_statements(statement)
    except duckdb.Error as error:
        raise syntax_error(error, statement) from None
    kinds = [one.type for one in found]
    if not kinds:
        raise InvalidQuery(f"the statement is empty; {_READS}")
    if kinds == [duckdb.StatementType.CREATE, duckdb.StatementType.SELECT] and "pivot" in statement.lower():
        raise InvalidQuery("PIVOT must name the values that become columns: PIVOT … ON column IN (…)")
    if len(kinds) > 1:
        raise InvalidQuery(f"only one statement at a time can be run, these are {len(kinds)}")
    if kinds[0] not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
        raise InvalidQuery(f"{_READS}; not {kinds[0].name.replace('_', ' ')}")
    return found[0]


def _unexplained(statement: str) -> tuple[bool, str]:
    """Whether an EXPLAIN runs what it explains, and what that is."""
    raw, left, runs = statement.encode(), list(words(statement))[1:], False
    while left:
        start, word = left[0]
        rest, length = raw[start:].decode(), 1
        if word == "(" and not _is_statement(rest):
            length += next(n for n, (_, one) in enumerate(left) if one == ")")
        elif word not in (*_ANALYZES, "verbose"):
            return runs, rest
        runs = runs or any(one in _ANALYZES for _, one in left[:length])
        left = left[length:]
    raise InvalidQuery("EXPLAIN needs a statement")


def _is_statement(text: str) -> bool:
    try:
        return len(duckdb.extract_statements(text)) == 1
    except duckdb.Error:
        return False


def _check_reads_tables(named: Mapping[str, set[str]]) -> None:
    for function in sorted(named["functions"] - _TABLE_FUNCTIONS):
        known = ", ".join(sorted(_TABLE_FUNCTIONS))
        raise InvalidQuery(
            f"SQL reads tables only, not {function}(…); of functions in FROM there are {known}"
        )
    for function in sorted({name.lower() for name in named["called"]} & _TELLING):
        raise InvalidQuery(f"SQL reads tables only, not {function}(…)")
    # a function of "system" would be another than the one of the planner, which knows no time
    catalogs = named["catalogs"] | named["homes"]
    for schema in sorted(named["schemas"] - {"main"} | catalogs - _CATALOGS):
        raise InvalidQuery(f"there is no schema {schema!r}: tables and functions go by their names alone")
    if "SHOW_UNQUALIFIED" in named["shown"] and not named["names"] & _LISTS:
        raise InvalidQuery("of SHOW there is SHOW TABLES, and SHOW with a table's name")


def _named(connection: duckdb.DuckDBPyConnection, select: str) -> dict[str, set[str]]:
    tree = f"json_serialize_sql({text(select)}, skip_null := true, skip_empty := true, skip_default := true)"
    columns = ", ".join(f"json_extract_string(tree, '{path}')" for path in _PATHS.values())
    try:
        found = connection.execute(
            f"WITH parsed AS MATERIALIZED (SELECT {tree} AS tree) "
            f"SELECT tree ->> '$.error_message', {columns} FROM parsed"
        ).fetchone()
    except duckdb.Error as error:
        raise failure(error, reads=False) from None
    assert found is not None  # noqa: S101 it is one row
    refused, *lists = found
    if refused is not None:
        raise InvalidQuery(f"{_READS}" if "Only SELECT" in refused else refused)
    return {name: set(items) for name, items in zip(_PATHS, lists, strict=True)}
