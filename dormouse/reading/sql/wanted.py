"""The ranges of row keys that a statement needs of each table, found in DuckDB's plan of the statement."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import duckdb

from dormouse.data.transform import quoted
from dormouse.errors import DormouseError, InvalidQuery
from dormouse.model.region import KeyRanges
from dormouse.model.schema import Schema
from dormouse.model.types import Parameters
from dormouse.reading.sql.conditions import text, type_name
from dormouse.reading.sql.constants import Node
from dormouse.reading.sql.firsts import Ends, Enough, ends, enough
from dormouse.reading.sql.joined import Joined
from dormouse.reading.sql.moments import dropped, macros
from dormouse.reading.sql.parsed import Parsed, words
from dormouse.reading.sql.results import INTERRUPTED, first_line
from dormouse.reading.sql.scans import Scans
from dormouse.reading.streams import Interruption

_UNSETTLED = {
    "age", "current_database", "current_query", "current_schema", "current_schemas", "current_setting",
    "getvariable", "in_search_path", "query", "txid_current",
}  # fmt: skip
"""Functions that DuckDB evaluates while planning, but that may return another value in the run."""
_SECRET = f"parameter_{secrets.token_hex(8)}"
"""A random prefix for the names of variables and their parts, so that no statement can name them."""
TOGETHER = 16
"""The number of parameters that share one variable, which is a STRUCT.

A variable takes a statement to set, and reading one part copies the whole STRUCT. So neither one parameter
nor all of them in a variable would be fast.
"""
LITERAL_CHARACTERS_MAX = 1_000
"""The most characters of a parameter that becomes a literal."""
PARAMETER = re.compile(rb'\?(\d*)|\$(\d+|"(?:[^"]|"")*"|[A-Za-z_\x80-\xff][\w$\x80-\xff]*)')
"""A pattern of a parameter: ?, ?1, $1, $name or $"name"."""


@dataclass(frozen=True, slots=True)
class Placed:
    """A statement in the form in which it is planned, and the values of its variables."""

    text: str
    planned: str
    variables: Mapping[str, Mapping[str, Any]]
    """The values of each variable's parts, by the name of the variable and the name of the part."""
    is_settled: bool
    """True if the plan will still be right when the statement runs."""


def placed(
    statement: Parsed, parameters: Sequence[Any] | Mapping[str, Any], tree: Callable[[str], Any]
) -> Placed:
    """Returns a statement in which variables replace the parameters.

    `tree` calls DuckDB's parser and returns its JSON. Raises `InvalidQuery` for values of parameters that the
    statement does not have, and for parameters without a value.
    """
    text = statement.select
    values = parameter_values(statement.parameters, parameters)
    planned, names = _with_variables(text, values, tree)
    if names is None:
        return Placed(text, text, {}, is_settled=False)
    variables: dict[str, dict[str, Any]] = {}
    for n, (part, one) in enumerate(names.items()):
        variables.setdefault(_variable(n), {})[part] = values[one]
    return Placed(text, planned, variables, is_settled=not _is_unsettled(text))


def _is_unsettled(text: str) -> bool:
    if not any(name in text.lower() for name in _UNSETTLED):
        return False
    found = [word for _, word in words(text)]
    return any(word in _UNSETTLED and following == "(" for word, following in pairwise(found))


