"""The public Python API: the instance and its tables."""

from __future__ import annotations

from dormouse.api.instance import Instance, connect
from dormouse.api.table import Table

__all__ = [
    "Instance",
    "Table",
    "connect",
]
