"""The review of DuckDB's functions, which lists each that exists; and the functions that Dormouse calls."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import duckdb
import pytest

from dormouse.errors import InvalidQuery
from dormouse.reading.sql.parsed import check_expressions, check_tables, review
from tests.support.reading import reviewed

KINDS = {"expressions": ("scalar", "aggregate", "macro"), "tables": ("table", "table_macro")}
OF_THE_GRAMMAR = {"unnest"}
"""Functions that DuckDB lists only as table functions."""
OF_THE_MODULE = {"DuckDBPyConnection", "Error", "__version__", "connect", "token_type", "tokenize"}
"""Names of the module `duckdb` that may be used: they need no connection, except `connect`."""
REVIEWED_AGAIN = (
    "review them in dormouse/reading/sql/functions.toml: a new function is allowed or refused by hand"
)


@pytest.fixture(scope="module")
def connection() -> Iterator[duckdb.DuckDBPyConnection]:
    with duckdb.connect(config={"autoinstall_known_extensions": False}) as connection:
        yield connection


def test_the_review_is_of_the_version_that_is_installed() -> None:
    assert review()["duckdb"] == duckdb.__version__, REVIEWED_AGAIN


@pytest.mark.parametrize("kind", KINDS)
def test_each_function_is_either_allowed_or_refused(connection: duckdb.DuckDBPyConnection, kind: str) -> None:
    found = connection.execute(
        "select distinct lower(function_name) from duckdb_functions() where list_contains($1, function_type)",
        [KINDS[kind]],
    ).fetchall()
    known = reviewed(kind)
    names = {name for (name,) in found} | (OF_THE_GRAMMAR if kind == "expressions" else set())
    assert len(names) > 90
    assert names - known.allowed - known.refused.keys() == set(), REVIEWED_AGAIN
    assert (known.allowed | known.refused.keys()) - names == set(), "DuckDB has them no more"
    assert known.allowed & known.refused.keys() == set()


def test_each_refusal_has_a_reason() -> None:
    for kind in KINDS:
        assert all(why and "\n" not in why for why in reviewed(kind).refused.values())


def test_no_allowed_macro_calls_a_refused_function(connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB expands a macro after the check of a statement, which sees only the macro's name."""
    allowed = reviewed("expressions").allowed
    macros = connection.execute(
        "select function_name, macro_definition from duckdb_functions() where function_type = 'macro'"
    ).fetchall()
    bodies = [(name, body) for name, body in macros if name.lower() in allowed]
    assert len(bodies) > 80
    for name, body in bodies:
        [text] = connection.execute("select json_serialize_sql($1)", [f"select {body}"]).fetchone() or [""]
        called, tables = names_in(json.loads(text))
        assert tables == set(), name
        check_expressions(called)


def test_every_aggregate_is_allowed(connection: duckdb.DuckDBPyConnection) -> None:
    """`list_aggregate(list, name)` can call any aggregate, by a name that the statement computes."""
    found = connection.execute(
        "select distinct function_name from duckdb_functions() where function_type = 'aggregate'"
    ).fetchall()
    assert {name for (name,) in found} - reviewed("expressions").allowed == set()


def names_in(tree: object) -> tuple[set[str], set[str]]:
    """Returns the names of the functions, and of the tables, in a tree of DuckDB's parser."""
    if isinstance(tree, list):
        parts = [names_in(item) for item in tree]
    elif isinstance(tree, dict):
        parts = [names_in(item) for item in tree.values()]
        parts.append(({tree["function_name"]} if "function_name" in tree else set(), set()))
        parts.append((set(), {tree["table_name"]} if tree.get("table_name") else set()))
    else:
        parts = []
    return set(chain(*(one for one, _ in parts))), set(chain(*(one for _, one in parts)))


def test_no_refused_function_is_called_without_parentheses(connection: duckdb.DuckDBPyConnection) -> None:
    """The parser takes current_date for a column, for example."""
    assert connection.execute("select current_date").fetchall()
    for name in reviewed("expressions").refused:
        for text in (name, f'"{name}"'):
            with pytest.raises(duckdb.BinderException):
                connection.execute(f"select {text}")


@pytest.mark.parametrize(
    ("called", "message"),
    [
        ("Pg_Get_ViewDef", "SQL reads tables only, not pg_get_viewdef(…): it tells of DuckDB's catalog"),
        ("setseed", "SQL reads tables only, not setseed(…): it changes what other statements see"),
        ("tolower", "unknown function 'tolower'; did you mean 'lower'?"),
        ("a_function_of_tomorrow", "unknown function 'a_function_of_tomorrow'"),
    ],
)
def test_an_unlisted_function_is_refused_in_one_line(called: str, message: str) -> None:
    with pytest.raises(InvalidQuery) as error:
        check_expressions({"abs", called})
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_an_unlisted_function_in_from_is_refused() -> None:
    check_tables({"range", "UNNEST"})
    for name, why in (
        ("read_text", ": it reads files; the functions allowed"),
        ("a_function_of_tomorrow", "; the functions allowed"),
    ):
        with pytest.raises(InvalidQuery, match=rf"^SQL reads tables only, not {name}\(…\){why}"):
            check_tables({"range", name})


@pytest.mark.slow
def test_the_connection_of_the_module_itself_is_used_nowhere() -> None:
    """`duckdb.sql` and similar functions run, and parse, on a shared connection that is not locked."""
    package = Path(__file__).parents[3] / "dormouse"
    used = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            match node:
                case ast.Attribute(value=ast.Name(id="duckdb"), attr=name):
                    used.add((path.name, name))
                case ast.ImportFrom(module="duckdb", names=names):
                    used |= {(path.name, alias.name) for alias in names}
    assert ("parsed.py", "tokenize") in used
    unknown = {one for one in used if one[1] not in OF_THE_MODULE and not one[1].endswith("Exception")}
    assert unknown == set()
