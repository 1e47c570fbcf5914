"""Queries: their questions, plans and rows."""

from __future__ import annotations

from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.region import KeyRanges
from dormouse.reading.executor import query
from dormouse.reading.streams import Interruption
from dormouse.reading.table_view import plan_query
from dormouse.reading.where import question

__all__ = [
    "Interruption",
    "KeyRanges",
    "arrow_schema",
    "plan_query",
    "query",
    "question",
]
