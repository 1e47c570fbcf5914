"""What a statement surely wants of each table's row keys, read from DuckDB's own plan of it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import duckdb

from dormouse.data.transform import quoted
from dormouse.errors import DormouseError, InvalidQuery
from dormouse.model.schema import Schema
from dormouse.query.interruption import Interruption
from dormouse.query.key_ranges import KeyRanges
from dormouse.sql.bounds import Node
from dormouse.sql.conditions import text, type_name
from dormouse.sql.failures import INTERRUPTED, first_line
from dormouse.sql.parameters import Placed, placed
from dormouse.sql.parsed import Parsed
from dormouse.sql.scans import Enough, Scans, enough
from dormouse.sql.windows import check_windows

MEMORY_MAX = "64MB"
"""Of text that is computed when it is planned; it does not bound lists, here or where a statement runs."""
PLAN_CHARACTERS_MAX = 20_000_000
PLANNERS_MAX = 4
"""Kept for later statements; more are made when more are planned at once."""
_OPTIMIZERS = {
    # those that tell more of keys. None that asks how many rows there are: the tables are empty
    "filter_pullup", "filter_pushdown", "expression_rewriter", "cte_filter_pusher", "cte_inlining",
    "deliminator", "unnest_rewriter",
}  # fmt: skip
_OF_WINDOWS = {"unused_columns"}
"""What takes a column for the one that it is joined with; too much for plans from which ranges are read."""
_NOW = {
    "now": "TIMESTAMPTZ", "transaction_timestamp": "TIMESTAMPTZ", "get_current_timestamp": "TIMESTAMPTZ",
    "current_date": "DATE", "today": "DATE", "get_current_time": "TIMETZ", "current_localtime": "TIME",
    "current_localtimestamp": "TIMESTAMP",
}  # fmt: skip
"""Functions whose value is another when the statement runs: here they are ones that are not folded."""
_TOO_LONG = '{"error": true, "error_type": ""}'
_REFUSED = {"binder", "catalog", "parser", "syntax"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a statement reads at most of each table that it reads; for all that is not known, of every one."""

    ranges: Mapping[str, KeyRanges]
    """By the names of tables; one that it does not read is not here."""
    enough: Enough | None
    """What makes further files needless."""
    explains: bool
    runs: bool
    """False for EXPLAIN without ANALYZE."""


def wanted(
    schemas: Mapping[str, Schema],
    statement: Parsed,
    parameters: Sequence[Any] | Mapping[str, Any] = (),
    interruption: Interruption | None = None,
) -> Wanted:
    """Raises `InvalidQuery` for what DuckDB refuses when it plans; some mistakes show only when it runs."""
    with _planner() as planner, _watched(planner, interruption):
        planner.make(schemas)
        found = placed(statement, parameters, planner.tree)
        answer = planner.plan(found)
    if answer.get("error_type") in _REFUSED:
        raise InvalidQuery(first_line(ValueError(answer["error_message"])))
    if "over" in found.text.lower():
        _check_windows(schemas, found, interruption)
    named = {name.lower() for name in statement.names}
    ranges = {name: KeyRanges() for name in schemas if name.lower() in named}
    everything = Wanted(ranges, None, statement.explains, statement.runs)
    if answer["error"] or not found.is_settled:
        return everything
    try:
        return _of_plan(schemas, answer["plans"], everything)
    except RecursionError:
        return everything


def _check_windows(
    schemas: Mapping[str, Schema], statement: Placed, interruption: Interruption | None
) -> None:
    """Raises `InvalidQuery` for windows that DuckDB would mix up."""
    with _planner(_OPTIMIZERS | _OF_WINDOWS) as planner, _watched(planner, interruption):
        planner.make(schemas)
        answer = planner.plan(statement)
        # of what has no plan, the tree tells less: there each expression is as it is written
        check_windows(planner.tree(statement.text) if answer["error"] else answer["plans"])


def _of_plan(schemas: Mapping[str, Schema], plans: Sequence[Node], everything: Wanted) -> Wanted:
    [plan] = plans
    scans = Scans(schemas)
    scans.read(plan)
    found = enough(plan, schemas) if scans.is_one else None
    return replace(everything, ranges=scans.ranges(), enough=found)


class _Planner:
    """A database with empty tables, for one statement at a time."""

    def __init__(self, optimizers: Set[str]) -> None:
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
        for name, kind in _NOW.items():
            self._connection.execute(
                f"CREATE MACRO {name}() AS make_timestamptz((random() * 0)::BIGINT)::TIMESTAMP::{kind}"
            )
        listed = self._connection.execute("SELECT name FROM duckdb_optimizers()").fetchall()
        off = ",".join(name for (name,) in listed if name not in optimizers)
        for setting in (f"disabled_optimizers = '{off}'", "TimeZone = 'UTC'", "lock_configuration = true"):
            self._connection.execute(f"SET {setting}")

    @property
    def interrupt(self) -> Callable[[], None]:
        return self._connection.interrupt

    def close(self) -> None:
        self._connection.close()

    def make(self, schemas: Mapping[str, Schema]) -> None:
        """Exactly these tables."""
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
        """What DuckDB's parser makes of a statement."""
        return self._json(f"SELECT json_serialize_sql({text(statement)})")

    def plan(self, statement: Placed) -> Node:
        """DuckDB's plan of a statement, or its error."""
        with self._variables(statement.variables):
            found = self._plan(statement.planned, optimize=True)
        if found["error"] and statement.variables:
            # a mistake only when it is one without variables, too
            return {"error": True, **{**self._plan(statement.text, optimize=False), "error": True}}
        return found

    @contextmanager
    def _variables(self, variables: Mapping[str, Mapping[str, Any]]) -> Iterator[None]:
        """Sets variables for what stands within, and resets them: the next statement is another caller's."""
        try:
            for name, parts in variables.items():
                made = ", ".join(f"{part} := ${number}" for number, part in enumerate(parts, 1))
                try:
                    # each value by itself: within a dict NaN would be taken for NULL
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
            # no parameter: for the first of a process DuckDB loads pandas, half a second
            [[found]] = self._connection.execute(query).fetchall()
            return json.loads(found)
        except duckdb.InterruptException:
            raise
        except (duckdb.Error, json.JSONDecodeError, RecursionError) as error:
            # its constants take too much memory or are no JSON, or it is too deep for Python
            return {"error": True, "error_type": "", "error_message": str(error)}


_free: dict[tuple[int, frozenset[str]], list[_Planner]] = {}
"""By process, as none may be used after a fork, and by their optimizers."""


@contextmanager
def _planner(optimizers: Set[str] = frozenset(_OPTIMIZERS)) -> Iterator[_Planner]:
    free = _free.setdefault((os.getpid(), frozenset(optimizers)), [])
    try:
        planner = free.pop()
    except IndexError:
        planner = _Planner(optimizers)
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
