"""Statements that run often: with numbered parameters, and prepared by the server."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import psycopg
from psycopg import sql

_PLACEHOLDER = re.compile(r"%\((\w+)\)s|%%")


class Statement:
    """A query translated once; psycopg translates a long one with named parameters at each execution."""

    def __init__(self, query: sql.Composable) -> None:
        numbers: dict[str, int] = {}

        def numbered(match: re.Match[str]) -> str:
            return f"${numbers.setdefault(match[1], len(numbers) + 1)}" if match[1] else "%"

        self._text = _PLACEHOLDER.sub(numbered, query.as_string(None)).encode()
        self._names = tuple(numbers)

    def execute(self, conn: psycopg.Connection[Any], values: Mapping[str, Any]) -> psycopg.Cursor[Any]:
        """Runs it with the values that it names."""
        cursor = psycopg.RawCursor(conn)
        return cursor.execute(self._text, [values[name] for name in self._names], prepare=True)
