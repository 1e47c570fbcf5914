"""Row tables and their columns."""

from __future__ import annotations

from dormouse.api.row_table import RowTable
from dormouse.rows.columns import Column

__all__ = [
    "Column",
    "RowTable",
]
