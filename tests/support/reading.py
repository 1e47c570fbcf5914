"""Queries: their questions, plans and rows."""

from __future__ import annotations

from dormouse.data.arrow_schema import arrow_schema
from dormouse.model.region import KeyRanges
from dormouse.reading import gone_rows, row_numbers, row_search, row_sets
from dormouse.reading.executor import query
from dormouse.reading.sql import selects
from dormouse.reading.sql.evaluating import stepped
from dormouse.reading.sql.parsed import reviewed
from dormouse.reading.sql.scalars import RANDOM, constant_text, scalar
from dormouse.reading.sql.staged import Staged
from dormouse.reading.streams import Interruption
from dormouse.reading.table_view import plan_query
from dormouse.reading.where import Deletion, Reach, may_hold, question

__all__ = [
    "RANDOM",
    "Deletion",
    "Interruption",
    "KeyRanges",
    "Reach",
    "Staged",
    "arrow_schema",
    "constant_text",
    "gone_rows",
    "may_hold",
    "plan_query",
    "query",
    "question",
    "reviewed",
    "row_numbers",
    "row_search",
    "row_sets",
    "scalar",
    "selects",
    "stepped",
]
