"""Subqueries that are evaluated before their statement, so that their values can restrict its row keys.

A subquery is evaluated by itself, so it must not refer to the statement around it, and must have no
parameter. Its values then replace it in the text of the statement.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from dormouse.model.schema import Field
from dormouse.model.types import DATE, INT, LONG, STRING, TIMESTAMP
from dormouse.reading.planner import Scan
from dormouse.reading.sql.conditions import literal, type_name
from dormouse.reading.sql.firsts import KnownRows
from dormouse.reading.sql.parsed import BEGINNINGS, Parsed, words
from dormouse.reading.sql.wanted import Wanted

SUBQUERIES_MAX = 8
"""The most subqueries of one statement that are evaluated before it."""
VALUES_MAX = 1_000
"""The most values of a subquery that follows IN."""
FILES_MAX, BYTES_MAX = 200, 64 * 1024 * 1024
"""The most files and bytes that a subquery may read."""
TRIED = ("('1')", "('2000-01-01')")
"""Constants for subqueries, which DuckDB takes for numbers, texts or times, as the other side is."""
_COMPARING = {"=", "<", ">"}
"""The first characters of the operators before a subquery of one value."""
_CHANGING = {"current_query", "gen_random_uuid", "random", "uuid", "uuidv4", "uuidv7"}
"""Functions that return another value each time, or in another text."""
_TYPES = {
    pa.int32(): INT, pa.int64(): LONG, pa.string(): STRING, pa.date32(): DATE,
    pa.timestamp("us", "UTC"): TIMESTAMP,
}  # fmt: skip
"""The types of values that can be written in a statement without loss."""


@dataclass(frozen=True, slots=True)
class Subquery:
    """A subquery in parentheses, which are at the positions `start` and `end - 1` of the text in UTF-8."""

    start: int
    end: int
    text: str
    is_list: bool
    """True after IN; false if the subquery stands for one value."""

    @property
    def statement(self) -> str:
        """A statement that returns the values, and one more if there are too many."""
        rows_max = VALUES_MAX if self.is_list else 1
        return f"SELECT * FROM ({self.text}\n) LIMIT {rows_max + 1}"

    def values(self, rows: pa.Table) -> str | None:
        """Returns the values as SQL, from the rows of `statement`; None if SQL cannot have them there."""
        kind = _TYPES.get(rows.schema.types[0])
        count_max = VALUES_MAX if self.is_list else 1
        if kind is None or rows.num_columns != 1 or rows.num_rows > count_max:
            return None
        field = Field("value", kind)
        values = rows.column(0).to_pylist() or ([] if self.is_list else [None])
        written = [f"NULL::{type_name(kind)}" if one is None else literal(field, one) for one in values]
        return f"({', '.join(written)})" if written else None


Reads = Mapping[str, Sequence[Scan]]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A subquery, or a column of a joined table, that was evaluated before its statement."""

    values: str
    """The values of a subquery as SQL."""
    wanted: Wanted
    reads: Reads
    known: KnownRows | None
    """The facts that took the place of rows; None if the files in `reads` were read."""

    @property
    def reads_files(self) -> bool:
        return self.known is None or bool(self.known.scans)


def subqueries(statement: Parsed) -> Iterator[Subquery]:
    """Yields the outermost subqueries of a statement that follow a comparison or IN."""
    raw, tokens = statement.text.encode(), list(words(statement.text))
    end = 0 if _CHANGING.isdisjoint(word for _, word in tokens) else len(raw)
    for n in range(1, len(tokens) - 1):
        start, word = tokens[n]
        before, after = tokens[n - 1][1], tokens[n + 1][1]
        if start < end or word != "(" or after not in BEGINNINGS or before not in {"in", *_COMPARING}:
            continue
        end = _closing(tokens, n) + 1
        yield Subquery(start, end, raw[start + 1 : end - 1].decode(), before == "in")


def _closing(tokens: Sequence[tuple[int, str]], opening: int) -> int:
    """Returns the position of the parenthesis that closes the one at a place in the list of tokens."""
    depth = 0
    for start, word in tokens[opening:]:
        depth += (word == "(") - (word == ")")
        if depth == 0:
            return start
    return tokens[-1][0]


def stands_alone(subquery: Parsed, statement: Parsed) -> bool:
    """Returns whether a subquery has no parameters and names no common table expression of the statement."""
    tables = {name.lower() for name in subquery.names} - subquery.ctes
    return not subquery.parameters and tables.isdisjoint(statement.ctes)


def with_values(statement: str, values: Sequence[tuple[Subquery, str]]) -> str:
    """Returns a statement with values, given as SQL, in place of subqueries."""
    raw = statement.encode()
    for subquery, written in sorted(values, key=_start, reverse=True):
        raw = raw[: subquery.start] + written.encode() + raw[subquery.end :]
    return raw.decode()


def _start(value: tuple[Subquery, Any]) -> int:
    return value[0].start
