"""The key ranges that statements need of two tables, written as short text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import duckdb

from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DOUBLE, INT, LONG, STRING
from dormouse.reading.sql import wanted as module
from dormouse.reading.sql.parsed import parsed
from dormouse.reading.sql.wanted import Wanted
from dormouse.reading.streams import Interruption

SCHEMAS = {
    "t": Schema([Field("k", LONG), Field("s", STRING), Field("b", BYTES)], values=[Field("v", DOUBLE, True)]),
    "u": Schema([Field("k", INT), Field("s", STRING)], values=[Field("v", DOUBLE, True)]),
}


@cache
def _parsers(process_id: int) -> duckdb.DuckDBPyConnection:
    """Returns the connection that parses statements in a process. Opening one takes milliseconds."""
    return duckdb.connect()


def wanted(
    schemas: Mapping[str, Schema],
    statement: str,
    parameters: Sequence[Any] | Mapping[str, Any] = (),
    interruption: Interruption | None = None,
    moment: int | None = None,
) -> Wanted:
    """Returns the columns and key ranges that a statement needs."""
    with _parsers(os.getpid()).cursor() as parser:
        found = parsed(parser, statement)
    return module.wanted(module.Planning(schemas, found, parameters, moment), interruption)


def shown(ranges: Mapping[str, KeyRanges]) -> str:
    return " | ".join(
        " ".join([name, *(f"{key}{'+'.join(map(_range, some[key])) or ' none'}" for key in sorted(some))])
        for name, some in sorted(ranges.items())
    )


def _range(bounds: Range) -> str:
    if bounds.is_exact:
        return f"={bounds.min!r}"
    low, high = ("" if end is None else repr(end) for end in (bounds.min, bounds.max))
    return f"{'[' if low and bounds.min_inclusive else '('}{low},{high}{']' if bounds.max_inclusive else ')'}"


def of(
    statement: str,
    parameters: Sequence[Any] | Mapping[str, Any] = (),
    moment: int | None = None,
    schemas: Mapping[str, Schema] = SCHEMAS,
) -> str:
    return shown(wanted(schemas, statement, parameters, moment=moment).ranges)