def parameter_values(names: frozenset[str], parameters: Sequence[Any] | Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by the parameters' names in lower case; raises `InvalidQuery` if the names differ."""
    if isinstance(parameters, Mapping):
        given = {str(name).lower(): value for name, value in parameters.items()}
    else:
        given = {str(n): value for n, value in enumerate(parameters, 1)}
    if names == given.keys():
        return given
    numbered = not isinstance(parameters, Mapping) and all(name.isdecimal() for name in names)
    count = max(map(int, names), default=0) if numbered else len(given)
    if count != len(given):
        counted = "1 parameter" if count == 1 else f"{count} parameters"
        raise InvalidQuery(f"the statement has {counted}, but {len(given)} values were given")
    if missing := sorted(names - given.keys()):
        raise InvalidQuery(f"parameter ${missing[0]} has no value")
    raise InvalidQuery(f"the statement has no parameter ${min(given.keys() - names)}")


def _with_variables(
    statement: str, values: Mapping[str, Any], tree: Callable[[str], Any]
) -> tuple[str, Mapping[str, str] | None]:
    """Returns the text with a part of a variable instead of each parameter, and each part's parameter.

    The second item is None if the parameters cannot be assigned to the parts.
    """
    if not values:
        return statement, {}
    raw, parts, end = statement.encode(), [], 0
    names: dict[str, str | None] = {}
    for start, kind in duckdb.tokenize(statement):
        found = PARAMETER.match(raw, start) if kind == duckdb.token_type.operator else None
        if found is None:
            continue
        name = (found[1] or found[2] or b"").decode().lower()
        if (value := values.get(name or ("1" if len(values) == 1 else ""))) is not None and _is_short(value):
            # DuckDB gives a literal, as a parameter, the type of the value that it is compared with
            parts += [raw[end:start].decode(), f" {text(value)} "]
            end = found.end()
            continue
        variable, part = _variable(len(names)), f"{_SECRET}_{len(names)}"
        names[part] = (name[1:-1].replace('""', '"') if name.startswith('"') else name) or None
        # without parentheses: in IN (…) they would enclose a list
        parts += [raw[end:start].decode(), f" struct_extract(getvariable('{variable}'), '{part}') "]
        end = found.end()
    planned = "".join(parts) + raw[end:].decode()
    return planned, _numbered(names, lambda: (list(_placed(tree(one))) for one in (statement, planned)))


def _is_short(value: Any) -> bool:
    """Returns whether a value is a text that can be a literal."""
    return isinstance(value, str) and value.isprintable() and len(value) <= LITERAL_CHARACTERS_MAX


def _variable(number: int) -> str:
    return f"{_SECRET}_of_{number // TOGETHER}"


def _numbered(
    names: Mapping[str, str | None], placed: Callable[[], Iterable[list[str]]]
) -> Mapping[str, str] | None:
    """Returns the parameter of each part; a `?` becomes a number. Returns None if they cannot be assigned.

    DuckDB does not always count each `?` from left to right, so its trees of both texts are compared.
    """
    if len(names) == 1:
        return {part: name or "1" for part, name in names.items()}
    known = {part: name for part, name in names.items() if name is not None}
    if len(known) == len(names):
        return known
    # both trees have the same parameter at the same place
    before, after = placed()
    found = dict(zip(after, before, strict=False))
    return found if len(before) == len(after) and found.keys() == names.keys() else None


def _placed(tree: Any) -> Iterator[str]:
    """Yields the names of parameters, or of parts of variables, in the order of a statement's tree."""
    pending = [tree]
    while pending:
        match pending.pop():
            case {"class": "PARAMETER", "identifier": str(name)}:
                yield name
            case {
                "class": "FUNCTION",
                "function_name": "struct_extract",
                "children": [_, {"value": {"value": str(name)}}],
            } if name.startswith(_SECRET):
                yield name
            case dict() as node:
                pending.extend(node.values())
            case list() as nodes:
                pending.extend(nodes)


MEMORY_MAX = "64MB"
"""The most memory of the planner for texts that are computed while planning. It does not limit lists."""
PLAN_CHARACTERS_MAX = 20_000_000
PLANNERS_MAX = 4
"""The most idle planners that are kept. If more statements are planned at once, more planners are made."""
_OPTIMIZERS = {
    # optimizers that reveal more about keys; none that uses row counts, since the tables are empty
    "filter_pullup", "filter_pushdown", "expression_rewriter", "cte_filter_pusher", "cte_inlining",
    "deliminator", "unnest_rewriter",
}  # fmt: skip
_TOO_LONG = '{"error": true, "error_type": ""}'
_REFUSED = {"binder", "catalog", "parser", "syntax"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """The ranges and rows that a statement needs of each table; everything, if its plan is not understood."""

    ranges: Mapping[str, KeyRanges]
    """The ranges by table name; tables that are not read are left out."""
    enough: Enough | None
    """The number of rows after which the answer is complete; None without such a limit."""
    explains: bool
    runs: bool
    """False for EXPLAIN without ANALYZE."""
    names: tuple[str, ...] | None = None
    """The names of the answer's columns, if the text that is run, `Parsed.run`, would give others."""
    ends: Ends | None = None
    """The facts that are the whole answer; None if rows are needed."""
    joined: Joined | None = None
    """The scans, if values of one may restrict row keys of another."""


@dataclass(frozen=True, slots=True)
class Planning:
    """A statement to plan, the schemas of its tables, and the values of its parameters.

    `moment` is the current time for the statement, in microseconds since 1970. Without it, the current time
    restricts nothing.
    """

    schemas: Mapping[str, Schema]
    statement: Parsed
    parameters: Parameters = ()
    moment: int | None = None


def wanted(planning: Planning, interruption: Interruption | None = None) -> Wanted:
    """Plans a statement and returns the ranges and rows that it needs of each table.

    Raises `InvalidQuery` for errors that DuckDB finds while planning. Some errors appear only when it runs.
    """
    schemas, statement = planning.schemas, planning.statement
    with idle_planner() as planner, _watched(planner, interruption):
        planner.make(schemas)
        found = placed(statement, planning.parameters, planner.tree)
        with planner.at(planning.moment):
            answer = planner.plan(found)
        if answer.get("error_type") in _REFUSED:
            raise InvalidQuery(first_line(ValueError(answer["error_message"])))
        is_renamed = statement.has_own_names and statement.run != statement.text
        names = planner.names(statement, planning.parameters) if is_renamed else None
    named = {name.lower() for name in statement.names}
    ranges = {name: KeyRanges() for name in schemas if name.lower() in named}
    everything = Wanted(ranges, None, statement.explains, statement.runs, names)
    if answer["error"] or not found.is_settled:
        return everything
    try:
        [plan] = answer["plans"]
        scans = Scans(schemas)
        scans.read(plan)
        joined = scans.joined()
        needed = replace(everything, ranges=joined.by_table(schemas))
        if scans.is_one:
            return replace(needed, enough=enough(plan, schemas), ends=ends(plan, schemas))
        return replace(needed, joined=joined) if any(joined.sources(schemas)) else needed
    except RecursionError:
        return everything


class _Planner:
    """An in-memory database with empty tables, which plans one statement at a time."""

    def __init__(self) -> None:
        self._connection = duckdb.connect(
            config={
                "threads": 1,
                "memory_limit": MEMORY_MAX,
                "enable_external_access": False,
                "autoload_known_extensions": False,
                "autoinstall_known_extensions": False,
                "python_enable_replacements": False,
            }
        )
        self._made: dict[str, Schema] = {}
        for statement in macros(None):
            self._connection.execute(statement)
        listed = self._connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()
        off = ",".join(name for (name,) in listed if name not in _OPTIMIZERS)
        for setting in (f"disabled_optimizers = '{off}'", "TimeZone = 'UTC'", "lock_configuration = true"):
            self._connection.execute(f"SET {setting}")

    @property
    def interrupt(self) -> Callable[[], None]:
        return self._connection.interrupt

    def close(self) -> None:
        self._connection.close()

    def make(self, schemas: Mapping[str, Schema]) -> None:
        """Creates tables with these schemas, and drops all others."""
        gone = [
            name
            for name, schema in self._made.items()
            if schemas.get(name) is not schema and schemas.get(name) != schema
        ]
        for name in gone:
            self._connection.execute(f"DROP TABLE {quoted(name)}")
            del self._made[name]
        for name in schemas.keys() - self._made.keys():
            columns = ", ".join(
                f"{quoted(field.name)} {type_name(field.type)}" for field in schemas[name].fields
            )
            try:
                self._connection.execute(f"CREATE TABLE {quoted(name)} ({columns})")
            except duckdb.CatalogException:
                raise InvalidQuery(
                    f"DuckDB cannot tell table {name!r} from another whose name differs in upper and lower "
                    "case only: rename one"
                ) from None
            self._made[name] = schemas[name]

    def tree(self, statement: str) -> Any:
        """Returns the JSON tree that DuckDB's parser makes of a statement."""
        return self._json(f"SELECT json_serialize_sql({text(statement)})")

    def text_of(self, node: Node) -> str:
        """Returns the text of a SELECT that is given by its part of a tree of `tree`."""
        tree = {"error": False, "statements": [{"node": node, "named_param_map": []}]}
        try:
            [[found]] = self._connection.execute(
                f"SELECT json_deserialize_sql({text(json.dumps(tree))})"
            ).fetchall()
        except duckdb.Error as error:
            raise InvalidQuery(f"a value of the expression is too large: {first_line(error)}") from None
        return str(found)

    def check(self, statement: str) -> None:
        """Raises `InvalidQuery` for a statement that DuckDB cannot bind."""
        answer = self._plan(statement, optimize=False)
        if answer["error"] and answer.get("error_type") in _REFUSED:
            raise InvalidQuery(first_line(ValueError(answer["error_message"])))

    def plan(self, statement: Placed) -> Node:
        """Returns DuckDB's plan of a statement as JSON, or its error."""
        with self._variables(statement.variables):
            found = self._plan(statement.planned, optimize=True)
        if found["error"] and statement.planned != statement.text:
            # an error counts only if the statement without variables has it too
            return {"error": True, **{**self._plan(statement.text, optimize=False), "error": True}}
        return found

    def names(self, statement: Parsed, parameters: Parameters) -> tuple[str, ...]:
        """Returns the names of an answer's columns; raises `InvalidQuery` if `Parsed.run` would be invalid.

        DuckDB names a window by its text, which differs between the statement and `Parsed.run`. The rest of
        the statement may refer to that name.
        """
        try:
            found = self._connection.execute(f"DESCRIBE {statement.text}", parameters or None).fetchall()
            self._connection.execute(f"DESCRIBE {statement.run}", parameters or None)
        except duckdb.InterruptException:
            raise
        except duckdb.Error as error:
            raise InvalidQuery(f"{first_line(error)}; name each window by AS") from None
        return tuple(str(row[0]) for row in found)

    @contextmanager
    def at(self, moment: int | None) -> Iterator[None]:
        """Fixes the current time, in microseconds since 1970, for the block; None leaves it unknown."""
        if moment is None:
            yield
            return
        for statement in macros(moment):
            self._connection.execute(statement)
        try:
            yield
        finally:
            for statement in dropped():
                self._connection.execute(statement)

    @contextmanager
    def _variables(self, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Sets variables for the block, then resets them, as the next statement is another caller's."""
        try:
            for name, parts in variables.items():
                made = ", ".join(f"{part} := ${number}" for number, part in enumerate(parts, 1))
                try:
                    # one parameter for each value: within a dict NaN would become NULL
                    self._connection.execute(
                        f"SET VARIABLE {name} = struct_pack({made})", list(parts.values())
                    )
                except duckdb.Error as error:
                    raise InvalidQuery(f"a parameter cannot be used: {first_line(error)}") from None
            yield
        finally:
            for name in variables:
                self._connection.execute(f"RESET VARIABLE {name}")

    def _plan(self, statement: str, *, optimize: bool) -> Node:
        options = f"optimize := {str(optimize).lower()}, skip_null := true"
        plan = f"SELECT json_serialize_plan({text(statement)}, {options}) AS plan"
        bounded = f"CASE WHEN length(plan) <= {PLAN_CHARACTERS_MAX} THEN plan ELSE '{_TOO_LONG}' END"
        return cast(Node, self._json(f"SELECT {bounded} FROM ({plan})"))

    def _json(self, query: str) -> Any:
        try:
            # without parameters: for the first one of a process DuckDB loads pandas, which takes half a
            # second
            [[found]] = self._connection.execute(query).fetchall()
            return json.loads(found)
        except duckdb.InterruptException:
            raise
        except (duckdb.Error, json.JSONDecodeError, RecursionError) as error:
            # its constants need too much memory or are no JSON, or it is nested too deeply for Python
            return {"error": True, "error_type": "", "error_message": str(error)}


_free: dict[int, list[_Planner]] = {}
"""The idle planners by process id, since a forked process must not use those of its parent."""


@contextmanager
def idle_planner() -> Iterator[_Planner]:
    """Yields a planner that no other thread uses meanwhile."""
    free = _free.setdefault(os.getpid(), [])
    try:
        planner = free.pop()
    except IndexError:
        planner = _Planner()
    keeps = True
    try:
        yield planner
    except BaseException as error:
        keeps = isinstance(error, InvalidQuery)
        raise
    finally:
        if keeps and len(free) < PLANNERS_MAX:
            free.append(planner)
        else:
            planner.close()


@contextmanager
def _watched(planner: _Planner, interruption: Interruption | None) -> Iterator[None]:
    try:
        with nullcontext() if interruption is None else interruption.ending(planner.interrupt):
            yield
    except duckdb.InterruptException:
        raise DormouseError(INTERRUPTED) from None
