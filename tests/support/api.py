"""The instance and its tables, as Python"s users have them."""

from __future__ import annotations

from dormouse.api.instance import Instance, connect
from dormouse.api.table import Table

__all__ = [
    "Instance",
    "Table",
    "connect",
]
