"""Statements that run often: with numbered parameters, and prepared by the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")


WALKS_ARRAYS = 17_00_00
"""Since PostgreSQL 17 one walk through an index finds all of an array, whatever statistics say."""


class Statement:
    """A query translated once; psycopg translates a long one with named parameters at each execution.

    `older` is what servers before `WALKS_ARRAYS` are asked, with the same parameters in the same order.
    """

    def __init__(self, query: sql.Composable, *, older: sql.Composable | None = None) -> None:
        self._text, self._names = _numbered(query)
        self._older = self._text if older is None else _numbered(older)[0]

    def execute(self, conn: psycopg.Connection[Any], values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
        """Runs it with the values that it names."""
        cursor = psycopg.RawCursor(conn)
        return cursor.execute(self.text(conn), self.given(values), prepare=True)

    def given(self, values: Mapping[str, Any]) -> list[Any]:
        """Of the values those that it names, by number."""
        return [values[name] for name in self._names]

    def text(self, conn: psycopg.Connection[Any]) -> bytes:
        """What this server is asked."""
        return self._text if conn.pgconn.server_version >= WALKS_ARRAYS else self._older


def _numbered(query: sql.Composable) -> tuple[bytes, tuple[str, ...]]:
    """The query's text, and the names of its parameters in their order."""
    numbers: dict[str, int] = {}

    def numbered(match: re.Match[str]) -> str:
        return f"${numbers.setdefault(match[1], len(numbers) + 1)}" if match[1] else "%"

    return _PLACEHOLDER.sub(numbered, query.as_string(None)).encode(), tuple(numbers)
