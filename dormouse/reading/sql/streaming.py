"""Statements whose answers DuckDB cannot stream: it would wait without end, whatever interrupts it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb

from dormouse.model.types import Parameters

ROWS_LEAST = 100_000
"""DuckDB may do the next part of a union later if it expects more rows than this in a part."""
_UNION = re.compile(r"\bunion\b", re.IGNORECASE)
_PASSING = {
    "FILTER",
    "INOUT_FUNCTION",
    "PROJECTION",
    "STREAMING_LIMIT",
    "STREAMING_WINDOW",
    "UNION",
    "UNNEST",
}
"""Operators that only pass rows on. All others with an input read one of their inputs whole, first."""
_COLLECTING = re.compile("AGGREGATE|GROUP_BY|ORDER_BY|TOP_N|WINDOW")
"""Operators that read all rows before they return one, except those in `_PASSING`."""


def streamable(
    connection: duckdb.DuckDBPyConnection, statement: str, parameters: Parameters, views: Mapping[str, str]
) -> str:
    """Returns the statement, or one with the same answer that DuckDB can stream.

    If two parts of a union have joins or the like, DuckDB begins those of the second part when it has all
    rows of the first one. But the first part waits until its rows are read, which can only be when DuckDB has
    begun all of the statement (https://github.com/duckdb/duckdb/issues/22215). So such an answer is collected
    first, in memory or on disk. `views` are the SELECTs of the tables that the statement reads.
    """
    of_views = (" UNION ALL " in select and " JOIN " in select for select in views.values())
    if not _UNION.search(statement) and not any(of_views):
        return statement
    collected = f"WITH __answer AS MATERIALIZED (\n{statement.rstrip().rstrip(';')}\n) SELECT * FROM __answer"
    try:
        if not any(map(_waits, _unions(_plan(connection, statement, parameters)))):
            return statement
        _plan(connection, collected, parameters)
    except duckdb.InterruptException:
        raise
    except duckdb.Error:
        return statement  # which then raises the error, or is no query
    return collected


def _plan(connection: duckdb.DuckDBPyConnection, statement: str, parameters: Parameters) -> Any:
    explained = connection.execute(f"EXPLAIN (FORMAT json) {statement}", parameters or None).fetchall()
    return json.loads(explained[-1][1])[0]


def _operators(plan: Any) -> Iterator[Any]:
    yield plan
    for part in plan["children"]:
        yield from _operators(part)


def _unions(plan: Any) -> Iterator[Any]:
    """Yields the unions whose rows may reach the answer before all of them are known."""
    if plan["name"] not in _PASSING and _COLLECTING.search(plan["name"]):
        return
    if plan["name"] == "UNION":
        yield plan
    for part in plan["children"]:
        yield from _unions(part)


def _waits(union: Any) -> bool:
    """Returns whether DuckDB may do a part of a union after an earlier one."""
    parts = [list(_operators(part)) for part in union["children"]]
    infos = (operator["extra_info"] for part in parts[:-1] for operator in part)
    rows = max((int(info.get("Estimated Cardinality", 0)) for info in infos), default=0)
    return rows > ROWS_LEAST and sum(any(map(_reads_first, part)) for part in parts) > 1


def _reads_first(operator: Any) -> bool:
    return bool(operator["children"]) and operator["name"] not in _PASSING
