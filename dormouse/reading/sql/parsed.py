"""The names that a statement uses, found by DuckDB's own parser, and checks that it only reads tables."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import count as count_from
from itertools import groupby, pairwise, product
from operator import itemgetter
from typing import Any

import duckdb

from dormouse.errors import DormouseError, InvalidQuery
from dormouse.model.text import did_you_mean
from dormouse.model.types import is_text
from dormouse.reading.sql.conditions import text
from dormouse.reading.sql.moments import tells_time
from dormouse.reading.sql.results import failure, syntax_error

# Windows rewritten so that DuckDB does not compute one over the partitions of another.

_FRAMES = {"rows", "range", "groups"}
_OPENING, _CLOSING = set("([{"), set(")]}")


def with_distinct_windows(statement: str, tokens: Sequence[tuple[int, str]]) -> str:
    """Returns the statement, changed so that different PARTITION BY clauses have lists of different lengths.

    DuckDB 1.5 treats two lists of equal length as one if each expression of the first is in the second
    (https://github.com/duckdb/duckdb/issues/24629). It compares them after simplification: `a` and
    `coalesce(a, 1)` are equal if no value of `a` is null. Lists of different lengths are never treated as
    one, and a constant at the end of a list changes no partition.

    `tokens` are those of the statement, from `words`.
    """
    raw = statement.encode()
    # a quoted name is no keyword
    unquoted = [(start, "" if raw[start : start + 1] == b'"' else word) for start, word in tokens]
    lists = [(raw[start:end].strip(), end, count) for start, end, count in _partitions(unquoted)]
    lengths: dict[bytes, int] = {}
    for expressions, _, count in lists:
        if expressions not in lengths:
            # lists of one expression are treated as one only if they are equal
            free = (n for n in count_from(count) if n == 1 or n not in lengths.values())
            lengths[expressions] = next(free)
    for expressions, end, count in sorted(lists, key=itemgetter(1), reverse=True):
        raw = raw[:end] + b", true " * (lengths[expressions] - count) + raw[end:]
    return raw.decode()


def _partitions(tokens: Sequence[tuple[int, str]]) -> Iterator[tuple[int, int, int]]:
    """Yields for each PARTITION BY the start and end of its list in UTF-8, and the number of expressions."""
    for n, pair in enumerate(pairwise(word for _, word in tokens), 2):
        if pair != ("partition", "by"):
            continue
        depth, count, before = 0, 1, ","
        for end, word in tokens[n:]:
            is_frame = word in _FRAMES and before not in {",", "."}
            if depth == 0 and (word in _CLOSING or word == "order" or is_frame):
                yield tokens[n][0], end, count
                break
            depth += (word in _OPENING) - (word in _CLOSING)
            count += depth == 0 and word == ","
            before = word


# The functions that a statement may call. It is a list of allowed ones, since some of DuckDB's reveal other
# statements.


@dataclass(frozen=True, slots=True)
class Functions:
    """The reviewed functions of one kind, by their names in lower case."""

    allowed: frozenset[str]
    refused: dict[str, str]
    """The reason for the refusal of each function that is not allowed."""


def check_expressions(called: Iterable[str]) -> None:
    """Raises `InvalidQuery` if a function, operator or macro in an expression is not allowed."""
    known = reviewed("expressions")
    for name in sorted(name.lower() for name in called):
        if name not in known.allowed:
            raise InvalidQuery(
                f"SQL reads tables only, not {name}(…): {known.refused[name]}"
                if name in known.refused
                else f"unknown function {name!r}{did_you_mean(name, known.allowed)}"
            )


def check_tables(called: Iterable[str]) -> None:
    """Raises `InvalidQuery` for the first function in FROM that is not allowed."""
    known = reviewed("tables")
    for name in sorted(name.lower() for name in called):
        if name not in known.allowed:
            listed = ", ".join(sorted(known.allowed))
            why = f": {known.refused[name]}" if name in known.refused else ""
            raise InvalidQuery(
                f"SQL reads tables only, not {name}(…){why}; the functions allowed in FROM are {listed}"
            )


@cache
def reviewed(kind: str) -> Functions:
    """Returns the reviewed functions of a kind: "expressions", or "tables" for those called in FROM."""
    found = review()
    allowed = (names for names in found["allowed"][kind].values())
    return Functions(
        frozenset(name.lower() for names in allowed for name in names.split()),
        {name: one["why"] for one in found["refused"][kind].values() for name in one["names"].split()},
    )


def review() -> dict[str, Any]:
    """Returns the review of all functions, and the version of DuckDB to which it applies."""
    return tomllib.loads(resources.files(__package__ or "").joinpath("functions.toml").read_text("utf-8"))


STATEMENT_CHARACTERS_MAX = 1 << 20
_READS = "SQL can only read: SELECT, WITH, VALUES, SHOW, DESCRIBE, SUMMARIZE and EXPLAIN of them"
_LISTS = {'"tables"', "__show_tables_expanded"}
_ANALYZES = ("analyze", "analyse")
WRITING = ("insert", "update", "delete", "truncate", "merge")
"""The first words of statements that change rows of tables."""
READS_RUN = "instance.sql and 'dormouse sql' without --write run it"
RUNS = "instance.execute and --write run INSERT, UPDATE, DELETE, TRUNCATE and MERGE INTO"
_READERS = {
    "(", "desc", "describe", "from", "pivot", "pivot_longer", "pivot_wider", "select", "show", "summarize",
    "table", "unpivot", "values", "with",
}  # fmt: skip
"""First words of statements that may read."""
_DESCRIBES = {"desc", "describe", "show"}
"""The first words of statements that name a table and compute none of its rows."""
_NAME_ALONE = {2, 4}
"""The numbers of tokens of a statement that only names a table: DESCRIBE t, DESCRIBE main.t."""
_WRITES = (
    "instance.execute and 'dormouse sql --write' run statements that write; dm.Update and "
    "'dormouse rows change' change row tables"
)
_AT = (
    "SQL takes no AT: give the moment beside the statement, by as_of or --as-of; all tables are then read "
    "as they were at that moment"
)
_TRANSACTIONS = (
    "each statement reads one moment; as_of, or --as-of, lets several statements read the same one"
)
_TOGETHER = "instance.transaction() makes several changes in one commit"
_MAINTAINS = "'dormouse maintain' and 'dormouse compact' maintain tables"
_PREPARES = "give the values of $1 or $name beside a statement: parameters, or --param"
_ACCESS = "roles of PostgreSQL and tokens of 'dormouse serve' say what a user may do"
_CHANGES = {
    **dict.fromkeys(WRITING, _WRITES),
    **dict.fromkeys(("upsert", "replace"), f"it is INSERT OR REPLACE INTO; {_WRITES}"),
    "create": "instance.create_table and 'dormouse table create' make a table, and in instance.duckdb() "
    "there can be tables and views of your own",
    "drop": "'dormouse table drop' drops a table",
    "alter": "table.add_column and 'dormouse table add-column' add a column, and others like them change it",
    "copy": "'dormouse sql --output FILE' writes an answer to a file, and 'dormouse ingest' reads one",
}
"""The advice for a refused statement that makes changes, by a word of the statement."""
_INSTEAD = _CHANGES | {
    **dict.fromkeys(("begin", "start", "commit", "end", "rollback", "abort", "savepoint"), _TRANSACTIONS),
    **dict.fromkeys(("lock", "declare", "fetch"), _TRANSACTIONS),
    **dict.fromkeys(("vacuum", "analyze", "checkpoint", "force"), _MAINTAINS),
    **dict.fromkeys(("prepare", "execute", "deallocate"), _PREPARES),
    **dict.fromkeys(("grant", "revoke"), _ACCESS),
    "pragma": "SHOW TABLES lists the tables, DESCRIBE their columns",
}
"""The advice for any refused statement, by its first word."""
_HINTS = {
    ("for", "system_time"): _AT,
    ("for", "update"): "rows are read as they are at one moment, and none is locked",
    ("for", "share"): "rows are read as they are at one moment, and none is locked",
    ("show", "create"): "DESCRIBE table gives its columns, 'dormouse table show' its schema",
}
"""The advice for a statement that cannot be parsed, by two consecutive words of it."""
_NO_STATEMENT = "parser"
"""DuckDB's error type for a text that cannot be parsed."""
_NO_SELECT = "CTE needs a SELECT"
_COMPARING_NULL = {
    ("distinct", "from"),
    *product(("is", "not"), ("true", "false", "unknown")),
}
_JOINING_FULL = {("full", "join"), ("full", "outer")}
_JOINING_ONE = set(product(("left", "right"), ("join", "outer")))
_NULLS_FIRST = ("nulls", "first")
BEGINNINGS = {"select", "from", "values", "with"}
"""The first words of a subquery."""
_OPENING_SUBQUERY = set(product("(", BEGINNINGS))
_WORD = re.compile(rb'"((?:[^"]|"")*)"|([\w\x80-\xff][\w$\x80-\xff]*)')
_NO_LINE_END = re.compile(r"[^\n]")
_CATALOGS = {"temp", "memory"}
_ABOUT_TABLES = {"information_schema", "pg_catalog"}
_PATHS = {
    "names": "$..table_name",
    "ctes": "$..cte_map.map[*].key",
    "functions": "$..function.function_name",
    "called": "$..function_name",
    "schemas": "$..schema_name",
    "catalogs": "$..catalog_name",
    "homes": "$..catalog",
    "shown": "$..show_type",
    "moments": "$..at_clause.unit",
}
"""The JSON paths of names in the tree that DuckDB's parser makes of a statement.

No name that a statement contains can be mistaken for a node of the tree.
"""


@dataclass(frozen=True, slots=True)
class Parsed:
    """A statement that only reads, with the facts that the parser found in it.

    `names` are the names in FROM, of tables or of its own `ctes` (common table expressions). `ctes` are in
    lower case.
    """

    text: str
    run: str
    """The statement as it is run, with windows that DuckDB does not confuse."""
    has_own_names: bool
    """True if the answer has the columns of the statement's SELECT; false for EXPLAIN and SUMMARIZE."""
    select: str
    """The statement itself, or after EXPLAIN the statement that is explained."""
    parameters: frozenset[str]
    """The names of the parameters in lower case. `$1` and the first `?` have the name 1."""
    names: frozenset[str]
    ctes: frozenset[str]
    lists_tables: bool
    describes: bool
    """True for a DESCRIBE or SHOW that names one table."""
    explains: bool
    runs: bool
    """False for EXPLAIN without ANALYZE."""
    tells_time: bool
    """True if it may depend on the current time."""
    compares_null: bool
    """True if it may compare NULL as a value: IS DISTINCT FROM, IS TRUE and others."""
    joins_outer: bool
    """True if it may have a FULL JOIN, or an outer join sorted with NULLS FIRST.

    DuckDB then skips rows of one side that the other side needs.
    """
    has_subqueries: bool
    """True if it may have a subquery in parentheses."""


def parsed(connection: duckdb.DuckDBPyConnection, statement: str) -> Parsed:
    """Parses a statement; raises `InvalidQuery` if it does more than read tables."""
    tokens = checked_words(connection, statement)
    kind = statement_kind(tokens)
    run = statement if kind in _DESCRIBES else with_distinct_windows(statement, tokens)
    explains, runs, select = kind == "explain", True, statement
    if explains:
        runs, select = _unexplained(connection, statement, tokens)
        tokens = list(words(select))
    tree = _tree(connection, select)
    if tree["error_message"] is not None:
        before = statement[: len(statement) - len(select)]
        raise _refusal(connection, _NO_LINE_END.sub(" ", before) + select, tokens, tree)
    named = {name: set(items) for name, items in tree.items() if name in _PATHS}
    _check_reads_tables(named)
    pairs = set(pairwise(word for _, word in tokens))
    lists = named["names"] & _LISTS if "SHOW_UNQUALIFIED" in named["shown"] else set()
    return Parsed(
        text=statement,
        run=run,
        has_own_names=kind not in {"explain", "summarize"},
        select=select,
        parameters=_parameters(connection, select),
        names=frozenset(named["names"] - lists),
        ctes=frozenset(name.lower() for name in named["ctes"]),
        lists_tables=bool(lists),
        describes=kind in _DESCRIBES
        and sum(word != ";" for _, word in tokens) in _NAME_ALONE
        and len(named["names"] - lists) == 1,
        explains=explains,
        runs=runs,
        tells_time=tells_time(word for _, word in tokens),
        compares_null=not _COMPARING_NULL.isdisjoint(pairs),
        joins_outer=not _JOINING_FULL.isdisjoint(pairs)
        or (_NULLS_FIRST in pairs and not _JOINING_ONE.isdisjoint(pairs)),
        has_subqueries=not _OPENING_SUBQUERY.isdisjoint(pairs),
    )


def checked_words(connection: duckdb.DuckDBPyConnection, statement: object) -> list[tuple[int, str]]:
    """Returns the tokens of a statement, from `words`. Raises `InvalidQuery` if it cannot be a statement."""
    if not isinstance(statement, str):
        raise InvalidQuery(f"a statement must be a string, not {statement!r}")
    if not is_text(statement):
        raise InvalidQuery("a statement can have neither NUL nor half a surrogate pair")
    if len(statement) > STATEMENT_CHARACTERS_MAX:
        raise InvalidQuery(
            f"the statement has {len(statement):,} characters, more than {STATEMENT_CHARACTERS_MAX:,}"
        )
    tokens = list(words(statement))
    if not tokens:
        _check_begins(connection, statement)
    return tokens


def words(text: str) -> Iterator[tuple[int, str]]:
    """Yields tokens: the position of each in UTF-8, and its text, with names and keywords in lower case."""
    raw = text.encode()
    for start, kind in duckdb.tokenize(text):
        word = _WORD.match(raw, start)
        if word is None or kind == duckdb.token_type.string_const:
            yield start, chr(raw[start]) if start < len(raw) else ""
        else:
            yield start, (word[1] or word[2] or b"").decode(errors="replace").lower()


def statement_kind(tokens: Sequence[tuple[int, str]], allowed: str = _READS) -> str:
    """Returns the first word of the statement; raises `InvalidQuery` without a statement, or for several."""
    parts = [list(part) for ends, part in groupby(tokens, lambda token: token[1] == ";") if not ends]
    if not parts:
        raise InvalidQuery(f"the statement is empty; {allowed}")
    if len(parts) > 1:
        raise InvalidQuery(f"only one statement can be run at a time, not {len(parts)}; send each by itself")
    return parts[0][0][1]


def _check_begins(connection: duckdb.DuckDBPyConnection, statement: str) -> None:
    """Raises `InvalidQuery` for a text without tokens that is not blank, such as an unterminated quote."""
    try:
        connection.extract_statements(statement)
    except duckdb.Error as error:
        raise syntax_error(error, statement) from None


def _unexplained(
    connection: duckdb.DuckDBPyConnection, statement: str, tokens: Sequence[tuple[int, str]]
) -> tuple[bool, str]:
    """Returns whether an EXPLAIN runs the explained statement, and the text of that statement."""
    raw, runs = statement.encode(), False
    left = [token for token in tokens if token[1] != ";"][1:]
    while left:
        start, word = left[0]
        rest, length = raw[start:].decode(), 1
        if word == "(" and _tree(connection, rest)["error_type"] == _NO_STATEMENT:
            length += next((n for n, (_, one) in enumerate(left) if one == ")"), 0)
        elif word not in (*_ANALYZES, "verbose"):
            return runs, rest
        runs = runs or any(one in _ANALYZES for _, one in left[:length])
        left = left[length:]
    raise InvalidQuery("EXPLAIN needs a statement")


def refusal_to_write(kind: str) -> InvalidQuery:
    """Returns the error for a statement of another kind, its first word, where one that writes is wanted."""
    if kind in _READERS or kind == "explain":
        return InvalidQuery(f"{RUNS}; not {kind.upper()}: {READS_RUN}")
    instead = _INSTEAD.get(kind)
    instead = _TOGETHER if instead is _TRANSACTIONS else instead
    return InvalidQuery(f"{RUNS}; not {kind.upper() or 'a name'}" + (f": {instead}" if instead else ""))


def check_reads_no_table(connection: duckdb.DuckDBPyConnection, select: str) -> None:
    """Raises `InvalidQuery` for a SELECT of expressions that names a table or a function not allowed."""
    tree = _tree(connection, select)
    if tree["error_message"] is not None:
        raise InvalidQuery(f"cannot read an expression of the statement: {tree['error_message']}")
    named = {name: set(items) for name, items in tree.items() if name in _PATHS}
    _check_reads_tables(named)
    if named["names"]:
        raise InvalidQuery(
            f"an expression reads only columns of its own row, not table {min(named['names'])!r}: write "
            "MERGE INTO table USING (SELECT …) AS s ON …"
        )


def _refusal(
    connection: duckdb.DuckDBPyConnection,
    statement: str,
    tokens: Sequence[tuple[int, str]],
    tree: Mapping[str, Any],
) -> DormouseError:
    """Returns the error for a statement that the parser refuses.

    The text before the explained statement of an EXPLAIN is blank in `statement`, so that the error's
    position is right.
    """
    kind = statement_kind(tokens)
    acts = kind in _INSTEAD or _NO_SELECT in tree["error_message"]
    if tree["error_type"] == _NO_STATEMENT and not acts:
        try:
            # this error has the position, too; text that cannot be parsed is never run
            connection.extract_statements(statement)
        except duckdb.Error as error:
            return syntax_error(error, statement, _hint(tokens, str(error)))
    if "Only SELECT" not in tree["error_message"] and not acts:
        return InvalidQuery(tree["error_message"])
    if kind in _READERS:
        # the statement starts with WITH, for example
        changes = [word for _, word in tokens if word in _CHANGES]
        if not changes and any(word.startswith("pivot") for _, word in tokens):
            return InvalidQuery("PIVOT must name the values that become columns: PIVOT … ON column IN (…)")
        if not changes:
            return InvalidQuery(_READS)
        kind = changes[0]
    instead = _INSTEAD.get(kind, "instance.duckdb() is a DuckDB that runs any statement over the same tables")
    return InvalidQuery(f"{_READS}; not {kind.upper()}; {instead}")


def _hint(tokens: Sequence[tuple[int, str]], complaint: str) -> str | None:
    """Returns advice for a text that cannot be parsed; None without any. `complaint` is DuckDB's error."""
    if 'at or near ":"' in complaint:
        return "a parameter is written $name"
    if 'at or near "."' in complaint or 'at or near "\\"' in complaint:
        return "commands of a shell are no statements: SHOW TABLES lists the tables, DESCRIBE their columns"
    if "SELECT INTO" in complaint:
        return _CHANGES["create"]
    return next(filter(None, map(_HINTS.get, pairwise(word for _, word in tokens))), None)


def _parameters(connection: duckdb.DuckDBPyConnection, select: str) -> frozenset[str]:
    """Returns the names of a statement's parameters in lower case. The statement must be one SELECT.

    DuckDB runs some other statements when it extracts them: IMPORT DATABASE and PRAGMA open files.
    """
    [found] = connection.extract_statements(select)
    return frozenset(name.lower() for name in found.named_parameters)


def _check_reads_tables(named: Mapping[str, set[str]]) -> None:
    check_tables(named["functions"])
    check_expressions(named["called"] - named["functions"])
    # a function of schema "system" would bypass the planner's macros for the current time
    catalogs = named["catalogs"] | named["homes"]
    for schema in sorted(named["schemas"] - {"main"} | catalogs - _CATALOGS | named["catalogs"] - {"temp"}):
        instead = (
            "SHOW TABLES lists the tables, DESCRIBE their columns"
            if schema.lower() in _ABOUT_TABLES
            else "use the names of tables and functions alone"
        )
        raise InvalidQuery(f"there is no schema {schema!r}: {instead}")
    if named["moments"]:
        raise InvalidQuery(_AT)
    if "SHOW_UNQUALIFIED" in named["shown"] and not named["names"] & _LISTS:
        raise InvalidQuery("use SHOW TABLES, or SHOW with a table's name")


def _tree(connection: duckdb.DuckDBPyConnection, select: str) -> dict[str, Any]:
    """Returns the names in a statement, found by `_PATHS`, and the error of the parser, if any.

    The parser executes nothing. It returns an error for all statements but SELECT.
    """
    tree = f"json_serialize_sql({text(select)}, skip_null := true, skip_empty := true, skip_default := true)"
    paths = {"error_type": "$.error_type", "error_message": "$.error_message", **_PATHS}
    columns = ", ".join(f"json_extract_string(tree, '{path}')" for path in paths.values())
    try:
        found = connection.execute(
            f"WITH parsed AS MATERIALIZED (SELECT {tree} AS tree) SELECT {columns} FROM parsed"
        ).fetchone()
    except duckdb.Error as error:
        raise failure(error, reads=False) from None
    assert found is not None  # noqa: S101 it is one row
    return dict(zip(paths, found, strict=True))
